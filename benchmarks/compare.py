"""Has every peer do the same thing, one after the other: made ready, checked, then timed."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags

from benchmarks import memory, output, timing
from benchmarks.output import Measurement
from benchmarks.peers import copy, cuda
from benchmarks.peers.peer import Peer


def define_peers(of: Sequence[Peer[Any, Any]]) -> flags.FlagHolder[list[str] | None]:
    """The flag that says which peers to time."""
    return output.define_some("peers", [peer.name for peer in of], "who is timed (default: all that can be here)")


def present[Job, Inputs](
    results: output.Report, peers: Sequence[Peer[Job, Inputs]], names: Sequence[str] | None
) -> list[Peer[Job, Inputs]]:
    """Those of the peers that were asked for and can run here; says of the others why not."""
    found = []
    for peer in peers:
        if names is not None and peer.name not in names:
            continue
        if reason := peer.why_missing():
            explicit = names is not None or (peer.own and output.IMPLEMENTATION.value is not None)
            results.skip(peer.name, reason, asked_for=explicit and peer.name != "kvjax xla")
        else:
            found.append(peer)
    if any(peer.name.startswith("CUDA") for peer in found):
        results.facts["cuda compiler"] = cuda.version()
    return found


def compare[Job, Inputs](
    results: output.Report,
    operation: str,
    subject: Mapping[str, Any],
    peers: Sequence[Peer[Job, Inputs]],
    inputs: Inputs,
    bytes_moved: int,
) -> dict[str, Measurement]:
    """Measures all these peers on the same inputs; by their names, those that were right.

    A peer that fails is said to be skipped, and the others are measured all the same.

    Raises:
      Exception: what kvjax itself failed with, once all are through.
    """
    found: dict[str, Measurement] = {}
    failure: Exception | None = None
    words = ", ".join(str(output.plain(value)) for value in subject.values() if value is not None)
    for peer in peers:
        try:
            found[peer.name] = _measure(results, operation, subject, peer, inputs, bytes_moved)
        except Exception as error:  # whatever a peer fails with, the others go on
            kind = "wrong: " if isinstance(error, AssertionError) else f"{type(error).__name__}: "
            results.skip(f"{peer.name} ({operation}: {words})", f"{kind}{error}")
            results.step(peer.name)
            if peer.own and not memory.is_exhausted(error):
                error.add_note(traceback.format_exc())
                failure = failure or error.with_traceback(None)  # its frames would hold on to caches
    if failure:
        raise failure
    return found


def _measure(
    results: output.Report,
    operation: str,
    subject: Mapping[str, Any],
    peer: Peer[Any, Any],
    inputs: Any,
    bytes_moved: int,
) -> Measurement:
    run = peer.prepare(inputs)
    first = run.call(0)
    run.wait(first)
    facts = {**run.facts, **(run.check(first) or {})}
    timed = timing.measure(run.call, wait=run.wait)
    measurement = Measurement(operation, subject, peer.name, timed, bytes_moved, copy.measure(bytes_moved), facts)
    results.add(measurement)
    return measurement


def peer_table(
    results: output.Report, title: str, measurements: Sequence[Measurement], columns: Sequence[str], *, note: str = ""
) -> None:
    """Adds a table with a line for each measurement, of which `columns` are what it is about."""
    words = [
        [
            *(_words(each.subject.get(column)) for column in columns),
            each.peer,
            output.microseconds(each.seconds),
            output.spread(each.timing.samples),
            *(output.rate(each.seconds, each.bytes_moved) if each.bytes_moved else ["-", "-"]),
            output.share(each.copy_share),
        ]
        for each in measurements
    ]
    header = [*(column.replace("num_", "") for column in columns), "by", "us", "5-95%", "MB moved", "GB/s", "of copy"]
    results.table(title, header, words, note=f"{note}By {output.clocks(measurements)}.", left=len(columns) + 1)


def _words(value: Any) -> str:
    value = output.plain(value)
    return f"{value:,}" if isinstance(value, int) else str(value)
