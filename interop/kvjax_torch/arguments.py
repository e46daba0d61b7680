"""Checks the arguments of the operations and turns them into plans.

Dtypes, shapes and strides are checked once for each plan. Counts, addresses, devices and the values of scales on the
host are checked in every call. In `kvjax.checked()` values on a GPU are checked too, for which the host waits.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping

import torch
from torch.autograd import forward_ad

import kvjax
from kvjax import (
    AttentionSpec,
    KVCache,
    KVCacheDType,
    KVCacheTypeError,
    KVCacheValueError,
    UnsupportedError,
)
from kvjax.ops.options import kind_of
from kvjax_torch.caches import Facts, cache_plan, check_apart, check_caches
from kvjax_torch.dtypes import (
    INDEX_DTYPES,
    INPUT_DTYPES,
    gathered_dtype,
    has_scale_tensors,
    resolve_cache_dtype,
    row_head_size,
)
from kvjax_torch.plan import Encoding, GatherPlan, ReadTensors, RopePlan, WritePlan

IndexFacts = tuple[torch.dtype, int]
"""Dtype and number of dimensions of a tensor of slots, blocks or lengths."""

ScaleFacts = Facts
"""Facts of a scale; it has strides only if it is a tensor `[num_blocks, block_size, num_kv_heads]`."""


def write_plan(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    v_scale_layout: str,
) -> WritePlan:
    """The plan of a `reshape_and_cache_flash` call.

    Raises:
      KVCacheValueError, KVCacheTypeError: an invalid argument; the message names it and what was expected.
    """
    tensors = {"key_cache": key_cache, "value_cache": value_cache, "key": key, "value": value}
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    check_devices(**tensors, slot_mapping=slot_mapping, **scales)
    plan = _write_plan(
        Facts.of(key_cache),
        Facts.of(value_cache),
        _row_facts(key),
        _row_facts(value),
        (slot_mapping.dtype, slot_mapping.ndim),
        kv_cache_dtype,
        _scale_facts(k_scale),
        _scale_facts(v_scale),
        v_scale_layout,
    )
    for name in ("key", "value"):
        if tensors[name].shape[0] < slot_mapping.shape[0]:
            raise KVCacheValueError(
                f"{name}: got {tensors[name].shape[0]} tokens, expected at least one for each of the"
                f" {slot_mapping.shape[0]} slots"
            )
    check_addresses(tensors | ({} if plan.cache.scales is None else scales))
    caches = {"key_cache": key_cache, "value_cache": value_cache}
    check_apart(caches | ({} if plan.cache.scales is None else scales), is_written=True)
    if plan.cache.scales is None:
        check_scale_values(scales)
    if kvjax.is_checked():
        slots = on_host("slot_mapping", slot_mapping).numpy()
        kvjax.check_slots(slots, key_cache.shape[0] * plan.cache.spec.block_size)
    return plan


def rope_plan(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    v_scale_layout: str,
    is_neox: bool,
) -> RopePlan:
    """The plan of a `rope_and_cache` call.

    Raises:
      KVCacheValueError, KVCacheTypeError: an invalid argument; the message names it and what was expected.
    """
    check_devices(key_cache, query=query, positions=positions, cos_sin_cache=cos_sin_cache)
    tensors = key, value, key_cache, value_cache, slot_mapping
    write = write_plan(*tensors, kv_cache_dtype, k_scale, v_scale, v_scale_layout)
    table = cos_sin_cache.dtype, cos_sin_cache.shape[1:], cos_sin_cache.ndim
    plan = _rope_plan(write, _row_facts(query), (positions.dtype, positions.ndim), table, is_neox)
    num_tokens = slot_mapping.shape[0]
    for name, tensor in (("query", query), ("key", key), ("value", value), ("positions", positions)):
        if tensor.shape[0] != num_tokens:
            raise KVCacheValueError(
                f"{name}: got {tensor.shape[0]} tokens, expected {num_tokens}, one for each slot; a slot of -1 is none"
            )
    if not cos_sin_cache.shape[0]:
        raise KVCacheValueError("cos_sin_cache: got no positions, expected one at least")
    check_addresses({"query": query, "cos_sin_cache": cos_sin_cache})
    if kvjax.is_checked():
        slots, rows = (on_host(*each).numpy() for each in (("slot_mapping", slot_mapping), ("positions", positions)))
        kvjax.check_positions(rows, slots, cos_sin_cache.shape[0])
    return plan


def gather_plan(
    tensors: ReadTensors,
    encoding: Encoding,
    dtype: torch.dtype | None,
    last_tokens: int | torch.Tensor | None = None,
) -> GatherPlan:
    """The plan of a `gather_kv` call.

    If only the `last_tokens` of each sequence are read, checked mode checks only their blocks. The number may be a
    tensor on the host with one for each sequence.

    Raises:
      KVCacheValueError, KVCacheTypeError: an invalid argument; the message names it and what was expected.
    """
    key_cache, value_cache, block_table, seq_lens, k_scale, v_scale = tensors
    caches = {"key_cache": key_cache, "value_cache": value_cache}
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    check_devices(**caches, block_table=block_table, seq_lens=seq_lens, **scales)
    plan = _gather_plan(
        Facts.of(key_cache),
        Facts.of(value_cache),
        (block_table.dtype, block_table.ndim),
        (seq_lens.dtype, seq_lens.ndim),
        encoding,
        _scale_facts(k_scale),
        _scale_facts(v_scale),
        dtype,
    )
    if seq_lens.shape[0] != block_table.shape[0]:
        raise KVCacheValueError(
            f"seq_lens: got shape {tuple(seq_lens.shape)}, expected [num_seqs={block_table.shape[0]}]"
        )
    check_addresses(caches | ({} if plan.cache.scales is None else scales))
    check_apart(caches, is_written=False)
    if plan.cache.scales is None:
        check_scale_values(scales)
    if kvjax.is_checked():
        block_size = plan.cache.spec.block_size
        blocks, lengths = on_host("block_table", block_table), on_host("seq_lens", seq_lens)
        if last_tokens is not None:
            ends = block_size * torch.arange(1, blocks.shape[1] + 1)
            reach = torch.as_tensor(last_tokens).reshape(-1, 1)
            blocks = blocks.masked_fill(lengths[:, None] - ends >= reach, -1)
        kvjax.check_sequences(blocks.numpy(), lengths.numpy(), key_cache.shape[0], block_size)
    return plan


def for_cache(value: object) -> str:
    """The end of an error message about a value that is not a tensor: how to pass it if it is a `KVCache`."""
    if not isinstance(value, KVCache):
        return ""
    return (
        "; lend its array, to_torch(cache.kv), and give each call the scales that it carries, to_torch(cache.k_scale)"
        " and to_torch(cache.v_scale), or 1 where it carries none"
    )


def check_tensors(**tensors: object) -> None:
    """Raises `KVCacheTypeError` for anything but dense tensors that are not quantized by torch."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise KVCacheTypeError(f"{name}: got {kind_of(tensor)}, expected a torch.Tensor{for_cache(tensor)}")
        check_strided(name, tensor)
        if tensor.is_quantized:
            raise KVCacheTypeError(f"{name}: got a quantized tensor, expected its numbers: {name}.dequantize()")


