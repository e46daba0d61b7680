"""Which `model_type`s of `config.json` are understood: what each one's keys are, and what they mean for the KV cache.

A type's row brings its configuration to the plain keys that `model_config` reads (`num_hidden_layers`,
`num_key_value_heads`, `head_dim`, `layer_types` and so on). The judge of every row is transformers: `docs/models.md`
lists, for each of its causal language models, the cache that it keeps next to what is read here.
"""

from __future__ import annotations

import dataclasses
import re
import types
from collections.abc import Callable, Mapping
from typing import Any

from kvjax.config_keys import Facts, as_size, first_int, flag, indices, num_layers, per_layer, positive_int
from kvjax.errors import KVCacheValueError, shown

PLAIN_KEYS = (
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_size",
    "head_dim",
    "layer_types",
    "sliding_window",
)


@dataclasses.dataclass(frozen=True)
class ModelType:
    """How one type of model states its KV cache.

    Attributes:
      keys: what is read of its configuration; nothing else in there matters.
      names: for plain keys that the type calls by names of its own, those names.
      defaults: what transformers' class fills in where the configuration leaves a key out. A null is not left out.
      translate: turns the type's own keys into plain ones, in place; returns what it had to assume, if anything.
    """

    keys: tuple[str, ...] = PLAIN_KEYS
    names: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    translate: Callable[[Facts], str | None] | None = None

    def plain(self, part: Mapping[str, Any]) -> tuple[Facts, str | None]:
        """The plain keys of a configuration of this type, and what was assumed."""
        named = {name for names in self.names.values() for name in names}
        stated = {key: part[key] for key in part if key in self.keys or key in named}
        for key, names in self.names.items():
            present = [name for name in (*names, key) if stated.get(name) is not None]
            if len({repr(stated[name]) for name in present}) > 1:
                raise KVCacheValueError(
                    f"config: got {' and '.join(f'{name}={shown(stated[name])}' for name in present)},"
                    f" expected one of them, or the same in each"
                )
            for name in names:
                if name in stated:
                    stated[key] = stated.pop(name)
        facts = {key: value for key, value in {**self.defaults, **stated}.items() if value is not None}
        return facts, self.translate(facts) if self.translate else None


def _plain(*keys: str, translate: Callable[[Facts], str | None] | None = None, **defaults: Any) -> ModelType:
    return ModelType(keys=(*PLAIN_KEYS, *keys, *defaults), defaults=defaults, translate=translate)


# What a layer keeps, by the names that `layer_types` has for it. Sliding and full layers keep keys and values.
_FULL, _SLIDING, _LINEAR = "full_attention", "sliding_attention", "linear_attention"


def _patterned(rule: Callable[[int], bool], *, then: str = _FULL, otherwise: str = _SLIDING) -> Callable[[Facts], None]:
    """Fills in `layer_types` where it is missing: `then` for the layers that the rule names."""

    def translate(facts: Facts) -> None:
        if "layer_types" not in facts:
            facts["layer_types"] = [then if rule(layer) else otherwise for layer in range(num_layers(facts))]

    return translate


def _every(facts: Facts, key: str, *, then: str = _FULL, otherwise: str = _SLIDING) -> None:
    """Fills in `layer_types` where it is missing: `then` for the last of each `facts[key]` layers."""
    period = positive_int(facts, key)
    _patterned(lambda layer: (layer + 1) % period == 0, then=then, otherwise=otherwise)(facts)


def _every_of(key: str, **kinds: str) -> Callable[[Facts], None]:
    return lambda facts: _every(facts, key, **kinds)


def _has_layer_types(facts: Facts) -> None:
    if "layer_types" not in facts:
        raise KVCacheValueError("config: got no 'layer_types', expected a list with the kind of each layer")


def _one_of(*kinds: str) -> Mapping[str, str]:
    """The meaning of a list's entries: each stands for itself, and older names for newer ones."""
    older = {"attention": _FULL, "mamba": _LINEAR}
    return {**{kind: kind for kind in kinds}, **{old: new for old, new in older.items() if new in kinds}}


def _all_heads(facts: Facts) -> None:
    """Every query head has a key and a value of its own."""
    facts["num_key_value_heads"] = positive_int(facts, "num_attention_heads")


def _mha(
    layers: str = "num_hidden_layers",
    heads: str = "num_attention_heads",
    hidden: str = "hidden_size",
    head_dim: str | None = None,
) -> ModelType:
    """A type whose every query head has a key and a value of its own, and which calls its sizes so."""
    plain = {"num_hidden_layers": layers, "num_attention_heads": heads, "hidden_size": hidden}
    if head_dim:
        plain["head_dim"] = head_dim
    return ModelType(
        keys=tuple(plain),
        names={key: (name,) for key, name in plain.items() if name != key},
        translate=_all_heads,
    )


