"""Tests of the kernels wherever they run: cases to choose from, and checks that compare a case with XLA.

A check runs the kernel where jax runs by default, so that one in interpret mode and one on a GPU are the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kvjax import AttentionSpec, KVCache, KVCacheDType, gather_kv
from kvjax.kernels import arithmetic, compat
from kvjax.kernels.registers import THREADS, lane_layout
from support.helpers import (
    FP8_NAMES,
    INPUT_DTYPES,
    KERNEL_DTYPES,
    SPECIALS,
    assert_same_bytes,
    assert_same_floats,
    page_bytes,
    pairwise,
    poisoned,
    run_write,
    simple_spec,
)

Case = dict[str, Any]

FORMAT_AXES = {
    "dtype": [dtype.value for dtype in KERNEL_DTYPES],
    "dense_dtype": list(INPUT_DTYPES),  # of what is written or gathered
    "layout": ["NHD", "HND"],
    "v_scale_layout": ["linear", "swizzled"],
    "scales": ["scalar", "per_head"],
}
SHAPE_AXES = {
    "head_size": [64, 80, 96, 112, 128, 192, 256, 512],
    "head_size_v": ["same", "other"],
    "num_kv_heads": [1, 2, 3, 4, 5, 8, 10, 16],
    "block_size": [1, 8, 16, 32, 64, 128, 784],
}
# Of tokens, 1,001 and 9,001 are more than one for each program, and leave the last program with fewer.
WRITE_AXES = {"num_tokens": [0, 1, 2, 7, 127, 1001, 9001], "slots": ["permuted", "with_holes", "repeated", "int64"]}
GATHER_AXES = {"sequences": ["one", "ragged", "none"], "indices": ["int32", "int64"]}

OTHER_HEAD_SIZE = {64: 80, 80: 64, 96: 192, 112: 16, 128: 96, 192: 128, 256: 32, 512: 64}
MAX_BLOCKS = 3
MAX_ELEMENTS = 2**24
"""Keys of one case: a bound on the time that it takes."""


def formats() -> list[Case]:
    """Every choice along all `FORMAT_AXES` that a layer can have."""
    choices = (dict(zip(FORMAT_AXES, values, strict=True)) for values in itertools.product(*FORMAT_AXES.values()))
    return [choice for choice in choices if _is_format(choice)]


def is_valid(case: Case) -> bool:
    return _is_format(case) and (case["v_scale_layout"] == "linear" or case["block_size"] % 4 == 0)


def _is_format(case: Case) -> bool:
    takes_swizzled, takes_per_head = "nvfp4" in case["dtype"], case["dtype"] in FP8_NAMES
    return (takes_swizzled or case["v_scale_layout"] == "linear") and (takes_per_head or case["scales"] == "scalar")


def covering(axes: Mapping[str, Sequence[Any]]) -> list[Case]:
    """Cases in which every format, a choice along all `FORMAT_AXES`, meets every value of `axes`.

    Every two values of two of these meet as well.
    """
    numbered = formats()

    def unfolded(case: Case) -> Case:
        return numbered[case["format"]] | {name: case[name] for name in axes}

    def is_wanted(case: Case) -> bool:
        case = unfolded(case)
        return is_valid(case) and _num_tokens(case) * case["num_kv_heads"] * case["head_size"] <= MAX_ELEMENTS

    return [unfolded(case) for case in pairwise({"format": range(len(numbered)), **axes}, is_wanted)]


def make_spec(case: Case) -> AttentionSpec:
    return simple_spec(
        KVCacheDType(case["dtype"]),
        block_size=case["block_size"],
        num_kv_heads=case["num_kv_heads"],
        head_size=case["head_size"],
        head_size_v=None if case["head_size_v"] == "same" else OTHER_HEAD_SIZE[case["head_size"]],
        layout=case["layout"],
        v_scale_layout=case["v_scale_layout"],
    )


def make_scales(case: Case) -> dict[str, np.ndarray]:
    shape = (case["num_kv_heads"],) if case["scales"] == "per_head" else ()
    k_scale, v_scale = np.exp2(np.random.default_rng(3).uniform(-7, 2, (2, *shape))).astype(np.float32)
    return {"k_scale": k_scale, "v_scale": v_scale}


def make_slots(kind: str, num_tokens: int, num_slots: int) -> np.ndarray:
    """Slots in no order, the first and the last of the cache among them; every third is by kind one as the others, none
    or one that another token has too.
    """
    rng = np.random.default_rng(2)
    inner = 1 + rng.permutation(num_slots - 2)
    slots = rng.permutation(np.concatenate([[num_slots - 1, 0], inner])[:num_tokens])
    if kind == "with_holes":
        least, most = np.iinfo(np.int32).min, np.iinfo(np.int32).max
        slots[1::3] = np.resize([-1, num_slots, least, most, -num_slots, num_slots + 1], slots[1::3].shape)
    elif kind == "repeated":
        slots[1::3] = rng.choice(slots, slots[1::3].shape)
    elif kind == "int64":  # of most of these the low half is a slot
        least, most = np.iinfo(np.int64).min, np.iinfo(np.int64).max
        slots[1::3] = np.resize([2**32, 2**32 + 1, 1 - 2**32, 2**40, least, most, -1, num_slots], slots[1::3].shape)
    return slots.astype(np.int64 if kind == "int64" else np.int32)


def make_kv(spec: AttentionSpec, num_tokens: int, dtype: Any) -> list[np.ndarray]:
    """Keys and values: normal numbers whose magnitudes differ by token, and 1 of 64 a special value."""
    rng = np.random.default_rng(4)
    both = []
    for size in (spec.head_size, spec.head_size_v):
        x = rng.standard_normal((num_tokens, spec.num_kv_heads, size), np.float32)
        x *= np.exp2(rng.integers(-8, 9, (num_tokens, 1, 1)).astype(np.float32))
        count = x.size // 64
        x.reshape(-1)[rng.integers(0, max(1, x.size), count)] = rng.choice(np.float32(SPECIALS), count)
        with np.errstate(over="ignore", under="ignore"):
            both.append(x.astype(dtype))
    return both


def check_write(case: Case) -> None:
    """Writes a case and compares every byte of the cache with XLA on the CPU; what is not written was random."""
    spec, num_tokens, dtype = make_spec(case), case["num_tokens"], INPUT_DTYPES[case["dense_dtype"]]
    num_blocks = max(3, 1 + 5 * num_tokens // (4 * spec.block_size))
    slots = make_slots(case["slots"], num_tokens, num_blocks * spec.block_size)
    key, value = make_kv(spec, num_tokens, dtype)
    with jax.enable_x64(case["slots"] == "int64"):
        compare_writes(spec, num_blocks, key, value, slots, **make_scales(case))


def check_encoding(dtype: KVCacheDType, x: np.ndarray, scale: float, implementation: str = "mosaic") -> None:
    """Stores numbers of any shape, and compares with XLA on the CPU."""
    spec = simple_spec(dtype, num_kv_heads=1, head_size=128)
    x = np.resize(x, (-(-x.size // spec.head_size), 1, spec.head_size))
    num_blocks = -(-len(x) // spec.block_size)
    slots = np.arange(len(x), dtype=np.int32)
    scales = {name: np.float32(scale) for name in ("k_scale", "v_scale")}
    compare_writes(spec, num_blocks, x, x[::-1], slots, implementation, **scales)


def compare_writes(
    spec: AttentionSpec,
    num_blocks: int,
    key: np.ndarray,
    value: np.ndarray,
    slots: np.ndarray,
    implementation: str = "mosaic",
    **scales: Any,
) -> None:
    with jax.default_device(jax.devices("cpu")[0]):
        expected = page_bytes(run_write("xla", key, value, poisoned(spec, num_blocks), slots, **scales))
    written = page_bytes(run_write(implementation, key, value, poisoned(spec, num_blocks), slots, **scales))
    assert_same_bytes(written, expected)


def check_gather(case: Case) -> None:
    """Gathers a case from a cache of random bytes, and compares with XLA."""
    spec = make_spec(case)
    table, lengths = make_tables(case)
    with jax.enable_x64(case["indices"] == "int64"):
        compare_gathers(poisoned(spec, 5), table, lengths, case["dense_dtype"], **make_scales(case))


def make_tables(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Block tables `[num_seqs, MAX_BLOCKS]` in a cache of five blocks, garbage past each length, and lengths."""
    block_size, dtype = case["block_size"], np.dtype(case["indices"])
    lengths = np.array(_lengths(case), dtype)
    table = np.random.default_rng(5).integers(0, 5, (len(lengths), MAX_BLOCKS)).astype(dtype)
    unused = np.arange(MAX_BLOCKS) * block_size >= lengths[:, None]
    garbage = np.array([-7, np.iinfo(dtype).max, np.iinfo(dtype).min], dtype)
    table[unused] = np.resize(garbage, unused.sum())
    return table, lengths


