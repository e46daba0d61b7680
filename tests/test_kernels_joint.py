"""The kernels that attend to pages and to the ring of an exact window at once: interpreted, and compiled for GPUs."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import gpu_compile
from support import joint_suite as suite
from support.attention_suite import Case
from support.gpu_compile import HOPPER_AND_BLACKWELL, compile_for
from support.helpers import simple_spec
from support.interpret_mode import interpret_mode
from support.joint_suite import JointCase

from kvjax import AttentionSpec, ExactWindow, KVCache, KVCacheDType, StepMetadata, attend
from kvjax.kernels import lanes
from kvjax.kernels.attention import choice, joint, schedule
from kvjax.kernels.attention.choice import plain_problem
from kvjax.kernels.registers import THREADS

W = 20


def pages(dtype: str = "nvfp4", lengths: tuple[int, ...] = (), **changes: Any) -> Case:
    return Case(dtype, lengths=lengths, **{"num_kv_heads": 1, "head_size": 32} | changes)


CASES = {
    "lengths": JointCase(pages(lengths=(0, 0, 0, 1, 90, 0, 40)), (0, 1, W - 1, W, W + 1, 0, 3 * W), W),
    "drafts": JointCase(
        pages(lengths=(0, 3, 50), q_len=3, q_lens=(1, 3, 2), cap=5.0, sinks=True), (W, W + 2, W + 15), W, layers=True
    ),
}
FULL = {
    "a window of pages": JointCase(pages(lengths=(0, 60, 90), window=37, sinks=True), (5, W, 30), W),
    "without a row of the ring": JointCase(pages(lengths=(60, 5)), (0, 0), W),
    "fp8": JointCase(pages("fp8_e4m3", lengths=(40, 3), scales="per_head", num_kv_heads=2), (W, W), W, layers=True),
    "int8": JointCase(pages("int8_per_token_head", lengths=(37, 5), group=5), (W, 30), W),
    "float16": JointCase(pages(lengths=(37,), query_dtype="float16"), (W,), W, ring_dtype="float16"),
    "bfloat16": JointCase(pages("bfloat16", lengths=(37, 2), head_size_v=16), (W, 30), W),
    "HND": JointCase(pages(lengths=(37, 2), layout="HND", num_kv_heads=4), (W, 30), W),
    "one token": JointCase(pages(lengths=(37, 12)), (1, 1), 1),
}
NIGHTLY = {
    "a window of pages, drafts": JointCase(
        pages(lengths=(0, 33, 90), window=7, q_len=2, q_lens=(1, 1, 2)), (5, W, 30), W
    ),
    "nothing": JointCase(pages(lengths=(0, 0), sinks=True), (0, 0), W),
    "float32": JointCase(pages("fp8_e5m2", lengths=(37,)), (W,), W, ring_dtype="float32"),
    "two passes": JointCase(pages(lengths=(37, 2, 9), group=6, q_len=4, q_lens=(4, 1, 3)), (W, 30, 23), W),
    "groups": JointCase(pages(lengths=(37, 12), group=20, sinks=True), (W, 30), W),
    "shorter than the window": JointCase(pages(lengths=(0, 0)), (5, W), W),
}


@pytest.fixture(autouse=True)
def shares_of_a_stage(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest):
    """Pages of two stages are divided among several of four thread blocks, if interpreted."""
    if "interpreted" in request.node.name:
        monkeypatch.setattr(schedule, "MIN_STAGES", 1)


@pytest.mark.parametrize(
    "case",
    [
        *CASES.values(),
        *(pytest.param(case, marks=pytest.mark.full) for case in FULL.values()),
        *(pytest.param(case, marks=pytest.mark.nightly) for case in NIGHTLY.values()),
    ],
    ids=[*CASES, *FULL, *NIGHTLY],
)
def test_interpreted_results_are_those_of_both_caches(case: JointCase):
    with interpret_mode():
        suite.check(case)


@pytest.mark.nightly
def test_interpreted_a_sequence_has_its_bits_in_every_batch(monkeypatch: pytest.MonkeyPatch):
    """Of parts of two stages and of more."""
    monkeypatch.setattr(choice, "MAX_TILES", 2)
    monkeypatch.setattr(choice, "PART_TOKENS", 64)
    monkeypatch.setattr(schedule, "MAX_PARTS", 3)
    with interpret_mode():
        suite.check_alone(JointCase(pages(lengths=(270, 0, 20), q_len=2), (W, 3, 70), W), range(3))


@pytest.mark.full
@pytest.mark.parametrize("merge", [*choice.MERGES.values()], ids=str)
def test_interpreted_parts_are_merged_in_every_way(merge: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(choice, "merge_config", lambda _: merge._replace(warps=min(merge.warps, 4)))
    with interpret_mode():
        suite.check(JointCase(pages("float16", lengths=(90, 0), head_size_v=48), (W, 9), W), other_poison=False)


LONG = (0, 1, 15, 1328, 5000, 0, 17, 300)
RECENT = (0, 64, 64, 79, 70, 3, 66, 64)
ON_GPU = {
    "nvfp4": JointCase(pages(lengths=LONG, num_kv_heads=8, head_size=128, group=4), RECENT, 64),
    "layers, sinks, cap": JointCase(
        pages(lengths=LONG, num_kv_heads=8, head_size=128, sinks=True, cap=30.0), RECENT, 64, layers=True
    ),
    "fp8": JointCase(pages("fp8_e4m3", lengths=LONG, head_size=128, group=8, scales="per_head"), RECENT, 64),
    "drafts, windows": JointCase(
        pages(lengths=LONG, num_kv_heads=2, head_size=64, q_len=4, q_lens=(1, 4, 2, 4, 3, 3, 1, 4), window=1000),
        RECENT,
        64,
    ),
    "int8": JointCase(
        pages("int8_per_token_head", lengths=LONG, num_kv_heads=4, head_size=128, layout="HND"), RECENT, 64
    ),
    "head size 256": JointCase(pages(lengths=LONG, num_kv_heads=8, head_size=256, group=3), RECENT, 64),
    "many sequences": JointCase(
        pages("bfloat16", lengths=LONG * 10, num_kv_heads=1, head_size=128, block_size=8), RECENT * 10, 64
    ),
}


@pytest.mark.gpu
@pytest.mark.parametrize("case", ON_GPU.values(), ids=ON_GPU)
def test_on_a_gpu_results_are_those_of_both_caches(case: JointCase):
    suite.check(case)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [ON_GPU["nvfp4"], ON_GPU["int8"]], ids=["nvfp4", "int8"])
def test_on_a_gpu_a_sequence_has_its_bits_in_every_batch(case: JointCase):
    suite.check_alone(case, range(len(LONG)))


@pytest.mark.parametrize("num_blocks", [2, 5, 132])
def test_thread_blocks_are_divided_as_the_work_is(num_blocks: int):
    for of_pages, of_ring in itertools.product((0, 1, 7, 1000, 100_000, 2**29), repeat=2):
        blocks = int(joint.blocks_of_ring(jnp.int32(of_pages), jnp.int32(of_ring), num_blocks))
        if not of_pages or not of_ring:
            assert blocks == (num_blocks if of_ring else 0)
            continue
        assert 1 <= blocks < num_blocks
        assert abs(blocks - num_blocks * of_ring / (of_pages + of_ring)) <= 1.5 + num_blocks**2 / (of_pages + of_ring)


def sequences_of(lens: np.ndarray, block_size: int, window: int | None) -> tuple[Any, schedule.Sequences]:
    """A problem of so many sequences, and the schedule of its stages of 16 tokens."""
    spec = simple_spec(KVCacheDType.BFLOAT16, block_size=block_size)
    sizes = choice.BatchSizes(len(lens), 1, 1, 2**14)
    problem = dataclasses.replace(plain_problem(spec, sizes), window=window, batch_invariant=False)
    return problem, schedule.Sequences(problem, 16, jax.new_ref(jnp.asarray(lens)))


def test_each_part_has_a_place_of_its_own(monkeypatch: pytest.MonkeyPatch):
    """Whatever sequences have none, and wherever shares of thread blocks begin."""
    monkeypatch.setattr(lanes, "thread_index", lambda: jnp.arange(THREADS))  # in a kernel it has a layout
    rng, num_blocks = np.random.default_rng(0), 7

    @functools.partial(jax.jit, static_argnums=(0, 2))
    def share(num_seqs: int, lens: jax.Array, window: int | None, block: jax.Array, count: jax.Array) -> Any:
        _, sequences = sequences_of(lens, 16, window)
        return sequences.share(schedule.Workers(block, count))[:3]

    for num_seqs in (5, 40):
        lens = rng.choice([0, 1, 16, 17, 700, 9000], num_seqs).astype(np.int32)
        places: list[int] = []
        for number, (own, window, begin, end) in enumerate(((lens, None, 0, 5), (lens[::-1], 64, 5, num_blocks))):
            _, sequences = sequences_of(own, 16, window)
            counts = np.asarray(sequences.stages(jnp.asarray(own))[1])
            for block in range(begin, end):
                with interpret_mode():
                    sequence, skipped, left = map(int, share(num_seqs, own, window, block - begin, end - begin))
                while left > 0:
                    places.append(block + sequence + number * num_seqs)
                    taken = min(int(counts[sequence]) - skipped, left)
                    sequence, skipped, left = sequence + 1, 0, left - taken
        assert len(set(places)) == len(places)
        assert max(places) < num_blocks + 2 * num_seqs


COMPILED = [
    ("nvfp4", {}, {}),
    ("nvfp4", {}, {"q_len": 4}),
    ("fp8_e4m3", {"layout": "HND", "num_layers": 4}, {"sliding_window": 1024, "logits_soft_cap": 50.0, "q_len": 2}),
    ("nvfp4", {"v_scale_layout": "swizzled", "head_size": 256, "num_kv_heads": 2}, {"q_len": 4}),
    ("int8_per_token_head", {}, {"q_len": 4}),
    ("nvfp4", {"num_kv_heads": 1}, {"batch_invariant": True, "num_seqs": 8}),
    ("fp8_k_nvfp4_v", {"head_size": 64}, {"num_seqs": 1}),
    ("bfloat16", {"block_size": 784, "head_size": 80, "num_kv_heads": 3}, {}),
]


def step(query: Any, key: Any, value: Any, cache: KVCache, metadata: StepMetadata, *others: Any, **options: Any) -> Any:
    window, layer = others
    options |= {"layer": layer, "unique_slots": True, "implementation": "mosaic"}
    return attend(query, key, value, cache, metadata, exact_window=window, **options)


@pytest.mark.full
@pytest.mark.skipif(gpu_compile.why_not() is not None, reason=str(gpu_compile.why_not()))
@pytest.mark.parametrize(
    ("target", "dtype", "spec", "options"),
    [
        *((target, *case) for target in HOPPER_AND_BLACKWELL for case in COMPILED),
        ("rtx6000pro", *COMPILED[0]),
        # Of the longest to compile: two passes, and shared memory that is not the other targets'.
        *(pytest.param("rtx6000pro", *case, marks=pytest.mark.nightly) for case in COMPILED[1:4]),
    ],
)
def test_it_compiles_without_spills(target: str, dtype: str, spec: dict[str, Any], options: dict[str, Any]):
    spec, options = dict(spec), dict(options)
    num_layers, q_len, num_seqs = spec.pop("num_layers", None), options.pop("q_len", 1), options.pop("num_seqs", 64)
    spec = simple_spec(KVCacheDType(dtype), **{"block_size": 16, "num_kv_heads": 8, "head_size": 128} | spec)
    of_ring = ExactWindow.allocate(spec, 1, 64, max_q_len=q_len)

    def cache_of(spec: AttentionSpec, num_blocks: int) -> KVCache:
        shape = spec.cache_shape(num_blocks)
        shape = shape if num_layers is None else (shape[0], num_layers, *shape[1:])
        return KVCache(jax.ShapeDtypeStruct(shape, spec.array_dtype), spec, num_layers=num_layers)

    cache = cache_of(spec, 4096)
    window = ExactWindow(cache_of(of_ring.ring.spec, 64 * of_ring.blocks_per_row), 64, q_len)
    shapes = (num_seqs, 64), (num_seqs,), (num_seqs + 1,), (num_seqs * q_len,), (num_seqs,)
    metadata = StepMetadata(*(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes))
    heads = 4 * spec.num_kv_heads, spec.num_kv_heads, spec.num_kv_heads
    rows = [jax.ShapeDtypeStruct((num_seqs * q_len, number, spec.head_size), jnp.bfloat16) for number in heads]
    layer = None if num_layers is None else jax.ShapeDtypeStruct((), jnp.int32)
    run = functools.partial(step, max_q_len=q_len, **options)
    program = compile_for(target, run, *rows, cache, metadata, window, layer, donate_argnums=(3, 5))
    names = [kernel.name.removesuffix("_mosaic_gpu_kernel") for kernel in program.kernels]
    num_passes = sum(len(runs) for _, runs in choice.passes(spec, 4, q_len))
    assert names[0] == "reshape_and_cache_flash"
    assert sorted(names[1:]) == ["merge_paged_attention"] * num_passes + ["paged_attention"] * num_passes
    assert [kernel.spill_bytes for kernel in program.kernels] == [0] * len(names)
    assert program.temp_size < 64 * 2**20
