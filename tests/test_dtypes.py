"""The one list of dtypes: what each is called, how it is stored, and what an unknown name is told."""

from __future__ import annotations

import dataclasses
import enum

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax.dtypes import (
    ACCEPTED_KV_CACHE_DTYPES,
    STORED_KV_CACHE_DTYPES,
    KVCacheDType,
    KVQuantMode,
    check_exact_in,
    parse_kv_cache_dtype,
    parse_model_dtype,
)
from kvjax.errors import KVCacheTypeError, KVCacheValueError, UnsupportedError

NAMES = {
    "auto": KVCacheDType.AUTO,
    "float32": KVCacheDType.FLOAT32,
    "float": KVCacheDType.FLOAT32,
    "float16": KVCacheDType.FLOAT16,
    "half": KVCacheDType.FLOAT16,
    "bfloat16": KVCacheDType.BFLOAT16,
    "fp8": KVCacheDType.FP8_E4M3,
    "fp8_e4m3": KVCacheDType.FP8_E4M3,
    "fp8_e5m2": KVCacheDType.FP8_E5M2,
    "fp8_per_token_head": KVCacheDType.FP8_PER_TOKEN_HEAD,
    "int8_per_token_head": KVCacheDType.INT8_PER_TOKEN_HEAD,
    "nvfp4": KVCacheDType.NVFP4,
    "nvfp4_4over6": KVCacheDType.NVFP4_4OVER6,
    "fp8_k_nvfp4_v": KVCacheDType.FP8_K_NVFP4_V,
    "fp8_k_nvfp4_4over6_v": KVCacheDType.FP8_K_NVFP4_4OVER6_V,
    "int8_k_nvfp4_v": KVCacheDType.INT8_K_NVFP4_V,
    "int8_k_nvfp4_4over6_v": KVCacheDType.INT8_K_NVFP4_4OVER6_V,
    "fp8_ds_mla": KVCacheDType.FP8_DS_MLA,
}
MIXED = {
    KVCacheDType.FP8_K_NVFP4_V: (KVCacheDType.FP8_E4M3, KVCacheDType.NVFP4),
    KVCacheDType.FP8_K_NVFP4_4OVER6_V: (KVCacheDType.FP8_E4M3, KVCacheDType.NVFP4_4OVER6),
    KVCacheDType.INT8_K_NVFP4_V: (KVCacheDType.INT8_PER_TOKEN_HEAD, KVCacheDType.NVFP4),
    KVCacheDType.INT8_K_NVFP4_4OVER6_V: (KVCacheDType.INT8_PER_TOKEN_HEAD, KVCacheDType.NVFP4_4OVER6),
}
WITH_A_ROW = [dtype for dtype in STORED_KV_CACHE_DTYPES if dtype not in MIXED]


@pytest.mark.parametrize(("name", "dtype"), NAMES.items())
def test_every_name_is_parsed(name: str, dtype: KVCacheDType):
    assert parse_kv_cache_dtype(name) is dtype


def test_no_other_name_is_accepted():
    assert set(ACCEPTED_KV_CACHE_DTYPES) == set(NAMES)


@pytest.mark.parametrize("dtype", KVCacheDType)
def test_canonical_names_and_members_parse_to_the_member(dtype: KVCacheDType):
    assert parse_kv_cache_dtype(dtype.value) is dtype
    assert parse_kv_cache_dtype(dtype) is dtype


def misspelled(name: str) -> st.SearchStrategy[str]:
    return st.sampled_from([name.upper(), name.capitalize(), f" {name}", f"{name}\n", f"torch.{name}", name[:-1]])


