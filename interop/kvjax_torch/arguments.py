"""Reading what callers of the operations hand over: tensors as they come, checked and turned into a plan.

What depends only on dtypes, shapes and strides is checked once for each plan; counts, addresses, devices and the values
of scales that lie on the host are checked at every call.
"""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Mapping

import jax
import numpy as np
import torch

import kvjax
from kvjax import AttentionSpec, KVCacheTypeError, KVCacheValueError, KVQuantMode, UnsupportedError
from kvjax_torch.caches import Facts, cache_plan, check_caches
from kvjax_torch.dtypes import INDEX_DTYPES, INPUT_DTYPES, gathered_dtype, resolve_cache_dtype, row_head_size
from kvjax_torch.plan import AttentionPlan, GatherPlan, WritePlan

MAX_WINDOW = 2**31 - 1
"""No sequence is longer: a window beyond it restricts nothing."""

IndexFacts = tuple[torch.dtype, int]
"""Of a tensor of slots, blocks or lengths: dtype and number of dimensions."""

ScaleFacts = tuple[torch.dtype, torch.Size]


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
      KVCacheValueError, KVCacheTypeError: whatever does not fit, naming it and what would.
    """
    refuse_gradient(key=key, value=value)
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
        (k_scale.dtype, k_scale.shape),
        (v_scale.dtype, v_scale.shape),
        v_scale_layout,
    )
    for name in ("key", "value"):
        if tensors[name].shape[0] < slot_mapping.shape[0]:
            raise KVCacheValueError(
                f"{name}: got {tensors[name].shape[0]} tokens, expected at least one for each of the"
                f" {slot_mapping.shape[0]} slots"
            )
    _check_addresses(tensors)
    check_scale_values(scales)
    if kvjax.is_checked():
        slots = _on_host("slot_mapping", slot_mapping).numpy()
        kvjax.check_slots(slots, key_cache.shape[0] * plan.cache.spec.block_size)
    return plan


def gather_plan(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    v_scale_layout: str,
    dtype: torch.dtype | None,
    last_tokens: int | None = None,
) -> GatherPlan:
    """The plan of a `gather_kv` call; where only `last_tokens` of a sequence count, their blocks alone are checked.

    Raises:
      KVCacheValueError, KVCacheTypeError: whatever does not fit, naming it and what would.
    """
    tensors = {"key_cache": key_cache, "value_cache": value_cache}
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    check_devices(**tensors, block_table=block_table, seq_lens=seq_lens, **scales)
    plan = _gather_plan(
        Facts.of(key_cache),
        Facts.of(value_cache),
        (block_table.dtype, block_table.ndim),
        (seq_lens.dtype, seq_lens.ndim),
        kv_cache_dtype,
        (k_scale.dtype, k_scale.shape),
        (v_scale.dtype, v_scale.shape),
        v_scale_layout,
        dtype,
    )
    if seq_lens.shape[0] != block_table.shape[0]:
        raise KVCacheValueError(
            f"seq_lens: got shape {tuple(seq_lens.shape)}, expected [num_seqs={block_table.shape[0]}]"
        )
    _check_addresses(tensors)
    check_scale_values(scales)
    if kvjax.is_checked():
        block_size = plan.cache.spec.block_size
        blocks, lengths = _on_host("block_table", block_table), _on_host("seq_lens", seq_lens)
        if last_tokens is not None:
            ends = block_size * torch.arange(1, blocks.shape[1] + 1)
            blocks = blocks.masked_fill(lengths[:, None] - ends >= last_tokens, -1)
        kvjax.check_sequences(blocks.numpy(), lengths.numpy(), key_cache.shape[0], block_size)
    return plan


def attention_plan(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    v_scale_layout: str,
    sm_scale: float | None,
    sliding_window: int | None,
    logits_soft_cap: float | None,
    sinks: torch.Tensor | None,
) -> AttentionPlan:
    """The plan of a `paged_attention` call.

    Raises:
      KVCacheValueError, KVCacheTypeError: whatever does not fit, naming it and what would.
    """
    refuse_gradient("attention over a cache", query=query)
    check_devices(key_cache, query=query)
    if query.ndim not in (3, 4):
        raise KVCacheValueError(
            f"query: got {query.ndim} dimensions, expected [num_seqs, num_heads, head_size] or [num_seqs, q_len,"
            " num_heads, head_size]"
        )
    q_len = query.shape[1] if query.ndim == 4 else 1
    sm_scale, window, cap = attention_numbers(sm_scale, sliding_window, logits_soft_cap)
    gathered = gather_plan(
        key_cache,
        value_cache,
        block_table,
        seq_lens,
        kv_cache_dtype,
        k_scale,
        v_scale,
        v_scale_layout,
        torch.float32,
        last_tokens=None if window is None else window + q_len - 1,
    )
    spec = gathered.cache.spec
    if query.dtype not in INPUT_DTYPES:
        raise KVCacheTypeError(f"query: got dtype {query.dtype}, expected {' or '.join(map(str, INPUT_DTYPES))}")
    num_heads, head_size = query.shape[-2:]
    if query.shape[0] != block_table.shape[0] or head_size != spec.head_size:
        raise KVCacheValueError(
            f"query: got shape {tuple(query.shape)}, expected num_seqs={block_table.shape[0]} and"
            f" head_size={spec.head_size}"
        )
    if num_heads % spec.num_kv_heads or not num_heads:
        raise KVCacheValueError(
            f"query: got num_heads={num_heads}, expected a multiple of num_kv_heads={spec.num_kv_heads}"
        )
    if sinks is not None:
        refuse_gradient("attention over a cache", sinks=sinks)
        check_devices(key_cache, sinks=sinks)
        if sinks.dtype is not torch.float32:
            raise KVCacheTypeError(f"sinks: got dtype {sinks.dtype}, expected torch.float32")
        if sinks.shape != (num_heads,):
            raise KVCacheValueError(f"sinks: got shape {tuple(sinks.shape)}, expected [num_heads={num_heads}]")
    return AttentionPlan(
        gathered.cache,
        query.dtype,
        num_heads,
        q_len,
        gathered.scale_sizes,
        head_size**-0.5 if sm_scale is None else sm_scale,
        window,
        cap,
        sinks is not None,
    )


def attention_numbers(
    sm_scale: object, sliding_window: object, logits_soft_cap: object
) -> tuple[float | None, int | None, float | None]:
    """The numbers of a `paged_attention` call as torch's dispatcher takes them; a window that holds all is None.

    Raises:
      KVCacheValueError, KVCacheTypeError: one of another type, or one that is not finite in float32 or not positive.
    """
    scale, cap = _as_float("sm_scale", sm_scale), _as_float("logits_soft_cap", logits_soft_cap)
    if cap is not None and cap < torch.finfo(torch.float32).tiny:
        raise KVCacheValueError(f"logits_soft_cap: got {cap}, expected a positive number or None")
    if sliding_window is None:
        return scale, None, cap
    if isinstance(sliding_window, bool) or not isinstance(sliding_window, numbers.Integral):
        kind = type(sliding_window).__name__
        raise KVCacheTypeError(f"sliding_window: got {sliding_window!r} of type {kind}, expected an int or None")
    window = int(sliding_window)
    if window <= 0:
        raise KVCacheValueError(f"sliding_window: got {window}, expected a positive int or None")
    return scale, window if window <= MAX_WINDOW else None, cap


def _as_float(what: str, number: object) -> float | None:
    if number is None:
        return None
    if isinstance(number, bool) or not isinstance(number, numbers.Real):
        raise KVCacheTypeError(f"{what}: got {number!r} of type {type(number).__name__}, expected a float or None")
    try:
        value = float(number)
    except OverflowError:
        value = math.inf
    if not abs(value) <= torch.finfo(torch.float32).max:
        raise KVCacheValueError(f"{what}: got {number}, expected a number that is finite in float32")
    return value


def as_bool(name: str, value: object) -> bool:
    """`value` as Python's bool. Raises `KVCacheTypeError` where it is something else than one, or than NumPy's."""
    if not isinstance(value, (bool, np.bool_)):
        raise KVCacheTypeError(f"{name}: got {value!r} of type {type(value).__name__}, expected a bool")
    return bool(value)


def kind_of(value: object) -> str:
    """What something is, for a message; of JAX's arrays the public name."""
    return "a jax.Array" if isinstance(value, jax.Array) else f"a {type(value).__name__}"


