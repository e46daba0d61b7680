"""Chunks of pages as operands of products in fp8: e4m3 keys by rows, and values transposed, as `fp8` describes them.

A program takes the tokens of one block that are neighbours in a row of transposed values. For all these tokens, a
thread takes four or eight neighbouring dims of a head, a word of the page, so that it has whole pieces of the rows to
store. Elements of fp8 are not touched. Those of NVFP4 are multiplied by their block's scale over the unit of the
sequence and head (`fp8.unit_above`) in float16, which holds the product, and rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax import quant
from kvjax.dtypes import KVCacheDType
from kvjax.kernels import compat, lanes, warpgroups
from kvjax.kernels.aliases import Scalar
from kvjax.kernels.launchable import Pages
from kvjax.kernels.prompts import fp8
from kvjax.kernels.registers import THREADS
from kvjax.pages import PageRegion, swizzled_position

TOKENS = fp8.BLOCK_TOKENS
"""Tokens of a program."""


class Part(NamedTuple):
    """Keys or values of a page.

    Attributes:
      dtype: how they are stored.
      pages: their regions.
      head_size: elements of a row.
      num_heads: rows of a token.
      inverse: returns the inverse of heads' units, each as two float16 in a word; called for NVFP4 only.
    """

    dtype: KVCacheDType
    pages: Pages
    head_size: int
    num_heads: int
    inverse: Callable[[jax.Array], jax.Array]

    @property
    def dims(self) -> int:
        """Elements of a word of the page."""
        return 32 // self.dtype.info.bits

    @property
    def words(self) -> int:
        """Words of a row of the page."""
        return self.head_size // self.dims


class Neighbours(NamedTuple):
    """`TOKENS` tokens of a page: the page, the first of them there, and the first and the end of those to read."""

    page: Scalar
    token: Scalar
    first_valid: Scalar
    num_valid: Scalar


type Store = Callable[[jax.Array, jax.Array, int, list[jax.Array], jax.Array], None]
"""Stores words for a head, the first of four dims, and the number of a token or, transposed, of a dim, where bool."""


def store_chunk(part: Part, chunk: Neighbours, transposed: bool, store: Store) -> None:
    """Stores a chunk's keys or values, zeros for tokens that are not to be read.

    If not transposed, `store` gets the words of a run of dims for each token; if transposed, the four words of tokens
    for each dim.
    """
    count = part.num_heads * part.words

    def take(i: jax.Array, _: None) -> None:
        unit = lanes.thread_index() + i * THREADS
        is_unit = unit < count
        unit = jnp.minimum(unit, count - 1)
        head, word = lax.div(unit, jnp.int32(part.words)), lax.rem(unit, jnp.int32(part.words))
        loaded = [_load(part, chunk, token, head, word) for token in range(TOKENS)]
        if part.pages.regions[1:]:
            inverse = part.inverse(head)
            loaded = [(*words, inverse) for words in loaded]
        decoded = [_decoded(part, chunk, token, *words) for token, words in enumerate(loaded)]
        dim = word * part.dims
        if not transposed:
            for token, words in enumerate(decoded):
                store(head, dim, token, words, is_unit)
            return
        for run in range(part.dims // 4):
            quarters = [_transposed([decoded[t][run] for t in tokens]) for tokens in _ORDER.reshape(4, 4).tolist()]
            for each in range(4):
                store(head, dim + (4 * run + each), 0, [quarter[each] for quarter in quarters], is_unit)

    lax.fori_loop(0, -(-count // THREADS), take, None)


_ORDER = np.arange(TOKENS).reshape(2, 4, 2).swapaxes(0, 1).reshape(-1)
"""`warpgroups.in_order_of_products` of the tokens."""


def _load(part: Part, chunk: Neighbours, token: int, head: jax.Array, word: jax.Array) -> tuple[jax.Array, ...]:
    """A word of a row and, if a block has a scale, the scale's byte."""
    data, *scales = part.pages.regions
    at = data.base + (chunk.token + token) * data.token_stride + head * data.head_stride + word * 4
    alignment = math.gcd(4, part.pages.alignment, data.base, data.token_stride, data.head_stride)
    loaded = _load_word(part.pages, chunk.page, at, alignment)
    if not scales:
        return (loaded,)
    per_block = (part.dtype.info.elements_per_scale or part.dims) // part.dims
    return loaded, load_scale(part.pages, chunk.page, chunk.token + token, head, lax.div(word, jnp.int32(per_block)))


