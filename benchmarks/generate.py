"""Times a decode step of a transformers model, and measures its memory, with different caches.

Run `python -m benchmarks.generate --json=generate.json` from the source tree. A step is the same as in `generate`: a
forward pass of one token per sequence, with the mask and positions that `generate` passes, and greedy sampling.
benchmarks/README.md explains the table.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any, ClassVar

from absl.testing import absltest

from benchmarks import output, shapes, timing
from benchmarks.bars import DYNAMIC, PAGED
from benchmarks.measurement import Measurement
from benchmarks.peers.in_torch import has_gpu, seconds_in_a_row, wait
from benchmarks.peers.peer import why_not_importable
from benchmarks.peers.serves_torch import random_llama
from benchmarks.timing import Clock, Timing
from examples.llama import ModelConfig
from kvjax import KVCacheDType

if reason := why_not_importable("torch", "transformers", "kvjax_torch"):
    raise SystemExit(f"benchmarks.generate measures transformers (pip install 'kvjax[transformers]'): {reason}")
import torch
from transformers import Cache, DynamicCache

from kvjax_torch.transformers_cache import CACHE_ARGUMENT, KvjaxCache

DTYPES = output.define_dtypes(shapes.TIMED_DTYPES)

GATHERED = "KvjaxCache, sdpa"
ATTENTION = {DYNAMIC: "sdpa", GATHERED: "sdpa", PAGED: "kvjax"}

NUM_LAYERS = 8


LLAMA_8B = ModelConfig(128_256, 4_096, 14_336, NUM_LAYERS, 32, 8, 128)  # a quarter of the layers
SMALL = ModelConfig(61, 64, 96, NUM_LAYERS, 4, 2, 32)  # for smoke tests and machines without a GPU

WARM_UP_STEPS, STEPS_IN_A_ROW, KERNEL_STEPS = 3, 6, 4
SAMPLES = 5
MAX_STEPS = 64  # room for tokens after the prompt
MAX_ERROR = 0.05
"""Maximum relative RMS error of the logits. Eight layers amplify bfloat16 rounding errors."""


@dataclasses.dataclass(frozen=True)
class Row:
    """A batch of sequences of equal length."""

    num_seqs: int
    seq_len: int

    @property
    def name(self) -> str:
        return f"{self.num_seqs}x{self.seq_len}"

    @property
    def num_blocks(self) -> int:
        return self.num_seqs * -(-(self.seq_len + MAX_STEPS) // shapes.BLOCK_SIZE)

    def dense_bytes(self, config: Any) -> int:
        """Returns the bytes of a layer's keys and values in bfloat16."""
        elements = 2 * int(config.num_key_value_heads or 0) * int(config.head_dim or 0)
        return self.num_seqs * self.seq_len * elements * torch.bfloat16.itemsize


GPU_ROWS, SMALL_ROWS = (Row(32, 2_048), Row(8, 8_192)), (Row(2, 48),)


@dataclasses.dataclass(frozen=True)
class Job:
    """One row, dtype and peer to time."""

    row: Row
    dtype: KVCacheDType
    peer: str

    @property
    def subject(self) -> dict[str, Any]:
        sizes = {"num_layers": NUM_LAYERS, **dataclasses.asdict(self.row)}
        return {"case": self.row.name, **sizes, "dtype": self.dtype}

    def cache(self, config: Any) -> Cache:
        if self.peer == DYNAMIC:
            return DynamicCache(config=config)
        # With random weights, keys and values have a magnitude of about 1. Unquantized caches ignore the scales.
        return KvjaxCache(
            config, num_blocks=self.row.num_blocks, kv_cache_dtype=self.dtype, k_scale=0.037, v_scale=0.052
        )


@functools.cache
def model() -> Any:
    torch.manual_seed(0)
    config = LLAMA_8B if has_gpu() and not output.SMOKE.value else SMALL
    return random_llama(config, 131_072, "cuda" if has_gpu() else "cpu")


class Decoding:
    """Decodes sequences whose prompt is in a cache."""

    def __init__(self, job: Job) -> None:
        self.job, self.model = job, model()
        self.model.set_attn_implementation("sdpa")  # all peers store the prompt in the same way
        shape = job.row.num_seqs, job.row.seq_len
        random = torch.Generator().manual_seed(1)
        prompt = torch.randint(self.model.config.vocab_size, shape, generator=random).to(self.model.device)
        self.cache = job.cache(self.model.config)
        with torch.no_grad():
            self.model(prompt, **{CACHE_ARGUMENT: self.cache}, logits_to_keep=1)
        self.first = prompt[:, :1]
        self.start()

    def start(self, peer: str | None = None) -> None:
        """Discards previous steps, and selects the attention of a peer for the next ones."""
        self.model.set_attn_implementation(ATTENTION[peer or self.job.peer])
        made = self.cache.get_seq_length() - self.job.row.seq_len
        if made:
            self.cache.crop(-made)
        num_seqs, seq_len = self.job.row.num_seqs, self.job.row.seq_len
        self.tokens = self.first
        self.mask = self.tokens.new_ones((num_seqs, seq_len))
        self.positions = self.tokens.new_full((1, 1), seq_len)

    @torch.no_grad()
    def step(self, _: int = 0) -> torch.Tensor:
        """Launches a step and returns its logits."""
        self.mask = torch.cat([self.mask, self.mask[:, :1]], dim=1)
        inputs = {"attention_mask": self.mask, "position_ids": self.positions, CACHE_ARGUMENT: self.cache}
        logits = self.model(self.tokens, **inputs, use_cache=True).logits[:, -1].float()
        self.tokens, self.positions = logits.argmax(dim=-1, keepdim=True), self.positions + 1
        return logits


