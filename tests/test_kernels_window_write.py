"""The update of an exact window's ring, by itself and in the kernel that writes pages: bytes, races, machine code."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import gpu_compile
from support.gpu_compile import TARGETS, compile_for
from support.helpers import (
    FEW_DTYPES,
    KERNEL_DTYPES,
    assert_same_bytes,
    each_case,
    kv_tokens,
    matrix,
    page_bytes,
    pairwise,
)
from support.interpret_mode import interpret_mode

import kvjax
from kvjax import AttentionSpec, ExactWindow, KVCache, KVCacheDType, KVCacheValueError
from kvjax.layouts import CacheLayout
from kvjax.ops.window_write import RingUpdate, update_ring, write_with_ring
from kvjax.ops.write import WriteTokens

NUM_LAYERS = 3
NUM_BLOCKS = 6
NO_ROWS = -1, 5, 2**31 - 1, -(2**31)
"""What are no rows of a ring of 5."""


@dataclasses.dataclass(frozen=True)
class Step:
    """A step's sequences: new tokens and earlier ones of each, and what follows in a padded batch.

    Attributes:
      longest: the limit that is given; None for that of the step.
    """

    q_lens: tuple[int, ...]
    before: tuple[int, ...]
    rows: tuple[int, ...]
    padding: int = 0
    longest: int | None = None

    @property
    def num_tokens(self) -> int:
        return sum(self.q_lens) + self.padding

    def sequences(self) -> list[np.ndarray]:
        lens = np.add(self.q_lens, self.before)
        return [np.int32(lens), np.int32([0, *np.cumsum(self.q_lens)]), np.int32(self.rows)]


STEPS = {
    "decodes": Step((1, 1, 1, 1), (0, 15, 16, 100), (4, 0, 3, 1)),
    "decodes, of some none": Step((1, 0, 1, 0, 0), (7, 15, 47, 3, 0), (4, 0, 2, -1, -1), padding=2, longest=1),
    "drafts": Step((3, 1, 2), (14, 0, 31), (2, 0, 4), longest=3),
    "longer than rows": Step((19, 1, 40), (5, 30, 0), (1, 4, 0), padding=3),
    "as long as rows, to a limit": Step((16, 2), (3, 8), (1, 4), longest=30),
    "without rows": Step((2, 1, 3, 1, 2), (4, 5, 6, 7, 30), (*NO_ROWS, 2), padding=1),
    "more new tokens than tokens": Step((3, 2), (-2, 9), (0, 3)),
    "one token": Step((1,), (33,), (3,)),
}


@dataclasses.dataclass(frozen=True)
class Memory:
    """A cache and a window over random bytes, of which a step's tokens are to go to `layer`."""

    cache: KVCache
    window: ExactWindow
    layer: int | None

    @classmethod
    def of(cls, spec: AttentionSpec, num_layers: int | None = None, layer: int | None = None, size: int = 16) -> Memory:
        cache = KVCache.allocate(spec, NUM_BLOCKS, num_layers=num_layers)
        window = ExactWindow.allocate(spec, 5, size, num_layers=num_layers)
        ring = random_bytes(window.ring, 1)
        return cls(random_bytes(cache, 0), dataclasses.replace(window, ring=ring), layer)

    def update(self, step: Step) -> RingUpdate:
        longest = step.longest or step.num_tokens
        return RingUpdate(self.window.ring, self.window.blocks_per_row, longest, *map(jnp.asarray, step.sequences()))

    def expected_ring(self, step: Step, key: np.ndarray, value: np.ndarray) -> np.ndarray:
        """The bytes of the ring after a step, token after token."""
        window, spec = self.window, self.window.ring.spec
        kv = np.array(window.ring.kv)
        if self.layer == NUM_LAYERS:  # none
            return kv
        of_layer = kv if self.layer is None else kv[:, self.layer]
        size = spec.head_size
        halves = (of_layer[..., :size], of_layer[..., size:]) if spec.is_diffkv else (of_layer[:, 0], of_layer[:, 1])
        if spec.layout is CacheLayout.HND:
            halves = tuple(half.swapaxes(1, 2) for half in halves)
        lens, bounds, rows = step.sequences()
        for length, (start, end), row in zip(lens, itertools.pairwise(bounds), rows, strict=True):
            for token in range(start, end):
                position = length - (end - token)
                if 0 <= row < window.num_rows and position >= 0:
                    slot = row * window.tokens_per_row + position % window.tokens_per_row
                    for half, x in zip(halves, (key, value), strict=True):
                        half[slot // 16, slot % 16] = x[token].astype(kv.dtype)
        return kv


def random_bytes(cache: KVCache, seed: int) -> KVCache:
    raw = np.random.default_rng(seed).integers(0, 256, cache.kv.nbytes, np.uint8)
    return dataclasses.replace(cache, kv=jnp.asarray(raw.view(cache.kv.dtype).reshape(cache.kv.shape)))


def spec_of(dtype: Any = "nvfp4", model_dtype: str = "bfloat16", **changes: Any) -> AttentionSpec:
    shape = {"block_size": 8, "num_kv_heads": 2, "head_size": 64} | changes
    return kvjax.FullAttentionSpec(dtype=KVCacheDType(dtype), model_dtype=KVCacheDType(model_dtype), **shape)


def slots_of(num_tokens: int) -> np.ndarray:
    """Slots of the pages, some of which are none and some given twice."""
    slots = np.random.default_rng(2).permutation(8 * NUM_BLOCKS)[np.arange(num_tokens) % (8 * NUM_BLOCKS)]
    slots[::5], slots[3::7] = -1, 11
    return slots.astype(np.int32)


def check_step(memory: Memory, step: Step, dense: Any = np.float32, implementation: str = "mosaic") -> None:
    """Writes a step to the ring alone, and to pages and ring, and compares all bytes of both."""
    key, value = kv_tokens(memory.cache.spec, step.num_tokens, dense, specials=False)
    update, slots = memory.update(step), slots_of(step.num_tokens)
    layer = None if memory.layer is None else jnp.int32(memory.layer)
    expected = memory.expected_ring(step, key, value)
    alone = update_ring(update, key, value, layer, implementation)
    assert_same_bytes(np.asarray(alone.kv), expected)
    given = WriteTokens(key, value, slots, layer, None, None)
    cache, ring = write_with_ring(memory.cache, given, update, unique_slots=False, implementation=implementation)
    assert_same_bytes(np.asarray(ring.kv), expected)
    cpu = jax.devices("cpu")[0]
    with jax.default_device(cpu):
        before = KVCache(jax.device_put(memory.cache.kv, cpu), memory.cache.spec, num_layers=memory.cache.num_layers)
        pages = kvjax.reshape_and_cache_flash(
            key, value, before, slots, layer=jax.device_put(layer, cpu), implementation="xla"
        )
    assert_same_bytes(page_bytes(cache), page_bytes(pages))


EACH_STEP = pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)


