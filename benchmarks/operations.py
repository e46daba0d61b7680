"""Every operation that is timed: the fields of its measurements, and the columns of its tables."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks import bars, shapes
from benchmarks.bars import BFLOAT16, DYNAMIC, FP8, NVFP4, Measure
from benchmarks.measurement import OWN, Measurement, Rows
from benchmarks.tables import (
    Column,
    Field,
    Lines,
    Operation,
    escaped,
    microseconds,
    milliseconds,
    nine_of_ten,
    ratio,
    share,
    word,
)
from benchmarks.timing import Timing
from kvjax import CacheLayout, KVCacheDType

CASE = Field("case", "case", is_text=True)
KV_HEADS, HEAD_SIZE = Field("num_kv_heads", "KV heads"), Field("head_size", "head size")
DTYPE, LAYOUT = Field("dtype", "dtype", is_text=True), Field("layout", "layout", is_text=True)
SLOTS = Field("slots", "slots", is_text=True)
SEQS, SEQ_LEN, TOKENS = Field("num_seqs", "seqs"), Field("seq_len", "seq len"), Field("num_tokens", "tokens")
CACHE_BYTES, LAYERS = Field("cache_bytes", "cache bytes"), Field("layers", "layers")
CACHE = (CASE, KV_HEADS, HEAD_SIZE, DTYPE, LAYOUT)
WRITE = (*CACHE, SLOTS)
TEMPORARY_BYTES = Field("temporary_bytes", "temporary bytes")
CODES_APART = Field("codes_apart", "codes apart")

type Other = Callable[[Measurement, Rows], Measurement | None]


def about(field: Field) -> Column:
    return Column(field.heading, lambda m, _: word(m.subject.get(field.key)), field.is_text)


def peer(heading: str) -> Column:
    return Column(heading, lambda m, _: escaped(m.peer), is_text=True)


def us_of(heading: str, other: Other) -> Column:
    """The median of another measurement."""
    return Column(heading, lambda m, rows: microseconds(found.seconds if (found := other(m, rows)) else None))


def over(heading: str, other: Other) -> Column:
    """This median over another."""
    return Column(heading, lambda m, rows: ratio(bars.over(m, other(m, rows))))


def of_bar(heading: str, measure: Measure, words: Callable[[float | None], str] = ratio) -> Column:
    """What a bar is about, of every line."""
    return Column(heading, lambda m, rows: words(bars.value(measure, m, rows)))


def by(name: str) -> Other:
    """Another peer's."""
    return lambda m, rows: rows.like(m, peer=name)


def seconds_of(key: str, unit: float = 1.0) -> Callable[[Measurement], float | None]:
    """A fact that is a time."""
    return lambda m: None if m.facts.get(key) is None else m.facts[key] * unit


def kernels(times: Timing | None) -> str:
    """How many kernels a call launches."""
    return str(len(times.kernels) or "-") if times else "-"


US = Column("us", lambda m, _: microseconds(m.seconds))
SPREAD = Column("5-95%", lambda m, _: nine_of_ten(m.times))
MEGABYTES = Column("MB moved", lambda m, _: f"{(m.bytes_moved or 0) / 1e6:,.3f}")
RATE = Column("GB/s", lambda m, _: f"{(m.bytes_per_second or 0) / 1e9:,.4g}")
OF_COPY = Column("of copy", lambda m, _: share(m.copy_share))
KERNELS = Column("kernels", lambda m, _: kernels(m.times))
BAR = Column("bar", lambda m, _: escaped(", ".join(map(str, bars.of(m))) or "-"))
REACHED = Column("reached", lambda m, rows: "; ".join(bars.verdicts(m, rows)) or "-")
TIMES = (US, SPREAD, MEGABYTES, RATE, OF_COPY)
SEQUENCES = Column("sequences", lambda m, _: word(m.subject["num_seqs"]))


def _write_order(m: Measurement) -> tuple[int, ...]:
    known = {
        "case": [*shapes.CASES_BY_NAME],
        "slots": [*shapes.Slots],
        "layout": [each.value for each in CacheLayout],
        "dtype": [each.value for each in KVCacheDType],
    }
    return tuple(names.index(str(m.subject[key])) for key, names in known.items())


def _timed_order(m: Measurement) -> tuple[int, ...]:
    return ((BFLOAT16, FP8, NVFP4).index(m.dtype),)


