"""The decode kernel: its parts against their definitions, the whole interpreted, and compiled for GPUs."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import types
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from support import attention_suite as suite
from support import gpu_compile
from support.any_count import attention_kernels
from support.attention_suite import Case
from support.gpu_compile import HOPPER_AND_BLACKWELL, compile_for
from support.helpers import simple_spec
from support.interpret_mode import interpret_mode

from kvjax import (
    STORED_KV_CACHE_DTYPES,
    AttentionSpec,
    FullAttentionSpec,
    KVCache,
    KVCacheDType,
    UnsupportedError,
    gather_kv,
    paged_attention,
    quant,
    ragged_paged_attention,
    reshape_and_cache_flash,
)
from kvjax.kernels import lanes, placement
from kvjax.kernels.attention import any_batch, choice, schedule, softmax
from kvjax.kernels.attention.choice import choose, rows_per_pass, scratch, why_not
from kvjax.kernels.attention.formats import Format, in_terms
from kvjax.kernels.attention.problem import MergeConfig, Problem
from kvjax.kernels.attention.ring import Ring
from kvjax.kernels.launchable import PageMemory
from kvjax.kernels.registers import LANES, THREADS, WARPS
from kvjax.kernels.target import Target, tracing_for

SERVED = list(STORED_KV_CACHE_DTYPES)
STATIC = ("sm_scale", "sliding_window", "logits_soft_cap", "batch_invariant")


def attend(query: Any, *args: Any, **options: Any) -> Any:
    run = jax.jit(functools.partial(paged_attention, return_lse=True, implementation="mosaic"), static_argnames=STATIC)
    with interpret_mode():
        return jax.tree.map(np.asarray, run(query, *args, **options))


@pytest.mark.parametrize(
    "case",
    [
        Case("nvfp4", lengths=(90, 0, 20), num_kv_heads=1, head_size=32, window=60, sinks=True, cap=5.0, q_len=2),
        Case("nvfp4", "float16", lengths=(1,), num_kv_heads=1),  # results are exact
        pytest.param(
            Case("nvfp4", lengths=(40, 0), num_kv_heads=2, window=39, sinks=True, cap=5.0, q_len=2),
            marks=pytest.mark.nightly,
        ),
        pytest.param(Case("fp8_e4m3", lengths=(37,), scales="per_head"), marks=pytest.mark.full),
        pytest.param(Case("float16", lengths=(20,), scales="scalar", group=5, q_len=4), marks=pytest.mark.nightly),
        pytest.param(Case("bfloat16", lengths=(37,), query_dtype="float16", block_size=8), marks=pytest.mark.full),
        pytest.param(Case("nvfp4", lengths=(37,), head_size=80, v_scale_layout="swizzled"), marks=pytest.mark.nightly),
        pytest.param(Case("float32", "float16", "HND", lengths=(20,), head_size_v=36, q_len=2), marks=pytest.mark.full),
        pytest.param(
            Case("nvfp4", lengths=(37,), head_size=16, group=16), marks=pytest.mark.nightly
        ),  # states fill more
        pytest.param(
            Case("int8_per_token_head", lengths=(37, 5), num_kv_heads=2, window=20, sinks=True, q_len=2),
            marks=pytest.mark.full,
        ),
        Case("bfloat16", lengths=(37, 3), num_kv_heads=1, q_len=4, tree=True),
        pytest.param(
            Case("nvfp4", lengths=(50, 5), num_kv_heads=1, head_size=32, group=1, q_len=34, window=20, tree=True),
            marks=pytest.mark.nightly,
        ),
        Case("fp8_e4m3", lengths=(40, 3), num_kv_heads=1, head_size=32, q_len=9, window=5, tree=True),  # in two passes
        pytest.param(
            Case("bfloat16", lengths=(77, 20), num_kv_heads=2, head_size=32, group=1, q_len=16, window=30, tree=True),
            marks=pytest.mark.nightly,
        ),
        pytest.param(Case("fp8_per_token_head", "float16", "HND", lengths=(37,), head_size=80), marks=pytest.mark.full),
        pytest.param(Case("int8_per_token_head", lengths=(37,), block_size=8, group=5), marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_interpreted_attention_matches_float64(case, monkeypatch):
    """Of sequences of two stages, which two thread blocks divide."""
    monkeypatch.setattr(schedule, "MIN_STAGES", 1)
    problem = suite.build(case)
    suite.assert_right(problem, *problem.run(attend))


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_interpreted_a_mean_that_float32_holds_does_not_overflow(dtype, monkeypatch):
    """Of one thread block's tokens, and of the parts that two have."""
    monkeypatch.setattr(choice, "MAX_TILES", 2)  # less to compile
    monkeypatch.setattr(schedule, "MIN_STAGES", 1)
    suite.check_large_values(attend, dtype, 70)


@pytest.mark.full
@pytest.mark.parametrize("merge", [*choice.MERGES.values(), MergeConfig(1, 1, 4)], ids=str)
def test_interpreted_parts_are_merged_in_every_way(merge, monkeypatch):
    """Rows of 48 elements take one thread block, or with one element a thread two."""
    monkeypatch.setattr(choice, "merge_config", lambda _: merge._replace(warps=min(merge.warps, WARPS)))
    monkeypatch.setattr(schedule, "MIN_STAGES", 1)
    problem = suite.build(Case("float16", lengths=(40, 0), head_size=16, head_size_v=48, num_kv_heads=4, group=2))
    suite.assert_right(problem, *problem.run(attend))


