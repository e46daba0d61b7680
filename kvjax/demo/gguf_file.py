"""Llama models in GGUF files: their configuration, tensors and tokenizer, as Hugging Face has them.

Needs the extra `smollm2`. Matrices are dequantized to float32. llama.cpp orders the rows of query and key projections
for RoPE of adjacent pairs (`LlamaModel.permute` of its converter); they are put back into the order of halves, since
the order of a key's elements decides which of them share an NVFP4 block.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

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

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
"""Types of tokens. The latter two are not made by merges; those of control are not part of a text."""

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
        """Returns a tensor, dequantized to float32; matrices are `[out, in]`.

        Raises:
          ValueError: gguf does not dequantize its type.
        """
        tensor = self._tensors[name]
        try:
            array = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        except NotImplementedError as error:
            raise ValueError(f"tensor {name}: got {tensor.tensor_type.name}, which gguf does not dequantize") from error
        for projection, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if name.endswith(f"{projection}.weight"):
                return _in_halves(array, self.config[heads])
        return array


def read(path: Path) -> GGUFModel:
    """Opens a model; its tensors are read when asked for.

    Raises:
      OSError: a file that cannot be read.
      ValueError: no whole GGUF file; one of another byte order, architecture, tokenizer, RoPE or scale of attention; a
        part of a divided file; missing or unknown fields and tensors, or tensors of other shapes.
    """
    try:
        return _read(path)
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:  # which gguf raises for broken files
        raise ValueError(f"{path}: {error}") from error


def _read(path: Path) -> GGUFModel:
    reader = GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    if reader.byte_order != "I":  # dequantizing would read numbers of this machine's order
        raise ValueError("got numbers of the other byte order, expected those of this machine")
    tensors = {_hugging_face_name(tensor.name): tensor for tensor in reader.tensors}
    config = _config(fields, has_unembedding="lm_head.weight" in tensors)
    _check_shapes(config, {name: (*reversed(tensor.shape.tolist()),) for name, tensor in tensors.items()})
    return GGUFModel(config, _tokenizer(fields), tensors)


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


def _check_shapes(config: Mapping[str, Any], got: Mapping[str, tuple[int, ...]]) -> None:
    """Raises `ValueError` unless a file has the tensors of a model, and no others."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    query, key = (config[heads] * config["head_dim"] for heads in ("num_attention_heads", "num_key_value_heads"))
    of_layer = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (query, hidden),
        "self_attn.k_proj": (key, hidden),
        "self_attn.v_proj": (key, hidden),
        "self_attn.o_proj": (hidden, query),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    embedding = config["vocab_size"], hidden
    expected = {"model.embed_tokens": embedding, "model.norm": (hidden,)}
    if not config["tie_word_embeddings"]:
        expected["lm_head"] = embedding
    if config["num_hidden_layers"] > len(got):  # whose tensors would take long to name
        raise ValueError(f"llama.block_count: got {config['num_hidden_layers']} with only {len(got)} tensors")
    for layer in range(config["num_hidden_layers"]):
        expected |= {f"model.layers.{layer}.{name}": shape for name, shape in of_layer.items()}
    for name in [f"{name}.weight" for name in expected] + [*got]:
        shape, own = expected.get(name.removesuffix(".weight")), got.get(name)
        if shape != own:
            raise ValueError(f"tensor {name}: got {_shown(own)}, expected {_shown(shape)}")


def _shown(shape: tuple[int, ...] | None) -> str:
    return "none" if shape is None else f"shape {shape}"


def _number[Number: (int, float)](
    fields: Mapping[str, Any], name: str, kind: type[Number], default: Number | None = None
) -> Number:
    """A field that is one positive number."""
    number = fields.get(name, default)
    if isinstance(number, bool) or not isinstance(number, kind) or not 0 < number < math.inf:
        raise ValueError(f"{name}: got {number!r}, expected a positive {kind.__name__}")
    return number


def _words(fields: Mapping[str, Any], name: str) -> list[str]:
    """A field that is a list of strings."""
    words = fields.get(name)
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        got = "none" if words is None else f"a {type(words).__name__}"
        raise ValueError(f"{name}: got {got}, expected a list of strings")
    return words


