"""Performance targets, most on an H200, relative to a copy, to plain CUDA, and to other rows of the same table."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from benchmarks import shapes
from benchmarks.measurement import OWN, Measurement, Rows
from benchmarks.timing import Clock
from kvjax import KVCacheDType

BFLOAT16, FP8, NVFP4 = (dtype.value for dtype in shapes.TIMED_DTYPES)

READ, DYNAMIC, PAGED = "read", "transformers DynamicCache", "transformers KvjaxCache"
"""Peers: a read-only kernel for attention; in serving, transformers' own cache, and attention over pages."""

MAX_SEQS, SAME_SEQS = "as many as fit", "the same number"  # serving rows that have bars, as named in files
NO_CASCADE, FLASHINFER, IN_TORCH = "kvjax without cascade", "FlashInfer FA2", "kvjax_torch"
"""Peers of attention in a step: kvjax without reading a shared prefix only once, FlashInfer for every dtype, and kvjax
on torch's stream."""
COMPUTED_AGAIN = "computed again"
"""Peer of a host tier: tokens whose pages were evicted are computed again."""

IN_FP8, WITH_WINDOW = "kvjax (fp8 products)", "kvjax, 64 exact"
"""kvjax with products in fp8, and with an exact window."""


type Other = Callable[[Measurement, Rows], Measurement | None]  # selects a baseline


@dataclasses.dataclass(frozen=True)
class Measure:
    """What a bar limits."""

    heading: str
    value: Callable[[Measurement, Rows], float | None]  # of a measurement, given all of its table
    form: str = "{:.2f}"
    at_least: bool = False  # whether a bar is a minimum instead of a maximum


def by(peer: str, **changes: str | int) -> Other:
    """Selects the same measurement by `peer`, with `changes` to its subject."""
    return lambda m, rows: rows.like(m, peer=peer, **changes)


def over(m: Measurement, other: Measurement | None = None) -> float | None:
    return None if other is None else m.seconds / other.seconds


def tokens_a_second(m: Measurement) -> float:
    """Returns the throughput of a step that generates one token per sequence."""
    return int(m.subject["num_seqs"]) / m.seconds


def fastest_bfloat16(m: Measurement, rows: Rows) -> Measurement | None:
    """Returns the fastest bfloat16 attention in the same row, by any peer."""
    return Rows(each for each in rows.find(case=m.subject["case"], dtype=BFLOAT16) if each.peer != READ).fastest


def multiple(heading: str, other: Other) -> Measure:
    """Measures the ratio of the time to that of `other`."""
    return Measure(heading, lambda m, rows: over(m, other(m, rows)))


def speed(heading: str, other: Other, form: str = "{:.2f}") -> Measure:
    """Measures the speedup over `other`."""
    return Measure(heading, lambda m, rows: over(found, m) if (found := other(m, rows)) else None, form, at_least=True)


def _base_row(m: Measurement, rows: Rows) -> Measurement | None:
    """Returns the baseline: the base row for attention, or the NHD row for a write."""
    if m.operation == "write":
        return rows.like(m, layout="NHD")
    known = shapes.ATTENTION_ROWS_BY_NAME.get(str(m.subject["case"]))
    return next(iter(rows.find(m.peer, case=known.base or "" if known else "", dtype=m.dtype)), None)


def _of_tokens(m: Measurement, rows: Rows) -> float | None:
    same = {key: value for key, value in m.subject.items() if key in ("case", "devices")}
    most = [each for each in rows.find(OWN, **same, dtype=BFLOAT16) if MAX_SEQS in each.facts.get("rows", "")]
    return tokens_a_second(m) / tokens_a_second(most[0]) if most else None


def _of_mean(m: Measurement, rows: Rows) -> float | None:
    of = [rows.like(m, dtype=dtype) for dtype in (FP8, NVFP4)]
    return None if None in of else 2 * m.seconds / sum(each.seconds for each in of if each)


def _of_fact(heading: str, key: str, value: Callable[[Measurement, Any], float], form: str = "{:.2f}") -> Measure:
    return Measure(heading, lambda m, _: None if m.facts.get(key) is None else value(m, m.facts[key]), form)


