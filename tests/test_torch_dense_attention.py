"""ragged_attention on torch tensors is attention in float64, on the CPU and by the kernels that torch launches."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from support.dense_arrays import MLA, ON_A_GPU, STEP, Arrays, Lengths, arrays, attention, check
from support.gpu_compile import compile_for, why_not
from support.helpers import INPUT_DTYPES, matrix, simple_spec

torch = pytest.importorskip("torch")

from support.interpreted_calls import run_interpreted  # noqa: E402
from support.torch_helpers import (  # noqa: E402
    assert_same,
    assert_torch_sees_no_wait,
    assert_waits_for_its_stream_alone,
    capture,
    from_numpy,
    to_numpy,
)

import kvjax  # noqa: E402
from kvjax import KVCacheDType, KVCacheTypeError, KVCacheValueError, UnsupportedError, binaries, kernels  # noqa: E402
from kvjax.kernels.prompts import problem as prompt_problem  # noqa: E402
from kvjax.kernels.registers import THREADS  # noqa: E402

import kvjax_torch  # noqa: E402  # isort: skip
from kvjax_torch import library  # noqa: E402
from kvjax_torch.calls import choosing  # noqa: E402
from kvjax_torch.cuda import dense_prompts  # noqa: E402
from kvjax_torch.eager import ragged as eager_ragged  # noqa: E402
from kvjax_torch.launch import running  # noqa: E402

BFLOAT16 = ml_dtypes.bfloat16


def given(args: Arrays, device: str = "cpu") -> dict[str, torch.Tensor]:
    """The arguments of a call, strided as callers have them: parts of projections, and bounds of 64 bits."""

    def part(rows: np.ndarray) -> torch.Tensor:
        after = np.full((*rows.shape[:2], 32), np.nan, rows.dtype)
        return from_numpy(np.concatenate([rows, after], axis=2)).to(device)[..., : rows.shape[2]]

    tensors = {"query": from_numpy(args.query).to(device), "key": part(args.key), "value": part(args.value)}
    bounds = {"cu_q_lens": args.cu_q_lens, "cu_kv_lens": args.cu_kv_lens}
    return tensors | {name: torch.from_numpy(np.int64(each)).to(device) for name, each in bounds.items()}


def run(args: Arrays, device: str = "cpu", **options: Any) -> list[np.ndarray]:
    out, lse = kvjax_torch.ragged_attention(**given(args, device), return_lse=True, **options)
    return [to_numpy(out, args.query.dtype), to_numpy(lse, np.dtype(np.float32))]


def interpret_kernels(monkeypatch: pytest.MonkeyPatch, *, multiprocessors: int = 2) -> list[running.Call]:
    """Runs calls with CPU tensors as those of a GPU, whose new memory is NaN; returns the kernel calls."""
    ran: list[running.Call] = []

    def run_call(call: running.Call) -> None:
        ran.append(call)
        run_interpreted(call)

    def poisoned(like: torch.Tensor, *size: Any, **options: Any) -> torch.Tensor:
        new = new_empty(like, *size, **options)
        new.view(-1).view(torch.uint8).fill_(0xFF)
        return new

    new_empty = torch.Tensor.new_empty
    target = kernels.Target(multiprocessors=multiprocessors)
    for cached in (dense_prompts._kernels, dense_prompts._why_no_kernel):
        cached.cache_clear()
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
    monkeypatch.setattr(library, "eager_ragged", dense_prompts)
    monkeypatch.setattr(running, "compile_once", lambda *_: None)
    monkeypatch.setattr(running, "run", run_call)
    monkeypatch.setattr(choosing, "target_of", lambda _: target)
    return ran


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "all"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, BFLOAT16], ids=lambda dtype: np.dtype(dtype).name)
def test_dense_attention_matches_float64(dtype: Any, causal: bool, device: str):
    for options in ({}, MLA):
        args = arrays(STEP, dtype, **options)
        check(args, run(args, device, causal=causal), attention(args, causal))


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "all"])
def test_dense_attention_matches_jax(causal: bool):
    """But for the order of sums, and in 16 bits a rounding of weights, which torch leaves out on a CPU."""
    for dtype, tolerance in ((np.float32, 1e-5), (BFLOAT16, 2e-2)):
        args = arrays(STEP, dtype, **MLA)
        wanted = jax.jit(functools.partial(kvjax.ragged_attention, causal=causal, return_lse=True))(*args)
        for got, expected in zip(run(args, causal=causal), wanted, strict=True):
            np.testing.assert_allclose(np.float32(got), np.float32(expected), rtol=tolerance, atol=tolerance)


def test_rows_are_attended_to_in_tiles(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(eager_ragged, "LOGITS_BYTES", 4 * 4 * 150 * 7)  # 7 rows of the longest sequence
    for causal in (True, False):
        args = arrays(STEP)
        check(args, run(args, causal=causal, sm_scale=-0.3), attention(args, causal, -0.3))


@pytest.mark.parametrize("lengths", [Lengths((), ()), Lengths((0,), (0,)), Lengths((2,), (0,)), Lengths((0,), (2,))])
@pytest.mark.parametrize("padding", [(0, 0), (3, 2)], ids=str)
def test_nothing_to_attend_to_is_no_error(lengths: Lengths, padding: tuple[int, int], device: str):
    args = arrays(lengths, np.float16, padding=padding)
    check(args, run(args, device), attention(args, True))


@pytest.mark.parametrize(
    ("lengths", "causal", "options"),
    [
        (STEP, True, MLA),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (
                (STEP, False, MLA),
                (STEP, True, {"sizes": (64, 64), "padding": (10, 300)}),
                (STEP, False, {"sizes": (128, 128), "heads": (3, 1)}),
                (Lengths((60,), (0,)), True, {"sizes": (80, 48)}),
                (Lengths((9, 8), (3, 20)), True, {"sizes": (32, 16), "padding": (0, 0)}),
                (Lengths((65,), (13,)), True, MLA | {"padding": (0, 0)}),  # rows before all keys
                (Lengths((1,) * 140, (2,) * 140), True, {"sizes": (32, 32), "heads": (1, 1)}),  # more than threads
            )
        ),
    ],
    ids=str,
)
def test_interpreted_kernels_match_float64(
    lengths: Lengths, causal: bool, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    ran = interpret_kernels(monkeypatch)
    args = arrays(lengths, BFLOAT16, **options)
    check(args, run(args, causal=causal), attention(args, causal))
    assert [call.kernel.origin.function.split(":")[1] for call in ran] == ["any_tiles", "any_ragged"]


BEFORE = (70, 13)
"""Query rows, more than a tile of them, and keys of no sequence before those of the first."""


@pytest.mark.parametrize("is_divided", [False, pytest.param(True, marks=pytest.mark.full)], ids=["whole", "splits"])
def test_interpreted_kernels_store_the_rows_before_the_first_sequence(
    is_divided: bool, monkeypatch: pytest.MonkeyPatch
):
    if is_divided:
        monkeypatch.setattr(prompt_problem, "MIN_SPLIT_TOKENS", 64)
    ran = interpret_kernels(monkeypatch, multiprocessors=8 if is_divided else 2)
    lengths = Lengths((50, 9), (290, 11)) if is_divided else Lengths((3,), (9,))
    args = arrays(lengths, BFLOAT16, sizes=(32, 32), heads=(2, 2), before=BEFORE)
    check(args, run(args), attention(args, True))
    assert ran[-1].kernel.origin.arguments["kind"].is_divided == is_divided


def test_rows_before_the_first_sequence_see_nothing(device: str):
    for lengths in (STEP, Lengths((), ())):
        for dtype in (np.float32, np.float16):
            args = arrays(lengths, dtype, before=BEFORE)
            check(args, run(args, device), attention(args, True))


@pytest.mark.full
def test_interpreted_kernels_take_as_many_sequences_as_a_program_has_threads(monkeypatch: pytest.MonkeyPatch):
    """Less one or none: then the prompts of rows of no sequence are stored by other threads than those before."""
    interpret_kernels(monkeypatch)
    for num_seqs in (THREADS - 1, THREADS):
        args = arrays(Lengths((1,) * num_seqs, (2,) * num_seqs), BFLOAT16, sizes=(32, 32), heads=(1, 1), before=BEFORE)
        check(args, run(args), attention(args, True))


@pytest.mark.full
def test_interpreted_kernels_divide_the_tokens_of_few_rows(monkeypatch: pytest.MonkeyPatch):
    """Also those of rows of no sequence, and of a sequence of fewer tokens than splits have tiles."""
    monkeypatch.setattr(prompt_problem, "MIN_SPLIT_TOKENS", 64)
    ran = interpret_kernels(monkeypatch, multiprocessors=8)
    args = arrays(Lengths((50, 9), (290, 11)), np.float16, sizes=(32, 32), heads=(2, 2), padding=(7, 4))
    check(args, run(args), attention(args, True))
    assert ran[-1].kernel.origin.arguments["kind"].is_divided
    assert ran[-1].counts[-1] == 4


@pytest.mark.full
def test_results_at_odd_addresses_are_copied_there(monkeypatch: pytest.MonkeyPatch):
    interpret_kernels(monkeypatch)
    args = arrays(Lengths((3,), (70,)), np.float16)
    memory = torch.full((6 * 4 * 16 + 2,), 7.0, dtype=torch.float16)
    out = memory[1:-1].view(6, 4, 16)
    assert kvjax_torch.ragged_attention(**given(args), out=out) is out
    np.testing.assert_allclose(out.numpy(), attention(args, True)[0], atol=2e-3)
    assert (memory[[0, -1]] == 7).all()


def test_kernels_are_those_of_any_lengths(monkeypatch: pytest.MonkeyPatch):
    """Of as few tokens and rows as kernels do not take, too."""
    interpret_kernels(monkeypatch)
    made: set[tuple[kernels.AnyCount, ...]] = set()
    monkeypatch.setattr(running, "compile_once", lambda every, _: made.add(every))
    monkeypatch.setattr(running, "run", lambda _: None)
    for lengths in (STEP, Lengths((3,), (5,)), Lengths((), ()), Lengths((700, 1), (1500, 64))):
        run(arrays(lengths, BFLOAT16, **MLA), causal=True)
    [every] = made
    run(arrays(STEP, BFLOAT16, **MLA), causal=False)
    assert made == {every}
    run(arrays(STEP, np.float16, **MLA))
    assert len(made) == 2


@pytest.mark.parametrize(
    "compiles",
    [
        False,
        pytest.param(True, marks=[pytest.mark.full, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]),
    ],
)
def test_a_warm_up_compiles_the_kernels_of_any_lengths_together(
    compiles: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Also of one token, whose strides may differ, and of either mask; compiled for a described GPU they are kept."""
    monkeypatch.setenv("KVJAX_CACHE_DIR", str(tmp_path / "kvjax"))
    interpret_kernels(monkeypatch)
    gpu, compiled = binaries.Device("NVIDIA H200", "9.0", 232_448), []

    def compile_all(every: list[Any], _: torch.device) -> None:
        compiled.append(every)
        if compiles:
            binaries.compiled(every, gpu)

    monkeypatch.setattr(running, "compile_all", compile_all)
    later: set[kernels.AnyCount] = set()
    monkeypatch.setattr(running, "compile_once", lambda every, _: later.update(every))
    monkeypatch.setattr(running, "run", lambda _: None)
    call = given(arrays(Lengths((2,), (2,)), BFLOAT16, padding=(0, 0)))
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "is_cuda", True)
        kvjax_torch.warm_up_ragged_attention(call["query"], call["key"], call["value"], sm_scale=0.25)
    [every] = compiled
    assert len(every) == len(set(every))
    if compiles:
        assert len(list((tmp_path / "kvjax").iterdir())) == len(every)
    for lengths, causal in ((STEP, True), (Lengths((1,), (1,)), False), (Lengths((700, 1), (1500, 64)), False)):
        args = given(arrays(lengths, BFLOAT16, padding=(0, 0)))
        kvjax_torch.ragged_attention(**args, causal=causal, sm_scale=0.25)
    one = {name: rows[:1].reshape(1, -1).view(1, *rows.shape[1:]) for name, rows in list(args.items())[:3]}
    bounds = torch.tensor([0, 1])
    kvjax_torch.ragged_attention(**one, cu_q_lens=bounds, cu_kv_lens=bounds, sm_scale=0.25)
    assert later == set(every)
    if compiles:
        before = binaries.num_compilations()
        binaries.compiled([*later], gpu)
        assert binaries.num_compilations() == before


