"""What calls from torch cost: the host, the GPU, in a CUDA graph, and once when their kernels are compiled.

`python -m benchmarks.bridge --json=torch.json`, from the source tree; docs/interop.md explains the tables.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import statistics
import time
import timeit
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from absl.testing import absltest

import kvjax_torch
from benchmarks import bars, output, shapes, timing, workload
from kvjax import AttentionSpec, KVCache, KVCacheDType
from kvjax_torch import cuda

# JAX takes three quarters of a GPU's memory when it is first used, torch what it needs when it needs it.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

CASE = shapes.LLAMA_8B
NUM_TOKENS = output.define_numbers(
    "tokens", "tokens in the writes whose kernels are timed (default: 1 to 65,536; without a GPU, 1 and 64)", least=1
)
GPU_TOKENS, HOST_TOKENS = (1, 64, 256, 2_048, 16_384, 65_536), (1, 64)

FIRST_CASE = shapes.Case("small", 1, 64)
"""What is compiled first, so that what only the first call of a process takes is not counted among the others."""

DECODE_TOKENS = 64
"""Tokens of the calls that are not about the number of tokens."""

EAGER_DTYPE = bars.NVFP4
EAGER_BLOCKS = 1024

GRAPH_WRITES = 32
GRAPH_TOKENS = (64, 2_048)
REPLAYS_IN_A_ROW = 10
REPLAY_SAMPLES = 30

A_WHILE = 20_000_000
"""Cycles that a GPU is kept busy for, some 10 ms, so that calls wait for it, and the host does not have to."""

SYNCHRONIZED = "called a synchronizing CUDA operation"
"""What torch warns of when asked to."""

SCALES = (0.037, 0.052)

Call = Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class FirstCall:
    """One line of the table of first calls: seconds until the results of a call are there, when first and then."""

    call: str
    dtype: KVCacheDType
    first_seconds: float
    second_seconds: float


@dataclasses.dataclass(frozen=True)
class HostTime:
    """One line of the table of the host's times.

    Attributes:
      call: what is called.
      seconds: median time that a call keeps the host.
      index_copy_ratio: that over the time of an `index_copy_`.
      bar: what it is held to.
      waits: whether the host waits for what was queued before the call; `None` where there is no GPU to wait for.
    """

    call: str
    seconds: float
    clock: timing.Clock
    index_copy_ratio: float
    bar: bars.Bar | None
    waits: bool | None

    @property
    def value(self) -> float:
        """What the bar is about."""
        is_time = self.bar is not None and self.bar.measure is bars.Measure.MICROSECONDS
        return self.seconds * 1e6 if is_time else self.index_copy_ratio


@dataclasses.dataclass(frozen=True)
class ReplayTime:
    """One line of the table of graphs: seconds of one replay and of one of its kernels, where those were timed."""

    dtype: KVCacheDType
    num_tokens: int
    num_writes: int
    seconds: float
    clock: timing.Clock
    kernel_seconds: float | None

    @property
    def ratio(self) -> float | None:
        """The replay's time over that of its kernels."""
        return None if self.kernel_seconds is None else self.seconds / (self.num_writes * self.kernel_seconds)


@dataclasses.dataclass(frozen=True)
class KernelTime:
    """One line of the table of kernels: what a write launches from torch, and under `jit`, with the same arguments."""

    dtype: KVCacheDType
    num_tokens: int
    torch_seconds: float
    jit_seconds: float
    clock: timing.Clock
    torch_kernels: tuple[str, ...]
    jit_kernels: tuple[str, ...]

    @property
    def ratio(self) -> float:
        """Torch's time over that under `jit`."""
        return self.torch_seconds / self.jit_seconds


def has_gpu() -> bool:
    """Whether torch has one. JAX is not asked, for that would start it before the first call does."""
    return torch.cuda.is_available()


def device() -> str:
    return "cuda" if has_gpu() else "cpu"


def synchronize(_: object = None) -> None:
    """Waits for every kernel on the device."""
    if has_gpu():
        torch.cuda.synchronize()


