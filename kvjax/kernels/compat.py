"""What differs between the JAX versions that the kernels run on, in one place."""

from __future__ import annotations

from typing import Any

import jax
from jax import lax
from jax._src import config
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

# Lanes, not warpgroups: the kernels say themselves which lane holds what. No kernel reads what another thread wrote
# without a barrier of its own, and the ones that Mosaic would put around each store cost more than the store.
COMPILER_PARAMS = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True)


def interpreting() -> bool:
    """Whether kernels traced now run in interpret mode (`plgpu.force_gpu_interpret_mode`)."""
    return getattr(config, "pallas_tpu_interpret_mode_context_manager").value is not None  # noqa: B009


def load(
    ref: Any, layout: Any, shape: tuple[int, ...] | None = None, columns: tuple[int, int] | None = None
) -> jax.Array:
    """Loads a reference, seen as `shape`, into registers in `layout`, whatever instructions that takes.

    All of it, or of two dimensions only `columns`, a first one and a number.
    """
    first, number = columns or (0, 0)
    if shape is not None and interpreting():  # which knows no reshaped references
        whole: jax.Array = ref[...].reshape(shape)
        return whole[:, first : first + number] if columns else whole
    if shape is not None:
        ref = ref.reshape(*shape)
    if columns:
        ref = ref.at[:, pl.ds(first, number)]
    loaded: jax.Array = plgpu.load(ref, layout=layout, optimized=False)
    return loaded


def spread(column: jax.Array, columns: int, layout: Any) -> jax.Array:
    """`[rows]` as `[rows, columns]` in `layout`, every column the same."""
    return plgpu.layout_cast(lax.broadcast_in_dim(column, (column.shape[0], columns), (0,)), layout)


if hasattr(plgpu, "store"):

    def _store(ref: Any, value: jax.Array) -> None:
        getattr(plgpu, "store")(ref, value, optimized=False)  # noqa: B009

else:  # before 0.12 there is no other store

    def _store(ref: Any, value: jax.Array) -> None:
        ref[...] = value


def store(ref: Any, value: jax.Array) -> None:
    """Stores registers to a whole reference, seen in their shape, whatever instructions that takes."""
    if interpreting():
        ref[...] = value.reshape(ref.shape)
    else:
        _store(ref if ref.shape == value.shape else ref.reshape(*value.shape), value)