def test_keys_that_kernels_do_not_read_where_they_are_are_copied():
    whole = torch.arange(70 * 4 * 48, dtype=torch.float16).view(70, 4, 48) % 1000
    read = {
        "contiguous": whole,
        "part of a row": whole[..., 8:40],
        "one head for all": whole[:, :1].expand(-1, 4, -1),
    }
    copied = {
        "few tokens": whole[:9],
        "odd address": whole[..., 1:33],
        "heads first": whole.transpose(0, 1).contiguous().transpose(0, 1),
        "columns first": whole.transpose(1, 2).contiguous().transpose(1, 2),
        "one token": whole[:1].expand(70, -1, -1),
    }
    for name, rows in (read | copied).items():
        got = dense_prompts._run(rows)
        assert (got.data_ptr() == rows.data_ptr()) == (name in read), name
        assert len(got) >= kernels.TILE_TOKENS
        assert torch.equal(got[: len(rows)], rows)
        assert not got[len(rows) :].any()
        assert got.stride(2) == 1
        assert not any(stride * 2 % 16 for stride in got.stride()[:2])


def test_other_gpus_are_served_by_torch(monkeypatch: pytest.MonkeyPatch):
    """As are float32, sizes that are no multiples of 16, and scales that are not positive."""
    ran = interpret_kernels(monkeypatch)
    for changed in ({"dtype": np.float32}, {"dtype": BFLOAT16, "sizes": (24, 16)}):
        args = arrays(STEP, **changed)
        check(args, run(args), attention(args, True))
    args = arrays(STEP, np.float16)
    check(args, run(args, sm_scale=-0.3), attention(args, True, -0.3))
    monkeypatch.setattr(choosing, "target_of", lambda _: kernels.Target(compute_capability=(10, 0)))
    dense_prompts._why_no_kernel.cache_clear()
    check(args, run(args), attention(args, True))
    dense_prompts._why_no_kernel.cache_clear()
    assert not ran


