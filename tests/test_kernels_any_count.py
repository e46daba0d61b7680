"""The kernels that take addresses and counts: compiled for GPUs that are not here, and interpreted with known numbers.

`test_torch_cuda.py` launches them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.any_count import (
    BFLOAT16,
    attention_kernels,
    gather_kernel,
    interleaved_memory,
    ring_kind,
    write_kernel,
)
from support.gpu_compile import HOPPER_AND_BLACKWELL, compile_for, why_not
from support.helpers import (
    KERNEL_DTYPES,
    assert_same_bytes,
    kv_tokens,
    matrix,
    page_bytes,
    poisoned,
    run_write,
    simple_spec,
)
from support.interpret_mode import interpret_mode

import kvjax
from kvjax import KVCacheDType, binaries, gather_kv, kernels
from kvjax.kernels.write import launch_config

EACH_DTYPE = pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=lambda dtype: dtype.value)
NUM_BLOCKS = 3


def call(make: Callable[..., kernels.AnyCount], given: Sequence[Any], *arrays: jax.Array) -> list[jax.Array]:
    return make(*given).function(*arrays)


def check_compiled(target: str, num_unused: int, make: Callable[..., kernels.AnyCount], *given: Any) -> None:
    """As torch launches it: where it begins, an array may lie at any address, of which JAX would make assumptions."""
    args = make(*given).args
    given_integers = functools.partial(binaries.given_integers, num_args=len(args))
    [kernel] = compile_for(target, functools.partial(call, make, given), *args, change_kernel=given_integers).kernels
    assert kernel.spill_bytes == 0
    assert kernel.parameters == [f".align 8 .b8[{8 * (len(args) - num_unused)}]"]


def plain_kernel(dtype: KVCacheDType, operation: str, num_kv_heads: int) -> kernels.AnyCount:
    spec = simple_spec(dtype, num_kv_heads=num_kv_heads, head_size=128)
    if operation == "gather":
        return gather_kernel(spec)
    return write_kernel(spec, unique_slots=operation == "write of unique slots")


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
@matrix(
    {
        "dtype": KERNEL_DTYPES,
        "operation": ["write", "write of unique slots", "gather"],
        "num_kv_heads": [1, 8],
        "target": HOPPER_AND_BLACKWELL,
    },
    few={"dtype": [KVCacheDType.NVFP4], "target": ["h100"]},
    valid=lambda case: case["dtype"] is KVCacheDType.NVFP4 or (case["target"] == "h100") == (case["num_kv_heads"] == 1),
)
def test_one_kernel_takes_counts_as_integers_and_spills_nothing(dtype, operation, num_kv_heads, target):
    check_compiled(target, 0 if dtype.is_quantized else 2, plain_kernel, dtype, operation, num_kv_heads)


def kernel_with_ring(dtype: KVCacheDType | None, kept: int) -> kernels.AnyCount:
    """The update of a ring, by itself or with a write to pages of a dtype."""
    if dtype is None:
        return kernels.ring_kernel(ring_kind(kept))
    spec = simple_spec(dtype, num_kv_heads=8, head_size=128, block_size=16)
    return write_kernel(spec, unique_slots=True, ring=ring_kind(kept))


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
@matrix(
    {"dtype": [None, *KERNEL_DTYPES], "kept": [1, 3, 64], "target": HOPPER_AND_BLACKWELL},
    few={"dtype": [None, KVCacheDType.NVFP4], "kept": [1, 64]},
)
def test_the_update_of_a_ring_takes_no_kernel_of_its_own_and_spills_nothing(dtype, kept, target):
    check_compiled(target, 0 if dtype is None or dtype.is_quantized else 2, kernel_with_ring, dtype, kept)


def interleaved_kernel(dtype: KVCacheDType, operation: str) -> kernels.AnyCount:
    spec = simple_spec(dtype, num_kv_heads=2, head_size=128, head_size_v=64)
    pages, scale_pages = interleaved_memory(spec)
    if operation == "gather":
        return kernels.gather_kernel(spec, pages, BFLOAT16, (1, 1), scale_pages)
    rows = [kernels.RowMemory(BFLOAT16, spec.num_kv_heads * size, 16) for size in (spec.head_size, spec.head_size_v)]
    options = {"unique_slots": False, "scale_pages": scale_pages}
    kind = kernels.WriteKind(spec, (rows[0], rows[1]), pages, np.dtype(np.int64), (1, 1), **options)
    return kernels.write_kernel(kind)


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
@matrix(
    {
        "dtype": [dtype for dtype in KERNEL_DTYPES if dtype.is_per_token_head],
        "operation": ["write", "gather"],
        "target": HOPPER_AND_BLACKWELL,
    },
    few={"dtype": [KVCacheDType.INT8_PER_TOKEN_HEAD], "operation": ["gather"], "target": ["h100"]},
)
def test_scales_between_rows_are_arguments_of_their_own(dtype, operation, target):
    """Of vLLM's pages, whose scales leave everything at multiples of four bytes."""
    check_compiled(target, 0, interleaved_kernel, dtype, operation)


