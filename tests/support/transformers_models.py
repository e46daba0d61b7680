"""Small random models of transformers and the caches that they are run with."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import transformers
from transformers import (
    DynamicCache,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Qwen3Config,
)

from kvjax import AttentionSpec, KVCacheDType
from kvjax_torch.arguments.dtypes import numpy_dtype
from kvjax_torch.transformers_cache import CACHE_ARGUMENT, KvjaxCache
from support import reference
from support.torch_helpers import from_numpy, to_numpy

VOCABULARY = 61


NUM_LAYERS = 2


NEW_TOKENS = 12


FACTOR = 2.0**-11


QUANTIZED = ["fp8_e4m3", "fp8_e5m2", "nvfp4"]


WINDOW = 5
MIXED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
MODELS: dict[str, tuple[type, dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "qwen3": (Qwen3Config, {}),
    "mistral": (MistralConfig, {"sliding_window": WINDOW}),
    "gemma2": (Gemma2Config, {**MIXED, "query_pre_attn_scalar": 32, "attn_logit_softcapping": 2.0}),
    "gemma3": (Gemma3TextConfig, {**MIXED, "query_pre_attn_scalar": 32}),
    "gpt-oss": (GptOssConfig, {**MIXED, "num_local_experts": 4, "num_experts_per_tok": 2}),
}
WINDOWED = [name for name, (_, changes) in MODELS.items() if "sliding_window" in changes]
PADDING = {
    "left": [[0] * 7 + [1] * 33, [1] * 40],
    "right": [[1] * 19 + [0] * 21, [1] * 40],
    "between turns": [[1] * 11 + [0] * 5 + [1] * 24, [0] * 3 + [1] * 37],
    "a chunk of nothing": [[0] * 16 + [1] * 24, [0] * 17 + [1] * 23],
}


def scales_for(dtype: str, factor: float) -> tuple[float, float]:
    """Decode scales that fit `make_model(factor=factor)`: its largest key and value are about 5 and 4 times that."""
    if dtype not in QUANTIZED:
        return 1.0, 1.0
    largest = KVCacheDType(dtype).info.max
    return 6 * factor / largest, 5 * factor / largest


def make_model(
    device: str,
    dtype: torch.dtype = torch.float32,
    config_class: type = LlamaConfig,
    *,
    factor: float = FACTOR,
    **changes: Any,
) -> Any:
    """A random model of two layers whose attention is neither flat nor a single token's.

    Keys and values are `factor` times those of a usual model, queries and the output projection as much larger: with a
    power of two attention stays what it is, and a scale that is forgotten shows.
    """
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": NUM_LAYERS}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    config = config_class(**{**sizes, **heads, "initializer_range": 0.15, **changes})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for layer in model.model.layers:
            for projection in (layer.self_attn.k_proj, layer.self_attn.v_proj):
                projection.weight.mul_(factor)
            for projection in (layer.self_attn.q_proj, layer.self_attn.o_proj):
                projection.weight.div_(factor)
    return model.eval().to(device)


def make_cache(model: Any, kv_cache_dtype: Any = "auto", *, num_blocks: int = 32, **options: Any) -> KvjaxCache:
    return KvjaxCache(
        model.config, num_blocks=num_blocks, kv_cache_dtype=kv_cache_dtype, **{"block_size": 4, **options}
    )


def taking(cache: Any) -> dict[str, Any]:
    """The argument of models and of `generate` that takes a cache."""
    return {CACHE_ARGUMENT: cache}


def prompts(device: str) -> dict[str, torch.Tensor]:
    """Three sequences of 9, 6 and 1 tokens, padded on the left."""
    ids = torch.randint(1, VOCABULARY, (3, 9), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(9) >= torch.tensor([[0], [3], [8]])).long()
    return {"input_ids": (ids * mask).to(device), "attention_mask": mask.to(device)}


def generate(model: Any, cache: Any, **options: Any) -> Any:
    defaults = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    asked = {"output_logits": True, "return_dict_in_generate": True, **taking(cache)}
    return model.generate(**prompts(model.device.type), **{**defaults, **asked, **options})


class RoundedCache(DynamicCache):
    """transformers' cache of keys and values that went through the tests' reference encoding and back."""

    def __init__(self, specs: tuple[AttentionSpec, ...], scales: list[tuple[Any, Any]]):
        super().__init__()
        self.specs, self.scales = specs, scales

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        spec, scales = self.specs[layer_idx], self.scales[layer_idx]
        parts = spec.dtype.parts
        rounded = [round_trip(*each) for each in zip((key_states, value_states), parts, scales, strict=True)]
        return super().update(*rounded, layer_idx, *args, **kwargs)


def round_trip(states: torch.Tensor, part: KVCacheDType, scale: Any) -> torch.Tensor:
    dtype, rows = numpy_dtype(states.dtype), states.transpose(1, 2)
    tokens = to_numpy(rows.cpu(), dtype).reshape(-1, *rows.shape[2:])
    decoded = reference.decode(reference.encode(tokens, part, np.asarray(scale, np.float32)), part, scale)
    return from_numpy(reference.cast(decoded, dtype)).view(rows.shape).transpose(1, 2).to(states.device)


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Root mean square of the difference over that of `expected`."""
    return ((got - expected).norm() / expected.norm()).item()


