"""The operations as torch's compiler sees them: what they mutate, what they return, and that compiled code is right."""

from __future__ import annotations

import os
import shutil
import sysconfig
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.utils import _triton  # noqa: E402

import kvjax_torch  # noqa: E402

CACHES = {
    "auto": ((4, 2, 8, 2, 64), torch.bfloat16),
    "fp8": ((4, 2, 8, 2, 64), torch.float8_e4m3fn),
    "fp8_e5m2": ((4, 2, 8, 2, 64), torch.uint8),
    "nvfp4": ((4, 2, 8, 2, 36), torch.uint8),
}


@pytest.fixture(autouse=True, scope="module")
def import_the_compiler() -> None:
    """With the warnings of its own imports, which are not what the first test is about."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch._dynamo.reset()


def new_cache(dtype: str, device: str) -> torch.Tensor:
    shape, element = CACHES[dtype]
    stored = torch.uint8 if element is not torch.bfloat16 else element
    return torch.zeros(shape, dtype=stored, device=device).view(element)


def write_arguments(dtype: str, device: str, num_tokens: int = 6) -> tuple:
    kv_cache = new_cache(dtype, device)
    query_key_value = torch.randn(num_tokens, 3, 2, 64, generator=torch.Generator().manual_seed(0)).to(device)
    key, value = query_key_value[:, 1], query_key_value[:, 2]
    slots = torch.randperm(32, generator=torch.Generator().manual_seed(1))[:num_tokens].to(device)
    one = torch.ones((), device=device)
    return key, value, kv_cache[:, 0], kv_cache[:, 1], slots, dtype, one, 2 * one


def read_arguments(dtype: str, device: str) -> tuple:
    kv_cache = new_cache(dtype, device)
    one = torch.ones(1, device=device)
    table, lengths = torch.tensor([[1, 0], [3, 2]], device=device), torch.tensor([13, 4], device=device)
    return kv_cache[:, 0], kv_cache[:, 1], table, lengths, dtype, one, one


@pytest.mark.parametrize("dtype", CACHES)
@pytest.mark.parametrize("operation", ["reshape_and_cache_flash", "gather_kv"])
def test_torchs_opcheck_accepts_the_operation(operation: str, dtype: str, device: str):
    arguments = (write_arguments if operation == "reshape_and_cache_flash" else read_arguments)(dtype, device)
    checks = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if CACHES[dtype][1] is torch.float8_e4m3fn:
        checks.remove("test_schema")  # it multiplies the arguments, and torch multiplies no float8
    torch.library.opcheck(getattr(torch.ops.kvjax, operation).default, arguments, test_utils=checks)


def test_the_schema_declares_what_is_mutated():
    mutated = [
        argument.name
        for argument in torch.ops.kvjax.reshape_and_cache_flash.default._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    assert mutated == ["key_cache", "value_cache"]
    assert not torch.ops.kvjax.gather_kv.default._schema.is_mutable


def layer(hidden, weight, kv_cache, slots, table, lengths, dtype):
    """Projects tokens, stores them, reads the sequences back and attends with the last token's query."""
    query, key, value = (hidden @ weight).view(-1, 3, 2, 64).unbind(1)
    halves = kv_cache[:, 0], kv_cache[:, 1]
    kvjax_torch.reshape_and_cache_flash(key, value, *halves, slots, dtype, 0.5, 0.25)
    keys, values = kvjax_torch.gather_kv(*halves, table, lengths, dtype, 0.5, 0.25, dtype=torch.float32)
    logits = torch.einsum("hd,sthd->sht", query[-1], keys)
    return torch.einsum("sht,sthd->shd", logits.softmax(-1), values)


def layer_arguments(num_tokens: int, dtype: str, device: str) -> tuple:
    """Of small multiples of powers of two: what is stored of their products is the same in whatever order they add."""
    generator = torch.Generator().manual_seed(num_tokens)
    hidden = torch.randint(-4, 5, (num_tokens, 32), generator=generator).float()
    weight = torch.randint(-4, 5, (32, 3 * 2 * 64), generator=torch.Generator().manual_seed(0)) / 64
    slots = torch.randperm(32, generator=generator)[:num_tokens]
    indices = slots, torch.tensor([[1, 0], [3, 2]]), torch.tensor([13, 16])
    return hidden.to(device), weight.to(device), new_cache(dtype, device), *(x.to(device) for x in indices), dtype


