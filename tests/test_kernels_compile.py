"""The kernels as GPUs will run them, compiled here by ptxas: in place, one kernel alone, without spills."""

from __future__ import annotations

import functools
import math
import re

import jax
import jax.numpy as jnp
import pytest
from support import gpu_compile
from support.gpu_compile import ARCHITECTURES, HOPPER_AND_BLACKWELL, TARGETS, CompiledProgram, compile_for
from support.helpers import FEW_DTYPES, FP8_NAMES, INPUT_DTYPES, KERNEL_DTYPES, each_case, matrix, pairwise, simple_spec
from support.kernel_cases import elementwise, reciprocals

from kvjax import (
    AttentionSpec,
    KVCache,
    KVCacheDType,
    gather_kv,
    kernels,
    reshape_and_cache_flash,
)
from kvjax.kernels import ptx
from kvjax.kernels.registers import THREADS

pytestmark = pytest.mark.skipif(gpu_compile.why_not() is not None, reason=str(gpu_compile.why_not()))

NUM_BLOCKS = 4096

SPEC_AXES = {
    "dtype": [dtype.value for dtype in KERNEL_DTYPES],
    "layout": ["NHD", "HND"],
    "v_scale_layout": ["linear", "swizzled"],
    "heads": [(1, 128), (3, 80), (5, 112), (8, 128), (16, 256)],
    "head_size_v": ["same", "other"],
    "block_size": [1, 16, 784],
}
HEAD_SIZE_V = {80: 64, 112: 16, 128: 96, 256: 32}
WRITE_AXES = SPEC_AXES | {
    "input_dtype": list(INPUT_DTYPES),
    "num_tokens": [1, 7, 64, 2048, 65536],
    "scales": ["scalar", "per_head"],
}
GATHER_AXES = SPEC_AXES | {
    "output_dtype": list(INPUT_DTYPES),
    "num_seqs": [1, 64],
    "scales": ["scalar", "per_head"],
    "target": list(TARGETS),
}


def is_valid(case: dict) -> bool:
    can_swizzle = "nvfp4" in case["dtype"] and case["block_size"] % 4 == 0
    takes_per_head = case["dtype"] in FP8_NAMES
    return (can_swizzle or case["v_scale_layout"] == "linear") and (takes_per_head or case["scales"] == "scalar")


def make_spec(case: dict) -> AttentionSpec:
    num_heads, head_size = case["heads"]
    return simple_spec(
        KVCacheDType(case["dtype"]),
        block_size=case["block_size"],
        num_kv_heads=num_heads,
        head_size=head_size,
        head_size_v=None if case["head_size_v"] == "same" else HEAD_SIZE_V[head_size],
        layout=case["layout"],
        v_scale_layout=case["v_scale_layout"],
    )


def abstract_cache(spec: AttentionSpec) -> KVCache:
    return KVCache(jax.ShapeDtypeStruct(spec.cache_shape(NUM_BLOCKS), spec.array_dtype), spec)


def abstract_scales(case: dict) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    shape = (case["heads"][0],) if case["scales"] == "per_head" else ()
    return (jax.ShapeDtypeStruct(shape, jnp.float32),) * 2


def write(key, value, cache, slot_mapping, k_scale, v_scale, unique_slots=False):
    return reshape_and_cache_flash(
        key,
        value,
        cache,
        slot_mapping,
        k_scale=k_scale,
        v_scale=v_scale,
        unique_slots=unique_slots,
        implementation="mosaic",
    )


def gather(cache, block_table, seq_lens, k_scale, v_scale, dtype):
    return gather_kv(
        cache, block_table, seq_lens, k_scale=k_scale, v_scale=v_scale, dtype=dtype, implementation="mosaic"
    )


def compile_write(target: str, case: dict, donate_argnums: int | tuple[()] = 2) -> CompiledProgram:
    spec = make_spec(case)
    key, value = (
        jax.ShapeDtypeStruct((case["num_tokens"], spec.num_kv_heads, size), INPUT_DTYPES[case["input_dtype"]])
        for size in (spec.head_size, spec.head_size_v)
    )
    slots = jax.ShapeDtypeStruct((case["num_tokens"],), jnp.int32)
    args = key, value, abstract_cache(spec), slots, *abstract_scales(case)
    # Of more tokens XLA finds the repeated slots, in kernels of its own.
    write_once = functools.partial(write, unique_slots=case["num_tokens"] >= kernels.SEARCHED)
    return compile_for(target, write_once, *args, donate_argnums=donate_argnums)


def cache_bytes(case: dict) -> int:
    return NUM_BLOCKS * make_spec(case).page_size_bytes


