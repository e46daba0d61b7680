"""Prompts from torch by kvjax's prompt kernel: its kernels run interpreted on CPU tensors, and compiled for H100."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest
from support.any_count import BFLOAT16, page_memory
from support.gpu_compile import compile_for, why_not
from support.helpers import assert_same_bytes, matrix, simple_spec

torch = pytest.importorskip("torch")

from support.attention_suite import Case  # noqa: E402
from support.interpreted_calls import run_interpreted  # noqa: E402
from support.ragged_suite import ragged  # noqa: E402
from support.torch_helpers import assert_same, capture  # noqa: E402
from support.torch_steps import attend_on, on_cuda, place_model, schedule_model, use_stand_ins  # noqa: E402

from support import attention_suite as suite  # noqa: E402  # isort: skip
from support import ragged_suite  # noqa: E402  # isort: skip
import kvjax_torch  # noqa: E402  # isort: skip
from kvjax import (  # noqa: E402
    KVCacheDType,
    KVCacheTypeError,
    UnsupportedError,
    binaries,
    kernels,
    ragged_paged_attention,
)
from kvjax.kernels.prompts import dense_dtype  # noqa: E402
from kvjax.kernels.tiles import CHUNK, offset, swizzle_of, word_of  # noqa: E402
from kvjax_torch.arguments.plan import AttentionPlan, Encoding, RaggedPlan, ReadTensors  # noqa: E402
from kvjax_torch.arguments.reads import gather_plan  # noqa: E402
from kvjax_torch.calls import attending, choosing  # noqa: E402
from kvjax_torch.cuda import prompt_kernels, ragged_step, reads  # noqa: E402
from kvjax_torch.cuda import ragged as on_gpu  # noqa: E402
from kvjax_torch.cuda.ragged_step import PackedRows, RaggedStep  # noqa: E402
from kvjax_torch.eager import host  # noqa: E402
from kvjax_torch.launch import running  # noqa: E402


def interpret_kernels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Runs calls with CPU tensors as those of a GPU, decodes on the host; returns the names of kernels that run."""
    ran: list[str] = []

    def run(call: running.Call) -> None:
        assert call.kernel.origin is not None
        ran.append(call.kernel.origin.function.split(":")[1])
        run_interpreted(call)

    prompt_kernels._kernels.cache_clear()
    monkeypatch.setattr(host, "attend_ragged", on_gpu.attend)
    monkeypatch.setattr(reads, "attend", host.attend)
    monkeypatch.setattr(running, "compile_once", lambda *_: None)
    monkeypatch.setattr(reads, "parts_of", lambda *_: ())
    monkeypatch.setattr(running, "run", run)
    monkeypatch.setattr(choosing, "target_of", lambda _: kernels.Target(multiprocessors=2))
    monkeypatch.setattr(attending, "route_of", attending.route_of.__wrapped__)
    return ran


