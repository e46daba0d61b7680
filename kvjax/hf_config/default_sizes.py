"""Sizes that transformers' configuration classes fill in for each model type where a file leaves them out."""

from __future__ import annotations

import types
from collections.abc import Mapping

_KEYS = ("num_hidden_layers", "num_attention_heads", "hidden_size")

# Layers, query heads and hidden size, and the types that have them.
_SIZES = """
2 8 64: bloom
6 12 768: git
12 4 256: electra
12 6 768: nanochat
12 12 768: bert big_bird camembert data2vec-text ernie gpt2 gpt_bigcode opt roberta roberta-prelayernorm roc_bert
  roformer xlm-roberta xmod
12 32 2048: jetmoe
16 16 2048: olmoe
16 32 2048: diffllama
18 16 1024: ernie4_5
19 64 4096: sarvam_moe
22 12 768: modernbert-decoder
24 16 1024: bert-generation biogpt megatron-bert xglm
24 16 2048: dbrx gpt_neo lfm3 mpt qwen2_moe
24 20 2560: granite_swa helium
24 32 2048: phi qwen3_moe
26 8 2304: gemma2 gemma3_text vaultgemma
26 10 2560: recurrent_gemma
27 32 2304: kimi_linear
28 16 3072: gemma
28 16 4096: codegen gptj
28 20 2560: ernie4_5_moe
28 32 2304: mellum
30 8 2304: gemma4_text gemma4_unified_text
30 20 2560: bitnet
30 24 3072: starcoder2
32 8 1024: doge
32 16 2048: afmoe youtu
32 16 4096: qwen3_5_text
32 18 1152: rembert
32 26 3328: jais2
32 30 3840: olmo_hybrid
32 32 2048: lfm2_moe
32 32 2560: arcee gpt_neox_japanese lfm2 stablelm
32 32 3072: phi3 phi4_multimodal
32 32 4096: apertus apertus1p5_text aria_text bamba deepseek_v2 emu3_text_model exaone exaone4 exaone_moe falcon_h1
  flex_olmo granite granitemoe granitemoe_swa granitemoehybrid granitemoeshared hunyuan_v1_dense hunyuan_v1_moe
  hyperclovax jamba llama minimax ministral mistral mixtral moshi olmo olmo2 olmo3 phimoe qwen2 qwen3
32 48 6144: nemotron
32 64 4096: sarvam_mla
32 71 4544: falcon
34 32 4096: ministral3
35 8 2048: gemma3n_text
36 16 2048: smollm3
36 32 2560: xlm-roberta-xl
36 32 4096: mistral4
36 64 2880: gpt_oss
36 64 4096: persimmon
40 8 2048: zaya
40 16 2048: qwen3_5_moe_text
40 32 4096: glm glm4 mllama_text_model
40 48 2048: laguna
40 64 8192: cohere cohere2 cohere2_moe cohere_compass_text
42 32 2560: bailing_hybrid
44 64 6144: gpt_neox
46 96 4096: glm4_moe
47 20 2048: glm4_moe_lite
48 16 1280: ctrl
48 16 2048: qwen3_next
48 32 4096: cpmant internlm3
48 40 5120: llama4_text
48 48 4608: inkling2_text
48 64 4096: mimo_v2_flash solar_open
49 32 2048: flint
50 48 2560: kolibri1
52 48 5120: beam
54 32 2560: zamba2
60 64 6144: minimax_m3_vl_text
61 64 7168: axk1
61 128 7168: deepseek_v3
62 32 4608: dots1
62 40 2560: minicpm3
62 48 3072: minimax_m2
64 48 6144: cwm
64 80 4096: seed_oss
66 64 6144: inkling_text
76 16 3712: zamba
80 40 5120: iquestcoder
80 64 4096: hy_v3
80 64 8192: qwen2_5_vl_text qwen2_vl_text
"""


def _by_type(text: str) -> Mapping[str, Mapping[str, int]]:
    sizes: dict[str, Mapping[str, int]] = {}
    for line in text.replace("\n  ", " ").strip().splitlines():
        numbers, model_types = line.split(": ")
        of_types = dict(zip(_KEYS, map(int, numbers.split()), strict=True))
        sizes.update(dict.fromkeys(model_types.split(), types.MappingProxyType(of_types)))
    return types.MappingProxyType(sizes)


DEFAULT_SIZES = _by_type(_SIZES)
"""The plain keys of sizes, by model type. Types whose class derives one of them, or has none, are missing."""

TEXT_DEFAULTS: Mapping[str, Mapping[str, int]] = types.MappingProxyType(
    {
        "glmasr": types.MappingProxyType(
            {"num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 4, "hidden_size": 2048}
        ),
        "voxtral": types.MappingProxyType(
            {"num_hidden_layers": 30, "num_key_value_heads": 8, "hidden_size": 3072, "head_dim": 128}
        ),
    }
)
"""What a composite's class fills in where its `text_config` leaves it out, before the defaults of the text's type."""
