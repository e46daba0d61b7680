"""Times attention and writes with an exact recent window beside pages, compared with pages alone."""

from __future__ import annotations

import itertools

from absl.testing import absltest

from benchmarks import compare, output, shapes
from benchmarks.peers.attention_inputs import AttentionJob
from benchmarks.peers.beside_window import (
    ATTENTION_PEERS,
    DECODES,
    PROMPTS,
    ROWS_BY_NAME,
    SMOKE,
    WRITE_PEERS,
    WindowInputs,
)
from benchmarks.shapes import AttentionRow
from kvjax import KVCacheDType

ROWS = output.define_some("rows", ROWS_BY_NAME, "rows to time (default: all of this device)")
DTYPES = output.define_dtypes((*shapes.TIMED_DTYPES, *shapes.MIXED))


def jobs() -> list[AttentionJob]:
    default: tuple[AttentionRow, ...] = output.by_device(gpu=(*DECODES, *PROMPTS), host=SMOKE, smoke=SMOKE)
    rows, dtypes = ROWS.value or default, DTYPES.value or [KVCacheDType.NVFP4]
    return [AttentionJob(row, dtype) for row, dtype in itertools.product(rows, dtypes)]


class ExactWindowBenchmark(output.Program):
    def test_attention(self) -> None:
        compare.compare_all(self, "attention beside a window", jobs(), ATTENTION_PEERS, WindowInputs, copies=False)

    def test_writes(self) -> None:
        compare.compare_all(self, "write beside a window", jobs(), WRITE_PEERS, WindowInputs, copies=False)


if __name__ == "__main__":
    absltest.main()
