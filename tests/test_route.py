"""`kvjax.ops.route` over its whole domain, against rules written as the documentation states them."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest

from kvjax import STORED_KV_CACHE_DTYPES, AttentionSpec, KVCacheDType
from kvjax.kernels.attention import BatchSizes
from kvjax.kernels.prompts import dense_dtype
from kvjax.kernels.target import Target
from kvjax.ops.route import Query, route

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "tools"))
import attention_routes  # noqa: E402

FLOAT32, FLOAT16, BFLOAT16 = (KVCacheDType(name).info.storage_dtype for name in ("float32", "float16", "bfloat16"))
TARGETS = [Target(compute_capability=capability) for capability in ((9, 0), (10, 0))]
FEW, MANY = BatchSizes(4, 1, 4, 8), BatchSizes(1 << 22, 1, 4, 1 << 10)
UNQUANTIZED = {"float32": FLOAT32, "float16": FLOAT16, "bfloat16": BFLOAT16}


def spec_of(dtype: KVCacheDType, head_size: int) -> AttentionSpec:
    return AttentionSpec(16, 2, head_size, dtype=dtype)


@pytest.mark.parametrize("target", [*TARGETS, None], ids=str)
@pytest.mark.parametrize("dtype", STORED_KV_CACHE_DTYPES)
def test_every_call_is_served_as_the_documentation_says(dtype: KVCacheDType, target: Target | None):
    is_hopper = target is None or target.compute_capability == (9, 0)
    for head_size, query_dtype, is_positive, is_static, has_prompts, sizes in itertools.product(
        (64, 256, 272), (FLOAT32, FLOAT16, BFLOAT16), (True, False), (True, False), (True, False), (None, FEW, MANY)
    ):
        query = Query(query_dtype, is_positive, is_static, has_prompts, sizes)
        found = route(spec_of(dtype, head_size), query, target)
        is_for_kernels = is_static and query_dtype != FLOAT32
        decodes = is_for_kernels and sizes is not MANY
        holds = UNQUANTIZED.get(dtype.value, query_dtype) == query_dtype
        has_prompt_kernel = is_for_kernels and holds and is_positive and is_hopper and head_size <= 256
        assert (found.why_no_decode_kernel is None) == decodes, query
        assert (found.why_no_prompt_kernel is None) == has_prompt_kernel, query
        serves_prompts = not has_prompts or sizes is None or has_prompt_kernel
        assert (found.why_no_kernels is None) == (decodes and serves_prompts), query


@pytest.mark.parametrize("head_size", [8, 24, 72])
def test_head_sizes_that_are_not_multiples_of_16_have_no_kernel(head_size):
    found = route(spec_of(KVCacheDType.BFLOAT16, head_size), Query(BFLOAT16), None)
    assert f"got head_size={head_size}" in str(found.why_no_decode_kernel)
    assert f"got {head_size}" in str(found.why_no_prompt_kernel)


@pytest.mark.parametrize("dtype", STORED_KV_CACHE_DTYPES)
def test_dense_keys_and_values_are_of_16_bits_where_these_hold_what_is_stored(dtype: KVCacheDType):
    spec = spec_of(dtype, 64)
    for query_dtype in (FLOAT16, BFLOAT16):
        if dtype.value in UNQUANTIZED:
            expected = query_dtype if UNQUANTIZED[dtype.value] == query_dtype else FLOAT32
        else:
            has_row_scales = any(part.is_per_token_head for part in dtype.parts)
            expected = query_dtype if has_row_scales else FLOAT16
        assert dense_dtype(spec, query_dtype) == expected
    assert dense_dtype(spec, FLOAT32) == FLOAT32


@pytest.mark.parametrize("has_prompts", [True, False])
def test_pages_that_the_gather_cannot_read_are_refused_to_prompts_alone(has_prompts):
    spec = AttentionSpec(16, 2, 64, dtype=KVCacheDType.BFLOAT16, page_size_padded=2 * 16 * 2 * 64 * 2 + 1)
    found = route(spec, Query(BFLOAT16, has_prompts=has_prompts), None)
    assert ("page_size_bytes: got 8193" in str(found.why_no_kernels)) == has_prompts


@pytest.mark.parametrize(
    ("query", "reason"),
    [
        (Query(FLOAT16, is_window_static=False), "sliding_window: got an array, expected an int"),
        (Query(FLOAT32), "query: got float32, expected float16 or bfloat16"),
        (Query(FLOAT16, has_positive_scale=False), "sm_scale: got 0 or less, expected a positive number"),
        (Query(FLOAT16), "query: got float16, expected bfloat16 as the cache"),
    ],
)
def test_the_reason_says_what_was_given_and_what_the_kernel_takes(query: Query, reason: str):
    dtype = KVCacheDType.BFLOAT16 if "bfloat16 as" in reason else KVCacheDType.NVFP4
    assert route(spec_of(dtype, 64), query, None).why_no_prompt_kernel == reason


def test_the_table_in_the_documentation_is_that_of_the_code():
    _, rest = attention_routes.PAGE.read_text().split(attention_routes.BEGIN)
    assert rest.split(attention_routes.END)[0] == attention_routes.table()
