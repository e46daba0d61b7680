"""NVFP4 packing of keys and values, with or without a cache. `PEERS` lists the alternatives."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks import workload
from benchmarks.peers import in_torch
from benchmarks.peers.in_jax import KVJAX
from benchmarks.peers.inputs import WriteInputs
from benchmarks.peers.peer import Peer, Run, by_turns
from benchmarks.workload import WriteJob
from kvjax import nvfp4_split_views, quant


def check_packed(packed: Sequence[Sequence[jax.Array]], inputs: WriteInputs) -> None:
    """Compares the data and scales of keys and values with the cache after the first write.

    Slots are contiguous from 0, so the tokens are the first rows of the cache.
    """
    expected = zip(*nvfp4_split_views(inputs.expected), strict=True)
    for got_half, expected_half in zip(packed, expected, strict=True):
        for got, rows in zip(got_half, expected_half, strict=True):
            as_bytes = lax.bitcast_convert_type(rows, jnp.uint8)
            workload.check_same_bits(got, as_bytes.reshape(-1, *rows.shape[2:])[: inputs.job.num_tokens])


@jax.jit
def _pack(key: jax.Array, value: jax.Array, k_scale: jax.Array, v_scale: jax.Array) -> Any:
    return quant.encode_nvfp4(key, k_scale), quant.encode_nvfp4(value, v_scale)


def kvjax_run(inputs: WriteInputs) -> Run:
    batches = [(batch.key, batch.value, *workload.scales().values()) for batch in inputs.batches]
    compiled = _pack.lower(*batches[0]).compile()

    def check(packed: Any) -> None:
        check_packed([[data, lax.bitcast_convert_type(scales, jnp.uint8)] for data, scales in packed], inputs)

    return Run(by_turns(compiled, batches), check, facts={"temporary_bytes": workload.temporary_bytes(compiled)})


def torch_pack(x: Any, scale: float) -> tuple[Any, Any]:
    """Returns the NVFP4 data and block scales of a tensor, in eager torch."""
    import torch

    blocks = x.float().unflatten(-1, (-1, 16))
    largest = blocks.abs().amax(-1)
    block_scales = (largest / np.float32(quant.E2M1_MAX * np.float32(scale)).item()).clamp_(max=quant.E4M3_MAX)
    block_scales = block_scales.to(torch.float8_e4m3fn)
    decoded = block_scales.float() * scale
    inverse = torch.where(decoded == 0, 0.0, 1 / decoded)
    scaled = blocks * inverse[..., None]
    magnitude, codes = scaled.abs(), torch.zeros_like(scaled, dtype=torch.uint8)
    for upper in range(1, len(quant.E2M1_VALUES)):  # midpoints round to even
        midpoint = (quant.E2M1_VALUES[upper - 1] + quant.E2M1_VALUES[upper]) / 2
        codes += magnitude > midpoint if upper % 2 else magnitude >= midpoint
    codes = (codes | torch.signbit(scaled).to(torch.uint8) << 3).flatten(-2)
    return codes[..., 0::2] | codes[..., 1::2] << 4, block_scales.view(torch.uint8)


def torch_run(inputs: WriteInputs) -> Run:
    scales = in_torch.float_scales()

    def pack(key: Any, value: Any, _: Any) -> Any:
        return [torch_pack(x, scale) for x, scale in zip((key, value), scales, strict=True)]

    def check(packed: Any) -> None:
        in_torch.wait()
        check_packed([[jax.dlpack.from_dlpack(each.contiguous()) for each in half] for half in packed], inputs)

    return Run(by_turns(pack, in_torch.borrowed(inputs.batches)), check, in_torch.wait)


PEERS = (
    Peer[WriteJob, WriteInputs]("kvjax", kvjax_run, own=True),
    dataclasses.replace(KVJAX, name="kvjax write"),
    Peer[WriteJob, WriteInputs]("torch eager", torch_run, why_missing=in_torch.why_missing),
)
