"""Writes and gathers of latents (MLA) by kernels: their bytes are XLA's; interpreted, compiled, and on a GPU."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import gpu_compile
from support.gpu_compile import TARGETS, compile_for
from support.hard_numbers import blocks_at_powers_of_two
from support.helpers import INPUT_DTYPES, assert_same_bytes, matrix, page_bytes, raise_scales, tokens
from support.interpret_mode import interpret_mode
from support.mla_cases import spec_of

from kvjax import MLA_KV_CACHE_DTYPES, KVCache, MLAAttentionSpec, UnsupportedError, concat_and_cache_mla, gather_mla
from kvjax.kernels.write import launch_config
from kvjax.ops import mla_gather

NAMES = [dtype.value for dtype in MLA_KV_CACHE_DTYPES]
FEW_NAMES = ["fp8_e4m3", "fp8_ds_mla", "nvfp4"]
NUM_BLOCKS = 5
SLOTS = np.array([3, -1, 30, 8, 3, 99, 9, 10, 11, 39, 0], np.int32)
"""One of them twice, and two that are none."""
TABLE = np.array([[1, 0, 5], [3, -1, 9], [-1, 2, 0]], np.int32)
BOUNDS, STARTS, NUM_ROWS = np.array([0, 8, 16, 27], np.int32), np.array([8, 3, 0], np.int32), 29
"""A block, a range over two of which one is none, a block that is none, part of one, and rows of no token."""


def poisoned(spec: MLAAttentionSpec, num_layers: int | None = None, num_blocks: int = NUM_BLOCKS) -> KVCache:
    """Bytes that are all numbers, for a gather of any token to be compared."""
    rng = np.random.default_rng(0)
    shape = spec.cache_shape(num_blocks, num_layers)
    size = int(np.prod(shape)) * spec.array_dtype.itemsize
    raw = rng.integers(0, 0x78, size, dtype=np.uint8)
    raise_scales(raw.reshape(-1, spec.page_size_bytes), spec)
    return KVCache(jnp.asarray(raw.view(spec.array_dtype).reshape(shape)), spec, num_layers=num_layers)


def rows_of(spec: MLAAttentionSpec, count: int, dtype: Any) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    return [tokens(rng, (count, 1, size), dtype)[:, 0] for size in spec.part_sizes]


def assert_same_write(spec: MLAAttentionSpec, rows: Any, slots: Any, num_layers: int | None = None, **options: Any):
    cache = poisoned(spec, num_layers)
    given = {"layer": 1 if num_layers else None, "scale": 0.0371, **options}
    expected = page_bytes(concat_and_cache_mla(*rows, cache, slots, **given, implementation="xla"))
    with interpret_mode(detect_races=len(rows[0]) < 20):
        got = page_bytes(concat_and_cache_mla(*rows, cache, slots, **given, implementation="mosaic"))
    assert_same_bytes(got, expected)
    assert not np.array_equal(expected, page_bytes(cache))


def assert_same_gather(spec: MLAAttentionSpec, dtype: Any, num_layers: int | None = None) -> None:
    cache = poisoned(spec, num_layers)
    given = {"layer": 1 if num_layers else None, "scale": 0.0371, "num_tokens": NUM_ROWS, "dtype": dtype}
    read = cache, TABLE, BOUNDS
    expected = gather_mla(*read, seq_starts=STARTS, **given, implementation="xla")
    with interpret_mode(detect_races=True):
        got = gather_mla(*read, seq_starts=STARTS, **given, implementation="mosaic")
        got = [np.asarray(x) for x in got]
    for part, want in zip(got, map(np.asarray, expected), strict=True):
        assert_same_bytes(part, want)
        assert (part[:13].any() and part[24:27].any()) or not part.size
        assert not part[13:24].any()
        assert not part[27:].any()


@matrix(
    {"name": NAMES, "sizes": [(128, 16), (256, 0), (384, 48)], "input_dtype": [*INPUT_DTYPES], "programs": [264, 2]},
    few={
        "name": ["fp8_e4m3", "fp8_ds_mla", "nvfp4"],
        "sizes": [(128, 16)],
        "input_dtype": ["bfloat16"],
        "programs": [2],
    },
    pairs=True,
)
def test_an_interpreted_write_has_the_bytes_of_xla(name, sizes, input_dtype, programs, monkeypatch: pytest.MonkeyPatch):
    """By programs of one token, and of several, without races."""
    monkeypatch.setattr(launch_config, "PROGRAMS", programs)
    spec = spec_of(name, sizes)
    assert_same_write(spec, rows_of(spec, len(SLOTS), INPUT_DTYPES[input_dtype]), SLOTS)


@matrix(
    {"name": NAMES, "sizes": [(128, 16), (256, 0), (384, 48)], "input_dtype": [*INPUT_DTYPES]},
    few={"name": FEW_NAMES, "sizes": [(128, 16)], "input_dtype": ["bfloat16"]},
    pairs=True,
)
def test_an_interpreted_gather_has_the_bits_of_xla(name: str, sizes: tuple[int, int], input_dtype: str):
    assert_same_gather(spec_of(name, sizes), INPUT_DTYPES[input_dtype])


def test_an_interpreted_gather_of_a_share_returns_zeros_for_sequences_of_other_shares():
    """There, starts and ends are separate arrays, and a sequence of another share starts where it ends."""
    cache = poisoned(spec_of("nvfp4", (128, 16)))
    starts, ends = (jnp.asarray(x) for x in ([0, 16, 16], BOUNDS[1:]))
    arrays = jnp.asarray(TABLE), jnp.asarray(STARTS), starts, ends, None, jnp.float32(0.0371)
    options = {"num_tokens": NUM_ROWS, "dtype": np.dtype(np.float32)}
    with interpret_mode():
        got = [np.asarray(x) for x in mla_gather._gather_mosaic(cache, *arrays, **options)]
    for part, want in zip(got, mla_gather._gather_xla(cache, *arrays, **options), strict=True):
        assert_same_bytes(part, np.asarray(want))
        assert [part[0, row].any() for row in (0, 8, 15, 24)] == [True, False, False, True]


@pytest.mark.parametrize("num_tokens", [1, 3, 9])
def test_neighbouring_rows_of_different_blocks_are_gathered(num_tokens: int):
    """Each sequence goes on in a block of its own where the last ended, in the middle of a program; or in no block."""
    cache = poisoned(spec_of("nvfp4", (128, 16)))
    table, bounds, starts = np.array([[1], [3], [-1], [0]]), np.array([0, 2, 5, 6, 8]), np.array([0, 2, 5, 6])
    read = functools.partial(
        gather_mla, cache, table, bounds, num_tokens=num_tokens, seq_starts=starts, dtype="bfloat16"
    )
    with interpret_mode(detect_races=num_tokens > 4):  # the last row's stores repeat
        got = [np.asarray(x) for x in read(implementation="mosaic")]
    for part, want in zip(got, read(implementation="xla"), strict=True):
        assert_same_bytes(part, np.asarray(want))
        assert part[0].any()
        assert not part[5:6].any()


@pytest.mark.parametrize(
    "name", ["fp8_ds_mla", *(pytest.param(x, marks=pytest.mark.full) for x in ("bfloat16", "nvfp4"))]
)
def test_a_gather_runs_in_a_scan_over_layers_and_under_vmap(name: str):
    """Layers that are traced, two of which do not exist, and ranges that are mapped."""
    cache = poisoned(spec_of(name, (128, 16)), num_layers=3)
    read = functools.partial(gather_mla, cache, TABLE, BOUNDS, num_tokens=NUM_ROWS, scale=0.0371, dtype="bfloat16")
    mapped = np.stack([STARTS, np.zeros_like(STARTS)])

    def scan(**given: Any) -> Any:
        return jax.lax.scan(lambda carry, layer: (carry, read(layer=layer, **given)), 0, jnp.arange(-1, 4))[1]

    def vmap(**given: Any) -> Any:
        return jax.vmap(lambda starts: read(layer=1, seq_starts=starts, **given))(mapped)

    for run in (scan, vmap):
        with interpret_mode():
            got = [np.asarray(x) for x in jax.jit(functools.partial(run, implementation="mosaic"))()]
        for part, want in zip(got, run(implementation="xla"), strict=True):
            assert_same_bytes(part, np.asarray(want))
            assert part[1].any()


def test_blocks_smaller_than_a_program_are_gathered():
    cache = poisoned(spec_of("nvfp4", (128, 16), 2))
    read = functools.partial(gather_mla, cache, np.array([[1, 0, 3]]), np.array([0, 6]), num_tokens=7, dtype="float16")
    with interpret_mode():
        got = [np.asarray(x) for x in read(implementation="mosaic")]
    for part, want in zip(got, read(implementation="xla"), strict=True):
        assert_same_bytes(part, np.asarray(want))
        assert part[:6].any()


@matrix(
    {"name": NAMES, "padding": [0, 64], "num_layers": [None, 3]},
    few={"name": ["fp8_ds_mla"], "padding": [64], "num_layers": [3]},
)
def test_padded_pages_of_several_layers_are_written_and_gathered(name: str, padding: int, num_layers: int | None):
    spec = spec_of(name, (128, 16))
    spec = spec_of(name, (128, 16), page_size_padded=spec.page_size_bytes + padding)
    assert_same_write(spec, rows_of(spec, 3, np.float32), SLOTS[:3], num_layers)
    assert_same_gather(spec, np.float32, num_layers)


@pytest.mark.parametrize("padding", [0, 64])
def test_no_scale_of_poisoned_pages_decodes_to_subnormal_numbers(padding: int):
    """XLA on CPU flushes them to zero, GPUs do not."""
    spec = spec_of("fp8_ds_mla", (128, 16))
    spec = spec_of("fp8_ds_mla", (128, 16), page_size_padded=spec.page_size_bytes + padding)
    pages = page_bytes(poisoned(spec, num_blocks=100))[:, : spec.real_page_size_bytes]
    scales = np.ascontiguousarray(pages.reshape(-1, spec.bytes_per_token)[:, 128:132]).view(np.float32)
    smallest_code, smallest, largest = 2.0**-9, 2.0**-126, 2.0**126
    assert (scales * smallest_code >= smallest).all()
    assert (scales * 448 <= largest).all()


@pytest.mark.parametrize("dtype", [np.float32, pytest.param(jnp.bfloat16, marks=pytest.mark.full)])
def test_special_numbers_are_stored_as_xla_stores_them(dtype: Any):
    """NaN, infinities, zeros and subnormal numbers."""
    spec = spec_of("fp8_ds_mla", (256, 16))
    latents = np.random.default_rng(0).standard_normal((16, 256)).astype(np.float32)
    latents *= 2.0 ** np.arange(-32, 32, 4, dtype=np.float32)[:, None]
    latents[0, :8] = [0.0, -0.0, 448.0, -448.0, 1e-40, -1e-40, 1e-45, np.nan]
    latents[1], latents[2, 5], latents[3, 200], latents[4, :128] = 0, np.inf, -np.inf, 1e-40
    latents[5], latents[6], latents[7, 0] = np.nan, latents[6] * 1e-38, -np.nan
    rope_keys = latents[:, :16]
    assert_same_write(spec, [x.astype(dtype) for x in (latents, rope_keys)], np.arange(3, 19, dtype=np.int32))


@pytest.mark.parametrize("input_dtype", INPUT_DTYPES)
def test_an_interpreted_write_has_the_bytes_of_xla_at_powers_of_two(input_dtype: str):
    """Largest magnitudes below, at and above 448 * 2^k."""
    spec, dtype = spec_of("fp8_ds_mla", (256, 16)), np.dtype(INPUT_DTYPES[input_dtype])
    blocks = blocks_at_powers_of_two(dtype, (-15, -14, -13, -12, 0, 6, 7, 64, 119))
    kv_c = blocks[: len(blocks) // 2 * 2].reshape(-1, 256)
    slots = np.arange(len(kv_c), dtype=np.int32)[::-1] + 3
    assert_same_write(spec, (kv_c, np.zeros((len(kv_c), 16), dtype)), slots)


def test_rows_at_odd_addresses_are_gathered_by_xla():
    """The write, which copies bytes, serves them."""
    spec = spec_of("nvfp4", (48, 2))  # whose rows are 31 bytes
    assert_same_write(spec, rows_of(spec, 3, np.float32), SLOTS[:3])
    read, given = (poisoned(spec), TABLE, BOUNDS), {"num_tokens": NUM_ROWS}
    with pytest.raises(
        UnsupportedError, match=r"gather_mla: .*: got rows of bfloat16 at addresses that 2 does not divide"
    ):
        gather_mla(*read, **given, implementation="mosaic")
    kv_c, _ = gather_mla(*read, **given)
    assert kv_c.shape == (NUM_ROWS, 48)


def write(kv_c, k_pe, cache, slot_mapping, scale):
    # Of more tokens XLA finds the repeated slots, in kernels of its own.
    is_many = kv_c.shape[0] >= launch_config.SEARCHED
    return concat_and_cache_mla(
        kv_c, k_pe, cache, slot_mapping, scale=scale, unique_slots=is_many, implementation="mosaic"
    )


def gather(cache, block_table, cu_seq_lens, scale, seq_starts=None, *, dtype):
    options = {"num_tokens": 4096, "scale": scale, "dtype": dtype, "implementation": "mosaic"}
    return gather_mla(cache, block_table, cu_seq_lens, seq_starts=seq_starts, **options)


needs_plugin = pytest.mark.skipif(gpu_compile.why_not() is not None, reason=str(gpu_compile.why_not()))
AXES = {"name": NAMES, "sizes": [(512, 64), (256, 0)], "input_dtype": [*INPUT_DTYPES], "target": list(TARGETS)}
FEW = {
    "name": ["bfloat16", "fp8_ds_mla", "nvfp4"],
    "sizes": [(512, 64)],
    "input_dtype": ["bfloat16"],
    "target": ["h100"],
}


def abstract(spec: MLAAttentionSpec) -> KVCache:
    return KVCache(jax.ShapeDtypeStruct(spec.cache_shape(32), spec.array_dtype), spec)


@needs_plugin
@matrix(AXES | {"num_tokens": [1, 70_000]}, few=FEW | {"num_tokens": [70_000]}, pairs=True)
def test_a_write_is_one_kernel_in_place_without_spills(name, sizes, input_dtype, target, num_tokens):
    spec = spec_of(name, sizes, 64)
    rows = [jax.ShapeDtypeStruct((num_tokens, size), INPUT_DTYPES[input_dtype]) for size in sizes]
    slots, scale = jax.ShapeDtypeStruct((num_tokens,), jnp.int32), jax.ShapeDtypeStruct((), jnp.float32)
    program = compile_for(target, write, *rows, abstract(spec), slots, scale, donate_argnums=2)
    assert program.device_ops == ("custom-call",)
    assert [kernel.spill_bytes for kernel in program.kernels] == [0]
    assert (program.alias_size, program.temp_size) == (32 * spec.page_size_bytes, 0)


@needs_plugin
@matrix(AXES | {"has_starts": [False, True]}, few=FEW | {"has_starts": [True]}, pairs=True)
def test_a_gather_is_two_kernels_that_copy_no_cache(name, sizes, input_dtype, target, has_starts):
    spec = spec_of(name, sizes, 64)
    table, bounds, starts = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((4, 64), (5,), (4,)))
    read = functools.partial(gather, dtype=INPUT_DTYPES[input_dtype])
    arrays = table, bounds, jax.ShapeDtypeStruct((), jnp.float32), *([starts] if has_starts else [])
    program = compile_for(target, read, abstract(spec), *arrays)
    assert program.device_ops[:2] == ("custom-call", "custom-call")
    assert [kernel.name for kernel in program.kernels] == [
        f"{name}_mosaic_gpu_kernel" for name in ("find_rows", "gather_mla")
    ]
    assert [kernel.spill_bytes for kernel in program.kernels] == [0, 0]
    assert program.temp_size < 64 << 10  # the places of tokens, not the pages


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 70, 9_001])
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_on_a_gpu_bytes_are_those_of_xla(name: str, dtype: Any, count: int):
    """With repeated slots, of any number of tokens; XLA's on the CPU."""
    spec, num_blocks = spec_of(name, block_size=64), 200
    rows, cache = rows_of(spec, count, dtype), poisoned(spec, num_blocks=num_blocks)
    slots = np.random.default_rng(2).integers(-1, num_blocks * 64 + 9, count).astype(np.int32)
    table = np.random.default_rng(3).permutation(num_blocks).astype(np.int32).reshape(2, -1)
    bounds, starts = np.array([0, count // 2, count], np.int32), np.array([60, 70], np.int32)
    results = []
    for device, how in ((jax.devices("cpu")[0], "xla"), (jax.devices()[0], "mosaic")):
        with jax.default_device(device):
            own = jax.device_put(cache, device)
            own = concat_and_cache_mla(*rows, own, slots, scale=0.0371, implementation=how)
            given = {"num_tokens": count, "seq_starts": starts, "scale": 0.0371, "dtype": dtype}
            results.append((page_bytes(own), *gather_mla(own, table, bounds, **given, implementation=how)))
    for got, expected in zip(*results, strict=True):
        assert_same_bytes(np.asarray(got), np.asarray(expected))
