"""What the tests of the operations share: poisoned caches, inputs full of special values, and one way to call each."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import kvjax
from kvjax import STORED_KV_CACHE_DTYPES, AttentionSpec, FullAttentionSpec, KVCache, KVCacheDType
from kvjax.kernels import codecs

INPUT_DTYPES = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16), "bfloat16": ml_dtypes.bfloat16}
SPECIALS = (
    *(np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0),
    *(1e-42, -1e-42, 1e-39, -1e-39, 6e-8, -6e-8),  # subnormal in float32, in bfloat16 too, in float16
    *(6.5e4, -6.5e4, 3e38, -3e38),  # fp8 and float16 saturate, or are infinite
)

KERNEL_DTYPES = tuple(dtype for dtype in STORED_KV_CACHE_DTYPES if dtype in codecs.DTYPES)
"""Those that kernels write and gather."""

FP8_DTYPES = (KVCacheDType.FP8_E4M3, KVCacheDType.FP8_E5M2)
"""Those that take a scale per KV head as well as one per tensor."""

FP8_NAMES = tuple(dtype.value for dtype in FP8_DTYPES)

FEW_DTYPES = (KVCacheDType.BFLOAT16, KVCacheDType.FP8_E4M3, KVCacheDType.INT8_PER_TOKEN_HEAD, KVCacheDType.NVFP4)
"""One of each kind: stored as they are, in 8 bits with a scale, in rows or in blocks with scales of their own."""

_STATIC = ("unique_slots", "implementation")
_write = jax.jit(kvjax.reshape_and_cache_flash, static_argnames=_STATIC, donate_argnames="cache")
_write_diffkv = jax.jit(kvjax.reshape_and_cache_flash_diffkv, static_argnames=_STATIC, donate_argnames="cache")


def run_write(implementation: str | None, key: Any, value: Any, cache: KVCache, slots: Any, **options: Any) -> KVCache:
    """Writes under `jit` with the cache donated, as users do; every test of written bytes goes through here."""
    write = _write_diffkv if cache.spec.is_diffkv else _write
    return write(key, value, cache, slots, implementation=implementation, **options)


def can_write(implementation: str, spec: AttentionSpec) -> bool:
    """Whether it writes to such a layer; asked for the one kind that it does not, it raises, and `None` takes XLA."""
    return implementation == "xla" or not spec.page_size_bytes % spec.storage_dtype.itemsize


def poisoned(spec: AttentionSpec, num_blocks: int, seed: int = 0) -> KVCache:
    """A cache of random bytes: a byte that is touched or moved shows, and so does a NaN that is not left alone."""
    shape = spec.cache_shape(num_blocks)
    count = int(np.prod(shape)) * spec.array_dtype.itemsize
    raw = np.random.default_rng(seed).integers(0, 256, count, np.uint8)
    raise_scales(raw.reshape(num_blocks, -1), spec)
    return cache_from_bytes(raw, spec, num_blocks)


def raise_scales(pages: np.ndarray, spec: AttentionSpec) -> None:
    """Puts float32 scales in pages of random bytes `[num_pages, page_bytes]` out of the subnormal numbers' reach.

    XLA on CPU flushes those; no write stores a scale below 1e-6.
    """
    if spec.dtype.is_per_token_head:
        for _, region in spec.regions:
            tops = pages[:, region.base + 3 : region.base + 4 * spec.block_size * spec.num_kv_heads : 4]
            tops |= 0x30  # the exponent's highest bits but one


def cache_from_bytes(raw: np.ndarray, spec: AttentionSpec, num_blocks: int) -> KVCache:
    array = np.ascontiguousarray(raw).reshape(-1).view(spec.array_dtype).reshape(spec.cache_shape(num_blocks))
    return KVCache(jnp.array(array, copy=True), spec)


def page_bytes(cache: KVCache) -> np.ndarray:
    """The cache's bytes, `[num_blocks, page_size_bytes]`, copied."""
    return np.asarray(cache.kv).reshape(cache.num_blocks, -1).view(np.uint8).copy()


def tokens(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any, *, specials: bool = True) -> np.ndarray:
    """Normal numbers whose magnitudes differ by token, with special values strewn among them."""
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-8, 9, (shape[0], 1, 1)))
    if specials:
        for i, value in enumerate(SPECIALS[: x.size]):
            x.reshape(-1)[i * 37 % x.size] = value
    with np.errstate(over="ignore", under="ignore"):
        return x.astype(np.float32).astype(dtype)


def kv_tokens(spec: AttentionSpec, num_tokens: int, dtype: Any = np.float32, seed: int = 0, *, specials: bool = True):
    """`(key, value)` of that many tokens of a layer."""
    rng = np.random.default_rng(seed)
    sizes = spec.head_size, spec.head_size_v
    return tuple(tokens(rng, (num_tokens, spec.num_kv_heads, size), dtype, specials=specials) for size in sizes)