def scale_tensors() -> tuple[torch.Tensor, torch.Tensor]:
    k_scale, v_scale = SCALES
    return torch.tensor(k_scale, device=device()), torch.tensor(v_scale, device=device())


def new_caches(spec: AttentionSpec, num_blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`key_cache` and `value_cache` of one allocation, as torch callers have them."""
    shape = spec.cache_shape(num_blocks)
    kv_cache = torch.zeros(shape, dtype=getattr(torch, spec.array_dtype.name), device=device())
    return kv_cache[:, 0], kv_cache[:, 1]


def new_rows(case: shapes.Case, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    key = torch.randn((num_tokens, case.num_kv_heads, case.head_size), device=device()).to(torch.bfloat16)
    return key, -key


def new_slots(num_tokens: int, num_blocks: int) -> torch.Tensor:
    return torch.randperm(num_blocks * shapes.BLOCK_SIZE, device=device())[:num_tokens]


def first_calls(case: shapes.Case, dtype: KVCacheDType) -> dict[str, Call]:
    """A write and a gather."""
    caches, scales = new_caches(case.spec(dtype), EAGER_BLOCKS), scale_tensors()
    rows, slots = new_rows(case, DECODE_TOKENS), new_slots(DECODE_TOKENS, EAGER_BLOCKS)
    table, lengths = (torch.full(shape, 4, dtype=torch.int32, device=device()) for shape in ((1, 4), (1,)))
    write, gather = kvjax_torch.reshape_and_cache_flash, kvjax_torch.gather_kv
    return {
        "write": lambda: write(*rows, *caches, slots, dtype.value, *scales),
        "gather": lambda: gather(*caches, table, lengths, dtype.value, *scales),
    }


def time_first_call(name: str, dtype: KVCacheDType, call: Call) -> FirstCall:
    """Times a call that was not made before, and then again."""
    seconds = []
    for _ in range(2):
        synchronize()
        start = time.perf_counter()
        call()
        synchronize()
        seconds.append(time.perf_counter() - start)
    return FirstCall(name, dtype, *seconds)


def eager_calls() -> dict[str, Call]:
    """The calls that the host's time is taken of, `index_copy_` of as many keys first."""
    caches = new_caches(CASE.spec(EAGER_DTYPE), EAGER_BLOCKS)
    key, value = new_rows(CASE, DECODE_TOKENS)
    slots = new_slots(DECODE_TOKENS, EAGER_BLOCKS)
    dense = key.new_zeros((EAGER_BLOCKS * shapes.BLOCK_SIZE, CASE.num_kv_heads * CASE.head_size))
    write = functools.partial(kvjax_torch.reshape_and_cache_flash, key, value, *caches, slots, EAGER_DTYPE.value)
    return {
        "torch.Tensor.index_copy_": functools.partial(dense.index_copy_, 0, slots, key.flatten(1)),
        "write, scales as tensors": functools.partial(write, *scale_tensors()),
        "write, scales as floats": functools.partial(write, *SCALES),
    }


def host_seconds(calls: Mapping[str, Call]) -> dict[str, float]:
    """The median time that each call keeps the host, by turns, in rows of calls that the GPU keeps up with."""
    rounds, in_a_row = (50, 100) if has_gpu() else (3, 3)
    timers = {name: timeit.Timer(call) for name, call in calls.items()}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + 1):
        for name, timer in timers.items():
            synchronize()
            samples[name].append(timer.timeit(in_a_row) / in_a_row)
    synchronize()
    return {name: statistics.median(seconds[1:]) for name, seconds in samples.items()}  # the first round warms up


@contextlib.contextmanager
def through_jax() -> Iterator[None]:
    """Has JAX run the kernels, as where they cannot be launched on torch's streams."""
    before = cuda._through_jax
    cuda._through_jax = True
    cuda._known_writes.clear()
    try:
        yield
    finally:
        cuda._through_jax = before


