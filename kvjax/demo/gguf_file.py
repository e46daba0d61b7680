"""Llama models in GGUF files: their configuration, tensors and tokenizer, as Hugging Face has them.

Needs the extra `smollm2`. Matrices are dequantized to float32. llama.cpp orders the rows of query and key projections
for RoPE of adjacent pairs (`LlamaModel.permute` of its converter); they are put back into the order of halves, since
the order of a key's elements decides which of them share an NVFP4 block.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}

_CONTROL, _USER_DEFINED = 3, 4
"""Types of tokens that text does not produce by merges."""

_BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False)
_PRE_TOKENIZERS = {
    "gpt-2": _BYTE_LEVEL,
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _BYTE_LEVEL]),
}


@dataclasses.dataclass(frozen=True)
class GGUFModel:
    """A model in a GGUF file. `keys` and `get_tensor` are those of a file opened by `safetensors.safe_open`.

    Attributes:
      config: its Hugging Face `config.json`.
      tokenizer: byte-level BPE.
    """

    config: Mapping[str, Any]
    tokenizer: Tokenizer
    _tensors: Mapping[str, Any]

    def keys(self) -> list[str]:
        """Returns the names of its tensors, those of Hugging Face."""
        return [*self._tensors]

    def get_tensor(self, name: str) -> np.ndarray:
        """Returns a tensor, dequantized to float32; matrices are `[out, in]`."""
        tensor = self._tensors[name]
        array = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        for projection, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if name.endswith(f"{projection}.weight"):
                return _in_halves(array, self.config[heads])
        return array


def read(path: Path) -> GGUFModel:
    """Opens a model; its tensors are read when asked for.

    Raises:
      ValueError: no GGUF file; one of another byte order, architecture, tokenizer, RoPE or scale of attention; a part
        of a divided file; or unknown tensors.
    """
    reader = GGUFReader(path)
    if reader.byte_order != "I":  # dequantizing would read numbers of this machine's order
        raise ValueError(f"{path}: got numbers of the other byte order, expected those of this machine")
    fields = {name: field.contents() for name, field in reader.fields.items()}
    tensors = {_hugging_face_name(tensor.name): tensor for tensor in reader.tensors}
    return GGUFModel(_config(fields, has_unembedding="lm_head.weight" in tensors), _tokenizer(fields), tensors)


def _in_halves(array: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorders the rows of each head from `x0 y0 x1 y1 ...` to `x0 x1 ... y0 y1 ...`."""
    return array.reshape(num_heads, -1, 2, array.shape[-1]).swapaxes(1, 2).reshape(array.shape)


def _hugging_face_name(name: str) -> str:
    if name in _TOP_TENSORS:
        return _TOP_TENSORS[name]
    match name.split("."):
        case "blk", layer, part, "weight" if part in _LAYER_TENSORS:
            return f"model.layers.{layer}.{_LAYER_TENSORS[part]}.weight"
    raise ValueError(f"tensor: got {name!r}, expected one of a Llama model without biases and RoPE factors")


def _config(fields: Mapping[str, Any], *, has_unembedding: bool) -> dict[str, Any]:
    _check("general.architecture", fields.get("general.architecture"), ("llama",))
    _check("llama.rope.scaling.type", fields.get("llama.rope.scaling.type", "none"), ("none",))
    hidden, heads = fields["llama.embedding_length"], fields["llama.attention.head_count"]
    head_dim = fields.get("llama.attention.key_length", hidden // heads)
    # What a Llama of Hugging Face has no place for. llama.cpp takes a scaling without a type as linear.
    for name in ("llama.rope.scaling.factor", "llama.rope.scale_linear"):
        _check(name, fields.get(name, 1), (0, 1))
    _check("llama.rope.dimension_count", fields.get("llama.rope.dimension_count", head_dim), (head_dim,))
    _check("llama.attention.scale", fields.get("llama.attention.scale", 0), (0,))
    _check("split.count", fields.get("split.count", 1), (0, 1))
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": hidden,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields.get("llama.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": fields["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": fields.get("llama.rope.freq_base", 10_000.0),
        "tie_word_embeddings": not has_unembedding,
        "dtype": "float32",
    }


def _tokenizer(fields: Mapping[str, Any]) -> Tokenizer:
    _check("tokenizer.ggml.model", fields.get("tokenizer.ggml.model"), ("gpt2",))
    _check("tokenizer.ggml.pre", fields.get("tokenizer.ggml.pre", "gpt-2"), _PRE_TOKENIZERS)
    words = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=merges))
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[fields.get("tokenizer.ggml.pre", "gpt-2")]
    tokenizer.decoder = decoders.ByteLevel()
    kinds = zip(words, fields.get("tokenizer.ggml.token_type", ()), strict=False)
    tokenizer.add_special_tokens(
        [AddedToken(word, special=True) for word, kind in kinds if kind in (_CONTROL, _USER_DEFINED)]
    )
    return tokenizer


def _check(field: str, got: object, expected: Any) -> None:
    if got not in expected:
        raise ValueError(f"{field}: got {got!r}, expected one of {', '.join(map(repr, expected))}")