def test_interpreted_small_values_behind_an_attention_sink_keep_their_bits():
    """Of weights below 2**-17 of the largest, whose token has the value 0, and of the smallest block scales."""
    num_tokens, spec = 64, FullAttentionSpec(16, 1, 16, dtype="fp8_k_nvfp4_v")
    rng, table, lens = np.random.default_rng(0), np.arange(4, dtype=np.int32)[None], np.array([num_tokens], np.int32)
    key = np.zeros((num_tokens, 1, 16), np.float32)
    key[:, 0, 0] = rng.integers(-4, 5, num_tokens) / 4
    key[0, 0, 0] = 18
    value = np.float32(0.01) * rng.standard_normal((num_tokens, 1, 16)).astype(np.float32)
    value[0] = 0
    slots = np.arange(num_tokens, dtype=np.int32)
    cache = reshape_and_cache_flash(key, value, KVCache.allocate(spec, 4), slots)
    query = jnp.zeros((1, 1, 16), jnp.bfloat16).at[..., 0].set(1)
    out, _ = attend(query, cache, table, lens, sm_scale=math.log(2))
    stored = np.asarray(gather_kv(cache, table, lens, dtype=jnp.float32)[1], np.float64).reshape(-1, 16)
    weights = 2.0 ** (key[:, 0, 0] - 18)
    expected = weights @ stored / weights.sum()
    error = np.asarray(out[0, 0], np.float64) - expected
    assert np.sqrt(np.mean(error**2) / np.mean(expected**2)) < 0.004


@pytest.mark.full
@pytest.mark.parametrize("layout", ["linear", "swizzled"])
def test_interpreted_attention_with_conversions_of_sm_100_matches_float64(layout):
    problem = suite.build(Case("nvfp4", lengths=(20, 3), num_kv_heads=1, v_scale_layout=layout))
    with tracing_for(Target(148, (10, 0))):
        suite.assert_right(problem, *problem.run(attend))


@pytest.fixture
def several_parts(monkeypatch: pytest.MonkeyPatch):
    """Batch-invariant calls divide sequences into parts of two stages and of more."""
    monkeypatch.setattr(choice, "MAX_TILES", 2)
    monkeypatch.setattr(choice, "PART_TOKENS", 64)
    monkeypatch.setattr(schedule, "MAX_PARTS", 3)
    return functools.partial(attend, batch_invariant=True)


@pytest.mark.full
@pytest.mark.parametrize(
    "case",
    [
        Case("nvfp4", lengths=(70, 20), num_kv_heads=1, head_size=32, sinks=True),
        Case("bfloat16", lengths=(40, 0, 300), window=200, q_len=2),
    ],
    ids=str,
)
def test_interpreted_a_sequence_has_its_bits_in_every_batch(case, several_parts):
    """The longest, of the most parts: each sequence alone is a program more to compile."""
    suite.check_alone(case, several_parts, sequences=[int(case.seq_lens.argmax())])


def test_interpreted_parts_of_each_sequence_are_merged(several_parts):
    problem = suite.build(Case("bfloat16", lengths=(400, 10, 400), num_kv_heads=1, group=1))
    suite.assert_right(problem, *problem.run(several_parts))


@pytest.mark.parametrize("window", [None, 700])
def test_each_part_is_of_its_sequence_alone_and_has_one_block(window, monkeypatch):
    monkeypatch.setattr(lanes, "thread_index", lambda: jnp.arange(THREADS))  # in a kernel it has a layout
    rng, least, rows, num_blocks = np.random.default_rng(0), 3, 16, 5
    for num_seqs in (7, 40):
        lens = rng.choice([0, 1, 47, 48, 49, 700, 20_000], num_seqs).astype(np.int32)
        spec = simple_spec(KVCacheDType.BFLOAT16)
        problem = problem_of(spec, num_seqs=num_seqs, max_blocks=2048, window=window)

        @jax.jit
        def share(block, lens, problem=problem):
            sequences = schedule.Sequences(problem, rows, jax.new_ref(lens))
            return sequences.share_of_parts(schedule.Workers(block, num_blocks), least)[:3]

        with interpret_mode():
            shares = [[int(x) for x in share(block, lens)] for block in range(num_blocks)]
        sequences = schedule.Sequences(problem, rows, None)
        counts = np.asarray(sequences.stages(jnp.asarray(lens))[1]).tolist()
        sizes = np.asarray(sequences.part(jnp.asarray(counts), least)).tolist()
        parts = [range(0, count, size) for count, size in zip(counts, sizes, strict=True)]
        expected = [(seq, start) for seq, starts in enumerate(parts) for start in starts]
        assert max(map(len, parts)) <= sequences.max_parts(least) <= schedule.MAX_PARTS
        taken = []
        for sequence, skipped, left in shares:
            while left > 0:
                if counts[sequence]:
                    taken.append((sequence, skipped))
                num_stages = min(counts[sequence] - skipped, sizes[sequence])
                skipped, left = skipped + num_stages, left - num_stages
                if skipped == counts[sequence]:
                    sequence, skipped = sequence + 1, 0
        assert taken == expected, (lens, shares)


