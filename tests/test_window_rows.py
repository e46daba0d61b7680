"""A window's rows go to the sequences that ran last, and whatever a row lacks of its sequence is to be filled."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvjax
from kvjax import BlockPool, ExactWindow, KVCacheTypeError, KVCacheValueError, StepMetadata, WindowRows

SPEC = kvjax.FullAttentionSpec(4, 1, 16, dtype="nvfp4")
SIZE, MAX_Q_LEN = 14, 4


@functools.cache
def window_of(num_rows: int) -> ExactWindow:
    return ExactWindow.allocate(SPEC, num_rows, SIZE, max_q_len=MAX_Q_LEN)


class Model:
    """Rows as dictionaries from slots to tokens: what a step and a fill write, and what a step then reads."""

    def __init__(self, num_rows: int) -> None:
        self.rows = WindowRows(window_of(num_rows))
        self.tokens_per_row = window_of(num_rows).tokens_per_row
        self.slots: list[dict[int, object]] = [{} for _ in range(num_rows)]
        self.filled = 0

    def step(self, sequences: list, q_lens: list[int], texts: dict) -> None:
        rows, fills = self.rows.assign(sequences, q_lens)
        used = [row for row, q_len in zip(rows, q_lens, strict=True) if q_len]
        assert len(set(used)) == len(used)
        for sequence, q_len, row, fill in zip(sequences, q_lens, rows, fills, strict=True):
            if not q_len:
                assert (row, fill) == (-1, -1)
                continue
            text, stop = texts[sequence], sequence.num_tokens
            start = stop - q_len
            if fill >= 0:
                assert fill == row
                self.filled += 1
                self.write(row, text, max(start - SIZE, 0), start)
            seen = range(max(start - SIZE + 1, 0), start)
            assert [self.slots[row][position % self.tokens_per_row] for position in seen] == [text[i] for i in seen]
            self.write(row, text, max(start, stop - self.tokens_per_row), stop)

    def write(self, row: int, text: list, start: int, stop: int) -> None:
        self.slots[row].update({position % self.tokens_per_row: text[position] for position in range(start, stop)})


@settings(max_examples=150)
@given(num_rows=st.sampled_from([1, 2, 3]), data=st.data())
def test_a_step_finds_the_tokens_that_its_queries_see(num_rows: int, data: st.DataObject):
    """Sequences that run in turns, truncate by any number of tokens, get tokens without a step, end and are forked."""
    pool, model, names = BlockPool(400, SPEC.block_size), Model(num_rows), iter(range(10**6))
    sequences = [pool.sequence() for _ in range(3)]
    texts = {one: [] for one in sequences}
    for _ in range(data.draw(st.integers(1, 12))):
        kind = data.draw(st.sampled_from(["step", "step", "step", "truncate", "import", "end", "fork"]))
        index = data.draw(st.integers(0, 2))
        one = sequences[index]
        if kind == "step":
            batch = data.draw(st.permutations(sequences))[:num_rows]
            q_lens = [data.draw(st.sampled_from([0, 1, 1, 2, 4, 9, 40])) for _ in batch]
            pool.append(batch, q_lens)
            for sequence, q_len in zip(batch, q_lens, strict=True):
                texts[sequence] += [next(names) for _ in range(q_len)]
            model.step(batch, q_lens, texts)
        elif kind == "truncate":
            one.truncate(data.draw(st.integers(0, one.num_tokens)))
            del texts[one][one.num_tokens :]
        elif kind == "import":
            number = data.draw(st.integers(1, 9))
            pool.append([one], [number])
            texts[one] += [next(names) for _ in range(number)]
        else:
            sequences[index] = other = pool.sequence() if kind == "end" else one.fork()
            texts[other] = [] if kind == "end" else [*texts[one]]
            if kind == "fork" and data.draw(st.booleans()):
                for source, destination in model.rows.fork(one, other):
                    model.slots[destination] = dict(model.slots[source])


def test_rows_are_filled_only_where_they_have_to_be():
    pool, model = BlockPool(400, SPEC.block_size), Model(2)
    one, other, third = (pool.sequence() for _ in range(3))
    texts = {sequence: [*range(1000 * index, 1000 * index + 200)] for index, sequence in enumerate((one, other, third))}

    def step(*q_lens: int) -> int:
        before = model.filled
        pool.append([one, other, third], q_lens)
        model.step([one, other, third], list(q_lens), texts)
        return model.filled - before

    assert step(50, 3, 0) == step(1, 30, 0) == step(4, 0, 0) == 0  # new sequences, chunks and decodes
    one.truncate(one.num_tokens - MAX_Q_LEN)
    assert step(4, 1, 0) == 0  # drafts
    one.truncate(one.num_tokens - 30)
    assert step(1, 1, 0) == 1  # tokens that later ones have overwritten
    assert step(0, 1, 5) == 0  # the row of the first, for a new sequence
    assert step(1, 0, 1) == 1  # the row of the second
    one.free()
    assert step(7, 0, 1) == 0  # from the start


def test_a_fork_without_a_row_to_copy_copies_none():
    pool, rows = BlockPool(40, SPEC.block_size), WindowRows(window_of(1))
    one = pool.sequence()
    pool.append([one], [6])
    child = one.fork()
    assert rows.fork(one, child).shape == (0, 2)
    rows.assign([one], [6])
    assert rows.fork(one, child).shape == (0, 2)  # the only row stays with the first
    pool.append([one], [1])
    assert rows.assign([one], [1])[1].tolist() == [-1]


def sequences(*lengths: int) -> list[kvjax.PagedSequence]:
    pool = BlockPool(40, SPEC.block_size)
    made = [pool.sequence() for _ in lengths]
    pool.append(made, lengths)
    return made


def assigned(given: object, q_lens: object) -> tuple[np.ndarray, np.ndarray]:
    return WindowRows(window_of(2)).assign(given, q_lens)


def step_of(rows: object, *q_lens: int) -> StepMetadata:
    return StepMetadata.from_sequences(sequences(5, 3), q_lens, num_seqs=3, window_rows=rows)


def test_a_step_holds_the_rows_of_its_sequences():
    for rows in ([4, 0], np.int32([4, 0])):
        held = step_of(rows, 5, 1).window_rows
        assert (held.dtype, held.tolist()) == (np.int32, [4, 0, -1])
    assert step_of([4, -1], 5, 0).window_rows.tolist() == [4, -1, -1]
    assert step_of(None, 5, 0).window_rows is None


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: step_of([1], 5, 1), KVCacheValueError, "window_rows: got 1 rows, expected one for each of 2 sequenc"),
        (lambda: step_of([1, 1], 5, 1), KVCacheValueError, r"window_rows\[1\]: got 1, expected a row of its own: win"),
        (lambda: step_of([1, -1], 5, 1), KVCacheValueError, r"window_rows\[1\]: got -1, expected an int of at least 0"),
        (lambda: step_of([1, 0.5], 5, 1), KVCacheTypeError, r"window_rows\[1\]: got 0.5 of type float, expected an i"),
        (
            lambda: WindowRows(window_of(1)).assign(sequences(5, 3), [1, 1]),
            KVCacheValueError,
            "sequences: got 2 with new tokens, expected at most 1, the rows of the window",
        ),
        (
            lambda: WindowRows(window_of(2)).assign(sequences(5, 3), [1]),
            KVCacheValueError,
            "q_lens: got 1 numbers, expected one for each of 2 sequences",
        ),
        (
            lambda: WindowRows(window_of(2)).assign(sequences(5, 3), [1, 4]),
            KVCacheValueError,
            r"q_lens\[1\]: got 4, expected an int of at most 3",
        ),
        (
            lambda: WindowRows(window_of(2)).assign(sequences(5) * 2, [1, 1]),
            KVCacheValueError,
            "sequences: got a duplicate, expected each once",
        ),
        (lambda: WindowRows(3), KVCacheTypeError, "exact_window: got an int, expected an ExactWindow"),
        (lambda: assigned(sequences(5)[0], [1]), KVCacheTypeError, "^sequences: got a PagedSequence, expected a seque"),
        (lambda: assigned(set(sequences(5)), [1]), KVCacheTypeError, "^sequences: got a set, expected a sequence of P"),
        (
            lambda: assigned(sequences(5), 1),
            KVCacheTypeError,
            "^q_lens: got an int, expected a sequence of ints, one f",
        ),
        (lambda: assigned(["a"], [1]), KVCacheTypeError, r"^sequences\[0\]: got a str, expected a PagedSequence"),
        (
            lambda: assigned(sequences(5), ["1"]),
            KVCacheTypeError,
            r"^q_lens\[0\]: got '1' of type str, expected an int",
        ),
        (
            lambda: WindowRows(window_of(2)).fork(3, sequences(5)[0]),
            KVCacheTypeError,
            "^sequence: got an int, expected a PagedSequence: BlockPool.sequence",
        ),
        (
            lambda: WindowRows(window_of(2)).fork(sequences(5)[0], None),
            KVCacheTypeError,
            "^other: got None, expected a PagedSequence: BlockPool.sequence",
        ),
    ],
)
def test_invalid_arguments_are_refused_by_name(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("left", [0, 4])
def test_a_row_is_filled_for_tokens_that_came_without_a_step(left: int):
    """After tokens were taken away and others imported into their blocks, whatever their number."""
    pool, rows = BlockPool(8, 4), WindowRows(window_of(2))
    sequence = pool.sequence()
    pool.append([sequence], [10])
    rows.assign([sequence], [10])
    sequence.truncate(left)
    pool.append([sequence], [8 - left])  # by import_blocks
    pool.append([sequence], [1])
    (row,), (fill,) = rows.assign([sequence], [1])
    assert fill == row
