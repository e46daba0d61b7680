"""Slots of arrays of states `[num_states, ...]` as bytes, for `export_blocks` and `import_blocks`."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.errors import KVCacheTypeError, KVCacheValueError, UnsupportedError
from kvjax.memory import check_memory
from kvjax.ops.blocks import is_traced, sharding_of_pages, take_jit, with_pages


def is_states(value: object) -> bool:
    """Returns whether a leaf of caches is an array of states."""
    return isinstance(value, (jax.Array, np.ndarray))


def check_states(what: str, states: Any, *, is_written: bool) -> None:
    """Raises if slots of an array of states cannot be read, or written in place."""
    if is_traced(states):
        raise KVCacheTypeError(f"{what}: got traced states, expected a call outside jit")
    if not _has_whole_bytes(states.dtype):
        raise KVCacheTypeError(f"{what}: got states of {states.dtype}, expected integers or floats of whole bytes")
    if states.ndim == 0:
        raise KVCacheValueError(f"{what}: got states of shape (), expected [num_states, ...]")
    if isinstance(states, np.ndarray):
        if is_written and not states.flags.writeable:
            raise KVCacheValueError(f"{what}: got states in a read-only array, expected one that can be written")
        return
    if states.is_deleted():
        raise KVCacheValueError(f"{what}: got states that were donated; use those that the call returned")
    if not states.is_fully_addressable:
        raise UnsupportedError(f"{what}: got states of several processes, expected those whose devices are all here")
    check_memory(what, states.sharding)


def _has_whole_bytes(dtype: Any) -> bool:
    """Returns whether a state's bytes are its elements', in the order of a little-endian machine."""
    info = jnp.iinfo if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo
    is_number = jnp.issubdtype(dtype, jnp.integer) or jnp.issubdtype(dtype, jnp.floating)
    return is_number and np.dtype(dtype).isnative and info(dtype).bits == 8 * np.dtype(dtype).itemsize


def state_description(states: Any) -> dict[str, Any]:
    """Returns what an export says of one state, as JSON values."""
    return {"dtype": np.dtype(states.dtype).name, "shape": [*states.shape[1:]]}


def num_state_bytes(states: Any) -> int:
    """Returns the bytes of one state."""
    return states.dtype.itemsize * int(np.prod(states.shape[1:], dtype=np.int64))


def state_to_host(states: Any, slot: int) -> np.ndarray:
    """Returns a state's bytes, uint8 `[num_state_bytes]`."""
    if isinstance(states, np.ndarray):
        state: Any = states[slot : slot + 1]
    else:
        with _in_64_bits():
            state = take_jit(states, np.array([slot], np.int32), None)
    return np.ascontiguousarray(np.asarray(state)).reshape(-1).view(np.uint8)


def state_from_host(states: Any, state: np.ndarray) -> Any:
    """Returns the state whose bytes `state_to_host` returned, placed where `states` are, for `put_state`."""
    is_here = isinstance(states, np.ndarray)
    stored = states.dtype if is_here else f"uint{8 * states.dtype.itemsize}"
    own = state.view(stored).reshape(1, *states.shape[1:])
    if is_here:
        return own
    with _in_64_bits():
        return jax.device_put(own, sharding_of_pages(states, None))


def put_state(what: str, states: Any, state: Any, slot: int) -> Any:
    """Writes a state of `state_from_host` into a slot of the array `what`, in place; a JAX array is donated."""
    if isinstance(states, np.ndarray):
        states[slot : slot + 1] = state
        return states
    with _in_64_bits():
        return with_pages(what, states, state, np.array([slot], np.int32), None)


def _in_64_bits() -> AbstractContextManager[None]:
    """Returns a context with x64 on. Without it, JAX truncates states of 64 bits that were made with it."""
    return jax.enable_x64(True)
