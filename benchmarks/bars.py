"""What each time is meant to reach on an H200, next to a copy, to plain CUDA and to its neighbours in the table."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence

from benchmarks import shapes
from benchmarks.timing import Clock
from kvjax import CacheLayout, KVCacheDType

BFLOAT16, FP8, NVFP4 = shapes.TIMED_DTYPES


@dataclasses.dataclass(frozen=True)
class WriteTime:
    """One line of the table of writes.

    Attributes:
      seconds: median of a write.
      kernels: what a write launched; empty by the wall clock.
      bytes_moved: fewest bytes that a write must read and write.
      copy_seconds: a copy that moves as many.
      cuda_seconds: the plain CUDA kernel with vLLM's number of threads, where there is one.
      cuda_fitted_seconds: the same with a thread for each 16 bytes.
    """

    case: str
    num_kv_heads: int
    head_size: int
    dtype: KVCacheDType
    layout: CacheLayout
    num_tokens: int
    seconds: float
    clock: Clock
    kernels: tuple[str, ...]
    bytes_moved: int
    copy_seconds: float | None
    cuda_seconds: float | None = None
    cuda_fitted_seconds: float | None = None
    slots: shapes.Slots = shapes.Slots.SCATTERED
    samples: tuple[float, ...] = ()

    @property
    def copy_share(self) -> float | None:
        """This write's rate over the copy's."""
        return None if self.copy_seconds is None else self.copy_seconds / self.seconds

    @property
    def cuda_ratio(self) -> float | None:
        """This write's time over that of the CUDA kernel with vLLM's number of threads."""
        return None if self.cuda_seconds is None else self.seconds / self.cuda_seconds


class Measure(enum.Enum):
    """What a bar is about: a share that is to be reached, or a ratio of times or a time that is not to be passed."""

    COPY = "of copy"
    CUDA = "x CUDA"
    BFLOAT16 = "x bf16"
    NHD = "x NHD"
    INDEX_COPY = "x index_copy_"
    JIT = "x jit"
    DYNAMIC_CACHE = "x DynamicCache"
    KERNELS = "x kernels"
    MICROSECONDS = "us"
    READ = "of reading"
    FASTEST_BFLOAT16 = "times as fast as bf16"
    WINDOW = "x the window's length"
    ONE_TOKEN = "x 1 token"
    TOKENS = "x bf16 tokens/s"
    READING_TIME = "x reading"
    EXPOSED = "of a step exposed"


SHARES = (Measure.COPY, Measure.READ, Measure.EXPOSED)
AT_LEAST = (Measure.COPY, Measure.READ, Measure.FASTEST_BFLOAT16, Measure.TOKENS)
"""What is to be reached; all else is not to be passed."""


@dataclasses.dataclass(frozen=True)
class Bar:
    """A limit on one measure of a line."""

    measure: Measure
    limit: float

    def holds(self, value: float) -> bool:
        """Whether a measured value is on the right side of the limit."""
        return value >= self.limit if self.measure in AT_LEAST else value <= self.limit

    def words(self, value: float) -> str:
        """A value of this measure, as the table prints it."""
        number = f"{value:.1%}" if self.measure in SHARES else f"{value:.2f}"
        return f"{number} {self.measure.value}"

    def __str__(self) -> str:
        return f"{'>=' if self.measure in AT_LEAST else '<='} {self.words(self.limit)}"


PASS, FALLS_SHORT = "pass", "falls short"

SMALL_COUNT = 256
"""Up to here a write is bound by latency, and is held against CUDA's rather than against a copy."""


def _shares(bfloat16: float, fp8: float, with_scales: float) -> Mapping[KVCacheDType, float]:
    return {BFLOAT16: bfloat16, FP8: fp8} | dict.fromkeys((NVFP4, *shapes.PER_TOKEN_HEAD), with_scales)


