"""What the contract's formulas give, in plain numpy with ml_dtypes: the tests' own account of every byte in a cache.

It shares nothing with kvjax but a spec's fields and the dtypes' names. Slow and explicit on purpose: one token, one
head, one byte range at a time.
"""

from __future__ import annotations

import fractions
import itertools
from typing import Any

import ml_dtypes
import numpy as np

from kvjax import AttentionSpec, CacheLayout, KVCacheDType, VScaleLayout

KEYS, VALUES = 0, 1

POSITIONS = 50
"""That `cos_sin` has rows for."""

E4M3, E5M2, E2M1 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float4_e2m1fn
ELEMENT = {
    KVCacheDType.FLOAT32: np.dtype(np.float32),
    KVCacheDType.FLOAT16: np.dtype(np.float16),
    KVCacheDType.BFLOAT16: np.dtype(ml_dtypes.bfloat16),
    KVCacheDType.FP8_E4M3: np.dtype(E4M3),
    KVCacheDType.FP8_E5M2: np.dtype(E5M2),
    KVCacheDType.FP8_PER_TOKEN_HEAD: np.dtype(E4M3),
    KVCacheDType.INT8_PER_TOKEN_HEAD: np.dtype(np.int8),
}
PARTS = {
    KVCacheDType.FP8_K_NVFP4_V: (KVCacheDType.FP8_E4M3, KVCacheDType.NVFP4),
    KVCacheDType.FP8_K_NVFP4_4OVER6_V: (KVCacheDType.FP8_E4M3, KVCacheDType.NVFP4_4OVER6),
    KVCacheDType.INT8_K_NVFP4_V: (KVCacheDType.INT8_PER_TOKEN_HEAD, KVCacheDType.NVFP4),
    KVCacheDType.INT8_K_NVFP4_4OVER6_V: (KVCacheDType.INT8_PER_TOKEN_HEAD, KVCacheDType.NVFP4_4OVER6),
}
"""Of a dtype whose keys and values differ, the dtypes of these."""