class Visits(NamedTuple):
    """A visitor of segments that writes down what it is called with; its cursor counts segments.

    Attributes:
      segments: int32 `[segments, 5]`: sequence, first stage, number of stages, whether whole, part.
      spans: int32 `[sequences, 2]`: first and last thread block.
    """

    segments: Any
    spans: Any

    def attend(self, sequence: Any, length: Any, first: Any, count: Any, cursor: Any) -> Any:
        self.segments[cursor, :3] = jnp.stack([sequence, first, count])
        return cursor, cursor + 1

    def finish(self, sequence: Any, state: Any, whole: Any, part: Any) -> None:
        self.segments[state, 3:] = jnp.stack([whole.astype(jnp.int32), part])

    def store_span(self, sequence: Any, first: Any, last: Any) -> None:
        self.spans[sequence] = jnp.stack([first, last])


def test_each_stage_is_of_one_thread_block_and_no_segment_is_empty(monkeypatch):
    """And parts are where spans say that they are."""
    monkeypatch.setattr(lanes, "thread_index", lambda: jnp.arange(THREADS))  # in a kernel it has a layout
    rng, rows, num_blocks = np.random.default_rng(0), 16, 6

    @jax.jit
    def serve(lens, block):
        visits = Visits(jax.new_ref(jnp.full((64, 5), -1)), jax.new_ref(jnp.full((len(lens), 2), -1)))
        problem = problem_of(simple_spec(KVCacheDType.BFLOAT16), num_seqs=len(lens), max_blocks=2048)
        sequences = schedule.Sequences(problem, rows, jax.new_ref(lens))
        workers = schedule.Workers(block, num_blocks)
        schedule.serve(visits, sequences, workers, None, jnp.int32(0))
        return visits.segments[...], visits.spans[...], sequences.share(workers).size

    for _ in range(40):
        lens = rng.choice([0, 1, 16, 17, 33, 100, 700], rng.choice([1, 5, 40])).astype(np.int32)
        counts = -(-lens // rows)
        every, spans = [], np.full((len(lens), 2), -1)
        for block in range(num_blocks):
            with interpret_mode():
                segments, own, size = (np.asarray(x) for x in serve(lens, jnp.int32(block)))
            segments = segments[segments[:, 0] >= 0]
            assert all(segments[:, 2] + (segments[:, 3] == 1) * (counts[segments[:, 0]] == 0) > 0)
            assert sum(segments[:, 2]) <= size
            spans = np.where(own >= 0, own, spans)
            every += [(block, *segment) for segment in segments.tolist() if segment[2]]
        for seq, count in enumerate(counts.tolist()):
            own = [x for x in every if x[1] == seq]
            stages = [stage for _, _, first, number, _, _ in own for stage in range(first, first + number)]
            assert stages == list(range(count)), (lens, own)
            if count:
                assert spans[seq].tolist() == [own[0][0], own[-1][0]]
                assert [x[0] for x in own] == list(range(own[0][0], own[-1][0] + 1))
                assert [x[4] for x in own] == [int(len(own) == 1)] * len(own)
                assert [x[5] for x in own] == [2 * block + (i == 0) for i, (block, *_) in enumerate(own)]


def interpreted(function: Any, *registers: np.ndarray) -> list[np.ndarray]:
    """What the model of a primitive makes of registers."""
    with interpret_mode():
        return jax.tree.map(np.asarray, function(*map(jnp.asarray, registers)))


def halves(word: np.ndarray, dtype: Any = np.float16) -> np.ndarray:
    """The numbers of 16 bits in the lower and the upper half of words, `[..., 2]` float32."""
    return np.stack([word & 0xFFFF, word >> 16], axis=-1).astype(np.uint16).view(dtype).astype(np.float32)


def decoded(words: np.ndarray, scale: float) -> np.ndarray:
    """`[THREADS, 8]`: the codes of words as kvjax.quant decodes them."""
    data = words.astype("<u4").view(np.uint8).reshape(THREADS, 4)
    scales = jnp.full((THREADS, 1), scale, jnp.float8_e4m3fn)
    both = jnp.concatenate([data, data], axis=1)  # a block has 8 bytes
    return np.asarray(quant.decode_nvfp4(both, scales, 1.0))[:, :8]


@pytest.mark.parametrize("by_instruction", [False, True])
@pytest.mark.parametrize("scale", [1.0, 0.001953125, 448.0])
def test_each_code_of_a_key_is_decoded_exactly(scale, by_instruction):
    """Over all 256 pairs of codes in each place of a word."""
    fmt = Format.of(KVCacheDType.NVFP4, converts_e2m1=by_instruction)
    low, high = np.divmod(np.arange(256, dtype=np.uint32), 16)
    for chunk in range(2):
        codes = (low | high << 4)[chunk * THREADS :][:THREADS] * np.uint32(0x01010101)
        word = codes ^ np.uint32(0x00F00F00)
        pair = np.full(THREADS, np.float16(scale).view(np.uint16), np.uint32) * np.uint32(0x10001)
        pairs = interpreted(lambda w, s: fmt.key_pairs([w] * 4, 16, [s, s]), word, pair)
        expected = decoded(word, scale)
        assert len(pairs) == len(fmt.key_dims(16)) == 16
        for got, dims in zip(pairs, fmt.key_dims(16), strict=True):
            both = halves(got) * np.float32(fmt.factor)
            np.testing.assert_array_equal(both, expected[:, [dim % 8 for dim in dims]])


@pytest.mark.parametrize("by_instruction", [False, True])
def test_each_code_of_a_value_is_decoded_exactly(by_instruction):
    fmt = Format.of(KVCacheDType.NVFP4, converts_e2m1=by_instruction)
    word = np.arange(THREADS, dtype=np.uint32) * np.uint32(0x02040811)
    pairs = interpreted(fmt.value_pairs, word)
    values = decoded(word, 1.0)
    for element, got in enumerate(pairs):
        expected = values[:, [element, element + 4]]
        np.testing.assert_array_equal(halves(got) * np.float32(fmt.factor), expected)


@pytest.mark.parametrize(
    "dtype", [dtype for dtype in SERVED if dtype.parts[0].info.bits == 8], ids=lambda dtype: dtype.value
)
def test_each_byte_is_decoded_exactly(dtype):
    fmt = Format.of(dtype.parts[0])
    data = np.arange(THREADS * 4, dtype=np.uint32).astype(np.uint8)
    word = data.view("<u4").astype(np.uint32)
    expected = np.asarray(data.view(fmt.dtype.info.storage_dtype), np.float32).reshape(THREADS, 4)
    pairs = interpreted(lambda w: fmt.key_pairs([w], 4, []), word)
    for got, dims in zip(pairs, fmt.key_dims(4), strict=True):
        np.testing.assert_array_equal(halves(got, fmt.operand), expected[:, list(dims)])
    for element, got in enumerate(interpreted(fmt.value_pairs, word)):
        np.testing.assert_array_equal(halves(got, fmt.operand), expected[:, [element, element + 2]])


@pytest.mark.parametrize("count", [2, 3])
def test_float32_is_split_into_a_sum_of_terms(count):
    """Of three exactly; each has the sign of the whole and 8 of its bits. A NaN stays one."""
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**31, (2, THREADS), dtype=np.uint32) | rng.integers(0, 2, (2, THREADS), np.uint32) << 31
    x, y = bits.view(np.float32)
    usual = (np.abs([x, y]) > 1e-20) & (np.abs([x, y]) < 1e38)  # terms of the smallest are subnormal
    terms = np.stack(interpreted(lambda x, y: in_terms(x, y, count), *bits))
    terms = np.stack([terms << 16, terms & 0xFFFF0000], axis=1).view(np.float32)
    with np.errstate(invalid="ignore"):
        terms, whole = terms.astype(np.float64), np.stack([x, y]).astype(np.float64)
        got = terms.sum(axis=0)
    assert usual.any()
    np.testing.assert_allclose(got[usual], whole[usual], rtol=0 if count == 3 else 2.0**-16)
    assert (np.abs(got[usual] - whole[usual]).max() > 0) == (count == 2)
    assert np.isnan(got[np.isnan(whole)]).all()


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_the_model_of_a_product_multiplies_the_matrices_that_registers_hold(dtype):
    rng = np.random.default_rng(0)
    a, b = rng.integers(-8, 9, (WARPS, 16, 16)), rng.integers(-8, 9, (WARPS, 16, 8))

    def words(pairs: np.ndarray) -> np.ndarray:  # [warps, 8, 4, 2]
        return lax.bitcast_convert_type(jnp.asarray(pairs, dtype), jnp.uint32).reshape(THREADS)

    def parts(matrix: np.ndarray) -> list[np.ndarray]:  # of [warps, rows, columns], rows in the threads' rows
        return [matrix[:, r : r + 8, c : c + 8].reshape(WARPS, 8, 4, 2) for c in (0, 8) for r in (0, 8)]

    left = [words(part) for part in parts(a)]
    right = [words(b.transpose(0, 2, 1)[:, :, k : k + 8].reshape(WARPS, 8, 4, 2)) for k in (0, 8)]
    zero = np.zeros(THREADS, np.float32)
    with interpret_mode():
        got = lanes.mma([jnp.asarray(zero)] * 4, left, right, dtype)
    got = np.stack([np.asarray(x).reshape(WARPS, 8, 4) for x in got], axis=-1)
    expected = (a @ b).reshape(WARPS, 2, 8, 4, 2)
    np.testing.assert_array_equal(got[..., :2], expected[:, 0])
    np.testing.assert_array_equal(got[..., 2:], expected[:, 1])


