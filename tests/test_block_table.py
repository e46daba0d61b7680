"""Every sequence finds its own tokens, whatever was grown, shared, cut and given back before."""

from __future__ import annotations

import functools
import re
import unittest.mock
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from kvjax import KVCacheValueError, OutOfBlocksError  # noqa: E402
from kvjax_torch.transformers.block_table import AppendStep, BlockTable  # noqa: E402


def make_copies(table: BlockTable, slots: torch.Tensor) -> None:
    copy_from, copy_to = torch.from_numpy(table.copies).long().T
    slots[copy_to] = slots[copy_from]
    table.copied()


def grow(table: BlockTable, num_seqs: int, start: int, end: int, **options: Any) -> AppendStep:
    return table.grow(table.plan(num_seqs, start, end, **options))


class Pool:
    """A table, a pool of numbers in place of tokens, and what each sequence has to hold."""

    def __init__(self, num_blocks: int, block_size: int):
        self.table = BlockTable(num_blocks, block_size)
        self.slots = torch.full((num_blocks, block_size), -1)
        self.sequences = np.empty((0, 0), np.int64)
        self.written = 0

    def grow(self, num_seqs: int, num_new: int) -> None:
        length = self.sequences.shape[1]
        step = grow(self.table, num_seqs, length, length + num_new)
        new = np.arange(self.written, self.written + num_seqs * num_new).reshape(num_seqs, num_new)
        self.written += new.size
        make_copies(self.table, self.slots)
        self.slots.view(-1)[step.slot_mapping] = torch.from_numpy(new.ravel())
        kept = self.sequences if length else np.empty((num_seqs, 0), np.int64)
        self.sequences = np.concatenate([kept, new], axis=1)
        found = self.slots[step.block_table.long()].flatten(1)[:, : length + num_new]
        np.testing.assert_array_equal(found.numpy(), self.sequences)
        assert step.seq_lens.tolist() == [length + num_new] * num_seqs
        assert step.block_table.dtype == step.seq_lens.dtype == torch.int32
        assert step.block_table.shape[1] == -(-(length + num_new) // self.slots.shape[1])
        np.testing.assert_array_equal(self.table.rows(), step.block_table.numpy())

    def truncate(self, length: int) -> None:
        self.sequences = self.sequences[:, :length]
        self.table.truncate(length)

    def select(self, sequences: np.ndarray) -> None:
        self.sequences = self.sequences[sequences]
        self.table.select(sequences)

    @property
    def fewest_blocks(self) -> int:
        """Different stretches of tokens, a block's worth each, that the sequences consist of."""
        size = self.slots.shape[1]
        starts = range(0, self.sequences.shape[1], size)
        return len({(start, *row[start : start + size]) for row in self.sequences.tolist() for start in starts})


@given(block_size=st.integers(1, 5), num_seqs=st.integers(1, 4), data=st.data())
def test_every_sequence_finds_its_tokens(block_size: int, num_seqs: int, data: st.DataObject):
    pool = Pool(num_blocks=200, block_size=block_size)
    pool.grow(num_seqs, data.draw(st.integers(1, 9)))
    for _ in range(data.draw(st.integers(0, 12))):
        what, num_held = data.draw(st.sampled_from(["grow", "truncate", "select"])), len(pool.sequences)
        if what == "grow":
            pool.grow(num_held, data.draw(st.integers(0, 6)))
        elif what == "truncate":
            pool.truncate(data.draw(st.integers(1, pool.sequences.shape[1])))
        else:
            chosen = st.lists(st.integers(0, num_held - 1), min_size=1, max_size=4)
            pool.select(np.array(data.draw(chosen)))
        pool.grow(len(pool.sequences), 0)  # reads what is left


def test_beams_share_blocks_until_they_write_into_them():
    pool = Pool(num_blocks=7, block_size=4)
    pool.grow(1, 6)
    pool.select(np.array([0, 0, 0]))
    assert pool.table.num_used_blocks == 2
    pool.grow(3, 1)  # one beam goes on in the second block, two get copies of it
    assert pool.table.num_used_blocks == pool.fewest_blocks == 4
    pool.grow(3, 4)
    assert pool.table.num_used_blocks == pool.fewest_blocks == 7
    pool.select(np.array([2, 2, 2]))
    assert pool.table.num_used_blocks == pool.fewest_blocks == 3


def test_a_step_that_does_not_fit_changes_nothing():
    pool = Pool(num_blocks=5, block_size=4)
    pool.grow(2, 8)
    before = pool.table.num_used_blocks
    message = "num_blocks: got 5 blocks of 4 tokens, expected at least 6 to hold 2 sequences of 9 tokens"
    with pytest.raises(KVCacheValueError, match=message):
        pool.grow(2, 1)
    assert pool.table.num_used_blocks == before == 4
    pool.select(np.array([True, False]))
    pool.grow(1, 12)  # all five blocks


@given(
    num_blocks=st.integers(2, 12), block_size=st.integers(1, 3), window=st.none() | st.integers(1, 5), data=st.data()
)
def test_a_plan_is_refused_if_the_pool_has_too_few_blocks_and_only_then(
    num_blocks: int, block_size: int, window: int | None, data: st.DataObject
):
    """The pool itself counts blocks after it has freed what the window has passed."""
    table, end = BlockTable(num_blocks, block_size, sliding_window=window), 0
    num_seqs = data.draw(st.integers(1, 3))
    is_token = np.empty((num_seqs, 0), np.bool_)
    for _ in range(data.draw(st.integers(1, 8))):
        if end and data.draw(st.booleans()):
            chosen = np.array(data.draw(st.lists(st.integers(0, num_seqs - 1), min_size=1, max_size=4)))
            table.select(chosen)
            num_seqs, is_token = len(chosen), is_token[chosen]
        num_new = data.draw(st.integers(1, 6))
        bits = data.draw(st.lists(st.booleans(), min_size=num_seqs * num_new, max_size=num_seqs * num_new))
        mask = np.concatenate([is_token, np.array(bits).reshape(num_seqs, num_new)], axis=1)
        rows, free_passed = table.rows(), data.draw(st.booleans())
        plan = functools.partial(table.plan, num_seqs, end, end + num_new, is_token=mask, free_passed=free_passed)
        try:
            growth = plan()
        except KVCacheValueError as error:
            np.testing.assert_array_equal(table.rows(), rows)
            needed = int(re.search(r"expected at least (\d+)", str(error))[1])
            with unittest.mock.patch.object(table, "_num_missing", return_value=0):
                growth = plan()
            with pytest.raises(OutOfBlocksError) as raised:
                table.grow(growth)
            assert needed == num_blocks + raised.value.num_needed - raised.value.num_free
            return
        table.grow(growth)
        table.copied()
        end, is_token = end + num_new, mask


def test_another_number_of_sequences_is_refused():
    pool = Pool(num_blocks=9, block_size=4)
    pool.grow(2, 3)
    with pytest.raises(KVCacheValueError, match="key_states: got a batch of 3, expected 2, the sequences that the"):
        grow(pool.table, 3, 3, 4)


@pytest.mark.parametrize("sizes", [(0, 4), (4, 0)])
def test_sizes_that_no_pool_has_are_refused(sizes: tuple[int, int]):
    with pytest.raises(KVCacheValueError, match="got 0, expected an int of at least 1"):
        BlockTable(*sizes)


class Padded:
    """A table of layers with a window: what each sequence holds are its tokens, and padding is nothing."""

    def __init__(self, block_size: int, window: int):
        self.table = BlockTable(100, block_size, sliding_window=window)
        self.slots = torch.full((100, block_size), -1)
        self.window = window
        self.is_token = np.empty((0, 0), np.bool_)
        self.tokens: list[list[int]] = []
        self.written = 0

    def grow(self, is_new: np.ndarray) -> None:
        start, end = self.is_token.shape[1], self.is_token.shape[1] + is_new.shape[1]
        if not start:
            self.tokens, self.is_token = [[] for _ in is_new], np.empty((len(is_new), 0), np.bool_)
        before = [len(tokens) for tokens in self.tokens]
        self.is_token = np.concatenate([self.is_token, is_new], axis=1)
        step = grow(self.table, len(is_new), start, end, is_token=self.is_token, free_passed=True)
        new = np.arange(self.written, self.written + is_new.size).reshape(is_new.shape)
        self.written += is_new.size
        for tokens, row, shown in zip(self.tokens, new, is_new, strict=True):
            tokens.extend(row[shown].tolist())
        slots, numbers = step.slot_mapping.numpy(), new.ravel()
        assert ((slots >= 0) == is_new.ravel()).all()
        make_copies(self.table, self.slots)
        self.slots.view(-1)[slots[slots >= 0]] = torch.from_numpy(numbers[slots >= 0])
        stored = np.arange(is_new.size) if step.stored is None else step.stored.numpy()
        assert stored.tolist() == np.flatnonzero(is_new).tolist()
        assert step.cu_q_lens.tolist() == [0, *np.cumsum(is_new.sum(axis=1))]
        assert step.seq_lens.tolist() == [len(tokens) for tokens in self.tokens]
        size = self.slots.shape[1]
        for row, tokens, num_before in zip(step.block_table.numpy(), self.tokens, before, strict=True):
            first = max(num_before - self.window + 1, 0)
            found = self.slots[row].flatten()[first : len(tokens)]
            assert found.tolist() == tokens[first:]
            assert (row[first // size : -(-len(tokens) // size)] >= 0).all()
            assert (row[: first // size] == -1).all()

    def truncate(self, length: int) -> None:
        kept = self.is_token[:, :length].sum(axis=1)
        self.table.truncate(length)
        self.is_token = self.is_token[:, :length]
        self.tokens = [tokens[:number] for tokens, number in zip(self.tokens, kept, strict=True)]


@given(block_size=st.integers(1, 5), window=st.integers(1, 9), num_seqs=st.integers(1, 3), data=st.data())
def test_windows_see_their_tokens_whatever_is_padding(block_size: int, window: int, num_seqs: int, data: st.DataObject):
    padded = Padded(block_size, window)
    for _ in range(data.draw(st.integers(1, 9))):
        shape = len(padded.tokens) if padded.is_token.shape[1] else num_seqs, data.draw(st.integers(1, 7))
        start = padded.is_token.shape[1]
        bits = st.lists(st.booleans(), min_size=shape[0] * shape[1], max_size=shape[0] * shape[1])
        padded.grow(np.array(data.draw(bits)).reshape(shape))
        what = data.draw(st.sampled_from(["go on", "take back", "select"]))
        if what == "take back":
            padded.truncate(data.draw(st.integers(start, padded.is_token.shape[1])))
        elif what == "select":
            chosen = np.array(data.draw(st.lists(st.integers(0, shape[0] - 1), min_size=1, max_size=3)))
            padded.table.select(chosen)
            padded.is_token, padded.tokens = padded.is_token[chosen], [[*padded.tokens[index]] for index in chosen]


def test_a_length_that_a_window_cannot_go_on_from_is_refused_and_nothing_is_cut():
    table = BlockTable(9, 2, sliding_window=3)
    for start in range(0, 12, 2):
        grow(table, 1, start, start + 2, free_passed=True)
    assert table.num_used_blocks == 2
    for length in (1, 9):
        with pytest.raises(KVCacheValueError, match=rf"tokens_to_remove: got -{12 - length}, expected at most the tok"):
            table.check_length(length, 12)
    assert grow(table, 1, 12, 13, free_passed=True).seq_lens.tolist() == [13]
    table.truncate(0)
    assert table.num_used_blocks == 0


@pytest.mark.parametrize(
    ("later", "message"),
    [
        (None, "got a token at position 0 of sequence 0, expected padding, as the cache holds it"),
        ([[0, 1, 1, 1, 1], [1, 1, 0, 1, 1]], "got padding at position 2 of sequence 1, expected a token, as the cache"),
        ([[1, 0, 1, 1, 1], [1, 1, 1, 1, 1]], "got a token at position 0 of sequence 0, expected padding, as the cache"),
    ],
    ids=["none any more", "more of it", "as much elsewhere"],
)
def test_changed_padding_is_refused(later: list[list[int]] | None, message: str):
    table, mask = BlockTable(9, 2), np.array([[0, 1, 1, 1], [1, 1, 1, 1]], np.bool_)
    grow(table, 2, 0, 4, is_token=mask)
    mask[:] = False  # the caller may reuse its memory
    assert table.has_padding
    with pytest.raises(KVCacheValueError, match=f"attention_mask: {message}"):
        grow(table, 2, 4, 5, is_token=None if later is None else np.array(later, np.bool_))
    assert grow(table, 2, 4, 5, is_token=np.array([[0, 1, 1, 1, 1], [1] * 5], np.bool_)).seq_lens.tolist() == [4, 5]
