"""Checked mode: operations also check the values of slots, block tables, lengths, scales and pairs."""

from __future__ import annotations

import contextlib
from types import ModuleType
from typing import Any

import jax
import numpy as np
from jax.typing import ArrayLike

from kvjax.scale_values import readable, refuse
from kvjax.spec import as_bool

# Part of JAX's trace and compilation cache keys: a program made without the checks does not run in checked mode.
_checked = jax.make_user_context(False)
# Whether any thread ever entered. Until then this skips reading the context, which takes three times as long.
_ever_entered = False


def checked(enabled: bool = True) -> contextlib.AbstractContextManager[None]:
    """Within this context, this thread's operations also check the values of their arguments.

    They reject a slot at or past `num_slots`, which would write nothing; two tokens with one slot; a block outside the
    cache that a sequence needs; a length beyond its block table; a scale not between `MIN_SCALE` and `MAX_SCALE`;
    pairs of blocks past the cache or with one destination. They accept negative slots and pairs, which are padding, and
    -1 in a block table, which stands for a freed block.

    Arrays are read on the host, which waits for them, before anything is written. Traced values are checked by
    `jax.experimental.checkify`: jit a step as `jax.jit(checkify.checkify(step), ...)`, which returns an error to
    `throw` beside its result. Without `checkify` JAX refuses to compile it. A program that was compiled outside the
    context is compiled again inside, with the checks, and vice versa.

    Args:
      enabled: whether to check; `checked(False)` disables the checks inside a checked context.

    Raises:
      KVCacheValueError: from an operation inside; the message names the first invalid value. From `throw` it is
        `checkify.JaxRuntimeError` with that message.
    """
    enabled = as_bool("enabled", enabled)
    global _ever_entered
    _ever_entered = True
    return _checked(enabled)


def is_checked() -> bool:
    """Returns whether this thread is inside `checked`."""
    return _ever_entered and _checked.value


def check_slots(slot_mapping: ArrayLike, num_slots: int) -> None:
    """Checks that slots `[num_tokens]` are less than `num_slots`, and that no two tokens share one.

    Raises:
      KVCacheValueError: names the first token whose slot is past the cache or already used.
    """
    xp, slots = readable(slot_mapping)
    num_tokens = slots.shape[0]
    if not num_tokens:
        return
    past = slots > min(num_slots - 1, np.iinfo(slots.dtype).max)
    token = xp.argmax(past)
    refuse(
        past.any(),
        f"slot_mapping[{{token}}]: got {{slot}}, expected less than num_slots={num_slots}, or negative for padding",
        token=token,
        slot=slots[token],
    )
    first, second = _first_repeated(xp, slots)
    refuse(
        second < num_tokens,
        "slot_mapping[{second}]: got {slot}, expected a unique slot: slot_mapping[{first}] is the same",
        first=first,
        second=second,
        slot=slots[xp.minimum(second, num_tokens - 1)],
    )


def check_positions(positions: ArrayLike, slot_mapping: ArrayLike, max_position: int) -> None:
    """Checks that positions `[num_tokens]` of tokens without a negative slot are rows of a table of `max_position`.

    Raises:
      KVCacheValueError: names the first that is not.
    """
    xp, rows, slots = readable(positions, slot_mapping)
    if not rows.shape[0]:
        return
    wrong = (slots >= 0) & ((rows < 0) | (rows >= max_position))
    token = xp.argmax(wrong)
    refuse(
        wrong.any(),
        f"positions[{{token}}]: got {{position}}, expected between 0 and {max_position - 1}, a row of cos_sin_cache",
        token=token,
        position=rows[token],
    )


