"""The KV cache dtypes: their names, storage and quantization, in one table.

`parse_kv_cache_dtype` converts strings to `KVCacheDType` at the API boundary; everything else dispatches on the enum.
No other module may list dtype strings.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

import ml_dtypes
import numpy as np

from kvjax.errors import MAX_SHOWN, KVCacheTypeError, KVCacheValueError, UnsupportedError, got_expected, shown

NVFP4_BLOCK_SIZE = 16
"""Elements along the head dimension that share one NVFP4 block scale."""


class KVCacheDType(enum.Enum):
    """How the keys and values of a layer are stored; `AUTO` means "not resolved yet" and is never stored."""

    AUTO = "auto"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FP8_E4M3 = "fp8_e4m3"
    FP8_E5M2 = "fp8_e5m2"
    FP8_PER_TOKEN_HEAD = "fp8_per_token_head"
    INT8_PER_TOKEN_HEAD = "int8_per_token_head"
    NVFP4 = "nvfp4"
    NVFP4_4OVER6 = "nvfp4_4over6"
    FP8_K_NVFP4_V = "fp8_k_nvfp4_v"
    FP8_K_NVFP4_4OVER6_V = "fp8_k_nvfp4_4over6_v"
    INT8_K_NVFP4_V = "int8_k_nvfp4_v"
    INT8_K_NVFP4_4OVER6_V = "int8_k_nvfp4_4over6_v"
    FP8_DS_MLA = "fp8_ds_mla"

    __hash__ = object.__hash__  # compared by identity; Enum's hash is Python code, and every call hashes specs

    @functools.cached_property
    def info(self) -> DTypeInfo:
        """This dtype's row of the table.

        Raises:
          KVCacheValueError: `AUTO`, which must be resolved first, or a dtype whose `parts` have a row each.
        """
        if self in _MIXED:
            raise KVCacheValueError(
                f"KVCacheDType.{self.name} stores keys and values in different dtypes: ask its parts"
            )
        if self is KVCacheDType.AUTO:
            raise KVCacheValueError("KVCacheDType.AUTO has no storage: resolve it with resolve_kv_cache_dtype first")
        return _TABLE[self]

    @property
    def byte_format(self) -> KVCacheDType:
        """The dtype of the stored bytes, which is all that readers need to know.

        This dtype with `NVFP4` in place of `NVFP4_4OVER6`, which differs only in how writes choose block scales.
        """
        return _BYTE_FORMATS.get(self, self)

    @functools.cached_property
    def parts(self) -> tuple[KVCacheDType, KVCacheDType]:
        """The dtypes that keys and values are stored in, each with a row of the table of its own."""
        return _MIXED.get(self, (self, self))

    @property
    def is_quantized(self) -> bool:
        """Whether elements are stored with scales."""
        return any(part.info.quant_mode is not KVQuantMode.NONE for part in self.parts)

    @property
    def takes_scale(self) -> bool:
        """Whether writes and reads take a decode scale of the layer.

        False for unquantized dtypes and for those with a scale per token and head. Of `parts` that differ, each decides
        for itself: keys or values that take none ignore theirs.
        """
        return any(part.info.layer_scale is not None for part in self.parts)

    @property
    def exact_in(self) -> np.dtype | None:
        """The 16-bit dtype that holds stored keys and values exactly, without the layer's scales, or None."""
        keys, values = (part.info.exact_in for part in self.parts)
        return keys if keys == values else None

    @property
    def is_per_token_head(self) -> bool:
        """Whether each token and head has a scale, of its key and of its value."""
        return all(part.info.has_row_scales for part in self.parts)


class KVQuantMode(enum.IntEnum):
    """Granularity of a layer's scales, numbered as in vLLM."""

    NONE = 0
    FP8_PER_TENSOR = 1
    INT8_PER_TOKEN_HEAD = 2
    FP8_PER_TOKEN_HEAD = 3
    NVFP4 = 4

    @property
    def is_per_token_head(self) -> bool:
        """Whether each token and head has a scale, which the write computes."""
        return self in (KVQuantMode.INT8_PER_TOKEN_HEAD, KVQuantMode.FP8_PER_TOKEN_HEAD)