def compare_gathers(cache: KVCache, table: np.ndarray, lengths: np.ndarray, dtype: str, **scales: np.ndarray) -> None:
    """Bit for bit with XLA on the same GPU; with XLA on the CPU any NaN is as good as another.

    On a CPU without bfloat16 instructions the NaN of one case had other bits, though XLA's program has it as integers
    from when it is chosen on: what LLVM makes of that is not ours to say.
    """
    on_gpu = jax.default_backend() != "cpu"
    got = read("mosaic", cache, table, lengths, dtype, **scales)
    for mine, expected in zip(got, read("xla", cache, table, lengths, dtype, **scales), strict=True):
        (assert_same_bytes if on_gpu else assert_same_floats)(mine, expected)
    if on_gpu:
        with jax.default_device(jax.devices("cpu")[0]):
            on_cpu = KVCache(jnp.asarray(np.asarray(cache.kv)), cache.spec)
            for mine, expected in zip(got, read("xla", on_cpu, table, lengths, dtype, **scales), strict=True):
                assert_same_floats(mine, expected)


_gather = jax.jit(gather_kv, static_argnames=("dtype", "implementation"))


def read(implementation: str, cache: KVCache, table: Any, lengths: Any, dtype: str, **scales: Any) -> list[np.ndarray]:
    """Gathers with scales that XLA does not know: it would leave out a product with 1, which changes a NaN."""
    gathered = _gather(cache, table, lengths, dtype=INPUT_DTYPES[dtype], implementation=implementation, **scales)
    return [np.asarray(x) for x in jax.block_until_ready(gathered)]


