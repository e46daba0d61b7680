"""ragged_attention is attention in float64 over each sequence's keys and values, whatever lies between sequences."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import checkify
from support import gpu_compile, prompt_model
from support.dense_arrays import MLA, ON_A_GPU, STEP, Lengths, arrays, attention, check
from support.gpu_compile import compile_for
from support.helpers import INPUT_DTYPES, matrix
from support.interpret_mode import interpret_mode

import kvjax
from kvjax import KVCacheTypeError, KVCacheValueError, UnsupportedError
from kvjax.kernels.prompts import problem as prompt_problem
from kvjax.kernels.target import Target, tracing_for
from kvjax.ops import prompt_kernel

BFLOAT16 = ml_dtypes.bfloat16

_run = jax.jit(
    functools.partial(kvjax.ragged_attention, return_lse=True), static_argnames=("causal", "sm_scale", "implementation")
)


@contextlib.contextmanager
def hopper(*, detect_races: bool = False, multiprocessors: int = 1) -> Iterator[None]:
    """The prompt kernel, interpreted, after a stand-in for the kernel of rows that see nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompt_kernel.kernel, "join", prompt_model.join)
        with interpret_mode(detect_races=detect_races), tracing_for(Target(multiprocessors)):
            yield


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "all"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, BFLOAT16], ids=lambda dtype: np.dtype(dtype).name)
def test_xla_matches_float64(dtype: Any, causal: bool):
    args = arrays(STEP, dtype)
    check(args, _run(*args, causal=causal, implementation="xla"), attention(args, causal))


def test_xla_takes_many_chunks_and_skips_those_that_no_row_sees(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kvjax.ops.softmax.blocks_per_chunk", lambda *_: 1)
    args, read = arrays(Lengths((3, 2), (2, 9))), []
    choose = kvjax.ops.softmax.TokenChunks

    def counting(number: int, read_chunk: Any, **options: Any) -> Any:
        def count(i: Any) -> Any:
            jax.debug.callback(lambda i: read.append(int(i)), i)
            return read_chunk(i)

        return choose(number, count, **options)

    monkeypatch.setattr("kvjax.ops.softmax.TokenChunks", counting)
    got = kvjax.ragged_attention(*args, return_lse=True)
    check(args, got, attention(args, True))
    jax.effects_barrier()
    assert max(read) == 8  # the last token of the longest sequence, of 16


def test_rows_before_the_first_sequence_see_nothing():
    args = arrays(STEP, before=(70, 13))
    check(args, _run(*args, implementation="xla"), attention(args, True))
    args = arrays(Lengths((3,), (9,)), BFLOAT16, before=(70, 13))
    with hopper():
        got = jax.block_until_ready(_run(*args, implementation="mosaic"))
    check(args, got, attention(args, True))


@settings(max_examples=15)
@given(st.lists(st.tuples(st.integers(0, 70), st.integers(0, 140)), min_size=3, max_size=3), st.booleans())
def test_xla_matches_float64_for_random_lengths(lengths: list[tuple[int, int]], causal: bool):
    """Of a call that is compiled once."""
    q_lens, kv_lens = zip(*lengths, strict=True)
    args = arrays(Lengths(q_lens, kv_lens), padding=(210 - sum(q_lens), 420 - sum(kv_lens)))
    check(args, _run(*args, causal=causal, sm_scale=-0.3), attention(args, causal, -0.3))


@pytest.mark.parametrize("lengths", [Lengths((), ()), Lengths((0,), (0,)), Lengths((2,), (0,)), Lengths((0,), (2,))])
def test_nothing_to_attend_to_is_no_error(lengths: Lengths):
    args = arrays(lengths, padding=(0, 0))
    check(args, kvjax.ragged_attention(*args, return_lse=True), attention(args, True))


@pytest.mark.parametrize(
    ("lengths", "causal", "options"),
    [
        pytest.param(STEP, True, MLA, id="MLA"),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (
                (STEP, False, MLA),
                (STEP, True, {"sizes": (64, 64), "padding": (10, 300)}),
                (STEP, False, {"sizes": (128, 128), "heads": (3, 1)}),
                (Lengths((60,), (0,)), True, {"sizes": (80, 48)}),
                (Lengths((65,), (13,)), True, MLA | {"padding": (0, 0)}),  # rows before all keys
            )
        ),
    ],
)  # fmt: skip
def test_the_interpreted_kernel_matches_float64_without_races(lengths: Lengths, causal: bool, options: dict[str, Any]):
    """On one multiprocessor, which takes all items one after another."""
    args = arrays(lengths, BFLOAT16, **options)
    with hopper(detect_races=True):
        got = jax.block_until_ready(_run(*args, causal=causal, implementation="mosaic"))
    check(args, got, attention(args, causal))


