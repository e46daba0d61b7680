"""Pages of 8-bit keys and NVFP4 values: whatever writes or reads them, key by key.

Those of fp8 keys are `[K | V data | V scales]`. Keys of int8 have a scale of each token and head:
`[K | K scales | V data | V scales]`.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import attention_suite as suite
from support import gpu_compile, reference
from support.any_count import BFLOAT16, attention_kernels, gather_kernel, page_memory, scale_memory, write_kernel
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
from kvjax.kernels.write import launch_config

FP8, INT8 = KVCacheDType.FP8_K_NVFP4_V, KVCacheDType.INT8_K_NVFP4_V
INT8_4OVER6 = KVCacheDType.INT8_K_NVFP4_4OVER6_V
INT8_SCALES = {"k_scale": np.float32(0.3), "v_scale": np.float32(1.7)}
"""That of keys is ignored."""

SCALES = {
    FP8: {"k_scale": np.float32([0.3, 1.2]), "v_scale": np.float32(1.7)},
    INT8: INT8_SCALES,
    INT8_4OVER6: INT8_SCALES,
}
EACH_DTYPE = pytest.mark.parametrize("dtype", [FP8, INT8])


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


def check_write(spec: AttentionSpec, num_tokens: int, implementation: str, of: Any = np.float32) -> None:
    key, value = kv_tokens(spec, num_tokens, of)
    scales = SCALES[spec.dtype]
    cache = poisoned(spec, NUM_BLOCKS)
    before = page_bytes(cache)
    written = run_write(implementation, key, value, cache, slots_of(num_tokens), **scales)
    expected = reference.write(before, spec, key, value, slots_of(num_tokens), *scales.values())
    assert_same_bytes(page_bytes(written), expected)


def check_gather(spec: AttentionSpec, implementation: str, dtype: Any) -> None:
    scales = SCALES[spec.dtype]
    cache = poisoned(spec, NUM_BLOCKS)
    dense = kvjax.gather_kv(cache, TABLE, LENGTHS, **scales, dtype=dtype, implementation=implementation)
    for half, (got, scale) in enumerate(zip(dense, scales.values(), strict=True)):
        expected = reference.read(page_bytes(cache), spec, half, TABLE, LENGTHS, scale, np.dtype(dtype))
        assert_same_floats(np.asarray(got), expected)


@pytest.mark.parametrize(
    ("dtype", "starts", "bits"), [(FP8, [0, 128, 128 + 64], 6.25), (INT8, [0, 128, 132, 132 + 64], 6.375)]
)
def test_a_page_holds_keys_and_then_values_each_with_their_scales(dtype, starts, bits):
    spec = simple_spec(dtype, block_size=16, num_kv_heads=8, head_size=128)
    rows = 16 * 8
    assert [region.base // rows for region in (*spec.regions.k, *spec.regions.v)] == starts
    assert spec.page_size_bytes == rows * (starts[-1] + 8)
    assert spec.storage_dtype == spec.array_dtype == np.uint8
    assert 8 * spec.bytes_per_token / (2 * 8 * 128) == bits


@EACH_SPEC
@pytest.mark.parametrize("dtype", [FP8, INT8, pytest.param(INT8_4OVER6, marks=pytest.mark.full)])
def test_xla_writes_and_reads_the_references_bytes(dtype, changes):
    spec = simple_spec(dtype, **changes)
    check_write(spec, 20, "xla")
    check_gather(spec, "xla", np.float16)


@pytest.mark.parametrize(
    ("dtype", "changes"),
    [
        pytest.param(
            dtype,
            changes,
            id=f"{dtype.value}-{name}",
            marks={INT8: pytest.mark.nightly}.get(dtype, () if (dtype, name) == (FP8, "diffkv") else pytest.mark.full),
        )
        for dtype in SCALES
        for name, changes in SPECS.items()
    ],
)
def test_interpreted_the_kernels_write_and_read_the_references_bytes(dtype, changes):
    spec = simple_spec(dtype, **changes)
    with interpret_mode():
        check_write(spec, 20, "mosaic", jnp.bfloat16)
        check_gather(spec, "mosaic", np.float16)


@pytest.mark.full
def test_interpreted_programs_of_several_tokens_take_keys_or_values(monkeypatch):
    monkeypatch.setattr(launch_config, "PROGRAMS", 2)
    spec = simple_spec(FP8, head_size=16)
    config = launch_config.WriteConfig.choose(spec, 35)
    assert (config.split_kv, config.tokens) == (True, 16)
    with interpret_mode():
        check_write(spec, 35, "mosaic")


def attention_cases(dtype: KVCacheDType) -> dict[str, Case]:
    scales = "scalar" if dtype is INT8 else Case.scales
    return {
        "windowed": Case(dtype.value, lengths=(40, 0), window=39, sinks=True, cap=5.0, q_len=2, scales="scalar"),
        "swizzled": Case(dtype.value, "float16", "HND", "swizzled", lengths=(37,), block_size=8, scales=scales),
        "wider values": Case(dtype.value, lengths=(37,), head_size=80, head_size_v=128),
    }


FP8_CASES, INT8_CASES = attention_cases(FP8), attention_cases(INT8)


@pytest.mark.parametrize(
    ("case", "is_kernel"),
    [
        (FP8_CASES["windowed"], False),
        (INT8_CASES["windowed"], False),
        # Formats of keys and of values are those of fp8 and of NVFP4, whose caches are interpreted in more ways.
        pytest.param(FP8_CASES["swizzled"], True, marks=pytest.mark.full),
        pytest.param(FP8_CASES["wider values"], False, marks=pytest.mark.full),
        *(pytest.param(case, True, marks=pytest.mark.full) for case in INT8_CASES.values()),
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


@EACH_DTYPE
def test_keys_are_those_of_a_cache_of_8_bits_and_values_those_of_an_nvfp4_one(dtype):
    key, value = kv_tokens(simple_spec(dtype), 20)
    caches = {
        each: run_write("xla", key, value, KVCache.allocate(simple_spec(each), NUM_BLOCKS), slots_of(20), **INT8_SCALES)
        for each in (dtype, *dtype.parts)
    }
    keys, values = (caches[part] for part in dtype.parts)
    keys_end, values_end = (cache.spec.regions.v[0].base for cache in (keys, values))
    both = np.concatenate([page_bytes(keys)[:, :keys_end], page_bytes(values)[:, values_end:]], axis=1)
    assert_same_bytes(page_bytes(caches[dtype]), both)


def test_only_fp8_keys_take_a_scale_per_head():
    spec = simple_spec(FP8)
    cache = KVCache.allocate(spec, 1, k_scale=np.ones(2, np.float32), v_scale=2.0)
    assert (cache.k_scale.shape, cache.v_scale.shape) == ((2,), ())
    with pytest.raises(KVCacheValueError, match=r"v_scale: got shape \(2,\), expected a scalar for dtype 'fp8_k_nvfp4"):
        KVCache.allocate(spec, 1, v_scale=np.ones(2, np.float32))
    with pytest.raises(KVCacheValueError, match=r"v_scale: got shape \(2,\), expected a scalar for dtype 'fp8_k_nvfp4"):
        kvjax.gather_kv(cache, TABLE[:, :1], LENGTHS, v_scale=np.ones(2, np.float32))


def test_the_scale_of_int8_keys_is_dropped_and_neither_is_one_per_head():
    spec = simple_spec(INT8)
    cache = KVCache.allocate(spec, 1, k_scale=3.0, v_scale=2.0)
    assert (cache.k_scale, float(cache.v_scale)) == (None, 2.0)
    with pytest.raises(KVCacheValueError, match=r"k_scale: got -1\.0, expected between"):
        KVCache.allocate(spec, 1, k_scale=-1.0)
    for name in INT8_SCALES:
        with pytest.raises(KVCacheValueError, match=rf"{name}: got shape \(2,\), expected a scalar for dtype 'int8_k"):
            kvjax.gather_kv(cache, TABLE[:, :1], LENGTHS, **{name: np.ones(2, np.float32)})


@pytest.mark.parametrize("method", ["amax", "mse"])
def test_calibration_takes_the_largest_number_of_each_part(method):
    spec = simple_spec(FP8)
    key, value = (np.abs(x) for x in kv_tokens(spec, 64, specials=False))
    [scales] = kvjax.calibrate([spec], [[(key, value)]], method=method, per_head=True)
    largest = key.max(axis=(0, 2)) / np.float32(448), value.max() / np.float32(6 * 448)
    assert [np.shape(scale) for scale in scales] == [(2,), ()]
    for scale, amax in zip(scales, largest, strict=True):
        np.testing.assert_array_less(scale / amax, 2.01)
        if method == "amax":
            np.testing.assert_array_equal(scale, amax)


@pytest.mark.parametrize("method", ["amax", "mse"])
def test_calibration_finds_a_scale_of_values_alone_beside_int8_keys(method):
    spec = simple_spec(INT8)
    key, value = (np.abs(x) for x in kv_tokens(spec, 64, specials=False))
    [scales] = kvjax.calibrate([spec], [[(key, value)]], method=method)
    amax = value.max() / np.float32(6 * 448)
    assert (scales.k_scale, np.shape(scales.v_scale)) == (1, ())
    assert scales.v_scale == amax if method == "amax" else scales.v_scale / amax < 2.01
    with pytest.raises(KVCacheValueError, match="per_head: got True, expected False"):
        kvjax.calibrate([spec], [[(key, value)]], per_head=True)


def model(**declared: Any) -> kvjax.ModelKVConfig:
    return kvjax.ModelKVConfig.from_hf_config(
        {"model_type": "llama", "num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 128},
        model_dtype="bfloat16",
        **declared,
    )


def checkpoint(divisor: float) -> tuple[kvjax.ModelKVConfig, dict[str, np.ndarray]]:
    scales = {"k_proj.k_scale": np.float32(3 / divisor), "v_proj.v_scale": np.float32(5 / divisor)}
    declared = {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8_K_NVFP4_V"}
    tensors = {f"model.layers.0.self_attn.{name}": scale for name, scale in scales.items()}
    return model(quantization_config=declared), tensors


def test_scales_of_a_checkpoint_are_those_of_each_part():
    of, tensors = checkpoint(448)
    assert kvjax.resolve_layer_specs(of)[0].dtype is FP8
    [scales] = kvjax.load_kv_scales(tensors, of, amax_divisor=448)
    np.testing.assert_allclose(scales, [3 / 448, 5 / 2688], rtol=1e-6)
    with pytest.warns(kvjax.KVCacheWarning, match="the divisor of the scales is unknown") as warned:
        [scales] = kvjax.load_kv_scales(tensors, of)
    assert len(warned) == 1
    assert scales == KVScales(*tensors.values())  # of keys it is 448, as for every fp8 cache
    with pytest.warns(kvjax.KVCacheWarning, match=r"keys: magnitudes above 448 .*; values: magnitudes above 2688"):
        assert kvjax.load_kv_scales({}, of) == (KVScales(1, 1),)


def test_of_a_checkpoint_only_the_scale_of_values_is_read_beside_int8_keys():
    names = (f"model.layers.0.self_attn.{name}" for name in ("k_proj.k_scale", "v_proj.v_scale"))
    k_scale, v_scale = names
    tensors = {k_scale: np.float32(-3), v_scale: np.float32(5 / 448)}
    [scales] = kvjax.load_kv_scales(tensors, model(), INT8, amax_divisor=448)
    np.testing.assert_allclose(scales, [1, 5 / 2688], rtol=1e-6)
    del tensors[k_scale]
    assert kvjax.load_kv_scales(tensors, model(), INT8, amax_divisor=448) == (scales,)
    with pytest.warns(kvjax.KVCacheWarning, match=r"unknown.*; values: if it is 448, the unchanged") as warned:
        kvjax.load_kv_scales(tensors, model(), INT8)
    assert len(warned) == 1
    with pytest.warns(kvjax.KVCacheWarning, match="holds no scale, so 1 is used: values: magnitudes above 2688"):
        assert kvjax.load_kv_scales({k_scale: np.float32(1)}, model(), INT8) == (KVScales(1, 1),)


def torch_cache_of(
    dtype: KVCacheDType, form: str = "one_allocation", **changes: Any
) -> tuple[AttentionSpec, np.ndarray, Any]:
    """A spec, bytes of its pages, and these as a torch caller's cache."""
    from support.torch_helpers import torch_cache

    spec = simple_spec(dtype, block_size=32, v_scale_layout="swizzled", **changes)
    pages = page_bytes(poisoned(spec, NUM_BLOCKS))
    return spec, pages, torch_cache(pages, spec, form=form)


