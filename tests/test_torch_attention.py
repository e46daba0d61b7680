"""kvjax_torch.paged_attention passes the suite that kvjax's own implementations pass, on tensors as torch has them.

On a GPU that is the kernels; here they are interpreted, with the numbers and the memory that a launch would be given.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import threading
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from support import attention_suite as suite  # noqa: E402
from support.attention_suite import Attend, Case  # noqa: E402
from support.helpers import assert_same_bytes, matrix, page_bytes  # noqa: E402
from support.interpret_mode import interpret_mode  # noqa: E402
from support.torch_helpers import (  # noqa: E402
    FORMS,
    assert_same,
    assert_torch_sees_no_wait,
    assert_waits_for_its_stream_alone,
    capture,
    from_numpy,
    to_numpy,
    torch_cache,
)

import kvjax  # noqa: E402
import kvjax_torch  # noqa: E402
from kvjax import KVCache, KVCacheTypeError, KVCacheValueError, UnsupportedError, kernels  # noqa: E402
from kvjax.kernels.attention import choice  # noqa: E402
from kvjax.kernels.attention.stages import StageLayout  # noqa: E402
from kvjax_torch import launch  # noqa: E402
from kvjax_torch.arguments.attention import attention_plan  # noqa: E402
from kvjax_torch.arguments.dtypes import numpy_dtype  # noqa: E402
from kvjax_torch.arguments.plan import Encoding, ReadTensors, SoftmaxOptions  # noqa: E402
from kvjax_torch.calls import attending, choosing  # noqa: E402
from kvjax_torch.cuda import reads  # noqa: E402
from kvjax_torch.eager import host  # noqa: E402
from kvjax_torch.launch import loading, running  # noqa: E402


def on(device: str, value: Any) -> Any:
    return from_numpy(value).to(device) if isinstance(value, np.ndarray) else value


def given(
    device: str,
    query: np.ndarray,
    cache: KVCache,
    table: np.ndarray,
    lens: np.ndarray,
    *,
    form: str = "one_allocation",
    before: int | None = None,
    **options: Any,
) -> dict[str, Any]:
    """The arguments of a call, strided as callers have them: a slice of a projection, and of a larger table."""
    spec = cache.spec
    pages = torch_cache(page_bytes(cache), spec, form=form, before=before, device=device)
    options["v_scale_layout"] = spec.v_scale_layout.value
    options |= {name: on(device, np.asarray(options[name])) for name in ("k_scale", "v_scale")}
    options |= {name: on(device, options[name]) for name in ("sinks", "tree_mask") if name in options}
    return options | {
        "query": on(device, np.concatenate([query, query], axis=-2))[..., : query.shape[-2], :],
        "key_cache": pages.key,
        "value_cache": pages.value,
        "block_table": on(device, np.pad(table, ((0, 0), (1, 2)), constant_values=1))[:, 1:-2],
        "seq_lens": on(device, lens.astype(np.int64)),
        "kv_cache_dtype": spec.dtype.value,
        "return_lse": True,
    }


def attend_on(device: str, **how: Any) -> Attend:
    def run(query: np.ndarray, *args: Any, **options: Any) -> Any:
        out, lse = kvjax_torch.paged_attention(**given(device, query, *args, **options, **how))
        return to_numpy(out, query.dtype), to_numpy(lse, np.dtype(np.float32))

    return run


@pytest.fixture
def attend(device: str) -> Attend:
    """On tensors of a device."""
    return attend_on(device)


CASES = [
    Case(num_kv_heads=1, group=1, lengths="one", q_len=4),
    Case("nvfp4", "float16", "HND", "swizzled", 80, q_len=3, window=9, cap=4.0, sinks=True, scales="scalar"),
    Case("fp8_e4m3", "float32", head_size=64, head_size_v=32, block_size=8, q_len=2, scales="per_head"),
    Case(num_kv_heads=1, group=17, q_len=3, sinks=True, window=9),
    Case("fp8_e5m2", "float16", group=4, q_len=8, scales="scalar"),
    Case("nvfp4", lengths=(5, 70, 33), group=4, q_len=8, cap=5.0, tree=True),
    Case("fp8_e4m3", "float16", lengths=(77, 5), num_kv_heads=1, q_len=40, window=20, tree=True, sinks=True),
    Case("float32", "float32", lengths=(30, 9, 0), block_size=8, q_len=5, window=2, tree=True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_matches_float64_in_each_case(attend, case):
    suite.check(case, attend)


@pytest.mark.full
@pytest.mark.parametrize("case", [case for case in suite.cases(2) if case.lengths != "long"], ids=str)
def test_attention_matches_float64_for_each_pair_of_options(attend, case):
    if case.dtype == "nvfp4" and case.head_size_v not in (None, case.head_size):
        pytest.skip("the halves of such a page are not two tensors")
    suite.check(case, attend)


def test_one_token_a_sequence_needs_no_axis_of_rows(attend):
    problem = suite.build(Case("nvfp4", window=9))
    query, *rest = problem.args
    for got, rows in zip(attend(query[:, 0], *rest, **problem.options), problem.run(attend), strict=True):
        assert_same_bytes(got, rows[:, 0])


@pytest.mark.parametrize("q_shape", [(0, 4, 64), (0, 3, 4, 64), (2, 0, 4, 64)], ids=str)
@pytest.mark.parametrize("query_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_empty_batch_has_empty_results(q_shape, query_dtype, device):
    num_seqs = q_shape[0]
    call = arguments(device) | {"query": torch.zeros(q_shape, dtype=query_dtype, device=device)}
    call |= {name: call[name][:num_seqs] for name in ("block_table", "seq_lens")}
    out, lse = kvjax_torch.paged_attention(**call, return_lse=True)
    assert (out.shape, out.dtype) == (q_shape, query_dtype)
    assert (lse.shape, lse.dtype) == (q_shape[:-1], torch.float32)


def arguments(device: str = "cpu", dtype: str = "nvfp4", query_dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    kv_cache = torch.zeros((4, 2, 8, 2, 36), dtype=torch.uint8, device=device)
    if dtype == "auto":
        kv_cache = torch.zeros((4, 2, 8, 2, 64), dtype=torch.bfloat16, device=device)
    one = torch.ones((), device=device)
    return {
        "query": torch.randn(2, 4, 64, generator=torch.Generator().manual_seed(0)).to(device, query_dtype),
        "key_cache": kv_cache[:, 0],
        "value_cache": kv_cache[:, 1],
        "block_table": torch.tensor([[1, 0], [3, 2]], device=device),
        "seq_lens": torch.tensor([13, 4], device=device),
        "kv_cache_dtype": dtype,
        "k_scale": one,
        "v_scale": one,
    }


EACH_QUERY = pytest.mark.parametrize("query_dtype", [torch.float32, torch.bfloat16], ids=str)
"""Of which the second is one that kernels serve."""


@EACH_QUERY
@pytest.mark.parametrize("dtype", ["auto", "nvfp4"])
@pytest.mark.parametrize(
    "options", [{}, {"sliding_window": 5, "logits_soft_cap": 3.0, "sinks": torch.ones(4)}], ids=len
)
def test_torchs_opcheck_accepts_the_operation(options, dtype, query_dtype, device):
    options = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    given = arguments(device, dtype, query_dtype)
    torch.library.opcheck(torch.ops.kvjax.paged_attention.default, tuple(given.values()), options)
    rows = given["query"][:, None].expand(2, 3, 4, 64)
    options["tree_mask"] = torch.eye(3, dtype=torch.bool, device=device)
    torch.library.opcheck(torch.ops.kvjax.paged_attention.default, (rows, *[*given.values()][1:]), options)


@pytest.mark.parametrize(
    "case",
    [
        Case("nvfp4", lengths="mixed", q_len=2, sinks=True),
        Case("bfloat16", lengths=(700, 0, 2900, 513), num_kv_heads=1, group=3, window=600),
    ],
    ids=str,
)
def test_batch_invariant_results_have_the_same_bits_alone_and_in_a_batch(case, attend):
    invariant = functools.partial(attend, batch_invariant=True)
    suite.check_alone(case, invariant, sequences=range(len(case.seq_lens)))
    problem = suite.build(case)
    suite.assert_right(problem, *problem.run(invariant))


def test_batch_invariance_is_refused_where_no_kernel_serves(recorder):
    call = arguments(query_dtype=torch.float32)
    with pytest.raises(UnsupportedError, match=r"got batch_invariant=True for a query of torch.float32 and a cache of"):
        kvjax_torch.paged_attention(**call, batch_invariant=True)


def test_parts_of_a_batch_invariant_call_have_room(recorder):
    """The workspace grows with the sequences and with the table, up to the most parts that a sequence has."""
    sizes = []
    for num_seqs, max_blocks in ((2, 4), (4, 4), (2, 400), (2, 100_000)):
        call = arguments(query_dtype=torch.bfloat16)
        call["query"] = call["query"].repeat(num_seqs // 2, 1, 1)
        call["block_table"], call["seq_lens"] = torch.zeros(num_seqs, max_blocks), torch.zeros(num_seqs)
        call["block_table"], call["seq_lens"] = call["block_table"].int(), call["seq_lens"].int()
        kvjax_torch.paged_attention(**call, batch_invariant=True)
        decode, merge = recorder[-2:]
        assert decode.tensors[-3:] == merge.tensors[-5:-2]
        sizes.append(decode.tensors[-3].numel() // (4 * 64))
    one, two, wider, widest = sizes
    assert two == 2 * one
    assert one < wider < widest == 2 * 64


def test_a_batch_invariant_call_with_too_large_a_workspace_is_refused_before_kernels_are_compiled(
    monkeypatch, recorder
):
    monkeypatch.setattr(running, "launcher", lambda kernel, device: pytest.fail("a kernel is compiled"))
    call = arguments(query_dtype=torch.bfloat16)
    call["query"] = torch.zeros(1, 4, 64, dtype=torch.bfloat16).expand(131072, -1, -1)
    call["block_table"] = torch.zeros(1, 4096, dtype=torch.int32).expand(131072, -1)
    call["seq_lens"] = torch.zeros(131072, dtype=torch.int32)
    with pytest.raises(UnsupportedError, match=r"its workspace is indexed in int32; got 131072 sequences"):
        kvjax_torch.paged_attention(**call, batch_invariant=True)
    assert recorder == []


def test_kernels_are_launched_for_the_multiprocessors_of_the_device(monkeypatch):
    shared = {"shared_memory_per_block_optin": 99 * 1024}
    properties = types.SimpleNamespace(multi_processor_count=148, major=10, minor=0, **shared)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    b200 = torch.device("cuda", 77)
    assert choosing.target_of(b200) == kernels.Target(148, (10, 0), 99 * 1024)
    query, *caches, table, lengths, dtype, k_scale, v_scale = arguments(query_dtype=torch.bfloat16).values()
    read = ReadTensors(*caches, table, lengths, k_scale, v_scale)
    plan = attention_plan(query, read, Encoding(dtype), SoftmaxOptions())
    devices = b200, torch.device("cpu")
    places = attending.PagePlaces((16, 16))
    sizes = [attending.attention_kernels(plan, places, device, 1, 4).workspace[0] for device in devices]
    assert sizes == [2 * blocks * plan.num_heads * 64 for blocks in (148, 132)]


@EACH_QUERY
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_code_attends_as_eager_code_does(query_dtype, device):
    torch._dynamo.reset()

    def layer(given: dict[str, Any]) -> Any:
        return kvjax_torch.paged_attention(**given, sliding_window=5, sm_scale=0.5, return_lse=True)

    given = arguments(device, query_dtype=query_dtype)
    for got, eager in zip(torch.compile(layer, backend="aot_eager", fullgraph=True)(given), layer(given), strict=True):
        torch.testing.assert_close(got, eager)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"query": torch.zeros(2, 64)}, KVCacheValueError, "query: got 2 dimensions, expected [num_seqs, num_heads, h"),
        (
            {"query": torch.zeros(2, 4, 32)},
            KVCacheValueError,
            "query: got shape (2, 4, 32), expected num_seqs=2 and hea",
        ),
        (
            {"query": torch.zeros(3, 4, 64)},
            KVCacheValueError,
            "query: got shape (3, 4, 64), expected num_seqs=2 and hea",
        ),
        (
            {"query": torch.zeros(2, 3, 64)},
            KVCacheValueError,
            "query: got num_heads=3, expected a multiple of num_kv_he",
        ),
        (
            {"query": torch.zeros(2, 4, 64).int()},
            KVCacheTypeError,
            "query: got dtype torch.int32, expected torch.float32",
        ),
        (
            {"query": torch.zeros(2, 4, 64, requires_grad=True)},
            KVCacheTypeError,
            "query: got requires_grad=True, but at",
        ),
        ({"query": np.zeros((2, 4, 64))}, KVCacheTypeError, "query: got a ndarray, expected a torch.Tensor"),
        ({"sinks": torch.zeros(3)}, KVCacheValueError, "sinks: got shape (3,), expected [num_heads=4]"),
        ({"sinks": torch.zeros(4).half()}, KVCacheTypeError, "sinks: got dtype torch.float16, expected torch.float32"),
        ({"sinks": [0.0] * 4}, KVCacheTypeError, "sinks: got a list, expected a torch.Tensor"),
        (
            {"tree_mask": torch.ones(2, 2, dtype=torch.bool)},
            KVCacheValueError,
            "tree_mask: got shape (2, 2), expected [num_seqs=2, q_len=1, q_len=1], or one for all sequences",
        ),
        (
            {"tree_mask": torch.ones(3, 1, 1, dtype=torch.bool)},
            KVCacheValueError,
            "tree_mask: got shape (3, 1, 1), expected [num_seqs=2, q_len=1, q_len=1]",
        ),
        ({"tree_mask": torch.ones(1, dtype=torch.bool)}, KVCacheValueError, "tree_mask: got shape (1,), expected [num"),
        ({"tree_mask": torch.ones(1, 1)}, KVCacheTypeError, "tree_mask: got dtype torch.float32, expected torch.bool"),
        ({"tree_mask": np.ones((1, 1), bool)}, KVCacheTypeError, "tree_mask: got a ndarray, expected a torch.Tensor"),
        ({"sliding_window": 0}, KVCacheValueError, "sliding_window: got 0, expected a positive int or None"),
        ({"sliding_window": 2.0}, KVCacheTypeError, "sliding_window: got 2.0 of type float, expected an int or None"),
        (
            {"sm_scale": float("nan")},
            KVCacheValueError,
            "sm_scale: got nan, expected a number that is finite in float32",
        ),
        ({"sm_scale": 10**400}, KVCacheValueError, "sm_scale: got 1000"),
        ({"sm_scale": "1"}, KVCacheTypeError, "sm_scale: got '1' of type str, expected a float or None"),
        ({"logits_soft_cap": -1}, KVCacheValueError, "logits_soft_cap: got -1, expected a positive number or None"),
        (
            {"logits_soft_cap": True},
            KVCacheTypeError,
            "logits_soft_cap: got True of type bool, expected a float or None",
        ),
        ({"seq_lens": torch.zeros(3).int()}, KVCacheValueError, "seq_lens: got shape (3,), expected [num_seqs=2]"),
        ({"return_lse": "no"}, KVCacheTypeError, "return_lse: got 'no' of type str, expected a bool"),
    ],
)
def test_invalid_arguments_are_refused(change, error, message):
    with pytest.raises(error) as raised:
        kvjax_torch.paged_attention(**arguments() | change)
    assert str(raised.value).startswith(message)


class Interpreter:
    """In place of what launches kernels for a call: each is interpreted, on the memory of CPU tensors."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[running.Call] = []
        self.compiled: list[kernels.AnyCount] = []
        monkeypatch.setattr(host, "attend", reads.attend)
        monkeypatch.setattr(running, "check_capability", lambda device: None)
        monkeypatch.setattr(running, "launcher", self.launcher)
        monkeypatch.setattr(running, "run", self.run)
        monkeypatch.setattr(running, "_compile_once", running._compile_once.__wrapped__)
        monkeypatch.setattr(loading, "compile_ahead", lambda kernels, device: None)

    def launcher(self, kernel: kernels.AnyCount, device: torch.device) -> object:
        self.compiled += [] if kernel in self.compiled else [kernel]
        return self

    def run(self, call: running.Call) -> None:
        assert call.kernel in self.compiled
        self.calls.append(call)
        arrays = [memory(tensor, each.array) for tensor, each in zip(call.tensors, call.kernel.arguments, strict=True)]
        results = call.kernel.with_counts(call.counts, call.amount, *arrays)
        for index, result in zip(call.kernel.written, results, strict=True):
            call.tensors[index].view(-1)[:] = from_numpy(np.array(result))


