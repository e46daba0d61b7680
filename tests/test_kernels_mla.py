"""The MLA kernel: interpreted, with race detection, and on a GPU, against float64; and compiled for H100."""

from __future__ import annotations

import collections
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from support import gpu_compile
from support.helpers import page_bytes
from support.interpret_mode import interpret_mode
from support.mla_calls import LENGTHS, PARAMETERS, assert_near, attend, check, compile_operation, left_to_nights
from support.mla_cases import NAN, SM_SCALE, build, queries, spec_of

import kvjax.spec
from kvjax import KVCache, KVCacheDType, UnsupportedError, mla_paged_attention, mla_ragged_paged_attention
from kvjax.kernels import codecs, mla
from kvjax.kernels.attention import BatchSizes, Softmax, any_batch
from kvjax.kernels.attention.choice import plain_problem
from kvjax.kernels.mla import MLAConfig, few_rows_stages
from kvjax.kernels.mla.decode import LatentDecode
from kvjax.kernels.mla.packed import Packed
from kvjax.kernels.mla.tiles import TOKENS, Source
from kvjax.kernels.registers import THREADS
from kvjax.kernels.target import Target
from kvjax.ops.route import Query, route

CASES = [
    # dtype, sizes, block size, query tokens, heads, query dtype, window, cap
    ("nvfp4", (256, 16), 16, 1, 3, "bfloat16", None, None),
    *(
        pytest.param(*case, marks=pytest.mark.full)
        for case in (
            ("bfloat16", (512, 64), 16, 1, 16, "bfloat16", None, None),
            ("float16", (512, 64), 64, 1, 64, "float16", None, None),
            ("bfloat16", (512, 64), 1, 1, 16, "bfloat16", None, None),
            ("bfloat16", (512, 64), 24, 1, 128, "bfloat16", None, None),
            ("float16", (512, 64), 8, 5, 16, "bfloat16", None, None),
            ("bfloat16", (512, 0), 16, 8, 3, "float16", None, 3.0),
            ("bfloat16", (256, 32), 16, 2, 40, "bfloat16", 70, None),
            ("float16", (256, 64), 128, 3, 4, "float16", 11, 3.0),
            ("bfloat16", (128, 16), 16, 1, 5, "bfloat16", 65, None),
            ("fp8_e4m3", (512, 64), 16, 1, 128, "bfloat16", None, None),
            ("fp8_e4m3", (512, 64), 1, 1, 16, "bfloat16", None, None),
            ("fp8_e4m3", (256, 32), 64, 3, 5, "float16", 70, 3.0),
            ("fp8_e4m3", (256, 0), 24, 8, 16, "bfloat16", None, None),
            ("nvfp4_4over6", (512, 64), 16, 1, 128, "bfloat16", None, None),
            ("nvfp4", (256, 32), 8, 3, 5, "float16", 70, 3.0),
            ("nvfp4", (512, 0), 24, 1, 16, "bfloat16", None, None),
            ("fp8_ds_mla", (512, 64), 64, 1, 64, "bfloat16", None, None),
            ("fp8_ds_mla", (512, 64), 16, 1, 128, "bfloat16", None, None),
            ("fp8_ds_mla", (512, 64), 24, 3, 40, "bfloat16", 70, None),
            ("fp8_ds_mla", (512, 32), 1, 2, 5, "float16", 70, 3.0),
            ("fp8_ds_mla", (512, 0), 64, 1, 16, "bfloat16", None, None),
        )
    ),
]


@pytest.mark.parametrize(PARAMETERS, left_to_nights(CASES, but=("fp8_e4m3", (256, 32))))
def test_the_interpreted_kernel_matches_float64(dtype, sizes, block_size, q_len, heads, query_dtype, window, cap):
    check(dtype, sizes, block_size, q_len, heads, query_dtype, window, cap)


RAISED = pytest.mark.parametrize(
    ("dtype", "sizes"),
    [
        ("bfloat16", (128, 64)),
        pytest.param("float16", (128, 16), marks=pytest.mark.nightly),
        pytest.param("fp8_ds_mla", (512, 16), marks=pytest.mark.nightly),
    ],
)
"""Weights over rope keys and in memory of their own, of bfloat16 and of float16; tiles that are decoded."""


@RAISED
def test_interpreted_results_are_rescaled_for_larger_logits_of_later_tiles(dtype, sizes):
    """By 2**10 from tile to tile, so that results without it are those of the first tiles.

    Sums of bfloat16 would overflow if they were rescaled only where weights exceed 1, which begin far below.
    """
    check(dtype, sizes, 16, 1, 3, "bfloat16", None, None, lengths=(200, 64, 330), growth=8)


