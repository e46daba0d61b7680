"""`rope_and_cache` of torch's tensors: the queries and every byte of the cache are those of kvjax's own."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import reference
from support.any_count import BFLOAT16, page_memory, scale_memory
from support.gpu_compile import compile_for, why_not
from support.helpers import (
    FEW_DTYPES,
    INPUT_DTYPES,
    KERNEL_DTYPES,
    assert_same_bytes,
    each_case,
    kv_tokens,
    pairwise,
    simple_spec,
    tokens,
)

torch = pytest.importorskip("torch")

from support.interpreted_calls import run_interpreted  # noqa: E402
from support.torch_helpers import FORMS, capture, from_numpy, random_pages, to_numpy, torch_cache  # noqa: E402

import kvjax  # noqa: E402
import kvjax_torch  # noqa: E402
from kvjax import (  # noqa: E402
    STORED_KV_CACHE_DTYPES,
    KVCache,
    KVCacheDType,
    KVCacheTypeError,
    KVCacheValueError,
    binaries,
    kernels,
)
from kvjax_torch import launch  # noqa: E402
from kvjax_torch.arguments.plan import Encoding, RopeInputs, WriteTensors  # noqa: E402
from kvjax_torch.arguments.writes import rope_plan  # noqa: E402
from kvjax_torch.calls import writing  # noqa: E402
from kvjax_torch.eager import rotation  # noqa: E402

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SCALES = (0.37, 0.52)
AXES = {
    "dtype": [dtype.value for dtype in STORED_KV_CACHE_DTYPES],
    "input_dtype": list(INPUT_DTYPES),
    "table_dtype": list(INPUT_DTYPES),
    "is_neox": [True, False],
    "layout": ["NHD", "HND"],
    "form": FORMS,
    "rows": ["packed", "fused"],
    "heads": [(1, 1), (6, 2), (15, 3)],
    "head_size": [64, 80, 128],
    "head_size_v": [None, 32],
    "rotated": [1.0, 0.5, 0.25],
    "num_tokens": [0, 1, 2, 19],
    "slots": ["int32", "int64"],
    "positions": ["int32", "int64"],
}


def is_valid(case: dict[str, Any]) -> bool:
    return case["head_size_v"] is None or case["form"] != "two_tensors"


CASES = pairwise(AXES, is_valid)
KERNEL_AXES = AXES | {"input_dtype": ["float16", "bfloat16"], "num_tokens": [5], "heads": [(6, 2)], "form": ["offset"]}
KERNEL_CASES = pairwise(KERNEL_AXES | {"head_size": [64, 80], "head_size_v": [None]}, is_valid)


class Tokens:
    """The arguments of a call, in numpy and for torch, and the cache that it writes."""

    def __init__(self, case: dict[str, Any], device: str = "cpu", num_blocks: int = 4) -> None:
        num_heads, num_kv_heads = case["heads"]
        self.dtype, self.is_neox = case["dtype"], case["is_neox"]
        self.spec = simple_spec(
            KVCacheDType(self.dtype),
            num_kv_heads=num_kv_heads,
            head_size=case["head_size"],
            head_size_v=case["head_size_v"],
            layout=case["layout"],
        )
        dtype, num_tokens = INPUT_DTYPES[case["input_dtype"]], case["num_tokens"]
        self.key, self.value = kv_tokens(self.spec, num_tokens, dtype)
        self.query = tokens(np.random.default_rng(5), (num_tokens, num_heads, self.spec.head_size), dtype)
        rot_dim = int(case["head_size"] * case["rotated"]) // 2 * 2
        self.table = reference.cos_sin(rot_dim, INPUT_DTYPES[case["table_dtype"]])
        slots = np.random.default_rng(1).permutation(num_blocks * self.spec.block_size)[:num_tokens]
        slots[2::7], slots[3::7] = -1, slots[::7][: len(slots[3::7])]
        self.slots = slots.astype(case["slots"])
        indices = np.dtype(case["positions"])
        most = 2**32 + 1 if case["positions"] == "int64" else 2**31 - 1  # of the former the low half is a row
        self.positions = np.resize(
            np.array([7, reference.POSITIONS - 1, most, -3, 0, -most, np.iinfo(indices).max, 30], indices), num_tokens
        )
        self.pages = random_pages(self.spec, num_blocks)
        self.cache = torch_cache(self.pages, self.spec, form=case["form"], device=device)
        rows = [from_numpy(x).to(device) for x in (self.query, self.key, self.value)]
        if case["rows"] == "fused":
            fused = torch.cat([x.flatten(1) for x in rows], dim=1)
            parts = fused.split([x.shape[1] * x.shape[2] for x in rows], dim=1)
            rows = [part.unflatten(1, x.shape[1:]) for part, x in zip(parts, rows, strict=True)]
        indices_of = torch.from_numpy(self.slots).to(device), torch.from_numpy(self.positions).to(device)
        self.arguments = *rows, self.cache.key, self.cache.value, *indices_of, from_numpy(self.table).to(device)

    def assert_rotated_and_written(self, query: torch.Tensor) -> None:
        rotated = [reference.rotate(x, self.table, self.positions, self.is_neox) for x in (self.query, self.key)]
        assert_same_bytes(to_numpy(query, self.query.dtype).reshape(self.query.shape), rotated[0])
        written = reference.write(self.pages, self.spec, rotated[1], self.value, self.slots, *SCALES)
        assert_same_bytes(self.cache.pages(), written)
        for given, x in zip(self.arguments, (self.query, self.key, self.value), strict=False):
            assert_same_bytes(to_numpy(given, x.dtype).reshape(x.shape), x)


@pytest.mark.parametrize("device", DEVICES)
@each_case(CASES, few={"dtype": [dtype.value for dtype in FEW_DTYPES], "head_size": [64], "num_tokens": [1, 2, 19]})
def test_every_byte_is_the_references(case: dict[str, Any], device: str):
    call = Tokens(case, device)
    rotated = kvjax_torch.rope_and_cache(*call.arguments, call.dtype, *SCALES, is_neox=call.is_neox)
    assert rotated.is_contiguous()
    call.assert_rotated_and_written(rotated)


SIMPLE: dict[str, Any] = {name: values[0] for name, values in AXES.items()} | {
    "dtype": "nvfp4",
    "input_dtype": "bfloat16",
    "heads": (6, 2),
    "num_tokens": 6,
    "positions": "int64",
}


def test_every_byte_is_that_of_jax():
    call = Tokens(SIMPLE)
    pages = KVCache(jnp.asarray(call.pages).reshape(call.spec.cache_shape(4)), call.spec)
    positions = call.positions.clip(0, reference.POSITIONS - 1).astype(np.int32)
    arguments = call.query, call.key, call.value, pages, call.slots, positions, call.table
    rotated, cache = jax.jit(kvjax.rope_and_cache)(*arguments, k_scale=SCALES[0], v_scale=SCALES[1])
    got = kvjax_torch.rope_and_cache(*call.arguments, "nvfp4", *SCALES)
    assert_same_bytes(to_numpy(got, call.query.dtype), np.asarray(rotated))
    assert_same_bytes(call.cache.pages(), np.asarray(cache.kv).reshape(4, -1))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("dtype", INPUT_DTYPES)
def test_torch_rotates_what_the_kernel_does_not_take_to_the_same_bytes(dtype: str, is_neox: bool, device: str):
    call = Tokens(SIMPLE | {"input_dtype": dtype, "is_neox": is_neox, "rotated": 0.5, "num_tokens": 40}, device)
    query, _, _, _, _, _, positions, table = call.arguments
    rotated = rotation.rotate(query, positions, table, is_neox)
    assert_same_bytes(
        to_numpy(rotated, call.query.dtype), reference.rotate(call.query, call.table, call.positions, is_neox)
    )


# Of each kind; `test_rope.py` interprets kernels of every dtype.
@pytest.mark.full
@each_case(
    [case for case in KERNEL_CASES if KVCacheDType(case["dtype"]) in FEW_DTYPES],
    few={"dtype": ["nvfp4"], "rotated": [0.5]},
)
def test_the_interpreted_kernel_of_a_call_writes_the_same(case: dict[str, Any], monkeypatch):
    monkeypatch.setattr(kvjax.kernels.write.launch_config, "PROGRAMS", 2)  # so that a program of five tokens takes two
    call = Tokens(case)
    scales = [torch.tensor(scale) for scale in SCALES]
    writing._write_kernel.cache_clear()
    query, *written, positions, table = call.arguments
    tensors, rope = WriteTensors(*written, *scales), RopeInputs(query, positions, table, call.is_neox)
    plan = rope_plan(tensors, rope, Encoding(call.dtype))
    assert writing.has_rope(plan, query)
    run, rotated = writing.rope_call(plan, tensors, rope, False)
    rotated.view(torch.uint8).fill_(0xFF)
    run_interpreted(run)
    writing._write_kernel.cache_clear()
    call.assert_rotated_and_written(rotated)


COMPILED = pairwise(
    {
        "dtype": [dtype.value for dtype in KERNEL_DTYPES],
        "is_neox": [True, False],
        "heads": [(32, 8), (8, 1)],
        "rotated": [128, 64],
        "unique_slots": [True, False],
        "target": ["h100", "b200"],
    },
    lambda case: True,
)


def rope_kernel(case: dict[str, Any]) -> kernels.AnyCount:
    num_heads, num_kv_heads = case["heads"]
    spec = simple_spec(KVCacheDType(case["dtype"]), num_kv_heads=num_kv_heads, head_size=128, block_size=16)
    rows = kernels.RowMemory(BFLOAT16, (num_heads + 2 * num_kv_heads) * 128, 16)
    turn = kernels.Rotation(BFLOAT16, 128, case["rotated"], case["is_neox"], table_itemsize=4)
    rotated = kernels.RotatedMemory(turn, num_heads, rows, np.dtype(np.int64), np.dtype(np.float32))
    kind = kernels.WriteKind(
        spec,
        (rows, rows),
        page_memory(spec),
        np.dtype(np.int64),
        (1, 1),
        case["unique_slots"],
        scale_memory(spec),
        rotated,
    )
    return kernels.write_kernel(kind)


def call_rope(case: dict[str, Any], *arrays: jax.Array) -> list[jax.Array]:
    return rope_kernel(case).function(*arrays)


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
@pytest.mark.full
@each_case(COMPILED)
def test_one_kernel_takes_counts_as_integers_and_spills_nothing(case: dict[str, Any]):
    args = rope_kernel(case).args
    given_integers = functools.partial(binaries.given_integers, num_args=len(args))
    function = functools.partial(call_rope, case)
    [kernel] = compile_for(case["target"], function, *args, change_kernel=given_integers).kernels
    assert kernel.spill_bytes == 0
    num_unused = 0 if KVCacheDType(case["dtype"]).is_quantized else 2  # scales
    assert kernel.parameters == [f".align 8 .b8[{8 * (len(args) - num_unused)}]"]


def test_torchs_opcheck_accepts_the_operation(device: str):
    call = Tokens(SIMPLE, device)
    rows = [torch.nan_to_num(x, 0.5) for x in call.arguments[:3]]  # it compares results, and no NaN is as another
    arguments = *rows, *call.arguments[3:], "nvfp4", *(torch.tensor(scale, device=device) for scale in SCALES)
    checks = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    torch.library.opcheck(torch.ops.kvjax.rope_and_cache.default, arguments, test_utils=checks)


def test_the_schema_declares_what_is_mutated():
    schema = torch.ops.kvjax.rope_and_cache.default._schema
    mutated = [each.name for each in schema.arguments if each.alias_info is not None and each.alias_info.is_write]
    assert mutated == ["key_cache", "value_cache"]
    assert schema.returns[0].alias_info is None


GOOD: dict[str, Any] = {
    "query": torch.zeros(3, 4, 64),
    "key": torch.zeros(3, 2, 64),
    "value": torch.zeros(3, 2, 64),
    "key_cache": torch.zeros(2, 8, 2, 64),
    "value_cache": torch.zeros(2, 8, 2, 64),
    "slot_mapping": torch.arange(3),
    "positions": torch.arange(3),
    "cos_sin_cache": torch.from_numpy(reference.cos_sin(64)),
    "kv_cache_dtype": "auto",
    "k_scale": 1.0,
    "v_scale": 1.0,
}


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"query": np.zeros((3, 4, 64))}, KVCacheTypeError, "query: got a ndarray, expected a torch.Tensor"),
        ({"query": torch.zeros(3, 4, 32)}, KVCacheValueError, "query: got head_size=32, expected 64 as in key"),
        ({"query": torch.zeros(3, 256)}, KVCacheValueError, "expected [num_tokens, num_heads, head_size]"),
        (
            {"query": torch.zeros(3, 4, 64).half()},
            KVCacheTypeError,
            "query: got dtype torch.float16, expected torch.fl",
        ),
        ({"query": torch.zeros(3, 64, 4).mT}, KVCacheValueError, "expected 1 along head_size; copy with query.cont"),
        ({"query": torch.zeros(4, 4, 64)}, KVCacheValueError, "query: got 4 tokens, expected 3, one for each slot"),
        ({"key": torch.zeros(4, 2, 64)}, KVCacheValueError, "key: got 4 tokens, expected 3, one for each slot"),
        ({"positions": torch.arange(4)}, KVCacheValueError, "positions: got 4 tokens, expected 3, one for each slot"),
        ({"positions": torch.zeros(3)}, KVCacheTypeError, "positions: got dtype torch.float32, expected torch.int32"),
        ({"positions": torch.zeros(3, 1).int()}, KVCacheValueError, "positions: got 2 dimensions, expected [num_tok"),
        ({"cos_sin_cache": torch.zeros(9, 63)}, KVCacheValueError, "cos_sin_cache: got rot_dim=63, expected an even"),
        ({"cos_sin_cache": torch.zeros(9, 66)}, KVCacheValueError, "an even number of 2 to head_size=64"),
        ({"cos_sin_cache": torch.zeros(0, 64)}, KVCacheValueError, "cos_sin_cache: got no positions"),
        ({"cos_sin_cache": torch.zeros(64)}, KVCacheValueError, "got 1 dimensions, expected [max_position, rot_dim]"),
        ({"cos_sin_cache": torch.zeros(9, 64).double()}, KVCacheTypeError, "cos_sin_cache: got dtype torch.float64"),
        ({"cos_sin_cache": torch.zeros(9, 64, device="meta")}, KVCacheValueError, "cos_sin_cache: got device meta"),
        ({"is_neox": 1}, KVCacheTypeError, "is_neox: got 1 of type int, expected a bool"),
        ({"query": torch.zeros(3, 4, 64, requires_grad=True)}, KVCacheTypeError, "query: got requires_grad=True"),
        ({"k_scale": 0.0}, KVCacheValueError, "k_scale: got 0"),
    ],
)
def test_invalid_arguments_are_refused_by_name_and_nothing_is_written(wrong, error, message):
    caches = {name: torch.full((2, 8, 2, 64), 7.0) for name in ("key_cache", "value_cache")}
    with pytest.raises(error) as raised:
        kvjax_torch.rope_and_cache(**GOOD | caches | wrong)
    assert message in str(raised.value)
    assert all((cache == 7).all() for cache in caches.values())


def test_checked_mode_names_a_position_without_a_row():
    last = reference.POSITIONS - 1
    padded = {"slot_mapping": torch.tensor([4, -1, 5]), "positions": torch.tensor([0, 99, last])}
    with kvjax.checked():
        kvjax_torch.rope_and_cache(**GOOD | padded)
        padded["positions"][2] += 1
        with pytest.raises(KVCacheValueError, match=rf"positions\[2\]: got {last + 1}, expected between 0 and {last}"):
            kvjax_torch.rope_and_cache(**GOOD | padded)


@pytest.mark.gpu
@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("num_kv_heads", [1, 8])
@pytest.mark.parametrize("dtype", STORED_KV_CACHE_DTYPES, ids=lambda dtype: dtype.value)
def test_one_compilation_serves_every_number_of_tokens(dtype: KVCacheDType, num_kv_heads: int, is_neox: bool):
    """From one to where slots are searched no more; programs of one token and of several."""
    compilations = None
    for num_tokens in (3, 1, 64, 529, 1057, 4800):
        sizes = {"heads": (4 * num_kv_heads, num_kv_heads), "head_size": 128, "num_tokens": num_tokens}
        case = SIMPLE | sizes | {"dtype": dtype.value, "is_neox": is_neox, "rows": "fused"}
        got, expected = (Tokens(case, device, num_blocks=700) for device in ("cuda", "cpu"))
        results = [
            kvjax_torch.rope_and_cache(*call.arguments, call.dtype, *SCALES, is_neox=is_neox)
            for call in (got, expected)
        ]
        assert_same_bytes(*(to_numpy(result, got.query.dtype) for result in results))
        assert_same_bytes(got.cache.pages(), expected.cache.pages())
        compilations = compilations or launch.num_compilations()
    # torch's strides of a single token are its own.
    assert launch.num_compilations() <= compilations + 1


@pytest.mark.gpu
def test_a_graph_records_it():
    call = Tokens(SIMPLE, "cuda")
    kvjax_torch.rope_and_cache(*call.arguments, "nvfp4", *SCALES)
    for half in (call.cache.key, call.cache.value):
        half.zero_()
    call.pages = call.cache.pages()
    graph = torch.cuda.CUDAGraph()
    with capture(graph):
        rotated = kvjax_torch.rope_and_cache(*call.arguments, "nvfp4", *SCALES)
    torch.cuda.synchronize()
    assert_same_bytes(call.cache.pages(), call.pages)
    graph.replay()
    call.assert_rotated_and_written(rotated)


def after_an_element(table: torch.Tensor) -> torch.Tensor:
    return torch.cat([table.new_zeros(1), table.flatten()])[1:].view_as(table)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "moved", [after_an_element, lambda table: table.mT.contiguous().mT], ids=["late", "transposed"]
)
def test_a_table_that_the_kernel_cannot_read_where_it_lies_is_copied(moved):
    call = Tokens(SIMPLE, "cuda")
    *others, table = call.arguments
    call.assert_rotated_and_written(kvjax_torch.rope_and_cache(*others, moved(table), "nvfp4", *SCALES))