def memory(tensor: torch.Tensor, form: Any) -> np.ndarray:
    """What lies from a tensor's first element on, in rows as a kernel sees them, the last filled up."""
    size = tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset()
    flat = to_numpy(tensor.as_strided((size,), (1,)), numpy_dtype(tensor.dtype)).view(form.dtype)
    row = int(np.prod(form.shape[1:]))
    return np.pad(flat, (0, -flat.size % row)).reshape(-1, *form.shape[1:])


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Interpreter]:
    attending.attention_kernels.cache_clear()  # of other configurations
    monkeypatch.setattr(choice, "MAX_TILES", 2)  # several, and no more than that
    with interpret_mode():
        yield Interpreter(monkeypatch)
    attending.attention_kernels.cache_clear()


INTERPRETED = [
    (Case("nvfp4", lengths=(20, 0), num_kv_heads=1, window=19, sinks=True, cap=5.0), "one_allocation"),
    (Case("fp8_e4m3", lengths=(37, 3), layout="HND", scales="per_head", q_len=2), "padded_pages"),
    (Case("bfloat16", "float16", lengths=(17, 2), block_size=8, head_size_v=32), "offset"),
    (Case("nvfp4", lengths=(37,), v_scale_layout="swizzled", num_kv_heads=1), "two_tensors"),
    pytest.param(
        Case("float16", lengths=(18,), num_kv_heads=1, group=17, q_len=2, sinks=True),
        "one_allocation",
        marks=pytest.mark.nightly,
    ),
    pytest.param(
        Case("fp8_e5m2", lengths=(9, 4), num_kv_heads=1, group=5, q_len=4, window=3),
        "one_allocation",
        marks=pytest.mark.nightly,
    ),
    (Case("fp8_e4m3", lengths=(37, 3), num_kv_heads=4, block_size=16, scales="per_head"), "beside"),
    pytest.param(
        Case("bfloat16", lengths=(20, 0), layout="HND", num_kv_heads=2, block_size=16),
        "beside",
        marks=pytest.mark.nightly,
    ),
    pytest.param(
        Case("float16", lengths=(50,), num_kv_heads=4, block_size=32, window=20), "beside", marks=pytest.mark.nightly
    ),
    (Case("bfloat16", lengths=(17, 2), block_size=16, head_size_v=32), "one_allocation"),
    (Case("fp8_e4m3", lengths=(20,), block_size=8), "beside"),
    pytest.param(
        Case("bfloat16", lengths=(37, 3), num_kv_heads=1, group=5, q_len=4, window=3, tree=True),
        "one_allocation",
        marks=pytest.mark.nightly,
    ),
    (Case("nvfp4", lengths=(20, 9), num_kv_heads=1, q_len=4, sinks=True, tree=True), "one_allocation"),
]