@EACH_STEP
def test_xla_keeps_the_last_tokens_of_each_sequence(step: Step):
    check_step(Memory.of(spec_of()), step, implementation="xla")


@EACH_STEP
def test_interpreted_programs_keep_the_last_tokens_of_each_sequence_and_do_not_race(step: Step):
    with interpret_mode(detect_races=step.num_tokens < 20):
        check_step(Memory.of(spec_of(num_kv_heads=1)), step)


@given(data=st.data())
def test_a_ring_holds_a_steps_last_tokens_however_it_is_cut(data: st.DataObject):
    bounds = sorted(data.draw(st.lists(st.integers(0, 90), min_size=4, max_size=4)))
    q_lens = np.diff([0, *bounds]).tolist()
    before = data.draw(st.lists(st.integers(0, 70), min_size=4, max_size=4))
    rows = data.draw(st.permutations([*range(5), -1, -1]))[:4]
    memory = Memory.of(spec_of("bfloat16", num_kv_heads=1, head_size=8), size=data.draw(st.sampled_from([9, 30])))
    step = Step(tuple(q_lens), tuple(before), tuple(rows), padding=91 - sum(q_lens))
    check_step(memory, step, implementation="xla")


AXES = {
    "dtype": [dtype.value for dtype in KERNEL_DTYPES],
    "model_dtype": ["bfloat16", "float16", "float32"],
    "dense": [np.float32, np.float16, ml_dtypes.bfloat16],
    "layout": ["NHD", "HND"],
    "head_size_v": [None, 32],
    "layer": [None, 0, 2, NUM_LAYERS],
    "step": ["decodes, of some none", "drafts", "longer than rows"],
}
CASES = {"dtype": ["nvfp4", "fp8_e4m3", "fp8_k_nvfp4_v"], "step": ["decodes, of some none", "drafts"]}


