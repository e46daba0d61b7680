"""Times attention and writes with an exact recent window beside pages, compared with pages alone."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest

import kvjax
from benchmarks import compare, output, shapes, workload
from benchmarks.measurement import OWN
from benchmarks.peers.attention_inputs import PEER_ERROR, AttentionInputs, AttentionJob
from benchmarks.peers.peer import Peer, Run, by_turns
from benchmarks.shapes import BLOCK_SIZE, AttentionRow, Step
from kvjax import ExactWindow, KVCache, KVCacheDType, StepMetadata

SIZE = 64  # exact tokens

DECODES = tuple(Step(f"{seqs}x{length}", seqs, length) for seqs, length in ((64, 8_192), (8, 8_192), (64, 1_024)))
PROMPTS = (shapes.RAGGED_ROWS_BY_NAME["chunk"], Step("chunks-2048", 8, 2_048, q_len=2_048))
SMOKE = tuple(dataclasses.replace(shapes.HOST_RAGGED_ROWS[0], name=f"{q_len} new", q_len=q_len) for q_len in (1, 20))
ROWS_BY_NAME = {row.name: row for row in (*DECODES, *PROMPTS, *SMOKE)}

ROWS = output.define_some("rows", ROWS_BY_NAME, "rows to time (default: all of this device)")
DTYPES = output.define_dtypes((*shapes.TIMED_DTYPES, *shapes.MIXED))


class WindowInputs(AttentionInputs):
    """Inputs of one job, and a window whose rows hold what the pages hold.

    So attention with the window and without it agree, apart from what its new tokens lose in the pages.

    Attributes:
      metadata: the step.
      key: bfloat16 `[num_tokens, num_kv_heads, head_size]`, of the step's tokens.
      value: likewise.
      window: with the tokens before these.
    """

    def __init__(self, job: AttentionJob) -> None:
        super().__init__(job)
        row = job.row
        slots = np.full(int(row.cu_q_lens[-1]), -1, np.int32)
        rows = np.arange(row.num_seqs, dtype=np.int32)
        self.metadata: StepMetadata = jax.device_put(
            StepMetadata(self.table, self.seq_lens, row.cu_q_lens, slots, rows)
        )
        seq, position = self.metadata.token_rows()
        block = self.table[seq, position // BLOCK_SIZE]
        slot_mapping = block * BLOCK_SIZE + position % BLOCK_SIZE
        self.metadata = dataclasses.replace(self.metadata, slot_mapping=slot_mapping)
        pages = self.token_pages()
        self.key, self.value = (x[block, position % BLOCK_SIZE] for x in pages)
        window = ExactWindow.allocate(job.spec, row.num_seqs, SIZE)
        scales: dict[str, Any] = workload.scales()
        self.window = kvjax.fill_exact_window(window, self.caches[0], self.metadata, rows, **scales)


def _options(inputs: WindowInputs) -> dict[str, Any]:
    return inputs.job.limits | {"implementation": output.IMPLEMENTATION.value}


def pages_run(inputs: WindowInputs) -> Run:
    attend = jax.jit(functools.partial(kvjax.ragged_paged_attention, **_options(inputs), **workload.scales()))
    sets = [(inputs.query, cache, *inputs.numbers) for cache in inputs.caches]
    return Run(by_turns(attend, sets), functools.partial(inputs.check, most=PEER_ERROR))


class _WindowCall:
    """Attends with the window that the previous call returned."""

    def __init__(self, inputs: WindowInputs) -> None:
        options = _options(inputs) | workload.scales()
        attend = functools.partial(kvjax.exact_window_attention, **options)
        self.inputs = inputs
        self.attend = jax.jit(attend, donate_argnames="exact_window")
        self.window = jax.tree.map(jnp.copy, inputs.window)

    def __call__(self, number: int) -> jax.Array:
        inputs = self.inputs
        cache = inputs.caches[number % len(inputs.caches)]
        attended, self.window = self.attend(
            inputs.query, inputs.key, inputs.value, cache, exact_window=self.window, metadata=inputs.metadata
        )
        return attended


def window_run(inputs: WindowInputs) -> Run:
    return Run(_WindowCall(inputs), functools.partial(inputs.check, most=PEER_ERROR))


class _WriteCall:
    """Writes the step's tokens into the pages, and into the window's ring if there is one."""

    def __init__(self, inputs: WindowInputs, *, with_ring: bool) -> None:
        self.inputs = inputs
        self.caches: tuple[KVCache, ...] = (jax.tree.map(jnp.copy, inputs.caches[0]),)
        self.slots: tuple[jax.Array, ...] = (inputs.metadata.slot_mapping,)
        self.scales: tuple[Mapping[str, Any], ...] = (workload.scales(),)
        if with_ring:
            window = inputs.window
            seq, position = inputs.metadata.token_rows()
            tokens = window.tokens_per_row
            slots = jnp.where(position >= inputs.seq_lens[seq] - tokens, seq * tokens + position % tokens, -1)
            self.caches += (jax.tree.map(jnp.copy, window.ring),)
            self.slots += (slots,)
            self.scales += ({},)
        self.write = jax.jit(self._write, donate_argnums=0)

    def _write(
        self, caches: tuple[KVCache, ...], key: jax.Array, value: jax.Array, slots: tuple[jax.Array, ...]
    ) -> tuple[KVCache, ...]:
        options: dict[str, Any] = {"unique_slots": True, "implementation": output.IMPLEMENTATION.value}
        return tuple(
            kvjax.reshape_and_cache_flash(key, value, cache, own, **options, **scales)
            for cache, own, scales in zip(caches, slots, self.scales, strict=True)
        )

    def __call__(self, number: int) -> Any:
        self.caches = self.write(self.caches, self.inputs.key, self.inputs.value, self.slots)
        return self.caches[-1].kv

    def check(self, _: Any) -> None:
        """Compares the pages' bytes with XLA's: those that were there, as the tokens are those of the pages."""
        workload.check_same_bits(self.caches[0].kv, self.inputs.caches[0].kv)


def write_run(inputs: WindowInputs, *, with_ring: bool) -> Run:
    call = _WriteCall(inputs, with_ring=with_ring)
    return Run(call, call.check)


WITH_WINDOW = f"{OWN}, {SIZE} exact"
type WindowPeer = Peer[AttentionJob, WindowInputs]
ATTENTION_PEERS: tuple[WindowPeer, ...] = (Peer(OWN, pages_run, own=True), Peer(WITH_WINDOW, window_run, own=True))
WRITE_PEERS: tuple[WindowPeer, ...] = (
    Peer(OWN, functools.partial(write_run, with_ring=False), own=True),
    Peer(WITH_WINDOW, functools.partial(write_run, with_ring=True), own=True),
)


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
