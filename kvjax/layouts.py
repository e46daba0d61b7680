"""The byte orders inside a block, as enums that also parse the common strings."""

from __future__ import annotations

import enum
from typing import Self

from kvjax.errors import KVCacheValueError, got_expected


class _Choice(enum.StrEnum):
    @classmethod
    def parse(cls, name: str) -> Self:
        """Returns the member for `name` (a member or its exact string); raises `KVCacheValueError` otherwise."""
        try:
            return cls(name)
        except ValueError:
            raise KVCacheValueError(got_expected(cls._what(), name, list(cls))) from None

    @classmethod
    def _what(cls) -> str:
        return cls.__name__


class CacheLayout(_Choice):
    """Order of the inner dimensions of a block: token, head, dim or head, token, dim."""

    NHD = "NHD"
    HND = "HND"

    @classmethod
    def _what(cls) -> str:
        return "layout"


class VScaleLayout(_Choice):
    """Order of the NVFP4 V scales of one (block, head) tile: as the data, or interleaved by four tokens."""

    LINEAR = "linear"
    SWIZZLED = "swizzled"

    @classmethod
    def _what(cls) -> str:
        return "v_scale_layout"
