"""Instructions of a warp, whose threads exchange registers: shuffles, reductions, matrix products."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir

from kvjax.kernels import compat, ptx
from kvjax.kernels.aliases import Context, DTypeLike, Lowered
from kvjax.kernels.lanes.words import LAYOUT, SIGNED, asm, column, to_word
from kvjax.kernels.registers import LANES, THREADS, WARPS


def _grid(x: jax.Array) -> jax.Array:
    """A register as `[warps, 8, 4]`."""
    return x.reshape(WARPS, 8, 4)


def shuffle_xor(x: jax.Array, mask: int) -> jax.Array:
    """The register of the thread whose lane number is this one's xor `mask`."""

    def model(x: jax.Array) -> list[jax.Array]:
        return [lax.rev(x.reshape(-1, 2, mask), (1,)).reshape(-1)]

    code = f"shfl.sync.bfly.b32 $0, $1, {mask}, 31, 0xffffffff;"
    return asm(code, model, x, results=[x.dtype], convergent=True)[0]


def shuffle_up(x: jax.Array, distance: int) -> jax.Array:
    """The register of the thread `distance` lanes before this one; 0 where there is none."""

    def model(x: jax.Array) -> list[jax.Array]:
        lanes = x.reshape(WARPS, LANES)
        padded = lax.pad(lanes, jnp.zeros((), x.dtype), ((0, 0, 0), (distance, -distance, 0)))
        return [padded.reshape(-1)]

    code = (
        "{ .reg .pred inside; .reg .b32 x;"
        f" shfl.sync.up.b32 x|inside, $1, {distance}, 0, 0xffffffff;"
        " selp.b32 $0, x, 0, inside; }"
    )
    return asm(code, model, x, results=[x.dtype], convergent=True)[0]


def sum_over_warp(x: jax.Array) -> jax.Array:
    """The sum of an int32 register over the threads of a warp, in all of them."""
    return _over_warp(x, "add", jnp.sum)


def max_over_warp(x: jax.Array) -> jax.Array:
    """The maximum of an int32 register over the threads of a warp, in all of them."""
    return _over_warp(x, "max", jnp.max)


def _over_warp(x: jax.Array, operation: str, reduction: Callable[..., jax.Array]) -> jax.Array:
    def model(x: jax.Array) -> list[jax.Array]:
        by_warp = x.reshape(WARPS, LANES)
        reduced = reduction(by_warp, axis=1, keepdims=True).astype(x.dtype)
        return [jnp.broadcast_to(reduced, by_warp.shape).reshape(-1)]

    code = f"redux.sync.{operation}.s32 $0, $1, 0xffffffff;"
    return asm(code, model, x, results=[x.dtype], convergent=True)[0]


def max_over_rows(x: jax.Array) -> jax.Array:
    """The float32 maximum over the eight threads of a column, in all of them."""
    for mask in (4, 8, 16):
        x = jnp.maximum(x, shuffle_xor(x, mask))
    return x


def sum_over_rows(x: jax.Array) -> jax.Array:
    """The sum over the eight threads of a column, in all of them."""
    for mask in (4, 8, 16):
        x = x + shuffle_xor(x, mask)
    return x


def transpose(x: jax.Array) -> jax.Array:
    """Transposes the 8 by 8 matrix of 16-bit elements that a register holds across a warp.

    Row `g` is in the threads of row `g`, two elements per thread.
    """

    def model(x: jax.Array) -> list[jax.Array]:
        halves = jnp.stack([x & 0xFFFF, x >> 16], axis=-1).reshape(WARPS, 8, 8)
        halves = jnp.swapaxes(halves, 1, 2).reshape(THREADS, 2)
        return [column(halves, 0) | column(halves, 1) << 16]

    code = "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;"
    return asm(code, model, x, results=[jnp.uint32], convergent=True)[0]