@pytest.mark.parametrize("num_tokens", [pytest.param(9, marks=pytest.mark.nightly), 70])
def test_keys_that_lie_too_far_apart_for_int32_are_copied(num_tokens: int, monkeypatch: pytest.MonkeyPatch):
    """As queries are: parts of wide rows lie further apart than they are long."""
    far = torch.empty_strided((num_tokens, 2, 32), (2**30, 64, 1), dtype=torch.float16, device="meta")
    assert dense_prompts._run(far).stride() == (64, 32, 1)
    ran = interpret_kernels(monkeypatch)
    args = arrays(Lengths((3,), (num_tokens,)), np.float16)
    call = given(args)
    for name in ("key", "value"):
        wide = torch.full((*call[name].shape[:2], 512), torch.nan, dtype=torch.float16)
        call[name] = wide[..., : call[name].shape[2]].copy_(call[name])
    monkeypatch.setattr(choosing, "INT32_MAX", 20_000)
    check(args, kvjax_torch.ragged_attention(**call, return_lse=True), attention(args, True))
    assert len(ran) == 2


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_what_int32_does_not_index_is_refused_before_anything_is_written(name: str, monkeypatch: pytest.MonkeyPatch):
    """Of keys and values as tiles, of which the last one may be empty."""
    size = 4 * 40 * 32 if name == "query" else 2 * (104 + kernels.PROMPT_TOKENS) * 32
    ran = interpret_kernels(monkeypatch)
    sizes = (16, 32) if name == "value" else (32, 16)
    args = arrays(Lengths((40,), (100,)), np.float16, sizes=sizes, padding=(0, 0))
    monkeypatch.setattr(choosing, "INT32_MAX", size - 1)
    out = torch.full((40, 4, sizes[1]), 7.0, dtype=torch.float16)
    with pytest.raises(UnsupportedError, match=rf"{name}: got {size} elements, expected at most {size - 1}"):
        kvjax_torch.ragged_attention(**given(args), out=out)
    assert (out == 7).all()
    assert not ran


