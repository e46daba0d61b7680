"""What each time should reach on an H200, next to a copy, to plain CUDA and to its neighbours in the table."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping, Sequence

from benchmarks import shapes
from benchmarks.measurement import OWN, Measurement, Rows
from benchmarks.timing import Clock

BFLOAT16, FP8, NVFP4 = (dtype.value for dtype in shapes.TIMED_DTYPES)
PER_TOKEN_HEAD = tuple(dtype.value for dtype in shapes.PER_TOKEN_HEAD)

READ, DYNAMIC, PAGED = "read", "DynamicCache, sdpa", "KvjaxCache, kvjax"
"""Peers: of attention a kernel that only reads, of `generate` transformers' own cache and attention over pages."""

NO_CASCADE, FLASHINFER = "kvjax without cascade", "FlashInfer FA2"
"""Peers of attention in a step: sequences that read a shared prefix each for itself, and FlashInfer in every dtype."""


class Measure(enum.Enum):
    """What a bar is about: a share or a speed to reach, or a ratio of times or a time not to exceed."""

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
    FLASHINFER = "x FlashInfer FA2"
    NO_CASCADE = "times as fast as without cascade"
    READING_TIME = "x reading"
    EXPOSED = "of a step exposed"


SHARES = (Measure.COPY, Measure.READ, Measure.EXPOSED)
AT_LEAST = (Measure.COPY, Measure.READ, Measure.FASTEST_BFLOAT16, Measure.NO_CASCADE, Measure.TOKENS)
"""Those to reach; the others are not to be exceeded."""


@dataclasses.dataclass(frozen=True)
class Bar:
    """A limit on one measure of a line."""

    measure: Measure
    limit: float

    def holds(self, value: float) -> bool:
        return value >= self.limit if self.measure in AT_LEAST else value <= self.limit

    def words(self, value: float) -> str:
        """A value of this measure, as tables print it."""
        number = f"{value:.1%}" if self.measure in SHARES else f"{value:.2f}"
        return f"{number} {self.measure.value}"

    def __str__(self) -> str:
        return f"{'>=' if self.measure in AT_LEAST else '<='} {self.words(self.limit)}"


def _of_copy(bfloat16: float, fp8: float, with_scales: float) -> dict[str, float]:
    return {BFLOAT16: bfloat16, FP8: fp8} | dict.fromkeys((NVFP4, *PER_TOKEN_HEAD), with_scales)


SMALL_COUNT = 256
"""Up to here a write is bound by latency, and is compared with CUDA's rather than with a copy."""

COPY_SHARES: Mapping[tuple[int, int, int], Mapping[str, float]] = {
    (8, 128, 16_384): _of_copy(0.92, 0.88, 0.80),
    (8, 128, 65_536): {**_of_copy(0.92, 0.88, 0.85), "nvfp4_4over6": 0.80},
    (1, 128, 65_536): _of_copy(0.70, 0.60, 0.55),
    **{(8, head_size, 16_384): _of_copy(0.85, 0.80, 0.75) for head_size in (64, 96, 256)},
}
"""Of writes, by (KV heads, head size, tokens)."""

GATHER_SIZE = (64, 2_048)
GATHER_COPY_SHARES: Mapping[str, float] = {BFLOAT16: 0.85, FP8: 0.75, NVFP4: 0.75}
"""Of a gather of `GATHER_SIZE` (sequences, tokens of each), 8 KV heads of 128, into bfloat16."""

HOST = {
    "kvjax_torch, scales as tensors": Bar(Measure.INDEX_COPY, 2.0),
    "kvjax_torch, scales as floats": Bar(Measure.INDEX_COPY, 2.0),
    "kvjax_torch through JAX (DLPack)": Bar(Measure.MICROSECONDS, 1000.0),
}
"""Of a call from torch, the time that it keeps the host, by how it is called."""

TORCH_KERNEL, REPLAY = Bar(Measure.JIT, 1.05), Bar(Measure.KERNELS, 1.1)
"""Of a call from torch, the time of its kernel; of a CUDA graph of writes, next to as many kernel times."""


def _limits(measure: Measure, *limits: float) -> dict[str, Bar]:
    return {dtype: Bar(measure, limit) for dtype, limit in zip((BFLOAT16, FP8, NVFP4), limits, strict=True)}


GENERATE = _limits(Measure.DYNAMIC_CACHE, 1.0, 1.0, 0.8)
"""Of a decode step of a transformers model that attends to pages, next to transformers' own cache in bfloat16."""