@pytest.mark.parametrize("half", [0, 1])
def test_both_halves_repeats_one_half_of_each_word(half):
    words = np.arange(THREADS, dtype=np.uint32) * np.uint32(0x02040811)
    expected = np.stack([words >> 16 * half & 0xFFFF] * 2, axis=-1).astype(np.uint16).view(np.uint32)[:, 0]
    np.testing.assert_array_equal(interpreted(lambda x: lanes.both_halves(x, half), words), expected)


def copied(
    which: str, rng: np.random.Generator, size: Any, condition: np.ndarray, where: np.ndarray
) -> tuple[np.ndarray, list[np.ndarray], np.ndarray, np.ndarray]:
    """Shared memory after a copy of each thread to `where`; both sources, and which row and byte threads read."""
    sources = [rng.integers(1, 256, (4, 512), dtype=np.uint8) for _ in range(2)]
    row, offset = rng.integers(0, 4, THREADS), rng.integers(0, 16, THREADS) * 16
    if which == "copy_bulk":  # all threads of a warp have the same copy
        row, offset, where, condition = (
            np.repeat(x[:: THREADS // WARPS], LANES) for x in (row, offset, where, condition)
        )
    with interpret_mode():
        refs = [jax.new_ref(jnp.asarray(source)) for source in sources]
        shared = jax.new_ref(jnp.zeros(4096, jnp.uint8))
        registers = [jnp.asarray(x, jnp.int32) for x in (where, row, offset)]
        to, row_register, offset_register = registers
        size = size if isinstance(size, int) else jnp.asarray(size, jnp.int32)
        copy = lanes.Copy(1, to, 32, row_register, 512, offset_register, 64, size, jnp.asarray(condition))
        if which == "copy_bulk":
            lanes.copy_bulk(shared, refs, None, 0, [copy])
        else:
            lanes.copy_async(shared, refs, copy)
        return np.asarray(shared[...]), sources, row, offset


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
def test_the_model_of_a_thread_s_copy_moves_its_bytes(size):
    rng = np.random.default_rng(size)
    condition, where = rng.random(THREADS) < 0.7, rng.permutation(THREADS) * 16
    got, sources, row, offset = copied("copy_async", rng, size, condition, where)
    expected = np.zeros_like(got)
    for thread in np.flatnonzero(condition):
        start = offset[thread] + 64
        expected[where[thread] + 32 :][:size] = sources[1][row[thread], start : start + size]
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("sizes", [160, [16, 176, 32, 96]], ids=str)
def test_the_model_of_a_bulk_copy_moves_the_bytes_of_each_warp(sizes):
    rng = np.random.default_rng(0)
    condition, where = np.repeat([True, True, False, True], LANES), np.repeat(rng.permutation(WARPS) * 256, LANES)
    size = sizes if isinstance(sizes, int) else np.repeat(sizes, LANES)
    got, sources, row, offset = copied("copy_bulk", rng, size, condition, where)
    expected = np.zeros_like(got)
    for warp in (0, 1, 3):
        thread = warp * LANES
        length = sizes if isinstance(sizes, int) else sizes[warp]
        start = offset[thread] + 64
        expected[where[thread] + 32 :][:length] = sources[1][row[thread], start : start + length]
    np.testing.assert_array_equal(got, expected)


def test_the_largest_window_is_accepted():
    query, cache, table, lens = suite.build(Case(q_len=2)).args
    run = functools.partial(paged_attention, sliding_window=2**31 - 1)
    jax.jit(run).trace(query, cache, table, lens)  # which traces the kernel, on a CPU too


def test_a_dtype_that_the_kernel_does_not_decode_has_a_reason(monkeypatch):
    monkeypatch.setattr(choice, "DTYPES", frozenset())
    assert why_not(simple_spec(KVCacheDType.NVFP4)) == "it reads no cache of dtype 'nvfp4'"


def lowered_for_cuda(implementation, num_seqs, *, ragged=False):
    spec = simple_spec(KVCacheDType.BFLOAT16, num_kv_heads=8, head_size=128, block_size=16)
    args = (
        jax.ShapeDtypeStruct((num_seqs, 64, 128), jnp.bfloat16),
        jax.eval_shape(functools.partial(KVCache.allocate, spec, 64)),
        jax.ShapeDtypeStruct((num_seqs, 4096), jnp.int32),
        jax.ShapeDtypeStruct((num_seqs,), jnp.int32),
    )
    options = {"batch_invariant": True, "implementation": implementation}
    run = functools.partial(paged_attention, **options)
    if ragged:
        args = *args, jax.ShapeDtypeStruct((num_seqs + 1,), jnp.int32)
        run = functools.partial(ragged_paged_attention, max_q_len=1, **options)
    return jax.jit(run).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def test_a_batch_invariant_call_with_too_large_a_workspace_is_served_by_xla_with_a_reason():
    """64 parts of each sequence, 64 heads of 128: int32 indexes the workspace of fewer than 4,096 sequences."""
    reason = "'mosaic' cannot serve this call: with batch_invariant=True its workspace .* got 4096 sequences"
    with pytest.raises(UnsupportedError, match=reason):
        lowered_for_cuda("mosaic", 4096)
    with pytest.raises(UnsupportedError, match=reason):
        lowered_for_cuda("mosaic", 4096, ragged=True)
    assert "mosaic_gpu" not in lowered_for_cuda(None, 4096)


@pytest.mark.full
@pytest.mark.skipif(gpu_compile.why_not() is not None, reason=str(gpu_compile.why_not()))
def test_a_batch_invariant_call_whose_workspace_just_fits_is_served_by_the_kernel():
    assert "mosaic_gpu" in lowered_for_cuda(None, 4095)


def test_queries_that_the_kernel_cannot_serve_have_a_reason():
    with pytest.raises(UnsupportedError, match="query: got float32, expected float16 or bfloat16"):
        suite.build(Case(query_dtype="float32")).run(functools.partial(paged_attention, implementation="mosaic"))


@pytest.mark.parametrize(
    ("dtype", "head_size", "head_size_v", "reason"),
    [
        ("float16", 40, 40, "16 elements of a key at once; got head_size=40"),
        ("fp8_e4m3", 64, 33, "values two bytes at once; got head_size_v=33, 33 bytes"),
        ("bfloat16", 1024, 1024, "64 rows of head_size=1024 and head_size_v=1024 fill the 220 KiB of shared memory"),
    ],
)
def test_rows_that_the_kernel_cannot_serve_are_served_by_xla_with_a_reason(dtype, head_size, head_size_v, reason):
    spec = simple_spec(KVCacheDType(dtype), num_kv_heads=1, head_size=head_size, head_size_v=head_size_v)
    assert reason in why_not(spec)
    problem = suite.build(Case(dtype, head_size=head_size, head_size_v=head_size_v, lengths=(3,)))
    with pytest.raises(UnsupportedError, match=reason):
        problem.run(functools.partial(paged_attention, implementation="mosaic"))
    suite.assert_right(problem, *problem.run(functools.partial(paged_attention, return_lse=True)))


@pytest.mark.parametrize("implementation", [None, "mosaic"])
def test_rows_that_fill_the_shared_memory_of_a_smaller_gpu_are_served_by_xla_with_a_reason(implementation, monkeypatch):
    """Known when the call is lowered; an H100 has room for them."""
    spec = simple_spec(KVCacheDType.BFLOAT16, num_kv_heads=1, head_size=512, block_size=16)
    reason = "64 rows of head_size=512 and head_size_v=512 fill the 98 KiB of shared memory"
    assert why_not(spec) is None
    assert reason in why_not(spec, None, SM_120)
    assert reason in why_not(spec, choice.BatchSizes(4, 1, 1, 4), SM_120)
    monkeypatch.setattr(placement, "_target", lambda: SM_120)
    traced = jax.jit(functools.partial(paged_attention, implementation=implementation)).trace(*shapes(spec))
    if implementation is None:
        assert "mosaic_gpu" not in traced.lower(lowering_platforms=("cuda",)).as_text()
    else:
        with pytest.raises(UnsupportedError, match=reason):
            traced.lower(lowering_platforms=("cuda",))


def test_fewer_warps_are_chosen_where_their_states_fill_shared_memory():
    """Of small keys and large values, whose stages of eight warps would fit."""
    spec = simple_spec(KVCacheDType.NVFP4, num_kv_heads=1, head_size=16, head_size_v=240, block_size=16)
    problem = problem_of(spec, group=rows_per_pass(spec), max_blocks=64)
    assert (choose(problem, Target()).warps, choose(problem, SM_120).warps) == (8, 4)


def test_a_call_that_is_not_traced_is_launched_for_its_device_too(monkeypatch):
    def choose(problem: Problem, target: Target) -> None:
        raise ZeroDivisionError(target)

    monkeypatch.setattr(placement, "target_of", lambda array: SM_120)
    monkeypatch.setattr(any_batch, "choose", choose)
    query, cache, table, lens = suite.build(Case("fp8_e4m3", lengths=(20,))).args
    with interpret_mode(), pytest.raises(ZeroDivisionError) as chosen:
        paged_attention(query, cache, table, lens, implementation="mosaic")
    assert chosen.value.args == (SM_120,)


def problem_of(spec: AttentionSpec, *, group: int = 1, num_seqs: int = 1, max_blocks: int, **changes: Any) -> Problem:
    memory = tuple(PageMemory(regions, spec.page_size_bytes, 256) for regions in spec.regions)
    problem = Problem(
        spec, memory, jnp.bfloat16, 1, group * spec.num_kv_heads, num_seqs, max_blocks, max_blocks, (0, 0), 4, 1, False,
        1.0, None, None, (1, 1), True, False,
    )  # fmt: skip
    return dataclasses.replace(problem, **changes)


def test_what_is_batch_invariant_is_launched_alike_whatever_the_batch():
    spec = simple_spec(KVCacheDType.NVFP4, num_kv_heads=8, head_size=128)
    batches = [(1, 1), (1, 4096), (33, 64), (256, 4096)]
    configs = {
        choose(problem_of(spec, num_seqs=num_seqs, max_blocks=max_blocks, batch_invariant=True), Target())
        for num_seqs, max_blocks in batches
    }
    assert len(configs) == 1
    assert (
        len({choose(problem_of(spec, num_seqs=num_seqs, max_blocks=width), Target()) for num_seqs, width in batches})
        > 1
    )


def test_each_multiprocessor_has_a_block():
    """One for each group of heads, where a block does not take all of them."""
    for num_kv_heads, groups in ((8, 1), (32, 4)):
        problem = problem_of(simple_spec(KVCacheDType.NVFP4, num_kv_heads=num_kv_heads, head_size=128), max_blocks=64)
        for multiprocessors in (132, 148):
            config = choose(problem, Target(multiprocessors))
            assert num_kv_heads // config.heads == groups
            assert config.blocks * groups == multiprocessors


@pytest.mark.parametrize(
    ("num_seqs", "length", "window", "tiles"),
    [(1, 8192, None, 1), (8, 8192, None, 2), (64, 2048, None, 2), (64, 8192, 1024, 2), (64, 8192, None, 3)],
)
def test_longer_calls_have_larger_stages_of_which_one_is_prefetched(num_seqs, length, window, tiles):
    spec = simple_spec(KVCacheDType.NVFP4, num_kv_heads=8, head_size=128, block_size=16)
    config = choose(problem_of(spec, num_seqs=num_seqs, max_blocks=length // 16, window=window), Target())
    assert (config.tiles, config.slots) == (tiles, 3)


def test_small_stages_are_prefetched_several_at_a_time():
    spec = simple_spec(KVCacheDType.NVFP4, num_kv_heads=1, head_size=16)
    problem = problem_of(spec, max_blocks=8)
    config = choose(problem, Target())
    ring = config.slots * choice.stage_layout(problem, 1, config.groups * config.tiles).stage_bytes
    assert (config.slots - 2) * ring // config.slots >= choice.AHEAD_BYTES


SM_120 = Target(188, (12, 0), 99 * 1024)


@pytest.mark.full
@pytest.mark.parametrize("target", [Target(), SM_120], ids=["sm_90", "sm_120"])
@pytest.mark.parametrize("dtype", SERVED, ids=lambda dtype: dtype.value)
def test_whatever_is_chosen_has_room_and_no_warp_waits_for_itself(dtype, target):
    for head_size, num_kv_heads, block_size, layout in itertools.product(
        (16, 64, 80, 256, 512), (1, 2, 3, 5, 8, 12), (8, 16, 784), ("NHD", "HND")
    ):
        shape = {"head_size": head_size, "num_kv_heads": num_kv_heads, "block_size": block_size, "layout": layout}
        spec = simple_spec(dtype, **shape)
        if why_not(spec, None, target) is not None:
            continue
        for max_blocks, rows in itertools.product((0, 8), {1, rows_per_pass(spec)}):
            problem = problem_of(spec, group=rows, max_blocks=max_blocks)
            config = choose(problem, target)
            buffer, barriers = scratch(problem, config)
            assert -(-buffer // 1024) * 1024 + barriers <= target.shared_bytes, shape
            assert barriers == 16 * config.slots > 0, shape
            ring = Ring(*([None] * 2), config.slots, *([None] * 9))
            assert 0 <= ring.ahead < config.slots, shape


COMPILED = [
    ("nvfp4", {}, {}),
    ("bfloat16", {}, {}),
    ("fp8_e4m3", {"layout": "HND", "num_layers": 4}, {"sliding_window": 1024, "logits_soft_cap": 50.0}),
    ("nvfp4", {"v_scale_layout": "swizzled", "head_size": 256, "num_kv_heads": 2}, {"q_len": 4}),
    ("fp8_e5m2", {"head_size": 80, "num_kv_heads": 3, "block_size": 784}, {}),
    ("float16", {"head_size": 64, "num_kv_heads": 32}, {"q_len": 8}),
    ("nvfp4", {}, {"batch_invariant": True}),
    ("nvfp4", {"head_size": 256, "num_kv_heads": 8}, {"num_seqs": 8}),
    ("nvfp4", {}, {"num_seqs": 1}),
    ("nvfp4", {"head_size": 16, "num_kv_heads": 2}, {"q_len": 2}),
    ("float32", {}, {}),
    ("float32", {"block_size": 8, "num_kv_heads": 2}, {}),
    ("int8_per_token_head", {}, {}),
    ("int8_per_token_head", {"head_size": 64, "num_kv_heads": 2}, {"q_len": 4, "sliding_window": 512}),
    ("fp8_per_token_head", {"layout": "HND"}, {"q_len": 2}),
    ("nvfp4", {}, {"q_len": 8, "tree_mask": np.tri(8, dtype=bool), "sliding_window": 1024}),
    ("bfloat16", {}, {"num_seqs": 8, "q_len": 40, "tree_mask": np.tri(40, dtype=bool), "sliding_window": 128}),
    ("fp8_e4m3", {"num_kv_heads": 2}, {"q_len": 4, "tree_mask": np.tri(4, dtype=bool)}),
]


def run(query: Any, cache: KVCache, table: Any, lens: Any, layer: Any = None, **options: Any) -> Any:
    return paged_attention(query, cache, table, lens, layer=layer, implementation="mosaic", **options)


@pytest.mark.full
@pytest.mark.skipif(gpu_compile.why_not() is not None, reason=str(gpu_compile.why_not()))
@pytest.mark.parametrize(
    ("target", "dtype", "spec", "options"),
    [
        pytest.param(target, *case, marks=() if (target, i) == ("h100", 0) else pytest.mark.full)
        for target in HOPPER_AND_BLACKWELL
        for i, case in enumerate(COMPILED)
    ]
    + [
        # Of these sizes each dtype takes other stages within 99 KiB.
        pytest.param("rtx6000pro", *case, marks=() if i == 1 else pytest.mark.full)
        for i, case in enumerate(COMPILED[:5])
    ],
)
def test_it_compiles_without_spills(target, dtype, spec, options):
    spec, options = dict(spec), dict(options)
    num_layers, q_len, num_seqs = spec.pop("num_layers", None), options.pop("q_len", 1), options.pop("num_seqs", 64)
    spec = simple_spec(KVCacheDType(dtype), **{"block_size": 16, "num_kv_heads": 8, "head_size": 128} | spec)
    shape = spec.cache_shape(4096)
    shape = shape if num_layers is None else (shape[0], num_layers, *shape[1:])
    cache = KVCache(jax.ShapeDtypeStruct(shape, spec.array_dtype), spec, num_layers=num_layers)
    query = jax.ShapeDtypeStruct((num_seqs, q_len, 4 * spec.num_kv_heads, spec.head_size), jnp.bfloat16)
    table, lens = jax.ShapeDtypeStruct((num_seqs, 64), jnp.int32), jax.ShapeDtypeStruct((num_seqs,), jnp.int32)
    layer = None if num_layers is None else jax.ShapeDtypeStruct((), jnp.int32)
    program = compile_for(target, functools.partial(run, **options), query, cache, table, lens, layer)
    attention = [kernel for kernel in program.kernels if kernel.name.startswith("paged_attention")]
    merges = [kernel for kernel in program.kernels if kernel.name.startswith("merge_paged_attention")]
    assert attention, "there is no kernel"
    assert len(attention) == len(merges)
    assert [kernel.spill_bytes for kernel in program.kernels] == [0] * len(program.kernels)
    for kernel in attention:  # bulk copies do not go by barriers alone
        made = kernel.ptx.index("fence.mbarrier_init.release.cluster;", kernel.ptx.index("mbarrier.init"))
        copied = kernel.ptx.find("cp.async.bulk.shared")
        assert copied < 0 or made < copied
        assert "fence.proxy.async.shared::cta; bar.sync 0;" in kernel.ptx or "st.shared" not in kernel.ptx
    # Nothing copies the cache.
    assert program.temp_size < 64 * 2**20


@pytest.mark.skipif(gpu_compile.why_not() is not None, reason=str(gpu_compile.why_not()))
@pytest.mark.parametrize(
    ("target", "multiprocessors"),
    [
        ("h100", 132),
        pytest.param("b200", 148, marks=pytest.mark.full),
        pytest.param("rtx6000pro", 188, marks=pytest.mark.full),
    ],
)
def test_it_is_launched_for_the_multiprocessors_of_the_target(target, multiprocessors):
    """The workspace has two parts for each block of threads."""
    program = compile_for(target, run, *shapes(simple_spec(KVCacheDType.NVFP4, num_kv_heads=1, head_size=64)))
    assert f"f32[{2 * multiprocessors * 4 * 64}]" in program.hlo
    assert [kernel.spill_bytes for kernel in program.kernels] == [0, 0]
    # sm_100 converts codes and block scales by instructions; sm_90 has the second of them.
    ptx = program.kernels[0].ptx
    assert ("cvt.rn.f16x2.e2m1x2" in ptx, "cvt.rn.f16x2.e4m3x2" in ptx) == (target != "h100", True)


def shapes(spec: AttentionSpec) -> tuple[Any, ...]:
    """The arguments of a call of one sequence."""
    cache = jax.eval_shape(lambda: KVCache.allocate(spec, 64))
    query = jax.ShapeDtypeStruct((1, 1, 4 * spec.num_kv_heads, spec.head_size), jnp.bfloat16)
    return query, cache, jax.ShapeDtypeStruct((1, 64), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)


def test_lowering_converts_few_bools(monkeypatch: pytest.MonkeyPatch):
    """For each, jax 0.11.2 starts ptxas: a kernel with hundreds took half a minute to compile."""
    converted: list[str] = []
    astype = mgpu.FragmentedArray.astype

    def counted(array: Any, *args: Any, **options: Any) -> Any:
        converted.append(str(array.mlir_dtype))
        return astype(array, *args, **options)

    monkeypatch.setattr(mgpu.FragmentedArray, "astype", counted)
    decode, *_ = attention_kernels(simple_spec(KVCacheDType.NVFP4, num_kv_heads=8, head_size=128)).of(4, 8)
    jax.jit(decode.function).trace(*decode.args).lower(lowering_platforms=("cuda",))
    assert converted
    assert converted.count("i1") < 40


@pytest.mark.full
def test_a_kernel_traced_for_one_gpu_is_not_taken_for_another(monkeypatch):
    """Programs that are alike share what was traced; not where they are for other GPUs."""
    seen = []
    monkeypatch.setattr(any_batch, "choose", lambda problem, target: seen.append(target) or choose(problem, target))
    args = shapes(simple_spec(KVCacheDType.FP8_E5M2, num_kv_heads=3, head_size=16))
    for multiprocessors in (132, 148, 132):
        monkeypatch.setattr(placement, "_target", functools.partial(Target, multiprocessors))
        jax.jit(lambda *args: run(*args)).trace(*args).lower(lowering_platforms=("cuda",))
    assert [target.multiprocessors for target in seen] == [132, 148]


def test_attributes_that_a_device_lacks_are_those_of_an_h100():
    assert Target.of(None) == Target() == Target(132, (9, 0), 227 * 1024)
    assert Target.of(types.SimpleNamespace(core_count=148, compute_capability="10.0")) == Target(148, (10, 0))
    assert Target.of(types.SimpleNamespace(core_count=188, compute_capability="12.0")) == SM_120
    gb10 = types.SimpleNamespace(core_count=48, compute_capability="12.1", shared_memory_per_block_optin=101376)
    assert Target.of(gb10) == Target(48, (12, 1), 101376)
    assert Target.of(types.SimpleNamespace(num_cores=148)) == Target(148)
    assert Target(148, (10, 0)).converts_e2m1
    assert not Target(132, (9, 0)).converts_e2m1


def test_a_row_that_sees_one_token_makes_up_for_the_rounding_of_its_weight():
    weight = jnp.float32(2.0) ** jnp.linspace(-0.5, 0.5, 9)
    rounded = weight.astype(jnp.bfloat16).astype(jnp.float32)
    assert np.max(np.abs(np.asarray(rounded / weight) - 1)) > 2**-10
    factor = softmax.rounding(weight, rounded, weight)
    np.testing.assert_allclose(np.asarray(rounded * factor / weight), 1, rtol=3e-7)
    assert softmax.rounding(weight[0], rounded[0], jnp.float32(0)) > 0  # finite where no token was seen