@pytest.mark.parametrize("dtype", [KVCacheDType.INT8_PER_TOKEN_HEAD, KVCacheDType.FP8_E4M3], ids=str)
def test_memory_of_scales_that_a_dtype_lacks_or_needs_is_refused(dtype):
    """Scales that are neither beside the data nor in memory of their own, and such memory for a dtype without them."""
    spec = simple_spec(dtype)
    (keys, values), of_scales = interleaved_memory(spec)
    scales = (None, None) if dtype.is_per_token_head else of_scales
    rows = (kernels.RowMemory(BFLOAT16, 128, 16),) * 2
    kind = kernels.WriteKind(spec, rows, (keys, values), np.dtype(np.int64), (1, 1), scale_pages=scales)
    batch = kernels.BatchKind(
        spec, (keys, values), BFLOAT16, 2, 1, (1, 1), kernels.Softmax(sm_scale=1.0), scale_pages=scales
    )
    for make in (
        lambda: kernels.write_kernel(kind),
        lambda: kernels.gather_kernel(spec, (keys, values), BFLOAT16, (1, 1), scales),
        lambda: kernels.prompt_gather_kernel(spec, (keys, values), BFLOAT16, scales),
        lambda: kernels.attention_kernels(batch, kernels.Target()),
    ):
        with pytest.raises(ValueError, match=r"memory=.* does not fit"):
            make()


@pytest.mark.full
def test_interpreted_kernels_serve_scales_between_rows():
    dtype = KVCacheDType.INT8_PER_TOKEN_HEAD
    spec = simple_spec(dtype, num_kv_heads=2, head_size=128, head_size_v=64)
    key, value = kv_tokens(spec, 5, BFLOAT16)
    slots = np.array([7, -1, 16, 3, 99], np.int64)
    expected = run_write("xla", key, value, poisoned(spec, NUM_BLOCKS), slots.astype(np.int32))
    starts = 0, spec.head_size + 4, spec.head_size, spec.head_size + 4 + spec.head_size_v  # K, V, their scales
    memory = np.zeros((NUM_BLOCKS, spec.page_size_bytes), np.uint8)
    with interpret_mode(), jax.enable_x64(True):
        rows = [jnp.asarray(x).reshape(5, -1) for x in (key, value)]
        counts, given = (5, NUM_BLOCKS * spec.block_size - 1), (jnp.asarray(slots), *rows)
        each = [jnp.array(memory) for _ in starts]
        parts = interleaved_kernel(dtype, "write").with_counts(counts, 5, *given, *each)
        for start, part in zip(starts, parts, strict=True):  # each as if it began where its own bytes do
            memory |= np.roll(np.asarray(part), start)
        table, lengths = jnp.array([2, 0, 1], jnp.int32), jnp.array([24], jnp.int32)
        kernel = interleaved_kernel(dtype, "gather")
        dense = [jnp.zeros((3 * spec.block_size, *x.array.shape[1:]), x.array.dtype) for x in kernel.arguments[-2:]]
        keys, values, *of_scales = (jnp.asarray(np.roll(memory, -start)) for start in starts)
        read = kernel.with_counts((3, 3, NUM_BLOCKS - 1), 3, table, lengths, *of_scales, keys, values, *dense)
        jax.block_until_ready(read)
    wanted = gather_kv(expected, table[None], lengths, dtype=BFLOAT16, implementation="xla")
    stored = np.isin(np.array([16 + i for i in range(8)] + [*range(16)]), slots)
    for got, want in zip(read, wanted, strict=True):
        assert_same_bytes(np.asarray(got)[stored], np.asarray(want)[0][stored])
        assert not np.asarray(got)[~stored].any()