CASES = [
    *(
        pytest.param(case, marks=pytest.mark.full)
        for case in (
            ragged((20, 1, 0), (40, 17, 0), dtype="nvfp4", head_size=32, scales="scalar"),
            ragged((70, 2, 13), (150, 17, 40), dtype="bfloat16", head_size=32, cap=5.0, window=9, sinks=True),
            ragged((12, 1, 3), (18, 17, 3), dtype="fp8_e4m3", head_size=80, head_size_v=48, scales="per_head"),
            ragged((40,), (300,), dtype="nvfp4", head_size=64, window=64, block_size=48),
            ragged((20, 1, 0), (40, 17, 0), dtype="int8_k_nvfp4_v", head_size=32, scales="scalar"),
        )
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_serving_step_of_interpreted_kernels_matches_float64(case: Case, monkeypatch: pytest.MonkeyPatch):
    ran = interpret_kernels(monkeypatch)
    ragged_suite.check(case, attend_on("cpu", is_rounded=True))
    assert {*ran} == {"any_schedule", "any_placement", "any_gather", "any_prompts"}


@pytest.mark.full
@pytest.mark.parametrize(
    ("options", "query_quantization"),
    [({"dtype": "bfloat16", "sinks": True}, False), ({"dtype": "nvfp4", "scales": "scalar"}, True)],
    ids=["bfloat16", "products in fp8"],
)
def test_batch_invariant_prompts_of_interpreted_kernels_have_the_same_bits_alone(
    options: dict[str, Any], query_quantization: bool, monkeypatch: pytest.MonkeyPatch
):
    """By the one kernel that divides no rows into splits, of which a smaller batch would have more."""
    divided: list[bool] = []
    right = prompt_kernels.kernels.prompt_kernel

    def made(kind: Any, *args: Any) -> Any:
        divided.append(kind.is_divided)
        return right(kind, *args)

    ran = interpret_kernels(monkeypatch)
    monkeypatch.setattr(prompt_kernels.kernels, "prompt_kernel", made)
    problem = ragged_suite.build(ragged((5, 18, 1), (140, 18, 7), head_size=32, num_kv_heads=1, **options))
    attend = attend_on(
        "cpu",
        is_rounded=True,
        batch_invariant=True,
        query_quantization=query_quantization,
        max_q_len=33,
        decode_q_len=1,
    )
    whole = ragged_suite.run(problem, attend)
    in_fp8 = {"in_fp8": lambda q_len: q_len > 1} if query_quantization else ragged_suite.slack(problem.case, attend)
    suite.assert_right(problem, *whole, **in_fp8)
    for got, expected in zip(ragged_suite.rows_in_turn(problem, [0], attend), whole, strict=True):
        assert_same_bytes(got[0], expected[0])
    assert "any_prompts" in ran
    assert divided == [False]


STEP = {"q_lens": (20, 1, 0, 33), "lengths": (90, 7, 0, 33)}
"""A chunk, a sequence that decodes, nothing, and a whole prompt."""

IN_FP8 = [
    {"dtype": "nvfp4", "sinks": True, "scales": "scalar", "v_scale_layout": "swizzled"},
    {"dtype": "fp8_e4m3", "scales": "per_head", "window": 21, "layout": "HND"},
    {"dtype": "nvfp4_4over6", "cap": 5.0, "query_dtype": "float16", "block_size": 32, "head_size": 96},
    {"dtype": "fp8_k_nvfp4_v", "scales": "scalar", "window": 8, "head_size_v": 32},
]


def in_jax(*args: Any, **options: Any) -> Any:
    attend = functools.partial(ragged_paged_attention, return_lse=True, implementation="xla", query_quantization=True)
    attend = jax.jit(attend, static_argnames=ragged_suite.STATIC)
    return jax.tree.map(np.asarray, attend(*args, **options))


def assert_alike(results: Any, wanted: Any) -> None:
    """Most elements have the same bits; another order of sums rounds a weight in a thousand otherwise."""
    for got, expected in zip(results, wanted, strict=True):
        got, expected = (np.float32(np.concatenate(each)) for each in (got, expected))
        np.testing.assert_allclose(got, expected, rtol=1e-2, atol=4e-3)
        assert (np.abs(got - expected)[np.isfinite(got)] < 1e-5).mean() > 0.99


@pytest.mark.parametrize("options", IN_FP8, ids=str)
def test_on_the_host_products_in_fp8_are_rounded_as_in_jax(options: dict[str, Any]):
    problem = ragged_suite.build(ragged(**STEP, **options))
    results = ragged_suite.run(problem, attend_on("cpu", query_quantization=True))
    suite.assert_right(problem, *results, in_fp8=lambda q_len: q_len > 1)
    assert_alike(results, ragged_suite.run(problem, in_jax))
    other = ragged_suite.build(problem.case, fill=suite.ZERO, garbage=(-1,))
    for got, first in zip(ragged_suite.run(other, attend_on("cpu", query_quantization=True)), results, strict=True):
        assert_same_bytes(np.concatenate(got), np.concatenate(first))
    exact = ragged_suite.run(problem, attend_on("cpu"))[0]
    assert [(x == y).all() for x, y in zip(exact, results[0], strict=True)] == [False, True, True, False]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"num_kv_heads": 1} | options, marks=pytest.mark.full)
        for options in (*IN_FP8, {"dtype": "nvfp4", "head_size": 32, "num_kv_heads": 2, "window": 100})
    ],
    ids=str,
)
def test_interpreted_products_in_fp8_are_those_of_the_host(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    """Whatever is where nobody looks."""
    case = ragged((20, 1, 3), (140, 7, 33), **options)
    problems = [ragged_suite.build(case), ragged_suite.build(case, fill=suite.ZERO, garbage=(-1,))]
    ran = interpret_kernels(monkeypatch)
    attend = attend_on("cpu", query_quantization=True)
    results = [ragged_suite.run(problem, attend) for problem in problems]
    units = {"any_units"} if "nvfp4" in options["dtype"] else set()
    assert {*ran} == {"any_schedule", "any_placement", "any_fp8_gather", "any_prompts"} | units
    monkeypatch.undo()
    assert_alike(results[0], ragged_suite.run(problems[0], attend))
    for got, first in zip(*results, strict=True):
        assert_same_bytes(np.concatenate(got), np.concatenate(first))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "bfloat16"}, "got a cache with keys or values of bfloat16"),
        ({"dtype": "nvfp4", "query_dtype": "float32"}, "got a query of float32"),
        ({"dtype": "nvfp4", "head_size": 80}, "got head size 80, expected a multiple of 32 up to 128"),
        ({"dtype": "nvfp4", "sm_scale": -1.0}, "got sm_scale of 0 or less"),
        ({"dtype": "fp8_e4m3", "block_size": 8}, "got block_size 8, expected a multiple of 16"),
    ],
    ids=str,
)
def test_what_products_in_fp8_do_not_serve_is_refused_as_in_jax(options: dict[str, Any], message: str):
    problem = ragged_suite.build(ragged((3,), (5,), **options))
    for attend in (attend_on("cpu", query_quantization=True), in_jax):
        with pytest.raises(UnsupportedError, match=f"query_quantization: {message}"):
            ragged_suite.run(problem, attend)
    with pytest.raises(KVCacheTypeError, match="query_quantization: got 1 of type int"):
        ragged_suite.run(problem, attend_on("cpu", query_quantization=1))


