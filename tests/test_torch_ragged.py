"""kvjax_torch.ragged_paged_attention passes the suite of kvjax.ragged_paged_attention, on tensors as torch has them.

On CPU tensors it is run as it is, and as a GPU has it with stand-ins for its kernels; on a GPU with the kernels.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from support import attention_suite as suite  # noqa: E402
from support import ragged_suite  # noqa: E402
from support.attention_suite import Attend, Case  # noqa: E402
from support.helpers import assert_same_bytes, matrix  # noqa: E402
from support.ragged_suite import GRID, OPTIONS, ragged  # noqa: E402
from support.torch_helpers import (  # noqa: E402
    assert_same,
    assert_torch_sees_no_wait,
    assert_waits_for_its_stream_alone,
    capture,
    to_numpy,
)
from support.torch_steps import attend_on, given, on_cuda, product_model, use_stand_ins  # noqa: E402
from torch.nn import functional  # noqa: E402

import kvjax  # noqa: E402
import kvjax_torch  # noqa: E402
from kvjax import KVCache, KVCacheTypeError, KVCacheValueError, UnsupportedError  # noqa: E402
from kvjax.ops import options  # noqa: E402
from kvjax_torch import launch  # noqa: E402
from kvjax_torch.arguments.attention import ragged_plan  # noqa: E402
from kvjax_torch.arguments.plan import Encoding, GatherPlan, ReadTensors, SoftmaxOptions  # noqa: E402
from kvjax_torch.cuda import prompts, reads  # noqa: E402
from kvjax_torch.cuda import ragged as ragged_of_cuda  # noqa: E402
from kvjax_torch.eager import dense, host  # noqa: E402


@pytest.fixture(params=["cpu", "stand-ins", pytest.param("cuda", marks=pytest.mark.gpu)])
def attend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Attend:
    if request.param == "stand-ins":
        use_stand_ins(monkeypatch)
    return attend_on("cuda" if request.param == "cuda" else "cpu", is_rounded=request.param != "cpu")


CASES = [
    ragged(**GRID, dtype="nvfp4", scales="scalar"),
    ragged(**GRID, dtype="fp8_e4m3", scales="per_head", layout="HND", sinks=True, window=127),
    ragged((12, 1, 0), (18, 17, 0), dtype="bfloat16", cap=5.0, window=9, sinks=True),
    ragged((12, 2), (18, 17), dtype="float32", query_dtype="float32", block_size=1),
    ragged((12, 1, 0), (18, 17, 0), dtype="int8_per_token_head", window=9),
    ragged((12, 1, 0), (18, 17, 0), dtype="int8_k_nvfp4_v", scales="scalar", sinks=True),
    ragged((12, 1, 0), (18, 17, 0), dtype="nvfp4", head_size=272, scales="scalar", cap=5.0),
]
MORE_CASES = [
    ragged(**GRID, **options)
    for options in OPTIONS
    if options.get("dtype") != "float32"  # of float32, CASES has one
]


@pytest.mark.parametrize(
    "case", [*CASES, *(pytest.param(case, marks=pytest.mark.full) for case in MORE_CASES)], ids=str
)
def test_attention_matches_float64_for_a_serving_step(attend, case):
    ragged_suite.check(case, attend)


TREES = {"lengths": (132, 18, 63, 17, 0, 5, 40, 9), "q_lens": (1, 5, 29, 0, 0, 4, 40, 6), "tree": True, "tree_rows": 6}


@pytest.mark.parametrize(
    "case",
    [
        ragged(**TREES, dtype="nvfp4", sinks=True),
        ragged(**TREES, dtype="fp8_e4m3", scales="per_head", layout="HND", window=5),
        ragged(**TREES, dtype="bfloat16", window=20, block_size=8, cap=30.0),
        ragged(**(TREES | {"tree_rows": 35}), dtype="float16", query_dtype="float16", window=30),
        ragged(**(TREES | {"tree_rows": 70}), dtype="float32", query_dtype="float32", window=1),
    ],
    ids=str,
)
def test_attention_matches_float64_for_trees_beside_prompts(attend, case):
    ragged_suite.check(case, attend)


def test_a_mask_for_more_tokens_than_the_step_has_is_cut():
    problem = ragged_suite.build(ragged((2, 1), (18, 17), dtype="bfloat16", tree=True, tree_rows=9, window=3))
    suite.assert_right(problem, *ragged_suite.run(problem, attend_on("cpu"), padding=0))


OTHERS = [
    ragged((12, 1, 0, 9), (18, 17, 0, 9), dtype="nvfp4", scales="scalar", cap=5.0, sinks=True),
    ragged((12, 2, 13), (18, 17, 40), dtype="bfloat16", cap=5.0, window=9),
    ragged((12, 1, 3), (18, 17, 3), dtype="fp8_e4m3", head_size=128, head_size_v=64, window=64),
    ragged((12, 1), (18, 17), dtype="nvfp4", sm_scale=-0.07),
    ragged((12, 1), (18, 17), dtype="float16", query_dtype="bfloat16"),
]


@pytest.mark.parametrize("case", OTHERS, ids=str)
def test_prompts_without_a_kernel_are_served_in_16_bits(case, monkeypatch):
    """Which hold what is stored, but for a cache of another dtype than the query's."""
    use_stand_ins(monkeypatch)
    dtypes = set()

    def product(a: torch.Tensor, b: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        dtypes.add(a.dtype)
        return product_model(a, b, factor)

    monkeypatch.setattr(dense, "product", product)
    monkeypatch.setattr(reads, "attend", None)  # nothing decodes
    ragged_suite.check(case, attend_on("cpu", is_rounded=True, decode_q_len=0))
    exact = torch.bfloat16 if case.dtype == "bfloat16" else torch.float16
    assert dtypes == {torch.float32 if case.dtype == "float16" else exact}


PLAIN = [
    ragged((12, 1, 0, 9), (18, 17, 0, 9), dtype="nvfp4", scales="scalar", sm_scale=-0.07),
    ragged((12, 2, 13), (18, 17, 40), dtype="bfloat16", window=9, sm_scale=-0.2),
    ragged((12, 1, 3), (18, 17, 3), dtype="fp8_e4m3", head_size=128, head_size_v=64, scales="per_head", sm_scale=-0.1),
    ragged((40, 3), (300, 3), dtype="float16", query_dtype="float16", sm_scale=0.0, group=1),
    ragged((12, 1, 40), (18, 17, 40), dtype="nvfp4", layout="HND", sm_scale=0.1),
    ragged((12, 1, 40), (18, 17, 40), dtype="nvfp4", head_size=272, scales="scalar"),
]
"""Prompts that the prompt kernel does not serve, but for one on Hopper, and that need no log-sum-exp."""


def attend_without_lse(device: str) -> Attend:
    """Results of calls that ask for them alone, with the log-sum-exp of others."""

    def run(query: np.ndarray, *args: Any, **options: Any) -> Any:
        call = given(device, query, *args, **options, decode_q_len=0)
        out, (_, lse) = (kvjax_torch.ragged_paged_attention(**call | {"return_lse": both}) for both in (False, True))
        return to_numpy(out, query.dtype), to_numpy(lse, np.dtype(np.float32))

    run.by_kernels = True  # type: ignore[attr-defined]
    return run


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_prompts_without_a_kernel_and_log_sum_exp_are_served_by_torchs_own_attention(case, monkeypatch):
    use_stand_ins(monkeypatch)
    calls = []
    right = functional.scaled_dot_product_attention

    def attend(query: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        calls.append(query.dtype)
        return right(query, *args, **options)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", attend)
    ragged_suite.check(case, attend_without_lse("cpu"))
    assert {*calls} == {torch.bfloat16 if case.dtype == "bfloat16" else torch.float16}


@pytest.mark.gpu
@pytest.mark.parametrize("case", [case for case in PLAIN if case.sm_scale != 0.1], ids=str)
def test_on_a_gpu_torchs_own_attention_serves_prompts_without_a_kernel(case):
    ragged_suite.check(case, attend_without_lse("cuda"))


def test_a_large_sink_does_not_round_weights_to_zero(monkeypatch):
    """Results are small with it, but as precise as without."""
    problem = ragged_suite.build(ragged((12,), (18,), dtype="nvfp4", cap=5.0))
    use_stand_ins(monkeypatch)
    [out], [lse] = ragged_suite.run(problem, attend_on("cpu"))
    sinks = np.full(out.shape[-2], 20.0, np.float32)
    problem = dataclasses.replace(problem, options=problem.options | {"sinks": sinks})
    [with_sinks], [log] = ragged_suite.run(problem, attend_on("cpu"))
    np.testing.assert_allclose(log, np.logaddexp(lse, 20.0), rtol=1e-6)
    expected = np.float32(out) * np.exp(lse - log)[..., None]
    np.testing.assert_allclose(np.float32(with_sinks), expected, rtol=2**-6, atol=2**-7 * np.abs(expected).max())


def numbers(q_lens: tuple[int, ...], decode_q_len: int) -> dict[str, int]:
    """The least that hold these sequences."""
    most = sum(q_len > decode_q_len for q_len in q_lens)
    return {"max_q_len": max(q_lens), "decode_q_len": decode_q_len, "max_prompts": most}


@pytest.mark.parametrize(
    "q_lens",
    [(3, 1, 0, 8), (1, 1, 0, 1), *(pytest.param(x, marks=pytest.mark.full) for x in ((4, 4, 4, 4), (9, 1, 0, 30)))],
)
@pytest.mark.parametrize("window", [20, pytest.param(None, marks=pytest.mark.full)])
def test_results_do_not_depend_on_buckets(attend, q_lens, window):
    """Whatever they are, as long as they hold the call."""
    problem = ragged_suite.build(ragged(q_lens, (33, 5, 0, 64), dtype="nvfp4", block_size=8, window=window))
    longest = max(q_lens)
    for decode_q_len in {0, 1, min(longest, 4), longest, longest + 7}:
        bounded = functools.partial(attend, **numbers(q_lens, decode_q_len))
        slack = ragged_suite.slack(problem.case, attend)
        suite.assert_right(problem, *ragged_suite.run(problem, bounded), **slack)


@pytest.mark.parametrize(
    "limits", [{"max_q_len": 11, "decode_q_len": 1}, {"max_prompts": 1, "decode_q_len": 1}], ids=str
)
def test_a_sequence_beyond_the_numbers_sees_nothing(limits, monkeypatch):
    """The others are served, as on the host all are."""
    problem = ragged_suite.build(ragged((4, 1, 12), (20, 9, 40), dtype="nvfp4", sinks=True))
    attend = functools.partial(attend_on("cpu"), **limits)
    whole = ragged_suite.run(problem, attend)
    suite.assert_right(problem, *whole)
    use_stand_ins(monkeypatch)
    outs, lses = ragged_suite.run(problem, attend)
    for seq in (0, 1):
        np.testing.assert_allclose(np.float32(outs[seq]), np.float32(whole[0][seq]), rtol=1e-2, atol=1e-3)
    assert not outs[2].astype(np.float32).any()
    np.testing.assert_array_equal(lses[2], np.broadcast_to(problem.options["sinks"], lses[2].shape))


@pytest.mark.parametrize("case", CASES[:3], ids=str)
def test_memory_is_bounded(case, monkeypatch):
    """A prompt at a time, and a row at a time, comes to the same."""
    use_stand_ins(monkeypatch)
    gathered = []

    def gather(plan: GatherPlan, tensors: ReadTensors) -> Any:
        gathered.append(tuple(tensors.block_table.shape))
        return host.gather(plan, tensors)

    monkeypatch.setattr(reads, "gather", gather)
    monkeypatch.setattr(options, "DENSE_BYTES", 1)
    monkeypatch.setattr(prompts, "LOGITS_BYTES", 1)
    problem, attend = ragged_suite.build(case), attend_on("cpu", is_rounded=True)
    most = numbers(case.q_lens, 1)
    results = ragged_suite.run(problem, functools.partial(attend, **most))
    suite.assert_right(problem, *results, **ragged_suite.slack(case, attend))
    assert len(gathered) == most["max_prompts"]
    assert {num_seqs for num_seqs, _ in gathered} == {1}
    if case.window is not None:
        reached = case.window - 1 + most["max_q_len"] + case.block_size - 1
        assert max(num_blocks for _, num_blocks in gathered) <= -(-reached // case.block_size)


@pytest.mark.parametrize("dtype", ["bfloat16", "nvfp4"])
@pytest.mark.parametrize("strides", ["offset", "heads last", "every second"])
def test_a_query_may_be_strided_in_any_way(strides, dtype, device, monkeypatch):
    if device == "cpu":
        use_stand_ins(monkeypatch)
    problem = ragged_suite.build(ragged((12, 1), (18, 17), dtype=dtype))
    rows, bounds = np.concatenate(problem.args[0]), np.int32([0, 12, 13])
    call = given(device, rows, *problem.args[1:], bounds, **problem.options)
    query = call["query"].contiguous()
    expected = kvjax_torch.ragged_paged_attention(**call | {"query": query})
    other = {
        "offset": lambda: torch.cat([query.new_zeros(1), query.flatten()])[1:].view(query.shape),
        "heads last": lambda: query.transpose(1, 2).contiguous().transpose(1, 2),
        "every second": lambda: query.repeat_interleave(2, dim=-1)[..., ::2],
    }[strides]()
    assert_same(kvjax_torch.ragged_paged_attention(**call | {"query": other}), expected)


BATCH = ragged((1, 3, 0, 2, 3), (300, 17, 9, 40, 129), dtype="nvfp4", sinks=True)


@pytest.mark.parametrize("seq", [0, 1, 4])
def test_batch_invariant_results_have_the_same_bits_alone_and_in_a_batch(attend, seq):
    """The same bits for a sequence alone as among others."""
    problem = ragged_suite.build(BATCH)
    query, cache, table, lens = problem.args
    options = {"batch_invariant": True, "max_q_len": 3}
    whole = ragged_suite.run(problem, functools.partial(attend, **options))
    own, rows = slice(seq, seq + 1), np.concatenate([query[seq], query[1]])
    bounds = np.int32([0, len(query[seq])])
    alone = attend(rows, cache, table[own], lens[own], bounds, **problem.options, **options)
    for got, results in zip(alone, whole, strict=True):
        assert_same_bytes(got[: len(query[seq])], results[seq])


def test_a_gpu_without_the_prompt_kernel_refuses_batch_invariant_prompts(monkeypatch):
    problem = ragged_suite.build(BATCH)
    attend = functools.partial(attend_on("cpu"), batch_invariant=True, decode_q_len=1)
    suite.assert_right(problem, *ragged_suite.run(problem, attend))
    use_stand_ins(monkeypatch)
    with pytest.raises(
        UnsupportedError, match="batch_invariant=True and room for 5 sequences of more than decode_q_len=1"
    ):
        ragged_suite.run(problem, attend)


@pytest.mark.parametrize("window", [None, pytest.param(11, marks=pytest.mark.full)])
@pytest.mark.parametrize("dtype", ["nvfp4", pytest.param("bfloat16", marks=pytest.mark.full)])
def test_chunks_of_any_size_match_decoding(attend, dtype, window):
    """A chunk's own keys and values are read as they were stored."""
    scales = "one" if dtype == "bfloat16" else "scalar"
    problem = ragged_suite.build(ragged((45,), (45,), dtype=dtype, scales=scales, window=window, block_size=8))
    want, factors = suite.expected(problem, 0), ragged_suite.slack(problem.case, attend)
    [query], cache, table, lens = problem.args
    chunks = [ragged_suite.step_by_step(problem, attend, cuts) for cuts in ([0], [0, 9, 10, 26, 40])]
    out, lse = each_alone(attend, query, cache, table, lens[0] - np.arange(45)[::-1], **problem.options)
    for got in (*chunks, np.concatenate([np.float32(out), lse[..., None]], axis=-1)):
        assert np.abs(got[..., :-1] - want.out).max() <= want.out_max
        assert np.abs(got[..., -1] - want.lse).max() <= want.lse_max * factors.get("lse_factor", 1)


def each_alone(attend: Attend, query: np.ndarray, cache: KVCache, table: np.ndarray, lens: Any, **options: Any) -> Any:
    """Results of rows that are sequences of one table, each of its own length, that decode."""
    tables, bounds = np.tile(table, (len(query), 1)), np.arange(len(query) + 1, dtype=np.int32)
    return attend(query, cache, tables, np.int32(lens), bounds, **options, max_q_len=1)


@pytest.mark.parametrize("window", [None, pytest.param(30, marks=pytest.mark.full)])
@pytest.mark.parametrize("hole", [1, 4, *(pytest.param(x, marks=pytest.mark.full) for x in (0, 3, 5))])
def test_a_block_that_was_given_back_is_not_seen(attend, hole, window):
    ragged_suite.check_hole(attend, hole, window)


def test_rows_of_one_prefix_are_rows_of_one_sequence(attend):
    """Whose own blocks are not there: more than are there."""
    problem = ragged_suite.build(ragged((24,), (40,), dtype="nvfp4", block_size=8))
    [query], cache, table, lens = problem.args
    shared = np.where(np.arange(table.shape[1]) < 2, table, -1)
    results = attend(query, cache, shared, lens, np.int32([0, 24]), **problem.options)
    expected = each_alone(attend, query, cache, table[:, :2], [16] * 24, **problem.options)
    for got, want in zip(results, expected, strict=True):
        np.testing.assert_allclose(np.float32(got), np.float32(want), rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize(("num_tokens", "num_seqs", "max_blocks"), [(0, 2, 3), (4, 0, 3), (4, 2, 0), (0, 0, 0)])
def test_attention_accepts_empty_batches_and_tables(attend, num_tokens, num_seqs, max_blocks):
    cache = KVCache.allocate(Case("nvfp4").spec, 4)
    table, lens = np.zeros((num_seqs, max_blocks), np.int32), np.full(num_seqs, 5, np.int32)
    bounds = np.minimum(np.arange(num_seqs + 1, dtype=np.int32), num_tokens)
    options = {"k_scale": np.float32(1), "v_scale": np.float32(1), "sinks": None}
    out, lse = attend(np.ones((num_tokens, 4, 64), np.float16), cache, table, lens, bounds, **options)
    assert (out.shape, lse.shape) == ((num_tokens, 4, 64), (num_tokens, 4))
    assert not out.any()
    assert np.isneginf(lse[num_seqs * bool(max_blocks) :]).all()


def arguments(device: str = "cpu", dtype: str = "nvfp4", query_dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    if dtype == "auto":
        kv_cache = torch.zeros((4, 2, 8, 2, 64), dtype=torch.bfloat16, device=device)
    else:
        kv_cache = torch.zeros((4, 2, 8, 2, 36), dtype=torch.uint8, device=device)
    one = torch.ones((), device=device)
    return {
        "query": torch.randn(6, 4, 64, generator=torch.Generator().manual_seed(0)).to(device, query_dtype),
        "key_cache": kv_cache[:, 0],
        "value_cache": kv_cache[:, 1],
        "block_table": torch.tensor([[1, 0], [3, 2]], device=device),
        "seq_lens": torch.tensor([13, 4], device=device),
        "cu_q_lens": torch.tensor([0, 4, 5], device=device),
        "kv_cache_dtype": dtype,
        "k_scale": one,
        "v_scale": one,
    }


EACH_QUERY = pytest.mark.parametrize(
    "query_dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.full)], ids=str
)
"""Of which the first is one that kernels serve."""

SOME_OPTIONS = {
    "defaults": {},
    "a bucket": {"max_q_len": 4},
    "a tree": {"sliding_window": 5, "tree_mask": torch.eye(3, dtype=torch.bool)},
    "all": {"sliding_window": 5, "logits_soft_cap": 3.0, "sinks": torch.ones(4), "max_prompts": 1, "decode_q_len": 1},
}


@EACH_QUERY
@matrix({"dtype": ["auto", "nvfp4"], "options": list(SOME_OPTIONS)})
def test_torchs_opcheck_accepts_the_operation(options, dtype, query_dtype, device):
    options = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in SOME_OPTIONS[options].items()}
    values = tuple(arguments(device, dtype, query_dtype).values())
    torch.library.opcheck(torch.ops.kvjax.ragged_paged_attention.default, values, options)


@EACH_QUERY
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_code_attends_as_eager_code_does(query_dtype, device):
    """One graph for every number of tokens, and whatever the call's own numbers."""
    torch._dynamo.reset()
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    def layer(call: dict[str, Any], longest: int) -> Any:
        options = {"sliding_window": 5, "sm_scale": 0.5, "return_lse": True, "max_q_len": longest}
        return kvjax_torch.ragged_paged_attention(**call, **options, max_prompts=1, decode_q_len=1)

    compiled = torch.compile(layer, backend=backend, fullgraph=True, dynamic=True)
    for num_tokens, longest in ((6, 4), (5, 5), (6, 6)):
        call = arguments(device, query_dtype=query_dtype)
        call["query"] = call["query"][:num_tokens].clone()
        for got, eager in zip(compiled(call, longest), layer(call, longest), strict=True):
            torch.testing.assert_close(got, eager)
    assert len(graphs) == 1


def test_meta_tensors_give_the_shapes_of_results():
    on_meta = [x.to("meta") if isinstance(x, torch.Tensor) else x for x in arguments().values()]
    out, lse = torch.ops.kvjax.ragged_paged_attention(*on_meta)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == ((6, 4, 64), torch.float32, (6, 4), torch.float32)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"query": torch.zeros(2, 3, 4, 64)}, KVCacheValueError, "query: got 4 dimensions, expected [num_tokens, num"),
        ({"query": torch.zeros(6, 4, 32)}, KVCacheValueError, "query: got shape (6, 4, 32), expected head_size=64"),
        ({"query": torch.zeros(6, 3, 64)}, KVCacheValueError, "query: got num_heads=3, expected a multiple of num_kv"),
        ({"query": torch.zeros(6, 4, 64).int()}, KVCacheTypeError, "query: got dtype torch.int32, expected torch.fl"),
        ({"query": torch.zeros(6, 4, 64).requires_grad_()}, KVCacheTypeError, "query: got requires_grad=True, but at"),
        ({"query": torch.zeros(6, 4, 64, device="meta")}, KVCacheValueError, "query: got device meta, expected cpu"),
        (
            {"cu_q_lens": torch.tensor([0, 6])},
            KVCacheValueError,
            "cu_q_lens: got shape (2,), expected [num_seqs + 1=3]",
        ),
        (
            {"cu_q_lens": torch.zeros(3)},
            KVCacheTypeError,
            "cu_q_lens: got dtype torch.float32, expected torch.int32 or",
        ),
        (
            {"cu_q_lens": torch.zeros(3, 1).int()},
            KVCacheValueError,
            "cu_q_lens: got 2 dimensions, expected [num_seqs +",
        ),
        ({"cu_q_lens": [0, 4, 6]}, KVCacheTypeError, "cu_q_lens: got a list, expected a torch.Tensor"),
        ({"seq_lens": torch.zeros(3).int()}, KVCacheValueError, "seq_lens: got shape (3,), expected [num_seqs=2]"),
        ({"block_table": torch.zeros(4).int()}, KVCacheValueError, "block_table: got 1 dimensions, expected [num_seqs"),
        ({"max_q_len": 0}, KVCacheValueError, "max_q_len: got 0, expected an int of at least 1"),
        ({"max_prompts": -1}, KVCacheValueError, "max_prompts: got -1, expected an int of at least 0"),
        ({"decode_q_len": 1.0}, KVCacheTypeError, "decode_q_len: got 1.0 of type float, expected an int"),
        ({"max_q_len": True}, KVCacheTypeError, "max_q_len: got True of type bool, expected an int"),
        ({"sinks": torch.zeros(3)}, KVCacheValueError, "sinks: got shape (3,), expected [num_heads=4]"),
        (
            {"tree_mask": torch.ones(3, 3, dtype=torch.bool), "decode_q_len": 2},
            KVCacheValueError,
            "tree_mask: got shape (3, 3), expected [num_seqs=2, decode_q_len=2, decode_q_len=2], or one for all",
        ),
        (
            {"tree_mask": torch.ones(3, 2, dtype=torch.bool)},
            KVCacheValueError,
            "tree_mask: got shape (3, 2), expected [num_seqs=2, decode_q_len=2, decode_q_len=2]",
        ),
        ({"tree_mask": torch.ones(3, 3)}, KVCacheTypeError, "tree_mask: got dtype torch.float32, expected torch.bool"),
        ({"sliding_window": 0}, KVCacheValueError, "sliding_window: got 0, expected a positive int or None"),
        ({"return_lse": "no"}, KVCacheTypeError, "return_lse: got 'no' of type str, expected a bool"),
    ],
)
def test_invalid_arguments_are_refused(change, error, message):
    with pytest.raises(error) as raised:
        kvjax_torch.ragged_paged_attention(**arguments() | change)
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cu_q_lens": torch.tensor([1, 4, 6])}, "cu_q_lens[0]: got 1, expected 0 first"),
        ({"cu_q_lens": torch.tensor([0, 4, 3])}, "cu_q_lens[2]: got 3, expected 0 first, and then each between"),
        (
            {"cu_q_lens": torch.tensor([0, 4, 7])},
            "cu_q_lens[2]: got 7, expected 0 first, and then each between the one",
        ),
        ({"max_q_len": 3}, "cu_q_lens: got 4 query tokens for sequence 0, expected at most max_q_len=3"),
        (
            {"cu_q_lens": torch.tensor([0, 4, 6]), "decode_q_len": 1, "max_prompts": 1},
            "cu_q_lens: got 2 sequences with more than decode_q_len=1 query tokens",
        ),
        ({"seq_lens": torch.tensor([13, 17])}, "seq_lens[1]: got 17, expected between 0 and 16"),
        ({"block_table": torch.tensor([[1, 0], [9, 2]])}, "block_table[1, 0]: got 9, expected between"),
    ],
)
def test_checked_mode_names_what_is_wrong(change, message, device):
    call = arguments(device) | {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in change.items()}
    with kvjax.checked(), pytest.raises(KVCacheValueError) as raised:
        kvjax_torch.ragged_paged_attention(**call)
    assert str(raised.value).startswith(message)