def _config(fields: Mapping[str, Any], *, has_unembedding: bool) -> dict[str, Any]:
    _check("general.architecture", fields.get("general.architecture"), ("llama",))
    _check("llama.rope.scaling.type", fields.get("llama.rope.scaling.type", "none"), ("none",))
    hidden, heads = (_number(fields, f"llama.{name}", int) for name in ("embedding_length", "attention.head_count"))
    kv_heads = _number(fields, "llama.attention.head_count_kv", int, heads)
    head_dim = _number(fields, "llama.attention.key_length", int, hidden // heads)
    if heads % kv_heads or head_dim % 2:
        raise ValueError(
            f"llama.attention: got {heads} heads of {head_dim} over {kv_heads}, expected a multiple of the latter, and"
            " an even size"
        )
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
        "vocab_size": len(_words(fields, "tokenizer.ggml.tokens")),
        "hidden_size": hidden,
        "intermediate_size": _number(fields, "llama.feed_forward_length", int),
        "num_hidden_layers": _number(fields, "llama.block_count", int),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": _number(fields, "llama.context_length", int),
        "rms_norm_eps": _number(fields, "llama.attention.layer_norm_rms_epsilon", float),
        "rope_theta": _number(fields, "llama.rope.freq_base", float, 10_000.0),
        "tie_word_embeddings": not has_unembedding,
        "dtype": "float32",
    }


def _tokenizer(fields: Mapping[str, Any]) -> Tokenizer:
    _check("tokenizer.ggml.model", fields.get("tokenizer.ggml.model"), ("gpt2",))
    _check("tokenizer.ggml.pre", fields.get("tokenizer.ggml.pre", "gpt-2"), _PRE_TOKENIZERS)
    words = _words(fields, "tokenizer.ggml.tokens")
    kinds = fields.get("tokenizer.ggml.token_type", [_NORMAL] * len(words))
    if not isinstance(kinds, list) or len(kinds) != len(words):
        raise ValueError(f"tokenizer.ggml.token_type: got other than one number for each of {len(words)} tokens")
    pairs = (merge.partition(" ") for merge in _words(fields, "tokenizer.ggml.merges"))
    merges = [(first, second) for first, _, second in pairs]
    try:
        model = models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=merges)
    except Exception as error:  # of no class of its own
        raise ValueError(f"tokenizer.ggml.merges: got {error}, expected pairs of tokens") from error
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[fields.get("tokenizer.ggml.pre", "gpt-2")]
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(_added(words, kinds, _CONTROL))
    tokenizer.add_tokens(_added(words, kinds, _USER_DEFINED))
    _add_begin(tokenizer, len(words), fields)
    return tokenizer


def _added(words: Sequence[str], kinds: Sequence[int], kind: int) -> list[AddedToken]:
    return [
        AddedToken(word, special=kind == _CONTROL, normalized=False)
        for word, own in zip(words, kinds, strict=True)
        if own == kind
    ]


def _add_begin(tokenizer: Tokenizer, num_words: int, fields: Mapping[str, Any]) -> None:
    """Has the tokenizer begin each text with a token, if the file says so."""
    # A prompt that ends is none to go on from.
    _check("tokenizer.ggml.add_eos_token", fields.get("tokenizer.ggml.add_eos_token", False), (False,))
    if fields.get("tokenizer.ggml.add_bos_token"):
        token = fields.get("tokenizer.ggml.bos_token_id")
        if not isinstance(token, int) or not 0 <= token < num_words:
            raise ValueError(
                f"tokenizer.ggml.bos_token_id: got {token!r}, expected the number of one of {num_words} tokens"
            )
        # The name is the template's own: words may have characters that mean something there.
        tokenizer.post_processor = processors.TemplateProcessing(single="bos $A", special_tokens=[("bos", token)])


def _check(field: str, got: object, expected: Any) -> None:
    if got not in tuple(expected):
        raise ValueError(f"{field}: got {got!r}, expected one of {', '.join(map(repr, expected))}")