def test_gpus_without_the_prompt_kernel_refuse_products_in_fp8_where_prompts_may_come(monkeypatch: pytest.MonkeyPatch):
    use_stand_ins(monkeypatch)  # for another GPU
    problem = ragged_suite.build(ragged((3, 1), (5, 9), dtype="nvfp4", head_size=32))
    attend = functools.partial(attend_on, "cpu", query_quantization=True)
    with pytest.raises(UnsupportedError, match=r"query_quantization needs the prompt kernel: `wgmma` is of .*max_pro"):
        ragged_suite.run(problem, attend(decode_q_len=1))
    for got, expected in zip(
        ragged_suite.run(problem, attend(max_q_len=3)), ragged_suite.run(problem, attend_on("cpu")), strict=True
    ):
        np.testing.assert_allclose(np.float32(np.concatenate(got)), np.float32(np.concatenate(expected)), atol=1e-2)


def make_step(
    dtype: torch.dtype, bounds: tuple[int, ...], *, window: int | None = None, sinks: bool = False
) -> RaggedStep:
    """A step of random rows over 3 blocks for each sequence, whose results are poisoned."""
    num_seqs, generator = len(bounds) - 1, torch.Generator().manual_seed(0)
    cache = torch.zeros((4, 8, 1, 16), dtype=torch.bfloat16)
    query = torch.randn((bounds[-1] + 3, 4, 16), generator=generator).to(dtype)[:, :2]
    table = torch.arange(3 * num_seqs, dtype=torch.int32).view(num_seqs, 3) % 6
    lens = torch.arange(num_seqs) * 5 - 1
    one = torch.ones(1)
    num_rows, num_heads, size = query.shape
    return RaggedStep(
        query,
        ragged_step.runs(query, 1),
        ReadTensors(cache, cache.clone(), table, lens, one, one),
        torch.tensor(bounds),
        torch.arange(num_heads) * 0.5 if sinks else None,
        torch.full((num_rows, num_heads, size), torch.nan, dtype=dtype),
        torch.full((num_rows, num_heads), torch.nan),
    )


def plan_of(step: RaggedStep, decode_q_len: int, window: int | None, **limits: int) -> RaggedPlan:
    gathered = gather_plan(step.tensors, Encoding("auto", "linear"), torch.float32)
    heads, has_sinks = step.query.shape[1], step.sinks is not None
    plan = AttentionPlan(gathered.cache, step.query.dtype, heads, decode_q_len, (1, 1), 1.0, window, None, has_sinks)
    return RaggedPlan(plan, **{"max_q_len": 20, "max_prompts": 3} | limits)


