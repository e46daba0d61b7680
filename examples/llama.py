"""Llama and Qwen3 in plain JAX, served from kvjax's paged caches: prompts in chunks beside decodes in one jitted step.

    pip install '.[demo]' tokenizers
    python examples/llama.py FOLDER 'The capital of France is' --kv-cache-dtype fp8

FOLDER is a model as Hugging Face saves it: config.json, safetensors, tokenizer.json. A step runs the new tokens of
several sequences, one sequence after the other (`kvjax.StepMetadata`). The caches are donated, so that it writes in
place.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import safe_open

import kvjax

type Params = Mapping[str, Any]
type Caches = tuple[kvjax.KVCache, ...]


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    """RoPE of Llama 3.1 and later: long wavelengths are stretched by `factor`, short ones kept."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __call__(self, frequencies: np.ndarray) -> np.ndarray:
        wavelengths = 2 * np.pi / frequencies
        low, high = self.low_freq_factor, self.high_freq_factor
        kept = (self.original_max_position_embeddings / wavelengths - low) / (high - low)
        kept = np.clip(kept, 0, 1)  # of what is between the two wavelengths, a part
        return (1 - kept) * frequencies / self.factor + kept * frequencies


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: Llama3Scaling | None = None
    tie_word_embeddings: bool = False
    qk_norm: bool = False

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Reads a `config.json` of transformers 4 or 5; `ValueError` for what this file does not compute."""
        expected = {"model_type": ("llama", "qwen3"), "hidden_act": ("silu",), "attention_bias": (False,)}
        for key, accepted in (expected | {"mlp_bias": (False,)}).items():
            if (got := config.get(key, accepted[-1])) not in accepted:
                raise ValueError(f"{key}: got {got!r}, expected one of {accepted}")
        heads = config["num_attention_heads"]
        # transformers 5 has one dictionary, which 4 has in two places.
        rope = {"rope_theta": config.get("rope_theta", 10_000.0)} | (config.get("rope_scaling") or {})
        rope |= config.get("rope_parameters") or {}
        return cls(
            **{key: config[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")},
            num_attention_heads=heads,
            num_key_value_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            rms_norm_eps=config["rms_norm_eps"],
            rope_theta=rope["rope_theta"],
            rope_scaling=_rope_scaling(rope),
            tie_word_embeddings=config.get("tie_word_embeddings", False),
            qk_norm=config["model_type"] == "qwen3",
        )


def _rope_scaling(rope: Mapping[str, Any]) -> Llama3Scaling | None:
    match rope.get("rope_type", rope.get("type", "default")):
        case "default":
            return None
        case "llama3":
            return Llama3Scaling(**{field.name: rope[field.name] for field in dataclasses.fields(Llama3Scaling)})
        case other:
            raise ValueError(f"rope_type: got {other!r}, expected one of 'default', 'llama3'")


LAYER_PARTS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "output": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
    "attention_norm": ("input_layernorm",),
    "mlp_norm": ("post_attention_layernorm",),
    "query_norm": ("self_attn.q_norm",),
    "key_norm": ("self_attn.k_norm",),
}
"""A layer's parameters, and the tensors of a checkpoint that they are made of, one under the other."""

TOP_PARTS = {"embedding": ("model.embed_tokens",), "norm": ("model.norm",), "unembedding": ("lm_head",)}


def parameter_shapes(config: ModelConfig) -> Params:
    """Shapes of all parameters. Matrices are `[out, in]`, as checkpoints have them."""
    hidden, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    query = config.num_attention_heads * head
    layer = {
        "qkv": (query + 2 * config.num_key_value_heads * head, hidden),
        "output": (hidden, query),
        "gate_up": (2 * inner, hidden),
        "down": (hidden, inner),
        "attention_norm": (hidden,),
        "mlp_norm": (hidden,),
    }
    if config.qk_norm:
        layer |= {"query_norm": (head,), "key_norm": (head,)}
    top = {"embedding": (config.vocab_size, hidden), "norm": (hidden,)}
    if not config.tie_word_embeddings:
        top["unembedding"] = (config.vocab_size, hidden)
    return {**top, "layers": [layer] * config.num_hidden_layers}


def random_params(config: ModelConfig, key: jax.Array, dtype: Any) -> Params:
    """Norms of one, matrices of the scale that keeps magnitudes."""

    def init(path: Any, shape: tuple[int, ...]) -> jax.Array:
        if len(shape) == 1:
            return jnp.ones(shape, dtype)
        own_key = jax.random.fold_in(key, zlib.crc32(jax.tree_util.keystr(path).encode()))
        return jax.random.normal(own_key, shape, dtype) * jnp.asarray(shape[1] ** -0.5, dtype)

    return jax.tree.map_with_path(init, parameter_shapes(config), is_leaf=lambda leaf: isinstance(leaf, tuple))


