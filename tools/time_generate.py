"""Times `generate` of a transformers model with random weights, over `DynamicCache` and over `KvjaxCache`.

    PYTHONPATH=.:interop python tools/time_generate.py

The model has Llama-3.1-8B's heads over a quarter of its hidden size. A call's time is that of the host, with a cache
that was made before; calls of all caches take turns. Milliseconds, medians, the least in brackets. To compare two
commits, run it in both source trees on one machine.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from kvjax.table import markdown_table
from kvjax_torch.transformers_cache import CACHE_ARGUMENT, KvjaxCache

FEW, MANY = 2, 12
"""New tokens of the two calls. Their difference is steps that decode."""

BASELINE = "DynamicCache, sdpa"
CACHES: dict[str, tuple[str | None, int | None]] = {
    BASELINE: (None, None),
    **{f"KvjaxCache, {dtype}": (dtype, None) for dtype in ("auto", "fp8", "nvfp4")},
    "KvjaxCache, nvfp4, 64 exact": ("nvfp4", 64),
}
"""The dtype of each cache, None for transformers' own, and its exact tokens."""


class Prompts(NamedTuple):
    """A model and its prompts, int64 `[num_seqs, num_tokens]`."""

    model: Any
    tokens: torch.Tensor

    @classmethod
    def of(cls, num_seqs: int, num_tokens: int, num_layers: int) -> Prompts:
        """Returns a bfloat16 model and random tokens."""
        config = LlamaConfig(
            vocab_size=32_000,
            hidden_size=1_024,
            intermediate_size=2_816,
            num_hidden_layers=num_layers,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=128,
            max_position_embeddings=num_tokens + MANY,
            dtype="bfloat16",
        )
        torch.manual_seed(0)
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            model = LlamaForCausalLM(config).bfloat16().eval()
        return cls(model, torch.randint(config.vocab_size, (num_seqs, num_tokens), device=model.device))

    def new_cache(self, dtype: str | None, exact_window: int | None) -> Any:
        """Returns an empty cache with room for the prompts and the new tokens."""
        if dtype is None:
            return DynamicCache(config=self.model.config)
        num_seqs, num_tokens = self.tokens.shape
        # Random keys and values have a magnitude of about 1.
        options: Any = {} if dtype == "auto" else {"k_scale": 0.037, "v_scale": 0.052}
        blocks = num_seqs * -(-(num_tokens + MANY) // 16)
        options["exact_window"] = exact_window
        return KvjaxCache(self.model.config, num_blocks=blocks, kv_cache_dtype=dtype, **options)

    def generate(self, name: str, new_tokens: int) -> tuple[float, torch.Tensor]:
        """Returns the milliseconds of a call, and the new tokens `[num_seqs, new_tokens]`."""
        self.model.set_attn_implementation("sdpa" if name == BASELINE else "kvjax")
        options: dict[str, Any] = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False}
        options |= {"pad_token_id": 0, "attention_mask": torch.ones_like(self.tokens)}
        options[CACHE_ARGUMENT] = self.new_cache(*CACHES[name])
        wait()
        start = time.perf_counter()
        found = self.model.generate(self.tokens, **options)
        wait()
        return (time.perf_counter() - start) * 1e3, found[:, self.tokens.shape[1] :]


def wait() -> None:
    """Waits for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def positive(text: str) -> int:
    """Returns a number of at least 1, for `argparse`."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a number of at least 1")
    return int(text)


def shown(milliseconds: Sequence[float]) -> str:
    """Returns the median and the least."""
    return f"{statistics.median(milliseconds):.1f} ({min(milliseconds):.1f})"


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=positive, default=8)
    parser.add_argument("--tokens", type=positive, default=2_048, help="of each prompt")
    parser.add_argument("--layers", type=positive, default=16)
    parser.add_argument("--repeats", type=positive, default=8)
    given = parser.parse_args()
    prompts = Prompts.of(given.sequences, given.tokens, given.layers)
    tokens = {name: prompts.generate(name, MANY)[1] for name in CACHES}  # compiles
    times: dict[tuple[str, int], list[float]] = {(name, count): [] for name in CACHES for count in (FEW, MANY)}
    for _ in range(given.repeats):
        for (name, count), milliseconds in times.items():
            milliseconds.append(prompts.generate(name, count)[0])
    rows = []
    for name in CACHES:
        few, many = times[name, FEW], times[name, MANY]
        further = [(each - statistics.median(few)) / (MANY - FEW) for each in many]
        same = float((tokens[name] == tokens[BASELINE]).float().mean())
        rows.append((name, shown(few), shown(further), f"{same:.0%}"))
    columns = "cache", f"prompt and {FEW} tokens", "each further token", "the baseline's tokens"
    print(markdown_table(columns, rows))


if __name__ == "__main__":
    main()
