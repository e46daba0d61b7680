"""Writes and reads of torch tensors: vLLM's write, the same with rotation, and a gather.

On CUDA they run on torch's current stream, and the host does not wait, with two exceptions: in `kvjax.checked()` every
call reads values back, and the first use of a float scale on a device copies it there.
"""

from __future__ import annotations

import torch
from torch.autograd.graph import increment_version

from kvjax import KVCacheDType
from kvjax.ops.options import as_bool
from kvjax_torch.arguments.checks import are_plain, check_tensors
from kvjax_torch.arguments.dtypes import check_dtype, dtype_name, has_scale_tensors, order_name
from kvjax_torch.arguments.plan import WriteTensors
from kvjax_torch.arguments.scales import Scale, as_tensor, as_tensors
from kvjax_torch.cuda import writes
from kvjax_torch.dispatch import call


def reshape_and_cache_flash(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str | KVCacheDType,
    k_scale: Scale,
    v_scale: Scale,
    *,
    v_scale_layout: str = "linear",
    unique_slots: bool = False,
) -> None:
    """Writes tokens into the slots of a paged cache, in place, encoded as `kv_cache_dtype`.

    The bytes are those that `kvjax.reshape_and_cache_flash` writes; bytes outside the written slots do not change. A
    call that raises has written nothing. `torch.ops.kvjax.reshape_and_cache_flash` is the same operation with scales as
    tensors on the caches' device.

    Args:
      key: `[num_tokens, num_kv_heads, head_size]`, float32, float16 or bfloat16. A head is contiguous; other strides
        are arbitrary, so it may be a slice of a fused QKV tensor. Tokens beyond the number of slots are padding.
      value: `[num_tokens, num_kv_heads, head_size_v]`, of `key`'s dtype, likewise.
      key_cache: `[num_blocks, block_size, num_kv_heads, row]`: `kv_cache[:, 0]` of one allocation or a tensor of its
        own. An HND cache is passed with these dimensions too, transposed: the strides tell the layouts apart. With one
        head or one token in a block both are the same. `row` is `head_size` elements of the storage dtype (for fp8 also
        uint8). For NVFP4 it is `head_size / 2 + head_size / 16` uint8: a block's bytes are then contiguous, all its
        data before all its block scales. With a scale for each token and head it is likewise `head_size + 4` bytes; or,
        with the scales of keys and values in tensors of their own, `head_size` int8, float8_e4m3fn or uint8, of any
        strides.
      value_cache: the same for the values: `kv_cache[:, 1]`.
      slot_mapping: int32 or int64 `[num_slots]`: `block * block_size + offset` of each token. Negative slots and those
        at or past `num_blocks * block_size` write nothing. If several tokens have one slot, the last is written.
      kv_cache_dtype: a `KVCacheDType` or a name that `kvjax.parse_kv_cache_dtype` takes; `"auto"` is the cache tensors'
        own dtype.
      k_scale: decode scale of the keys. Unquantized caches ignore it. With a scale for each token and head it is
        ignored too or, if values also have such scales, is the float32 tensor `[num_blocks, block_size, num_kv_heads]`,
        of any strides, that the keys' scales are written to: vLLM's `k_scale_cache`.
      v_scale: the same for the values.
      v_scale_layout: order of NVFP4 V scales, `"linear"` or `"swizzled"` (`block_size` a multiple of 4).
      unique_slots: promises that no two written tokens share a slot; on CUDA that skips the check. If two do, the bytes
        of that slot are undefined.

    Raises:
      KVCacheValueError, KVCacheTypeError: an invalid shape, stride, dtype, device, address or scale; the message names
        it. Values of slots and of scales on a GPU are checked only in `kvjax.checked()`; the call waits for them.
      UnsupportedError: a device without an implementation; a jax that kernels cannot be launched with; or a call
        during the capture of a CUDA graph in `kvjax.checked()`.
    """
    if not isinstance(key_cache, torch.Tensor):
        check_tensors(key_cache=key_cache)
    kv_cache_dtype = dtype_name(kv_cache_dtype)
    if unique_slots.__class__ is not bool:
        unique_slots = as_bool("unique_slots", unique_slots)
    if not isinstance(k_scale, torch.Tensor):
        k_scale = as_tensor("k_scale", k_scale, key_cache)
    if not isinstance(v_scale, torch.Tensor):
        v_scale = as_tensor("v_scale", v_scale, key_cache)
    tensors = key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale
    # What is written, which an operation's schema says, depends on whether scales are in tensors of their own.
    own_scales = has_scale_tensors(k_scale)
    # torch's dispatcher takes as long as the rest of a call. It is skipped if nothing observes operations.
    if key_cache.is_cuda and are_plain(*tensors):
        writes.write(tensors, (kv_cache_dtype, v_scale_layout), unique_slots)
        increment_version((key_cache, value_cache, k_scale, v_scale) if own_scales else (key_cache, value_cache))
    else:
        check_tensors(**WriteTensors._make(tensors)._asdict())
        written = torch.ops.kvjax.reshape_and_cache_flash_per_token_head if own_scales else None
        write = (written or torch.ops.kvjax.reshape_and_cache_flash).default
        options = {"v_scale_layout": order_name(v_scale_layout), "unique_slots": unique_slots}
        write(*tensors[:5], kv_cache_dtype, k_scale, v_scale, **options)


