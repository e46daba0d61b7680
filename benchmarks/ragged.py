"""How long a step of a server attends, prompts in chunks beside decodes, by `ragged_paged_attention` and its peers.

`python -m benchmarks.ragged --json=ragged.json`, from the source tree; benchmarks/README.md explains the table.
"""

from __future__ import annotations

import itertools

from absl.testing import absltest

from benchmarks import compare, output, shapes
from benchmarks.peers import attends, attends_flashinfer, attends_ragged
from benchmarks.peers.attention_inputs import RaggedInputs, RaggedJob
from kvjax import KVCacheDType

ROWS = output.define_some("rows", shapes.RAGGED_ROWS_BY_NAME, "rows to time (default: all of this device)")
DTYPES = output.define_dtypes(shapes.TIMED_DTYPES)
PEERS = compare.define_peers(attends_ragged.PEERS)


def jobs() -> list[RaggedJob]:
    """What is timed: rows in each dtype."""
    rows = output.by_device(gpu=shapes.RAGGED_ROWS, host=shapes.HOST_RAGGED_ROWS, smoke=shapes.HOST_RAGGED_ROWS)
    chosen = output.chosen(ROWS, shapes.RAGGED_ROWS_BY_NAME.__getitem__, rows)
    dtypes = output.chosen(DTYPES, KVCacheDType, shapes.TIMED_DTYPES)
    return [RaggedJob(row, dtype) for row, dtype in itertools.product(chosen, dtypes)]


class RaggedBenchmark(output.Program):
    def test_rows(self) -> None:
        wanted = jobs()
        peers = compare.present(self.results, attends_ragged.PEERS, PEERS.value)
        attends_flashinfer.build_ahead(wanted, peers)
        attends.compile_ahead(wanted, peers)
        built = [peer for peer in peers if peer in attends_flashinfer.PREFILL.values()]
        for some in ([peer for peer in peers if peer not in built], built):
            too_large = RaggedJob.why_too_large
            compare.compare_all(self, "ragged attention", wanted, some, RaggedInputs, too_large, copies=False)


if __name__ == "__main__":
    absltest.main()
