"""The limits and options of attention, which calls on JAX arrays and on torch tensors share.

`kvjax_torch` uses this module and `route` besides public names, and takes from here the checks that it shares with
kvjax (`kind_of`, `as_bool`, `as_int`, `parse_dtype_of`). Nothing here knows of arrays.
"""

from __future__ import annotations

import math
import numbers
from typing import Any, NamedTuple

import numpy as np

from kvjax.dtypes import parse_dtype_of as parse_dtype_of
from kvjax.errors import KVCacheTypeError, KVCacheValueError, for_torch, shown, type_name
from kvjax.errors import kind_of as kind_of
from kvjax.spec import as_bool as as_bool
from kvjax.spec import as_int as as_int

MAX_WINDOW = 2**31 - 1
"""The longest sequence: a larger window restricts nothing."""

WINDOW_BLOCK_SIZE = 16
"""Tokens of a block of an exact window; pages may have any other number."""

MAX_DECODE_Q_LEN = 8
"""The most query tokens of a sequence that the decode kernel serves by default, as in a step that verifies drafts."""

DENSE_BYTES = 1 << 30
"""Limit on the dense keys and values of the prompts processed at once; those of a single one may exceed it."""

SPLIT_BYTES = 64 << 20
"""Limit on the results of all splits that the tokens of prompts are divided into."""


class Given(NamedTuple):
    """Options of attention as callers give them, unchecked but for the factor on logits.

    Attributes:
      sm_scale: factor on the logits.
      sliding_window: tokens that a row sees: an int, an array, or None for all; or `OF_LAYER` of `ops.arguments`.
      logits_soft_cap: bound on the magnitude of logits; None for no bound.
      return_lse: whether to return the log-sum-exp too.
      batch_invariant: whether the bits of a sequence's results must not depend on the rest of the batch.
      implementation: of `ops.select`; None to choose.
      query_quantization: whether attention to prompts uses fp8 products.
    """

    sm_scale: float
    sliding_window: Any
    logits_soft_cap: float | None
    return_lse: bool
    batch_invariant: bool
    implementation: str | None
    query_quantization: bool = False


class Limits(NamedTuple):
    """Upper limits of a `ragged_paged_attention` call, as callers give them; None for the default.

    Attributes:
      max_q_len: query tokens of a sequence.
      max_prompts: sequences with more query tokens than `decode_q_len`.
      decode_q_len: query tokens of a sequence that is served as one that decodes.
    """

    max_q_len: int | None = None
    max_prompts: int | None = None
    decode_q_len: int | None = None


class Buckets(NamedTuple):
    """The sizes that a program is compiled for; names as in `Limits`."""

    max_q_len: int
    max_prompts: int
    decode_q_len: int


def as_limits(max_q_len: object, max_prompts: object, decode_q_len: object) -> Limits:
    """Returns limits as ints of at most 2**31 - 1, which no number of tokens or sequences exceeds.

    Raises:
      KVCacheValueError, KVCacheTypeError: another type of value, or too small a number.
    """

    def as_limit(what: str, value: object, least: int) -> int | None:
        return None if value is None else min(as_int(what, value, least=least), 2**31 - 1)

    return Limits(
        as_limit("max_q_len", max_q_len, 1),
        as_limit("max_prompts", max_prompts, 0),
        as_limit("decode_q_len", decode_q_len, 0),
    )