def check_sequences(
    block_table: ArrayLike, seq_lens: ArrayLike, num_blocks: int, block_size: int, *, what: str = "seq_lens"
) -> None:
    """Checks that `[num_seqs]` lengths fit `[num_seqs, max_blocks]` tables, and that the blocks they need exist.

    An entry may be -1, for a freed block: its tokens are masked. Entries past a sequence's last block may be anything.
    `what` names the lengths in messages.

    Raises:
      KVCacheValueError: names the first wrong length, or else the first wrong entry.
    """
    xp, table, lens = readable(block_table, seq_lens)
    num_seqs, max_blocks = table.shape
    if not num_seqs:
        return
    wrong = (lens < 0) | (lens > max_blocks * block_size)
    seq = xp.argmax(wrong)
    refuse(
        wrong.any(),
        f"{what}[{{seq}}]: got {{length}}, expected between 0 and {max_blocks * block_size}, the capacity of the"
        f" {max_blocks} blocks of {block_size} tokens in its block table",
        seq=seq,
        length=lens[seq],
    )
    if not max_blocks:
        return
    needed = np.arange(max_blocks)[None] * block_size < lens[:, None]
    wrong = (needed & ((table < -1) | (table >= num_blocks))).reshape(-1)
    entry = xp.argmax(wrong)
    refuse(
        wrong.any(),
        f"block_table[{{seq}}, {{column}}]: got {{block}}, expected between 0 and {num_blocks - 1}, or -1"
        " for a freed block: it holds some of the {length} tokens of its sequence",
        seq=entry // max_blocks,
        column=entry % max_blocks,
        block=table.reshape(-1)[entry],
        length=lens[entry // max_blocks],
    )


def check_cumulative(what: str, cumulative: ArrayLike, num_tokens: int) -> None:
    """Checks that `[num_seqs + 1]` cumulative lengths start at 0, never decrease and end at or before `num_tokens`.

    Raises:
      KVCacheValueError: names the first entry that is out of order or past the rows.
    """
    xp, starts = readable(cumulative)
    previous = xp.concatenate([xp.zeros(1, starts.dtype), starts[:-1]])
    is_first = np.arange(starts.shape[0]) == 0
    wrong = (starts < previous) | (starts > num_tokens) | (is_first & (starts != 0))
    seq = xp.argmax(wrong)
    refuse(
        wrong.any(),
        f"{what}[{{seq}}]: got {{start}}, expected 0 first, and then each between the one before it and"
        f" num_tokens={num_tokens}",
        seq=seq,
        start=starts[seq],
    )


def check_starts(what: str, starts: ArrayLike) -> None:
    """Checks that first tokens `[num_seqs]` are not negative.

    Raises:
      KVCacheValueError: names the first that is.
    """
    xp, values = readable(starts)
    if not values.shape[0]:
        return
    seq = xp.argmax(values < 0)
    refuse((values < 0).any(), f"{what}[{{seq}}]: got {{start}}, expected at least 0", seq=seq, start=values[seq])


def check_query_lens(
    cu_q_lens: ArrayLike, num_tokens: int, max_q_len: int, decode_q_len: int, max_prompts: int
) -> None:
    """Checks that `[num_seqs + 1]` cumulative query lengths increase, and that the sequences fit the static sizes.

    Raises:
      KVCacheValueError: names the first entry out of order or past the rows; else the first sequence with more than
        `max_q_len` rows; else the number of sequences with more than `decode_q_len`, if above `max_prompts`.
    """
    check_cumulative("cu_q_lens", cu_q_lens, num_tokens)
    xp, starts = readable(cu_q_lens)
    if starts.shape[0] == 1:
        return
    q_lens = starts[1:] - starts[:-1]
    wrong = q_lens > max_q_len
    seq = xp.argmax(wrong)
    refuse(
        wrong.any(),
        f"cu_q_lens: got {{q_len}} query tokens for sequence {{seq}}, expected at most max_q_len={max_q_len}",
        seq=seq,
        q_len=q_lens[seq],
    )
    count = xp.sum(q_lens > decode_q_len)
    refuse(
        count > max_prompts,
        f"cu_q_lens: got {{count}} sequences with more than decode_q_len={decode_q_len} query tokens, expected at most"
        f" max_prompts={max_prompts}",
        count=count,
    )


def check_pairs(pairs: ArrayLike, num_source: int, num_destination: int) -> None:
    """Checks that `[num_pairs, 2]` blocks are in their caches or negative, and that destinations are unique.

    Raises:
      KVCacheValueError: names the first pair.
    """
    xp, blocks = readable(pairs)
    num_pairs = blocks.shape[0]
    if not num_pairs:
        return
    copied = (blocks >= 0).all(axis=1)
    for side, name, count in ((0, "source", num_source), (1, "destination", num_destination)):
        past = copied & (blocks[:, side] >= count)
        pair = xp.argmax(past)
        refuse(
            past.any(),
            f"pairs[{{pair}}]: got {name} block {{block}}, expected less than num_blocks={count}, or a negative one"
            " to copy nothing",
            pair=pair,
            block=blocks[pair, side],
        )
    destination = xp.where(copied, blocks[:, 1], -1)
    first, second = _first_repeated(xp, destination)
    refuse(
        second < num_pairs,
        "pairs[{second}]: got destination block {block}, expected a unique one: pairs[{first}] has the same",
        first=first,
        second=second,
        block=destination[xp.minimum(second, num_pairs - 1)],
    )


def check_layer(layer: ArrayLike, num_layers: int) -> None:
    """Checks that the number of a layer, a scalar, lies between 0 and `num_layers - 1`.

    Raises:
      KVCacheValueError: names it.
    """
    _, number = readable(layer)
    refuse(
        (number < 0) | (number >= num_layers),
        f"layer: got {{layer}}, expected between 0 and {num_layers - 1}",
        layer=number,
    )


def check_window(window: ArrayLike) -> None:
    """Checks that a sliding window, a scalar, is positive.

    Raises:
      KVCacheValueError: names it.
    """
    _, number = readable(window)
    refuse(number < 1, "sliding_window: got {window}, expected at least 1", window=number)


def check_window_rows(what: str, rows: ArrayLike, is_used: ArrayLike, num_rows: int) -> None:
    """Checks that used rows of a window, `[num_seqs]`, lie between 0 and `num_rows - 1` and are unique.

    Raises:
      KVCacheValueError: names the first that does not, or the first that is repeated.
    """
    xp, row, used = readable(rows, is_used)
    if not row.shape[0]:
        return
    wrong = used & ((row < 0) | (row >= num_rows))
    seq = xp.argmax(wrong)
    refuse(
        wrong.any(),
        f"{what}[{{seq}}]: got {{row}}, expected between 0 and {num_rows - 1}, a row of the window",
        seq=seq,
        row=row[seq],
    )
    first, second = _first_repeated(xp, xp.where(used, row, -1))
    refuse(
        second < row.shape[0],
        f"{what}[{{second}}]: got {{row}}, expected a unique row: {what}[{{first}}] is the same",
        first=first,
        second=second,
        row=row[xp.minimum(second, row.shape[0] - 1)],
    )


def check_num_seqs(num_seqs: ArrayLike, max_num_seqs: int) -> None:
    """Checks that a number of sequences, `[]` or `[1]`, lies between 0 and `max_num_seqs`.

    Raises:
      KVCacheValueError: names it.
    """
    _, number = readable(num_seqs)
    number = number.reshape(())
    refuse(
        (number < 0) | (number > max_num_seqs),
        f"num_seqs: got {{number}}, expected between 0 and {max_num_seqs}",
        number=number,
    )


def _first_repeated(xp: ModuleType, indices: Any) -> tuple[Any, Any]:
    """Returns the indices of the first non-negative element that repeats an earlier one: (earlier, repeat).

    Both are `len(indices)` if there is none.
    """
    none = indices.shape[0]
    order = xp.argsort(indices, stable=True)
    in_order = indices[order]
    repeated = (in_order[1:] == in_order[:-1]) & (in_order[1:] >= 0)
    if not repeated.shape[0]:
        return none, none
    pair = xp.argmin(xp.where(repeated, order[1:], none))
    return order[pair], xp.where(repeated[pair], order[pair + 1], none)