@pytest.mark.full
def test_interpreted_results_of_a_token_above_all_are_not_rounded_with_its_weight():
    """It is alone in the last tile of a sequence, or of a part of one, which is the second warpgroup's.

    Results of float16 show a rounding to bfloat16, the largest weight's, that those of bfloat16 would hide.
    """
    config = MLAConfig(2, 1, part=2)
    arguments = "bfloat16", (128, 16), 16, 1, 8, "float16", None, None
    check(*arguments, lengths=(65, 193), config=config, invariant=True, growth=8, eps=2**-10)


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["bfloat16", "fp8_e4m3"])
def test_interpreted_sequences_without_tokens_hold_no_warpgroup_up(dtype):
    check(dtype, (256, 16), 16, 1, 3, "bfloat16", None, None, lengths=(70, 0, 130, 0, 0, 64, 1, 0))


@pytest.mark.gpu
@RAISED
@pytest.mark.parametrize("invariant", [False, True], ids=["shares", "parts"])
def test_on_a_gpu_results_are_rescaled_for_larger_logits_of_later_tiles(dtype, sizes, invariant):
    lengths = [900 - i for i in range(300)]  # more than a tile for each thread block
    check(dtype, sizes, 16, 1, 3, "bfloat16", None, None, on_gpu=True, lengths=lengths, invariant=invariant, growth=8)


@pytest.mark.full
@pytest.mark.parametrize(
    ("dtype", "config"),
    [
        pytest.param("nvfp4", MLAConfig(5, 1), id="nvfp4-shares"),
        pytest.param("bfloat16", MLAConfig(2, 1, part=1), marks=pytest.mark.nightly, id="bfloat16-parts"),
    ],
)
def test_interpreted_parts_of_sequences_are_merged_and_each_token_is_asked_for_once(dtype, config, monkeypatch):
    """Parts are multiplied by the layer's scale, which NVFP4 has; and none loads what another thread block's has."""
    sources, counts = LatentDecode.sources, list[int]()

    def counted(self: LatentDecode, *args: Any) -> list[Source]:
        found = sources(self, *args)
        per_row = THREADS * len(found) // TOKENS
        jax.debug.callback(
            lambda threads: counts.append(int(threads) // per_row), sum(jnp.sum(x.is_row) for x in found)
        )
        return found

    monkeypatch.setattr(LatentDecode, "sources", counted)
    invariant = config.part is not None
    check(dtype, (128, 16), 16, 2, 3, "bfloat16", None, None, config=config, invariant=invariant)
    jax.effects_barrier()
    assert sum(counts) == sum(LENGTHS)


@pytest.mark.full
@pytest.mark.parametrize(
    ("dtype", "sizes"),
    [("bfloat16", (128, 16)), ("fp8_e4m3", (256, 16)), ("nvfp4", (128, 16)), ("fp8_ds_mla", (512, 64))],
)
def test_interpreted_warpgroups_do_not_race(dtype, sizes, monkeypatch):
    """In one thread block, sequences of even and odd numbers of tiles one after another."""
    monkeypatch.setattr(any_batch, "merge_kernel", lambda *_: lambda *_: None)  # nothing is merged
    problem = build(spec_of(dtype, sizes, 16), (130, 200, 1, 64))
    q = queries(problem.spec, (4, 2, 3), "bfloat16")
    with interpret_mode(detect_races=True):
        out, lse = attend(problem, q, Softmax(SM_SCALE), MLAConfig(1, 1))
        assert_near(problem, q, out, lse)


@pytest.mark.gpu
@pytest.mark.parametrize("invariant", [False, True], ids=["shares", "parts"])
@pytest.mark.parametrize(PARAMETERS, CASES)
def test_on_a_gpu_the_kernel_matches_float64(
    dtype, sizes, block_size, q_len, heads, query_dtype, window, cap, invariant
):
    lengths = 3000, *LENGTHS, 777, 64 * 40
    arguments = dtype, sizes, block_size, q_len, heads, query_dtype, window, cap
    check(*arguments, on_gpu=True, lengths=lengths, invariant=invariant)


@pytest.mark.gpu
def test_on_a_gpu_many_sequences_of_one_tile_are_each_their_own():
    check("bfloat16", (512, 64), 64, 1, 16, "bfloat16", None, None, on_gpu=True, lengths=[64] * 300 + [1] * 300)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "nvfp4"])
def test_on_a_gpu_a_hundred_equal_calls_have_equal_bits(dtype):
    """Over sequences of one tile to five in turn: where a barrier is missing, some calls would differ from others."""
    lengths = np.random.default_rng(4).integers(1, 301, 300).tolist()
    problem = build(spec_of(dtype, (512, 64), 16), lengths)
    q = [jnp.asarray(x) for x in queries(problem.spec, (len(lengths), 1, 64), "bfloat16")]
    first, config = None, MLAConfig(132, 1)
    for _ in range(100):
        out, lse = attend(problem, q, Softmax(SM_SCALE), config)
        bits = out.view(jnp.uint16), lse.view(jnp.uint32)
        first = first or bits
        assert all(map(jnp.array_equal, bits, first))


