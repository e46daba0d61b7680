"""Numbers that the threads of a block share."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from kvjax.kernels.aliases import Ref
from kvjax.kernels.lanes.access import load_shared, store_shared
from kvjax.kernels.lanes.copies import wait_for_block
from kvjax.kernels.lanes.warps import of_first_thread
from kvjax.kernels.lanes.words import bits, thread_index
from kvjax.kernels.registers import LANES, WARPS


def over_block(shared: Ref, of_warp: jax.Array, operation: Callable[..., jax.Array]) -> jax.Array:
    """Reduces the numbers that the four warps of a block hold to a scalar, by way of four words of `shared`."""
    thread = thread_index()
    warp = thread >> LANES.bit_length() - 1
    wait_for_block()  # until earlier numbers have been loaded
    store_shared(shared, warp * 4, [of_warp], 4, (thread & (LANES - 1)) == 0)
    wait_for_block()
    loaded = [load_shared(shared, thread * 0, 4, 4 * i)[0] for i in range(WARPS)]
    return of_first_thread(functools.reduce(operation, (bits(x, jnp.int32) for x in loaded)))
