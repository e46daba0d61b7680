"""Attention over pages: the decode kernel and the one that merges its parts.

The parts, each by what it is: `lanes` (what threads of a warp do together), `formats` (from stored bytes to operands),
`stages` (rows of pages on their way through shared memory), `schedule` (who attends to what), `decode` (logits,
softmax, output), `merge`.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from kvjax.errors import UnsupportedError
from kvjax.kernels import compat
from kvjax.kernels.attention.decode import COLUMNS, SHARED_BYTES, Decode, DecodeConfig, Problem, Refs
from kvjax.kernels.attention.formats import SERVED_DTYPES
from kvjax.kernels.attention.merge import Merge
from kvjax.kernels.attention.stages import TILE, StagePlan
from kvjax.kernels.registers import LANES, WARPS
from kvjax.spec import AttentionSpec

WIDE = 256
"""Elements of a key and a value together from which on registers hold the output of one product's query rows alone."""

MAX_WARPS = 8
"""Warps of a block: two for each scheduler leave 255 registers to a thread, and several tiles at once keep it busy."""

MAX_TILES = 3
"""Tiles of a warp in a stage: more would leave room for two stages only."""

SLOTS = 3
"""Stages in shared memory, at least, where a block has several tiles."""

STAGES = 8
"""Stages that a block should have; with fewer, smaller ones divide the work more evenly."""

BLOCKS = 132
"""Blocks of threads of a launch: one for each multiprocessor of an H100 or H200."""

FEW_SEQUENCES = 32
"""Up to so many sequences `MERGE_WARPS` warps take each row of a merge, for a sequence then has many parts."""

MERGE_WARPS = 16


def why_not(spec: AttentionSpec) -> str | None:
    """Why the kernel cannot read caches of a spec; None where it can."""
    if spec.dtype not in SERVED_DTYPES:
        return f"it reads no cache of dtype {spec.dtype.value!r}"
    return None


def rows_a_pass(spec: AttentionSpec) -> int:
    """Query rows of a KV head that one pass over the pages takes; of more there are several passes."""
    return COLUMNS if spec.head_size + spec.head_size_v > WIDE else 2 * COLUMNS