def check_strided(name: str, tensor: torch.Tensor) -> None:
    """Raises `KVCacheTypeError` for sparse and nested tensors."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        kind = "nested" if tensor.is_nested else tensor.layout
        raise KVCacheTypeError(f"{name}: got layout {kind}, expected torch.strided: {name}.to_dense()")


def refuse_gradient(what: str, /, **tensors: torch.Tensor) -> None:
    """Raises `KVCacheTypeError` if autograd would need a gradient, or differentiates forward."""
    for name, tensor in tensors.items():
        is_dual = forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None
        if is_dual or (tensor.requires_grad and torch.is_grad_enabled()):
            raise KVCacheTypeError(
                f"{name}: got {'a tangent' if is_dual else 'requires_grad=True'}, but {what} has no gradient;"
                f" pass {name}.detach(){'' if is_dual else ', or call under torch.no_grad()'}"
            )


def check_devices(key_cache: torch.Tensor, **tensors: torch.Tensor) -> None:
    """Raises `KVCacheValueError` if a tensor is on another device than the cache."""
    device = key_cache.device
    for name, tensor in tensors.items():
        if tensor.device != device:
            raise KVCacheValueError(f"{name}: got device {tensor.device}, expected {device}, that of key_cache")


@functools.lru_cache(maxsize=1024)
def _write_plan(
    key_cache: Facts,
    value_cache: Facts,
    key: Facts,
    value: Facts,
    slot_mapping: IndexFacts,
    kv_cache_dtype: str,
    k_scale: ScaleFacts,
    v_scale: ScaleFacts,
    v_scale_layout: str,
) -> WritePlan:
    check_caches(key_cache, value_cache)
    _check_rows("key", key, INPUT_DTYPES)
    _check_rows("value", value, (key.dtype,))
    check_index("slot_mapping", slot_mapping, ("num_tokens",))
    num_heads, head_size = key.shape
    if value.shape[0] != num_heads:
        raise KVCacheValueError(f"value: got num_kv_heads={value.shape[0]}, expected {num_heads} as in key")
    dtype = resolve_cache_dtype(kv_cache_dtype, key_cache.dtype)
    scale_tensors = _scale_tensors(k_scale, v_scale, dtype)
    head_sizes = head_size, value.shape[1]
    cache = cache_plan(key_cache, value_cache, num_heads, head_sizes, dtype, v_scale_layout, scale_tensors)
    return WritePlan(
        cache,
        key.dtype,
        slot_mapping[0],
        _scale_sizes(k_scale, v_scale, cache.spec),
    )


@functools.lru_cache(maxsize=1024)
def _rope_plan(
    write: WritePlan, query: Facts, positions: IndexFacts, table: tuple[torch.dtype, torch.Size, int], is_neox: bool
) -> RopePlan:
    head_size = write.cache.spec.head_size
    _check_rows("query", query, (write.dtype,), "num_heads")
    if query.shape[1] != head_size:
        raise KVCacheValueError(f"query: got head_size={query.shape[1]}, expected {head_size} as in key")
    check_index("positions", positions, ("num_tokens",))
    dtype, shape, ndim = table
    if dtype not in INPUT_DTYPES:
        raise KVCacheTypeError(f"cos_sin_cache: got dtype {dtype}, expected {' or '.join(map(str, INPUT_DTYPES))}")
    if ndim != 2:
        raise KVCacheValueError(f"cos_sin_cache: got {ndim} dimensions, expected [max_position, rot_dim]")
    [rot_dim] = shape
    if rot_dim % 2 or not 2 <= rot_dim <= head_size:
        raise KVCacheValueError(
            f"cos_sin_cache: got rot_dim={rot_dim}, expected an even number of 2 to head_size={head_size}"
        )
    return RopePlan(write, query.shape[0], rot_dim, is_neox, positions[0], dtype)


@functools.lru_cache(maxsize=1024)
def _gather_plan(
    key_cache: Facts,
    value_cache: Facts,
    block_table: IndexFacts,
    seq_lens: IndexFacts,
    encoding: Encoding,
    k_scale: ScaleFacts,
    v_scale: ScaleFacts,
    dtype: torch.dtype | None,
) -> GatherPlan:
    check_caches(key_cache, value_cache)
    check_index("block_table", block_table, ("num_seqs", "max_blocks"))
    check_index("seq_lens", seq_lens, ("num_seqs",))
    cache_dtype = resolve_cache_dtype(encoding.kv_cache_dtype, key_cache.dtype)
    key_bytes, value_bytes = (cache.shape[3] * cache.dtype.itemsize for cache in (key_cache, value_cache))
    scale_tensors = _scale_tensors(k_scale, v_scale, cache_dtype)
    apart = scale_tensors is not None
    head_sizes = (
        row_head_size("key_cache", key_bytes, cache_dtype.parts[0], scales_apart=apart),
        row_head_size("value_cache", value_bytes, cache_dtype.parts[1], scales_apart=apart),
    )
    num_heads = key_cache.shape[2]
    order = encoding.v_scale_layout
    cache = cache_plan(key_cache, value_cache, num_heads, head_sizes, cache_dtype, order, scale_tensors)
    return GatherPlan(
        cache,
        gathered_dtype(dtype, cache_dtype),
        _scale_sizes(k_scale, v_scale, cache.spec),
    )


def _row_facts(rows: torch.Tensor) -> Facts:
    if not rows.numel() and 0 in rows.stride():
        rows = rows.new_empty(rows.shape)  # empty numpy arrays have strides of 0
    return Facts(rows.dtype, rows.shape[1:], rows.stride())  # a plan does not depend on the number of rows


def _check_rows(name: str, rows: Facts, dtypes: tuple[torch.dtype, ...], heads: str = "num_kv_heads") -> None:
    if rows.dtype not in dtypes:
        raise KVCacheTypeError(f"{name}: got dtype {rows.dtype}, expected {' or '.join(map(str, dtypes))}")
    if len(rows.strides) != 3:
        raise KVCacheValueError(
            f"{name}: got {len(rows.strides)} dimensions, expected [num_tokens, {heads}, head_size]"
        )
    if rows.strides[2] != 1 and rows.shape[1] != 1:
        raise KVCacheValueError(
            f"{name}: got strides {rows.strides}, expected 1 along head_size; copy with {name}.contiguous()"
        )


def check_index(name: str, index: IndexFacts, dims: tuple[str, ...]) -> None:
    """Raises unless slots, blocks or lengths are int32 or int64 and have the dimensions `dims`."""
    dtype, ndim = index
    if dtype not in INDEX_DTYPES:
        raise KVCacheTypeError(f"{name}: got dtype {dtype}, expected {' or '.join(map(str, INDEX_DTYPES))}")
    if ndim != len(dims):
        raise KVCacheValueError(f"{name}: got {ndim} dimensions, expected [{', '.join(dims)}]")


def _scale_facts(scale: torch.Tensor) -> ScaleFacts:
    return Facts(scale.dtype, scale.shape, scale.stride() if has_scale_tensors(scale) else ())


def _scale_tensors(k_scale: ScaleFacts, v_scale: ScaleFacts, dtype: KVCacheDType) -> tuple[Facts, Facts] | None:
    """The facts of the tensors with the scales of each token and head; None if there are no such tensors."""
    if not (dtype.is_per_token_head and (k_scale.strides or v_scale.strides)):
        return None
    for name, facts in (("k_scale", k_scale), ("v_scale", v_scale)):
        if not facts.strides:
            raise KVCacheValueError(
                f"{name}: got shape {tuple(facts.shape)}, expected [num_blocks, block_size, num_kv_heads] as of the"
                " other scale"
            )
    return k_scale, v_scale


def _scale_sizes(k_scale: ScaleFacts, v_scale: ScaleFacts, spec: AttentionSpec) -> tuple[int, int]:
    for name, (dtype, shape, strides), part in zip(
        ("k_scale", "v_scale"), (k_scale, v_scale), spec.dtype.parts, strict=True
    ):
        takes_heads = part.info.takes_head_scales
        if dtype is not torch.float32:
            raise KVCacheTypeError(f"{name}: got dtype {dtype}, expected torch.float32")
        if spec.dtype.is_per_token_head and strides:
            continue
        if math.prod(shape) != 1 and not (takes_heads and shape == (spec.num_kv_heads,)):
            accepted = f"one element or [num_kv_heads={spec.num_kv_heads}]" if takes_heads else "one element"
            raise KVCacheValueError(f"{name}: got shape {tuple(shape)}, expected {accepted} for {spec.dtype.value!r}")
    if spec.dtype.is_per_token_head:
        return 1, 1
    return math.prod(k_scale.shape), math.prod(v_scale.shape)


def check_addresses(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raises `KVCacheValueError` for tensors at addresses that their elements do not fit."""
    for name, tensor in tensors.items():
        if tensor.data_ptr() % tensor.element_size():
            raise KVCacheValueError(
                f"{name}: got address {tensor.data_ptr():#x}, expected a multiple of {tensor.dtype.itemsize},"
                f" the bytes of a {tensor.dtype}"
            )


def check_scale_values(scales: Mapping[str, torch.Tensor]) -> None:
    """Raises `KVCacheValueError` if `kvjax.check_scale` rejects a scale.

    Scales on a GPU are read only in `kvjax.checked()`; the host waits for them.
    """
    for name, scale in scales.items():
        if scale.device.type == "cpu" or kvjax.is_checked():
            kvjax.check_scale(name, on_host(name, scale).detach().numpy())


def on_host(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the host, to check its values; the host waits for it. Raises `UnsupportedError` in a capture."""
    if not tensor.is_cuda:
        return tensor
    if torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(
            f"kvjax.checked() reads {name} on the host, which cannot wait while a CUDA graph is captured; leave it for"
            " the capture, with kvjax.checked(False)"
        )
    return tensor.cpu()