@settings(derandomize=True, max_examples=80)
@given((st.text() | st.sampled_from(sorted(NAMES)).flatmap(misspelled)).filter(lambda name: name not in NAMES))
def test_any_other_string_is_refused_by_name(name: str):
    with pytest.raises(KVCacheValueError) as raised:
        parse_kv_cache_dtype(name)
    message = str(raised.value)
    assert repr(name) in message
    assert ", ".join(ACCEPTED_KV_CACHE_DTYPES) in message


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        *[("nvpf4", "nvfp4"), ("FP8", "fp8"), ("fp8_e4m3fn", "fp8_e4m3"), ("bf16", "bfloat16"), (" half", "half")],
        *[("float8", "fp8"), ("float8_e4m3fn", "fp8_e4m3"), ("torch.float8_e5m2", "fp8_e5m2"), ("float4", "nvfp4")],
    ],
)
def test_a_typo_is_told_the_nearest_name(typo: str, meant: str):
    with pytest.raises(KVCacheValueError, match=rf"did you mean '{meant}'\?"):
        parse_kv_cache_dtype(typo)


def test_a_string_that_is_near_nothing_gets_no_suggestion():
    with pytest.raises(KVCacheValueError) as raised:
        parse_kv_cache_dtype("zzz")
    assert "did you mean" not in str(raised.value)


def test_errors_derive_from_those_of_python():
    assert issubclass(KVCacheValueError, ValueError)
    assert issubclass(KVCacheTypeError, TypeError)


@pytest.mark.parametrize("name", [None, 8, b"fp8", ["fp8"], np.float32], ids=repr)
def test_what_is_no_string_is_refused_by_type(name: object):
    with pytest.raises(KVCacheTypeError, match=r"kv_cache_dtype: got .*expected a string or KVCacheDType"):
        parse_kv_cache_dtype(name)  # type: ignore[arg-type]


def test_each_dtype_has_its_storage_and_largest_value():
    table = {dtype: (dtype.info.storage_dtype, dtype.info.quant_mode, dtype.info.max) for dtype in WITH_A_ROW}
    assert table == {
        KVCacheDType.FLOAT32: (np.float32, KVQuantMode.NONE, float(np.finfo(np.float32).max)),
        KVCacheDType.FLOAT16: (np.float16, KVQuantMode.NONE, 65504.0),
        KVCacheDType.BFLOAT16: (ml_dtypes.bfloat16, KVQuantMode.NONE, float(ml_dtypes.finfo(jnp.bfloat16).max)),
        KVCacheDType.FP8_E4M3: (ml_dtypes.float8_e4m3fn, KVQuantMode.FP8_PER_TENSOR, 448.0),
        KVCacheDType.FP8_E5M2: (ml_dtypes.float8_e5m2, KVQuantMode.FP8_PER_TENSOR, 57344.0),
        KVCacheDType.FP8_PER_TOKEN_HEAD: (ml_dtypes.float8_e4m3fn, KVQuantMode.FP8_PER_TOKEN_HEAD, 448.0),
        KVCacheDType.INT8_PER_TOKEN_HEAD: (np.int8, KVQuantMode.INT8_PER_TOKEN_HEAD, 127.0),
        KVCacheDType.NVFP4: (np.uint8, KVQuantMode.NVFP4, 6.0 * 448.0),
        KVCacheDType.NVFP4_4OVER6: (np.uint8, KVQuantMode.NVFP4, 6.0 * 448.0),
    }


@pytest.mark.parametrize(
    ("exact_in", "other", "got"),
    [
        (None, None, "None and None"),
        (None, KVCacheDType.FP8_E4M3, "float16 and None"),
        (None, KVCacheDType.INT8_PER_TOKEN_HEAD, "None and None"),
        (jnp.bfloat16, KVCacheDType.NVFP4, "float16 and bfloat16"),
        (jnp.bfloat16, KVCacheDType.INT8_PER_TOKEN_HEAD, "None and bfloat16"),
    ],
)
def test_scales_of_blocks_that_may_exceed_the_dtype_of_a_query_are_refused(exact_in, other, got):
    """MXFP4 has scales up to 2**127; `other` stores the keys."""
    dtype = None if exact_in is None else np.dtype(exact_in)
    mxfp4 = dataclasses.replace(KVCacheDType.NVFP4.info, block=32, layer_scale=None, exact_in=dtype)
    with pytest.raises(UnsupportedError, match=f"exact_in of 'mxfp4': got {got} for keys and values"):
        check_exact_in("mxfp4", [other.info if other else mxfp4, mxfp4])