@pytest.mark.full
@pytest.mark.parametrize(("case", "form"), INTERPRETED, ids=str)
def test_interpreted_kernels_with_arguments_of_a_launch_match_float64(case, form, interpreter):
    problem = suite.build(case)
    suite.assert_right(problem, *problem.run(attend_on("cpu", form=form)))
    parts = {(17, 2): 3, (5, 4): 2}.get((case.group, case.q_len), 1)
    assert len(interpreter.calls) == 2 * parts


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("form", ["beside", "one_allocation", "two_tensors"])
@pytest.mark.parametrize("dtype", ["bfloat16", "fp8_e4m3"])
def test_views_of_one_allocation_are_read_as_one_memory(dtype, form, layout, recorder):
    """A tile of pages of 16 tokens takes as few bulk copies as a page of kvjax's own."""
    case = Case(dtype, lengths=(37, 3), layout=layout, num_kv_heads=8, head_size=128, block_size=16)
    query, cache, *rest = suite.build(case).args
    one = np.float32(1)
    call = given("cpu", query, cache, *rest, form=form, k_scale=one, v_scale=one, sinks=None)
    kvjax_torch.paged_attention(**call)
    problem = recorder[0].kernel.origin.arguments["problem"]
    assert problem.one_memory == (form != "two_tensors")
    plan = StageLayout.of(problem.spec, problem.memory, 8, 1, one_memory=problem.one_memory)
    assert len(plan.chunks) == {"NHD": 8, "HND": 1}[layout] + (form == "two_tensors")


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> list[running.Call]:
    """What would be run; nothing is."""
    ran: list[running.Call] = []
    monkeypatch.setattr(host, "attend", reads.attend)
    monkeypatch.setattr(running, "check_capability", lambda device: None)
    monkeypatch.setattr(running, "launcher", lambda kernel, device: object())
    monkeypatch.setattr(running, "run", ran.append)
    monkeypatch.setattr(running, "_compile_once", running._compile_once.__wrapped__)
    monkeypatch.setattr(loading, "compile_ahead", lambda kernels, device: None)
    return ran


