"""Inputs that all attention peers share, and the expected results."""

from __future__ import annotations

import dataclasses
import functools
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from benchmarks import workload
from benchmarks.peers import in_torch
from benchmarks.peers.peer import Run
from benchmarks.shapes import BLOCK_SIZE, AttentionRow
from examples.shared_prefix import shared_prefix_attention
from kvjax import AttentionSpec, FullAttentionSpec, KVCache, KVCacheDType
from kvjax.ops.options import MAX_DECODE_Q_LEN

DISTINCT_PAGES = 1_024  # pages of random tokens; each cache is a random selection of them
OWN_ERROR, FP8_ERROR, PEER_ERROR = 2**-7, 0.09, 2**-3
"""The maximum relative RMS error with respect to XLA in float32. kvjax rounds results and weights to bfloat16, or, for
products in fp8, query, weights and elements of NVFP4 to e4m3. Of fp8 caches, other kernels also round queries and
weights to fp8."""

NUM_SAMPLED = 16  # query tokens of a step to compare
MAX_WORKERS = 8  # compilation threads; they hold the GIL most of the time


@dataclasses.dataclass(frozen=True)
class AttentionJob:
    """One call of attention to time."""

    row: AttentionRow
    dtype: KVCacheDType

    @property
    def spec(self) -> AttentionSpec:
        """The cache's spec. It has no window, which is an argument of the call."""
        row = self.row
        return FullAttentionSpec(BLOCK_SIZE, row.num_kv_heads, row.head_size, dtype=self.dtype, layout=row.layout)

    @property
    def subject(self) -> dict[str, Any]:
        """The fields that identify the job in tables and files."""
        row = self.row
        sizes = {"num_seqs": row.num_seqs, "seq_len": row.seq_len, "q_len": row.q_len, "window_len": row.window}
        heads = {"num_heads": row.num_heads, "num_kv_heads": row.num_kv_heads, "head_size": row.head_size}
        step = {"num_prompts": row.num_prompts, "prefix_len": row.prefix_len or None}
        case = {"case": row.name, **heads, "dtype": self.dtype, "layout": row.layout}
        return {**case, **sizes, **step, "logits_soft_cap": row.logits_soft_cap}

    @property
    def page_bytes(self) -> int:
        return self.row.num_blocks_read * self.spec.real_page_size_bytes

    @property
    def query_shape(self) -> tuple[int, ...]:
        """`[num_seqs, q_len, num_heads, head_size]`, or `[num_tokens, num_heads, head_size]` for a step."""
        row = self.row
        tokens = (int(row.cu_q_lens[-1]),) if row.is_step else (row.num_seqs, row.q_len)
        return *tokens, row.num_heads, row.head_size

    @property
    def query(self) -> jax.ShapeDtypeStruct:
        of_one = self.row.q_len == 1 and not self.row.is_step
        shape = self.query_shape[:1] + self.query_shape[2:] if of_one else self.query_shape
        return jax.ShapeDtypeStruct(shape, workload.INPUT_DTYPE)

    @property
    def sampled(self) -> np.ndarray:
        """Indices to check along the query's first dimension. In a step, half are last tokens of sequences."""
        row, half = self.row, NUM_SAMPLED // 2
        if not row.is_step:
            return np.asarray([0, -1])
        tokens, seqs = (np.linspace(0, count - 1, half).astype(int) for count in (row.cu_q_lens[-1], row.num_seqs))
        return np.concatenate([tokens, row.cu_q_lens[seqs + 1] - 1])

    @property
    def limits(self) -> dict[str, int]:
        """The static sizes of a step's call."""
        row = self.row
        if row.num_prompts is not None:
            return {"max_q_len": row.q_len, "max_prompts": row.num_prompts}
        decode_q_len = row.q_len if row.q_len <= MAX_DECODE_Q_LEN else 0
        return {"max_q_len": row.q_len, "max_prompts": row.num_seqs, "decode_q_len": decode_q_len}

    @property
    def bytes_moved(self) -> int:
        """The minimum bytes that a call reads and writes: pages, block table, lengths, query and result."""
        numbers = (self.row.num_blocks_read + self.row.num_seqs) * np.dtype(np.int32).itemsize
        return self.page_bytes + numbers + 2 * int(np.prod(self.query_shape)) * workload.INPUT_DTYPE.itemsize

    @property
    def num_caches(self) -> int:
        """The number of caches that calls rotate through, so that the pages they read are not in L2."""
        return min(-(-workload.sizes().rotation_bytes // self.page_bytes), workload.MAX_BATCHES)


class CheckedInputs:
    """Inputs with expected results.

    Attributes:
      result_shape: The shape of a result. Peers may add or leave out dimensions of size 1.
      sampled: Indices to check along the result's first dimension.
    """

    result_shape: tuple[int, ...]
    sampled: np.ndarray

    @property
    def expected(self) -> np.ndarray:
        """The expected result for the sampled queries, float64."""
        raise NotImplementedError

    def check(self, attended: Any, *, most: float, factor: float = 1.0) -> dict[str, float]:
        """Compares a result, multiplied by `factor`, with that of XLA.

        Returns the root mean square of the sampled tokens' relative errors; `AssertionError` if that exceeds `most` or
        an element is NaN or infinite.
        """
        got = np.asarray(attended).reshape(self.result_shape)
        if not np.isfinite(got).all():
            wrong = np.count_nonzero(~np.isfinite(got))
            raise AssertionError(f"{wrong:,} of {got.size:,} elements are NaN or infinite")
        deviation = factor * got[self.sampled].astype(np.float64) - self.expected
        errors = np.linalg.norm(deviation, axis=(-2, -1)) / np.linalg.norm(self.expected, axis=(-2, -1))
        apart = np.sqrt(np.mean(errors**2))
        if not apart <= most:
            raise AssertionError(f"the result is {apart:.2%} off, expected at most {most:.2%}")
        return {"error": float(apart)}

    def run_in_torch(self, call: Callable[[int], Any], *, most: float, factor: float = 1.0) -> Run:
        """Returns the run of a torch peer, which checks its results."""

        def check(attended: Any) -> dict[str, float]:
            return self.check(attended.float().cpu().numpy(), most=most, factor=factor)

        return Run(call, check, in_torch.wait)


class AttentionInputs(CheckedInputs):
    """Inputs of one job.

    Attributes:
      caches: Full caches with equal contents; calls rotate through them.
      query: bfloat16 array of the job's `query_shape`.
      table: int32 `[num_seqs, blocks]`, a random permutation of all pages, except for shared ones.
      seq_lens: int32 `[num_seqs]`.
      numbers: kvjax's arguments after the query and the cache.
    """

    def __init__(self, job: AttentionJob) -> None:
        self.job, row = job, job.row
        self.result_shape, self.sampled = job.query_shape, job.sampled
        rng = np.random.default_rng(2)
        pages = filled_pages(job.spec)
        self.source = jax.device_put(rng.integers(pages.num_blocks, size=row.num_blocks, dtype=np.int32))
        self.caches = [KVCache(take_pages(pages.kv, self.source), job.spec) for _ in range(job.num_caches)]
        self.table = jax.device_put(row.table(rng.permutation(row.num_blocks).astype(np.int32)))
        self.seq_lens = jax.device_put(row.seq_lens)
        query = rng.standard_normal(job.query_shape, np.float32).astype(workload.INPUT_DTYPE)
        self.query = jax.device_put(query)
        self.numbers: tuple[jax.Array, ...] = self.table, self.seq_lens
        if prefix := row.prefix_blocks:
            self.numbers = self.table[0, :prefix], self.table[:, prefix:], self.seq_lens - row.prefix_len
        elif row.is_step:
            self.numbers = self.table, self.seq_lens, jax.device_put(row.cu_q_lens)

    @property
    def sampled_sequences(self) -> tuple[jax.Array, jax.Array]:
        """Table and lengths of the sampled queries. In a step, each sampled token ends a sequence of its own."""
        row, sampled = self.job.row, self.job.sampled
        if not row.is_step:
            return self.table[sampled], self.seq_lens[sampled]
        seqs = np.searchsorted(row.cu_q_lens[1:], sampled, side="right")
        lengths = row.seq_lens[seqs] - (row.cu_q_lens[seqs + 1] - sampled) + 1
        return self.table[seqs], jax.device_put(lengths.astype(np.int32))

    def token_pages(self) -> tuple[jax.Array, jax.Array]:
        """Returns bfloat16 keys and values by page: `[num_blocks, BLOCK_SIZE, heads, head_size]`."""
        spec = self.job.spec
        shape = DISTINCT_PAGES, BLOCK_SIZE, spec.num_kv_heads, spec.head_size
        key, value = (
            take_pages(x.reshape(shape), self.source) for x in workload.random_tokens(spec, DISTINCT_PAGES * BLOCK_SIZE)
        )
        return key, value

    def dense(self) -> tuple[jax.Array, jax.Array]:
        """Returns bfloat16 keys and values by sequence: `[num_seqs, blocks * BLOCK_SIZE, heads, head_size]`."""
        spec, order = self.job.spec, self.table.reshape(-1)
        shape = self.job.row.num_seqs, -1, spec.num_kv_heads, spec.head_size
        key, value = (take_pages(pages, order).reshape(shape) for pages in self.token_pages())
        return key, value

    @functools.cached_property
    def expected(self) -> np.ndarray:
        query = self.query[self.job.sampled].astype(jnp.float32)
        attended = reference(self.job).result()(query, self.caches[0], *self.sampled_sequences, **workload.scales())
        return np.asarray(attended, np.float64)


@functools.cache
def filled_pages(spec: AttentionSpec, *, scaled: bool = True) -> KVCache:
    """Returns `DISTINCT_PAGES` pages of normal random tokens, written by XLA with `workload.scales()` or without."""
    key, value = workload.random_tokens(spec, DISTINCT_PAGES * BLOCK_SIZE)
    slots = np.arange(DISTINCT_PAGES * BLOCK_SIZE, dtype=np.int32)
    scales = workload.scales() if scaled else {}
    return workload.write_in_xla(key, value, KVCache.allocate(spec, DISTINCT_PAGES), slots, **scales)


@jax.jit
def take_pages(pages: jax.Array, source: Any) -> jax.Array:
    return jnp.take(pages, source, axis=0, mode="clip")


class Workers:
    """Daemon threads that run submitted tasks in order. They do not keep the program alive."""

    def __init__(self, count: int) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        for _ in range(count):
            threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while True:
            self._tasks.get()()

    def submit[Result](self, make: Callable[..., Result], *args: Any) -> Future[Result]:
        """Schedules `make(*args)`. The future's `result` raises any error."""
        future: Future[Result] = Future()

        def task() -> None:
            try:
                future.set_result(make(*args))
            except BaseException as error:
                future.set_exception(error)

        self._tasks.put(task)
        return future


@functools.cache
def workers() -> Workers:
    return Workers(min(os.cpu_count() or 1, MAX_WORKERS))


def compiling(function: Any, *args: Any, **kwargs: Any) -> Future[Any]:
    """Lowers and compiles `function` for these argument shapes and dtypes in the background."""
    jitted = function if hasattr(function, "lower") else jax.jit(function)
    return workers().submit(lambda: jitted.lower(*args, **kwargs).compile())


def dense_implementation() -> Literal["cudnn", "xla"]:
    """Returns the implementation of `jax.nn.dot_product_attention` on this device."""
    return "cudnn" if workload.is_gpu() else "xla"


@functools.cache
def attention(job: AttentionJob, implementation: str | None, *, cascade: bool = True, **options: Any) -> Future[Any]:
    """Compiles kvjax's attention for a job: `(query, cache, *numbers, **workload.scales())`.

    This is `paged_attention`, `ragged_paged_attention` for a step, or the attention of examples/shared_prefix.py for
    shared prefixes, which without `cascade` is `paged_attention` where every sequence reads the prefix. `options` are
    more of the first two.
    """
    row, cache = job.row, workload.cache_struct(job.spec, job.row.num_blocks)
    if not (row.is_step and cascade):
        return paged(job, job.query, implementation, **options)
    table, lengths = indices(row.num_seqs, row.blocks_a_seq - row.prefix_blocks), indices(row.num_seqs)
    if row.prefix_len:
        attend = functools.partial(shared_prefix_attention, implementation=implementation)
        numbers = indices(row.prefix_blocks), table, lengths
    else:
        options = job.limits | row.options | options
        attend = functools.partial(kvjax.ragged_paged_attention, **options, implementation=implementation)
        numbers = table, lengths, indices(row.num_seqs + 1)
    return compiling(attend, job.query, cache, *numbers, **workload.scales())


def reference(job: AttentionJob) -> Future[Any]:
    """Compiles `paged_attention` in XLA for a float32 query of the sampled sequences."""
    shape = len(job.sampled), *job.query_shape[1:]
    return paged(job, jax.ShapeDtypeStruct(shape, jnp.float32), "xla")


@functools.cache
def paged(job: AttentionJob, query: jax.ShapeDtypeStruct, implementation: str | None, **options: Any) -> Future[Any]:
    """Compiles `kvjax.paged_attention` for a query over the caches of a job."""
    attend = functools.partial(kvjax.paged_attention, **job.row.options, **options, implementation=implementation)
    cache = workload.cache_struct(job.spec, job.row.num_blocks)
    numbers = indices(query.shape[0], job.row.blocks_a_seq), indices(query.shape[0])
    return compiling(attend, query, cache, *numbers, **workload.scales())


def indices(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)
