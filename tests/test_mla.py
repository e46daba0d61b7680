"""Attention over latents against float64, and what operations on their caches share with others."""

from __future__ import annotations

import functools
import re
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from support import mla_reference
from support.helpers import assert_same_bytes, cache_from_bytes, each_case, matrix, page_bytes, poisoned
from support.interpret_mode import interpret_mode
from support.mla_cases import SM_SCALE, assert_right, build, queries, spec_of

import kvjax
from benchmarks import mla_accuracy
from examples.clients import mla as client
from kvjax import (
    MLA_KV_CACHE_DTYPES,
    KVCache,
    KVCacheDType,
    KVCacheError,
    KVCacheTypeError,
    KVCacheValueError,
    KVCacheWarning,
    KVScales,
    MLAAttentionSpec,
    UnsupportedError,
    calibrate,
    checked,
    concat_and_cache_mla,
    copy_blocks,
    gather_mla,
    mla_paged_attention,
    mla_ragged_paged_attention,
    swap_blocks,
)

NAMES = [dtype.value for dtype in MLA_KV_CACHE_DTYPES]


OPTIONS: dict[str, dict[str, Any]] = {"plain": {}, "window": {"window": 11}, "cap": {"cap": 3.0}}


@each_case(
    [
        dict(zip(("dtype", "sizes", "query_dtype", "q_len", "num_heads", "options"), case, strict=True))
        for case in (
            ("bfloat16", (512, 64), "bfloat16", 1, 16, "plain"),
            ("float16", (256, 32), "float16", 2, 5, "cap"),
            ("float32", (512, 64), "float32", 4, 3, "window"),
            ("fp8_e4m3", (512, 0), "bfloat16", 8, 2, "plain"),
            ("fp8_ds_mla", (512, 64), "bfloat16", 1, 128, "window"),
            ("fp8_ds_mla", (256, 64), "float32", 3, 4, "plain"),
            ("nvfp4", (512, 64), "bfloat16", 2, 16, "window"),
            ("nvfp4_4over6", (256, 64), "float32", 1, 20, "cap"),
        )
    ],
    few={"dtype": ["float16", "fp8_e4m3", "fp8_ds_mla", "nvfp4"]},
)
def test_attention_of_last_tokens_matches_float64(case: dict[str, Any]):
    """Sequences of no token, of fewer than the query and of several blocks; what no row sees is NaN."""
    dtype, sizes, query_dtype, q_len, num_heads, options = case.values()
    spec, asked = spec_of(dtype, sizes), OPTIONS[options]
    reach = q_len + asked["window"] - 1 if "window" in asked else None
    problem = build(spec, [37, 1, 0, 8, 100], reach)
    q = queries(spec, (5, q_len, num_heads), query_dtype)
    names = {"window": "sliding_window", "cap": "logits_soft_cap"}
    attend = jax.jit(
        functools.partial(
            mla_paged_attention,
            sm_scale=SM_SCALE,
            return_lse=True,
            scale=problem.scale,
            **{names[name]: value for name, value in asked.items()},
        )
    )
    out, lse = attend(*q, problem.cache, problem.block_table, problem.seq_lens)
    for seq in range(5):
        assert_right(problem, [x[seq] for x in q], out[seq], lse[seq], seq, **asked)
    other = build(spec, [37, 1, 0, 8, 100], reach, fill=0)
    for got, first in zip(attend(*q, other.cache, other.block_table, other.seq_lens), (out, lse), strict=True):
        assert_same_bytes(np.asarray(got), np.asarray(first))
    if q_len == 1:
        alone = mla_paged_attention(
            *(x[:, 0] for x in q), problem.cache, problem.block_table, problem.seq_lens, sm_scale=SM_SCALE,
            scale=problem.scale, **{names[name]: value for name, value in asked.items()},
        )  # fmt: skip
        np.testing.assert_allclose(
            np.asarray(alone, np.float32), np.asarray(out[:, 0], np.float32), atol=1e-5, rtol=0.01
        )


