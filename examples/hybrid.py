"""Recurrent layers beside attention: states in slots of arrays, keys and values in pages, of one `kvjax.BlockPool`.

    python -m examples.hybrid

`examples.engine` serves the model: it tells a step each sequence's slot, and moves states to the host and back with the
blocks of a preempted request. `copied` makes the copies for sequences that were forked, of blocks and of states.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from examples.engine import Engine, swap_states

VOCABULARY, HIDDEN, HEADS, HEAD_SIZE = 61, 32, 2, 16
LAYERS = ("recurrent", "attention", "recurrent")
SPEC = kvjax.FullAttentionSpec(4, HEADS, HEAD_SIZE, dtype=kvjax.KVCacheDType.FLOAT32)

type Caches = list[Any]
"""One of each layer: a `KVCache`, or states `[num_states, HEADS, HEAD_SIZE, HEAD_SIZE]`, float32."""


def random_weights(key: jax.Array) -> dict[str, Any]:
    sizes = {"qkv": (HIDDEN, 3 * HEADS * HEAD_SIZE), "decay": (HIDDEN, HEADS), "output": (HEADS * HEAD_SIZE, HIDDEN)}
    keys = iter(jax.random.split(key, 1 + len(LAYERS) * len(sizes)))
    layers = [{name: jax.random.normal(next(keys), size) / 6 for name, size in sizes.items()} for _ in LAYERS]
    return {"embedding": jax.random.normal(next(keys), (VOCABULARY, HIDDEN)), "layers": layers}


def recur(rows: tuple[jax.Array, ...], states: jax.Array, state_slots: jax.Array, step: kvjax.StepMetadata) -> Any:
    """Gated linear attention of a step: a token's state is `decay * state + key value^T`, its result `query state`.

    `rows` are queries, keys and values `[num_tokens, HEADS, HEAD_SIZE]` and decays `[num_tokens, HEADS]`. Goes through
    the tokens one by one, which is slow for prompts; returns the results and the states.
    """
    sequence, position = step.token_rows()
    slots = jnp.where(position < 0, len(states), state_slots[sequence])  # padding: past the end, and not written

    def advance(states: jax.Array, token: Any) -> Any:
        slot, is_first, query, key, value, decay = token
        state = jnp.where(is_first, 0, states[slot])  # a slot holds what its last sequence left
        state = decay[:, None, None] * state + key[:, :, None] * value[:, None, :]
        return states.at[slot].set(state, mode="drop"), jnp.einsum("hk,hkv->hv", query, state)

    states, results = jax.lax.scan(advance, states, (slots, position == 0, *rows))
    return results, states


@functools.partial(jax.jit, static_argnames=("max_q_len", "max_prompts"), donate_argnames="caches")
def run(
    weights: Any,
    tokens: jax.Array,
    previous: jax.Array,
    step: kvjax.StepMetadata,
    caches: Caches,
    *,
    state_slots: jax.Array,
    **buckets: int | None,
) -> tuple[jax.Array, Caches]:
    """A step as `examples.engine` starts it: returns each sequence's next token, `[len(previous)]`, and the caches."""
    tokens, previous, state_slots = jnp.asarray(tokens), jnp.asarray(previous), jnp.asarray(state_slots)
    x = weights["embedding"][jnp.where(tokens < 0, previous[jnp.maximum(~tokens, 0)], tokens)]
    caches = list(caches)
    for number, (kind, layer) in enumerate(zip(LAYERS, weights["layers"], strict=True)):
        heads = (x @ layer["qkv"]).reshape(len(x), 3, HEADS, HEAD_SIZE)
        query, key, value = heads[:, 0], heads[:, 1], heads[:, 2]
        if kind == "attention":
            found, caches[number] = kvjax.attend(query, key, value, caches[number], step, unique_slots=True, **buckets)
        else:
            rows = query, key, value, jax.nn.sigmoid(2 + x @ layer["decay"])
            found, caches[number] = recur(rows, caches[number], state_slots, step)
        x += found.reshape(len(x), -1) @ layer["output"]
    last = jnp.maximum(step.cu_q_lens[1:] - 1, 0)
    following = jnp.argmax(x[last] @ weights["embedding"].T, axis=-1).astype(jnp.int32)
    return previous.at[: len(following)].set(following), caches


def allocate(num_blocks: int, num_states: int) -> Caches:
    """Returns empty caches of all layers, on the first device."""
    device = jax.devices()[0]
    shape = (num_states, HEADS, HEAD_SIZE, HEAD_SIZE)

    def of(kind: str) -> Any:
        if kind == "attention":
            return kvjax.KVCache.allocate(SPEC, num_blocks, sharding=device)
        return jnp.zeros(shape, device=device)

    return [of(kind) for kind in LAYERS]


def copied(caches: Caches, pairs: np.ndarray, swaps: kvjax.Swaps) -> Caches:
    """Makes the copies for forks that grow: of blocks, `pairs` of `BlockPool.append`, and of states."""

    def copy(x: Any) -> Any:
        is_pages = isinstance(x, kvjax.KVCache)
        return kvjax.copy_blocks(x, pairs, donate=True) if is_pages else swap_states(x, x, swaps.state_copies)

    return [copy(x) for x in caches]


def main() -> None:
    weights = jax.device_put(random_weights(jax.random.key(0)), jax.devices()[0])
    prompts = [np.random.default_rng(seed).integers(0, VOCABULARY, 9).tolist() for seed in range(4)]
    pool = kvjax.BlockPool(14, SPEC.block_size, num_states=4, num_host_blocks=16, num_host_states=4)
    engine = Engine(
        functools.partial(run, weights),
        allocate(14, 4),
        pool,
        num_seqs=[4],
        max_blocks=8,
        chunk=8,
        sharding=jax.devices()[0],
    )
    requests = [engine.submit(prompt, 16) for prompt in prompts]
    while not engine.is_idle:
        engine.step()
    print(f"{engine.num_preempted} times a request was moved to the host, {engine.num_recomputed} computed again")
    for request in requests:
        print(request.generated)


if __name__ == "__main__":
    main()
