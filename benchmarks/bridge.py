"""What calls from torch cost: the host, the GPU, in a CUDA graph, and once when their kernels are compiled.

`python -m benchmarks.bridge --json=bridge.json`, from the source tree; docs/interop.md explains the tables.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import multiprocessing
import os
import time
import timeit
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, ClassVar

from absl.testing import absltest

from benchmarks import bars, output, shapes, timing, workload
from benchmarks.output import Measurement
from benchmarks.peers import copy
from benchmarks.peers.in_jax import why_no_kernel
from benchmarks.peers.peer import why_not_importable
from benchmarks.timing import Clock, Timing
from benchmarks.workload import WriteJob
from kvjax import AttentionSpec, KVCache, KVCacheDType

if reason := why_not_importable("torch", "kvjax_torch"):
    raise SystemExit(f"benchmarks.bridge measures calls from torch (pip install 'kvjax[torch]'): {reason}")
import torch

import kvjax_torch
from kvjax_torch import cuda

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

THROUGH_JAX = "kvjax_torch through JAX (DLPack)"

CALLS_AHEAD = 8
"""Calls in a row that a busy GPU has before it: of those that JAX runs, it lets the eleventh wait."""

PLACES, PLACE_BYTES = 2_000, 256
"""Of what comes with every step, in calls that have it elsewhere each time: how many, and how far apart."""

GRAPH_WRITES = 32
GRAPH_TOKENS = (64, 2_048)
REPLAYS_IN_A_ROW = 10

OTHER_GRAPHS = 8
"""Graphs that a process records besides the one that is timed, since a server has many."""

A_WHILE = 20_000_000
"""Cycles that a GPU is kept busy for, some 10 ms, so that calls wait for it, and the host does not have to."""

SYNCHRONIZED = "called a synchronizing CUDA operation"
"""What torch warns of when asked to."""

SCALES = (0.037, 0.052)

Call = Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class FirstCall:
    """One line of the table of first calls: seconds until the results of a call are there, when first and then.

    A process has but one first call of a kind, so there is one sample of it.
    """

    call: str
    case: shapes.Case
    dtype: KVCacheDType
    first_seconds: float
    second_seconds: float

    def measurement(self) -> Measurement:
        """The same for the file."""
        subject = _subject(self.case, self.dtype, DECODE_TOKENS)
        times = Timing((self.first_seconds,), Clock.WALL)
        facts = {"call": self.call, "second_seconds": self.second_seconds}
        return Measurement("bridge first call", subject, "kvjax_torch", times, facts=facts)


@dataclasses.dataclass(frozen=True)
class HostTime:
    """One line of the table of the host's times.

    Attributes:
      call: what is called.
      times: how long calls keep the host, each the mean of several in a row.
      index_copy_ratio: their median over that of an `index_copy_`.
      bar: what it is held to.
      waits: whether the host waits for what was queued before the call; `None` where there is no GPU to wait for.
    """

    call: str
    times: Timing
    index_copy_ratio: float
    bar: bars.Bar | None
    waits: bool | None

    @property
    def value(self) -> float:
        """What the bar is about."""
        is_time = self.bar is not None and self.bar.measure is bars.Measure.MICROSECONDS
        return self.times.seconds * 1e6 if is_time else self.index_copy_ratio

    def measurement(self) -> Measurement:
        """The same for the file."""
        subject = _subject(CASE, EAGER_DTYPE, DECODE_TOKENS)
        return Measurement("bridge host", subject, self.call, self.times, facts={"waits": self.waits})


@dataclasses.dataclass(frozen=True)
class ReplayTimes:
    """How long replays of a graph take.

    Once a process has launched a few kernels on streams other than its first, CUDA lets kernels follow each other more
    slowly in all of its streams and graphs: see docs/interop.md.

    Attributes:
      one_stream: where torch launched all kernels, and recorded all graphs, on one. JAX filled the cache on its own.
      two_streams: where torch had launched others on a second stream afterwards.
    """

    one_stream: Timing
    two_streams: Timing


@dataclasses.dataclass(frozen=True)
class WriteReplay:
    """One line of the table of graphs: of `GRAPH_WRITES` writes.

    Attributes:
      dtype: of the cache.
      num_tokens: tokens of each write.
      times: of the graph.
      kernel_seconds: what one of its kernels takes, where that was timed.
    """

    dtype: KVCacheDType
    num_tokens: int
    times: ReplayTimes
    kernel_seconds: float | None = None

    @property
    def ratio(self) -> float | None:
        """A replay's time over that of its kernels."""
        return self._over_kernels(self.times.one_stream)

    @property
    def two_streams_ratio(self) -> float | None:
        """The same where a second stream was in use."""
        return self._over_kernels(self.times.two_streams)

    def _over_kernels(self, times: Timing) -> float | None:
        return None if self.kernel_seconds is None else times.seconds / (GRAPH_WRITES * self.kernel_seconds)

    def measurements(self) -> list[Measurement]:
        """The same for the file."""
        moved = GRAPH_WRITES * WriteJob(CASE, self.dtype, self.num_tokens).bytes_moved
        subject = {**_subject(CASE, self.dtype, self.num_tokens), "num_writes": GRAPH_WRITES}
        facts = {"kernel_seconds": self.kernel_seconds}
        return [
            Measurement("bridge replay", subject, peer, times, moved, copy.measure(moved), facts)
            for peer, times in (
                ("kvjax_torch", self.times.one_stream),
                ("kvjax_torch, two streams", self.times.two_streams),
            )
        ]