def _encoder(facts: Facts) -> None:
    if not flag(facts, "is_decoder", False):
        raise KVCacheValueError(
            "config: got no is_decoder=true: an encoder keeps no keys and values; expected a decoder"
        )
    if flag(facts, "add_cross_attention", False):
        raise KVCacheValueError(
            "config: got add_cross_attention=True: the layers also keep keys and values of an encoder's tokens;"
            " expected a decoder without an encoder"
        )
    _all_heads(facts)


def _latent(facts: Facts) -> str:
    """Multi-head latent attention: one latent a token, and one key with positions, for all heads together."""
    rank, rope = positive_int(facts, "kv_lora_rank"), positive_int(facts, "qk_rope_head_dim")
    heads, nope, value = (positive_int(facts, key) for key in ("num_attention_heads", "qk_nope_head_dim", "v_head_dim"))
    facts |= {"num_key_value_heads": 1, "head_dim": rank, "v_head_dim": rope}
    expanded = heads * (nope + rope + value)
    return (
        f"multi-head latent attention is read as the latent cache, one head with a key of kv_lora_rank={rank} and a"
        f" value of qk_rope_head_dim={rope} elements; a cache of every head's own keys and values takes"
        f" {expanded / (rank + rope):.3g} times as much"
    )


_LATENT_KEYS = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")


def _latent_type(*keys: str, first: Callable[[Facts], None] | None = None, **defaults: Any) -> ModelType:
    def translate(facts: Facts) -> str:
        if first:
            first(facts)
        return _latent(facts)

    return _plain(*_LATENT_KEYS, *keys, translate=translate, **defaults)


def _longcat(facts: Facts) -> str:
    facts["num_hidden_layers"] = 2 * num_layers(facts)  # each has two attentions
    return _latent(facts)


def _kimi_linear(facts: Facts) -> None:
    linear = facts.get("linear_attn_config", {})
    if "layer_types" in facts:
        return
    if not isinstance(linear, Mapping) or "full_attn_layers" not in linear:
        raise KVCacheValueError(
            "config: got no 'layer_types' and no 'full_attn_layers' in 'linear_attn_config', expected one of them"
        )
    count = num_layers(facts)
    from_one = linear["full_attn_layers"]
    if not isinstance(from_one, (list, tuple)) or not all(type(layer) is int for layer in from_one):
        raise KVCacheValueError(
            f"config.linear_attn_config.full_attn_layers: got {shown(from_one)}, expected a list of layers from 1"
        )
    full = indices({"full_attn_layers": [layer - 1 for layer in from_one]}, "full_attn_layers", count)
    facts["layer_types"] = [_FULL if layer in full else _LINEAR for layer in range(count)]


def _falcon(facts: Facts) -> str | None:
    heads = positive_int(facts, "num_attention_heads")
    if flag(facts, "new_decoder_architecture", False):
        facts["num_key_value_heads"] = shared = first_int(facts, "num_key_value_heads") or heads
        if shared != heads:
            return (
                f"num_kv_heads={shared} KV heads are read; transformers' own cache repeats them for each of"
                f" num_attention_heads={heads}"
            )
    else:
        facts["num_key_value_heads"] = 1 if flag(facts, "multi_query", True) else heads
    return None


def _gpt_bigcode(facts: Facts) -> None:
    if flag(facts, "multi_query", True):
        facts["num_key_value_heads"] = 1
    else:
        _all_heads(facts)


def _attn_config(facts: Facts) -> Mapping[str, Any]:
    value = facts.get("attn_config", {})
    if not isinstance(value, Mapping):
        raise KVCacheValueError(f"config.attn_config: got {shown(value)}, expected a mapping")
    return value


def _dbrx(facts: Facts) -> None:
    heads = _attn_config(facts).get("kv_n_heads")
    facts["num_key_value_heads"] = as_size("config.attn_config.kv_n_heads", 1 if heads is None else heads, 1)


def _mpt(facts: Facts) -> None:
    attention = _attn_config(facts)
    if attention.get("attn_type", "multihead_attention") != "multihead_attention" or attention.get("kv_n_heads"):
        raise KVCacheValueError(
            f"config.attn_config: got {shown(dict(attention))}, expected attn_type 'multihead_attention'"
        )
    _all_heads(facts)


def _bamba(facts: Facts) -> None:
    count = num_layers(facts)
    full = indices(facts, "attn_layer_indices", count) if "attn_layer_indices" in facts else frozenset()
    facts["layer_types"] = [_FULL if layer in full else _LINEAR for layer in range(count)]


def _jamba(facts: Facts) -> None:
    period, offset = positive_int(facts, "attn_layer_period"), first_int(facts, "attn_layer_offset", minimum=0)
    facts["layer_types"] = [_FULL if layer % period == offset else _LINEAR for layer in range(num_layers(facts))]


def _layers_block_type(facts: Facts) -> None:
    if "layers_block_type" not in facts:
        raise KVCacheValueError("config: got no 'layers_block_type', expected a list with the kind of each layer")
    facts["layer_types"] = facts["layers_block_type"]


