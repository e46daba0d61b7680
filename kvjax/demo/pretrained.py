"""A pretrained Llama model over paged caches, teacher-forced: what each KV cache dtype does to its predictions.

Every layer is one call of a compiled function, so a dtype compiles one layer, and layers may have different ones.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import kvjax

if TYPE_CHECKING:  # needs the extra `smollm2`
    from kvjax.demo.gguf_file import GGUFModel

BLOCK_SIZE = 16

type Layer = Mapping[str, jax.Array]

_PARTS = {
    "attention_norm": "input_layernorm",
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "output": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


class Attended(NamedTuple):
    """A layer's inputs of attention, `[tokens, heads, head_size]`: query and key after RoPE."""

    query: jax.Array
    key: jax.Array
    value: jax.Array

    def rotated(self, is_rotated: bool) -> Attended:
        """Returns these, with query and key rotated if `is_rotated`."""
        if not is_rotated:
            return self
        return self._replace(query=kvjax.hadamard_transform(self.query), key=kvjax.hadamard_transform(self.key))


@dataclasses.dataclass(frozen=True)
class Pretrained:
    """A model in float32. Matrices are `[in, out]`.

    Attributes:
      kv_config: its caches' configuration, for `kvjax.resolve_layer_specs`.
      rms_norm_eps: of every norm.
      frequencies: of RoPE, float64 `[head_size / 2]`.
    """

    kv_config: kvjax.ModelKVConfig
    rms_norm_eps: float
    frequencies: np.ndarray
    embedding: jax.Array
    norm: jax.Array
    unembedding: jax.Array
    layers: Sequence[Layer]

    @classmethod
    def from_gguf(cls, model: GGUFModel) -> Pretrained:
        """Loads the tensors of a file."""

        def load(name: str) -> jax.Array:
            return jnp.asarray(model.get_tensor(f"{name}.weight").T)

        config = model.config
        head_size = config["head_dim"]
        embedding = load("model.embed_tokens").T
        return cls(
            kv_config=kvjax.ModelKVConfig.from_hf_config(config),
            rms_norm_eps=config["rms_norm_eps"],
            frequencies=config["rope_theta"] ** (-np.arange(0, head_size, 2) / head_size),
            embedding=embedding,
            norm=load("model.norm"),
            unembedding=embedding.T if config["tie_word_embeddings"] else load("lm_head"),
            layers=[
                {part: load(f"model.layers.{number}.{name}") for part, name in _PARTS.items()}
                for number in range(config["num_hidden_layers"])
            ],
        )

    def allocate(
        self, dtype: Any, num_blocks: int, samples: Sequence[Sequence[Attended]], key_rotation: Collection[int] = ()
    ) -> list[kvjax.KVCache]:
        """Returns a cache for each layer, with scales by the largest magnitudes of `samples` where layers take any.

        `dtype` is what `kvjax.resolve_layer_specs` takes: a dtype, or dtypes of layers. `key_rotation` are layers that
        will store rotated keys; samples are not rotated.
        """
        specs = kvjax.resolve_layer_specs(self.kv_config, dtype, block_size=BLOCK_SIZE)
        scales = [kvjax.KVScales(np.float32(1), np.float32(1))] * len(specs)
        if any(spec.dtype.takes_scale for spec in specs):
            batches = [
                [layer.rotated(number in key_rotation)[1:] for number, layer in enumerate(sample)] for sample in samples
            ]
            scales = [*kvjax.calibrate(specs, batches)]
        return [
            kvjax.KVCache.allocate(spec, num_blocks, **of_layer._asdict())
            for spec, of_layer in zip(specs, scales, strict=True)
        ]

    def run(
        self,
        tokens: np.ndarray,
        step: kvjax.StepMetadata,
        caches: list[kvjax.KVCache],
        *,
        first_position: int = 0,
        exact_window: int | None = None,
        key_rotation: Collection[int] = (),
    ) -> tuple[jax.Array, list[Attended]]:
        """Runs a step over `caches`, which it donates and replaces by those written.

        Args:
          tokens: int32 `[tokens]`.
          step: their sequences.
          caches: one for each layer.
          first_position: RoPE's position of each sequence's first token.
          exact_window: tokens that each query of a quantized layer reads in bfloat16, its own included, in a step of
            whole sequences.
          key_rotation: layers that attend with rotated queries over rotated keys.

        Returns:
          Logits `[tokens, vocab_size]`, float32, and what each layer attended with, before a rotation.
        """
        x = self.embedding[jnp.asarray(tokens)]
        angles = (step.token_rows()[1] + first_position)[:, None, None] * jnp.asarray(self.frequencies, jnp.float32)
        attended = []
        if exact_window is not None:
            step = dataclasses.replace(step, window_rows=np.arange(len(step.seq_lens), dtype=np.int32))
        for number, layer in enumerate(self.layers):
            x, caches[number], inputs = _run_layer(
                x,
                caches[number],
                layer,
                step,
                angles,
                options=_Options(self.rms_norm_eps, exact_window, number in key_rotation),
            )
            attended.append(inputs)
        return _logits(x, self.norm, self.unembedding, eps=self.rms_norm_eps), attended


