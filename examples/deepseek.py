"""DeepSeek-V3 and Kimi K2 in plain JAX, served from kvjax's paged caches of latents (MLA).

    python -m examples.deepseek --kv-cache-dtype nvfp4

makes tiny models of random weights with transformers, generates tokens, and prints how far the logits are from those of
transformers. Sequences that decode attend over latents: `W_UK` is absorbed into the query, `W_UV` follows attention.
Prompts come in chunks: `ragged_attention` attends within the chunk over keys and values of each head, and over the
context, whose latents are gathered in rounds and expanded. `merge_attention_states` joins the results.
"""

from __future__ import annotations

import argparse
import functools
import math
import types
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvjax

type Params = Mapping[str, jax.Array]
"""Tensors by their names in transformers, without those of other layers; experts are stacked."""

WORKSPACE = 32
"""Tokens of each sequence's context that are expanded at once."""


def rms_norm(x: jax.Array, weight: jax.Array, eps: float = 1e-6) -> jax.Array:
    x32 = x.astype(jnp.float32)
    return (x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)).astype(x.dtype) * weight


def mlp(params: Params, prefix: str, x: jax.Array) -> jax.Array:
    gate, up, down = (params[f"{prefix}.{name}_proj.weight"] for name in ("gate", "up", "down"))
    return (jax.nn.silu(x @ gate.T) * (x @ up.T)) @ down.T