@dataclasses.dataclass(frozen=True)
class DTypeInfo:
    """One row of the table: how keys or values are stored.

    Attributes:
      aliases: other strings for the dtype.
      storage_dtype: dtype of the stored elements, or of the bytes that hold several.
      quant_mode: what vLLM calls the granularity of its scales.
      max: largest finite value that an element decodes to before the layer's scale.
      bits: of an element.
      block: elements that share a scale in the page: a number of them, a whole "row", or None without such scales.
      scale_dtype: dtype of these scales.
      layer_scale: scales that a call gives: one for the "layer", which may be one for each "head", or None.
      exact_in: of a quantized dtype, the 16-bit one that holds all that is stored, without the layer's scale; None if
        there is none. Keys and values with scales of blocks need one (`check_exact_in`).
    """

    aliases: tuple[str, ...]
    storage_dtype: np.dtype
    quant_mode: KVQuantMode
    max: float
    bits: int
    block: int | Literal["row"] | None = None
    scale_dtype: np.dtype | None = None
    layer_scale: Literal["layer", "head"] | None = None
    exact_in: np.dtype | None = None

    @property
    def elements_per_scale(self) -> int | None:
        """Elements that share a scale where rows are divided into blocks, else None."""
        return self.block if isinstance(self.block, int) else None

    @property
    def has_row_scales(self) -> bool:
        """Whether each row, that of a token and head, has a scale in the page, which the write computes."""
        return self.block == "row"

    @property
    def takes_head_scales(self) -> bool:
        """Whether the layer's scale may be one for each KV head."""
        return self.layer_scale == "head"

    @property
    def region_dtypes(self) -> tuple[np.dtype, ...]:
        """Dtypes of what a page's regions hold: elements, and scales if there are any."""
        return (self.storage_dtype,) if self.scale_dtype is None else (self.storage_dtype, self.scale_dtype)

    def row_bytes(self, head_size: int) -> tuple[int, int]:
        """Returns the bytes of one head of one token: (data, stored scales)."""
        scales = 1 if self.block == "row" else head_size // self.block if self.block else 0
        return head_size * self.bits // 8, scales * (self.scale_dtype.itemsize if self.scale_dtype else 0)

    def head_size_of(self, row_bytes: int) -> int | None:
        """Returns the head size whose rows have `row_bytes`, data and stored scales; None if there is none."""
        own = self.row_bytes(1)[1] if self.has_row_scales else 0
        unit = self.elements_per_scale or 1
        unit_bytes = sum(self.row_bytes(unit)) - own
        elements = (row_bytes - own) * unit  # times `unit_bytes`; maybe torch's symbolic int, which has no divmod
        return elements // unit_bytes if elements > 0 and elements % unit_bytes == 0 else None


def _float(scalar: type, quant_mode: KVQuantMode, *aliases: str, **fields: Any) -> DTypeInfo:
    dtype = np.dtype(scalar)
    return DTypeInfo(aliases, dtype, quant_mode, float(ml_dtypes.finfo(scalar).max), 8 * dtype.itemsize, **fields)


_E4M3, _HALF = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(np.float16)
_IN_FLOAT8: Mapping[str, Any] = {"layer_scale": "head", "exact_in": _HALF}
_IN_ROWS: Mapping[str, Any] = {"block": "row", "scale_dtype": np.dtype(np.float32)}
_IN_BLOCKS_OF_128: Mapping[str, Any] = {"block": 128, "scale_dtype": np.dtype(np.float32)}
_NVFP4 = DTypeInfo(
    (), np.dtype(np.uint8), KVQuantMode.NVFP4, 6.0 * 448.0, 4, NVFP4_BLOCK_SIZE, _E4M3, "layer", exact_in=_HALF
)

