"""What a peer is: something that does what an operation of kvjax does, made ready, checked and timed as that is."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import jax

from benchmarks import workload


@dataclasses.dataclass(frozen=True)
class Run:
    """A peer made ready for one thing to time.

    Attributes:
      call: starts one call, given its number; the numbers are there to choose among inputs.
      check: compares what `call(0)` left behind or returned; raises `AssertionError` where that is wrong, and returns
        what else is worth to be told.
      wait: waits for what the last call returned.
      facts: what is known beforehand.
    """

    call: Callable[[int], Any]
    check: Callable[[Any], Mapping[str, Any] | None]
    wait: Callable[[Any], Any] = jax.block_until_ready
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def by_turns(function: Callable[..., Any], sets: Sequence[Sequence[Any]]) -> Callable[[int], Any]:
    """Returns a call that takes the sets of arguments in turn, so that they are not in the L2 cache."""
    return lambda number: function(*sets[number % len(sets)])


@dataclasses.dataclass(frozen=True)
class Peer[Job, Inputs]:
    """One way to do what `Job` asks.

    Attributes:
      name: as tables and files have it.
      prepare: makes it ready, with inputs that all peers share.
      serves: whether it does such a job at all.
      why_missing: why it cannot run here, whatever the job; `None` where it can.
      ahead: starts to compile what it needs for such a job; done where no time is taken.
      own: whether it is kvjax: a wrong result, or an error other than too little memory, then fails the program.
    """

    name: str
    prepare: Callable[[Inputs], Run]
    serves: Callable[[Job], bool] = lambda job: True
    why_missing: Callable[[], str | None] = lambda: None
    ahead: Callable[[Job], Sequence[Future[Any]]] = lambda job: ()
    own: bool = False


def why_no_gpu() -> str | None:
    return None if workload.is_gpu() else "needs an NVIDIA GPU"


@functools.cache
def why_not_importable(*modules: str) -> str | None:
    """Why one of these modules is not there; `None` where all are, and then they are imported."""
    for module in modules:
        try:
            importlib.import_module(module)
        except (ImportError, OSError) as error:  # a library that a module was built for may be another version
            return f"not importable: {str(error).strip() or type(error).__name__}"
    return None
