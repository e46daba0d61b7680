"""What the operations refuse: each message names the value and what would be accepted, and the cache is as it was."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from support.helpers import assert_same_bytes, page_bytes, poisoned, simple_spec

from kvjax import (
    KVCache,
    KVCacheDType,
    KVCacheTypeError,
    KVCacheValueError,
    MLAAttentionSpec,
    ModelKVConfig,
    SlidingWindowSpec,
    StepMetadata,
    UnsupportedError,
    attend,
    checked,
    copy_blocks,
    gather_kv,
    max_tokens,
    nvfp4_kv_cache_full_dim,
    nvfp4_split_views,
    paged_attention,
    ragged_paged_attention,
    reshape_and_cache_flash,
    reshape_and_cache_flash_diffkv,
    resolve_layer_specs,
    rope_and_cache,
)
from kvjax.ops import select

FP8, NVFP4 = simple_spec(KVCacheDType.FP8_E4M3), simple_spec(KVCacheDType.NVFP4)
TOKENS, SLOTS = np.zeros((3, 2, 64), np.float32), np.arange(3, dtype=np.int32)
PAIRS = np.zeros((1, 2), np.int32)
TABLE, LENS = np.zeros((4, 2), np.int32), np.zeros(4, np.int32)
QUERY = np.zeros((4, 6, 64), np.float32)

WRITE = {"key": TOKENS, "value": TOKENS, "slot_mapping": SLOTS}
READ = {"block_table": TABLE, "seq_lens": LENS}
ATTEND = {"query": QUERY, **READ}
SCALE_RANGE = "expected between 7.9e-31 and 1.3e+30"

VALUE, TYPE = KVCacheValueError, KVCacheTypeError
NO_SCALES = [
    ([0.0, -1.0], "got [0.0, -1.0] of type list, expected a number or an array of numbers: numpy.array(k_scale, "),
    ("-1", "got '-1' of type str, expected a number or an array of numbers"),
    (True, "got True of type bool, expected a number or an array of numbers"),
    (np.array(["1"]), "got dtype <U1, expected numbers, such as float32"),
    (jnp.array([True, True]), "got dtype bool, expected numbers, such as float32"),
]
WRITE_ERRORS = [
    *(({"k_scale": scale}, TYPE, f"k_scale: {message}") for scale, message in NO_SCALES),
    ({"key": TOKENS[0]}, VALUE, "key: got shape (2, 64), expected [num_tokens, num_kv_heads=2, head_size=64]"),
    ({"key": TOKENS[:, :1]}, VALUE, "key: got shape (3, 1, 64), expected [num_tokens, num_kv_heads=2, head_size=64]"),
    ({"key": TOKENS[..., :32]}, VALUE, "key: got shape (3, 2, 32), expected [num_tokens, num_kv_heads=2, head_size=64"),
    ({"key": TOKENS.astype(np.float64)}, TYPE, "key: got dtype float64, expected one of float32, float16, bfloat16"),
    ({"key": TOKENS.astype(np.int32)}, TYPE, "key: got dtype int32, expected one of float32, float16, bfloat16"),
    ({"key": TOKENS.astype(ml_dtypes.float8_e4m3fn)}, TYPE, "key: got dtype float8_e4m3fn, expected one of float32"),
    ({"key": TOKENS.tolist()}, TYPE, "key: got a list, expected an array"),
    (
        {"value": TOKENS[:2]},
        VALUE,
        "value: got shape (2, 2, 64), expected [num_tokens=3, num_kv_heads=2, head_size_v=6",
    ),
    (
        {"value": TOKENS[..., :32]},
        VALUE,
        "value: got shape (3, 2, 32), expected [num_tokens=3, num_kv_heads=2, head_si",
    ),
    ({"value": TOKENS.astype(np.float16)}, TYPE, "value: got dtype float16, expected float32"),
    ({"slot_mapping": SLOTS[:2]}, VALUE, "slot_mapping: got shape (2,), expected [num_tokens=3]"),
    ({"key": TOKENS[None]}, VALUE, "value: got shape (3, 2, 64), expected [batch=1, time=3, num_kv_heads=2, head_s"),
    ({"key": TOKENS[None, :, :1]}, VALUE, "key: got shape (1, 3, 1, 64), expected [batch, time, num_kv_heads=2, head_"),
    (
        {"key": TOKENS[None], "value": TOKENS[None]},
        VALUE,
        "slot_mapping: got shape (3,), expected [batch=1, time=3]",
    ),
    ({"key": TOKENS[None, None]}, VALUE, "key: got shape (1, 1, 3, 2, 64), expected [num_tokens, num_kv_heads=2, he"),
    ({"slot_mapping": SLOTS[None]}, VALUE, "slot_mapping: got shape (1, 3), expected [num_tokens=3]"),
    ({"slot_mapping": SLOTS.astype(np.uint32)}, TYPE, "slot_mapping: got dtype uint32, expected one of int32, int64"),
    ({"slot_mapping": SLOTS.astype(np.float32)}, TYPE, "slot_mapping: got dtype float32, expected one of int32, int64"),
    (
        {"slot_mapping": [0, 1, 2]},
        TYPE,
        "slot_mapping: got a list, expected an array: numpy.asarray(slot_mapping, numpy.int",
    ),
    ({"k_scale": 0.0}, VALUE, f"k_scale: got 0.0, {SCALE_RANGE}"),
    ({"k_scale": -1.0}, VALUE, f"k_scale: got -1.0, {SCALE_RANGE}"),
    ({"v_scale": float("nan")}, VALUE, f"v_scale: got nan, {SCALE_RANGE}"),
    ({"v_scale": float("inf")}, VALUE, f"v_scale: got inf, {SCALE_RANGE}"),
    ({"v_scale": 1e-40}, VALUE, f"v_scale: got 1e-40, {SCALE_RANGE}"),
    ({"v_scale": 1e38}, VALUE, f"v_scale: got 1e+38, {SCALE_RANGE}"),
    ({"v_scale": 10**400}, VALUE, "v_scale: got 1000000"),
    ({"k_scale": np.float16([np.inf])}, VALUE, f"k_scale: got inf, {SCALE_RANGE}"),
    ({"v_scale": np.float32([1.0, 0.0])}, VALUE, f"v_scale: got 0.0, {SCALE_RANGE}"),
    (
        {"k_scale": np.ones(3, np.float32)},
        VALUE,
        "k_scale: got shape (3,), expected a scalar or [num_kv_heads=2] for dtype 'fp8_e4m3'",
    ),
    ({"implementation": "cuda"}, VALUE, "implementation: got 'cuda', expected one of "),
    ({"implementation": "xlaa"}, VALUE, "implementation: got 'xlaa', expected one of "),
    ({"unique_slots": 1}, TYPE, "unique_slots: got 1 of type int, expected a bool"),
]
READ_ERRORS = [
    *(({"k_scale": scale}, TYPE, f"k_scale: {message}") for scale, message in NO_SCALES[:1]),
    ({"block_table": TABLE[0]}, VALUE, "block_table: got shape (2,), expected [num_seqs"),
    ({"block_table": TABLE.astype(np.uint8)}, TYPE, "block_table: got dtype uint8, expected one of int32, int64"),
    ({"block_table": [[0]]}, TYPE, "block_table: got a list, expected an array"),
    ({"seq_lens": LENS[:3]}, VALUE, "seq_lens: got shape (3,), expected [num_seqs=4]"),
    ({"seq_lens": LENS.astype(np.float32)}, TYPE, "seq_lens: got dtype float32, expected one of int32, int64"),
    (
        {"k_scale": np.ones((2, 1), np.float32)},
        VALUE,
        "k_scale: got shape (2, 1), expected a scalar or [num_kv_heads=2]",
    ),
    ({"v_scale": 0}, VALUE, f"v_scale: got 0, {SCALE_RANGE}"),
    ({"implementation": "gpu"}, VALUE, "implementation: got 'gpu', expected one of "),
]
GATHER_ERRORS = [
    ({"dtype": jnp.int8}, TYPE, "dtype: got int8, expected one of float32, float16, bfloat16"),
    ({"dtype": np.float64}, TYPE, "dtype: got float64, expected one of float32, float16, bfloat16"),
    ({"dtype": "nvfp4"}, TYPE, "dtype: got 'nvfp4', expected one of float32, float16, bfloat16"),
    ({"dtype": "f4,("}, TYPE, "dtype: got 'f4,(', expected one of float32, float16, bfloat16"),
    ({"dtype": KVCacheDType.FP8_E4M3}, TYPE, "dtype: got <KVCacheDType.FP8_E4M3: 'fp8_e4m3'>, expected one of float3"),
]
ATTENTION_ERRORS = [
    ({"query": QUERY[0]}, VALUE, "query: got shape (6, 64), expected [num_seqs, num_heads, head_size=64]"),
    ({"query": QUERY[..., :63]}, VALUE, "query: got shape (4, 6, 63), expected [num_seqs, num_heads, head_size=64]"),
    ({"query": QUERY.astype(np.int8)}, TYPE, "query: got dtype int8, expected one of float32, float16, bfloat16"),
    ({"query": QUERY[:, :5]}, VALUE, "query: got num_heads=5, expected a multiple of num_kv_heads=2"),
    ({"query": QUERY[:, :0]}, VALUE, "query: got num_heads=0, expected a multiple of num_kv_heads=2"),
    ({"query": QUERY[:2]}, VALUE, "block_table: got shape (4, 2), expected [num_seqs=2, max_blocks]"),
    ({"sliding_window": 0}, VALUE, "sliding_window: got 0, expected a positive int, an integer scalar, "),
    ({"sliding_window": -4}, VALUE, "sliding_window: got -4, expected a positive int, an integer scalar, "),
    ({"sliding_window": 4.0}, TYPE, "sliding_window: got 4.0 of type float, expected an int, an integer scalar, "),
    ({"sliding_window": True}, TYPE, "sliding_window: got True of type bool, expected an int, an integer scalar, "),
    ({"sliding_window": "full"}, TYPE, "sliding_window: got 'full' of type str, expected an int, an integer scalar, "),
    ({"sliding_window": jnp.float32(4)}, TYPE, "sliding_window: got dtype float32, expected one of int32, int64"),
    ({"sliding_window": jnp.array([4, 4])}, VALUE, "sliding_window: got shape (2,), expected []"),
    ({"query": QUERY[:, None, None]}, VALUE, "query: got shape (4, 1, 1, 6, 64), expected [num_seqs, num_heads, head"),
    ({"query": QUERY[:, None, :3]}, VALUE, "query: got num_heads=3, expected a multiple of num_kv_heads=2"),
    ({"query": QUERY[:, None, :, :8]}, VALUE, "query: got shape (4, 1, 6, 8), expected [num_seqs, q_len, num_heads, h"),
    ({"sm_scale": "1"}, TYPE, "sm_scale: got '1' of type str, expected a float or None"),
    ({"sm_scale": np.ones(1)}, TYPE, "sm_scale: got array([1.]) of type ndarray, expected a float or None"),
    ({"sm_scale": float("inf")}, VALUE, "sm_scale: got inf, expected a number that is finite in float32"),
    ({"sm_scale": 1e39}, VALUE, "sm_scale: got 1e+39, expected a number that is finite in float32"),
    ({"logits_soft_cap": 0}, VALUE, "logits_soft_cap: got 0, expected a positive number or None"),
    ({"logits_soft_cap": -50.0}, VALUE, "logits_soft_cap: got -50.0, expected a positive number or None"),
    ({"logits_soft_cap": float("nan")}, VALUE, "logits_soft_cap: got nan, expected a number that is finite in float32"),
    ({"logits_soft_cap": True}, TYPE, "logits_soft_cap: got True of type bool, expected a float or None"),
    ({"sinks": LENS}, TYPE, "sinks: got dtype int32, expected one of float32, float64"),
    ({"sinks": np.zeros(2, np.float32)}, VALUE, "sinks: got shape (2,), expected [num_heads=6]"),
    ({"sinks": 1.0}, TYPE, "sinks: got a float, expected an array"),
]
CASES = [
    (operation, {**arguments, **change}, error, message)
    for operation, arguments, cases in (
        (reshape_and_cache_flash, WRITE, WRITE_ERRORS),
        (gather_kv, READ, READ_ERRORS + GATHER_ERRORS),
        (paged_attention, ATTEND, READ_ERRORS + ATTENTION_ERRORS),
    )
    for change, error, message in cases
]


def check_refused(run: Any, cache: KVCache, error: type[Exception], message: str) -> None:
    before = page_bytes(cache)
    with pytest.raises(error) as raised:
        run(cache)
    assert type(raised.value) is error
    assert str(raised.value).startswith(message)
    assert_same_bytes(page_bytes(cache), before)


@pytest.mark.parametrize(
    ("operation", "arguments", "error", "message"),
    CASES,
    ids=[f"{operation.__name__}-{message}" for operation, _, _, message in CASES],
)
def test_invalid_arguments_are_refused(operation, arguments, error, message):
    def run(cache):
        return operation(cache=cache, **arguments)

    cache = poisoned(FP8, 2)
    check_refused(run, cache, error, message)
    check_refused(jax.jit(run, donate_argnums=0), cache, error, message)


OPERATIONS = {
    "copy": lambda cache: copy_blocks(cache, PAIRS),
    "write": lambda cache: reshape_and_cache_flash(cache=cache, **WRITE),
    "gather": lambda cache: gather_kv(cache, **READ),
    "attention": lambda cache: paged_attention(cache=cache, **ATTEND),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_invalid_caches_are_refused(operation):
    run, donated = OPERATIONS[operation], KVCache.allocate(FP8, 2)
    jax.jit(lambda cache: cache, donate_argnums=0)(donated)
    for cache, error, message in [
        (np.zeros(3), TYPE, "cache: got a ndarray, expected a KVCache"),
        (KVCache(np.zeros(FP8.cache_shape(2), np.uint8), FP8), TYPE, "cache.kv: got a ndarray, expected a jax.Array"),
        (KVCache(jnp.zeros(FP8.cache_shape(2)), FP8), TYPE, "cache.kv: got dtype float32, expected uint8 for a cache "),
        (
            KVCache(jnp.zeros((2, 3), jnp.uint8), FP8),
            VALUE,
            "cache.kv: got shape (2, 3), expected [num_blocks, 2, 8, 2",
        ),
        (donated, VALUE, "cache.kv: got an array that was donated to an earlier call, expected the one that call ret"),
    ]:
        with pytest.raises(error) as raised:
            run(cache)
        assert str(raised.value).startswith(message)


def test_views_of_what_is_no_cache_are_refused():
    donated = KVCache.allocate(NVFP4, 2)
    jax.jit(lambda cache: cache, donate_argnums=0)(donated)
    for cache, error, message in [
        (np.zeros(3), TYPE, "cache: got a ndarray, expected a KVCache"),
        (donated, VALUE, "cache.kv: got an array that was donated to an earlier call, expected the one that call ret"),
    ]:
        with pytest.raises(error) as raised:
            nvfp4_split_views(cache)
        assert str(raised.value).startswith(message)


def test_the_message_of_a_donated_cache_shows_what_to_write_instead():
    cache = KVCache.allocate(FP8, 2)
    written = jax.jit(reshape_and_cache_flash, donate_argnums=2)(TOKENS, TOKENS, cache, SLOTS)
    with pytest.raises(KVCacheValueError, match=r"`cache = write\(key, value, cache, slot_mapping\)`"):
        reshape_and_cache_flash(TOKENS, TOKENS, cache, SLOTS)
    written.check()


def test_a_jitted_function_leaves_the_refusal_of_a_donated_cache_to_jax():
    cache = KVCache.allocate(FP8, 2)
    step = jax.jit(functools.partial(reshape_and_cache_flash, TOKENS, TOKENS, slot_mapping=SLOTS))
    jax.jit(lambda cache: cache, donate_argnums=0)(cache)
    with pytest.raises(RuntimeError, match=r"Array has been deleted with shape=uint8\[2,2,8,2,64\]"):
        step(cache=cache)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_array_of_the_other_layout_is_named_as_such(operation):
    hnd = dataclasses.replace(FP8, layout="HND")
    mislabelled = KVCache(KVCache.allocate(hnd, 2).kv, FP8)
    message = "cache.kv: got shape (2, 2, 2, 8, 64), expected [num_blocks, 2, 8, 2, 64] for dtype 'fp8_e4m3' and layout"
    check_refused(OPERATIONS[operation], mislabelled, VALUE, message)
    with pytest.raises(KVCacheValueError, match=r"layout 'NHD' \(the shape is that of layout='HND'\)$"):
        mislabelled.check()
    with pytest.raises(KVCacheValueError, match=r"layout='NHD'\)$"):
        KVCache(KVCache.allocate(FP8, 2).kv, hnd).check()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda cache, n: KVCache.allocate(FP8, n), "num_blocks: got "),
        (lambda cache, n: simple_spec(block_size=n), "FullAttentionSpec.block_size: got "),
        (lambda cache, n: paged_attention(QUERY, cache, TABLE, LENS, sm_scale=n), "sm_scale: got "),
        (lambda cache, n: paged_attention(QUERY, cache, TABLE, LENS, logits_soft_cap=n), "logits_soft_cap: got "),
    ],
    ids=["num_blocks", "block_size", "sm_scale", "logits_soft_cap"],
)
def test_static_arguments_have_to_be_known_when_traced(call, message):
    cache = poisoned(FP8, 2)
    call(cache, 4)
    with pytest.raises(KVCacheTypeError, match=rf"^{message}.*Tracer.*, expected an? (int|float)"):
        jax.jit(call)(cache, 4)


def test_what_may_be_traced_or_concrete_gives_the_same_bytes():
    cache, scale = poisoned(FP8, 2), np.float32(0.5)
    key = np.ones_like(TOKENS)
    expected = page_bytes(reshape_and_cache_flash(key, key, cache, SLOTS, k_scale=scale))
    for traced in ("cache", "slot_mapping", "k_scale", "key"):
        given = {"key": key, "cache": cache, "slot_mapping": SLOTS, "k_scale": scale}

        def run(x, traced=traced, given=given):
            return reshape_and_cache_flash(value=key, **{**given, traced: x})

        assert_same_bytes(page_bytes(jax.jit(run)(given[traced])), expected)


@pytest.mark.parametrize("spec", [simple_spec(), NVFP4], ids=lambda spec: spec.dtype.value)
@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_scales_per_head_are_refused_except_for_fp8(spec, name):
    scales = {name: jnp.ones(2)}
    message = f"{name}: got shape (2,), expected a scalar for dtype {spec.dtype.value!r}"
    cache = poisoned(spec, 2)
    for run in (
        lambda cache: reshape_and_cache_flash(cache=cache, **WRITE, **scales),
        lambda cache: gather_kv(cache, **READ, **scales),
        lambda cache: paged_attention(cache=cache, **ATTEND, **scales),
    ):
        check_refused(run, cache, VALUE, message)


def test_values_have_their_own_head_size():
    message = "value: got shape (3, 2, 64), expected [num_tokens=3, num_kv_heads=2, head_size_v=32]"
    check_refused(OPERATIONS["write"], poisoned(simple_spec(head_size_v=32), 2), VALUE, message)


def test_vllms_name_of_writes_with_two_head_sizes_is_the_same_operation():
    assert reshape_and_cache_flash_diffkv is reshape_and_cache_flash


def test_operations_on_keys_and_values_refuse_a_cache_of_latents_by_name():
    """Before anything is written, and with the operation that takes it."""
    spec = MLAAttentionSpec(8, 64, 32, dtype="bfloat16")
    tokens = TOKENS[:, :1], TOKENS[:, :1, :32]
    step = StepMetadata(TABLE, LENS, np.zeros(5, np.int32), SLOTS)
    table = np.zeros((10, 8), np.float32)
    calls = {
        "concat_and_cache_mla": {
            "reshape_and_cache_flash": lambda cache: reshape_and_cache_flash(*tokens, cache, SLOTS),
            "attend": lambda cache: attend(QUERY[:3], *tokens, cache, step),
        },
        "rope_and_cache_mla": {
            "rope_and_cache": lambda cache: rope_and_cache(QUERY[:3], *tokens, cache, SLOTS, SLOTS, table),
        },
        "gather_mla": {"gather_kv": lambda cache: gather_kv(cache, TABLE, LENS)},
        "mla_paged_attention": {"paged_attention": lambda cache: paged_attention(QUERY, cache, TABLE, LENS)},
        "mla_ragged_paged_attention": {
            "ragged_paged_attention": lambda cache: ragged_paged_attention(QUERY, cache, TABLE, LENS, step.cu_q_lens),
        },
    }
    for instead, refused in calls.items():
        for name, call in refused.items():
            message = f"{name}: got a cache of latents (MLA), expected one of keys and values; use {instead}"
            check_refused(call, poisoned(spec, 2), VALUE, message)
    with pytest.raises(VALUE, match="nvfp4_split_views: got a 'nvfp4' cache of latents"):
        nvfp4_split_views(poisoned(dataclasses.replace(spec, dtype=KVCacheDType.NVFP4), 2))


BOTH = select.Candidates(
    ("cache",), xla=lambda cache: "xla", mosaic=lambda cache: "mosaic", results=lambda cache: "name"
)
NOT_FOR_THIS = dataclasses.replace(BOTH, why_not_mosaic=lambda spec, target: "too few heads")


def chosen(requested: str | None, candidates: select.Candidates) -> str:
    cache = KVCache.allocate(simple_spec(), 1)
    return select.choose("op", requested, candidates, cache)(cache)


def test_where_a_kernel_can_run_it_is_chosen_unless_it_cannot_serve_the_cache():
    with plgpu.force_gpu_interpret_mode():
        assert [chosen(requested, BOTH) for requested in (None, "mosaic", "xla")] == ["mosaic", "mosaic", "xla"]
        assert chosen(None, NOT_FOR_THIS) == "xla"
        assert chosen(None, select.Candidates(("cache",), BOTH.xla)) == "xla"
        with pytest.raises(UnsupportedError, match=r"^op: implementation 'mosaic' cannot .*: too few heads$"):
            chosen("mosaic", NOT_FOR_THIS)


def test_where_no_kernel_can_run_asking_for_one_raises():
    with jax.default_device(jax.devices("cpu")[0]):
        assert chosen(None, BOTH) == "xla"
        with pytest.raises(UnsupportedError, match=r"^op: implementation 'mosaic' cannot .* this runs on cpu"):
            chosen("mosaic", BOTH)


def test_numpys_ints_and_bools_are_taken_for_pythons():
    cache, other = (KVCache.allocate(simple_spec(KVCacheDType.BFLOAT16), 2) for _ in range(2))
    four, window = np.int64(4), np.int32(8)
    spec = SlidingWindowSpec(four, four, np.uint8(32), dtype=KVCacheDType.BFLOAT16, sliding_window=window)
    config = {"num_hidden_layers": 2, "num_key_value_heads": 4, "head_dim": 64, "dtype": "bfloat16"}
    model = ModelKVConfig.from_hf_config(config)
    results = {
        "spec": (spec, SlidingWindowSpec(4, 4, 32, dtype=KVCacheDType.BFLOAT16, sliding_window=8)),
        "page_size_padded": (
            dataclasses.replace(spec, page_size_padded=np.int64(9000)).cache_shape(np.int64(3)),
            (3, 9000),
        ),
        "num_blocks": (KVCache.allocate(spec, four).num_blocks, 4),
        "max_tokens": (max_tokens([spec], np.int64(10**6)), max_tokens([spec], 10**6)),
        "shard": (model.shard(np.int32(2)), model.shard(2)),
        "skip_layers": (
            resolve_layer_specs(model, "fp8", skip_layers=[np.int64(1)], block_size=np.int64(8)),
            resolve_layer_specs(model, "fp8", skip_layers=[1], block_size=8),
        ),
        "nvfp4_kv_cache_full_dim": (nvfp4_kv_cache_full_dim(np.int64(64)), 36),
        "unique_slots": (
            reshape_and_cache_flash(TOKENS, TOKENS, cache, SLOTS, unique_slots=np.True_).spec,
            other.spec,
        ),
        "sliding_window": (
            paged_attention(QUERY, cache, TABLE, LENS, sliding_window=window).tolist(),
            paged_attention(QUERY, cache, TABLE, LENS, sliding_window=8).tolist(),
        ),
        "checked": (type(checked(np.True_)), type(checked(True))),
    }
    for name, (got, expected) in results.items():
        assert got == expected, name
    assert all(type(size) is int for size in dataclasses.astuple(spec)[:4])


@pytest.mark.parametrize(("platform", "holds_the_kernel"), [("cpu", False), ("cuda", True)])
def test_a_program_holds_a_kernel_where_it_is_lowered_for_a_gpu(platform, holds_the_kernel):
    candidates = select.Candidates(
        ("cache",),
        xla=lambda cache: jnp.cos(cache.kv),
        mosaic=lambda cache: jnp.sin(cache.kv),
        results=lambda cache: cache.kv,
    )

    def run(cache, requested=None):
        return select.choose("op", requested, candidates, cache)(cache)

    cache = KVCache.allocate(simple_spec(), 1)
    lowered = jax.jit(run).trace(cache).lower(lowering_platforms=(platform,)).as_text()
    assert ("stablehlo.sine" in lowered) is holds_the_kernel
    asked = jax.jit(functools.partial(run, requested="mosaic")).trace(cache)
    with contextlib.nullcontext() if holds_the_kernel else pytest.raises(UnsupportedError, match="this runs on cpu"):
        asked.lower(lowering_platforms=(platform,))


def test_a_misspelt_implementation_is_told_the_nearest():
    with pytest.raises(
        KVCacheValueError, match=r"got 'mosiac', expected one of mosaic, xla \(did you mean 'mosaic'\?\)"
    ):
        chosen("mosiac", BOTH)


def test_tensors_of_torch_are_sent_to_kvjax_torch():
    torch = pytest.importorskip("torch")
    cache = poisoned(FP8, 2)
    message = "got a Tensor, expected an array; kvjax_torch has the operations on torch's tensors"
    with pytest.raises(KVCacheTypeError, match=f"slot_mapping: {message}"):
        reshape_and_cache_flash(TOKENS, TOKENS, cache, torch.zeros(3, dtype=torch.int32))
    for scale in (torch.tensor(1.0), torch.nn.Parameter(torch.ones(2))):
        with pytest.raises(
            KVCacheTypeError, match=r"v_scale: got .*expected a number .*; kvjax_torch has the operations"
        ):
            gather_kv(cache, TABLE, LENS, v_scale=scale)
