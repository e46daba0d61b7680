"""Times `paged_attention`, compared with its peers and with reading the same number of bytes."""

from __future__ import annotations

import dataclasses

from absl.testing import absltest

from benchmarks import compare, output, shapes
from benchmarks.peers import attends

ROWS = output.define_some("rows", shapes.ATTENTION_ROWS_BY_NAME, "rows to time (default: all of this device)")
DTYPES = output.define_dtypes((*shapes.TIMED_DTYPES, *shapes.PER_TOKEN_HEAD, *shapes.MIXED))
PEERS = compare.define_peers(attends.PEERS)


class AttentionBenchmark(output.Program):
    def test_rows(self) -> None:
        rows = ROWS.value or output.by_device(
            gpu=shapes.ATTENTION_ROWS, host=shapes.HOST_ATTENTION_ROWS, smoke=shapes.SMOKE_ATTENTION_ROWS
        )
        peers = compare.present(self.results, attends.PEERS, PEERS.value)
        if PEERS.value is None:
            if output.SMOKE.value:
                for peer in attends.BUILT:
                    self.results.skip(peer.name, "takes minutes to build")
                peers = [peer for peer in peers if peer not in attends.BUILT]
            # One row suffices for kvjax in XLA, which is ten times slower.
            once = dataclasses.replace(attends.KVJAX_IN_XLA, serves=lambda job: job.row is rows[0])
            peers = [once if peer is attends.KVJAX_IN_XLA else peer for peer in peers]
        attends.measure(self, "attention", rows, DTYPES.value, peers)


if __name__ == "__main__":
    absltest.main()
