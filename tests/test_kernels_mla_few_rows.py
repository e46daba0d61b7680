"""The MLA kernel for few query rows: interpreted, with race detection, and on a GPU, against float64; and compiled."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import gpu_compile
from support.gpu_compile import compile_for
from support.interpret_mode import interpret_mode
from support.mla_calls import LENGTHS, PARAMETERS, assert_near, attend, check, compile_operation, left_to_nights
from support.mla_cases import SM_SCALE, build, queries, spec_of

import kvjax
from kvjax import UnsupportedError, kernels, mla_paged_attention
from kvjax.kernels import mla
from kvjax.kernels.attention import Softmax, any_batch
from kvjax.kernels.attention.choice import BatchSizes, plain_problem
from kvjax.kernels.attention.problem import DecodeConfig
from kvjax.kernels.launchable import array_memory
from kvjax.kernels.mla import MLAConfig, arrays
from kvjax.kernels.target import Target

B200 = Target(148, (10, 0))
RTX = Target(188, (12, 0), 99 * 1024)

SHORT = 70, 1, 0

CASES = [
    # dtype, sizes, block size, query tokens, heads, query dtype, window, cap
    ("nvfp4", (128, 16), 16, 1, 16, "bfloat16", None, None),
    *(
        pytest.param(*case, marks=pytest.mark.full)
        for case in (
            ("nvfp4", (512, 64), 64, 1, 16, "bfloat16", None, None),
            ("nvfp4", (256, 0), 1, 1, 5, "bfloat16", None, None),
            ("nvfp4", (384, 32), 24, 2, 16, "float16", 30, 3.0),
            ("nvfp4_4over6", (128, 64), 48, 8, 4, "float16", 11, None),
            ("bfloat16", (128, 16), 16, 4, 4, "float16", None, None),
            ("bfloat16", (256, 64), 8, 3, 8, "bfloat16", 20, None),
            ("float16", (256, 32), 32, 1, 32, "bfloat16", None, 3.0),
            ("float16", (128, 0), 1, 1, 1, "float16", None, None),
            ("fp8_e4m3", (128, 64), 16, 8, 4, "bfloat16", 11, None),
            ("fp8_e4m3", (384, 16), 24, 1, 20, "float16", None, None),
            ("fp8_ds_mla", (512, 64), 64, 1, 16, "bfloat16", None, None),
            ("fp8_ds_mla", (256, 32), 16, 2, 16, "float16", 30, 3.0),
            ("fp8_ds_mla", (256, 0), 8, 1, 7, "bfloat16", None, None),
        )
    ),
]


@pytest.mark.parametrize(PARAMETERS, left_to_nights(CASES, but=("fp8_e4m3", (128, 64))))
def test_the_interpreted_kernel_matches_float64(dtype, sizes, block_size, q_len, heads, query_dtype, window, cap):
    check(dtype, sizes, block_size, q_len, heads, query_dtype, window, cap, lengths=SHORT, kernel="few")


@pytest.mark.full
@pytest.mark.parametrize("invariant", [False, True], ids=["shares", "parts"])
@pytest.mark.parametrize("shares", [2, 4])
def test_interpreted_parts_of_sequences_are_merged(shares, invariant):
    config = DecodeConfig(shares, 4, 1, 2, 5, part=2 if invariant else None)
    arguments = "nvfp4", (128, 16), 16, 2, 3, "bfloat16", None, None
    check(*arguments, lengths=(150, 70), config=config, invariant=invariant)


@pytest.mark.full
def test_interpreted_four_warps_divide_latents_for_16_rows():
    config = DecodeConfig(4, 4, 1, 2, 2)
    check("bfloat16", (128, 64), 16, 1, 16, "float16", None, None, lengths=SHORT, config=config)


@pytest.mark.full
def test_interpreted_stages_of_several_tiles_match_float64():
    config = DecodeConfig(2, 4, 2, 2, 2)
    check("nvfp4", (128, 16), 16, 1, 8, "bfloat16", None, None, lengths=(200, 70), config=config)


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["bfloat16", "nvfp4"])
def test_interpreted_warps_do_not_race(dtype, monkeypatch):
    """In one thread block, with more stages than slots, and sequences one after another."""
    monkeypatch.setattr(any_batch, "merge_kernel", lambda *_: lambda *_: None)  # nothing is merged
    problem = build(spec_of(dtype, (128, 16), 16), (200, 70))
    q = queries(problem.spec, (2, 2, 3), "bfloat16")
    with interpret_mode(detect_races=True):
        out, lse = attend(problem, q, Softmax(SM_SCALE), DecodeConfig(2, 4, 1, 2, 1))
        assert_near(problem, q, out, lse)


@pytest.mark.full
def test_the_interpreted_kernel_with_conversions_of_sm_100_matches_float64(monkeypatch):
    monkeypatch.setattr(arrays, "current", lambda: B200)
    check("nvfp4", (128, 16), 16, 1, 16, "bfloat16", None, None, lengths=SHORT, kernel="few")


@pytest.mark.full
def test_interpreted_logits_and_weights_stay_exact_where_scales_leave_float16():
    """Of latents whose scales differ by 2**24, those of the largest beyond float16 with their weights."""
    spec = spec_of("fp8_ds_mla", (256, 64), 16)
    rng = np.random.default_rng(3)
    magnitude = np.float32(2.0) ** rng.integers(-12, 12, (40, 1)).astype(np.float32)
    kv_c = rng.standard_normal((40, 256)).astype(np.float32) * magnitude
    k_pe = rng.standard_normal((40, 64)).astype(np.float32)
    cache = kvjax.KVCache.allocate(spec, 4)
    cache = kvjax.concat_and_cache_mla(kv_c, k_pe, cache, np.arange(16, 56, dtype=np.int32))
    q = [(x / 4096).astype(jnp.bfloat16) for x in queries(spec, (1, 1, 4), "float32")]
    arguments = cache, np.array([[1, 2, 3]], np.int32), np.array([40], np.int32)
    run = functools.partial(mla_paged_attention, *q, *arguments, sm_scale=1.0, return_lse=True)
    with interpret_mode():
        found = jax.block_until_ready(run(implementation="mosaic"))
    for x, y in zip(found, run(implementation="xla"), strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        np.testing.assert_allclose(x, y, rtol=2**-7, atol=2**-8 * np.abs(y).max())


@pytest.mark.full
@pytest.mark.parametrize(("dtype", "sizes", "q_len"), [("nvfp4", (128, 16), 2), ("fp8_ds_mla", (256, 16), 1)])
def test_interpreted_kernels_of_a_launcher_match_float64(dtype, sizes, q_len):
    """The kernels of a launcher, for any number of sequences and blocks, over tokens with gaps between them."""
    heads = 16 // q_len
    spec = spec_of(dtype, sizes, 16)
    problem = build(spec, SHORT)
    q = queries(spec, (len(SHORT), q_len, heads), "bfloat16")
    pages = array_memory(spec)
    softmax, own = kernels.Softmax(SM_SCALE), {"one_memory": True, "joined_query": True}
    kind = kernels.BatchKind(spec, pages, q[0].dtype, heads, q_len, (1, 1), softmax, **own)
    num_seqs, max_blocks = problem.block_table.shape
    joined = np.concatenate(q, axis=-1).reshape(num_seqs, q_len, -1)
    spaced = np.pad(joined, [(0, 0), (0, 1), (0, 8)], constant_values=np.nan)
    a_sequence, a_token = (q_len + 1) * spaced.shape[2], spaced.shape[2]
    scale = jnp.full((1,), problem.scale, jnp.float32)
    kv = problem.cache.kv.reshape(problem.cache.num_blocks, -1)
    with interpret_mode():
        decode, merge, workspace = kernels.mla_kernels(kind, Target()).of(num_seqs, max_blocks)
        out = jnp.zeros(num_seqs * 16 * sizes[0], q[0].dtype), jnp.zeros(num_seqs * 16, jnp.float32)
        between = [jnp.zeros(array.shape, array.dtype) for array in workspace]
        lens, table = jnp.asarray(problem.seq_lens), jnp.asarray(problem.block_table.reshape(-1))
        counts = num_seqs, max_blocks, problem.cache.num_blocks, max_blocks, a_sequence, a_token
        arrays = lens, table, jnp.asarray(spaced.reshape(-1)), kv, kv, scale, scale, *out, *between
        *out, partial, partial_lse, spans = decode.with_counts(counts, num_seqs, *arrays)
        out, lse = merge.with_counts((max_blocks,), num_seqs, lens, partial, partial_lse, spans, *out)
        jax.block_until_ready((out, lse))
    assert_near(problem, q, out.reshape(*q[0].shape), lse.reshape(q[0].shape[:-1]), is_few=True)


@pytest.mark.gpu
@pytest.mark.parametrize("invariant", [False, True], ids=["shares", "parts"])
@pytest.mark.parametrize(PARAMETERS, CASES)
def test_on_a_gpu_the_kernel_matches_float64(
    dtype, sizes, block_size, q_len, heads, query_dtype, window, cap, invariant
):
    lengths = 3000, *LENGTHS, 777, 64 * 40
    arguments = dtype, sizes, block_size, q_len, heads, query_dtype, window, cap
    check(*arguments, on_gpu=True, lengths=lengths, invariant=invariant, kernel="few")


@pytest.mark.full
@pytest.mark.skipif(gpu_compile.why_not() is not None, reason=str(gpu_compile.why_not()))
@pytest.mark.parametrize("target", gpu_compile.HOPPER_AND_BLACKWELL)
@pytest.mark.parametrize(
    ("dtype", "sizes", "q_len", "heads", "window"),
    [
        ("bfloat16", (512, 64), 1, 16, None),
        ("float16", (512, 64), 2, 16, 1024),
        ("fp8_e4m3", (512, 64), 1, 16, None),
        ("fp8_e4m3", (512, 64), 8, 4, 1024),
        ("fp8_ds_mla", (512, 64), 1, 16, None),
        ("fp8_ds_mla", (512, 64), 2, 16, None),
        ("nvfp4", (512, 64), 1, 8, None),
        ("nvfp4", (512, 64), 1, 16, None),
        ("nvfp4", (512, 64), 2, 16, 1024),
    ],
)
def test_compiled_it_decodes_each_latent_once_and_spills_no_more_than_known(target, dtype, sizes, q_len, heads, window):
    check_compiled(target, spec_of(dtype, sizes, 64, sliding_window=window), q_len, heads)


@pytest.mark.full
@pytest.mark.skipif(gpu_compile.why_not() is not None, reason=str(gpu_compile.why_not()))
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_compiled_for_less_shared_memory_four_warps_divide_the_latents(dtype):
    check_compiled("rtx6000pro", spec_of(dtype, (512, 64), 64), 1, 16, shares=4)


@pytest.mark.skipif(gpu_compile.why_not() is not None, reason=str(gpu_compile.why_not()))
@pytest.mark.parametrize("q_lens", [(), (1,)], ids=["3 dimensions", "4 dimensions"])
@pytest.mark.parametrize(("dtype", "heads"), [("nvfp4", 16), pytest.param("bfloat16", 128, marks=pytest.mark.full)])
def test_xla_neither_joins_nor_splits_the_parts_of_a_query(dtype, heads, q_lens):
    spec, struct = spec_of(dtype, (512, 64), 64), jax.ShapeDtypeStruct
    cache = jax.eval_shape(functools.partial(kvjax.KVCache.allocate, spec, 128))
    query = [struct((64, *q_lens, heads, size), jnp.bfloat16) for size in spec.part_sizes]
    call = functools.partial(mla_paged_attention, sm_scale=SM_SCALE, implementation="mosaic")
    program = compile_for("h100", call, *query, cache, struct((64, 128), jnp.int32), struct((64,), jnp.int32))
    assert program.device_ops == ("custom-call", "custom-call")


def check_compiled(target: str, spec: Any, q_len: int, heads: int, *, shares: int | None = None) -> None:
    kernel, merge = compile_operation(target, spec, q_len, heads).kernels
    assert (kernel.name.startswith("mla_paged_attention"), merge.spill_bytes) == (True, 0)
    # What needs no decoding takes wgmma there, and so do more than 16 rows.
    if target == "h100" and ("16" in spec.dtype.value or q_len * heads > 16):
        assert "wgmma" in kernel.ptx
        return
    assert kernel.spill_bytes <= SPILL_BYTES.get(spec.dtype.value, 0)
    assert ("mma.sync" in kernel.ptx, "wgmma" in kernel.ptx) == (True, False)
    # Each element is decoded once, and transposed in registers.
    registers = spec.part_sizes[0] // (shares or (2 if q_len * heads <= 16 else 4)) // 4
    assert kernel.ptx.count("movmatrix") >= registers
    if "nvfp4" in spec.dtype.value:
        assert ("e2m1x2" in kernel.ptx) == (target == "b200")


SPILL_BYTES = {"bfloat16": 116, "fp8_e4m3": 208, "fp8_ds_mla": 92, "nvfp4": 104}
"""The output and the latents of 16 tokens fill the registers, so that what a segment does not change is spilled, of two
tiles in a stage more than of one; by jax 0.12.0.1, or for bfloat16 0.11.2.
"""


def plan(dtype: str, rows: int, target: Target | None = None, sizes: tuple[int, int] = (512, 64)) -> str | None:
    return mla.why_not(spec_of(dtype, sizes, 64), None, target, rows)


def test_few_rows_are_served_on_every_gpu_and_many_on_hopper():
    for dtype in ("float16", "bfloat16", "fp8_e4m3", "fp8_ds_mla", "nvfp4", "nvfp4_4over6"):
        for target in (None, B200):
            assert all(plan(dtype, rows, target) is None for rows in (1, 16, 32))
    assert "compute capability 9" in str(plan("bfloat16", 33, B200))
    assert plan("nvfp4", 33) is None
    assert "compute capability 9" in str(plan("nvfp4", 33, B200))
    assert "got kv_lora_rank=192" in str(plan("nvfp4", 16, B200, (192, 64)))
    assert "got qk_rope_head_dim=48" in str(plan("nvfp4", 16, B200, (512, 48)))
    assert "got kv_lora_rank=384, which takes 396 bytes" in str(plan("fp8_ds_mla", 16, B200, (384, 64)))
    assert "dtype 'float32'" in str(plan("float32", 16))
    assert "shared memory" in str(plan("bfloat16", 32, RTX))


@pytest.mark.parametrize(
    ("dtype", "heads", "kind", "warps"),
    [
        *[("fp8_e4m3", 8, DecodeConfig, 2), ("nvfp4", 16, DecodeConfig, 2), ("fp8_ds_mla", 16, DecodeConfig, 2)],
        *[("nvfp4", 17, MLAConfig, None), ("fp8_ds_mla", 33, MLAConfig, None), ("bfloat16", 16, MLAConfig, None)],
    ],
)
def test_the_kernel_is_chosen_by_dtype_and_number_of_heads(dtype, heads, kind, warps):
    chosen = mla.choose(problem_of(dtype, heads), Target())
    assert isinstance(chosen, kind)
    assert warps is None or chosen.heads == warps
    assert isinstance(mla.choose(problem_of(dtype, min(heads, 32)), B200), DecodeConfig)


def problem_of(dtype: str, heads: int) -> Any:
    sizes = BatchSizes(num_seqs=1, q_len=1, group=heads, max_blocks=1)
    return dataclasses.replace(plain_problem(spec_of(dtype, (512, 64), 64), sizes), batch_invariant=False)


@pytest.mark.parametrize(
    ("dtype", "rows", "warps"),
    [("float16", 8, 2), ("float16", 16, 4), ("float16", 32, 4), ("bfloat16", 16, 4), ("fp8_ds_mla", 16, 2)],
)
def test_four_warps_divide_what_does_not_fit_shared_memory_for_two(dtype, rows, warps):
    assert plan(dtype, rows, RTX) is None
    assert mla.choose(problem_of(dtype, rows), RTX).heads == warps


def test_more_rows_of_4_bit_latents_are_served_by_xla_with_a_reason():
    problem = build(spec_of("nvfp4", (128, 16)), [20])
    q = queries(problem.spec, (1, 33), "bfloat16")
    arguments = *q, problem.cache, problem.block_table, problem.seq_lens
    with pytest.raises(UnsupportedError, match="it decodes latents of a multiple of 256 elements"):
        mla_paged_attention(*arguments, sm_scale=1.0, implementation="mosaic")