_TABLE: Mapping[KVCacheDType, DTypeInfo] = MappingProxyType(
    {
        KVCacheDType.FLOAT32: _float(np.float32, KVQuantMode.NONE, "float"),
        KVCacheDType.FLOAT16: _float(np.float16, KVQuantMode.NONE, "half"),
        KVCacheDType.BFLOAT16: _float(ml_dtypes.bfloat16, KVQuantMode.NONE),
        KVCacheDType.FP8_E4M3: _float(ml_dtypes.float8_e4m3fn, KVQuantMode.FP8_PER_TENSOR, "fp8", **_IN_FLOAT8),
        KVCacheDType.FP8_E5M2: _float(ml_dtypes.float8_e5m2, KVQuantMode.FP8_PER_TENSOR, **_IN_FLOAT8),
        KVCacheDType.FP8_PER_TOKEN_HEAD: _float(ml_dtypes.float8_e4m3fn, KVQuantMode.FP8_PER_TOKEN_HEAD, **_IN_ROWS),
        KVCacheDType.INT8_PER_TOKEN_HEAD: DTypeInfo(
            (), np.dtype(np.int8), KVQuantMode.INT8_PER_TOKEN_HEAD, 127.0, 8, **_IN_ROWS
        ),
        KVCacheDType.NVFP4: _NVFP4,
        KVCacheDType.NVFP4_4OVER6: _NVFP4,
        KVCacheDType.FP8_DS_MLA: _float(ml_dtypes.float8_e4m3fn, KVQuantMode.FP8_PER_TENSOR, **_IN_BLOCKS_OF_128),
    }
)

_MIXED: Mapping[KVCacheDType, tuple[KVCacheDType, KVCacheDType]] = MappingProxyType(
    {
        KVCacheDType.FP8_K_NVFP4_V: (KVCacheDType.FP8_E4M3, KVCacheDType.NVFP4),
        KVCacheDType.FP8_K_NVFP4_4OVER6_V: (KVCacheDType.FP8_E4M3, KVCacheDType.NVFP4_4OVER6),
        KVCacheDType.INT8_K_NVFP4_V: (KVCacheDType.INT8_PER_TOKEN_HEAD, KVCacheDType.NVFP4),
        KVCacheDType.INT8_K_NVFP4_4OVER6_V: (KVCacheDType.INT8_PER_TOKEN_HEAD, KVCacheDType.NVFP4_4OVER6),
    }
)
"""The dtypes whose keys and values differ, and the dtypes of these."""

MLA_PARTS: Mapping[KVCacheDType, tuple[KVCacheDType, KVCacheDType]] = MappingProxyType(
    {
        **{
            dtype: (dtype, dtype)
            for dtype in (KVCacheDType.FLOAT32, KVCacheDType.FLOAT16, KVCacheDType.BFLOAT16, KVCacheDType.FP8_E4M3)
        },
        KVCacheDType.FP8_DS_MLA: (KVCacheDType.FP8_DS_MLA, KVCacheDType.BFLOAT16),
        KVCacheDType.NVFP4: (KVCacheDType.NVFP4, KVCacheDType.BFLOAT16),
        KVCacheDType.NVFP4_4OVER6: (KVCacheDType.NVFP4_4OVER6, KVCacheDType.BFLOAT16),
    }
)
"""The dtypes of caches of multi-head latent attention (MLA), and the dtypes of their latents and of their rope keys."""

_BYTE_FORMATS: Mapping[KVCacheDType, KVCacheDType] = MappingProxyType(
    {
        KVCacheDType.NVFP4_4OVER6: KVCacheDType.NVFP4,
        KVCacheDType.FP8_K_NVFP4_4OVER6_V: KVCacheDType.FP8_K_NVFP4_V,
        KVCacheDType.INT8_K_NVFP4_4OVER6_V: KVCacheDType.INT8_K_NVFP4_V,
    }
)
"""The dtypes that write bytes of another."""

_BY_NAME: Mapping[str, KVCacheDType] = MappingProxyType(
    {dtype.value: dtype for dtype in KVCacheDType}
    | {alias: dtype for dtype, info in _TABLE.items() for alias in info.aliases}
)

_KERAS_POLICIES: Mapping[str, str] = MappingProxyType({"mixed_bfloat16": "bfloat16", "mixed_float16": "float16"})

ACCEPTED_KV_CACHE_DTYPES: tuple[str, ...] = tuple(_BY_NAME)
"""Every string that names a KV cache dtype, canonical names first."""

MLA_KV_CACHE_DTYPES: tuple[KVCacheDType, ...] = tuple(MLA_PARTS)
"""Every dtype that a cache of latents (MLA) can have."""

