"""Attention and writes with an exact recent window beside pages, and over pages alone: rows, inputs and peers."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from benchmarks import output, shapes, workload
from benchmarks.measurement import OWN
from benchmarks.peers import attends, in_torch
from benchmarks.peers.attention_inputs import PEER_ERROR, AttentionInputs, AttentionJob
from benchmarks.peers.peer import Peer, Run, by_turns
from benchmarks.shapes import BLOCK_SIZE, Step
from kvjax import ExactWindow, KVCache, StepMetadata, window_attention

SIZE = 64  # exact tokens

DECODES = tuple(Step(f"{seqs}x{length}", seqs, length) for seqs, length in ((64, 8_192), (8, 8_192), (64, 1_024)))
PROMPTS = (shapes.RAGGED_ROWS_BY_NAME["chunk"], Step("chunks-2048", 8, 2_048, q_len=2_048))
SMOKE = tuple(dataclasses.replace(shapes.HOST_RAGGED_ROWS[0], name=f"{q_len} new", q_len=q_len) for q_len in (1, 20))
ROWS_BY_NAME = {row.name: row for row in (*DECODES, *PROMPTS, *SMOKE)}


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

    @functools.cached_property
    def expected_ring(self) -> jax.Array:
        """The ring's pages after the step: of its tokens those that rows keep, else what was there."""
        window, ring = self.window, np.array(self.window.ring.kv)
        for new, half in ((self.key, ring[:, 0]), (self.value, ring[:, 1])):
            by_row = half.reshape(window.num_rows, window.tokens_per_row, *new.shape[1:])  # a copy
            for row, (start, end) in enumerate(itertools.pairwise(self.job.row.cu_q_lens)):
                kept = np.asarray(new[start:end])[-window.tokens_per_row :]
                positions = np.arange(self.job.row.seq_len - len(kept), self.job.row.seq_len)
                by_row[row, positions % window.tokens_per_row] = kept
            half[:] = by_row.reshape(half.shape)
        return jnp.asarray(ring)


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


def window_in_torch_run(inputs: WindowInputs) -> Run:
    import kvjax_torch

    query, key, value, *numbers = map(in_torch.borrow, (inputs.query, inputs.key, inputs.value, *inputs.numbers))
    keys, values = in_torch.borrow(jnp.copy(inputs.window.ring.kv)).unbind(1)
    window = kvjax_torch.ExactWindow(keys, values, SIZE)
    beside = window, in_torch.borrow(inputs.metadata.window_rows), inputs.job.dtype.value, *workload.SCALES
    halves = [kvjax_torch.split_kv_cache(in_torch.borrow(cache.kv), cache.spec) for cache in inputs.caches]
    sets = [(query, key, value, *each, *numbers, *beside) for each in halves]
    limits: dict[str, Any] = inputs.job.limits
    attend: Any = functools.partial(kvjax_torch.exact_window_attention, **limits)
    return inputs.run_in_torch(by_turns(attend, sets), most=PEER_ERROR)


class _Writes(NamedTuple):
    """What a call returns.

    Attributes:
      cache: the pages.
      window: with what its rows keep of the step; None without one.
      room: what queries attend to beside pages, and its block table, where that is not the ring; None if not asked for.
    """

    cache: KVCache
    window: ExactWindow | None = None
    room: tuple[KVCache, jax.Array] | None = None


class _WriteCall:
    """Writes a step's tokens as `attend` does: into the pages, and into the window's ring `with_ring`.

    Chunks attend over a copy of the ring's rows and of the step's tokens. A call returns it `with_room`; without, XLA
    leaves it out.
    """

    def __init__(self, inputs: WindowInputs, *, with_ring: bool, with_room: bool) -> None:
        self.inputs, self.with_room = inputs, with_room
        window = jax.tree.map(jnp.copy, inputs.window) if with_ring else None
        self.writes = _Writes(jax.tree.map(jnp.copy, inputs.caches[0]), window)
        self.write = jax.jit(self._write, donate_argnums=(0, 1))

    def _write(
        self, cache: KVCache, window: ExactWindow | None, key: jax.Array, value: jax.Array, metadata: StepMetadata
    ) -> _Writes:
        implementation, scales = output.IMPLEMENTATION.value, workload.scales()
        if window is None:
            options: dict[str, Any] = {"unique_slots": True, "implementation": implementation, **scales}
            return _Writes(kvjax.reshape_and_cache_flash(key, value, cache, metadata.slot_mapping, **options))
        new = window_attention.StepTokens(key, value, implementation, metadata.slot_mapping, unique_slots=True)
        longest, of_cache = self.inputs.job.row.q_len, {"layer": None, **scales}
        written = window_attention.write_step(window, new, metadata, longest, cache, of_cache)
        window = dataclasses.replace(window, ring=written.ring)
        return _Writes(written.cache, window, (written.recent, written.table) if self.with_room else None)

    def __call__(self, number: int) -> Any:
        cache, window, _ = self.writes
        self.writes = self.write(cache, window, self.inputs.key, self.inputs.value, self.inputs.metadata)
        return jax.tree.leaves(self.writes)

    def check(self, _: Any) -> None:
        """Compares all bytes of the pages, of the ring, and of the step's tokens in its room.

        The pages are to have those that were there, as the tokens are theirs.
        """
        cache, window, room = self.writes
        workload.check_same_bits(cache.kv, self.inputs.caches[0].kv)
        if window is not None:
            workload.check_same_bits(window.ring.kv, self.inputs.expected_ring)
        if room is not None:
            for got, expected in zip(self._new_tokens(*room), (self.inputs.key, self.inputs.value), strict=True):
                workload.check_same_bits(got, expected)

    def _new_tokens(self, cache: KVCache, table: jax.Array) -> list[jax.Array]:
        """Returns the step's keys and values as its queries find them."""
        row = self.inputs.job.row
        q_lens = np.diff(row.cu_q_lens)
        ends = row.seq_len - np.maximum(row.seq_len - q_lens - SIZE + 1, 0) // BLOCK_SIZE * BLOCK_SIZE
        dense = kvjax.gather_kv(cache, table, ends, dtype=self.inputs.key.dtype)
        return [
            jnp.concatenate(
                [x[seq, end - q_len : end] for seq, (q_len, end) in enumerate(zip(q_lens, ends, strict=True))]
            )
            for x in dense
        ]


def write_run(inputs: WindowInputs, *, with_ring: bool = False, with_room: bool = False) -> Run:
    call = _WriteCall(inputs, with_ring=with_ring, with_room=with_room)
    return Run(call, call.check)


_IN_TORCH = attends.IN_TORCH.name
WITH_WINDOW = f"{OWN}, {SIZE} exact"
WITH_ROOM = f"{WITH_WINDOW}, with room"
type WindowPeer = Peer[AttentionJob, WindowInputs]
ATTENTION_PEERS: tuple[WindowPeer, ...] = (
    Peer(OWN, pages_run, own=True),
    Peer(WITH_WINDOW, window_run, own=True),
    in_torch.torch_peer(_IN_TORCH, functools.partial(attends.step_in_torch_run, most=PEER_ERROR), own=True),
    in_torch.torch_peer(f"{_IN_TORCH}, {SIZE} exact", window_in_torch_run, own=True),
)
WRITE_PEERS: tuple[WindowPeer, ...] = (
    Peer(OWN, write_run, own=True),
    Peer(WITH_WINDOW, functools.partial(write_run, with_ring=True), own=True),
    Peer(
        WITH_ROOM,
        functools.partial(write_run, with_ring=True, with_room=True),
        serves=lambda job: job.row.q_len > 1,
        own=True,
    ),
)
