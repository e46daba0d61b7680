"""The one dispatcher: which implementation of an operation serves a call."""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.sharding import NamedSharding

from kvjax.cache import KVCache, without_scales
from kvjax.errors import KVCacheTypeError, KVCacheValueError, UnsupportedError, got_expected
from kvjax.kernels import placement
from kvjax.partition import Signature, partition_of, run_on_shares
from kvjax.spec import AttentionSpec


class Implementation(enum.StrEnum):
    """`MOSAIC` is Pallas Mosaic GPU (sm_90 and later), `XLA` runs anywhere."""

    MOSAIC = "mosaic"
    XLA = "xla"


@dataclasses.dataclass(frozen=True)
class Candidates:
    """An operation's implementations, which take the same arguments, the cache first.

    `why_not_mosaic` says of a cache why the kernel cannot serve it, `None` where it can. `results` goes with a kernel:
    called as they are, it gives the shapes and dtypes that they return, as arrays or `jax.ShapeDtypeStruct`s.
    `differentiable` names the parameters of `xla` with respect to which its gradients are right.
    `signature` says what of the other arguments and of the results belongs to a device's share of a cache: a caller of
    `choose` that gives it calls an implementation with arrays, and whatever else there is by name.
    """

    xla: Callable[..., Any]
    mosaic: Callable[..., Any] | None = None
    results: Callable[..., Any] | None = None
    why_not_mosaic: Callable[[KVCache], str | None] = lambda cache: None
    signature: Signature | None = None
    differentiable: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True)
class _OnAShare:
    """An operation on one device's share of a cache; equal to another of the same operation, as jit wants it."""

    operation: str
    wanted: Implementation | None
    candidates: Candidates
    num_layers: int | None

    def __call__(self, kv: jax.Array, spec: AttentionSpec, *args: Any, **static: Any) -> Any:
        cache = KVCache(kv, spec, num_layers=self.num_layers)
        serve = _choose(self.operation, self.wanted, self.candidates, cache)
        return serve(cache, *args, **static)


def choose(operation: str, requested: str | None, candidates: Candidates, cache: KVCache) -> Callable[..., Any]:
    """The implementation asked for, or for `None` the kernel where it can serve, else XLA.

    A cache that is an array says where it is; one that is traced shows on lowering, and then an implementation that was
    asked for and cannot serve raises. Of a cache that is divided among devices, as `as_seen_here` gives it, each device
    runs the implementation on its share.

    Traced arguments that are not `differentiable` have no gradient: what is returned refuses one, for implementations
    read bits, through which JAX has a gradient of 0.

    Raises:
      KVCacheValueError: no such implementation.
      UnsupportedError: the one asked for cannot serve this call; with the reason.
    """
    wanted = _as_wanted(requested)
    serve = _choose(operation, wanted, candidates, cache)
    return functools.partial(_call_without_gradient, operation, wanted, candidates, serve)


def _as_wanted(requested: str | None) -> Implementation | None:
    try:
        return None if requested is None else Implementation(requested)
    except ValueError:
        raise KVCacheValueError(got_expected("implementation", requested, list(Implementation))) from None


def _choose(
    operation: str, wanted: Implementation | None, candidates: Candidates, cache: KVCache
) -> Callable[..., Any]:
    if cache.sharding is not None and candidates.signature is not None:
        on_a_share = _OnAShare(operation, wanted, candidates, cache.num_layers)
        return functools.partial(_run_on_shares, on_a_share, candidates.signature)
    serve = _choose_here(operation, wanted, candidates, cache)
    if not isinstance(cache.kv, jax.core.Tracer):
        return serve
    return functools.partial(_call, operation, _traced_once(operation, serve))


