"""Pallas' GPU interpret mode, taught what it lacks: reshaped and dynamically sliced references, and errors for races.

An access through such a reference is carried out as accesses to the boxes of the buffer that it consists of, a range
of indices along each axis. So race detection sees exactly the elements that are touched, and nothing between them.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.experimental.pallas.tpu  # else interpret mode does so when it first compiles, and all is traced anew
import numpy as np
from jax._src import callback
from jax._src.pallas.mosaic.interpret import thread_map
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, shared_memory
from jax._src.state import indexing
from jax._src.state.types import ReshapeTransform, TransposeTransform
from jax.experimental.pallas import mosaic_gpu as plgpu


@contextlib.contextmanager
def interpret_mode(*, detect_races: bool = False) -> Iterator[None]:
    """Kernels that are traced in this context run on the CPU, operation by operation. Wait for their results in it.

    With `detect_races`, two accesses to one element, one of them a write and neither ordered before the other, raise a
    RuntimeError with "RACE DETECTED" in it. Programs of a grid are then blocks of one cluster, for among those, unlike
    among the blocks of a grid, no race goes unseen.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(callback, "io_callback_impl", _call_with_numpy_arrays))
        stack.enter_context(mock.patch.object(shared_memory, "_to_int", _to_int))
        stack.enter_context(mock.patch.object(thread_map, "_run_jaxpr", _run_compiled))
        stack.enter_context(mock.patch.object(gpu_callbacks, "_get", _get_by_boxes(gpu_callbacks._get)))
        stack.enter_context(mock.patch.object(gpu_callbacks, "_swap", _swap_by_boxes(gpu_callbacks._swap)))
        if detect_races:
            stack.enter_context(mock.patch.object(plgpu, "kernel", _grid_as_cluster(plgpu.kernel)))
        stack.enter_context(plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=detect_races)))
        stack.callback(gpu_callbacks.reset_gpu_interpret_mode_state)
        yield
        if detect_races and gpu_callbacks.get_races().races_found:
            raise RuntimeError("RACE DETECTED, and printed above")  # jax 0.12 has raised an error of its own


def _call_with_numpy_arrays(*args: Any, callback: Callable[..., Any], **_: Any) -> Any:
    """Calls what a program calls back, without a copy of each argument to a device."""
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        return jax.tree.map(np.asarray, callback(*args))


def _to_int(x: Any) -> Any:
    """Of an array of any library; jax's own takes none of NumPy's."""
    return x if isinstance(x, jax.core.Tracer) else int(x)


_compiling = threading.Lock()
_compiled: dict[Any, Any] = {}


def _run_compiled(jaxpr: Any, consts: Any, *args: Any) -> None:
    """Runs the program of a warpgroup, which jax would compile in each of them, and for each block of a grid."""
    with _compiling:
        if jaxpr not in _compiled:
            if len(_compiled) == 64:
                _compiled.clear()
            _compiled[jaxpr] = jax.jit(thread_map._run, static_argnums=0).lower(jaxpr, consts, *args).compile()
        program = _compiled[jaxpr]
    program(consts, *args)


def _grid_as_cluster(kernel: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(body, *, grid, grid_names, **kwargs):
        return kernel(body, cluster=grid, cluster_names=grid_names, **kwargs)

    return wrapped


# jax 0.11.1 lets exceptions end the callback; later ones raise them in the caller.
_fail_on_exception = getattr(gpu_callbacks, "fail_on_exception", lambda callback: callback)


def _get_by_boxes(get: Callable[..., Any]) -> Callable[..., Any]:
    @_fail_on_exception
    def wrapped(token, mesh_location, thread, key, transforms, *args, **kwargs):
        if not _is_refused(transforms):
            return get(token, mesh_location, thread, key, transforms, *args, **kwargs)
        elements, buffer = _resolve(key, transforms)
        got = np.empty(elements.size, buffer.dtype)
        for part, indexer in _boxes(elements, buffer.shape):
            token, values = get(token, mesh_location, thread, key, (indexer,), *args, **kwargs)
            got[part] = values.reshape(-1)
        return token, got.reshape(elements.shape)

    return wrapped


def _swap_by_boxes(swap: Callable[..., Any]) -> Callable[..., Any]:
    @_fail_on_exception
    def wrapped(token, mesh_location, thread, key, transforms, value, mask, **kwargs):
        if not _is_refused(transforms):
            return swap(token, mesh_location, thread, key, transforms, value, mask, **kwargs)
        if mask is not None:
            raise NotImplementedError(f"a masked store through {transforms}")
        elements, buffer = _resolve(key, transforms)
        value, before = np.asarray(value).reshape(-1), np.empty(elements.size, buffer.dtype)
        for part, indexer in _boxes(elements, buffer.shape):
            part_value = value[part].reshape(indexer.get_indexer_shape())
            token, old = swap(token, mesh_location, thread, key, (indexer,), part_value, None, **kwargs)
            before[part] = old.reshape(-1)
        return token, before.reshape(elements.shape)

    return wrapped


def _is_refused(transforms: Any) -> bool:
    return any(
        isinstance(transform, ReshapeTransform)
        or (isinstance(transform, indexing.NDIndexer) and gpu_callbacks._is_dynamic(transform))
        for transform in transforms
    )


def _resolve(key: Any, transforms: Any) -> tuple[np.ndarray, Any]:
    """Which elements of the flat buffer a reference stands for, in its shape; and the buffer's shape and dtype."""
    memory = gpu_callbacks._get_shared_memory()
    allocation = memory.mem[gpu_callbacks.HostAllocationKey.from_array(key)]
    buffer = jax.ShapeDtypeStruct(allocation.logical_shape, allocation.content.dtype)
    elements = np.arange(np.prod(buffer.shape)).reshape(buffer.shape)
    for transform in transforms:
        match transform:
            case ReshapeTransform():
                elements = elements.reshape(transform.shape)
            case TransposeTransform():
                elements = elements.transpose([int(axis) for axis in transform.permutation])
            case indexing.NDIndexer():
                for axis, index in reversed([*enumerate(transform.indices)]):
                    elements = _take(elements, axis, index)
            case _:
                raise NotImplementedError(f"{transform} in {transforms}")
    return elements, buffer


def _take(elements: np.ndarray, axis: int, index: Any) -> np.ndarray:
    """Indexes one axis with an integer or a slice, within bounds."""
    if isinstance(index, indexing.Slice):
        index = int(index.start) + int(index.stride) * np.arange(int(index.size))
    if np.any((np.asarray(index) < 0) | (np.asarray(index) >= elements.shape[axis])):
        raise IndexError(f"index {index} is out of bounds of axis {axis} of shape {elements.shape}")
    return np.take(elements, index, axis)


def _boxes(elements: np.ndarray, shape: tuple[int, ...], start: int = 0) -> Iterator[tuple[slice, indexing.NDIndexer]]:
    """Boxes of a buffer of `shape` that make up `elements`: where each lies in `elements`, flat, and in the buffer."""
    coordinates = np.unravel_index(elements, shape)
    ranges = tuple(indexing.Slice(int(axis.min()), int(np.ptp(axis)) + 1) for axis in coordinates)
    if math.prod(r.size for r in ranges) == elements.size and np.all(np.diff(elements.reshape(-1)) > 0):
        yield slice(start, start + elements.size), indexing.NDIndexer(ranges, shape, ())
    else:
        for part in elements:
            yield from _boxes(part, shape, start)
            start += part.size