def attention_kernel(operation: str, dtype: KVCacheDType, options: dict[str, Any]) -> kernels.AnyCount:
    options = dict(options)
    sizes = {name: options.pop(name) for name in ("head_size", "layout", "block_size") if name in options}
    spec = simple_spec(dtype, **{"num_kv_heads": 8, "head_size": 128, "block_size": 16} | sizes)
    num_seqs = {"merge of one": 1, "merge of few": 8}.get(operation, 64)
    decode, merge, _ = attention_kernels(spec, **options).of(num_seqs, 64)
    return decode if operation == "decode" else merge


def call_attention(operation: str, dtype: KVCacheDType, options: dict[str, Any], *arrays: jax.Array) -> list[jax.Array]:
    return attention_kernel(operation, dtype, options).function(*arrays)


ATTENTION = [
    ("decode", KVCacheDType.NVFP4, {"has_sinks": True}),
    ("merge of one", KVCacheDType.NVFP4, {"has_sinks": True}),
    ("merge of few", KVCacheDType.NVFP4, {"has_sinks": True}),
    ("merge", KVCacheDType.BFLOAT16, {"has_sinks": True, "q_len": 4}),
    ("decode", KVCacheDType.BFLOAT16, {"q_len": 2}),
    ("decode", KVCacheDType.FP8_E4M3, {"layout": "HND", "window": 1024, "logits_soft_cap": 50.0}),
    ("decode", KVCacheDType.NVFP4, {"head_size": 256, "q_len": 2}),
    ("decode", KVCacheDType.FLOAT16, {"head_size": 80, "block_size": 8, "q_len": 4}),
    ("decode", KVCacheDType.BFLOAT16, {"one_memory": True}),
    ("decode", KVCacheDType.BFLOAT16, {"one_memory": True, "layout": "HND"}),
    ("decode", KVCacheDType.FP8_E4M3, {"one_memory": True}),
    ("decode", KVCacheDType.FP8_E4M3, {"one_memory": True, "layout": "HND", "block_size": 64}),
    ("decode", KVCacheDType.INT8_PER_TOKEN_HEAD, {}),
    ("decode", KVCacheDType.INT8_PER_TOKEN_HEAD, {"interleaved": True}),
    ("decode", KVCacheDType.FP8_PER_TOKEN_HEAD, {"q_len": 4, "layout": "HND"}),
]


@pytest.mark.full
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
@pytest.mark.parametrize(
    ("operation", "dtype", "options", "target"),
    # `test_torch_launch.py` lowers NVFP4's decode, `test_kernels_attention.py` compiles it for each target.
    [
        *(
            pytest.param(*each, "h100", marks=() if i in (1, 4, 8, 12) else pytest.mark.full)
            for i, each in enumerate(ATTENTION)
        ),
        *(
            pytest.param(*ATTENTION[i], target, marks=pytest.mark.full)
            for i in (0, 1, 11)
            for target in ("b200", "rtx6000pro")
        ),
    ],
)
def test_attention_is_two_kernels_that_are_given_integers(operation, dtype, options, target):
    options = options | ({"target": kernels.Target(188, (12, 0), 99 * 1024)} if target == "rtx6000pro" else {})
    args = attention_kernel(operation, dtype, options).args
    given_integers = functools.partial(binaries.given_integers, num_args=len(args))
    function = functools.partial(call_attention, operation, dtype, options)
    [kernel] = compile_for(target, function, *args, change_kernel=given_integers).kernels
    assert kernel.spill_bytes == 0
    num_unused = 0 if dtype.is_quantized or operation != "decode" else 2  # scales
    num_unused += options.get("one_memory", False)  # the address of values
    assert kernel.parameters == [f".align 8 .b8[{8 * (len(args) - num_unused)}]"]


def with_gaps(rows: jax.Array) -> jax.Array:
    """Tokens as a fused projection has them, 64 other elements after each."""
    return jnp.pad(rows.reshape(rows.shape[0], -1), [(0, 0), (0, 64)], constant_values=jnp.nan)