def load_params(folder: Path, config: ModelConfig, dtype: Any) -> Params:
    """The parameters of a model's safetensors, as `dtype`; `ValueError` where they are not those of `config`."""
    files = {}
    for path in sorted(folder.glob("*.safetensors")):
        file = safe_open(path, framework="numpy")
        files |= dict.fromkeys(file.keys(), file)

    def read(names: Sequence[str], prefix: str, shape: tuple[int, ...]) -> jax.Array:
        parts = [f"{prefix}{name}.weight" for name in names]
        if missing := [name for name in parts if name not in files]:
            raise ValueError(f"{folder}: got no tensor {missing[0]!r}")
        array = np.concatenate([files.pop(name).get_tensor(name) for name in parts])
        if array.shape != shape:
            raise ValueError(f"{parts[0]}: got shape {array.shape} with what stands under it, expected {shape}")
        return jnp.asarray(array, dtype)

    shapes = parameter_shapes(config)
    layers = [
        {part: read(LAYER_PARTS[part], f"model.layers.{index}.", shape) for part, shape in layer.items()}
        for index, layer in enumerate(shapes["layers"])
    ]
    top = {part: read(names, "", shapes[part]) for part, names in TOP_PARTS.items() if part in shapes}
    if unknown := [name for name in files if not name.endswith("rotary_emb.inv_freq") and name != "lm_head.weight"]:
        raise ValueError(f"{folder}: got tensor {unknown[0]!r}, which this model has no place for")
    return {**top, "layers": layers}


def write_and_attend(
    query: jax.Array, key: jax.Array, value: jax.Array, cache: kvjax.KVCache, step: kvjax.StepMetadata
) -> tuple[jax.Array, kvjax.KVCache]:
    """Stores the step's keys and values, and attends to all that its sequences have stored."""
    cache = kvjax.reshape_and_cache_flash(key, value, cache, step.slot_mapping, unique_slots=True)
    attended = kvjax.ragged_paged_attention(query, cache, step.block_table, step.seq_lens, step.cu_q_lens)
    return attended, cache


def forward(
    params: Params, config: ModelConfig, tokens: jax.Array, step: kvjax.StepMetadata, caches: Caches
) -> tuple[jax.Array, Caches]:
    """Runs a step's `tokens [num_tokens]`; returns their last hidden states `[num_tokens, hidden_size]` and the caches.

    The caches are one for each layer; `logits` makes logits of the hidden states that they are wanted of.
    """
    x = params["embedding"][tokens]
    rotate = _rotary(step.token_rows()[1], config)
    written = []
    for layer, cache in zip(params["layers"], caches, strict=True):
        h = _rms_norm(x, layer["attention_norm"], config.rms_norm_eps)
        num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        heads = (h @ layer["qkv"].T).reshape(len(tokens), -1, config.head_dim)
        query, key, value = jnp.split(heads, [num_heads, num_heads + num_kv_heads], axis=1)
        if config.qk_norm:
            query = _rms_norm(query, layer["query_norm"], config.rms_norm_eps)
            key = _rms_norm(key, layer["key_norm"], config.rms_norm_eps)
        attended, cache = write_and_attend(rotate(query), rotate(key), value, cache, step)
        written.append(cache)
        x += attended.reshape(len(tokens), -1) @ layer["output"].T
        h = _rms_norm(x, layer["mlp_norm"], config.rms_norm_eps)
        gate, up = jnp.split(h @ layer["gate_up"].T, 2, axis=1)
        x += (jax.nn.silu(gate) * up) @ layer["down"].T
    return _rms_norm(x, params["norm"], config.rms_norm_eps), tuple(written)


def logits(params: Params, hidden: jax.Array) -> jax.Array:
    """float32 `[..., vocab_size]` of hidden states `[..., hidden_size]`."""
    unembedding = params.get("unembedding", params["embedding"])  # tied where there is none
    return jnp.matmul(hidden, unembedding.T, preferred_element_type=jnp.float32)


