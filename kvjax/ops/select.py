"""The dispatcher: picks the implementation of an operation that serves a call."""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from kvjax.cache import KVCache, without_scales
from kvjax.errors import KVCacheTypeError, KVCacheValueError, UnsupportedError, got_expected
from kvjax.kernels import placement
from kvjax.kernels.target import Target, current, tracing_for
from kvjax.partition import Partition, Signature, partition_of, run_on_shares
from kvjax.spec import AttentionSpec


class Implementation(enum.StrEnum):
    """`MOSAIC` is Pallas Mosaic GPU (sm_90 and later), `XLA` runs anywhere."""

    MOSAIC = "mosaic"
    XLA = "xla"


@dataclasses.dataclass(frozen=True)
class Candidates:
    """The implementations of an operation. All take the same arguments, the cache first.

    Attributes:
      parameters: names of the arrays that it takes, the cache first, for errors.
      xla: runs anywhere.
      mosaic: the kernel; None if there is none.
      results: takes the same arguments, returns the shapes and dtypes of the results, as arrays or
        `jax.ShapeDtypeStruct`s. Required with `mosaic`.
      why_not_mosaic: returns why the kernel cannot serve caches of a spec on a GPU, None if it can. Before the GPU is
        known it is given None, and asked again later.
      signature: how the other arguments and the results are divided among the devices of a divided cache. With it,
        pass arrays by position and everything else by name. None if the operation runs on the whole cache.
      differentiable: parameters whose gradients are correct.
    """

    parameters: tuple[str, ...]
    xla: Callable[..., Any]
    mosaic: Callable[..., Any] | None = None
    results: Callable[..., Any] | None = None
    why_not_mosaic: Callable[[AttentionSpec, Target | None], str | None] = lambda spec, target: None
    signature: Signature | None = None
    differentiable: frozenset[str] = frozenset()


@functools.partial(jax.tree_util.register_dataclass, data_fields=["kv"], meta_fields=["spec"])
@dataclasses.dataclass(frozen=True)
class DenseKeys:
    """Keys in an array, in place of the cache of an operation that takes none.

    Attributes:
      kv: the keys.
      spec: of the cache that would hold them and the values.
    """

    kv: jax.Array
    spec: AttentionSpec
    sharding: ClassVar[None] = None
    num_layers: ClassVar[None] = None


type _Kernel = tuple[Callable[..., Any], Callable[..., Any]]
"""`Candidates.mosaic` and `Candidates.results`."""


def choose(
    operation: str, requested: str | None, candidates: Candidates, cache: KVCache | DenseKeys
) -> Callable[..., Any]:
    """Returns the requested implementation; for `None` the kernel if it can serve the call, else XLA.

    The device of a concrete cache is known here, that of a traced cache only at lowering: a requested implementation
    that cannot serve raises then. For a divided cache (as `local_view` returns it) each device runs the implementation
    on its share.

    The returned function raises on differentiation with respect to arguments that are not `differentiable`.
    Implementations bitcast, and JAX would silently return a gradient of 0.

    Raises:
      KVCacheValueError: unknown implementation.
      UnsupportedError: the requested implementation cannot serve this call; with the reason.
    """
    wanted = _parse(requested)
    divided = None
    if cache.sharding is not None and candidates.signature is not None:
        divided = partition_of(cache.spec, cache.sharding, cache.num_layers)
    kernel = None
    if wanted is not Implementation.XLA:
        kernel, reason = _serving_kernel(candidates, cache, divided)
        if reason is not None and wanted is Implementation.MOSAIC:
            raise UnsupportedError(f"{operation}: implementation 'mosaic' cannot serve this call: {reason}")
    return functools.partial(_call, operation, candidates, kernel, wanted is Implementation.MOSAIC, divided)


def _parse(requested: str | None) -> Implementation | None:
    try:
        return None if requested is None else Implementation(requested)
    except ValueError:
        raise KVCacheValueError(got_expected("implementation", requested, list(Implementation))) from None


def _serving_kernel(
    candidates: Candidates, cache: KVCache | DenseKeys, divided: Partition | None
) -> tuple[_Kernel | None, str | None]:
    """Returns the kernel if it can serve the cache, or None and the reason."""
    if candidates.mosaic is None or candidates.results is None:
        return None, "it has no kernel; got 'mosaic', expected one of xla"
    if divided is None:
        target = placement.target_of(cache.kv)
        reason = candidates.why_not_mosaic(cache.spec, target) or placement.why_not(cache.kv)
    else:  # a share is always traced, so its device is known at lowering
        reason = candidates.why_not_mosaic(divided.share(cache.spec), None)
    return (None if reason else (candidates.mosaic, candidates.results)), reason