DTYPES = ("float16", "bfloat16", "fp8_e4m3", "fp8_e5m2", "nvfp4")

STEP = ragged((1, 300, 1, 0, 17, 3), (1328, 700, 17, 0, 17, 90), head_size=128, group=4)
"""A mixed step."""


@pytest.mark.gpu
@matrix(
    {"form": ["one_allocation", "two_tensors", "padded_pages", "offset"], "layout": ["NHD", "HND"], "dtype": DTYPES}
)
def test_pages_may_lie_anywhere(form, layout, dtype):
    case = dataclasses.replace(STEP, dtype=dtype, layout=layout, sinks=True)
    ragged_suite.check(case, attend_on("cuda", is_rounded=True, form=form))


@pytest.mark.gpu
@matrix({"window": [None, 200], "head_size": [64, 80, 96, 112, 128, 192, 256], "group": [1, 5, 16]})
def test_attention_matches_float64_for_heads_of_any_size(window, head_size, group):
    case = dataclasses.replace(STEP, dtype="nvfp4", window=window, head_size=head_size, group=group)
    ragged_suite.check(case, attend_on("cuda", is_rounded=True))


@pytest.mark.gpu
@matrix({"dtype": ["bfloat16", "nvfp4"], "window": [None, 1024]})
def test_attention_matches_float64_for_long_chunks(dtype, window):
    problem = ragged_suite.build(ragged((2048, 1, 9), (8192, 300, 9), dtype=dtype, num_kv_heads=1, window=window))
    attend = attend_on("cuda", is_rounded=True)
    suite.assert_right(problem, *ragged_suite.run(problem, attend), **ragged_suite.slack(problem.case, attend))


