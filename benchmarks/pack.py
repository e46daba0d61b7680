"""Times packing keys and values as NVFP4 without a cache, compared with a write that packs and stores."""

from __future__ import annotations

import itertools

from absl.testing import absltest

from benchmarks import compare, output, shapes
from benchmarks.peers import packs, writes
from benchmarks.shapes import GPT_OSS_20B, LLAMA_8B, Slots
from benchmarks.workload import WriteJob
from kvjax import KVCacheDType

CASES = output.define_some("cases", shapes.CASES_BY_NAME, "shapes to time (default: llama-3.1-8b and gpt-oss-20b)")
NUM_TOKENS = output.define_numbers("tokens", "tokens that are packed", least=1)
PEERS = compare.define_peers(packs.PEERS)


def jobs() -> list[WriteJob]:
    """Returns the jobs to time. Writes use contiguous slots, as in a prefill."""
    default = output.by_device(gpu=(1, 256, 2_048, 16_384, 65_536), host=(1, 64, 256), smoke=(8,))
    few = (LLAMA_8B,) if output.SMOKE.value else (LLAMA_8B, GPT_OSS_20B)
    cases = output.chosen(CASES, shapes.CASES_BY_NAME.__getitem__, few)
    wanted = itertools.product(cases, output.chosen(NUM_TOKENS, int, default))
    return [WriteJob(case, KVCacheDType.NVFP4, num_tokens, slots=Slots.CONTIGUOUS) for case, num_tokens in wanted]


class PackBenchmark(output.Program):
    def test_token_counts(self) -> None:
        writes.measure(self, "pack", jobs(), compare.present(self.results, packs.PEERS, PEERS.value))


if __name__ == "__main__":
    absltest.main()