def step_of(lengths: Sequence[int]) -> tuple[kvjax.StepMetadata, int]:
    """Returns a step of whole sequences of `lengths`, and the number of blocks that it needs."""
    num_blocks = sum(-(-length // BLOCK_SIZE) for length in lengths)
    pool = kvjax.BlockPool(num_blocks, BLOCK_SIZE)
    sequences = [pool.sequence() for _ in lengths]
    pool.append(sequences, lengths)
    return kvjax.StepMetadata.from_sequences(sequences, lengths), num_blocks


class _Options(NamedTuple):
    """What a layer is compiled for, as in `Pretrained.run`."""

    eps: float
    exact_window: int | None
    rotates: bool


@functools.partial(jax.jit, static_argnames=("options",), donate_argnames="cache")
def _run_layer(
    x: jax.Array,
    cache: kvjax.KVCache,
    layer: Layer,
    step: kvjax.StepMetadata,
    angles: jax.Array,
    *,
    options: _Options,
) -> tuple[jax.Array, kvjax.KVCache, Attended]:
    # By default a GPU would multiply float32 matrices in TF32, whose rounding exceeds that of the 16-bit caches.
    with jax.default_matmul_precision("highest"):
        h = _rms_norm(x, layer["attention_norm"], options.eps)
        heads = (len(x), -1, cache.spec.head_size)
        query, key, value = ((h @ layer[name]).reshape(heads) for name in ("query", "key", "value"))
        inputs = Attended(_rotate(query, angles), _rotate(key, angles), value)
        own = inputs.rotated(options.rotates)
        if options.exact_window is None or not cache.spec.dtype.is_quantized:
            attended, cache = kvjax.attend(*own, cache, step, unique_slots=True)
        else:
            spec = dataclasses.replace(cache.spec, model_dtype=kvjax.KVCacheDType.BFLOAT16)
            window = kvjax.ExactWindow.allocate(spec, len(step.seq_lens), options.exact_window)
            attended, cache, _ = kvjax.attend(*own, cache, step, exact_window=window, unique_slots=True)
        x += attended.reshape(len(x), -1) @ layer["output"]
        h = _rms_norm(x, layer["mlp_norm"], options.eps)
        x += (jax.nn.silu(h @ layer["gate"]) * (h @ layer["up"])) @ layer["down"]
    return x, cache, inputs


@functools.partial(jax.jit, static_argnames="eps")
def _logits(x: jax.Array, norm: jax.Array, unembedding: jax.Array, *, eps: float) -> jax.Array:
    return jnp.matmul(_rms_norm(x, norm, eps), unembedding, precision="highest")


def _rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def _rotate(x: jax.Array, angles: jax.Array) -> jax.Array:
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