def addresses(*tensors: torch.Tensor) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


def test_what_a_kernel_can_read_where_it_lies_is_not_copied(recorder):
    problem = suite.build(Case("nvfp4", lengths=(40, 3, 17), q_len=2, sinks=True))
    call = given("cpu", *problem.args, **problem.options, form="padded_pages")
    call["block_table"], call["seq_lens"] = call["block_table"].int(), call["seq_lens"].int()
    out, lse = kvjax_torch.paged_attention(**call)
    decode, merge = recorder
    table, query = call["block_table"], call["query"]
    assert decode.counts == (3, 4, call["key_cache"].shape[0], 7, query.stride(0), query.stride(1))
    assert table.stride() == (7, 1)
    assert query.stride(1) == 2 * query.shape[2] * query.shape[3]
    assert merge.counts == (4,)
    assert merge.amount == 3
    results, between = decode.tensors[-5:-3], decode.tensors[-3:]
    names = "seq_lens", "block_table", "query", "key_cache", "value_cache", "k_scale", "v_scale", "sinks"
    assert addresses(*decode.tensors) == addresses(*(call[name] for name in names), *results, *between)
    assert addresses(*merge.tensors) == addresses(call["seq_lens"], call["sinks"], *between, *results)
    assert addresses(*results) == addresses(out, lse)
    assert between[2].numel() == 6
    assert between[0].numel() == between[1].numel() // 3 * problem.case.head_size


