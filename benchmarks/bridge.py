"""Times calls from torch: host time, GPU time, CUDA graph replays, and first calls, which compile.

Run `python -m benchmarks.bridge --json=bridge.json` from the source tree. docs/interop.md explains the tables.
"""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import os
import time
import timeit
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from typing import Any
from unittest import mock

from absl.testing import absltest

from benchmarks import compare, copies, latents, output, shapes, timing, workload
from benchmarks.measurement import Measurement, Rows
from benchmarks.peers import in_torch, writes
from benchmarks.peers.in_torch import has_gpu, wait
from benchmarks.peers.peer import why_not_importable
from benchmarks.timing import Clock, Timing
from benchmarks.workload import WriteJob
from kvjax import CacheLayout, KVCacheDType

if reason := why_not_importable("torch", "kvjax_torch"):
    raise SystemExit(f"benchmarks.bridge measures calls from torch (pip install 'kvjax[torch]'): {reason}")
import torch

import kvjax_torch

CASE = shapes.LLAMA_8B
NUM_TOKENS = output.define_numbers(
    "tokens", "tokens in the writes whose kernels are timed (default: 1 to 65,536; without a GPU, 1 and 64)", least=1
)

FIRST_CASE = shapes.Case("small", 1, 64)
"""Compiled first, so that one-time costs of the process are not attributed to other cases."""

DECODE_TOKENS = 64  # tokens per call where the number does not vary
EAGER_DTYPE, EAGER_BLOCKS = KVCacheDType.NVFP4, 1024
QUERY_HEADS = 32

GRAPH_WRITES, GRAPH_TOKENS, REPLAYS_IN_A_ROW = 32, (64, 2_048), 10
A_WHILE = 20_000_000  # GPU cycles to sleep, about 10 ms, so that calls queue up without blocking the host

SYNCHRONIZED = "called a synchronizing CUDA operation"  # part of torch's warning

Call = Callable[[], Any]
type WriteArguments = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def device() -> str:
    return "cuda" if has_gpu() else "cpu"


def scale_tensors() -> list[torch.Tensor]:
    return [torch.tensor(scale, device=device()) for scale in workload.SCALES]


def new_write(case: shapes.Case, dtype: KVCacheDType) -> WriteArguments:
    """Returns `key`, `value`, `key_cache`, `value_cache` (one allocation) and slots for `DECODE_TOKENS` tokens."""
    spec = case.spec(dtype)
    stored = getattr(torch, spec.array_dtype.name)
    kv_cache = torch.zeros(spec.cache_shape(EAGER_BLOCKS), dtype=stored, device=device())
    key = torch.randn((DECODE_TOKENS, case.num_kv_heads, case.head_size), device=device()).to(torch.bfloat16)
    slots = torch.randperm(EAGER_BLOCKS * shapes.BLOCK_SIZE, device=device())[:DECODE_TOKENS]
    return key, -key, kv_cache[:, 0], kv_cache[:, 1], slots


def first_calls(case: shapes.Case, dtype: KVCacheDType) -> dict[str, Call]:
    arguments, scales = new_write(case, dtype), scale_tensors()
    table, lengths = (torch.full(shape, 4, dtype=torch.int32, device=device()) for shape in ((1, 4), (1,)))
    write, gather = kvjax_torch.reshape_and_cache_flash, kvjax_torch.gather_kv
    return {
        "write": lambda: write(*arguments, dtype.value, *scales),
        "gather": lambda: gather(*arguments[2:4], table, lengths, dtype.value, *scales),
    }


def time_first_call(name: str, case: shapes.Case, dtype: KVCacheDType, call: Call) -> Measurement:
    """Times the first call until its result is ready, and then a second call.

    There is one sample, because a process has only one first call of each kind.
    """
    seconds = []
    for _ in range(2):
        wait()
        start = time.perf_counter()
        call()
        wait()
        seconds.append(time.perf_counter() - start)
    subject = {**WriteJob(case, dtype, DECODE_TOKENS).subject, "call": name}
    times = Timing(tuple(seconds[:1]), Clock.WALL)
    return Measurement("bridge first call", subject, "kvjax_torch", times, facts={"second_seconds": seconds[1]})