@matrix({"dtype": NAMES}, few={"dtype": ["bfloat16", "fp8_ds_mla"]})
def test_ragged_attention_is_that_of_each_sequence_alone(dtype: str):
    """Prompts in chunks, sequences that decode and none: each of them as alone."""
    spec = spec_of(dtype)
    problem, q_lens = build(spec, [70, 3, 0, 41]), [65, 1, 0, 9]
    cu_q_lens = np.array([0, *np.cumsum(q_lens)], np.int32)
    q = queries(spec, (80, 4), "bfloat16")  # of which 5 rows are no sequence's
    out, lse = mla_ragged_paged_attention(
        *q, problem.cache, problem.block_table, problem.seq_lens, cu_q_lens, sm_scale=SM_SCALE, scale=problem.scale,
        return_lse=True,
    )  # fmt: skip
    for seq in range(4):
        rows = slice(cu_q_lens[seq], cu_q_lens[seq + 1])
        assert_right(problem, [x[rows] for x in q], out[rows], lse[rows], seq)
    assert not np.asarray(out[75:]).astype(np.float32).any()
    assert np.isneginf(lse[75:]).all()


@pytest.mark.full
def test_the_window_of_the_spec_is_that_of_its_layer():
    problem = build(spec_of("bfloat16", sliding_window=9), [37], 9)
    q = queries(problem.spec, (1, 2), "float32")
    args = *q, problem.cache, problem.block_table, problem.seq_lens
    out, lse = mla_paged_attention(*args, sm_scale=SM_SCALE, return_lse=True)
    assert_right(problem, [x[:, :] for x in q], out, lse, 0, window=9)
    cu_q_lens = np.array([0, 1], np.int32)
    ragged = mla_ragged_paged_attention(*args, cu_q_lens, sm_scale=SM_SCALE)
    np.testing.assert_allclose(ragged, out, rtol=1e-6, atol=1e-6)


def test_batch_invariant_results_are_those_of_a_sequence_alone():
    problem = build(spec_of("nvfp4"), [37, 8, 100])
    q = queries(problem.spec, (3, 2, 4), "bfloat16")
    attend = functools.partial(mla_paged_attention, sm_scale=SM_SCALE, batch_invariant=True)
    together = attend(*q, problem.cache, problem.block_table, problem.seq_lens)
    for seq in range(3):
        own = (x[seq : seq + 1] for x in (*q, problem.block_table, problem.seq_lens))
        q_nope, q_pe, table, lens = own
        alone = attend(q_nope, q_pe, problem.cache, table, lens)
        assert_same_bytes(np.asarray(alone[0]), np.asarray(together[seq]))


@pytest.mark.full
def test_gradients_of_queries_are_those_of_dense_attention():
    problem = build(spec_of("bfloat16"), [20])
    q_nope, q_pe = queries(problem.spec, (1, 2), "float32")
    keys = jnp.asarray(problem.keys[0])

    def dense(q_nope: Any, q_pe: Any) -> jax.Array:
        weights = jax.nn.softmax(jnp.concatenate([q_nope, q_pe], -1) @ keys.T * SM_SCALE)
        return jnp.sum(jnp.sin(weights @ keys[:, :512]))

    def paged(q_nope: Any, q_pe: Any) -> jax.Array:
        args = problem.cache, problem.block_table, problem.seq_lens
        return jnp.sum(jnp.sin(mla_paged_attention(q_nope, q_pe, *args, sm_scale=SM_SCALE)))

    for got, expected in zip(*(jax.grad(f, (0, 1))(q_nope, q_pe) for f in (paged, dense)), strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-4)

    def write(kv_c: jax.Array) -> jax.Array:
        return concat_and_cache_mla(kv_c, kv_c[:, :64], problem.cache, np.arange(1)).kv.astype(jnp.float32).sum()

    with pytest.raises(KVCacheTypeError, match="concat_and_cache_mla: cannot differentiate with respect to kv_c"):
        jax.grad(write)(jnp.ones((1, 512)))


