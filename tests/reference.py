"""What the contract's formulas give, in plain numpy with ml_dtypes: the tests' own account of every byte in a cache.

It shares nothing with kvjax but a spec's fields and the dtypes' names. Slow and explicit on purpose: one token, one
head, one byte range at a time.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from kvjax import AttentionSpec, CacheLayout, KVCacheDType, VScaleLayout

KEYS, VALUES = 0, 1

E4M3, E5M2, E2M1 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float4_e2m1fn
ELEMENT = {
    KVCacheDType.FLOAT32: np.dtype(np.float32),
    KVCacheDType.FLOAT16: np.dtype(np.float16),
    KVCacheDType.BFLOAT16: np.dtype(ml_dtypes.bfloat16),
    KVCacheDType.FP8_E4M3: np.dtype(E4M3),
    KVCacheDType.FP8_E5M2: np.dtype(E5M2),
}
FP8 = (KVCacheDType.FP8_E4M3, KVCacheDType.FP8_E5M2)
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


def encode_fp8(x: np.ndarray, scale: np.ndarray | float, dtype: KVCacheDType) -> np.ndarray:
    largest = float(ml_dtypes.finfo(ELEMENT[dtype]).max)
    with np.errstate(all="ignore"):
        scaled = x.astype(np.float32) / np.float32(scale)
    return cast(np.clip(scaled, -largest, largest), ELEMENT[dtype])


def encode_e2m1(x: np.ndarray) -> np.ndarray:
    codes = np.clip(x.astype(np.float32), -6, 6).astype(E2M1).view(np.uint8)
    return np.where(np.isnan(x), 0, codes).astype(np.uint8)


def encode_nvfp4(x: np.ndarray, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Bytes `[..., head_size / 2]` of codes and `[..., head_size / 16]` of block scales."""
    scale = np.float32(scale)
    blocks = x.astype(np.float32).reshape(*x.shape[:-1], x.shape[-1] // 16, 16)
    with np.errstate(all="ignore"):
        amax = np.where(np.isnan(blocks), np.float32(0), np.abs(blocks)).max(-1)
        sf = np.minimum(amax / (np.float32(6) * scale), np.float32(448)).astype(E4M3)
        decoded = sf.astype(np.float32) * scale
        inv = np.where(decoded == 0, np.float32(0), np.float32(1) / decoded)
        codes = encode_e2m1(blocks * inv[..., None]).reshape(x.shape)
    return codes[..., ::2] + 16 * codes[..., 1::2], sf.view(np.uint8)


def encode(x: np.ndarray, spec: AttentionSpec, scale: np.ndarray) -> list[np.ndarray]:
    """The bytes that each head of each token is stored as: its data and, for NVFP4, its block scales."""
    if spec.dtype is KVCacheDType.NVFP4:
        return list(encode_nvfp4(x, scale))
    stored = encode_fp8(x, per_head(scale), spec.dtype) if spec.dtype in FP8 else cast(x, ELEMENT[spec.dtype])
    return [np.ascontiguousarray(stored).view(np.uint8)]


def decode(rows: list[np.ndarray], spec: AttentionSpec, scale: np.ndarray) -> np.ndarray:
    """What those bytes stand for: float32, with one NaN, where the layer is quantized, else its own dtype."""
    if spec.dtype is KVCacheDType.NVFP4:
        data, block_scales = rows
        codes = np.stack([data % 16, data // 16], axis=-1).reshape(*block_scales.shape, 16)
        values = E2M1_VALUES[codes] * block_scales.view(E4M3).astype(np.float32)[..., None] * np.float32(scale)
        return one_nan(values.reshape(*data.shape[:-1], 2 * data.shape[-1]))
    stored = rows[0].view(ELEMENT[spec.dtype])
    return one_nan(stored.astype(np.float32) * per_head(scale)) if spec.dtype in FP8 else stored


def one_nan(x: np.ndarray) -> np.ndarray:
    return np.where(np.isnan(x), np.uint32(NAN_BITS["float32"]).view(np.float32), x)


def per_head(scale: np.ndarray | float) -> np.ndarray:
    scale = np.asarray(scale, np.float32)
    return scale[:, None] if scale.ndim else scale


def byte_offsets(spec: AttentionSpec, half: int, token: int, head: int) -> list[np.ndarray]:
    """Where in its page one head of one token keeps the bytes of its data and, for NVFP4, of its block scales."""
    block_size, num_heads = spec.block_size, spec.num_kv_heads
    sizes = spec.head_size, spec.head_size_v

    def row(token: np.ndarray | int) -> np.ndarray | int:
        return token * num_heads + head if spec.layout is CacheLayout.NHD else head * block_size + token

    if spec.dtype is KVCacheDType.NVFP4:
        region = block_size * num_heads
        data, scales = sizes[half] // 2, sizes[half] // 16
        start = 0 if half == KEYS else region * (sizes[KEYS] // 2 + sizes[KEYS] // 16)
        in_tile = token * scales + np.arange(scales)
        if half == VALUES and spec.v_scale_layout is VScaleLayout.SWIZZLED:
            in_tile = (token // 4) * 4 * scales + 4 * np.arange(scales) + token % 4
        scale_bytes = start + region * data + row(in_tile // scales) * scales + in_tile % scales
        return [start + row(token) * data + np.arange(data), scale_bytes]
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
        rows = encode(x, spec, scale)
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
            rows = [np.stack([pages[block, offsets] for offsets in part]) for part in zip(*heads, strict=True)]
            dense[seq, position] = cast(decode(rows, spec, scale), dtype)
    return dense
