"""How long packing keys and values as NVFP4 takes, without a cache and next to a write, which packs and stores.

`python -m benchmarks.pack --json=pack.json`, from the source tree; benchmarks/README.md explains the table.
"""

from __future__ import annotations

from absl.testing import absltest

from benchmarks import compare, output, shapes, workload
from benchmarks.peers import packs, writes
from benchmarks.shapes import Slots
from benchmarks.workload import WriteJob
from kvjax import KVCacheDType

CASES = output.define_some("cases", shapes.CASES_BY_NAME, "shapes to time (default: llama-3.1-8b and gpt-oss-20b)")
NUM_TOKENS = output.define_numbers("tokens", "tokens that are packed", least=1)
PEERS = compare.define_peers(packs.PEERS)

GPU_TOKENS, HOST_TOKENS, SMOKE_TOKENS = (1, 256, 2_048, 16_384, 65_536), (1, 64, 256), (8,)
DEFAULT_CASES = (shapes.LLAMA_8B, shapes.GPT_OSS_20B)


def jobs() -> list[WriteJob]:
    """What is timed: the write of the same tokens goes to slots one after the other, as in a prefill."""
    default = SMOKE_TOKENS if output.SMOKE.value else GPU_TOKENS if workload.is_gpu() else HOST_TOKENS
    few = DEFAULT_CASES[:1] if output.SMOKE.value else DEFAULT_CASES
    cases = [shapes.CASES_BY_NAME[name] for name in CASES.value or ()] or few
    return [
        WriteJob(case, KVCacheDType.NVFP4, num_tokens, slots=Slots.CONTIGUOUS)
        for case in cases
        for num_tokens in output.numbers(NUM_TOKENS) or default
    ]


class PackBenchmark(output.Program):
    """Fails where bytes are wrong, never because of a time."""

    name = "benchmarks.pack"

    def test_token_counts(self) -> None:
        peers = compare.present(self.results, packs.PEERS, PEERS.value)
        measured = writes.measure(self, "pack", jobs(), peers)
        note = (
            "kvjax packs in XLA, for use without a cache; its write packs and stores in one kernel where there is one. "
        )
        compare.peer_table(self.results, "Time of packing NVFP4", measured, ["case", "num_tokens"], note=note)


if __name__ == "__main__":
    absltest.main()
