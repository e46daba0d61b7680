"""What the tests of the operations share: poisoned caches, inputs full of special values, and one way to call each."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import math
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import kvjax
from kvjax import STORED_KV_CACHE_DTYPES, AttentionSpec, FullAttentionSpec, HostCaches, KVCache, KVCacheDType
from kvjax.kernels import codecs
from kvjax.ops import host_copies

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

WIDENS_BFLOAT16 = jax.__version_info__ < (0, 11, 2) and jax.default_backend() == "cpu"
"""Whether XLA moves bfloat16 in float32: it copies a whole cache, and each NaN becomes 0x7fc0 with its sign."""

_STATIC = ("unique_slots", "implementation")
_write = jax.jit(kvjax.reshape_and_cache_flash, static_argnames=_STATIC, donate_argnames="cache")


def run_write(implementation: str | None, key: Any, value: Any, cache: KVCache, slots: Any, **options: Any) -> KVCache:
    """Writes under `jit` with the cache donated, as users do; every test of written bytes goes through here."""
    return _write(key, value, cache, slots, implementation=implementation, **options)


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


class HeldCopies:
    """Copies to the host and from it that wait until they are let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.released, start = threading.Event(), host_copies.start

        def waits(device: jax.Device, copies: Iterable[host_copies.HostCopy]) -> None:
            assert self.released.wait(60)
            start(device, copies)

        monkeypatch.setattr(host_copies, "start", waits)


def poison(host: HostCaches) -> HostCaches:
    """Sets all bytes of the blocks on the host, which makes NaN of every float."""
    for kv in host._kv:
        for shard in kv.addressable_shards:
            ctypes.memset(shard.data.unsafe_buffer_pointer(), 0xFF, shard.data.nbytes)
    return host


def raise_scales(pages: np.ndarray, spec: AttentionSpec) -> None:
    """Puts float32 scales in pages of random bytes `[num_pages, page_bytes]` out of the subnormal numbers' reach.

    XLA on CPU flushes those, and their products with codes, to zero; GPUs do not. No write stores such a scale.
    """
    for regions, part in zip(spec.regions, spec.parts, strict=True):
        if part.info.scale_dtype == np.float32:
            rows = regions[1]
            shape = len(pages), spec.block_size, spec.num_kv_heads, rows.row_bytes // 4
            strides = pages.strides[0], rows.token_stride, rows.head_stride, 4
            tops = np.lib.stride_tricks.as_strided(pages[:, rows.base + 3 :], shape, strides)
            tops[tops & 0x70 < 0x30] |= 0x30  # the exponent's highest bits but one


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


def copied(source: np.ndarray, destination: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    """What blocks `[num_blocks, ...]` of the destination hold after a copy."""
    after = destination.copy()
    for read, write in pairs.tolist():
        if 0 <= read < len(source) and 0 <= write < len(destination):
            after[write] = source[read]
    return after


def skip_if_copied(caches: Any) -> None:
    """Skips a test of the memory of programs that are given these pytrees, where XLA copies one of them."""
    if WIDENS_BFLOAT16 and any(leaf.dtype == ml_dtypes.bfloat16 for leaf in jax.tree.leaves(caches)):
        pytest.skip("XLA of jax 0.11.1 on a CPU copies caches of bfloat16")


def assert_same_bytes(got: np.ndarray, expected: np.ndarray) -> None:
    """Compares arrays of any dtype by their bytes, and says where the first difference is.

    Where `WIDENS_BFLOAT16`, two bytes that may be a NaN of bfloat16 may be another one.
    """
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    got, expected = (np.ascontiguousarray(x).reshape(-1).view(np.uint8) for x in (got, expected))
    differs = got != expected
    if WIDENS_BFLOAT16 and got.size % 2 == 0:
        differs &= ~np.repeat(np.all([np.isnan(x.view(ml_dtypes.bfloat16)) for x in (got, expected)], axis=0), 2)
    if (different := np.flatnonzero(differs)).size:
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
    whole: bool = False,
) -> pytest.MarkDecorator:
    """Parametrizes a test with valid combinations of values, as `each_case` does with cases."""
    cases = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    params = _params([case for case in cases if valid(case)], few, pairs, whole, lambda case: tuple(case.values()))
    return pytest.mark.parametrize(list(axes), params)


