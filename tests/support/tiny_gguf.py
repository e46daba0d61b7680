"""A tiny Llama of random weights in a GGUF file, as llama.cpp's converter writes it. Needs gguf and tokenizers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFEndian, GGUFWriter
from tokenizers.pre_tokenizers import ByteLevel

LAYERS, HEADS, KV_HEADS, HEAD_SIZE, HIDDEN, INNER = 2, 4, 2, 32, 32, 48
SPECIAL = ["<|im_start|>", "<|im_end|>"]
BYTES = sorted(ByteLevel.alphabet())
MERGES = ["t h", "th e", "Ġ the"]
WORDS = [*SPECIAL, *BYTES, "th", "the", "Ġthe"]


def interleaved(array: np.ndarray, num_heads: int) -> np.ndarray:
    """A projection's rows as llama.cpp orders them: element i of a head's first half, then of its second half."""
    heads = array.reshape(num_heads, HEAD_SIZE, -1)
    order = [half * HEAD_SIZE // 2 + i for i in range(HEAD_SIZE // 2) for half in range(2)]
    return heads[:, order].reshape(array.shape)


def hugging_face_tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {"model.embed_tokens": (len(WORDS), HIDDEN), "model.norm": (HIDDEN,)}
    for layer in range(LAYERS):
        shapes |= {
            f"model.layers.{layer}.{name}": shape
            for name, shape in {
                "self_attn.q_proj": (HEADS * HEAD_SIZE, HIDDEN),
                "self_attn.k_proj": (KV_HEADS * HEAD_SIZE, HIDDEN),
                "self_attn.v_proj": (KV_HEADS * HEAD_SIZE, HIDDEN),
                "self_attn.o_proj": (HIDDEN, HEADS * HEAD_SIZE),
                "mlp.gate_proj": (INNER, HIDDEN),
                "mlp.up_proj": (INNER, HIDDEN),
                "mlp.down_proj": (HIDDEN, INNER),
                "input_layernorm": (HIDDEN,),
                "post_attention_layernorm": (HIDDEN,),
            }.items()
        }
    return {f"{name}.weight": rng.normal(size=shape).astype(np.float32) * 0.3 for name, shape in shapes.items()}


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def write_gguf(
    path: Path,
    *,
    architecture: str = "llama",
    pre: str = "smollm",
    extra: str | None = None,
    endian: GGUFEndian = GGUFEndian.LITTLE,
    fields: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray | None] | None = None,
) -> Path:
    """Writes the model, with another tensor, and changed or further fields and tensors; None leaves one out."""
    writer = GGUFWriter(path, architecture, endianess=endian)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_block_count(LAYERS)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_SIZE)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(5e4)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(WORDS)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(WORDS) - len(SPECIAL)))
    writer.add_token_merges(MERGES)
    add = {int: writer.add_uint32, float: writer.add_float32, bool: writer.add_bool, str: writer.add_string}
    for name, value in (fields or {}).items():
        for stored in writer.kv_data:
            stored.pop(name, None)
        if value is not None:
            add.get(type(value), writer.add_array)(name, value)
    for name, array in (hugging_face_tensors() | (tensors or {})).items():
        if array is None:
            continue
        prefix, part = "", name.removesuffix(".weight")
        if part.startswith("model.layers."):
            _, _, layer, part = part.split(".", 3)
            prefix = f"blk.{layer}."
        if part.endswith(("q_proj", "k_proj")) and name not in (tensors or {}):
            array = interleaved(array, HEADS if part.endswith("q_proj") else KV_HEADS)
        writer.add_tensor(f"{prefix}{GGUF_NAMES[part]}.weight", array)
    if extra:
        writer.add_tensor(extra, np.ones(HIDDEN, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