def wrong(**changed: Any) -> dict[str, Any]:
    call = {name: torch.zeros(shape) for name, shape in (("query", (3, 4, 32)), ("key", (9, 2, 32)))}
    call |= {"value": torch.zeros(9, 2, 16), "cu_q_lens": torch.tensor([0, 3]), "cu_kv_lens": torch.tensor([0, 9])}
    return call | changed


ERRORS = [
    ({"query": torch.zeros(3, 4)}, KVCacheValueError, r"query: got shape \(3, 4\), expected \[num_tokens, num_heads"),
    ({"query": torch.zeros(3, 4, 32).int()}, KVCacheTypeError, "query: got dtype torch.int32, expected torch.float32"),
    ({"query": torch.zeros(3, 5, 32)}, KVCacheValueError, "query: got num_heads=5, expected a multiple"),
    ({"key": [1.0]}, KVCacheTypeError, "key: got a list, expected a torch.Tensor"),
    ({"key": torch.zeros(9, 2, 32).half()}, KVCacheTypeError, "key: got dtype torch.float16, expected torch.float32"),
    ({"key": torch.zeros(9, 2, 24)}, KVCacheValueError, r"key: got shape \(9, 2, 24\), expected head_size=32"),
    ({"key": torch.zeros(9, 0, 32)}, KVCacheValueError, r"key: got shape \(9, 0, 32\), .* at least one head"),
    ({"value": torch.zeros(9, 2, 0)}, KVCacheValueError, r"value: got shape \(9, 2, 0\), .* at least one head"),
    ({"value": torch.zeros(8, 2, 16)}, KVCacheValueError, r"value: got shape .* expected \[num_kv_tokens=9"),
    ({"value": torch.zeros(9, 2, 16, device="meta")}, KVCacheValueError, "value: got device meta, expected cpu"),
    (
        {"out": torch.zeros(3, 4, 16, device="meta")},
        KVCacheValueError,
        "out: got device meta, expected cpu, that of query",
    ),
    ({"cu_q_lens": torch.tensor([0.0, 3.0])}, KVCacheTypeError, "cu_q_lens: got dtype torch.float32, expected torch.i"),
    ({"cu_q_lens": torch.tensor([0])[:0]}, KVCacheValueError, r"cu_q_lens: got shape \(0,\), expected \[num_seqs \+ 1"),
    ({"cu_q_lens": torch.tensor([[0, 3]])}, KVCacheValueError, r"cu_q_lens: got 2 dimensions, expected \[num_seqs \+"),
    ({"cu_kv_lens": torch.tensor([0, 3, 5])}, KVCacheValueError, r"cu_kv_lens: got shape \(3,\), .* \+ 1=2\]"),
    ({"causal": 1}, KVCacheTypeError, "causal: got 1"),
    ({"sm_scale": np.inf}, KVCacheValueError, "sm_scale: got inf"),
    ({"return_lse": None}, KVCacheTypeError, "return_lse: got None"),
    ({"out": torch.zeros(3, 4, 32)}, KVCacheValueError, r"out: got shape \(3, 4, 32\), expected \(3, 4, 16\)"),
    (
        {"out": torch.zeros(3, 4, 16).half()},
        KVCacheTypeError,
        "out: got dtype torch.float16, expected torch.float32 as",
    ),
]


