"""Every byte that a cache of latents holds, against rows made of each format's description alone."""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from support import mla_reference
from support.hard_numbers import blocks_at_powers_of_two
from support.helpers import (
    INPUT_DTYPES,
    SPECIALS,
    assert_same_bytes,
    assert_same_floats,
    matrix,
    page_bytes,
    poisoned,
    skip_if_copied,
)

import kvjax
from kvjax import (
    MLA_KV_CACHE_DTYPES,
    FullAttentionSpec,
    KVCache,
    KVCacheDType,
    KVCacheError,
    KVCacheTypeError,
    KVCacheValueError,
    MLAAttentionSpec,
    concat_and_cache_mla,
    gather_mla,
    max_tokens,
    quant,
    unify_page_sizes,
)
from kvjax.spec import spec_from_dict, spec_to_dict

GIB = 2**30
NAMES = [dtype.value for dtype in MLA_KV_CACHE_DTYPES]
SIZES = [(512, 64), (256, 64), (256, 32), (512, 0)]
SLOTS = np.array([3, -1, 40, 8, 7, 2**31 - 1, 16, 31, 3], np.int32)
"""Padding, slots past the cache and one that two tokens have; the last of them is written."""

GOLDEN = Path(__file__).parent / "data/mla_golden.npz"


def spec_of(dtype: str, sizes: tuple[int, int] = (512, 64), block_size: int = 8, **fields: Any) -> MLAAttentionSpec:
    return MLAAttentionSpec(block_size, *sizes, dtype=KVCacheDType(dtype), **fields)