WRITES = Lines(
    "Time of a write, by the number of tokens",
    (
        *(about(CASE), about(DTYPE), about(LAYOUT), about(SLOTS), about(TOKENS), *TIMES),
        *(us_of("CUDA us", by("CUDA")), us_of("fitted us", by("CUDA fitted")), of_bar("x CUDA", Measure.CUDA)),
        *(KERNELS, BAR, REACHED),
    ),
    note=f"kvjax, bfloat16 tokens, {shapes.BLOCK_SIZE} tokens a block.",
    order=_write_order,
)
GATHERS = Lines(
    "Time of a gather",
    (about(CASE), about(DTYPE), about(LAYOUT), SEQUENCES, about(SEQ_LEN), *TIMES, KERNELS, BAR, REACHED),
    note="kvjax, into bfloat16.",
)
COPIES = Lines(
    "Time of a copy",
    (
        *(
            Column("copied by", lambda m, _: escaped(m.facts.get("way", "-")), is_text=True),
            US,
            SPREAD,
            MEGABYTES,
            RATE,
        ),
        *(Column("of the fastest", OF_COPY.words), Column("clock", lambda m, _: m.clock)),
    ),
    note="Bytes read plus bytes written.",
    keep=lambda m: True,
)

CALL = Field("call", "call", is_text=True)
_SECOND = seconds_of("second_seconds", 1e3)
FIRST_CALLS = Lines(
    "Time of the first call, which compiles",
    (
        *(about(CALL), about(DTYPE), about(KV_HEADS), Column("first ms", lambda m, _: f"{m.seconds * 1e3:,.2f}")),
        Column("second ms", lambda m, _: "-" if (found := _SECOND(m)) is None else f"{found:,.2f}"),
    ),
    note="Until the result is there.",
    keep=lambda m: True,
)
HOST_TIMES = Lines(
    "Time that a call keeps the host",
    (
        *(peer("call"), US, SPREAD, of_bar("x index_copy_", Measure.INDEX_COPY)),
        Column("host waits", lambda m, _: {"True": "yes", "False": "no"}.get(str(m.facts.get("waits")), "-")),
        *(BAR, REACHED),
    ),
    note="64 tokens of 8 KV heads of 128, NVFP4, int64 slots.",
    keep=lambda m: True,
)
TWO_STREAMS = ", two streams"


def _two_streams(m: Measurement, rows: Rows) -> Measurement | None:
    return rows.like(m, peer=m.peer + TWO_STREAMS)


def _two_streams_ratio(m: Measurement, rows: Rows) -> str:
    other = _two_streams(m, rows)
    return ratio(bars.value(Measure.KERNELS, other, rows) if other else None)


_KERNEL_SECONDS = seconds_of("kernel_seconds")
REPLAYS = Lines(
    "Time of a CUDA graph of writes",
    (
        *(about(DTYPE), about(TOKENS), US, SPREAD, us_of("2 streams us", _two_streams)),
        Column("kernel us", lambda m, _: microseconds(_KERNEL_SECONDS(m))),
        of_bar("x kernels", Measure.KERNELS),
        *(Column("2 streams x", _two_streams_ratio), BAR, REACHED),
    ),
    note="Of one replay among several in a row, where torch uses one stream; then again, when it has used a second.",
    keep=lambda m: not m.peer.endswith(TWO_STREAMS),
)
TORCH_KERNELS = Lines(
    "Time of a write's kernels, from torch and under jit",
    (
        *(about(DTYPE), about(TOKENS), US, SPREAD, us_of("us under jit", by(OWN))),
        Column("5-95% under jit", lambda m, rows: nine_of_ten(other.times) if (other := by(OWN)(m, rows)) else "-"),
        *(of_bar("x jit", Measure.JIT), KERNELS),
        Column("under jit", lambda m, rows: kernels(other.times if (other := by(OWN)(m, rows)) else None)),
        *(BAR, REACHED),
    ),
    note="The same tokens, slots and pages, int32 slots.",
    keep=lambda m: m.peer != OWN,
    order=_timed_order,
)

READ_SHARE = of_bar("share", Measure.READ, share)
VARIANTS = (OWN, "kvjax xla", "kvjax_torch", bars.NO_CASCADE, bars.READ)
"""Who is no peer of attention."""


def _next_best(m: Measurement, rows: Rows) -> Measurement | None:
    found = [each for each in rows.find(case=m.subject["case"], dtype=m.dtype) if each.peer not in VARIANTS]
    return min(found, key=lambda each: each.seconds, default=None)


def _name_of(other: Other) -> Callable[[Measurement, Rows], str]:
    return lambda m, rows: escaped(found.peer) if (found := other(m, rows)) else "-"


