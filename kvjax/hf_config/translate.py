"""Translates model-specific keys to the plain keys, in place.

Each function returns what it had to assume, if anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvjax.errors import KVCacheValueError, shown
from kvjax.hf_config.keys import (
    PLAIN_KEYS,
    Facts,
    as_size,
    first_int,
    flag,
    indices,
    num_layers,
    per_layer,
    positive_int,
)

# Kinds of layers, named as in `layer_types`. Sliding and full layers cache keys and values.
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"

# transformers' `num_layers`. No row has it as a default: beside a stated `num_hidden_layers` it would contradict it.
LONGCAT_LAYERS = 28


def patterned(rule: Callable[[int], bool], *, then: str = FULL, otherwise: str = SLIDING) -> Callable[[Facts], None]:
    """Fills in a missing `layer_types`: `then` for the layers that satisfy the rule."""

    def translate(facts: Facts) -> None:
        if "layer_types" not in facts:
            facts["layer_types"] = [then if rule(layer) else otherwise for layer in range(num_layers(facts))]

    return translate


def every(facts: Facts, key: str, *, then: str = FULL, otherwise: str = SLIDING) -> None:
    """Fills in a missing `layer_types`: `then` for the last of each `facts[key]` layers."""
    period = positive_int(facts, key)
    patterned(lambda layer: (layer + 1) % period == 0, then=then, otherwise=otherwise)(facts)


def every_of(key: str, **kinds: str) -> Callable[[Facts], None]:
    """Returns `every` as a row's translation."""
    return lambda facts: every(facts, key, **kinds)


def has_layer_types(facts: Facts) -> None:
    """Requires `layer_types`, without which the kinds of layers are unknown."""
    if "layer_types" not in facts:
        raise KVCacheValueError("config: got no 'layer_types', expected a list with the kind of each layer")


def no_window(facts: Facts) -> None:
    """Ignores a window: the type's class has none, so its layers cache every token."""
    facts.pop("sliding_window", None)


def one_of(*kinds: str) -> Mapping[str, str]:
    """Returns the meanings of a list's entries: each kind is itself, older names are mapped to newer ones."""
    older = {"attention": FULL, "mamba": LINEAR}
    return {**{kind: kind for kind in kinds}, **{old: new for old, new in older.items() if new in kinds}}


def all_heads(facts: Facts) -> None:
    """Sets one KV head per query head."""
    facts["num_key_value_heads"] = positive_int(facts, "num_attention_heads")


def encoder(facts: Facts) -> None:
    """Accepts an encoder's layers used as a decoder; rejects encoders, which cache nothing."""
    if not flag(facts, "is_decoder", False):
        raise KVCacheValueError(
            "config: got no is_decoder=true: an encoder caches no keys and values; expected a decoder"
        )
    if flag(facts, "add_cross_attention", False):
        raise KVCacheValueError(
            "config: got add_cross_attention=True: the layers also cache keys and values of an encoder's tokens;"
            " expected a decoder without an encoder"
        )
    all_heads(facts)


def latent(facts: Facts) -> None:
    """Multi-head latent attention: one latent per token and one key with positions, shared by all heads.

    No transformers class of the types read here has a window: their masks ignore one, while their caches drop tokens by
    it. Those of dots3_note have one, and an indexer's keys besides, for which they are refused by name.
    """
    if not flag(facts, "use_sliding_window", True):
        facts.pop("sliding_window", None)
    if "sliding_window" in facts:
        raise KVCacheValueError(
            f"config: got sliding_window={shown(facts['sliding_window'])} for multi-head latent attention, expected"
            " none or null, or use_sliding_window=false: no model of this type has a window"
        )
    rank, rope = positive_int(facts, "kv_lora_rank"), first_int(facts, "qk_rope_head_dim", minimum=0)
    if rope is None:
        raise KVCacheValueError("config: got no 'qk_rope_head_dim', expected an int of at least 0")
    facts |= {"num_key_value_heads": 1, "head_dim": rank + rope, "v_head_dim": rank, "is_mla": True}