@pytest.mark.gpu
@matrix(
    {
        "options": [{}, {"cap": 30.0}, {"sinks": True, "window": 100}, {"tree": True, "tree_rows": 4, "window": 100}],
        "dtype": ["bfloat16", "nvfp4"],
    }
)
def test_a_gpu_gives_what_the_host_gives(options, dtype):
    call = on_cuda(dataclasses.replace(STEP, dtype=dtype, **options))
    on_host = {name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in call.items()}
    results = zip(
        kvjax_torch.ragged_paged_attention(**call), kvjax_torch.ragged_paged_attention(**on_host), strict=True
    )
    for got, wanted in results:
        torch.testing.assert_close(got.cpu(), wanted, rtol=2**-6, atol=2**-7)


def replayed(call: dict[str, Any], limits: dict[str, int], steps: list[tuple[list[int], list[int]]]) -> None:
    """Holds a captured call's results to those of calls, with other rows, lengths and tables in the same buffers."""
    kvjax_torch.ragged_paged_attention(**call, **limits)
    compilations = launch.num_compilations()
    graph = torch.cuda.CUDAGraph()
    with capture(graph):
        results = kvjax_torch.ragged_paged_attention(**call, **limits)
    tables = call["block_table"].clone()
    for number, (q_lens, lengths) in enumerate(steps):
        call["block_table"].copy_(tables.roll(number, 0))
        call["seq_lens"].copy_(torch.tensor(lengths))
        call["cu_q_lens"].copy_(torch.tensor(np.cumsum([0, *q_lens])))
        call["query"].normal_()
        expected = kvjax_torch.ragged_paged_attention(**call, **limits)
        for result in results:
            result.fill_(float("nan"))
        graph.replay()
        assert_same(results, expected)
        assert results[0][: sum(q_lens)].any()
    assert launch.num_compilations() == compilations


