"""How long writes on the CPU take as the cache grows: in place they do not, and what copies the cache does.

`python -m benchmarks.host --json=host.json`, from the source tree; benchmarks/README.md explains the table.
"""

from __future__ import annotations

import itertools

import jax
from absl.testing import absltest

from benchmarks import compare, output, shapes
from benchmarks.peers import in_jax, in_torch, writes
from benchmarks.workload import WriteJob

WRITERS = (
    in_jax.KVJAX,
    in_jax.NOT_DONATED,
    in_jax.XLA_SCATTER,
    in_torch.INDEX_COPY,
    in_torch.INDEX_PUT,
    in_torch.KVJAX,
)

CASES = output.define_some("cases", shapes.CASES_BY_NAME, "shapes to time writes of (default: llama-3.1-8b)")
NUM_BLOCKS = output.define_numbers("blocks", "pages of the caches (default: 64, 512 and 4,096)", least=1)
NUM_TOKENS = output.define_numbers("tokens", "tokens in a write (default: 1 and 64)", least=1)
PEERS = compare.define_peers(WRITERS)

CACHE_SIZES, SMOKE_CACHE_SIZES = (64, 512, 4_096), (4,)
DEFAULT_TOKENS, SMOKE_TOKENS = (1, 64), (8,)


def jobs() -> list[WriteJob]:
    """What is timed."""
    smoke = output.SMOKE.value
    sizes = output.numbers(NUM_BLOCKS) or (SMOKE_CACHE_SIZES if smoke else CACHE_SIZES)
    counts = output.numbers(NUM_TOKENS) or (SMOKE_TOKENS if smoke else DEFAULT_TOKENS)
    cases = [shapes.CASES_BY_NAME[name] for name in CASES.value or [shapes.LLAMA_8B.name]]
    return [
        WriteJob(case, dtype, num_tokens, num_blocks=num_blocks)
        for case, dtype, num_tokens, num_blocks in itertools.product(cases, shapes.TIMED_DTYPES, counts, sizes)
    ]


class HostBenchmark(output.Program):
    """Fails where bytes are wrong, never because of a time."""

    name = "benchmarks.host"

    def test_cache_sizes(self) -> None:
        peers = compare.present(self.results, WRITERS, PEERS.value)
        measured = writes.measure(self, "host write", jobs(), peers)
        columns = ["case", "dtype", "num_tokens", "cache_bytes"]
        title = "Time of a write on the CPU, by the size of the cache"
        compare.peer_table(self.results, title, measured, columns, facts=["temporary_bytes"])


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    absltest.main()