def longcat(facts: Facts) -> None:
    """LongCat: each of `num_layers` has two attentions, which `num_hidden_layers` counts, with a cache each."""
    layers, attentions = first_int(facts, "num_layers"), first_int(facts, "num_hidden_layers")
    if attentions is None:
        facts["num_hidden_layers"] = 2 * (LONGCAT_LAYERS if layers is None else layers)
    elif attentions % 2 or layers not in (None, attentions // 2):
        raise KVCacheValueError(
            f"config: got num_layers={shown(layers)} and num_hidden_layers={attentions}, expected 2 attentions for each"
            " of num_layers"
        )
    latent(facts)


def kimi_linear(facts: Facts) -> None:
    """Kimi Linear: linear and latent attention layers, which `linear_attn_config` counts from 1."""
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
    facts["layer_types"] = [FULL if layer in full else LINEAR for layer in range(count)]


def falcon(facts: Facts) -> str | None:
    """Falcon: one KV head (7B), one per query head, or a few (40B and 180B)."""
    heads = positive_int(facts, "num_attention_heads")
    if flag(facts, "new_decoder_architecture", False):
        facts["num_key_value_heads"] = shared = first_int(facts, "num_key_value_heads") or heads
        if shared != heads:
            return (
                f"num_kv_heads={shared} KV heads are assumed; transformers' own cache repeats them for each of"
                f" num_attention_heads={heads}"
            )
    else:
        facts["num_key_value_heads"] = 1 if flag(facts, "multi_query", True) else heads
    return None


def gpt_bigcode(facts: Facts) -> None:
    """GPTBigCode: one KV head, or one per query head."""
    if flag(facts, "multi_query", True):
        facts["num_key_value_heads"] = 1
    else:
        all_heads(facts)


def attn_config(facts: Facts) -> Mapping[str, Any]:
    """Returns the mapping of MPT's and DBRX's attention keys."""
    value = facts.get("attn_config", {})
    if not isinstance(value, Mapping):
        raise KVCacheValueError(f"config.attn_config: got {shown(value)}, expected a mapping")
    return value


def dbrx(facts: Facts) -> None:
    """DBRX: the number of KV heads is in `attn_config`."""
    heads = attn_config(facts).get("kv_n_heads")
    facts["num_key_value_heads"] = as_size("config.attn_config.kv_n_heads", 1 if heads is None else heads, 1)


def mpt(facts: Facts) -> None:
    """MPT: one KV head per query head. `attn_config` may specify others, which transformers does not build."""
    attention = attn_config(facts)
    if attention.get("attn_type", "multihead_attention") != "multihead_attention" or attention.get("kv_n_heads"):
        raise KVCacheValueError(
            f"config.attn_config: got {shown(dict(attention))}, expected attn_type 'multihead_attention'"
        )
    all_heads(facts)


def bamba(facts: Facts) -> None:
    """Bamba: attention layers, by index, among Mamba layers."""
    count = num_layers(facts)
    full = indices(facts, "attn_layer_indices", count) if "attn_layer_indices" in facts else frozenset()
    facts["layer_types"] = [FULL if layer in full else LINEAR for layer in range(count)]


def jamba(facts: Facts) -> None:
    """Jamba: one attention layer per period, the others Mamba layers."""
    period, offset = positive_int(facts, "attn_layer_period"), first_int(facts, "attn_layer_offset", minimum=0)
    facts["layer_types"] = [FULL if layer % period == offset else LINEAR for layer in range(num_layers(facts))]


def layers_block_type(facts: Facts) -> None:
    """Zamba: `layers_block_type` is its name for `layer_types`."""
    if "layers_block_type" not in facts:
        raise KVCacheValueError("config: got no 'layers_block_type', expected a list with the kind of each layer")
    facts["layer_types"] = facts["layers_block_type"]


def zamba(facts: Facts) -> None:
    """Zamba: Mamba layers, some of them with attention over twice the hidden size."""
    layers_block_type(facts)
    facts["layer_types"] = per_layer(facts, "layer_types", num_layers(facts), one_of("hybrid", LINEAR))
    if "head_dim" not in facts:
        facts["head_dim"] = 2 * positive_int(facts, "hidden_size") // positive_int(facts, "num_attention_heads")


def recurrent_gemma(facts: Facts) -> None:
    """RecurrentGemma: a repeated block of recurrent and sliding layers."""
    block, count = facts.get("block_types"), num_layers(facts)
    kinds = {"recurrent": LINEAR, "attention": SLIDING}
    if not isinstance(block, (list, tuple)) or not block:
        raise KVCacheValueError(f"config.block_types: got {shown(block)}, expected a list of {', '.join(kinds)}")
    read = per_layer({"block_types": block}, "block_types", len(block), kinds)
    facts["layer_types"] = [read[layer % len(block)] for layer in range(count)]


def nemotron_h(facts: Facts) -> None:
    """Nemotron-H: Mamba, attention, MLP and expert layers, as a list or as a string of letters."""
    kinds = {"M": LINEAR, "E": "moe", "*": FULL, "-": "mlp"}
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


def lfm2(facts: Facts) -> None:
    """LFM2: attention layers, by index, among convolutions."""
    if "layer_types" not in facts:
        count = num_layers(facts)
        full = indices(facts, "full_attn_idxs", count) if "full_attn_idxs" in facts else range(count)
        facts["layer_types"] = [FULL if layer in full else "conv" for layer in range(count)]


def modernbert_decoder(facts: Facts) -> None:
    """ModernBERT decoder: every n-th layer is full; the window is half of `local_attention`."""
    facts.setdefault("sliding_window", positive_int(facts, "local_attention") // 2)
    period = positive_int(facts, "global_attn_every_n_layers")
    patterned(lambda layer: layer % period == 0)(facts)
    all_heads(facts)


def mimo(facts: Facts) -> None:
    """MiMo: sliding layers have twice the KV heads."""
    # Its window excludes the query's own token; kvjax's includes it.
    if "sliding_window_size" in facts:
        facts["sliding_window"] = positive_int(facts, "sliding_window_size") + 1
    if "hybrid_layer_pattern" not in facts:
        has_layer_types(facts)
    facts.setdefault("swa_num_key_value_heads", 2 * positive_int(facts, "num_key_value_heads"))


def inkling(facts: Facts) -> None:
    """Inkling: sliding layers by index, or five of six."""
    if "layer_types" not in facts:
        count = num_layers(facts)
        local = (
            indices(facts, "local_layer_ids", count)
            if "local_layer_ids" in facts
            else frozenset(layer for layer in range(count) if (layer + 1) % 6)
        )
        facts["layer_types"] = ["hybrid_sliding" if layer in local else "hybrid" for layer in range(count)]


def hrm_text(facts: Facts) -> None:
    """HRM: layers run several times per token, and cache keys and values each time."""
    # Configurations by transformers hold both the number of layers and the number of all runs; others only the former.
    if "num_layers_per_stack" not in facts:
        high, low = positive_int(facts, "H_cycles"), positive_int(facts, "L_cycles")
        facts["num_hidden_layers"] = num_layers(facts) * high * (low + 1)
    all_heads(facts)


def one_direction(facts: Facts) -> None:
    """Rejects embedding models, which attend in both directions and cache nothing."""
    value = facts.get("use_bidirectional_attention")
    if value is True or value == "all":
        raise KVCacheValueError(
            f"config: got use_bidirectional_attention={value!r}: an encoder caches no keys and values; expected a"
            " decoder"
        )


def gemma3(facts: Facts) -> None:
    """Gemma 3: sliding layers follow a pattern."""
    one_direction(facts)
    if "layer_types" not in facts:
        every(facts, "sliding_window_pattern")


def gemma_shared(facts: Facts) -> None:
    """Gemma 3n and 4: the last layers may read an earlier layer's cache."""
    one_direction(facts)
    has_layer_types(facts)
    count = num_layers(facts)
    shared = first_int(facts, "num_kv_shared_layers", minimum=0) or 0
    if shared > count:
        raise KVCacheValueError(f"config.num_kv_shared_layers: got {shared}, expected an int of at most {count}")
    own = per_layer(facts, "layer_types", count, one_of(FULL, SLIDING))
    facts["layer_types"] = own[: count - shared] + ["shared"] * shared


def gemma4(facts: Facts) -> None:
    """Gemma 4: full layers have other head sizes, and the last layer is full whatever `layer_types` says."""
    gemma_shared(facts)
    if facts["layer_types"][-1] == SLIDING:
        facts["layer_types"][-1] = FULL
    if "per_layer_config" in facts:
        facts.pop("global_head_dim", None)
        facts.pop("num_global_key_value_heads", None)
        facts["per_layer_config"] = per_layer_config(facts)
    elif not flag(facts, "attention_k_eq_v", False):
        facts.pop("num_global_key_value_heads", None)


def per_layer_config(facts: Facts) -> dict[int, Facts]:
    """Returns the head sizes and KV heads that override the model's, by layer.

    Refuses other plain keys and "skip", which would change what is cached. Remaining keys have no effect.
    """
    layers = facts["per_layer_config"]
    if not isinstance(layers, Mapping):
        raise KVCacheValueError(f"config.per_layer_config: got {shown(layers)}, expected a mapping")
    supported = ("head_dim", "num_key_value_heads")
    unsupported = {*PLAIN_KEYS, "skip"} - {*supported}
    read: dict[int, Facts] = {}
    for layer, differs in layers.items():
        if not (isinstance(layer, (str, int)) and str(layer).isdecimal() and isinstance(differs, Mapping)):
            raise KVCacheValueError(
                f"config.per_layer_config: got {shown(layer)}: {shown(differs)}, expected a mapping for a layer's index"
            )
        if other := [key for key in differs if key in unsupported]:
            raise KVCacheValueError(
                f"config.per_layer_config[{layer}]: got {shown(other)}, expected only head_dim and num_key_value_heads"
            )
        read[int(layer)] = {key: differs[key] for key in supported if key in differs}
    return read


def mllama(facts: Facts) -> str | None:
    """Llama 3.2 Vision: layers that attend to an image, by index."""
    count = num_layers(facts)
    cross = indices(facts, "cross_attention_layers", count)
    facts["layer_types"] = ["cross_attention" if layer in cross else FULL for layer in range(count)]
    return (
        f"{len(cross)} cross-attention layers cache only keys and values of an image's tokens, which are not counted"
        if cross
        else None
    )


def may_slide(facts: Facts) -> None:
    """Requires `layer_types` where transformers derives the sliding layers by a rule of its own."""
    if flag(facts, "use_sliding_window", False):
        has_layer_types(facts)


def slides_where(facts: Facts) -> None:
    """Exaone: layers follow a pattern if there is a window."""
    if "layer_types" not in facts and "sliding_window" in facts:
        every(facts, "sliding_window_pattern")