@pytest.mark.full
@pytest.mark.parametrize(
    ("dtype", "sizes", "heads"),
    [("bfloat16", (128, 16), 4), pytest.param("fp8_ds_mla", (512, 64), 40, marks=pytest.mark.nightly)],
)
def test_the_operations_run_the_kernel(dtype, sizes, heads):
    """With layers, blocks that are not in the cache, a sequence longer than its blocks, and rows of no sequence."""
    spec = spec_of(dtype, sizes, 16)
    problem = build(spec, (80, 3, 0))
    q = queries(spec, (3, 3, heads), "bfloat16")
    cache, third = as_third_of_three_layers(problem.cache), jnp.int32(2)
    args = problem.block_table, problem.seq_lens
    # Past the 96 tokens of its entries are those of the next sequence, whose block is NaN after its 3 tokens.
    table, lens = problem.block_table.copy(), np.array([200, 3, 0], np.int32)
    table[0, [1, 3]] = problem.cache.num_blocks, -1  # masks their tokens
    rows = [x[:, 0] for x in queries(spec, (7, 1, heads), "bfloat16")]
    bounds = np.array([0, 3, 4, 4], np.int32)
    options = {"sm_scale": SM_SCALE, "return_lse": True, "layer": third}
    with interpret_mode():
        run = functools.partial(mla_paged_attention, *q, cache, implementation="mosaic")
        assert_near(problem, q, *run(*args, **options))
        for absent in (-1, 3):
            out, lse = run(*args, **options | {"layer": jnp.int32(absent)})
            assert not np.any(out)
            assert np.all(np.isneginf(lse))
        masked = run(table, lens, **options)
        # Of so many rows of a sequence, the program above serves this operation, too.
        ragged = functools.partial(mla_ragged_paged_attention, *rows, cache, *args, bounds, max_q_len=3, **options)
        found = ragged(implementation="mosaic")
        jax.block_until_ready((masked, found))
    for results, expected in (
        (masked, mla_paged_attention(*q, cache, table, lens, implementation="xla", **options)),
        (found, ragged(implementation="xla")),
    ):
        for x, y in zip(results, expected, strict=True):
            np.testing.assert_allclose(np.asarray(x, np.float32), np.asarray(y, np.float32), rtol=0.01, atol=0.01)


def as_third_of_three_layers(cache: KVCache) -> KVCache:
    """The pages of a cache as those of the last layer of three, the others of which are NaN."""
    spec, num_blocks = cache.spec, cache.num_blocks
    layers = np.full((num_blocks, 3, spec.page_size_bytes), NAN, np.uint8)
    layers[:, 2] = page_bytes(cache)
    shape = spec.cache_shape(num_blocks, 3)
    return KVCache(jnp.array(layers.reshape(-1).view(spec.array_dtype).reshape(shape)), spec, num_layers=3)


@pytest.mark.full
@pytest.mark.skipif(gpu_compile.why_not() is not None, reason=str(gpu_compile.why_not()))
@pytest.mark.parametrize(
    ("dtype", "sizes", "q_len", "heads", "window"),
    [
        ("bfloat16", (512, 64), 1, 128, None),
        ("float16", (512, 64), 4, 16, 1024),
        ("bfloat16", (512, 0), 1, 64, None),
        ("bfloat16", (256, 32), 1, 40, None),
        ("fp8_e4m3", (512, 64), 1, 64, None),
        ("fp8_e4m3", (512, 64), 8, 16, 1024),
        ("nvfp4", (512, 64), 1, 64, None),
        ("nvfp4_4over6", (512, 64), 8, 16, 1024),
        ("fp8_ds_mla", (512, 64), 1, 64, None),
        ("fp8_ds_mla", (512, 64), 8, 16, 1024),
    ],
)
def test_compiled_it_multiplies_by_wgmma_and_spills_nothing(dtype, sizes, q_len, heads, window):
    spec = spec_of(dtype, sizes, 64, sliding_window=window)
    kernel, merge = compile_operation("h100", spec, q_len, heads).kernels
    assert (kernel.name.startswith("mla_paged_attention"), merge.spill_bytes, kernel.spill_bytes) == (True, 0, 0)
    assert "wgmma" in kernel.ptx
    # Named barriers by their threads. Of both warpgroups: `announce`, and `release` in the loop and after it; waits for
    # an announcement in both places, and for a release in the loop. Of one: `wait_for_own`, twice if tiles are copied.
    barriers = collections.Counter(re.findall(r"\bbar\.(\w+)\s+%\w+, (\d+);", kernel.ptx))
    assert barriers == {("arrive", "256"): 3, ("sync", "256"): 3, ("sync", "128"): 1 if spec.dtype.is_quantized else 2}
    # ptxas says so where it makes `wgmma` wait for each other.
    assert "serialized" not in kernel.ptxas_log


