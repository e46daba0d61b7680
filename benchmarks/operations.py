"""The timed operations: the fields of their measurements, and the columns of their tables."""

from __future__ import annotations

from benchmarks import bars, shapes
from benchmarks.bars import BFLOAT16, FP8, NVFP4, by
from benchmarks.measurement import OWN, Column, Measurement, Other, Rows, fact
from benchmarks.tables import Lines, Operation, about

CACHE = ("case", "num_kv_heads", "head_size", "dtype", "layout")
WRITE = (*CACHE, "slots")
CODES_APART = fact("codes apart", "codes_apart", form="{:,}")
TEMPORARY_BYTES = fact("temporary bytes", "temporary_bytes", form="{:,}")
ERROR = fact("error", "error", form="{:.2%}")


def peer(heading: str) -> Column:
    return Column(heading, lambda m, _: m.peer, "{}", is_text=True)


US = Column("us", lambda m, _: m.seconds * 1e6)
MS = Column("step, ms", lambda m, _: m.seconds * 1e3, "{:,.3g}")
SPREAD = Column("5-95%", lambda m, _: "-".join(f"{each * 1e6:,.2f}" for each in m.times.spread), "{}")
KERNELS = Column("kernels", lambda m, _: len(m.times.kernels) or None, "{}")
KERNEL_US = fact("kernel us", "kernel_seconds", 1e6)
PEER = peer("")
MEGABYTES = Column("MB moved", lambda m, _: (m.bytes_moved or 0) / 1e6, "{:,.3f}")
RATE = Column("GB/s", lambda m, _: (m.bytes_per_second or 0) / 1e9, "{:,.4g}")
TIMES = (US, SPREAD, MEGABYTES, RATE)
BAR = Column("bar", lambda m, _: ", ".join(map(str, bars.of(m))) or None, "{}")
BARS = BAR.named("bars")
REACHED = Column("reached", lambda m, rows: "; ".join(bars.verdicts(m, rows)) or None, "{}")
CASE, DTYPE, TOKENS = about("case"), about("dtype"), about("num_tokens")


WRITES = Lines(
    "Time of a write, by the number of tokens",
    (
        *(CASE, DTYPE, about("layout"), about("slots"), TOKENS, *TIMES, bars.OF_COPY),
        *(US.of("CUDA us", by("CUDA")), US.of("fitted us", by("CUDA fitted")), bars.X_CUDA),
        *(KERNELS, BAR, REACHED),
    ),
    note=f"kvjax, bfloat16 tokens, {shapes.BLOCK_SIZE} tokens a block.",
    order=("case", "slots", "layout", "dtype"),
)
GATHERS = Lines(
    "Time of a gather",
    (
        *(CASE, DTYPE, about("layout"), about("num_seqs", "sequences"), about("seq_len")),
        *(*TIMES, bars.OF_COPY, KERNELS, BAR, REACHED),
    ),
    note="kvjax, into bfloat16.",
)
COPIES = Lines(
    "Time of a copy",
    (
        *(Column("copied by", lambda m, _: m.facts.get("way"), "{}", is_text=True), *TIMES),
        *(bars.OF_COPY.named("of the fastest"), Column("clock", lambda m, _: m.clock, "{}")),
    ),
    note="Bytes read plus bytes written.",
    keep=lambda _: True,
)
FIRST_CALLS = Lines(
    "Time of the first call, which compiles",
    (
        *(about("call"), DTYPE, about("num_kv_heads"), Column("first ms", lambda m, _: m.seconds * 1e3)),
        fact("second ms", "second_seconds", 1e3),
    ),
    note="Until the result is there.",
    keep=lambda _: True,
)
HOST_TIMES = Lines(
    "Time that a call keeps the host",
    (
        *(peer("call"), US, SPREAD, bars.X_INDEX_COPY),
        Column("host waits", lambda m, _: {True: "yes", False: "no", None: None}[m.facts.get("waits")], "{}"),
        *(BAR, REACHED),
    ),
    note="64 tokens of 8 KV heads of 128, NVFP4, int64 slots.",
    keep=lambda _: True,
)
HOST_SHORT = Lines("Calls from torch", HOST_TIMES.columns[:5], HOST_TIMES.note, HOST_TIMES.keep)
TWO_STREAMS = ", two streams"


def _two_streams(m: Measurement, rows: Rows) -> Measurement | None:
    return rows.like(m, peer=m.peer + TWO_STREAMS)