def _zamba(facts: Facts) -> None:
    _layers_block_type(facts)
    facts["layer_types"] = per_layer(facts, "layer_types", num_layers(facts), _one_of("hybrid", _LINEAR))
    if "head_dim" not in facts:
        facts["head_dim"] = 2 * positive_int(facts, "hidden_size") // positive_int(facts, "num_attention_heads")


def _recurrent_gemma(facts: Facts) -> None:
    block, count = facts["block_types"], num_layers(facts)
    kinds = {"recurrent": _LINEAR, "attention": _SLIDING}
    if not isinstance(block, (list, tuple)) or not block:
        raise KVCacheValueError(f"config.block_types: got {shown(block)}, expected a list of {', '.join(kinds)}")
    read = per_layer({"block_types": block}, "block_types", len(block), kinds)
    facts["layer_types"] = [read[layer % len(block)] for layer in range(count)]


def _nemotron_h(facts: Facts) -> None:
    kinds = {"M": _LINEAR, "E": "moe", "*": _FULL, "-": "mlp"}
    if "layers_block_type" in facts:
        facts["layer_types"] = facts["layers_block_type"]
    elif "hybrid_override_pattern" in facts:
        pattern = facts["hybrid_override_pattern"]
        if not isinstance(pattern, str) or not set(pattern) <= set(kinds):
            raise KVCacheValueError(
                f"config.hybrid_override_pattern: got {shown(pattern)}, expected a string of {', '.join(kinds)}"
            )
        facts["layer_types"] = [kinds[letter] for letter in pattern]
    else:
        raise KVCacheValueError("config: got no 'layers_block_type' or 'hybrid_override_pattern', expected one of them")
    if isinstance(facts["layer_types"], (list, tuple)):
        facts["num_hidden_layers"] = len(facts["layer_types"])


def _lfm2(facts: Facts) -> None:
    if "layer_types" not in facts:
        count = num_layers(facts)
        full = indices(facts, "full_attn_idxs", count) if "full_attn_idxs" in facts else range(count)
        facts["layer_types"] = [_FULL if layer in full else "conv" for layer in range(count)]