@dataclasses.dataclass(frozen=True)
class KernelTime:
    """One line of the table of kernels: what a write launches from torch, and under `jit`, with the same arguments."""

    dtype: KVCacheDType
    num_tokens: int
    from_torch: Timing
    under_jit: Timing

    @property
    def clock(self) -> Clock:
        """What both were read from."""
        return self.from_torch.clock if self.from_torch.clock is self.under_jit.clock else Clock.WALL

    @property
    def ratio(self) -> float:
        """Torch's time over that under `jit`."""
        return self.from_torch.seconds / self.under_jit.seconds

    def measurements(self) -> list[Measurement]:
        """The same for the file."""
        job = WriteJob(CASE, self.dtype, self.num_tokens)
        copied = copy.measure(job.bytes_moved)
        return [
            Measurement("bridge kernel", job.subject, peer, times, job.bytes_moved, copied)
            for peer, times in (("kvjax_torch", self.from_torch), ("kvjax", self.under_jit))
        ]


def _subject(case: shapes.Case, dtype: KVCacheDType, num_tokens: int) -> dict[str, Any]:
    return WriteJob(case, dtype, num_tokens).subject


def has_gpu() -> bool:
    """Whether torch has one. JAX is not asked, for that would start it, as no call does."""
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


def time_first_call(name: str, case: shapes.Case, dtype: KVCacheDType, call: Call) -> FirstCall:
    """Times a call that was not made before, and then again."""
    seconds = []
    for _ in range(2):
        synchronize()
        start = time.perf_counter()
        call()
        synchronize()
        seconds.append(time.perf_counter() - start)
    return FirstCall(name, case, dtype, *seconds)


def eager_calls() -> dict[str, Call]:
    """The calls that the host's time is taken of, `index_copy_` of as many keys first; the last is JAX's own."""
    caches = new_caches(CASE.spec(EAGER_DTYPE), EAGER_BLOCKS)
    key, value = new_rows(CASE, DECODE_TOKENS)
    slots = new_slots(DECODE_TOKENS, EAGER_BLOCKS)
    dense = key.new_zeros((EAGER_BLOCKS * shapes.BLOCK_SIZE, CASE.num_kv_heads * CASE.head_size))
    write = functools.partial(kvjax_torch.reshape_and_cache_flash, key, value, *caches, slots, EAGER_DTYPE.value)
    return {
        "torch index_copy_": functools.partial(dense.index_copy_, 0, slots, key.flatten(1)),
        "kvjax_torch, scales as tensors": functools.partial(write, *scale_tensors()),
        "kvjax_torch, scales as floats": functools.partial(write, *SCALES),
        "kvjax under jit": jitted_write(),
    }