@pytest.mark.parametrize(("changed", "error", "message"), ERRORS)
def test_bad_arguments_raise(changed: dict[str, Any], error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        kvjax_torch.ragged_attention(**wrong(**changed))


@pytest.mark.parametrize("name", ["query", "key", "value", "cu_q_lens"])
def test_results_in_memory_of_an_argument_are_refused(name: str):
    call = wrong()
    memory = torch.zeros(call[name].numel() * call[name].element_size() // 4 + 3 * 4 * 16)
    shared = memory[: len(memory) - 3 * 4 * 16].view(call[name].dtype).view(call[name].shape).copy_(call[name])
    out = memory[len(memory) - 3 * 4 * 16 - 1 : -1].view(3, 4, 16)
    with pytest.raises(KVCacheValueError, match=f"out: got memory that overlaps that of {name}"):
        kvjax_torch.ragged_attention(**wrong(**{name: shared}, out=out))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"cu_q_lens": torch.tensor([1, 2])}, r"cu_q_lens\[0\]: got 1, expected 0 first"),
        ({"cu_q_lens": torch.tensor([0, 4])}, r"cu_q_lens\[1\]: got 4, .* and num_tokens=3"),
        ({"cu_kv_lens": torch.tensor([0, -2])}, r"cu_kv_lens\[1\]: got -2, expected 0 first"),
        ({"cu_kv_lens": torch.tensor([0, 10])}, r"cu_kv_lens\[1\]: got 10, .* and num_tokens=9"),
    ],
)
def test_checked_mode_refuses_lengths(changed: dict[str, Any], message: str):
    with kvjax.checked(), pytest.raises(KVCacheValueError, match=message):
        kvjax_torch.ragged_attention(**wrong(**changed))
    with kvjax.checked():
        kvjax_torch.ragged_attention(**wrong())