OF_COPY = Measure("of copy", lambda m, _: m.copy_share, "{:.1%}", at_least=True)
X_CUDA = multiple("x CUDA", by("CUDA"))
X_BFLOAT16 = multiple("x bf16", by(OWN, dtype=BFLOAT16))
X_NHD = multiple("x NHD", _base_row)
X_INDEX_COPY = Measure(
    "x index_copy_",  # prefers the index_copy_ time interleaved with this call
    lambda m, rows: m.facts.get("index_copy_ratio") or over(m, rows.like(m, peer="torch index_copy_")),
)
X_JIT = multiple("x jit", by(OWN))
X_DYNAMIC_CACHE = multiple("x DynamicCache", by(DYNAMIC, dtype=BFLOAT16))
X_KERNELS = _of_fact("x kernels", "kernel_seconds", lambda m, kernel: m.seconds / (m.subject["num_writes"] * kernel))
MICROSECONDS = Measure("us", lambda m, _: m.seconds * 1e6)
OF_READING = speed("of reading", by(READ), "{:.1%}")
TIMES_BFLOAT16 = speed("times as fast as bf16", fastest_bfloat16)
X_WINDOW = multiple("x the window's length", _base_row)
X_ONE_TOKEN = multiple("x 1 token", _base_row)
X_JAX = multiple("x JAX", by(OWN))
X_FA3 = multiple("x FlashInfer FA3 bf16", by("FlashInfer FA3", dtype=BFLOAT16))
X_FLASHINFER = multiple("x FlashInfer FA2", by(FLASHINFER))
TIMES_NO_CASCADE = speed("times as fast as without cascade", by(NO_CASCADE))
X_PAGES = multiple("x pages alone", by(OWN))
X_FP8 = multiple("x fp8", by(OWN, dtype=FP8))
X_MEAN = Measure("x the mean of fp8 and nvfp4", _of_mean)
X_TOKENS = Measure("x bf16 tokens/s", _of_tokens, at_least=True)
X_READING = _of_fact("x reading", "read_ns", lambda m, read: m.seconds * 1e9 / read)
X_COMPUTED_AGAIN = multiple("x computed again", by(COMPUTED_AGAIN))
X_ONE_DEVICE = multiple("x one device", by(OWN, devices=1))
DISPATCH = _of_fact("of a step in its dispatch", "dispatch_ns", lambda m, ns: ns / 1e9 / m.seconds, "{:.1%}")
EXPOSED = _of_fact("of a step exposed", "device_ns", lambda m, ns: max(1 - ns / 1e9 / m.seconds, 0.0), "{:.1%}")

type Where = Mapping[str, Collection[object]]  # fields and their allowed values
type Applies = Callable[[Measurement], bool]


@dataclasses.dataclass(frozen=True)
class Bar:
    """A limit on one measure of an operation by a peer."""

    operation: str
    measure: Measure
    limit: float
    where: Where = dataclasses.field(default_factory=dict)
    peer: str = OWN
    applies: Applies = lambda m: True  # an additional condition

    def is_of(self, m: Measurement) -> bool:
        is_there = all(m.subject.get(key) in values for key, values in self.where.items())
        return (m.operation, m.peer) == (self.operation, self.peer) and is_there and self.applies(m)

    def holds(self, value: float) -> bool:
        return value >= self.limit if self.measure.at_least else value <= self.limit

    def text(self, value: float) -> str:
        return f"{self.measure.form.format(value)} {self.measure.heading}"

    def __str__(self) -> str:
        return f"{'>=' if self.measure.at_least else '<='} {self.text(self.limit)}"


def _by_dtype(
    operation: str, measure: Measure, *limits: float, peer: str = OWN, applies: Applies = Bar.applies, **where: Any
) -> list[Bar]:
    """Returns one bar per timed dtype."""
    dtypes = zip((BFLOAT16, FP8, NVFP4), limits, strict=True)
    return [Bar(operation, measure, limit, {**where, "dtype": (dtype,)}, peer, applies) for dtype, limit in dtypes]


