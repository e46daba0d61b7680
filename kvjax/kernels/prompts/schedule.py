"""The kernel that finds the prompts among a step's sequences, and what their rows see, from lengths and tables.

A thread block takes a sequence. It counts the prompts before, which is the sequence's number among them, and looks
which blocks of its row of the block table are in the cache.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kvjax.kernels import compat
from kvjax.kernels.attention import lanes
from kvjax.kernels.memory import ANY_LENGTH, AnyCount, Argument, Number, with_origin
from kvjax.kernels.prompts.memory import FIELDS
from kvjax.kernels.registers import LANES, THREADS, WARPS

COUNTS = (
    "num_seqs", "num_rows", "max_blocks", "table_stride", "num_blocks", "decode_q_len", "max_q_len", "max_prompts",
    "num_lots",
)  # fmt: skip

_AT_ONCE = 4
"""Entries of the block table that a thread loads before it looks at any."""


@functools.cache
@with_origin
def any_schedule(block_size: int, window: int | None) -> AnyCount:
    """Finds up to `max_prompts` sequences with more than `decode_q_len` and at most `max_q_len` rows.

    The arguments are the block table, the lengths and the bounds of rows, int32, and the results: `FIELDS` of each
    prompt, and the header, the number of prompts followed by a 0 for each of `num_lots`. Bounds are clipped to
    `num_rows`. `table_stride` counts the entries from a sequence's first to that of the next.
    """
    results = "prompts", "header"

    def body(counts: Mapping[str, Number], arrays: Mapping[str, Any], scratch: Sequence[Any]) -> None:
        _schedule(block_size, window, counts, arrays, scratch[0])

    def kernel(body: Callable[..., None], grid: int = ANY_LENGTH) -> Callable[..., Any]:
        made: Callable[..., Any] = plgpu.kernel(
            compat.named("schedule_prompts", body),
            out_type=(),
            scratch_types=[plgpu.SMEM((4 * WARPS,), np.dtype(np.uint8))],
            grid=(grid,),
            grid_names=("sequence",),
            compiler_params=compat.COMPILER_PARAMS,
        )
        return made

    numbers = jax.ShapeDtypeStruct((ANY_LENGTH,), jnp.int32)
    names = "block_table", "seq_lens", "cu_q_lens", *results
    arguments = tuple(Argument(name, numbers) for name in names)
    return AnyCount(body, kernel, COUNTS, arguments, writes=results, num_programs=lambda num_seqs: num_seqs)


def _schedule(
    block_size: int, window: int | None, counts: Mapping[str, Number], arrays: Mapping[str, Any], shared: Any
) -> None:
    thread, own = lanes.thread_index(), lax.axis_index("sequence")
    cu_q_lens = arrays["cu_q_lens"]
    num_seqs, max_prompts = (jnp.int32(counts[name]) for name in ("num_seqs", "max_prompts"))
    decode_q_len, max_q_len = (jnp.int32(counts[name]) for name in ("decode_q_len", "max_q_len"))

    def bound(x: jax.Array) -> jax.Array:
        return jnp.clip(x, 0, jnp.int32(counts["num_rows"]))

    def is_prompt(q_len: jax.Array) -> jax.Array:
        return (q_len > decode_q_len) & (q_len <= max_q_len)

    def count(i: jax.Array, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        seq = thread + i * THREADS
        is_one = seq < num_seqs
        start, end = (lanes.bits(lanes.load_global(cu_q_lens, seq + j, is_one), jnp.int32) for j in range(2))
        found = (is_one & is_prompt(bound(end) - bound(start))).astype(jnp.int32)
        before, total = sums
        return before + jnp.where(seq < own, found, 0), total + found

    zero = lanes.splat(0, jnp.int32)
    chunks = lax.div(num_seqs + (THREADS - 1), jnp.int32(THREADS))
    sums = lax.fori_loop(0, chunks, count, (zero, zero))
    number, total = (_over_block(shared, lanes.sum_over_warp(x), jnp.add) for x in sums)
    total = jnp.minimum(total, max_prompts)

    @pl.when(own == 0)
    def begin() -> None:
        def clear(i: jax.Array, _: None) -> None:
            index = thread + i * THREADS
            value = jnp.where(index == 0, lanes.splat(total, jnp.int32), 0)
            lanes.store_global(arrays["header"], index, value, index < 1 + counts["num_lots"])

        lax.fori_loop(0, lax.div(jnp.int32(counts["num_lots"]) + THREADS, jnp.int32(THREADS)), clear, None)

    q_start = bound(cu_q_lens[own])
    q_len = bound(cu_q_lens[own + 1]) - q_start

    @pl.when(is_prompt(q_len) & (number < max_prompts))
    def describe() -> None:
        length = jnp.maximum(arrays["seq_lens"][own], 0)
        first_row = length - q_len  # the position of its token
        first_seen = jnp.int32(0)
        if window is not None:
            first_seen = jnp.maximum(first_row - jnp.int32(window - 1), 0)
        first_block = lax.div(first_seen, jnp.int32(block_size))
        skipped = first_block * block_size
        blocks = jnp.minimum(_divided_up(length - skipped, block_size), jnp.int32(counts["max_blocks"]) - first_block)
        start = own * counts["table_stride"] + first_block

        def look(i: jax.Array, found: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            first_absent, end = found
            entries = [thread + (i * _AT_ONCE + j) * THREADS for j in range(_AT_ONCE)]
            loaded = [lanes.load_global(arrays["block_table"], start + each, each < blocks, -1) for each in entries]
            for entry, block in zip(entries, loaded, strict=True):
                # As unsigned: negative entries are large.
                exists = block < lanes.splat(counts["num_blocks"], jnp.uint32)
                first_absent = jnp.minimum(first_absent, jnp.where(exists, first_absent, entry))
                end = jnp.where(exists, entry + 1, end)  # entries grow
            return first_absent, end

        chunks = _divided_up(blocks, THREADS * _AT_ONCE)
        found = lax.fori_loop(0, chunks, look, (lanes.splat(blocks, jnp.int32), zero))
        # The least is the greatest of the negative numbers.
        found = [_over_block(shared, lanes.max_over_warp(x), jnp.maximum) for x in (-found[0], found[1])]
        blocks_until = jnp.minimum(-found[0], blocks), found[1]
        first_absent, end = (jnp.minimum(x * block_size, length - skipped) for x in blocks_until)
        fields = own, q_start, q_len, first_row - skipped, first_absent, end, first_block, first_seen - skipped
        row = functools.reduce(lambda row, i: jnp.where(thread == i, fields[i], row), range(len(FIELDS)), zero)
        lanes.store_global(arrays["prompts"], number * len(FIELDS) + thread, row, thread < len(FIELDS))


def _divided_up(x: jax.Array, divisor: int) -> jax.Array:
    """The quotient, rounded up, of a number that is not negative."""
    return lax.div(x, jnp.int32(divisor)) + (lax.rem(x, jnp.int32(divisor)) > 0).astype(jnp.int32)


def _over_block(shared: Any, of_warp: jax.Array, operation: Callable[..., jax.Array]) -> jax.Array:
    """A scalar of the four numbers that the warps of a block hold."""
    thread = lanes.thread_index()
    warp = thread >> LANES.bit_length() - 1
    lanes.wait_for_block()  # until earlier numbers have been loaded
    lanes.store_shared(shared, warp * 4, [of_warp], 4, (thread & (LANES - 1)) == 0)
    lanes.wait_for_block()
    loaded = [lanes.load_shared(shared, thread * 0, 4, 4 * i)[0] for i in range(WARPS)]
    return lanes.of_first_thread(functools.reduce(operation, (lanes.bits(x, jnp.int32) for x in loaded)))