REPLAYS = Lines(
    "Time of a CUDA graph of writes",
    (
        *(DTYPE, TOKENS, US, SPREAD, US.of("2 streams us", _two_streams), KERNEL_US, bars.X_KERNELS),
        *(bars.X_KERNELS.of("2 streams x", _two_streams), BAR, REACHED),
    ),
    note="Of one replay among several in a row, where torch uses one stream; then again, when it has used a second.",
    keep=lambda m: not m.peer.endswith(TWO_STREAMS),
)
TORCH_KERNELS = Lines(
    "Time of a write's kernels, from torch and under jit",
    (
        *(DTYPE, TOKENS, US, SPREAD, US.of("us under jit", by(OWN)), SPREAD.of("5-95% under jit", by(OWN))),
        *(bars.X_JIT, KERNELS, KERNELS.of("under jit", by(OWN)), BAR, REACHED),
    ),
    note="The same tokens, slots and pages, int32 slots.",
    keep=lambda m: m.peer != OWN,
    order=("dtype",),
)

READ_SHARE = bars.OF_READING.named("share")
VARIANTS = (OWN, "kvjax xla", "kvjax_torch", bars.NO_CASCADE, bars.READ)  # excluded from the alternatives


def _next_best(m: Measurement, rows: Rows) -> Measurement | None:
    of_row = rows.find(case=m.subject["case"], dtype=m.dtype)
    return Rows(each for each in of_row if each.peer not in VARIANTS).fastest


_OF_ROW = (about("case", "row"), DTYPE, US, SPREAD)
_BEST = (
    *(PEER.of("next best", _next_best), US.of("its us", _next_best)),
    *(PEER.of("fastest bf16", bars.fastest_bfloat16), US.of("bf16 us", bars.fastest_bfloat16)),
    *(bars.TIMES_BFLOAT16.named("times as fast"), BARS, REACHED),
)
ATTENTION = Lines(
    "Time of attention",
    (*_OF_ROW, US.of("reading us", by(bars.READ)), READ_SHARE, *_BEST),
    note="A row is sequences x tokens of each, 32 query heads over 8 KV heads of 128, one query token a sequence, NHD,"
    " where its name says nothing else. Share: of the rate of a kernel that only reads as many bytes as the pages hold."
    " Next best: the fastest of the others in the same row and dtype. Fastest bf16: of anyone in this run, kvjax"
    " included, and how many times as fast kvjax is in this dtype.",
)
RAGGED = Lines(
    "Time of attention in a step",
    (*_OF_ROW, US.of("from torch us", by("kvjax_torch")), US.of("no cascade us", by(bars.NO_CASCADE)), *_BEST),
    note="32 query heads over 8 KV heads of 128, NHD. chunk: 2,048 new tokens behind 6,144; chunks: 8 x (512 behind"
    " 3,584); whole: 8,192 new; mixed: 1,024 behind 3,072, and 63 decodes at 4,096; speculative: 64 x (4 behind 4,092);"
    " shared-prefix: 64 decodes at 8,448, of which 8,192 are shared and read once, or by each sequence alone;"
    " chunk-soft-cap: chunk with logits_soft_cap=50; chunk-window-1024: chunk with a window of 1,024;"
    " chunk-heads-of-64 and others: chunk with this head size.",
)


def _in(dtype: str) -> Column:
    whole = Column("", lambda m, rows: f"{US.text(m, rows)} ({READ_SHARE.text(m, rows)})", "{}")
    return whole.of(f"kvjax, {dtype}", by(OWN, dtype=dtype))


_NAMED = Column("", lambda m, rows: f"{m.peer}: {US.text(m, rows)}", "{}")
ATTENTION_SHORT = Lines(
    "Attention decode",
    (
        *(about("case", "sequences x tokens"), _NAMED.of("fastest other, bfloat16", _next_best)),
        *map(_in, (BFLOAT16, FP8, NVFP4)),
    ),
    note="Microseconds of a call, and the share of the rate of a kernel that only reads as many bytes as the pages"
    " hold. 32 query heads over 8 KV heads of 128, one query token a sequence, NHD, unless a row is named otherwise.",
    keep=lambda m: m.peer == OWN and m.dtype == BFLOAT16,
)


def _of_a_dense_layer(m: Measurement, _: Rows) -> float | None:
    taken = m.facts.get("step_bytes")
    return None if taken is None else taken / m.facts["dense_layer_bytes"]


STEPS = Lines(
    "Time of a decode step",
    (
        *(about("case", "sequences"), DTYPE, peer("cache, attention"), US, SPREAD),
        *(KERNEL_US.named("kernels us"), bars.X_DYNAMIC_CACHE),
        *(fact("MiB of a step", "step_bytes", 2**-20, "{:,.1f}"), Column("of a dense layer", _of_a_dense_layer)),
        *(BAR, REACHED),
    ),
    note="A model of 8 layers of Llama-3.1-8B with random weights in bfloat16 (without a GPU, of tiny ones); a step of"
    " `generate` without its bookkeeping, mask of ones included. Kernels by device timestamps. MiB: the most that torch"
    " holds in a step beside what is there before.",
    keep=lambda _: True,
)