def moving_write() -> Call:
    """The same write of keys, values and slots that lie elsewhere each time, at more addresses than JAX's are kept."""
    caches = new_caches(CASE.spec(EAGER_DTYPE), EAGER_BLOCKS)
    key, value = new_rows(CASE, DECODE_TOKENS)
    moved = map(_copies, (key, value, new_slots(DECODE_TOKENS, EAGER_BLOCKS)))
    dtype, scales = EAGER_DTYPE.value, scale_tensors()
    writes = [
        functools.partial(kvjax_torch.reshape_and_cache_flash, key, value, *caches, slots, dtype, *scales)
        for key, value, slots in zip(*moved, strict=True)
    ]
    next_write = itertools.cycle(writes).__next__
    return lambda: next_write()()


def _copies(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Of packed rows, at each of the places in one allocation; they overlap."""
    step = PLACE_BYTES // tensor.element_size()
    memory = tensor.flatten().repeat(1 + -(-PLACES * step // tensor.numel()))
    return [memory.as_strided(tensor.shape, tensor.stride(), place * step) for place in range(PLACES)]


def jitted_write() -> Call:
    """The same write from JAX, with the cache donated."""
    tokens = workload.Tokens(CASE, DECODE_TOKENS, EAGER_BLOCKS, rotation_bytes=0)
    write = workload.Write(tokens.poisoned(CASE.spec(EAGER_DTYPE)), tokens.batches(DECODE_TOKENS), None)
    return lambda: write(0)


def host_times(calls: Mapping[str, Call], is_busy: bool = False) -> dict[str, Timing]:
    """How long each call keeps the host, by turns, in rows of calls that the GPU keeps up with, or comes to later."""
    rounds = timing.LIMITS.min_calls
    in_a_row = CALLS_AHEAD if is_busy else 100 if has_gpu() else 3
    timers = {name: timeit.Timer(call) for name, call in calls.items()}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + 1):
        for name, timer in timers.items():
            synchronize()
            if is_busy:
                torch.cuda._sleep(A_WHILE)
            samples[name].append(timer.timeit(in_a_row) / in_a_row)
    synchronize()
    clock = Clock.HOST if has_gpu() else Clock.WALL
    return {name: Timing(tuple(seconds[1:]), clock) for name, seconds in samples.items()}  # the first round warms up


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


def time_eager_calls(
    calls: Mapping[str, Call], held_to: Mapping[str, bars.Bar], is_busy: bool = False
) -> list[HostTime]:
    """Times calls of which the first is what `Measure.INDEX_COPY` is about, and some have a bar."""
    times = host_times(calls, is_busy)
    index_copy, *_ = times
    return [
        HostTime(
            call=name,
            times=times[name],
            index_copy_ratio=times[name].seconds / times[index_copy].seconds,
            bar=held_to.get(name),
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
            unique_slots=True,
        )
        for batch in batches
    ]


def check_written(cache: KVCache, expected: KVCache) -> None:
    """Raises `AssertionError` where torch has written other bytes than XLA."""
    synchronize()
    workload.check_same_bits(cache.kv, expected.kv)


def time_writes_replayed(dtype: KVCacheDType, num_tokens: int) -> ReplayTimes:
    """Records, times and then checks `GRAPH_WRITES` writes of other tokens each."""
    spec = CASE.spec(dtype)
    tokens = workload.make_tokens(CASE, GRAPH_WRITES * num_tokens)
    cache = tokens.poisoned(spec)
    writes = torch_writes(cache, tokens.batches(num_tokens)[:GRAPH_WRITES])
    times = time_replays(writes)
    check_written(cache, tokens.expected(spec, len(writes) * num_tokens))
    return times


def time_additions_replayed(num_tokens: int) -> ReplayTimes:
    """The same of as many of torch's own kernels, each of which adds a number to the keys and values of a write."""
    return time_replays(additions(num_tokens))


def additions(num_tokens: int) -> list[Call]:
    shape = 2, num_tokens, CASE.num_kv_heads, CASE.head_size
    tensors = [torch.zeros(shape, dtype=torch.bfloat16, device=device()) for _ in range(GRAPH_WRITES)]
    return [functools.partial(tensor.add_, 1) for tensor in tensors]


def time_replays(calls: Sequence[Call]) -> ReplayTimes:
    """Times calls in a graph that is recorded on this process's stream with others, and again with a second stream."""
    graphs = [recorded(each) for each in (calls, *[additions(DECODE_TOKENS)] * OTHER_GRAPHS)]
    one_stream = event_times(graphs[0].replay)
    others = additions(DECODE_TOKENS)
    synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        for add in others:
            add()
    synchronize()
    return ReplayTimes(one_stream, event_times(graphs[0].replay))


def recorded(calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
    """A graph of calls, recorded on the current stream.

    The first is made beforehand: what it compiles or loads, no graph could record.
    """
    calls[0]()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    # Only what this thread does is recorded: one of JAX's may ask for an event meanwhile, which else is an error.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for call in calls:
            call()
    return graph


def in_new_process[T](function: Callable[..., T], *args: Any) -> T:
    """Calls a function of this module in a process that has done nothing before, on one stream of torch's."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, initializer=_begin, initargs=(output.SMOKE.value,)) as processes:
        return processes.submit(function, *args).result()


def _begin(is_smoke: bool) -> None:
    # The program's own JAX has three quarters of the GPU's memory.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    if is_smoke:
        output.shorten()
    torch.cuda.set_stream(torch.cuda.Stream())


def event_times(call: Call) -> Timing:
    """How long a call takes on the GPU when others come right before and after it, each the mean of a row of them."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    samples = []
    for _ in range(timing.LIMITS.min_calls):
        torch.cuda._sleep(A_WHILE)  # until all of them are queued
        start.record()
        for _ in range(REPLAYS_IN_A_ROW):
            call()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) / 1e3 / REPLAYS_IN_A_ROW)
    return Timing(tuple(samples), Clock.EVENTS)


