"""Attention over the latents in the pages of a JAX array."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from kvjax.kernels import compat
from kvjax.kernels.aliases import DType, Kernel, OutType, Ref, ScratchType
from kvjax.kernels.attention.choice import array_memory, restricting
from kvjax.kernels.attention.launch import merge_kernel, run_merge
from kvjax.kernels.attention.problem import DecodeConfig, Problem, ReadArrays, Refs, Softmax
from kvjax.kernels.launchable import Number
from kvjax.kernels.mla import few_rows_stages
from kvjax.kernels.mla.decode import LatentDecode
from kvjax.kernels.mla.few_rows import FewRows
from kvjax.kernels.mla.packed import Packed, scratch_type
from kvjax.kernels.mla.problem import MLAConfig, choose, num_parts
from kvjax.kernels.mla.tiles import WARPGROUPS, Tiles, operand_dtypes, scratch_types
from kvjax.kernels.registers import WARPS
from kvjax.kernels.target import current
from kvjax.spec import AttentionSpec

type Config = MLAConfig | DecodeConfig

_COMPILER_PARAMS = plgpu.CompilerParams(
    approx_math=True,
    lowering_semantics=plgpu.LoweringSemantics.Lane,
    unsafe_no_auto_barriers=True,
    reduction_scratch_bytes=0,  # rows are reduced within warps
)


def decode(
    query: jax.Array,
    pages: jax.Array,
    read: ReadArrays,
    spec: AttentionSpec,
    softmax: Softmax,
    *,
    num_layers: int = 1,
    config: Config | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attention of the last tokens of each sequence.

    Args:
      query: float16 or bfloat16 `[num_seqs, q_len, num_heads, head_size]`.
      pages: `[num_blocks * num_layers, page_elements]`, the pages of a block side by side.
      read: the other arrays, without sinks.
      spec: the cache's.
      softmax: the options.
      num_layers: pages of a block.
      config: how the kernel is launched, by default `choose`'s.

    Returns:
      The output `[num_seqs, q_len, num_heads, kv_lora_rank]` in the query's dtype and the float32 log-sum-exp
      `[num_seqs, q_len, num_heads]`.
    """
    num_seqs, q_len, num_heads, _ = query.shape
    target = current()
    problem = Problem(
        spec=spec,
        memory=array_memory(spec),
        query_dtype=query.dtype,
        q_len=q_len,
        num_heads=num_heads,
        num_seqs=num_seqs,
        max_blocks=read.block_table.shape[1],
        table_stride=read.block_table.shape[1],
        query_strides=(q_len * num_heads * spec.head_size, num_heads * spec.head_size),
        num_blocks=pages.shape[0] // num_layers,
        num_layers=num_layers,
        has_layer=read.layer is not None,
        sm_scale=softmax.sm_scale,
        window=restricting(softmax.window, q_len),
        logits_soft_cap=softmax.logits_soft_cap,
        scale_sizes=(1, 1),
        one_memory=True,
        has_sinks=False,
        batch_invariant=softmax.batch_invariant,
        converts_e2m1=target.converts_e2m1,
    )
    return _attend(problem, config or choose(problem, target), query, pages, read)


@functools.partial(jax.jit, static_argnums=(0, 1))  # traced and lowered once for all layers of a program
def _attend(
    problem: Problem,
    config: Config,
    query: jax.Array,
    pages: jax.Array,
    read: ReadArrays,
) -> tuple[jax.Array, jax.Array]:
    spec = problem.spec
    rows, parts = problem.num_seqs * problem.q_len * problem.num_heads, num_parts(problem, config)

    def body(*refs: Ref) -> None:
        query, pages, table, seq_lens, layer, k_scale, out, lse, partial, partial_lse, spans, *shared = refs
        known = {"out": out, "lse": lse, "partial": partial, "partial_lse": partial_lse, "spans": spans}
        own = Refs(query=query, pages=pages, table=table, seq_lens=seq_lens, layer=layer, k_scale=k_scale, **known)
        run_decode(problem, config, own, shared)

    out_type = (
        jax.ShapeDtypeStruct(rows_shape(problem, config, rows), query.dtype),
        jax.ShapeDtypeStruct((rows,), jnp.float32),
        jax.ShapeDtypeStruct(rows_shape(problem, config, parts), jnp.float32),
        jax.ShapeDtypeStruct(
            (problem.sums * parts,) if isinstance(config, DecodeConfig) else (parts, problem.sums), jnp.float32
        ),
        jax.ShapeDtypeStruct((2 * problem.num_seqs,), jnp.int32),
    )
    kernel = decode_kernel(body, problem, config, out_type)
    operand = query.reshape(-1) if isinstance(config, DecodeConfig) else _operand(query, spec).reshape(rows, -1)
    # A placeholder for an absent layer, which the kernel does not read.
    layer = read.seq_lens if read.layer is None else read.layer.reshape(1)
    out, lse, partial, partial_lse, spans = kernel(
        operand, pages, read.block_table.reshape(-1), read.seq_lens, layer, read.k_scale.reshape(-1)
    )
    out_ref, lse_ref = jax.new_ref(out.reshape(-1)), jax.new_ref(lse)

    def merge_body(*refs: Ref) -> None:
        seq_lens, partial, partial_lse, spans, out, lse, *shared = refs
        known = {"partial": partial, "partial_lse": partial_lse, "spans": spans, "out": out, "lse": lse}
        run_merge(problem, config, Refs(seq_lens=seq_lens, **known), shared)

    merge = merge_kernel(merge_body, problem, config, read.seq_lens.shape[0])
    merge(read.seq_lens, partial.reshape(-1), partial_lse.reshape(-1), spans, out_ref, lse_ref)
    shape = problem.num_seqs, problem.q_len, problem.num_heads
    return jax.freeze(out_ref).reshape(*shape, spec.head_size_v), jax.freeze(lse_ref).reshape(shape)