def check_tensors(**tensors: object) -> None:
    """Raises `KVCacheTypeError` where something is no tensor, or none whose elements lie in memory as they are."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise KVCacheTypeError(f"{name}: got {kind_of(tensor)}, expected a torch.Tensor")
        check_strided(name, tensor)
        if tensor.is_quantized:
            raise KVCacheTypeError(f"{name}: got a quantized tensor, expected its numbers: {name}.dequantize()")


def check_strided(name: str, tensor: torch.Tensor) -> None:
    """Raises `KVCacheTypeError` for sparse and nested tensors."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        kind = "nested" if tensor.is_nested else tensor.layout
        raise KVCacheTypeError(f"{name}: got layout {kind}, expected torch.strided: {name}.to_dense()")


def refuse_gradient(what: str = "a write into a cache", /, **tensors: torch.Tensor) -> None:
    """Raises `KVCacheTypeError` where autograd would look for a gradient through stored values, which are rounded."""
    for name, tensor in tensors.items():
        if tensor.requires_grad and torch.is_grad_enabled():
            raise KVCacheTypeError(
                f"{name}: got requires_grad=True, but {what} has no gradient;"
                f" pass {name}.detach(), or call under torch.no_grad()"
            )


def check_devices(key_cache: torch.Tensor, **tensors: torch.Tensor) -> None:
    """Raises `KVCacheValueError` where a tensor is on another device than the cache."""
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
    _check_index("slot_mapping", slot_mapping, ("num_tokens",))
    num_heads, head_size = key.shape
    if value.shape[0] != num_heads:
        raise KVCacheValueError(f"value: got num_kv_heads={value.shape[0]}, expected {num_heads} as in key")
    dtype = resolve_cache_dtype(kv_cache_dtype, key_cache.dtype)
    cache = cache_plan(key_cache, value_cache, num_heads, (head_size, value.shape[1]), dtype, v_scale_layout)
    return WritePlan(
        cache,
        key.dtype,
        slot_mapping[0],
        _scale_sizes(k_scale, v_scale, cache.spec),
    )