def states(device: str, num_seqs: int, num_tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of `make_model`'s layers, for `update`."""
    shape = (2, num_seqs, 2, num_tokens, 32)
    return tuple(torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device))


def logits_in_steps(model: Any, cache: Any, *, is_compiled: bool) -> list[torch.Tensor]:
    """The logits of two sequences that a model reads three tokens at a time."""
    tokens = prompts(model.device.type)["input_ids"][:2].split(3, dim=1)
    if is_compiled:
        model = torch.compile(model, backend="eager")
    with torch.no_grad():
        logits = [model(some, **taking(cache)).logits for some in tokens]
    torch._dynamo.reset()
    return logits


def model_of(name: str, device: str, dtype: torch.dtype = torch.float32) -> Any:
    """A model of two layers with transformers' plainest attention; gpt-oss has sinks that take half of all weight."""
    config_class, changes = MODELS[name]
    model = make_model(device, dtype, config_class, factor=1.0, attn_implementation="eager", **changes)
    if name == "gpt-oss":
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.sinks.copy_(torch.linspace(-1, 3, 4))
    return model


def over_pages(model: Any) -> Any:
    """The same model, which from now on attends to pages."""
    model.set_attn_implementation("kvjax")
    return model


def text_of(device: str, num_seqs: int = 2, num_tokens: int = 40) -> torch.Tensor:
    ids = torch.randint(1, VOCABULARY, (num_seqs, num_tokens), generator=torch.Generator().manual_seed(3))
    return ids.to(device)


def read(model: Any, cache: Any, ids: torch.Tensor, mask: torch.Tensor | None, chunks: list[int]) -> torch.Tensor:
    """Logits `[num_seqs, num_tokens, vocabulary]` of a text in chunks, after each of which free pages are poisoned."""
    logits, end = [], 0
    with torch.no_grad():
        for part in ids.split(chunks, dim=1):
            end += part.shape[1]
            masks = (
                {} if mask is None else {"attention_mask": mask[:, :end], "position_ids": positions(mask, end, part)}
            )
            logits.append(model(part, **taking(cache), **masks).logits)
            if isinstance(cache, KvjaxCache):
                poison_free_pages(cache)
    return torch.cat(logits, dim=1)


def positions(mask: torch.Tensor, end: int, part: torch.Tensor) -> torch.Tensor:
    """Where the tokens of a chunk stand, padding not counted, as `generate` has it."""
    return (mask[:, :end].cumsum(dim=1) - 1).clamp(min=0)[:, -part.shape[1] :]


def poison_free_pages(cache: KvjaxCache) -> None:
    for layer in cache.layers:
        free = np.setdiff1d(np.arange(layer.block_table.num_blocks), layer.block_table.rows())
        layer.kv.view(torch.uint8)[torch.from_numpy(free).to(layer.kv.device)] = 0xFF  # NaN, but for NVFP4's codes
