"""How long `reshape_and_cache_flash` takes: whatever the cache's size, and next to a copy and to plain CUDA.

`python -m benchmarks.write --json=write.json`, from the source tree; docs/benchmarks.md explains the tables.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import ClassVar

import jax
from absl import flags
from absl.testing import absltest

from benchmarks import bars, output, shapes, timing, workload
from benchmarks.bars import WriteTime
from benchmarks.peers import cuda
from benchmarks.peers.copy import copy_seconds
from kvjax import STORED_KV_CACHE_DTYPES, CacheLayout, KVCache, KVCacheDType

CASES = flags.DEFINE_list("cases", list(shapes.CASES_BY_NAME), "shapes to time writes of")
NUM_TOKENS = output.define_numbers(
    "tokens", "tokens in a write (default: those of each case; without a GPU, few)", least=1
)
QUICK = flags.DEFINE_bool("quick", False, "the first of the cases alone, NHD only, in few sizes")
flags.register_validator(
    "cases", lambda names: names and {*names} <= {*shapes.CASES_BY_NAME}, f"expected some of {[*shapes.CASES_BY_NAME]}"
)

CACHE_SIZE_CASE = shapes.Case("small", 2, 64)
"""The largest of its caches takes 1 GiB in float32, which any machine has."""

CACHE_SIZE_TOKENS = 256
CACHE_SIZES = (64, 1_024, 16_384, 65_536)
QUICK_CACHE_SIZES = (64, 4_096)
NUM_BLOCKS = output.define_numbers(
    "blocks",
    "pages of the caches whose size is varied (default: 64 to 65,536)",
    least=CACHE_SIZE_TOKENS // shapes.BLOCK_SIZE,
)

QUICK_TOKENS = (1, 256, 16_384)
HOST_TOKENS = (1, 64, 256)


@dataclasses.dataclass(frozen=True)
class CacheSizeTime:
    """One cell of the table of cache sizes.

    `temporary_bytes` is what the compiled write needs beside its arguments and its result.
    """

    dtype: KVCacheDType
    num_blocks: int
    cache_bytes: int
    num_tokens: int
    seconds: float
    clock: timing.Clock
    temporary_bytes: int


def time_cache_size(dtype: KVCacheDType, num_blocks: int) -> CacheSizeTime:
    """Checks, then times a donated write of `CACHE_SIZE_TOKENS` tokens into a cache of so many pages."""
    spec = CACHE_SIZE_CASE.spec(dtype)
    tokens = workload.Tokens(CACHE_SIZE_CASE, CACHE_SIZE_TOKENS, num_blocks, workload.HOST_ROTATION_BYTES)
    write = workload.Write(tokens.poisoned(spec), tokens.batches(CACHE_SIZE_TOKENS), output.IMPLEMENTATION.value)
    workload.check_first_write(write, tokens.expected(spec, CACHE_SIZE_TOKENS))
    timed = timing.measure(write)
    return CacheSizeTime(
        dtype=dtype,
        num_blocks=num_blocks,
        cache_bytes=num_blocks * spec.page_size_bytes,
        num_tokens=CACHE_SIZE_TOKENS,
        seconds=timed.seconds,
        clock=timed.clock,
        temporary_bytes=write.temporary_bytes,
    )


def selected_cases() -> list[shapes.Case]:
    """The cases that the flags ask for, each with the numbers of tokens and the layouts to time."""
    cases = [shapes.CASES_BY_NAME[name] for name in CASES.value]
    if QUICK.value:
        cases = [dataclasses.replace(cases[0], layouts=(CacheLayout.NHD,), num_tokens=QUICK_TOKENS)]
    num_tokens = output.numbers(NUM_TOKENS) or (None if workload.is_gpu() else HOST_TOKENS)
    return [dataclasses.replace(case, num_tokens=num_tokens or case.num_tokens) for case in cases]


def time_write(
    tokens: workload.Tokens,
    batches: Sequence[workload.Batch],
    case: shapes.Case,
    dtype: KVCacheDType,
    layout: CacheLayout,
) -> WriteTime:
    """Checks, then times the writes of `batches` and all that they are held against."""
    spec = case.spec(dtype, layout)
    num_tokens = len(batches[0].slot_mapping)
    expected = tokens.expected(spec, num_tokens)
    write = workload.Write(tokens.poisoned(spec), batches, output.IMPLEMENTATION.value)
    workload.check_first_write(write, expected)
    timed = timing.measure(write)
    moved = workload.bytes_moved(spec, num_tokens)
    line = WriteTime(
        case=case.name,
        num_kv_heads=case.num_kv_heads,
        head_size=case.head_size,
        dtype=dtype,
        layout=layout,
        num_tokens=num_tokens,
        seconds=timed.seconds,
        clock=timed.clock,
        kernels=timed.kernels,
        temporary_bytes=write.temporary_bytes,
        bytes_moved=moved,
        copy_seconds=copy_seconds(moved),
    )
    if not (cuda.is_available() and cuda.serves(spec)):
        return line
    return dataclasses.replace(
        line,
        cuda_seconds=time_cuda(tokens.poisoned(spec), batches, expected, cuda.vllm_threads),
        cuda_fitted_seconds=time_cuda(tokens.poisoned(spec), batches, expected, cuda.fitted_threads),
    )


def time_cuda(cache: KVCache, batches: Sequence[workload.Batch], expected: KVCache, threads: cuda.ThreadCount) -> float:
    """Checks, then times the same writes by the plain CUDA kernel."""
    scales = workload.scales()

    def write(number: int) -> None:
        cuda.reshape_and_cache(*batches[number % len(batches)], cache, **scales, threads=threads)

    jax.block_until_ready((cache, batches, scales))
    write(0)
    cuda.synchronize()
    workload.check_same_bits(cache.kv, expected.kv)
    return timing.measure(write, wait=cuda.synchronize).seconds


class WriteBenchmark(absltest.TestCase):
    """Fails where bytes are wrong, never because of a time."""

    results: ClassVar[output.Report]

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.results = output.Report("benchmarks.write")

    @classmethod
    def tearDownClass(cls) -> None:
        cls.results.finish()
        super().tearDownClass()

    def test_cache_sizes(self) -> None:
        sizes = output.numbers(NUM_BLOCKS) or (QUICK_CACHE_SIZES if QUICK.value else CACHE_SIZES)
        cells = []
        for dtype, num_blocks in itertools.product(STORED_KV_CACHE_DTYPES, sizes):
            with self.subTest(dtype=dtype.value, num_blocks=num_blocks):
                cells.append(time_cache_size(dtype, num_blocks))
                output.progress(f"{dtype.value}, {num_blocks:,} blocks: {output.microseconds(cells[-1].seconds)} us")
        add_cache_sizes(self.results, cells)

    def test_token_counts(self) -> None:
        lines = []
        for case in selected_cases():
            tokens = workload.make_tokens(case, max(case.num_tokens))
            for num_tokens in case.num_tokens:
                batches = tokens.batches(num_tokens)
                for dtype, layout in itertools.product(shapes.TIMED_DTYPES, case.layouts):
                    with self.subTest(case=case.name, dtype=dtype.value, layout=layout, num_tokens=num_tokens):
                        line = time_write(tokens, batches, case, dtype, layout)
                        output.progress(" ".join([*line_words(line), *line_numbers(line)]))
                        lines.append(line)
        add_token_counts(self.results, lines)


def add_cache_sizes(to: output.Report, cells: Sequence[CacheSizeTime]) -> None:
    """Adds the table of times by the cache's size, a line for each dtype."""
    by_size = {(cell.dtype, cell.num_blocks): cell for cell in cells}
    sizes = list(dict.fromkeys(cell.num_blocks for cell in cells))

    def line(dtype: KVCacheDType) -> list[str]:
        line_cells = [by_size.get((dtype, size)) for size in sizes]
        temporary = max((cell.temporary_bytes for cell in line_cells if cell), default=0)
        times = [output.microseconds(cell.seconds if cell else None) for cell in line_cells]
        return [dtype.value, *times, f"{temporary:,}"]

    case = CACHE_SIZE_CASE
    to.add(
        "cache_sizes",
        "Time of a write, by the size of the cache",
        ["dtype", *(f"{size:,} blocks" for size in sizes), "temporary bytes"],
        [line(dtype) for dtype in dict.fromkeys(cell.dtype for cell in cells)],
        cells,
        note=f"Microseconds for {CACHE_SIZE_TOKENS} tokens of {case.num_kv_heads} KV heads of {case.head_size},"
        f" {shapes.BLOCK_SIZE} tokens a block; by {output.clocks(cells)}.",
    )


