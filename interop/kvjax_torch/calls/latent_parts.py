"""The kernel calls of writes and gathers of latents (MLA), by the kernels for keys and values.

Latents and rope keys that are stored alike are keys and values of two sizes. Others take a call each, in which the
first half of a part is the keys and the second half the values; a part that its blocks with scales do not divide is
both. The blocks of `fp8_ds_mla` are read as heads with a scale each, and written as bytes that torch has encoded:
their scales and codes are exact quotients, unlike those of heads.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import torch

from kvjax import FullAttentionSpec, KVCacheDType, UnsupportedError, VScaleLayout
from kvjax_torch.arguments.plan import BlockRows, CachePlan, GatherPlan, ReadTensors, WritePlan, WriteTensors
from kvjax_torch.calls import arrays, gathering, writing
from kvjax_torch.launch.running import Call

_NAN = 0x7F
"""The code of NaN of any sign."""


class LatentPart(NamedTuple):
    """The latents or the rope keys of a cache as keys and values.

    Attributes:
      cache: their plan; both are in one tensor, that of the part.
      is_rope: which of the two.
      is_divided: whether values are the second half; else keys and values are both the whole part.
    """

    cache: CachePlan
    is_rope: bool
    is_divided: bool


def write_calls(plan: WritePlan, tensors: WriteTensors, unique_slots: bool) -> list[Call]:
    """The writes of a `concat_and_cache_mla` call that `plan` describes."""
    if not plan.cache.spec.is_mla:
        return [writing.write_call(plan, tensors, unique_slots)]
    calls = []
    for is_rope in range(2):
        own, x, pages = plan, tensors[is_rope], tensors[2 + is_rope]
        if not x.shape[-1]:
            continue
        if plan.cache.spec.parts[is_rope] is KVCacheDType.FP8_DS_MLA:
            own, rows, part = _as_bytes(plan, x[: tensors.slot_mapping.shape[0]])
        else:
            part = _part(plan.cache, bool(is_rope), reads=False)
            first, last = x.chunk(2, dim=-1) if part.is_divided else (x, x)
            rows = first, last
        _check_address(part, pages)
        given = tensors._replace(key=rows[0], value=rows[1], key_cache=pages, value_cache=pages)
        calls.append(writing.write_call(dataclasses.replace(own, cache=part.cache), given, unique_slots))
    return calls


def gather_calls(plan: GatherPlan, tensors: ReadTensors) -> list[Call]:
    """The gathers of what `plan` describes."""
    spec = plan.cache.spec
    if not spec.is_mla:
        return [gathering.gather_call(plan, tensors)]
    calls = []
    for is_rope, size in enumerate(spec.part_sizes):
        if size:
            part, pages = _part(plan.cache, bool(is_rope), reads=True), tensors[is_rope]
            _check_address(part, pages)
            own = tensors._replace(key_cache=pages, value_cache=pages)
            calls.append(gathering.gather_call(dataclasses.replace(plan, cache=part.cache), own))
    return calls


def gathered(plan: GatherPlan, calls: list[Call]) -> tuple[torch.Tensor, torch.Tensor]:
    """What `gather_calls` have stored: keys and values, or latents and rope keys, of one head."""
    spec = plan.cache.spec
    if not spec.is_mla:
        keys, values = calls[0].tensors[-2:]
        return keys, values
    results = []
    for is_rope, call in enumerate(calls):
        keys, values = (x.flatten(2)[:, :, None] for x in call.tensors[-2:])
        is_divided = _part(plan.cache, bool(is_rope), reads=True).is_divided
        results.append(torch.cat([keys, values], dim=-1) if is_divided else keys)
    if len(results) == 1:  # without rope keys
        results.append(results[0][..., :0])
    latents, rope_keys = results
    return latents, rope_keys


@functools.lru_cache(maxsize=1024)
def _part(cache: CachePlan, is_rope: bool, *, reads: bool) -> LatentPart:
    spec = cache.spec
    dtype, size = spec.parts[is_rope], spec.part_sizes[is_rope]
    rows = cache.values if is_rope else cache.keys
    unit = dtype.info.elements_per_scale or 1
    is_divided = not size % (2 * unit)
    part_size = size // 2 if is_divided else size
    heads = 1
    if dtype is KVCacheDType.FP8_DS_MLA and reads:
        dtype, heads, part_size = KVCacheDType.FP8_PER_TOKEN_HEAD, part_size // unit, unit
        widths = dtype.info.row_bytes(part_size)
        rows = rows._replace(
            regions=tuple(
                dataclasses.replace(region, head_stride=width, row_bytes=width)
                for region, width in zip(rows.regions, widths, strict=True)
            )
        )
    own = FullAttentionSpec(
        spec.block_size, heads, part_size, part_size, dtype=dtype, v_scale_layout=VScaleLayout.LINEAR
    )
    row_bytes = own.dtype.info.row_bytes(part_size)
    keys = _moved(rows, [0] * len(rows.regions), row_bytes)
    values = _moved(rows, [heads * width if is_divided else 0 for width in row_bytes], row_bytes)
    return LatentPart(CachePlan(own, keys, values), is_rope, is_divided)


def _moved(rows: BlockRows, starts: list[int], row_bytes: tuple[int, int]) -> BlockRows:
    """The rows of parts of regions: from byte `starts` of each on, `row_bytes` long."""
    regions = tuple(
        dataclasses.replace(region, base=region.base + start, row_bytes=width)
        for region, start, width in zip(rows.regions, starts, row_bytes, strict=False)
    )
    return rows._replace(regions=regions)


def _as_bytes(plan: WritePlan, kv_c: torch.Tensor) -> tuple[WritePlan, tuple[torch.Tensor, torch.Tensor], LatentPart]:
    """The write of latents of `fp8_ds_mla` as float16, which is written as it is: codes as keys, scales as values."""
    codes, scales = encode_fp8_ds_mla(kv_c.flatten(1))
    rows = tuple(x.view(torch.float16)[:, None] for x in (codes, scales))
    spec = FullAttentionSpec(plan.cache.spec.block_size, 1, *(x.shape[-1] for x in rows), dtype=KVCacheDType.FLOAT16)
    data, of_blocks = plan.cache.keys.regions
    keys, values = (plan.cache.keys._replace(regions=(region,)) for region in (data, of_blocks))
    cache = CachePlan(spec, keys, values)
    return dataclasses.replace(plan, dtype=torch.float16), (rows[0], rows[1]), LatentPart(cache, False, False)


def encode_fp8_ds_mla(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`kvjax.quant.encode_fp8_ds_mla` of `[num_tokens, size]`: uint8 codes and float32 scales."""
    info = KVCacheDType.FP8_DS_MLA.info
    blocks = x.float().unflatten(-1, (-1, info.elements_per_scale or 1))
    amax = torch.where(blocks.isnan(), 0.0, blocks.abs()).amax(-1, keepdim=True)
    # By a tensor: torch multiplies by the reciprocal of a number.
    scales = (amax / torch.full_like(amax, info.max)).clamp(min=torch.finfo(torch.float32).tiny)
    quotients = (blocks / scales).clamp(-info.max, info.max)
    codes = quotients.to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(quotients.isnan(), _NAN, codes).flatten(-2), scales.squeeze(-1)


def _check_address(part: LatentPart, pages: torch.Tensor) -> None:
    itemsize = part.cache.spec.array_dtype.itemsize
    if arrays.page_alignment(pages) % itemsize:
        raise UnsupportedError(
            f"kv_cache: got {'rope keys' if part.is_rope else 'latents'} at addresses that {itemsize} does not divide,"
            " expected on CUDA blocks and rows of a multiple of it"
        )
