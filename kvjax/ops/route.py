"""What serves a call of attention: a pure function of the cache's spec, the call and the GPU.

Operations on JAX arrays and `kvjax_torch` ask it; docs/attention.md has its table (`tools/attention_routes.py`). A step
has rows of sequences that decode and rows of prompts. Each kind has one kernel and one fallback over gathered keys and
values; for prompts from torch that is torch's own attention, where it computes what a call asks for. From JAX, XLA
serves the whole call where the decode kernel cannot.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from kvjax.dtypes import KVCacheDType
from kvjax.errors import UnsupportedError
from kvjax.kernels import attention, mla
from kvjax.kernels import prompts as prompt_kernel
from kvjax.kernels.attention import BatchSizes
from kvjax.kernels.codecs import why_not_pages
from kvjax.kernels.target import Target
from kvjax.ops.options import as_bool
from kvjax.spec import AttentionSpec

INT32_MAX = 2**31 - 1
"""The largest count, and the largest index into an array, that kernels take."""


class Query(NamedTuple):
    """The properties of a call that decide what serves it.

    Attributes:
      dtype: float32, float16 or bfloat16.
      has_positive_scale: whether `sm_scale` is positive.
      is_window_static: whether the window is an int or None, not an array on the device.
      has_prompts: whether sequences with more query tokens than `decode_q_len` may come.
      invariant: sizes of a batch-invariant call over a JAX array, whose workspace grows with them; None for others.
      rows: query heads times query tokens of a sequence that decodes, for latents; None where unknown: maybe many.
      query_quantization: whether attention to prompts uses fp8 products.
      has_plain_softmax: whether it has neither soft cap nor sinks and asks for no log-sum-exp, which torch's own
        attention does not compute.
      is_indexable: whether int32 indexes the query, the results, the block table, and the tokens of its rows.
    """

    dtype: np.dtype[Any]
    has_positive_scale: bool = True
    is_window_static: bool = True
    has_prompts: bool = False
    invariant: BatchSizes | None = None
    rows: int | None = None
    query_quantization: bool = False
    has_plain_softmax: bool = False
    is_indexable: bool = True


class Route(NamedTuple):
    """What serves a call; each reason is None where the kernel serves.

    Attributes:
      why_no_decode_kernel: why the decode kernel does not serve sequences that decode.
      why_no_prompt_kernel: why the prompt kernel does not serve prompts.
      why_no_kernels: why kernels cannot serve the whole call on JAX arrays, so that XLA does.
      dense_dtype: dtype of the gathered keys and values of prompts, and of the products of the fallback.
      by_sdpa: whether the fallback of prompts is torch's own attention (from torch).
    """

    why_no_decode_kernel: str | None
    why_no_prompt_kernel: str | None
    why_no_kernels: str | None
    dense_dtype: np.dtype[Any]
    by_sdpa: bool


def route(spec: AttentionSpec, query: Query, target: Target | None) -> Route:
    """Returns what serves a call over caches of a spec; None as `target`, an unknown GPU, means `Target()`."""
    target = target or Target()
    dense = prompt_kernel.fp8.DTYPE if query.query_quantization else prompt_kernel.dense_dtype(spec, query.dtype)
    neither = _why_neither_kernel(spec, query)
    decode = neither or _why_no_decode_kernel(spec, query, target)
    prompt = neither or _why_no_prompt_kernel(spec, query, dense, target)
    prompts = _why_no_prompts(spec, query, prompt) if query.has_prompts else None
    # torch stores the logits of other head sizes.
    sizes = not (spec.head_size % 8 or spec.head_size_v % 8)
    by_sdpa = query.has_plain_softmax and dense.itemsize == 2 and sizes and not spec.is_mla
    return Route(decode, prompt, decode or prompts, dense, by_sdpa)


def why_not_both(specs: Sequence[AttentionSpec], queries: Sequence[Query], target: Target | None) -> str | None:
    """Returns why kernels cannot serve a call over pages and a ring at once, each with its spec and query.

    None if they can: where they serve the calls over either by itself.
    """
    reasons = (route(spec, query, target).why_no_kernels for spec, query in zip(specs, queries, strict=True))
    return next((reason for reason in reasons if reason is not None), None)


def _why_neither_kernel(spec: AttentionSpec, query: Query) -> str | None:
    if not query.is_indexable:
        return (
            "got a query, results, a block table or the tokens of one of its rows that exceed"
            f" {INT32_MAX}, the most that int32 indexes"
        )
    if not query.is_window_static:
        return "sliding_window: got an array, expected an int"
    if query.dtype == np.float32:
        return "query: got float32, expected float16 or bfloat16"
    return None


def _why_no_decode_kernel(spec: AttentionSpec, query: Query, target: Target) -> str | None:
    if spec.is_mla:
        return mla.why_not(spec, query.invariant, target, query.rows)
    return attention.why_not(spec, query.invariant, target)


def _why_no_prompt_kernel(spec: AttentionSpec, query: Query, dense: np.dtype[Any], target: Target) -> str | None:
    if spec.is_mla:
        return "no kernel attends with prompts over latents (MLA)"
    if dense == np.float32:
        return f"query: got {query.dtype}, expected {spec.storage_dtype} as the cache"
    if not query.has_positive_scale:  # it takes the maximum of a row before it multiplies
        return "sm_scale: got 0 or less, expected a positive number"
    if query.query_quantization and (reason := why_no_query_quantization(spec, query)):
        return reason
    return prompt_kernel.why_not((spec.head_size, spec.head_size_v), target)


def check_query_quantization(what: object, spec: AttentionSpec, query: Query) -> bool:
    """Returns the option as a bool.

    Raises:
      KVCacheTypeError: another type.
      UnsupportedError: fp8 products serve no prompts of the query over caches of the spec, on any GPU.
    """
    asked = as_bool("query_quantization", what)
    if asked and (reason := why_no_query_quantization(spec, query)):
        raise UnsupportedError(reason)
    return asked


def why_no_query_quantization(spec: AttentionSpec, query: Query) -> str | None:
    """Why fp8 products serve no prompts over caches of a spec, on any GPU; None if they do."""
    if bad := [part.value for part in spec.dtype.parts if part.byte_format not in _FP8_OPERANDS]:
        expected = ", ".join(dtype.value for dtype in sorted(_FP8_OPERANDS, key=lambda dtype: dtype.value))
        return f"query_quantization: got a cache with keys or values of {bad[0]}, expected {expected}"
    if reason := prompt_kernel.fp8.why_not((spec.head_size, spec.head_size_v), spec.block_size):
        return f"query_quantization: {reason}"
    if query.dtype == np.float32:
        return "query_quantization: got a query of float32, expected float16 or bfloat16"
    if not query.has_positive_scale:
        return "query_quantization: got sm_scale of 0 or less, expected a positive number"
    return None


_FP8_OPERANDS = frozenset({KVCacheDType.FP8_E4M3, KVCacheDType.NVFP4})
"""Byte formats of keys or values that e4m3 holds, or rounds. The format of 4over6 is NVFP4's."""


def _why_no_prompts(spec: AttentionSpec, query: Query, why_no_prompt_kernel: str | None) -> str | None:
    """Why kernels do not serve prompts over a JAX array: none gathers its pages, or bits depend on the batch."""
    if query.query_quantization and why_no_prompt_kernel is not None:
        return f"query_quantization needs the prompt kernel: {why_no_prompt_kernel}"
    if query.invariant is not None and why_no_prompt_kernel is not None:
        return (
            "without the prompt kernel, results of sequences with more than decode_q_len query tokens depend on the"
            " batch; batch_invariant=True needs max_prompts=0"
        )
    return why_no_prompt_kernel if spec.is_mla else why_not_pages(spec)