def _modernbert_decoder(facts: Facts) -> None:
    facts.setdefault("sliding_window", positive_int(facts, "local_attention") // 2)
    period = positive_int(facts, "global_attn_every_n_layers")
    _patterned(lambda layer: layer % period == 0)(facts)
    _all_heads(facts)


def _mimo(facts: Facts) -> None:
    # The window counts the tokens before the query here, and the query's own elsewhere.
    if "sliding_window_size" in facts:
        facts["sliding_window"] = positive_int(facts, "sliding_window_size") + 1
    if "hybrid_layer_pattern" not in facts:
        _has_layer_types(facts)
    facts.setdefault("swa_num_key_value_heads", 2 * positive_int(facts, "num_key_value_heads"))


def _inkling(facts: Facts) -> None:
    if "layer_types" not in facts:
        count = num_layers(facts)
        local = (
            indices(facts, "local_layer_ids", count)
            if "local_layer_ids" in facts
            else frozenset(layer for layer in range(count) if (layer + 1) % 6)
        )
        facts["layer_types"] = ["hybrid_sliding" if layer in local else "hybrid" for layer in range(count)]


def _hrm_text(facts: Facts) -> None:
    # Each of its layers runs several times a token and keeps keys and values each time. What transformers writes holds
    # the number of layers beside the number of all these; other files hold the number of layers alone.
    if "num_layers_per_stack" not in facts:
        high, low = positive_int(facts, "H_cycles"), positive_int(facts, "L_cycles")
        facts["num_hidden_layers"] = num_layers(facts) * high * (low + 1)
    _all_heads(facts)


def _one_direction(facts: Facts) -> None:
    value = facts.get("use_bidirectional_attention")
    if value is True or value == "all":
        raise KVCacheValueError(
            f"config: got use_bidirectional_attention={value!r}: an encoder keeps no keys and values; expected a"
            " decoder"
        )


def _gemma(facts: Facts) -> None:
    _one_direction(facts)


def _gemma_patterned(facts: Facts) -> None:
    _one_direction(facts)
    if "layer_types" not in facts:
        _every(facts, "sliding_window_pattern")


def _gemma_shared(facts: Facts) -> None:
    """Gemma 3n and 4, whose last layers may read the cache of an earlier one."""
    _one_direction(facts)
    _has_layer_types(facts)
    count = num_layers(facts)
    shared = first_int(facts, "num_kv_shared_layers", minimum=0) or 0
    if shared > count:
        raise KVCacheValueError(f"config.num_kv_shared_layers: got {shared}, expected an int of at most {count}")
    own = per_layer(facts, "layer_types", count, _one_of(_FULL, _SLIDING))
    facts["layer_types"] = own[: count - shared] + ["shared"] * shared


def _gemma4(facts: Facts) -> None:
    _gemma_shared(facts)
    if "per_layer_config" in facts:
        facts.pop("global_head_dim", None)
        facts.pop("num_global_key_value_heads", None)
        facts["per_layer_config"] = _per_layer_config(facts)
    elif not flag(facts, "attention_k_eq_v", False):
        facts.pop("num_global_key_value_heads", None)


def _per_layer_config(facts: Facts) -> dict[int, Facts]:
    """What transformers writes of layers that differ from the rest, by their indices."""
    layers = facts["per_layer_config"]
    if not isinstance(layers, Mapping):
        raise KVCacheValueError(f"config.per_layer_config: got {shown(layers)}, expected a mapping")
    read: dict[int, Facts] = {}
    for layer, differs in layers.items():
        if not (isinstance(layer, (str, int)) and str(layer).isdecimal() and isinstance(differs, Mapping)):
            raise KVCacheValueError(
                f"config.per_layer_config: got {shown(layer)}: {shown(differs)}, expected a mapping for a layer's index"
            )
        if other := [key for key in differs if key in PLAIN_KEYS or key == "skip"] and [
            key for key in differs if key not in ("head_dim", "num_key_value_heads")
        ]:
            raise KVCacheValueError(
                f"config.per_layer_config[{layer}]: got {shown(other)}, expected head_dim and num_key_value_heads alone"
            )
        read[int(layer)] = dict(differs)
    return read


def _mllama(facts: Facts) -> str | None:
    count = num_layers(facts)
    cross = indices(facts, "cross_attention_layers", count)
    facts["layer_types"] = ["cross_attention" if layer in cross else _FULL for layer in range(count)]
    return (
        f"{len(cross)} cross-attention layers keep keys and values of an image's tokens alone, which are not counted"
        if cross
        else None
    )


def _may_slide(facts: Facts) -> None:
    """Where transformers derives the sliding layers by a rule of its own, `layer_types` has to say which they are."""
    if flag(facts, "use_sliding_window", False):
        _has_layer_types(facts)


_QWEN: dict[str, Any] = {"use_sliding_window": False, "sliding_window": 4096}
_INTERVAL = _every_of("full_attention_interval", otherwise=_LINEAR)
_D_MODEL = {"num_hidden_layers": ("n_layers",), "num_attention_heads": ("n_heads",), "hidden_size": ("d_model",)}
_OLD_NAMES = {"num_hidden_layers": ("n_layer",), "num_attention_heads": ("n_head",), "hidden_size": ("n_embd",)}


def _slides_where(facts: Facts) -> None:
    if "layer_types" not in facts and "sliding_window" in facts:
        _every(facts, "sliding_window_pattern")


_PLAIN_TYPES = """
apertus arcee aria_text cohere diffllama doge flex_olmo granite granitemoe granitemoeshared hunyuan_v1_dense
hunyuan_v1_moe hyperclovax jais2 llama nanochat nemotron olmo olmo2 olmoe phi phi3
"""
_ENCODER_TYPES = """
bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert rembert roberta
roberta-prelayernorm roc_bert roformer xlm-roberta xlm-roberta-xl xmod
"""

MODEL_TYPES: Mapping[str, ModelType] = types.MappingProxyType(
    {
        # The plain keys, and what transformers fills in.
        **dict.fromkeys(
            _PLAIN_TYPES.split(),
            _plain(),
        ),
        "bitnet": _plain(num_key_value_heads=5),
        "emu3_text_model": _plain(num_key_value_heads=8),
        "ernie4_5": _plain(num_key_value_heads=2, head_dim=128),
        "ernie4_5_moe": _plain(num_key_value_heads=4),
        "falcon_h1": _plain(num_key_value_heads=8),
        "glm": _plain(num_key_value_heads=2, head_dim=128),
        "glm4": _plain(num_key_value_heads=2, head_dim=128),
        "glm4_moe": _plain(num_key_value_heads=8),
        "helium": _plain(num_key_value_heads=20, head_dim=128),
        "hy_v3": _plain(num_key_value_heads=8, head_dim=128),
        "internlm3": _plain(num_key_value_heads=2, head_dim=128),
        "iquestcoder": _plain(num_key_value_heads=8, head_dim=128),
        "llama4_text": _plain(num_key_value_heads=8, head_dim=128),
        "minimax_m2": _plain(num_key_value_heads=8, head_dim=128),
        "ministral": _plain(num_key_value_heads=8, sliding_window=4096),
        "ministral3": _plain(num_key_value_heads=8, head_dim=128),
        "mistral": _plain(num_key_value_heads=8, sliding_window=4096),
        "mixtral": _plain(num_key_value_heads=8),
        "moshi": _plain(sliding_window=3000),
        "phi4_multimodal": _plain(num_key_value_heads=8),
        "phimoe": _plain(num_key_value_heads=8),
        "seed_oss": _plain(num_key_value_heads=8, head_dim=128),
        "solar_open": _plain(num_key_value_heads=8, head_dim=128),
        "stablelm": _plain(num_key_value_heads=32),
        "starcoder2": _plain(num_key_value_heads=2),
        "zaya": _plain(num_key_value_heads=2, head_dim=128),
        # Some layers slide.
        "afmoe": _plain(
            head_dim=128,
            sliding_window=1024,
            global_attn_every_n_layers=4,
            translate=_every_of("global_attn_every_n_layers"),
        ),
        "beam": _plain(num_key_value_heads=8, head_dim=128, sliding_window=512, translate=_has_layer_types),
        "cohere2": _plain(sliding_window=4096, sliding_window_pattern=4, translate=_every_of("sliding_window_pattern")),
        "cohere2_moe": _plain(head_dim=128, sliding_window=4096, translate=_has_layer_types),
        "cohere_compass_text": _plain(sliding_window=4096, translate=_has_layer_types),
        "cwm": _plain(
            num_key_value_heads=8, head_dim=128, sliding_window=8192, translate=_patterned(lambda layer: layer % 4 == 0)
        ),
        "dots1": _plain("max_window_layers", num_key_value_heads=32, sliding_window=4096, max_window_layers=62),
        "exaone4": _plain(
            num_key_value_heads=32, sliding_window=4096, sliding_window_pattern=4, translate=_slides_where
        ),
        "exaone_moe": _plain(
            num_key_value_heads=32, sliding_window=4096, sliding_window_pattern=4, translate=_slides_where
        ),
        "flint": _plain(num_key_value_heads=4, head_dim=128, sliding_window=513, translate=_has_layer_types),
        "gemma": _plain("use_bidirectional_attention", num_key_value_heads=16, head_dim=256, translate=_gemma),
        "gemma2": _plain(
            "use_bidirectional_attention",
            num_key_value_heads=4,
            head_dim=256,
            sliding_window=4096,
            sliding_window_pattern=2,
            translate=_gemma_patterned,
        ),
        "gemma3_text": _plain(
            "use_bidirectional_attention",
            num_key_value_heads=4,
            head_dim=256,
            sliding_window=4096,
            sliding_window_pattern=6,
            translate=_gemma_patterned,
        ),
        "gemma3n_text": _plain(
            num_key_value_heads=2, head_dim=256, sliding_window=512, num_kv_shared_layers=15, translate=_gemma_shared
        ),
        "gemma4_text": _plain(
            "use_bidirectional_attention",
            "per_layer_config",
            "attention_k_eq_v",
            "num_global_key_value_heads",
            num_key_value_heads=4,
            head_dim=256,
            sliding_window=512,
            num_kv_shared_layers=0,
            global_head_dim=512,
            translate=_gemma4,
        ),
        "gemma4_unified_text": _plain(
            "use_bidirectional_attention",
            "per_layer_config",
            "attention_k_eq_v",
            "num_global_key_value_heads",
            num_key_value_heads=4,
            head_dim=256,
            sliding_window=1024,
            num_kv_shared_layers=0,
            global_head_dim=512,
            translate=_gemma4,
        ),
        # The published checkpoints name no dtype; all that is not MXFP4 in them is bfloat16.
        "gpt_oss": _plain(
            num_key_value_heads=8,
            head_dim=64,
            sliding_window=128,
            dtype="bfloat16",
            translate=_patterned(lambda layer: layer % 2 == 1),
        ),
        "granite_swa": _plain(num_key_value_heads=4, sliding_window=128, translate=_has_layer_types),
        "granitemoe_swa": _plain(sliding_window=128, translate=_has_layer_types),
        "kolibri1": _plain(num_key_value_heads=4, head_dim=128, sliding_window=513, translate=_has_layer_types),
        "laguna": _plain(num_key_value_heads=8, head_dim=128, sliding_window=512, translate=_has_layer_types),
        "mellum": _plain(num_key_value_heads=4, head_dim=128, sliding_window=1024, translate=_has_layer_types),
        "mimo_v2_flash": _plain(
            "hybrid_layer_pattern",
            "sliding_window_size",
            "swa_num_key_value_heads",
            "swa_head_dim",
            "swa_v_head_dim",
            num_key_value_heads=4,
            head_dim=192,
            v_head_dim=128,
            sliding_window=129,
            translate=_mimo,
        ),
        "modernbert-decoder": _plain(local_attention=128, global_attn_every_n_layers=3, translate=_modernbert_decoder),
        "olmo3": _plain(sliding_window=4096, translate=_patterned(lambda layer: layer % 4 == 3)),
        "qwen2": _plain(num_key_value_heads=32, max_window_layers=28, **_QWEN),
        "qwen2_vl": _plain(num_key_value_heads=8, max_window_layers=80, **_QWEN),
        "qwen2_vl_text": _plain(num_key_value_heads=8, max_window_layers=80, **_QWEN),
        "qwen2_5_vl": _plain(num_key_value_heads=8, max_window_layers=80, **_QWEN),
        "qwen2_5_vl_text": _plain(num_key_value_heads=8, max_window_layers=80, **_QWEN),
        "qwen2_moe": _plain(num_key_value_heads=16, translate=_may_slide, **_QWEN),
        "qwen3": _plain(num_key_value_heads=32, head_dim=128, max_window_layers=28, **_QWEN),
        "qwen3_moe": _plain(num_key_value_heads=4, **_QWEN),
        "smollm3": _plain(num_key_value_heads=4, use_sliding_window=False, translate=_may_slide),
        "vaultgemma": _plain(
            num_key_value_heads=4, head_dim=256, sliding_window=4096, translate=_patterned(lambda layer: layer % 2 == 1)
        ),
        # Some layers keep a state instead, or nothing.
        "bamba": _plain("attn_layer_indices", num_key_value_heads=8, translate=_bamba),
        "granitemoehybrid": ModelType(names={"layer_types": ("layers_block_type",)}, translate=_has_layer_types),
        "inkling_text": ModelType(
            keys=(*PLAIN_KEYS, "local_layer_ids", "swa_num_key_value_heads", "swa_head_dim"),
            names={"sliding_window": ("sliding_window_size",)},
            defaults={
                "num_key_value_heads": 8,
                "head_dim": 128,
                "sliding_window": 512,
                "swa_num_key_value_heads": 16,
                "swa_head_dim": 128,
            },
            translate=_inkling,
        ),
        "inkling2_text": ModelType(
            keys=(*PLAIN_KEYS, "swa_num_key_value_heads", "swa_head_dim"),
            names={"sliding_window": ("sliding_window_size",)},
            defaults={
                "num_key_value_heads": 8,
                "head_dim": 128,
                "sliding_window": 1024,
                "swa_num_key_value_heads": 8,
                "swa_head_dim": 128,
            },
            translate=_has_layer_types,
        ),
        "jamba": _plain(num_key_value_heads=8, attn_layer_period=8, attn_layer_offset=4, translate=_jamba),
        "lfm2": _plain("full_attn_idxs", num_key_value_heads=8, translate=_lfm2),
        "lfm2_moe": _plain(num_key_value_heads=8, translate=_has_layer_types),
        "lfm3": _plain(num_key_value_heads=4, head_dim=128, sliding_window=256, translate=_has_layer_types),
        "minimax": _plain(num_key_value_heads=8, translate=_has_layer_types),
        "minimax_m3_vl_text": _plain(num_key_value_heads=4, head_dim=128, translate=_has_layer_types),
        "mllama_text_model": _plain(
            num_key_value_heads=8, cross_attention_layers=[3, 8, 13, 18, 23, 28, 33, 38], translate=_mllama
        ),
        "nemotron_h": _plain(
            "layers_block_type", "hybrid_override_pattern", num_key_value_heads=8, head_dim=128, translate=_nemotron_h
        ),
        "olmo_hybrid": _plain(translate=_has_layer_types),
        "qwen3_5_moe_text": _plain(num_key_value_heads=2, head_dim=256, full_attention_interval=4, translate=_INTERVAL),
        "qwen3_5_text": _plain(num_key_value_heads=4, head_dim=256, full_attention_interval=4, translate=_INTERVAL),
        "qwen3_next": _plain(num_key_value_heads=2, head_dim=256, full_attention_interval=4, translate=_INTERVAL),
        "recurrent_gemma": ModelType(
            keys=(*PLAIN_KEYS[:5], "block_types"),
            names={"sliding_window": ("attention_window_size",)},
            defaults={"sliding_window": 2048, "block_types": ["recurrent", "recurrent", "attention"]},
            translate=_recurrent_gemma,
        ),
        "zamba": ModelType(
            keys=(*PLAIN_KEYS, "layers_block_type"),
            names={"head_dim": ("attention_head_dim",)},
            defaults={"num_key_value_heads": 16},
            translate=_zamba,
        ),
        "zamba2": ModelType(
            keys=(
                "num_hidden_layers",
                "num_attention_heads",
                "num_key_value_heads",
                "hidden_size",
                "layers_block_type",
            ),
            translate=_zamba,
        ),
        # One latent a token for all heads.
        "axk1": _latent_type(),
        "deepseek_v2": _latent_type(),
        "deepseek_v3": _latent_type(),
        "glm4_moe_lite": _latent_type(),
        "minicpm3": _latent_type(),
        "youtu": _latent_type(),
        "bailing_hybrid": _latent_type(layer_group_size=6, first=_every_of("layer_group_size", otherwise=_LINEAR)),
        "kimi_linear": _latent_type("linear_attn_config", first=_kimi_linear),
        "longcat_flash": ModelType(
            keys=(*PLAIN_KEYS, *_LATENT_KEYS),
            names={"num_hidden_layers": ("num_layers",)},
            translate=_longcat,
        ),
        # Names of their own.
        **dict.fromkeys(["gpt2", "gptj", "ctrl"], _mha("n_layer", "n_head", "n_embd")),
        **dict.fromkeys(["biogpt", "git", "gpt_neox", "gpt_neox_japanese", "opt", "persimmon"], _mha()),
        "bloom": ModelType(
            keys=("num_hidden_layers", "num_attention_heads", "hidden_size"),
            names={"num_hidden_layers": ("n_layer",), "num_attention_heads": ("n_head",), "hidden_size": ("n_embed",)},
            translate=_all_heads,
        ),
        "codegen": _mha("n_layer", "n_head", "n_embd"),
        "cpmant": _mha(head_dim="dim_head"),
        "dbrx": ModelType(
            keys=("attn_config",),
            names={
                "num_hidden_layers": ("n_layers",),
                "num_attention_heads": ("n_heads",),
                "hidden_size": ("d_model",),
            },
            translate=_dbrx,
        ),
        "falcon": ModelType(
            keys=("num_hidden_layers", "num_attention_heads", "hidden_size", "multi_query", "new_decoder_architecture"),
            names={"num_key_value_heads": ("num_kv_heads",)},
            translate=_falcon,
        ),
        "gpt_bigcode": ModelType(keys=("multi_query",), names=_OLD_NAMES, translate=_gpt_bigcode),
        "gpt_neo": _mha("num_layers", "num_heads"),
        "hrm_text": _plain("num_layers_per_stack", head_dim=128, H_cycles=2, L_cycles=3, translate=_hrm_text),
        "jetmoe": ModelType(
            keys=("num_hidden_layers", "num_key_value_heads"),
            names={"head_dim": ("kv_channels",)},
            defaults={"num_key_value_heads": 16, "head_dim": 128},
        ),
        "mpt": ModelType(
            keys=("attn_config",),
            names={
                "num_hidden_layers": ("n_layers",),
                "num_attention_heads": ("n_heads",),
                "hidden_size": ("d_model",),
            },
            translate=_mpt,
        ),
        "xglm": _mha("num_layers", "attention_heads", "d_model"),
        # Encoders, unless they are used as decoders.
        **dict.fromkeys(
            _ENCODER_TYPES.split(),
            ModelType(
                keys=("num_hidden_layers", "num_attention_heads", "hidden_size", "is_decoder", "add_cross_attention"),
                translate=_encoder,
            ),
        ),
    }
)

_STATE = "its layers keep a state, not tokens"
_INDEXER = "sparse attention also keeps an indexer's key of each token"
_ENCODER = "it is no decoder, and keeps no keys and values"
_CROSS = "the decoder's layers also keep keys and values of the encoder's tokens"
_OTHER = "its cache is another than each layer's keys and values"

_ENCODER_DECODERS = """
bart bigbird_pegasus blenderbot blenderbot-small marian mbart musicgen musicgen_decoder musicgen_melody
musicgen_melody_decoder mvp pegasus plbart prophetnet trocr whisper
"""

REFUSED: Mapping[str, str] = types.MappingProxyType(
    {
        **dict.fromkeys(["falcon_mamba", "mamba", "mamba2", "rwkv", "xlstm"], _STATE),
        **dict.fromkeys(
            ["axk2", "deepseek_v32", "dots3_note_text", "glm_moe_dsa", "hy_v4", "qwen4_exp_text"], _INDEXER
        ),
        **dict.fromkeys(_ENCODER_DECODERS.split(), _CROSS),
        **dict.fromkeys(["openai-gpt", "xlm"], "it runs without a cache"),
        "blt": "it is several models, each with a cache of its own",
        "deepseek_v4": "compressed attention keeps one entry for several tokens",
        **dict.fromkeys(["gemma4_assistant", "gemma4_unified_assistant"], "its layers read another model's cache"),
        "reformer": _OTHER,
        "xlnet": _OTHER,
    }
)
"""Types of models that kvjax knows to keep something else than each layer's keys and values, and what."""

CONTRADICTIONS: Mapping[str, str] = types.MappingProxyType(
    {
        **dict.fromkeys(
            (
                "attn_layer_indices",
                "attn_layer_offset",
                "attn_layer_period",
                "attn_type_list",
                "block_types",
                "full_attention_interval",
                "full_attn_idxs",
                "hybrid_layer_ids",
                "hybrid_override_pattern",
                "layer_group_size",
                "layers_block_type",
                "linear_attn_config",
                "linear_num_key_heads",
                "mamba_d_state",
                "mamba_expand",
                "ssm_cfg",
                "ssm_state_size",
                "state_size",
                "lru_width",
            ),
            "some layers may keep a state, not tokens",
        ),
        **dict.fromkeys(
            ("compress_rates", "compress_ratios"), "compressed attention keeps one entry for several tokens"
        ),
        "cross_attention_layers": "some layers keep keys and values of other tokens",
        "add_cross_attention": _CROSS,
        **dict.fromkeys(("index_head_dim", "index_topk", "indexer_head_dim"), _INDEXER),
        "kv_lora_rank": "multi-head latent attention keeps one latent a token",
        **dict.fromkeys(("num_kv_shared_layers", "kv_source_layers"), "some layers read another layer's cache"),
        "per_layer_config": "layers differ",
        **dict.fromkeys(
            (
                "attn_config",
                "kv_n_heads",
                "multi_query",
                "multi_query_attention",
                "multi_query_group_num",
                "n_head_kv",
                "new_decoder_architecture",
                "num_kv_heads",
                "num_query_groups",
            ),
            "it may say how many KV heads there are",
        ),
        **dict.fromkeys(
            ("num_kv_heads", "n_head_kv", "kv_n_heads", "attn_config"), "it may say how many KV heads there are"
        ),
        **dict.fromkeys(
            ("attention_head_dim", "attention_hidden_size", "d_head", "d_kv", "dim_head", "kv_channels"),
            "it may say how large a head is",
        ),
        **dict.fromkeys(
            (
                "attention_types",
                "attention_window_size",
                "global_attn_every_n_layers",
                "local_attention",
                "window_size",
            ),
            "it may say which layers slide",
        ),
        **dict.fromkeys(
            (
                "decoder",
                "decoder_config",
                "generator",
                "language_config",
                "llm_config",
                "text_encoder",
                "thinker_config",
            ),
            "the language model's keys may stand in it; give that part",
        ),
    }
)
"""Keys that say of a model of no known type that it may keep something else than the plain keys say."""

COMPOSITES: Mapping[str, str] = types.MappingProxyType({})

GENERIC = ModelType(
    keys=(
        *PLAIN_KEYS,
        "global_head_dim",
        "hybrid_layer_pattern",
        "max_window_layers",
        "num_global_key_value_heads",
        "sliding_window_pattern",
        "swa_head_dim",
        "swa_num_key_value_heads",
        "swa_v_head_dim",
        "use_sliding_window",
        "v_head_dim",
    )
)
"""How a model of no known type is read."""

_DOUBTFUL = re.compile(
    r"(?:^|_)(?:kv|key|keys|value|values|head|heads|latent|lora|window|sliding|local|global|linear|mamba|ssm|rnn|gdn|"
    r"recurrent|state|conv|cache|cross|shared|share|layer_type|layers_type|block_type|pattern|interval|hybrid)(?:_|$)"
)
_HARMLESS = re.compile(
    r"^(?:use_cache|vision|audio|image|moe|mlp|no_rope)|expert|bias|norm|dropout|lm_head|init|chunk_size_feed|logit|_config$|"
    r"^cache_|token|embed|output_|_act$|loss|rope|router|dtype|scal"
)


@dataclasses.dataclass(frozen=True)
class Doubts:
    """What to warn of, if anything, and whether the layers were guessed by the plain keys."""

    warning: str = ""
    guessed: bool = False


def plain_keys(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], Facts, Doubts]:
    """The part of a configuration that describes the language model, its plain keys, and what is doubtful about them.

    Raises:
      KVCacheValueError: a model that keeps something else than its layers' keys and values, or that may.
    """
    part, model_type = _language_model(config)
    for place in (config, part):
        _refuse(place)
    if (known := MODEL_TYPES.get(model_type) if isinstance(model_type, str) else None) is not None:
        if part.get("per_layer_config") and "per_layer_config" not in known.keys:
            raise _contradiction(part, "per_layer_config")
        facts, assumed = known.plain(part)
        return part, facts, Doubts(f"config.model_type: got {model_type!r}: {assumed}" if assumed else "")
    for key in CONTRADICTIONS:
        if part.get(key):
            raise _contradiction(part, key)
    facts, _ = GENERIC.plain(part)
    doubtful = ", ".join(
        shown(key)
        for key, value in part.items()
        if isinstance(key, str)
        and isinstance(value, (int, str, list))
        and value
        and key not in GENERIC.keys
        and _DOUBTFUL.search(key)
        and not _HARMLESS.search(key)
    )
    if model_type is not None:
        also = f", and {doubtful}, which it does not read" if doubtful else ""
        return part, facts, Doubts(f"config.model_type: got {shown(model_type)}, which kvjax does not know{also}", True)
    return part, facts, Doubts(f"config: got {doubtful}, which kvjax does not read" if doubtful else "", True)