def recording(graphs: list[torch.fx.GraphModule], backend: str) -> Callable:
    """The backend, which keeps what it is given to compile."""

    def compile_graph(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable:
        graphs.append(graph)
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    return compile_graph


def skip_where_inductor_cannot_compile_for(device: str) -> None:
    if device == "cpu":
        if not shutil.which("g++"):
            pytest.skip("inductor needs a C++ compiler")
        return
    if not _triton.has_triton():
        pytest.skip("inductor needs triton, with a driver for this GPU")
    compilers = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    if not any(map(shutil.which, compilers)) or not Path(sysconfig.get_path("include"), "Python.h").exists():
        pytest.skip("triton needs a C compiler and Python.h")


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        ("aot_eager", "nvfp4"),
        *(pytest.param(*case, marks=pytest.mark.full) for case in [("aot_eager", "auto"), ("inductor", "nvfp4")]),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of inductor's own imports
@pytest.mark.filterwarnings("ignore::UserWarning")  # of what would be faster on a GPU
def test_compiled_code_writes_and_reads_what_eager_code_does(backend: str, dtype: str, device: str):
    if backend == "inductor":
        skip_where_inductor_cannot_compile_for(device)
    torch._dynamo.reset()
    graphs = []
    compiled = torch.compile(layer, backend=recording(graphs, backend), fullgraph=True)
    with torch.no_grad():
        eager, traced = layer_arguments(6, dtype, device), layer_arguments(6, dtype, device)
        torch.testing.assert_close(compiled(*traced), layer(*eager), rtol=1e-4, atol=1e-4)
    assert traced[2].any()
    assert torch.equal(traced[2].view(torch.uint8), eager[2].view(torch.uint8))
    [graph] = graphs
    operations = torch.ops.kvjax.reshape_and_cache_flash.default, torch.ops.kvjax.gather_kv.default
    assert {node.target for node in graph.graph.nodes}.issuperset(operations)


def test_one_graph_serves_every_number_of_tokens(device: str):
    torch._dynamo.reset()
    graphs = []
    compiled = torch.compile(layer, backend=recording(graphs, "aot_eager"), fullgraph=True, dynamic=True)
    with torch.no_grad():
        for num_tokens in (6, 2, 17, 31):
            eager, traced = layer_arguments(num_tokens, "fp8", device), layer_arguments(num_tokens, "fp8", device)
            torch.testing.assert_close(compiled(*traced), layer(*eager))
            assert torch.equal(traced[2].view(torch.uint8), eager[2].view(torch.uint8))
    assert len(graphs) == 1


def test_a_gradient_is_refused_when_traced(device: str):
    torch._dynamo.reset()
    hidden, *rest = layer_arguments(6, "auto", device)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match=r"key: got requires_grad=True, but a write into a cache has no gradient"):
        compiled(hidden.requires_grad_(), *rest)


def test_meta_tensors_give_the_shapes_of_results():
    on_meta = [x.to("meta") if isinstance(x, torch.Tensor) else x for x in read_arguments("nvfp4", "cpu")]
    keys, values = torch.ops.kvjax.gather_kv(*on_meta)
    assert (keys.shape, keys.dtype, keys.device.type) == ((2, 16, 2, 64), torch.bfloat16, "meta")
    assert values.shape == keys.shape
    assert keys.is_contiguous()


def test_numpy_scales_are_compiled():
    """`load_kv_scales` and `calibrate` return them; Dynamo takes one for an array."""
    pages, scale = torch.randn(4, 2, 8, 2, 64).to(torch.float8_e4m3fn), np.float32(0.3)
    table, lens = torch.tensor([[1, 2]], dtype=torch.int32), torch.tensor([9], dtype=torch.int32)

    def gather(pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return kvjax_torch.gather_kv(pages[:, 0], pages[:, 1], table, lens, "fp8", scale, scale)

    compiled = torch.compile(gather, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(pages), gather(pages), rtol=0, atol=0)
