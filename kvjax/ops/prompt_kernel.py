"""Attention of long query chunks on Hopper: a gather kernel copies pages to tiles, the prompt kernel attends.

The kernel stores the results of each row in place, among those of the rows that decode, so that no rows are packed or
joined. Where few rows see many tokens, their tokens are divided into splits, whose results are merged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kvjax.kernels import prompts as kernel
from kvjax.kernels.attention import Softmax
from kvjax.kernels.launchable import RowMemory
from kvjax.ops.merge import merge_parts
from kvjax.ops.options import most_splits, prompts_at_once, restricting
from kvjax.ops.prompts import LayerSequences, Prompts, by_lots


class Launch(NamedTuple):
    """A call of the kernel.

    Attributes:
      prompts: the rows and what they attend to.
      options: the call's, with a window that restricts.
      splits: parts that a row's tokens are divided into.
      at_once: prompts of a lot, whose tiles fit in `DENSE_BYTES` of `ops.options`.
      near: the same rows over other tokens, of which each row sees the last `near_window`; or None.
      near_window: see there.
    """

    prompts: Prompts
    options: Softmax
    splits: int
    at_once: int
    near: Prompts | None = None
    near_window: int | None = None

    @classmethod
    def of(
        cls, prompts: Prompts, options: Softmax, near: Prompts | None = None, near_window: int | None = None
    ) -> Launch:
        """The launch for prompts.

        With `batch_invariant`, rows are not divided into splits, whose number depends on the batch.
        """
        spec, (num_tokens, num_heads, _) = prompts.cache.spec, prompts.query.shape
        options = options._replace(window=restricting(options.window, prompts.max_tokens))
        reached = prompts.max_reached(options.window)
        tokens = _whole_tiles(reached) + (0 if near is None else _whole_tiles(near.max_reached(near_window)))
        token_bytes = spec.num_kv_heads * sum(spec.head_sizes) * prompts.dtype.itemsize + 4  # and the bias
        at_once = prompts_at_once(tokens * token_bytes, len(prompts.sequences.lens))
        most = most_splits(num_tokens, num_heads, spec.head_size_v)
        max_splits = 1 if options.batch_invariant else most
        config = kernel.choose(spec, at_once, prompts.max_q_len, num_heads, reached, max_splits)
        return cls(prompts, options, int(config.splits), at_once, near, near_window)

    @property
    def reads_results(self) -> bool:
        """Whether prompts' rows must hold results of rows that attend to nothing, to merge as one more part."""
        return self.prompts.sinks is not None and self.splits > 1

    def kind(self, rows: jax.Array) -> kernel.PromptKind:
        """What the kernel is compiled for, with rows of the query."""
        prompts, options, is_divided = self.prompts, self.options, self.splits > 1
        return kernel.PromptKind(
            prompts.cache.spec,
            RowMemory.of(rows),
            rows.shape[1],
            (prompts.k_scale.size, prompts.v_scale.size),
            options.sm_scale,
            options.window,
            options.logits_soft_cap,
            has_sinks=prompts.sinks is not None and not is_divided,  # with the rows that attend to nothing
            is_divided=is_divided,
            query_quantization=kernel.fp8.is_fp8(prompts.dtype),
            near=self.near_window,
        )