@pytest.mark.gpu
@matrix({"dtype": ["bfloat16", "fp8_e4m3", "nvfp4"], "q_len": [1, 4]})
def test_a_graph_of_decodes_replays_with_other_lengths(dtype, q_len):
    """And with fewer sequences, which is how a batch is padded."""
    case = ragged((q_len,) * 5, (1328, 700, 17, 64, 100), dtype=dtype, head_size=128, group=4, sinks=True)
    call = on_cuda(case, fill=suite.ZERO)
    steps = [
        ([q_len] * 5, [1328, 17, 64, 700, 9]),
        ([q_len, q_len, 1, 0, 0], [1, 400, 17, 0, 0]),
        ([1, 0, q_len, 1, q_len], [5, 33, 1328, 600, 128]),
    ]
    replayed(call, {"max_q_len": q_len}, steps)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 64])
def test_a_graph_of_trees_beside_prompts_replays_with_other_sizes(window):
    case = ragged((4, 300, 1, 0, 17, 3), (1328, 700, 17, 0, 17, 90), dtype="nvfp4", head_size=128, group=4)
    case = dataclasses.replace(case, tree=True, tree_rows=4, window=window)
    call = on_cuda(case, fill=suite.ZERO)
    call["block_table"].fill_(1)
    steps = [
        ([4, 300, 1, 0, 17, 3], [1328, 700, 17, 0, 17, 90]),
        ([300, 1, 20, 2, 0, 0], [1300, 1, 20, 500, 0, 0]),
        ([1, 2, 3, 4, 1, 1], [5, 33, 1328, 600, 128, 1]),
    ]
    replayed(call, {"max_q_len": 300, "max_prompts": 3}, steps)


