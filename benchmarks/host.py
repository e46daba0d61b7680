"""Times writes on the CPU for growing caches. In-place writes do not slow down, but writes that copy the cache do."""

from __future__ import annotations

import itertools

import jax
from absl.testing import absltest

from benchmarks import compare, output, shapes
from benchmarks.peers import in_jax, in_torch, writes
from benchmarks.workload import WriteJob

WRITERS = (
    *(in_jax.KVJAX, in_jax.NOT_DONATED, in_jax.XLA_SCATTER),
    *(in_torch.INDEX_COPY, in_torch.INDEX_PUT, in_torch.KVJAX),
)

CASES = output.define_some("cases", shapes.CASES_BY_NAME, "shapes to time writes of (default: llama-3.1-8b)")
NUM_BLOCKS = output.define_numbers("blocks", "pages of the caches (default: 64, 512 and 4,096)", least=1)
NUM_TOKENS = output.define_numbers("tokens", "tokens in a write (default: 1 and 64)", least=1)
PEERS = compare.define_peers(WRITERS)


def jobs() -> list[WriteJob]:
    smoke = output.SMOKE.value
    sizes = output.chosen(NUM_BLOCKS, int, (4,) if smoke else (64, 512, 4_096))
    counts = output.chosen(NUM_TOKENS, int, (8,) if smoke else (1, 64))
    cases = output.chosen(CASES, shapes.CASES_BY_NAME.__getitem__, [shapes.LLAMA_8B])
    wanted = itertools.product(cases, shapes.TIMED_DTYPES, counts, sizes)
    return [WriteJob(case, dtype, count, num_blocks=size) for case, dtype, count, size in wanted]


class HostBenchmark(output.Program):
    def test_cache_sizes(self) -> None:
        writes.measure(self, "host write", jobs(), compare.present(self.results, WRITERS, PEERS.value))


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    absltest.main()