@EACH_DTYPE
@pytest.mark.parametrize("num_tokens", [3, 100])
@pytest.mark.parametrize("form", ["one_allocation", "padded_pages"])
def test_torch_writes_and_reads_the_same_bytes(dtype, num_tokens, form):
    torch = pytest.importorskip("torch")
    import kvjax_torch

    spec, pages, cache = torch_cache_of(dtype, form)
    key, value = kv_tokens(spec, num_tokens)
    slots = np.random.default_rng(0).permutation(NUM_BLOCKS * 32)[:num_tokens]
    scales = SCALES[dtype]
    stored = [torch.as_tensor(scale) for scale in scales.values()]
    options = {"v_scale_layout": "swizzled"}
    rows = torch.from_numpy(key), torch.from_numpy(value)
    kvjax_torch.reshape_and_cache_flash(
        *rows, cache.key, cache.value, torch.from_numpy(slots), dtype.value, *stored, **options
    )
    expected = reference.write(pages, spec, key, value, slots, *scales.values())
    assert_same_bytes(cache.pages(), expected)
    table, lengths = torch.from_numpy(TABLE), torch.from_numpy(LENGTHS * 3)
    read = cache.key, cache.value, table, lengths, dtype.value, *stored
    dense = kvjax_torch.gather_kv(*read, **options, dtype=torch.float32)
    for half, got in enumerate(dense):
        scale = list(scales.values())[half]
        wanted = reference.read(expected, spec, half, TABLE, LENGTHS * 3, scale, np.dtype(np.float32))
        assert_same_floats(got.numpy(), wanted)
    query = torch.randn(2, 4, 64, generator=torch.Generator().manual_seed(0))
    out = kvjax_torch.paged_attention(query, *read, **options)
    cache_in_jax = KVCache(jnp.asarray(expected).reshape(spec.cache_shape(NUM_BLOCKS)), spec)
    wanted = kvjax.paged_attention(query.numpy(), cache_in_jax, TABLE, LENGTHS * 3, **scales)
    np.testing.assert_allclose(out.numpy(), np.asarray(wanted), rtol=2e-5, atol=2e-5)


