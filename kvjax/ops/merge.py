"""`merge_attention_states`: joins attention over parts of a sequence."""

from __future__ import annotations

import functools
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
    """Merges attention over disjoint sets of tokens, given the output and the log-sum-exp of each.

    `lse = log(sum(exp(lses)))` and `out = sum(exp(lses - lse) * outs)`, in float32, as in FlashInfer and in section 2.2
    of https://arxiv.org/abs/2501.01005, but with natural logarithms. No token may be in two sets, and a sink may be
    included in one set only.

    A part whose log-sum-exp is -inf has no weight, whatever its `outs` hold; if all are -inf, the result is 0 with
    -inf.

    Args:
      outs: `[..., num_heads, head_size_v]` for each part, float32, float16 or bfloat16: a sequence of arrays of one
        shape and dtype, or one stacked array, `[num_parts, ..., num_heads, head_size_v]`.
      lses: float32 `[..., num_heads]` for each part, likewise: what `paged_attention` returns with `return_lse`.

    Returns:
      `(out, lse)`: `[..., num_heads, head_size_v]` of the dtype of `outs`, and float32 `[..., num_heads]`.

    Raises:
      KVCacheValueError, KVCacheTypeError: no part, or an invalid shape or dtype; the message names the argument.
    """
    parts, logs = _parts("outs", outs, INPUT_DTYPES), _parts("lses", lses, (np.dtype(np.float32),))
    shape, count = parts[0].shape, len(parts)
    if len(shape) < 2:
        got = np.shape(outs) if isinstance(outs, (jax.Array, np.ndarray)) else (count, *shape)
        raise KVCacheValueError(
            f"outs: got shape {got}, expected [num_parts, ..., num_heads, head_size_v] or a sequence of"
            " [..., num_heads, head_size_v]"
        )
    if (len(logs), *logs[0].shape) != (count, *shape[:-1]):
        raise KVCacheValueError(
            f"lses: got shape {(len(logs), *logs[0].shape)}, expected {(count, *shape[:-1])}, that of outs without its"
            " last dimension"
        )
    out, lse = merge_parts(parts, logs)
    return out.astype(parts[0].dtype), lse


def merge_parts(outs: Sequence[jax.Array], lses: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Returns what `merge_attention_states` does, in float32, for checked parts, whose dtypes may differ.

    Written as a fold over the parts, so that the compiler makes one pass without stacking them.
    """
    largest = functools.reduce(jnp.maximum, lses)
    shift = jnp.where(largest == -jnp.inf, 0.0, largest)  # inf - inf would be NaN
    weights = [jnp.exp(lse - shift) for lse in lses]
    total = functools.reduce(jnp.add, weights)
    # Divided first: the mean of large outputs is finite, their sum may not be.
    shares = [weight / jnp.where(total == 0.0, 1.0, total) for weight in weights]
    # A part without weight may be NaN.
    weighted = [
        jnp.where(lse[..., None] == -jnp.inf, 0.0, share[..., None] * out.astype(jnp.float32))
        for out, lse, share in zip(outs, lses, shares, strict=True)
    ]
    return functools.reduce(jnp.add, weighted), shift + jnp.log(total)


def _parts(what: str, parts: Any, dtypes: Sequence[np.dtype[Any]]) -> list[jax.Array]:
    """Returns the parts as a list, also from a stacked array."""
    is_one = isinstance(parts, (jax.Array, np.ndarray))
    if not is_one and not isinstance(parts, (list, tuple)):
        raise KVCacheTypeError(f"{what}: got {kind_of(parts)}, expected an array or a sequence of arrays")
    if not ((parts.shape or (1,))[0] if is_one else len(parts)):
        raise KVCacheValueError(f"{what}: got no parts, expected at least one")
    if is_one:
        check_array(what, parts, [("", None)] * parts.ndim, dtypes)
        if not parts.ndim:
            raise KVCacheValueError(f"{what}: got shape (), expected [num_parts, ...]")
        return [jnp.asarray(parts)[i] for i in range(parts.shape[0])]
    for i, part in enumerate(parts):
        check_array(f"{what}[{i}]", part, [("", None)] * np.ndim(part), dtypes)
        if (part.shape, part.dtype) != (parts[0].shape, parts[0].dtype):
            raise KVCacheValueError(
                f"{what}[{i}]: got {part.dtype}{list(part.shape)}, expected {parts[0].dtype}{list(parts[0].shape)} as"
                f" {what}[0]"
            )
    return [jnp.asarray(part) for part in parts]
