"""Writes, reads and attends with caches divided among devices: right, in place, without communication.

`sharded_caches.py AXIS_TYPE DATA TENSOR few|full [CHECK ...]`: a program of its own because JAX fixes the number of
simulated devices (`XLA_FLAGS`) when it starts. The mesh has the axes "data" and "tensor", of the sizes given and typed
`Auto` or, as `jax.make_mesh` types them by default, `Explicit`. By default it makes all of `CHECKS`, with `few` without
`ONLY_FULL` and of few formats and divisions; what needs an axis of more than one device says so.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import kvjax
from kvjax import (
    MLA_KV_CACHE_DTYPES,
    STORED_KV_CACHE_DTYPES,
    AttentionSpec,
    KVCache,
    KVCacheDType,
    KVCacheValueError,
    MLAAttentionSpec,
    UnsupportedError,
    concat_and_cache_mla,
    copy_blocks,
    gather_kv,
    gather_mla,
    mla_paged_attention,
    mla_ragged_paged_attention,
    nvfp4_split_views,
    paged_attention,
    ragged_paged_attention,
    reshape_and_cache_flash,
    rope_and_cache,
    swap_blocks,
)
from support import reference
from support.helpers import (
    FP8_DTYPES,
    assert_same_bytes,
    assert_same_floats,
    kv_tokens,
    page_bytes,
    poisoned,
    simple_spec,
)
from support.interpret_mode import interpret_mode

COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter", "collective-broadcast")
NVFP4 = KVCacheDType.NVFP4
NUM_HEADS, NUM_BLOCKS = 8, 8


def make_spec(name: str) -> AttentionSpec:
    dtype, layout, *more = name.split("-")
    return simple_spec(
        KVCacheDType(dtype),
        num_kv_heads=NUM_HEADS,
        head_size=32,
        head_size_v=16 if "diffkv" in more else None,
        layout=layout,
        v_scale_layout="swizzled" if "swizzled" in more else "linear",
        page_size_padded=10_000 if "pool" in more else None,
    )


FEW = ("bfloat16-NHD", "fp8_e4m3-HND", "nvfp4-HND-swizzled")
NAMES = (
    *(f"{dtype.value}-{layout}" for dtype in STORED_KV_CACHE_DTYPES for layout in ("NHD", "HND")),
    *("nvfp4-NHD-swizzled", "nvfp4-HND-swizzled"),
    *("float16-HND-diffkv", "fp8_e4m3-NHD-diffkv", "int8_per_token_head-HND-diffkv", "nvfp4-NHD-swizzled-diffkv"),
)
POOLS = ("bfloat16-NHD-pool", "nvfp4-HND-swizzled-pool")
SPECS = {name: make_spec(name) for name in NAMES + POOLS}

# Which axes divide the blocks, and which the heads; over what is named in neither, the cache is repeated.
DIVISIONS: dict[str, tuple[Any, Any]] = {
    "heads": (None, "tensor"),
    "blocks": ("data", None),
    "both": ("data", "tensor"),
    "heads over both axes": (None, ("data", "tensor")),
    "nothing": (None, None),
}

# Four sequences, of which two have their blocks in either half of the cache; blocks are global.
TABLE = np.array([[1, 3], [2, -7], [6, 4], [7, 2**31 - 1]], np.int32)
LENS = np.array([11, 5, 9, 0], np.int32)
# All their tokens, and some that write nothing.
SLOTS = np.array(
    [
        *(TABLE[seq, i // 8] * 8 + i % 8 for seq in range(4) for i in range(LENS[seq])),
        *[-1, NUM_BLOCKS * 8, -(2**31), 2**31 - 1],
    ],
    np.int32,
)
WINDOW = 2

AXIS_TYPE, DATA, TENSOR, FULL = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "full"
MESH = jax.make_mesh(
    (DATA, TENSOR), ("data", "tensor"), (AxisType[AXIS_TYPE],) * 2, devices=jax.devices()[: DATA * TENSOR]
)
ON_GPU = jax.default_backend() == "gpu"


def with_kernels() -> contextlib.AbstractContextManager[None]:
    """Where the kernels run: on GPUs, or interpreted."""
    return contextlib.nullcontext() if ON_GPU else interpret_mode()


def head_axis(spec: AttentionSpec) -> int:
    return len(spec.cache_shape(1)) - (2 if spec.layout == "NHD" else 3)


def sharding_of(spec: AttentionSpec, division: str) -> NamedSharding:
    blocks, heads = DIVISIONS[division]
    return NamedSharding(MESH, P(blocks, *([None] * (head_axis(spec) - 1) + [heads] if heads else [])))


@dataclasses.dataclass(frozen=True)
class Share:
    """What one device holds: which of the shares of blocks and of heads, of how many."""

    device: Any
    block_share: int
    block_shares: int
    head_share: int
    head_shares: int

    def heads(self, x: Any, axis: int) -> Any:
        """Its part of an array that has an axis of heads."""
        return np.split(np.asarray(x), self.head_shares, axis)[self.head_share] if np.ndim(x) else x

    def own(self, x: np.ndarray) -> np.ndarray:
        """Its part of an array of blocks, or of sequences."""
        return np.split(x, self.block_shares)[self.block_share]

    @property
    def first_block(self) -> int:
        return self.block_share * NUM_BLOCKS // self.block_shares

    @property
    def slots(self) -> np.ndarray:
        """`SLOTS` as a cache of its blocks alone counts them."""
        first, most = (x * NUM_BLOCKS * 8 // self.block_shares for x in (self.block_share, self.block_share + 1))
        return np.where((first <= SLOTS) & (most > SLOTS), SLOTS.astype(np.int64) - first, -1)

    def data_of(self, array: jax.Array) -> np.ndarray:
        """What its device holds of an array."""
        [data] = [shard.data for shard in array.addressable_shards if shard.device == self.device]
        return np.asarray(data)


def shares(division: str, *, all_processes: bool = False) -> list[Share]:
    """Of this process's devices, or of all."""
    sizes = {"data": DATA, "tensor": TENSOR}

    def count(axes: Any, place: Mapping[str, int]) -> tuple[int, int]:
        names = [axes] if isinstance(axes, str) else axes or []
        index, total = 0, 1
        for name in names:
            index, total = index * sizes[name] + place[name], total * sizes[name]
        return index, total

    blocks, heads = DIVISIONS[division]
    return [
        Share(
            MESH.devices[data, tensor],
            *count(blocks, {"data": data, "tensor": tensor}),
            *count(heads, {"data": data, "tensor": tensor}),
        )
        for data, tensor in itertools.product(range(DATA), range(TENSOR))
        if all_processes or MESH.devices[data, tensor].process_index == jax.process_index()
    ]