def _call(
    operation: str,
    candidates: Candidates,
    kernel: _Kernel | None,
    required: bool,
    divided: Partition | None,
    cache: KVCache | DenseKeys,
    *args: Any,
    **static: Any,
) -> Any:
    names = [None if name in candidates.differentiable else name for name in candidates.parameters]
    cache = without_scales(cache) if isinstance(cache, KVCache) else cache
    kv, *arrays = without_gradient(operation, names, (cache.kv, *args))
    cache = cache if kv is cache.kv else dataclasses.replace(cache, kv=kv)
    is_traced = isinstance(kv, jax.core.Tracer)
    if kernel is not None:  # a kernel called directly with traced arguments would itself be differentiated
        is_traced |= any(isinstance(array, jax.core.Tracer) for array in arrays)
    if divided is None and not is_traced:
        with tracing_for(placement.target_of(kv) or current()):
            return (candidates.xla if kernel is None else kernel[0])(cache, *arrays, **static)
    serve = candidates.xla if kernel is None else _placed(required, candidates.why_not_mosaic, *kernel, candidates.xla)
    run = _traced_once(operation, serve)
    if divided is not None and candidates.signature is not None:
        on_share = _OnShare(run, cache.num_layers)
        return run_on_shares(operation, on_share, candidates.signature, divided, cache.spec, kv, *arrays, **static)
    for array in jax.tree.leaves(arrays):
        if isinstance(array, jax.Array) and any(entry is not None for entry in jax.typeof(array).sharding.spec):
            instead = "a divided cache, KVCache.allocate(..., sharding=...): see docs/scaling.md, Explicit axes"
            if isinstance(cache, DenseKeys):
                instead = "a call inside jax.shard_map, for each device's heads"
            raise KVCacheValueError(
                f"{operation}: got {jax.typeof(array)}, divided over explicit axes, for a cache that is not divided;"
                f" expected a whole array, as jax.reshard(array, PartitionSpec()) returns, or {instead}"
            )
    return run(tuple(static.items()), cache, *arrays)


@dataclasses.dataclass(frozen=True)
class _OnShare:
    """Runs an implementation on one device's share of a cache. Hashable, as jit's static arguments must be."""

    run: Callable[..., Any]
    num_layers: int | None

    def __call__(self, kv: jax.Array, spec: AttentionSpec, *args: Any, **static: Any) -> Any:
        return self.run(tuple(static.items()), KVCache(kv, spec, num_layers=self.num_layers), *args)


@functools.cache
def _placed(
    required: bool,
    why_not: Callable[[AttentionSpec, Target | None], str | None],
    mosaic: Callable[..., Any],
    results: Callable[..., Any],
    xla: Callable[..., Any],
) -> Callable[..., Any]:
    """Returns a function that picks the kernel or XLA at lowering; the same one for equal arguments."""

    def serve(cache: KVCache, *args: Any, **static: Any) -> Any:
        refuses = functools.partial(why_not, cache.spec)
        return placement.run(required, refuses, mosaic, xla, results, cache, *args, **static)

    return serve


@functools.cache
def _traced_once(operation: str, serve: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `serve` jitted, so that equal calls, as of a model's layers, trace and lower once."""

    def run(static: tuple[tuple[str, Any], ...], cache: KVCache, *args: Any) -> Any:
        return serve(cache, *args, **dict(static))

    run.__name__ = operation  # the name that profilers show
    return jax.jit(run, static_argnums=0)


def without_gradient(operation: str, names: Sequence[str | None], arrays: Sequence[Any]) -> list[Any]:
    """Returns the arrays; those with a name raise on differentiation.

    A symbolically zero tangent, as of a cache that is carried through a differentiated function, does not raise.
    """
    named = {
        i: name
        for i, (name, array) in enumerate(zip(names, arrays, strict=True))
        if name is not None and isinstance(array, jax.core.Tracer) and jnp.issubdtype(array.dtype, jnp.inexact)
    }
    result = list(arrays)
    if named:
        kept = _without_gradient(operation, tuple(named.values()), [arrays[i] for i in named])
        for i, array in zip(named, kept, strict=True):
            result[i] = array
    return result


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _without_gradient(operation: str, names: tuple[str, ...], arrays: list[Any]) -> list[Any]:
    return arrays


def _refuse_gradient(operation: str, names: tuple[str, ...], primals: Any, tangents: Any) -> Any:
    [arrays], [dots] = primals, tangents
    for name, dot in zip(names, dots, strict=True):
        if not isinstance(dot, SymbolicZero):
            raise KVCacheTypeError(
                f"{operation}: cannot differentiate with respect to {name}; training through a cache is not supported."
                f" Pass jax.lax.stop_gradient({name}); to train, attend over dense keys and values"
            )
    return arrays, dots


_without_gradient.defjvp(_refuse_gradient, symbolic_zeros=True)