_OF_ROW = (Column("row", about(CASE).words, is_text=True), about(DTYPE), US, SPREAD)
_BEST = (
    *(Column("next best", _name_of(_next_best)), us_of("its us", _next_best)),
    *(Column("fastest bf16", _name_of(bars.fastest_bfloat16)), us_of("bf16 us", bars.fastest_bfloat16)),
    *(of_bar("times as fast", Measure.FASTEST_BFLOAT16), Column("bars", BAR.words), REACHED),
)
ATTENTION = Lines(
    "Time of attention",
    (*_OF_ROW, us_of("reading us", by(bars.READ)), READ_SHARE, *_BEST),
    note="A row is sequences x tokens of each, 32 query heads over 8 KV heads of 128, one query token a sequence, NHD,"
    " where its name says nothing else. Share: of the rate of a kernel that only reads as many bytes as the pages hold."
    " Next best: the fastest of the others in the same row and dtype. Fastest bf16: of anyone in this run, kvjax"
    " included, and how many times as fast kvjax is in this dtype.",
)


RAGGED = Lines(
    "Time of attention in a step",
    (*_OF_ROW, us_of("from torch us", by("kvjax_torch")), us_of("no cascade us", by(bars.NO_CASCADE)), *_BEST),
    note="32 query heads over 8 KV heads of 128, NHD. chunk: 2,048 new tokens behind 6,144; chunks: 8 x (512 behind"
    " 3,584); whole: 8,192 new; mixed: 1,024 behind 3,072, and 63 decodes at 4,096; speculative: 64 x (4 behind 4,092);"
    " shared-prefix: 64 decodes at 8,448, of which 8,192 are shared and read once, or by each sequence alone.",
)


def _in(dtype: str) -> Column:
    """A decode by kvjax in a dtype, and its share of reading."""

    def words(m: Measurement, rows: Rows) -> str:
        found = rows.like(m, dtype=dtype)
        return f"{microseconds(found.seconds)} ({READ_SHARE.words(found, rows)})" if found else "-"

    return Column(f"kvjax, {dtype}", words)


def _best_in_bfloat16(m: Measurement, rows: Rows) -> str:
    found = _next_best(m, rows)
    return f"{escaped(found.peer)}: {microseconds(found.seconds)}" if found else "-"


ATTENTION_SHORT = Lines(
    "Attention decode",
    (
        Column("sequences x tokens", about(CASE).words, is_text=True),
        *(Column("fastest other, bfloat16", _best_in_bfloat16), *map(_in, (BFLOAT16, FP8, NVFP4))),
    ),
    note="Microseconds of a call, and the share of the rate of a kernel that only reads as many bytes as the pages"
    " hold. 32 query heads over 8 KV heads of 128, one query token a sequence, NHD, unless a row is named otherwise.",
    keep=lambda m: m.peer == OWN and m.dtype == BFLOAT16,
)
HOST_SHORT = Lines("Calls from torch", HOST_TIMES.columns[:5], HOST_TIMES.note, HOST_TIMES.keep)


def _mebibytes(m: Measurement, _: Rows) -> str:
    return "-" if m.facts.get("step_bytes") is None else f"{m.facts['step_bytes'] / 2**20:,.1f}"


def _of_a_dense_layer(m: Measurement, _: Rows) -> str:
    taken = m.facts.get("step_bytes")
    return "-" if taken is None else ratio(taken / m.facts["dense_layer_bytes"])


STEPS = Lines(
    "Time of a decode step",
    (
        *(Column("sequences", about(CASE).words, is_text=True), about(DTYPE), peer("cache, attention"), US, SPREAD),
        Column("kernels us", lambda m, _: microseconds(_KERNEL_SECONDS(m))),
        over("x DynamicCache", lambda m, rows: rows.like(m, peer=DYNAMIC, dtype=BFLOAT16)),
        *(Column("MiB of a step", _mebibytes), Column("of a dense layer", _of_a_dense_layer), BAR, REACHED),
    ),
    note="A model of 8 layers of Llama-3.1-8B with random weights in bfloat16 (without a GPU, of tiny ones); a step of"
    " `generate` without its bookkeeping, mask of ones included. Kernels by device timestamps. MiB: the most that torch"
    " holds in a step beside what is there before.",
    keep=lambda m: True,
)

_DTYPE, _ROW = about(DTYPE), Column("row", lambda m, _: escaped(m.facts.get("rows") or "-"), is_text=True)
_SEQUENCES = Column("sequences", SEQUENCES.words, is_text=True)
_READ, _HOST = seconds_of("read_ns", 1e-9), seconds_of("host_ns", 1e-9)
_TOKENS_A_SECOND = Column("tokens a second", lambda m, _: f"{bars.tokens_a_second(m):,.0f}")
_STEP = Column("step, ms", lambda m, _: milliseconds(m.seconds))
_X_TOKENS = of_bar("x bf16 tokens/s", Measure.TOKENS)
_X_STEP = of_bar("x bf16's step", Measure.BFLOAT16)