@pytest.mark.full
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "all"])
def test_the_kernel_divides_the_tokens_of_few_rows(monkeypatch: pytest.MonkeyPatch, causal: bool):
    monkeypatch.setattr(prompt_problem, "MIN_SPLIT_TOKENS", 64)
    args = arrays(Lengths((5, 9), (290, 11)), np.float16, sizes=(64, 64), heads=(2, 2))
    with hopper(multiprocessors=8):
        got = jax.block_until_ready(_run(*args, causal=causal, implementation="mosaic"))
    check(args, got, attention(args, causal))


@pytest.mark.gpu
@matrix(ON_A_GPU, pairs=True)
def test_on_a_gpu_the_kernel_matches_float64(
    heads: tuple[int, int], sizes: tuple[int, int], input_dtype: str, causal: bool
):
    if jax.devices()[0].compute_capability != "9.0":
        pytest.skip("the prompt kernel is for compute capability 9.0")
    for lengths in (STEP, Lengths((700, 1, 300), (1500, 77, 300)), Lengths((9,), (4000,))):
        args = arrays(lengths, INPUT_DTYPES[input_dtype], heads=heads, sizes=sizes, before=(70, 13))
        got = _run(*args, causal=causal, implementation="mosaic")
        check(args, got, attention(args, causal))


@pytest.mark.parametrize("implementation", ["xla", pytest.param("mosaic", marks=pytest.mark.gpu)])
def test_a_chunk_and_pieces_of_its_context_join_to_the_whole(implementation: str):
    args = arrays(Lengths((40, 7), (40, 90)), np.float16, sizes=(64, 32))
    whole = attention(args, True)
    kv_lens, q_lens = np.diff(args.cu_kv_lens), np.diff(args.cu_q_lens)
    context, parts = kv_lens - q_lens, []
    for first in (0, 32, 64, None):  # the last is the chunk
        starts = args.cu_kv_lens[:-1] + (context if first is None else np.minimum(first, context))
        lens = q_lens if first is None else np.clip(context - first, 0, 32)
        index = np.concatenate([np.arange(start, start + size) for start, size in zip(starts, lens, strict=True)])
        own = np.cumsum([0, *lens], dtype=np.int32)
        parts.append(
            _run(
                args.query, *(x[index] for x in args[1:3]), args.cu_q_lens, own,
                causal=first is None, implementation=implementation,
            )
        )  # fmt: skip
    check(args, kvjax.merge_attention_states(*map(list, zip(*parts, strict=True))), whole)


def test_gradients_are_those_of_attention():
    """Also of padding, whose gradients are zeros though it is NaN."""
    args = arrays(Lengths((3, 20), (9, 20)), sizes=(8, 8))
    weight = np.random.default_rng(1).standard_normal((*args.query.shape[:2], 8)).astype(np.float32)

    def loss(query: Any, key: Any, value: Any) -> Any:
        return jnp.sum(kvjax.ragged_attention(query, key, value, *args[3:]) * weight)

    def dense(query: Any, key: Any, value: Any) -> Any:
        row, token = np.arange(len(query)), np.arange(len(key))
        owner, own_row = (np.searchsorted(x[1:], at, side="right") for x, at in ((args[4], token), (args[3], row)))
        # The last rows of both end with the last tokens, which are 6 further.
        sees = (owner == own_row[:, None]) & (token <= row[:, None] + 6) & (own_row < 2)[:, None]
        key, value = (jnp.repeat(jnp.where((owner < 2)[:, None, None], x, 0), 2, axis=1) for x in (key, value))
        query = jnp.where((own_row < 2)[:, None, None], query, 0)
        logits = jnp.where(sees[:, None], jnp.einsum("nhd,mhd->nhm", query, key) / 8**0.5, -1e30)
        out = jnp.einsum("nhm,mhd->nhd", jax.nn.softmax(logits), value)
        return jnp.sum(jnp.where((own_row < 2)[:, None, None], out * weight, 0))

    for got, want in zip(jax.grad(loss, (0, 1, 2))(*args[:3]), jax.grad(dense, (0, 1, 2))(*args[:3]), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)


