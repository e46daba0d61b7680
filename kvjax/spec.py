"""The layout of one layer's cache: shapes, sizes in bytes, and where each byte of a token is in a page.

All of it is exact integer arithmetic on a spec's fields, without arrays or devices.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Self

import numpy as np

from kvjax.dtypes import (
    MLA_KV_CACHE_DTYPES,
    MLA_PARTS,
    STORED_KV_CACHE_DTYPES,
    KVCacheDType,
    KVQuantMode,
    parse_dtype_of,
    parse_model_dtype,
)
from kvjax.errors import KVCacheTypeError, KVCacheValueError, got_expected, kind_of, shown, type_name
from kvjax.layouts import CacheLayout, VScaleLayout
from kvjax.pages import SWIZZLE_TOKENS, PageRegions, interleaved_regions, separate_regions

MAX_SIZE = 2**63 - 1
"""Limit on any size: more than any memory, small enough that products of sizes convert to float."""


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """The KV cache of one attention layer. Use `FullAttentionSpec`, `SlidingWindowSpec` or `MLAAttentionSpec`.

    Attributes:
      block_size: tokens in a block (page).
      num_kv_heads: KV heads of this layer on this device.
      head_size: elements of one head's key.
      head_size_v: elements of one head's value; default `head_size`.
      dtype: how elements are stored, never `AUTO`; set from a `KVCacheDType` or its string.
      layout: order of a block's inner dimensions, `"NHD"` or `"HND"`.
      v_scale_layout: order of NVFP4 V scales, `"linear"` or `"swizzled"` (NVFP4 only, `block_size` a multiple of 4).
      sliding_window: tokens that a query sees, its own included; set in a `SlidingWindowSpec`, and only there.
      page_size_padded: bytes of a page in a pool that several layers share. The cache is then that pool, uint8
        `[num_blocks, page_size_padded]`; bytes of a page past `real_page_size_bytes` are never written.
      model_dtype: the model's compute dtype, in any framework's notation: the default result dtype of `gather_kv` for
        a quantized layer.

    Raises:
      KVCacheValueError, KVCacheTypeError: from the constructor, for an invalid field; the message names it.
    """

    block_size: int
    num_kv_heads: int
    head_size: int
    head_size_v: int = None  # type: ignore[assignment]  # filled in from head_size
    _: dataclasses.KW_ONLY
    dtype: KVCacheDType
    layout: CacheLayout = CacheLayout.NHD
    v_scale_layout: VScaleLayout = VScaleLayout.LINEAR
    sliding_window: int | None = None
    page_size_padded: int | None = None
    model_dtype: KVCacheDType = KVCacheDType.BFLOAT16

    PART_NAMES: ClassVar[tuple[str, str]] = ("head_size", "head_size_v")
    """The fields of `part_sizes`."""
    _DTYPES: ClassVar[tuple[KVCacheDType, ...]] = STORED_KV_CACHE_DTYPES

    def __new__(cls, *args: Any, is_latent: object = None, **fields: Any) -> Self:
        """Refuses a field of earlier versions by name."""
        if is_latent is not None:
            raise KVCacheTypeError(_no_longer_latent(cls.__name__, is_latent))
        return super().__new__(cls)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores a pickle; one of an earlier version may have `is_latent`."""
        state = dict(state)
        if state.pop("is_latent", False):
            raise KVCacheValueError(_no_longer_latent(type(self).__name__, True))
        self.__dict__.update(state)

    def __post_init__(self) -> None:
        if self.head_size_v is None:
            object.__setattr__(self, "head_size_v", self.head_size)
        for name in self._sizes():
            size = as_int(f"{type(self).__name__}.{name}", getattr(self, name), least=1, most=MAX_SIZE)
            object.__setattr__(self, name, size)
        object.__setattr__(self, "dtype", parse_dtype_of(f"{type(self).__name__}.dtype", self.dtype, self._DTYPES))
        object.__setattr__(self, "layout", CacheLayout.parse(self.layout))
        object.__setattr__(self, "v_scale_layout", VScaleLayout.parse(self.v_scale_layout))
        object.__setattr__(self, "model_dtype", parse_model_dtype(self.model_dtype))
        self._check_dtype()
        self._check_blocks()
        if self.page_size_padded is not None and self.page_size_padded < self.real_page_size_bytes:
            raise KVCacheValueError(
                f"page_size_padded: got {self.page_size_padded}, expected at least {self.real_page_size_bytes},"
                " the bytes of one page of this spec"
            )

    def _sizes(self) -> list[str]:
        names = ["block_size", "num_kv_heads", "head_size", "head_size_v"]
        return names + [name for name in ("sliding_window", "page_size_padded") if getattr(self, name) is not None]

    def _check_dtype(self) -> None:
        _ = self.dtype.is_quantized  # raises for AUTO
        if self.dtype not in self._DTYPES:
            names = [dtype.value for dtype in self._DTYPES]
            hint = "it stores latents: MLAAttentionSpec" if self.dtype in MLA_KV_CACHE_DTYPES else None
            raise KVCacheValueError(got_expected(f"{type(self).__name__}.dtype", self.dtype.value, names, hint=hint))

    def _check_blocks(self) -> None:
        for name, size, part in zip(self.PART_NAMES, self.part_sizes, self.parts, strict=True):
            if size % (block := part.info.elements_per_scale or 1):
                raise KVCacheValueError(f"{name}: got {size}, expected a multiple of {block} for {part.value!r}")
        if not self.is_swizzled:
            return
        if self.parts[1].info.elements_per_scale is None:
            raise KVCacheValueError(
                f"v_scale_layout: got 'swizzled' with dtype {self.dtype.value!r}, which has no block scales;"
                " expected 'linear'"
            )
        if self.block_size % SWIZZLE_TOKENS:
            raise KVCacheValueError(
                f"block_size: got {self.block_size}, expected a multiple of {SWIZZLE_TOKENS}"
                " for v_scale_layout='swizzled'"
            )

    @property
    def quant_mode(self) -> KVQuantMode:
        """The granularity of this layer's scales; `NONE` for an unquantized layer.

        Raises:
          KVCacheValueError: keys and values have dtypes of their own, `dtype.parts`.
        """
        return self.dtype.info.quant_mode

    @property
    def storage_dtype(self) -> np.dtype[Any]:
        """Dtype of a stored element; uint8 where a byte holds two codes, or keys and values differ."""
        keys, values = (part.info.storage_dtype for part in self.parts)
        return keys if keys == values else np.dtype(np.uint8)

    @property
    def is_mla(self) -> bool:
        """Whether tokens are latents of multi-head latent attention, not keys and values."""
        return False

    @property
    def is_diffkv(self) -> bool:
        """Whether keys and values have different head sizes."""
        return self.head_size != self.head_size_v

    @property
    def is_swizzled(self) -> bool:
        """Whether the V scales are stored in the swizzled layout."""
        return self.v_scale_layout is VScaleLayout.SWIZZLED

    @property
    def has_head_axis(self) -> bool:
        """Whether the cache array has real axes for tokens, heads and the head dimension.

        A shared pool has no such axes; in pages that hold scales they are nominal, and `regions` gives the byte order.
        """
        return not self.stores_scales and self.page_size_padded is None

    @property
    def stores_scales(self) -> bool:
        """Whether pages hold scales beside the data: one per block of elements, or per token and head."""
        return any(part.info.scale_dtype is not None for part in self.parts)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys, values and stored scales in this layer, without padding."""
        return self.num_kv_heads * sum(map(sum, self.row_bytes))

    @property
    def real_page_size_bytes(self) -> int:
        """Bytes of one page without padding."""
        return self.block_size * self.bytes_per_token

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one page, padding included."""
        return self.real_page_size_bytes if self.page_size_padded is None else self.page_size_padded

    @property
    def page_padding_bytes(self) -> int:
        """Bytes of padding in each page."""
        return self.page_size_bytes - self.real_page_size_bytes

    def cache_shape(self, num_blocks: int, num_layers: int | None = None) -> tuple[int, ...]:
        """Returns the shape of this layer's array of `num_blocks` pages, in elements of `array_dtype`.

        `[num_blocks, 2, block_size, num_kv_heads, row]` (HND: heads before tokens), where `row` is `head_size`
        elements, or with stored scales the bytes of data and scales; `[num_blocks, block_size, num_kv_heads,
        row + row_v]` if head sizes of keys and values differ; `[num_blocks, block_size, row]` of latents;
        `[num_blocks, page_size_padded]` in a shared pool. With `num_layers`, it is `[num_blocks, num_layers, ...]`.
        """
        pages = (num_blocks,) if num_layers is None else (num_blocks, num_layers)
        return (*pages, *(self._page_shape() if self.page_size_padded is None else (self.page_size_padded,)))

    def _page_shape(self) -> tuple[int, ...]:
        row, row_v = (sum(row) // self.storage_dtype.itemsize for row in self.row_bytes)
        inner = (self.block_size, self.num_kv_heads)
        if self.layout is CacheLayout.HND:
            inner = inner[::-1]
        return (*inner, row + row_v) if self.is_diffkv or row != row_v else (2, *inner, row)

    @property
    def array_dtype(self) -> np.dtype[Any]:
        """Dtype of the cache array: uint8 for quantized layers and shared pools, else `storage_dtype`.

        XLA on CPU widens a float8 array to float16 and back in every operation, which copies the cache in each write
        and changes NaNs in slots that were not written. Integers are unaffected.
        """
        in_bytes = self.dtype.is_quantized or self.page_size_padded is not None
        return np.dtype(np.uint8) if in_bytes else self.storage_dtype

    @functools.cached_property
    def regions(self) -> PageRegions:
        """Where a page's keys, values and stored scales are, in bytes."""
        counts = [len(part.info.region_dtypes) for part in self.parts]
        rows = [size for row, count in zip(self.row_bytes, counts, strict=True) for size in row[:count]]
        make_regions = interleaved_regions if self._is_interleaved() else separate_regions
        regions = make_regions(rows, self.block_size, self.num_kv_heads, self.layout)
        if self.is_swizzled:
            regions[-1] = dataclasses.replace(regions[-1], swizzled=True)
        return PageRegions(tuple(regions[: counts[0]]), tuple(regions[counts[0] :]))

    def _is_interleaved(self) -> bool:
        """Whether all that a page holds of one token and head is adjacent."""
        return self.is_diffkv and not self.stores_scales

    @property
    def head_sizes(self) -> tuple[int, int]:
        """Elements of a head's key and of its value."""
        return self.head_size, self.head_size_v

    @property
    def parts(self) -> tuple[KVCacheDType, KVCacheDType]:
        """Dtypes of the two rows that a page holds for each token and head: those of its key and of its value."""
        return self.dtype.parts

    @property
    def part_sizes(self) -> tuple[int, int]:
        """Elements of these rows."""
        return self.head_sizes

    @property
    def row_bytes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Bytes of one head of one token: data and stored scales, of each of its `parts`."""
        keys, values = (part.info.row_bytes(size) for part, size in zip(self.parts, self.part_sizes, strict=True))
        return keys, values


@dataclasses.dataclass(frozen=True)
class FullAttentionSpec(AttentionSpec):
    """A layer whose queries see every earlier token."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sliding_window is not None:
            raise KVCacheValueError(
                f"FullAttentionSpec.sliding_window: got {self.sliding_window}, expected None (or a SlidingWindowSpec)"
            )


@dataclasses.dataclass(frozen=True)
class SlidingWindowSpec(AttentionSpec):
    """A layer whose queries see the last `sliding_window` tokens, their own included."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sliding_window is None:
            raise KVCacheValueError("SlidingWindowSpec.sliding_window: got None, expected a positive int")


@dataclasses.dataclass(frozen=True)
class MLAAttentionSpec(AttentionSpec):
    """A layer of multi-head latent attention (MLA), which keeps one latent of each token for all heads.

    A token is stored as its latent, the low-rank key and value after the norm, and its rope key, the part of the key
    with positions. Attention is that of one KV head: keys are latents followed by rope keys, values are latents.

    A page is `block_size` rows, one for each token, without gaps: the latent's data, its stored scales if there are
    any, the rope key. `cache_shape` is `[num_blocks, block_size, row]`.

    | dtype | a row of 512 and 64 elements | bytes |
    | --- | --- | --- |
    | float32, float16, bfloat16 | elements | 2,304 or 1,152 |
    | fp8_e4m3 | elements, all with the layer's scale | 576 |
    | fp8_ds_mla | 512 e4m3, 4 float32 scales of 128 each, 64 bfloat16 | 656 |
    | nvfp4, nvfp4_4over6 | 256 bytes of e2m1, 32 e4m3 scales of 16 each, 64 bfloat16; the layer's scale | 416 |

    Attributes:
      block_size: tokens in a block (page).
      kv_lora_rank: elements of a latent.
      qk_rope_head_dim: elements of a rope key; may be 0.
      num_kv_heads: 1.
      head_size: elements of a key, `kv_lora_rank + qk_rope_head_dim`.
      head_size_v: elements of a value, `kv_lora_rank`.
      layout: NHD; with one head, a block has one order.
      v_scale_layout: linear.
      dtype: of `MLA_KV_CACHE_DTYPES`.
      sliding_window: tokens that a query sees, its own included; None for all.
    """

    num_kv_heads: int = dataclasses.field(init=False, repr=False, default=1)
    head_size: int = dataclasses.field(init=False, repr=False, default=0)
    head_size_v: int = dataclasses.field(init=False, repr=False, default=0)
    layout: CacheLayout = dataclasses.field(init=False, repr=False, default=CacheLayout.NHD)
    v_scale_layout: VScaleLayout = dataclasses.field(init=False, repr=False, default=VScaleLayout.LINEAR)
    kv_lora_rank: int = dataclasses.field(kw_only=False)
    qk_rope_head_dim: int = dataclasses.field(kw_only=False)

    PART_NAMES: ClassVar[tuple[str, str]] = ("kv_lora_rank", "qk_rope_head_dim")
    _DTYPES: ClassVar[tuple[KVCacheDType, ...]] = MLA_KV_CACHE_DTYPES

    def __post_init__(self) -> None:
        for name, least in zip(self.PART_NAMES, (1, 0), strict=True):
            size = as_int(f"{type(self).__name__}.{name}", getattr(self, name), least=least, most=MAX_SIZE)
            object.__setattr__(self, name, size)
        object.__setattr__(self, "head_size", self.kv_lora_rank + self.qk_rope_head_dim)
        object.__setattr__(self, "head_size_v", self.kv_lora_rank)
        super().__post_init__()

    def _page_shape(self) -> tuple[int, ...]:
        return self.block_size, self.bytes_per_token // self.array_dtype.itemsize

    def _is_interleaved(self) -> bool:
        return True

    @property
    def is_mla(self) -> bool:
        """True."""
        return True

    @property
    def has_head_axis(self) -> bool:
        """False: rows have no axis of heads."""
        return False

    @property
    def parts(self) -> tuple[KVCacheDType, KVCacheDType]:
        """Dtypes of the latents and of the rope keys."""
        return MLA_PARTS[self.dtype]

    @property
    def part_sizes(self) -> tuple[int, int]:
        """Elements of a latent and of a rope key."""
        return self.kv_lora_rank, self.qk_rope_head_dim


_KINDS: dict[str, type[AttentionSpec]] = {
    kind.__name__: kind for kind in (AttentionSpec, FullAttentionSpec, SlidingWindowSpec, MLAAttentionSpec)
}


def _no_longer_latent(kind: str, value: object) -> str:
    return (
        f"{kind}.is_latent: got {shown(value)}, but specs have no such field any more: the cache of a layer of"
        " multi-head latent attention is MLAAttentionSpec(block_size, kv_lora_rank, qk_rope_head_dim, dtype=...), which"
        " stores other bytes; ModelKVConfig.from_hf_config and resolve_layer_specs make it"
    )


def spec_to_dict(spec: AttentionSpec) -> dict[str, Any]:
    """Returns a spec as JSON values; `spec_from_dict` restores it."""
    fields = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec) if field.init}
    return {"kind": type(spec).__name__, **fields, "dtype": spec.dtype.value, "model_dtype": spec.model_dtype.value}


def spec_from_dict(fields: dict[str, Any]) -> AttentionSpec:
    """Returns the spec that `spec_to_dict` described."""
    fields = {**fields, "dtype": KVCacheDType(fields["dtype"])}
    if fields.get("is_latent") is False:  # of an earlier version
        del fields["is_latent"]
    return _KINDS[fields.pop("kind")](**fields)


def as_specs(specs: object) -> tuple[AttentionSpec, ...]:
    """Returns a sequence of specs as a tuple; raises `KVCacheTypeError` for anything else, such as a single spec."""
    if not isinstance(specs, Sequence) or not all(isinstance(spec, AttentionSpec) for spec in specs):
        raise KVCacheTypeError(f"specs: got {shown(specs)}, expected a sequence of specs, one for each layer")
    return tuple(specs)


def as_int(what: str, value: object, *, least: int | None = None, most: int | None = None) -> int:
    """Returns `value` as a Python int, whose products do not overflow as NumPy's would."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise KVCacheTypeError(f"{what}: got {shown(value)} of type {type_name(value)}, expected an int")
    size = int(value)
    if least is not None and size < least:
        raise KVCacheValueError(f"{what}: got {shown(size)}, expected an int of at least {least}")
    if most is not None and size > most:
        raise KVCacheValueError(f"{what}: got {shown(size)}, expected an int of at most {most}")
    return size


def as_items(what: str, value: object, expected: str) -> list[Any]:
    """Returns the entries of a sequence, or of anything else with an order; `expected` words it for the message."""
    is_other = isinstance(value, (str, bytes, dict, set, frozenset)) or getattr(value, "ndim", 1) == 0
    if is_other or not isinstance(value, Iterable):
        raise KVCacheTypeError(f"{what}: got {kind_of(value)}, expected {expected}")
    return list(value)


def as_bool(what: str, value: object) -> bool:
    """Returns `value` as a Python bool."""
    if not isinstance(value, (bool, np.bool_)):
        raise KVCacheTypeError(f"{what}: got {shown(value)} of type {type_name(value)}, expected a bool")
    return bool(value)