def _serve_order(m: Measurement) -> tuple[int, ...]:
    return (*_timed_order(m), int(m.subject["num_seqs"]))


SERVE = Lines(
    "Tokens a second",
    (
        *(_DTYPE, _SEQUENCES, _ROW, peer("by"), _TOKENS_A_SECOND, _STEP),
        Column("5-95%", lambda m, _: "-".join(map(milliseconds, m.times.spread))),
        *(_X_TOKENS, _X_STEP, Column("reading, ms", lambda m, _: milliseconds(_READ(m)))),
        of_bar("x reading", Measure.READING_TIME),
        Column("host, ms", lambda m, _: milliseconds(_HOST(m))),
        *(of_bar("exposed", Measure.EXPOSED, share), Column("bars", BAR.words), REACHED),
    ),
    note="A step decodes one token of each sequence. Reading: the time that weights and pages take at the rate of a"
    " kernel that only reads. Host: for how long the host is busy in a step while the device works on the one before;"
    " exposed: what a step of the engine takes beyond a step without synchronization, as a share of it."
    " kvjax's steps are those of an engine, from one step's tokens to the next's; peers run without an engine"
    " and without synchronization.",
    keep=lambda m: True,
    order=_serve_order,
)
SERVE_SHORT = Lines(
    "Tokens a second",
    (_DTYPE, _SEQUENCES, _ROW, peer("by"), _TOKENS_A_SECOND, _X_TOKENS, _STEP, _X_STEP),
    keep=lambda m: bool(m.facts.get("rows")),
    order=_serve_order,
)


def _a_second(key: str) -> Callable[[Measurement, Rows], str]:
    return lambda m, _: f"{m.facts[key]:,}" if key in m.facts else "-"


KIND = Field("steps", "steps", is_text=True)
PROMPTS = Lines(
    "Requests with prompts",
    (
        *(_DTYPE, about(KIND), Column("step, ms", _STEP.words)),
        Column("generated a second", _a_second("generated_a_second")),
        Column("prompt tokens a second", _a_second("prompt_tokens_a_second")),
    ),
    note="Twice as many requests as run at a time, each with a prompt of its own; at most one chunk of a prompt a step"
    " beside the decodes. Times of whole steps.",
)

DEVICES = Field("devices", "devices")


def _sharded(devices_differ: bool, clock_differs: bool) -> Other:
    """The same on several devices, or by the host's clock in a row."""

    def other(m: Measurement, rows: Rows) -> Measurement | None:
        for each in rows:
            same = {**each.subject, "devices": 1} == m.subject
            found = each.subject["devices"] != 1, "in_a_row" in each.facts
            if same and found == (devices_differ, clock_differs):
                return each
        return None

    return other


_MANY = _sharded(True, False)
SHARDED = Lines(
    "Time of several devices, and of one",
    (
        Column("operation", lambda m, _: m.operation, is_text=True),
        *(about(DTYPE), about(TOKENS), US, us_of("us of several", _MANY)),
        Column("ratio", lambda m, rows: ratio(other.seconds / m.seconds if (other := _MANY(m, rows)) else None)),
        *(us_of("host us", _sharded(False, True)), us_of("host us of several", _sharded(True, True))),
    ),
    note="The same KV heads on each device; of several devices a time is that of one of them. `host` is the time from a"
    " call to the next.",
    keep=lambda m: m.subject["devices"] == 1 and "in_a_row" not in m.facts,
)

SCAN, UNROLLED, SEPARATE = "one cache, scan", "one cache, unrolled", "a cache a layer, unrolled"


def _fastest_unrolled(m: Measurement, rows: Rows) -> Measurement | None:
    found = [other for name in (UNROLLED, SEPARATE) if (other := rows.like(m, peer=name))]
    return min(found, key=lambda each: each.seconds, default=None)


LAYERED = Lines(
    "Time of a step over layers",
    (
        *(about(DTYPE), Column(SCAN, US.words), us_of(UNROLLED, by(UNROLLED)), us_of(SEPARATE, by(SEPARATE))),
        over("ratio", _fastest_unrolled),
    ),
    note="Microseconds of a step. A layer writes a token of each sequence and gathers them, all of its pages. The ratio"
    " is that of the scan to the faster of the others.",
    keep=lambda m: m.peer == SCAN,
)

STEP = Field("step", "each layer", is_text=True)