ERRORS = [
    ({"query": np.zeros((3, 4), np.float32)}, KVCacheValueError, r"query: got shape \(3, 4\), expected \[num_tokens, "),
    ({"query": np.zeros((3, 4, 32), np.int32)}, KVCacheTypeError, "query: got dtype int32, expected one of float32"),
    ({"query": np.zeros((3, 5, 32), np.float32)}, KVCacheValueError, "query: got num_heads=5, expected a multiple"),
    ({"key": [1.0]}, KVCacheTypeError, "key: got a list, expected an array"),
    ({"key": np.zeros((9, 2, 32), np.float16)}, KVCacheTypeError, "key: got dtype float16, expected float32"),
    ({"key": np.zeros((9, 2, 24), np.float32)}, KVCacheValueError, r"key: got shape \(9, 2, 24\), .*head_size=32"),
    ({"key": np.zeros((9, 0, 32), np.float32), "value": np.zeros((9, 0, 16), np.float32)}, KVCacheValueError,
     r"key: got shape \(9, 0, 32\), expected at least one head"),
    ({"value": np.zeros((9, 2, 0), np.float32)}, KVCacheValueError, r"value: got shape \(9, 2, 0\), expected at least"),
    ({"value": np.zeros((8, 2, 16), np.float32)}, KVCacheValueError, r"value: got shape .* expected \[num_kv_tokens=9"),
    ({"cu_q_lens": np.float32([0, 3])}, KVCacheTypeError, "cu_q_lens: got dtype float32, expected one of int32, int64"),
    ({"cu_q_lens": np.int32([])}, KVCacheValueError, r"cu_q_lens: got shape \(0,\), expected \[num_seqs \+ 1\]"),
    ({"cu_kv_lens": np.int32([0, 3, 5])}, KVCacheValueError, r"cu_kv_lens: got shape \(3,\), expected \[num_seqs "),
    ({"causal": 1}, KVCacheTypeError, "causal: got 1"),
    ({"sm_scale": np.inf}, KVCacheValueError, "sm_scale: got inf"),
    ({"return_lse": None}, KVCacheTypeError, "return_lse: got None"),
    ({"implementation": "cuda"}, KVCacheValueError, "implementation: got 'cuda'"),
    ({"implementation": "mosaic"}, UnsupportedError, "query: got float32, expected float16 or bfloat16"),
]  # fmt: skip


@pytest.mark.parametrize(("changed", "error", "message"), ERRORS)
def test_bad_arguments_raise(changed: dict[str, Any], error: type[Exception], message: str):
    args = arrays(Lengths((3,), (9,)), padding=(0, 0))
    with pytest.raises(error, match=message):
        kvjax.ragged_attention(**(args._asdict() | changed))


@pytest.mark.parametrize(
    ("sizes", "sm_scale", "capability", "reason"),
    [
        ((72, 64), None, (9, 0), "its head sizes are multiples of 16 up to 256; got 72"),
        ((64, 272), None, (9, 0), "got 272"),
        ((64, 64), -1.0, (9, 0), "sm_scale: got 0 or less"),
        ((64, 64), None, (10, 0), "compute capability 9; got"),
    ],
)
def test_asked_for_the_kernel_it_says_why_it_does_not_serve(
    monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, int], sm_scale: float | None, capability: Any, reason: str
):
    target = Target(compute_capability=capability)
    monkeypatch.setattr(kvjax.ops.select.placement, "target_of", lambda _: target)
    args = arrays(STEP, np.float16, sizes=sizes)
    with pytest.raises(UnsupportedError, match=reason):
        kvjax.ragged_attention(*args, sm_scale=sm_scale, implementation="mosaic")
    check(args, _run(*args, sm_scale=sm_scale), attention(args, True, sm_scale))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"cu_q_lens": np.int32([0, 2, 1])}, r"cu_q_lens\[2\]: got 1, expected 0 first"),
        ({"cu_kv_lens": np.int32([0, 2, 10])}, r"cu_kv_lens\[2\]: got 10, expected 0 first"),
    ],
)
def test_checked_mode_refuses_lengths(changed: dict[str, Any], message: str):
    args = arrays(Lengths((1, 2), (4, 5)), padding=(0, 0))._asdict() | changed
    with kvjax.checked(), pytest.raises(KVCacheValueError, match=message):
        kvjax.ragged_attention(**args)
    with kvjax.checked():
        error, _ = jax.jit(checkify.checkify(lambda args: kvjax.ragged_attention(**args)))(args)
    with pytest.raises(checkify.JaxRuntimeError, match=message):
        error.throw()


@pytest.mark.full
@pytest.mark.skipif(gpu_compile.why_not() is not None, reason=str(gpu_compile.why_not()))
@pytest.mark.parametrize("sizes", [(192, 128), (128, 128), (64, 64)], ids=str)
def test_compiled_it_copies_no_keys_or_values_and_spills_nothing(sizes: tuple[int, int]):
    """Keys and values are not copied, and no register spills."""
    struct, (size, size_v) = jax.ShapeDtypeStruct, sizes
    program = compile_for(
        "h100",
        functools.partial(kvjax.ragged_attention, return_lse=True, implementation="mosaic"),
        struct((2048, 16, size), jnp.bfloat16),
        *[struct((8192, 16, each), jnp.bfloat16) for each in (size, size_v)],
        *[struct((5,), jnp.int32)] * 2,
    )
    kernels = {kernel.name.removesuffix("_mosaic_gpu_kernel"): kernel for kernel in program.kernels}
    assert sorted(kernels) == ["join_rows", "prompt_attention"]
    attend = kernels["prompt_attention"]
    assert attend.spill_bytes == 0
    assert "wgmma" in attend.ptx
    assert "serialized" not in attend.ptxas_log
    assert program.temp_size < 2**20