def latents_of(monkeypatch: pytest.MonkeyPatch, *parts: KVCacheDType) -> kvjax.MLAAttentionSpec:
    """A spec of latents and rope keys of dtypes that no table has for them, named after the first."""
    monkeypatch.setattr(kvjax.spec, "MLA_PARTS", {parts[0]: parts})
    monkeypatch.setattr(kvjax.MLAAttentionSpec, "_DTYPES", parts[:1])
    return kvjax.MLAAttentionSpec(64, 512, 64, dtype=parts[0])


@pytest.mark.parametrize("latents", [KVCacheDType.FP8_E5M2, KVCacheDType.FP8_PER_TOKEN_HEAD])
def test_new_latents_are_not_read_as_those_of_another_dtype(monkeypatch, latents):
    """XLA attends to them; and neither kernel would decode them, or rope keys, in another way if it had them."""
    spec = latents_of(monkeypatch, latents, KVCacheDType.FLOAT16)
    assert f"no kernel reads latents (MLA) of dtype '{latents.value}'" in str(mla.why_not(spec, rows=16))
    assert f"no kernel reads latents (MLA) of dtype '{latents.value}'" in str(mla.why_not(spec, rows=128))
    packed = Packed(spec, tokens=None)
    with pytest.raises(UnsupportedError, match=f"latents: got dtype '{latents.value}', expected fp8_e4m3, fp8_ds_mla"):
        packed._latents([], 0, [])
    with pytest.raises(UnsupportedError, match="rope keys: got dtype 'float16', expected bfloat16 or fp8_e4m3"):
        packed._rope_keys([])
    assert codecs.why_not_dtype(spec) is None
    monkeypatch.delitem(codecs.CODECS, latents)
    with pytest.raises(UnsupportedError, match="which no kernel encodes or decodes"):
        codecs.codecs_of(spec)


def test_scales_of_latents_that_the_kernel_for_few_rows_does_not_read_are_refused(monkeypatch):
    spec = latents_of(monkeypatch, KVCacheDType.FP8_PER_TOKEN_HEAD, KVCacheDType.BFLOAT16)
    problem = plain_problem(spec, BatchSizes(num_seqs=1, q_len=1, group=16, max_blocks=1))
    with pytest.raises(UnsupportedError, match="latents: got scales of 'fp8_per_token_head', expected nvfp4, "):
        few_rows_stages.LatentStages.of(problem, 2, 1)


def test_what_the_kernel_cannot_serve_is_served_by_xla_with_a_reason():
    def why(name: str = "bfloat16", sizes: tuple[int, int] = (512, 64), block_size: int = 64, **query: Any) -> str:
        asked = Query(np.dtype(ml_dtypes.bfloat16))._replace(**query)
        return route(spec_of(name, sizes, block_size), asked, None).why_no_kernels or ""

    assert not why()
    assert not why(sizes=(256, 0), block_size=1)
    assert "compute capability 9; got (10, 0)" in str(mla.why_not(spec_of("bfloat16"), None, Target(148, (10, 0))))
    assert "dtype 'float32'" in why("float32")
    assert not why("fp8_e4m3", (256, 64))
    assert "got kv_lora_rank=384" in why("fp8_e4m3", (384, 64))
    assert not why("nvfp4")
    assert not why("fp8_ds_mla")
    assert not why("fp8_ds_mla", rows=128)
    small = mla.why_not(spec_of("fp8_ds_mla"), None, Target(132, (9, 0), 223_232))
    assert "its tiles take 223233 bytes of shared memory; got 223232" in str(small)
    assert "got bytes_per_token=392" in why("fp8_ds_mla", (256, 64))
    assert "got kv_lora_rank=640" in why(sizes=(640, 64))
    assert "got kv_lora_rank=192" in why(sizes=(192, 64))
    assert "got qk_rope_head_dim=48" in why(sizes=(512, 48))
    assert "query: got float32" in why(dtype=np.dtype(np.float32))
    assert "latents (MLA)" in why(has_prompts=True)
    assert "got an array" in why(is_window_static=False)
    batch = BatchSizes(num_seqs=4096, q_len=1, group=128, max_blocks=4096)
    assert "got 4096 sequences" in why(invariant=batch)
    problem = build(spec_of("float32"), [20])
    q = queries(problem.spec, (1, 16), "bfloat16")
    with pytest.raises(UnsupportedError, match="no kernel reads latents"):
        mla_paged_attention(
            *q, problem.cache, problem.block_table, problem.seq_lens, sm_scale=1.0, implementation="mosaic"
        )