def test_torchs_opcheck_accepts_the_operation(device: str):
    call = {name: x.to(device) for name, x in wrong().items()}
    torch.library.opcheck(torch.ops.kvjax.ragged_attention.default, (*call.values(),), {"causal": False})
    out = torch.zeros(3, 4, 16, device=device)
    torch.library.opcheck(torch.ops.kvjax.ragged_attention_out.default, (out, *call.values()), {"sm_scale": 0.5})


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_code_attends_as_eager_code_does(device: str):
    torch._dynamo.reset()
    call = given(arrays(STEP, padding=(0, 0)), device)
    attend = functools.partial(kvjax_torch.ragged_attention, return_lse=True)
    assert_same(torch.compile(attend, backend="aot_eager", fullgraph=True)(**call), attend(**call))


SIZES = (192, 128), (80, 48), (128, 128), (256, 256)


def make(kernel: str, sizes: tuple[int, int], group: int = 1, is_divided: bool = False) -> kernels.AnyCount:
    heads = 16
    if kernel == "tiles":
        rows = (kernels.HeadRows(np.dtype(BFLOAT16), size, heads * (size + 128), size + 128) for size in sizes)
        return kernels.tiles_kernel(heads, *rows)
    spec = simple_spec(KVCacheDType.BFLOAT16, num_kv_heads=heads, head_size=sizes[0], head_size_v=sizes[1])
    query = kernels.RowMemory(np.dtype(BFLOAT16), heads * group * sizes[0] + 64, 4)
    kind = kernels.RaggedKind(spec, query, heads * group, 0.1, is_divided)
    return kernels.ragged_kernel(kind, kernels.Target())


def call_kernel(made: tuple[Any, ...], *arrays: jax.Array) -> list[jax.Array]:
    return make(*made).function(*arrays)


@pytest.mark.full
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
@pytest.mark.parametrize(
    "made",
    [
        *(("tiles", sizes) for sizes in SIZES),
        *(("ragged", sizes) for sizes in SIZES),
        ("ragged", (192, 128), 1, True),
        ("ragged", (128, 128), 4),
    ],
    ids=str,
)
def test_compiled_it_is_one_kernel_that_is_given_integers(made: tuple[Any, ...]):
    args = make(*made).args
    given_integers = functools.partial(binaries.given_integers, num_args=len(args))
    [kernel] = compile_for("h100", functools.partial(call_kernel, made), *args, change_kernel=given_integers).kernels
    assert kernel.parameters == [f".align 8 .b8[{8 * len(args)}]"]
    # Descriptors, which JAX's kernel has, would be cheaper to address tiles by.
    assert kernel.spill_bytes <= (32 if made[0] == "ragged" else 0)
    if made[0] == "ragged":
        assert "wgmma" in kernel.ptx
        assert "cp.async.bulk.tensor" not in kernel.ptx  # which takes a descriptor
        assert "serialized" not in kernel.ptxas_log


