"""The same model in transformers, with its own caches and with `KvjaxCache`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from benchmarks import timing
from benchmarks.bars import DYNAMIC, PAGED
from benchmarks.peers.in_torch import has_gpu, wait
from benchmarks.serving import Scenario, ServeJob
from benchmarks.shapes import BLOCK_SIZE
from benchmarks.timing import Timing
from kvjax import KVCacheDType

STATIC, GATHERED = "transformers StaticCache", "transformers KvjaxCache, sdpa"
NAMES = (STATIC, DYNAMIC, GATHERED, PAGED)
OWN_NAMES = (GATHERED, PAGED)
"""Peers whose errors fail the program. The first makes pages dense in each step, the second attends to pages."""

WARM_UP_STEPS, STEPS_IN_A_ROW, SAMPLES = 3, 6, 3
ROOM = 32
"""Tokens that are left free in full sequences, more than steps are taken."""

MAX_ERROR = 0.25
"""Maximum relative RMS difference between logits over pages and over dense layers. Layers amplify bfloat16 rounding."""


def serves(name: str, job: ServeJob) -> bool:
    """Limits the caches, which are slow, to the row that all dtypes share. transformers' own are in bfloat16."""
    return job.num_seqs == job.of.same and (name in OWN_NAMES or job.dtype is KVCacheDType.BFLOAT16)


@functools.cache
def model(of: Scenario) -> Any:
    """Returns a bfloat16 model with random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    others = ("rope_theta", "rope_scaling", "qk_norm")
    fields = {name: value for name, value in dataclasses.asdict(of.config).items() if name not in others}
    rope = {"rope_type": "default", "rope_theta": of.config.rope_theta}
    if of.config.rope_scaling:
        rope |= {"rope_type": "llama3", **dataclasses.asdict(of.config.rope_scaling)}
    described = LlamaConfig(**fields, rope_parameters=rope, max_position_embeddings=of.seq_len, dtype="bfloat16")
    with torch.device("cuda" if has_gpu() else "cpu"):
        made = LlamaForCausalLM._from_config(described, dtype=torch.bfloat16, attn_implementation="sdpa")
    return made.eval()


class Decoding:
    """Decodes a token of each sequence a step, from caches that are full but for `ROOM` tokens.

    A step is that of `generate` without its bookkeeping: a forward pass with the mask and the positions that it passes,
    and the likeliest next token.
    """

    def __init__(self, name: str, job: ServeJob) -> None:
        import torch
        from transformers import DynamicCache, StaticCache

        from kvjax_torch.transformers_cache import KvjaxCache

        self.model, config = model(job.of), model(job.of).config
        num_seqs, num_tokens = job.num_seqs, job.of.seq_len - ROOM
        if name == STATIC:
            self.cache: Any = StaticCache(config=config, max_cache_len=job.of.seq_len)
        elif name == DYNAMIC:
            self.cache = DynamicCache(config=config)
        else:
            # Random keys and values have a magnitude of about 1.
            sizes: Any = {"num_blocks": job.num_blocks, "block_size": BLOCK_SIZE}
            self.cache = KvjaxCache(config, **sizes, kv_cache_dtype=job.dtype, k_scale=0.037, v_scale=0.052)
        random = torch.Generator(self.model.device).manual_seed(1)
        shape = num_seqs, job.of.config.num_key_value_heads, num_tokens, job.of.config.head_dim
        tokens = torch.randn(shape, dtype=torch.bfloat16, device=self.model.device, generator=random)
        self.model.set_attn_implementation("sdpa")  # with "kvjax", attention stores the tokens instead of `update`
        for layer in range(job.of.config.num_hidden_layers):
            self.cache.update(tokens, tokens, layer)
        self.dense_layer_bytes = 2 * tokens.nbytes
        self.tokens = torch.arange(num_seqs, device=self.model.device)[:, None]
        self.mask = self.tokens.new_ones((num_seqs, num_tokens))

    def step(self) -> Any:
        """Launches a step and returns its logits."""
        import torch

        from kvjax_torch.transformers_cache import CACHE_ARGUMENT

        positions = self.tokens.new_full((1, 1), self.mask.shape[1])
        self.mask = torch.cat([self.mask, self.mask[:, :1]], dim=1)
        inputs = {"attention_mask": self.mask, "position_ids": positions, CACHE_ARGUMENT: self.cache}
        logits = self.model(self.tokens, **inputs, use_cache=True).logits[:, -1].float()
        self.tokens = logits.argmax(dim=-1, keepdim=True)
        return logits

    def attend_to_pages(self) -> float:
        """Attends to pages from here on, and returns the error of a step's logits relative to dense layers."""
        tokens, mask = self.tokens, self.mask
        expected = self.step()
        self.cache.crop(-1)
        self.tokens, self.mask = tokens, mask
        self.model.set_attn_implementation("kvjax")
        error = float((self.step() - expected).norm() / expected.norm())
        if not error <= MAX_ERROR:  # also rejects NaN
            raise AssertionError(f"logits are off by {error:.3g} of their root mean square")
        return error


def serve(name: str, job: ServeJob) -> tuple[Timing, Mapping[str, Any]]:
    """Times back-to-back steps by the host's clock, if logits over pages are right and take less than a dense layer."""
    import torch

    with torch.inference_mode():
        decoding, facts = Decoding(name, job), {}
        if name == PAGED:
            facts["error"] = decoding.attend_to_pages()
        for _ in range(WARM_UP_STEPS):
            decoding.step()
        if has_gpu():
            facts["step_bytes"] = taken = step_bytes(decoding)
            if name == PAGED and taken >= decoding.dense_layer_bytes:
                raise AssertionError(f"a step took {taken} bytes, a dense layer {decoding.dense_layer_bytes}")
        times = timing.measure_in_a_row(lambda _: decoding.step(), wait=wait, count=STEPS_IN_A_ROW, samples=SAMPLES)
    return times, facts


def step_bytes(decoding: Decoding) -> int:
    """Returns the most memory that torch allocates in a step beside what is there before."""
    import torch

    wait()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    decoding.step()
    wait()
    return torch.cuda.max_memory_allocated() - before


def free() -> None:
    """Frees the model's memory, if there is one; without, torch may be missing."""
    if model.cache_info().currsize:
        import torch

        model.cache_clear()
        torch.cuda.empty_cache()