def _whole_tiles(num_tokens: int) -> int:
    return -(-num_tokens // kernel.TOKENS) * kernel.TOKENS


def attend(launch: Launch, results: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Attends with the rows of prompts.

    `results` are those of other rows, `[num_tokens, num_heads, head_size_v]` of the query's dtype, and the log-sum-exp,
    float32 `[num_tokens, num_heads]`. For prompts' rows the log-sum-exp is that of rows that attend to nothing (the
    sink), and if `launch.reads_results` the results are 0, otherwise arbitrary.

    Returns:
      `results`, with those of the first `max_q_len` rows of each sequence.
    """
    prompts, near = launch.prompts, launch.near
    num_tokens = prompts.query.shape[0]
    query, results = padded(prompts.query, results)
    kind = launch.kind(query)
    rows = kernel.PromptRows(query, prompts.max_q_len, prompts.k_scale, prompts.v_scale, prompts.sinks)

    def attend_lot(
        results: tuple[jax.Array, jax.Array], lots: tuple[LayerSequences, LayerSequences | None]
    ) -> tuple[tuple[jax.Array, jax.Array], None]:
        pages = _pages(prompts, lots[0], launch.options.window)
        recent = None if near is None or lots[1] is None else _pages(near, lots[1], launch.near_window)

        def attend_parts(parts: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            return kernel.attend(kind, rows, pages, recent, parts, launch.splits)

        return by_splits(attend_parts, results, launch.splits), None

    lots = prompts.sequences, None if near is None else near.sequences
    (out, lse), _ = by_lots(attend_lot, results, lots, launch.at_once)
    return out[0, :num_tokens], lse[0, :num_tokens]


def _pages(prompts: Prompts, sequences: LayerSequences, window: int | None) -> kernel.LotPages:
    """What rows of some of the sequences see in their pages, as the kernel `schedule_prompts` finds it for torch.

    If a sequence has more than `max_q_len` rows, only its first rows are served. They do not see its last tokens, which
    are left out: these may be NaN, which a weight of 0 does not remove.
    """
    cache, spec, (table, lens, q_ends, q_lens) = prompts.cache, prompts.cache.spec, sequences
    size, first_row = spec.block_size, lens - q_lens
    lens = jnp.maximum(lens - jnp.maximum(q_lens - prompts.max_q_len, 0), 0)  # a sum of both may be 2**31
    first_seen = jnp.zeros_like(lens) if window is None else jnp.maximum(first_row - (window - 1), 0)
    first_block = first_seen // size
    skipped = first_block * size
    column = jnp.arange(table.shape[1], dtype=jnp.int32)[None, :]
    is_reached = (column >= first_block[:, None]) & (column * size < lens[:, None])
    exists = (table >= 0) & (table < cache.num_blocks)
    # One reduction for both.
    first_absent, minus_end = jnp.min(
        jnp.stack([
            jnp.where(is_reached & ~exists, column, table.shape[1]),
            jnp.where(is_reached & exists, -column - 1, 0),
        ]),
        axis=-1,
    )  # fmt: skip
    fields = {
        "q_start": q_ends - q_lens,
        "q_len": jnp.minimum(q_lens, prompts.max_q_len),
        "position": first_row - skipped,
        "first_absent": jnp.maximum(jnp.minimum(first_absent * size, lens) - skipped, 0),
        "end": jnp.maximum(jnp.minimum(-minus_end * size, lens) - skipped, 0),
        "first_block": first_block,
        "first_seen": first_seen - skipped,
    }
    found = kernel.found_of(fields, jnp.sum(q_lens > 0, dtype=jnp.int32))
    return kernel.LotPages(cache.kv, spec, table, found, _whole_tiles(prompts.max_reached(window)))


def padded(query: jax.Array, results: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Returns a query of at least `ROWS` rows, and results for it, of one split."""
    padding = max(kernel.ROWS - len(query), 0)
    rows, out, lse = (jnp.pad(x, ((0, padding), *((0, 0),) * (x.ndim - 1))) for x in (query, *results))
    return rows, (out[None], lse[None])


def by_splits(
    attend: Callable[[tuple[jax.Array, jax.Array]], tuple[jax.Array, jax.Array]],
    results: tuple[jax.Array, jax.Array],
    splits: int,
) -> tuple[jax.Array, jax.Array]:
    """Returns `results`, of one split, with the results of prompts, which `attend` stores in its arguments.

    With several splits, `attend` gets memory of its own, of float32 so that results are rounded once, and `results` are
    merged as one more part.
    """
    if splits == 1:
        return attend(results)
    out, lse = results
    outs, lses = attend((
        lax.empty((splits, *out.shape[1:]), jnp.float32),
        jnp.full((splits, *lse.shape[1:]), -jnp.inf, lse.dtype),
    ))  # fmt: skip
    merged, lse = merge_parts([out[0], *outs], [lse[0], *lses])
    return merged.astype(out.dtype)[None], lse[None]