@pytest.mark.parametrize(
    "query",
    [
        torch.empty(3, 2, 64, 4).transpose(2, 3),
        torch.empty(3, 2, 4, 128)[..., ::2],
        torch.empty(3, 2, 4, 80)[..., :64],
    ],
    ids=["heads last", "every second", "gaps"],
)
def test_a_query_whose_heads_are_no_run_is_copied(query, recorder):
    problem = suite.build(Case("nvfp4", lengths=(40, 3, 17), q_len=2))
    call = given("cpu", *problem.args, **problem.options) | {"query": query.bfloat16()}
    kvjax_torch.paged_attention(**call)
    decode, _ = recorder
    assert decode.tensors[2].is_contiguous()
    assert torch.equal(decode.tensors[2].nan_to_num(), query.bfloat16().nan_to_num())
    assert decode.counts[-2:] == (2 * 4 * 64, 4 * 64)


def test_the_kernels_are_the_same_for_every_batch(recorder):
    """But for the merge: of few sequences more warps take each row."""
    for num_seqs in (1, 3, 4, 32, 33, 200):
        problem = suite.build(Case("nvfp4", lengths=(17,) * num_seqs))
        kvjax_torch.paged_attention(**given("cpu", *problem.args, **problem.options))
    decodes, merges = recorder[::2], recorder[1::2]
    assert len({call.kernel for call in decodes}) == 1
    assert [merges[i].kernel for i in (0, 0, 2, 2, 4, 4)] == [call.kernel for call in merges]
    assert len({call.kernel for call in merges}) == 3


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_mean_that_float32_holds_does_not_overflow(dtype, device):
    def run(*args: Any) -> Any:
        return attend_on(device)(*args, k_scale=np.float32(1), v_scale=np.float32(1), sinks=None)

    suite.check_large_values(run, dtype, 40)


