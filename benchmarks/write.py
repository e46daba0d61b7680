"""How long `reshape_and_cache_flash` takes, next to what a user would pick instead and to a copy of as many bytes.

`python -m benchmarks.write --json=write.json`, from the source tree; benchmarks/README.md explains the tables.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from absl import flags
from absl.testing import absltest

from benchmarks import bars, compare, output, shapes, workload
from benchmarks.bars import WriteTime
from benchmarks.output import Measurement
from benchmarks.peers import writes
from benchmarks.peers.in_jax import KVJAX, KVJAX_ANY_SLOTS, KVJAX_IN_XLA
from benchmarks.peers.inputs import WriteInputs
from benchmarks.peers.peer import Peer
from benchmarks.shapes import LLAMA_8B, LLAMA_70B_SHARD, OTHER_CASES, Slots
from benchmarks.workload import WriteJob
from kvjax import STORED_KV_CACHE_DTYPES, CacheLayout, KVCacheDType

NHD, HND = CacheLayout

CASES = output.define_some("cases", shapes.CASES_BY_NAME, "shapes to time writes of")
NUM_TOKENS = output.define_numbers("tokens", "tokens in a write", least=1)
DTYPES = output.define_some("dtypes", [dtype.value for dtype in STORED_KV_CACHE_DTYPES], "dtypes of the caches")
LAYOUTS = output.define_some("layouts", [*CacheLayout], "layouts of the caches")
SLOTS = output.define_some("slots", [*Slots], "where the tokens go")
FULL = flags.DEFINE_bool("full", False, "every case with every dtype, layout, kind of slots and number of tokens")
PEERS = compare.define_peers(writes.PEERS)

CACHE_SIZE_CASE = shapes.Case("small", 2, 64)
"""The largest of its caches takes 1 GiB in float32, which any machine has."""

CACHE_SIZE_TOKENS = 256
CACHE_SIZES, SMOKE_CACHE_SIZES = (64, 4_096, 65_536), (16,)
NUM_BLOCKS = output.define_numbers(
    "blocks",
    "pages of the caches whose size is varied (default: 64 to 65,536)",
    least=CACHE_SIZE_TOKENS // shapes.BLOCK_SIZE,
)

VARIANTS = (KVJAX_ANY_SLOTS, KVJAX_IN_XLA)
"""What kvjax would be without a promise or without its kernel; one case tells."""

HOST_TOKENS, HOST_FEW_TOKENS = (1, 64, 1_024), (64,)
"""Without a GPU, in place of `shapes.ALL_TOKENS` and `shapes.FEW_TOKENS`."""


@dataclasses.dataclass(frozen=True)
class Matrix:
    """Jobs: each of these with each."""

    cases: Sequence[shapes.Case] = (LLAMA_8B,)
    slots: Sequence[Slots] = (Slots.SCATTERED,)
    num_tokens: Sequence[int] = shapes.ALL_TOKENS
    layouts: Sequence[CacheLayout] = (NHD,)
    dtypes: Sequence[KVCacheDType] = shapes.TIMED_DTYPES

    def jobs(self) -> list[WriteJob]:
        """Those of one case and of one number of tokens together."""
        product = itertools.product(self.cases, self.slots, self.num_tokens, self.layouts, self.dtypes)
        return [WriteJob(case, dtype, num_tokens, layout, slots) for case, slots, num_tokens, layout, dtype in product]


def matrices() -> list[Matrix]:
    """What is timed where no flag says otherwise: all sizes of one model, and two of all else."""
    many, few = (shapes.ALL_TOKENS, shapes.FEW_TOKENS) if workload.is_gpu() else (HOST_TOKENS, HOST_FEW_TOKENS)
    if output.SMOKE.value:
        small = Matrix(cases=(shapes.GPT_OSS_20B,), num_tokens=(8,))
        return [small, dataclasses.replace(small, slots=(Slots.PADDED,), layouts=(HND,))]
    if FULL.value:
        return [Matrix(shapes.CASES, tuple(Slots), many, tuple(CacheLayout), STORED_KV_CACHE_DTYPES)]
    return [
        Matrix(num_tokens=many, layouts=(NHD, HND)),
        Matrix(num_tokens=few, dtypes=shapes.OTHER_DTYPES),
        Matrix(num_tokens=many[-1:], dtypes=(KVCacheDType.NVFP4_4OVER6,)),
        Matrix(num_tokens=few, slots=(Slots.CONTIGUOUS, Slots.PADDED)),
        Matrix((LLAMA_70B_SHARD,), num_tokens=(1, *few, shapes.ALL_TOKENS[-1]) if workload.is_gpu() else few),
        Matrix(OTHER_CASES, num_tokens=few),
    ]


def jobs() -> list[WriteJob]:
    """What is timed: each flag that was given takes the place of what the matrices say."""
    given = {
        "cases": [shapes.CASES_BY_NAME[name] for name in CASES.value or ()],
        "slots": [*map(Slots, SLOTS.value or ())],
        "num_tokens": output.numbers(NUM_TOKENS),
        "layouts": [*map(CacheLayout, LAYOUTS.value or ())],
        "dtypes": [*map(KVCacheDType, DTYPES.value or ())],
    }
    changes = {name: values for name, values in given.items() if values}
    found = itertools.chain.from_iterable(dataclasses.replace(each, **changes).jobs() for each in matrices())  # type: ignore[arg-type]
    return [*dict.fromkeys(found)]


class WriteBenchmark(output.Program):
    """Fails where bytes are wrong, never because of a time."""

    name = "benchmarks.write"

    def test_cache_sizes(self) -> None:
        sizes = output.numbers(NUM_BLOCKS) or (SMOKE_CACHE_SIZES if output.SMOKE.value else CACHE_SIZES)
        peers = compare.present(self.results, [KVJAX], None)
        wanted = [
            WriteJob(CACHE_SIZE_CASE, dtype, CACHE_SIZE_TOKENS, num_blocks=num_blocks)
            for num_blocks, dtype in itertools.product(
                sizes, shapes.TIMED_DTYPES if output.SMOKE.value else STORED_KV_CACHE_DTYPES
            )
        ]
        measured = writes.measure(self, "write by cache size", wanted, peers)
        add_cache_sizes(self.results, {job: each["kvjax"] for job, each in measured.items() if "kvjax" in each})

    def test_token_counts(self) -> None:
        peers = compare.present(self.results, writes.PEERS, PEERS.value)
        if PEERS.value is None and not FULL.value:
            peers = [for_one_case(peer) if peer in VARIANTS else peer for peer in peers]
        measured = writes.measure(self, "write", jobs(), peers)
        add_token_counts(self.results, [line for job, each in measured.items() if (line := write_time(job, each))])
        columns = ["case", "dtype", "layout", "slots", "num_tokens"]
        compare.peer_table(self.results, "Time of a write, by who makes it", measured, columns)


def for_one_case(peer: Peer[WriteJob, WriteInputs]) -> Peer[WriteJob, WriteInputs]:
    return dataclasses.replace(peer, serves=lambda job: job.case is LLAMA_8B and job.layout is NHD)


def write_time(job: WriteJob, measured: dict[str, Measurement]) -> WriteTime | None:
    """What the bars are about; `None` where kvjax was not measured."""
    if "kvjax" not in measured:
        return None
    own = measured["kvjax"]
    cuda, fitted = (measured[name].seconds if name in measured else None for name in ("CUDA", "CUDA fitted"))
    return WriteTime(
        case=job.case.name,
        num_kv_heads=job.case.num_kv_heads,
        head_size=job.case.head_size,
        dtype=job.dtype,
        layout=job.layout,
        slots=job.slots,
        num_tokens=job.num_tokens,
        seconds=own.seconds,
        samples=own.times.samples,
        clock=own.clock,
        kernels=own.times.kernels,
        bytes_moved=job.bytes_moved,
        copy_seconds=own.copy_seconds,
        cuda_seconds=cuda,
        cuda_fitted_seconds=fitted,
    )


def add_cache_sizes(to: output.Report, cells: dict[WriteJob, Measurement]) -> None:
    """Adds the table of times by the cache's size, a line for each dtype."""
    by_size = {(job.dtype, job.num_blocks): cell for job, cell in cells.items()}
    sizes = [*dict.fromkeys(job.num_blocks for job in cells if job.num_blocks)]

    def line(dtype: KVCacheDType) -> list[str]:
        line_cells = [by_size.get((dtype, size)) for size in sizes]
        temporary = max((cell.facts["temporary_bytes"] for cell in line_cells if cell), default=0)
        times = [
            f"{output.microseconds(cell.seconds)} ({output.spread(cell.times.samples)})" if cell else "-"
            for cell in line_cells
        ]
        return [dtype.value, *times, f"{temporary:,}"]

    case = CACHE_SIZE_CASE
    to.table(
        "Time of a write, by the size of the cache",
        ["dtype", *(f"{size:,} blocks" for size in sizes), "temporary bytes"],
        [line(dtype) for dtype in dict.fromkeys(job.dtype for job in cells)],
        note=f"Microseconds for {CACHE_SIZE_TOKENS} tokens of {case.num_kv_heads} KV heads of {case.head_size},"
        f" {shapes.BLOCK_SIZE} tokens a block, with what nine of ten calls lie between;"
        f" by {output.clocks(cells.values())}.",
    )