def choose(problem: Problem) -> DecodeConfig:
    """The configuration for a problem: as many heads a block as fit, then as many tiles a warp."""
    spec = problem.spec
    most = WARPS if compat.interpreting() else MAX_WARPS  # interpret mode knows no barrier of several warpgroups
    num_blocks, several = (2, WARPS) if compat.interpreting() else (BLOCKS, MERGE_WARPS)
    for heads in range(min(spec.num_kv_heads, most), 0, -1):
        if spec.num_kv_heads % heads:
            continue
        tile_bytes = StagePlan.of(spec, heads, 1).stage_bytes
        warps = -(-heads // WARPS) * WARPS
        if warps // heads * tile_bytes * 2 > SHARED_BYTES and heads > 1:
            continue
        while warps + WARPS <= most and (warps + WARPS) // heads * tile_bytes * SLOTS <= SHARED_BYTES:
            warps += WARPS
        groups, blocks = warps // heads, -(-num_blocks * heads // spec.num_kv_heads)
        tokens = problem.num_seqs * problem.max_blocks * spec.block_size // blocks
        tiles = min(MAX_TILES, SHARED_BYTES // (groups * tile_bytes * SLOTS), tokens // (groups * TILE * STAGES))
        tiles = max(1, tiles)
        slots = min(8, SHARED_BYTES // (groups * tile_bytes * tiles))
        return DecodeConfig(heads, warps, tiles, slots, blocks, several if problem.num_seqs <= FEW_SEQUENCES else 1)
    raise UnsupportedError(f"paged_attention: no configuration of the kernel holds rows of {spec}")


def decode(
    query: jax.Array,
    pages: jax.Array,
    block_table: jax.Array,
    seq_lens: jax.Array,
    layer: jax.Array | None,
    k_scale: jax.Array,
    v_scale: jax.Array,
    sinks: jax.Array,
    spec: AttentionSpec,
    *,
    num_layers: int = 1,
    sm_scale: float,
    window: int | None = None,
    logits_soft_cap: float | None = None,
    config: DecodeConfig | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attention of the last tokens of each sequence.

    Args:
      query: float16 or bfloat16 `[num_seqs, q_len, num_heads, head_size]`.
      pages: `[num_blocks * num_layers, page_elements]`, the pages of a block side by side.
      block_table: int32 `[num_seqs, max_blocks]`, of any numbers.
      seq_lens: int32 `[num_seqs]`.
      layer: int32 `[]`, which of a block's pages; one out of range holds no tokens. None where a block has one.
      k_scale: float32, of one element or of one for each KV head.
      v_scale: likewise.
      sinks: float32 `[num_heads]`, -inf where there is none.
      spec: the cache's.
      num_layers: pages of a block.
      sm_scale: factor of the logits.
      window: tokens that a query token sees, its own included.
      logits_soft_cap: logits become `cap * tanh(logit / cap)`.
      config: how the kernel is launched, by default `choose`'s.

    Returns:
      The output `[num_seqs, q_len, num_heads, head_size_v]` in the query's dtype and the float32 log-sum-exp
      `[num_seqs, q_len, num_heads]`.
    """
    num_seqs, q_len, num_heads, head_size = query.shape
    group, max_rows = num_heads // spec.num_kv_heads, rows_a_pass(spec)
    if window is not None and window > np.iinfo(np.int32).max - q_len:
        window = None  # the sums below stay within int32, and no sequence is longer
    static: dict[str, Any] = {
        "num_layers": num_layers, "sm_scale": sm_scale, "window": window, "logits_soft_cap": logits_soft_cap
    }  # fmt: skip
    if group > max_rows:  # heads of a group by turns
        by_group = query.reshape(num_seqs, q_len, spec.num_kv_heads, group, head_size)
        sinks_by_group = sinks.reshape(spec.num_kv_heads, group)
        parts = []
        for first in range(0, group, max_rows):
            some = slice(first, min(first + max_rows, group))
            heads = by_group[:, :, :, some].reshape(num_seqs, q_len, -1, head_size)
            scales = k_scale, v_scale, sinks_by_group[:, some].reshape(-1)
            out, lse = decode(heads, pages, block_table, seq_lens, layer, *scales, spec, **static)
            grouped = num_seqs, q_len, spec.num_kv_heads, -1
            parts.append((out.reshape(*grouped, spec.head_size_v), lse.reshape(grouped)))
        outs, lses = zip(*parts, strict=True)
        shape = num_seqs, q_len, num_heads
        return jnp.concatenate(outs, axis=3).reshape(*shape, -1), jnp.concatenate(lses, axis=3).reshape(shape)
    tokens = max_rows // group
    if q_len > tokens:  # tokens by turns: earlier ones stand at the end of shorter sequences
        parts = []
        for first in range(0, q_len, tokens):
            end = min(first + tokens, q_len)
            lens = jnp.maximum(seq_lens, 0) - (q_len - end)
            parts.append(
                decode(query[:, first:end], pages, block_table, lens, layer, k_scale, v_scale, sinks, spec, **static)
            )
        outs, lses = zip(*parts, strict=True)
        return jnp.concatenate(outs, axis=1), jnp.concatenate(lses, axis=1)
    problem = Problem(
        spec=spec,
        query_dtype=query.dtype,
        q_len=q_len,
        num_heads=num_heads,
        num_seqs=num_seqs,
        max_blocks=block_table.shape[1],
        num_blocks=pages.shape[0] // num_layers,
        num_layers=num_layers,
        has_layer=layer is not None,
        sm_scale=sm_scale,
        window=window,
        logits_soft_cap=logits_soft_cap,
        scale_sizes=(k_scale.size, v_scale.size),
    )
    number = seq_lens if layer is None else layer.reshape(1)  # without one nothing reads it
    return _attend(
        problem, config or choose(problem), query, pages, block_table, seq_lens, number, k_scale, v_scale, sinks
    )


@functools.partial(jax.jit, static_argnums=(0, 1))  # traced and lowered once for all layers of a program
def _attend(
    problem: Problem, config: DecodeConfig, query: jax.Array, *arrays: jax.Array
) -> tuple[jax.Array, jax.Array]:
    spec = problem.spec
    plan = StagePlan.of(spec, config.heads, config.groups * config.tiles)
    rows = problem.num_seqs * problem.q_len * problem.num_heads
    parts = 2 * config.blocks * problem.q_len * problem.num_heads
    out_types = (
        jax.ShapeDtypeStruct((rows * spec.head_size_v,), query.dtype),
        jax.ShapeDtypeStruct((rows,), jnp.float32),
        jax.ShapeDtypeStruct((parts * spec.head_size_v,), jnp.float32),
        jax.ShapeDtypeStruct((parts * 2,), jnp.float32),
        jax.ShapeDtypeStruct((2 * problem.num_seqs,), jnp.int32),
    )
    pages, block_table, seq_lens, layer, k_scale, v_scale, sinks = arrays

    def decode_body(*refs: Any) -> None:
        *others, buffer, barriers = refs
        Decode(problem, config, plan, Refs(*others), buffer, barriers).run()

    registers = Decode.registers(problem)
    joined = (config.groups - 1) * config.heads * registers * LANES * 4
    kernel = plgpu.kernel(
        compat.named("paged_attention", decode_body),
        out_type=out_types,
        scratch_types=[
            plgpu.SMEM((max(config.slots * plan.stage_bytes, joined),), jnp.uint8),
            plgpu.SMEM((4 * config.slots,), jnp.int32),
        ],
        grid=(config.blocks, spec.num_kv_heads // config.heads),
        grid_names=("block", "heads"),
        num_threads=config.warps // WARPS,
        thread_name="warpgroup",
        compiler_params=compat.COMPILER_PARAMS,
    )
    out, lse, partial, partial_lse, spans = kernel(
        query.reshape(-1), pages, block_table.reshape(-1), seq_lens, layer, k_scale.reshape(-1), v_scale.reshape(-1),
        sinks,
    )  # fmt: skip
    out, lse = _merge(problem, config, seq_lens, sinks, partial, partial_lse, spans, out, lse)
    shape = problem.num_seqs, problem.q_len, problem.num_heads
    return out.reshape(*shape, spec.head_size_v), lse.reshape(shape)


def _merge(
    problem: Problem,
    config: DecodeConfig,
    seq_lens: jax.Array,
    sinks: jax.Array,
    partial: jax.Array,
    partial_lse: jax.Array,
    spans: jax.Array,
    out: jax.Array,
    lse: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """`out` and `lse` with the rows of sequences that several blocks of threads had a part of."""
    warps_a_row = config.merge_warps
    several = warps_a_row > 1
    registers = 2 + -(-problem.spec.head_size_v // LANES)
    rows = problem.q_len * problem.num_heads

    def body(*refs: Any) -> None:
        seq_lens, sinks, partial, partial_lse, spans, out, lse, *shared = refs
        known = Refs(
            query=None, pages=None, table=None, seq_lens=seq_lens, layer=None, k_scale=None, v_scale=None,
            sinks=sinks, out=out, lse=lse, partial=partial, partial_lse=partial_lse, spans=spans,
        )  # fmt: skip
        Merge(problem, config.rows, known, warps_a_row, shared[0] if shared else None).run()

    out_ref, lse_ref = jax.new_ref(out), jax.new_ref(lse)
    plgpu.kernel(
        compat.named("merge_paged_attention", body),
        scratch_types=[plgpu.SMEM((warps_a_row * registers * LANES * 4,), jnp.uint8)] if several else [],
        grid=(problem.num_seqs, rows if several else -(-rows // WARPS)),
        grid_names=("sequence", "rows"),
        num_threads=max(1, warps_a_row // WARPS),
        thread_name="warpgroup",
        compiler_params=compat.COMPILER_PARAMS,
    )(seq_lens, sinks, partial, partial_lse, spans, out_ref, lse_ref)
    return jax.freeze(out_ref), jax.freeze(lse_ref)
