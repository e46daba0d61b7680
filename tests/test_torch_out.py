"""Attention that stores its results in a tensor of the caller."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from support.torch_helpers import assert_same, capture  # noqa: E402
from support.torch_steps import use_stand_ins  # noqa: E402

import kvjax_torch  # noqa: E402
from kvjax import KVCacheTypeError, KVCacheValueError, UnsupportedError  # noqa: E402
from kvjax_torch.cuda import reads  # noqa: E402
from kvjax_torch.eager import host  # noqa: E402
from kvjax_torch.launch import running  # noqa: E402

HEADS, SIZE, SIZE_V = 4, 32, 16


def arguments(device: str = "cpu", dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(4, 8, 2, size, generator=generator).to(device, dtype) for size in (SIZE, SIZE_V))
    return {
        "query": torch.randn(3, HEADS, SIZE, generator=generator).to(device, dtype),
        "key_cache": keys,
        "value_cache": values,
        "block_table": torch.tensor([[1, 0], [3, 2], [0, 0]], device=device),
        "seq_lens": torch.tensor([13, 4, 0], device=device),
        "kv_cache_dtype": "auto",
        "k_scale": torch.ones((), device=device),
        "v_scale": torch.ones((), device=device),
    }


def call_of(operation: str, device: str = "cpu", dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    call = arguments(device, dtype)
    if operation == "ragged_paged_attention":
        call["cu_q_lens"] = torch.tensor([0, 2, 3, 3], device=device)
    if operation == "several tokens":
        call["query"] = call["query"][:, None].repeat(1, 2, 1, 1)
    return call


def run(operation: str, call: dict[str, Any], **options: Any) -> Any:
    name = "paged_attention" if operation == "several tokens" else operation
    return getattr(kvjax_torch, name)(**call, **options)


def poisoned(call: dict[str, Any]) -> torch.Tensor:
    query = call["query"]
    return torch.full((*query.shape[:-1], SIZE_V), torch.nan, dtype=query.dtype, device=query.device)


EACH_OPERATION = pytest.mark.parametrize(
    "operation", ["paged_attention", "several tokens", "ragged_paged_attention"], ids=lambda name: name.split("_")[0]
)
EACH_DTYPE = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@EACH_OPERATION
@EACH_DTYPE
def test_results_are_stored_there_and_returned(operation: str, dtype: torch.dtype, device: str):
    call = call_of(operation, device, dtype)
    expected = run(operation, call, return_lse=True)
    memory = torch.full((5, *poisoned(call).shape[1:]), 7, dtype=dtype, device=device)
    into = memory[1:4]
    out, lse = run(operation, call, out=into, return_lse=True)
    assert out is into
    assert_same((into, lse), expected)
    assert (memory[[0, 4]] == 7).all()
    assert run(operation, call, out=into.fill_(torch.nan)) is into
    assert_same([into], expected[:1])


def test_results_of_a_ragged_call_for_a_gpu_are_stored_there(monkeypatch):
    call = call_of("ragged_paged_attention", dtype=torch.float32)
    expected = kvjax_torch.ragged_paged_attention(**call)
    use_stand_ins(monkeypatch)
    out = poisoned(call)
    assert kvjax_torch.ragged_paged_attention(**call, out=out) is out
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("num_heads", [4, 34 * 2])
def test_kernels_store_there_without_a_copy(num_heads: int, monkeypatch):
    """Where more heads come than one run takes, their results are copied there, from each run."""
    ran: list[running.Call] = []
    monkeypatch.setattr(host, "attend", reads.attend)
    monkeypatch.setattr(running, "check_capability", lambda device: None)
    monkeypatch.setattr(reads, "_compile_parts", lambda parts, tensors: None)
    monkeypatch.setattr(running, "run", ran.append)
    call = arguments()
    call["query"] = call["query"].repeat(1, num_heads // HEADS, 1)
    out = poisoned(call)
    assert kvjax_torch.paged_attention(**call, out=out) is out
    stored = [each.tensors[-2].data_ptr() for each in ran if each.kernel is ran[-1].kernel]
    assert (stored == [out.data_ptr()]) == (len(ran) == 2)
    assert (len(ran) == 2) == (num_heads == 4)


QUERY = torch.ones(3, HEADS, SIZE, dtype=torch.bfloat16)
SHAPE = (3, HEADS, SIZE_V)
WRONG = {
    "list": ([], KVCacheTypeError, "out: got a list, expected a torch.Tensor"),
    "dtype": (torch.zeros(SHAPE), KVCacheTypeError, "out: got dtype torch.float32, expected torch.bfloat16 as query"),
    "shape": (QUERY.clone(), KVCacheValueError, "out: got shape (3, 4, 32), expected (3, 4, 16)"),
    "strides": (
        QUERY[..., :SIZE_V],
        KVCacheValueError,
        "out: got strides (128, 32, 1) for shape (3, 4, 16), expected a contiguous tensor",
    ),
    "device": (QUERY[..., :SIZE_V].to("meta"), KVCacheValueError, "out: got device meta, expected cpu"),
    "gradient": (
        torch.zeros(SHAPE, dtype=torch.bfloat16, requires_grad=True),
        KVCacheTypeError,
        "out: got requires_grad=True, but attention over a cache has no gradient",
    ),
}


@pytest.mark.parametrize("operation", ["paged_attention", "ragged_paged_attention"])
@pytest.mark.parametrize("case", WRONG)
def test_memory_that_does_not_fit_is_refused(case: str, operation: str):
    out, error, message = WRONG[case]
    with pytest.raises(error) as raised:
        run(operation, call_of(operation), out=out)
    assert message in str(raised.value)


@EACH_OPERATION
def test_memory_of_an_argument_is_refused_and_not_written(operation: str):
    call = call_of(operation, dtype=torch.float32)
    call["sinks"] = torch.zeros(HEADS)
    for name in ("query", "key_cache", "value_cache", "block_table", "seq_lens", "cu_q_lens", "k_scale", "sinks"):
        if name not in call:
            continue
        given = call[name]
        size = int(poisoned(call).numel())
        memory = torch.zeros(size + given.numel() * given.element_size() // 4 + 1)
        start = size - 1 if given.element_size() == 4 else size - 2
        shared = memory[start : start + given.numel() * given.element_size() // 4].view(given.dtype).view(given.shape)
        shared.copy_(given)
        before = memory.clone()
        with pytest.raises(KVCacheValueError, match=rf"out: got memory that overlaps that of {name}, expected memory"):
            run(operation, call | {name: shared}, out=memory[:size].view(poisoned(call).shape))
        assert_same([memory], [before])


def test_memory_beside_the_query_in_one_allocation_is_accepted():
    """As where a step has one buffer for projections and for results."""
    call = arguments(dtype=torch.float32)
    memory = torch.zeros(3 * HEADS * (SIZE + SIZE_V))
    query, out = memory[: 3 * HEADS * SIZE].view(3, HEADS, SIZE), memory[3 * HEADS * SIZE :].view(SHAPE)
    query.copy_(call["query"])
    kvjax_torch.paged_attention(**call | {"query": query}, out=out)
    assert_same([out], [kvjax_torch.paged_attention(**call)])


@pytest.mark.parametrize("operation", ["paged_attention", "ragged_paged_attention"])
def test_torchs_opcheck_accepts_the_operation(operation: str, device: str):
    call = call_of(operation, device)
    positional = [call.pop(name) for name in ("query", "key_cache", "value_cache", "block_table", "seq_lens")]
    positional += [call.pop("cu_q_lens")] if "cu_q_lens" in call else []
    out = torch.zeros(SHAPE, dtype=torch.bfloat16, device=device)
    into = getattr(torch.ops.kvjax, f"{operation}_out").default
    torch.library.opcheck(into, (out, *positional, *call.values()), {"sliding_window": 5})
    assert [each.name for each in into._schema.arguments if each.alias_info is not None] == ["out"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_code_writes_to_memory_of_the_caller(device: str):
    torch._dynamo.reset()

    def layer(call: dict[str, Any], buffer: torch.Tensor) -> Any:
        out, lse = kvjax_torch.paged_attention(**call, out=buffer, sliding_window=5, return_lse=True)
        return out + 1, lse

    call = arguments(device)
    buffers = poisoned(call), poisoned(call)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    assert_same(compiled(call, buffers[0]), layer(call, buffers[1]))
    assert_same(buffers[:1], buffers[1:])


@pytest.mark.gpu
@pytest.mark.parametrize("operation", ["paged_attention", "ragged_paged_attention"])
def test_a_graph_stores_there(operation: str):
    call = call_of(operation, "cuda")
    out = poisoned(call)
    expected = run(operation, call)
    run(operation, call, out=out)
    graph = torch.cuda.CUDAGraph()
    with capture(graph):
        run(operation, call, out=out)
    out.fill_(torch.nan)
    graph.replay()
    assert_same([out], [expected])


def test_what_no_kernel_serves_in_any_batch_is_refused_before_anything_is_stored(monkeypatch):
    monkeypatch.setattr(host, "attend", reads.attend)
    monkeypatch.setattr(running, "check_capability", lambda device: None)
    call = arguments(dtype=torch.float32)
    out = torch.full(SHAPE, 7.0)
    with pytest.raises(UnsupportedError, match=r"got batch_invariant=True for a query of torch\.float32"):
        kvjax_torch.paged_attention(**call, out=out, batch_invariant=True)
    assert (out == 7).all()