@pytest.mark.parametrize(("programs", "least", "tokens"), [(264, 1, 1), (2, 4, 2), (2, 8, 4), (2, 16, 4), (2, 32, 4)])
def test_a_config_is_chosen_from_its_least_number_of_tokens_on(programs, least, tokens, monkeypatch):
    monkeypatch.setattr(launch_config, "PROGRAMS", programs)
    monkeypatch.setattr(launch_config, "SEARCHED", 16 * programs)
    spec = simple_spec(KVCacheDType.NVFP4, num_kv_heads=8, head_size=96)
    rungs = launch_config.rungs(spec, unique_slots=False)
    assert [rung.min_tokens for rung in rungs] == [1, 2 * programs, 4 * programs, 16 * programs]
    kernel = write_kernel(spec)
    for num_tokens in (least, least + 1):
        halves = 2 if num_tokens < 2 * programs else 1
        assert kernel.num_programs(num_tokens) == halves * -(-num_tokens // tokens)
        config = launch_config.WriteConfig.choose(spec, num_tokens)
        assert config == launch_config.WriteConfig(tokens, split_kv=halves == 2)
        assert config.num_programs(num_tokens) == kernel.num_programs(num_tokens)


@pytest.mark.parametrize(
    ("dtype", "num_heads", "leasts"),
    [
        (KVCacheDType.BFLOAT16, 8, [1]),
        (KVCacheDType.BFLOAT16, 4, [1, 528]),
        (KVCacheDType.FP8_E4M3, 8, [1]),
        (KVCacheDType.FP8_E5M2, 8, [1]),
        (KVCacheDType.FP8_E4M3, 6, [1, 528]),
        (KVCacheDType.NVFP4, 8, [1, 528]),
    ],
)
def test_a_kernel_has_nothing_to_choose_where_a_token_is_enough_for_a_program(dtype, num_heads, leasts):
    spec = simple_spec(dtype, num_kv_heads=num_heads, head_size=128)
    assert [rung.min_tokens for rung in launch_config.rungs(spec, unique_slots=True)] == leasts
    kernel = write_kernel(spec, unique_slots=True)
    assert kernel.num_programs(600) == (600 if leasts == [1] else 300)


@pytest.mark.parametrize("rotates", [False, True])
@pytest.mark.parametrize("num_heads", [1, 2, 8, 16])
@EACH_DTYPE
def test_no_program_takes_more_elements_than_its_limit(dtype, num_heads, rotates):
    spec = simple_spec(dtype, num_kv_heads=num_heads, head_size=256)
    ladder = launch_config.WriteConfig.by_min_tokens(spec, rotates)
    assert list(ladder) == sorted(ladder)
    for least, config in ladder.items():
        assert config.tokens == 1 or config.tokens * num_heads * 256 <= launch_config.max_elements(spec)
        assert config.num_programs(least) >= min(least, launch_config.PROGRAMS)
        is_small = least == 1 and (spec.stores_scales or rotates)
        assert config.split_kv == (is_small or launch_config.has_to_split(spec))


@matrix(
    {
        "dtype": KERNEL_DTYPES,
        "tokens": [(1, False), (3, False), (5, False), (9, False), (33, False), (5, True)],
    },
    few={"tokens": [(1, False), (9, False), (33, False), (5, True)]},
)
def test_an_interpreted_write_and_gather_have_the_bytes_of_xla(dtype, tokens, monkeypatch):
    """Two programs at least: of 5 tokens each takes two, of 9 four, and 33 are not searched for repeated slots.

    Where the slots of 5 are promised to be unique, each takes one, but of NVFP4 two.
    """
    num_tokens, unique_slots = tokens
    monkeypatch.setattr(launch_config, "PROGRAMS", 2)
    monkeypatch.setattr(launch_config, "SEARCHED", 32)
    spec = simple_spec(dtype, num_kv_heads=8, head_size=128) if unique_slots else simple_spec(dtype)
    key, value = kv_tokens(spec, num_tokens, BFLOAT16)
    if num_tokens < 32:
        slots = np.array([7, -1, 16, 3, 99, 7, 3, 0, 7], np.int32)[:num_tokens]
    else:
        slots = np.random.default_rng(0).permutation(40)[:num_tokens].astype(np.int32)  # a few past the last
    cache = poisoned(spec, NUM_BLOCKS)
    scales = {"k_scale": np.float32(0.3), "v_scale": np.float32(1.7)}
    expected = run_write("xla", key, value, cache, slots, **scales)
    both_scales = [jnp.full(1, scale, jnp.float32) for scale in scales.values()]
    pages = poisoned(spec, NUM_BLOCKS).kv.reshape(NUM_BLOCKS, -1)
    rows = [with_gaps(jnp.asarray(x)) for x in (key, value)]
    last_slot = NUM_BLOCKS * spec.block_size - 1

    def of_scales(pages: jax.Array) -> list[jax.Array]:
        """The layer's, or for scales of each token and head what these lie in."""
        in_pages = [part.is_per_token_head for part in spec.dtype.parts]
        return [pages if each else scale for each, scale in zip(in_pages, both_scales, strict=True)]

    with interpret_mode():
        kernel = write_kernel(spec, np.int32, unique_slots=unique_slots)
        written, *_ = kernel.with_counts(
            (num_tokens, last_slot), num_tokens, jnp.asarray(slots), *rows, pages, pages, *of_scales(pages)
        )
        assert_same_bytes(np.asarray(written).view(np.uint8).reshape(NUM_BLOCKS, -1), page_bytes(expected))

        full = expected.kv.reshape(NUM_BLOCKS, -1)
        table, lengths = jnp.array([NUM_BLOCKS, 0, 2, 1], jnp.int32), jnp.array([11, 3], jnp.int32)
        heads = 4 * spec.block_size, spec.num_kv_heads
        dense = [jax.ShapeDtypeStruct((*heads, size), BFLOAT16) for size in spec.head_sizes]
        arrays = table, lengths, *of_scales(full), full, full, *dense
        read = gather_kernel(spec).with_counts((2, 2, NUM_BLOCKS - 1), 4, *arrays)
        jax.block_until_ready(read)
    wanted = gather_kv(expected, table.reshape(2, 2), lengths, dtype=BFLOAT16, implementation="xla", **scales)
    for got, want in zip(read, wanted, strict=True):
        assert_same_bytes(np.asarray(got).reshape(-1).view(np.uint8), np.asarray(want).reshape(-1).view(np.uint8))


def latent_kernel(operation: str, dtype: KVCacheDType, heads: int, q_len: int) -> kernels.AnyCount:
    spec = kvjax.MLAAttentionSpec(64, 512, 64, dtype=dtype)
    batch = attention_kernels(spec, group=heads, q_len=q_len, one_memory=True)
    decode, merge, _ = batch.of(64, 64)
    return decode if operation == "decode" else merge


def call_latents(operation: str, dtype: KVCacheDType, heads: int, q_len: int, *arrays: jax.Array) -> list[jax.Array]:
    return latent_kernel(operation, dtype, heads, q_len).function(*arrays)


@pytest.mark.full
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
@pytest.mark.parametrize(
    ("operation", "dtype", "heads", "q_len"),
    [
        ("decode", KVCacheDType.BFLOAT16, 16, 1),
        ("decode", KVCacheDType.FLOAT16, 128, 2),
        ("decode", KVCacheDType.FP8_E4M3, 64, 1),
        ("decode", KVCacheDType.FP8_DS_MLA, 64, 1),
        ("merge", KVCacheDType.BFLOAT16, 16, 1),
    ],
)
def test_attention_over_latents_is_two_kernels_that_are_given_integers(operation, dtype, heads, q_len):
    given = operation, dtype, heads, q_len
    args = latent_kernel(*given).args
    given_integers = functools.partial(binaries.given_integers, num_args=len(args))
    function = functools.partial(call_latents, *given)
    [kernel] = compile_for("h100", function, *args, change_kernel=given_integers).kernels
    assert ("wgmma" in kernel.ptx) == (operation == "decode")
    assert "serialized" not in kernel.ptxas_log
    if operation == "merge":
        assert kernel.spill_bytes == 0
    else:  # as over JAX arrays: results and logits fill the registers, and masks and bytes take more
        most = {"bfloat16": 188, "float16": 356, "fp8_e4m3": 1096, "fp8_ds_mla": 1060}
        assert kernel.spill_bytes <= most[dtype.value]