def load_scale(pages: Pages, page: Scalar, token: Scalar, head: jax.Array, block: jax.Array) -> jax.Array:
    """The scale of a block of a token and head, a byte in a uint32."""
    at = _scale_byte(pages.regions[1], token, head, block)
    word = _load_word(pages, page, at - (at & 3), math.gcd(4, pages.alignment))
    return word >> lanes.bits((at & 3) << 3, jnp.uint32) & jnp.uint32(0xFF)


def _scale_byte(region: PageRegion, token: Scalar, head: jax.Array, block: jax.Array) -> jax.Array:
    """The byte of a block's scale in its page."""
    if region.swizzled:
        row, block = swizzled_position(lanes.splat(token, jnp.int32), block, region.row_bytes)
        return region.base + row * region.token_stride + head * region.head_stride + block
    return region.base + token * region.token_stride + head * region.head_stride + block


def _load_word(pages: Pages, page: Scalar, offset: jax.Array, alignment: int) -> jax.Array:
    """The word at a byte of a page."""
    offset = compat.layout_cast(offset, lanes.LAYOUT)
    return lanes.bits(warpgroups.load_words(pages.ref, page, offset, alignment, lanes.LAYOUT), jnp.uint32)


def _decoded(part: Part, chunk: Neighbours, token: int, word: jax.Array, *scales: jax.Array) -> list[jax.Array]:
    """A word of the page as one word of e4m3, or two."""
    is_valid = (chunk.first_valid <= token) & (chunk.num_valid > token)
    words = [word]
    if scales:
        scale, unit = scales
        operands = scale | scale << 8, unit
        words = [
            lanes.asm(_PTX_OF_NVFP4, _nvfp4_model, half, *operands, results=[jnp.uint32])[0]
            for half in (word, word >> 16)
        ]
    return [jnp.where(is_valid, each, jnp.uint32(0)) for each in words]


def _transposed(words: list[jax.Array]) -> list[jax.Array]:
    """A matrix of four by four bytes, transposed."""
    low = [lanes.permute(words[i], words[i + 1], 0x5140) for i in (0, 2)]  # bytes 0 and 1 of both
    high = [lanes.permute(words[i], words[i + 1], 0x7362) for i in (0, 2)]
    return [lanes.permute(x, y, selector) for x, y in (low, high) for selector in (0x5410, 0x7632)]


def _ptx_of_byte(extract: str, result: str) -> str:
    """PTX that converts two codes, the byte that `extract` puts into `code`, to two e4m3 in `result`.

    The exponent and mantissa of a code, put at those of a float16, are its magnitude times 2**-14.
    """
    return f"""{extract}
  mul.lo.u32 halves, code, 0x200200;
  mul.lo.u32 signs, code, 0x1001000;
  and.b32 halves, halves, 0x0E000E00;
  lop3.b32 halves, halves, signs, 0x80008000, 0xF8;
  mul.rn.f16x2 halves, halves, unit;
  mul.rn.f16x2 halves, halves, scales;
  cvt.rn.satfinite.e4m3x2.f16x2 {result}, halves;"""


_PTX_OF_NVFP4 = f"""{{
  .reg .b16 scale, low, high;
  .reg .b32 scales, code, halves, signs, unit;
  mov.b32 unit, 0x74007400;
  cvt.u16.u32 scale, $2;
  cvt.rn.f16x2.e4m3x2 scales, scale;
  mul.rn.f16x2 scales, scales, $3;
  {_ptx_of_byte("and.b32 code, $1, 0xFF;", "low")}
  {_ptx_of_byte("bfe.u32 code, $1, 8, 8;", "high")}
  mov.b32 $0, {{low, high}};
}}"""


def _nvfp4_model(codes: jax.Array, scales: jax.Array, units: jax.Array) -> list[jax.Array]:
    """Four codes of the lower half of a word, times the scale in a byte, times the float16 in a half of the last."""
    unit = lax.bitcast_convert_type(units.astype(jnp.uint16), jnp.float16).astype(jnp.float32)
    scale = lax.bitcast_convert_type(scales.astype(jnp.uint8), fp8.DTYPE).astype(jnp.float32)
    result = jnp.zeros_like(codes)
    for i in range(4):
        code = codes >> 4 * i & 0xF
        half = ((code & 7) << 9 | (code & 8) << 12).astype(jnp.uint16)
        x = lax.bitcast_convert_type(half, jnp.float16).astype(jnp.float32) * 2.0**14
        x = quant.cast(x * (scale * unit), fp8.DTYPE)
        result |= lax.bitcast_convert_type(x, jnp.uint8).astype(jnp.uint32) << 8 * i
    return [result]