def eager_calls() -> dict[str, Call]:
    """Returns the calls whose host time is measured: a write, an equal `index_copy_`, and the write in JAX."""
    key, *_, slots = arguments = new_write(CASE, EAGER_DTYPE)
    dense = key.new_zeros((EAGER_BLOCKS * shapes.BLOCK_SIZE, CASE.num_kv_heads * CASE.head_size))
    write = functools.partial(kvjax_torch.reshape_and_cache_flash, *arguments, EAGER_DTYPE.value)
    tokens = workload.Tokens(CASE, DECODE_TOKENS, num_blocks=EAGER_BLOCKS, rotation_bytes=0)
    jitted = workload.Write(tokens.poisoned(CASE.spec(EAGER_DTYPE)), tokens.batches(DECODE_TOKENS), None)
    return {
        "torch index_copy_": functools.partial(dense.index_copy_, 0, slots, key.flatten(1)),
        "kvjax_torch, scales as tensors": functools.partial(write, *scale_tensors()),
        "kvjax_torch, scales as floats": functools.partial(write, *workload.SCALES),
        "kvjax under jit": functools.partial(jitted, 0),
    }


def attention_calls() -> dict[str, Call]:
    """Returns calls whose host time is measured. A ragged step is a prompt beside 7 sequences that decode."""
    _, _, key_cache, value_cache, _ = new_write(CASE, EAGER_DTYPE)
    query = torch.randn((DECODE_TOKENS, QUERY_HEADS, CASE.head_size), device=device()).to(torch.bfloat16)
    table = torch.arange(2 * DECODE_TOKENS, dtype=torch.int32, device=device())
    lens = torch.full((DECODE_TOKENS,), 2 * shapes.BLOCK_SIZE, dtype=torch.int32, device=device())
    cu_q_lens = torch.tensor([0, *range(DECODE_TOKENS - 7, DECODE_TOKENS + 1)], dtype=torch.int32, device=device())
    stored, sizes = (EAGER_DTYPE.value, *scale_tensors()), {"max_q_len": DECODE_TOKENS, "max_prompts": 1}
    cache, out = (query, key_cache, value_cache), torch.empty_like(query)
    decode = functools.partial(kvjax_torch.paged_attention, *cache, table.view(DECODE_TOKENS, -1))
    step = functools.partial(kvjax_torch.ragged_paged_attention, *cache, table.view(8, -1), 8 * lens[:8], **sizes)
    calls = {"paged_attention": (decode, lens), "ragged_paged_attention": (step, cu_q_lens)}
    found: dict[str, Call] = {}
    for name, (call, last) in calls.items():
        found[name] = functools.partial(call, last, *stored)
        found[f"{name}, out="] = functools.partial(call, last, *stored, out=out)
        # 64-bit numbers are converted, so each call is planned.
        found[f"{name}, planned"] = functools.partial(call, last.long(), *stored)
    return found