def add_token_counts(to: output.Report, lines: Sequence[WriteTime]) -> None:
    """Adds the table of kvjax's times by case, slots, layout, dtype and number of tokens, with the bars."""
    cases, slots, layouts, dtypes = [*shapes.CASES_BY_NAME], [*Slots], [*CacheLayout], [*KVCacheDType]
    lines = sorted(
        lines,
        key=lambda line: (
            cases.index(line.case),
            slots.index(line.slots),
            layouts.index(line.layout),
            dtypes.index(line.dtype),
        ),
    )
    bar_columns = [bar_words(line, lines) for line in lines]
    header = ["case", "dtype", "layout", "slots", "tokens", "us", "5-95%", "MB moved", "GB/s", "of copy"]
    to.table(
        "Time of a write, by the number of tokens",
        [*header, "CUDA us", "fitted us", "x CUDA", "kernels", "bar", "reached"],
        [[*line_words(line), *words] for line, words in zip(lines, bar_columns, strict=True)],
        left=4,
        note=f"kvjax, bfloat16 tokens, {shapes.BLOCK_SIZE} tokens a block; by"
        f" {' and '.join(dict.fromkeys(line.clock.words for line in lines))}."
        + bars.summary([reached for _, reached in bar_columns]),
    )


def line_words(line: WriteTime) -> list[str]:
    return [
        line.case,
        line.dtype.value,
        line.layout.value,
        line.slots.value,
        f"{line.num_tokens:,}",
        output.microseconds(line.seconds),
        output.spread(line.samples),
        *output.rate(line.seconds, line.bytes_moved),
        output.share(line.copy_share),
        output.microseconds(line.cuda_seconds),
        output.microseconds(line.cuda_fitted_seconds),
        "-" if line.cuda_ratio is None else f"{line.cuda_ratio:.2f}",
        str(len(line.kernels) or "-"),
    ]


def bar_words(line: WriteTime, lines: Sequence[WriteTime]) -> tuple[str, str]:
    bar = bars.bar_of(line)
    value = None if bar is None else bars.value_of(bar.measure, line, lines)
    return str(bar or "-"), bars.verdict(bar, value, line.clock)


if __name__ == "__main__":
    absltest.main()