@pytest.mark.parametrize("operation", ["attend", "ragged"])
def test_no_kernel_attends_to_float32(operation: str):
    """XLA does, on a GPU too; a kernel that is asked for is refused with the reason."""
    problem = build(spec_of("float32"), [20])
    read = problem.block_table, problem.seq_lens
    q = queries(problem.spec, (1, 16), "bfloat16")
    one = np.array([0, 1], np.int32)
    run = {
        "attend": lambda cache, how: mla_paged_attention(*q, cache, *read, sm_scale=1.0, implementation=how),
        "ragged": lambda cache, how: mla_ragged_paged_attention(
            *q, cache, *read, one, sm_scale=1.0, implementation=how
        ),
    }[operation]
    with pytest.raises(UnsupportedError, match=r"^mla_.*: implementation 'mosaic' cannot serve this call: .*no kernel"):
        run(problem.cache, "mosaic")
    for how in (None, "xla"):
        jax.block_until_ready(jax.tree.leaves(run(problem.cache, how)))
    traced = jax.jit(lambda cache: jax.tree.leaves(run(cache, None))[0]).trace(problem.cache)
    assert "mosaic" not in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("dtype", NAMES)
def test_blocks_are_copied_and_swapped_with_all_that_they_hold(dtype: str):
    spec = spec_of(dtype)
    cache = poisoned(spec, 4)
    before = page_bytes(cache)
    after = page_bytes(copy_blocks(cache, np.array([[0, 3], [2, 1]])))
    assert_same_bytes(after, before[[0, 2, 2, 0]])
    host = KVCache.allocate(spec, 2)
    swapped = page_bytes(swap_blocks(cache, host, np.array([[3, 1]])))
    assert_same_bytes(swapped, np.stack([np.zeros_like(before[0]), before[3]]))


@pytest.mark.full
@matrix({"dtype": ["bfloat16", "fp8_e4m3", "nvfp4"]}, few={"dtype": ["fp8_e4m3"]})
def test_a_scan_over_layers_serves_each_from_its_own_latents(dtype: str):
    """One cache of all layers, with a scale of each; the results are those of caches apart."""
    spec, rng = spec_of(dtype), np.random.default_rng(0)
    scales = np.float32([0.002, 0.01, 0.0005])
    cache = KVCache.allocate(spec, 4, num_layers=3, k_scale=scales)
    kv_c, k_pe = (rng.standard_normal((3, 20, size)).astype(np.float32) for size in (512, 64))
    q = queries(spec, (3, 1, 4), "float32")
    slots, table, lens = np.arange(8, 28), np.array([[1, 2, 3]], np.int32), np.array([20], np.int32)

    @functools.partial(jax.jit, donate_argnums=0)
    def serve(cache: KVCache, layers: Any) -> tuple[KVCache, jax.Array]:
        def step(cache: KVCache, given: Any) -> tuple[KVCache, jax.Array]:
            layer, kv_c, k_pe, q_nope, q_pe = given
            cache = concat_and_cache_mla(kv_c, k_pe, cache, slots, layer=layer)
            return cache, mla_paged_attention(q_nope, q_pe, cache, table, lens, layer=layer, sm_scale=SM_SCALE)

        return jax.lax.scan(step, cache, layers)

    cache, results = serve(cache, (jnp.arange(3), kv_c, k_pe, *q))
    for layer in range(3):
        own = KVCache.allocate(spec, 4, k_scale=scales[layer])
        own = concat_and_cache_mla(kv_c[layer], k_pe[layer], own, slots)
        expected = mla_paged_attention(q[0][layer], q[1][layer], own, table, lens, sm_scale=SM_SCALE)
        np.testing.assert_allclose(results[layer], expected, rtol=1e-6, atol=1e-6)
        read = functools.partial(gather_mla, block_table=table, cu_seq_lens=np.array([0, 20]), num_tokens=20)
        for got, want in zip(read(cache, layer=layer), read(own), strict=True):
            assert_same_bytes(np.asarray(got), np.asarray(want))


@pytest.mark.parametrize(
    ("dtype", "largest"), [("bfloat16", None), ("fp8_e4m3", 448), ("fp8_ds_mla", None), ("nvfp4", 6 * 448)]
)
def test_calibration_gives_one_scale(dtype: str, largest: int | None):
    """In fp8 of latents and rope keys together, in NVFP4 of latents."""
    rng = np.random.default_rng(0)
    batches = [[tuple(rng.standard_normal((7, size)).astype(np.float32) for size in (512, 64))] for _ in range(2)]
    batches[1][0][1][3, 5] = -50
    [scales] = calibrate([spec_of(dtype)], batches)
    samples = [x for batch in batches for x in batch[0][: 2 if dtype == "fp8_e4m3" else 1]]
    amax = max(np.abs(x).max() for x in samples)
    assert scales == KVScales(np.float32(1 if largest is None else amax / np.float32(largest)), np.float32(1))
    for method in ("percentile", "mse"):
        [other] = calibrate([spec_of(dtype)], batches, method=method)
        assert (other.k_scale == 1) == (largest is None)
        assert other.v_scale == 1