def other_calls() -> dict[str, Call]:
    """Returns calls with a rotation, gathers, and calls over latents, whose host time is measured."""
    key, value, key_cache, value_cache, slots = new_write(CASE, EAGER_DTYPE)
    k_scale, v_scale = scale_tensors()
    stored, of_latents = (EAGER_DTYPE.value, k_scale, v_scale), (EAGER_DTYPE.value, k_scale)

    def rows(*sizes: int) -> torch.Tensor:
        return torch.randn((DECODE_TOKENS, *sizes), device=device()).to(torch.bfloat16)

    query, angles = rows(QUERY_HEADS, CASE.head_size), rows(CASE.head_size)
    table = torch.arange(DECODE_TOKENS, dtype=torch.int32, device=device())[:, None]
    lens = torch.ones(DECODE_TOKENS, dtype=torch.int32, device=device())
    spec = latents.spec_of(EAGER_DTYPE)
    cache = torch.zeros(spec.cache_shape(EAGER_BLOCKS), dtype=torch.uint8, device=device())
    dst, bounds = rows(latents.RANK + latents.ROPE), torch.arange(DECODE_TOKENS + 1, device=device()).int()
    new, sizes = (rows(latents.RANK), rows(latents.ROPE)), (latents.RANK, latents.ROPE)
    parts = rows(16, latents.RANK + latents.ROPE).split(sizes, dim=2)
    apart = [part.contiguous() for part in parts]
    attend = functools.partial(kvjax_torch.mla_paged_attention, sm_scale=0.1)
    rotated = query, key, value, key_cache, value_cache, slots, slots, angles
    write = functools.partial(kvjax_torch.concat_and_cache_mla, *new, cache, slots, *of_latents)
    gather = functools.partial(kvjax_torch.gather_and_maybe_dequant_cache, cache, dst, table, bounds, None)
    return {
        "rope_and_cache": functools.partial(kvjax_torch.rope_and_cache, *rotated, *stored, unique_slots=True),
        "gather_kv": functools.partial(kvjax_torch.gather_kv, key_cache, value_cache, table, lens, *stored),
        "concat_and_cache_mla": functools.partial(write, unique_slots=True),
        "gather_and_maybe_dequant_cache": functools.partial(gather, DECODE_TOKENS, *of_latents),
        "mla_paged_attention": functools.partial(attend, *parts, cache, table, lens, *of_latents),
        "mla_paged_attention, two tensors": functools.partial(attend, *apart, cache, table, lens, *of_latents),
    }


def host_times(calls: Mapping[str, Call]) -> dict[str, Timing]:
    """Measures host time per call, interleaving the calls."""
    in_a_row = 100 if has_gpu() else 3
    timers = {name: timeit.Timer(call) for name, call in calls.items()}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(timing.LIMITS.min_calls + 1):
        for name, timer in timers.items():
            wait()
            samples[name].append(timer.timeit(in_a_row) / in_a_row)
    wait()
    clock = Clock.HOST if has_gpu() else Clock.WALL
    return {name: Timing(tuple(seconds[1:]), clock) for name, seconds in samples.items()}  # drops the warm-up round


def host_waits(call: Call) -> bool | None:
    """Returns whether a warmed-up call blocks the host while the GPU is busy, or `None` without a GPU."""
    if not has_gpu():
        return None
    stream, done = torch.cuda.Stream(), torch.cuda.Event()
    waited = False
    for _ in range(5):
        torch.cuda.synchronize()
        with torch.cuda.stream(stream), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda._sleep(A_WHILE)
            torch.cuda.set_sync_debug_mode("warn")
            try:
                call()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            done.record()
            waited |= done.query() or any(SYNCHRONIZED in str(warning.message) for warning in caught)
    torch.cuda.synchronize()
    return waited


def time_writes_replayed(dtype: KVCacheDType, num_tokens: int) -> Timing:
    """Records, times and checks a graph of `GRAPH_WRITES` writes of different tokens.

    A sample is the GPU time of a replay by CUDA's events, the mean of `REPLAYS_IN_A_ROW`.
    """
    spec = CASE.spec(dtype)
    tokens = workload.Tokens(CASE, GRAPH_WRITES * num_tokens)
    cache = tokens.poisoned(spec)
    calls = in_torch.kvjax_writes(cache, tokens.batches(num_tokens)[:GRAPH_WRITES])
    calls[0]()  # compiles and loads a module, which cannot be captured
    graph, samples = torch.cuda.CUDAGraph(), []
    # JAX's threads may query events meanwhile, which would fail a global capture.
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
        for call in calls:
            call()
    for _ in range(timing.LIMITS.min_calls):
        torch.cuda._sleep(A_WHILE)  # until all replays are queued
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(REPLAYS_IN_A_ROW):
            graph.replay()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) / 1e3 / REPLAYS_IN_A_ROW)
    wait()
    workload.check_same_bits(cache.kv, tokens.expected(spec, len(calls) * num_tokens).kv)
    return Timing(tuple(samples), Clock.EVENTS)


