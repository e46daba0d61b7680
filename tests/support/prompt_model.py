"""What `attend` and `join` of `kvjax.kernels.prompts` compute, in XLA."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax import KVCache, quant
from kvjax.kernels.prompts import LEFT, ROWS, TOKENS, LotPages, PromptKind, PromptProblem, PromptRows
from kvjax.kernels.prompts.tiled import FIELDS
from kvjax.ops.gather import gather_xla, token_mask


class NearTokens(NamedTuple):
    """Tokens that rows see beside others, each row the last ones up to its own; all before an end are present."""

    keys: jax.Array
    values: jax.Array
    positions: jax.Array
    ends: jax.Array


class Operands(NamedTuple):
    """What the prompt kernel attends to, dense.

    Attributes:
      query: `[num_rows, num_heads, head_size]`, at least `ROWS` rows.
      keys: `[num_prompts, num_tokens, num_kv_heads, head_size]`; whole tiles.
      values: `[.., head_size_v]`; finite also where no row looks.
      q_starts: int32 `[num_prompts]`, the first row of each.
      q_lens: int32 `[num_prompts]`, its rows.
      positions: int32 `[num_prompts]`, the index of its first row's token among the dense ones; may be negative.
      bias: float32 `[num_prompts, num_tokens]`, 0, or -inf for tokens that are absent.
      first_absent: int32 `[num_prompts]`: all tokens before this one are present.
      ends: int32 `[num_prompts]`: no token from this one on is present.
      sm_scale: factor of the logits.
      k_scale: float32 `[num_kv_heads]`, another.
      v_scale: float32 `[num_kv_heads]`, the factor of the results.
      sinks: float32 `[num_heads]`, -inf for none; or None.
      near: near tokens, or None.
    """

    query: jax.Array
    keys: jax.Array
    values: jax.Array
    q_starts: jax.Array
    q_lens: jax.Array
    positions: jax.Array
    bias: jax.Array
    first_absent: jax.Array
    ends: jax.Array
    sm_scale: float
    k_scale: jax.Array
    v_scale: jax.Array
    sinks: jax.Array | None
    near: NearTokens | None = None


def attend_dense(
    operands: Operands, results: tuple[jax.Array, jax.Array], problem: PromptProblem
) -> tuple[jax.Array, jax.Array]:
    """Returns `results`, `[num_rows, num_heads, head_size_v]` and the log-sum-exp, with those of prompts."""
    query, keys, values, q_starts, q_lens, positions, bias, first_absent, ends, sm_scale, *scales, sinks, near = (
        operands
    )
    num_rows, num_heads, head_size = query.shape
    num_kv_heads = keys.shape[2]
    assert num_rows >= ROWS
    factor, v_factor = (x.reshape(num_kv_heads, 1) for x in scales)
    row, token = jnp.arange(num_rows), jnp.arange(keys.shape[1])
    most = float(jnp.finfo(keys.dtype).max)
    is_fp8 = keys.dtype.itemsize == 1
    if is_fp8:
        query, power = fp8_rows(query)
        grouped = query.astype(jnp.float32) * power
    else:
        grouped = jnp.clip(query, -most, most).astype(keys.dtype).astype(jnp.float32)
    grouped = grouped.reshape(num_rows, num_kv_heads, -1, head_size)
    sink = jnp.full(num_heads, -jnp.inf) if sinks is None else sinks
    sink = sink.reshape(num_kv_heads, -1, 1)

    def near_logits(own: Any, row: Any) -> jax.Array:
        key, _, position, end = own
        token = jnp.arange(len(key))
        logits = jnp.einsum("rhgd,thd->hgrt", grouped, key.astype(jnp.float32))
        logits *= sm_scale
        if problem.logits_soft_cap is not None:
            logits = problem.logits_soft_cap * jnp.tanh(logits / problem.logits_soft_cap)
        from_row = (position + row)[:, None] - token[None, :]
        sees = (from_row >= 0) & (from_row < problem.near) & (token < end)
        return jnp.where(sees, logits, -jnp.inf)

    def attend_one(results: Any, prompt: Any) -> Any:
        (key, value, start, count, position, absent, first_absent, end), of_near = prompt
        own_positions = position + row - start
        is_own = (row >= start) & (row < start + count)
        sees = token[None, :] <= own_positions[:, None]
        if problem.window is not None:
            sees &= token[None, :] > own_positions[:, None] - problem.window
        # Before the first absent token the kernel does not look for any.
        sees &= ((token < first_absent) | (absent == 0)) & (token < end)
        logits = jnp.einsum("rhgd,thd->hgrt", grouped, key.astype(jnp.float32)) * sm_scale * factor[..., None, None]
        if problem.logits_soft_cap is not None:
            logits = problem.logits_soft_cap * jnp.tanh(logits / problem.logits_soft_cap)
        logits = jnp.where(sees, logits, -jnp.inf)
        num_far = len(key)
        if of_near is not None:
            logits = jnp.concatenate([logits, near_logits(of_near, row - start)], axis=-1)
        # As in the kernel, weights are rounded before they are divided by their sum.
        largest = jnp.max(logits, axis=-1)
        shift = jnp.where(largest == -jnp.inf, 0.0, largest)
        if is_fp8:  # relative to a power of two, and their sum is that of the rounded ones
            shift = jnp.ceil(shift * np.log2(np.e)) / np.log2(np.e)
        weights = jnp.exp(logits - shift[..., None])
        if is_fp8:
            weights = quant.cast(weights * 256, np.dtype(key.dtype)).astype(jnp.float32) / 256
            value = value.astype(jnp.float32)
        else:
            value, weights_sum = value, weights.sum(axis=-1)
            weights = weights.astype(key.dtype)
        product = functools.partial(jnp.einsum, "hgrt,thd->rhgd", preferred_element_type=jnp.float32)
        attended = product(weights[..., :num_far], value) * v_factor[..., None]
        if of_near is not None:
            attended += product(weights[..., num_far:], of_near[1])
        own_lse = jnp.logaddexp(shift + jnp.log(weights.sum(axis=-1) if is_fp8 else weights_sum), sink)
        share = jnp.where(own_lse == -jnp.inf, 0.0, jnp.exp(shift - own_lse))
        attended = (attended * jnp.moveaxis(share, -1, 0)[..., None]).reshape(num_rows, num_heads, -1)
        own_lse = jnp.moveaxis(own_lse, -1, 0).reshape(num_rows, num_heads)
        whole, whole_lse = results
        return (
            jnp.where(is_own[:, None, None], attended.astype(whole.dtype), whole),
            jnp.where(is_own[:, None], own_lse, whole_lse),
        ), None

    far = keys, values, q_starts, q_lens, positions, bias, first_absent, ends
    whole, _ = lax.scan(attend_one, results, (far, near))
    return whole


def attend(
    kind: PromptKind,
    rows: PromptRows,
    pages: LotPages,
    near: None,
    results: tuple[jax.Array, jax.Array],
    splits: int = 1,
) -> tuple[jax.Array, jax.Array]:
    """In 16 bits. All tokens belong to the first split; the others are not touched."""
    assert not kind.query_quantization
    assert near is None
    assert kind.near is None
    assert pages.num_tokens % TOKENS == 0
    assert kind.is_divided == (splits > 1)
    spec, (header, found) = kind.spec, (pages.found[0], pages.found[1:])
    fields = dict(zip(FIELDS, found.T, strict=True))
    cache = KVCache(pages.kv, spec)
    # What is not in `max_blocks` is in no block.
    columns = fields["first_block"][:, None] + jnp.arange(-(-pages.num_tokens // spec.block_size))
    table = pages.table[fields["seq"]]
    table = jnp.take_along_axis(table, columns, axis=1, mode="fill", fill_value=-1)
    one = jnp.float32(1.0)
    there = token_mask(table, fields["end"], cache.num_blocks, spec.block_size)[:, : pages.num_tokens]
    dense = gather_xla(cache, table, fields["end"], None, one, one, dtype=kind.dtype)
    keys, values = (x[:, : pages.num_tokens] for x in dense)
    is_seen = jnp.arange(pages.num_tokens) >= fields["first_seen"][:, None]
    is_prompt = jnp.arange(len(found)) < header[0] - 1
    takes_scale = [part.takes_scale for part in spec.dtype.parts]
    scales = (
        jnp.broadcast_to(scale.reshape(-1) if takes else one, spec.num_kv_heads)
        for scale, takes in zip((rows.k_scale, rows.v_scale), takes_scale, strict=True)
    )
    operands = Operands(
        rows.query,
        keys,
        jnp.where(is_seen[..., None, None], values, jnp.zeros((), values.dtype)),
        fields["q_start"],
        jnp.where(is_prompt, fields["q_len"], 0),
        fields["position"],
        jnp.where(there, 0.0, -jnp.inf),
        fields["first_absent"],
        fields["end"],
        kind.sm_scale,
        *scales,
        rows.sinks if kind.has_sinks else None,
    )
    problem = PromptProblem(0, kind.window, kind.logits_soft_cap)
    out, lse = results
    assert out.shape[0] == splits
    whole = attend_dense(operands, (out[0], lse[0]), problem)
    # The kernel takes items from the number on that its queue begins with.
    is_new = header[1] == 0
    return tuple(x.at[0].set(jnp.where(is_new, new, jnp.nan)) for x, new in zip(results, whole, strict=True))


def fp8_rows(query: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Rows divided by a power of two, which the largest element then has as its binary exponent 7; and the power."""
    query = query.astype(jnp.float32)
    _, exponent = jnp.frexp(jnp.max(jnp.abs(query), axis=-1, keepdims=True))
    power = jnp.ldexp(jnp.float32(1.0), jnp.maximum(exponent - 8, -126))
    return quant.cast(query / power, np.dtype(jnp.float8_e4m3fn)), power


def join(source: jax.Array, packed: Any, sinks: Any, result: jax.ShapeDtypeStruct) -> tuple[jax.Array, jax.Array]:
    """Results that another kernel stores are NaN."""
    num_rows, num_heads, _ = result.shape
    out = jnp.where((source == LEFT)[:, None, None], jnp.nan, jnp.zeros(result.shape, result.dtype))
    lse = jnp.broadcast_to(-jnp.inf if sinks is None else sinks, (num_rows, num_heads))
    if packed is None:
        return out, lse
    is_packed, index = source >= 0, jnp.maximum(source, 0)
    return jnp.where(is_packed[:, None, None], packed[0][index], out), jnp.where(
        is_packed[:, None], packed[1][index], lse
    )