def time_from_torch(cache: KVCache, batches: Sequence[workload.Batch], expected: KVCache) -> Timing:
    """Checks, then times the writes of `batches` from torch."""
    writes = torch_writes(cache, batches)
    writes[0]()
    check_written(cache, expected)
    return timing.measure(lambda number: writes[number % len(writes)](), wait=synchronize)


def time_under_jit(cache: KVCache, batches: Sequence[workload.Batch], expected: KVCache) -> Timing:
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
    return KernelTime(dtype, num_tokens, from_torch, under_jit)


class TorchBenchmark(output.Program):
    """Fails where bytes are wrong, never because of a time.

    The tests run in the order of their names: what compiles comes first, and CUPTI, which stays in the process and
    slows down every launch, last.
    """

    name = "benchmarks.bridge"
    replays: ClassVar[list[WriteReplay]]
    kernels: ClassVar[list[KernelTime]]
    addition_times: ClassVar[dict[int, ReplayTimes]]

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.replays, cls.kernels, cls.addition_times = [], [], {}

    @classmethod
    def tearDownClass(cls) -> None:
        add_replays(cls.results, cls.replays, cls.addition_times, cls.kernels)
        super().tearDownClass()

    def test_compilations(self) -> None:
        lines: list[FirstCall] = []
        timed = [(FIRST_CASE, bars.BFLOAT16), *((CASE, dtype) for dtype in shapes.TIMED_DTYPES)]
        self.results.expect(2 * len(timed))
        for case, dtype in timed:
            for name, call in first_calls(case, dtype).items():
                with self.subTest(case=case.name, dtype=dtype.value, call=name):
                    name = name if lines else f"{name}, the first call of the process"
                    lines.append(time_first_call(name, case, dtype, call))
                    self.results.add(lines[-1].measurement())
        add_first_calls(self.results, lines)

    def test_eager_calls(self) -> None:
        calls = eager_calls()
        index_copy, with_tensors, with_floats, _ = calls
        lines = time_eager_calls(calls, dict.fromkeys((with_tensors, with_floats), bars.EAGER_CALL))
        if has_gpu():
            held_to = {THROUGH_JAX: bars.DLPACK_CALL}
            for name, call, is_busy in (
                (THROUGH_JAX, calls[with_tensors], False),
                ("through JAX, GPU busy", calls[with_tensors], True),
                ("through JAX, tokens at new addresses", moving_write(), False),
            ):
                with self.subTest(call=name), through_jax():
                    by_turns = {index_copy: calls[index_copy], name: call}
                    lines += time_eager_calls(by_turns, held_to, is_busy)[1:]
        self.results.expect(len(lines))
        for line in lines:
            self.results.add(line.measurement())
        add_host_times(self.results, lines)

    def test_graphs(self) -> None:
        if not has_gpu():
            self.results.skip("CUDA graphs", "need an NVIDIA GPU")
            return
        counts = (min(GRAPH_TOKENS),) if output.SMOKE.value else GRAPH_TOKENS
        for num_tokens, dtype in itertools.product(counts, shapes.TIMED_DTYPES):
            with self.subTest(dtype=dtype.value, num_tokens=num_tokens):
                times = in_new_process(time_writes_replayed, dtype, num_tokens)
                self.replays.append(WriteReplay(dtype, num_tokens, times))
        for num_tokens in counts:
            with self.subTest(call="add_", num_tokens=num_tokens):
                self.addition_times[num_tokens] = in_new_process(time_additions_replayed, num_tokens)

    def test_kernels(self) -> None:
        if reason := why_no_kernel():
            self.results.skip("kvjax under jit", reason, asked_for=True)
            return
        default = (8,) if output.SMOKE.value else GPU_TOKENS if has_gpu() else HOST_TOKENS
        counts = output.numbers(NUM_TOKENS) or default
        self.results.expect(2 * len(counts) * len(shapes.TIMED_DTYPES))
        tokens = workload.make_tokens(CASE, max(counts))
        for num_tokens in counts:
            batches = tokens.batches(num_tokens)
            for dtype in shapes.TIMED_DTYPES:
                with self.subTest(dtype=dtype.value, num_tokens=num_tokens):
                    self.kernels.append(time_kernels(tokens, batches, dtype))
                    for each in self.kernels[-1].measurements():
                        self.results.add(each)
        add_kernels(self.results, self.kernels)