@contextlib.contextmanager
def compilations() -> Iterator[list[str]]:
    """The names of the programs that JAX compiles in the context, those that it loads from its files included."""
    names: list[str] = []

    def note(event: str, _: float, **kwargs: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(str(kwargs.get("fun_name")))

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        yield names
    finally:
        jax.monitoring.unregister_event_duration_listener(note)


def simple_spec(dtype: KVCacheDType = KVCacheDType.BFLOAT16, **changes: Any) -> AttentionSpec:
    """A small layer, but for what a test changes of it."""
    return FullAttentionSpec(**{"block_size": 8, "num_kv_heads": 2, "head_size": 64, "dtype": dtype, **changes})


def assert_same_bytes(got: np.ndarray, expected: np.ndarray) -> None:
    """Compares arrays of any dtype by their bytes, and says where the first difference is."""
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    got, expected = (np.ascontiguousarray(x).reshape(-1).view(np.uint8) for x in (got, expected))
    if (different := np.flatnonzero(got != expected)).size:
        first = different[0]
        raise AssertionError(
            f"{different.size} of {got.size} bytes differ, first at {first}: {got[first]:#x}, not {expected[first]:#x}"
        )


def assert_same_floats(got: np.ndarray, expected: np.ndarray) -> None:
    """Compares floats bit for bit, but any NaN with any: which one arithmetic gives is the hardware's business."""
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(got), nan)
    assert_same_bytes(got[~nan], expected[~nan])


def pairwise(axes: Mapping[str, Sequence[Any]], valid: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
    """Few combinations that together hold every valid pair of values of any two axes."""
    return covering(axes, valid, 2)


def covering(
    axes: Mapping[str, Sequence[Any]], valid: Callable[[dict[str, Any]], bool], strength: int
) -> list[dict[str, Any]]:
    """Few combinations that together hold every valid combination of values of any `strength` axes."""
    rng = np.random.default_rng(0)
    names, values = list(axes), list(axes.values())
    sizes = [len(some) for some in values]
    # Combinations are numbered: of the axes `some`, `base + indices @ strides` is that of the values at `indices`.
    tables, todo = [], {}
    for some in itertools.combinations(range(len(names)), strength):
        counts = [sizes[axis] for axis in some]
        tables.append((some, len(todo), [math.prod(counts[i + 1 :]) for i in range(strength)]))
        for indices in itertools.product(*map(range, counts)):
            todo[tuple((names[axis], values[axis][i]) for axis, i in zip(some, indices, strict=True))] = len(todo)
    strides = np.zeros((len(names), len(tables)), np.int64)
    for column, (some, _, steps) in enumerate(tables):
        strides[list(some), column] = steps
    bases = np.array([base for _, base, _ in tables])
    is_todo = np.ones(len(todo), bool)

    cases = []
    for wanted in sorted(todo, key=repr):
        if not is_todo[todo[wanted]]:
            continue
        drawn = rng.integers(sizes, size=(200, len(sizes)))
        for name, value in wanted:
            drawn[:, names.index(name)] = axes[name].index(value)
        held = bases + drawn @ strides
        for best in np.argsort(-is_todo[held].sum(1), kind="stable"):
            case = {name: axes[name][i] for name, i in zip(names, drawn[best], strict=True)}
            if valid(case):
                cases.append(case)
                is_todo[held[best]] = False
                break
        else:
            is_todo[todo[wanted]] = False  # no valid case holds this combination
    return cases


def matrix(
    axes: Mapping[str, Sequence[Any]],
    few: Mapping[str, Collection[Any]] | None = None,
    *,
    valid: Callable[[dict[str, Any]], bool] = lambda case: True,
    pairs: bool = False,
) -> pytest.MarkDecorator:
    """Parametrizes a test with every valid combination of values; but for a few (`_marks`) they are marked `full`."""
    cases = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    cases = [case for case in cases if valid(case)]
    marks = _marks(cases, few or {}, 2 if pairs else 1)
    params = [pytest.param(*case.values(), id=_name(case), marks=mark) for case, mark in zip(cases, marks, strict=True)]
    return pytest.mark.parametrize(list(axes), params)


def each_case(
    cases: Sequence[dict[str, Any]],
    few: Mapping[str, Collection[Any]] | None = None,
    *,
    pairs: bool = False,
    argument: str = "case",
    make: Callable[[dict[str, Any]], Any] = lambda case: case,
) -> pytest.MarkDecorator:
    """Parametrizes a test with what is made of each case; but for a few (`_marks`) they are marked `full`."""
    marks = _marks(cases, few or {}, 2 if pairs else 1)
    params = [pytest.param(make(case), id=_name(case), marks=mark) for case, mark in zip(cases, marks, strict=True)]
    return pytest.mark.parametrize(argument, params)


def _marks(cases: Sequence[dict[str, Any]], few: Mapping[str, Collection[Any]], size: int) -> list[Any]:
    """Marks that leave in every run cases that hold each value of each axis, or with `size` 2 each two of two axes.

    Of an axis that `few` has these are its values there; of dtypes, if not there, those of `FEW_DTYPES`. Combinations
    that no case has do not count.
    """
    kinds = [*FEW_DTYPES, *(dtype.value for dtype in FEW_DTYPES)]
    if "dtype" not in few and any(case.get("dtype") in kinds for case in cases):
        few = {**few, "dtype": kinds}
    held = [set(itertools.combinations([(axis, repr(value)) for axis, value in case.items()], size)) for case in cases]
    candidates = [i for i, case in enumerate(cases) if all(case[axis] in values for axis, values in few.items())]
    todo = set().union(*(held[i] for i in candidates))
    taken = set()
    while todo:
        best = max(candidates, key=lambda i: len(held[i] & todo))
        taken.add(best)
        todo -= held[best]
    return [() if i in taken else pytest.mark.full for i in range(len(cases))]


def _name(case: dict[str, Any]) -> str:
    return "-".join(str(getattr(value, "value", value)) for value in case.values())