def rows_shape(problem: Problem, config: Config, rows: Number) -> tuple[Number, ...]:
    """The shape of rows of results: flat, or halves of a row for two warpgroups."""
    rank = problem.spec.head_size_v
    return (rows * rank,) if isinstance(config, DecodeConfig) else (rows, WARPGROUPS, rank // WARPGROUPS)


def read_dtype(problem: Problem, config: Config) -> DType:
    """The dtype of the query as a kernel reads it."""
    return np.dtype(problem.query_dtype) if isinstance(config, DecodeConfig) else operand_dtypes(problem.spec)[0]


def run_decode(problem: Problem, config: Config, refs: Refs, shared: Sequence[Ref]) -> None:
    """The body of the decode kernel; `shared` is shared memory, as `decode_kernel` allocates it."""
    if isinstance(config, DecodeConfig):
        buffer, others, barriers = shared
        FewRows.of(problem, config, refs, (buffer, others, barriers)).run()
        return
    *of_tiles, last = shared
    if not problem.spec.dtype.is_quantized:
        LatentDecode(problem, config, refs, Tiles.of(problem.spec, tuple(shared)), None).run()
        return
    tiles = Tiles.of(problem.spec, tuple(of_tiles))
    LatentDecode(problem, config, refs, tiles, Packed(problem.spec, last, tiles)).run()


def decode_kernel(body: Callable[..., None], problem: Problem, config: Config, out_type: OutType = ()) -> Kernel:
    """The decode kernel of `body`, which stores results of whole sequences, and partial results for the merge."""
    spec, is_few = problem.spec, isinstance(config, DecodeConfig)
    if isinstance(config, DecodeConfig):
        buffer, others, barriers = few_rows_stages.scratch(problem, config)
        shared: list[ScratchType] = [plgpu.SMEM((size,), jnp.uint8) for size in (buffer, others)]
        shared.append(plgpu.SMEM((barriers // 4,), jnp.int32))
        grid, warpgroups = {"block": config.blocks, "heads": 1}, config.warps // WARPS
    else:
        packed = [scratch_type(spec)] if spec.dtype.is_quantized else []
        shared = scratch_types(spec) + packed
        grid, warpgroups = {"block": config.blocks, "rows": config.passes}, WARPGROUPS
    kernel: Kernel = plgpu.kernel(
        compat.named("mla_paged_attention", body),
        out_type=out_type,
        scratch_types=shared,
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        num_threads=warpgroups,
        thread_name="warpgroup",
        compiler_params=compat.COMPILER_PARAMS if is_few else _COMPILER_PARAMS,
    )
    return kernel


def _operand(query: jax.Array, spec: AttentionSpec) -> jax.Array:
    """The query as the second kernel copies it: rope parts of another dtype than latents have its bits."""
    dtype, rope_dtype = operand_dtypes(spec)
    if dtype == rope_dtype:
        return _converted(query, dtype)
    latents, rope = jnp.split(query, [spec.head_size_v], axis=-1)
    rope = lax.bitcast_convert_type(_converted(rope, rope_dtype), dtype)
    return jnp.concatenate([_converted(latents, dtype), rope], axis=-1)


def _converted(query: jax.Array, dtype: DType) -> jax.Array:
    """The query in the dtype of products, clamped to what it holds."""
    if query.dtype == dtype:
        return query
    most = float(jnp.finfo(dtype).max)
    return jnp.clip(query.astype(jnp.float32), -most, most).astype(dtype)