def _begin(is_smoke: bool) -> None:
    """Initializes a process that uses a single torch stream."""
    if is_smoke:
        output.shorten()
    torch.cuda.set_stream(torch.cuda.Stream())


class TorchBenchmark(output.Program):
    """Runs compilations first, and CUPTI last, because it stays attached and slows down every launch."""

    def test_compilations(self) -> None:
        timed = [(FIRST_CASE, KVCacheDType.BFLOAT16), *((CASE, dtype) for dtype in shapes.TIMED_DTYPES)]
        for case, dtype in timed:
            for name, call in first_calls(case, dtype).items():
                nothing_is_kept = mock.patch.dict(os.environ, KVJAX_CACHE_DIR="0")
                with self.subTest(case=case.name, dtype=dtype.value, call=name), nothing_is_kept:
                    is_first = not self.results.measurements
                    name = f"{name}, the first call of the process" if is_first else name
                    self.results.add(time_first_call(name, case, dtype, call))

    def test_eager_calls(self) -> None:
        self._measure_host("bridge host", WriteJob(CASE, EAGER_DTYPE, DECODE_TOKENS).subject, eager_calls())

    def test_eager_attention(self) -> None:
        subject = {**CASE.subject(EAGER_DTYPE, CacheLayout.NHD), "num_seqs": DECODE_TOKENS}
        self._measure_host("bridge host attention", subject, attention_calls())
        self._measure_host("bridge host others", subject, other_calls())

    def _measure_host(self, operation: str, subject: Mapping[str, Any], calls: Mapping[str, Call]) -> None:
        times = host_times(calls)
        for name, call in calls.items():
            facts: dict[str, Any] = {"waits": host_waits(call)}
            if index_copy := times.get("torch index_copy_"):
                facts["index_copy_ratio"] = times[name].seconds / index_copy.seconds
            self.results.add(Measurement(operation, subject, name, times[name], facts=facts))

    def test_graphs_and_kernels(self) -> None:
        replays = self.replayed()
        default = output.by_device(gpu=(1, 64, 256, 2_048, 16_384, 65_536), host=(1, 64), smoke=(8,))
        counts = NUM_TOKENS.value or default
        jobs = [WriteJob(CASE, dtype, count) for count, dtype in itertools.product(counts, shapes.TIMED_DTYPES)]
        peers = compare.present(self.results, [in_torch.KVJAX, writes.KVJAX], None)
        writes.measure(self, "bridge kernel", jobs, peers)
        every = self.results.measurements
        kernels = Rows(m for m in every if m.operation == "bridge kernel" and m.clock is Clock.DEVICE)
        for job, times in replays:
            subject, moved = {**job.subject, "num_writes": GRAPH_WRITES}, GRAPH_WRITES * job.bytes_moved
            kernel = kernels.find(in_torch.KVJAX.name, dtype=job.dtype.value, num_tokens=job.num_tokens).fastest
            facts = {"kernel_seconds": kernel and kernel.seconds}
            replay = Measurement("bridge replay", subject, "kvjax_torch", times, moved, copies.measure(moved), facts)
            self.results.add(replay)

    def replayed(self) -> list[tuple[WriteJob, Timing]]:
        """Times graphs of writes, each in a process of its own."""
        found: list[tuple[WriteJob, Timing]] = []
        if not has_gpu():
            self.results.skip("CUDA graphs", "need an NVIDIA GPU")
            return found
        counts = (min(GRAPH_TOKENS),) if output.SMOKE.value else GRAPH_TOKENS
        begin = functools.partial(_begin, output.SMOKE.value)
        for num_tokens, dtype in itertools.product(counts, shapes.TIMED_DTYPES):
            with self.subTest(dtype=dtype.value, num_tokens=num_tokens):
                with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), begin) as process:
                    times = process.submit(time_writes_replayed, dtype, num_tokens).result()
                found.append((WriteJob(CASE, dtype, num_tokens), times))
        return found


if __name__ == "__main__":
    absltest.main()
