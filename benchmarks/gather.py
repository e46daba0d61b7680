"""How long `gather_kv` takes to read whole sequences back, dequantized to bfloat16, next to what a user would pick.

`python -m benchmarks.gather --json=gather.json`, from the source tree; benchmarks/README.md explains the table.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from absl import flags
from absl.testing import absltest

from benchmarks import bars, compare, output, shapes, workload
from benchmarks.output import Measurement
from benchmarks.peers import gathers
from benchmarks.peers.gathers import GatherInputs, GatherJob
from kvjax import CacheLayout, KVCacheDType

CASES = output.define_some("cases", shapes.CASES_BY_NAME, "shapes to time gathers of (default: llama-3.1-8b)")
NUM_SEQS = flags.DEFINE_integer("seqs", None, "sequences of one size, in place of all others", lower_bound=1)
SEQ_LEN = flags.DEFINE_integer("seq_len", None, "tokens of each (default: 2,048; without a GPU, 256)", lower_bound=1)
PEERS = compare.define_peers(gathers.PEERS)

GPU_SIZES = (bars.GATHER_SIZE, (1, 16_384), (256, 128))
HOST_SIZES = ((4, 256), (1, 1_024))
SMOKE_SIZES = ((2, 32),)
"""Sequences, and tokens of each; the first of them in both layouts."""


def jobs() -> list[GatherJob]:
    """What is timed."""
    sizes = SMOKE_SIZES if output.SMOKE.value else GPU_SIZES if workload.is_gpu() else HOST_SIZES
    if NUM_SEQS.value or SEQ_LEN.value:
        sizes = ((NUM_SEQS.value or sizes[0][0], SEQ_LEN.value or sizes[0][1]),)
    cases = [shapes.CASES_BY_NAME[name] for name in CASES.value or [shapes.LLAMA_8B.name]]
    return [
        GatherJob(case, dtype, layout, *size)
        for case, size, layout, dtype in itertools.product(cases, sizes, CacheLayout, shapes.TIMED_DTYPES)
        if layout is CacheLayout.NHD or size is sizes[0]
    ]


def bar_of(job: GatherJob) -> bars.Bar | None:
    """The bar that a gather is held to: there are some for one size only."""
    if (job.num_seqs, job.seq_len) != bars.GATHER_SIZE or job.case is not shapes.LLAMA_8B:
        return None
    return bars.Bar(bars.Measure.COPY, bars.GATHER_COPY_SHARES[job.dtype])


class GatherBenchmark(output.Program):
    """Fails where values are wrong, never because of a time."""

    name = "benchmarks.gather"

    def test_sizes(self) -> None:
        peers = compare.present(self.results, gathers.PEERS, PEERS.value)
        measured = compare.compare_all(self, "gather", jobs(), peers, GatherInputs, GatherJob.why_too_large)
        add_bars(self.results, [(job, each["kvjax"]) for job, each in measured.items() if "kvjax" in each])
        columns = ["case", "dtype", "layout", "num_seqs", "seq_len"]
        compare.peer_table(self.results, "Time of a gather, by who makes it", measured, columns)


def add_bars(to: output.Report, lines: Sequence[tuple[GatherJob, Measurement]]) -> None:
    """Adds the table of kvjax's gathers, with their bars."""
    words = [line_words(job, line) for job, line in lines]
    header = ["case", "dtype", "layout", "sequences", "tokens", "us", "5-95%", "MB moved", "GB/s", "of copy"]
    to.table(
        "Time of a gather",
        [*header, "kernels", "bar", "reached"],
        words,
        left=3,
        note=f"kvjax, into bfloat16; by {output.clocks(line for _, line in lines)}."
        + bars.summary([line[-1] for line in words]),
    )


def line_words(job: GatherJob, line: Measurement) -> list[str]:
    bar = bar_of(job)
    return [
        job.case.name,
        KVCacheDType(job.dtype).value,
        job.layout.value,
        str(job.num_seqs),
        f"{job.seq_len:,}",
        output.microseconds(line.seconds),
        output.spread(line.times.samples),
        *output.rate(line.seconds, job.bytes_moved),
        output.share(line.copy_share),
        str(len(line.times.kernels) or "-"),
        str(bar or "-"),
        bars.verdict(bar, line.copy_share, line.clock),
    ]


if __name__ == "__main__":
    absltest.main()