def test_torch_reads_fp8_keys_of_any_strides():
    """Keys of fp8 have no scales of their own in the page, so that their rows may lie apart."""
    torch = pytest.importorskip("torch")
    from support.torch_helpers import torch_cache

    import kvjax_torch

    spec = simple_spec(FP8)
    pages = page_bytes(poisoned(spec, NUM_BLOCKS))
    cache = torch_cache(pages, spec)
    apart = torch.zeros((*cache.key.shape[:3], 80), dtype=torch.uint8)[..., :64]
    apart.copy_(cache.key)
    table, lengths = torch.from_numpy(TABLE), torch.from_numpy(LENGTHS)
    both = [
        kvjax_torch.gather_kv(keys, cache.value, table, lengths, FP8.value, 1.0, 1.0, dtype=torch.float32)
        for keys in (cache.key, apart)
    ]
    for one, other in zip(*both, strict=True):
        assert_same_bytes(one.numpy(), other.numpy())


@pytest.mark.full
@pytest.mark.parametrize("form", ["one_allocation", "padded_pages"])
def test_interpreted_the_kernels_of_torch_write_and_read_the_same_bytes(form):
    """The scales of keys are told from the tensor of keys, that of values is the layer's."""
    torch = pytest.importorskip("torch")
    from support.interpreted_calls import run_interpreted

    from kvjax_torch.arguments.plan import Encoding, ReadTensors, WriteTensors
    from kvjax_torch.arguments.reads import gather_plan
    from kvjax_torch.arguments.writes import write_plan
    from kvjax_torch.calls.gathering import gather_call
    from kvjax_torch.calls.writing import write_call

    spec, pages, cache = torch_cache_of(INT8, form)
    key, value = kv_tokens(spec, 3, jnp.float32)
    slots, scales = np.array([70, 3, -1]), [torch.as_tensor(scale) for scale in INT8_SCALES.values()]
    rows = torch.from_numpy(key), torch.from_numpy(value)
    tensors = WriteTensors(*rows, cache.key, cache.value, torch.from_numpy(slots), *scales)
    encoding = Encoding(INT8.value, "swizzled")
    call = write_call(write_plan(tensors, encoding), tensors, unique_slots=True)
    assert [call.kernel.arguments[i].name for i in call.kernel.written] == ["key_cache", "value_cache", "k_scale"]
    assert call.tensors[-2] is cache.key
    assert call.tensors[-1].data_ptr() == scales[1].data_ptr()
    run_interpreted(call)
    expected = reference.write(pages, spec, key, value, slots, *INT8_SCALES.values())
    assert_same_bytes(cache.pages(), expected)
    table, lengths = torch.from_numpy(TABLE), torch.from_numpy(LENGTHS * 3)
    read = ReadTensors(cache.key, cache.value, table, lengths, *scales)
    call = gather_call(gather_plan(read, encoding, torch.float16), read)
    run_interpreted(call)
    for half, (got, scale) in enumerate(zip(call.tensors[-2:], INT8_SCALES.values(), strict=True)):
        wanted = reference.read(expected, spec, half, TABLE, LENGTHS * 3, scale, np.dtype(np.float16))
        assert_same_floats(got.numpy(), wanted)