def host_waits(call: Call) -> bool | None:
    """Whether a call, not the first of its kind, keeps the host until a busy GPU has come to it."""
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


def time_eager_calls(calls: Mapping[str, Call], bar: bars.Bar) -> list[HostTime]:
    """Times calls of which the first is what `Measure.INDEX_COPY` is about."""
    seconds = host_seconds(calls)
    index_copy, *_ = seconds
    return [
        HostTime(
            call=name,
            seconds=seconds[name],
            clock=timing.Clock.HOST if has_gpu() else timing.Clock.WALL,
            index_copy_ratio=seconds[name] / seconds[index_copy],
            bar=None if name == index_copy else bar,
            waits=host_waits(call),
        )
        for name, call in calls.items()
    ]


def torch_writes(cache: KVCache, batches: Sequence[workload.Batch]) -> list[Call]:
    """The write of each batch from torch, on the memory of JAX's arrays and behind its back."""
    kv_cache = kvjax_torch.to_torch(cache.kv)
    scales = [kvjax_torch.to_torch(scale) for scale in workload.scales().values()]
    dtype = cache.spec.dtype.value
    return [
        functools.partial(
            kvjax_torch.reshape_and_cache_flash,
            kvjax_torch.to_torch(batch.key),
            kvjax_torch.to_torch(batch.value),
            kv_cache[:, 0],
            kv_cache[:, 1],
            kvjax_torch.to_torch(batch.slot_mapping),
            dtype,
            *scales,
        )
        for batch in batches
    ]


def check_written(cache: KVCache, expected: KVCache) -> None:
    """Raises `AssertionError` where torch has written other bytes than XLA."""
    synchronize()
    workload.check_same_bits(cache.kv, expected.kv)


def time_replay(tokens: workload.Tokens, dtype: KVCacheDType, num_tokens: int) -> ReplayTime:
    """Records, checks and times `GRAPH_WRITES` writes of other tokens each."""
    spec = CASE.spec(dtype)
    cache = tokens.poisoned(spec)
    writes = torch_writes(cache, tokens.batches(num_tokens)[:GRAPH_WRITES])
    writes[0]()
    graph = torch.cuda.CUDAGraph()
    # Only what this thread does is recorded: one of JAX's may ask for an event meanwhile, which else is an error.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for write in writes:
            write()
    graph.replay()
    check_written(cache, tokens.expected(spec, len(writes) * num_tokens))
    return ReplayTime(
        dtype=dtype,
        num_tokens=num_tokens,
        num_writes=len(writes),
        seconds=event_seconds(graph.replay),
        clock=timing.Clock.EVENTS,
        kernel_seconds=None,
    )


