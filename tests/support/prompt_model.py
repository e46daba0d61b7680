"""What `attend` and `join` of `kvjax.kernels.prompts` compute, in XLA."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax import quant
from kvjax.kernels.prompts import ALIGNMENT, LEFT, ROWS, Operands, PromptConfig, PromptProblem
from kvjax.kernels.warpgroups import in_order_of_products


def attend(operands: Operands, out: Any, lse: Any, claims: Any, problem: PromptProblem, config: PromptConfig) -> None:
    """All tokens belong to the first split; the others are not touched."""
    query, keys, values, q_starts, q_lens, positions, bias, first_absent, ends, (factor, v_factor, sinks), near = (
        operands
    )
    num_tokens, num_heads, head_size = query.shape
    num_kv_heads = keys.shape[2]
    assert num_tokens >= ROWS
    assert keys.shape[1] % ALIGNMENT == 0
    assert keys.shape[1] >= config.tokens
    row, token = jnp.arange(num_tokens), jnp.arange(keys.shape[1])
    most = float(jnp.finfo(keys.dtype).max)
    is_fp8 = keys.dtype.itemsize == 1
    if is_fp8:
        values = jnp.zeros_like(values).at[..., in_order_of_products(jnp.arange(values.shape[3]))].set(values)
        values = jnp.moveaxis(values, 3, 1)
        query, power = fp8_rows(query)
        grouped = query.astype(jnp.float32) * power
    else:
        grouped = jnp.clip(query, -most, most).astype(keys.dtype).astype(jnp.float32)
    grouped = grouped.reshape(num_tokens, num_kv_heads, -1, head_size)
    sink = sinks.reshape(num_kv_heads, -1, 1)

    def near_logits(own: Any, row: Any) -> jax.Array:
        key, _, position, end = own
        token = jnp.arange(len(key))
        logits = jnp.einsum("rhgd,thd->hgrt", grouped, key.astype(jnp.float32))
        logits *= near.factor
        if problem.logits_soft_cap is not None:
            logits = problem.logits_soft_cap * jnp.tanh(logits / problem.logits_soft_cap)
        from_row = (position + row)[:, None] - token[None, :]
        sees = (from_row >= 0) & (from_row < problem.near) & (token < end)
        return jnp.where(sees, logits, -jnp.inf)

    def attend_one(results: Any, prompt: Any) -> Any:
        (key, value, start, count, position, absent, first_absent, end), of_near = prompt
        own_positions = position + row - start
        is_own = (row >= start) & (row < start + jnp.minimum(count, problem.max_q_len))
        sees = token[None, :] <= own_positions[:, None]
        if problem.window is not None:
            sees &= token[None, :] > own_positions[:, None] - problem.window
        # Before the first absent token the kernel does not look for any.
        sees &= ((token < first_absent) | (absent == 0)) & (token < end)
        logits = jnp.einsum("rhgd,thd->hgrt", grouped, key.astype(jnp.float32)) * factor.reshape(num_kv_heads, -1, 1, 1)
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
        attended = product(weights[..., :num_far], value) * v_factor.reshape(num_kv_heads, -1, 1)
        if of_near is not None:
            attended += product(weights[..., num_far:], of_near[1])
        own_lse = jnp.logaddexp(shift + jnp.log(weights.sum(axis=-1) if is_fp8 else weights_sum), sink)
        share = jnp.where(own_lse == -jnp.inf, 0.0, jnp.exp(shift - own_lse))
        attended = (attended * jnp.moveaxis(share, -1, 0)[..., None]).reshape(num_tokens, num_heads, -1)
        own_lse = jnp.moveaxis(own_lse, -1, 0).reshape(num_tokens, num_heads)
        whole, whole_lse = results
        return (
            jnp.where(is_own[:, None, None], attended.astype(whole.dtype), whole),
            jnp.where(is_own[:, None], own_lse, whole_lse),
        ), None

    far = keys, values, q_starts, q_lens, positions, bias, first_absent, ends
    prompts = far, None if near is None else near[:4]
    (whole, whole_lse), _ = lax.scan(attend_one, (out[0], lse[0]), prompts)
    # The kernel takes items from the number on that its queue begins with.
    is_new = claims[0] == 0
    out[0], lse[0] = jnp.where(is_new, whole, jnp.nan), jnp.where(is_new, whole_lse, jnp.nan)


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
