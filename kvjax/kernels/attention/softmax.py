"""The online softmax of a warp's query rows, and its normalization.

It runs in the registers of the logits. The largest logit is raised only where another exceeds it by more than
`HEADROOM`: weights then stay within float16, and the output is rescaled rarely instead of at every step.

Sums of weighted bfloat16 may overflow float32 where their mean does not. So for these, weights are relative to a logit
that is `MARGIN` above the largest one: a sum of 2**20 values with weights up to `2 ** (HEADROOM + 1 - MARGIN)` does not
exceed the largest value. Sums of float16 do not overflow, and weights that small would underflow in float16.

The logit that weights are relative to is an integer (`reference`). Logits are binary logarithms, so the choice of the
integer changes exponents of weights, not how they are rounded to 16 bits. A row has nearly the same result in the
decode and the prompt kernel, and however its tokens are divided among thread blocks. The largest weight is then rounded
like all others. A row that sees mostly one token would have the whole error; `rounding` makes up for it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax.kernels import lanes
from kvjax.kernels.aliases import DTypeLike
from kvjax.kernels.attention.problem import Problem, Refs

LOG2_E = math.log2(math.e)

HEADROOM = 8.0
"""How far logits may exceed the largest logit that weights are relative to, as a binary logarithm."""

MARGIN = 29.0
"""How far the logit that weights are relative to is above the largest, where operands are bfloat16."""

LOWEST = -1e30
"""The largest logit of a row that has seen no token: below all logits, and finite, so that differences are defined."""


class State(NamedTuple):
    """A warp's softmax and output, of the rows `2c` and `2c + 1` of each tile of query rows.

    Registers of a thread in column `c` of its warp, for the query rows `8 * tile + 2 * c + r` with `r` 0 or 1, and of
    each product of 16 dims the two that `ValueRows.dim` numbers `h`, 0 or 1:

    ```
    largest[2 * tile + r]                                  of the row, equal in all threads of a column
    total[2 * tile + r]                                    of this thread's tokens; `Segments.finish` adds the others
    top[2 * tile + r]                                      likewise, the largest logit
    output[4 * (tile * products + product) + 2 * h + r]    of the row and the dim `ValueRows.dim(product, h)`
    ```

    Weights are relative to `largest`, the `reference` of a logit.
    """

    largest: list[jax.Array]
    total: list[jax.Array]
    top: list[jax.Array]
    output: list[jax.Array]

    @classmethod
    def empty(cls, tiles: int, products: int) -> State:
        """The state of rows that have seen no token, for a number of query row tiles and of products of 16 dims."""
        zero, lowest = lanes.splat(0.0, jnp.float32), lanes.splat(LOWEST, jnp.float32)
        rows = 2 * tiles
        return cls([lowest] * rows, [zero] * rows, [lowest] * rows, [zero] * 4 * tiles * products)


def capped(x: jax.Array, cap: float | None, exp2: Callable[[jax.Array], jax.Array] = lanes.exp2) -> jax.Array:
    """`cap * tanh(x / cap)` where there is a cap; logits are binary logarithms, and the cap is converted."""
    if cap is None:
        return x
    # tanh(y) = 1 - 2 / (e**(2 y) + 1), with y = x / (cap * log2(e)) and so e**(2 y) = 2 ** (2 x / cap).
    power = exp2(x * np.float32(2.0 / cap))
    return np.float32(cap * LOG2_E) * (1.0 - 2.0 / (power + 1.0))


def margin(dtype: DTypeLike) -> float:
    """`MARGIN` where operands of a dtype need it, else 0."""
    return MARGIN if dtype == jnp.bfloat16 else 0.0


def reference(largest: jax.Array, margin: float) -> jax.Array:
    """The logit that weights are relative to, for the largest logit of a row: `margin` above the integer next to it."""
    nearest = lax.round(largest, lax.RoundingMethod.TO_NEAREST_EVEN)
    return nearest + margin if margin else nearest


def rounding(weight: jax.Array, rounded: jax.Array, total: jax.Array) -> jax.Array:
    """The factor of a row's results that makes up for the rounding of its largest weight.

    Results are sums of rounded weights. `total` is the sum of the unrounded weights, as the log-sum-exp needs it.
    """
    known = jnp.where(total == 0.0, 1.0, total)
    return known / (known + (rounded - weight))


def raised(state: State, logits: list[list[jax.Array]], margin: float, *, has_top: bool) -> State:
    """The state with `largest` raised where a logit exceeds it too far, to the `reference` of the largest logit.

    Where `has_top` is False, so without `Problem.weight_dtype`, to `margin` above the largest logit: its weight is then
    not rounded.
    """
    tiles = len(state.largest) // 2
    tops = [
        functools.reduce(jnp.maximum, [xs[4 * (i // 2) + i % 2 + j] for xs in logits for j in (0, 2)])
        for i in range(2 * tiles)
    ]
    too_far = functools.reduce(
        jnp.logical_or, [top > large + (HEADROOM - margin) for top, large in zip(tops, state.largest, strict=True)]
    )

    def raise_all(*flat: jax.Array) -> list[jax.Array]:
        largest, total = list(flat[: 2 * tiles]), list(flat[2 * tiles : 4 * tiles])
        output = list(flat[4 * tiles :])
        products = len(output) // (4 * tiles)
        for i in range(2 * tiles):
            new = lanes.max_over_rows(tops[i])
            new = jnp.maximum(largest[i], reference(new, margin) if has_top else new + margin)
            shrink = lanes.exp2(largest[i] - new)
            largest[i], total[i] = new, total[i] * shrink
            for product in range(products):
                start = 4 * (i // 2 * products + product)
                for j in (i % 2, i % 2 + 2):
                    output[start + j] = output[start + j] * shrink
        return [*largest, *total, *output]

    flat = [*state.largest, *state.total, *state.output]
    flat = lax.cond(lanes.any_in_warp(too_far), raise_all, lambda *xs: list(xs), *flat)
    top = [jnp.maximum(old, new) for old, new in zip(state.top, tops, strict=True)]
    return State(flat[: 2 * tiles], flat[2 * tiles : 4 * tiles], top, flat[4 * tiles :])


def weights(
    logits: list[jax.Array],
    largest: list[jax.Array],
    total: list[jax.Array],
    dtype: DTypeLike,
    row_scales: list[jax.Array],
) -> list[list[jax.Array]]:
    """The weights of a tile as matrix operands, by tile of query rows; adds them to `total`.

    Operands are multiplied by `row_scales`, the scales of the thread's two rows of values, where values have these.
    Column `j` of a tile of query rows has registers j and j + 2 of the tile's four.
    """
    return weight_operands(exponentials(logits, largest, total), dtype, row_scales)


def exponentials(logits: list[jax.Array], largest: list[jax.Array], total: list[jax.Array]) -> list[list[jax.Array]]:
    """The float32 weights of a tile, four registers for each tile of query rows; adds them to `total`."""
    result: list[list[jax.Array]] = []
    for rows in range(len(largest) // 2):
        four = logits[4 * rows : 4 * rows + 4]
        four = [lanes.exp2(x - largest[2 * rows + i % 2]) for i, x in enumerate(four)]
        for i in range(2):
            total[2 * rows + i] = total[2 * rows + i] + (four[i] + four[i + 2])
        result.append(four)
    return result


def weight_operands(
    weights: list[list[jax.Array]], dtype: DTypeLike, row_scales: list[jax.Array]
) -> list[list[jax.Array]]:
    """Weights of `exponentials` as matrix operands, multiplied by `row_scales` if there are any."""
    result: list[list[jax.Array]] = []
    for four in weights:
        scaled = [x * row_scales[i // 2] for i, x in enumerate(four)] if row_scales else four
        halves = lanes.half2(scaled[0], scaled[1], dtype), lanes.half2(scaled[2], scaled[3], dtype)
        result.append([lanes.transpose(half) for half in halves])
    return result


def sink(problem: Problem, refs: Refs, head: jax.Array, is_row: jax.Array) -> jax.Array:
    """The sinks of the rows' heads; -inf without sinks."""
    if not problem.has_sinks:
        return lanes.splat(-jnp.inf, jnp.float32)
    return lanes.bits(lanes.load_global(refs.sinks, head, is_row), jnp.float32)