def time_steps(job: Job) -> Measurement:
    """Checks the first step of a job, then times its steps.

    Facts are the peak memory that a step allocates (on a GPU), the size of a dense layer, and the error of the first
    logits relative to the same cache with dense layers.
    """
    decoding = Decoding(job)
    error = None
    if job.peer == PAGED:
        decoding.start(GATHERED)
        expected = decoding.step()
        decoding.start()
        got = decoding.step()
        error = ((got - expected).norm() / expected.norm()).item()
        if not error <= MAX_ERROR:  # also rejects NaN
            raise AssertionError(f"{job}: logits are off by {error:.3g} of their root mean square")
    for _ in range(WARM_UP_STEPS):
        decoding.step()
    times, dense = step_times(decoding), job.row.dense_bytes(decoding.model.config)
    facts = {"kernel_seconds": None, "step_bytes": step_bytes(decoding), "dense_layer_bytes": dense, "error": error}
    return Measurement("decode step", job.subject, job.peer, times, facts=facts)


def step_times(decoding: Decoding) -> Timing:
    """Times back-to-back steps."""
    if not has_gpu():
        return timing.measure(decoding.step, wait=wait, calls=SAMPLES)
    samples = tuple(seconds_in_a_row(decoding.step, STEPS_IN_A_ROW) for _ in range(SAMPLES))
    return Timing(samples, Clock.EVENTS)


def step_bytes(decoding: Decoding) -> int | None:
    """Returns the peak memory that torch allocates in a step, or `None` without a GPU."""
    if not has_gpu():
        return None
    wait()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    decoding.step()
    wait()
    return torch.cuda.max_memory_allocated() - before


def kernel_seconds(job: Job) -> float | None:
    decoding = Decoding(job)
    for _ in range(WARM_UP_STEPS):
        decoding.step()
    return timing.kernel_seconds(decoding.step, wait=wait, calls=KERNEL_STEPS)


def jobs() -> list[Job]:
    """Returns the jobs to time. transformers' own cache comes first, only in bfloat16."""
    rows = GPU_ROWS if has_gpu() and not output.SMOKE.value else SMALL_ROWS
    kinds = itertools.product(output.chosen(DTYPES, KVCacheDType, shapes.TIMED_DTYPES), (GATHERED, PAGED))
    each = [(KVCacheDType.BFLOAT16, DYNAMIC), *kinds]
    return [Job(row, *kind) for row, kind in itertools.product(rows, each)]


class GenerateBenchmark(output.Program):
    """Fails if logits are wrong or a layer is materialized densely, never because of a time.

    CUPTI comes last, because it stays attached and slows down every launch.
    """

    found: ClassVar[dict[Job, Measurement]] = {}

    @classmethod
    def tearDownClass(cls) -> None:
        """Adds measurements at the end, because saving them initializes JAX, which calls from torch do not need."""
        for measurement in cls.found.values():
            cls.results.add(measurement)
        model.cache_clear()
        super().tearDownClass()

    def test_decode_steps(self) -> None:
        for job in jobs():
            with self.subTest(row=job.row.name, dtype=job.dtype.value, peer=job.peer):
                what = f"{job.peer}, {job.dtype.value}, {job.row.name}"
                if (found := self.results.fitting(what, None, functools.partial(time_steps, job))) is None:
                    continue
                self.found[job] = found
                taken, dense = found.facts["step_bytes"] or 0, found.facts["dense_layer_bytes"]
                if job.peer == PAGED and taken >= dense and not output.SMOKE.value:
                    self.fail(f"a step took {taken} bytes, a dense layer {dense}")

    def test_kernels_of_steps(self) -> None:
        if not has_gpu():
            self.results.skip("kernels", "need an NVIDIA GPU")
            return
        for job, found in self.found.items():
            with self.subTest(row=job.row.name, dtype=job.dtype.value, peer=job.peer):
                found.facts["kernel_seconds"] = kernel_seconds(job)


if __name__ == "__main__":
    absltest.main()