def check_ends(spec: AttentionSpec, num_blocks: int) -> None:
    """Writes and reads tokens of the first, the middle and the last blocks; no other block changes."""
    blocks = np.array([num_blocks - 1, 0, num_blocks // 2, num_blocks - 2, 1], np.int32)
    rng = np.random.default_rng(6)
    small = rng.permutation(len(blocks) * spec.block_size)[:-7].astype(np.int32)  # slots of these blocks alone
    slots = blocks[small // spec.block_size] * spec.block_size + small % spec.block_size
    key, value = make_kv(spec, len(slots), np.dtype(np.float32))
    scales = {"k_scale": np.float32(0.037), "v_scale": np.float32(0.052)}
    poison = np.full(spec.array_dtype.itemsize, 0xAB, np.uint8).view(spec.array_dtype)[0]

    with jax.default_device(jax.devices("cpu")[0]):
        before = KVCache(jnp.full(spec.cache_shape(len(blocks)), poison), spec)
        expected = page_bytes(run_write("xla", key, value, before, small, **scales))
    cache = KVCache(jnp.full(spec.cache_shape(num_blocks), poison), spec)
    cache = run_write("mosaic", key, value, cache, slots, **scales)

    written = KVCache(cache.kv[blocks], spec)
    assert_same_bytes(page_bytes(written), expected)
    is_poison = jax.jit(lambda kv: jnp.all(kv == poison, axis=range(1, kv.ndim)))
    np.testing.assert_array_equal(np.flatnonzero(~np.asarray(is_poison(cache.kv))), np.sort(blocks))

    lengths = np.array([len(blocks) * spec.block_size - 3], np.int32)
    got = read("mosaic", cache, blocks[None], lengths, "float32", **scales)
    in_order = np.arange(len(blocks), dtype=np.int32)[None]
    for mine, theirs in zip(got, read("xla", written, in_order, lengths, "float32", **scales), strict=True):
        assert_same_bytes(mine, theirs)


def _lengths(case: Case) -> tuple[int, ...]:
    full = MAX_BLOCKS * case["block_size"]
    ragged = full, max(0, full - case["block_size"] - 1), 1, 0, case["block_size"]
    return {"one": (full - case["block_size"] // 2,), "ragged": ragged, "none": ()}[case["sequences"]]


def _num_tokens(case: Case) -> int:
    return case["num_tokens"] if "num_tokens" in case else len(_lengths(case)) * MAX_BLOCKS * case["block_size"]


def reciprocals(x: jax.Array) -> jax.Array:
    """The kernels' `rounded_reciprocal` of float32, 4,096 a program."""
    return elementwise(arithmetic.rounded_reciprocal, x, 4096)


def elementwise(function: Callable[[jax.Array], jax.Array], x: jax.Array, size: int = THREADS) -> jax.Array:
    """A kernel alone with `function`; a program takes `size` elements."""

    def body(x_ref: Any, out_ref: Any) -> None:
        run = pl.ds(jax.lax.axis_index("program") * size, size)
        compat.store(out_ref.at[run], function(compat.load(x_ref.at[run], lane_layout((size,), 4))))

    kernel: Callable[[jax.Array], jax.Array] = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(x.size // size,),
        grid_names=("program",),
        compiler_params=compat.COMPILER_PARAMS,
    )
    return kernel(x)
