"""How long `paged_attention` takes to decode from a cache's pages, next to reading as many bytes and to its peers.

`python -m benchmarks.attention --json=attention.json`, from the source tree; benchmarks/README.md explains the table.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from absl.testing import absltest

from benchmarks import attention_table, compare, output, shapes, workload
from benchmarks.output import Measurement
from benchmarks.peers import attends, attends_flashinfer
from benchmarks.peers.attention_inputs import AttentionInputs, AttentionJob
from benchmarks.peers.peer import Peer
from kvjax import KVCacheDType

ROWS = output.define_some("rows", shapes.ATTENTION_ROWS_BY_NAME, "rows to time (default: all of this device)")
DTYPES = output.define_some("dtypes", [dtype.value for dtype in shapes.TIMED_DTYPES], "dtypes of the caches")
PEERS = compare.define_peers(attends.PEERS)


def rows() -> Sequence[shapes.AttentionRow]:
    """What is timed."""
    if ROWS.value:
        return [shapes.ATTENTION_ROWS_BY_NAME[name] for name in ROWS.value]
    if output.SMOKE.value:
        return shapes.SMOKE_ATTENTION_ROWS
    return shapes.ATTENTION_ROWS if workload.is_gpu() else shapes.HOST_ATTENTION_ROWS


def jobs() -> list[AttentionJob]:
    """The same in each dtype."""
    dtypes = [*map(KVCacheDType, DTYPES.value or [dtype.value for dtype in shapes.TIMED_DTYPES])]
    return [AttentionJob(row, dtype) for row, dtype in itertools.product(rows(), dtypes)]


class AttentionBenchmark(output.Program):
    """Fails where a result is wrong, never because of a time."""

    name = "benchmarks.attention"

    def test_rows(self) -> None:
        wanted = jobs()
        peers = compare.present(self.results, attends.PEERS, PEERS.value)
        if PEERS.value is None:
            if output.SMOKE.value:
                peers = without_builds(self.results, peers)
            peers = [for_one_row(peer, wanted) if peer is attends.KVJAX_IN_XLA else peer for peer in peers]
        attends_flashinfer.build_ahead(wanted, peers)
        attends.compile_ahead(wanted, peers)
        measured: dict[AttentionJob, dict[str, Measurement]] = {job: {} for job in wanted}
        built = [peer for peer in peers if peer in attends.BUILT]
        for some in ([peer for peer in peers if peer not in built], built):
            served = [job for job in wanted if any(peer.serves(job) for peer in some)]
            found = compare.compare_all(
                self, "attention", served, some, AttentionInputs, AttentionJob.why_too_large, copies=False
            )
            for job, by_peer in found.items():
                measured[job] |= by_peer
        add_rows(self.results, [each for by_peer in measured.values() for each in by_peer.values()])
        columns = ["case", "dtype"]
        compare.peer_table(self.results, "Time of attention, by who makes it", measured, columns, facts=["error"])


def without_builds(
    results: output.Report, peers: Sequence[Peer[AttentionJob, AttentionInputs]]
) -> list[Peer[AttentionJob, AttentionInputs]]:
    for peer in attends.BUILT:
        results.skip(peer.name, "takes minutes to build")
    return [peer for peer in peers if peer not in attends.BUILT]


def for_one_row(
    peer: Peer[AttentionJob, AttentionInputs], of: Sequence[AttentionJob]
) -> Peer[AttentionJob, AttentionInputs]:
    """What the kernel is to be compared with once: it takes ten times as long."""
    return dataclasses.replace(peer, serves=lambda job: job.row is of[0].row)


def add_rows(to: output.Report, measurements: Sequence[Measurement]) -> None:
    """Adds the table of kvjax's times, with their bars."""
    lines = attention_table.times(measurements, lambda each: each.times.samples, lambda each: each.clock)
    to.table(
        "Time of attention",
        attention_table.HEADER,
        [attention_table.words(line) for line in lines],
        left=attention_table.LEFT,
        note=f"{attention_table.NOTE} By {output.clocks(measurements)}.{attention_table.summary(lines)}",
    )


if __name__ == "__main__":
    absltest.main()
