"""The parts of the gather kernel: its decodings, launches and layouts, and what callers may put into its tables."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import ptx
from support.helpers import (
    FEW_DTYPES,
    INPUT_DTYPES,
    KERNEL_DTYPES,
    assert_same_bytes,
    assert_same_floats,
    matrix,
    poisoned,
    simple_spec,
)
from support.interpret_mode import interpret_mode

from kvjax import KVCacheDType, gather_kv, quant
from kvjax.kernels import decoding
from kvjax.kernels.gather import GatherConfig
from kvjax.kernels.registers import THREADS, lane_layout
from kvjax.ops.gather import gather_mosaic

BYTES = np.arange(256, dtype=np.uint8)


def read(implementation: str, *args, **kwargs) -> list[np.ndarray]:
    return [np.asarray(x) for x in jax.block_until_ready(gather_kv(*args, implementation=implementation, **kwargs))]


@pytest.mark.parametrize("scale", [1.0, 0.0371, 2.0**-100, 2.0**100])
def test_every_pair_of_nvfp4_codes_is_decoded_with_every_block_scale(scale):
    scale = np.float32(scale)
    data = np.broadcast_to(BYTES.reshape(-1, 8), (256, 32, 8))
    block_scales = np.broadcast_to(BYTES[:, None], (256, 32))
    with interpret_mode():
        low, high = decoding.decode_nvfp4(
            jnp.asarray(data), jnp.asarray(block_scales), scale, np.dtype(np.float32), lambda x: x[..., None]
        )
    expected = quant.decode_nvfp4(
        jnp.asarray(data), jnp.asarray(block_scales).view(jnp.float8_e4m3fn)[..., None], scale
    )
    assert_same_floats(np.stack([low, high], axis=-1).reshape(256, 32, 16), np.asarray(expected).reshape(256, 32, 16))


@pytest.mark.parametrize("scale", [1.0, 0.0371, 2.0**-100, 2.0**100])
@pytest.mark.parametrize("out", ["float16", "bfloat16"])
def test_ptx_decodes_every_pair_of_nvfp4_codes_with_every_block_scale(out, scale):
    """Run on the CPU; what is decoded in float32 and rounded."""
    out, scale = np.dtype(INPUT_DTYPES[out]), np.float32(scale)
    data, block_scales = np.tile(BYTES.reshape(-1, 8), (256, 1)), np.repeat(BYTES, 32)
    [factor] = ptx.run(decoding.PTX_OF_FACTOR, 1, [block_scales.astype(np.uint32)])
    scales = np.full(data.size, scale * np.float32(decoding.FACTOR))
    given = data.reshape(-1).astype(np.uint32), np.repeat(factor, 8), scales
    [pairs] = ptx.run(decoding.ptx_of_pair(out), 1, given)
    of_blocks = jnp.asarray(block_scales).view(jnp.float8_e4m3fn)[:, None]
    expected = quant.cast(quant.decode_nvfp4(jnp.asarray(data), of_blocks, scale), out)
    assert_same_bytes(pairs.view(out), np.asarray(expected).reshape(-1))


@pytest.mark.parametrize("out", INPUT_DTYPES)
@pytest.mark.parametrize("dtype", [KVCacheDType.FP8_E4M3, KVCacheDType.FP8_E5M2], ids=str)
def test_every_fp8_byte_is_decoded(dtype, out):
    out = np.dtype(INPUT_DTYPES[out])
    with interpret_mode():  # where conversions are those of `quant`
        got = decoding.decode_fp8(jnp.asarray(BYTES), jnp.float32(0.0371), dtype, out)
    stored = jnp.asarray(BYTES).view(dtype.info.storage_dtype)
    assert_same_bytes(np.asarray(got), np.asarray(quant.cast(quant.decode_fp8(stored, jnp.float32(0.0371)), out)))


@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize("block_size", [1, 4, 16, 20, 48, 784])
@pytest.mark.parametrize("num_kv_heads", [1, 5, 8, 128])
def test_programs_take_whole_parts_of_a_block(num_kv_heads, block_size, swizzled):
    if swizzled and block_size % 4:
        return
    layout = "swizzled" if swizzled else "linear"
    spec = simple_spec(
        KVCacheDType.NVFP4, block_size=block_size, num_kv_heads=num_kv_heads, head_size=256, v_scale_layout=layout
    )
    for dtype in INPUT_DTYPES.values():
        tokens = GatherConfig.choose(spec, np.dtype(dtype)).tokens
        assert block_size % tokens == 0
        assert not swizzled or tokens % 4 == 0


def test_a_program_takes_a_token_at_least():
    with pytest.raises(ValueError, match=r"self.tokens=0 must be positive"):
        GatherConfig(0)


@pytest.mark.parametrize("max_vector", [1, 4, 8])
@pytest.mark.parametrize("shape", [(8, 8, 128), (16, 1, 80), (1, 5, 112), (784, 3, 6, 8), (4, 8, 8), (1, 1, 16), (3,)])
def test_a_layout_tiles_its_arrays_with_as_many_threads_as_powers_of_two_allow(shape, max_vector):
    layout = lane_layout(shape, max_vector).to_mgpu()
    elements = np.prod([size & -size for size in shape])
    assert layout.vector_length <= max_vector
    assert all(size % tile == 0 for size, tile in zip(shape[::-1], layout.base_tile_shape[::-1], strict=False))
    assert THREADS // layout.replication_factor == min(THREADS, elements // layout.vector_length)
    assert layout.replication_factor == max(1, THREADS // elements)


@matrix({"dtype": KERNEL_DTYPES, "tokens": [1, 4, 16]}, few={"dtype": FEW_DTYPES})
def test_the_number_of_tokens_of_a_program_does_not_change_the_result(dtype, tokens):
    spec = simple_spec(dtype, block_size=16, head_size_v=32)
    cache, table = poisoned(spec, 3), np.array([[2, 0], [1, 7]], np.int32)
    lengths, scale, out = np.array([29, 15], np.int32), np.full(1, 0.0371, np.float32), np.dtype(np.float16)
    with interpret_mode():
        got = gather_mosaic(cache, table, lengths, None, scale, scale, dtype=out, config=GatherConfig(tokens))
    expected = read("xla", cache, table, lengths, k_scale=scale[0], v_scale=scale[0], dtype=out)
    for g, e in zip(got, expected, strict=True):
        assert_same_bytes(np.asarray(g), e)


@pytest.mark.parametrize("x64", [False, True])
def test_blocks_and_lengths_out_of_range_read_zeros(x64):
    cache = poisoned(simple_spec(KVCacheDType.FLOAT32), 4)
    most = np.iinfo(np.int64 if x64 else np.int32)
    with jax.enable_x64(x64):
        table = jnp.array([[3, most.max], [most.min, -1], [1, 2], [0, 4]], most.dtype)
        lengths = jnp.array([most.max, 16, most.min, -3], most.dtype)
        expected = read("xla", cache, table, lengths)
        with interpret_mode():
            got = read("mosaic", cache, table, lengths)
    for g, e in zip(got, expected, strict=True):
        assert_same_bytes(g, e)
    read_or_zero = got[0].view(np.uint32)
    assert read_or_zero[0, :8].any()
    assert not read_or_zero[0, 8:].any()
    assert not read_or_zero[1].any()


@matrix({"dtype": KERNEL_DTYPES, "padding": [0, 4, 72]}, few={"dtype": FEW_DTYPES})
def test_padded_pages_of_a_shared_pool_are_read(dtype, padding):
    spec = simple_spec(dtype)
    cache = poisoned(dataclasses.replace(spec, page_size_padded=spec.real_page_size_bytes + padding), 3)
    table, lengths = np.array([[2, 0]], np.int32), np.array([13], np.int32)
    with interpret_mode():
        got = read("mosaic", cache, table, lengths)
    for g, e in zip(got, read("xla", cache, table, lengths), strict=True):
        assert_same_bytes(g, e)


@pytest.mark.parametrize(("num_seqs", "max_blocks"), [(0, 3), (3, 0)])
def test_nothing_to_read_is_no_error(num_seqs, max_blocks):
    cache = poisoned(simple_spec(), 3)
    table, lengths = np.zeros((num_seqs, max_blocks), np.int32), np.zeros(num_seqs, np.int32)
    with interpret_mode():
        got = read("mosaic", cache, table, lengths)
    assert [x.shape for x in got] == [(num_seqs, 8 * max_blocks, 2, 64)] * 2


@matrix({"dtype": KERNEL_DTYPES, "layout": ["NHD", "HND"]}, few={"dtype": FEW_DTYPES})
def test_programs_do_not_race(dtype, layout):
    spec = simple_spec(dtype, layout=layout, head_size=32)
    cache, table, lengths = poisoned(spec, 3), np.array([[2, 0], [0, 0]], np.int32), np.array([13, 8], np.int32)
    with interpret_mode(detect_races=True):
        got = read("mosaic", cache, table, lengths)
    for g, e in zip(got, read("xla", cache, table, lengths), strict=True):
        assert_same_bytes(g, e)
