"""The stages of the kernel for few query rows: rows of tokens in shared memory, and the parts of them that warps read.

A row is copied as it is stored. Each warp of a group reads a *share* of it: equal parts of the latent and of the rope
key, the latter in whole steps of 16 dims. Where there are fewer steps than warps, the other warps multiply zeros.

A warp reads 64 contiguous bytes of two rows at once. To be in different banks, the two must be 64 bytes apart modulo
128. For most row sizes this holds for some pairs of tokens, and products take the tokens in that order. Rows of a
multiple of 128 bytes are padded.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.dtypes import KVCacheDType
from kvjax.errors import UnsupportedError
from kvjax.kernels.aliases import DTypeLike
from kvjax.kernels.attention.formats import Format
from kvjax.kernels.attention.problem import COLUMNS, DecodeConfig, Problem
from kvjax.kernels.attention.segments import OutputRows
from kvjax.kernels.attention.stages import COPY_BYTES, TILE, Chunk, SharedRows, StageLayout
from kvjax.kernels.attention.warp import Warp
from kvjax.kernels.registers import LANES
from kvjax.pages import PageRegion
from kvjax.spec import AttentionSpec

STEP = 16
"""Dims of a product."""

WORD = 4
"""Bytes of a register."""

_BANKS = 128
"""Bytes of all banks of shared memory."""

DTYPES = frozenset(
    {
        *(KVCacheDType.FLOAT16, KVCacheDType.BFLOAT16, KVCacheDType.FP8_E4M3),
        *(KVCacheDType.FP8_DS_MLA, KVCacheDType.NVFP4, KVCacheDType.NVFP4_4OVER6),
    }
)
"""Dtypes of caches that both kernels read."""


def latent_format(spec: AttentionSpec, *, converts_e2m1: bool) -> Format:
    """How latents become operands.

    The float32 scales of `FP8_DS_MLA`, and so the products of weights with them, may exceed float16's range: its
    latents become bfloat16, as rows with a scale each.
    """
    stored = spec.parts[0]
    is_scaled = stored is KVCacheDType.FP8_DS_MLA
    return Format.of(KVCacheDType.FP8_PER_TOKEN_HEAD if is_scaled else stored, converts_e2m1=converts_e2m1)


def rope_format(spec: AttentionSpec) -> Format:
    """How rope keys become operands."""
    return Format.of(spec.parts[1])


def run_of(spec: AttentionSpec) -> int:
    """Elements of a latent with a float32 scale; 0 where they have none."""
    return (spec.parts[0].info.elements_per_scale or 0) if spec.parts[0] is KVCacheDType.FP8_DS_MLA else 0


@dataclasses.dataclass(frozen=True)
class LatentStages:
    """The layout of a stage.

    Attributes:
      layout: the copies; its rows are whole.
      latents: the share of a latent of a warp, the heads of its rows, and block scales of NVFP4.
      rope: the share of a rope key, likewise; empty for none.
      scales: the float32 scales of `FP8_DS_MLA`, of which `scales.page.row_bytes` are a warp's; None for none.
      scale_step: number of warps that read the same scales.
      apart: tokens between two rows that a warp reads at once.
    """

    layout: StageLayout
    latents: tuple[SharedRows, ...]
    rope: tuple[SharedRows, ...]
    scales: SharedRows | None
    scale_step: int
    apart: int

    @classmethod
    def of(cls, problem: Problem, shares: int, tiles: int) -> LatentStages:
        """The layout of stages of `tiles` runs of 16 tokens, whose rows `shares` warps divide."""
        spec, memory = problem.spec, problem.memory[0]
        base, size = memory.regions[0].base, spec.bytes_per_token
        page = PageRegion(base, size, 0, size)
        apart = next((step for step in (1, 2, 4) if step * size % _BANKS == _BANKS // 2), 0)
        pad = 0 if apart or size % COPY_BYTES else _BANKS // 2
        pitch = size + pad
        tile_bytes = -(-TILE * pitch // _BANKS) * _BANKS
        unit = math.gcd(COPY_BYTES, size, base, memory.page_stride, memory.alignment)
        rows = SharedRows(page, memory.page_stride, 0, pitch, 8 * pitch, 0, tile_bytes, unit, 0)
        count = TILE if pad else 1
        run = TILE // count * size
        chunks = [Chunk(base + i * size, i * pitch, run, size, 0, 0) for i in range(count)]
        numbers = [base, memory.page_stride, memory.alignment, run, TILE * size]
        in_bulk = spec.block_size % TILE == 0 and not any(number % COPY_BYTES for number in numbers)
        layout = StageLayout(
            spec.block_size, 1, tiles, (rows,), (), tiles * tile_bytes, False, tuple(chunks) if in_bulk else ()
        )

        def part(start: int, row_bytes: int, stride: int) -> SharedRows:
            own = PageRegion(base + start, size, stride, row_bytes)
            return dataclasses.replace(rows, page=own, start=start, head_stride=stride)

        rank, rope = spec.part_sizes
        info = spec.parts[0].info
        data, scales = info.row_bytes(rank)
        latents = [part(0, data // shares, data // shares)]
        of_runs, step = None, 1
        if spec.parts[0].byte_format is KVCacheDType.NVFP4:
            latents.append(part(data, scales // shares, scales // shares))
        elif run := run_of(spec):
            step = max(1, run * shares // rank)
            own = max(WORD, scales // shares)
            of_runs = part(data, own, own)
        elif scales:
            raise UnsupportedError(
                f"latents: got scales of {spec.parts[0].value!r}, expected nvfp4, nvfp4_4over6 or fp8_ds_mla"
            )
        of_rope = []
        if rope:
            own = spec.parts[1].info.row_bytes(rope_share(spec, shares))[0]
            of_rope.append(part(data + scales, own, own))
        return cls(layout, tuple(latents), tuple(of_rope), of_runs, step, apart or 1)

    def token_row(self, row: jax.Array) -> jax.Array:
        """The token, of eight, that is row `row` of products."""
        if self.apart == 1:
            return row
        bit = self.apart.bit_length() - 1
        others = row & (7 - 1 - self.apart)
        return others | (row & 1) << bit | row >> bit & 1


def rope_share(spec: AttentionSpec, shares: int) -> int:
    """Dims of a rope key that a warp multiplies."""
    return max(STEP, spec.part_sizes[1] // shares)


@dataclasses.dataclass(frozen=True)
class LatentDims(OutputRows):
    """The dims that registers of the output hold.

    A product of 16 dims takes two transposed pairs of an operand's registers: row `g` of the result is the element
    `g & 1` of the pair of the thread in column `g >> 1`.

    Attributes:
      warp: the warp.
      size: dims of a warp.
      format: of latents.
      unit: bytes of a row that a thread loads at once.
    """

    warp: Warp
    size: int
    format: Format
    unit: int

    @property
    def products(self) -> int:
        """Products of 16 dims."""
        return self.size // STEP

    def dim(self, product: int, half: int) -> tuple[jax.Array, jax.Array]:
        """The dim of row `8 * half + g` of a product, and that it exists."""
        pairs = self.format.key_dims(self.unit)
        unit, pair = divmod(2 * product + half, len(pairs))
        low, high = pairs[pair]
        each = 2 * len(pairs)
        row = self.warp.row
        dim = (row >> 1) * each + (row & 1) * (high - low)
        return dim + self.warp.head * self.size + (4 * unit * each + low), row < COLUMNS

    def runs(self) -> list[list[int]]:
        """Runs of one or two registers whose dims follow each other, the first a multiple of their number.

        Registers of a row are numbered `2 * product + half`. Each holds one of a pair's two dims (`dim`); whichever
        these are, the dims of a run follow each other.
        """
        low, high = self.format.key_dims(self.unit)[0]
        size = high - low  # pairs two apart alternate: (0, 2), (1, 3)
        return [list(range(first, first + size)) for first in range(0, 2 * self.products, size)]


def query_terms(fmt: Format, query_dtype: DTypeLike) -> int:
    """Operands that a query is the sum of."""
    return 2 if fmt.operand == jnp.bfloat16 and np.dtype(query_dtype) != jnp.bfloat16 else 1


def query_registers(problem: Problem, shares: int) -> tuple[int, int]:
    """Registers of a warp's query operands: those for latents, and those for rope keys."""
    spec = problem.spec
    fmt = latent_format(spec, converts_e2m1=problem.converts_e2m1)
    sizes = spec.part_sizes[0] // shares, rope_share(spec, shares) if spec.part_sizes[1] else 0
    latents, rope = (
        size // STEP * 2 * problem.tiles * query_terms(each, problem.query_dtype)
        for size, each in zip(sizes, (fmt, rope_format(spec)), strict=True)
    )
    return latents, rope


def state_registers(problem: Problem, shares: int) -> int:
    """Registers of a warp's state: sums and output."""
    return problem.tiles * (2 * problem.sums + 4 * (problem.spec.part_sizes[0] // shares // STEP))


def scratch(problem: Problem, config: DecodeConfig) -> tuple[int, int, int]:
    """Bytes of shared memory: of stages, later of states; of queries and partial logits; and of barriers."""
    ring = config.slots * LatentStages.of(problem, config.heads, config.groups * config.tiles).layout.stage_bytes
    joined = (config.groups - 1) * config.heads * state_registers(problem, config.heads)
    exchanged = 2 * config.warps * 4 * problem.tiles
    query = config.heads * sum(-(-count // 4) * 4 for count in query_registers(problem, config.heads))
    return max(ring, joined * LANES * WORD), (query + exchanged) * LANES * WORD, 16 * config.slots