def test_calibration_refuses_samples_of_other_shapes_and_scales_of_heads():
    spec, sample = spec_of("fp8_e4m3"), np.ones((7, 512), np.float32)
    with pytest.raises(
        KVCacheValueError, match=r"latents of layer 0: got shape \(7, 512\), expected \[..., qk_rope_head"
    ):
        calibrate([spec], [[(sample, sample)]])
    with pytest.raises(KVCacheValueError, match="per_head: got True, expected False"):
        calibrate([spec], [[(sample, sample[:, :64])]], per_head=True)
    with pytest.warns(KVCacheWarning, match="the latents of layer 0 are all 0, so their scale is 1"):
        calibrate([spec], [[(0 * sample, 0 * sample[:, :64])]])
    [scales] = calibrate([spec_of("fp8_e4m3", (512, 0))], [[(sample, sample[:, :0])]])
    for k_pe in (sample[:, :3], sample[:6, :0]):
        with pytest.raises(KVCacheValueError, match=r", k_pe: got shape .*, expected \(7, 0\), the tokens of kv_c"):
            calibrate([spec_of("fp8_e4m3", (512, 0))], [[(sample, k_pe)]])
    assert scales.k_scale == np.float32(1) / np.float32(448)


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "nvfp4", "nvfp4_4over6"])
@pytest.mark.parametrize(
    ("k_pe", "error", "message"),
    [
        (
            np.ones((7, 32), np.float32),
            KVCacheValueError,
            r": got shape \(7, 32\), expected \[..., qk_rope_head_dim=64",
        ),
        (np.ones((6, 64), np.float32), KVCacheValueError, r", k_pe: got shape \(6, 64\), expected \(7, 64\), the toke"),
        (np.ones((7, 64), np.int8), KVCacheTypeError, ": got dtype int8, expected one of float32"),
        (None, KVCacheTypeError, ": got a NoneType, expected an array"),
    ],
)
def test_calibration_checks_rope_keys_beside_latents_with_a_scale(
    dtype: str, k_pe: Any, error: type[KVCacheError], message: str
):
    with pytest.raises(error, match=message):
        calibrate([spec_of(dtype)], [[(np.ones((7, 512), np.float32), k_pe)]])


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp8_ds_mla", "nvfp4"])
def test_calibration_refuses_infinite_rope_keys(dtype: str):
    sample = np.ones((7, 512), np.float32), np.full((7, 64), np.inf, np.float32)
    what = "latents" if dtype == "fp8_e4m3" else "rope keys"
    with pytest.raises(KVCacheValueError, match=f"got infinite {what} of layer 0"):
        calibrate([spec_of(dtype)], [[sample]])