@pytest.mark.gpu
@matrix({"dtype": ["bfloat16", "nvfp4"], "window": [None, 64], "cap": [None, 30.0]})
def test_a_graph_of_a_mixed_step_replays_with_other_lengths(dtype, window, cap):
    call = on_cuda(dataclasses.replace(STEP, dtype=dtype, window=window, cap=cap), fill=suite.ZERO)
    call["block_table"].fill_(1)  # a block that is there, wherever a length reaches
    steps = [
        ([1, 300, 1, 0, 17, 3], [1328, 700, 17, 0, 17, 90]),
        ([300, 1, 20, 1, 0, 0], [1300, 1, 20, 500, 0, 0]),
        ([1, 1, 1, 1, 1, 1], [5, 33, 1328, 600, 128, 1]),
    ]
    replayed(call, {"max_q_len": 300, "max_prompts": 3, "decode_q_len": 1}, steps)


@pytest.mark.gpu
@pytest.mark.parametrize("new_stream", [torch.cuda.default_stream, torch.cuda.Stream], ids=["default", "side"])
@pytest.mark.parametrize("dtype", ["bfloat16", "nvfp4"])
def test_calls_wait_for_their_stream_and_for_nothing_else(new_stream, dtype):
    call = on_cuda(dataclasses.replace(STEP, dtype=dtype))
    call["query"].nan_to_num_()
    assert_waits_for_its_stream_alone(kvjax_torch.ragged_paged_attention, call, new_stream(), repeats=3)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # which it says of itself
