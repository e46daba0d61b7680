"""`ragged_attention`: attention over keys and values that a model has just computed, of sequences one after the other.

It needs no cache: the prompt kernel copies tiles from the arrays themselves.
"""

from __future__ import annotations

import functools
from typing import Any, Literal, NamedTuple, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from kvjax.dtypes import KVCacheDType
from kvjax.errors import KVCacheValueError
from kvjax.kernels import prompts as kernel
from kvjax.kernels.attention import Softmax
from kvjax.kernels.target import Target
from kvjax.ops import prompt_kernel, prompts, select, softmax
from kvjax.ops.arguments import INDEX_DTYPES, INPUT_DTYPES, as_lengths, as_sinks, check_array, check_devices
from kvjax.ops.options import as_bool, as_sm_scale, most_splits
from kvjax.ops.route import INT32_MAX, Query, route
from kvjax.ops.value_checks import check_cumulative, is_checked
from kvjax.spec import AttentionSpec


class RaggedAttentionOptions(TypedDict, total=False):
    """Keyword arguments of `ragged_attention` that do not change the type of its result."""

    causal: bool
    sm_scale: float | None
    implementation: str | None


@overload
def ragged_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    cu_q_lens: ArrayLike,
    cu_kv_lens: ArrayLike,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[RaggedAttentionOptions],
) -> jax.Array: ...


@overload
def ragged_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    cu_q_lens: ArrayLike,
    cu_kv_lens: ArrayLike,
    *,
    return_lse: Literal[True],
    **options: Unpack[RaggedAttentionOptions],
) -> tuple[jax.Array, jax.Array]: ...