def each_case(
    cases: Sequence[dict[str, Any]],
    few: Mapping[str, Collection[Any]] | None = None,
    *,
    pairs: bool = False,
    whole: bool = False,
    argument: str = "case",
    make: Callable[[dict[str, Any]], Any] = lambda case: case,
) -> pytest.MarkDecorator:
    """Parametrizes a test with what is made of cases: a few in every run, more with `--full`.

    In every run there is each value of each axis, or with `pairs` each two values of two axes. Of an axis that `few`
    has, values are those there; of dtypes, if not there, those of `FEW_DTYPES`.

    With `--full` there is each two values of two axes, but of other dtypes than those of `FEW_DTYPES` only with the
    values of `AXES_OF_EACH_DTYPE`; with `whole` there is every case.
    """
    return pytest.mark.parametrize(argument, _params(cases, few, pairs, whole, lambda case: (make(case),)))


AXES_OF_EACH_DTYPE = {"layout", "operation", "input_dtype", "dense_dtype", "output_dtype", "source"}
"""What the code of each dtype depends on, and not that of each kind alone."""

_KINDS = [*FEW_DTYPES, *(dtype.value for dtype in FEW_DTYPES)]
_NAMES_OF_KINDS = {*map(repr, _KINDS)}


def _is_of_a_kind(combination: Iterable[tuple[str, str]]) -> bool:
    """Whether it has no dtype, one of `FEW_DTYPES`, or but for a dtype only values of `AXES_OF_EACH_DTYPE`."""
    names = dict(combination)
    dtype = names.pop("dtype", None)
    return dtype is None or dtype in _NAMES_OF_KINDS or names.keys() <= AXES_OF_EACH_DTYPE


def _params(
    cases: Sequence[dict[str, Any]],
    few: Mapping[str, Collection[Any]] | None,
    pairs: bool,
    whole: bool,
    values: Callable[[dict[str, Any]], tuple[Any, ...]],
) -> list[Any]:
    few = few or {}
    has_kinds = any(case.get("dtype") in _KINDS for case in cases)
    if "dtype" not in few and has_kinds:
        few = {**few, "dtype": _KINDS}
    # By the names of values, which are equal only where they are the same.
    named = [[(axis, repr(value)) for axis, value in case.items()] for case in cases]
    singles, twos = ([{*itertools.combinations(each, size)} for each in named] for size in (1, 2))
    of_kinds = [{*filter(_is_of_a_kind, each)} for each in twos] if has_kinds else twos
    in_few = [i for i, case in enumerate(cases) if all(case[axis] in some for axis, some in few.items())]
    always = _covering(in_few, twos if pairs else singles)
    wanted = [one | two for one, two in zip(singles, of_kinds, strict=True)]
    kept = range(len(cases)) if whole else _covering(range(len(cases)), wanted, always)
    marks = [() if i in always else pytest.mark.full for i in range(len(cases))]
    return [pytest.param(*values(cases[i]), id=_name(cases[i]), marks=marks[i]) for i in sorted(kept)]


def _covering(candidates: Sequence[int], held: Sequence[set[Any]], taken: Collection[int] = ()) -> set[int]:
    """Candidates that, with those already taken, hold whatever any candidate holds."""
    todo = set().union(*(held[i] for i in candidates)).difference(*(held[i] for i in taken))
    chosen = set(taken)
    while todo:
        best = max(candidates, key=lambda i: len(held[i] & todo))
        chosen.add(best)
        todo -= held[best]
    return chosen


def _name(case: dict[str, Any]) -> str:
    return "-".join(str(getattr(value, "value", value)) for value in case.values())


def refused(call: Callable[[], object]) -> kvjax.OutOfBlocksError | None:
    """Calls; returns the error if a pool's blocks or states do not suffice."""
    try:
        call()
    except kvjax.OutOfBlocksError as error:
        return error
    return None
