"""Times `reshape_and_cache_flash`, compared with its alternatives and with a copy of the same number of bytes."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

from absl.testing import absltest

from benchmarks import compare, output, shapes, workload
from benchmarks.peers import in_torch, writes
from benchmarks.peers.writes import KVJAX, KVJAX_ANY_SLOTS, KVJAX_IN_XLA, NOT_DONATED, XLA_SCATTER
from benchmarks.shapes import LLAMA_8B, LLAMA_70B_SHARD, OTHER_CASES, Slots
from benchmarks.workload import WriteJob
from kvjax import STORED_KV_CACHE_DTYPES, CacheLayout, KVCacheDType

NHD, HND = CacheLayout

CASES = output.define_some("cases", shapes.CASES_BY_NAME, "shapes to time writes of")
NUM_TOKENS = output.define_numbers("tokens", "tokens in a write", least=1)
DTYPES = output.define_dtypes(STORED_KV_CACHE_DTYPES)
LAYOUTS = output.define_some("layouts", {each.value: each for each in CacheLayout}, "layouts of the caches")
SLOTS = output.define_some("slots", {each.value: each for each in Slots}, "where the tokens go")
PEERS = compare.define_peers(writes.PEERS)

CACHE_SIZE_CASE = shapes.Case("small", 2, 64)  # its largest cache takes 1 GiB in float32, which fits any machine
CACHE_SIZE_TOKENS = 256

CACHE_SIZE_WRITERS = (KVJAX, NOT_DONATED, XLA_SCATTER, in_torch.INDEX_COPY, in_torch.INDEX_PUT, in_torch.KVJAX)
"""Timed in caches of growing size on a CPU: writes in place do not slow down, writes that copy the cache do."""

VARIANTS = (KVJAX_ANY_SLOTS, KVJAX_IN_XLA)
"""kvjax without unique slots or without its kernel, timed in one case only."""


def product(
    cases: Sequence[shapes.Case] = (LLAMA_8B,),
    slots: Sequence[Slots] = (Slots.SCATTERED,),
    num_tokens: Sequence[int] = shapes.ALL_TOKENS,
    layouts: Sequence[CacheLayout] = (NHD,),
    dtypes: Sequence[KVCacheDType] = shapes.TIMED_DTYPES,
) -> list[WriteJob]:
    """Returns all combinations, grouped by case and number of tokens. Flags replace these values."""
    fields = (CASES, cases), (SLOTS, slots), (NUM_TOKENS, num_tokens), (LAYOUTS, layouts), (DTYPES, dtypes)
    every: Any = itertools.product(*(flag.value or values for flag, values in fields))
    return [WriteJob(case, dtype, count, layout, slots) for case, slots, count, layout, dtype in every]


def jobs() -> list[WriteJob]:
    """Returns the jobs to time: by default all sizes of one model, and few sizes of everything else."""
    many = output.by_device(gpu=shapes.ALL_TOKENS, host=(1, 64, 1_024), smoke=(8,))
    few = output.by_device(gpu=shapes.FEW_TOKENS, host=(64,), smoke=(8,))
    if output.SMOKE.value:
        small = functools.partial(product, (shapes.GPT_OSS_20B,), num_tokens=few)
        return [*dict.fromkeys([*small(), *small(slots=(Slots.PADDED,), layouts=(HND,))])]
    found = [
        *product(num_tokens=many, layouts=(NHD, HND)),
        *product(num_tokens=few, dtypes=shapes.OTHER_DTYPES),
        *product(num_tokens=many[-1:], dtypes=(KVCacheDType.NVFP4_4OVER6,)),
        *product(num_tokens=few, slots=(Slots.CONTIGUOUS, Slots.PADDED)),
        *product((LLAMA_70B_SHARD,), num_tokens=output.by_device(gpu=(1, *few, many[-1]), host=few, smoke=few)),
        *product(OTHER_CASES, num_tokens=few),
    ]
    return [*dict.fromkeys(found)]


def _one_case(job: WriteJob) -> bool:
    return job.case is LLAMA_8B and job.layout is NHD


class WriteBenchmark(output.Program):
    def test_cache_sizes(self) -> None:
        sizes = (16,) if output.SMOKE.value else (64, 4_096, 65_536)
        dtypes = shapes.TIMED_DTYPES if output.SMOKE.value else STORED_KV_CACHE_DTYPES
        wanted = [
            WriteJob(CACHE_SIZE_CASE, dtype, CACHE_SIZE_TOKENS, num_blocks=num_blocks)
            for num_blocks, dtype in itertools.product(sizes, dtypes)
        ]
        peers = [KVJAX] if workload.is_gpu() else CACHE_SIZE_WRITERS
        writes.measure(self, "write by cache size", wanted, compare.present(self.results, peers, None))

    def test_token_counts(self) -> None:
        peers = compare.present(self.results, writes.PEERS, PEERS.value)
        if PEERS.value is None:
            peers = [dataclasses.replace(peer, serves=_one_case) if peer in VARIANTS else peer for peer in peers]
        writes.measure(self, "write", jobs(), peers)


if __name__ == "__main__":
    absltest.main()