class Model:
    """A model by its `config.json` of transformers 5. Methods take the parameters of a layer, `params`."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config, self.rope = types.SimpleNamespace(**config), config["rope_parameters"]
        # The scale of each head's keys, not of latents.
        self.sm_scale = (self.config.qk_nope_head_dim + self.config.qk_rope_head_dim) ** -0.5
        self.sm_scale *= self.mscale("mscale_all_dim") ** 2

    def mscale(self, key: str) -> float:
        """YaRN's factor of attention, 1 without YaRN (https://arxiv.org/abs/2309.00071)."""
        is_yarn = self.rope["rope_type"] == "yarn"
        return 0.1 * self.rope.get(key, 0) * math.log(self.rope["factor"]) + 1 if is_yarn else 1.0

    def frequencies(self) -> np.ndarray:
        """RoPE's frequencies, `[qk_rope_head_dim / 2]`; YaRN divides low ones."""
        rope, size = self.rope, self.config.qk_rope_head_dim
        base = rope["rope_theta"]
        plain = base ** (-np.arange(0, size, 2) / size)
        if rope["rope_type"] == "default":
            return plain

        def index(rotations: float) -> float:
            longest = rope["original_max_position_embeddings"]
            return size * math.log(longest / (rotations * 2 * math.pi)) / (2 * math.log(base))

        low, high = max(math.floor(index(rope["beta_fast"])), 0), min(math.ceil(index(rope["beta_slow"])), size - 1)
        divided = np.clip((np.arange(size // 2) - low) / max(high - low, 1e-3), 0, 1)
        return plain * (1 - divided) + plain / rope["factor"] * divided

    def rotate(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        """Rotates neighbouring elements of `[num_tokens, heads, size]`; returns all first elements, then all second."""
        angles = positions[:, None, None] * jnp.asarray(self.frequencies(), jnp.float32)
        factor = self.mscale("mscale") / self.mscale("mscale_all_dim")
        cos, sin = jnp.cos(angles) * factor, jnp.sin(angles) * factor
        first, second = x[..., ::2], x[..., 1::2]
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)

    def parts_of_kv_b(self, params: Params) -> Sequence[jax.Array]:
        """Returns `W_UK [heads, qk_nope_head_dim, kv_lora_rank]` and `W_UV [heads, v_head_dim, kv_lora_rank]`."""
        kv_b = params["self_attn.kv_b_proj.weight"]
        by_head = kv_b.reshape(self.config.num_attention_heads, -1, self.config.kv_lora_rank)
        return jnp.split(by_head, [self.config.qk_nope_head_dim], axis=1)

    def expanded(self, params: Params, kv_c: jax.Array, k_pe: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the keys and values of each head that latents and rope keys stand for."""
        w_uk, w_uv = self.parts_of_kv_b(params)
        k_nope = jnp.einsum("tr,hdr->thd", kv_c, w_uk)
        rope = jnp.broadcast_to(k_pe[:, None], (*k_nope.shape[:2], k_pe.shape[1]))
        return jnp.concatenate([k_nope, rope], axis=2), jnp.einsum("tr,hvr->thv", kv_c, w_uv)

    def attention(
        self, params: Params, x: jax.Array, cache: kvjax.KVCache, step: kvjax.StepMetadata, context: int | None
    ) -> tuple[jax.Array, kvjax.KVCache]:
        """Writes the latents of a step and attends; `context` is that of `forward`."""
        config, position = self.config, step.token_rows()[1]
        weights = {name.removeprefix("self_attn."): weight for name, weight in params.items()}
        low, up = x, "q_proj.weight"
        if config.q_lora_rank is not None:
            low = rms_norm(x @ weights["q_a_proj.weight"].T, weights["q_a_layernorm.weight"])
            up = "q_b_proj.weight"
        query = (low @ weights[up].T).reshape(len(x), config.num_attention_heads, -1)
        q_nope, q_pe = jnp.split(query, [config.qk_nope_head_dim], axis=2)
        kv_c, k_pe = jnp.split(x @ weights["kv_a_proj_with_mqa.weight"].T, [config.kv_lora_rank], axis=1)
        kv_c = rms_norm(kv_c, weights["kv_a_layernorm.weight"])
        q_pe, k_pe = self.rotate(q_pe, position), self.rotate(k_pe[:, None], position)[:, 0]
        cache = kvjax.concat_and_cache_mla(kv_c, k_pe, cache, step.slot_mapping, unique_slots=True)
        if context is None:
            w_uk, w_uv = self.parts_of_kv_b(params)
            absorbed, read = jnp.einsum("nhd,hdr->nhr", q_nope, w_uk), (step.block_table, step.seq_lens)
            latents = kvjax.mla_paged_attention(absorbed, q_pe, cache, *read, sm_scale=self.sm_scale)
            attended = jnp.einsum("nhr,hvr->nhv", latents, w_uv)
        else:
            query = jnp.concatenate([q_nope, q_pe], axis=2)
            chunk, bounds = self.expanded(params, kv_c, k_pe), (step.cu_q_lens, step.cu_q_lens)
            parts = [kvjax.ragged_attention(query, *chunk, *bounds, sm_scale=self.sm_scale, return_lse=True)]
            rounds = range(0, context, WORKSPACE)
            parts += [self.attention_to_context(params, query, cache, step, first) for first in rounds]
            attended, _ = kvjax.merge_attention_states(*map(list, zip(*parts, strict=True)))
        return attended.reshape(len(x), -1) @ weights["o_proj.weight"].T, cache

    def attention_to_context(
        self, params: Params, query: jax.Array, cache: kvjax.KVCache, step: kvjax.StepMetadata, first: int
    ) -> tuple[jax.Array, jax.Array]:
        """Attends to the tokens `first` to `first + WORKSPACE` of each sequence that are before its chunk."""
        bounds = jnp.asarray(step.cu_q_lens)
        lens = jnp.clip(jnp.asarray(step.seq_lens) - (bounds[1:] - bounds[:-1]) - first, 0, WORKSPACE)
        cu_seq_lens = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(lens, dtype=jnp.int32)])
        num_tokens, starts = WORKSPACE * len(lens), jnp.full(len(lens), first, jnp.int32)
        options: dict[str, Any] = {"num_tokens": num_tokens, "seq_starts": starts, "dtype": query.dtype}
        kv_c, k_pe = kvjax.gather_mla(cache, step.block_table, cu_seq_lens, **options)
        tokens = self.expanded(params, kv_c, k_pe)
        return kvjax.ragged_attention(
            query, *tokens, bounds, cu_seq_lens, causal=False, sm_scale=self.sm_scale, return_lse=True
        )

    def experts(self, params: Params, x: jax.Array) -> jax.Array:
        """All experts of every token, weighted; a real model computes only those that are chosen."""
        config = self.config
        scores = jax.nn.sigmoid(x.astype(jnp.float32) @ params["mlp.gate.weight"].astype(jnp.float32).T)
        choice = (scores + params["mlp.gate.e_score_correction_bias"]).reshape(len(x), config.n_group, -1)
        groups = jax.lax.top_k(jnp.sum(jax.lax.top_k(choice, 2)[0], axis=-1), config.topk_group)[1]
        is_chosen = jnp.any(groups[:, :, None] == jnp.arange(config.n_group), axis=1)
        choice = jnp.where(is_chosen[:, :, None], choice, -jnp.inf).reshape(scores.shape)
        chosen = jax.lax.top_k(choice, config.num_experts_per_tok)[1]
        weights = jnp.where(jnp.any(chosen[:, :, None] == jnp.arange(scores.shape[1]), axis=1), scores, 0.0)
        if config.norm_topk_prob:
            weights /= jnp.sum(weights, axis=-1, keepdims=True) + 1e-20
        gate, up = jnp.split(jnp.einsum("nd,eid->nei", x, params["mlp.experts.gate_up_proj"]), 2, axis=-1)
        out = jnp.einsum("nei,edi->ned", jax.nn.silu(gate) * up, params["mlp.experts.down_proj"])
        routed = jnp.einsum("ned,ne->nd", out, (weights * config.routed_scaling_factor).astype(x.dtype))
        return routed + mlp(params, "mlp.shared_experts", x)

    @functools.partial(jax.jit, static_argnames=("self", "context"), donate_argnames="caches")
    def forward(
        self,
        params: Params,
        tokens: jax.Array,
        step: kvjax.StepMetadata,
        caches: Sequence[kvjax.KVCache],
        context: int | None,
    ) -> tuple[jax.Array, list[kvjax.KVCache]]:
        """Returns the float32 logits of a step's `tokens [num_tokens]`, `[num_tokens, vocab_size]`, and the caches.

        `context` is None for a step of one token of each sequence; else a number, a multiple of `WORKSPACE`, that no
        sequence exceeds with the tokens before its chunk. Each value compiles a program.
        """
        x, written, eps = params["model.embed_tokens.weight"][tokens], [], self.config.rms_norm_eps
        for number, cache in enumerate(caches):
            prefix = f"model.layers.{number}."
            layer = {name.removeprefix(prefix): x for name, x in params.items() if name.startswith(prefix)}
            h = rms_norm(x, layer["input_layernorm.weight"], eps)
            attended, cache = self.attention(layer, h, cache, step, context)
            written.append(cache)
            x += attended
            h = rms_norm(x, layer["post_attention_layernorm.weight"], eps)
            x += mlp(layer, "mlp", h) if number < self.config.first_k_dense_replace else self.experts(layer, h)
        x = rms_norm(x, params["model.norm.weight"], eps)
        return jnp.matmul(x, params["lm_head.weight"].T, preferred_element_type=jnp.float32), written

    def run(
        self,
        params: Params,
        caches: Sequence[kvjax.KVCache],
        sequences: Sequence[kvjax.PagedSequence],
        new: Sequence[np.ndarray],
    ) -> tuple[list[np.ndarray], list[kvjax.KVCache]]:
        """Runs new tokens of sequences, for which their pool has reserved blocks; returns the logits of each."""
        step = kvjax.StepMetadata.from_sequences(sequences, [len(tokens) for tokens in new])
        before = max(sequence.num_tokens - len(tokens) for sequence, tokens in zip(sequences, new, strict=True))
        context = None if all(len(tokens) == 1 for tokens in new) else -(-before // WORKSPACE) * WORKSPACE
        logits, caches = self.forward(params, np.concatenate(new), step, caches, context)
        return np.split(np.asarray(logits), np.cumsum([len(tokens) for tokens in new])[:-1]), caches


TINY = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
    "kv_lora_rank": 128, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32, "initializer_range": 0.1,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "original_max_position_embeddings": 64,
    "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
MODELS = {
    "deepseek-v3": {"q_lora_rank": 48, "n_group": 4, "topk_group": 2, "rope_parameters": YARN},
    "kimi-k2": {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "num_attention_heads": 2},
}
"""What each has of its own: Kimi K2 has no groups of experts, and half as many heads."""


def tiny_model(name: str) -> tuple[Any, Model, Params]:
    """Returns transformers' model of random weights, its model here and its parameters."""
    import torch  # needed only here
    import transformers

    torch.manual_seed(0)
    sizes = {**TINY, **MODELS[name], "max_position_embeddings": 2560, "dtype": "float32"}
    model = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**sizes)).eval()
    for tensor in model.state_dict().values():  # in place: norms and biases other than 1 and 0
        if tensor.ndim == 1:
            tensor.uniform_(0.5, 1.5)
    params = {key: jnp.array(tensor.numpy()) for key, tensor in model.state_dict().items()}
    return model, Model(model.config.to_dict()), params


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve tiny models with latent attention, next to transformers.")
    parser.add_argument("--kv-cache-dtype", default="auto")
    args = parser.parse_args()
    for name in MODELS:
        reference, model, params = tiny_model(name)
        kv_config = kvjax.ModelKVConfig.from_hf_config(reference.config.to_dict())
        specs = kvjax.resolve_layer_specs(kv_config, args.kv_cache_dtype)
        caches = [kvjax.KVCache.allocate(spec, 16) for spec in specs]
        pool = kvjax.BlockPool(16, specs[0].block_size)
        sequence, tokens, largest = pool.sequence(), [*range(80)], 0.0
        for size in [48, 32, *[1] * 15]:  # a prompt in two chunks, then tokens one by one
            new = np.array(tokens[sequence.num_tokens :][:size], np.int32)
            pool.append([sequence], [size])
            [logits], caches = model.run(params, caches, [sequence], [new])
            ids = reference.dummy_inputs["input_ids"].new_tensor([tokens[: sequence.num_tokens]])
            expected = reference(ids).logits[0, -size:].detach().numpy()
            largest = max(largest, float(np.abs(logits - expected).max()))
            tokens += [int(logits[-1].argmax())] * (sequence.num_tokens == len(tokens))
        print(
            f"{name}: {specs[0].bytes_per_token} bytes/token, generated {tokens[80:]}, logits differ by {largest:.2g}"
        )


if __name__ == "__main__":
    main()
