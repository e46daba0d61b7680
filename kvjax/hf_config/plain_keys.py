"""Finds the language model in a `config.json`, rejects models with other caches, and returns the rest as plain keys."""

from __future__ import annotations

import dataclasses
import re
import types
from collections.abc import Mapping
from typing import Any

from kvjax.errors import KVCacheValueError, shown
from kvjax.hf_config.default_sizes import TEXT_DEFAULTS
from kvjax.hf_config.keys import PLAIN_KEYS, Facts
from kvjax.hf_config.model_types import MODEL_TYPES, ModelType

_STATE = "its layers cache a state, not tokens"
_INDEXER = "sparse attention also caches an indexer's key of each token"
_ENCODER = "it is not a decoder, and caches no keys and values"
_CROSS = "the decoder's layers also cache keys and values of the encoder's tokens"
_OTHER = "its cache is not each layer's keys and values"

_ENCODERS = """
aimv2 aimv2_text_model aimv2_vision_model albert align align_text_model altclip altclip_text_model
altclip_vision_model audio-spectrogram-transformer audioflamingo3_encoder beit blip_2_qformer
blip_2_vision_model blip_vision_model bridgetower bridgetower_text_model bros canine chinese_clip
chinese_clip_text_model chinese_clip_vision_model clap clap_text_model clip clip_text_model clip_vision_model
clipseg clipseg_text_model clipseg_vision_model clvp_encoder convbert cosmos3_edge_vision data2vec-audio
data2vec-vision deberta deberta-v2 deepseek_ocr2_encoder deit dia_encoder dinov2 dinov2_with_registers
dinov3_vit dots3_note_audio_encoder dpr dpt edgetam_mask_decoder edgetam_video_mask_decoder eomt eomt_dinov3 esm
esmc eurobert flava flava_image_model flava_multimodal_model flava_text_model fun_asr_nano_encoder gemma4_audio
gemma4_vision git_vision_model glmasr_encoder granite_docling_vision granite_speech5_encoder groupvit
groupvit_text_model groupvit_vision_model gte hubert hunyuan_vl_vision ibert idefics2_vision idefics3_vision
ijepa inkling2_vision instructblip_qformer instructblip_vision_model instructblipvideo_qformer
instructblipvideo_vision_model internvl_vision janus_vision_model jina_embeddings_v3 kimi_k25_vision
kosmos_2_5_vision_model kosmos_2_vision_model lasr_encoder layoutlm layoutlmv2 layoutlmv3 layoutxlm
lfm3_vl_vision lightglue lilt llama4_vision_model longformer luke lw_detr_vit markuplm metaclip_2
metaclip_2_text_model metaclip_2_vision_model mgp-str mimi_encoder minicpm_ocr_vision minicpmv4_6_vision
minicpmv4_7_vision minimax_m3_vl_vision mlcd mlcd_vision_model mobilebert molmo2_vision
moonshine_streaming_encoder moss_transcribe_diarize_audio mpnet mra nemotron3_5_transcribe_asr_audio
nemotron3_5_transcribe_word_timestamp nemotron3_diarization_audio nemotron_asr_streaming_encoder nomic_bert
nystromformer openai_privacy_filter ovis2_vision owlv2 owlv2_text_model owlv2_vision_model owlvit
owlvit_text_model owlvit_vision_model paddleocr_vl_vision parakeet_encoder pe_audio_encoder
pe_audio_video_encoder pe_video_encoder phi4_multimodal_vision pixio pixtral qianfan_ocr_vision qwen2_5_omni_dit
radio rf_detr_dinov2 sam2_mask_decoder sam2_video_mask_decoder sam3 sam3_lite_text sam3_lite_text_text_model
sam3_tracker_mask_decoder sam3_tracker_video_mask_decoder sam_hq_mask_decoder sam_mask_decoder sapiens2 seggpt
sew sew-d siglip siglip2 siglip2_text_model siglip2_vision_model siglip_text_model siglip_vision_model
smolvlm_vision splinter squeezebert step3p5_vision t5_gemma_module t5gemma2_encoder tapas timesfm timesfm2_5
timesformer tipsv2 tipsv2_text_model tipsv2_vision_model tvp ultrabert ultravbert unispeech unispeech-sat
unlimited_ocr_vision_encoder video_llama_3_vision videomae videomt videoprism videoprism_text_model vilt
visual_bert vit vit_mae vit_msn vitdet vitpose_backbone vivit vjepa2 voxtral_encoder voxtral_realtime_encoder
wav2vec2 wav2vec2-bert wav2vec2-conformer wavlm xclip xclip_text_model xclip_vision_model xcodec2 yolos yoso
"""
_ENCODER_DECODERS = """
bart bigbird_pegasus blenderbot blenderbot-small marian mbart musicgen musicgen_decoder musicgen_melody
musicgen_melody_decoder mvp pegasus plbart prophetnet trocr whisper
"""

