"""Times attention in a server step (prompt chunks and decodes): `ragged_paged_attention` and its peers."""

from __future__ import annotations

from absl.testing import absltest

from benchmarks import compare, output, shapes
from benchmarks.peers import attends

ROWS = output.define_some("rows", shapes.RAGGED_ROWS_BY_NAME, "rows to time (default: all of this device)")
DTYPES = output.define_dtypes((*shapes.TIMED_DTYPES, *shapes.PER_TOKEN_HEAD, *shapes.MIXED))
PEERS = compare.define_peers(attends.STEP_PEERS)


class RaggedBenchmark(output.Program):
    def test_rows(self) -> None:
        default = output.by_device(gpu=shapes.RAGGED_ROWS, host=shapes.HOST_RAGGED_ROWS, smoke=shapes.HOST_RAGGED_ROWS)
        peers = compare.present(self.results, attends.STEP_PEERS, PEERS.value)
        attends.measure(self, "ragged attention", ROWS.value or default, DTYPES.value, peers)


if __name__ == "__main__":
    absltest.main()
