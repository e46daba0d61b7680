"""The kernel that finds the token of each row of a gather of ranges, against NumPy; interpreted and compiled."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import gpu_compile
from support.gpu_compile import TARGETS, compile_for
from support.interpret_mode import interpret_mode

from kvjax.kernels import row_places_kernel

NUM_BLOCKS, POISON = 7, 99
INT32_MAX = 2**31 - 1


class Ranges(NamedTuple):
    """Ranges of `lengths` tokens; `known` are the sequences of rows, and `firsts` the first tokens, if given."""

    table: Any
    lengths: Any
    num_rows: int
    block_size: int = 4
    firsts: Any = None
    known: Any = None
    stride: int = 0

    @property
    def bounds(self) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int32)


def expected(ranges: Ranges) -> tuple[list[int], list[int]]:
    """Page and token of each row, -1 for both where it has none, in Python's integers."""
    bounds, width = ranges.bounds.tolist(), np.shape(ranges.table)[1]
    places = []
    for row in range(ranges.num_rows):
        owner = [seq for seq, (start, end) in enumerate(itertools.pairwise(bounds)) if start <= row < end]
        if ranges.known is not None:
            named = min(max(int(ranges.known[row]), 0), len(bounds) - 2)
            owner = [seq for seq in owner if seq == named]
        first = 0 if ranges.firsts is None or not owner else max(int(ranges.firsts[owner[0]]), 0)
        position = row - bounds[owner[0]] + first if owner else -1
        column = position // ranges.block_size
        page = int(ranges.table[owner[0]][column]) if owner and column < width and position <= INT32_MAX else -1
        places.append((page, position % ranges.block_size) if 0 <= page < NUM_BLOCKS else (-1, -1))
    pages, tokens = zip(*places, strict=True)
    return list(pages), list(tokens)


def run(ranges: Ranges) -> tuple[list[int], list[int]]:
    num_seqs, width = np.shape(ranges.table)
    stride = max(width, ranges.stride)
    table = np.full((num_seqs, stride), NUM_BLOCKS - 1, np.int32)
    table[:, :width] = ranges.table
    given = [np.array([] if x is None else x, np.int64).astype(np.int32) for x in (ranges.known, ranges.firsts)]
    results = [np.full(ranges.num_rows, POISON, np.int32)] * 2
    arrays = table.reshape(-1), ranges.bounds, ranges.bounds, *given, *results
    arrays = [jnp.asarray(x if x.size else np.zeros(1, np.int32)) for x in arrays]  # interpret mode clamps indices
    counts = ranges.num_rows, num_seqs, width, stride, NUM_BLOCKS - 1, ranges.block_size, *map(len, given), 1
    # A store of the model rewrites the whole array, which only one program may.
    with interpret_mode(detect_races=ranges.num_rows <= 128):
        page, token = row_places_kernel().with_counts(counts, ranges.num_rows, *arrays)
        pages, tokens = np.array(page), np.array(token)
    assert (tokens >= 0).all()
    assert (tokens < ranges.block_size).all()
    return pages.tolist(), np.where(pages >= 0, tokens, -1).tolist()