def mma(acc: Sequence[jax.Array], a: Sequence[jax.Array], b: Sequence[jax.Array], dtype: DTypeLike) -> list[jax.Array]:
    """`acc + a @ b` in each warp: `a` 16 by 16 and `b` 16 by 8, of float16 or bfloat16, `acc` float32 16 by 8.

    Registers of the thread in row `g` and column `c` (each pair the lower column or row first):

    ```
          a: columns 2c, 2c+1   columns 2c+8, 2c+9      b: rows 2c, 2c+1   rows 2c+8, 2c+9
    row g         a[0]                a[2]        column g       b[0]              b[1]
    row g+8       a[1]                a[3]
          acc: columns 2c, 2c+1
    row g        acc[0], acc[1]
    row g+8      acc[2], acc[3]
    ```
    """
    name = {jnp.dtype(jnp.float16): "f16", jnp.dtype(jnp.bfloat16): "bf16"}[jnp.dtype(dtype)]

    def model(*registers: jax.Array) -> list[jax.Array]:
        left, right, sums = registers[:4], registers[4:6], registers[6:]

        def pairs(x: jax.Array) -> jax.Array:  # [warps, 8, 8]
            return lax.bitcast_convert_type(_grid(x), dtype).astype(jnp.float32).reshape(WARPS, 8, 8)

        matrix = jnp.concatenate(
            [jnp.concatenate([pairs(left[i]), pairs(left[i + 2])], axis=2) for i in range(2)], axis=1
        )
        other = jnp.concatenate([pairs(right[0]), pairs(right[1])], axis=2)
        product = jnp.einsum("wmk,wnk->wmn", matrix, other, precision="highest")
        product = product.reshape(WARPS, 2, 8, 4, 2)
        return [
            sums[2 * i + j] + lax.index_in_dim(column(product, j), i, 1, keepdims=False).reshape(-1)
            for i in range(2)
            for j in range(2)
        ]

    code = (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{name}.{name}.f32"
        " {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
    )
    return asm(code, model, *a, *b, *acc, results=[jnp.float32] * 4, convergent=True)


def any_in_warp(mask: jax.Array) -> jax.Array:
    """Whether a bool register holds in any thread of the warp: a scalar, which may differ from warp to warp.

    In interpret mode it is the same for all warps of a warpgroup: a true result must be safe for every warp.
    """
    if compat.interpreting():
        return mask.any()

    def run(_: Context, mask: Lowered) -> Lowered:
        code = (
            "{ .reg .pred mine, any; setp.ne.b32 mine, $1, 0;"
            " vote.sync.any.pred any, mine, 0xffffffff; selp.b32 $0, 1, 0, any; }"
        )
        [found] = ptx.inline(code, [to_word(mask)], [ir.IntegerType.get_signless(32)], side_effects=True)
        return mgpu.FragmentedArray.splat(found, (), is_signed=True)

    result = plgpu.ShapeDtypeStruct((), np.dtype(np.int32), layout=plgpu.Layout.WG_SPLAT(()))
    found = plgpu.inline_mgpu(arg_types=(LAYOUT,), return_type=result)(run)(mask)
    return found != 0


def ballot(mask: jax.Array) -> jax.Array:
    """int32 whose bit `i` is the bool register of lane `i` of the warp, in all of its threads."""

    def model(mask: jax.Array) -> list[jax.Array]:
        by_warp = mask.reshape(WARPS, LANES).astype(jnp.int32) << lax.iota(jnp.int32, LANES)
        words = jnp.sum(by_warp, axis=1, keepdims=True, dtype=jnp.int32)
        return [jnp.broadcast_to(words, by_warp.shape).reshape(-1)]

    code = "{ .reg .pred mine; setp.ne.b32 mine, $1, 0; vote.sync.ballot.b32 $0, mine, 0xffffffff; }"
    return asm(code, model, mask, results=[jnp.int32], convergent=True)[0]


def of_first_thread(x: jax.Array) -> jax.Array:
    """A register that is the same in all threads of a warp, as a scalar."""
    if compat.interpreting():
        return lax.index_in_dim(x, 0, keepdims=False)

    def run(_: Context, x: Lowered) -> Lowered:
        return mgpu.FragmentedArray.splat(to_word(x), (), is_signed=SIGNED[np.dtype(np.int32)])

    result = plgpu.ShapeDtypeStruct((), np.dtype(np.int32), layout=plgpu.Layout.WG_SPLAT(()))
    return plgpu.inline_mgpu(arg_types=(LAYOUT,), return_type=result)(run)(x)