def rope_and_cache(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    kv_cache_dtype: str | KVCacheDType,
    k_scale: Scale,
    v_scale: Scale,
    *,
    v_scale_layout: str = "linear",
    is_neox: bool = True,
    unique_slots: bool = False,
) -> torch.Tensor:
    """Rotates queries and keys by their positions, and writes keys and values into their slots, in place.

    The bytes are those that `kvjax.rope_and_cache` returns and writes; `query` and `key` do not change. Queries are
    rotated for every token, including those whose slot writes nothing. A call that raises has written nothing.
    `torch.ops.kvjax.rope_and_cache` is the same operation with scales as tensors on the caches' device. On a GPU it is
    one kernel on torch's current stream; for float32 and odd head sizes, torch rotates and the kernel of
    `reshape_and_cache_flash` writes. The first call of a kind compiles for every number of tokens.

    Args:
      query: `[num_tokens, num_heads, head_size]`, of `key`'s dtype, with any strides except within a head.
      key: as in `reshape_and_cache_flash`, with as many tokens as slots.
      value: likewise.
      key_cache: as in `reshape_and_cache_flash`.
      value_cache: as in `reshape_and_cache_flash`.
      slot_mapping: as in `reshape_and_cache_flash`, `[num_tokens]`; -1 for padding.
      positions: int32 or int64 `[num_tokens]`: the row of `cos_sin_cache` of each token, clipped to its rows.
      cos_sin_cache: float32, float16 or bfloat16 `[max_position, rot_dim]`, as in vLLM's rotary embeddings: for each
        position the cosines of `rot_dim / 2` pairs, then the sines. `rot_dim` is even and at most `head_size`; the
        elements of a head from there on do not change. On a GPU a table that is not contiguous, or not aligned to 16
        bytes, is copied in every call.
      kv_cache_dtype: as in `reshape_and_cache_flash`.
      k_scale: as in `reshape_and_cache_flash`.
      v_scale: as in `reshape_and_cache_flash`.
      v_scale_layout: as in `reshape_and_cache_flash`.
      is_neox: whether element `i` of a head is paired with `i + rot_dim / 2` (NeoX, Llama); else `2 i` with `2 i + 1`
        (GPT-J).
      unique_slots: as in `reshape_and_cache_flash`.

    Returns:
      The rotated queries, contiguous, of the shape and dtype of `query`.

    Raises:
      KVCacheValueError, KVCacheTypeError, UnsupportedError: as `reshape_and_cache_flash`; in `kvjax.checked()` also if
        the position of a written token is not a row of `cos_sin_cache`.
    """
    check_tensors(query=query, key=key, value=value, key_cache=key_cache, value_cache=value_cache)
    check_tensors(slot_mapping=slot_mapping, positions=positions, cos_sin_cache=cos_sin_cache)
    k_scale, v_scale = as_tensors(k_scale, v_scale, key_cache)
    own_scales = has_scale_tensors(k_scale)  # as in `reshape_and_cache_flash`
    rotate = torch.ops.kvjax.rope_and_cache_per_token_head if own_scales else torch.ops.kvjax.rope_and_cache
    rows = query, key, value, key_cache, value_cache, slot_mapping, positions, cos_sin_cache
    options = {"v_scale_layout": order_name(v_scale_layout), "is_neox": as_bool("is_neox", is_neox)}
    options |= {"unique_slots": as_bool("unique_slots", unique_slots)}
    rotated: torch.Tensor = call(rotate, (*rows, dtype_name(kv_cache_dtype), k_scale, v_scale), options)
    return rotated


def gather_kv(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    kv_cache_dtype: str | KVCacheDType,
    k_scale: Scale,
    v_scale: Scale,
    *,
    v_scale_layout: str = "linear",
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of whole sequences, dequantized, for attention written in torch.

    Args:
      key_cache: as in `reshape_and_cache_flash`.
      value_cache: as in `reshape_and_cache_flash`.
      block_table: int32 or int64 `[num_seqs, max_blocks]`: the blocks of each sequence, in order. An entry that is not
        a block of the cache holds no tokens, such as -1 for a freed block; entries past a sequence's last block may be
        any number.
      seq_lens: int32 or int64 `[num_seqs]`: tokens of each sequence.
      kv_cache_dtype: as in `reshape_and_cache_flash`.
      k_scale: the decode scale that the keys were written with.
      v_scale: the decode scale that the values were written with.
      v_scale_layout: the order that the V scales were written in.
      dtype: of the results: float32, float16 or bfloat16; by default the cache's if it is unquantized, else bfloat16.
        Decoding computes in float32 and rounds once.

    Returns:
      `(key, value)`: `[num_seqs, max_blocks * block_size, num_kv_heads, head_size]` and `[.., head_size_v]`, zeros from
      each sequence's length on, and for entries that hold no tokens.

    Raises:
      KVCacheValueError, KVCacheTypeError, UnsupportedError: as `reshape_and_cache_flash`.
    """
    check_tensors(key_cache=key_cache, value_cache=value_cache, block_table=block_table, seq_lens=seq_lens)
    k_scale, v_scale = as_tensors(k_scale, v_scale, key_cache)
    check_dtype(dtype)
    pages = key_cache, value_cache, block_table, seq_lens
    options = {"v_scale_layout": order_name(v_scale_layout), "dtype": dtype}
    keys, values = call(torch.ops.kvjax.gather_kv, (*pages, dtype_name(kv_cache_dtype), k_scale, v_scale), options)
    return keys, values
