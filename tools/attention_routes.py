"""Rewrites the table in docs/attention.md of what serves a step: what `kvjax.ops.route.route` says of its examples.

JAX_PLATFORMS=cpu .venv/bin/python tools/attention_routes.py

Needs no GPU. tests/test_route.py checks that the table is that of the code.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvjax import AttentionSpec, KVCacheDType
from kvjax.kernels.target import Target
from kvjax.ops.route import Query, route

PAGE = Path(__file__).parents[1] / "docs/attention.md"
BEGIN, END = "<!-- routes: begin -->\n", "<!-- routes: end -->\n"
HOPPER, OTHER = Target(compute_capability=(9, 0)), Target(compute_capability=(10, 0))
FLOAT16, FLOAT32 = np.dtype(np.float16), np.dtype(np.float32)


class Example(NamedTuple):
    """Calls with one property; the rest is that of a call which both kernels serve.

    Attributes:
      calls: what they have in common.
      spec: of an example's cache.
      query: the example.
      is_for_torch: whether torch has such calls.
    """

    calls: str
    spec: dict[str, Any]
    query: Query
    is_for_torch: bool = True


EXAMPLES = (
    Example("all but the following", {}, Query(FLOAT16)),
    Example("`sm_scale` of 0 or less", {}, Query(FLOAT16, has_positive_scale=False)),
    Example("head sizes above 256", {"head_size": 512}, Query(FLOAT16)),
    Example(
        "an unquantized cache of another dtype than the query's",
        {"dtype": KVCacheDType.BFLOAT16},
        Query(FLOAT16),
    ),
    Example(
        "head sizes that are not multiples of 16", {"head_size": 72, "dtype": KVCacheDType.FP8_E4M3}, Query(FLOAT16)
    ),
    Example("a scale for each token and head", {"dtype": KVCacheDType.FP8_PER_TOKEN_HEAD}, Query(FLOAT16)),
    Example(
        "`query_quantization`, where products in fp8 serve the cache",
        {},
        Query(FLOAT16, query_quantization=True),
    ),
    Example("float32 queries", {}, Query(FLOAT32)),
    Example("a window that is an array (JAX)", {}, Query(FLOAT16, is_window_static=False), is_for_torch=False),
)
"""In the order of the table's rows."""


def main() -> None:
    """Rewrites the table in docs/attention.md."""
    before, rest = PAGE.read_text().split(BEGIN)
    _, after = rest.split(END)
    PAGE.write_text(f"{before}{BEGIN}{table()}{END}{after}")


def table() -> str:
    """A row for each example: what serves its sequences that decode, and its prompts."""
    rows = [
        "| calls | sequences that decode | prompts on Hopper | prompts on other GPUs |",
        "| --- | --- | --- | --- |",
    ]
    for example in EXAMPLES:
        cells = [_cell(example, HOPPER, False), _cell(example, HOPPER, True), _cell(example, OTHER, True)]
        rows.append(f"| {' | '.join([example.calls, *cells])} |")
    return "".join(f"{row}\n" for row in rows)


def _cell(example: Example, target: Target, are_prompts: bool) -> str:
    """What serves sequences that decode, or prompts, from JAX and from torch."""
    fields = {"block_size": 16, "num_kv_heads": 8, "head_size": 128, "dtype": KVCacheDType.NVFP4, **example.spec}
    found = route(AttentionSpec(**fields), example.query._replace(has_prompts=are_prompts), target)
    if are_prompts:
        bits = "float32" if found.dense_dtype == FLOAT32 else "16 bits"
        fallback = "refused" if example.query.query_quantization else f"fallback in {bits}"
        served = fallback if found.why_no_prompt_kernel else "prompt kernel"
    else:
        served = "fallback in float32" if found.why_no_decode_kernel else "decode kernel"
    if found.why_no_kernels is None:
        return served
    return f"JAX: XLA; torch: {served}" if example.is_for_torch else "XLA"


if __name__ == "__main__":
    main()
