"""When an implementation is traced: once its program is lowered, for the platforms that it is lowered for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from support.any_count import gather_kernel, write_kernel
from support.helpers import assert_same_bytes, kv_tokens, matrix, page_bytes, poisoned, simple_spec

from kvjax import KVCache, KVCacheDType, UnsupportedError, gather_kv, paged_attention, reshape_and_cache_flash
from kvjax.kernels import codecs, placement
from kvjax.kernels.attention import choice
from kvjax.kernels.target import Target
from kvjax.kernels.write import why_no_staging
from kvjax.ops import select

TABLE, LENS = np.array([[0, 1], [2, 3]], np.int32), np.array([5, 9], np.int32)
PLATFORMS = {"cpu": ["xla"], "cuda": ["mosaic"], "tpu": ["xla"]}


class Recorded:
    """An operation that notes which of its implementations are traced: XLA's has cosines, the kernel's sines."""

    def __init__(self) -> None:
        self.traced: list[str] = []
        self.candidates = select.Candidates(
            ("cache", "x"),
            xla=functools.partial(self._trace, "xla", jnp.cos),
            mosaic=functools.partial(self._trace, "mosaic", jnp.sin),
            results=lambda cache, x: x,
            differentiable=frozenset({"x"}),
        )

    def _trace(self, name: str, function: Callable[..., Any], cache: KVCache, x: Any) -> Any:
        self.traced.append(name)
        return function(x)

    def __call__(self, cache: KVCache, x: Any, requested: str | None = None) -> Any:
        return select.choose("op", requested, self.candidates, cache)(cache, x)


def lower(function: Any, platforms: tuple[str, ...], *args: Any) -> str:
    return jax.jit(function).trace(*args).lower(lowering_platforms=platforms).as_text()


@pytest.fixture
def cache() -> KVCache:
    return KVCache.allocate(simple_spec(), 4)


X = np.linspace(0.0, 1.0, 6, dtype=np.float32).reshape(3, 2)


@pytest.mark.parametrize("platforms", [("cpu",), ("cuda",), ("cpu", "cuda"), ("tpu", "cpu")], ids="-".join)
def test_an_implementation_is_traced_for_the_platforms_of_the_program_alone(cache, platforms):
    op = Recorded()
    traced = jax.jit(op).trace(cache, X)
    assert op.traced == []
    lowered = traced.lower(lowering_platforms=platforms).as_text()
    expected = {name for platform in platforms for name in PLATFORMS[platform]}
    assert set(op.traced) == expected
    assert len(op.traced) == len(expected)
    assert {"mosaic": "stablehlo.sine" in lowered, "xla": "stablehlo.cosine" in lowered} == {
        name: name in expected for name in ("mosaic", "xla")
    }


def test_programs_trace_what_they_have_in_common_once(cache):
    op = Recorded()
    lower(lambda cache, x: op(cache, op(cache, x)), ("cpu",), cache, X)
    lower(lambda cache, x: 2 * op(cache, x), ("cpu",), cache, X)
    assert op.traced == ["xla"]


def test_one_that_is_asked_for_is_refused_for_a_platform_without_it(cache):
    op = functools.partial(Recorded(), requested="mosaic")
    assert "stablehlo.sine" in lower(op, ("cuda",), cache, X)
    for platforms in (("cpu",), ("cuda", "cpu")):
        with pytest.raises(UnsupportedError, match="this runs on cpu"):
            lower(op, platforms, cache, X)


@pytest.mark.parametrize("in_axes", [0, 1])
def test_vmap_maps_the_implementation_that_runs(cache, in_axes):
    op = Recorded()
    mapped = jax.vmap(op, (None, in_axes), in_axes)
    np.testing.assert_allclose(jax.jit(mapped)(cache, X), jnp.cos(X), rtol=1e-6)
    assert "stablehlo.sine" in lower(mapped, ("cuda",), cache, X)
    nested = jax.vmap(jax.vmap(op, (None, 0)), (None, in_axes), in_axes)
    np.testing.assert_allclose(jax.jit(nested)(cache, X), jnp.cos(X), rtol=1e-6)
    assert set(op.traced) == {"xla", "mosaic"}


def test_vmap_without_jit_runs_what_serves_the_arrays(cache):
    op = Recorded()
    caches = KVCache(jnp.stack([cache.kv] * 3), cache.spec)
    with jax.disable_jit(), jax.default_device(jax.devices("cpu")[0]):
        np.testing.assert_allclose(jax.vmap(op)(caches, X), jnp.cos(X), rtol=1e-6)
    assert op.traced == ["xla"]


def test_what_is_differentiated_is_xlas(cache):
    op = Recorded()

    def total(x: Any, cache: KVCache, requested: str | None = None) -> Any:
        return op(cache, x, requested).sum()

    np.testing.assert_allclose(jax.jit(jax.grad(total))(X, cache), -jnp.sin(X), rtol=1e-6)
    assert "stablehlo.cosine" in lower(jax.value_and_grad(total), ("cuda",), X, cache)
    np.testing.assert_allclose(jax.jit(jax.grad(jax.checkpoint(total)))(X, cache), -jnp.sin(X), rtol=1e-6)
    np.testing.assert_allclose(jax.jit(jax.vmap(jax.grad(total), (0, None)))(X, cache), -jnp.sin(X), rtol=1e-6)
    with pytest.raises(UnsupportedError, match="the kernel has no gradient"):
        lower(functools.partial(jax.grad(total), requested="mosaic"), ("cuda",), X, cache)


def test_gradient_uses_xla_even_if_kernel_serves(cache, monkeypatch):
    monkeypatch.setattr(placement, "why_not", lambda array: None)
    op = Recorded()
    np.testing.assert_allclose(op(cache, X), jnp.sin(X), rtol=1e-6)
    np.testing.assert_allclose(jax.grad(lambda x: op(cache, x).sum())(X), -jnp.sin(X), rtol=1e-6)
    with pytest.raises(UnsupportedError, match="the kernel has no gradient"):
        jax.grad(lambda x: op(cache, x, "mosaic").sum())(X)


def test_it_is_traced_in_the_mode_of_the_call(cache):
    """A slot past int32 is none, also where the program is lowered when x64 is off again."""
    spec, num_blocks = cache.spec, cache.num_blocks
    key, value = kv_tokens(spec, 2, jnp.bfloat16)

    def write(cache: KVCache) -> KVCache:
        with jax.enable_x64(True):
            return reshape_and_cache_flash(key, value, cache, jnp.asarray([2**32 + 1, 3], jnp.int64))

    written = jax.jit(write)(poisoned(spec, num_blocks))
    expected = reshape_and_cache_flash(key[1:], value[1:], poisoned(spec, num_blocks), np.array([3], np.int32))
    assert_same_bytes(page_bytes(written), page_bytes(expected))
    assert "i64" in lower(write, ("cuda",), cache)


@pytest.mark.full
@matrix({"dtype": [KVCacheDType.BFLOAT16, KVCacheDType.NVFP4]}, few={"dtype": [KVCacheDType.NVFP4]})
def test_a_program_exported_for_two_platforms_has_the_implementation_of_each(dtype):
    spec = simple_spec(dtype)

    @jax.jit
    def step(query: Any, key: Any, value: Any, cache: KVCache) -> Any:
        cache = reshape_and_cache_flash(key, value, cache, np.arange(5, dtype=np.int32))
        return cache, gather_kv(cache, TABLE, LENS), paged_attention(query, cache, TABLE, LENS)

    args = jnp.ones((2, 4, 64), jnp.bfloat16), *map(jnp.asarray, kv_tokens(spec, 5)), KVCache.allocate(spec, 4)
    checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in ("mosaic_gpu_v2", "LayoutConstraint")]
    exported = jax.export.export(step, platforms=("cpu", "cuda"), disabled_checks=checks)(*args)
    assert exported.mlir_module().count("@mosaic_gpu") >= 3
    with jax.default_device(jax.devices("cpu")[0]):
        got = exported.call(*args)
        expected = step(*args)
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert_same_bytes(np.asarray(mine), np.asarray(theirs))


@pytest.mark.full
def test_a_dtype_without_kernels_is_served_by_xla(monkeypatch):
    """As every new one is, until it is named among those that kernels serve."""
    spec = simple_spec(KVCacheDType.FP8_E5M2)
    query = jnp.ones((2, spec.num_kv_heads, spec.head_size), jnp.bfloat16)
    operations = {
        "write": lambda cache, **options: reshape_and_cache_flash(*kv_tokens(spec, 2), cache, LENS, **options),
        "gather": lambda cache, **options: gather_kv(cache, TABLE, LENS, **options),
        "attention": lambda cache, **options: paged_attention(query, cache, TABLE, LENS, **options),
    }
    for operation in operations.values():
        assert "mosaic_gpu" in lower(operation, ("cuda",), poisoned(spec, 4))
    monkeypatch.delitem(codecs.CODECS, KVCacheDType.FP8_E5M2)
    monkeypatch.setattr(choice, "DTYPES", choice.DTYPES - {KVCacheDType.FP8_E5M2})
    jax.clear_caches()  # of what was lowered above
    for operation in operations.values():
        with pytest.raises(UnsupportedError, match="fp8_e5m2"):
            operation(poisoned(spec, 4), implementation="mosaic")
        assert "mosaic_gpu" not in lower(operation, ("cuda",), poisoned(spec, 4))
    for kernel in (write_kernel, gather_kernel):
        with pytest.raises(UnsupportedError, match="dtype: got 'fp8_e5m2', which no kernel"):
            kernel(spec)


def test_a_write_whose_rows_fill_the_shared_memory_of_a_gpu_is_served_by_xla(monkeypatch):
    """Of formats that stage a token's rows: known when the call is lowered."""
    spec = simple_spec(KVCacheDType.INT8_PER_TOKEN_HEAD, num_kv_heads=64, head_size=1024)
    small = Target(188, (12, 0), 99 * 1024)
    reason = "a token's rows, 131584 bytes, do not fit in the 96256 bytes of shared memory"
    assert why_no_staging(spec) is None
    assert reason in (why_no_staging(spec, small) or "")
    with pytest.raises(UnsupportedError, match=reason):
        write_kernel(spec, target=small)
    monkeypatch.setattr(placement, "_target", lambda: small)
    rows, slots = jax.ShapeDtypeStruct((3, 64, 1024), jnp.bfloat16), jax.ShapeDtypeStruct((3,), jnp.int32)
    cache = jax.eval_shape(functools.partial(KVCache.allocate, spec, 4))
    assert "mosaic_gpu" not in lower(reshape_and_cache_flash, ("cuda",), rows, rows, cache, slots)
    with pytest.raises(UnsupportedError, match=reason):
        lower(functools.partial(reshape_and_cache_flash, implementation="mosaic"), ("cuda",), rows, rows, cache, slots)
