"""After a warm-up nothing is compiled when calls come, and the cache holds what it held before."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.helpers import assert_same_bytes, kv_tokens, simple_spec

torch = pytest.importorskip("torch")

from support.torch_helpers import from_numpy, random_pages, torch_cache  # noqa: E402

import kvjax_torch  # noqa: E402
from kvjax import AttentionSpec, KVCacheDType, KVCacheTypeError, KVCacheValueError  # noqa: E402
from kvjax_torch import launch  # noqa: E402
from kvjax_torch.arguments.plan import Encoding, ReadTensors, WriteTensors  # noqa: E402
from kvjax_torch.arguments.reads import gather_plan  # noqa: E402
from kvjax_torch.arguments.writes import write_plan  # noqa: E402
from kvjax_torch.calls import gathering, writing  # noqa: E402
from kvjax_torch.eager import host  # noqa: E402

NUM_BLOCKS = 40

INT32, INT64 = torch.int32, torch.int64
PER_HEAD, ONE = torch.full((4,), 0.5), torch.tensor([0.25])


def spec_of(dtype: KVCacheDType, head_size: int, **changes: Any) -> AttentionSpec:
    """A layer like no other test's, so that nothing of it is compiled yet."""
    return simple_spec(dtype, num_kv_heads=4, head_size=head_size, **changes)


CASES = {
    "bfloat16": (spec_of(KVCacheDType.BFLOAT16, 48), 1.0, INT64),
    "HND": (spec_of(KVCacheDType.FP8_E5M2, 176, layout="HND"), 0.25, INT32),
    "scales_of_heads": (spec_of(KVCacheDType.FP8_E4M3, 144), PER_HEAD, INT64),
    "diffkv": (spec_of(KVCacheDType.FP8_E4M3, 48, head_size_v=32), ONE, INT32),
    "nvfp4": (spec_of(KVCacheDType.NVFP4, 208), 0.5, INT64),
    "swizzled": (spec_of(KVCacheDType.NVFP4, 192, v_scale_layout="swizzled"), ONE, INT32),
}


def rows_of(spec: AttentionSpec, num_tokens: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Slices of a fused projection."""
    key, value = (from_numpy(x).to(torch.bfloat16).flatten(1) for x in kv_tokens(spec, num_tokens))
    fused = torch.cat([key, key, value], dim=1).to(device)
    _, key, value = fused.split([key.shape[1], key.shape[1], value.shape[1]], dim=1)
    return key.unflatten(1, (spec.num_kv_heads, -1)), value.unflatten(1, (spec.num_kv_heads, -1))


def num_compiled() -> tuple[int, ...]:
    return launch.num_compilations(), host.encode_chunk._cache_size(), host.decode_chunk._cache_size()


@pytest.mark.parametrize("case", CASES)
def test_what_is_warm_is_not_compiled_again(case: str, device: str):
    spec, scale, index_dtype = CASES[case]
    scale = scale.to(device) if isinstance(scale, torch.Tensor) else scale
    pages = random_pages(spec, NUM_BLOCKS)
    cache = torch_cache(pages, spec, form="padded_pages", device=device)
    slots = torch.randperm(NUM_BLOCKS * spec.block_size).to(device, index_dtype)
    stored_as = spec.dtype.value, scale, scale
    options = {"v_scale_layout": spec.v_scale_layout.value, "unique_slots": case == "diffkv"}
    before = num_compiled()
    kvjax_torch.warm_up(
        *rows_of(spec, 2, device), cache.key, cache.value, slots, *stored_as, **options, dtype=torch.float32
    )
    assert_same_bytes(cache.pages(), pages)
    warm = num_compiled()
    assert (warm != before) == (device == "cuda" or spec.dtype.is_quantized)  # torch moves the others on the host
    for num_tokens in (1, 7, 33, 300):
        taken = slots[:num_tokens]
        kvjax_torch.reshape_and_cache_flash(
            *rows_of(spec, num_tokens, device), cache.key, cache.value, taken, *stored_as, **options
        )
        table = torch.arange(num_tokens // 8 + 1).to(device, index_dtype).expand(2, -1)
        lengths = torch.tensor([num_tokens, 3]).to(device, index_dtype)
        read = {"v_scale_layout": spec.v_scale_layout.value, "dtype": torch.float32}
        kvjax_torch.gather_kv(cache.key, cache.value, table, lengths, *stored_as, **read)
    assert num_compiled() == warm
    assert not np.array_equal(cache.pages(), pages)


def test_what_no_operation_takes_is_refused():
    spec, *_ = CASES["nvfp4"]
    cache = torch_cache(random_pages(spec, 2), spec)
    slots, rows = torch.arange(3), rows_of(spec, 3, "cpu")
    with pytest.raises(KVCacheValueError, match="key: got 1 tokens, expected at least 2"):
        kvjax_torch.warm_up(*(x[:1] for x in rows), cache.key, cache.value, slots, "nvfp4", 1.0, 1.0)
    with pytest.raises(KVCacheTypeError, match=r"slot_mapping: got dtype torch\.float32"):
        kvjax_torch.warm_up(*rows, cache.key, cache.value, slots.float(), "nvfp4", 1.0, 1.0)
    with pytest.raises(KVCacheTypeError, match=r"dtype: got torch\.int8"):
        kvjax_torch.warm_up(*rows, cache.key, cache.value, slots, "nvfp4", 1.0, 1.0, dtype=torch.int8)


def test_calls_that_differ_in_nothing_that_a_kernel_depends_on_share_one():
    spec, *_ = CASES["nvfp4"]
    cache, one = torch_cache(random_pages(spec, 2), spec), torch.ones(())
    halves = cache.key, cache.value
    key, value = rows_of(spec, 6, "cpu")
    apart = [
        x.transpose(0, 1).contiguous().transpose(0, 1) for x in (key, value)
    ]  # copied, and then as packed rows are
    packed = [x.contiguous() for x in (key, value)]

    def write_kernel(rows: list[torch.Tensor], slots: torch.Tensor, unique_slots: bool = False) -> object:
        tensors = WriteTensors(*rows, *halves, slots, one, one)
        return writing.write_call(write_plan(tensors, Encoding("nvfp4")), tensors, unique_slots).kernel

    def gather_kernel(table: torch.Tensor, lengths: torch.Tensor) -> object:
        read = ReadTensors(*halves, table, lengths, one, one)
        return gathering.gather_call(gather_plan(read, Encoding("nvfp4"), None), read).kernel

    slots = torch.arange(6)
    assert write_kernel(packed, slots) is write_kernel(apart, slots) is write_kernel(packed, slots[:3])
    assert write_kernel(packed, slots) is not write_kernel(packed, slots.int())
    assert write_kernel(packed, slots, True) is write_kernel(apart, slots, True) is not write_kernel(packed, slots)
    table, lengths = torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    assert gather_kernel(table, lengths) is gather_kernel(table.long(), lengths.long())
