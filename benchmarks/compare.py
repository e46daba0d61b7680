"""Runs the same job on every peer in sequence: prepare, check, then time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from absl import flags

from benchmarks import output, timing
from benchmarks.copies import measure as measure_copy
from benchmarks.measurement import Measurement, known
from benchmarks.peers.peer import Peer

flags.disclaim_key_flags()  # `define_peers` is called by programs, whose flag it is


def define_peers(of: Sequence[Peer[Any, Any]]) -> flags.FlagHolder[list[str] | None]:
    names = {peer.name: peer.name for peer in of}
    return output.define_some("peers", names, "who is timed (default: all that are available)")


def present[J, Inputs](
    results: output.Report, peers: Sequence[Peer[J, Inputs]], names: Sequence[str] | None
) -> list[Peer[J, Inputs]]:
    """Returns the requested peers that can run here and reports why others cannot."""
    found = []
    for peer in peers:
        if names is not None and peer.name not in names:
            continue
        if reason := peer.why_missing():
            explicit = names is not None or (peer.own and output.IMPLEMENTATION.value is not None)
            results.skip(peer.name, reason, asked_for=explicit and peer.name != "kvjax xla")
        else:
            found.append(peer)
    return found


class Job(Protocol):
    @property
    def subject(self) -> Mapping[str, Any]:
        """The fields that identify the job in tables and files."""

    @property
    def bytes_moved(self) -> int:
        """The minimum number of bytes to read and write."""


def compare_all[J: Job, Inputs](
    test: output.Program,
    operation: str,
    jobs: Sequence[J],
    peers: Sequence[Peer[J, Inputs]],
    make_inputs: Callable[[J], Inputs],
    *,
    copies: bool = True,
) -> None:
    """Measures every job with every peer that supports it.

    Jobs that do not fit in memory and peers that fail are reported as skipped. A failure of kvjax itself also fails a
    subtest of `test`. `copies` also measures a copy that moves the same number of bytes.
    """
    inputs: Inputs | None
    for job in jobs:
        if not (serving := [peer for peer in peers if peer.serves(job)]):
            continue
        subject, inputs = known(job.subject), None  # frees the previous job's inputs before new ones are made
        what = f"{operation}: {', '.join(map(str, subject.values()))}"
        with test.subTest(**subject):
            inputs = test.results.attempt(what, make_inputs, job, own=True)
            for peer in serving if inputs is not None else ():
                with test.subTest(peer=peer.name):
                    one = f"{peer.name} ({what})"
                    found = test.results.attempt(one, _measured, operation, job, peer, inputs, copies, own=peer.own)
                    if found:
                        test.results.add(found)


def _measured(operation: str, job: Job, peer: Peer[Any, Any], inputs: Any, copies: bool) -> Measurement:
    run = peer.prepare(inputs)
    first = run.call(0)
    run.wait(first)
    facts = {**run.facts, **(run.check(first) or {})}
    timed = timing.measure(run.call, wait=run.wait)
    copied = measure_copy(job.bytes_moved) if copies else None
    return Measurement(operation, job.subject, peer.name, timed, job.bytes_moved, copied, facts)
