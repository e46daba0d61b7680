"""Times attention to prompts by the fallback that serves GPUs without the prompt kernel, beside that kernel."""

from __future__ import annotations

from absl.testing import absltest

from benchmarks import compare, output, shapes
from benchmarks.peers import attends
from benchmarks.peers.attends_fallback import PEERS
from kvjax import KVCacheDType

NAMES = "chunk", "chunks", "late-chunk", "whole", "chunk-soft-cap"
ROWS = output.define_some("rows", shapes.RAGGED_ROWS_BY_NAME, f"rows to time (default: {', '.join(NAMES)})")
DTYPES = output.define_dtypes(shapes.TIMED_DTYPES)


class FallbackBenchmark(output.Program):
    def test_rows(self) -> None:
        default = [shapes.RAGGED_ROWS_BY_NAME[name] for name in NAMES]
        rows = ROWS.value or output.by_device(gpu=default, host=shapes.HOST_RAGGED_ROWS, smoke=shapes.HOST_RAGGED_ROWS)
        peers = compare.present(self.results, PEERS, None)
        attends.measure(self, "attention to prompts", rows, DTYPES.value or [KVCacheDType.BFLOAT16], peers)


if __name__ == "__main__":
    absltest.main()
