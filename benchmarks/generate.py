"""Times `generate` of a transformers model with random weights, over `KvjaxCache` and over `DynamicCache`.

To compare two commits, run it in both source trees on one machine.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from typing import Any

from absl import flags
from absl.testing import absltest

from benchmarks import output
from benchmarks.measurement import Measurement
from benchmarks.peers.in_torch import has_gpu, wait
from benchmarks.peers.peer import why_not_importable
from benchmarks.timing import Clock, Timing

if reason := why_not_importable("torch", "transformers", "kvjax_torch"):
    raise SystemExit(f"benchmarks.generate measures transformers (pip install 'kvjax[transformers]'): {reason}")
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from kvjax_torch.transformers_cache import CACHE_ARGUMENT, KvjaxCache

NUM_SEQS = flags.DEFINE_integer("sequences", 8, "sequences", lower_bound=1)
NUM_TOKENS = flags.DEFINE_integer("tokens", 2048, "tokens of each prompt", lower_bound=1)
NUM_LAYERS = flags.DEFINE_integer("layers", 16, "layers of the model", lower_bound=1)

FEW, MANY = 2, 12
"""New tokens of the two calls. Their difference is steps that decode."""

REPEATS = 8
BLOCK_SIZE = 16
SDPA, KVJAX = "sdpa", "kvjax"

BASELINE = "DynamicCache, sdpa"
CACHES = {
    BASELINE: (SDPA, None),
    "KvjaxCache, auto": (KVJAX, "auto"),
    "KvjaxCache, fp8": (KVJAX, "fp8"),
    "KvjaxCache, nvfp4": (KVJAX, "nvfp4"),
}
"""The attention implementation and the cache dtype of what is timed."""


def sizes() -> tuple[int, int, int]:
    """Returns the numbers of sequences, of tokens of a prompt, and of layers."""
    given = NUM_SEQS.value, NUM_TOKENS.value, NUM_LAYERS.value
    return output.by_device(gpu=given, host=(2, 64, 2), smoke=(2, 20, 1))


@functools.cache
def model() -> Any:
    """Returns a bfloat16 model, on a GPU of Llama-3.1-8B's heads over a quarter of its hidden size."""
    _, num_tokens, num_layers = sizes()
    hidden, heads, kv_heads, words = output.by_device(
        gpu=(1024, 32, 8, 32_000), host=(256, 4, 2, 1_000), smoke=(64, 4, 2, 100)
    )
    config = LlamaConfig(
        vocab_size=words,
        hidden_size=hidden,
        intermediate_size=11 * hidden // 4,
        num_hidden_layers=num_layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=128,
        max_position_embeddings=num_tokens + MANY,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    with torch.device("cuda" if has_gpu() else "cpu"):
        return LlamaForCausalLM(config).bfloat16().eval()


@functools.cache
def prompts() -> torch.Tensor:
    """Returns int64 `[num_seqs, num_tokens]`."""
    num_seqs, num_tokens, _ = sizes()
    return torch.randint(model().config.vocab_size, (num_seqs, num_tokens), device=model().device)


def new_cache(dtype: str | None) -> Any:
    if dtype is None:
        return DynamicCache(config=model().config)
    num_seqs, num_tokens, _ = sizes()
    blocks = num_seqs * -(-(num_tokens + MANY) // BLOCK_SIZE)
    # Random keys and values have a magnitude of about 1.
    scales: Any = {} if dtype == "auto" else {"k_scale": 0.037, "v_scale": 0.052}
    return KvjaxCache(model().config, num_blocks=blocks, block_size=BLOCK_SIZE, kv_cache_dtype=dtype, **scales)


def generate(name: str, new_tokens: int) -> tuple[float, torch.Tensor]:
    """Returns the seconds of a call, its cache made before, and the new tokens `[num_seqs, new_tokens]`."""
    implementation, dtype = CACHES[name]
    model().set_attn_implementation(implementation)
    options: dict[str, Any] = {
        "max_new_tokens": new_tokens,
        "min_new_tokens": new_tokens,
        "do_sample": False,
        "pad_token_id": 0,
    }
    options |= {"attention_mask": torch.ones_like(prompts()), CACHE_ARGUMENT: new_cache(dtype)}
    wait()
    start = time.perf_counter()
    found = model().generate(prompts(), **options)
    wait()
    return time.perf_counter() - start, found[:, prompts().shape[1] :]


class GenerateBenchmark(output.Program):
    def test_generate(self) -> None:
        tokens = {name: generate(name, MANY)[1] for name in CACHES}  # compiles
        few: dict[str, list[float]] = {name: [] for name in CACHES}
        many: dict[str, list[float]] = {name: [] for name in CACHES}
        for _, name in itertools.product(range(2 if output.SMOKE.value else REPEATS), CACHES):
            few[name].append(generate(name, FEW)[0])
            many[name].append(generate(name, MANY)[0])
        subject = dict(zip(("num_seqs", "num_tokens", "num_layers"), sizes(), strict=True))
        for name in CACHES:
            begun = statistics.median(few[name])
            facts = {"same_tokens": float((tokens[name] == tokens[BASELINE]).float().mean())}
            for part, seconds in (
                (f"prompt and {FEW} tokens", few[name]),
                ("a further token", [(each - begun) / (MANY - FEW) for each in many[name]]),
            ):
                times = Timing(tuple(seconds), Clock.WALL)
                self.results.add(Measurement("generate", {**subject, "part": part}, name, times, facts=facts))


if __name__ == "__main__":
    absltest.main()
