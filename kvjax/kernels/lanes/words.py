"""Registers as arrays: constants, bitcasts, and arithmetic by PTX within each thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from kvjax.kernels import compat, ptx
from kvjax.kernels.aliases import Context, DType, DTypeLike, Lowered, Scalar, Value
from kvjax.kernels.registers import THREADS, lane_layout

LAYOUT = lane_layout((THREADS,), 1)
"""One element of an array of `THREADS` for each thread, in order."""

SIGNED: dict[DType, bool | None] = {np.dtype(np.int32): True, np.dtype(np.uint32): False, np.dtype(np.float32): None}


def thread_index() -> jax.Array:
    """int32 `[128]`: each thread's number in its warpgroup."""
    return compat.layout_cast(lax.iota(jnp.int32, THREADS), LAYOUT)


def splat(value: Scalar, dtype: DTypeLike) -> jax.Array:
    """A register that holds `value`, a number or a scalar, in every thread."""
    x = lax.broadcast(jnp.asarray(value, dtype), (THREADS,))
    return compat.layout_cast(x, LAYOUT)


def bits(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """A bitcast of a register to another 32-bit type."""
    if x.dtype == dtype:
        return x
    if jnp.issubdtype(x.dtype, jnp.integer) and jnp.issubdtype(dtype, jnp.integer):
        return x.astype(dtype)  # a bitcast would not change the signedness that Mosaic tracks
    return lax.bitcast_convert_type(x, dtype)


def asm(
    code: str,
    model: Callable[..., Sequence[jax.Array]],
    *registers: jax.Array,
    results: Sequence[DTypeLike],
    convergent: bool = False,
) -> list[jax.Array]:
    """Runs PTX in each thread.

    Args:
      code: writes `$0` and so on, one for each of `results`, and reads the operands after them.
      model: computes the same in `jax.numpy`: from registers to a list of registers.
      registers: operands.
      results: dtypes of the results.
      convergent: whether the threads of a warp exchange data.
    """
    if compat.interpreting():
        return list(model(*registers))

    def run(_: Context, *operands: Lowered) -> Lowered:
        values = [to_word(x) for x in operands]
        types = [utils.dtype_to_ir_type(np.dtype(dtype)) for dtype in results]
        outputs = ptx.inline(code, values, types, side_effects=convergent)
        return tuple(from_word(value, dtype) for value, dtype in zip(outputs, results, strict=True))

    shapes = tuple(plgpu.ShapeDtypeStruct((THREADS,), np.dtype(dtype), layout=LAYOUT) for dtype in results)
    return list(plgpu.inline_mgpu(arg_types=(LAYOUT,) * len(registers), return_type=shapes)(run)(*registers))


def to_word(x: Lowered) -> Value:
    """The only register of a thread, as a value of MLIR; a bool as int32.

    In jax 0.11.2 each conversion of a bool by Mosaic GPU asks ptxas for its version, which takes longer than all else.
    """
    [register] = x.registers.flat
    value = vector.extract(register, [], [0]) if isinstance(register.type, ir.VectorType) else register
    is_bool = value.type == ir.IntegerType.get_signless(1)
    return arith.extui(ir.IntegerType.get_signless(32), value) if is_bool else value


def from_word(value: Value, dtype: DTypeLike) -> Lowered:
    """A value of MLIR, one in each thread, as a register."""
    layout = LAYOUT.to_mgpu()
    return mgpu.FragmentedArray.splat(value, (THREADS,), layout, is_signed=SIGNED[np.dtype(dtype)])


def column(x: jax.Array, index: int) -> jax.Array:
    """An element of the last axis, which is dropped."""
    return lax.index_in_dim(x, index, x.ndim - 1, keepdims=False)


def half2(x: jax.Array, y: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Two float32 registers as one of two 16-bit elements, rounded to nearest even, `x` in the lower half."""
    name = {jnp.dtype(jnp.float16): "f16x2", jnp.dtype(jnp.bfloat16): "bf16x2"}[jnp.dtype(dtype)]

    def model(x: jax.Array, y: jax.Array) -> list[jax.Array]:
        low, high = (lax.bitcast_convert_type(v.astype(dtype), jnp.uint16).astype(jnp.uint32) for v in (x, y))
        return [low | high << 16]

    return asm(f"cvt.rn.{name}.f32 $0, $2, $1;", model, x, y, results=[jnp.uint32])[0]


def lower_half(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """The 16-bit element of the lower half of a uint32 register as float32."""
    if jnp.dtype(dtype) == jnp.bfloat16:
        return bits(x << 16, jnp.float32)

    def model(x: jax.Array) -> list[jax.Array]:
        return [lax.bitcast_convert_type(x.astype(jnp.uint16), jnp.float16).astype(jnp.float32)]

    code = "{ .reg .b16 x, y; mov.b32 {x, y}, $1; cvt.f32.f16 $0, x; }"
    return asm(code, model, x, results=[jnp.float32])[0]


def exp2(x: jax.Array) -> jax.Array:
    """`2 ** x` in float32, approximate; 0 for -inf."""
    return asm("ex2.approx.ftz.f32 $0, $1;", lambda x: [jnp.exp2(x)], x, results=[jnp.float32])[0]


def permute(x: jax.Array, y: jax.Array, selector: int | jax.Array) -> jax.Array:
    """Selects bytes of `x` (numbers 0 to 3) and `y` (4 to 7): nibble `i` of the selector is the number of byte `i`."""
    dynamic = [] if isinstance(selector, int) else [selector]

    def model(x: jax.Array, y: jax.Array, *dynamic: jax.Array) -> list[jax.Array]:
        chosen = dynamic[0] if dynamic else jnp.full((THREADS,), selector, jnp.uint32)
        source = jnp.stack([w >> shift & 0xFF for w in (x, y) for shift in (0, 8, 16, 24)], axis=1)
        result = jnp.zeros((THREADS,), jnp.uint32)
        for i in range(4):
            index = (chosen >> 4 * i & 7).astype(jnp.int32)
            wanted = lax.broadcast_in_dim(index, source.shape, (0,)) == lax.broadcasted_iota(jnp.int32, source.shape, 1)
            result |= jnp.sum(jnp.where(wanted, source, jnp.uint32(0)), axis=1, dtype=jnp.uint32) << 8 * i
        return [result]

    third = "$3" if dynamic else f"0x{selector:x}"
    return asm(f"prmt.b32 $0, $1, $2, {third};", model, x, y, *dynamic, results=[jnp.uint32])[0]


def both_halves(x: jax.Array, half: int) -> jax.Array:
    """The lower or the upper half of each register in both halves, as instructions on pairs take it."""

    def model(x: jax.Array) -> list[jax.Array]:
        part = x >> 16 * half & 0xFFFF
        return [part | part << 16]

    code = f"{{ .reg .b16 x<2>; mov.b32 {{x0, x1}}, $1; mov.b32 $0, {{x{half}, x{half}}}; }}"
    return asm(code, model, x, results=[jnp.uint32])[0]
