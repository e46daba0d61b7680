"""The body of the prompt kernel: a warpgroup attends with the rows of an item.

The two warpgroups take turns through one barrier, `phase_ended`. Each arrives there when it ends its phase, and waits
until the other has ended its own. By then, one has issued a product of query and keys (QK), and the other has finished
its softmax and next multiplies weights and values (PV). Tile after tile, with `|` for the end of a phase:

```
first     QK0 | softmax0 | PV0 QK1  | softmax1 | PV1 QK2  | ...
second        | QK0      | softmax0 | PV0 QK1  | softmax1 | ...
```

In fp8, whose products take half as long, each warpgroup has a barrier of its own. It arrives there when it has issued
QK, and the other waits for that before its PV. So products still take turns, but both may compute their softmax at
once.

Phases also say which tiles both have read; the second warpgroup replaces these. While it multiplies keys, it copies
values to the slot of the tile before; while it multiplies values, it copies keys to the slot of the same tile, because
the first warpgroup has then begun with the next one.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kvjax.kernels import arithmetic, compat, tiles, warpgroups
from kvjax.kernels.aliases import Barriers, Carry, Ref, Scalar
from kvjax.kernels.attention.softmax import LOG2_E, capped, margin, reference, rounding
from kvjax.kernels.prompts import fp8
from kvjax.kernels.prompts.operands import PromptArrays, Stage, TokenArrays
from kvjax.kernels.prompts.problem import ROWS, PromptConfig, PromptProblem
from kvjax.kernels.prompts.queue import Claimed, Item, NearSpan, Queue


class Scratch(NamedTuple):
    """Shared memory of a thread block.

    Attributes:
      query: rows of each warpgroup, of the keys' dtype.
      keys: a ring of tiles.
      values: likewise; in fp8 transposed, with ones below, as in `fp8`.
      claimed: int32, the fields of `Claimed`.
      keys_full: barriers, one for each tile of the ring, which complete when its copies have arrived.
      values_full: likewise.
      phase_ended: a barrier that both warpgroups wait for and that completes when both have ended a phase; in fp8 one
        for each warpgroup, which completes when it has issued QK, and which the other waits for.
    """

    query: Ref
    keys: Ref
    values: Ref
    claimed: Ref
    keys_full: Barriers
    values_full: Barriers
    phase_ended: Barriers


class MaskedTokens(NamedTuple):
    """Tokens of which rows see some; numbers are computed for each tile, so that no registers hold them.

    Attributes:
      arrays: where they are.
      window: how many of them a row sees.
      number: returns the number in `arrays` of a tile of an item.
      position: returns the position of the sequence's first row among them.
    """

    arrays: TokenArrays
    window: int | None
    number: Callable[[Scalar], Scalar]
    position: Callable[[], Scalar]


@dataclasses.dataclass(frozen=True)
class RowWarpgroup:
    """A warpgroup that attends with the rows of an item.

    Whenever it begins with an item, copies have been issued of the keys of the item's first `stages` tiles, and of the
    values of one tile less.

    Attributes:
      step: tiles of all items before.
      scale: float32 `[ROWS]`, in fp8 what each row of the query was divided by; None in 16 bits.
    """

    problem: PromptProblem
    config: PromptConfig
    arrays: PromptArrays
    scratch: Scratch
    queue: Queue
    warpgroup: Scalar
    item: Item
    step: Scalar
    scale: jax.Array | None = None

    def begin(self, claimed: Claimed) -> None:
        """What the second warpgroup does before a thread block's first item."""
        warpgroups.store_numbers(self.scratch.claimed, *claimed.numbers)
        warpgroups.barrier()
        if self.is_fp8:
            fp8.store_ones(self.scratch.values, self.arrays.head_size_v)
            plgpu.commit_smem()
        start, stop = self.item.span.start, self.item.stop
        for ahead in range(self.config.stages):

            @pl.when(start + ahead < stop)
            def copy(ahead: int = ahead) -> None:
                self._copy_keys(start + ahead)
                if ahead < self.config.stages - 1:
                    self._copy_values(start + ahead)

        if not self.is_fp8:
            self._end_phase()

    @property
    def is_fp8(self) -> bool:
        """Whether products are of e4m3."""
        return fp8.is_fp8(self.scratch.keys.dtype)

    def run(self) -> RowWarpgroup:
        """Attends, and stores the results.

        Returns:
          What attends with the rows of the next item, which are in shared memory.
        """
        arrays, scratch, warpgroup, item = self.arrays, self.scratch, self.warpgroup, self.item
        size_v, span, stages = arrays.head_size_v, item.span, self.config.stages
        columns = size_v + tiles.GROUP if self.is_fp8 else size_v
        own_query = scratch.query.at[warpgroup]
        factor = arrays.factor(item.prompt, item.head, item.kv_head) * LOG2_E
        if self.is_fp8:
            factor = self.scale * factor
        # A row's logarithms are binary, those of `exp2`.
        largest = compat.layout_cast(jnp.full((ROWS,), -jnp.inf, jnp.float32), plgpu.Layout.WGMMA.reduce(1))
        total = compat.layout_cast(jnp.full((ROWS,), 0, jnp.float32), plgpu.Layout.WGMMA.reduce(1))
        # In fp8 a column of these is the total.
        acc = compat.layout_cast(jnp.full((ROWS, columns), 0, jnp.float32), plgpu.Layout.WGMMA)
        self._wait(scratch.keys_full, span.start)

        @pl.when(warpgroup == 1)
        def follow() -> None:
            self._wait_for_other()
            # For a short item, the loop does not copy all tiles that the next item begins with.
            pl.when(item.stop - span.start <= stages)(self._claim)
            for ahead in range(1, stages):

                @pl.when(span.start + ahead >= item.stop)
                def copy(ahead: int = ahead) -> None:
                    self._copy_keys(span.start + ahead)
                    if ahead < stages - 1:
                        self._copy_values(span.start + ahead)

        seen = MaskedTokens(arrays, self.problem.window, number=lambda tile: tile, position=lambda: item.position)
        masked = functools.partial(self._tile, own_query, factor, seen)
        plain = functools.partial(self._tile, own_query, factor, None)
        # In fp8 products sum weights too.
        state = (acc, largest) if self.is_fp8 else (acc, largest, total, largest)
        if self.problem.window is not None or not arrays.is_aligned:
            state = lax.fori_loop(span.start, span.plain_start, masked, state)
        state = lax.fori_loop(span.plain_start, span.plain_stop, plain, state)
        state = lax.fori_loop(span.plain_stop, span.stop, masked, state)
        of_results = arrays.weight(item.prompt, item.head, item.kv_head)
        if arrays.near is not None and item.near is not None:
            state = self._with_near(arrays.near, item.near, own_query, (state[0] * of_results, *state[1:]))
            of_results = jnp.float32(1.0)
        acc, largest, *sums = state
        self._end_phase()

        following = self.queue.item(self._claimed(), warpgroup)
        next_rows = dataclasses.replace(self, item=following, step=self.step + item.stop - span.start)
        loaded = next_rows.load_query()
        if self.is_fp8:
            loaded, scale = fp8.scaled_rows(loaded)
            next_rows = dataclasses.replace(next_rows, scale=scale)
            acc, total = fp8.results_and_sums(acc)
            factor = jnp.float32(1.0)
        else:
            total, top = sums
            factor = self._rounding(top, largest, total)
        sink = arrays.sink(item.prompt, item.head) * LOG2_E
        whole = jnp.maximum(largest, sink)
        shift = jnp.where(whole == -jnp.inf, 0.0, whole)
        shrink = jnp.exp2(largest - (shift + fp8.WEIGHTS_EXPONENT if self.is_fp8 else shift))
        total = total * shrink + jnp.exp2(sink - shift)
        weight = jnp.where(total > 0, shrink * factor / total, 0.0) * of_results
        acc = acc * lax.broadcast_in_dim(weight, acc.shape, [0])
        lse = (shift + jnp.log2(total)) / LOG2_E
        # Only rows that are the sequence's and not another tile's.
        base = self._copied_base
        start = item.base - base
        stop = jnp.minimum(item.base + ROWS, item.q_end) - base
        out_ref, lse_ref, first = arrays.out(item.split, item.head)
        stored = first + base, start, stop
        warpgroups.store_rows(out_ref, acc.astype(out_ref.dtype), *stored, plgpu.Layout.WGMMA)
        warpgroups.store_rows(lse_ref, lse, *stored, plgpu.Layout.WGMMA.reduce(1))
        is_next = following.prompt < self.queue.num_prompts
        pl.when(is_next)(functools.partial(next_rows.store_query, loaded))

        pl.when(warpgroup == 0)(self._wait_for_other)

        return next_rows

    def _with_near(self, near: TokenArrays, span: NearSpan, own_query: Ref, state: Carry) -> Carry:
        """Attends to near tokens too."""
        item = self.item
        seen = MaskedTokens(
            near,
            self.problem.near,
            number=lambda tile: tile + (span.start - item.span.stop),
            position=lambda: near.position(item.prompt),
        )
        factor = near.factor(item.prompt, item.head, item.kv_head) * LOG2_E
        tile = functools.partial(self._tile, own_query, factor, seen)
        return lax.fori_loop(item.span.stop, item.stop, tile, state)

    def _rounding(self, top: jax.Array, largest: jax.Array, total: jax.Array) -> jax.Array:
        """The factor for the rounding of rows' largest weights, those of the logits `top`."""
        dtype = self.scratch.keys.dtype
        weight = jnp.exp2(top - jnp.where(largest == -jnp.inf, 0.0, largest))
        # Adding and subtracting a number whose last bit is the dtype's rounds as a conversion does; jax 0.11 has none
        # for one element per thread. The weight is within half a power of two of `one`.
        one = 2.0 ** -margin(dtype)
        large = jnp.where(weight < one, 0.5, 1.0) * np.float32(1.5 * 2**23 * float(jnp.finfo(dtype).eps) * one)
        return rounding(weight, (weight + large) - large, total)

    @property
    def _copied_base(self) -> Scalar:
        """The first row that is loaded. All are within the query, so some may be of other tiles or sequences."""
        return jnp.clip(self.item.base, 0, self.arrays.num_rows - ROWS)

    def begin_item(self) -> RowWarpgroup:
        """Loads the rows of the first item."""
        rows = self.load_query()
        if not self.is_fp8:
            self.store_query(rows)
            return self
        rows, scale = fp8.scaled_rows(rows)
        self.store_query(rows)
        return dataclasses.replace(self, scale=scale)

    def load_query(self) -> jax.Array:
        """The item's rows, in registers."""
        return self.arrays.load_query(self._copied_base, self.item.head)

    def store_query(self, rows: jax.Array) -> None:
        """Stores rows where `wgmma` reads them, in the dtype of the keys."""
        own_query = self.scratch.query.at[self.warpgroup]
        most = float(jnp.finfo(own_query.dtype).max)
        rows = jnp.clip(rows.astype(jnp.float32), -most, most)
        own_query[...] = arithmetic.cast(rows, own_query.dtype) if self.is_fp8 else rows.astype(own_query.dtype)
        plgpu.commit_smem()

    def _claim(self) -> None:
        """Claims the next item of the queue, and describes it in shared memory."""
        warpgroups.fetch_add(self.arrays.claims, self.scratch.claimed.at[0])
        warpgroups.barrier()
        claimed = self._claimed()
        # A thread block's first item has the block's index; claimed ones follow.
        found = self.queue.seek(claimed._replace(index=claimed.index + lax.axis_size("block")))
        warpgroups.barrier()
        warpgroups.store_numbers(self.scratch.claimed, *found.numbers)
        warpgroups.barrier()

    def _claimed(self) -> Claimed:
        return Claimed(*(self.scratch.claimed[i] for i in range(Claimed.num_numbers(self.problem))))

    def _slot(self, tile: Scalar) -> Scalar:
        """The stage of a tile."""
        return lax.rem(self.step + tile - self.item.span.start, jnp.int32(self.config.stages))

    def _wait(self, full: Barriers, tile: Scalar) -> None:
        number = self.step + tile - self.item.span.start
        self.arrays.wait(full, self._slot(tile), lambda: lax.div(number, jnp.int32(self.config.stages)))

    def _copy_keys(self, tile: Scalar) -> None:
        self._copy(tile, False, self.scratch.keys, self.scratch.keys_full)

    def _copy_values(self, tile: Scalar) -> None:
        self._copy(tile, True, self.scratch.values, self.scratch.values_full)

    def _copy(self, tile: Scalar, values: bool, buffer: Ref, full: Barriers) -> None:
        """Copies a tile to its stage, whose last reader is done; tiles after the last are those of the next item."""
        item = self.item

        def own() -> tuple[Scalar, ...]:
            return item.prompt, item.kv_head, tile, *item.bounds

        def following() -> tuple[Scalar, ...]:
            claimed = self._claimed()
            return claimed.prompt, claimed.kv_head, claimed.start + tile - item.stop, *claimed.bounds

        prompt, kv_head, copied, stop, *of_near = lax.cond(tile < item.stop, own, following)

        def copy(arrays: TokenArrays, number: Scalar) -> None:
            first = arrays.first_token(prompt, number, self.config.tokens)
            arrays.copy(values, prompt, kv_head, first, Stage(buffer, self._slot(tile), full))

        pl.when(copied < stop)(functools.partial(copy, self.arrays, copied))
        if self.arrays.near is not None:
            start, end = of_near
            is_near = (copied >= stop) & (copied < end)
            pl.when(is_near)(functools.partial(copy, self.arrays.near, start + copied - stop))

    def _end_phase(self) -> None:
        """Ends a phase: the other warpgroup may multiply."""
        ended = self.scratch.phase_ended
        plgpu.barrier_arrive(ended.at[self.warpgroup] if self.is_fp8 else ended)

    def _wait_for_other(self) -> None:
        """Waits until the other warpgroup has ended its phase."""
        ended = self.scratch.phase_ended
        plgpu.barrier_wait(ended.at[1 - self.warpgroup] if self.is_fp8 else ended)

    def _tile(self, own_query: Ref, factor: Scalar, seen: MaskedTokens | None, tile: Scalar, state: Carry) -> Carry:
        """Attends to one tile of keys and values; `factor` is that of the logits, in fp8 one for each row.

        `seen` says which of its tokens rows see; None if all rows see all.
        """
        _, keys, values, _, keys_full, values_full, _ = self.scratch
        acc, largest, *sums = state
        config, stop = self.config, self.item.stop
        slot = self._slot(tile)

        def multiplying_keys() -> None:
            self._end_phase()
            if not self.is_fp8:
                self._wait_for_other()
            pl.when(self.warpgroup == 1)(functools.partial(self._copy_values, tile + config.stages - 1))

        shape = ROWS, config.tokens
        of_logits = lax.broadcast_in_dim(factor, shape, [0]) if self.is_fp8 else factor
        logits = warpgroups.product(own_query, keys.at[slot], multiplying_keys, transposed=True)
        if self.problem.logits_soft_cap is not None:
            logits = capped(logits * of_logits, self.problem.logits_soft_cap, jnp.exp2)
            factor = of_logits = jnp.float32(1.0)
        if seen is not None:
            logits = self._masked(seen, logits, tile)
        highest = jnp.max(logits, axis=1) * factor
        raised = fp8.integer_above(highest) if self.is_fp8 else reference(highest, margin(keys.dtype))
        raised = jnp.maximum(largest, raised)
        shift = jnp.where(raised == -jnp.inf, 0.0, raised)
        shrink = jnp.exp2(largest - shift)
        if self.is_fp8:
            shift -= fp8.WEIGHTS_EXPONENT
        weights = jnp.exp2(logits * of_logits - lax.broadcast_in_dim(shift, shape, [0]))
        if self.is_fp8:
            operand = warpgroups.e4m3_operand(weights)
            shrink, raised, operand = lax.optimization_barrier((shrink, raised, operand))
        else:
            total, top = sums
            top = jnp.maximum(top, highest)
            acc *= lax.broadcast_in_dim(shrink, acc.shape, [0])
            total *= shrink
            operand = weights.astype(keys.dtype)
            total += jnp.sum(weights, axis=1)
            acc, total, raised, operand = lax.optimization_barrier((acc, total, raised, operand))
        if not self.is_fp8:
            self._end_phase()
        self._wait(values_full, tile)
        if seen is not None and not self.arrays.is_aligned:
            # Before its own turn, so that the other warpgroup, whose turn is later, finds it done.
            pl.when(self.warpgroup == 0)(functools.partial(self._clear_absent, tile))
        self._wait_for_other()

        def multiplying_values() -> None:
            @pl.when(self.warpgroup == 1)
            def copy() -> None:
                # Claim late, so that the first idle block gets it, but before its first tile is copied.
                pl.when(tile == stop - config.stages - 1)(self._claim)
                self._copy_keys(tile + config.stages)  # past the item's last tile: of the next item

            @pl.when(tile + 1 < stop)
            def wait() -> None:
                self._wait(keys_full, tile + 1)

        if self.is_fp8:
            product = warpgroups.product(operand, values.at[slot], multiplying_values, transposed=True)
            return acc * lax.broadcast_in_dim(shrink, acc.shape, [0]) + product, raised
        acc = warpgroups.product(operand, values.at[slot], multiplying_values, acc)
        return acc, raised, total, top

    def _masked(self, seen: MaskedTokens, logits: jax.Array, tile: Scalar) -> jax.Array:
        """Logits of a tile, -inf for the tokens that a row does not see."""
        arrays, window, config, item = seen.arrays, seen.window, self.config, self.item
        tile = seen.number(tile)
        first = self._copied_base - item.q_start + seen.position()
        first_token = arrays.first_token(item.prompt, tile, config.tokens)
        shape = logits.shape
        row = compat.layout_cast(lax.broadcasted_iota(jnp.int32, shape, 0), plgpu.Layout.WGMMA) + first
        token = compat.layout_cast(lax.broadcasted_iota(jnp.int32, shape, 1), plgpu.Layout.WGMMA) + first_token
        sees = (token <= row) & (token >= tile * config.tokens)
        if window is not None:
            sees &= token > row - window
        sees &= arrays.is_present(item.prompt, first_token, token)
        return jnp.where(sees, logits, -jnp.inf)

    def _clear_absent(self, tile: Scalar) -> None:
        """Clears the values of absent tokens, which may be NaN: a weight of 0 does not remove it."""
        prompt, size = self.item.prompt, self.config.tokens
        first_token = self.arrays.first_token(prompt, tile, size)
        start = self.arrays.first_present(prompt) - first_token
        stop = self.arrays.end(prompt) - first_token

        @pl.when((start > 0) | (stop < size))
        def clear() -> None:
            tiles.clear_rows(self.scratch.values, self._slot(tile), start, stop)
            plgpu.commit_smem()


