"""gather_kv gives exactly the documented decoding of the documented encoding, and zeros past each length."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import reference
from support.helpers import (
    FP8_NAMES,
    INPUT_DTYPES,
    assert_same_bytes,
    assert_same_floats,
    can_write,
    each_case,
    kv_tokens,
    matrix,
    page_bytes,
    pairwise,
    poisoned,
    run_write,
    simple_spec,
)

from kvjax import STORED_KV_CACHE_DTYPES, KVCacheDType, ModelKVConfig, gather_kv, resolve_layer_specs
from kvjax.scale_values import MAX_SCALE, MIN_SCALE

EACH_DTYPE = pytest.mark.parametrize("dtype", STORED_KV_CACHE_DTYPES, ids=lambda dtype: dtype.value)

NUM_BLOCKS = 9
GARBAGE = 2**31 - 1  # what a block table may hold past a sequence's last block
LENGTHS = {
    "ragged": (0, 1, 11, 24),  # empty, one token, partial, full
    "full": (24, 24),
    "empty": (0, 0, 0),
    "no sequences": (),
}
AXES = {
    "dtype": [dtype.value for dtype in STORED_KV_CACHE_DTYPES],
    "out": [None, *INPUT_DTYPES],
    "layout": ["NHD", "HND", "NHD-diffkv", "HND-diffkv"],
    "v_scale_layout": ["linear", "swizzled"],
    "head_size": [64, 80, 128, 256],
    "num_kv_heads": [1, 3, 8],
    "scale": ["one", "scalar", "per_head"],
    "lengths": list(LENGTHS),
    "page": ["exact", "padded_pool"],
}


def is_valid(case: dict) -> bool:
    can_swizzle, takes_per_head = "nvfp4" in case["dtype"], case["dtype"] in FP8_NAMES
    return (can_swizzle or case["v_scale_layout"] == "linear") and (takes_per_head or case["scale"] != "per_head")


def make_spec(case: dict):
    layout, _, diffkv = case["layout"].partition("-")
    spec = simple_spec(
        KVCacheDType(case["dtype"]),
        num_kv_heads=case["num_kv_heads"],
        head_size=case["head_size"],
        head_size_v=96 if diffkv else None,
        layout=layout,
        v_scale_layout=case["v_scale_layout"],
    )
    padded = spec.real_page_size_bytes + 72
    return spec if case["page"] == "exact" else dataclasses.replace(spec, page_size_padded=padded)


def make_scales(kind: str, num_heads: int) -> dict[str, float | np.ndarray]:
    per_head = np.linspace(0.3, 2.9, num_heads, dtype=np.float32)
    k_scale, v_scale = {"one": (1.0, 1.0), "scalar": (0.0173, 1.9), "per_head": (per_head, per_head[::-1].copy())}[kind]
    return {"k_scale": k_scale, "v_scale": v_scale}


def make_tables(seq_lens: tuple[int, ...], block_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Block tables of three blocks a sequence that share no block, with garbage past each length."""
    table = np.random.default_rng(0).permutation(NUM_BLOCKS)[: 3 * sum(length > 0 for length in seq_lens)]
    tables = np.full((len(seq_lens), 3), GARBAGE, np.int32)
    tables[1::2] = -7
    for seq, blocks in zip((i for i, length in enumerate(seq_lens) if length), table.reshape(-1, 3), strict=True):
        used = -(-seq_lens[seq] // block_size)
        tables[seq, :used] = blocks[:used]
    return tables, np.asarray(seq_lens, np.int32)


@each_case(pairwise(AXES, is_valid))
def test_a_gather_reads_what_was_written(implementation, case):
    spec, scales = make_spec(case), make_scales(case["scale"], case["num_kv_heads"])
    block_table, seq_lens = make_tables(LENGTHS[case["lengths"]], spec.block_size)
    slots = np.random.default_rng(1).permutation(NUM_BLOCKS * spec.block_size).astype(np.int32)
    key, value = kv_tokens(spec, len(slots))
    writer = implementation if can_write(implementation, spec) else None
    cache = run_write(writer, key, value, poisoned(spec, NUM_BLOCKS), slots, **scales)
    pages = page_bytes(cache)

    out = case["out"] and INPUT_DTYPES[case["out"]]
    expected_out = np.dtype(out or (INPUT_DTYPES["bfloat16"] if spec.dtype.is_quantized else spec.storage_dtype))
    gather = jax.jit(gather_kv, static_argnames=("dtype", "implementation"))
    got = gather(cache, block_table, seq_lens, **scales, dtype=out, implementation=implementation)
    for half, dense, x in zip((reference.KEYS, reference.VALUES), got, (key, value), strict=True):
        scale = scales[("k_scale", "v_scale")[half]]
        expected = reference.read(pages, spec, half, block_table, seq_lens, scale, expected_out)
        assert_same_floats(np.asarray(dense), expected)
        # The same again without a cache: the decoding of the encoding of each position's token.
        part = reference.part(spec, half)
        decoded = reference.cast(reference.decode(reference.encode(x, part, scale), part, scale), expected_out)
        token_of_slot = np.argsort(slots)
        for seq, length in enumerate(seq_lens):
            positions = np.arange(length)
            at = block_table[seq, positions // spec.block_size] * spec.block_size + positions % spec.block_size
            assert_same_floats(np.asarray(dense)[seq, :length], decoded[token_of_slot[at]])


@pytest.mark.parametrize("model_dtype", ["float32", "float16", "bfloat16"])
def test_a_quantized_cache_gives_what_the_model_computes_in(implementation, model_dtype):
    config = {"num_hidden_layers": 2, "num_key_value_heads": 1, "head_dim": 32, "dtype": model_dtype}
    model = ModelKVConfig.from_hf_config(config)
    for spec in resolve_layer_specs(model, "nvfp4", block_size=4, skip_layers=[1]):
        cache = poisoned(spec, 2)
        arrays = cache, np.array([[1]]), np.array([3])
        which = implementation if spec.dtype.is_quantized else None
        for dense, asked in zip(
            gather_kv(*arrays, implementation=which),
            gather_kv(*arrays, dtype=INPUT_DTYPES[model_dtype], implementation=which),
            strict=True,
        ):
            assert_same_floats(np.asarray(dense), np.asarray(asked))


@EACH_DTYPE
def test_a_gather_reads_every_byte_pattern(implementation, dtype):
    """A poisoned cache holds NaNs, infinities, subnormals, and block scales that no write makes."""
    spec = simple_spec(dtype, num_kv_heads=4, head_size=128)
    cache = poisoned(spec, 2)
    block_table, seq_lens = np.array([[1, 0]], np.int32), np.array([16], np.int32)
    for out in INPUT_DTYPES.values():
        got = gather_kv(cache, block_table, seq_lens, dtype=out, implementation=implementation)
        for half, dense in zip((reference.KEYS, reference.VALUES), got, strict=True):
            expected = reference.read(page_bytes(cache), spec, half, block_table, seq_lens, 1.0, np.dtype(out))
            (assert_same_bytes if out == spec.storage_dtype else assert_same_floats)(np.asarray(dense), expected)


@matrix({"dtype": [dtype for dtype in STORED_KV_CACHE_DTYPES if dtype.takes_scale], "scale": [MIN_SCALE, MAX_SCALE]})
def test_the_smallest_and_the_largest_scale_are_applied(implementation, dtype, scale):
    spec = simple_spec(dtype)
    key, value = (x * np.float32(scale) for x in kv_tokens(spec, 8, specials=False))
    slots, scales = np.arange(8, dtype=np.int32), {"k_scale": scale, "v_scale": scale}
    cache = run_write(implementation, key, value, poisoned(spec, 1), slots, **scales)
    tables = np.zeros((1, 1), np.int32), np.array([8], np.int32)
    got = gather_kv(cache, *tables, **scales, dtype=jnp.float32, implementation=implementation)
    for half, part, dense in zip((reference.KEYS, reference.VALUES), dtype.parts, got, strict=True):
        expected = reference.read(page_bytes(cache), spec, half, *tables, scale, np.dtype(np.float32))
        assert_same_bytes(np.asarray(dense), expected)
        assert np.abs(expected).max() > 8 * scale or not part.takes_scale  # scales of rows are at least 1e-6


def test_indices_of_each_int_dtype_gather_the_same(implementation):
    cache = poisoned(simple_spec(KVCacheDType.FLOAT32), 4)
    table, lens = np.array([[3, 1]]), np.array([12])
    expected = gather_kv(cache, table.astype(np.int32), lens.astype(np.int32), implementation=implementation)
    for got in (
        gather_kv(cache, table, lens, implementation=implementation),  # NumPy's int64
        gather_kv(cache, jnp.asarray(table), lens, implementation=implementation),
    ):
        jax.tree.map(lambda a, b: assert_same_bytes(np.asarray(a), np.asarray(b)), got, expected)
    with jax.enable_x64(True):
        got = gather_kv(cache, jnp.asarray(table), jnp.asarray(lens), implementation=implementation)
        jax.tree.map(lambda a, b: assert_same_bytes(np.asarray(a), np.asarray(b)), got, expected)


def test_a_length_past_the_table_reads_the_whole_table(implementation):
    cache = poisoned(simple_spec(KVCacheDType.FLOAT32), 4)
    table = np.array([[3, 1]], np.int32)
    full, *longer = (
        gather_kv(cache, table, np.array([length]), implementation=implementation) for length in (16, 1000, 2**32 + 1)
    )
    for past in longer:
        jax.tree.map(lambda a, b: assert_same_bytes(np.asarray(a), np.asarray(b)), past, full)


@pytest.mark.parametrize("dtype", [KVCacheDType.BFLOAT16, KVCacheDType.NVFP4], ids=lambda dtype: dtype.value)
def test_nothing_is_read_where_the_table_names_no_block(implementation, dtype):
    """Zeros, and never what another sequence has in the first or the last page; the other blocks are read as usual."""
    cache = poisoned(simple_spec(dtype), 4)
    pages, lens = page_bytes(cache), np.array([16, 16, 13], np.int32)

    def check(table, given):
        got = gather_kv(cache, given, lens, implementation=implementation)
        for half, dense in zip((reference.KEYS, reference.VALUES), got, strict=True):
            dense = np.asarray(dense)
            assert_same_floats(dense, reference.read(pages, cache.spec, half, table, lens, 1.0, dense.dtype))
            assert not dense[(table != np.clip(table, 0, 3)).repeat(8, axis=1)].view(np.uint16).any()

    table = np.array([[-1, 2], [4, 99], [3, -(2**31)]], np.int32)
    check(table, table)
    check(table, jnp.asarray(table))
    table = np.array([[2**32, 2], [1, 2**31], [-(2**32), -(2**63)]])  # the low halves of some are blocks
    check(table, table)
    with jax.enable_x64(True):
        check(table, jnp.asarray(table))
