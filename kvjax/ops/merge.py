"""Joining attention over parts of a sequence: `merge_attention_states`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from kvjax.errors import KVCacheTypeError, KVCacheValueError, kind_of
from kvjax.ops.arguments import INPUT_DTYPES, check_array


def merge_attention_states(
    outs: ArrayLike | Sequence[ArrayLike], lses: ArrayLike | Sequence[ArrayLike]
) -> tuple[jax.Array, jax.Array]:
    """Attention over several sets of tokens together, from the attention over each and its log-sum-exp.

    `lse = log(sum(exp(lses)))` and `out = sum(exp(lses - lse) * outs)`, in float32, as in FlashInfer and in section 2.2
    of https://arxiv.org/abs/2501.01005, but with natural logarithms. No token may be in two sets, and of a sink only
    one set may know.

    A part whose log-sum-exp is -inf counts for nothing, whatever is in its `outs`; where all are -inf the result is 0
    with -inf.

    Args:
      outs: of each part `[..., num_heads, head_size_v]`, float32, float16 or bfloat16: a sequence of arrays of one
        shape and dtype, or one array of them, `[num_parts, ..., num_heads, head_size_v]`.
      lses: of each part float32 `[..., num_heads]`, likewise: what `paged_attention` returns with `return_lse`.

    Returns:
      `(out, lse)`: `[..., num_heads, head_size_v]` of the dtype of `outs`, and float32 `[..., num_heads]`.

    Raises:
      KVCacheValueError, KVCacheTypeError: no part, or shapes or dtypes that do not fit, naming the argument.
    """
    outs, lses = _stacked("outs", outs, INPUT_DTYPES), _stacked("lses", lses, (np.dtype(np.float32),))
    if outs.ndim < 3:
        raise KVCacheValueError(
            f"outs: got shape {outs.shape}, expected [num_parts, ..., num_heads, head_size_v] or a sequence of"
            " [..., num_heads, head_size_v]"
        )
    if lses.shape != outs.shape[:-1]:
        raise KVCacheValueError(
            f"lses: got shape {lses.shape}, expected {outs.shape[:-1]}, that of outs less its last dimension"
        )
    largest = jnp.max(lses, axis=0)
    shift = jnp.where(largest == -jnp.inf, 0.0, largest)  # an infinity less itself would be NaN
    weights = jnp.exp(lses - shift[None])
    total = jnp.sum(weights, axis=0)
    # What has no weight may be NaN.
    weighted = jnp.where(lses[..., None] == -jnp.inf, 0.0, weights[..., None] * outs.astype(jnp.float32))
    out = jnp.sum(weighted, axis=0) / jnp.where(total == 0.0, 1.0, total)[..., None]
    return out.astype(outs.dtype), shift + jnp.log(total)


def _stacked(what: str, parts: Any, dtypes: Sequence[np.dtype[Any]]) -> jax.Array:
    """The parts as one array, along a new first dimension unless they are one already."""
    is_one = isinstance(parts, (jax.Array, np.ndarray))
    if not is_one and not isinstance(parts, (list, tuple)):
        raise KVCacheTypeError(f"{what}: got {kind_of(parts)}, expected an array or a sequence of arrays")
    if not ((parts.shape or (1,))[0] if is_one else len(parts)):
        raise KVCacheValueError(f"{what}: got no parts, expected at least one")
    if is_one:
        check_array(what, parts, [("", None)] * parts.ndim, dtypes)
        return jnp.asarray(parts)
    for i, part in enumerate(parts):
        check_array(f"{what}[{i}]", part, [("", None)] * np.ndim(part), dtypes)
        if (part.shape, part.dtype) != (parts[0].shape, parts[0].dtype):
            raise KVCacheValueError(
                f"{what}[{i}]: got {part.dtype}{list(part.shape)}, expected {parts[0].dtype}{list(parts[0].shape)} as"
                f" {what}[0]"
            )
    return jnp.stack(parts)