def event_seconds(call: Call) -> float:
    """The median time that a call takes on the GPU when others come right before and after it."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    samples = []
    for _ in range(REPLAY_SAMPLES):
        torch.cuda._sleep(A_WHILE)  # until all of them are queued
        start.record()
        for _ in range(REPLAYS_IN_A_ROW):
            call()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) / 1e3 / REPLAYS_IN_A_ROW)
    return statistics.median(samples)


def time_from_torch(cache: KVCache, batches: Sequence[workload.Batch], expected: KVCache) -> timing.Timing:
    """Checks, then times the writes of `batches` from torch."""
    writes = torch_writes(cache, batches)
    writes[0]()
    check_written(cache, expected)
    return timing.measure(lambda number: writes[number % len(writes)](), wait=synchronize)


def time_under_jit(cache: KVCache, batches: Sequence[workload.Batch], expected: KVCache) -> timing.Timing:
    """The same under `jit`, with the cache donated."""
    write = workload.Write(cache, batches, output.IMPLEMENTATION.value)
    workload.check_first_write(write, expected)
    return timing.measure(write)


def time_kernels(tokens: workload.Tokens, batches: Sequence[workload.Batch], dtype: KVCacheDType) -> KernelTime:
    """Checks, then times the writes of `batches` both ways."""
    spec, num_tokens = CASE.spec(dtype), len(batches[0].slot_mapping)
    expected = tokens.expected(spec, num_tokens)
    from_torch = time_from_torch(tokens.poisoned(spec), batches, expected)
    under_jit = time_under_jit(tokens.poisoned(spec), batches, expected)
    return KernelTime(
        dtype=dtype,
        num_tokens=num_tokens,
        torch_seconds=from_torch.seconds,
        jit_seconds=under_jit.seconds,
        clock=from_torch.clock if from_torch.clock is under_jit.clock else timing.Clock.WALL,
        torch_kernels=from_torch.kernels,
        jit_kernels=under_jit.kernels,
    )


class TorchBenchmark(absltest.TestCase):
    """Fails where bytes are wrong, never because of a time.

    The tests run in the order of their names: what compiles comes first, and CUPTI, which stays in the process and
    slows down every launch, last.
    """

    results: ClassVar[output.Report]
    replays: ClassVar[list[ReplayTime]]
    kernels: ClassVar[list[KernelTime]]

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.results = output.Report("benchmarks.bridge")
        cls.replays, cls.kernels = [], []

    @classmethod
    def tearDownClass(cls) -> None:
        add_replays(cls.results, cls.replays, cls.kernels)
        cls.results.finish()
        super().tearDownClass()

    def test_compilations(self) -> None:
        lines: list[FirstCall] = []
        for case, dtype in [(FIRST_CASE, bars.BFLOAT16), *((CASE, dtype) for dtype in shapes.TIMED_DTYPES)]:
            for name, call in first_calls(case, dtype).items():
                with self.subTest(case=case.name, dtype=dtype.value, call=name):
                    name = name if lines else f"{name}, the first call of the process"
                    lines.append(time_first_call(name, dtype, call))
                    output.progress(" ".join(first_call_words(lines[-1])))
        add_first_calls(self.results, lines)

    def test_eager_calls(self) -> None:
        calls = eager_calls()
        lines = time_eager_calls(calls, bars.EAGER_CALL)
        if has_gpu():
            index_copy, with_tensors, _ = calls
            with self.subTest(call="through JAX"), through_jax():
                by_turns = {index_copy: calls[index_copy], "write through JAX (DLPack)": calls[with_tensors]}
                lines += time_eager_calls(by_turns, bars.DLPACK_CALL)[1:]
        for line in lines:
            output.progress(" ".join(host_words(line)))
        add_host_times(self.results, lines)

    def test_graphs(self) -> None:
        if not has_gpu():
            self.skipTest("needs a GPU")
        tokens = workload.make_tokens(CASE, GRAPH_WRITES * max(GRAPH_TOKENS))
        for num_tokens in GRAPH_TOKENS:
            for dtype in shapes.TIMED_DTYPES:
                with self.subTest(dtype=dtype.value, num_tokens=num_tokens):
                    self.replays.append(time_replay(tokens, dtype, num_tokens))
                    output.progress(" ".join(replay_words(self.replays[-1])))

    def test_kernels(self) -> None:
        counts = output.numbers(NUM_TOKENS) or (GPU_TOKENS if has_gpu() else HOST_TOKENS)
        tokens = workload.make_tokens(CASE, max(counts))
        for num_tokens in counts:
            batches = tokens.batches(num_tokens)
            for dtype in shapes.TIMED_DTYPES:
                with self.subTest(dtype=dtype.value, num_tokens=num_tokens):
                    self.kernels.append(time_kernels(tokens, batches, dtype))
                    output.progress(" ".join(kernel_words(self.kernels[-1])))
        add_kernels(self.results, self.kernels)


def add_first_calls(to: output.Report, lines: Sequence[FirstCall]) -> None:
    to.add(
        "first_calls",
        "Time of the first call, which compiles",
        ["call", "dtype", "first ms", "second ms"],
        [first_call_words(line) for line in lines],
        lines,
        left=2,
        note=f"Until the result is there, {DECODE_TOKENS} tokens; {CASE.num_kv_heads} KV heads of {CASE.head_size}, but"
        f" {FIRST_CASE.num_kv_heads} of {FIRST_CASE.head_size} in the first two lines; by the wall clock.",
    )


def first_call_words(line: FirstCall) -> list[str]:
    return [line.call, line.dtype.value, *(f"{s * 1e3:,.2f}" for s in (line.first_seconds, line.second_seconds))]


def add_host_times(to: output.Report, lines: Sequence[HostTime]) -> None:
    words = [host_words(line) for line in lines]
    to.add(
        "host_times",
        "Time that a call keeps the host",
        ["call", "us", "x index_copy_", "host waits", "bar", "reached"],
        words,
        lines,
        note=f"{DECODE_TOKENS} tokens of {CASE.num_kv_heads} KV heads of {CASE.head_size}, {EAGER_DTYPE.value}, int64"
        f" slots; by {output.clocks(lines)}.{bars.summary([line[-1] for line in words])}",
    )


def host_words(line: HostTime) -> list[str]:
    reached = bars.verdict(line.bar, line.value, line.clock)
    if line.bar is not None and line.waits:
        reached = f"the host waits: {bars.FALLS_SHORT}"
    return [
        line.call,
        output.microseconds(line.seconds),
        f"{line.index_copy_ratio:.2f}",
        "-" if line.waits is None else "yes" if line.waits else "no",
        str(line.bar or "-"),
        reached,
    ]


def add_replays(to: output.Report, replays: Sequence[ReplayTime], kernels: Sequence[KernelTime]) -> None:
    """Adds the table of graphs, if any were replayed, next to what their kernels took one by one."""
    seconds = {
        (line.dtype, line.num_tokens): line.torch_seconds for line in kernels if line.clock is timing.Clock.DEVICE
    }
    lines = [dataclasses.replace(line, kernel_seconds=seconds.get((line.dtype, line.num_tokens))) for line in replays]
    words = [replay_words(line) for line in lines]
    if lines:
        to.add(
            "replays",
            f"Time of a CUDA graph of {GRAPH_WRITES} writes",
            ["dtype", "tokens", "us", "us a write", "kernel us", "x kernels", "bar", "reached"],
            words,
            lines,
            note=f"Of one replay among {REPLAYS_IN_A_ROW}; by {output.clocks(lines)}."
            + bars.summary([line[-1] for line in words]),
        )


def replay_words(line: ReplayTime) -> list[str]:
    return [
        line.dtype.value,
        f"{line.num_tokens:,}",
        output.microseconds(line.seconds),
        output.microseconds(line.seconds / line.num_writes),
        output.microseconds(line.kernel_seconds),
        "-" if line.ratio is None else f"{line.ratio:.2f}",
        str(bars.REPLAY),
        bars.verdict(bars.REPLAY, line.ratio, line.clock),
    ]


def add_kernels(to: output.Report, lines: Sequence[KernelTime]) -> None:
    lines = sorted(lines, key=lambda line: shapes.TIMED_DTYPES.index(line.dtype))
    words = [kernel_words(line) for line in lines]
    to.add(
        "kernels",
        "Time of a write's kernels, from torch and under jit",
        ["dtype", "tokens", "us", "us under jit", "x jit", "kernels", "under jit", "bar", "reached"],
        words,
        lines,
        note=f"The same tokens, slots and pages; {CASE.num_kv_heads} KV heads of {CASE.head_size}, int32 slots; by"
        f" {output.clocks(lines)}.{bars.summary([line[-1] for line in words])}",
    )


def kernel_words(line: KernelTime) -> list[str]:
    return [
        line.dtype.value,
        f"{line.num_tokens:,}",
        output.microseconds(line.torch_seconds),
        output.microseconds(line.jit_seconds),
        f"{line.ratio:.2f}",
        *(str(len(kernels) or "-") for kernels in (line.torch_kernels, line.jit_kernels)),
        str(bars.TORCH_KERNEL),
        bars.verdict(bars.TORCH_KERNEL, line.ratio, line.clock),
    ]


if __name__ == "__main__":
    absltest.main()