def poisoned_shares(spec: AttentionSpec, division: str) -> tuple[KVCache, dict[Any, KVCache]]:
    """A divided cache of random bytes, and what each device holds of it as a cache of its own."""
    sharding = sharding_of(spec, division)
    local: dict[tuple[int, int], KVCache] = {}
    by_device = {}
    for share in shares(division, all_processes=True):
        own_spec = dataclasses.replace(spec, num_kv_heads=NUM_HEADS // share.head_shares)
        which = share.block_share, share.head_share
        if which not in local:
            local[which] = poisoned(own_spec, NUM_BLOCKS // share.block_shares, seed=hash(which) % 1000)
        by_device[share.device] = local[which]
    rows = [
        np.concatenate([np.asarray(local[b, h].kv) for h in range(share.head_shares)], head_axis(spec))
        for b in range(share.block_shares)
    ]
    empty = KVCache.allocate(spec, NUM_BLOCKS, sharding=sharding)
    assert empty.kv.sharding.is_equivalent_to(sharding, empty.kv.ndim)
    assert empty.local_spec == own_spec
    # Copied, for NumPy's memory, which JAX may borrow, cannot be given away.
    kv = jax.make_array_from_callback(empty.kv.shape, empty.sharding, lambda index: np.concatenate(rows)[index])
    return dataclasses.replace(empty, kv=jnp.copy(kv)), by_device


def make_inputs(names: Any, division: str, *, divided: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tokens and scales of each spec; given whole, or already divided as the cache's heads are."""
    _, heads = DIVISIONS[division]

    def put(x: Any, axis: int) -> Any:
        return jax.device_put(x, NamedSharding(MESH, P(*[None] * axis, heads))) if divided and np.ndim(x) else x

    tokens, scales = {}, {}
    for i, name in enumerate(names):
        spec = SPECS[name]
        tokens[name] = tuple(put(x, 1) for x in kv_tokens(spec, len(SLOTS), seed=i, specials=False))
        shape = (2, NUM_HEADS) if spec.dtype in FP8_DTYPES else (2,)
        k_scale, v_scale = np.exp2(np.random.default_rng(i).uniform(-7, 2, shape)).astype(np.float32)
        scales[name] = {"k_scale": put(k_scale, 0), "v_scale": put(v_scale, 0)}
    return tokens, scales


def write_all(caches, tokens, scales, slots, implementation):
    return {
        name: reshape_and_cache_flash(*tokens[name], cache, slots, implementation=implementation, **scales[name])
        for name, cache in caches.items()
    }


def gather_all(caches, scales, table, lens, implementation="xla"):
    return {
        name: gather_kv(cache, table, lens, dtype=jnp.float32, implementation=implementation, **scales[name])
        for name, cache in caches.items()
    }


def attend_all(caches, queries, scales, table, lens, sinks, tree_mask=None):
    options = {"sinks": sinks, "sliding_window": WINDOW, "return_lse": True, "tree_mask": tree_mask}
    return {
        name: paged_attention(queries[name], cache, table, lens, **scales[name], **options)
        for name, cache in caches.items()
    }


def attend_ragged(caches, queries, scales, table, lens, sinks, tree_mask=None):
    bounds = np.arange(0, 2 * len(lens) + 1, 2, dtype=np.int32)
    options = {"sinks": sinks, "sliding_window": jnp.int32(WINDOW), "return_lse": True, "max_q_len": 2}
    options["tree_mask"] = tree_mask
    return {
        name: ragged_paged_attention(
            jnp.reshape(queries[name], (-1, *queries[name].shape[2:])),
            *(cache, table, lens, bounds),
            **scales[name],
            **options,
        )
        for name, cache in caches.items()
    }


def compile_without_collectives(f: Callable[..., Any], *args: Any, **options: Any) -> Any:
    compiled = jax.jit(f, **options).lower(*args).compile()
    text = compiled.as_text()
    assert not [name for name in COLLECTIVES if f"{name}(" in text or f"{name}-start(" in text]
    return compiled


def device_pointers(array: jax.Array) -> list[int]:
    return [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]


def check_written(written: Mapping[str, KVCache], before: Any, tokens: Any, scales: Any, division: str) -> None:
    """Every byte on every device is that of a cache of the device's blocks and heads alone."""
    for name, cache in written.items():
        expected: dict[Any, np.ndarray] = {}
        for share in shares(division):
            if (which := (share.block_share, share.head_share)) not in expected:
                own = before[name][share.device]
                key, value = (share.heads(x, 1) for x in tokens[name])
                own_scales = [share.heads(x, 0) for x in scales[name].values()]
                pages = page_bytes(own)
                expected[which] = reference.write(pages, own.spec, key, value, share.slots, *own_scales)
            got = share.data_of(cache.kv)
            assert_same_bytes(got.reshape(len(got), -1).view(np.uint8), expected[which])


def check_read(got: Any, written: Mapping[str, KVCache], scales: Any, division: str) -> None:
    for name, halves in got.items():
        for half, dense in enumerate(halves):
            for share in shares(division):
                own_spec = written[name].local_spec
                pages = share.data_of(written[name].kv)
                pages = pages.reshape(len(pages), -1).view(np.uint8)
                table, lens = share.own(TABLE) - share.first_block, share.own(LENS)
                scale = share.heads([*scales[name].values()][half], 0)
                expected = reference.read(pages, own_spec, half, table, lens, scale, np.dtype(np.float32))
                assert_same_floats(share.data_of(dense), expected)


def check_division(division: str, names: Any, implementation: str, *, divided: bool) -> None:
    """One program writes all caches, one reads them, one attends; of each the compiled form and every result."""
    both = {name: poisoned_shares(SPECS[name], division) for name in names}
    caches, before = ({name: pair[i] for name, pair in both.items()} for i in range(2))
    tokens, scales = make_inputs(names, division, divided=divided)
    pointers = {name: device_pointers(cache.kv) for name, cache in caches.items()}
    write = functools.partial(write_all, implementation=implementation)
    compiled = compile_without_collectives(write, caches, tokens, scales, SLOTS, donate_argnums=0)
    share = shares(division)[0]
    own_bytes = sum(cache.kv.nbytes for cache in caches.values()) // (share.block_shares * share.head_shares)
    assert compiled.memory_analysis().alias_size_in_bytes == own_bytes
    written = compiled(caches, tokens, scales, SLOTS)
    assert {name: device_pointers(cache.kv) for name, cache in written.items()} == pointers
    check_written(written, before, tokens, scales, division)

    read = functools.partial(gather_all, implementation=implementation)
    compiled = compile_without_collectives(read, written, scales, TABLE, LENS)
    check_read(compiled(written, scales, TABLE, LENS), written, scales, division)
    if implementation == "xla" and jax.process_count() == 1:
        attended = FEW if FULL or division == "both" else FEW[-1:]
        check_attention(*({name: tree[name] for name in attended} for tree in (written, scales)), division)


def check_attention(written: Mapping[str, KVCache], scales: Any, division: str) -> None:
    """In numpy from the keys and values that the cache gives back, which `check_read` has checked.

    Two rows a sequence, with sinks, behind a window: blocks before it are somebody else's, on this device or another.
    """
    dense = jax.device_get(jax.jit(gather_all)(written, scales, TABLE, LENS))
    rng = np.random.default_rng(1)
    queries = {
        name: rng.standard_normal((4, 2, NUM_HEADS, 2, cache.spec.head_size)).astype(np.float32)
        for name, cache in written.items()
    }
    sinks = rng.standard_normal((NUM_HEADS, 2)).astype(np.float32)
    table = np.where(LENS[:, None] - 8 * np.arange(1, 3) >= WINDOW + 1, 7 - TABLE, TABLE)
    assert (table != TABLE).any()
    given = {name: query.reshape(4, 2, 2 * NUM_HEADS, -1) for name, query in queries.items()}
    args = written, given, scales, table, LENS, sinks.reshape(-1)
    attended = compile_without_collectives(attend_all, *args)(*args)
    age = (LENS[:, None] - 2 + np.arange(2))[:, :, None] - np.arange(dense[next(iter(written))][0].shape[1])
    for name, (result, lse) in attended.items():
        keys, values = dense[name]
        weights = np.exp(np.einsum("sqhgd,sthd->sqhgt", queries[name], keys) / np.sqrt(keys.shape[-1]))
        weights *= ((age >= 0) & (age < WINDOW))[:, :, None, None]
        total = weights.sum(-1) + np.exp(sinks)
        expected = np.einsum("sqhgt,sthd->sqhgd", weights / total[..., None], values)
        np.testing.assert_allclose(np.asarray(result), expected.reshape(result.shape), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(np.asarray(lse), np.log(total).reshape(lse.shape), rtol=1e-4, atol=1e-5)
        blocks, heads = (entry or None for entry in DIVISIONS[division])
        for array in (result, lse):
            assert array.sharding.is_equivalent_to(NamedSharding(MESH, P(blocks, None, heads)), array.ndim)
    tree = np.ones((4, 2, 2), bool)  # each row sees all before it, as without a tree
    for name, results in compile_without_collectives(attend_all, *args, tree)(*args, tree).items():
        for array, expected in zip(results, attended[name], strict=True):
            np.testing.assert_array_equal(np.asarray(array), np.asarray(expected))
    # The rows of all sequences are on every device: where blocks are divided, the results are added up.
    for given in ((), (tree,)):
        for name, (result, lse) in jax.jit(attend_ragged)(*args, *given).items():
            for array, expected in zip((result, lse), attended[name], strict=True):
                expected = np.asarray(expected).reshape(array.shape)
                np.testing.assert_allclose(np.asarray(array), expected, rtol=1e-4, atol=1e-5)


def check_every_format() -> None:
    divisions = DIVISIONS if FULL else ("heads", "blocks", "both") if AXIS_TYPE == "Auto" else ("both",)
    for division, implementation in itertools.product(divisions, ("mosaic", "xla") if ON_GPU else ("xla",)):
        every = division == "both" or (AXIS_TYPE == "Auto" and not ON_GPU and division in ("heads", "blocks"))
        every = every and FULL
        names = (NAMES if every else FEW) + (POOLS if division in ("blocks", "nothing") else ())
        check_division(division, names, implementation, divided=division == "both")


def check_interpreted_kernels() -> None:
    """Of one format and one type of axes, for eight devices take their time; one write is in `within_shard_map`."""
    if AXIS_TYPE == "Auto" and FULL:
        with interpret_mode():
            check_division("both", ("nvfp4-HND-swizzled",), "mosaic", divided=False)


def small(name: str, division: str) -> tuple[KVCache, Any, dict[str, Any], dict[str, Any]]:
    cache, before = poisoned_shares(SPECS[name], division)
    tokens, scales = make_inputs([name], division, divided=False)
    return cache, before, tokens[name], scales[name]


def check_rotations() -> None:
    """Every device has the rotated queries of its own heads, whichever blocks it has, and no more is exchanged."""
    rng, table = np.random.default_rng(2), reference.cos_sin(16)
    positions = rng.integers(0, reference.POSITIONS, len(SLOTS)).astype(np.int32)
    query = rng.standard_normal((len(SLOTS), 2 * NUM_HEADS, 32)).astype(np.float32)

    def rope(cache: KVCache, scales: Any, implementation: str, *rows: Any) -> Any:
        return rope_and_cache(*rows, cache, SLOTS, positions, table, implementation=implementation, **scales)

    def check(name: str, division: str, implementation: str) -> None:
        cache, before, (key, value), scales = small(name, division)
        pointers = device_pointers(cache.kv)
        args = cache, scales, implementation, query, key, value
        compiled = compile_without_collectives(rope, *args, donate_argnums=0, static_argnums=2)
        rotated, written = compiled(*(arg for arg in args if arg is not implementation))
        assert device_pointers(written.kv) == pointers
        keys = reference.rotate(key, table, positions, True)
        check_written({name: written}, {name: before}, {name: (keys, value)}, {name: scales}, division)
        expected = reference.rotate(query, table, positions, True)
        for share in shares(division):
            assert_same_bytes(share.data_of(rotated), share.heads(expected, 1))

    for name, division in (("nvfp4-HND-swizzled", "both"), ("bfloat16-NHD", "blocks"), ("fp8_e4m3-HND", "heads")):
        check(name, division, "mosaic" if ON_GPU else "xla")
    if not ON_GPU and AXIS_TYPE == "Auto" and FULL:
        with interpret_mode():
            check("nvfp4-HND-swizzled", "both", "mosaic")


def check_within_shard_map() -> None:
    """In a shard_map of the caller's a cache is the device's own, and so are its slots; over what axes it may be."""
    cases: list[tuple[str, set[str], str | None, bool]] = [("nvfp4-NHD", {"data", "tensor"}, None, True)]
    if FULL:
        interpreted_over = {"tensor"} if AXIS_TYPE == "Auto" else {"data", "tensor"}
        cases += [
            ("nvfp4-HND-swizzled", {"data"}, None, False),
            ("fp8_e4m3-NHD", {"tensor"}, None, False),
            ("bfloat16-HND", interpreted_over, "mosaic", False),
        ]
    for name, axes, implementation, check_vma in cases:
        cache, before, tokens, scales = small(name, "both")
        # Slots are those of the blocks at hand: all of the cache's, or where "data" is divided a share's.
        slots = np.stack([share.slots for share in shares("both") if share.head_share == 0])
        slots = slots.astype(np.int32) if "data" in axes else np.broadcast_to(SLOTS, slots.shape)
        over = {axis: axis if axis in axes else None for axis in ("data", "tensor")}
        spec = cache.sharding.spec
        cache_spec = P(*(over.get(entry) for entry in spec))
        head_spec = P(over["tensor"]) if cache.spec.dtype in FP8_DTYPES else P()
        in_specs = (cache_spec, P(None, over["tensor"]), P(over["data"]), head_spec)
        if AXIS_TYPE == "Explicit":
            tokens = [jax.device_put(x, NamedSharding(MESH, P(None, over["tensor"]))) for x in tokens]
            scales = {k: jax.device_put(x, NamedSharding(MESH, head_spec)) for k, x in scales.items()}
        slots = jax.device_put(slots, NamedSharding(MESH, P(over["data"])))

        def write(cache, tokens, slots, scales, implementation=implementation, over=over):
            [slots] = slots if over["data"] else slots[:1]
            return reshape_and_cache_flash(*tokens, cache, slots, implementation=implementation, **scales)

        mapped = jax.shard_map(
            write, mesh=MESH, in_specs=in_specs, out_specs=cache_spec, axis_names=axes, check_vma=check_vma
        )
        run = jax.jit(mapped, donate_argnums=0)
        pointers = device_pointers(cache.kv)
        with with_kernels() if implementation == "mosaic" else contextlib.nullcontext():
            written = jax.block_until_ready(run(cache, tokens, slots, scales))
        assert device_pointers(written.kv) == pointers
        assert (written.spec, written.sharding) == (cache.spec, cache.sharding)
        check_written({name: written}, {name: before}, {name: tokens}, {name: scales}, "both")

    cache, _, tokens, scales = small("nvfp4-NHD", "both")
    whole = jax.shard_map(
        functools.partial(reshape_and_cache_flash, slot_mapping=SLOTS, **scales),
        mesh=MESH,
        in_specs=P(),
        out_specs=P(),
        check_vma=False,
    )
    if AXIS_TYPE == "Auto" and TENSOR > 1:  # of explicit axes shard_map itself says what the cache is
        with pytest.raises(KVCacheValueError, match=r"inside a shard_map .* in_specs have to be its spec"):
            jax.jit(whole)(*tokens, cache)
    ask = functools.partial(reshape_and_cache_flash, implementation="mosaic", **scales)
    own = jax.shard_map(
        lambda cache, key, value: ask(key, value, cache, SLOTS),
        mesh=MESH,
        in_specs=(cache.sharding.spec, P(None, "tensor"), P(None, "tensor")),
        out_specs=cache.sharding.spec,
    )
    tokens = [jax.device_put(x, NamedSharding(MESH, P(None, "tensor"))) for x in tokens]
    with pytest.raises(UnsupportedError, match="check_vma=False"):
        jax.jit(own)(cache, *tokens)


def check_transformations() -> None:
    """Scans over layers, batches, trees of caches, shapes alone, calls without jit: each keeps what a cache is."""
    name = "nvfp4-HND-swizzled"
    cache, before, tokens, scales = small(name, "both")
    key, value = tokens

    def check(written: KVCache) -> None:
        assert (written.spec, written.sharding) == (cache.spec, cache.sharding)
        check_written({name: written}, {name: before}, {name: tokens}, {name: scales}, "both")

    write = functools.partial(reshape_and_cache_flash, **scales)
    check(write(key, value, cache, SLOTS))  # without jit
    with jax.set_mesh(MESH):
        check(jax.jit(write)(key, value, cache, SLOTS))

    @functools.partial(jax.jit, donate_argnums=0)
    def write_by_layer(cache, keys, values, slots):
        def layer(cache, per_layer):
            return write(*per_layer[:2], cache, per_layer[2]), None

        return jax.lax.scan(layer, cache, (keys, values, slots))[0]

    parts = [x.reshape(2, -1, *x.shape[1:]) for x in (key[:-1], value[:-1], SLOTS[:-1])]  # the last one writes nothing
    copied = jax.tree.map(jnp.copy, cache)
    pointers = device_pointers(copied.kv)
    written = write_by_layer(copied, *parts)
    assert device_pointers(written.kv) == pointers
    check(written)

    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), cache, cache)
    twice = [np.stack([x, x]) for x in (key, value, SLOTS)]
    for written in (
        jax.jit(jax.vmap(write))(*twice[:2], stacked, twice[2]),
        jax.jit(lambda xs: jax.lax.scan(lambda _, x: (None, write(*x)), None, xs)[1])((*twice[:2], stacked, twice[2])),
    ):
        assert written.kv.sharding.is_equivalent_to(NamedSharding(MESH, P(None, *cache.sharding.spec)), written.kv.ndim)
        for i in range(2):
            check(jax.tree.map(lambda x, i=i: x[i], written))

    sizes = jax.eval_shape(lambda: KVCache.allocate(cache.spec, NUM_BLOCKS, sharding=cache.sharding))
    assert jax.tree.structure(sizes) == jax.tree.structure(cache)
    assert (sizes.kv.shape, sizes.kv.dtype) == (cache.kv.shape, cache.kv.dtype)
    check(jax.device_put(jax.device_get(write(key, value, cache, SLOTS)), cache.sharding))


def write_layers(cache: KVCache, keys: Any, values: Any, slots: Any, **scales: Any) -> KVCache:
    def write(cache: KVCache, per_layer: Any) -> tuple[KVCache, None]:
        key, value, layer = per_layer
        return reshape_and_cache_flash(key, value, cache, slots, layer=layer, **scales), None

    return jax.lax.scan(write, cache, (keys, values, jnp.arange(cache.num_layers)))[0]


def check_layers() -> None:
    """Of a cache of several layers each device has its blocks and heads of every layer."""
    cases = ("nvfp4-HND-swizzled", "both"), ("bfloat16-NHD", "blocks")
    for name, division in cases if FULL else cases[:1]:
        alone, before, tokens, scales = small(name, division)
        spec = P(*[*alone.sharding.spec][:1], None, *[*alone.sharding.spec][1:])
        with pytest.raises(KVCacheValueError, match="expected one that divides blocks"):
            KVCache.allocate(alone.spec, NUM_BLOCKS, num_layers=2, sharding=NamedSharding(MESH, P(None, "data")))
        cache = KVCache.allocate(alone.spec, NUM_BLOCKS, num_layers=2, sharding=NamedSharding(MESH, spec))
        stack = jax.jit(lambda kv: jnp.stack([kv, kv], 1), out_shardings=cache.sharding)
        cache = dataclasses.replace(cache, kv=stack(alone.kv))
        assert (cache.local_spec, cache.num_blocks, cache.num_layers) == (alone.local_spec, NUM_BLOCKS, 2)
        keys, values = (np.stack([x, x[::-1]]) for x in tokens)
        pointers = device_pointers(cache.kv)
        write = functools.partial(write_layers, **scales)
        written = compile_without_collectives(write, cache, keys, values, SLOTS, donate_argnums=0)(
            cache, keys, values, SLOTS
        )
        assert device_pointers(written.kv) == pointers
        assert (written.spec, written.sharding, written.num_layers) == (cache.spec, cache.sharding, 2)
        pick = jax.jit(lambda kv, layer: kv[:, layer], static_argnums=1, out_shardings=alone.sharding)
        layers = [dataclasses.replace(alone, kv=pick(written.kv, layer)) for layer in range(2)]
        for layer, own in enumerate(layers):
            layer_tokens = keys[layer], values[layer]
            check_written({name: own}, {name: before}, {name: layer_tokens}, {name: scales}, division)
            read = functools.partial(gather_kv, block_table=TABLE, seq_lens=LENS, **scales)
            for got, expected in zip(read(written, layer=layer), read(own), strict=True):
                assert_same_floats(np.asarray(got), np.asarray(expected))
        pairs = np.array([[1, 6], [6, 2], [-1, 3], [7, 0]], np.int32)
        host = functools.partial(KVCache.allocate, alone.spec, NUM_BLOCKS, sharding=jax.devices()[0])
        copied, swapped = copy_blocks(written, pairs), swap_blocks(written, host(num_layers=2), pairs)
        only = swap_blocks(written, host(num_layers=2), pairs, layer=1)
        assert copied.kv.sharding.is_equivalent_to(cache.kv.sharding, cache.kv.ndim)
        for layer, own in enumerate(layers):
            assert_same_bytes(np.asarray(copied.kv)[:, layer], np.asarray(copy_blocks(own, pairs).kv))
            expected = np.asarray(swap_blocks(own, host(), pairs).kv)
            assert_same_bytes(np.asarray(swapped.kv)[:, layer], expected)
            assert_same_bytes(np.asarray(only.kv)[:, layer], expected if layer == 1 else np.zeros_like(expected))


def compile_with_sums(f: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Compiles what sums over the shares of blocks, as attention in ragged steps does."""
    return jax.jit(f, **options).lower(*args).compile()


def attend_with_window(cache, window, query, key, value, step, layer, max_q_len):
    out, cache, window = kvjax.attend(
        query, key, value, cache, step, exact_window=window, layer=layer, max_q_len=max_q_len, logits_soft_cap=4.0
    )
    return out, cache, window


def check_exact_windows() -> None:
    """A window's heads are divided as the cache's are, in chunks over a copy of it too; it is filled and copied so."""
    spec, rng = make_spec("nvfp4-HND-swizzled"), np.random.default_rng(0)
    new = [rng.standard_normal((24, heads, 32)).astype(np.float32) for heads in (2 * NUM_HEADS, NUM_HEADS, NUM_HEADS)]
    table, rows = np.int32([[1, 3, 0], [6, 4, 7]]), np.int32([1, 0])
    lens, bounds = np.int32([14, 6]), np.int32([0, 14, 20])
    slots = np.int32([*range(8, 16), *range(24, 30), *range(48, 54)])
    chunks = kvjax.StepMetadata(table, lens, bounds, slots, rows)
    decodes = kvjax.StepMetadata(table, lens + 1, np.int32([0, 1, 2]), np.int32([30, 54]), rows)
    steps = [(20, chunks), (1, decodes)]
    alone: list[np.ndarray] = []

    def compare(found: list[jax.Array]) -> None:
        got = [np.asarray(x, np.float32) for x in found]
        alone.extend(got[len(alone) :])
        for one, expected in zip(got, alone, strict=False):
            np.testing.assert_allclose(one, expected, atol=1e-5, rtol=0)

    for division in ("alone", "heads", "heads over both axes", "both") if FULL else ("alone", "heads"):
        sharding, heads = None, DIVISIONS.get(division, (None, None))[1]
        if division != "alone":
            whole = sharding_of(spec, division).spec
            sharding = NamedSharding(MESH, P(*whole[:1], None, *whole[1:]))
        cache = KVCache.allocate(spec, NUM_BLOCKS, num_layers=2, sharding=sharding, k_scale=0.01, v_scale=0.02)
        window = kvjax.ExactWindow.allocate(spec, 3, 5, num_layers=2, sharding=sharding)
        pointers = device_pointers(window.ring.kv), device_pointers(cache.kv)
        compiled = compile_with_sums if division == "both" else compile_without_collectives
        found = []
        for max_q_len, step in steps if FULL else steps[:1]:
            own = [x[: len(step.slot_mapping)] for x in new]
            if sharding is not None:
                own = [jax.device_put(x, NamedSharding(MESH, P(None, heads))) for x in own]
            run = functools.partial(attend_with_window, layer=jnp.int32(1), max_q_len=max_q_len)
            out, cache, window = compiled(run, cache, window, *own, step, donate_argnums=(0, 1))(
                cache, window, *own, step
            )
            found.append(out)
        assert (device_pointers(window.ring.kv), device_pointers(cache.kv)) == pointers
        fill = functools.partial(kvjax.fill_exact_window, layer=jnp.int32(1))
        filled_rows = np.int32([2, -1])
        if (division, AXIS_TYPE) == ("both", "Explicit"):
            with pytest.raises(KVCacheValueError, match=r"docs/scaling\.md, Explicit axes"):
                fill(window, cache, step, filled_rows)
            compare(found)
            continue
        filled = compiled(fill, window, cache, step, filled_rows)(window, cache, step, filled_rows)
        copied = kvjax.copy_window_rows(window, np.int32([[1, 2]]))
        found += [each.ring.kv for each in (window, filled, copied)]
        compare(found)
    pages = NamedSharding(MESH, P("data"))
    assert kvjax.ExactWindow.allocate(spec, 3, 5, sharding=pages).ring.local_spec.num_kv_heads == NUM_HEADS
    bad = NamedSharding(MESH, P(None, "data"))
    with pytest.raises(KVCacheValueError, match="expected one that divides blocks"):
        kvjax.ExactWindow.allocate(spec, 3, 5, sharding=bad)


def check_carried_scales(name: str, division: str) -> KVCache:
    """A write and a read by a cache that carries its scales; returns it."""
    given, before, tokens, scales = small(name, division)
    cache = KVCache.allocate(given.spec, NUM_BLOCKS, sharding=given.sharding, **scales)
    cache = dataclasses.replace(cache, kv=given.kv)
    _, heads = DIVISIONS[division]
    of_heads = P(heads) if given.spec.dtype in FP8_DTYPES and heads else P()
    assert [scale.sharding.spec for scale in (cache.k_scale, cache.v_scale)] == [of_heads] * 2
    write = compile_without_collectives(reshape_and_cache_flash, *tokens, cache, SLOTS)
    written = write(*tokens, cache, SLOTS)
    assert jax.tree.structure(written) == jax.tree.structure(cache)
    check_written({name: written}, {name: before}, {name: tokens}, {name: scales}, division)
    read = compile_without_collectives(functools.partial(gather_kv, dtype=jnp.float32), written, TABLE, LENS)
    check_read({name: read(written, TABLE, LENS)}, {name: written}, {name: scales}, division)
    return cache


def check_scales_of_the_cache() -> None:
    """Scales that a cache carries lie with its heads, and mean what scales mean that are given to each call."""
    cases = ("fp8_e4m3-HND", "both"), ("nvfp4-NHD", "heads"), ("fp8_e4m3-NHD", "nothing")
    for name, division in cases if FULL else cases[:2]:
        cache = check_carried_scales(name, division)
        given, before, tokens, scales = small(name, division)
        cache = dataclasses.replace(cache, kv=given.kv)
        written = reshape_and_cache_flash(*tokens, cache, SLOTS)  # without jit
        check_written({name: written}, {name: before}, {name: tokens}, {name: scales}, division)
        check_read(
            {name: gather_kv(written, TABLE, LENS, dtype=jnp.float32)}, {name: written}, {name: scales}, division
        )

        slots = np.stack([share.slots for share in shares(division) if share.head_share == 0]).astype(np.int32)
        blocks, heads = DIVISIONS[division]
        tokens_spec = P(None, heads)
        on_mesh = [jax.device_put(x, NamedSharding(MESH, tokens_spec)) for x in tokens]
        slots = jax.device_put(slots if blocks else slots[:1], NamedSharding(MESH, P(blocks)))
        own = jax.shard_map(
            lambda key, value, cache, slots: reshape_and_cache_flash(key, value, cache, slots[0]),
            mesh=MESH,
            in_specs=(tokens_spec, tokens_spec, cache.partition_specs, P(blocks)),
            out_specs=cache.partition_specs,
        )
        mapped = jax.jit(own)(*on_mesh, cache, slots)
        check_written({name: mapped}, {name: before}, {name: tokens}, {name: scales}, division)
        assert_same_bytes(np.asarray(mapped.k_scale), np.asarray(cache.k_scale))

        layers = np.stack([np.asarray(scale) for scale in (scales["k_scale"], scales["v_scale"])])
        entries = [*cache.sharding.spec]
        sharding = NamedSharding(MESH, P(*entries[:1], None, *entries[1:]))
        stacked = KVCache.allocate(given.spec, NUM_BLOCKS, num_layers=2, sharding=sharding, k_scale=layers, v_scale=2.0)
        step = compile_without_collectives(write_layers, stacked, *(np.stack([x, x]) for x in tokens), SLOTS)
        stacked = step(stacked, *(np.stack([x, x]) for x in tokens), SLOTS)
        for layer in range(2):
            by_layer, expected = (
                gather_kv(stacked, TABLE, LENS, layer=layer, **by)
                for by in ({}, {"k_scale": layers[layer], "v_scale": np.float32(2)})
            )
            for got, wanted in zip(by_layer, expected, strict=True):
                assert_same_floats(np.asarray(got), np.asarray(wanted))

        pairs = np.array([[1, 2]])
        host = functools.partial(KVCache.allocate, cache.spec, NUM_BLOCKS, sharding=jax.devices()[0])
        swapped = swap_blocks(host(**scales), cache, pairs)
        assert swapped.k_scale is cache.k_scale
        with pytest.raises(KVCacheValueError, match=r"destination\.k_scale: got 1\.0, expected "):
            swap_blocks(swapped, host(v_scale=scales["v_scale"]), pairs)


def check_programs_are_reused() -> None:
    """Neither a second write nor one of what the first returned traces or compiles again."""
    for name in FEW:
        cache, _, tokens, scales = small(name, "both")
        traced = []

        def write(cache, tokens, scales, traced=traced):
            traced.append(cache.kv.shape)
            return reshape_and_cache_flash(*tokens, cache, SLOTS, **scales)

        write = jax.jit(write, donate_argnums=0)
        tokens = [jax.device_put(x, NamedSharding(MESH, P())) for x in tokens]
        for _ in range(3):
            cache = write(cache, tokens, scales)
        assert len(traced) == 1
        before = write._cache_size()
        cache = write(cache, tokens, scales)
        assert write._cache_size() == before


def check_split_views() -> None:
    for name, division in itertools.product(
        ("nvfp4-NHD", "nvfp4-HND-swizzled", "nvfp4-NHD-swizzled-diffkv"), ("heads", "both")
    ):
        cache, before, _, _ = small(name, division)
        views = jax.tree.leaves(compile_without_collectives(nvfp4_split_views, cache)(cache))
        for share in shares(division):
            for got, expected in zip(views, jax.tree.leaves(nvfp4_split_views(before[share.device])), strict=True):
                assert_same_bytes(share.data_of(got), np.asarray(expected))


def check_sequences_elsewhere_are_empty() -> None:
    cache, _, _, scales = small("nvfp4-NHD", "both")
    table, lens = np.array([[1, 4], [0, 2], [7, 3], [6, 0]], np.int32), np.array([9, 12, 9, 8], np.int32)
    keys, _ = gather_kv(cache, table, lens, **scales)
    # Of the first the second block is in the other half, of the third too; of the last it is not used.
    assert [bool(jnp.any(seq != 0)) for seq in np.asarray(keys, np.float32)] == [False, True, False, True]
    with pytest.raises(KVCacheValueError, match=r"gather_kv: got num_seqs=3 .* a multiple of 2"):
        gather_kv(cache, table[:3], lens[:3], **scales)


def check_blocks_out_of_range_are_not_read() -> None:
    """They are zeros, and the other blocks of their sequences are read, whichever share these are in."""
    cache, _, _, scales = small("nvfp4-NHD", "both")
    table, lens = (
        np.array([[-1, 2], [0, NUM_BLOCKS], [2**31 - 1, 5], [4, -(2**31)]], np.int32),
        np.full(4, 16, np.int32),
    )
    is_block = (table >= 0) & (table < NUM_BLOCKS)
    whole = np.where(is_block, table, [[0], [1], [6], [7]]).astype(np.int32)
    for got, expected in zip(
        jax.jit(gather_kv)(cache, table, lens, **scales), gather_kv(cache, whole, lens, **scales), strict=True
    ):
        got, expected = (np.asarray(x).view(np.uint16).reshape(4, 2, -1) for x in (got, expected))
        assert expected.any(axis=-1).all()
        np.testing.assert_array_equal(got, np.where(is_block[..., None], expected, 0))


def check_checked_values() -> None:
    cache, _, (key, value), scales = small("fp8_e4m3-HND", "both")
    slots, message = np.append(SLOTS[:-1], NUM_BLOCKS * 8), r"got 64, expected less than num_slots=64"
    write = functools.partial(reshape_and_cache_flash, **scales)
    with kvjax.checked():
        with pytest.raises(KVCacheValueError, match=message):
            write(key, value, cache, slots)
        error, _ = jax.jit(checkify.checkify(write))(key, value, cache, slots)
    with pytest.raises(checkify.JaxRuntimeError, match=message):
        jax.device_get(error).throw()


def check_copies() -> None:
    """Whole pages: within a cache, without communication where blocks are not divided, and to the host and back."""
    pairs = np.array([[1, 6], [6, 2], [-1, 3], [7, 0]], np.int32)
    for name, division in (("nvfp4-NHD", "heads"), ("nvfp4-NHD", "both"), ("bfloat16-HND", "blocks")):
        cache, _, _, _ = small(name, division)
        expected = page_bytes(cache)
        expected[[6, 2, 0]] = expected[[1, 6, 7]]
        if division == "heads":
            compile_without_collectives(copy_blocks, cache, pairs)
        copied = jax.jit(copy_blocks)(cache, pairs)
        assert (copied.spec, copied.sharding) == (cache.spec, cache.sharding)
        assert copied.kv.sharding.is_equivalent_to(cache.kv.sharding, cache.kv.ndim)
        assert_same_bytes(page_bytes(copied), expected)

        host = KVCache.allocate(cache.spec, NUM_BLOCKS, sharding=jax.devices()[0])
        host = swap_blocks(copied, host, np.array([[6, 0], [0, 5]]))
        empty = KVCache.allocate(cache.spec, NUM_BLOCKS, sharding=cache.sharding)
        back = swap_blocks(host, empty, np.array([[0, 6], [5, 0]]))
        assert (back.spec, back.sharding) == (cache.spec, cache.sharding)
        assert_same_bytes(page_bytes(back)[[0, 6]], expected[[0, 6]])


def check_copies_between_divisions() -> None:
    """From a cache to one that is divided in any other way, each device has the bytes of its own heads and blocks."""
    names = "nvfp4-NHD-swizzled-diffkv", "nvfp4-HND-swizzled", "int8_per_token_head-NHD", "bfloat16-NHD", "fp8_e4m3-HND"
    other_mesh = jax.make_mesh((2, 4), ("few", "rest"), (AxisType[AXIS_TYPE],) * 2, devices=jax.devices()[::-1])
    for name in names if FULL else names[1:4]:
        spec = SPECS[name]
        placements = {division: sharding_of(spec, division) for division in DIVISIONS} | {
            "one device": jax.sharding.SingleDeviceSharding(jax.devices()[3]),
            "another mesh": NamedSharding(other_mesh, P("rest", *[None] * (head_axis(spec) - 1), "few")),
        }
        if name not in names[:2]:
            placements = {key: placements[key] for key in ("one device", "both", "another mesh")}
        # Every number of shares of the heads comes after every other.
        walk = ["one device", *placements, "heads", "one device", "another mesh", "blocks", "heads over both axes"]
        walk = [key for key in walk if key in placements]
        cache = poisoned(spec, NUM_BLOCKS)
        whole = page_bytes(cache)
        for place in walk:
            empty = KVCache.allocate(spec, NUM_BLOCKS, sharding=placements[place])
            before = page_bytes(empty)
            cache = swap_blocks(cache, empty, np.array([*[[b, b] for b in range(1, NUM_BLOCKS)], [0, -1]]))
            whole[0] = before[0]
            check_pages(cache, whole)


def check_pages(cache: KVCache, whole: np.ndarray) -> None:
    """Every device has of pages, given as those of an undivided cache, the bytes of its own heads."""
    spec, local = cache.spec, cache.local_spec
    axis = head_axis(spec)
    for shard in cache.kv.addressable_shards:
        first = shard.index[axis].start or 0
        expected = np.zeros((len(whole), local.page_size_bytes), np.uint8)
        for half, token, head in itertools.product((0, 1), range(spec.block_size), range(local.num_kv_heads)):
            mine = reference.byte_offsets(local, half, token, head)
            for to, at in zip(mine, reference.byte_offsets(spec, half, token, first + head), strict=True):
                expected[:, to] = whole[:, at]
        got = np.asarray(shard.data)
        assert_same_bytes(got.reshape(len(got), -1).view(np.uint8), expected[shard.index[0]])


def check_swaps_that_are_refused() -> None:
    cache, _, _, _ = small("nvfp4-NHD", "heads")
    pairs = np.array([[1, 2]])
    whole = KVCache.allocate(cache.spec, NUM_BLOCKS, sharding=NamedSharding(MESH, P()))
    message = f"got 'nvfp4' pages whose heads are divided into 1 shares in a traced call, expected {TENSOR} as"
    with pytest.raises(KVCacheValueError, match=message):
        jax.jit(swap_blocks)(cache, whole, pairs)
    by_hand = KVCache(cache.kv, cache.spec)
    host = KVCache.allocate(cache.spec, NUM_BLOCKS, sharding=jax.devices()[0])
    with pytest.raises(KVCacheValueError, match="source: got an array of 'nvfp4' divided as"):
        swap_blocks(by_hand, host, pairs)
    with pytest.raises(KVCacheValueError, match="destination: got an array of 'nvfp4' divided as"):
        swap_blocks(host, by_hand, pairs)
    with pytest.raises(KVCacheValueError, match="does not say whether its pages"):
        copy_blocks(by_hand, pairs)
    with pytest.raises(KVCacheValueError, match="does not say whether its pages"):
        by_hand.check()


def check_swaps_outside_the_mesh() -> None:
    """Blocks can be swapped, exported and imported under a mesh that does not include the caches' devices."""
    cache, _, _, _ = small("nvfp4-NHD", "heads")
    states = jax.device_put(np.arange(12, dtype=np.float32).reshape(3, 4), MESH.devices[0, 0])
    host = KVCache.allocate(cache.spec, NUM_BLOCKS, sharding=jax.devices()[0])
    exported = kvjax.export_blocks([cache, states], [3, 1], state=1)
    other = jax.make_mesh((1,), ("other",), (AxisType[AXIS_TYPE],), devices=jax.devices()[-1:])
    with jax.set_mesh(other):
        assert kvjax.export_blocks([cache, states], [3, 1], state=1) == exported
        host = swap_blocks(cache, host, np.array([[3, 4], [1, 0]]))
        assert kvjax.export_blocks([host, states], [4, 0], state=1) == exported
        cache = swap_blocks(host, cache, np.array([[4, 5]]))
        cache, states = kvjax.import_blocks(exported, [cache, states], [6, -1], state=0)
        assert kvjax.export_blocks([cache, states], [6, 1], state=0) == exported
        assert kvjax.export_blocks([cache, states], [5, 1], state=1) == exported


def check_caches_made_by_hand() -> None:
    """The array of a cache that names no sharding shows one, where it is not traced or the axes are explicit."""
    for name, division in itertools.product(("bfloat16-NHD", "fp8_e4m3-HND"), ("heads", "both")):
        cache, before, tokens, scales = small(name, division)
        by_hand = KVCache(cache.kv, cache.spec)
        write = functools.partial(reshape_and_cache_flash, **scales)
        runs = [write, *([jax.jit(write)] if AXIS_TYPE == "Explicit" else [])]
        for written in (run(*tokens, by_hand, SLOTS) for run in runs):
            assert written.sharding is None
            check_written({name: written}, {name: before}, {name: tokens}, {name: scales}, division)
    cache, _, tokens, scales = small("nvfp4-NHD", "heads")
    with pytest.raises(KVCacheValueError, match="does not say whether its pages"):
        reshape_and_cache_flash(*tokens, KVCache(cache.kv, cache.spec), SLOTS, **scales)
    one_device = jax.device_put(cache, MESH.devices[0, 0])
    with pytest.raises(KVCacheValueError, match=r"expected NamedSharding.* as cache.sharding says"):
        gather_kv(one_device, TABLE, LENS, **scales)
    spec = SPECS["bfloat16-NHD"]
    by_token = jnp.zeros(spec.cache_shape(8), spec.array_dtype, device=NamedSharding(MESH, P(None, None, "tensor")))
    with pytest.raises(KVCacheValueError, match=r"expected one that divides blocks .*, KV heads \(dimension 3\)"):
        gather_kv(KVCache(by_token, spec), TABLE, LENS)


def check_latents() -> None:
    """Blocks of latents are divided, never heads; devices that have all query heads read whole latents."""
    rng = np.random.default_rng(0)
    for dtype in MLA_KV_CACHE_DTYPES if FULL else (KVCacheDType.BFLOAT16, KVCacheDType.FP8_DS_MLA):
        spec = MLAAttentionSpec(8, 128, 16, dtype=dtype)
        kv_c, k_pe = (rng.standard_normal((len(SLOTS), size)).astype(np.float32) for size in spec.part_sizes)
        queries = tuple(rng.standard_normal((4, 2, 8, size)).astype(np.float32) for size in spec.part_sizes)
        rows = np.array([0, 2, 3, 3, 3], np.int32)
        packed = tuple(x[:, -1] for x in queries)
        whole, divided = (
            KVCache.allocate(spec, NUM_BLOCKS, num_layers=2, k_scale=np.float32([0.01, 0.02]), sharding=sharding)
            for sharding in (None, NamedSharding(MESH, P("data")))
        )
        write = functools.partial(concat_and_cache_mla, layer=1)
        attend = functools.partial(mla_paged_attention, sm_scale=0.1, layer=1, return_lse=True)
        run = compile_without_collectives(write, kv_c, k_pe, divided, SLOTS, donate_argnums=2)
        pointers = device_pointers(divided.kv)
        written = run(kv_c, k_pe, divided, SLOTS), write(kv_c, k_pe, whole, SLOTS)
        assert device_pointers(written[0].kv) == pointers
        assert_same_bytes(np.asarray(written[0].kv), np.asarray(written[1].kv))
        run = compile_without_collectives(attend, *queries, written[0], TABLE, LENS)
        results = run(*queries, written[0], TABLE, LENS), attend(*queries, written[1], TABLE, LENS)
        ragged = functools.partial(mla_ragged_paged_attention, sm_scale=0.1, layer=1)
        results += tuple((jax.jit(ragged)(*packed, cache, TABLE, LENS, rows),) for cache in written)
        for got, expected in zip(results[0] + results[2], results[1] + results[3], strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
        gather = functools.partial(gather_mla, num_tokens=20, layer=1)
        cu_seq_lens = np.array([0, 9, 13, 14, 14], np.int32)
        for starts in ([2, 0, 8, 0], [-3, 2**31 - 2, 8, 0]):  # negative, and past every block table
            gathered = [jax.jit(gather)(cache, TABLE, cu_seq_lens, seq_starts=np.int32(starts)) for cache in written]
            for got, expected in zip(*gathered, strict=True):
                assert_same_bytes(np.asarray(got), np.asarray(expected))
        # The second block of the first sequence is in the other half.
        elsewhere = gather(written[0], np.int32([[1, 4], [2, 0], [6, 3], [7, 0]]), cu_seq_lens)[0]
        assert np.flatnonzero(np.asarray(elsewhere, np.float32).any(axis=1)).tolist() == [*range(9, 14)]
        if TENSOR > 1:
            with pytest.raises(KVCacheValueError, match=r"latents .* expected one that divides blocks .* alone"):
                KVCache.allocate(spec, NUM_BLOCKS, sharding=NamedSharding(MESH, P(None, None, "tensor")))


def check_documentation() -> None:
    """What docs/scaling.md shows, and its example, run as they stand."""
    root = Path(__file__).parents[2]
    shown: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", (root / "docs/scaling.md").read_text(), re.DOTALL):
        exec(code, shown)
    exec((root / "examples/several_devices.py").read_text(), shown)
    assert shown["cache"].local_spec.num_kv_heads == 2
    keys, _ = gather_kv(jax.device_put(shown["engines"], shown["by_block"]), np.array([[0], [32]]), np.array([10, 10]))
    expected, _ = gather_kv(shown["cache"], np.array([[0, 1]]), np.array([20]))
    assert_same_bytes(np.asarray(keys[:, :10]).reshape(20, 8, 128), np.asarray(expected)[0, :20])
    assert (shown["attended"].shape, shown["attended"].sharding.spec[1]) == ((1, 32, 128), ("tensor", "data"))


def check_explicit_types() -> None:
    """Of explicit axes results show how they are divided, and what would have to be communicated is refused."""
    if AXIS_TYPE != "Explicit":
        return
    cache, _, tokens, _ = small("bfloat16-NHD", "both")

    def read(cache):
        keys, _ = gather_kv(cache, TABLE, LENS)
        assert jax.typeof(keys).sharding.spec == P("data", None, "tensor", None)
        return keys

    jax.jit(read)(cache)
    by_token = [jax.device_put(np.resize(x, (32, *x.shape[1:])), NamedSharding(MESH, P("data"))) for x in tokens]
    with pytest.raises(
        KVCacheValueError, match=r"got float32.*expected .*, or a whole array; jax.reshard\(array, P\(Non"
    ):
        jax.jit(reshape_and_cache_flash)(*by_token, cache, np.resize(SLOTS, 32))

    with jax.set_mesh(MESH):
        window = kvjax.ExactWindow.allocate(cache.spec, 4, 5, sharding=cache.sharding)
        step = kvjax.StepMetadata(TABLE, LENS, np.arange(5), np.full(4, -1), np.arange(4))
        for name in ("seq_lens", "window_rows"):
            divided = jax.device_put(getattr(step, name), NamedSharding(MESH, P("data")))
            with pytest.raises(KVCacheValueError, match=rf"metadata.{name}: got int32\[4@data\].* whole array"):
                kvjax.attend(
                    *(jnp.zeros((4, NUM_HEADS, cache.spec.head_size)),) * 3,
                    cache,
                    dataclasses.replace(step, **{name: divided}),
                    exact_window=window,
                )
        whole = KVCache.allocate(cache.spec, NUM_BLOCKS)
        for implementation in (None, "xla"):
            write = jax.jit(functools.partial(reshape_and_cache_flash, implementation=implementation))
            with pytest.raises(
                KVCacheValueError, match=r"got float32\[32@data.*not divided; expected a whole array, as"
            ):
                write(*by_token, whole, np.resize(SLOTS, 32))
        table, lens = (jax.device_put(x, NamedSharding(MESH, P("data"))) for x in (TABLE, LENS))
        with pytest.raises(
            KVCacheValueError, match=r"gather_kv: got int32\[4@data,2\].*docs/scaling.md, Explicit axes"
        ):
            jax.jit(gather_kv)(whole, table, lens)
        jax.jit(reshape_and_cache_flash)(*(jax.reshard(x, P()) for x in by_token), whole, np.resize(SLOTS, 32))


CHECKS = {
    check.__name__.removeprefix("check_"): check
    for check in (
        check_every_format,
        check_interpreted_kernels,
        check_rotations,
        check_within_shard_map,
        check_transformations,
        check_layers,
        check_exact_windows,
        check_scales_of_the_cache,
        check_programs_are_reused,
        check_split_views,
        check_sequences_elsewhere_are_empty,
        check_blocks_out_of_range_are_not_read,
        check_checked_values,
        check_copies,
        check_copies_between_divisions,
        check_swaps_that_are_refused,
        check_swaps_outside_the_mesh,
        check_caches_made_by_hand,
        check_latents,
        check_documentation,
        check_explicit_types,
    )
}

ONLY_FULL = "scales_of_the_cache", "split_views", "copies_between_divisions", "documentation"
"""Checks that take long to compile, left out with `few`."""

if __name__ == "__main__":
    by_default = [name for name in CHECKS if FULL or name not in ONLY_FULL]
    for name in sys.argv[5:] or by_default:
        CHECKS[name]()