_SEQUENCES = about("num_seqs", "sequences", is_text=True)
_ROW = Column("row", lambda m, _: m.facts.get("rows") or None, "{}", is_text=True)
_TOKENS_A_SECOND = Column("tokens a second", lambda m, _: bars.tokens_a_second(m), "{:,.0f}")
_X_STEP = bars.X_BFLOAT16.named("x bf16's step")
SERVE = Lines(
    "Tokens a second",
    (
        *(DTYPE, _SEQUENCES, _ROW, peer("by"), _TOKENS_A_SECOND, MS),
        Column("5-95%", lambda m, _: "-".join(f"{each * 1e3:,.3g}" for each in m.times.spread), "{}"),
        *(bars.X_TOKENS, _X_STEP, fact("reading, ms", "read_ns", 1e-6, "{:,.3g}"), bars.X_READING),
        *(fact("host, ms", "host_ns", 1e-6, "{:,.3g}"), bars.EXPOSED.named("exposed"), BARS, REACHED),
    ),
    note="A step decodes one token of each sequence. Reading: the time that weights and pages take at the rate of a"
    " kernel that only reads. Host: for how long the host is busy in a step while the device works on the one before;"
    " exposed: what a step of the engine takes beyond a step without synchronization, as a share of it."
    " kvjax's steps are those of an engine, from one step's tokens to the next's; peers run without an engine"
    " and without synchronization.",
    keep=lambda _: True,
    order=("dtype", "num_seqs"),
)
SERVE_SHORT = Lines(
    "Tokens a second",
    (DTYPE, _SEQUENCES, _ROW, peer("by"), _TOKENS_A_SECOND, bars.X_TOKENS, MS, _X_STEP),
    note="Decode steps of Llama-3.1-8B's shape, random weights in bfloat16, caches of 40 GiB full of sequences of 8,192"
    " tokens, except the last tokens.",
    keep=lambda m: bool(m.facts.get("rows")),
    order=SERVE.order,
)
PROMPTS = Lines(
    "Requests with prompts",
    (
        *(DTYPE, about("steps"), MS, fact("generated a second", "generated_a_second", form="{:,}")),
        fact("prompt tokens a second", "prompt_tokens_a_second", form="{:,}"),
    ),
    note="Twice as many requests as run at a time, each with a prompt of its own; at most one chunk of a prompt a step"
    " beside the decodes. Times of whole steps.",
)


def _sharded(devices_differ: bool, clock_differs: bool) -> Other:
    """Selects the same measurement on several devices, or by the host's clock around back-to-back calls."""

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
        *(Column("operation", lambda m, _: m.operation, "{}", is_text=True), DTYPE, TOKENS),
        *(US, US.of("us of several", _MANY), bars.speed("ratio", _MANY), US.of("host us", _sharded(False, True))),
        US.of("host us of several", _sharded(True, True)),
    ),
    note="The same KV heads on each device; of several devices a time is that of one of them. `host` is the time from a"
    " call to the next.",
    keep=lambda m: m.subject["devices"] == 1 and "in_a_row" not in m.facts,
)

SCAN, UNROLLED, SEPARATE = "one cache, scan", "one cache, unrolled", "a cache a layer, unrolled"


def _fastest_unrolled(m: Measurement, rows: Rows) -> Measurement | None:
    return Rows(other for name in (UNROLLED, SEPARATE) if (other := rows.like(m, peer=name))).fastest


LAYERED = Lines(
    "Time of a step over layers",
    (
        *(DTYPE, Column(SCAN, US.value), US.of(UNROLLED, by(UNROLLED)), US.of(SEPARATE, by(SEPARATE))),
        bars.multiple("ratio", _fastest_unrolled),
    ),
    note="Microseconds of a step. A layer writes a token of each sequence and gathers them, all of its pages. The ratio"
    " is that of the scan to the faster of the others.",
    keep=lambda m: m.peer == SCAN,
)