@pytest.mark.parametrize(
    "ranges",
    [
        Ranges([[3, 1], [0, 2], [5, 6], [4, 4]], [0, 5, 0, 3], 9, firsts=[9, 3, 9, 2]),
        Ranges([[3, -1, 9], [0, 2, 2**31 - 1]], [12, 10], 24, stride=5),  # holes, and positions past the table
        Ranges([[3]], [1], 1, block_size=1),
        Ranges([[3]], [0], 1),
        Ranges([[3, 1], [0, 2]], [4, 4], 8, known=[0, 1, 0, 0, 1, -1, 9, 0]),
        Ranges([[3, 1], [0, 2]], [4, 4], 8, firsts=[-1, INT32_MAX - 1]),
        Ranges(np.zeros((0, 3), int), [], 3, known=[0, 1, -1]),
        Ranges(np.zeros((0, 3), int), [], 3),
        Ranges(np.zeros((2, 0), int), [1, 2], 3),
        Ranges(np.arange(300)[:, None] % 9, [1, 0, 2] * 100, 310, firsts=[0, 1, 2] * 100),
    ],
    ids=["empty", "holes", "one", "none", "known", "firsts", "no sequence", "nothing known", "no table", "programs"],
)
def test_places_match_numpy(ranges: Ranges):
    assert run(ranges) == expected(ranges)


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(i, marks=pytest.mark.full) for i in range(4, 40))])
def test_places_of_random_ranges_match_numpy(seed: int):
    rng = np.random.default_rng(seed)
    num_seqs, width, size = int(rng.integers(1, 12)), int(rng.integers(1, 6)), int(rng.choice([1, 5, 16]))
    lengths = rng.integers(0, 50, num_seqs) * (rng.random(num_seqs) < 0.7)
    num_rows = max(int(lengths.sum() + rng.integers(-9, 20)), 1)
    firsts = rng.integers(-3, 40, num_seqs) if rng.random() < 0.5 else None
    known = rng.integers(-1, num_seqs + 1, num_rows) if rng.random() < 0.3 else None
    table = rng.integers(-2, NUM_BLOCKS + 2, (num_seqs, width))
    ranges = Ranges(table, lengths, num_rows, size, firsts, known, stride=width + int(rng.integers(3)))
    assert run(ranges) == expected(ranges)


@pytest.mark.parametrize("layer", [None, 1, 2, -1])
def test_starts_and_ends_may_be_separate_arrays(layer: int | None):
    """As for a share of a divided cache in JAX, where a sequence of another share has no rows."""
    ranges = Ranges([[3, 1], [0, 2], [5, -1], [4, 6]], [5, 3, 4, 6], 20)
    starts, ends = ranges.bounds[:-1].copy(), ranges.bounds[1:]
    starts[1] = ends[1]
    num_layers = None if layer is None else 2
    kernel = row_places_kernel(num_layers=num_layers)
    arrays = {"block_table": np.array(ranges.table, np.int32), "firsts": np.array([2, 9, 2, -3], np.int32)}
    arrays |= {"starts": starts, "ends": ends, "sequences": ends, "layer": np.int32(layer or 0)}
    given = {name: jnp.asarray(x) for name, x in arrays.items()}
    given |= dict.fromkeys(kernel.writes, jax.ShapeDtypeStruct((ranges.num_rows,), jnp.int32))
    counts = ranges.num_rows, 4, 2, 2, NUM_BLOCKS - 1, 4
    with interpret_mode(detect_races=True):
        places = kernel.of_arrays((*counts, 0, 4, 0), ranges.num_rows, given)
        pages, tokens = (np.array(places[name]) for name in ("page", "token"))
    blocks = [*[3, 3, 1, 1, 1], *[-1] * 3, *[5, 5, -1, -1], *[4] * 4, *[6] * 2, -1, -1]
    if layer is None:
        expected_pages = blocks
    else:
        expected_pages = [2 * block + layer if block >= 0 and layer in {0, 1} else -1 for block in blocks]
    assert pages.tolist() == expected_pages
    assert tokens[np.array(blocks) >= 0].tolist() == [2, 3, 0, 1, 2, 2, 3, 0, 1, 2, 3, 0, 1]


@pytest.mark.parametrize("num_layers", [None, 3])
def test_one_kernel_serves_every_call(num_layers: int | None):
    kernel = row_places_kernel(num_layers=num_layers)
    assert kernel is row_places_kernel(num_layers=num_layers)
    made = kernel.origin.make()  # as another process makes it
    assert (made.counts, made.arguments) == (kernel.counts, kernel.arguments)


@pytest.mark.skipif(gpu_compile.why_not() is not None, reason=str(gpu_compile.why_not()))
@pytest.mark.parametrize("target", ["h100", *(pytest.param(x, marks=pytest.mark.full) for x in TARGETS if x != "h100")])
def test_it_compiles_without_spills(target: str):
    program = compile_for(target, call_kernel, *row_places_kernel().args)
    [kernel] = program.kernels
    assert kernel.spill_bytes == 0
    assert kernel.registers <= 32


def call_kernel(*arrays: jax.Array) -> list[jax.Array]:
    return row_places_kernel().function(*arrays)