@pytest.mark.full
@pytest.mark.parametrize(
    ("decode_q_len", "window", "sinks", "dtype", "limits"),
    [
        (1, None, True, torch.bfloat16, {}),
        (3, 9, False, torch.float32, {"max_prompts": 1}),
        (0, None, True, torch.float16, {"max_q_len": 4}),
        (3, None, False, torch.bfloat16, {"max_q_len": 2, "max_prompts": 0}),
    ],
)
def test_step_kernels_divide_a_step_as_their_model_does(decode_q_len, window, sinks, dtype, limits, monkeypatch):
    """Rows that decode are packed and placed again; rows that nothing attends with have results, and no others."""
    monkeypatch.setattr(running, "run", run_interpreted)
    made = [make_step(dtype, (2, 3, 3, 8, 10, 25, 26, 29), sinks=sinks) for _ in range(2)]
    plan = plan_of(made[0], decode_q_len, window, **limits)
    step_kernels = ragged_step.kernels_of(plan.attention, window)
    schedule, place = ragged_step.schedule, ragged_step.place
    got = schedule(plan, made[0], step_kernels.schedule, 2)
    expected = schedule_model(plan, made[1], step_kernels.schedule, 2)
    assert got.header.tolist()[1:] == [0, 0]
    assert (got.packed is None) == (decode_q_len == 0)
    if got.packed is not None and expected.packed is not None:
        for name, mine, wanted in zip(PackedRows._fields, got.packed, expected.packed, strict=True):
            torch.testing.assert_close(mine, wanted.to(mine.dtype), rtol=0, atol=0, msg=name)
        rows = got.packed.rows.flatten(0, 1)
        results = rows + 1, rows.sum(-1).float()
        place(made[0], step_kernels.place, got.packed.places, *results)
        place_model(made[1], step_kernels.place, got.packed.places, *results)
    for mine, wanted in ((made[0].out, made[1].out), (made[0].lse, made[1].lse)):
        torch.testing.assert_close(mine, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.full
def test_results_of_splits_are_rounded_once(monkeypatch: pytest.MonkeyPatch):
    """Merged results of splits are as accurate as results without splits."""
    interpret_kernels(monkeypatch)
    monkeypatch.setattr(choosing, "target_of", lambda _: kernels.Target(multiprocessors=8))
    case = ragged((64,), (400,), dtype="bfloat16", head_size=16, block_size=16, num_kv_heads=2, group=2)
    problem = ragged_suite.build(dataclasses.replace(case, query_dtype="bfloat16"))
    deviations = []
    for splits in (1, 4):
        monkeypatch.setattr(prompt_kernels, "_splits", lambda *_, splits=splits: splits)
        [out], _ = ragged_suite.run(problem, attend_on("cpu"))
        deviations.append(np.std(out.astype(np.float64) - suite.expected(problem, 0).out))
    assert deviations[1] < 1.1 * deviations[0]


@pytest.mark.full
def test_a_split_without_tokens_reads_no_tile_that_is_not_stored(monkeypatch: pytest.MonkeyPatch):
    """Memory that other calls have used holds zeros, as the bias of tokens that are present does."""
    interpret_kernels(monkeypatch)
    monkeypatch.setattr(choosing, "target_of", lambda _: kernels.Target(multiprocessors=8))
    monkeypatch.setattr(torch.Tensor, "new_empty", torch.Tensor.new_zeros)
    monkeypatch.setattr(prompt_kernels, "_splits", lambda *_: 4)
    case = ragged((64,), (400,), dtype="bfloat16", head_size=16, block_size=16, num_kv_heads=1, group=1)
    problem = ragged_suite.build(case)
    # Tokens from the third tile on are absent, those of the last rows too: of four splits one has none.
    query, cache, table, lens = problem.args
    table = np.where(np.arange(table.shape[1]) < 16, table, -1)
    absent = dataclasses.replace(problem, args=(query, cache, table, lens))
    results = ragged_suite.run(absent, attend_on("cpu", is_rounded=True))
    monkeypatch.undo()
    for got, expected in zip(results, ragged_suite.run(absent, attend_on("cpu", is_rounded=True)), strict=True):
        for rows, other in zip(got, expected, strict=True):
            np.testing.assert_allclose(np.float32(rows), np.float32(other), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("columns", [32, 64, 96, 128])
def test_tiles_of_fp8_have_their_bytes_where_as_many_of_16_bits_have_them(columns: int):
    """Which `wgmma` reads likewise."""
    rows, of_words = np.arange(24)[:, None], np.arange(0, columns, 4)[None]
    half = np.vectorize(functools.partial(offset, columns=columns // 2))(rows % 8, of_words // 2)
    np.testing.assert_array_equal(4 * word_of(rows, of_words, columns, 1), rows // 8 * (8 * columns) + half)


@pytest.mark.parametrize("columns", [16, 32, 48, 64, 96, 128, 256])
def test_rows_of_tiles_share_their_bytes(columns: int):
    """Eight rows fill their bytes once; chunks of a column of one run lie in as many places as rows have."""
    places = np.array([[offset(row, column, columns) for column in range(columns)] for row in range(8)])
    assert sorted(places.flatten()) == list(range(0, 16 * columns, 2))
    swizzle = swizzle_of(columns)
    assert len({*(places[:, 0] % 128 // CHUNK)}) == 128 // CHUNK
    assert (places[0, : swizzle // 2] == 2 * np.arange(swizzle // 2)).all()


def make(kernel: str, dtype: str, head_size: int, **options: Any) -> kernels.AnyCount:
    spec = simple_spec(KVCacheDType(dtype), num_kv_heads=8, head_size=head_size)
    if kernel == "schedule":
        units = kernels.Units.of(32 * head_size, BFLOAT16)
        known = {"window": None, "decode_q_len": 1, "rows_alone": False, "has_sinks": False} | options
        return kernels.step_schedule_kernel(
            kernels.StepKind(spec.block_size, query=units, results=units, num_heads=32, **known)
        )
    if kernel == "place":
        return kernels.placement_kernel(kernels.Units.of(32 * head_size, BFLOAT16, **options), 32)
    if kernel == "gather":
        return kernels.prompt_gather_kernel(spec, page_memory(spec), dense_dtype(spec, BFLOAT16))
    if kernel in ("units", "gather in fp8"):
        of_pages = kernels.prompt_units_kernel if kernel == "units" else kernels.prompt_fp8_gather_kernel
        return of_pages(spec, page_memory(spec))
    query = kernels.RowMemory(BFLOAT16, 32 * head_size + 64, 4)
    known = {"window": None, "logits_soft_cap": None, "has_sinks": False, "is_divided": False} | options
    return kernels.prompt_kernel(kernels.PromptKind(spec, query, 32, (1, 1), 0.1, **known), kernels.Target())


def call_kernel(made: tuple[str, str, int], options: dict[str, Any], *arrays: jax.Array) -> list[jax.Array]:
    return make(*made, **options).function(*arrays)


@pytest.mark.full
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
@pytest.mark.parametrize(
    ("made", "options"),
    [
        (("schedule", "nvfp4", 128), {}),
        (("place", "nvfp4", 128), {}),
        (("gather", "nvfp4", 128), {}),
        (("prompts", "nvfp4", 128), {}),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (
                (("place", "nvfp4", 128), {"is_aligned": False}),
                (("schedule", "nvfp4", 128), {"window": 100, "decode_q_len": 4, "rows_alone": True, "has_sinks": True}),
                (("gather", "bfloat16", 80), {}),
                (("gather", "fp8_e4m3", 256), {}),
                (("prompts", "bfloat16", 64), {}),
                (("prompts", "nvfp4", 256), {}),
                (("prompts", "nvfp4", 128), {"window": 1024, "is_divided": True}),
                (("prompts", "fp8_e4m3", 128), {"logits_soft_cap": 30.0}),
                (("units", "nvfp4", 128), {}),
                (("gather in fp8", "nvfp4", 128), {}),
                (("gather in fp8", "fp8_k_nvfp4_v", 96), {}),
                (("prompts", "nvfp4", 128), {"query_quantization": True}),
                (("prompts", "fp8_e4m3", 128), {"query_quantization": True, "is_divided": True}),
                (("prompts", "nvfp4", 64), {"query_quantization": True, "window": 1024, "has_sinks": True}),
                (("prompts", "nvfp4", 128), {"near": 64}),
                (("prompts", "bfloat16", 256), {"near": 128}),
                (("prompts", "bfloat16", 256), {"window": 1024}),
                (("prompts", "bfloat16", 128), {"near": 128, "window": 1024}),
            )
        ),
    ],
)
def test_compiled_it_is_one_kernel_that_is_given_integers(made, options):
    args = make(*made, **options).args
    given_integers = functools.partial(binaries.given_integers, num_args=len(args))
    function = functools.partial(call_kernel, made, options)
    [kernel] = compile_for("h100", function, *args, change_kernel=given_integers).kernels
    num_unused = 0 if made[0] != "prompts" else sum(not x.size for x in args)
    # A soft cap takes more registers than there are, with jax 0.11 a third of this. In fp8, splits take two more with
    # jax 0.12. Heads of 256 with a window or near tokens, and near tokens beside a window, take some more, too.
    most = 164 if "logits_soft_cap" in options else 8 if "is_divided" in options else 0
    most = 40 if made[2] == 256 and options else 24 if {"near", "window"} <= {*options} else most
    assert kernel.spill_bytes <= most
    assert kernel.parameters == [f".align 8 .b8[{8 * (len(args) - num_unused)}]"]
    if made[0] == "prompts":
        assert "wgmma" in kernel.ptx
        # Interpreted kernels have no barriers: those of keys and values, two stages each, and of turns, in fp8 two.
        in_fp8 = "query_quantization" in options
        assert kernel.ptx.count("mbarrier.init") == 2 * 2 + 1 + in_fp8
        assert "cp.async.bulk.tensor" not in kernel.ptx  # which takes a descriptor
        assert ("e4m3.e4m3" in kernel.ptx) == in_fp8
        assert "serialized" not in kernel.ptxas_log


GPU_STEPS = [
    (ragged((5, 0, 200, 1, 33, 129), (40, 0, 450, 12, 33, 700), **options), decode_q_len)
    for options, decode_q_lens in (
        ({"dtype": "bfloat16", "head_size": 128, "group": 4}, (0, 8)),
        ({"dtype": "bfloat16", "head_size": 32, "head_size_v": 16, "window": 33, "block_size": 48}, (1,)),
        ({"dtype": "nvfp4", "scales": "scalar", "head_size": 128, "group": 4}, (0, 1)),
        (
            {"dtype": "nvfp4", "v_scale_layout": "swizzled", "cap": 20.0, "sinks": True, "head_size": 128, "group": 4},
            (1, 8),
        ),
        ({"dtype": "nvfp4", "head_size": 256, "window": 100}, (0,)),
        ({"dtype": "fp8_e4m3", "scales": "per_head"}, (0, 8)),
        ({"dtype": "fp8_e5m2", "head_size": 80, "head_size_v": 48, "group": 3}, (1,)),
        ({"dtype": "float16", "query_dtype": "float16", "num_kv_heads": 1, "group": 3}, (8,)),
    )
    for decode_q_len in decode_q_lens
]
"""Every limit of sequences that decode with both 16-bit and NVFP4 caches: each case compiles kernels for seconds."""


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "decode_q_len"), GPU_STEPS, ids=str)
def test_a_serving_step_on_a_gpu_matches_float64(case: Case, decode_q_len: int):
    ragged_suite.check(case, attend_on("cuda", is_rounded=True, decode_q_len=decode_q_len))


@pytest.mark.gpu
@matrix(
    {"own": IN_FP8, "options": [{"head_size": 128}, {"head_size": 64, "window": 100}], "decode_q_len": [0, 1, 8]},
    pairs=True,
)
def test_products_in_fp8_on_a_gpu_have_the_errors_of_rounding(
    own: dict[str, Any], options: dict[str, Any], decode_q_len: int
):
    """Against float64, whatever is where nobody looks; and they are what JAX's kernels give."""
    case = ragged((5, 0, 200, 1, 33, 129), (40, 0, 450, 12, 33, 700), **own | options, group=4)
    attend = attend_on("cuda", query_quantization=True, decode_q_len=decode_q_len)
    problem = ragged_suite.build(case)
    results = ragged_suite.run(problem, attend)
    suite.assert_right(problem, *results, in_fp8=lambda q_len: q_len > decode_q_len)
    other = ragged_suite.build(case, fill=suite.ZERO, garbage=(-1,))
    for got, first in zip(ragged_suite.run(other, attend), results, strict=True):
        assert_same_bytes(np.concatenate(got), np.concatenate(first))
    in_jax = functools.partial(ragged_paged_attention, return_lse=True, implementation="mosaic")
    in_jax = jax.jit(in_jax, static_argnames=ragged_suite.STATIC)
    in_jax = functools.partial(in_jax, query_quantization=True, decode_q_len=decode_q_len)
    for got, wanted in zip(results, ragged_suite.run(problem, in_jax), strict=True):
        got, wanted = (np.float32(np.concatenate(each)) for each in (got, wanted))
        np.testing.assert_allclose(got, wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["nvfp4", "fp8_e4m3"])
def test_few_rows_in_fp8_behind_many_tokens_are_attended_to_in_splits(dtype: str):
    for q_lens, lens in (((40,), (5000,)), ((70, 1, 0), (5000, 100, 0))):
        problem = ragged_suite.build(ragged(q_lens, lens, dtype=dtype, head_size=128, group=4, sinks=True))
        results = ragged_suite.run(problem, attend_on("cuda", query_quantization=True, decode_q_len=1))
        suite.assert_right(problem, *results, in_fp8=lambda q_len: q_len > 1)


@pytest.mark.gpu
@pytest.mark.parametrize("q_len", [3, 40, 70])
@pytest.mark.parametrize("sinks", [False, True])
def test_few_rows_behind_many_tokens_are_attended_to_in_splits(q_len: int, sinks: bool):
    """With other rows, which splits do not touch; fewer than 64 in all are padded."""
    for q_lens, lens in (((q_len,), (5000,)), ((q_len, 1, 0), (5000, 100, 0))):
        case = ragged(q_lens, lens, dtype="nvfp4", head_size=128, group=4, sinks=sinks)
        ragged_suite.check(case, attend_on("cuda", is_rounded=True, decode_q_len=1))


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{"dtype": "nvfp4"}, {"dtype": "bfloat16", "window": 50}], ids=str)
def test_a_prompt_has_the_same_bits_alone_and_in_a_batch(options: dict[str, Any]):
    problem = ragged_suite.build(
        ragged((90, 7, 200, 64), (4000, 30, 350, 64), head_size=128, group=4, sinks=True, **options)
    )
    attend = attend_on("cuda", is_rounded=True, batch_invariant=True, max_q_len=512)
    whole = ragged_suite.run(problem, attend)
    suite.assert_right(problem, *whole, **ragged_suite.slack(problem.case, attend))
    for order in ([0], [1], [2], [3, 0], [2, 2, 1]):
        for got, expected in zip(ragged_suite.rows_in_turn(problem, order, attend), whole, strict=True):
            for seq, rows in zip(order, got, strict=True):
                assert_same_bytes(rows, expected[seq])


@pytest.mark.gpu
@pytest.mark.parametrize("query_quantization", [False, True])
@pytest.mark.parametrize("decode_q_len", [0, 1])
def test_a_graph_stores_all_rows_in_memory_of_the_caller(decode_q_len: int, query_quantization: bool):
    """Whatever it held, and however long sequences are when the graph is replayed."""
    lens = (1000,) * 6
    call = on_cuda(ragged((5, 0, 200, 1, 33, 129), lens, dtype="nvfp4", head_size=128, group=4, sinks=True))
    call["query"].nan_to_num_()
    out = torch.empty_like(call["query"])
    call |= {"max_q_len": 300, "max_prompts": 6, "decode_q_len": decode_q_len}
    call["query_quantization"] = query_quantization
    kvjax_torch.ragged_paged_attention(**call, out=out)
    graph = torch.cuda.CUDAGraph()
    with capture(graph):
        _, lse = kvjax_torch.ragged_paged_attention(**call, out=out)
    for q_lens in ((5, 0, 200, 1, 33, 129), (100, 100, 100, 1, 1, 2), (0, 0, 0, 0, 0, 300), (0,) * 6):
        call["cu_q_lens"].copy_(torch.tensor(np.cumsum([0, *q_lens])))
        expected = kvjax_torch.ragged_paged_attention(**call)
        for result in (out, lse):
            result.fill_(torch.nan)
        graph.replay()
        assert_same((out, lse), expected)
        assert not out[sum(q_lens) :].any()
        assert (lse[sum(q_lens) :] == call["sinks"]).all()