def tokens(num_tokens: int, sizes: tuple[int, int], dtype: Any = np.float32, *, specials: bool = True):
    """Latents and rope keys of several magnitudes, special values among them."""
    rng = np.random.default_rng(0)
    made = []
    for size in sizes:
        x = rng.standard_normal((num_tokens, size)) * np.exp2(rng.integers(-8, 9, (num_tokens, 1)))
        if specials and size:
            for i, value in enumerate(SPECIALS):
                x.reshape(-1)[i * 97 % x.size] = value
            x[-1, : size // 2] = 1e-40  # a block of subnormal numbers alone
        with np.errstate(over="ignore", under="ignore"):
            made.append(x.astype(np.float32).astype(dtype))
    return tuple(made)


def written(spec: MLAAttentionSpec, *arrays: Any, seed: int = 0, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """The bytes of a poisoned cache before and after a write, under jit with the cache donated."""
    cache = poisoned(spec, 4, seed)
    before = page_bytes(cache)
    kv_c, k_pe, slots = arrays
    write = jax.jit(concat_and_cache_mla, donate_argnames="cache", static_argnames="unique_slots")
    return before, page_bytes(write(kv_c, k_pe, cache, slots, **options))


@pytest.mark.parametrize("dtype", NAMES)
def test_a_token_takes_the_bytes_of_its_format(dtype: str):
    spec = spec_of(dtype, block_size=64)
    row = mla_reference.ROW_BYTES[dtype]
    assert (spec.bytes_per_token, spec.page_size_bytes, spec.page_padding_bytes) == (row, 64 * row, 0)
    elements = row // spec.array_dtype.itemsize
    assert spec.cache_shape(5) == (5, 64, elements)
    assert spec.cache_shape(5, 3) == (5, 3, 64, elements)
    assert (spec.num_kv_heads, spec.head_size, spec.head_size_v) == (1, 576, 512)
    assert max_tokens([spec] * 61, GIB) == GIB // (61 * 64 * row) * 64
    assert dataclasses.replace(spec, page_size_padded=10**6).cache_shape(5) == (5, 10**6)


@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize("sizes", SIZES)
def test_regions_of_a_token_are_contiguous(dtype: str, sizes: tuple[int, int]):
    """Each region has one descriptor; together they are the row, without gaps."""
    spec = spec_of(dtype, sizes)
    regions = [region for regions in spec.regions for region in regions]
    ends = [region.base + region.row_bytes for region in regions]
    assert [0, *ends[:-1]] == [region.base for region in regions]
    assert ends[-1] == spec.bytes_per_token
    assert {region.token_stride for region in regions} == {spec.bytes_per_token}
    assert len(regions) == (3 if dtype in ("fp8_ds_mla", "nvfp4", "nvfp4_4over6") else 2)


@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize(
    ("sizes", "source", "fields"),
    [
        ((512, 64), "bfloat16", {}),
        ((512, 64), "float32", {"page_size_padded": 30_000}),
        ((256, 32), "float16", {}),
        ((512, 0), "float32", {}),
    ],
    ids=str,
)
def test_a_write_stores_the_formats_bytes_and_no_others(dtype: str, sizes, source: str, fields: dict[str, Any]):
    spec = spec_of(dtype, sizes, **fields)
    kv_c, k_pe = tokens(len(SLOTS), sizes, INPUT_DTYPES[source])
    before, after = written(spec, kv_c, k_pe, SLOTS, scale=0.037)
    expected = mla_reference.write(before, spec, mla_reference.rows(spec, kv_c, k_pe, 0.037), SLOTS)
    assert_same_bytes(after, expected)


@pytest.mark.parametrize("dtype", NAMES)
def test_the_bytes_match_the_committed_bytes(dtype: str):
    """Rows of each format, and the bfloat16 numbers that they were made of."""
    golden = np.load(GOLDEN)
    kv_c, k_pe = (golden[name].view(ml_dtypes.bfloat16) for name in ("kv_c", "k_pe"))
    spec = spec_of(dtype)
    assert_same_bytes(mla_reference.rows(spec, kv_c, k_pe, float(golden["scale"])), golden[dtype])
    slots = np.arange(len(kv_c), dtype=np.int32) + 5
    before, after = written(spec, kv_c, k_pe, slots, scale=golden["scale"])
    assert_same_bytes(after, mla_reference.write(before, spec, golden[dtype], slots))


def test_the_reference_rounds_to_the_nearest_e4m3_number():
    """The search among all numbers that `fp8_ds_mla`'s reference makes, against ml_dtypes."""
    x = np.concatenate([np.arange(-460, 460, 0.53), np.arange(256) * 2.0**-11, [-0.0, 1e-30, -1e-30]])
    clipped = np.clip(x, -448, 448).astype(np.float32).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    np.testing.assert_array_equal(mla_reference.e4m3(x.astype(np.float32)), clipped)


@pytest.mark.parametrize("value", [0.0, 1e-45, -1e-40, 1e-38, 3e-36, 1.0, 448.0, 3e38, np.inf, np.nan])
def test_fp8_ds_mla_stores_blocks_of_any_magnitude(value: float):
    """Zeros, what is below the least scale, subnormal numbers, infinity and NaN."""
    kv_c = np.full((2, 512), 0.5, np.float32)
    kv_c[0, 128:256], kv_c[1, 130] = value, value
    spec = spec_of("fp8_ds_mla")
    k_pe = np.zeros((2, 64), np.float32)
    before, after = written(spec, kv_c, k_pe, np.array([0, 9]))
    assert_same_bytes(after, mla_reference.write(before, spec, mla_reference.rows(spec, kv_c, k_pe, 1.0), [0, 9]))


@pytest.mark.parametrize("source", INPUT_DTYPES)
def test_fp8_ds_mla_has_the_bytes_of_the_format_at_every_power_of_two(source: str):
    """Largest magnitudes below, at and above each 448 * 2^k, and codes beside their midpoints."""
    blocks = blocks_at_powers_of_two(np.dtype(INPUT_DTYPES[source]), range(-18, 120))
    kv_c = np.resize(blocks, (-(-len(blocks) // 4) * 4, 128)).reshape(-1, 512)
    expected = np.stack([mla_reference.fp8_ds_mla(row) for row in kv_c])
    for encode in (jax.jit(quant.encode_fp8_ds_mla), quant.encode_fp8_ds_mla):
        codes, scales = map(np.asarray, encode(kv_c))
        assert_same_bytes(np.concatenate([mla_reference.raw(codes), mla_reference.raw(scales)], axis=1), expected)


@pytest.mark.parametrize(
    ("amax", "scale"),
    [
        *((3.125, 0.0078125), (2.374e-9, 2.0**-13), (3178496.0, 8192.0), (3741319168.0, 8388608.0)),
        *((448 * 2.0**k, 2.0**k) for k in (-13, -1, 0, 1, 16, 100, 119)),
        *((np.nextafter(np.float32(448 * 2.0**k), np.float32(np.inf)), 2.0 ** (k + 1)) for k in (-13, 0, 64, 119)),
        *((np.nextafter(np.float32(448 * 2.0**k), np.float32(0)), 2.0**k) for k in (-13, 0, 64, 119)),
        *((x, 2.0**-13) for x in (0.0, 1e-45, 2.0**-126, 448 * 2.0**-14, 300 * 2.0**-13)),
        *((np.finfo(np.float32).max, 2.0**120), (np.inf, np.inf)),
    ],
)
def test_a_scale_of_fp8_ds_mla_is_a_power_of_two(amax: float, scale: float):
    """The first four as vLLM 0.33.0 stored them on an H200."""
    assert quant.block_scales(jnp.float32(amax))[0] == scale
    kv_c = np.zeros((1, 512), np.float32)
    kv_c[0, 7], kv_c[0, 8], kv_c[0, 133] = -amax, np.nan, amax / 2
    codes, scales = quant.encode_fp8_ds_mla(kv_c)
    assert scales[0, 0] == scale
    assert scales[0, 1] == quant.block_scales(jnp.float32(amax / 2))[0]
    assert np.isnan(float(codes[0, 8]))
    read = float(quant.decode_fp8_ds_mla(codes, scales)[0, 7])
    if amax > 248 * 2.0**120:  # as its code is 256, it reads as -2^128
        assert np.isnan(read) if np.isinf(amax) else np.isneginf(read)
    else:
        assert abs(read + amax) <= max(amax / 16, 2.0**-23)


def test_every_significand_has_the_least_power_of_two_above():
    """In two binades, below the least scale and above it, in integers of 24 bits."""
    significand = np.arange(1 << 23, 1 << 24, dtype=np.int32)
    for exponent, scale in ((-8, 2.0**-13), (3, 2.0**-5)):
        amax = np.ldexp(significand.astype(np.float32), exponent - 23)
        scales, inverse = map(np.asarray, jax.jit(quant.block_scales)(amax))
        exceeds = (significand > 7 << 21) & (exponent > -8)
        np.testing.assert_array_equal(scales, np.where(exceeds, 2 * scale, scale))
        np.testing.assert_array_equal(inverse, np.float32(1) / scales)


@matrix({"dtype": ["bfloat16", "fp8_e4m3", "fp8_ds_mla", "nvfp4"]}, few={"dtype": ["bfloat16", "nvfp4"]})
def test_a_donated_cache_is_written_in_place(dtype: str):
    spec = spec_of(dtype)
    cache = KVCache.allocate(spec, 256, num_layers=3)
    skip_if_copied(cache)
    kv_c, k_pe = tokens(9, (512, 64), ml_dtypes.bfloat16)

    def write(cache: KVCache, kv_c: Any, k_pe: Any, slots: Any) -> KVCache:
        def layer(cache: KVCache, index: jax.Array) -> tuple[KVCache, None]:
            return concat_and_cache_mla(kv_c, k_pe, cache, slots, layer=index), None

        return jax.lax.scan(layer, cache, jnp.arange(3))[0]

    compiled = jax.jit(write, donate_argnums=0).lower(cache, kv_c, k_pe, SLOTS).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == cache.kv.nbytes
    assert memory.temp_size_in_bytes < 2**18 < cache.kv.nbytes / 4
    pointer = cache.kv.unsafe_buffer_pointer()
    result = compiled(cache, kv_c, k_pe, SLOTS)
    assert result.kv.unsafe_buffer_pointer() == pointer
    stored = mla_reference.rows(spec, kv_c, k_pe, 1.0)
    pages = np.asarray(result.kv).reshape(256, 3, -1).view(np.uint8)
    for index in range(3):
        expected = mla_reference.write(np.zeros((256, spec.page_size_bytes), np.uint8), spec, stored, SLOTS)
        assert_same_bytes(np.ascontiguousarray(pages[:, index]), expected)


@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize(
    ("sizes", "fields"), [((512, 64), {}), ((256, 32), {"page_size_padded": 30_000}), ((512, 0), {})]
)
def test_a_gather_decodes_ranges_of_tokens(dtype: str, sizes, fields: dict[str, Any]):
    """Of sequences from any token on; what is not read is poison, and a block that is none reads as zeros."""
    spec, scale = spec_of(dtype, sizes, **fields), 0.037
    kv_c, k_pe = tokens(32, sizes)
    cache = concat_and_cache_mla(kv_c, k_pe, poisoned(spec, 7), np.arange(16, 48), scale=scale)
    table = np.array([[3, 2, 99], [-5, 5, 4], [2, -1, 3], [0, 0, 0]], np.int32)
    starts, lens = np.array([1, 11, 0, 0], np.int32), np.array([12, 13, 24, 0])
    cu_seq_lens = np.array([0, 12, 25, 49, 49], np.int32)
    got = jax.jit(gather_mla, static_argnames=("num_tokens", "dtype"))(
        cache, table, cu_seq_lens, num_tokens=52, seq_starts=starts, scale=scale, dtype=np.float32
    )
    latents = mla_reference.decoded(spec, mla_reference.rows(spec, kv_c, k_pe, scale), scale)
    for part, stored in zip(got, latents, strict=True):
        expected = np.zeros((52, stored.shape[1]), np.float32)
        for seq in range(4):
            position = starts[seq] + np.arange(lens[seq])
            block = table[seq, position // 8]
            row = block * 8 + position % 8 - 16
            dense = np.where((block >= 0)[:, None], stored[np.clip(row, 0, 31)], 0)
            expected[cu_seq_lens[seq] : cu_seq_lens[seq + 1]] = dense
        assert_same_floats(np.asarray(part), expected)


@pytest.mark.parametrize("dtype", ["float16", "fp8_ds_mla"])
def test_gathered_numbers_have_the_models_dtype_unless_asked(dtype: str):
    spec = spec_of(dtype, model_dtype="float16")
    cache = KVCache.allocate(spec, 1)
    args = np.zeros((1, 1), np.int32), np.array([0, 4])
    assert [x.dtype for x in gather_mla(cache, *args, num_tokens=4)] == [np.float16] * 2
    assert [x.dtype for x in gather_mla(cache, *args, num_tokens=4, dtype="bfloat16")] == [ml_dtypes.bfloat16] * 2
    assert [x.shape for x in gather_mla(cache, args[0][:0], args[1][:1], num_tokens=3)] == [(3, 512), (3, 64)]


def test_layers_of_several_dtypes_share_a_pool():
    """Skipped layers in bfloat16 beside NVFP4: as many more tokens in a page as fit."""
    specs = unify_page_sizes([spec_of("bfloat16", block_size=16), spec_of("nvfp4", block_size=16)])
    assert [(spec.block_size, spec.page_size_bytes, spec.page_padding_bytes) for spec in specs] == [
        (16, 18432, 0),
        (32, 18432, 18432 - 32 * 416),
    ]
    pool = np.random.default_rng(0).integers(0, 256, (3, 18432), np.uint8)
    kv_c, k_pe = tokens(5, (512, 64), ml_dtypes.bfloat16, specials=False)
    for spec in specs:
        slots = np.arange(5) + spec.block_size
        cache = concat_and_cache_mla(kv_c, k_pe, KVCache(jnp.array(pool), spec), slots, scale=0.01)
        expected = mla_reference.write(pool, spec, mla_reference.rows(spec, kv_c, k_pe, 0.01), slots)
        assert_same_bytes(np.asarray(cache.kv), expected)


def test_a_cache_carries_the_scale_of_its_latents():
    """As `load_kv_scales` and `calibrate` return it: of both scales, that of keys."""
    spec, (kv_c, k_pe) = spec_of("fp8_e4m3"), tokens(3, (512, 64), specials=False)
    scales = kvjax.KVScales(np.float32([0.25, 0.5]), np.float32([1, 1]))
    cache = KVCache.allocate(spec, 2, num_layers=2, **scales._asdict())
    assert cache.v_scale is None
    for layer, scale in enumerate((0.25, 0.5)):
        cache = concat_and_cache_mla(kv_c, k_pe, cache, np.arange(3), layer=layer)
        pages = np.asarray(cache.kv)[:, layer].reshape(2, -1)
        expected = mla_reference.rows(spec, kv_c, k_pe, scale)
        assert_same_bytes(pages[0, : 3 * 576].reshape(3, 576), expected)
        read = gather_mla(cache, np.array([[0]]), np.array([0, 3]), num_tokens=3, layer=layer, dtype=np.float32)
        for got, stored in zip(read, mla_reference.decoded(spec, expected, scale), strict=True):
            assert_same_floats(np.asarray(got), stored)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: spec_of("fp8_e5m2"),
            KVCacheValueError,
            "MLAAttentionSpec.dtype: got 'fp8_e5m2'",
        ),
        (
            lambda: spec_of("fp8_k_nvfp4_v"),
            KVCacheValueError,
            "MLAAttentionSpec.dtype: got 'fp8_k_nvfp4_v'",
        ),
        (lambda: spec_of("auto"), KVCacheValueError, "KVCacheDType.AUTO has no storage"),
        (
            lambda: MLAAttentionSpec(8, 512, 64, dtype="int4"),
            KVCacheValueError,
            "MLAAttentionSpec.dtype: got 'int4', expected one of float32, float16, bfloat16, fp8_e4m3, nvfp4,"
            " nvfp4_4over6, fp8_ds_mla, float, half, fp8",
        ),
        (
            lambda: spec_of("fp8_ds_mla", (192, 64)),
            KVCacheValueError,
            "kv_lora_rank: got 192, expected a multiple of 1",
        ),
        (lambda: spec_of("nvfp4", (520, 64)), KVCacheValueError, "kv_lora_rank: got 520, expected a multiple of 16"),
        (
            lambda: spec_of("bfloat16", (0, 64)),
            KVCacheValueError,
            "MLAAttentionSpec.kv_lora_rank: got 0",
        ),
        (
            lambda: spec_of("bfloat16", (512, -1)),
            KVCacheValueError,
            "MLAAttentionSpec.qk_rope_head_dim: got -1",
        ),
        (
            lambda: spec_of("bfloat16", (512, 6.4)),
            KVCacheTypeError,
            "MLAAttentionSpec.qk_rope_head_dim: got 6.4",
        ),
        (
            lambda: FullAttentionSpec(16, 1, 576, 512, dtype="fp8_ds_mla"),
            KVCacheValueError,
            "FullAttentionSpec.dtype: got 'fp8_ds_mla', expected one of float32, ",
        ),
        (
            lambda: FullAttentionSpec(16, 1, 512, 64, dtype="bfloat16", is_latent=True),
            KVCacheTypeError,
            "FullAttentionSpec.is_latent: got True, but specs have no such field any more: the cache of a layer of",
        ),
    ],
)
def test_invalid_specs_are_refused(make: Any, error: type[KVCacheError], message: str):
    with pytest.raises(error) as raised:
        make()
    assert str(raised.value).startswith(message)


def test_specs_are_pickled_and_exported():
    spec = spec_of("nvfp4", sliding_window=128)
    assert pickle.loads(pickle.dumps(spec)) == spec == spec_from_dict(spec_to_dict(spec))
    assert len({spec, dataclasses.replace(spec, block_size=8), spec_of("nvfp4"), spec_of("nvfp4", (512, 32))}) == 3


@pytest.mark.parametrize("is_latent", [False, True])
def test_specs_stored_with_is_latent_are_read_or_refused(is_latent: bool):
    """Of keys and values they are read; of latents, which were other bytes, they are refused."""
    spec = FullAttentionSpec(16, 1, 512, 64, dtype="bfloat16")
    old, fields = FullAttentionSpec(16, 1, 512, 64, dtype="bfloat16"), spec_to_dict(spec) | {"is_latent": is_latent}
    old.__dict__["is_latent"] = is_latent
    for restore in (lambda: pickle.loads(pickle.dumps(old)), lambda: spec_from_dict(fields)):
        if is_latent:
            with pytest.raises(KVCacheError, match=r"is_latent: got True, .* MLAAttentionSpec\(block_size, "):
                restore()
        else:
            assert restore() == spec
            assert not hasattr(restore(), "is_latent")