def run(problem: PromptProblem, config: PromptConfig, arrays: PromptArrays, scratch: Scratch) -> None:
    """The body of the kernel."""
    queue = Queue(problem, config, arrays)
    warpgroup = lax.axis_index("warpgroup")
    claimed = queue.first(lax.axis_index("block"))
    first = queue.item(claimed, warpgroup)

    def rows(item: Item, step: Scalar, *scale: jax.Array) -> RowWarpgroup:
        return RowWarpgroup(problem, config, arrays, scratch, queue, warpgroup, item, step, *scale)

    def state(of: RowWarpgroup) -> tuple[Carry, ...]:
        return (of.item, of.step) if of.scale is None else (of.item, of.step, of.scale)

    @pl.when(first.prompt < queue.num_prompts)
    def run_items() -> None:
        zero = jnp.int32(0)
        first_rows = rows(first, zero)
        pl.when(warpgroup == 1)(functools.partial(first_rows.begin, claimed))
        first_rows = first_rows.begin_item()

        def is_item(state: Carry) -> Scalar:
            return state[0].prompt < queue.num_prompts

        lax.while_loop(is_item, lambda now: state(rows(*now).run()), state(first_rows))
        if not fp8.is_fp8(scratch.keys.dtype):
            # The second warpgroup has ended one more phase. Interpret mode requires that both wait for it.
            pl.when(warpgroup == 0)(functools.partial(plgpu.barrier_arrive, scratch.phase_ended))
            plgpu.barrier_wait(scratch.phase_ended)