def test_scales_of_a_checkpoint_are_those_of_its_keys():
    config = {"model_type": "deepseek_v3", "num_hidden_layers": 2, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    declared = {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}
    model = kvjax.ModelKVConfig.from_hf_config(config | {"dtype": "bfloat16", "quantization_config": declared})
    tensors = {f"model.layers.{i}.self_attn.k_proj.k_scale": np.float32(0.5 + i) for i in range(2)}
    tensors |= {f"model.layers.{i}.self_attn.v_proj.v_scale": np.float32(9) for i in range(2)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scales = kvjax.load_kv_scales(tensors, model)
    assert scales == (KVScales(np.float32(0.5), np.float32(1)), KVScales(np.float32(1.5), np.float32(1)))
    of_values = {name: scale for name, scale in tensors.items() if name.endswith("v_scale")}
    with pytest.warns(kvjax.KVCacheWarning, match="layers 0-1"):
        assert kvjax.load_kv_scales(of_values, model) == (KVScales(np.float32(1), np.float32(1)),) * 2
    [spec, _] = kvjax.resolve_layer_specs(model)
    assert spec == MLAAttentionSpec(16, 512, 64, dtype=KVCacheDType.FP8_E4M3)


def test_skipped_layers_keep_latents_of_the_model_s_dtype():
    """In 1,152 bytes a token beside 416 of the others, also in a pool of one page size."""
    config = {"model_type": "deepseek_v3", "num_hidden_layers": 3, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    model = kvjax.ModelKVConfig.from_hf_config(config | {"num_attention_heads": 4, "dtype": "bfloat16"})
    specs = kvjax.resolve_layer_specs(model, "nvfp4", skip_layers=[0])
    assert specs == tuple(spec_of(dtype, block_size=16) for dtype in ("bfloat16", "nvfp4", "nvfp4"))
    assert [spec.bytes_per_token for spec in specs] == [1152, 416, 416]
    pooled = kvjax.unify_page_sizes(specs)
    assert [(spec.block_size, spec.page_size_bytes) for spec in pooled] == [(16, 18432), (32, 18432), (32, 18432)]
    [ds, *others] = kvjax.resolve_layer_specs(model, "fp8_ds_mla", skip_layers=["1-2"])
    assert (ds.bytes_per_token, {spec.bytes_per_token for spec in others}) == (656, {1152})


@pytest.mark.parametrize("dtype", ["fp8_e5m2", "int8_per_token_head"])
def test_resolution_refuses_dtypes_that_latents_cannot_have(dtype: str):
    config = {"model_type": "deepseek_v3", "num_hidden_layers": 2, "num_attention_heads": 4, "dtype": "bfloat16"}
    model = kvjax.ModelKVConfig.from_hf_config(config | {"kv_lora_rank": 512, "qk_rope_head_dim": 64})
    message = f"^kv_cache_dtype of layer 1: got '{dtype}', expected one of .*fp8_ds_mla.*latents"
    with pytest.raises(KVCacheValueError, match=message):
        kvjax.resolve_layer_dtypes(model, {1: dtype})
    for accepted in kvjax.MLA_KV_CACHE_DTYPES:
        assert [of.dtype for of in kvjax.resolve_layer_dtypes(model, accepted)] == [accepted] * 2


SPEC = spec_of("fp8_e4m3")
WRITE = {
    "kv_c": np.zeros((3, 512), np.float32),
    "k_pe": np.zeros((3, 64), np.float32),
    "slot_mapping": np.arange(3, dtype=np.int32),
}
GATHER = {"block_table": np.zeros((2, 2), np.int32), "cu_seq_lens": np.array([0, 3, 5]), "num_tokens": 5}
ATTEND = {
    "q_nope": np.zeros((2, 4, 512), np.float32),
    "q_pe": np.zeros((2, 4, 64), np.float32),
    "block_table": np.zeros((2, 2), np.int32),
    "seq_lens": np.ones(2, np.int32),
    "sm_scale": 0.1,
}
RAGGED = ATTEND | {"cu_q_lens": np.array([0, 1, 2])}
VALUE, TYPE = KVCacheValueError, KVCacheTypeError


@pytest.mark.parametrize(
    ("run", "given", "changes", "error", "message"),
    [
        (concat_and_cache_mla, WRITE, {"kv_c": WRITE["k_pe"]}, VALUE, "kv_c: got shape (3, 64), expected [num_tokens,"),
        (concat_and_cache_mla, WRITE, {"kv_c": WRITE["kv_c"][:, None]}, VALUE, "kv_c: got shape (3, 1, 512), expected"),
        (concat_and_cache_mla, WRITE, {"kv_c": [[0.0]]}, TYPE, "kv_c: got a list, expected an array"),
        (concat_and_cache_mla, WRITE, {"kv_c": np.zeros((3, 512))}, TYPE, "kv_c: got dtype float64, expected one of"),
        (concat_and_cache_mla, WRITE, {"k_pe": np.zeros((3, 64), np.float16)}, TYPE, "k_pe: got dtype float16, expect"),
        (concat_and_cache_mla, WRITE, {"k_pe": np.zeros((2, 64), np.float32)}, VALUE, "k_pe: got shape (2, 64), expec"),
        (concat_and_cache_mla, WRITE, {"slot_mapping": np.arange(2)}, VALUE, "slot_mapping: got shape (2,), expected "),
        (concat_and_cache_mla, WRITE, {"scale": 0.0}, VALUE, "scale: got 0.0, expected between 7.9e-31 and 1.3e+30"),
        (concat_and_cache_mla, WRITE, {"scale": np.ones(1, np.float32)}, VALUE, "scale: got shape (1,), expected a sc"),
        (concat_and_cache_mla, WRITE, {"scale": "1"}, TYPE, "scale: got '1' of type str, expected a number"),
        (concat_and_cache_mla, WRITE, {"layer": 0}, VALUE, "layer: got 0 for a cache without num_layers"),
        (concat_and_cache_mla, WRITE, {"unique_slots": 1}, TYPE, "unique_slots: got 1 of type int, expected a bool"),
        (concat_and_cache_mla, WRITE, {"implementation": "cuda"}, VALUE, "implementation: got 'cuda', expected one of"),
        (gather_mla, GATHER, {"num_tokens": 5.0}, TYPE, "num_tokens: got 5.0 of type float, expected an int"),
        (gather_mla, GATHER, {"num_tokens": -1}, VALUE, "num_tokens: got -1, expected an int of at least 0"),
        (gather_mla, GATHER, {"cu_seq_lens": np.array([0, 3])}, VALUE, "cu_seq_lens: got shape (2,), expected [num_se"),
        (gather_mla, GATHER, {"seq_starts": np.array([0])}, VALUE, "seq_starts: got shape (1,), expected [num_seqs=2]"),
        (gather_mla, GATHER, {"block_table": GATHER["cu_seq_lens"]}, VALUE, "block_table: got shape (3,), expected [n"),
        (gather_mla, GATHER, {"dtype": "int8"}, TYPE, "dtype: got int8, expected one of float32, float16, bfloat16"),
        (mla_paged_attention, ATTEND, {"sm_scale": None}, TYPE, "sm_scale: got None, expected a number, usually (qk_n"),
        (mla_paged_attention, ATTEND, {"sm_scale": np.inf}, VALUE, "sm_scale: got inf, expected a number that is fini"),
        (mla_paged_attention, ATTEND, {"sm_scale": jnp.ones(())}, TYPE, "sm_scale: got Array(1., dtype=float32"),
        (mla_paged_attention, ATTEND, {"q_nope": ATTEND["q_pe"]}, VALUE, "q_nope: got shape (2, 4, 64), expected [num"),
        (mla_paged_attention, ATTEND, {"q_pe": ATTEND["q_pe"][:, :3]}, VALUE, "q_pe: got shape (2, 3, 64), expected ["),
        (mla_paged_attention, ATTEND, {"q_pe": np.zeros((2, 4, 64), np.float16)}, TYPE, "q_pe: got dtype float16, exp"),
        (mla_paged_attention, ATTEND, {"seq_lens": np.ones(3, np.int32)}, VALUE, "seq_lens: got shape (3,), expected "),
        (mla_paged_attention, ATTEND, {"q_nope": ATTEND["q_nope"][:, :0], "q_pe": ATTEND["q_pe"][:, :0]}, VALUE, "q_n"),
        (mla_paged_attention, ATTEND, {"sliding_window": 0}, VALUE, "sliding_window: got 0, expected a positive int"),
        (mla_paged_attention, ATTEND, {"logits_soft_cap": -1.0}, VALUE, "logits_soft_cap: got -1.0, expected a positi"),
        (mla_paged_attention, ATTEND, {"return_lse": 1}, TYPE, "return_lse: got 1 of type int, expected a bool"),
        (mla_ragged_paged_attention, RAGGED, {"cu_q_lens": np.arange(2)}, VALUE, "cu_q_lens: got shape (2,), expected"),
        (mla_ragged_paged_attention, RAGGED, {"max_q_len": 0}, VALUE, "max_q_len: got 0, expected an int of at least "),
        (mla_ragged_paged_attention, RAGGED, {"sm_scale": "1"}, TYPE, "sm_scale: got '1' of type str, expected a floa"),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused_by_name_and_change_nothing(run, given, changes, error: type[KVCacheError], message):
    cache = poisoned(SPEC, 2)
    before = page_bytes(cache)
    with pytest.raises(error) as raised:
        run(cache=cache, **given | changes)
    assert str(raised.value).startswith(message)
    assert_same_bytes(page_bytes(cache), before)
    jax.block_until_ready(jax.tree.leaves(run(cache=cache, **given)))


@pytest.mark.parametrize("run", [concat_and_cache_mla, gather_mla, mla_paged_attention, mla_ragged_paged_attention])
def test_operations_on_latents_refuse_keys_and_values(run: Any):
    given = {
        concat_and_cache_mla: WRITE,
        gather_mla: GATHER,
        mla_paged_attention: ATTEND,
        mla_ragged_paged_attention: RAGGED,
    }[run]
    diffkv = kvjax.FullAttentionSpec(8, 1, 512, 64, dtype="bfloat16")
    message = f"{run.__name__}: got a cache of keys and values, of a FullAttentionSpec, expected one of latents"
    with pytest.raises(KVCacheValueError, match=message):
        run(cache=poisoned(diffkv, 2), **given)
    with pytest.raises(KVCacheTypeError, match=r"^cache: got None, expected a KVCache"):
        run(cache=None, **given)


@pytest.mark.parametrize(
    ("run", "given", "changes", "message"),
    [
        (concat_and_cache_mla, WRITE, {"slot_mapping": np.array([0, 16, 1])}, r"slot_mapping\[1\]: got 16, expected l"),
        (concat_and_cache_mla, WRITE, {"scale": jnp.zeros(())}, "scale: got 0.0, expected between"),
        (gather_mla, GATHER, {"cu_seq_lens": np.array([0, 3, 2])}, r"cu_seq_lens\[2\]: got 2, expected 0 first, and t"),
        (gather_mla, GATHER, {"seq_starts": np.array([0, -2])}, r"seq_starts\[1\]: got -2, expected at least 0"),
        (gather_mla, GATHER, {"seq_starts": np.array([0, 15])}, r"seq_starts \+ lengths\[1\]: got 17, expected betwee"),
        (gather_mla, GATHER, {"seq_starts": np.array([0, 2**31 - 2])}, r"seq_starts \+ lengths\[1\]: got 2147483647"),
        (gather_mla, GATHER, {"block_table": np.array([[0, 9], [2, 9]])}, r"block_table\[1, 0\]: got 2, expected betw"),
        (mla_paged_attention, ATTEND, {"seq_lens": np.array([1, 17])}, r"seq_lens\[1\]: got 17, expected between 0 an"),
        (mla_ragged_paged_attention, RAGGED, {"cu_q_lens": np.array([0, 2, 1])}, r"cu_q_lens\[2\]: got 1, expected 0 "),
    ],
)  # fmt: skip
def test_checked_mode_names_the_first_invalid_value(run, given, changes, message):
    cache = poisoned(SPEC, 2)
    with checked():
        jax.block_until_ready(jax.tree.leaves(run(cache=cache, **given)))
        with pytest.raises(KVCacheValueError, match=f"^{message}"):
            run(cache=cache, **given | changes)
        if "scale" not in changes:
            static = {name: x for name, x in given.items() if not isinstance(x, np.ndarray)}
            arrays = {name: x for name, x in {**given, **changes}.items() if isinstance(x, np.ndarray)}
            run_checked = jax.jit(checkify.checkify(lambda cache, arrays: run(cache=cache, **arrays, **static)))
            error, _ = run_checked(cache, arrays)
            with pytest.raises(checkify.JaxRuntimeError, match=message):
                error.throw()


@pytest.mark.parametrize("implementation", ["xla", "mosaic"])
def test_gather_clamps_negative_starts_and_returns_zeros_past_the_block_table(implementation: str):
    """Also for tokens whose position overflows int32."""
    spec = spec_of("bfloat16", (128, 16))
    kv_c, k_pe = (np.random.default_rng(0).standard_normal((24, size)).astype(np.float32) for size in spec.part_sizes)
    cache = concat_and_cache_mla(kv_c, k_pe, KVCache.allocate(spec, 3), np.arange(24, dtype=np.int32))
    table, bounds, starts = (jnp.int32(x) for x in ([[0], [1], [2]], [0, 2, 9, 11], [-5, 2**31 - 3, 1]))
    with interpret_mode():
        latents, _ = gather_mla(
            cache, table, bounds, num_tokens=12, seq_starts=starts, dtype="float32", implementation=implementation
        )
    expected = np.zeros((12, 128), np.float32)
    stored = kv_c.astype(jnp.bfloat16)
    expected[:2], expected[9:11] = stored[:2], stored[17:19]
    np.testing.assert_array_equal(latents, expected)


def test_blocks_before_a_range_may_be_freed_in_checked_mode():
    cache = poisoned(SPEC, 2)
    with checked():
        gather_mla(cache, np.array([[-9, 1]]), np.array([0, 4]), num_tokens=4, seq_starts=np.array([8]))


@pytest.mark.nightly
def test_the_table_of_errors_is_what_the_program_prints():
    page = (Path(__file__).parents[1] / "docs/mla.md").read_text()
    [printed] = re.findall(r"<!-- accuracy: begin -->\n((?s:.*))\n<!-- accuracy: end -->", page)
    assert mla_accuracy.table() == printed


@pytest.mark.full
def test_formats_with_more_bits_have_smaller_errors():
    """On latents of 0.03, whatever the magnitude of their layer's scale."""
    of = functools.partial(mla_accuracy.error, magnitude=0.03)
    errors = [of(KVCacheDType(name)) for name in ("float16", "bfloat16", "fp8_ds_mla", "nvfp4")]
    assert errors == sorted(errors)
    assert errors[0] < 1e-3
    assert errors[-1] < 0.2


@pytest.mark.full
@pytest.mark.parametrize("stack", ["tpu-inference", "sglang-jax"])
def test_the_signature_of_tpu_stacks_writes_and_attends(stack: str):
    """Page indices padded to two of each sequence, or one after the other; the third sequence is padding."""
    spec, lens, q_lens = spec_of("float32"), [11, 7], [4, 7]
    problem = build(spec, lens, fill=0)
    keys = np.concatenate([keys[-q_len:] for keys, q_len in zip(problem.keys, q_lens, strict=True)])
    new = [np.pad(x, ((0, 1), (0, 0))) for x in np.split(keys, [512], axis=1)]  # a row of padding
    q = queries(spec, (12, 4), "float32")
    table = np.zeros((3, 2), np.int32)
    table[:2] = problem.block_table[:2, :2]
    before = page_bytes(problem.cache)
    pages = before.copy()
    for seq, (length, q_len) in enumerate(zip(lens, q_lens, strict=True)):
        for position in range(length - q_len, length):  # what the call has to write
            at = position % 8 * spec.bytes_per_token
            pages[table[seq, position // 8], at : at + spec.bytes_per_token] = 0
    cache = cache_from_bytes(pages, spec, len(pages))
    kv_lens, cu_q_lens = np.array([11, 7, 99], np.int32), np.array([0, 4, 11, 5], np.int32)
    distribution = np.array([0, 0, 2], np.int32)
    more: dict[str, Any] = {"sm_scale": SM_SCALE, "num_kv_pages_per_block": 4}
    if stack == "sglang-jax":
        page_indices = np.array([*table[0], table[1, 0], 0], np.int32)
        args, more["max_blocks"] = (np.array([0, 16, 24, 24], np.int32), distribution), 2
    else:
        page_indices, args = table.reshape(-1), (distribution,)
    run = jax.jit(functools.partial(client.mla_ragged_paged_attention, **more), donate_argnums=4)
    out, written = run(*q, *new, cache, kv_lens, page_indices, cu_q_lens, *args)
    assert_same_bytes(page_bytes(written), before)
    for seq, rows in enumerate((slice(0, 4), slice(4, 11))):
        want, _ = mla_reference.attention(np.concatenate(q, axis=-1)[rows], problem.keys[seq], 512, SM_SCALE)
        np.testing.assert_allclose(out[rows], want, atol=2e-5)
    with pytest.raises(TypeError, match=r"^sparse_mask: expected none but tuning: chunk_prefill_size, "):
        client.mla_ragged_paged_attention(
            *q, *new, written, kv_lens, page_indices, cu_q_lens, *args, **more, sparse_mask=None
        )
    with pytest.raises(NotImplementedError, match="a quantized query"):
        client.mla_ragged_paged_attention(
            *q, *new, written, kv_lens, page_indices, cu_q_lens, *args, **more, q_scale=2.0
        )
