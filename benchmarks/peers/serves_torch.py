"""The same model in transformers, with its `StaticCache` and with `KvjaxCache`."""

from __future__ import annotations

import dataclasses
import functools
import time
from typing import Any

from benchmarks import workload
from benchmarks.peers.in_torch import wait
from benchmarks.peers.peer import why_not_importable
from benchmarks.serving import Scenario, ServeJob
from benchmarks.shapes import BLOCK_SIZE
from benchmarks.timing import Clock, Timing
from examples.llama import ModelConfig
from kvjax import KVCacheDType

STATIC, KVJAX_CACHE = "transformers StaticCache", "transformers KvjaxCache"
FEW, MANY = 4, 20  # tokens to generate; a step takes the difference in time over the difference in tokens


def why_missing() -> str | None:
    if reason := why_not_importable("torch", "transformers"):
        return reason
    import torch

    return None if torch.cuda.is_available() or not workload.is_gpu() else "torch sees no GPU"


def serves(name: str, job: ServeJob) -> bool:
    """Limits both caches, which are slow, to the row that all dtypes share. `StaticCache` supports only bfloat16."""
    return job.num_seqs == job.of.same and (name == KVJAX_CACHE or job.dtype is KVCacheDType.BFLOAT16)


@functools.cache
def model(of: Scenario) -> Any:
    return random_llama(of.config, of.seq_len, "cuda" if workload.is_gpu() else "cpu")


def random_llama(config: ModelConfig, num_positions: int, device: str) -> Any:
    """Returns a bfloat16 model with random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    others = ("rope_theta", "rope_scaling", "qk_norm")
    fields = {name: value for name, value in dataclasses.asdict(config).items() if name not in others}
    rope = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling:
        rope |= {"rope_type": "llama3", **dataclasses.asdict(config.rope_scaling)}
    described = LlamaConfig(**fields, rope_parameters=rope, max_position_embeddings=num_positions, dtype="bfloat16")
    with torch.device(device):
        made = LlamaForCausalLM._from_config(described, dtype=torch.bfloat16, attn_implementation="sdpa")
    return made.eval()


def filled_cache(name: str, job: ServeJob, num_tokens: int) -> Any:
    """Returns a cache with `num_tokens` random tokens per sequence and capacity for full sequences."""
    import torch
    from transformers import StaticCache

    lm, of = model(job.of), job.of
    shape = job.num_seqs, of.config.num_key_value_heads, num_tokens, of.config.head_dim
    tokens = torch.randn(shape, dtype=torch.bfloat16, device=lm.device)
    lm.set_attn_implementation("sdpa")  # with "kvjax", attention stores the tokens instead of `update`
    if name == STATIC:
        cache: Any = StaticCache(config=lm.config, max_cache_len=of.seq_len)
    else:
        from kvjax_torch.transformers_cache import KvjaxCache

        sizes: Any = {"num_blocks": job.num_blocks, "block_size": BLOCK_SIZE}
        cache = KvjaxCache(lm.config, **sizes, kv_cache_dtype=job.dtype, k_scale=1.0, v_scale=1.0)
    for layer in range(of.config.num_hidden_layers):
        cache.update(tokens, tokens, layer)
    if name == KVJAX_CACHE:
        lm.set_attn_implementation("kvjax")
    return cache


def serve(name: str, job: ServeJob) -> Timing:
    """Times a step of `generate` as the difference between generating many and few tokens.

    Raises:
      AssertionError: If `generate` returns the wrong number of tokens.
    """
    import torch

    from kvjax_torch.transformers_cache import CACHE_ARGUMENT

    lm = model(job.of)
    num_tokens = job.of.seq_len - MANY if job.of.seq_len > 2 * MANY else MANY
    ids = torch.randint(job.of.config.vocab_size, (job.num_seqs, num_tokens + 1), device=lm.device)

    def seconds(number: int) -> float:
        cache = filled_cache(name, job, num_tokens)
        wait()
        start = time.perf_counter()
        found = lm.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            **{CACHE_ARGUMENT: cache},
            max_new_tokens=number,
            min_new_tokens=number,
            do_sample=False,
            pad_token_id=0,
        )
        wait()
        if found.shape[1] != num_tokens + 1 + number:
            raise AssertionError(f"got {found.shape[1] - num_tokens - 1} tokens, expected {number}")
        return time.perf_counter() - start

    with torch.inference_mode():
        seconds(FEW)  # compiles
        samples = [max(seconds(MANY - 1) - seconds(FEW), 1e-9) / (MANY - 1 - FEW) for _ in range(2)]
    return Timing(tuple(samples), Clock.HOST)


def free() -> None:
    model.cache_clear()
    if workload.is_gpu():
        import torch

        torch.cuda.empty_cache()