def assert_one_sound_kernel(program: CompiledProgram, target: str, spill_bytes: int = 0) -> None:
    assert program.device_ops == ("custom-call",)
    [kernel] = program.kernels
    assert kernel.target == ARCHITECTURES[target]
    assert kernel.spill_bytes <= spill_bytes
    assert "div.full" not in kernel.ptx  # off by two units in the last place, which no interpretation shows


# Bytes, at most. Of 35 blocks a token some threads have one more, and both candidates of it in registers.
SPILLS = {("nvfp4_4over6", (5, 112)): 136, ("int8_k_nvfp4_4over6_v", (5, 112)): 64}


TYPICAL = {
    "dtype": "bfloat16",
    "layout": "NHD",
    "v_scale_layout": "linear",
    "heads": (8, 128),
    "head_size_v": "same",
    "block_size": 16,
    "input_dtype": "bfloat16",
    "num_tokens": 1000,
    "scales": "scalar",
}


@each_case(
    [case | {"target": target} for target in HOPPER_AND_BLACKWELL for case in pairwise(WRITE_AXES, is_valid)]
    + [TYPICAL | {"dtype": dtype.value, "target": "rtx6000pro"} for dtype in KERNEL_DTYPES]
)
def test_a_write_is_one_kernel_in_place_without_spills(case):
    target = case["target"]
    program = compile_write(target, case)
    assert_one_sound_kernel(program, target, SPILLS.get((case["dtype"], case["heads"]), 0))
    assert program.alias_size == cache_bytes(case)
    assert program.temp_size == 0


@each_case(pairwise(GATHER_AXES, is_valid))
def test_a_gather_is_one_kernel_without_spills(case):
    spec, target = make_spec(case), case["target"]
    num_seqs, max_blocks = case["num_seqs"], 4
    table = jax.ShapeDtypeStruct((num_seqs, max_blocks), jnp.int32)
    lengths = jax.ShapeDtypeStruct((num_seqs,), jnp.int32)
    read = functools.partial(gather, dtype=INPUT_DTYPES[case["output_dtype"]])
    program = compile_for(target, read, abstract_cache(spec), table, lengths, *abstract_scales(case))
    assert_one_sound_kernel(program, target)
    assert program.temp_size <= 16  # where keys and values are: two pointers
    if spec.dtype is KVCacheDType.INT8_PER_TOKEN_HEAD:  # codes have a sign, which interpretation never loses
        assert "cvt.rn.f32.u" not in program.kernels[0].ptx


@matrix({"dtype": KERNEL_DTYPES}, few={"dtype": FEW_DTYPES})
def test_the_smallest_token_is_written_by_one_kernel(dtype):
    program = compile_write("h100", TYPICAL | {"dtype": dtype.value, "heads": (1, 16), "num_tokens": 1})
    assert_one_sound_kernel(program, "h100")


@matrix({"dtype": KERNEL_DTYPES, "target": HOPPER_AND_BLACKWELL}, few={"dtype": FEW_DTYPES, "target": ["h100"]})
def test_a_cache_that_is_not_donated_is_copied_once(dtype, target):
    program = compile_write(target, TYPICAL | {"dtype": dtype.value}, donate_argnums=())
    assert program.device_ops == ("copy", "custom-call")
    assert program.alias_size == 0


@pytest.mark.parametrize("target", TARGETS)
def test_the_hardware_makes_e2m1_codes_where_it_can(target):
    [kernel] = compile_write(target, TYPICAL | {"dtype": "nvfp4"}).kernels
    assert ("cvt.rn.satfinite.e2m1x2.f32" in kernel.ptx) == (target != "h100")


@matrix({"target": TARGETS, "input_dtype": ["float16", "bfloat16"]}, few={"input_dtype": ["bfloat16"]})
def test_a_thread_that_holds_whole_blocks_compares_sums_of_integers(target, input_dtype):
    many = {"num_tokens": 65536, "input_dtype": input_dtype}
    [kernel] = compile_write(target, TYPICAL | many | {"dtype": "nvfp4_4over6"}).kernels
    assert "dp4a" in kernel.ptx
    assert kernel.registers <= 96  # five programs fit a multiprocessor


def ieee_reciprocal(x):
    return elementwise(functools.partial(ptx.elementwise, "rcp.rn.f32 $0, $1;", jnp.reciprocal), x)


STEPS = r"MUFU\.RCP (R\d+), (R\d+) .*FFMA (R\d+), \2, \1, -1 .*FADD\.FTZ (R\d+), -\3, .*FFMA R\d+, \1, \4, \1 "


EXTREMES = r"(IADD3|VIADD) R.*, 0x1800000\b.*LOP3.LUT R.*, 0x7f800000,.*ISETP.GT.U32.AND P0,.*, 0x1ffffff,"