@pytest.mark.parametrize("case", [Case(query_dtype="float32"), Case(head_size=24)], ids=str)
def test_where_no_kernel_attends_it_is_gathered(case, recorder, monkeypatch):
    monkeypatch.setattr(reads, "_attend_to_gathered", lambda plan, query, *arrays: (query, query[..., 0]))
    problem = suite.build(case)
    kvjax_torch.paged_attention(**given("cpu", *problem.args, **problem.options))
    assert not recorder


ON_GPU = pytest.mark.gpu
DTYPES = ("float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2", "nvfp4", "int8_per_token_head")


def on_gpu(case: Case, **how: Any) -> dict[str, Any]:
    problem = suite.build(case)
    return given("cuda", *problem.args, **problem.options, **how)


@ON_GPU
@matrix({"form": FORMS, "layout": ["NHD", "HND"], "dtype": DTYPES})
def test_pages_may_lie_anywhere(form, layout, dtype):
    suite.check(Case(dtype, layout=layout, lengths="mixed", head_size=128, sinks=True), attend_on("cuda", form=form))


@ON_GPU
@pytest.mark.parametrize(("dtype", "before"), [("bfloat16", 2), ("fp8_e4m3", 1), ("nvfp4", 3), ("nvfp4", 8)])
def test_pages_may_begin_anywhere(dtype, before):
    suite.check(Case(dtype, lengths="mixed", head_size=80), attend_on("cuda", before=before))


