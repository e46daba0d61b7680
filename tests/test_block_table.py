"""Every sequence finds its own tokens, whatever was grown, shared, cut and given back before."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from kvjax import KVCacheValueError  # noqa: E402
from kvjax_torch.block_table import BlockTable  # noqa: E402

CPU = torch.device("cpu")


class Pool:
    """A table, a pool of numbers in place of tokens, and what each sequence has to hold."""

    def __init__(self, num_blocks: int, block_size: int):
        self.table = BlockTable(num_blocks, block_size)
        self.slots = torch.full((num_blocks, block_size), -1)
        self.sequences = np.empty((0, 0), np.int64)
        self.written = 0

    def grow(self, num_seqs: int, num_new: int) -> None:
        length = self.sequences.shape[1]
        step = self.table.grow(num_seqs, length, length + num_new, CPU)
        new = np.arange(self.written, self.written + num_seqs * num_new).reshape(num_seqs, num_new)
        self.written += new.size
        self.slots[step.copy_to] = self.slots[step.copy_from]
        self.slots.view(-1)[step.slot_mapping] = torch.from_numpy(new.ravel())
        kept = self.sequences if length else np.empty((num_seqs, 0), np.int64)
        self.sequences = np.concatenate([kept, new], axis=1)
        found = self.slots[step.block_table.long()].flatten(1)[:, : length + num_new]
        np.testing.assert_array_equal(found.numpy(), self.sequences)
        assert step.seq_lens.tolist() == [length + num_new] * num_seqs
        assert step.block_table.dtype == step.seq_lens.dtype == torch.int32
        assert step.block_table.shape[1] == -(-(length + num_new) // self.slots.shape[1])

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


def test_layers_share_one_step():
    table = BlockTable(4, 2)
    first = table.grow(2, 0, 3, CPU)
    assert table.grow(2, 0, 3, CPU) is first
    table.truncate(0)
    assert table.grow(2, 0, 3, CPU) is not first


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


def test_another_number_of_sequences_is_refused():
    pool = Pool(num_blocks=9, block_size=4)
    pool.grow(2, 3)
    with pytest.raises(KVCacheValueError, match="key_states: got a batch of 3, expected 2, the sequences that the"):
        pool.table.grow(3, 3, 4, CPU)


@pytest.mark.parametrize("sizes", [(0, 4), (4, 0)])
def test_sizes_that_no_pool_has_are_refused(sizes: tuple[int, int]):
    with pytest.raises(KVCacheValueError, match="got 0, expected an int of at least 1"):
        BlockTable(*sizes)