def needs_the_kernel() -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the prompt kernel is for compute capability 9.0")


@pytest.mark.gpu
@matrix(ON_A_GPU, pairs=True)
def test_on_a_gpu_dense_attention_matches_float64(
    heads: tuple[int, int], sizes: tuple[int, int], input_dtype: str, causal: bool
):
    """Also of few rows over many tokens, which are divided into splits."""
    for lengths in (STEP, Lengths((700, 1, 300), (1500, 77, 300)), Lengths((9,), (4000,)), Lengths((70,), (4000,))):
        args = arrays(lengths, INPUT_DTYPES[input_dtype], heads=heads, sizes=sizes, before=BEFORE)
        check(args, run(args, "cuda", causal=causal), attention(args, causal))


def on_a_gpu(lengths: Lengths = STEP) -> dict[str, torch.Tensor]:
    return given(arrays(lengths, BFLOAT16, heads=(16, 16), sizes=(192, 128)), "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("new_stream", [torch.cuda.default_stream, torch.cuda.Stream], ids=["default", "side"])
def test_a_call_waits_for_its_stream_and_for_nothing_else(new_stream: Any):
    needs_the_kernel()
    call = on_a_gpu()
    call["query"].nan_to_num_()
    attend = functools.partial(kvjax_torch.ragged_attention, return_lse=True)
    assert_waits_for_its_stream_alone(attend, call, new_stream(), repeats=3)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # which it says of itself
def test_torch_sees_nothing_that_waits():
    needs_the_kernel()
    assert_torch_sees_no_wait(functools.partial(kvjax_torch.ragged_attention, return_lse=True), on_a_gpu())


@pytest.mark.gpu
def test_a_graph_is_replayed_with_other_lengths():
    needs_the_kernel()
    args = arrays(Lengths((400, 0, 0), (900, 0, 0)), BFLOAT16, heads=(16, 16), sizes=(192, 128))
    call = given(args, "cuda")
    out = torch.empty(403, 16, 128, dtype=torch.bfloat16, device="cuda")
    kvjax_torch.ragged_attention(**call, out=out)
    graph = torch.cuda.CUDAGraph()
    with capture(graph):
        _, lse = kvjax_torch.ragged_attention(**call, out=out, return_lse=True)
    for q_lens, kv_lens in (((400, 0, 0), (900, 0, 0)), ((3, 200, 30), (77, 200, 600)), ((0, 0, 0), (1, 2, 3))):
        bounds = [np.cumsum([0, *each], dtype=np.int32) for each in (q_lens, kv_lens)]
        for name, each in zip(("cu_q_lens", "cu_kv_lens"), bounds, strict=True):
            call[name].copy_(torch.from_numpy(each))
        expected = kvjax_torch.ragged_attention(**call, return_lse=True)
        for result in (out, lse):
            result.fill_(torch.nan)
        graph.replay()
        assert_same((out, lse), expected)
        step = args._replace(cu_q_lens=bounds[0], cu_kv_lens=bounds[1])
        results = to_numpy(out, args.query.dtype), to_numpy(lse, np.dtype(np.float32))
        check(step, results, attention(step, True))


@pytest.mark.gpu
def test_without_the_kernel_a_capture_is_refused():
    call = given(arrays(STEP), "cuda")
    refused = pytest.raises(UnsupportedError, match=r"reads cu_q_lens and cu_kv_lens on the host.*got float32")
    with refused, capture(torch.cuda.CUDAGraph()):
        kvjax_torch.ragged_attention(**call)