def add_token_counts(to: output.Report, lines: Sequence[WriteTime]) -> None:
    """Adds the table of times by case, layout, dtype and number of tokens."""
    cases, dtypes = [*shapes.CASES_BY_NAME], [*shapes.TIMED_DTYPES]
    lines = sorted(
        lines, key=lambda line: (cases.index(line.case), line.layout is CacheLayout.HND, dtypes.index(line.dtype))
    )
    bar_columns = [bar_words(line, lines) for line in lines]
    header = ["case", "dtype", "layout", "tokens", "us", "MB moved", "GB/s", "of copy", "CUDA us", "fitted us"]
    to.add(
        "token_counts",
        "Time of a write, by the number of tokens",
        [*header, "x CUDA", "kernels", "bar", "reached"],
        [[*line_words(line), *line_numbers(line), *words] for line, words in zip(lines, bar_columns, strict=True)],
        lines,
        left=3,
        note=f"bfloat16 tokens, random slots, {shapes.BLOCK_SIZE} tokens a block; by {output.clocks(lines)}."
        + bars.summary([reached for _, reached in bar_columns]),
    )


def line_words(line: WriteTime) -> list[str]:
    return [line.case, line.dtype.value, line.layout.value]


def line_numbers(line: WriteTime) -> list[str]:
    return [
        f"{line.num_tokens:,}",
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