def _in_nvfp4(m: Measurement, rows: Rows) -> Measurement | None:
    return rows.like(m, dtype=NVFP4)


TRACED = Lines(
    "Tracing and lowering",
    (
        *(about(STEP), Column(BFLOAT16, lambda m, _: f"{m.seconds:.3f}")),
        Column(NVFP4, lambda m, rows: f"{other.seconds:.3f}" if (other := _in_nvfp4(m, rows)) else "-"),
        Column("ratio", lambda m, rows: ratio(other.seconds / m.seconds if (other := _in_nvfp4(m, rows)) else None)),
        Column(
            "lines of StableHLO",
            lambda m, rows: ", ".join(f"{each.facts['lines']:,}" for each in (m, _in_nvfp4(m, rows)) if each),
        ),
    ),
    note="Seconds to trace and lower a program of unrolled layers, in a new process each.",
    keep=lambda m: m.dtype == BFLOAT16,
)
DISPATCHES = Lines(
    "Dispatch of many caches", (peer("arguments"), US, SPREAD), note="A jitted function.", keep=lambda m: True
)

ATTENTION_ABOUT = (
    *(CASE, Field("num_heads", "heads"), KV_HEADS, HEAD_SIZE, DTYPE, LAYOUT),
    *(SEQS, SEQ_LEN, Field("q_len", "q len"), Field("window_len", "window len")),
)
SERVED = (CASE, KV_HEADS, HEAD_SIZE, DTYPE)
ADDITIONS = (DTYPE, Field("num_kernels", "kernels"), Field("num_elements", "elements"), TOKENS)
PERCENT = Field("error", "error", words=lambda value: f"{float(value):.2%}")

OPERATIONS = {
    each.name: each
    for each in (
        Operation(
            "attention",
            ATTENTION_ABOUT,
            (PERCENT,),
            ATTENTION,
            short=ATTENTION_SHORT,
            is_headline=True,
        ),
        Operation(
            "ragged attention",
            (*ATTENTION_ABOUT, Field("num_prompts", "prompts"), Field("prefix_len", "shared")),
            (PERCENT,),
            RAGGED,
        ),
        Operation("write", (*WRITE, TOKENS), (CODES_APART,), WRITES, against="num_tokens", is_headline=True),
        Operation("write by cache size", (*WRITE, CACHE_BYTES, TOKENS), (TEMPORARY_BYTES,), against="cache_bytes"),
        Operation(
            "gather",
            (*CACHE, SEQS, SEQ_LEN, TOKENS),
            lines=GATHERS,
            against="num_tokens",
            along=("num_seqs", "seq_len"),
            is_headline=True,
        ),
        Operation("pack", (*WRITE, TOKENS), against="num_tokens"),
        Operation("bridge first call", (*WRITE, CALL, TOKENS), lines=FIRST_CALLS),
        Operation("bridge host", (*WRITE, TOKENS), lines=HOST_TIMES, short=HOST_SHORT, is_headline=True),
        Operation("bridge kernel", (*WRITE, TOKENS), lines=TORCH_KERNELS, against="num_tokens"),
        Operation(
            "bridge replay", (*WRITE, Field("num_writes", "writes"), TOKENS), lines=REPLAYS, against="num_tokens"
        ),
        Operation("bridge replay of add_", ADDITIONS, lines=REPLAYS, against="num_tokens", along=("num_elements",)),
        Operation("host write", (*WRITE, CACHE_BYTES, TOKENS), (TEMPORARY_BYTES,), against="cache_bytes"),
        Operation("copy", (Field("bytes_moved", "bytes moved"),), lines=COPIES, against="bytes_moved"),
        Operation("serve", (*SERVED, SEQS, SEQ_LEN), lines=SERVE, short=SERVE_SHORT, is_headline=True),
        Operation("serve prompts", (*SERVED, KIND, SEQS, SEQ_LEN), lines=PROMPTS),
        Operation("decode step", (CASE, DTYPE, Field("num_layers", "layers"), SEQS, SEQ_LEN), (PERCENT,), STEPS),
        Operation("sharded write", (*WRITE, TOKENS, DEVICES), lines=SHARDED),
        Operation("sharded gather", (*WRITE, TOKENS, DEVICES), lines=SHARDED),
        Operation("step over layers", (*CACHE, LAYERS, CACHE_BYTES), (TEMPORARY_BYTES,), LAYERED),
        Operation("trace and lower", (DTYPE, STEP, LAYERS), lines=TRACED),
        Operation("dispatch", (DTYPE,), lines=DISPATCHES),
    )
}
"""By name, the first ones first on a page."""
