"""The supported `model_type`s: each one's keys, and their meaning for the KV cache.

A type's row translates its configuration to the plain keys that `kvjax.model_config` reads. transformers is the
reference: `docs/notes/models.md` compares, for each of its causal language models, its own cache with what is read
here.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Mapping
from typing import Any

from kvjax.errors import KVCacheValueError, shown
from kvjax.hf_config import translate
from kvjax.hf_config.default_sizes import DEFAULT_SIZES
from kvjax.hf_config.keys import PLAIN_KEYS, Facts


@dataclasses.dataclass(frozen=True)
class ModelType:
    """How a model type's configuration describes its KV cache.

    Attributes:
      keys: the keys that are read; all others are ignored.
      names: the type's own names of plain keys. Those in `keys` are read by their plain names too, as transformers does
        by a class's `attribute_map`.
      defaults: values that transformers' class fills in for missing keys. A null is not missing.
      translate: translates the type's own keys to plain ones, in place; returns what it had to assume, if anything.
    """

    keys: tuple[str, ...] = PLAIN_KEYS
    names: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    translate: Callable[[Facts], str | None] | None = None

    def plain(self, part: Mapping[str, Any]) -> tuple[Facts, str | None]:
        """Returns the plain keys of a configuration of this type, and what was assumed."""
        named = {name for names in self.names.values() for name in names}
        stated = {key: part[key] for key in part if key in self.keys or key in named}
        for key, names in self.names.items():
            present = [name for name in (*names, key) if stated.get(name) is not None]
            if len({shown(stated[name]) for name in present}) > 1:
                raise KVCacheValueError(
                    f"config: got {' and '.join(f'{name}={shown(stated[name])}' for name in present)},"
                    f" expected one of them, or the same in each"
                )
            for name in names:
                # A null beside the plain name says nothing.
                if name in stated and ((value := stated.pop(name)) is not None or key not in stated):
                    stated[key] = value
        facts = {key: value for key, value in {**self.defaults, **stated}.items() if value is not None}
        return facts, self.translate(facts) if self.translate else None


def _plain(*keys: str, translate: Callable[[Facts], str | None] | None = None, **defaults: Any) -> ModelType:
    return ModelType(keys=(*PLAIN_KEYS, *keys, *defaults), defaults=defaults, translate=translate)


def _gemma4(sliding_window: int) -> ModelType:
    return _plain(
        "use_bidirectional_attention",
        "per_layer_config",
        "attention_k_eq_v",
        "num_global_key_value_heads",
        num_key_value_heads=4,
        head_dim=256,
        sliding_window=sliding_window,
        num_kv_shared_layers=0,
        global_head_dim=512,
        translate=translate.gemma4,
    )


_SIZES = ("num_hidden_layers", "num_attention_heads", "hidden_size")


def _mha(
    layers: str = "num_hidden_layers", heads: str = "num_attention_heads", hidden: str = "hidden_size"
) -> ModelType:
    """Returns a type with one KV head per query head, and these names of its sizes."""
    plain = dict(zip(_SIZES, (layers, heads, hidden), strict=True))
    return ModelType(
        keys=tuple(plain),
        names={key: (name,) for key, name in plain.items() if name != key},
        translate=translate.all_heads,
    )


_LATENT_KEYS = ("kv_lora_rank", "qk_rope_head_dim", "use_sliding_window")


def _latent_type(*keys: str, first: Callable[[Facts], None] | None = None, **defaults: Any) -> ModelType:
    def first_then_latent(facts: Facts) -> None:
        if first:
            first(facts)
        translate.latent(facts)

    return _plain(*_LATENT_KEYS, *keys, translate=first_then_latent, **defaults)


_QWEN: dict[str, Any] = {"use_sliding_window": False, "sliding_window": 4096}
_INTERVAL = translate.every_of("full_attention_interval", otherwise=translate.LINEAR)
_OLD_NAMES = {"num_hidden_layers": ("n_layer",), "num_attention_heads": ("n_head",), "hidden_size": ("n_embd",)}
_MPT_NAMES = {"num_hidden_layers": ("n_layers",), "num_attention_heads": ("n_heads",), "hidden_size": ("d_model",)}

_PLAIN_TYPES = """
apertus apertus1p5_text arcee aria_text cohere diffllama doge flex_olmo granite granitemoe granitemoeshared
hunyuan_v1_dense hunyuan_v1_moe hyperclovax jais2 llama nanochat nemotron olmo olmo2 olmoe phi phi3
"""
_ENCODER_TYPES = """
bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert rembert roberta
roberta-prelayernorm roc_bert roformer xlm-roberta xlm-roberta-xl xmod
"""

_ROWS: Mapping[str, ModelType] = types.MappingProxyType(
    {
        # Plain keys, with defaults of transformers.
        **dict.fromkeys(_PLAIN_TYPES.split(), _plain()),
        "bitnet": _plain(num_key_value_heads=5),
        "emu3_text_model": _plain(num_key_value_heads=8),
        "ernie4_5": _plain(num_key_value_heads=2, head_dim=128),
        "ernie4_5_moe": _plain(num_key_value_heads=4),
        "exaone": dataclasses.replace(_plain(num_key_value_heads=8), names={"num_hidden_layers": ("num_layers",)}),
        "falcon_h1": _plain(num_key_value_heads=8, translate=translate.no_window),
        "glm": _plain(num_key_value_heads=2, head_dim=128),
        "glm4": _plain(num_key_value_heads=2, head_dim=128),
        "glm4_moe": _plain(num_key_value_heads=8),
        "helium": _plain(num_key_value_heads=20, head_dim=128),
        "hy_v3": _plain(num_key_value_heads=8, head_dim=128),
        "internlm3": _plain(num_key_value_heads=2, head_dim=128),
        "iquestcoder": _plain(num_key_value_heads=8, head_dim=128),
        "llama4_text": _plain(num_key_value_heads=8, head_dim=128, translate=translate.no_window),
        "minimax_m2": _plain(num_key_value_heads=8, head_dim=128),
        "ministral": _plain(num_key_value_heads=8, sliding_window=4096),
        "ministral3": _plain(num_key_value_heads=8, head_dim=128),
        "mistral": _plain(num_key_value_heads=8, sliding_window=4096),
        "mixtral": _plain(num_key_value_heads=8),
        "moshi": _plain(sliding_window=3000),
        "phi4_multimodal": _plain(num_key_value_heads=8),
        "phimoe": _plain(num_key_value_heads=8),
        "sarvam_moe": _plain(num_key_value_heads=4, head_dim=64),
        "seed_oss": _plain(num_key_value_heads=8, head_dim=128),
        "solar_open": _plain(num_key_value_heads=8, head_dim=128),
        "stablelm": _plain(num_key_value_heads=32),
        "starcoder2": _plain(num_key_value_heads=2),
        "zaya": _plain(
            num_key_value_heads=2, head_dim=128, translate=translate.patterned(lambda layer: True, then="hybrid")
        ),
        # Some layers slide.
        "afmoe": _plain(
            head_dim=128,
            sliding_window=1024,
            global_attn_every_n_layers=4,
            translate=translate.every_of("global_attn_every_n_layers"),
        ),
        "beam": _plain(num_key_value_heads=8, head_dim=128, sliding_window=512, translate=translate.has_layer_types),
        "cohere2": _plain(
            sliding_window=4096, sliding_window_pattern=4, translate=translate.every_of("sliding_window_pattern")
        ),
        "cohere2_moe": _plain(head_dim=128, sliding_window=4096, translate=translate.has_layer_types),
        "cohere_compass_text": _plain(sliding_window=4096, translate=translate.has_layer_types),
        "cwm": _plain(
            num_key_value_heads=8,
            head_dim=128,
            sliding_window=8192,
            translate=translate.patterned(lambda layer: layer % 4 == 0),
        ),
        "dots1": _plain("max_window_layers", num_key_value_heads=32, sliding_window=4096, max_window_layers=62),
        "exaone4": _plain(
            num_key_value_heads=32, sliding_window=4096, sliding_window_pattern=4, translate=translate.slides_where
        ),
        "exaone_moe": _plain(
            num_key_value_heads=32, sliding_window=4096, sliding_window_pattern=4, translate=translate.slides_where
        ),
        "flint": _plain(num_key_value_heads=4, head_dim=128, sliding_window=513, translate=translate.has_layer_types),
        "gemma": _plain(num_key_value_heads=16, head_dim=256),
        "gemma2": _plain(
            num_key_value_heads=4,
            head_dim=256,
            sliding_window=4096,
            sliding_window_pattern=2,
            translate=translate.every_of("sliding_window_pattern"),
        ),
        "gemma3_text": _plain(
            "use_bidirectional_attention",
            num_key_value_heads=4,
            head_dim=256,
            sliding_window=4096,
            sliding_window_pattern=6,
            translate=translate.gemma3,
        ),
        "gemma3n_text": _plain(
            num_key_value_heads=2,
            head_dim=256,
            sliding_window=512,
            num_kv_shared_layers=15,
            translate=translate.gemma_shared,
        ),
        "gemma4_text": _gemma4(sliding_window=512),
        "gemma4_unified_text": _gemma4(sliding_window=1024),
        # The published checkpoints declare no dtype; everything but MXFP4 in them is bfloat16.
        "gpt_oss": _plain(
            num_key_value_heads=8,
            head_dim=64,
            sliding_window=128,
            dtype="bfloat16",
            translate=translate.patterned(lambda layer: layer % 2 == 1),
        ),
        "granite_swa": _plain(num_key_value_heads=4, sliding_window=128, translate=translate.has_layer_types),
        "granitemoe_swa": _plain(sliding_window=128, translate=translate.has_layer_types),
        "kolibri1": _plain(
            num_key_value_heads=4, head_dim=128, sliding_window=513, translate=translate.has_layer_types
        ),
        "laguna": _plain(num_key_value_heads=8, head_dim=128, sliding_window=512, translate=translate.has_layer_types),
        "mellum": _plain(num_key_value_heads=4, head_dim=128, sliding_window=1024, translate=translate.has_layer_types),
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
            translate=translate.mimo,
        ),
        "modernbert-decoder": _plain(
            local_attention=128, global_attn_every_n_layers=3, translate=translate.modernbert_decoder
        ),
        "olmo3": _plain(sliding_window=4096, translate=translate.patterned(lambda layer: layer % 4 == 3)),
        "qwen2": _plain(num_key_value_heads=32, max_window_layers=28, **_QWEN),
        "qwen2_vl": _plain(num_key_value_heads=8, max_window_layers=80, **_QWEN),
        "qwen2_vl_text": _plain(num_key_value_heads=8, max_window_layers=80, **_QWEN),
        "qwen2_5_vl": _plain(num_key_value_heads=8, max_window_layers=80, **_QWEN),
        "qwen2_5_vl_text": _plain(num_key_value_heads=8, max_window_layers=80, **_QWEN),
        "qwen2_moe": _plain(num_key_value_heads=16, translate=translate.may_slide, **_QWEN),
        "qwen3": _plain(num_key_value_heads=32, head_dim=128, max_window_layers=28, **_QWEN),
        "qwen3_moe": _plain(num_key_value_heads=4, **_QWEN),
        "smollm3": _plain(num_key_value_heads=4, use_sliding_window=False, translate=translate.may_slide),
        "vaultgemma": _plain(
            num_key_value_heads=4,
            head_dim=256,
            sliding_window=4096,
            translate=translate.patterned(lambda layer: layer % 2 == 1),
        ),
        # Some layers cache a state, or nothing.
        "bamba": _plain("attn_layer_indices", num_key_value_heads=8, translate=translate.bamba),
        "granitemoehybrid": ModelType(
            names={"layer_types": ("layers_block_type",)}, translate=translate.has_layer_types
        ),
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
            translate=translate.inkling,
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
            translate=translate.has_layer_types,
        ),
        "jamba": _plain(num_key_value_heads=8, attn_layer_period=8, attn_layer_offset=4, translate=translate.jamba),
        "lfm2": _plain("full_attn_idxs", num_key_value_heads=8, translate=translate.lfm2),
        "lfm2_moe": _plain(num_key_value_heads=8, translate=translate.has_layer_types),
        "lfm3": _plain(num_key_value_heads=4, head_dim=128, sliding_window=256, translate=translate.has_layer_types),
        "minimax": _plain(num_key_value_heads=8, translate=translate.has_layer_types),
        "minimax_m3_vl_text": _plain(num_key_value_heads=4, head_dim=128, translate=translate.has_layer_types),
        "mllama_text_model": _plain(
            num_key_value_heads=8, cross_attention_layers=[3, 8, 13, 18, 23, 28, 33, 38], translate=translate.mllama
        ),
        "nemotron_h": _plain(
            "layers_block_type",
            "hybrid_override_pattern",
            num_key_value_heads=8,
            head_dim=128,
            translate=translate.nemotron_h,
        ),
        "olmo_hybrid": _plain(translate=translate.has_layer_types),
        "qwen3_5_moe_text": _plain(num_key_value_heads=2, head_dim=256, full_attention_interval=4, translate=_INTERVAL),
        "qwen3_5_text": _plain(num_key_value_heads=4, head_dim=256, full_attention_interval=4, translate=_INTERVAL),
        "qwen3_next": _plain(num_key_value_heads=2, head_dim=256, full_attention_interval=4, translate=_INTERVAL),
        "recurrent_gemma": ModelType(
            keys=(*PLAIN_KEYS[:5], "sliding_window", "block_types"),
            names={"sliding_window": ("attention_window_size",)},
            defaults={"sliding_window": 2048, "block_types": ["recurrent", "recurrent", "attention"]},
            translate=translate.recurrent_gemma,
        ),
        "zamba": ModelType(
            keys=(*PLAIN_KEYS, "layers_block_type"),
            names={"head_dim": ("attention_head_dim",)},
            defaults={"num_key_value_heads": 16},
            translate=translate.zamba,
        ),
        "zamba2": ModelType(
            keys=(
                "num_hidden_layers",
                "num_attention_heads",
                "num_key_value_heads",
                "hidden_size",
                "head_dim",
                "layers_block_type",
            ),
            names={"head_dim": ("attention_head_dim",)},
            translate=translate.zamba,
        ),
        # One latent per token for all heads.
        "axk1": _latent_type(),
        "deepseek_v2": _latent_type(),
        "deepseek_v3": _latent_type(),
        "glm4_moe_lite": _latent_type(),
        "kimi_k2": _latent_type(),
        "minicpm3": _latent_type(),
        "mistral4": _latent_type(),
        "sarvam_mla": _latent_type(),
        "youtu": _latent_type(),
        "bailing_hybrid": _latent_type(
            layer_group_size=6, first=translate.every_of("layer_group_size", otherwise=translate.LINEAR)
        ),
        "kimi_linear": _latent_type("linear_attn_config", first=translate.kimi_linear),
        "longcat_flash": _plain(*_LATENT_KEYS, "num_layers", translate=translate.longcat),
        # Other names of plain keys.
        **dict.fromkeys(["gpt2", "gptj", "ctrl"], _mha("n_layer", "n_head", "n_embd")),
        **dict.fromkeys(["biogpt", "git", "gpt_neox", "gpt_neox_japanese", "opt", "persimmon"], _mha()),
        "bloom": ModelType(
            keys=_SIZES,
            names={"num_hidden_layers": ("n_layer",), "num_attention_heads": ("n_head",), "hidden_size": ("n_embed",)},
            translate=translate.all_heads,
        ),
        "codegen": _mha("n_layer", "n_head", "n_embd"),
        "cpmant": ModelType(
            keys=("num_hidden_layers", "num_attention_heads"),
            names={"head_dim": ("dim_head",)},
            defaults={"head_dim": 128},
            translate=translate.all_heads,
        ),
        "dbrx": ModelType(keys=(*_SIZES, "attn_config"), names=_MPT_NAMES, translate=translate.dbrx),
        "falcon": ModelType(
            keys=(*_SIZES, "multi_query", "new_decoder_architecture"),
            names={"num_key_value_heads": ("num_kv_heads",), "hidden_size": ("n_embed",)},
            translate=translate.falcon,
        ),
        "gpt_bigcode": ModelType(keys=(*_SIZES, "multi_query"), names=_OLD_NAMES, translate=translate.gpt_bigcode),
        "gpt_neo": _mha("num_layers", "num_heads"),
        "hrm_text": _plain("num_layers_per_stack", head_dim=128, H_cycles=2, L_cycles=3, translate=translate.hrm_text),
        "jetmoe": ModelType(
            keys=("num_hidden_layers", "num_key_value_heads", "head_dim"),
            names={"head_dim": ("kv_channels",)},
            defaults={"num_key_value_heads": 16, "head_dim": 128},
        ),
        "mpt": ModelType(keys=(*_SIZES, "attn_config"), names=_MPT_NAMES, translate=translate.mpt),
        "xglm": _mha("num_layers", "attention_heads", "d_model"),
        # Encoders, unless used as decoders.
        **dict.fromkeys(
            _ENCODER_TYPES.split(),
            ModelType(
                keys=(*_SIZES, "is_decoder", "add_cross_attention"),
                translate=translate.encoder,
            ),
        ),
    }
)

MODEL_TYPES: Mapping[str, ModelType] = types.MappingProxyType(
    {
        model_type: dataclasses.replace(row, defaults={**DEFAULT_SIZES.get(model_type, {}), **row.defaults})
        for model_type, row in _ROWS.items()
    }
)
"""The row of each type, with the sizes of transformers' class."""