@functools.lru_cache(maxsize=1024)
def _gather_plan(
    key_cache: Facts,
    value_cache: Facts,
    block_table: IndexFacts,
    seq_lens: IndexFacts,
    kv_cache_dtype: str,
    k_scale: ScaleFacts,
    v_scale: ScaleFacts,
    v_scale_layout: str,
    dtype: torch.dtype | None,
) -> GatherPlan:
    check_caches(key_cache, value_cache)
    _check_index("block_table", block_table, ("num_seqs", "max_blocks"))
    _check_index("seq_lens", seq_lens, ("num_seqs",))
    cache_dtype = resolve_cache_dtype(kv_cache_dtype, key_cache.dtype)
    key_bytes, value_bytes = (cache.shape[3] * cache.dtype.itemsize for cache in (key_cache, value_cache))
    head_sizes = (
        row_head_size("key_cache", key_bytes, cache_dtype),
        row_head_size("value_cache", value_bytes, cache_dtype),
    )
    cache = cache_plan(key_cache, value_cache, key_cache.shape[2], head_sizes, cache_dtype, v_scale_layout)
    return GatherPlan(
        cache,
        gathered_dtype(dtype, cache_dtype),
        _scale_sizes(k_scale, v_scale, cache.spec),
    )


def _row_facts(rows: torch.Tensor) -> Facts:
    if not rows.numel() and 0 in rows.stride():
        rows = rows.new_empty(rows.shape)  # empty numpy arrays come with strides of 0
    return Facts(rows.dtype, rows.shape[1:], rows.stride())  # how many rows there are is no part of a plan


def _check_rows(name: str, rows: Facts, dtypes: tuple[torch.dtype, ...]) -> None:
    if rows.dtype not in dtypes:
        raise KVCacheTypeError(f"{name}: got dtype {rows.dtype}, expected {' or '.join(map(str, dtypes))}")
    if len(rows.strides) != 3:
        raise KVCacheValueError(
            f"{name}: got {len(rows.strides)} dimensions, expected [num_tokens, num_kv_heads, head_size]"
        )
    if rows.strides[2] != 1 and rows.shape[1] != 1:
        raise KVCacheValueError(
            f"{name}: got strides {rows.strides}, expected 1 along head_size; copy with {name}.contiguous()"
        )


def _check_index(name: str, index: IndexFacts, dims: tuple[str, ...]) -> None:
    dtype, ndim = index
    if dtype not in INDEX_DTYPES:
        raise KVCacheTypeError(f"{name}: got dtype {dtype}, expected {' or '.join(map(str, INDEX_DTYPES))}")
    if ndim != len(dims):
        raise KVCacheValueError(f"{name}: got {ndim} dimensions, expected [{', '.join(dims)}]")


def _scale_sizes(k_scale: ScaleFacts, v_scale: ScaleFacts, spec: AttentionSpec) -> tuple[int, int]:
    takes_heads = spec.quant_mode is KVQuantMode.FP8_PER_TENSOR
    for name, (dtype, shape) in (("k_scale", k_scale), ("v_scale", v_scale)):
        if dtype is not torch.float32:
            raise KVCacheTypeError(f"{name}: got dtype {dtype}, expected torch.float32")
        if math.prod(shape) != 1 and not (takes_heads and shape == (spec.num_kv_heads,)):
            accepted = f"one element or [num_kv_heads={spec.num_kv_heads}]" if takes_heads else "one element"
            raise KVCacheValueError(f"{name}: got shape {tuple(shape)}, expected {accepted} for {spec.dtype.value!r}")
    return math.prod(k_scale[1]), math.prod(v_scale[1])


def _check_addresses(tensors: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.data_ptr() % tensor.element_size():
            raise KVCacheValueError(
                f"{name}: got address {tensor.data_ptr():#x}, expected a multiple of {tensor.dtype.itemsize},"
                f" the bytes of a {tensor.dtype}"
            )


def check_scale_values(scales: Mapping[str, torch.Tensor]) -> None:
    """Raises `KVCacheValueError` where a scale that lies on the host is none that `kvjax.check_scale` takes.

    In `kvjax.checked` also one that lies on a GPU; to read it makes the host wait.
    """
    for name, scale in scales.items():
        if scale.device.type == "cpu" or kvjax.is_checked():
            kvjax.check_scale(name, _on_host(name, scale).detach().numpy())


def _on_host(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_cuda:
        return tensor
    if torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(
            f"kvjax.checked() reads {name} on the host, which cannot wait while a CUDA graph is captured; leave it for"
            " the capture, with kvjax.checked(False)"
        )
    return tensor.cpu()
