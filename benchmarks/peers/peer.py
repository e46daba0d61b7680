"""Peers: alternative implementations of kvjax's operations, all prepared, checked and timed in the same way."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Concatenate

import jax

from benchmarks import output, workload


@dataclasses.dataclass(frozen=True)
class Run:
    """A peer prepared for one job.

    Attributes:
      call: Starts a call. Its argument is the call number, which selects the inputs.
      check: Checks the result or the side effects of `call(0)`, and returns additional facts. Raises `AssertionError`
        if they are wrong.
      wait: Waits for the result of the last call.
      facts: Facts that are known before the call.
    """

    call: Callable[[int], Any]
    check: Callable[[Any], Mapping[str, Any] | None]
    wait: Callable[[Any], Any] = jax.block_until_ready
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def by_turns(function: Callable[..., Any], sets: Sequence[Sequence[Any]]) -> Callable[[int], Any]:
    """Returns a call that rotates through sets of arguments, so that they are not in the L2 cache."""
    return lambda number: function(*sets[number % len(sets)])


@dataclasses.dataclass(frozen=True)
class Peer[Job, Inputs]:
    """One implementation of a kind of job.

    Attributes:
      name: The name in tables and files.
      prepare: Prepares a run from the inputs that all peers share.
      serves: Returns whether the peer supports a job.
      why_missing: Returns why the peer cannot run here, or `None` if it can.
      ahead: Starts compiling the programs for a job, before anything is timed.
      own: Whether the peer is kvjax. Its wrong results and errors fail the program, except for lack of memory.
    """

    name: str
    prepare: Callable[[Inputs], Run]
    serves: Callable[[Job], bool] = lambda job: True
    why_missing: Callable[[], str | None] = lambda: None
    ahead: Callable[[Job], Sequence[Future[Any]]] = lambda job: ()
    own: bool = False


def why_no_gpu() -> str | None:
    return None if workload.is_gpu() else "needs an NVIDIA GPU"


def why_no_kernel() -> str | None:
    """Returns why the requested implementation cannot run here, or `None`."""
    if output.IMPLEMENTATION.value == "mosaic" and not workload.is_gpu():
        return f"--implementation=mosaic: got {jax.devices()[0].platform}, expected an NVIDIA GPU (sm_90 or later)"
    return None


def own_peers[Job, Inputs](
    _: type[Job], run: Callable[Concatenate[Inputs, ...], Run]
) -> tuple[Peer[Job, Inputs], Peer[Job, Inputs]]:
    """Returns kvjax with the implementation that the flag selects, and kvjax in XLA for GPUs."""

    def prepare(inputs: Inputs) -> Run:
        return run(inputs, implementation=output.IMPLEMENTATION.value)

    in_xla = Peer[Job, Inputs](
        "kvjax xla",
        functools.partial(run, implementation="xla"),
        why_missing=lambda: None if workload.is_gpu() else "is what kvjax runs here",
        own=True,
    )
    return Peer("kvjax", prepare, why_missing=why_no_kernel, own=True), in_xla


@functools.cache
def why_not_importable(*modules: str) -> str | None:
    """Imports modules and returns why one is not importable, or `None`."""
    for module in modules:
        try:
            importlib.import_module(module)
        except (ImportError, OSError) as error:  # a shared library may be missing or have the wrong version
            return f"not importable: {str(error).strip() or type(error).__name__}"
    return None
