"""Checks of decode scales, by type and by value; and reading values that may be traced."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify
from jax.typing import ArrayLike

from kvjax.errors import KVCacheTypeError, KVCacheValueError, for_torch, is_of_torch, kind_of, shown, type_name

MIN_SCALE = 2.0**-100
"""The smallest decode scale. Outside `MIN_SCALE` to `MAX_SCALE`, `1 / scale` and products with it leave float32's
normal range, and devices disagree on bits."""

MAX_SCALE = 2.0**100
"""The largest decode scale; see `MIN_SCALE`."""


def check_scale_type(what: str, scale: Any) -> None:
    """Checks that a scale is a number or an array of numbers, whatever their values.

    Raises:
      KVCacheTypeError: anything else: None, a bool, a string, a list, an array of bools.
    """
    if isinstance(scale, (jax.Array, np.ndarray, np.generic)):
        if not (jnp.issubdtype(scale.dtype, jnp.floating) or jnp.issubdtype(scale.dtype, jnp.integer)):
            raise KVCacheTypeError(f"{what}: got dtype {scale.dtype}, expected numbers, such as float32")
        return
    if isinstance(scale, (int, float)) and not isinstance(scale, bool):
        return
    expected = "expected a number or an array of numbers"
    if is_of_torch(scale):  # reading it may copy from a GPU
        raise KVCacheTypeError(f"{what}: got {kind_of(scale)}, {expected}{for_torch(scale)}")
    if isinstance(scale, (list, tuple)):
        expected += f": numpy.array({what}, numpy.float32)"
    raise KVCacheTypeError(f"{what}: got {shown(scale)} of type {type_name(scale)}, {expected}")


def check_scale(what: str, scale: Any) -> None:
    """Checks that a scale is a number or an array of numbers between `MIN_SCALE` and `MAX_SCALE`.

    Raises:
      KVCacheTypeError: it is neither.
      KVCacheValueError: names the first number out of range.
    """
    check_scale_type(what, scale)
    message = f"{what}: got {{value}}, expected between {MIN_SCALE:.2g} and {MAX_SCALE:.2g}"
    if isinstance(scale, (int, float)):  # also ints that no array can hold
        refuse(not MIN_SCALE <= scale <= MAX_SCALE, message, value=shown(scale))
        return
    xp, scales = readable(scale)
    scales = scales.reshape(-1)
    if not scales.size:
        return
    wide = scales.astype(np.float32 if xp is jnp else np.float64)  # the bounds overflow float16
    wrong = ~((wide >= MIN_SCALE) & (wide <= MAX_SCALE))
    first = scales[xp.argmax(wrong)]
    refuse(wrong.any(), message, value=first if xp is jnp else str(first))


def readable(*arrays: ArrayLike) -> tuple[ModuleType, *tuple[Any, ...]]:
    """Returns NumPy and the arrays on the host; if one of them is traced, jax.numpy and the arrays unchanged."""
    if any(isinstance(array, jax.core.Tracer) for array in arrays):
        return jnp, *map(jnp.asarray, arrays)
    return np, *map(np.asarray, arrays)


def refuse(wrong: Any, message: str, **values: Any) -> None:
    """Raises `KVCacheValueError` with the formatted message if `wrong`; if that is traced, by `checkify`."""
    if isinstance(wrong, jax.core.Tracer):
        checkify.check(~wrong, message, **values)
    elif wrong:
        raise KVCacheValueError(message.format(**values))