@pytest.mark.skipif(gpu_compile.folder_of_nvdisasm() is None, reason="needs nvdisasm, of CUDA's toolkit or of triton")
@pytest.mark.parametrize("target", ["h100", "b200"])  # whose instructions EXTREMES and STEPS are
def test_a_reciprocal_is_what_ptxas_makes_of_one_that_ieee_754_rounds(target):
    """`arithmetic.rounded_reciprocal` is, step by step, the path that ptxas takes for all but extreme exponents."""
    divisors = jax.ShapeDtypeStruct((4096,), jnp.float32)
    [ieee] = compile_for(target, ieee_reciprocal, divisors, disassemble=True).kernels
    body = " ".join(ieee.sass[ieee.sass.index(f".text.{ieee.name}:") :].replace(".reuse", "").split())
    assert re.search(EXTREMES, body)
    assert re.search(STEPS, body)
    [ours] = compile_for(target, reciprocals, divisors).kernels
    assert "rcp.approx.ftz.f32" in ours.ptx
    assert ours.ptx.count("fma.rn.f32") == 2 * 4096 // THREADS


def write_stacked(stacked, keys, values, slots, spec):
    def layer(_, per_layer):
        pages, key, value, slot_mapping = per_layer
        return None, write(key, value, KVCache(pages, spec), slot_mapping, 1.0, 1.0).kv

    return jax.lax.scan(layer, None, (stacked, keys, values, slots))[1]


NUM_LAYERS = 8


def step_over_layers(cache, keys, values, slots, table, lengths, implementation):
    """A model's step: each layer writes its tokens, and reads its sequences."""

    def step(cache, per_layer):
        key, value, layer = per_layer
        options = {"layer": layer, "implementation": implementation}
        cache = reshape_and_cache_flash(key, value, cache, slots, unique_slots=True, **options)
        read, _ = gather_kv(cache, table, lengths, **options)
        return cache, read.sum(dtype=jnp.float32)

    return jax.lax.scan(step, cache, (keys, values, jnp.arange(NUM_LAYERS, dtype=jnp.int32)))


@pytest.mark.full
@matrix(
    {"implementation": [None, "mosaic", "xla"], "dtype": [KVCacheDType.BFLOAT16, KVCacheDType.NVFP4]},
    few={"dtype": [KVCacheDType.NVFP4]},
)
def test_a_scan_over_layers_moves_no_cache(implementation, dtype):
    """The carried cache stays where it is, and one kernel writes, and one reads, whichever layer it is."""
    spec = make_spec(TYPICAL | {"dtype": dtype.value})
    shape = spec.cache_shape(NUM_BLOCKS, NUM_LAYERS)
    cache = KVCache(jax.ShapeDtypeStruct(shape, spec.array_dtype), spec, num_layers=NUM_LAYERS)
    rows = jax.ShapeDtypeStruct((NUM_LAYERS, 64, 8, 128), jnp.bfloat16)
    slots, table, lengths = (jax.ShapeDtypeStruct(dims, jnp.int32) for dims in ((64,), (4, 4), (4,)))
    step = functools.partial(step_over_layers, implementation=implementation)
    program = compile_for("h100", step, cache, rows, rows, slots, table, lengths, donate_argnums=0)
    cache_bytes = NUM_BLOCKS * NUM_LAYERS * spec.page_size_bytes
    assert [kernel.spill_bytes for kernel in program.kernels] == ([] if implementation == "xla" else [0, 0])
    assert program.alias_size == cache_bytes
    assert program.temp_size < 2**23 < cache_bytes / 64
    kinds = {"parameter", "get-tuple-element", "bitcast", "tuple", "while", "custom-call", "scatter", "fusion"}
    made = re.findall(r"= (\w+)\[([\d,]+)\]\S* ([a-z-]+)\(", program.hlo)
    largest = {kind for _, dims, kind in made if math.prod(map(int, dims.split(","))) == math.prod(shape)}
    assert largest <= (kinds if implementation == "xla" else kinds - {"scatter", "fusion"})


@pytest.mark.parametrize("target", TARGETS)
def test_slices_of_stacked_layers_are_not_fused_with_the_kernel(target):
    """XLA would drop the kernel's aliasing in such a fusion, and with it what the kernel leaves as it was."""
    spec = simple_spec(KVCacheDType.BFLOAT16)
    stacked = jax.ShapeDtypeStruct((3, *spec.cache_shape(NUM_BLOCKS)), spec.array_dtype)
    rows = jax.ShapeDtypeStruct((3, 5, spec.num_kv_heads, spec.head_size), jnp.bfloat16)
    slots = jax.ShapeDtypeStruct((3, 5), jnp.int32)
    program = compile_for(target, functools.partial(write_stacked, spec=spec), stacked, rows, rows, slots)
    assert "mosaic_gpu" in program.hlo
    assert "dynamic-slice-fusion" not in program.hlo
