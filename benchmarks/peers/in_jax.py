"""Writes in JAX: kvjax, and a plain scatter."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Concatenate

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks import output, workload
from benchmarks.peers.inputs import WriteInputs, check_dense, dense_poisoned
from benchmarks.peers.peer import Peer, Run, by_turns
from benchmarks.workload import WriteJob
from kvjax import AttentionSpec, CacheLayout, KVCacheDType, KVQuantMode


def kvjax_run(inputs: WriteInputs, *, implementation: str | None, **options: bool) -> Run:
    write = workload.Write(inputs.poisoned(), inputs.batches, implementation, **options)
    facts = {"temporary_bytes": workload.temporary_bytes(write.compiled)}
    return Run(write, lambda _: write.check(inputs.expected), facts=facts)


def why_no_kernel() -> str | None:
    """Returns why the requested implementation cannot run here, or `None`."""
    if output.IMPLEMENTATION.value == "mosaic" and not workload.is_gpu():
        return f"--implementation=mosaic: got {jax.devices()[0].platform}, expected an NVIDIA GPU (sm_90 or later)"
    return None


def own_peers[Job, Inputs](
    _: type[Job], run: Callable[Concatenate[Inputs, ...], Run]
) -> tuple[Peer[Job, Inputs], Peer[Job, Inputs]]:
    """Returns kvjax with the implementation that the flag selects, and kvjax in XLA for GPUs."""

    def prepare(inputs: Inputs) -> Run:
        return run(inputs, implementation=output.IMPLEMENTATION.value)

    in_xla = Peer[Job, Inputs](
        "kvjax xla",
        functools.partial(run, implementation="xla"),
        why_missing=lambda: None if workload.is_gpu() else "is what kvjax runs here",
        own=True,
    )
    return Peer("kvjax", prepare, why_missing=why_no_kernel, own=True), in_xla


KVJAX, KVJAX_IN_XLA = own_peers(WriteJob, kvjax_run)
KVJAX_ANY_SLOTS = dataclasses.replace(
    own_peers(WriteJob, functools.partial(kvjax_run, unique_slots=False))[0], name="kvjax, any slots"
)
NOT_DONATED = Peer[WriteJob, WriteInputs](
    "kvjax, cache not donated",
    functools.partial(kvjax_run, implementation=None, donated=False),
    serves=lambda job: job.dtype is KVCacheDType.BFLOAT16,  # copying the cache dominates the time for any dtype
    own=True,
)


def _scatter(
    caches: list[jax.Array], batch: workload.Batch, scales: dict[str, jax.Array], spec: AttentionSpec
) -> list[jax.Array]:
    # JAX counts negative indices from the end, so map padding past the end.
    slots = jnp.where(batch.slot_mapping < 0, caches[0].shape[0], batch.slot_mapping)
    stored = [_stored(batch.key, scales["k_scale"], spec), _stored(batch.value, scales["v_scale"], spec)]
    return [cache.at[slots].set(rows, mode="drop") for cache, rows in zip(caches, stored, strict=True)]


def _stored(x: jax.Array, scale: jax.Array, spec: AttentionSpec) -> jax.Array:
    info = spec.dtype.info
    if spec.quant_mode is KVQuantMode.NONE:
        return x.astype(info.storage_dtype)
    codes = jnp.clip(x.astype(jnp.float32) / scale, -info.max, info.max).astype(info.storage_dtype)
    return lax.bitcast_convert_type(codes, spec.array_dtype)  # a scatter of 8-bit floats is slow on CPU


def scatter_run(inputs: WriteInputs) -> Run:
    caches = dense_poisoned(inputs)
    scatter = jax.jit(functools.partial(_scatter, spec=inputs.job.spec), donate_argnums=0)
    compiled = scatter.lower(caches, inputs.batches[0], workload.scales()).compile()

    def write(*batch: jax.Array) -> list[jax.Array]:
        caches[:] = compiled(caches, workload.Batch(*batch), workload.scales())
        return caches

    facts = {"temporary_bytes": workload.temporary_bytes(compiled)}
    return Run(by_turns(write, inputs.batches), lambda _: check_dense(caches, inputs), facts=facts)


XLA_SCATTER = Peer[WriteJob, WriteInputs](
    "XLA scatter", scatter_run, serves=lambda job: not job.spec.stores_scales and job.layout is CacheLayout.NHD
)