@pytest.mark.parametrize("options", [{}, {"window": 100, "sinks": True}, {"cap": 30.0}], ids=str)
@pytest.mark.parametrize("query_quantization", [False, True])
def test_torch_sees_nothing_that_waits(options, query_quantization):
    call = on_cuda(dataclasses.replace(STEP, dtype="nvfp4", **options))
    call["query_quantization"] = query_quantization
    assert_torch_sees_no_wait(kvjax_torch.ragged_paged_attention, call)


@pytest.mark.gpu
def test_memory_goes_back_to_torch_and_is_bounded():
    """Keys and values of a prompt, its query and what rows come to: not of the sequences that decode."""
    call = on_cuda(dataclasses.replace(STEP, dtype="nvfp4"))
    limits = {"max_q_len": 300, "max_prompts": 1, "decode_q_len": 17}
    kvjax_torch.ragged_paged_attention(**call, **limits)
    torch.cuda.synchronize()
    gc.collect()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    results = kvjax_torch.ragged_paged_attention(**call, **limits)
    kept = sum(-(-each.untyped_storage().nbytes() // 512) * 512 for each in results)
    assert torch.cuda.memory_allocated() == before + kept
    dense = call["block_table"].shape[1] * 16 * 2 * 2 * 128 * 2
    assert torch.cuda.max_memory_allocated() <= before + dense + 10 * kept + (16 << 20)  # of which the most workspace


@pytest.mark.parametrize("dtype", ["fp8", "nvfp4"])
def test_products_in_fp8_are_the_same_whatever_torchs_default_dtype_is(dtype: str):
    generator = torch.Generator().manual_seed(0)
    key = torch.randn(12, 2, 32, generator=generator)
    pages = torch.zeros(1, 2, 16, 2, 32 if dtype == "fp8" else 18, dtype=torch.uint8)
    kvjax_torch.reshape_and_cache_flash(key, key, pages[:, 0], pages[:, 1], torch.arange(12), dtype, 0.02, 0.03)
    query = torch.randn(12, 4, 32, generator=generator).bfloat16()
    step = torch.zeros(1, 1).int(), torch.tensor([12]).int(), torch.tensor([0, 12])

    def attend() -> torch.Tensor:
        call = query, pages[:, 0], pages[:, 1], *step, dtype, 0.02, 0.03
        return kvjax_torch.ragged_paged_attention(*call, query_quantization=True)

    expected = attend()
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert torch.equal(attend(), expected)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    ("num_tokens", "num_seqs", "message"),
    [
        (2**17, 1, "131072 query tokens of 128 heads: 2147483648 elements"),
        (8, 2**16, "65536 sequences, each padded to 2 query tokens of 128 heads: 2147483648 elements"),
        (2**17 - 1, 2**16 - 1, None),
    ],
)
def test_a_gpu_refuses_what_int32_does_not_index(num_tokens: int, num_seqs: int, message: str | None):
    pages, one = torch.zeros(2, 1, 16, 8, 128, dtype=torch.bfloat16), torch.tensor(1.0)
    table = torch.zeros(num_seqs, 1, dtype=torch.int32)
    tensors = ReadTensors(*pages, table, table[:, 0], one, one)
    query = torch.zeros((), dtype=torch.bfloat16).expand(num_tokens, 128, 128)
    bounds = torch.zeros(num_seqs + 1, dtype=torch.int32)
    limits = options.Limits(decode_q_len=2, max_q_len=2, max_prompts=0)
    plan = ragged_plan(query, tensors, bounds, Encoding("bfloat16"), SoftmaxOptions(0.1), limits)
    reason = ragged_of_cuda.why_refused(plan, query, tensors)
    assert (reason is None) if message is None else (message in str(reason))