def check_case(case: dict[str, Any]) -> None:
    shape = {"num_kv_heads": 2, "head_size": 64, "head_size_v": case["head_size_v"], "layout": case["layout"]}
    spec = spec_of(case["dtype"], case["model_dtype"], **shape)
    memory = Memory.of(spec, None if case["layer"] is None else NUM_LAYERS, case["layer"])
    check_step(memory, STEPS[case["step"]], case["dense"])


PAIRS = pairwise(AXES, lambda case: True)


@each_case(PAIRS, CASES)
def test_interpreted_it_serves_every_dtype_and_layout(case):
    with interpret_mode():
        check_case(case)


@pytest.mark.gpu
@each_case(PAIRS, pairs=True, whole=True)
def test_on_a_gpu_it_serves_every_dtype_and_layout(case):
    check_case(case)


@pytest.mark.gpu
@matrix({"dtype": FEW_DTYPES, "heads": [(1, 64), (8, 128), (5, 80)], "size": [16, 64]})
def test_on_a_gpu_steps_of_many_sequences_are_written(dtype, heads, size):
    """Of one token each, with holes, and of prompts between them; more rows than sequences are never needed."""
    num_kv_heads, head_size = heads
    memory = Memory.of(spec_of(dtype, num_kv_heads=num_kv_heads, head_size=head_size), size=size)
    for step in STEPS.values():
        check_step(memory, step, ml_dtypes.bfloat16)
    check_step(memory, Step((1500, 1, 3000, 0, 70), (0, 8000, 31, 0, 4000), (3, 1, 0, -1, 4)), ml_dtypes.bfloat16)