class Sums(NamedTuple):
    """What a row has seen, in a register each.

    Attributes:
      largest: the logit that weights are relative to.
      total: the sum of weights.
      top: the largest logit; None where `Problem.weight_dtype` is.
    """

    largest: jax.Array
    total: jax.Array
    top: jax.Array | None = None

    @property
    def registers(self) -> list[jax.Array]:
        """The registers that are present, `Problem.sums` in number."""
        return [self.largest, self.total, *([] if self.top is None else [self.top])]


def normalized(sums: Sums, sink: jax.Array, dtype: DTypeLike | None) -> tuple[jax.Array, jax.Array]:
    """The factor that normalizes a row's output, and its log-sum-exp; `dtype` is that of rounded weights.

    Logits are binary logarithms, except for the sink; the log-sum-exp is natural. For a row that has seen no token, the
    factor is 0 and the log-sum-exp is the sink's logit, or -inf without a sink.
    """
    largest, total, top = sums
    sink = sink * np.float32(LOG2_E)
    raised = jnp.maximum(largest, sink)
    shrink = lanes.exp2(largest - raised)
    whole = total * shrink + lanes.exp2(sink - raised)
    zero = lanes.splat(0.0, jnp.float32)
    inverse = shrink / jnp.where(whole == 0.0, zero + 1.0, whole)
    if top is not None and dtype is not None:
        inverse = inverse * top_rounding(top, sums, dtype)
    return jnp.where(total == 0.0, zero, inverse), (raised + _log2(whole)) * np.float32(1 / LOG2_E)


def top_rounding(top: jax.Array, sums: Sums, dtype: DTypeLike) -> jax.Array:
    """`rounding`, for the largest logit and the sums of a row whose weights are rounded to `dtype`."""
    weight = lanes.exp2(top - sums.largest)
    return rounding(weight, lanes.lower_half(lanes.half2(weight, weight, dtype), dtype), sums.total)


def _log2(x: jax.Array) -> jax.Array:
    return lanes.asm("lg2.approx.ftz.f32 $0, $1;", lambda x: [jnp.log2(x)], x, results=[jnp.float32])[0]