@pytest.mark.full
@pytest.mark.parametrize("form", ["one_allocation", "two_tensors"])
def test_interpreted_the_kernels_of_torch_attend(form):
    torch = pytest.importorskip("torch")
    from support.interpreted_calls import run_interpreted

    import kvjax_torch
    from kvjax_torch.arguments.attention import attention_plan
    from kvjax_torch.arguments.plan import Encoding, ReadTensors, SoftmaxOptions
    from kvjax_torch.calls.attending import attention_calls

    spec, _, cache = torch_cache_of(INT8, form, head_size=32)
    scales = [torch.as_tensor(scale) for scale in INT8_SCALES.values()]
    rows = [torch.from_numpy(x) for x in kv_tokens(spec, NUM_BLOCKS * 32, specials=False)]
    stored, options = (INT8.value, *scales), {"v_scale_layout": "swizzled"}
    kvjax_torch.reshape_and_cache_flash(
        *rows, cache.key, cache.value, torch.arange(NUM_BLOCKS * 32), *stored, **options
    )
    # In one allocation the values of the last block follow all that `run_interpreted` copies.
    numbers = torch.from_numpy(np.where(TABLE == NUM_BLOCKS - 1, 1, TABLE)), torch.from_numpy(LENGTHS * 3)
    query = torch.randn(2, 1, 4, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    wanted = kvjax_torch.paged_attention(query.float(), cache.key, cache.value, *numbers, *stored, **options)
    read = ReadTensors(cache.key, cache.value, *numbers, *scales)
    plan = attention_plan(query, read, Encoding(INT8.value, "swizzled"), SoftmaxOptions())
    with interpret_mode():  # it has no barrier of several warpgroups, so kernels are made for it
        decode, merge = attention_calls(plan, query, read, None)
    run_interpreted(decode)
    run_interpreted(merge)
    np.testing.assert_allclose(merge.tensors[-2].float(), wanted, atol=0.02 * wanted.abs().max())


def test_torch_refuses_scales_of_each_token_and_head_in_tensors_of_their_own():
    torch = pytest.importorskip("torch")
    import kvjax_torch

    spec, pages, cache = torch_cache_of(INT8)
    rows = [torch.ones(2, spec.num_kv_heads, 64)] * 2
    own = torch.ones(NUM_BLOCKS, spec.block_size, spec.num_kv_heads)
    for scales, name in (((own, 1.0), "k_scale"), ((1.0, own), "v_scale"), ((own, own), "k_scale")):
        with pytest.raises(
            KVCacheValueError, match=rf"{name}: got shape \(4, 32, 2\), expected one element for 'int8_"
        ):
            kvjax_torch.reshape_and_cache_flash(
                *rows, cache.key, cache.value, torch.arange(2), INT8.value, *scales, v_scale_layout="swizzled"
            )
    with pytest.raises(KVCacheValueError, match=r"expected \[.*, 68\] for head size 64 in 'int8_k_nvfp4_v'$"):
        kvjax_torch.reshape_and_cache_flash(
            *rows, cache.key[..., :64].clone(), cache.value, torch.arange(2), INT8.value, own, 1.0
        )
    assert_same_bytes(cache.pages(), pages)


needs_compiler = pytest.mark.skipif(gpu_compile.why_not() is not None, reason=str(gpu_compile.why_not()))
ON_BOTH = pytest.mark.parametrize("target", ["h100", pytest.param("b200", marks=pytest.mark.full)])


def write_tokens(key, value, cache, slots):
    return kvjax.reshape_and_cache_flash(key, value, cache, slots, unique_slots=True, implementation="mosaic")


def read_tokens(cache, table, lengths):
    return kvjax.gather_kv(cache, table, lengths, implementation="mosaic")


def attend_to_tokens(query, cache, table, lengths):
    return kvjax.paged_attention(query, cache, table, lengths, implementation="mosaic")


def attend_to_prompts(query, cache, table, lengths):
    ends = jnp.arange(5, dtype=jnp.int32) * 16
    return kvjax.ragged_paged_attention(
        jnp.tile(query, (16, 1, 1)), cache, table, lengths, ends, max_q_len=16, implementation="mosaic"
    )


@needs_compiler
@pytest.mark.full
@ON_BOTH
@pytest.mark.parametrize("num_tokens", [1, 65536])
@pytest.mark.parametrize("dtype", SCALES)
def test_a_write_is_one_kernel_in_place_without_spills(dtype, num_tokens, target):
    spec = simple_spec(dtype, block_size=16, num_kv_heads=8, head_size=128)
    cache = KVCache(jax.ShapeDtypeStruct(spec.cache_shape(4096), spec.array_dtype), spec)
    rows = jax.ShapeDtypeStruct((num_tokens, 8, 128), jnp.bfloat16)
    slots = jax.ShapeDtypeStruct((num_tokens,), jnp.int32)
    program = gpu_compile.compile_for(target, write_tokens, rows, rows, cache, slots, donate_argnums=2)
    assert program.device_ops == ("custom-call",)
    assert program.alias_size == 4096 * spec.page_size_bytes
    assert [kernel.spill_bytes for kernel in program.kernels] == [0]


@needs_compiler
@ON_BOTH
@pytest.mark.parametrize(
    ("dtype", "operation", "num_kernels"),
    [
        (FP8, read_tokens, 1),
        (FP8, attend_to_tokens, 2),
        *(
            pytest.param(INT8, *each, marks=pytest.mark.full)
            for each in ((read_tokens, 1), (attend_to_tokens, 2), (attend_to_prompts, None))
        ),
    ],
)
def test_reads_are_kernels_without_spills(dtype, operation, num_kernels, target):
    spec = simple_spec(dtype, block_size=16, num_kv_heads=8, head_size=128)
    cache = KVCache(jax.ShapeDtypeStruct(spec.cache_shape(4096), spec.array_dtype), spec)
    sequences = jax.ShapeDtypeStruct((4, 64), jnp.int32), jax.ShapeDtypeStruct((4,), jnp.int32)
    query = () if operation is read_tokens else (jax.ShapeDtypeStruct((4, 32, 128), jnp.bfloat16),)
    program = gpu_compile.compile_for(target, operation, *query, cache, *sequences)
    assert num_kernels in (None, len(program.kernels))
    assert [kernel.spill_bytes for kernel in program.kernels] == [0] * len(program.kernels)
    assert program.kernels


def any_kernel(operation: str) -> kvjax.kernels.AnyCount:
    spec = simple_spec(INT8, block_size=16, num_kv_heads=8, head_size=128)
    if operation == "decode":
        decode, _, _ = attention_kernels(spec).of(4, 64)
        return decode
    if operation == "gather of prompts":
        return kvjax.kernels.prompt_gather_kernel(spec, page_memory(spec), BFLOAT16, scale_memory(spec))
    return {"write": write_kernel, "gather": gather_kernel}[operation](spec)


def call_any_kernel(operation: str, *arrays: Any) -> Any:
    return any_kernel(operation).function(*arrays)


@needs_compiler
@pytest.mark.full
@ON_BOTH
@pytest.mark.parametrize("operation", ["write", "gather", "decode", "gather of prompts"])
def test_kernels_of_torch_spill_nothing(operation, target):
    args = any_kernel(operation).args
    program = gpu_compile.compile_for(target, functools.partial(call_any_kernel, operation), *args)
    assert [kernel.spill_bytes for kernel in program.kernels] == [0]