STORED_KV_CACHE_DTYPES: tuple[KVCacheDType, ...] = tuple(
    dtype for dtype in (*_TABLE, *_MIXED) if dtype is not KVCacheDType.FP8_DS_MLA
)
"""Every dtype that a cache of keys and values can have: all but `AUTO` and `FP8_DS_MLA`, which is of latents alone."""


def check_exact_in(name: str, parts: Sequence[DTypeInfo]) -> None:
    """Checks that 16 bits hold keys and values with scales of blocks, whatever a query's dtype.

    Where `KVCacheDType.exact_in` is None, attention to prompts rounds keys and values to the query's dtype. Those with
    scales of blocks may exceed float16's range, unless float16 holds them exactly; bfloat16 then has their range too.

    Raises:
      UnsupportedError: 16 bits do not hold them; the message has the name.
    """
    dtypes = [part.exact_in for part in parts]
    is_shared = None not in dtypes and len(set(dtypes)) == 1
    if not is_shared and any(part.elements_per_scale and part.exact_in != _HALF for part in parts):
        raise UnsupportedError(
            f"exact_in of {name!r}: got {' and '.join(map(str, dtypes))} for keys and values, of which some have scales"
            " of blocks; expected one dtype for both, or float16 for those"
        )


for _dtype in STORED_KV_CACHE_DTYPES:
    check_exact_in(_dtype.value, [_part.info for _part in _dtype.parts])


def parse_kv_cache_dtype(name: str | KVCacheDType) -> KVCacheDType:
    """Returns the dtype that a string names; an enum member is returned unchanged.

    Raises:
      KVCacheValueError: an unknown string; the message names it, the accepted ones and the closest.
      KVCacheTypeError: neither a string nor a `KVCacheDType`.
    """
    return parse_dtype_of("kv_cache_dtype", name)


def parse_dtype_of(what: str, name: object, stored: Collection[KVCacheDType] = tuple(KVCacheDType)) -> KVCacheDType:
    """Returns what `parse_kv_cache_dtype` does, for the argument that messages name `what`.

    Messages list the names of `stored`, the dtypes that the caller takes.
    """
    if isinstance(name, KVCacheDType):
        return name
    if not isinstance(name, str):
        raise KVCacheTypeError(
            f"{what}: got {shown(name)} of type {type(name).__name__}, expected a string or KVCacheDType"
        )
    try:
        return _BY_NAME[name]
    except KeyError:
        like = name[:MAX_SHOWN].lower().replace("float8", "fp8").replace("float4", "fp4")  # as jax and torch name them
        accepted = [each for each in ACCEPTED_KV_CACHE_DTYPES if _BY_NAME[each] in stored]
        raise KVCacheValueError(got_expected(what, name, accepted, like=like)) from None


def parse_model_dtype(dtype: object) -> KVCacheDType:
    """Returns the unquantized cache dtype that stores a model's compute dtype without loss.

    Accepts what configurations and frameworks write: `"bfloat16"`, `"torch.bfloat16"`, a `KVCacheDType`, a NumPy or
    ml_dtypes dtype, `jnp.bfloat16`, a `torch.dtype`. Keras's policy `"mixed_bfloat16"` computes in bfloat16 whatever
    the dtype of its variables, `"mixed_float16"` in float16.

    Raises:
      KVCacheValueError: no unquantized cache dtype matches (float64, float8, None, `AUTO`).
    """
    name = "" if isinstance(dtype, KVCacheDType) else _dtype_name(dtype).removeprefix("torch.")
    parsed = dtype if isinstance(dtype, KVCacheDType) else _BY_NAME.get(_KERAS_POLICIES.get(name, name))
    unquantized = [row for row in STORED_KV_CACHE_DTYPES if not row.is_quantized]
    if parsed is None or parsed not in unquantized:
        raise KVCacheValueError(got_expected("model dtype", dtype, [row.value for row in unquantized]))
    return parsed


def _dtype_name(dtype: object) -> str:
    if isinstance(dtype, str):
        return dtype
    # NumPy would parse lists and dicts as structured dtypes, or raise errors of many types.
    if isinstance(dtype, (np.dtype, type)):
        with contextlib.suppress(TypeError, ValueError):
            return np.dtype(dtype).name
    with contextlib.suppress(ValueError, RecursionError):  # ints of thousands of digits, deeply nested lists
        return str(dtype)  # str(torch.dtype) is its name
    return ""