_SECONDS, _NVFP4 = Column(BFLOAT16, lambda m, _: m.seconds, "{:.3f}"), by("kvjax", dtype=NVFP4)
_LINES = fact("", "lines", form="{:,}")
_LINES_NVFP4 = _LINES.of("", _NVFP4)
TRACED = Lines(
    "Tracing and lowering",
    (
        *(about("step"), _SECONDS, _SECONDS.of(NVFP4, _NVFP4), bars.speed("ratio", _NVFP4)),
        Column("lines of StableHLO", lambda m, rows: f"{_LINES.text(m, rows)}, {_LINES_NVFP4.text(m, rows)}", "{}"),
    ),
    note="Seconds to trace and lower a program of unrolled layers, in a new process each.",
    keep=lambda m: m.dtype == BFLOAT16,
)
DISPATCHES = Lines(
    "Dispatch of many caches", (peer("arguments"), US, SPREAD), note="A jitted function.", keep=lambda _: True
)

ATTENTION_ABOUT = (
    *("case", "num_heads", "num_kv_heads", "head_size", "dtype", "layout"),
    *("num_seqs", "seq_len", "q_len", "window_len"),
)
STEP_ABOUT = "num_prompts", "prefix_len", "logits_soft_cap"
SERVED = ("case", "num_kv_heads", "head_size", "dtype")

VLLM_FIELDS = ("case", "dtype", "layers", "num_seqs", "seq_len")
VLLM = Lines(
    "vLLM's engine",
    (
        *(CASE, DTYPE, PEER.named("backend"), about("layers"), about("num_seqs"), about("seq_len")),
        *(MS, fact("tokens/s", "tokens_a_second", form="{:,}")),
        fact("prompt tokens/s", "prompt_tokens_a_second", form="{:,}"),
        *(fact("ready s", "ready", form="{:.1f}"), fact("again s", "ready_again", form="{:.1f}")),
        *(fact("tokens that fit", "kv_tokens", form="{:,}"), fact("drafts accepted", "accepted", form="{:.2f}")),
    ),
    note="A step is of all sequences, after their prompts; `ready` is from the import of vLLM to the first request.",
    keep=lambda _: True,
)

OPERATIONS = {
    each.name: each
    for each in (
        Operation("attention", ATTENTION_ABOUT, (ERROR,), ATTENTION, short=ATTENTION_SHORT, is_headline=True),
        Operation("ragged attention", (*ATTENTION_ABOUT, *STEP_ABOUT), (ERROR,), RAGGED),
        Operation("write", (*WRITE, "num_tokens"), (CODES_APART,), WRITES, against="num_tokens", is_headline=True),
        Operation(
            "write by cache size", (*WRITE, "cache_bytes", "num_tokens"), (TEMPORARY_BYTES,), against="cache_bytes"
        ),
        Operation(
            "gather",
            (*CACHE, "num_seqs", "seq_len", "num_tokens"),
            lines=GATHERS,
            against="num_tokens",
            along=("num_seqs", "seq_len"),
            is_headline=True,
        ),
        Operation("pack", (*WRITE, "num_tokens"), against="num_tokens"),
        Operation("bridge first call", (*WRITE, "call", "num_tokens"), lines=FIRST_CALLS),
        Operation("bridge host", (*WRITE, "num_tokens"), lines=HOST_TIMES, short=HOST_SHORT, is_headline=True),
        Operation("bridge kernel", (*WRITE, "num_tokens"), lines=TORCH_KERNELS, against="num_tokens"),
        Operation("bridge replay", (*WRITE, "num_writes", "num_tokens"), lines=REPLAYS, against="num_tokens"),
        Operation(
            "bridge replay of add_",
            ("dtype", "num_kernels", "num_elements", "num_tokens"),
            lines=REPLAYS,
            against="num_tokens",
            along=("num_elements",),
        ),
        Operation("host write", (*WRITE, "cache_bytes", "num_tokens"), (TEMPORARY_BYTES,), against="cache_bytes"),
        Operation("copy", ("bytes_moved",), lines=COPIES, against="bytes_moved"),
        Operation("serve", (*SERVED, "num_seqs", "seq_len"), lines=SERVE, short=SERVE_SHORT, is_headline=True),
        Operation("serve prompts", (*SERVED, "steps", "num_seqs", "seq_len"), lines=PROMPTS),
        Operation("vllm", VLLM_FIELDS, lines=VLLM),
        Operation("decode step", ("case", "dtype", "num_layers", "num_seqs", "seq_len"), (ERROR,), STEPS),
        Operation("sharded write", (*WRITE, "num_tokens", "devices"), lines=SHARDED),
        Operation("sharded gather", (*WRITE, "num_tokens", "devices"), lines=SHARDED),
        Operation("step over layers", (*CACHE, "layers", "cache_bytes"), (TEMPORARY_BYTES,), LAYERED),
        Operation("trace and lower", ("dtype", "step", "layers"), lines=TRACED),
        Operation("dispatch", ("dtype",), lines=DISPATCHES),
    )
}
"""By name, in the order of the summary page."""