ATTENTION: Mapping[str, Mapping[str, Bar]] = {
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
"""Of NVFP4 in the first row of attention."""

_PROMPTS = Bar(Measure.FLASHINFER, 0.5), Bar(Measure.FASTEST_BFLOAT16, 0.91)
RAGGED: Mapping[str, Sequence[Bar]] = {
    **dict.fromkeys(("chunk", "chunks", "whole"), _PROMPTS),
    "mixed": [Bar(Measure.FLASHINFER, 0.35)],
    "speculative": [Bar(Measure.FLASHINFER, 0.5)],
    "shared-prefix": [Bar(Measure.NO_CASCADE, 2.5)],
}
"""Of NVFP4 in a step."""

MOST, SAME = "as many as fit", "the same number"
"""Rows of serving that bars are about, as a file names them."""

SERVE_TOKENS = {FP8: Bar(Measure.TOKENS, 1.5), NVFP4: Bar(Measure.TOKENS, 2.2)}
"""Of as many sequences as fit, tokens a second as a multiple of bfloat16's."""

SERVE_STEP = Bar(Measure.BFLOAT16, 0.75)
"""Of NVFP4 with the same number of sequences."""

SERVE_READING, SERVE_HOST = Bar(Measure.READING_TIME, 1.15), Bar(Measure.EXPOSED, 0.05)
"""Of bfloat16; of every dtype."""


def of(m: Measurement) -> list[Bar]:
    """The bars of a measurement."""
    find = _BARS.get(m.operation)
    return [bar for bar in find(m) if bar is not None] if find else []


def _of_write(m: Measurement) -> list[Bar | None]:
    """Only writes of scattered slots have bars."""
    subject, num_tokens = m.subject, int(m.subject["num_tokens"])
    shape = int(subject["num_kv_heads"]), int(subject["head_size"])
    if m.peer != OWN or subject["slots"] != shapes.Slots.SCATTERED:
        return []
    if subject["layout"] == "HND":
        return [Bar(Measure.NHD, 1.15)]
    if shape == (8, 128) and num_tokens <= SMALL_COUNT:
        with_scales = m.dtype in (NVFP4, *PER_TOKEN_HEAD)
        return [Bar(Measure.BFLOAT16, 1.25) if with_scales else Bar(Measure.CUDA, 0.95)]
    share = COPY_SHARES.get((*shape, num_tokens), {}).get(m.dtype)
    return [None if share is None else Bar(Measure.COPY, share)]


def _of_gather(m: Measurement) -> list[Bar | None]:
    size = m.subject["num_seqs"], m.subject["seq_len"]
    is_held = m.peer == OWN and size == GATHER_SIZE and m.subject["case"] == shapes.LLAMA_8B.name
    return [Bar(Measure.COPY, GATHER_COPY_SHARES[m.dtype])] if is_held else []


def _of_attention(m: Measurement) -> list[Bar | None]:
    if m.peer != OWN:
        return []
    row = str(m.subject["case"])
    is_first = (row, m.dtype) == (shapes.ATTENTION_ROWS[0].name, NVFP4)
    return [ATTENTION.get(row, {}).get(m.dtype), NVFP4_SPEEDUP if is_first else None]


def _of_serve(m: Measurement) -> list[Bar | None]:
    rows = m.facts.get("rows") or ""
    if m.peer != OWN or not rows or m.facts.get("read_ns") is None:
        return []
    return [
        SERVE_TOKENS.get(m.dtype) if MOST in rows else None,
        SERVE_STEP if SAME in rows and m.dtype == NVFP4 else None,
        SERVE_READING if m.dtype == BFLOAT16 else None,
        SERVE_HOST,
    ]


_BARS: Mapping[str, Callable[[Measurement], list[Bar | None]]] = {
    "write": _of_write,
    "gather": _of_gather,
    "bridge host": lambda m: [HOST.get(m.peer)],
    "bridge kernel": lambda m: [TORCH_KERNEL] if m.peer == "kvjax_torch" else [],
    "bridge replay": lambda m: [REPLAY] if m.peer == "kvjax_torch" else [],
    "attention": _of_attention,
    "ragged attention": lambda m: (
        [*RAGGED.get(str(m.subject["case"]), ())] if (m.peer, m.dtype) == (OWN, NVFP4) else []
    ),
    "decode step": lambda m: [GENERATE[m.dtype]] if m.peer == PAGED else [],
    "serve": _of_serve,
}


def value(measure: Measure, m: Measurement, rows: Rows) -> float | None:
    """A measure of a line among all of its operation; `None` where what it is compared with was not timed."""
    match measure:
        case Measure.COPY:
            return m.copy_share
        case Measure.CUDA:
            return over(m, rows.like(m, peer="CUDA"))
        case Measure.BFLOAT16:
            return over(m, rows.like(m, peer=OWN, dtype=BFLOAT16))
        case Measure.NHD if m.operation == "write":
            return over(m, rows.like(m, layout="NHD"))
        case Measure.NHD | Measure.WINDOW | Measure.ONE_TOKEN:
            known = shapes.ATTENTION_ROWS_BY_NAME.get(str(m.subject["case"]))
            return over(m, *rows.find(m.peer, case=known.base or "" if known else "", dtype=m.dtype)[:1])
        case Measure.INDEX_COPY:
            ratio: float | None = m.facts.get("index_copy_ratio")  # timed by turns with this call
            return ratio or over(m, rows.like(m, peer="torch index_copy_"))
        case Measure.JIT:
            return over(m, rows.like(m, peer=OWN))
        case Measure.DYNAMIC_CACHE:
            return over(m, rows.like(m, peer=DYNAMIC, dtype=BFLOAT16))
        case Measure.KERNELS:
            kernel = m.facts.get("kernel_seconds")
            return None if kernel is None else m.seconds / (int(m.subject["num_writes"]) * kernel)
        case Measure.MICROSECONDS:
            return m.seconds * 1e6
        case Measure.READ:
            read = rows.like(m, peer=READ)
            return None if read is None else read.seconds / m.seconds
        case Measure.FASTEST_BFLOAT16:
            fastest = fastest_bfloat16(m, rows)
            return None if fastest is None else fastest.seconds / m.seconds
        case Measure.FLASHINFER:
            return over(m, rows.like(m, peer=FLASHINFER))
        case Measure.NO_CASCADE:
            without = rows.like(m, peer=NO_CASCADE)
            return None if without is None else without.seconds / m.seconds
        case Measure.TOKENS:
            most = [each for each in rows.find(OWN, dtype=BFLOAT16) if MOST in each.facts.get("rows", "")]
            return tokens_a_second(m) / tokens_a_second(most[0]) if most else None
        case Measure.READING_TIME:
            nanoseconds = m.facts.get("read_ns")
            return None if nanoseconds is None else m.seconds * 1e9 / nanoseconds
        case Measure.EXPOSED:
            nanoseconds = m.facts.get("device_ns")
            return None if nanoseconds is None else max(1 - nanoseconds / 1e9 / m.seconds, 0.0)


def over(m: Measurement, other: Measurement | None = None) -> float | None:
    """A time as a multiple of another."""
    return None if other is None else m.seconds / other.seconds


def tokens_a_second(m: Measurement) -> float:
    """Of a step that gives one token of each sequence."""
    return int(m.subject["num_seqs"]) / m.seconds


def fastest_bfloat16(m: Measurement, rows: Rows) -> Measurement | None:
    """Of attention: whoever is the fastest in bfloat16 in the same row."""
    found = [each for each in rows.find(case=m.subject["case"], dtype=BFLOAT16) if each.peer != READ]
    return min(found, key=lambda each: each.seconds, default=None)


PASS, FALLS_SHORT = "pass", "falls short"


def verdicts(m: Measurement, rows: Rows) -> list[str]:
    """Whether each of a line's bars holds; `"-"` by the wall clock, which times the host's dispatch."""
    return [_verdict(bar, m, rows) for bar in of(m)]


def _verdict(bar: Bar, m: Measurement, rows: Rows) -> str:
    if m.clock is Clock.WALL or (reached := value(bar.measure, m, rows)) is None:
        return "-"
    if m.facts.get("waits"):
        return f"the host waits: {FALLS_SHORT}"
    return f"{bar.words(reached)}: {PASS if bar.holds(reached) else FALLS_SHORT}"


def summary(found: Sequence[str]) -> str:
    """How many of the bars in a table hold; nothing where none was judged."""
    holding, failing = (sum(each.endswith(word) for each in found) for word in (PASS, FALLS_SHORT))
    return f" {holding} of {holding + failing} bars hold." if holding + failing else ""