def add_first_calls(to: output.Report, lines: Sequence[FirstCall]) -> None:
    to.table(
        "Time of the first call, which compiles",
        ["call", "dtype", "first ms", "second ms"],
        [first_call_words(line) for line in lines],
        left=2,
        note=f"Until the result is there, {DECODE_TOKENS} tokens; {CASE.num_kv_heads} KV heads of {CASE.head_size}, but"
        f" {FIRST_CASE.num_kv_heads} of {FIRST_CASE.head_size} in the first two lines; by the wall clock.",
    )


def first_call_words(line: FirstCall) -> list[str]:
    return [line.call, line.dtype.value, *(f"{s * 1e3:,.2f}" for s in (line.first_seconds, line.second_seconds))]


def add_host_times(to: output.Report, lines: Sequence[HostTime]) -> None:
    words = [host_words(line) for line in lines]
    to.table(
        "Time that a call keeps the host",
        ["call", "us", "5-95%", "x index_copy_", "host waits", "bar", "reached"],
        words,
        note=f"{DECODE_TOKENS} tokens of {CASE.num_kv_heads} KV heads of {CASE.head_size}, {EAGER_DTYPE.value}, int64"
        f" slots; by {output.clocks(line.times for line in lines)}.{bars.summary([line[-1] for line in words])}",
    )


def host_words(line: HostTime) -> list[str]:
    reached = bars.verdict(line.bar, line.value, line.times.clock)
    if line.bar is not None and line.waits:
        reached = f"the host waits: {bars.FALLS_SHORT}"
    return [
        line.call,
        output.microseconds(line.times.seconds),
        output.spread(line.times.samples),
        f"{line.index_copy_ratio:.2f}",
        "-" if line.waits is None else "yes" if line.waits else "no",
        str(line.bar or "-"),
        reached,
    ]


