"""Trains the byte-level model of `kvjax demo` on the standard library's sources.

    python examples/train_demo_model.py --out kvjax/demo/weights.safetensors

Intended for a GPU. Needs the extra `train` (`pip install 'kvjax[train]'`). The seed fixes the initial weights and every
batch; the last digits of the result still depend on the device and the JAX version.
"""

from __future__ import annotations

import argparse
import functools
import platform
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from kvjax.demo import text, weights
from kvjax.demo.model import Params, TransformerConfig, bits_per_token, dense_logits, init_params

STEPS_PER_CALL = 50
"""Steps per compiled call, to amortize dispatch."""


def sequence_bits(params: Params, tokens: jax.Array, config: TransformerConfig) -> jax.Array:
    """Returns the mean bits per byte of `tokens [batch, length]`, over all bytes but the first of each sequence."""
    logits = jax.vmap(functools.partial(dense_logits, params, config))(tokens[:, :-1])
    return jnp.mean(jax.vmap(bits_per_token)(logits, tokens[:, 1:]))


def make_optimizer(steps: int, learning_rate: float) -> optax.GradientTransformation:
    """Returns AdamW with warm-up and cosine decay, and weight decay for matrices only."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, learning_rate, max(steps // 20, 1), steps, learning_rate / 20)
    decayed = functools.partial(jax.tree.map, lambda p: p.ndim > 1)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98, weight_decay=0.1, mask=decayed))


@functools.partial(jax.jit, static_argnames=("config", "optimizer", "batch", "length"), donate_argnums=(0, 1))
def train_steps(
    params: Params,
    opt_state: optax.OptState,
    data: jax.Array,
    keys: jax.Array,
    *,
    config: TransformerConfig,
    optimizer: optax.GradientTransformation,
    batch: int,
    length: int,
) -> tuple[Params, optax.OptState, jax.Array]:
    """Runs one step per key, on `batch` random windows of `data`; returns the new state and the mean loss."""

    def loss(params: Params, tokens: jax.Array) -> jax.Array:
        low = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
        return sequence_bits(low, tokens, config)

    def step(state: tuple[Params, optax.OptState], key: jax.Array) -> tuple[tuple[Params, optax.OptState], jax.Array]:
        params, opt_state = state
        starts = jax.random.randint(key, (batch, 1), 0, len(data) - length)
        value, grads = jax.value_and_grad(loss)(params, data[starts + jnp.arange(length + 1)])
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    (params, opt_state), losses = jax.lax.scan(step, (params, opt_state), keys)
    return params, opt_state, jnp.mean(losses)


def evaluate(params: Params, data: np.ndarray, config: TransformerConfig, *, length: int, windows: int) -> float:
    """Returns float32 bits per byte over up to `windows` evenly spaced windows of `length` + 1 bytes of `data`."""
    all_windows = data[: len(data) // (length + 1) * (length + 1)].reshape(-1, length + 1).astype(np.int32)
    chosen = all_windows[np.linspace(0, len(all_windows) - 1, min(windows, len(all_windows))).astype(int)]
    score = jax.jit(functools.partial(sequence_bits, config=config))
    return float(np.mean([score(params, window[None]) for window in chosen]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="weights file to write")
    parser.add_argument("--steps", type=int, default=2000, help=f"rounded up to whole calls of {STEPS_PER_CALL}")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=512, help="bytes per training sequence")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--eval-windows", type=int, default=512)
    args = parser.parse_args()

    root = text.standard_library()
    train_files, held_out_files = text.split(text.source_files(root))
    train, held_out = text.read(root, train_files), text.read(root, held_out_files)
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, optax {optax.__version__}")
    print(f"training part: {len(train_files)} files, {train.size:,} bytes")
    print(f"held out:      {len(held_out_files)} files, {held_out.size:,} bytes")

    config = TransformerConfig()
    init_key, data_key = jax.random.split(jax.random.key(args.seed))
    params = init_params(config, init_key)
    print(f"{sum(p.size for p in params.values()):,} parameters")
    optimizer = make_optimizer(args.steps, args.learning_rate)
    opt_state = optimizer.init(params)
    data = jnp.asarray(train, jnp.int32)
    calls = -(-args.steps // STEPS_PER_CALL)
    keys = jax.random.split(data_key, (calls, STEPS_PER_CALL))
    start = reported = time.monotonic()
    for call in range(calls):
        params, opt_state, loss = train_steps(
            params,
            opt_state,
            data,
            keys[call],
            config=config,
            optimizer=optimizer,
            batch=args.batch,
            length=args.length,
        )
        loss = float(loss)
        if (now := time.monotonic()) - reported > 5 or call == calls - 1:
            reported = now
            step = (call + 1) * STEPS_PER_CALL
            print(f"step {step}/{calls * STEPS_PER_CALL}  {loss:.3f} bits/byte  {now - start:.0f} s", flush=True)

    shipped = {name: jnp.asarray(np.asarray(p, np.float16), jnp.float32) for name, p in params.items()}
    measure = functools.partial(evaluate, shipped, config=config, length=args.length, windows=args.eval_windows)
    result = {
        "held_out_bits_per_byte": measure(held_out),
        "training_bits_per_byte": measure(train),
        "unigram_held_out_bits_per_byte": text.unigram_bits_per_byte(train, held_out),
    }
    for name, value in result.items():
        print(f"{name}: {value:.3f}")
    weights.save(
        args.out,
        config,
        params,
        {
            "steps": str(calls * STEPS_PER_CALL),
            "batch": str(args.batch),
            "length": str(args.length),
            "learning_rate": str(args.learning_rate),
            "seed": str(args.seed),
            "python": platform.python_version(),
            "jax": jax.__version__,
            **{name: f"{value:.4f}" for name, value in result.items()},
        },
    )
    print(f"wrote {args.out}: {args.out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