def _of_copy(heads: int, head_sizes: Collection[int], num_tokens: int, *limits: float) -> list[Bar]:
    """Returns bars for writes. The third limit applies to all dtypes with stored scales."""
    fields = {"num_kv_heads": (heads,), "head_size": head_sizes, "num_tokens": (num_tokens,), **_NHD}
    dtypes = zip(((BFLOAT16,), (FP8,), WITH_SCALES), limits, strict=True)
    return [Bar("write", OF_COPY, limit, {**fields, "dtype": dtype}) for dtype, limit in dtypes]


def _serves(row: str = "", *, divided: bool = False) -> Applies:
    """Returns a predicate for serving measurements of a named row (any by default) that have a reading time.

    They are of one device, or of a model divided among several.
    """

    def applies(m: Measurement) -> bool:
        rows, is_divided = m.facts.get("rows", ""), m.subject.get("devices", 1) > 1
        return m.facts.get("read_ns") is not None and bool(rows) and row in rows and is_divided == divided

    return applies


def _on(device: str) -> Applies:
    """Returns a predicate for measurements on GPUs with a word in their name."""
    return lambda m: device in str(m.subject.get("device", ""))


FP8_DS_MLA = KVCacheDType.FP8_DS_MLA.value
_MLA_CODES = (FP8_DS_MLA, NVFP4)
_MLA_TIMED, _MLA_TOKENS = tuple(f"{heads}x1-64x8192" for heads in (16, 64, 128)), ("16x4-64x4096", "128x2-64x4096")
"""Rows of attention over latents: those with bars in microseconds, and those of several query tokens."""
_PER_TOKEN_HEAD = tuple(dtype.value for dtype in shapes.PER_TOKEN_HEAD)
_FP8_KEYS = ("fp8_k_nvfp4_v", "fp8_k_nvfp4_4over6_v")
_DECODES = ("64x8192", "64x2048", "256x1024", "8x8192", "1x8192", "64x1024", "64x4096")
WITH_SCALES = (NVFP4, *_PER_TOKEN_HEAD)
_SCATTERED: Where = {"slots": (shapes.Slots.SCATTERED.value,)}
_NHD: Where = {**_SCATTERED, "layout": ("NHD",)}
_SMALL: Where = {"num_kv_heads": (8,), "head_size": (128,), "num_tokens": range(257), **_NHD}
"""Small writes are latency-bound, so they are compared with CUDA instead of a copy."""

