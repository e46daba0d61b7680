"""Checks the arguments of writes and turns them into plans."""

from __future__ import annotations

import functools

import torch

import kvjax
from kvjax import KVCacheTypeError, KVCacheValueError
from kvjax_torch.arguments.caches import Facts, cache_plan, check_apart, check_caches
from kvjax_torch.arguments.checks import (
    IndexFacts,
    check_addresses,
    check_devices,
    check_index,
    check_scale_values,
    on_host,
)
from kvjax_torch.arguments.dtypes import INPUT_DTYPES, resolve_cache_dtype
from kvjax_torch.arguments.plan import Encoding, RingTensors, RopeInputs, RopePlan, WritePlan, WriteTensors
from kvjax_torch.arguments.scales import as_tensors, scale_facts, scale_sizes, scale_tensor_facts


def write_plan(tensors: WriteTensors, encoding: Encoding) -> WritePlan:
    """The plan of a `reshape_and_cache_flash` call.

    Raises:
      KVCacheValueError, KVCacheTypeError: an invalid argument; the message names it and what was expected.
    """
    key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale = tensors
    check_devices(**tensors._asdict())
    plan = _write_plan(
        (Facts.of(key_cache), Facts.of(value_cache)),
        (_row_facts(key), _row_facts(value)),
        (slot_mapping.dtype, slot_mapping.ndim),
        encoding,
        (scale_facts(k_scale), scale_facts(v_scale)),
    )
    rows, num_slots = {"key": key, "value": value}, slot_mapping.shape[0]
    for name, tokens in rows.items():
        if tokens.shape[0] < num_slots:
            raise KVCacheValueError(
                f"{name}: got {tokens.shape[0]} tokens, expected at least one for each of the {num_slots} slots"
            )
    written, scales = {"key_cache": key_cache, "value_cache": value_cache}, {"k_scale": k_scale, "v_scale": v_scale}
    if plan.cache.scales is not None:
        written |= scales
    check_addresses(written | rows)
    check_apart(written, is_written=True)
    if plan.cache.scales is None:
        check_scale_values(scales)
    if kvjax.is_checked():
        slots = on_host("slot_mapping", slot_mapping).numpy()
        kvjax.check_slots(slots, key_cache.shape[0] * plan.cache.spec.block_size)
    return plan


def ring_plan(key: torch.Tensor, value: torch.Tensor, ring: RingTensors) -> WritePlan:
    """The plan of a write to a ring's pages, at slots that the kernel derives.

    Raises:
      KVCacheValueError, KVCacheTypeError: an invalid argument; the message names it and what was expected.
    """
    pages, no_slots = (ring.key_cache, ring.value_cache), ring.window_rows[:0]
    return write_plan(WriteTensors(key, value, *pages, no_slots, *as_tensors(1.0, 1.0, pages[0])), Encoding("auto"))


def rope_plan(tensors: WriteTensors, rope: RopeInputs, encoding: Encoding) -> RopePlan:
    """The plan of a `rope_and_cache` call.

    Raises:
      KVCacheValueError, KVCacheTypeError: an invalid argument; the message names it and what was expected.
    """
    query, positions, cos_sin_cache, _ = rope
    check_devices(tensors.key_cache, query=query, positions=positions, cos_sin_cache=cos_sin_cache)
    write, rows = write_plan(tensors, encoding), {"key": tensors.key, "value": tensors.value}
    return check_rotation(write, tensors, rope, query=query, **rows, positions=positions)


@functools.lru_cache(maxsize=1024)
def _write_plan(
    caches: tuple[Facts, Facts],
    rows: tuple[Facts, Facts],
    slot_mapping: IndexFacts,
    encoding: Encoding,
    scales: tuple[Facts, Facts],
) -> WritePlan:
    check_caches(*caches)
    key, value = rows
    _check_rows("key", key, INPUT_DTYPES)
    _check_rows("value", value, (key.dtype,))
    check_index("slot_mapping", slot_mapping, ("num_tokens",))
    num_heads, head_size = key.shape
    if value.shape[0] != num_heads:
        raise KVCacheValueError(f"value: got num_kv_heads={value.shape[0]}, expected {num_heads} as in key")
    dtype = resolve_cache_dtype(encoding.kv_cache_dtype, caches[0].dtype)
    apart, head_sizes = scale_tensor_facts(*scales, dtype), (head_size, value.shape[1])
    cache = cache_plan(*caches, num_heads, head_sizes, dtype, encoding.v_scale_layout, apart)
    return WritePlan(cache, key.dtype, slot_mapping[0], scale_sizes(*scales, cache.spec))


def check_rotation(write: WritePlan, tensors: WriteTensors, rope: RopeInputs, **rows: torch.Tensor) -> RopePlan:
    """The plan of a write of rotated keys or rope keys; `rows` are those of tokens by name, the query first.

    Raises:
      KVCacheValueError, KVCacheTypeError: an invalid query, position or table, or another number of tokens than slots.
    """
    query, positions, cos_sin_cache, is_neox = rope
    table = cos_sin_cache.dtype, cos_sin_cache.shape[1:], cos_sin_cache.ndim
    plan = _rope_plan(write, next(iter(rows)), _row_facts(query), (positions.dtype, positions.ndim), table, is_neox)
    num_tokens = tensors.slot_mapping.shape[0]
    for name, tensor in rows.items():
        if tensor.shape[0] != num_tokens:
            raise KVCacheValueError(
                f"{name}: got {tensor.shape[0]} tokens, expected {num_tokens}, one for each slot; a slot of -1 is none"
            )
    if not cos_sin_cache.shape[0]:
        raise KVCacheValueError("cos_sin_cache: got no positions, expected one at least")
    check_addresses({next(iter(rows)): query, "cos_sin_cache": cos_sin_cache})
    if kvjax.is_checked():
        slots, at = on_host("slot_mapping", tensors.slot_mapping), on_host("positions", positions)
        kvjax.check_positions(at.numpy(), slots.numpy(), cos_sin_cache.shape[0])
    return plan


@functools.lru_cache(maxsize=1024)
def _rope_plan(
    write: WritePlan,
    name: str,
    query: Facts,
    positions: IndexFacts,
    table: tuple[torch.dtype, torch.Size, int],
    is_neox: bool,
) -> RopePlan:
    spec = write.cache.spec
    what, head_size = ("qk_rope_head_dim", spec.part_sizes[1]) if spec.is_mla else ("head_size", spec.head_size)
    _check_rows(name, query, (write.dtype,), "num_heads")
    if query.shape[1] != head_size:
        as_in = "k_pe" if spec.is_mla else "key"
        raise KVCacheValueError(f"{name}: got {what}={query.shape[1]}, expected {head_size} as in {as_in}")
    check_index("positions", positions, ("num_tokens",))
    dtype, shape, ndim = table
    if dtype not in INPUT_DTYPES:
        raise KVCacheTypeError(f"cos_sin_cache: got dtype {dtype}, expected {' or '.join(map(str, INPUT_DTYPES))}")
    if ndim != 2:
        raise KVCacheValueError(f"cos_sin_cache: got {ndim} dimensions, expected [max_position, rot_dim]")
    [rot_dim] = shape
    if rot_dim % 2 or not 2 <= rot_dim <= head_size:
        raise KVCacheValueError(
            f"cos_sin_cache: got rot_dim={rot_dim}, expected an even number of 2 to {what}={head_size}"
        )
    return RopePlan(write, query.shape[0], rot_dim, is_neox, positions[0], dtype)


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