def test_scales_of_blocks_are_accepted_where_16_bits_hold_them():
    mxfp4 = dataclasses.replace(KVCacheDType.NVFP4.info, block=32, layer_scale=None, exact_in=np.dtype(jnp.bfloat16))
    check_exact_in("mxfp4", [mxfp4, mxfp4])
    for keys in (KVCacheDType.FP8_E4M3, KVCacheDType.INT8_PER_TOKEN_HEAD, KVCacheDType.NVFP4):
        check_exact_in("keys_of_another", [keys.info, KVCacheDType.NVFP4.info])


def test_only_dtypes_that_are_quantized_by_tensor_take_scales():
    take_scales = {
        *(KVCacheDType.FP8_E4M3, KVCacheDType.FP8_E5M2),
        *(KVCacheDType.NVFP4, KVCacheDType.NVFP4_4OVER6),
        *MIXED,
    }
    per_token_head = {KVCacheDType.FP8_PER_TOKEN_HEAD, KVCacheDType.INT8_PER_TOKEN_HEAD}
    assert {dtype for dtype in STORED_KV_CACHE_DTYPES if dtype.takes_scale} == take_scales
    assert {dtype for dtype in STORED_KV_CACHE_DTYPES if dtype.is_quantized} == take_scales | per_token_head
    assert {dtype for dtype in STORED_KV_CACHE_DTYPES if dtype.is_per_token_head} == per_token_head


def test_nvfp4_4over6_has_the_bytes_of_nvfp4_for_all_who_read():
    writes_4over6 = {
        *(KVCacheDType.NVFP4_4OVER6, KVCacheDType.FP8_K_NVFP4_4OVER6_V, KVCacheDType.INT8_K_NVFP4_4OVER6_V),
    }
    others = [dtype for dtype in STORED_KV_CACHE_DTYPES if dtype not in writes_4over6]
    assert [dtype.byte_format for dtype in others] == others
    assert KVCacheDType.NVFP4_4OVER6.byte_format is KVCacheDType.NVFP4
    assert KVCacheDType.FP8_K_NVFP4_4OVER6_V.byte_format is KVCacheDType.FP8_K_NVFP4_V
    assert KVCacheDType.INT8_K_NVFP4_4OVER6_V.byte_format is KVCacheDType.INT8_K_NVFP4_V
    assert KVCacheDType.NVFP4_4OVER6.info == KVCacheDType.NVFP4.info


@pytest.mark.parametrize(
    ("dtype", "row"),
    [
        (KVCacheDType.FLOAT32, (512, 0)),
        (KVCacheDType.FLOAT16, (256, 0)),
        (KVCacheDType.BFLOAT16, (256, 0)),
        (KVCacheDType.FP8_E4M3, (128, 0)),
        (KVCacheDType.FP8_E5M2, (128, 0)),
        (KVCacheDType.FP8_PER_TOKEN_HEAD, (128, 4)),
        (KVCacheDType.INT8_PER_TOKEN_HEAD, (128, 4)),
        (KVCacheDType.NVFP4, (64, 8)),
        (KVCacheDType.NVFP4_4OVER6, (64, 8)),
    ],
)
def test_row_bytes_returns_the_bytes_of_one_head_of_a_token(dtype: KVCacheDType, row: tuple[int, int]):
    assert dtype.info.row_bytes(128) == row