def add_replays(
    to: output.Report,
    replays: Sequence[WriteReplay],
    addition_times: Mapping[int, ReplayTimes],
    kernels: Sequence[KernelTime],
) -> None:
    """Adds the table of graphs, if any were replayed, next to what their kernels took one by one."""
    seconds = {(line.dtype, line.num_tokens): line.from_torch.seconds for line in kernels if line.clock is Clock.DEVICE}
    lines = [dataclasses.replace(line, kernel_seconds=seconds.get((line.dtype, line.num_tokens))) for line in replays]
    words = [replay_words(line) for line in lines]
    measured = [each for line in lines for each in line.measurements()]
    for num_tokens, times in addition_times.items():
        words.append(["torch add_", f"{num_tokens:,}", *times_words(times), *["-"] * 5])
        subject = {"num_kernels": GRAPH_WRITES, "num_tokens": num_tokens, "dtype": "bfloat16"}
        facts = {"num_elements": 2 * num_tokens * CASE.num_kv_heads * CASE.head_size}
        peers = {"torch": times.one_stream, "torch, two streams": times.two_streams}
        measured += [Measurement("bridge replay of add_", subject, *each, facts=facts) for each in peers.items()]
    to.expect(len(measured))
    for each in measured:
        to.add(each)
    to.table(
        f"Time of a CUDA graph of {GRAPH_WRITES} writes",
        ["dtype", "tokens", "us", "5-95%", "2 streams us", "kernel us", "x kernels", "2 streams x", "bar", "reached"],
        words,
        note=f"Of one replay among {REPLAYS_IN_A_ROW}, where the process records this graph and {OTHER_GRAPHS} more,"
        f" and torch does all on one stream; then again, when {GRAPH_WRITES} kernels have run on a second. Last"
        f" graphs of {GRAPH_WRITES} additions to as many bfloat16 numbers as a write has. By {output.clocks(measured)}."
        f"{bars.summary([line[-1] for line in words])}",
    )


def replay_words(line: WriteReplay) -> list[str]:
    return [
        line.dtype.value,
        f"{line.num_tokens:,}",
        *times_words(line.times),
        output.microseconds(line.kernel_seconds),
        *("-" if ratio is None else f"{ratio:.2f}" for ratio in (line.ratio, line.two_streams_ratio)),
        str(bars.REPLAY),
        bars.verdict(bars.REPLAY, line.ratio, line.times.one_stream.clock),
    ]


def times_words(times: ReplayTimes) -> list[str]:
    return [
        output.microseconds(times.one_stream.seconds),
        output.spread(times.one_stream.samples),
        output.microseconds(times.two_streams.seconds),
    ]


def add_kernels(to: output.Report, lines: Sequence[KernelTime]) -> None:
    lines = sorted(lines, key=lambda line: shapes.TIMED_DTYPES.index(line.dtype))
    words = [kernel_words(line) for line in lines]
    to.table(
        "Time of a write's kernels, from torch and under jit",
        ["dtype", "tokens", "us", "5-95%", "us under jit", "5-95%", "x jit", "kernels", "under jit", "bar", "reached"],
        words,
        note=f"The same tokens, slots and pages; {CASE.num_kv_heads} KV heads of {CASE.head_size}, int32 slots; by"
        f" {output.clocks(line.from_torch for line in lines)}.{bars.summary([line[-1] for line in words])}",
    )


def kernel_words(line: KernelTime) -> list[str]:
    return [
        line.dtype.value,
        f"{line.num_tokens:,}",
        output.microseconds(line.from_torch.seconds),
        output.spread(line.from_torch.samples),
        output.microseconds(line.under_jit.seconds),
        output.spread(line.under_jit.samples),
        f"{line.ratio:.2f}",
        *(str(len(times.kernels) or "-") for times in (line.from_torch, line.under_jit)),
        str(bars.TORCH_KERNEL),
        bars.verdict(bars.TORCH_KERNEL, line.ratio, line.clock),
    ]


if __name__ == "__main__":
    absltest.main()