UNSUPPORTED: Mapping[str, str] = types.MappingProxyType(
    {
        **dict.fromkeys(["falcon_mamba", "mamba", "mamba2", "rwkv", "xlstm"], _STATE),
        **dict.fromkeys(
            ["axk2", "deepseek_v32", "dots3_note_text", "glm_moe_dsa", "hy_v4", "qwen4_exp_text"], _INDEXER
        ),
        **dict.fromkeys(_ENCODERS.split(), _ENCODER),
        **dict.fromkeys(_ENCODER_DECODERS.split(), _CROSS),
        **dict.fromkeys(["openai-gpt", "xlm"], "it runs without a cache"),
        "blt": "it is several models, each with a cache of its own",
        "deepseek_v4": "compressed attention caches one entry for several tokens",
        **dict.fromkeys(["gemma4_assistant", "gemma4_unified_assistant"], "its layers read another model's cache"),
        "reformer": _OTHER,
        "xlnet": _OTHER,
    }
)
"""Model types that cache something other than each layer's keys and values, and what."""

_SOME_STATE = "some layers cache a state, not tokens"
_LINEAR = "linear attention caches a state, not tokens"
_SOME_SLIDE = "it may define which layers slide"
_IMPLIED_BY_LAYER_TYPES = (_SOME_STATE, _LINEAR, _SOME_SLIDE)

CONTRADICTIONS: Mapping[str, str] = types.MappingProxyType(
    {
        **dict.fromkeys(
            (
                "attn_layer_indices",
                "attn_layer_offset",
                "attn_layer_period",
                "attn_type_list",
                "block_types",
                "full_attn_idxs",
                "hybrid_layer_ids",
                "hybrid_override_pattern",
                "layer_group_size",
                "layers_block_type",
                "mamba_d_state",
                "mamba_expand",
                "ssm_cfg",
                "ssm_state_size",
                "state_size",
                "lru_width",
            ),
            _SOME_STATE,
        ),
        **dict.fromkeys(("full_attention_interval", "linear_attn_config", "linear_num_key_heads"), _LINEAR),
        **dict.fromkeys(
            ("compress_rates", "compress_ratios"), "compressed attention caches one entry for several tokens"
        ),
        "cross_attention_layers": "some layers cache keys and values of other tokens",
        "add_cross_attention": _CROSS,
        "cross_layer_interval": "some layers cache keys and values of other tokens",
        **dict.fromkeys(("index_head_dim", "index_topk", "indexer_head_dim"), _INDEXER),
        "kv_lora_rank": "multi-head latent attention caches one latent per token",
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
            "it may define the number of KV heads",
        ),
        **dict.fromkeys(
            ("attention_head_dim", "attention_hidden_size", "d_head", "d_kv", "dim_head", "kv_channels"),
            "it may define the head size",
        ),
        **dict.fromkeys(
            (
                "attention_types",
                "attention_window_size",
                "global_attn_every_n_layers",
                "local_attention",
                "window_size",
            ),
            _SOME_SLIDE,
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
            "the language model's keys may be inside it; pass that part",
        ),
    }
)
"""Keys that suggest, for an unknown model type, that its cache is not what the plain keys describe."""

_TEXT_MODELS = {
    "aria_text": "aria",
    "cohere2": "aya_vision cohere2_vision",
    "cohere_compass_text": "cohere_compass",
    "deepseek_v3": "kimi_k25",
    "dots3_note_text": "dots3_note",
    "emu3_text_model": "emu3",
    "exaone4": "exaone4_5",
    "gemma": "paligemma",
    "gemma3_text": "gemma3 shieldgemma2",
    "gemma3n_text": "gemma3n",
    "gemma4_text": "gemma4",
    "gemma4_unified_text": "gemma4_unified",
    "granite": "granite_speech granite_speech_plus",
    "hyperclovax": "hyperclovax_vision_v2",
    "inkling2_text": "inkling2",
    "inkling_text": "inkling_mm_model",
    "lfm2": "lfm2_vl",
    "lfm3": "lfm3_vl",
    "llama": "deepseek_vl deepseek_vl_hybrid glmasr idefics3 janus llava llava_next llava_next_video perception_lm "
    "smolvlm video_llava vipllava voxtral",
    "llama4_text": "llama4",
    "minimax_m3_vl_text": "minimax_m3_vl",
    "mistral": "idefics2 mistral3",
    "mllama_text_model": "mllama",
    "nemotron_h": "nemo_speechlm nemotron_h_omni",
    "opt": "blip-2 instructblip instructblipvideo",
    "persimmon": "fuyu",
    "qwen2": "audioflamingo3 fast_vlm got_ocr2 internvl llava_onevision musicflamingo ovis2 pp_chart2table "
    "qwen2_audio vibevoice vibevoice_asr video_llama_3",
    "qwen2_5_vl_text": "qwen2_5_vl",
    "qwen2_vl_text": "qwen2_vl",
    "qwen3": "fun_asr_nano lighton_ocr moss_transcribe_diarize qianfan_ocr qwen3_asr",
    "qwen3_5_moe_text": "qwen3_5_moe",
    "qwen3_5_text": "minicpm_ocr minicpmv4_6 minicpmv4_7 qwen3_5",
    "qwen4_exp_text": "qwen4_exp",
}

