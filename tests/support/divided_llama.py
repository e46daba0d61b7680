"""A model on two devices, each with a share of its heads, gives the logits and tokens of the same model on one."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import serving
from examples import llama
from kvjax import FullAttentionSpec, KVCache, StepMetadata

NUMBER = 2


def by_device(whole: llama.Params, config: llama.ModelConfig) -> llama.Params:
    """Parameters whose rows are in the order of the devices that have them, as `parameter_axes` wants them."""
    heads, kv_heads, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    parts = {"qkv": np.cumsum([heads, kv_heads]) * size, "gate_up": [config.intermediate_size]}

    def ordered(path: Any, x: jax.Array) -> jax.Array:
        if path[-1].key not in parts:
            return x
        shares = [np.split(np.asarray(part), NUMBER) for part in np.split(np.asarray(x), parts[path[-1].key])]
        return jnp.concatenate([share[device] for device in range(NUMBER) for share in shares])

    return jax.tree.map_with_path(ordered, whole)


def main() -> None:
    config = llama.ModelConfig(64, 32, 48, 2, 8, 4, 16)
    whole = llama.random_params(config, jax.random.key(0), jnp.float32)
    spec = FullAttentionSpec(8, 4, 16, dtype="fp8")
    tokens, lengths = np.arange(5, dtype=np.int32), np.int32([2, 3])
    step = StepMetadata(np.int32([[0], [2]]), lengths, np.int32([0, 2, 5]), np.int32([0, 1, 16, 17, 18]))

    every_row = StepMetadata(step.block_table, step.seq_lens, np.arange(6, dtype=np.int32), step.slot_mapping)

    def logits(params: Any, tokens: Any, step: Any, caches: Any, **part: Any) -> Any:
        hidden, caches = llama.forward(params, tokens=tokens, step=step, caches=caches, **part)
        axis = part["axis"]
        # If both devices have the same rows, ties go to the first device.
        half = params["unembedding"][: config.vocab_size // NUMBER]
        same = jax.lax.all_gather(half, axis)[0] if axis else jnp.tile(half, (NUMBER, 1))
        ties = {**params, "unembedding": same}
        none = jnp.zeros(len(tokens), jnp.int32)
        tied = {name: each for name, each in params.items() if name != "unembedding"}
        following = [llama.next_tokens(each, hidden, every_row, none, axis) for each in (params, ties, tied)]
        return (llama.logits(params, hidden, axis), *following), caches

    caches = tuple(KVCache.allocate(spec, 4) for _ in range(2))
    expected, _ = jax.jit(functools.partial(logits, config=config, axis=None))(whole, tokens, step, caches)
    caches = tuple(KVCache.allocate(spec, 4, sharding=serving.by_heads(NUMBER)) for _ in range(2))
    part = functools.partial(logits, **serving.own_part(config, NUMBER))
    run = serving.divided(part, config, caches, jax.P(), NUMBER)
    placed = jax.tree.map(
        lambda x, spec: jax.device_put(x, serving.placed(NUMBER, *spec)),
        by_device(whole, config),
        llama.parameter_axes(config, serving.AXIS),
    )
    got, written = jax.jit(run)(placed, tokens, step, caches)
    for found, wanted in zip(got[1:], expected[1:], strict=True):
        np.testing.assert_array_equal(found, wanted)
    assert {int(token) * NUMBER // config.vocab_size for token in got[1]} == {*range(NUMBER)}  # of both devices
    got, expected = got[0], expected[0]
    np.testing.assert_allclose(np.asarray(got), np.asarray(expected), atol=1e-5)
    assert np.abs(np.asarray(expected)).max() > 0.1
    assert all(len(cache.kv.sharding.device_set) == NUMBER for cache in written)


if __name__ == "__main__":
    main()
