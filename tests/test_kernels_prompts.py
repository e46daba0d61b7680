"""The prompt kernel: interpreted, with race detection, against its model; and compiled for H100."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import gpu_compile
from support.gpu_compile import compile_for
from support.helpers import assert_same_bytes
from support.interpret_mode import interpret_mode
from support.prompt_suite import CONFIG, LENGTHS, check, operands, run, run_model

from kvjax import FullAttentionSpec, KVCache, KVCacheDType
from kvjax.kernels import prompts
from kvjax.kernels.launchable import RowMemory
from kvjax.kernels.prompts import PromptConfig, PromptKind, PromptProblem
from kvjax.kernels.prompts.any_prompts import any_prompts
from kvjax.kernels.prompts.schedule import StepKind, any_schedule, num_programs
from kvjax.kernels.prompts.tiled import FIELDS
from kvjax.kernels.prompts.transfer import Units
from kvjax.kernels.target import Target, tracing_for
from kvjax.ops import prompt_kernel
from kvjax.ops.prompts import LayerSequences, Prompts


@pytest.mark.full
@pytest.mark.parametrize(
    "heads",
    [
        pytest.param((2, 1), id="two heads"),
        pytest.param((1, 1), id="rows of one head", marks=pytest.mark.nightly),
    ],
)
def test_interpreted_warpgroups_do_not_race(heads):
    """In one thread block, with five tiles of tokens for two stages, so that each stage is refilled."""
    check(operands((60,), (250,), heads=heads, sinks=True), PromptProblem(60, None, None), detect_races=True)


@pytest.mark.full
@pytest.mark.parametrize(
    ("shapes", "problem", "config"),
    [
        pytest.param(LENGTHS, PromptProblem(70, None, None), CONFIG, id="two stages"),
        *(
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in (
                (LENGTHS | {"heads": (4, 2), "sinks": True}, PromptProblem(70, 50, None), PromptConfig(64, 3)),
                (LENGTHS | {"heads": (1, 1), "query_dtype": jnp.bfloat16}, PromptProblem(300, None, None), CONFIG),
                (LENGTHS, PromptProblem(70, None, None), PromptConfig(64, 3, 2)),
                (LENGTHS | {"near": 40, "sinks": True}, PromptProblem(70, None, None, 33), CONFIG),
                (LENGTHS | {"near": 70, "heads": (1, 1)}, PromptProblem(70, 50, 5.0, 64), PromptConfig(64, 3)),
            )
        ),
    ],
)  # fmt: skip
def test_a_thread_block_takes_all_items_without_races(shapes, problem, config):
    check(operands(**shapes), problem, config, detect_races=True, multiprocessors=1)


@pytest.mark.parametrize(
    ("shapes", "problem", "config"),
    [
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (
                ({"q_lens": (70, 20), "positions": (30, 70), "sinks": True}, PromptProblem(70, None, None), CONFIG),
                ({"q_lens": (70, 20), "positions": (30, 70), "heads": (4, 2), "num_keys": 128, "absent": slice(5, 20)},
                 PromptProblem(70, None, 5.0), CONFIG),
                ({"q_lens": (70, 0, 20), "positions": (180, 0, -10), "num_keys": 256},
                 PromptProblem(70, None, None), PromptConfig(64, 2, 3)),
                ({"q_lens": (20,), "positions": (-5,), "sinks": True}, PromptProblem(64, 8, None), CONFIG),
                ({"q_lens": (40,), "positions": (150,), "head_size": 80, "head_size_v": 48, "num_keys": 200},
                 PromptProblem(40, None, None), CONFIG),
                ({"q_lens": (40,), "positions": (150,), "dtype": jnp.bfloat16}, PromptProblem(40, None, None), CONFIG),
                ({"q_lens": (40,), "positions": (150,), "query_dtype": jnp.bfloat16},
                 PromptProblem(40, None, None), CONFIG),
                ({"q_lens": (70, 0, 20), "positions": (180, 0, -10), "num_keys": 256, "near": 20},
                 PromptProblem(70, 100, None, 17), PromptConfig(64, 2, 3)),
            )
        ),
        *(
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in (
                ({"q_lens": (40,), "positions": (150,), "head_size": 256, "head_size_v": 256, "num_keys": 200},
                 PromptProblem(40, 33, 9.0), CONFIG),
                ({"q_lens": (70, 20, 0, 5), "positions": (-9, 70, 3, -40), "near": 64, "num_keys": 128},
                 PromptProblem(70, None, None, 64), CONFIG),
                ({"q_lens": (130,), "positions": (170,), "heads": (1, 1), "num_tokens": 134},
                 PromptProblem(130, 70, None), CONFIG),
                ({"q_lens": (130,), "positions": (120,), "heads": (4, 2), "near": 128, "num_tokens": 134,
                  "dtype": jnp.bfloat16}, PromptProblem(130, None, None, 128), PromptConfig(128, 2)),
            )
        ),
    ],
)  # fmt: skip
def test_the_interpreted_kernel_matches_its_model(shapes, problem, config):
    check(operands(**shapes), problem, config)


@pytest.mark.full
@pytest.mark.parametrize("config", [CONFIG, PromptConfig(64, 2, 2)], ids=str)
def test_interpreted_a_mean_that_float32_holds_does_not_overflow(config):
    args = operands((20,), (150,), dtype=jnp.bfloat16, num_keys=192, num_tokens=64, heads=(1, 1))
    large = jnp.full_like(args.values, 3e38)
    problem = PromptProblem(20, None, None)
    with interpret_mode():
        got, log = run(args._replace(values=large), problem, config, Target(1))
    ones = args._replace(keys=jnp.nan_to_num(args.keys), values=jnp.ones_like(large))
    expected, expected_log = run_model(ones, problem, int(config.splits))
    np.testing.assert_allclose(got[3:23] / float(large[0, 0, 0, 0]), expected[3:23], rtol=1e-2)
    np.testing.assert_allclose(log, expected_log, atol=1e-5)


@pytest.mark.full
def test_thread_blocks_share_the_items():
    """The first of three takes all but those that the others begin with."""
    check(operands(**LENGTHS), PromptProblem(70, None, None), multiprocessors=3)


@pytest.mark.gpu
@pytest.mark.parametrize("multiprocessors", [1, 3, 132])
@pytest.mark.parametrize("config", [CONFIG, PromptConfig(64, 3), PromptConfig(128, 2)], ids=str)
@pytest.mark.parametrize("heads", [(4, 2), (3, 1)])
def test_on_a_gpu_the_kernel_matches_its_model(heads, config, multiprocessors):
    shapes = LENGTHS | {"heads": heads, "head_size": 128, "head_size_v": 64, "query_dtype": jnp.bfloat16}
    check(operands(**shapes), PromptProblem(70, None, None), config, multiprocessors=multiprocessors, on_gpu=True)


@pytest.mark.gpu
@pytest.mark.parametrize("multiprocessors", [1, 132])
@pytest.mark.parametrize(
    ("sizes", "problem", "config"),
    [
        ((128, 128), PromptProblem(70, 50, None), PromptConfig(128, 2)),
        ((80, 48), PromptProblem(70, None, 5.0), PromptConfig(128, 2)),
        ((256, 256), PromptProblem(70, 50, 5.0), CONFIG),
        ((128, 128), PromptProblem(70, None, None), PromptConfig(128, 2, 2)),
        ((128, 128), PromptProblem(70, None, None, 64), PromptConfig(128, 2)),
        ((64, 64), PromptProblem(70, 50, 5.0, 33), PromptConfig(128, 2, 2)),
        ((256, 256), PromptProblem(70, None, None, 64), CONFIG),
    ],
    ids=str,
)
def test_on_a_gpu_the_kernel_matches_its_model_with_options(sizes, problem, config, multiprocessors):
    head_size, head_size_v = sizes
    shapes = LENGTHS | {"heads": (4, 2), "head_size": head_size, "head_size_v": head_size_v}
    has_sinks = config.splits == 1  # otherwise each split would count them
    args = operands(**shapes, sinks=has_sinks, near=problem.near)
    check(args, problem, config, multiprocessors=multiprocessors, on_gpu=True)


def test_the_model_matches_float64():
    args = operands((30,), (90,), heads=(4, 2), absent=slice(3, 9), sinks=True)
    problem = PromptProblem(30, 50, 7.0)
    args = args._replace(keys=jnp.nan_to_num(args.keys))
    got, log = run_model(args, problem)
    query, keys, values = (np.asarray(x, np.float64) for x in args[:3])
    for row in range(30):
        seen = [t for t in range(90 + row - 49, 90 + row + 1) if not 3 <= t < 9]
        for head in range(4):
            logits = query[3 + row, head] @ keys[0, seen, head // 2].T * args.sm_scale * float(args.k_scale[head // 2])
            weights = np.exp(7.0 * np.tanh(logits / 7.0))
            total = weights.sum() + np.exp(float(args.sinks[head]))
            expected = weights @ values[0, seen, head // 2] / total * float(args.v_scale[head // 2])
            np.testing.assert_allclose(got[3 + row, head], expected, atol=4e-3)
            np.testing.assert_allclose(log[3 + row, head], np.log(total), atol=1e-5)


@pytest.mark.parametrize("window", [9, pytest.param(None, marks=pytest.mark.nightly)])
def test_xla_finds_of_prompts_what_the_kernel_for_torch_finds(window):
    """With freed blocks, fewer tokens than rows, tokens past the table, and garbage in it."""
    spec = FullAttentionSpec(8, 1, 16, dtype=KVCacheDType.BFLOAT16)
    table = np.random.default_rng(0).integers(-1, 5, (5, 6)).astype(np.int32)
    table[2, 3:] = [2**31 - 1, -(2**31), 4]
    lens, bounds = np.array([40, 3, 45, 7, 60], np.int32), np.array([0, 12, 17, 37, 38, 47], np.int32)
    counts = {
        "num_seqs": 5, "num_rows": 50, "max_blocks": 6, "table_stride": 6, "num_blocks": 5, "max_q_len": 20,
        "max_prompts": 5, "num_zeros": 1, "query_stride": 8,
    }  # fmt: skip
    units = Units.of(16, np.dtype(jnp.bfloat16))
    schedule = any_schedule(StepKind(8, window, 0, False, units, units, num_heads=1, has_sinks=False))
    arrays = {"block_table": table, "seq_lens": lens, "cu_q_lens": bounds}
    results = {"prompts": ((5, len(FIELDS)), np.int32), "header": (2, np.int32), "out": ((50, 8), np.int32)}
    results["lse"] = 50, np.float32
    new = {name: jax.ShapeDtypeStruct(np.empty(shape).shape, dtype) for name, (shape, dtype) in results.items()}
    with interpret_mode():
        given = {name: jnp.asarray(x) for name, x in arrays.items()} | new
        expected = schedule.of_arrays([counts[name] for name in schedule.counts], num_programs(5, 50), given)
    cache, query = KVCache.allocate(spec, 5), jnp.zeros((50, 1, 16), jnp.bfloat16)
    sequences = LayerSequences(*map(jnp.asarray, (table, lens, bounds[1:], np.diff(bounds))))
    one = jnp.float32(1.0)
    asked = Prompts(cache, query, sequences, 20, one, one, None, np.dtype(jnp.bfloat16))
    found = np.asarray(prompt_kernel._pages(asked, sequences, window).found)
    np.testing.assert_array_equal(found[1:], expected["prompts"])
    assert found[0, 0] == 1 + expected["header"][0] == 6
    assert not found[0, 1:].any()


def check_join(num_rows: int, heads: int, size: int, dtype: Any, sinks: bool, has_packed: bool) -> None:
    rng = np.random.default_rng(1)
    rows = (
        jnp.asarray(rng.standard_normal((7, heads, size)), dtype)
        .at[0, 0, :3]
        .set(jnp.asarray([jnp.inf, -0.0, 6e-8], dtype))
    )
    lses = jnp.asarray(rng.standard_normal((7, heads)), jnp.float32)
    source = rng.integers(-2, 7 if has_packed else 0, num_rows).astype(np.int32)
    own_sinks = rng.standard_normal(heads).astype(np.float32) if sinks else np.full(heads, -np.inf, np.float32)
    result = jax.ShapeDtypeStruct((num_rows, heads, size), dtype)
    args = source, (rows, lses) if has_packed else None, jnp.asarray(own_sinks) if sinks else None, result
    out, lse = map(np.asarray, prompts.join(jnp.asarray(source), *args[1:]))
    is_packed = source >= 0
    expected = np.where(is_packed[:, None, None], np.asarray(rows)[source], 0).astype(dtype)
    stored = source != prompts.LEFT
    assert_same_bytes(out[stored], expected[stored])
    assert_same_bytes(lse, np.where(is_packed[:, None], np.asarray(lses)[source], own_sinks))


JOINS = [
    pytest.param(5, 2, 48, jnp.float16, True, True, id="few rows"),
    pytest.param(1030, 1, 16, jnp.bfloat16, False, True, id="many rows", marks=pytest.mark.full),
    pytest.param(3, 130, 16, jnp.bfloat16, True, False, id="many heads, none packed", marks=pytest.mark.full),
]


@pytest.mark.parametrize(("num_rows", "heads", "size", "dtype", "sinks", "has_packed"), JOINS)
def test_interpreted_rows_of_a_step_are_joined(num_rows, heads, size, dtype, sinks, has_packed):
    with interpret_mode(), tracing_for(Target(1)):  # which takes each store for one of the whole array, so no races
        check_join(num_rows, heads, size, dtype, sinks, has_packed)


@pytest.mark.gpu
@pytest.mark.parametrize(("num_rows", "heads", "size", "dtype", "sinks", "has_packed"), JOINS)
def test_rows_of_a_step_are_joined_on_a_gpu(num_rows, heads, size, dtype, sinks, has_packed):
    check_join(num_rows, heads, size, dtype, sinks, has_packed)


def test_splits_occupy_a_gpu():
    """Thread blocks take 64 rows of two heads: 16 of them divide the tokens for 132 multiprocessors in eight."""
    spec = FullAttentionSpec(16, 8, 128, dtype=KVCacheDType.NVFP4)
    assert prompts.choose(spec, 1, 64, 32, 8192, 99).splits == 8
    assert prompts.choose(spec, 1, 64, 32, 1024, 99).splits == 2
    assert prompts.choose(spec, 1, 2048, 32, 8192, 99).splits == 1
    assert prompts.choose(spec, 1, 64, 32, 8192, 3).splits == 3
    assert prompts.choose(spec, 1, 128, 24, 8192, 99).splits == 5  # 128 rows of one of 24 heads


def test_what_the_kernel_cannot_serve_has_a_reason():
    def why(*sizes: int, capability: tuple[int, int] = (9, 0)) -> str | None:
        return prompts.why_not((sizes[0], sizes[1]), Target(compute_capability=capability))

    assert why(80, 64) is None
    for capability in ((10, 0), (12, 0)):
        assert f"compute capability 9; got {capability}" in (why(64, 64, capability=capability) or "")
    assert "got 72" in (why(64, 72) or "")
    assert "got 272" in (why(272, 64) or "")


def attend_in_place(kind: PromptKind, splits: int, results: Any, given: dict[str, Any]) -> Any:
    out, lse, found = results
    arrays = given | {"out": out, "lse": lse, "prompts": found, "header": found}
    counts = [len(arrays["query"]), 8192, 1, 1, 0, splits, *([] if kind.near is None else [2176])]
    written = any_prompts(kind, Target()).of_arrays(counts, 1, arrays)
    return written["out"], written["lse"], written["header"]


@pytest.mark.full
@pytest.mark.skipif(gpu_compile.why_not() is not None, reason=str(gpu_compile.why_not()))
@pytest.mark.parametrize(
    ("head_size", "group", "options", "spilled"),
    [
        (128, 4, {}, 0),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (
                (64, 8, {}, 0),
                (80, 4, {}, 0),
                (128, 4, {"window": 1024}, 8),
                # As from torch, where a soft cap takes more registers than there are.
                (128, 4, {"logits_soft_cap": 30.0}, 164),
                (128, 3, {"window": 1024, "logits_soft_cap": 30.0, "splits": 4}, 164),
                (256, 4, {}, 32),  # with jax 0.11, with 0.12 half of it
                (128, 4, {"near": 64}, 0),
            )
        ),
    ],
)
def test_compiled_it_is_one_kernel_in_place(head_size, group, options, spilled):
    """With the registers that it has, or few more."""
    spec = FullAttentionSpec(16, 8, head_size, dtype=KVCacheDType.NVFP4)
    options = {"window": None, "logits_soft_cap": None, "near": None, "splits": 1} | options
    splits, struct = options.pop("splits"), jax.ShapeDtypeStruct
    query = struct((2048, 8 * group, head_size), jnp.bfloat16)
    memory, one = RowMemory.of(query), struct((), jnp.float32)
    kind = PromptKind(
        spec, memory, 8 * group, (1, 1), 0.1, has_sinks=False, is_divided=splits > 1, **options
    )  # fmt: skip
    found, tokens = struct((2, 8), jnp.int32), {"": 8192} | ({} if kind.near is None else {"near_": 2176})
    tiles = {
        f"{name}{part}": struct(shape, dtype)
        for name, count in tokens.items()
        for part, shape, dtype in (
            ("keys", (8 * count, head_size), kind.dtype),
            ("values", (8 * count, head_size), kind.dtype),
            ("bias", (count,), jnp.float32),
            *([("prompts", found.shape, found.dtype)] if name else []),
        )
    }
    stored = jnp.bfloat16 if splits == 1 else jnp.float32
    results = struct((splits, *query.shape), stored), struct((splits, *query.shape[:2]), jnp.float32), found
    program = compile_for(
        "h100",
        functools.partial(attend_in_place, kind, splits),
        results,
        {"query": query, "k_scale": one, "v_scale": one, **tiles},
        donate_argnums=0,
    )
    [kernel] = program.kernels
    assert program.device_ops == ("custom-call",)
    assert kernel.spill_bytes <= spilled
    assert "wgmma" in kernel.ptx
    # ptxas says so where it makes `wgmma` wait for each other.
    assert "serialized" not in kernel.ptxas_log