_OTHER_HEAD_SIZES = _shares(0.85, 0.80, 0.75)
COPY_SHARES: Mapping[tuple[int, int, int], Mapping[KVCacheDType, float]] = {
    (8, 128, 16_384): _shares(0.92, 0.88, 0.80),
    (8, 128, 65_536): {**_shares(0.92, 0.88, 0.85), KVCacheDType.NVFP4_4OVER6: 0.80},
    (1, 128, 65_536): _shares(0.70, 0.60, 0.55),
    **{(8, head_size, 16_384): _OTHER_HEAD_SIZES for head_size in (64, 96, 256)},
}
"""Share of the copy's rate, by (KV heads, head size, tokens)."""

GATHER_SIZE = (64, 2_048)
GATHER_COPY_SHARES: Mapping[KVCacheDType, float] = {BFLOAT16: 0.85, FP8: 0.75, NVFP4: 0.75}
"""The same of a gather of `GATHER_SIZE` (sequences, tokens of each), 8 KV heads of 128, into bfloat16."""

EAGER_CALL = Bar(Measure.INDEX_COPY, 2.0)
"""Of a call from torch, the time that it keeps the host."""

DLPACK_CALL = Bar(Measure.MICROSECONDS, 150.0)
"""The same where JAX runs the kernel on torch's memory."""

TORCH_KERNEL = Bar(Measure.JIT, 1.05)
"""Of a call from torch, the time of its kernel."""

REPLAY = Bar(Measure.KERNELS, 1.1)
"""Of a CUDA graph of writes, next to as many kernel times."""

GENERATE = {dtype: Bar(Measure.DYNAMIC_CACHE, 0.8 if dtype is NVFP4 else 1.0) for dtype in shapes.TIMED_DTYPES}
"""Of a decode step of a transformers model that attends to pages, next to transformers' own cache in bfloat16."""


def bar_of(line: WriteTime) -> Bar | None:
    """The bar that a line is held to, if any: only writes of scattered slots are."""
    if line.slots is not shapes.Slots.SCATTERED:
        return None
    if line.layout is CacheLayout.HND:
        return Bar(Measure.NHD, 1.15)
    if (line.num_kv_heads, line.head_size) == (8, 128) and line.num_tokens <= SMALL_COUNT:
        return Bar(Measure.BFLOAT16, 1.25) if line.dtype in (NVFP4, *shapes.PER_TOKEN_HEAD) else Bar(Measure.CUDA, 0.95)
    share = COPY_SHARES.get((line.num_kv_heads, line.head_size, line.num_tokens), {}).get(line.dtype)
    return None if share is None else Bar(Measure.COPY, share)


def value_of(measure: Measure, line: WriteTime, lines: Sequence[WriteTime]) -> float | None:
    """A measure of a line among all others, or `None` where what it is held against was not timed."""
    match measure:
        case Measure.COPY:
            return line.copy_share
        case Measure.CUDA:
            return line.cuda_ratio
        case Measure.BFLOAT16:
            return _ratio(line, lines, BFLOAT16, line.layout)
        case Measure.NHD:
            return _ratio(line, lines, line.dtype, CacheLayout.NHD)
        case _:  # of calls from torch
            return None


def _ratio(line: WriteTime, lines: Sequence[WriteTime], dtype: KVCacheDType, layout: CacheLayout) -> float | None:
    """A line's time over that of the same tokens in another dtype or layout."""
    other = (line.case, line.slots, line.num_tokens, dtype, layout)
    found = (each for each in lines if (each.case, each.slots, each.num_tokens, each.dtype, each.layout) == other)
    return next((line.seconds / each.seconds for each in found), None)


def verdict(bar: Bar | None, value: float | None, clock: Clock) -> str:
    """How a table says whether a bar holds; `"-"` by the wall clock, which times the host's dispatch."""
    if bar is None or value is None or clock is Clock.WALL:
        return "-"
    return f"{bar.words(value)}: {PASS if bar.holds(value) else FALLS_SHORT}"


def summary(verdicts: Sequence[str]) -> str:
    """How many of the bars in a table hold; nothing where none was judged."""
    holding, failing = (sum(each.endswith(word) for each in verdicts) for word in (PASS, FALLS_SHORT))
    return f" {holding} of {holding + failing} bars hold." if holding + failing else ""