@pytest.mark.parametrize(("dtype", "parts"), MIXED.items())
def test_keys_and_values_may_have_dtypes_of_their_own(dtype, parts):
    assert dtype.parts == parts
    assert all(dtype.parts == (dtype, dtype) for dtype in WITH_A_ROW)
    with pytest.raises(KVCacheValueError, match=f"{dtype.name} stores keys and values in different dtypes: ask its p"):
        _ = dtype.info


@pytest.mark.parametrize("dtype", WITH_A_ROW)
def test_the_head_size_of_rows_is_that_of_their_bytes(dtype: KVCacheDType):
    sizes = {head_size: sum(dtype.info.row_bytes(head_size)) for head_size in (16, 48, 128)}
    assert {head_size: dtype.info.head_size_of(row_bytes) for head_size, row_bytes in sizes.items()} == dict(
        zip(sizes, sizes, strict=True)
    )
    if dtype.info.block:
        assert dtype.info.head_size_of(1) is None


def test_auto_has_no_storage():
    assert KVCacheDType.AUTO not in STORED_KV_CACHE_DTYPES
    with pytest.raises(KVCacheValueError, match="resolve_kv_cache_dtype"):
        _ = KVCacheDType.AUTO.info


def test_quant_modes_have_the_numbers_that_vllm_gives_them():
    assert {mode.name: mode.value for mode in KVQuantMode} == {
        "NONE": 0,
        "FP8_PER_TENSOR": 1,
        "INT8_PER_TOKEN_HEAD": 2,
        "FP8_PER_TOKEN_HEAD": 3,
        "NVFP4": 4,
    }


class TorchDType(enum.Enum):
    """Prints as torch's dtypes do, which numpy cannot read."""

    BFLOAT16 = "torch.bfloat16"
    FLOAT8 = "torch.float8_e4m3fn"

    def __str__(self) -> str:
        return self.value


@pytest.mark.parametrize(
    ("dtype", "parsed"),
    [
        ("float32", KVCacheDType.FLOAT32),
        ("float", KVCacheDType.FLOAT32),
        ("float16", KVCacheDType.FLOAT16),
        ("half", KVCacheDType.FLOAT16),
        ("bfloat16", KVCacheDType.BFLOAT16),
        ("torch.bfloat16", KVCacheDType.BFLOAT16),
        ("mixed_bfloat16", KVCacheDType.BFLOAT16),
        ("mixed_float16", KVCacheDType.FLOAT16),
        ("torch.float16", KVCacheDType.FLOAT16),
        ("torch.half", KVCacheDType.FLOAT16),
        (KVCacheDType.BFLOAT16, KVCacheDType.BFLOAT16),
        (np.float32, KVCacheDType.FLOAT32),
        (np.dtype(np.float16), KVCacheDType.FLOAT16),
        (ml_dtypes.bfloat16, KVCacheDType.BFLOAT16),
        (jnp.bfloat16, KVCacheDType.BFLOAT16),
        (jnp.dtype(jnp.float32), KVCacheDType.FLOAT32),
        (TorchDType.BFLOAT16, KVCacheDType.BFLOAT16),
    ],
    ids=repr,
)
def test_a_model_dtype_is_parsed(dtype: object, parsed: KVCacheDType):
    assert parse_model_dtype(dtype) is parsed


@pytest.mark.parametrize(
    "dtype",
    [
        *("auto", "fp8", "nvfp4", "float64", "torch.float8_e4m3fn", "torch.torch.half", "", "int8"),
        *(KVCacheDType.AUTO, KVCacheDType.FP8_E4M3, KVCacheDType.NVFP4),
        *(None, float, np.float64, np.uint8, ml_dtypes.float8_e4m3fn, TorchDType.FLOAT8, 16, [], {}, ...),
    ],
    ids=repr,
)
def test_a_model_dtype_that_no_cache_holds_is_refused_by_name(dtype: object):
    with pytest.raises(KVCacheValueError) as raised:
        parse_model_dtype(dtype)
    assert f"model dtype: got {dtype!r}, expected one of float32, float16, bfloat16" in str(raised.value)
