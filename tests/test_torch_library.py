"""The operations as torch's compiler sees them: what they mutate, what they return, and that compiled code is right."""

from __future__ import annotations

import shutil

import pytest

torch = pytest.importorskip("torch")

import kvjax_torch  # noqa: E402

CACHES = {
    "auto": ((4, 2, 8, 2, 64), torch.bfloat16),
    "fp8": ((4, 2, 8, 2, 64), torch.float8_e4m3fn),
    "fp8_e5m2": ((4, 2, 8, 2, 64), torch.uint8),
    "nvfp4": ((4, 2, 8, 2, 36), torch.uint8),
}


def new_cache(dtype: str) -> torch.Tensor:
    shape, element = CACHES[dtype]
    return torch.zeros(shape, dtype=torch.uint8 if element is not torch.bfloat16 else element).view(element)


def write_arguments(dtype: str, num_tokens: int = 6) -> tuple:
    kv_cache = new_cache(dtype)
    query_key_value = torch.randn(num_tokens, 3, 2, 64, generator=torch.Generator().manual_seed(0))
    key, value = query_key_value[:, 1], query_key_value[:, 2]
    slots = torch.randperm(32, generator=torch.Generator().manual_seed(1))[:num_tokens]
    one = torch.ones(())
    return key, value, kv_cache[:, 0], kv_cache[:, 1], slots, dtype, one, 2 * one


def read_arguments(dtype: str) -> tuple:
    kv_cache = new_cache(dtype)
    one = torch.ones(1)
    table, lengths = torch.tensor([[1, 0], [3, 2]]), torch.tensor([13, 4])
    return kv_cache[:, 0], kv_cache[:, 1], table, lengths, dtype, one, one


@pytest.mark.parametrize("dtype", CACHES)
@pytest.mark.parametrize("operation", ["reshape_and_cache_flash", "gather_kv"])
def test_opcheck(operation: str, dtype: str):
    arguments = write_arguments(dtype) if operation == "reshape_and_cache_flash" else read_arguments(dtype)
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


def layer_arguments(num_tokens: int, dtype: str) -> tuple:
    generator = torch.Generator().manual_seed(num_tokens)
    hidden = torch.randn(num_tokens, 32, generator=generator)
    weight = torch.randn(32, 3 * 2 * 64, generator=torch.Generator().manual_seed(0))
    slots = torch.randperm(32, generator=generator)[:num_tokens]
    return hidden, weight, new_cache(dtype), slots, torch.tensor([[1, 0], [3, 2]]), torch.tensor([13, 16]), dtype


HAS_COMPILER = pytest.mark.skipif(not shutil.which("g++"), reason="inductor needs a C++ compiler")


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [("aot_eager", "auto"), ("aot_eager", "nvfp4"), pytest.param("inductor", "nvfp4", marks=HAS_COMPILER)],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of inductor's own imports
def test_compiled_code_writes_and_reads_what_eager_code_does(backend: str, dtype: str):
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    with torch.no_grad():
        eager, traced = layer_arguments(6, dtype), layer_arguments(6, dtype)
        torch.testing.assert_close(compiled(*traced), layer(*eager))
    assert traced[2].any()
    assert torch.equal(traced[2].view(torch.uint8), eager[2].view(torch.uint8))


def test_one_graph_serves_every_number_of_tokens():
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, backend=counter, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for num_tokens in (6, 2, 17, 31):
            eager, traced = layer_arguments(num_tokens, "fp8"), layer_arguments(num_tokens, "fp8")
            torch.testing.assert_close(compiled(*traced), layer(*eager))
            assert torch.equal(traced[2].view(torch.uint8), eager[2].view(torch.uint8))
    assert counter.frame_count == 1


def test_a_gradient_is_refused_when_traced():
    torch._dynamo.reset()
    hidden, *rest = layer_arguments(6, "auto")
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match=r"key: got requires_grad=True, but a write into a cache has no gradient"):
        compiled(hidden.requires_grad_(), *rest)


def test_shapes_on_the_meta_device():
    on_meta = [x.to("meta") if isinstance(x, torch.Tensor) else x for x in read_arguments("nvfp4")]
    keys, values = torch.ops.kvjax.gather_kv(*on_meta)
    assert (keys.shape, keys.dtype, keys.device.type) == ((2, 16, 2, 64), torch.bfloat16, "meta")
    assert values.shape == keys.shape
    assert keys.is_contiguous()