@dataclasses.dataclass(frozen=True)
class AttentionTime:
    """One line of the table of attention.

    Attributes:
      row: the name of one of `shapes.ATTENTION_ROWS`.
      seconds: median of a call.
      samples: of each call.
      read_seconds: a kernel that only reads as many bytes as the pages hold, where it was timed.
      others: medians of the same row and dtype by others, by their names.
      fastest_bfloat16: who was the fastest in bfloat16 in this row, and its median.
      base_seconds: median of the row and layout that this one is compared with, where there is one.
    """

    row: str
    dtype: KVCacheDType
    seconds: float
    samples: tuple[float, ...]
    clock: Clock
    read_seconds: float | None = None
    others: Mapping[str, float] = dataclasses.field(default_factory=dict)
    fastest_bfloat16: tuple[str, float] | None = None
    base_seconds: float | None = None

    @property
    def read_share(self) -> float | None:
        """This rate over that of reading alone."""
        return None if self.read_seconds is None else self.read_seconds / self.seconds

    @property
    def speedup(self) -> float | None:
        """How many times as fast as the fastest in bfloat16."""
        return None if self.fastest_bfloat16 is None else self.fastest_bfloat16[1] / self.seconds

    def value(self, measure: Measure) -> float | None:
        """A measure of this line, or `None` where what it is held against was not timed."""
        match measure:
            case Measure.READ:
                return self.read_share
            case Measure.FASTEST_BFLOAT16:
                return self.speedup
            case Measure.MICROSECONDS:
                return self.seconds * 1e6
            case _:
                return None if self.base_seconds is None else self.seconds / self.base_seconds


def _limits(measure: Measure, *limits: float) -> dict[KVCacheDType, Bar]:
    return {dtype: Bar(measure, limit) for dtype, limit in zip(shapes.TIMED_DTYPES, limits, strict=True)}


ATTENTION_BARS: Mapping[str, Mapping[KVCacheDType, Bar]] = {
    "64x8192": _limits(Measure.READ, 0.92, 0.90, 0.68),
    "64x2048": _limits(Measure.READ, 0.88, 0.84, 0.60),
    "256x1024": _limits(Measure.READ, 0.88, 0.84, 0.60),
    "8x8192": _limits(Measure.READ, 0.82, 0.76, 0.54),
    "1x8192": _limits(Measure.MICROSECONDS, 13.0, 11.0, 11.0),
    "64x8192-8/1": _limits(Measure.READ, 0.82, 0.72, 0.48),
    "64x8192-64/8x64": _limits(Measure.READ, 0.88, 0.80, 0.54),
    "64x8192-window-1024": _limits(Measure.WINDOW, 1.3, 1.3, 1.3),
    "64x4096-4-tokens": _limits(Measure.ONE_TOKEN, 1.15, 1.25, 1.4),
    "64x8192-HND": _limits(Measure.NHD, 1.1, 1.1, 1.15),
}

NVFP4_SPEEDUP = Bar(Measure.FASTEST_BFLOAT16, 2.2)
"""Of NVFP4 in the first row."""


SERVE_TOKENS = {FP8: 1.5, NVFP4: 2.2}
"""Of as many sequences as fit, tokens a second as a multiple of bfloat16's."""

SERVE_STEP = Bar(Measure.BFLOAT16, 0.75)
"""Of NVFP4 with the same number of sequences."""

SERVE_READING = Bar(Measure.READING_TIME, 1.15)
"""Of bfloat16."""

SERVE_HOST = Bar(Measure.EXPOSED, 0.05)
"""Of every dtype."""


def attention_bars(line: AttentionTime) -> list[Bar]:
    """The bars that a line is held to."""
    own = ATTENTION_BARS.get(line.row, {}).get(line.dtype)
    further = [NVFP4_SPEEDUP] if (line.row, line.dtype) == (shapes.ATTENTION_ROWS[0].name, NVFP4) else []
    return [*([own] if own else []), *further]