def buckets(limits: Limits, num_tokens: int, num_seqs: int, *, batch_invariant: bool = False) -> Buckets:
    """Returns the sizes for a call with these numbers of query tokens and sequences, each as small as the others allow.

    With `batch_invariant`, given numbers are not limited by the number of tokens, which depends on the batch.
    """
    longest = num_tokens if limits.max_q_len is None else limits.max_q_len
    longest = longest if batch_invariant else min(longest, num_tokens)
    if limits.decode_q_len is None:
        decode = max(longest, 1) if longest <= MAX_DECODE_Q_LEN else 1
    else:
        decode = min(limits.decode_q_len, max(longest, 1))
    prompts = min(num_seqs, num_seqs if batch_invariant else num_tokens // (decode + 1)) if longest > decode else 0
    if limits.max_prompts is not None:
        prompts = min(limits.max_prompts, prompts)
    return Buckets(longest, prompts, decode)


def as_float(what: str, number: Any) -> float | None:
    """Returns a number as float, None for None; raises if it is not finite in float32."""
    if number is None:
        return None
    if isinstance(number, bool) or not isinstance(number, numbers.Real):
        raise KVCacheTypeError(f"{what}: got {shown(number)} of type {type_name(number)}, expected a float or None")
    try:
        value = float(number)
    except OverflowError:
        value = math.inf
    if not abs(value) <= float(np.finfo(np.float32).max):
        raise KVCacheValueError(f"{what}: got {shown(number)}, expected a number that is finite in float32")
    return value


def as_sm_scale(sm_scale: Any, head_size: int) -> float:
    """Returns the factor on logits, default `1 / sqrt(head_size)`."""
    scale = as_float("sm_scale", sm_scale)
    return 1.0 / math.sqrt(head_size) if scale is None else scale


def as_soft_cap(cap: Any) -> float | None:
    """Returns a soft cap as float; None for none."""
    number = as_float("logits_soft_cap", cap)
    if number is not None and number < np.finfo(np.float32).tiny:
        raise KVCacheValueError(f"logits_soft_cap: got {cap}, expected a positive number or None")
    return number


def as_window(window: Any, expected: str = "an int or None") -> int | None:
    """Returns a window as int; None for none, and for one that no sequence exceeds.

    Raises:
      KVCacheValueError, KVCacheTypeError: no positive int. `expected` says in the message what callers may pass.
    """
    if window is None:
        return None
    if isinstance(window, bool) or not isinstance(window, numbers.Integral):
        raise KVCacheTypeError(
            f"sliding_window: got {shown(window)} of type {type_name(window)}, expected {expected}{for_torch(window)}"
        )
    if window <= 0:
        raise KVCacheValueError(f"sliding_window: got {window}, expected a positive {expected.removeprefix('an ')}")
    return int(window) if window <= MAX_WINDOW else None


def restricting(window: int | None, num_tokens: int) -> int | None:
    """Returns a window, or None for one that holds all of `num_tokens`."""
    return None if window is not None and window >= num_tokens else window


def window_blocks(size: object, max_q_len: object) -> int:
    """Returns the blocks of an exact window's row: they hold what the first of `max_q_len` new tokens attends to, and
    the others besides.

    One block may hold both the oldest and the newest of these tokens; a query's window decides which it sees.
    """
    tokens = as_int("size", size, least=1, most=MAX_WINDOW) + as_int("max_q_len", max_q_len, least=1, most=MAX_WINDOW)
    return -(-(tokens - 1) // WINDOW_BLOCK_SIZE)


class WindowSpans(NamedTuple):
    """How a sliding window is divided beside an exact window.

    Attributes:
      near: tokens that a query sees in the ring, at most.
      far: tokens that it sees in the pages, at most; None for all.
      reaches_pages: whether it sees any there.
    """

    near: Any
    far: Any
    reaches_pages: Any

    @classmethod
    def of(cls, window: int | None, size: int) -> WindowSpans:
        """Those of a sliding window, None for all tokens, and an exact one of `size` tokens."""
        return cls(size, None, True) if window is None else cls(min(window, size), window - size, window > size)


def num_reached_blocks(window: int | None, max_q_len: int, max_blocks: int, block_size: int) -> int:
    """Returns how many blocks the rows of a sequence reach, at any offset in the first one."""
    if window is None:
        return max_blocks
    return min(-(-(window - 1 + max_q_len + block_size - 1) // block_size), max_blocks)


def prompts_at_once(prompt_bytes: int, num_prompts: int) -> int:
    """Returns how many prompts, each with `prompt_bytes` of dense keys and values, are processed at once."""
    return max(1, min(num_prompts, DENSE_BYTES // max(1, prompt_bytes)))


def most_splits(num_rows: int, num_heads: int, head_size_v: int) -> int:
    """Returns how many splits the tokens of prompts may be divided into, each with float32 results for all rows."""
    return SPLIT_BYTES // max(1, 4 * num_rows * num_heads * (head_size_v + 1))