COMPOSITES: Mapping[str, str] = types.MappingProxyType(
    {composite: text for text, composites in _TEXT_MODELS.items() for composite in composites.split()}
)
"""Types with a `text_config`, and its type if it has no `model_type`."""

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
    )
)
"""How an unknown model type is read."""

# Parts of key names that may concern a cache, and key names with such a part that do not.
_DOUBTFUL = re.compile(
    r"(?:^|_)(?:kv|keys?|values?|heads?|latent|lora|window|sliding|local|global|linear|mamba|ssm|rnn|recurrent|state|"
    r"conv|cache|cross|shared?|layers?_type|block_type|pattern|interval|hybrid)(?:_|$)"
)
_HARMLESS = re.compile(
    r"^(?:use_cache|cache_|vision|audio|image|moe|mlp|no_rope)|(?:_config|_act)$|attention_heads|bias|chunk_size_feed|"
    r"dropout|dtype|embed|expert|init|lm_head|logit|loss|norm|output_|rope|router|scal|token"
)
_MAX_NAMED = 5


@dataclasses.dataclass(frozen=True)
class Doubts:
    """What to warn about, if anything, and whether the layers were assumed from the plain keys."""

    warning: str = ""
    guessed: bool = False


def plain_keys(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], Facts, Doubts]:
    """Returns a configuration's language model part, its plain keys, and what is uncertain about them.

    Raises:
      KVCacheValueError: a model that caches, or may cache, something other than its layers' keys and values.
    """
    part, model_type = language_model(config)
    for section in (config, part):
        _reject(section)
    outer = config.get("model_type")
    beside = ""
    if part is not config and outer is not None and not (isinstance(outer, str) and outer in COMPOSITES):
        beside = f"config.model_type: got {shown(outer)}, which is unknown to kvjax; only text_config is read"
    if (known := MODEL_TYPES.get(model_type) if isinstance(model_type, str) else None) is not None:
        if part.get("per_layer_config") and "per_layer_config" not in known.keys:
            raise _contradiction(part, "per_layer_config")
        facts, assumed = known.plain(part)
        of_text = f"config.model_type: got {model_type!r}: {assumed}" if assumed else ""
        return part, facts, Doubts("; ".join(filter(None, (beside, of_text))))
    for key, why in CONTRADICTIONS.items():
        if part.get(key) and not ("layer_types" in part and why in _IMPLIED_BY_LAYER_TYPES):
            raise _contradiction(part, key)
    facts, _ = GENERIC.plain(part)
    names = [
        shown(key)
        for key, value in part.items()
        if isinstance(key, str)
        and isinstance(value, (int, str, list))
        and value
        and key not in GENERIC.keys
        and _DOUBTFUL.search(key)
        and not _HARMLESS.search(key)
    ]
    doubtful = ", ".join(names[:_MAX_NAMED] + ["others"] * (len(names) > _MAX_NAMED))
    unread = ""
    if model_type is not None:
        unread = f"config.model_type: got {shown(model_type)}, which is unknown to kvjax" + (
            f", and {doubtful}, which it does not read" if doubtful else ""
        )
    elif doubtful:
        unread = f"config: got {doubtful}, which kvjax does not read"
    return part, facts, Doubts("; ".join(filter(None, (beside, unread))), guessed=bool(unread))


def language_model(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], object]:
    """Returns the part that describes the language model (`text_config`, if present) and its type.

    What the composite's class fills in is in the part: it comes before the defaults of the type.
    """
    text, outer = config.get("text_config"), config.get("model_type")
    if text is None:
        return config, outer
    if not isinstance(text, Mapping):
        raise KVCacheValueError(f"config.text_config: got {shown(text)}, expected a mapping")
    model_type = text.get("model_type")
    if isinstance(outer, str):
        text = {**TEXT_DEFAULTS.get(outer, {}), **text}
        if model_type is None:
            model_type = COMPOSITES.get(outer)
    return text, model_type


def _reject(section: Mapping[str, Any]) -> None:
    model_type = section.get("model_type")
    if isinstance(model_type, str) and (why := UNSUPPORTED.get(COMPOSITES.get(model_type, model_type))):
        raise KVCacheValueError(
            f"config.model_type: got {model_type!r}: {why}; expected a decoder whose layers cache keys and values"
        )
    if section.get("is_encoder_decoder"):
        raise KVCacheValueError(
            f"config: got is_encoder_decoder={shown(section['is_encoder_decoder'])}: {_CROSS}; expected a decoder-only"
            " model"
        )


def _contradiction(section: Mapping[str, Any], key: str) -> KVCacheValueError:
    return KVCacheValueError(
        f"config: got {key}={shown(section[key])}: {CONTRADICTIONS[key]}; expected a known model_type, or a model whose"
        " layers each cache keys and values as the plain keys describe"
    )