def ragged_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    cu_q_lens: ArrayLike,
    cu_kv_lens: ArrayLike,
    *,
    causal: bool = True,
    sm_scale: float | None = None,
    return_lse: bool = False,
    implementation: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention of sequences over dense keys and values, without a cache.

    Sequence `i` has the rows `cu_q_lens[i]:cu_q_lens[i + 1]` of the query, and the rows
    `cu_kv_lens[i]:cu_kv_lens[i + 1]` of keys and values. With `causal` its query rows are its last tokens, so row `j`
    of them attends to the first `kv_len_i - q_len_i + j + 1`; without `causal`, every row attends to all. These are the
    parts of a prompt over latents (MLA): the chunk itself, and pieces of the context, which `merge_attention_states`
    joins. It is the same as `flash_attn_varlen_func` in vLLM and FlashInfer's ragged prefill, with natural logarithms.

    A row that attends to nothing is 0, and its log-sum-exp is -inf; so are rows of no sequence, such as those past
    `cu_q_lens[-1]`. Keys and values of no sequence may hold anything.

    Args:
      query: `[num_tokens, num_heads, head_size]`; float32, float16 or bfloat16. `num_heads` is a multiple of
        `num_kv_heads`; neighbouring query heads share a KV head.
      key: `[num_kv_tokens, num_kv_heads, head_size]`, of the query's dtype.
      value: `[num_kv_tokens, num_kv_heads, head_size_v]`, likewise. The kernel reads padded copies of arrays whose
        number of tokens is not a multiple of 8 or is less than 128.
      cu_q_lens: int32 `[num_seqs + 1]`, cumulative query lengths: starts with 0 and never decreases.
      cu_kv_lens: int32 `[num_seqs + 1]`, cumulative lengths of keys and values, likewise.
      causal: whether rows attend only to tokens that are not after their own.
      sm_scale: factor on the logits, a Python number; default `1 / sqrt(head_size)`.
      return_lse: whether to return the log-sum-exp too.
      implementation: `"mosaic"` (the prompt kernel, on Hopper), `"xla"`, or `None` to choose.

    Returns:
      `[num_tokens, num_heads, head_size_v]` of the query's dtype. With `return_lse`, a pair of this and the natural
      logarithm of each softmax's denominator: float32 `[num_tokens, num_heads]`.

    Raises:
      KVCacheValueError, KVCacheTypeError: an invalid shape, dtype or number; the message names it.
      UnsupportedError: the requested implementation cannot serve this call.
    """
    sizes: list[tuple[str, int | None]] = [("num_heads", None), ("head_size", None)]
    check_array("query", query, [("num_tokens", None), *sizes], INPUT_DTYPES)
    query = jnp.asarray(query)
    num_tokens, num_heads, head_size = query.shape
    dims = [("num_kv_tokens", None), ("num_kv_heads", None), ("head_size", head_size)]
    check_array("key", key, dims, [query.dtype])
    num_kv_tokens, num_kv_heads, _ = np.shape(key)
    dims = [("num_kv_tokens", num_kv_tokens), ("num_kv_heads", num_kv_heads), ("head_size_v", None)]
    check_array("value", value, dims, [query.dtype])
    head_size_v = np.shape(value)[2]
    for what, shape in (("query", query.shape), ("key", np.shape(key)), ("value", np.shape(value))):
        if not (shape[1] and shape[2]):
            raise KVCacheValueError(f"{what}: got shape {shape}, expected at least one head of at least one element")
    check_array("cu_q_lens", cu_q_lens, [("num_seqs + 1", None)], INDEX_DTYPES)
    if not np.shape(cu_q_lens)[0]:
        raise KVCacheValueError("cu_q_lens: got shape (0,), expected [num_seqs + 1]")
    check_array("cu_kv_lens", cu_kv_lens, [("num_seqs + 1", np.shape(cu_q_lens)[0])], INDEX_DTYPES)
    spec = AttentionSpec(1, num_kv_heads, head_size, head_size_v, dtype=KVCacheDType(query.dtype.name))
    as_sinks(None, num_heads, spec)
    keys = select.DenseKeys(jnp.asarray(key), spec)
    check_devices(keys, query=query, value=value, cu_q_lens=cu_q_lens, cu_kv_lens=cu_kv_lens)
    causal, return_lse = as_bool("causal", causal), as_bool("return_lse", return_lse)
    scale = as_sm_scale(sm_scale, head_size)
    if is_checked():
        check_cumulative("cu_q_lens", cu_q_lens, num_tokens)
        check_cumulative("cu_kv_lens", cu_kv_lens, num_kv_tokens)
    q_bounds, kv_bounds = _bounds(cu_q_lens, num_tokens), _bounds(cu_kv_lens, num_kv_tokens)
    elements = max(num_tokens * num_heads * max(head_size, head_size_v), np.size(key), np.size(value))
    asked = Query(np.dtype(query.dtype), scale > 0, has_prompts=True, is_indexable=elements <= INT32_MAX)
    serve = select.choose("ragged_attention", implementation, _candidates(asked), keys)
    out, lse = serve(keys, query, jnp.asarray(value), *q_bounds, *kv_bounds, options=DenseOptions(scale, causal))
    return (out, lse) if return_lse else out


def _bounds(cumulative: ArrayLike, num_tokens: int) -> tuple[jax.Array, jax.Array]:
    """The first token of each sequence, and the token after its last, within the array."""
    bounds = jnp.clip(as_lengths(cumulative), 0, num_tokens)
    return bounds[:-1], jnp.maximum(bounds[1:], bounds[:-1])


class DenseOptions(NamedTuple):
    """The static part of a call: as in `ragged_attention`."""

    sm_scale: float
    causal: bool


def _attend_xla(
    keys: select.DenseKeys,
    query: jax.Array,
    value: jax.Array,
    q_starts: jax.Array,
    q_ends: jax.Array,
    *kv_bounds: jax.Array,
    options: DenseOptions,
) -> tuple[jax.Array, jax.Array]:
    """Attends in XLA, a tile of rows and a chunk of tokens at a time; products of the arrays' dtype, sums in float32.

    Bounds are int32 `[num_seqs]`, within the arrays. Returns results and log-sum-exps.
    """
    key, spec = keys.kv, keys.spec
    nothing = prompts.of_no_tokens(query, None, spec.head_size_v)
    if not query.size or not key.size or not len(q_starts):
        return nothing
    kv_starts, kv_lens = kv_bounds[0], kv_bounds[1] - kv_bounds[0]

    def attend_tile(tile: prompts.RowTile) -> tuple[jax.Array, jax.Array]:
        num_tiles, num_rows, num_heads, _ = tile.query.shape
        elements = spec.num_kv_heads * sum(spec.head_sizes) + num_rows * num_heads
        size = softmax.blocks_per_chunk(len(key), 4 * num_tiles * elements)
        starts, lens = kv_starts[tile.seq][:, None], kv_lens[tile.seq][:, None]
        positions = jnp.where(tile.is_row, lens - tile.from_end if options.causal else lens - 1, -1)

        def read(number: jax.Array | int) -> tuple[jax.Array, jax.Array, jax.Array]:
            token = number * size + jnp.arange(size)[None, :]
            there = token < lens
            index = jnp.clip(starts + token, 0, len(key) - 1)
            # Zeros instead of others' tokens, which may be NaN, and so would be gradients.
            dense = [jnp.where(there[:, :, None, None], x[index], jnp.zeros((), x.dtype)) for x in (key, value)]
            return dense[0], dense[1], there

        longest = jnp.max(positions)
        chunks = softmax.TokenChunks(-(-len(key) // size), read, is_seen=lambda number: number * size <= longest)
        return softmax.attend(tile.query, chunks, positions, None, spec, Softmax(options.sm_scale))

    return prompts.by_tiles(attend_tile, query, (q_starts, q_ends), nothing, len(query))


def _attend_mosaic(
    keys: select.DenseKeys,
    query: jax.Array,
    value: jax.Array,
    q_starts: jax.Array,
    q_ends: jax.Array,
    *kv_bounds: jax.Array,
    options: DenseOptions,
) -> tuple[jax.Array, jax.Array]:
    """Attends with the prompt kernel; returns what `_attend_xla` does."""
    key, spec, (num_tokens, num_heads, _) = keys.kv, keys.spec, query.shape
    if not query.size or not key.size or not len(q_starts):
        return _attend_xla(keys, query, value, q_starts, q_ends, *kv_bounds, options=options)
    kv_starts, kv_ends = kv_bounds
    first_present = kv_starts % kernel.ALIGNMENT
    ends = first_present + (kv_ends - kv_starts)
    positions = ends - (q_ends - q_starts) if options.causal else ends
    most = most_splits(num_tokens, num_heads, spec.head_size_v)
    config = kernel.choose(spec, 1, num_tokens, num_heads, len(key), most)
    num_keys = max(-(-len(key) // kernel.ALIGNMENT) * kernel.ALIGNMENT, config.tokens)
    key, value = (jnp.pad(x, ((0, num_keys - len(x)), (0, 0), (0, 0))) for x in (key, value))
    rows = prompts.RowSequences.of(num_tokens, q_starts, q_ends)
    result = jax.ShapeDtypeStruct((num_tokens, num_heads, spec.head_size_v), query.dtype)
    nothing = kernel.join(jnp.where(rows.is_any, kernel.LEFT, -1), None, None, result)
    query, padded = prompt_kernel.padded(query, nothing)
    operands = kernel.RaggedOperands(
        query,
        key,
        value,
        q_starts,
        q_ends - q_starts,
        positions,
        kv_starts - first_present,
        first_present,
        ends,
        jnp.full(1, options.sm_scale, jnp.float32),
    )
    problem = kernel.PromptProblem(num_tokens, None, None)

    def attend_parts(parts: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return kernel.attend_dense(operands, parts, problem, config)

    out, lse = prompt_kernel.by_splits(attend_parts, padded, int(config.splits))
    return out[0, :num_tokens], lse[0, :num_tokens]


def _results(keys: select.DenseKeys, query: jax.Array, *_: Any, **__: Any) -> Any:
    """The types of results."""
    rows = query.shape[:2]
    return jax.ShapeDtypeStruct((*rows, keys.spec.head_size_v), query.dtype), jax.ShapeDtypeStruct(rows, jnp.float32)


def _why_not(query: Query, spec: AttentionSpec, target: Target | None) -> str | None:
    return route(spec, query, target).why_no_prompt_kernel


@functools.lru_cache(maxsize=64)
def _candidates(query: Query) -> select.Candidates:
    return select.Candidates(
        parameters=("key", "query", "value", "q_starts", "q_ends", "kv_starts", "kv_ends"),
        xla=_attend_xla,
        mosaic=_attend_mosaic,
        results=_results,
        why_not_mosaic=functools.partial(_why_not, query),
        differentiable=frozenset({"key", "query", "value"}),
    )
