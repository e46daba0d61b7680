"""How long `gather_kv` takes to read whole sequences back, dequantized to bfloat16, next to a copy.

`python -m benchmarks.gather --json=gather.json`, from the source tree; docs/benchmarks.md explains the table.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import ClassVar

import jax
import numpy as np
from absl import flags
from absl.testing import absltest

import kvjax
from benchmarks import bars, output, shapes, timing, workload
from benchmarks.peers.copy import copy_seconds
from kvjax import AttentionSpec, KVCache, KVCacheDType, quant
from kvjax.ops.rows import decode_rows, encode_rows

NUM_SEQS = flags.DEFINE_integer("seqs", None, "sequences (default: 64; without a GPU, 4)", lower_bound=1)
SEQ_LEN = flags.DEFINE_integer("seq_len", None, "tokens of each (default: 2,048; without a GPU, 256)", lower_bound=1)

CASE = shapes.LLAMA_8B
OUT_DTYPE = workload.INPUT_DTYPE


@dataclasses.dataclass(frozen=True)
class GatherTime:
    """One line of the table.

    Attributes:
      seconds: median of a gather.
      kernels: what a gather launched; empty by the wall clock.
      bytes_moved: fewest bytes that a gather must read and write.
      copy_seconds: a copy that moves as many, on a GPU.
    """

    dtype: KVCacheDType
    num_seqs: int
    seq_len: int
    seconds: float
    clock: timing.Clock
    kernels: tuple[str, ...]
    bytes_moved: int
    copy_seconds: float | None

    @property
    def copy_share(self) -> float | None:
        """This gather's rate over the copy's."""
        return None if self.copy_seconds is None else self.copy_seconds / self.seconds


def random_block_table(num_seqs: int, seq_len: int) -> np.ndarray:
    """Pages of so many sequences, each page anywhere in a cache that has no others."""
    blocks_a_seq = -(-seq_len // shapes.BLOCK_SIZE)
    return np.random.default_rng(1).permutation(num_seqs * blocks_a_seq).reshape(num_seqs, -1).astype(np.int32)


def random_tokens(spec: AttentionSpec, num_tokens: int) -> tuple[jax.Array, jax.Array]:
    """Keys and values of so many tokens, normal numbers in bfloat16."""
    rng = np.random.default_rng(0)
    shape = (num_tokens, spec.num_kv_heads, spec.head_size)
    distinct = rng.standard_normal(workload.DISTINCT_ELEMENTS, np.float32).astype(workload.INPUT_DTYPE)
    key = np.resize(distinct, shape)
    return jax.device_put((key, key[::-1]))


def filled_cache(spec: AttentionSpec, tokens: tuple[jax.Array, jax.Array], block_table: np.ndarray) -> KVCache:
    """A cache with these tokens in the pages of a block table, sequence after sequence."""
    in_block = np.arange(spec.block_size, dtype=np.int32)
    slot_mapping = (block_table[..., None] * spec.block_size + in_block).reshape(-1)
    cache = KVCache.allocate(spec, block_table.size)
    return workload.write_in_xla(*tokens, cache, slot_mapping, **workload.scales())


def check_gathered(
    spec: AttentionSpec, tokens: tuple[jax.Array, jax.Array], gathered: tuple[jax.Array, ...], seq_len: int
) -> None:
    """Compares gathered keys and values with what the encoding of these tokens decodes to; no page is involved.

    Raises:
      AssertionError: they differ.
    """
    encode = jax.jit(functools.partial(encode_rows, spec=spec))
    decode = jax.jit(lambda rows, scale: quant.cast(decode_rows(rows, spec, scale), OUT_DTYPE))
    for got, x, scale in zip(gathered, tokens, workload.scales().values(), strict=True):
        expected = decode(encode(x, scale=scale), scale).reshape(got.shape)
        workload.check_same_bits(got, expected.at[:, seq_len:].set(0))


def bytes_moved(spec: AttentionSpec, block_table: np.ndarray, seq_len: int) -> int:
    """The fewest bytes that a gather reads and writes: what is stored, the pages' numbers, the dense result."""
    num_seqs, max_blocks = block_table.shape
    elements = spec.num_kv_heads * (spec.head_size + spec.head_size_v)
    read = num_seqs * (seq_len * spec.bytes_per_token + (max_blocks + 1) * block_table.itemsize)
    return read + num_seqs * max_blocks * spec.block_size * elements * OUT_DTYPE.itemsize


def time_gather(dtype: KVCacheDType, num_seqs: int, seq_len: int) -> GatherTime:
    """Checks, then times a gather of sequences of one length."""
    spec = CASE.spec(dtype)
    block_table = random_block_table(num_seqs, seq_len)
    tokens = random_tokens(spec, block_table.size * spec.block_size)
    cache = filled_cache(spec, tokens, block_table)
    gather = jax.jit(functools.partial(kvjax.gather_kv, dtype=OUT_DTYPE, implementation=output.IMPLEMENTATION.value))
    arguments = jax.device_put((cache, block_table, np.full(num_seqs, seq_len, np.int32)))

    def call(_: int) -> tuple[jax.Array, jax.Array]:
        return gather(*arguments, **workload.scales())

    check_gathered(spec, tokens, call(0), seq_len)
    timed = timing.measure(call)
    moved = bytes_moved(spec, block_table, seq_len)
    return GatherTime(
        dtype=dtype,
        num_seqs=num_seqs,
        seq_len=seq_len,
        seconds=timed.seconds,
        clock=timed.clock,
        kernels=timed.kernels,
        bytes_moved=moved,
        copy_seconds=copy_seconds(moved),
    )


def bar_of(line: GatherTime) -> bars.Bar | None:
    """The bar that a line is held to: there are some for one size only."""
    if (line.num_seqs, line.seq_len) != bars.GATHER_SIZE:
        return None
    return bars.Bar(bars.Measure.COPY, bars.GATHER_COPY_SHARES[line.dtype])


class GatherBenchmark(absltest.TestCase):
    """Fails where values are wrong, never because of a time."""

    results: ClassVar[output.Report]

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.results = output.Report("benchmarks.gather")

    @classmethod
    def tearDownClass(cls) -> None:
        cls.results.finish()
        super().tearDownClass()

    def test_dtypes(self) -> None:
        default_seqs, default_len = bars.GATHER_SIZE if jax.default_backend() == "gpu" else (4, 256)
        num_seqs, seq_len = NUM_SEQS.value or default_seqs, SEQ_LEN.value or default_len
        lines = []
        for dtype in shapes.TIMED_DTYPES:
            with self.subTest(dtype=dtype.value):
                lines.append(time_gather(dtype, num_seqs, seq_len))
                output.progress(" ".join(line_words(lines[-1])))
        words = [line_words(line) for line in lines]
        self.results.add(
            "gathers",
            "Time of a gather",
            ["dtype", "us", "MB moved", "GB/s", "of copy", "kernels", "bar", "reached"],
            words,
            lines,
            note=f"{num_seqs} sequences of {seq_len:,} tokens, {CASE.num_kv_heads} KV heads of {CASE.head_size}, into"
            f" bfloat16; by {output.clocks(lines)}.{bars.summary([line[-1] for line in words])}",
        )


def line_words(line: GatherTime) -> list[str]:
    bar = bar_of(line)
    return [
        line.dtype.value,
        *output.rate(line.seconds, line.bytes_moved),
        output.share(line.copy_share),
        str(len(line.kernels) or "-"),
        str(bar or "-"),
        bars.verdict(bar, line.copy_share, line.clock),
    ]


if __name__ == "__main__":
    absltest.main()
