"""Pages of fp8 keys and NVFP4 values, `[K | V data | V scales]`: whatever writes or reads them, key by key."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import attention_suite as suite
from support import gpu_compile, reference
from support.attention_suite import Case
from support.helpers import (
    assert_same_bytes,
    assert_same_floats,
    kv_tokens,
    page_bytes,
    poisoned,
    run_write,
    simple_spec,
)
from support.interpret_mode import interpret_mode

import kvjax
from kvjax import AttentionSpec, KVCache, KVCacheDType, KVCacheValueError, KVScales
from kvjax.kernels.attention import schedule
from kvjax.kernels.write import plan

DTYPE = KVCacheDType.FP8_K_NVFP4_V
SCALES = {"k_scale": np.float32([0.3, 1.2]), "v_scale": np.float32(1.7)}
NUM_BLOCKS = 4
TABLE, LENGTHS = np.array([[1, 0, 2], [3, -1, 0]], np.int32), np.array([20, 12], np.int32)

SPECS = {
    "NHD": {},
    "HND-swizzled": {"layout": "HND", "v_scale_layout": "swizzled"},
    "diffkv": {"head_size": 72, "head_size_v": 128},
    "pool": {"page_size_padded": 5000, "v_scale_layout": "swizzled"},
}
EACH_SPEC = pytest.mark.parametrize("changes", SPECS.values(), ids=SPECS)


def slots_of(num_tokens: int) -> np.ndarray:
    """Some past the last."""
    return np.random.default_rng(0).permutation(NUM_BLOCKS * 8 + 4)[:num_tokens].astype(np.int32)


def check_write(spec: AttentionSpec, num_tokens: int, implementation: str, dtype: Any = np.float32) -> np.ndarray:
    key, value = kv_tokens(spec, num_tokens, dtype)
    cache = poisoned(spec, NUM_BLOCKS)
    before = page_bytes(cache)
    written = run_write(implementation, key, value, cache, slots_of(num_tokens), **SCALES)
    expected = reference.write(before, spec, key, value, slots_of(num_tokens), *SCALES.values())
    assert_same_bytes(page_bytes(written)[:, : spec.real_page_size_bytes], expected[:, : spec.real_page_size_bytes])
    assert_same_bytes(page_bytes(written), expected)
    return expected


def check_gather(spec: AttentionSpec, implementation: str, dtype: Any) -> None:
    cache = poisoned(spec, NUM_BLOCKS)
    dense = kvjax.gather_kv(cache, TABLE, LENGTHS, **SCALES, dtype=dtype, implementation=implementation)
    for half, (got, scale) in enumerate(zip(dense, SCALES.values(), strict=True)):
        expected = reference.read(page_bytes(cache), spec, half, TABLE, LENGTHS, scale, np.dtype(dtype))
        assert_same_floats(np.asarray(got), expected)


@EACH_SPEC
def test_xla_writes_and_reads_the_references_bytes(changes):
    spec = simple_spec(DTYPE, **changes)
    check_write(spec, 20, "xla")
    check_gather(spec, "xla", np.float16)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(changes, id=name, marks=[] if name == "diffkv" else pytest.mark.full)
        for name, changes in SPECS.items()
    ],
)
def test_interpreted_the_kernels_write_and_read_the_references_bytes(changes):
    spec = simple_spec(DTYPE, **changes)
    with interpret_mode():
        check_write(spec, 20, "mosaic", jnp.bfloat16)
        check_gather(spec, "mosaic", np.float16)


@pytest.mark.full
def test_interpreted_programs_of_several_tokens_take_keys_or_values(monkeypatch):
    monkeypatch.setattr(plan, "PROGRAMS", 2)
    spec = simple_spec(DTYPE, head_size=16)
    config = plan.WriteConfig.choose(spec, 35)
    assert (config.split_kv, config.tokens) == (True, 16)
    with interpret_mode():
        check_write(spec, 35, "mosaic")


WINDOWED = Case(DTYPE.value, lengths=(40, 0), window=39, sinks=True, cap=5.0, q_len=2, scales="scalar")
SWIZZLED = Case(DTYPE.value, "float16", "HND", "swizzled", lengths=(37,), block_size=8)
WIDER_VALUES = Case(DTYPE.value, lengths=(37,), head_size=80, head_size_v=128)


@pytest.mark.parametrize(
    ("case", "is_kernel"),
    [
        (WINDOWED, False),
        # Formats of keys and of values are those of fp8 and of NVFP4, whose caches are interpreted in more ways.
        *(pytest.param(*each, marks=pytest.mark.full) for each in ((SWIZZLED, True), (WIDER_VALUES, False))),
    ],
    ids=str,
)
def test_attention_is_right(case, is_kernel, monkeypatch):
    monkeypatch.setattr(schedule, "MIN_STAGES", 1)
    problem = suite.build(case)

    def attend(query, cache, *args, **options):
        run = functools.partial(kvjax.paged_attention, return_lse=True, implementation="mosaic" if is_kernel else "xla")
        with interpret_mode() if is_kernel else jax.default_device(jax.devices("cpu")[0]):
            return jax.tree.map(np.asarray, run(query, cache, *args, **options))

    suite.assert_right(problem, *problem.run(attend))


def test_values_are_those_of_an_nvfp4_cache_and_keys_those_of_an_fp8_one():
    spec = simple_spec(DTYPE)
    key, value = kv_tokens(spec, 20)
    options = {"k_scale": 0.3, "v_scale": 1.7}
    caches = {
        dtype: run_write("xla", key, value, KVCache.allocate(simple_spec(dtype), NUM_BLOCKS), slots_of(20), **options)
        for dtype in (DTYPE, *DTYPE.parts)
    }
    keys, values = (caches[part] for part in DTYPE.parts)
    keys_end, values_end = (cache.spec.regions.v[0].base for cache in (keys, values))
    both = np.concatenate([page_bytes(keys)[:, :keys_end], page_bytes(values)[:, values_end:]], axis=1)
    assert_same_bytes(page_bytes(caches[DTYPE]), both)


def test_only_keys_take_a_scale_per_head():
    spec = simple_spec(DTYPE)
    cache = KVCache.allocate(spec, 1, k_scale=np.ones(2, np.float32), v_scale=2.0)
    assert (cache.k_scale.shape, cache.v_scale.shape) == ((2,), ())
    with pytest.raises(KVCacheValueError, match=r"v_scale: got shape \(2,\), expected a scalar for dtype 'fp8_k_nvfp4"):
        KVCache.allocate(spec, 1, v_scale=np.ones(2, np.float32))
    with pytest.raises(KVCacheValueError, match=r"v_scale: got shape \(2,\), expected a scalar for dtype 'fp8_k_nvfp4"):
        kvjax.gather_kv(cache, TABLE[:, :1], LENGTHS, v_scale=np.ones(2, np.float32))


@pytest.mark.parametrize("method", ["amax", "mse"])
def test_calibration_takes_the_largest_number_of_each_part(method):
    spec = simple_spec(DTYPE)
    key, value = (np.abs(x) for x in kv_tokens(spec, 64, specials=False))
    [scales] = kvjax.calibrate([spec], [[(key, value)]], method=method, per_head=True)
    largest = key.max(axis=(0, 2)) / np.float32(448), value.max() / np.float32(6 * 448)
    assert [np.shape(scale) for scale in scales] == [(2,), ()]
    for scale, amax in zip(scales, largest, strict=True):
        np.testing.assert_array_less(scale / amax, 2.01)
        if method == "amax":
            np.testing.assert_array_equal(scale, amax)


def checkpoint(divisor: float) -> tuple[kvjax.ModelKVConfig, dict[str, np.ndarray]]:
    model = kvjax.ModelKVConfig.from_hf_config(
        {"model_type": "llama", "num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 128},
        model_dtype="bfloat16",
        quantization_config={"quant_method": "modelopt", "kv_cache_quant_algo": "FP8_K_NVFP4_V"},
    )
    scales = {"k_proj.k_scale": np.float32(3 / divisor), "v_proj.v_scale": np.float32(5 / divisor)}
    return model, {f"model.layers.0.self_attn.{name}": scale for name, scale in scales.items()}


def test_scales_of_a_checkpoint_are_those_of_each_part():
    model, tensors = checkpoint(448)
    assert kvjax.resolve_layer_specs(model)[0].dtype is DTYPE
    [scales] = kvjax.load_kv_scales(tensors, model, amax_divisor=448)
    np.testing.assert_allclose(scales, [3 / 448, 5 / 2688], rtol=1e-6)
    with pytest.warns(kvjax.KVCacheWarning, match="the divisor of the scales is unknown") as warned:
        [scales] = kvjax.load_kv_scales(tensors, model)
    assert len(warned) == 1
    assert scales == KVScales(*tensors.values())  # of keys it is 448, as for every fp8 cache
    with pytest.warns(kvjax.KVCacheWarning, match=r"keys: magnitudes above 448 .*; values: magnitudes above 2688"):
        assert kvjax.load_kv_scales({}, model) == (KVScales(1, 1),)


@pytest.mark.parametrize("num_tokens", [3, 100])
@pytest.mark.parametrize("form", ["one_allocation", "padded_pages"])
def test_torch_writes_and_reads_the_same_bytes(num_tokens, form):
    torch = pytest.importorskip("torch")
    from support.torch_helpers import torch_cache

    import kvjax_torch

    spec = simple_spec(DTYPE, block_size=32, v_scale_layout="swizzled")
    key, value = kv_tokens(spec, num_tokens)
    pages = page_bytes(poisoned(spec, NUM_BLOCKS))
    cache = torch_cache(pages, spec, form=form)
    slots = np.random.default_rng(0).permutation(NUM_BLOCKS * 32)[:num_tokens]
    stored = [torch.as_tensor(scale) for scale in SCALES.values()]
    options = {"v_scale_layout": "swizzled"}
    rows = torch.from_numpy(key), torch.from_numpy(value)
    kvjax_torch.reshape_and_cache_flash(
        *rows, cache.key, cache.value, torch.from_numpy(slots), DTYPE.value, *stored, **options
    )
    expected = reference.write(pages, spec, key, value, slots, *SCALES.values())
    assert_same_bytes(cache.pages(), expected)
    table, lengths = torch.from_numpy(TABLE), torch.from_numpy(LENGTHS * 3)
    read = cache.key, cache.value, table, lengths, DTYPE.value, *stored
    dense = kvjax_torch.gather_kv(*read, **options, dtype=torch.float32)
    for half, got in enumerate(dense):
        scale = list(SCALES.values())[half]
        wanted = reference.read(expected, spec, half, TABLE, LENGTHS * 3, scale, np.dtype(np.float32))
        assert_same_floats(got.numpy(), wanted)
    query = torch.randn(2, 4, 64, generator=torch.Generator().manual_seed(0))
    out = kvjax_torch.paged_attention(query, *read, **options)
    cache_in_jax = KVCache(jnp.asarray(expected).reshape(spec.cache_shape(NUM_BLOCKS)), spec)
    wanted = kvjax.paged_attention(query.numpy(), cache_in_jax, TABLE, LENGTHS * 3, **SCALES)
    np.testing.assert_allclose(out.numpy(), np.asarray(wanted), rtol=2e-5, atol=2e-5)


def test_torch_reads_keys_of_any_strides():
    """Keys have no scales of their own in the page, so that their rows may lie apart."""
    torch = pytest.importorskip("torch")
    from support.torch_helpers import torch_cache

    import kvjax_torch

    spec = simple_spec(DTYPE)
    pages = page_bytes(poisoned(spec, NUM_BLOCKS))
    cache = torch_cache(pages, spec)
    apart = torch.zeros((*cache.key.shape[:3], 80), dtype=torch.uint8)[..., :64]
    apart.copy_(cache.key)
    table, lengths = torch.from_numpy(TABLE), torch.from_numpy(LENGTHS)
    both = [
        kvjax_torch.gather_kv(keys, cache.value, table, lengths, DTYPE.value, 1.0, 1.0, dtype=torch.float32)
        for keys in (cache.key, apart)
    ]
    for one, other in zip(*both, strict=True):
        assert_same_bytes(one.numpy(), other.numpy())


needs_compiler = pytest.mark.skipif(gpu_compile.why_not() is not None, reason=str(gpu_compile.why_not()))


def write_tokens(key, value, cache, slots):
    return kvjax.reshape_and_cache_flash(key, value, cache, slots, unique_slots=True, implementation="mosaic")


def read_tokens(cache, table, lengths):
    return kvjax.gather_kv(cache, table, lengths, implementation="mosaic")


def attend_to_tokens(query, cache, table, lengths):
    return kvjax.paged_attention(query, cache, table, lengths, implementation="mosaic")


@pytest.mark.full
@needs_compiler
@pytest.mark.parametrize("target", ["h100", pytest.param("b200", marks=pytest.mark.full)])
@pytest.mark.parametrize("num_tokens", [1, 65536])
def test_a_write_is_one_kernel_in_place_without_spills(target, num_tokens):
    spec = simple_spec(DTYPE, block_size=16, num_kv_heads=8, head_size=128)
    cache = KVCache(jax.ShapeDtypeStruct(spec.cache_shape(4096), spec.array_dtype), spec)
    rows = jax.ShapeDtypeStruct((num_tokens, 8, 128), jnp.bfloat16)
    slots = jax.ShapeDtypeStruct((num_tokens,), jnp.int32)
    program = gpu_compile.compile_for(target, write_tokens, rows, rows, cache, slots, donate_argnums=2)
    assert program.device_ops == ("custom-call",)
    assert program.alias_size == 4096 * spec.page_size_bytes
    assert [kernel.spill_bytes for kernel in program.kernels] == [0]


@needs_compiler
@pytest.mark.parametrize("target", ["h100", pytest.param("b200", marks=pytest.mark.full)])
@pytest.mark.parametrize("operation", [read_tokens, attend_to_tokens])
def test_reads_are_kernels_without_spills(target, operation):
    spec = simple_spec(DTYPE, block_size=16, num_kv_heads=8, head_size=128)
    cache = KVCache(jax.ShapeDtypeStruct(spec.cache_shape(4096), spec.array_dtype), spec)
    sequences = jax.ShapeDtypeStruct((4, 64), jnp.int32), jax.ShapeDtypeStruct((4,), jnp.int32)
    query = (jax.ShapeDtypeStruct((4, 32, 128), jnp.bfloat16),) if operation is attend_to_tokens else ()
    program = gpu_compile.compile_for(target, operation, *query, cache, *sequences)
    assert [kernel.spill_bytes for kernel in program.kernels] == [0] * (1 + len(query))
