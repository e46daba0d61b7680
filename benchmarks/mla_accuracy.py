"""Errors of attention over latents (MLA) in each dtype, on random latents like those of a model.

    JAX_PLATFORMS=cpu python -m benchmarks.mla_accuracy

Latents follow Student's t distribution of 5 degrees of freedom, with a magnitude of each element (log-normal) and one
of each layer, up to a hundred apart. Four of the 64 elements of rope keys are a hundred times as large as the others.
Logits have a standard deviation of 2 by latents and of 1 by rope keys. The error is the root mean square of the
difference from attention over float32 latents, over that of these results, in percent, of all samples together.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from benchmarks.latents import MLA_BLOCK_SIZE, RANK, ROPE, spec_of
from kvjax.table import markdown_table

TOKENS, ROWS, HEADS, SAMPLES = 1024, 16, 16, 4
MAGNITUDES = (0.003, 0.03, 0.3)


def sample(magnitude: float, seed: int = 0) -> tuple[np.ndarray, ...]:
    """Returns `q_nope`, `q_pe`, `kv_c` and `k_pe` of a layer, float32; with a factor of 1, logits are as above."""
    rng = np.random.default_rng(seed)
    kv_c = rng.standard_t(5, (TOKENS, RANK)) * rng.lognormal(0, 0.5, RANK) * magnitude
    k_pe = rng.standard_normal((TOKENS, ROPE)) * np.where(np.arange(ROPE) % 16 == 5, 100.0, 1.0)
    q_nope, q_pe = (rng.standard_normal((ROWS, HEADS, size)) for size in (RANK, ROPE))
    q_nope *= 2 / np.std(q_nope.reshape(-1, RANK) @ kv_c.T)
    q_pe *= 1 / np.std(q_pe.reshape(-1, ROPE) @ k_pe.T)
    return tuple(x.astype(np.float32) for x in (q_nope, q_pe, kv_c, k_pe))


@functools.partial(jax.jit, static_argnames="spec")
def _attended(q_nope: Any, q_pe: Any, kv_c: Any, k_pe: Any, scale: Any, *, spec: kvjax.MLAAttentionSpec) -> jax.Array:
    num_blocks = TOKENS // MLA_BLOCK_SIZE
    cache = kvjax.concat_and_cache_mla(
        kv_c, k_pe, kvjax.KVCache.allocate(spec, num_blocks), jnp.arange(TOKENS), scale=scale
    )
    table, lens = jnp.tile(jnp.arange(num_blocks)[None], (ROWS, 1)), jnp.full(ROWS, TOKENS)
    return kvjax.mla_paged_attention(q_nope, q_pe, cache, table, lens, sm_scale=1.0, scale=scale)


def error(dtype: kvjax.KVCacheDType, magnitude: float, *, calibrated: bool = True) -> float:
    """Returns the relative error of a dtype, with the scale of `calibrate` or with 1."""
    spec = spec_of(dtype)
    plain = dataclasses.replace(spec, dtype=kvjax.KVCacheDType.FLOAT32)
    samples = [sample(magnitude, seed) for seed in range(SAMPLES)]
    [scales] = kvjax.calibrate([spec], [[arrays[2:]] for arrays in samples])
    scale = scales.k_scale if calibrated else np.float32(1)
    exact = np.stack([_attended(*arrays, np.float32(1), spec=plain) for arrays in samples])
    stored = np.stack([_attended(*arrays, scale, spec=spec) for arrays in samples])
    return float(np.linalg.norm(stored - exact) / np.linalg.norm(exact))


def table() -> str:
    """Returns the table of docs/mla.md."""
    rows = []
    for dtype in kvjax.MLA_KV_CACHE_DTYPES[1:]:
        for calibrated in (True, False) if dtype.takes_scale else (True,):
            name = f"{dtype.value}, scale 1" if not calibrated else dtype.value
            spec = spec_of(dtype)
            errors = (f"{100 * error(dtype, magnitude, calibrated=calibrated):.2g}%" for magnitude in MAGNITUDES)
            rows.append((name, f"{spec.bytes_per_token:,}", *errors))
    header = ("dtype", "bytes/token", *(f"magnitude {magnitude:g}" for magnitude in MAGNITUDES))
    return markdown_table(header, rows, left=1)


if __name__ == "__main__":
    print(table())
