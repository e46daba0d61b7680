"""Times `gather_kv` of whole sequences into bfloat16, compared with its alternatives."""

from __future__ import annotations

import itertools

from absl.testing import absltest

from benchmarks import bars, compare, output, shapes
from benchmarks.peers import gathers
from benchmarks.peers.gathers import GatherInputs, GatherJob
from kvjax import CacheLayout

CASES = output.define_some("cases", shapes.CASES_BY_NAME, "shapes to time gathers of (default: llama-3.1-8b)")
PEERS = compare.define_peers(gathers.PEERS)


def jobs() -> list[GatherJob]:
    """Returns the jobs to time. Only the first size is timed in both layouts."""
    gpu = (bars.GATHER_SIZE, (1, 16_384), (256, 128))
    sizes: tuple[tuple[int, int], ...] = output.by_device(gpu=gpu, host=((4, 256), (1, 1_024)), smoke=((2, 32),))
    cases = output.chosen(CASES, shapes.CASES_BY_NAME.__getitem__, [shapes.LLAMA_8B])
    return [
        GatherJob(case, dtype, layout, *size)
        for case, size, layout, dtype in itertools.product(cases, sizes, CacheLayout, shapes.TIMED_DTYPES)
        if layout is CacheLayout.NHD or size is sizes[0]
    ]


class GatherBenchmark(output.Program):
    def test_sizes(self) -> None:
        peers = compare.present(self.results, gathers.PEERS, PEERS.value)
        compare.compare_all(self, "gather", jobs(), peers, GatherInputs)


if __name__ == "__main__":
    absltest.main()