_PROMPTS, _LLAMA = ("chunk", "chunks", "whole"), (shapes.LLAMA_8B.name,)
_WITH_PROMPT_KERNEL = (
    *_PROMPTS, "late-chunk", "chunk-soft-cap", "chunk-window-1024", "chunk-heads-of-64", "chunk-heads-of-256",
)  # fmt: skip
GATHER_SIZE = (64, 2_048)  # sequences, tokens per sequence
BARS = (
    Bar("write", X_NHD, 1.15, {**_SCATTERED, "layout": ("HND",)}),
    Bar("write", X_BFLOAT16, 1.25, {**_SMALL, "dtype": WITH_SCALES}),
    Bar("write", X_CUDA, 0.95, _SMALL, applies=lambda m: m.dtype not in WITH_SCALES),
    *_of_copy(8, (128,), 16_384, 0.92, 0.88, 0.80),
    *_of_copy(8, (128,), 65_536, 0.92, 0.88, 0.85),
    Bar("write", OF_COPY, 0.80, {**_SMALL, "num_tokens": (65_536,), "dtype": ("nvfp4_4over6",)}),
    *_of_copy(1, (128,), 65_536, 0.70, 0.60, 0.55),
    *_of_copy(8, (64, 96, 256), 16_384, 0.85, 0.80, 0.75),
    *_by_dtype("gather", OF_COPY, 0.85, 0.75, 0.75, case=_LLAMA, num_seqs=GATHER_SIZE[:1], seq_len=GATHER_SIZE[1:]),
    Bar("swap", OF_COPY, 0.80, {"num_blocks": (512,)}),
    Bar("host tier sequence", X_COMPUTED_AGAIN, 0.1, {"seq_len": (8_192,)}),
    Bar("bridge host", X_INDEX_COPY, 2.0, peer="kvjax_torch, scales as tensors"),
    Bar("bridge host", X_INDEX_COPY, 2.0, peer="kvjax_torch, scales as floats"),
    Bar("bridge kernel", X_JIT, 1.05, peer="kvjax_torch"),
    Bar("bridge replay", X_KERNELS, 1.1, peer="kvjax_torch"),
    *_by_dtype("attention", OF_READING, 0.92, 0.90, 0.68, case=("64x8192",)),
    Bar("attention", TIMES_BFLOAT16, 2.2, {"case": ("64x8192",), "dtype": (NVFP4,)}),
    *_by_dtype("attention", OF_READING, 0.88, 0.84, 0.60, case=("64x2048", "256x1024")),
    *_by_dtype("attention", OF_READING, 0.82, 0.76, 0.54, case=("8x8192",)),
    *_by_dtype("attention", MICROSECONDS, 13.0, 11.0, 11.0, case=("1x8192",)),
    *_by_dtype("attention", OF_READING, 0.82, 0.72, 0.48, case=("64x8192-8/1",)),
    *_by_dtype("attention", OF_READING, 0.88, 0.80, 0.54, case=("64x8192-64/8x64",)),
    *_by_dtype("attention", X_WINDOW, 1.3, 1.3, 1.3, case=("64x8192-window-1024",)),
    *_by_dtype("attention", X_ONE_TOKEN, 1.15, 1.25, 1.4, case=("64x4096-4-tokens",)),
    *_by_dtype("attention", X_NHD, 1.1, 1.1, 1.15, case=("64x8192-HND",)),
    Bar("attention", X_MEAN, 1.05, {"case": ("64x8192",), "dtype": _FP8_KEYS}),
    Bar("attention", X_MEAN, 1.08, {"case": ("8x8192", "64x1024"), "dtype": _FP8_KEYS}),
    Bar("attention", X_FP8, 1.1, {"case": _DECODES, "dtype": _PER_TOKEN_HEAD}),
    Bar("ragged attention", X_FLASHINFER, 0.5, {"case": (*_PROMPTS, "speculative"), "dtype": (NVFP4,)}),
    Bar("ragged attention", TIMES_BFLOAT16, 0.91, {"case": _PROMPTS, "dtype": (NVFP4,)}),
    Bar("ragged attention", X_FLASHINFER, 0.35, {"case": ("mixed",), "dtype": (NVFP4,)}),
    Bar("ragged attention", X_JAX, 1.05, {"case": _WITH_PROMPT_KERNEL}, IN_TORCH),
    Bar("ragged attention", X_JAX, 1.1, {"case": ("mixed",)}, IN_TORCH),
    Bar("ragged attention", X_FA3, 1.05, {"case": _PROMPTS, "dtype": (NVFP4,)}, IN_TORCH),
    Bar("ragged attention", X_FA3, 1.1, {"case": _PROMPTS, "dtype": (BFLOAT16,)}, IN_TORCH),
    Bar("ragged attention", X_FP8, 1.1, {"case": _WITH_PROMPT_KERNEL, "dtype": _PER_TOKEN_HEAD}),
    Bar("ragged attention", MICROSECONDS, 340.0, {"case": ("chunk",), "dtype": (FP8, NVFP4)}, IN_FP8),
    Bar("ragged attention", MICROSECONDS, 760.0, {"case": ("whole",), "dtype": (FP8, NVFP4)}, IN_FP8),
    Bar("attention beside a window", X_PAGES, 1.1, {"case": ("64x8192",), "dtype": (NVFP4,)}, WITH_WINDOW),
    Bar("attention beside a window", X_PAGES, 1.3, {"case": ("8x8192", "64x1024"), "dtype": (NVFP4,)}, WITH_WINDOW),
    Bar("attention beside a window", X_PAGES, 1.12, {"case": ("chunk",), "dtype": (NVFP4,)}, WITH_WINDOW),
    Bar("write beside a window", X_PAGES, 1.4, {"case": ("64x8192", "64x1024"), "dtype": (NVFP4,)}, WITH_WINDOW),
    Bar("write beside a window", X_PAGES, 1.15, {"case": ("chunks-2048",), "dtype": (NVFP4,)}, WITH_WINDOW),
    Bar("ragged attention", TIMES_NO_CASCADE, 2.5, {"case": ("shared-prefix",), "dtype": (NVFP4,)}),
    Bar("mla write", OF_COPY, 0.80, {"num_tokens": (65_536,)}),
    Bar("mla gather", OF_COPY, 0.85, {"num_tokens": (65_536,)}),
    Bar("mla attention", X_FA3, 1.05, {"case": (*_MLA_TIMED, "128x1-8x32768"), "dtype": (BFLOAT16,)}),
    Bar("mla attention", X_FA3, 1.0, {"case": _MLA_TOKENS, "dtype": (BFLOAT16,)}),
    Bar("mla attention", X_BFLOAT16, 1.25, {"case": _MLA_TOKENS, "dtype": _MLA_CODES}),
    Bar("mla attention", MICROSECONDS, 100.0, {"case": _MLA_TIMED[:1], "dtype": (FP8_DS_MLA,)}, applies=_on("H200")),
    Bar("mla attention", MICROSECONDS, 85.0, {"case": _MLA_TIMED[:1], "dtype": (NVFP4,)}, applies=_on("H200")),
    Bar("mla attention", MICROSECONDS, 150.0, {"case": _MLA_TIMED[1:2], "dtype": _MLA_CODES}, applies=_on("H200")),
    Bar("mla attention", MICROSECONDS, 300.0, {"case": _MLA_TIMED[2:], "dtype": _MLA_CODES}, applies=_on("H200")),
    Bar("mla attention", X_FA3, 0.5, {"case": _MLA_TIMED[:1], "dtype": (NVFP4,)}, applies=_on("H100")),
    *_by_dtype("serve", X_DYNAMIC_CACHE, 1.0, 1.0, 0.8, peer=PAGED, applies=_serves(SAME_SEQS)),
    Bar("serve", X_TOKENS, 1.5, {"dtype": (FP8,)}, applies=_serves(MAX_SEQS)),
    Bar("serve", X_TOKENS, 2.2, {"dtype": (NVFP4,)}, applies=_serves(MAX_SEQS)),
    Bar("serve", X_TOKENS, 2.5, {"dtype": (NVFP4,)}, WITH_WINDOW, applies=_serves(MAX_SEQS)),
    Bar("serve", X_BFLOAT16, 0.75, {"dtype": (NVFP4,)}, applies=_serves(SAME_SEQS)),
    Bar("serve", X_READING, 1.15, {"dtype": (BFLOAT16,)}, applies=_serves()),
    Bar("serve", EXPOSED, 0.05, applies=_serves()),
    *_by_dtype("serve", X_ONE_DEVICE, 0.60, 0.64, 0.68, applies=_serves(SAME_SEQS, divided=True), devices=(2,)),
    Bar("serve", EXPOSED, 0.05, applies=_serves(divided=True)),
    Bar("serve", DISPATCH, 0.90, applies=_serves(divided=True)),  # the devices do not wait for the host
)


def of(m: Measurement) -> list[Bar]:
    return [bar for bar in BARS if bar.is_of(m)]


PASS, FALLS_SHORT = "pass", "falls short"


def verdicts(m: Measurement, rows: Rows) -> list[str]:
    """Returns a verdict for each bar of a measurement; `"-"` for the wall clock, which includes host dispatch."""
    return [_verdict(bar, m, rows) for bar in of(m)]


def _verdict(bar: Bar, m: Measurement, rows: Rows) -> str:
    if m.clock is Clock.WALL or (reached := bar.measure.value(m, rows)) is None:
        return "-"
    if m.facts.get("waits"):
        return f"the host waits: {FALLS_SHORT}"
    return f"{bar.text(reached)}: {PASS if bar.holds(reached) else FALLS_SHORT}"


def summary(found: Sequence[str]) -> str:
    """Returns how many targets of a table are met, or an empty string if none has a verdict."""
    holding, failing = (sum(each.endswith(word) for each in found) for word in (PASS, FALLS_SHORT))
    return f" {holding} of {holding + failing} targets are met." if holding + failing else ""