def _language_model(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], object]:
    """The part that describes the language model, and its type: `text_config` alone, where there is one."""
    text, outer = config.get("text_config"), config.get("model_type")
    if text is None:
        return config, outer
    if not isinstance(text, Mapping):
        raise KVCacheValueError(f"config.text_config: got {shown(text)}, expected a mapping")
    model_type = text.get("model_type")
    if model_type is None and isinstance(outer, str):
        model_type = COMPOSITES.get(outer, outer)
    return text, model_type


def _refuse(place: Mapping[str, Any]) -> None:
    model_type = place.get("model_type")
    if isinstance(model_type, str) and model_type in REFUSED:
        raise KVCacheValueError(
            f"config.model_type: got {model_type!r}: {REFUSED[model_type]}; expected a decoder whose layers keep keys"
            " and values"
        )
    if place.get("is_encoder_decoder"):
        raise KVCacheValueError(
            f"config: got is_encoder_decoder={shown(place['is_encoder_decoder'])}: {_CROSS}; expected a decoder alone"
        )


def _contradiction(place: Mapping[str, Any], key: str) -> KVCacheValueError:
    return KVCacheValueError(
        f"config: got {key}={shown(place[key])}: {CONTRADICTIONS[key]}; expected a model_type that kvjax knows, or one"
        " whose layers each keep keys and values as the plain keys say"
    )