def _call_without_gradient(
    operation: str,
    wanted: Implementation | None,
    candidates: Candidates,
    serve: Callable[..., Any],
    cache: KVCache,
    *args: Any,
    **static: Any,
) -> Any:
    mosaic, xla, results = candidates.mosaic, candidates.xla, candidates.results
    names = [None if name in candidates.differentiable else name for name in _parameters(xla)]
    cache = without_scales(cache)
    kv, *arrays = without_gradient(operation, names, (cache.kv, *args))
    cache = cache if kv is cache.kv else dataclasses.replace(cache, kv=kv)
    if serve is mosaic and results is not None and any(isinstance(array, jax.core.Tracer) for array in arrays):
        # Of a cache that is an array: a kernel that is called as it is would be differentiated itself.
        in_a_program = _where_it_can(wanted is not None, mosaic, xla, results)
        serve = functools.partial(_call, operation, _traced_once(operation, in_a_program))
    return serve(cache, *arrays, **static)


@functools.cache
def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)


def without_gradient(operation: str, names: Sequence[str | None], arrays: Sequence[Any]) -> list[Any]:
    """The arrays, of which those that have a name raise where they are differentiated; names past the last are unused.

    A tangent that is known to be 0, as of a cache that is carried past what is differentiated, is none.
    """
    named = {
        i: name
        for i, (name, array) in enumerate(zip(names, arrays, strict=False))
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
    [arrays], [moves] = primals, tangents
    for name, move in zip(names, moves, strict=True):
        if not isinstance(move, SymbolicZero):
            raise KVCacheTypeError(
                f"{operation}: cannot differentiate with respect to {name}; training through a cache is not supported."
                f" Pass jax.lax.stop_gradient({name}); to train, attend over dense keys and values"
            )
    return arrays, moves


_without_gradient.defjvp(_refuse_gradient, symbolic_zeros=True)


def _choose_here(
    operation: str, wanted: Implementation | None, candidates: Candidates, cache: KVCache
) -> Callable[..., Any]:
    """What `choose` returns for a cache that is one device's; of equal arguments the same function."""
    if wanted is Implementation.XLA:
        return candidates.xla
    mosaic, results = candidates.mosaic, candidates.results
    if mosaic is None or results is None:
        reason: str | None = "it has no kernel; got 'mosaic', expected one of xla"
    else:
        reason = candidates.why_not_mosaic(cache) or placement.why_not(cache.kv)
    if reason is None and mosaic is not None and results is not None:
        if not isinstance(cache.kv, jax.core.Tracer):
            return mosaic
        return _where_it_can(wanted is not None, mosaic, candidates.xla, results)
    if wanted is not None:
        raise UnsupportedError(f"{operation}: implementation 'mosaic' cannot serve this call: {reason}")
    return candidates.xla


@functools.cache
def _where_it_can(
    required: bool, mosaic: Callable[..., Any], xla: Callable[..., Any], results: Callable[..., Any]
) -> Callable[..., Any]:
    return functools.partial(placement.run, required, mosaic, xla, results)


@functools.cache
def _traced_once(operation: str, serve: Callable[..., Any]) -> Callable[..., Any]:
    """`serve` as a function that programs call: calls that are alike, as of a model's layers, trace and lower one."""

    def run(static: tuple[tuple[str, Any], ...], cache: KVCache, *args: Any) -> Any:
        return serve(cache, *args, **dict(static))

    run.__name__ = operation  # as profilers show it
    return jax.jit(run, static_argnums=0)


def _call(operation: str, run: Callable[..., Any], cache: KVCache, *args: Any, **static: Any) -> Any:
    for array in jax.tree.leaves(args):
        if isinstance(array, jax.Array) and any(entry is not None for entry in jax.typeof(array).sharding.spec):
            raise KVCacheValueError(
                f"{operation}: got {jax.typeof(array)}, divided over explicit axes, for a cache that is not divided;"
                " expected a whole array, as jax.reshard(array, PartitionSpec()) returns, or a divided cache,"
                " KVCache.allocate(..., sharding=...): see docs/scaling.md, Explicit axes"
            )
    return run(tuple(static.items()), cache, *args)


def _run_on_shares(run: _OnAShare, signature: Signature, cache: KVCache, *args: Any, **static: Any) -> Any:
    divided = partition_of(cache.spec, cast(NamedSharding, cache.sharding), cache.num_layers)
    return run_on_shares(run.operation, run, signature, divided, cache.spec, cache.kv, *args, **static)
