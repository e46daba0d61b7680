"""The kernel that finds where a step's tokens are beside an exact window, against its definition in Python."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import binaries, kernels
from tests.support.gpu_compile import compile_for, why_not
from tests.support.helpers import matrix
from tests.support.interpret_mode import interpret_mode

BLOCK_SIZE = 16
SIZE, NUM_ROWS = 40, 5
BLOCKS_PER_ROW = 4


STEPS = {
    "one": [(75, 20, 2)],
    "decodes": [(100, 1, 0), (7, 1, 1), (0, 0, -1), (41, 2, 4), (64, 0, 2), (30, 1, 9), (200, 1, -1), (3, 3, 3)],
    "chunks": [(80, 80, 0), (300, 1, 1), (0, 0, 2), (90, 33, -1), (16, 16, 3), (5, 9, 4), (130, 50, 4)],
    "many": [(int(x) % 90, int(x) % 4, int(x) % 7 - 1) for x in np.random.default_rng(0).integers(0, 1000, 300)],
}
"""Sequences: their tokens, their new ones, their rows of the window."""


def expected(step: list[tuple[int, int, int]], counts: dict[str, int], with_room: bool) -> dict[str, np.ndarray]:
    """What the kernel is to store, one sequence and one token after the other."""
    size, columns = counts["size"], counts["columns"]
    results: dict[str, list[Any]] = {name: [] for name in ("near_lens", "far_lens", "decoding_lens", "q_lens", "table")}
    if with_room:
        results |= {"old": [], "slots": []}
    next_block = len(step) * counts.get("num_old", 0)
    for number, (length, new, row) in enumerate(step):
        q_len = min(new, length)
        first_block = max(length - q_len - size + 1, 0) // BLOCK_SIZE
        far, has_row = max(length - size, 0), 0 <= row < counts["num_rows"]
        results["near_lens"].append(length - first_block * BLOCK_SIZE)
        results["far_lens"].append(far)
        results["decoding_lens"].append(far if q_len > 0 and new <= counts["decode_q_len"] else 0)
        results["q_lens"].append(q_len)
        per_row = counts["blocks_per_row"]

        def in_ring(column: int) -> int:
            return row * per_row + (first_block + column) % per_row if has_row else -1  # noqa: B023

        if not with_room:
            results["table"].append([in_ring(column) for column in range(columns)])
            continue
        num_old = counts["num_old"]
        results["old"].append([max(in_ring(column), 0) for column in range(num_old)])
        blocks = [number * num_old + column for column in range(num_old)]
        if q_len and has_row:
            more = max(-(-length // BLOCK_SIZE) - first_block - num_old, 0)
            blocks += range(next_block, next_block + more)
            next_block += more
        blocks = blocks[:columns] if has_row else []
        results["table"].append(blocks + [-1] * (columns - len(blocks)))
        for position in range(length - new, length):
            column = position // BLOCK_SIZE - first_block
            is_there = position >= 0 and 0 <= column < len(blocks)
            results["slots"].append(blocks[column] * BLOCK_SIZE + position % BLOCK_SIZE if is_there else -1)
    if with_room:
        results["slots"] += [-1] * (counts["num_tokens"] - len(results["slots"]))
    return {name: np.asarray(x, np.int32) for name, x in results.items()}


def arguments(
    step: list[tuple[int, int, int]], with_room: bool, columns: int, padding: int, size: int = SIZE
) -> tuple[dict[str, int], dict[str, Any]]:
    """Counts, and the arrays by name."""
    lens, new, rows = (np.asarray(x, np.int32) for x in zip(*step, strict=True))
    bounds = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
    counts = {"num_seqs": len(step), "num_rows": NUM_ROWS, "size": size, "blocks_per_row": BLOCKS_PER_ROW}
    counts |= {"columns": columns, "decode_q_len": 2}
    if with_room:
        counts |= {"num_tokens": int(bounds[-1]) + padding, "num_old": 4}
    results = {name: x.size for name, x in expected(step, counts, with_room).items()}
    new_arrays = {name: jax.ShapeDtypeStruct((size,), jnp.int32) for name, size in results.items()}
    given = {"seq_lens": lens, "cu_q_lens": bounds, "window_rows": rows}
    return counts, {name: jnp.asarray(x) for name, x in given.items()} | new_arrays


@matrix(
    {
        "step": [*STEPS],
        "with_room": [False, True],
        "columns": [6, 1, 9, 200],
        "padding": [0, 5],
    },
    few={"columns": [6, 9], "padding": [5]},
    pairs=True,
)
def test_the_interpreted_kernel_stores_what_its_definition_says(step, with_room, columns, padding):
    sequences = STEPS[step]
    counts, arrays = arguments(sequences, with_room, columns, padding)
    kernel = kernels.window_places_kernel(with_room=with_room)
    # Of stores at addresses of their own, those of two programs look alike to the detection of races.
    with interpret_mode(detect_races=len(sequences) == 1):
        got = kernel.of_arrays([counts[name] for name in kernel.counts], len(sequences), arrays)
        got = {name: np.asarray(x) for name, x in got.items()}
    for name, x in expected(sequences, counts, with_room).items():
        np.testing.assert_array_equal(got[name].reshape(x.shape), x, err_msg=name)


@pytest.mark.parametrize("with_room", [False, True])
@pytest.mark.parametrize("step", STEPS)
def test_torch_finds_the_same_on_cpu_tensors(step, with_room):
    torch = pytest.importorskip("torch")
    plan = pytest.importorskip("kvjax_torch.arguments.plan")
    places = pytest.importorskip("kvjax_torch.eager.windows").places
    counts, arrays = arguments(STEPS[step], with_room, 9, 5)
    given = {name: torch.tensor(np.asarray(arrays[name])) for name in ("seq_lens", "cu_q_lens", "window_rows")}
    sizes = {name: counts[name] for name in ("num_rows", "size", "blocks_per_row", "columns", "decode_q_len")}
    room = plan.WindowRoom(counts["num_tokens"], counts["num_old"]) if with_room else None
    got = places(plan.WindowStep(**given, **sizes, room=room))._asdict()
    for name, x in expected(STEPS[step], counts, with_room).items():
        assert got[name].dtype is torch.int32
        np.testing.assert_array_equal(got[name].numpy(), x, err_msg=name)


def test_rows_before_the_first_sequence_are_nowhere():
    counts, arrays = arguments([(20, 3, 1), (20, 1, 2)], True, 4, 0)
    kernel = kernels.window_places_kernel(with_room=True)
    arrays["cu_q_lens"] += jnp.array([2, 0, 0], jnp.int32)  # the first sequence has one token
    with interpret_mode():
        slots = kernel.of_arrays([counts[name] for name in kernel.counts], 2, arrays)["slots"]
        assert ((np.asarray(slots) >= 0) == [False, False, True, True]).all()


def test_the_longest_length_takes_its_blocks():
    sequences = [(2**31 - 1, 40, 0), (40, 3, 1)]
    counts, arrays = arguments(sequences, True, 9, 3)
    kernel = kernels.window_places_kernel(with_room=True)
    with interpret_mode():
        got = kernel.of_arrays([counts[name] for name in kernel.counts], 2, arrays)
        for name, x in expected(sequences, counts, True).items():
            np.testing.assert_array_equal(np.asarray(got[name]).reshape(x.shape), x, err_msg=name)


def test_a_length_below_zero_is_that_of_no_tokens():
    counts, arrays = arguments([(0, 0, 1), (20, 1, 2)], True, 4, 3)
    kernel = kernels.window_places_kernel(with_room=True)
    with interpret_mode():
        run = functools.partial(kernel.of_arrays, [counts[name] for name in kernel.counts], 2)
        plain, below = (run(arrays | {"seq_lens": jnp.array([first, 20], jnp.int32)}) for first in (0, -7))
        for name, x in plain.items():
            np.testing.assert_array_equal(below[name], x, err_msg=name)


def call_kernel(with_room: bool, *arrays: jax.Array) -> list[jax.Array]:
    return kernels.window_places_kernel(with_room=with_room).function(*arrays)


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
@pytest.mark.parametrize("target", ["h100", "b200"])
@pytest.mark.parametrize("with_room", [False, True])
def test_compiled_it_is_one_kernel_without_spills(with_room, target):
    args = kernels.window_places_kernel(with_room=with_room).args
    given_integers = functools.partial(binaries.given_integers, num_args=len(args))
    function = functools.partial(call_kernel, with_room)
    [kernel] = compile_for(target, function, *args, change_kernel=given_integers).kernels
    assert kernel.spill_bytes == 0
    assert kernel.parameters == [f".align 8 .b8[{8 * len(args)}]"]