@ON_GPU
@matrix({"dtype": DTYPES}, few={"dtype": ["bfloat16", "fp8_e4m3", "nvfp4"]})
def test_one_compilation_serves_every_batch(dtype):
    case = Case(dtype, head_size=96, num_kv_heads=3, group=4, window=700)
    before = launch.num_compilations()
    suite.check(dataclasses.replace(case, lengths=(17,)), attend_on("cuda"))
    compilations = launch.num_compilations()
    assert compilations - before <= 1 + len(kernels.ATTENTION_BATCHES)  # the decode kernel and a merge for each
    for lengths in ((1, 0), (5000,), (900, 17, 3), (33,) * 32, (33,) * 33, (*range(300),)):
        suite.check(dataclasses.replace(case, lengths=lengths), attend_on("cuda"))
    assert launch.num_compilations() == compilations


@ON_GPU
@matrix({"q_len": [1, 3, 8], "dtype": ["bfloat16", "nvfp4"], "tree": [False, True]})
def test_a_graph_replays_with_what_is_then_in_the_buffers(dtype, q_len, tree):
    """Other lengths, tables, trees and queries; of eight query tokens the kernels run more than once."""
    lengths = 1328, 17, 400, 1, 64
    call = on_gpu(Case(dtype, head_size=128, group=4, q_len=q_len, lengths=lengths, sinks=True, tree=tree))
    kvjax_torch.paged_attention(**call)
    compilations = launch.num_compilations()
    graph = torch.cuda.CUDAGraph()
    with capture(graph):
        results = kvjax_torch.paged_attention(**call)
    tables, longest = call["block_table"].clone(), torch.tensor(lengths, device="cuda")
    for step in range(4):
        call["block_table"].copy_(tables.roll(step, 0))
        call["seq_lens"].copy_(longest.roll(step) // (step + 1))
        call["query"].normal_()
        if tree:
            call["tree_mask"].copy_(call["tree_mask"].roll(1, 0))
        expected = kvjax_torch.paged_attention(**call)
        for result in results:
            result.fill_(float("nan"))
        graph.replay()
        assert_same(results, expected)
    assert launch.num_compilations() == compilations


@ON_GPU
@pytest.mark.parametrize(("dtype", "q_len"), [("bfloat16", 1), ("nvfp4", 8)])
@pytest.mark.parametrize("new_stream", [torch.cuda.default_stream, torch.cuda.Stream], ids=["default", "side"])
def test_calls_wait_for_their_stream_and_for_nothing_else(new_stream, dtype, q_len):
    call = on_gpu(Case(dtype, group=4, q_len=q_len, lengths=(1328, 17, 400)))
    assert_waits_for_its_stream_alone(kvjax_torch.paged_attention, call, new_stream(), repeats=5)


@ON_GPU
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # which it says of itself
@pytest.mark.parametrize("q_len", [1, 8])
@pytest.mark.parametrize("tree", [False, True])
def test_torch_sees_nothing_that_waits(q_len, tree):
    call = on_gpu(Case("nvfp4", group=4, q_len=q_len, lengths="mixed", tree=tree, window=100))
    assert_torch_sees_no_wait(kvjax_torch.paged_attention, call)


@ON_GPU
def test_the_workspace_goes_back_to_torch():
    """And takes no more with longer sequences."""
    call = on_gpu(Case("nvfp4", lengths=(1328, 17)))
    kvjax_torch.paged_attention(**call)
    torch.cuda.synchronize()
    gc.collect()
    before = torch.cuda.memory_allocated()
    results = kvjax_torch.paged_attention(**call)
    sizes = sum(-(-each.untyped_storage().nbytes() // 512) * 512 for each in results)
    assert torch.cuda.memory_allocated() == before + sizes


@ON_GPU
def test_threads_may_attend_on_streams_of_their_own():
    cases = [Case("nvfp4", lengths="mixed"), Case("bfloat16", lengths=(5000, 3), q_len=2), Case("fp8_e4m3", group=3)]
    given_calls = [on_gpu(case) for case in cases]
    expected = [kvjax_torch.paged_attention(**call) for call in given_calls]
    torch.cuda.synchronize()
    failures: list[BaseException] = []

    def serve(call: dict[str, Any], wanted: tuple[torch.Tensor, ...]) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(50):
                    results = kvjax_torch.paged_attention(**call)
                    torch.cuda.current_stream().synchronize()
                    assert_same(results, wanted)
        except BaseException as error:  # a thread's failures are the test's
            failures.append(error)

    threads = [threading.Thread(target=serve, args=each) for each in zip(given_calls, expected, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.parametrize(
    ("start", "strides", "is_read_there"),
    [
        (0, (96, 32), True),
        (8, (96, 32), True),  # 16 bytes on
        (0, (136, 40), True),  # tokens apart
        (1, (96, 32), False),
        (4, (96, 32), False),
        (0, (120, 36), False),
        (0, (100, 32), False),
        (0, (0, 32), True),  # one sequence's query for all
    ],
)
def test_the_kernel_reads_a_query_where_it_is_unless_its_tokens_are_unaligned(start, strides, is_read_there):
    memory = torch.arange(512, dtype=torch.float32).bfloat16()
    query = torch.as_strided(memory, (2, 3, 2, 16), (*strides, 16, 1), start)
    read = attending._query(query)
    assert torch.equal(read, query)
    assert (read.data_ptr() == query.data_ptr()) is is_read_there
    assert not read.data_ptr() % 16


@ON_GPU
@matrix({"q_len": [1, 8], "dtype": DTYPES})
def test_the_result_is_that_of_jax(q_len, dtype):
    """But for rounding: jax knows how long tables are when it compiles, and may divide the work otherwise."""
    problem = suite.build(Case(dtype, head_size=128, group=4, q_len=q_len, lengths=(1328, 17, 0, 5000), sinks=True))
    in_jax = problem.run(functools.partial(kvjax.paged_attention, return_lse=True, implementation="mosaic"))
    for got, wanted in zip(problem.run(attend_on("cuda")), in_jax, strict=True):
        got, wanted = (np.asarray(x, np.float32) for x in (got, wanted))
        np.testing.assert_allclose(got, wanted, rtol=2**-7, atol=2**-9 * np.abs(wanted[np.isfinite(wanted)]).max())