@functools.partial(jax.jit, static_argnames="config", donate_argnames="caches")
def greedy_step(
    params: Params, tokens: jax.Array, step: kvjax.StepMetadata, caches: Caches, *, config: ModelConfig
) -> tuple[jax.Array, Caches]:
    """The likeliest token after the last of each sequence, int32 `[num_seqs]`, and the caches."""
    hidden, caches = forward(params, config, tokens, step, caches)
    last = jnp.maximum(jnp.asarray(step.cu_q_lens)[1:] - 1, 0)
    return jnp.argmax(logits(params, hidden[last]), axis=-1).astype(jnp.int32), caches


def generate(
    params: Params,
    config: ModelConfig,
    caches: Caches,
    pool: kvjax.BlockPool,
    prompts: Sequence[Sequence[int]],
    num_new_tokens: int,
    *,
    chunk: int = 256,
) -> tuple[list[list[int]], Caches]:
    """Continues each prompt by its likeliest tokens; prompts go through `chunk` tokens a step, beside decodes.

    Blocks that the pool knows to hold the beginning of a prompt are not computed again. All sequences run at once: an
    engine that serves more than fit lets them wait until `pool.num_free` allows.
    """
    running = [(pool.sequence(prompt), list(prompt)) for prompt in prompts]
    max_blocks = max(-(-(len(prompt) + num_new_tokens) // pool.block_size) for prompt in prompts)
    sizes = [2**i for i in range(math.ceil(math.log2(chunk * len(prompts))) + 1)]
    left = [num_new_tokens] * len(prompts)
    while any(left):
        indices = [i for i, number in enumerate(left) if number]
        batch = [running[i] for i in indices]
        new = [tokens[sequence.num_tokens :][:chunk] for sequence, tokens in batch]
        sequences, q_lens = [sequence for sequence, _ in batch], [len(tokens) for tokens in new]
        pool.append(sequences, q_lens)
        step = kvjax.StepMetadata.from_sequences(
            sequences, q_lens, num_tokens=sizes, num_seqs=len(prompts), max_blocks=max_blocks
        )
        tokens = np.zeros(len(step.slot_mapping), np.int32)
        tokens[: sum(q_lens)] = np.concatenate(new)
        following, caches = greedy_step(params, tokens, step, caches, config=config)
        for i, token, computed in zip(indices, np.asarray(following).tolist(), new, strict=False):
            sequence, known = running[i]
            sequence.commit(computed)
            if sequence.num_tokens == len(known):
                known.append(token)
                left[i] -= 1
                if not left[i]:
                    sequence.free()
    return [known for _, known in running], caches


def _rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return normed.astype(x.dtype) * weight


def _rotary(positions: jax.Array, config: ModelConfig) -> Any:
    """Rotates the two halves of each head against each other, by angles that grow with `positions [num_tokens]`."""
    frequencies = config.rope_theta ** (-np.arange(0, config.head_dim, 2) / config.head_dim)
    if config.rope_scaling:
        frequencies = config.rope_scaling(frequencies)
    angles = positions[:, None, None].astype(jnp.float32) * jnp.asarray(frequencies, jnp.float32)
    cos, sin = jnp.cos(angles), jnp.sin(angles)

    def rotate(x: jax.Array) -> jax.Array:
        first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)

    return rotate


def main() -> None:
    parser = argparse.ArgumentParser(description="Continue prompts greedily with a Llama or a Qwen3.")
    parser.add_argument("folder", type=Path, help="config.json, *.safetensors and tokenizer.json")
    parser.add_argument("prompts", nargs="+")
    parser.add_argument("--num-new-tokens", type=int, default=64)
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--num-blocks", type=int, default=1024, help="of 16 tokens, in every layer")
    args = parser.parse_args()

    from tokenizers import Tokenizer  # used here alone

    tokenizer = Tokenizer.from_file(str(args.folder / "tokenizer.json"))
    hf_config = json.loads((args.folder / "config.json").read_text())
    model = kvjax.ModelKVConfig.from_hf_config(hf_config)
    config = ModelConfig.from_hf_config(hf_config)
    params = load_params(args.folder, config, model.dtype.info.storage_dtype)
    specs = kvjax.resolve_layer_specs(model, args.kv_cache_dtype)
    caches = tuple(kvjax.KVCache.allocate(spec, args.num_blocks) for spec in specs)
    pool = kvjax.BlockPool(args.num_blocks, specs[0].block_size)
    prompts = [tokenizer.encode(prompt).ids for prompt in args.prompts]
    generated, _ = generate(params, config, caches, pool, prompts, args.num_new_tokens)
    for tokens in generated:
        print(tokenizer.decode(tokens), end="\n\n")


if __name__ == "__main__":
    main()