def test_a_ring_that_is_divided_by_blocks_is_refused():
    memory = Memory.of(spec_of())
    mesh = jax.sharding.AbstractMesh((1,), ("data",))
    ring = dataclasses.replace(memory.window.ring)
    ring = KVCache(ring.kv, ring.spec, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data")))
    update = memory.update(STEPS["decodes"])._replace(ring=ring)
    key, value = kv_tokens(memory.cache.spec, 4)
    with pytest.raises(KVCacheValueError, match=r"exact_window\.ring: got blocks divided among devices"):
        update_ring(update, key, value, None, None)


def write(key: Any, value: Any, cache: Any, ring: Any, slots: Any, *sequences: Any, longest: int, alone: bool) -> Any:
    update = RingUpdate(ring, 4, longest, *sequences)
    if alone:
        return update_ring(update, key, value, None, "mosaic")
    tokens = WriteTokens(key, value, slots, None, None, None)
    return write_with_ring(cache, tokens, update, unique_slots=True, implementation="mosaic")


@pytest.mark.skipif(gpu_compile.why_not() is not None, reason=str(gpu_compile.why_not()))
@matrix(
    {
        "dtype": KERNEL_DTYPES,
        "size": [(64, 1), (64, 4), (8, 2048)],
        "alone": [False, True],
        "target": list(TARGETS),
    },
    few={"dtype": [KVCacheDType.NVFP4]},
)
def test_a_step_is_one_kernel_in_place_without_spills(dtype, size, alone, target):
    """Of 64 sequences with a token or drafts, and of 8 with 2,048 tokens: slots of the ring are no kernel's result."""
    num_seqs, longest = size
    spec = spec_of(dtype, num_kv_heads=8, head_size=128, block_size=16)
    ring = ExactWindow.allocate(spec, 1, 64).ring.spec
    rows = jax.ShapeDtypeStruct((num_seqs * longest, 8, 128), jnp.bfloat16)
    numbers = [jax.ShapeDtypeStruct((n,), jnp.int32) for n in (num_seqs, num_seqs + 1, num_seqs, num_seqs * longest)]
    cache, ring = (
        KVCache(jax.ShapeDtypeStruct(one.cache_shape(num_blocks), one.array_dtype), one)
        for one, num_blocks in ((spec, 4096), (ring, num_seqs * 4))
    )
    run = functools.partial(write, longest=longest, alone=alone)
    args = rows, rows, cache, ring, numbers[3], *numbers[:3]
    program = compile_for(target, run, *args, donate_argnums=3 if alone else (2, 3))
    assert program.device_ops == ("custom-call",)
    written = [ring] if alone else [cache, ring]
    assert program.alias_size == sum(one.num_blocks * one.spec.page_size_bytes for one in written)
    assert program.temp_size <= 16  # where the two results are
    [kernel] = program.kernels
    assert kernel.spill_bytes == 0
    assert kernel.name == f"{'write_exact_window' if alone else 'reshape_and_cache_flash'}_mosaic_gpu_kernel"


def divided(cache: KVCache, spec: jax.sharding.PartitionSpec) -> KVCache:
    """The cache over a mesh that exists in the compiler alone."""
    sharding = jax.sharding.NamedSharding(jax.sharding.AbstractMesh((2, 2), ("data", "tensor")), spec)
    return KVCache(jax.ShapeDtypeStruct(cache.kv.shape, cache.kv.dtype, sharding=sharding), cache.spec, sharding)


@pytest.mark.skipif(gpu_compile.why_not() is not None, reason=str(gpu_compile.why_not()))
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("nvfp4", marks=pytest.mark.full)])
def test_on_several_gpus_each_writes_its_heads_of_pages_and_ring_in_one_kernel(dtype):
    spec = spec_of(dtype, num_kv_heads=8, head_size=128, block_size=16)
    heads = jax.sharding.PartitionSpec(None, None, None, "tensor")
    both = jax.sharding.PartitionSpec("data", None, None, "tensor")
    cache = divided(KVCache.allocate(spec, 64), both)
    ring = divided(ExactWindow.allocate(spec, 8, 64).ring, heads)
    mesh, tokens = cache.sharding.mesh, jax.sharding.PartitionSpec(None, "tensor")
    rows = jax.ShapeDtypeStruct((8, 8, 128), jnp.bfloat16, sharding=jax.sharding.NamedSharding(mesh, tokens))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    numbers = [jax.ShapeDtypeStruct((n,), jnp.int32, sharding=everywhere) for n in (8, 8, 9, 8)]
    run = functools.partial(write, longest=1, alone=False)
    program = compile_for("h100", run, rows, rows, cache, ring, *numbers, donate_argnums=(2, 3))
    assert [kernel.name for kernel in program.kernels] == ["reshape_and_cache_flash_mosaic_gpu_kernel"]
    assert not program.collectives
    ring_bytes = ring.num_blocks * ring.spec.page_size_bytes
    assert program.alias_size == 64 * spec.page_size_bytes // 4 + ring_bytes // 2


def test_a_ring_that_is_not_divided_as_the_pages_takes_a_call_of_its_own():
    memory = Memory.of(spec_of())
    update = memory.update(STEPS["decodes"])
    heads = jax.sharding.PartitionSpec(None, None, None, "tensor")
    mesh = jax.sharding.AbstractMesh((1, 1), ("data", "tensor"))
    cache = KVCache(memory.cache.kv, memory.cache.spec, jax.sharding.NamedSharding(mesh, heads))
    given = WriteTokens(*kv_tokens(memory.cache.spec, 4), slots_of(4), None, None, None)
    assert write_with_ring(cache, given, update, unique_slots=True, implementation=None) is None