FP8 = (KVCacheDType.FP8_E4M3, KVCacheDType.FP8_E5M2)
PER_TOKEN_HEAD = (KVCacheDType.FP8_PER_TOKEN_HEAD, KVCacheDType.INT8_PER_TOKEN_HEAD)
NVFP4 = (KVCacheDType.NVFP4, KVCacheDType.NVFP4_4OVER6)
NAN_BITS = {"float32": 0x7FFFFFFF, "float16": 0x7FFF, "bfloat16": 0x7FFF, "float8_e4m3fn": 0x7F, "float8_e5m2": 0x7F}
E2M1_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def cast(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Nearest even; infinite past the largest finite value; one NaN. The same dtype keeps its bits."""
    dtype = np.dtype(dtype)
    if x.dtype == dtype:
        return x
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        bits = x.astype(np.float32).astype(dtype).view(f"u{dtype.itemsize}")
    bits[np.isnan(x)] = NAN_BITS[dtype.name]
    return bits.view(dtype)


def cos_sin(rot_dim: int, dtype: Any = np.float32) -> np.ndarray:
    """A table `[POSITIONS, rot_dim]` of cosines and sines as vLLM makes it."""
    angles = np.arange(POSITIONS)[:, None] / 10000.0 ** (np.arange(0, rot_dim, 2) / rot_dim)
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(dtype)


def rotate(x: np.ndarray, table: np.ndarray, positions: np.ndarray, is_neox: bool) -> np.ndarray:
    """Rotary position embedding in float32, products rounded, then rounded to the dtype of `x`."""
    rot_dim = table.shape[1]
    half = rot_dim // 2
    rows = table[np.clip(positions, 0, len(table) - 1)].astype(np.float32)[:, None]
    cos, sin = rows[..., :half], rows[..., half:]
    pairs = (slice(half), slice(half, rot_dim)) if is_neox else (slice(0, rot_dim, 2), slice(1, rot_dim, 2))
    first, second, cos, sin = map(normal, (*(x[..., each].astype(np.float32) for each in pairs), cos, sin))
    with np.errstate(all="ignore"):
        products = [normal(one * other) for one, other in itertools.product((first, second), (cos, sin))]
        turned = normal(products[0] - products[3]), normal(products[2] + products[1])
    rotated = x.copy()
    for each, values in zip(pairs, turned, strict=True):
        rotated[..., each] = one_nan(values) if x.dtype == np.float32 else cast(values, x.dtype)
    return rotated


def normal(x: np.ndarray) -> np.ndarray:
    """float32 with zeros for subnormals."""
    return np.where(np.abs(x) < 2.0**-126, np.copysign(np.float32(0), x), x)


def encode_fp8(x: np.ndarray, scale: np.ndarray | float, dtype: KVCacheDType) -> np.ndarray:
    largest = float(ml_dtypes.finfo(ELEMENT[dtype]).max)
    with np.errstate(all="ignore"):
        scaled = x.astype(np.float32) / np.float32(scale)
    return cast(np.clip(scaled, -largest, largest), ELEMENT[dtype])


def encode_e2m1(x: np.ndarray) -> np.ndarray:
    codes = np.clip(x.astype(np.float32), -6, 6).astype(E2M1).view(np.uint8)
    return np.where(np.isnan(x), 0, codes).astype(np.uint8)


def encode_nvfp4(x: np.ndarray, scale: float, largest: int = 6) -> tuple[np.ndarray, np.ndarray]:
    """Bytes `[..., head_size / 2]` of codes and `[..., head_size / 16]` of block scales; `largest` is what the largest
    magnitude of a block becomes.
    """
    scale = np.float32(scale)
    blocks = x.astype(np.float32).reshape(*x.shape[:-1], x.shape[-1] // 16, 16)
    with np.errstate(all="ignore"):
        amax = np.where(np.isnan(blocks), np.float32(0), np.abs(blocks)).max(-1)
        sf = np.minimum(amax / (np.float32(largest) * scale), np.float32(448)).astype(E4M3)
        decoded = sf.astype(np.float32) * scale
        inv = np.where(decoded == 0, np.float32(0), np.float32(1) / decoded)
        codes = encode_e2m1(blocks * inv[..., None]).reshape(x.shape)
    return codes[..., ::2] + 16 * codes[..., 1::2], sf.view(np.uint8)


def encode_per_token_head(x: np.ndarray, dtype: KVCacheDType) -> tuple[np.ndarray, np.ndarray]:
    """Codes `[..., head_size]` and their float32 scales `[..., 1]`, one operation of float32 after the other."""
    x, one, half = x.astype(np.float32), np.float32(1), np.float32(0.5)
    is_int8 = dtype is KVCacheDType.INT8_PER_TOKEN_HEAD
    with np.errstate(all="ignore"):
        amax = np.abs(np.where(np.isnan(x), np.float32(0), x)).max(axis=-1, keepdims=True)
        scales = np.maximum(amax / np.float32(127 if is_int8 else 448), np.float32(1e-6))
        q = x * (one / scales)
        if not is_int8:
            return cast(np.clip(q, -448, 448), np.dtype(E4M3)), scales
        q = np.where(q >= 0, q + half, q - half)
        return np.where(np.isnan(q), 0, np.trunc(np.clip(q, -128, 127))).astype(np.int8), scales


def encode_nvfp4_4over6(x: np.ndarray, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """The same, of each block that with 6 or that with 4, whichever has the smaller sum of squared errors."""
    six, four = (encode_nvfp4(x, scale, largest) for largest in (6, 4))
    is_four = sum_of_squares(x, *four, scale) < sum_of_squares(x, *six, scale)  # not where a block has NaN
    blocks = [data.reshape(*is_four.shape, 8) for data, _ in (six, four)]
    return np.where(is_four[..., None], blocks[1], blocks[0]).reshape(six[0].shape), np.where(is_four, four[1], six[1])


def sum_of_squares(x: np.ndarray, data: np.ndarray, block_scales: np.ndarray, scale: float) -> np.ndarray:
    """Of each block, in the order that the contract gives, every step rounded to float32."""
    steps = block_scales.view(E4M3).astype(np.float32) * np.float32(scale)
    codes = np.stack([data % 16, data // 16], axis=-1).reshape(*block_scales.shape, 16)
    with np.errstate(all="ignore"):
        blocks = np.abs(x.astype(np.float32)).reshape(codes.shape).astype(np.float64)
        errors = (blocks - np.abs(E2M1_VALUES[codes]).astype(np.float64) * steps[..., None]).astype(np.float32)
        even, odd = (errors[..., i::2].astype(np.float64) ** 2 for i in (0, 1))
        sums = fused(np.where(even < 2.0**-126, 0, even).astype(np.float32), odd)
        while sums.shape[-1] > 1:
            sums = sums[..., ::2] + sums[..., 1::2]
    return sums[..., 0]


def fused(x: np.ndarray, square: np.ndarray) -> np.ndarray:
    """`x + square` of non-negative float32 and float64, rounded to float32 once, and 0 where that is subnormal."""
    total = (x + square).astype(np.float32)
    # Rounded twice, it is right but where the float64 sum was rounded onto the middle between two float32.
    near = np.argwhere(np.isfinite(total) & ((x + square).view(np.uint64) & 0xFFFFFFF == 0))
    for index in map(tuple, near):
        exact = fractions.Fraction(float(x[index])) + fractions.Fraction(float(square[index]))
        around = [np.nextafter(total[index], np.float32(way)) for way in (0, np.inf)] + [total[index]]
        finite = [each for each in around if np.isfinite(each)]
        total[index] = min(
            finite, key=lambda each: (abs(fractions.Fraction(float(each)) - exact), each.view(np.uint32) & 1)
        )
    return np.where(total < 2.0**-126, np.float32(0), total)


def part(spec: AttentionSpec, half: int) -> KVCacheDType:
    """The dtype of a layer's keys or values."""
    return PARTS.get(spec.dtype, (spec.dtype, spec.dtype))[half]


def encode(x: np.ndarray, dtype: KVCacheDType, scale: np.ndarray) -> list[np.ndarray]:
    """The bytes that each head of each token is stored as: its data and, where there are some, its scales."""
    if dtype in PER_TOKEN_HEAD:
        return [np.ascontiguousarray(stored).view(np.uint8) for stored in encode_per_token_head(x, dtype)]
    if dtype in NVFP4:
        encode_blocks = encode_nvfp4 if dtype is KVCacheDType.NVFP4 else encode_nvfp4_4over6
        return list(encode_blocks(x, scale))
    stored = encode_fp8(x, per_head(scale), dtype) if dtype in FP8 else cast(x, ELEMENT[dtype])
    return [np.ascontiguousarray(stored).view(np.uint8)]


def decode(rows: list[np.ndarray], dtype: KVCacheDType, scale: np.ndarray) -> np.ndarray:
    """What those bytes stand for: float32, with one NaN, where the layer is quantized, else its own dtype."""
    if dtype in NVFP4:
        data, block_scales = rows
        codes = np.stack([data % 16, data // 16], axis=-1).reshape(*block_scales.shape, 16)
        values = E2M1_VALUES[codes] * block_scales.view(E4M3).astype(np.float32)[..., None] * np.float32(scale)
        return one_nan(values.reshape(*data.shape[:-1], 2 * data.shape[-1]))
    stored = rows[0].view(ELEMENT[dtype])
    if dtype in PER_TOKEN_HEAD:
        with np.errstate(all="ignore"):
            return one_nan(stored.astype(np.float32) * np.ascontiguousarray(rows[1]).view(np.float32))
    return one_nan(stored.astype(np.float32) * per_head(scale)) if dtype in FP8 else stored


def one_nan(x: np.ndarray) -> np.ndarray:
    return np.where(np.isnan(x), np.uint32(NAN_BITS["float32"]).view(np.float32), x)


def per_head(scale: np.ndarray | float) -> np.ndarray:
    scale = np.asarray(scale, np.float32)
    return scale[:, None] if scale.ndim else scale


def row_bytes(dtype: KVCacheDType, size: int) -> tuple[int, int]:
    """Bytes of a head of a token, `size` elements of keys or of values: its data, and its scales."""
    if dtype in NVFP4:
        return size // 2, size // 16
    return size * ELEMENT[dtype].itemsize, 4 if dtype in PER_TOKEN_HEAD else 0


def byte_offsets(spec: AttentionSpec, half: int, token: int, head: int) -> list[np.ndarray]:
    """Where in its page one head of one token keeps the bytes of its data and, where there are some, of its scales."""
    block_size, num_heads = spec.block_size, spec.num_kv_heads
    sizes = spec.head_size, spec.head_size_v

    def row(token: np.ndarray | int) -> np.ndarray | int:
        return token * num_heads + head if spec.layout is CacheLayout.NHD else head * block_size + token

    region = block_size * num_heads
    if spec.dtype in PARTS or spec.dtype in NVFP4 or spec.dtype in PER_TOKEN_HEAD:
        data, scales = row_bytes(part(spec, half), sizes[half])
        start = 0 if half == KEYS else region * sum(row_bytes(part(spec, KEYS), sizes[KEYS]))
        in_data = start + row(token) * data + np.arange(data)
        if not scales:
            return [in_data]
        in_tile = token * scales + np.arange(scales)
        if half == VALUES and spec.v_scale_layout is VScaleLayout.SWIZZLED:
            in_tile = (token // 4) * 4 * scales + 4 * np.arange(scales) + token % 4
        return [in_data, start + region * data + row(in_tile // scales) * scales + in_tile % scales]
    bytes_k, bytes_v = (size * ELEMENT[spec.dtype].itemsize for size in sizes)
    if bytes_k != bytes_v:
        start = row(token) * (bytes_k + bytes_v) + (0, bytes_k)[half]
    else:
        start = half * block_size * num_heads * bytes_k + row(token) * bytes_k
    return [start + np.arange((bytes_k, bytes_v)[half])]


def write(
    pages: np.ndarray,
    spec: AttentionSpec,
    key: np.ndarray,
    value: np.ndarray,
    slots: np.ndarray,
    k_scale: np.ndarray | float,
    v_scale: np.ndarray | float,
) -> np.ndarray:
    """A copy of the bytes `[num_blocks, page_size_bytes]` with the tokens in their slots."""
    pages = pages.copy()
    for half, x, scale in ((KEYS, key, k_scale), (VALUES, value, v_scale)):
        rows = encode(x, part(spec, half), scale)
        for i, slot in enumerate(slots):
            if 0 <= slot < len(pages) * spec.block_size:
                block, token = divmod(int(slot), spec.block_size)
                for head in range(spec.num_kv_heads):
                    for offsets, stored in zip(byte_offsets(spec, half, token, head), rows, strict=True):
                        pages[block, offsets] = stored[i, head]
    return pages


def read(
    pages: np.ndarray,
    spec: AttentionSpec,
    half: int,
    block_table: np.ndarray,
    seq_lens: np.ndarray,
    scale: np.ndarray | float,
    dtype: np.dtype,
) -> np.ndarray:
    """Keys or values `[num_seqs, max_blocks * block_size, num_kv_heads, size]`, zero past each length and where the
    table names no page.
    """
    size = (spec.head_size, spec.head_size_v)[half]
    num_seqs, max_blocks = block_table.shape
    dense = np.zeros((num_seqs, max_blocks * spec.block_size, spec.num_kv_heads, size), dtype)
    for seq, length in enumerate(seq_lens):
        for position in range(length):
            block, token = block_table[seq, position // spec.block_size], position % spec.block_size
            if not 0 <= block < len(pages):
                continue
            heads = [byte_offsets(spec, half, token, head) for head in range(spec.num_kv_heads)]
            rows = [np.stack([pages[block, offsets] for offsets in each]) for each in zip(*heads, strict=True)]
            dense[seq, position] = cast(decode(rows, part(spec, half), scale), dtype)
    return dense
