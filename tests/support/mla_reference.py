"""Caches of latents in plain numpy: every byte of a row by its format's description, and attention in float64.

Rows are made element by element from the formats alone. Of kvjax they use only a spec's fields; fp8 and NVFP4 are those
of `reference`.
"""

from __future__ import annotations

from collections.abc import Sequence

import ml_dtypes
import numpy as np

from kvjax import KVCacheDType, MLAAttentionSpec
from support import reference

ROW_BYTES = {
    "float32": 2304,
    "float16": 1152,
    "bfloat16": 1152,
    "fp8_e4m3": 576,
    "fp8_ds_mla": 656,
    "nvfp4": 416,
    "nvfp4_4over6": 416,
}
"""Bytes of a token of 512 and 64 elements."""


def raw(x: np.ndarray) -> np.ndarray:
    """An array's bytes, its last dimension in bytes."""
    return np.ascontiguousarray(x).view(np.uint8).reshape(*x.shape[:-1], x.shape[-1] * x.dtype.itemsize)


E4M3 = np.array([m * 2.0**-9 if not e else (8 + m) * 2.0 ** (e - 10) for e in range(16) for m in range(8)][:127])
"""The magnitudes of the codes 0 to 126."""


def e4m3(x: np.ndarray) -> np.ndarray:
    """The bytes of the nearest e4m3 numbers, ties to an even code, clamped to 448: by search among all of them."""
    distances = np.abs(E4M3 - np.minimum(np.abs(x.astype(np.float64)), 448)[..., None])
    # Of two equal distances, that of an even code comes first.
    order = np.argsort(np.arange(127) % 2, kind="stable")
    codes = order[np.argmin(distances[..., order], axis=-1)]
    return np.where(np.isnan(x), 0x7F, codes + 128 * np.signbit(x)).astype(np.uint8)


def fp8_ds_mla(latent: np.ndarray) -> np.ndarray:
    """The bytes of a latent: a code of each element, then a float32 scale of each 128.

    A scale is the first power of two from 2^-13 on of which 448 are no less than the block's largest magnitude.
    """
    codes, scales = [], []
    with np.errstate(invalid="ignore"):  # a signaling NaN
        blocks = latent.astype(np.float64).reshape(-1, 128)
    for block in blocks:
        amax = np.abs(np.where(np.isnan(block), 0, block)).max()
        scale = next((2.0**k for k in range(-13, 128) if amax <= 448 * 2.0**k), np.inf)
        with np.errstate(invalid="ignore"):
            codes.append(e4m3(block / scale))
        scales.append(scale)
    return np.concatenate([*codes, np.array(scales, np.float32).view(np.uint8)])


def rows(spec: MLAAttentionSpec, kv_c: np.ndarray, k_pe: np.ndarray, scale: float) -> np.ndarray:
    """The bytes of tokens, `[num_tokens, bytes_per_token]`."""
    dtype = spec.dtype
    match dtype.value:
        case "fp8_e4m3":
            parts = [raw(reference.encode_fp8(x, scale, dtype)) for x in (kv_c, k_pe)]
        case "fp8_ds_mla":
            size = spec.kv_lora_rank // 128 * 132
            parts = [np.array(list(map(fp8_ds_mla, kv_c)), np.uint8).reshape(len(kv_c), size)]
        case "nvfp4":
            parts = list(reference.encode_nvfp4(kv_c, scale))
        case "nvfp4_4over6":
            parts = list(reference.encode_nvfp4_4over6(kv_c, scale))
        case _:
            parts = [raw(reference.cast(x, reference.ELEMENT[dtype])) for x in (kv_c, k_pe)]
    if dtype.value in ("fp8_ds_mla", "nvfp4", "nvfp4_4over6"):
        parts.append(raw(reference.cast(k_pe, np.dtype(ml_dtypes.bfloat16))))
    return np.concatenate(parts, axis=-1)


def decoded(spec: MLAAttentionSpec, stored: np.ndarray, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """The latents and rope keys, float32, of bytes `[num_tokens, bytes_per_token]`."""
    rank, dtype = spec.kv_lora_rank, spec.dtype
    bfloat16 = reference.ELEMENT[KVCacheDType.BFLOAT16]
    stored = np.ascontiguousarray(stored)
    with np.errstate(all="ignore"):
        match dtype.value:
            case "fp8_e4m3":
                both = stored.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * np.float32(scale)
                return both[:, :rank], both[:, rank:]
            case "fp8_ds_mla":
                codes, scales, rope = np.split(stored, [rank, rank + rank // 32], axis=1)
                values = np.ascontiguousarray(codes).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
                latents = reference.normal(
                    values * np.repeat(np.ascontiguousarray(scales).view(np.float32), 128, axis=1)
                )
            case "nvfp4" | "nvfp4_4over6":
                data, scales, rope = np.split(stored, [rank // 2, rank // 2 + rank // 16], axis=1)
                latents = reference.decode([data, np.ascontiguousarray(scales)], KVCacheDType.NVFP4, np.float32(scale))
            case _:
                both = stored.view(reference.ELEMENT[dtype]).astype(np.float32)
                return both[:, :rank], both[:, rank:]
        return latents, np.ascontiguousarray(rope).view(bfloat16).astype(np.float32)


def write(pages: np.ndarray, spec: MLAAttentionSpec, stored: np.ndarray, slots: Sequence[int]) -> np.ndarray:
    """A copy of the bytes `[num_blocks, page_size_bytes]` with the rows in their slots."""
    pages, size = pages.copy(), spec.bytes_per_token
    for row, slot in zip(stored, slots, strict=True):
        if 0 <= slot < len(pages) * spec.block_size:
            block, token = divmod(int(slot), spec.block_size)
            pages[block, token * size : (token + 1) * size] = row
    return pages


def attention(
    query: np.ndarray,
    keys: np.ndarray,
    rank: int,
    sm_scale: float,
    *,
    window: int | None = None,
    cap: float | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Of one sequence in float64: of a query `[q_len, heads, key]` over keys `[tokens, key]`, whose first elements are
    the values; `[q_len, heads, rank]` and the log-sum-exp.
    """
    q_len, num_heads, _ = query.shape
    out, lse = np.zeros((q_len, num_heads, rank)), np.full((q_len, num_heads), -np.inf)
    query, keys = query.astype(np.float64), keys.astype(np.float64)
    for row in range(q_len):
        end = len(keys) - q_len + row + 1
        seen = keys[max(0, 0 if window is None else end - window) : max(end, 0)]
        if not len(seen):
            continue
        logits = query[row] @ seen.T * sm_scale
        if cap is not None:
            logits = cap * np.tanh(logits / cap)
        largest = logits.max(axis=-1, keepdims=True)
        weights = np.exp(logits - largest)
        out[row] = weights @ seen[:, :rank] / weights.sum(axis=-1, keepdims=True)
        lse[row] = (largest + np.log(weights.sum(axis=-1, keepdims=True)))[:, 0]
    return out, lse
