"""Decoding of stored bytes to operands of `lanes.mma`, for each storage dtype.

The order of dims does not matter to attention as long as query and keys agree, nor does that of tokens. So a thread
takes contiguous bytes of a row and decodes them in place, and the query is permuted to match, once.

**Keys** are the operand of 16 tokens by 16 dims. The four threads of row `g` share the rows of tokens `g` and `g + 8`:
thread `c` has *units* `c`, `c + 4`, ... of each row, runs of up to 16 bytes. `Format.key_pairs` turns a unit's words
into the pairs of elements that the operand's registers hold, two pairs of each token for a step of 16 dims;
`Format.key_dims` says which dims of the unit those are. For NVFP4, a word has eight codes:

```
word        7654 3210       code 0 in the lowest bits
pairs       (0, 2) (1, 3) (4, 6) (5, 7)     the even and the odd codes of each half of the word
```

**Values** are the operand of 16 dims by 16 tokens, so a register holds one dim of two neighbouring tokens. `ldmatrix`
with `.trans` distributes values in units of 16 bits: thread `(g, c)` gets unit `g` of tokens `2c` and `2c + 1`, one
element of 16 bits, two of 8, or four of 4 (`Format.elements_per_unit`). `Format.value_pairs` makes one register for
each element.

e2m1 to float16 needs no table: a code is put where an e4m3 has its sign, its lowest exponent bits and its highest
mantissa bit. That is the value times `2**-6`; code 1 is a subnormal in both formats. An instruction converts two e4m3
to float16. The product with the block scale, an e4m3 number that float16 holds exactly, is exact too. From compute
capability 10.0 on, an instruction converts the two codes of a byte. Codes of values are converted after those of two
tokens have been put side by side.

Rows with a scale each become bfloat16, which holds their elements exactly. `Keys` multiplies logits by the scales of
keys. `softmax.weights` multiplies weights by the scales of values; the products may exceed float16's range.

A float32 is split into bfloat16 *terms*, each the upper half of the remainder after the terms before it. Keys have
three terms, which are exact. Values have two, 16 bits, because they are multiplied by weights of 8 bits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax.dtypes import KVCacheDType
from kvjax.errors import UnsupportedError
from kvjax.kernels import lanes

E2M1_FACTOR = 2.0**6
"""Factor of decoded e2m1 elements, unless the GPU converts e2m1."""

DECODED = frozenset(
    {
        *(KVCacheDType.FLOAT32, KVCacheDType.FLOAT16, KVCacheDType.BFLOAT16),
        *(KVCacheDType.FP8_E4M3, KVCacheDType.FP8_E5M2, KVCacheDType.NVFP4),
        *(KVCacheDType.FP8_PER_TOKEN_HEAD, KVCacheDType.INT8_PER_TOKEN_HEAD),
    }
)
"""Byte formats of keys and of values that become operands here."""

KEY_TERMS, VALUE_TERMS = 3, 2
"""Number of terms of a float32 element."""


@dataclasses.dataclass(frozen=True)
class Format:
    """Decoding of one storage dtype.

    Attributes:
      dtype: the storage dtype.
      operand: element type of the operands, float16 or bfloat16.
      bits: bits of a stored element.
      converts_e2m1: whether the GPU has an instruction that converts e2m1.
    """

    dtype: KVCacheDType
    operand: np.dtype
    bits: int
    converts_e2m1: bool = False

    @classmethod
    def of(cls, dtype: KVCacheDType, *, converts_e2m1: bool = False) -> Format:
        """The format of keys or values of a storage dtype; raises `UnsupportedError` if it is not in `DECODED`."""
        dtype = dtype.byte_format
        if dtype not in DECODED:
            raise UnsupportedError(f"dtype: got {dtype.value!r}, which attention does not decode")
        exact = dtype.info.exact_in if dtype.is_quantized else dtype.info.storage_dtype
        is_half = exact == np.dtype(np.float16)
        operand = np.dtype(np.float16) if is_half else jnp.dtype(jnp.bfloat16)  # which has float32's range
        return cls(dtype, operand, dtype.info.bits, converts_e2m1)

    @property
    def has_block_scales(self) -> bool:
        """Whether each block of elements has a scale."""
        return self.dtype.info.elements_per_scale is not None

    @property
    def has_row_scales(self) -> bool:
        """Whether each row has a scale."""
        return self.dtype.info.block == "row"

    @property
    def block_bytes(self) -> int:
        """Bytes of the elements that share a scale."""
        return (self.dtype.info.elements_per_scale or 0) * self.bits // 8

    @property
    def factor(self) -> float:
        """Factor of decoded elements, in addition to their scales."""
        return E2M1_FACTOR if self.has_block_scales and not self.converts_e2m1 else 1.0

    @property
    def unit_bytes(self) -> int:
        """Bytes of a unit of a value row: 16 bits, or an element that is wider."""
        return max(16, self.bits) // 8

    @property
    def elements_per_unit(self) -> int:
        """Elements of a unit of a value row."""
        return 8 * self.unit_bytes // self.bits

    @property
    def value_terms(self) -> int:
        """Number of operands that a value is the sum of."""
        return VALUE_TERMS if self.bits == 32 else 1

    def key_dims(self, unit_bytes: int) -> list[tuple[int, int]]:
        """The elements of a unit that each of `key_pairs` holds, in the lower and the upper half."""
        count = unit_bytes * 8 // self.bits
        if self.bits != 4 or self.converts_e2m1:
            return [(i, i + 1) for i in range(0, count, 2)]
        return [(i + odd, i + odd + 2) for i in range(0, count, 4) for odd in range(2)]

    def key_terms(
        self, words: Sequence[jax.Array], unit_bytes: int, scales: Sequence[jax.Array]
    ) -> list[list[jax.Array]]:
        """`key_pairs` of each term that a key is the sum of: one, except for float32."""
        if self.bits != 32:
            return [self.key_pairs(words, unit_bytes, scales)]
        pairs = [in_terms(x, y, KEY_TERMS) for x, y in zip(words[::2], words[1::2], strict=True)]
        return [list(term) for term in zip(*pairs, strict=True)]

    def key_pairs(self, words: Sequence[jax.Array], unit_bytes: int, scales: Sequence[jax.Array]) -> list[jax.Array]:
        """The pairs of a unit.

        Args:
          words: the unit, uint32; a unit of 2 bytes is the lower half of a word.
          unit_bytes: its size.
          scales: NVFP4: the block scale of each run of 16 elements of the unit, in both halves of a float16 pair.
        """
        match self.dtype:
            case KVCacheDType.NVFP4:
                return [
                    scaled(pair, scales[4 * index // self.block_bytes])
                    for index, word in enumerate(words)
                    for pair in self._e2m1_pairs(word, min(unit_bytes, 4))
                ]
            case KVCacheDType.FP8_E4M3:
                return [from_e4m3(word, half) for word in words for half in range(2)]
            case KVCacheDType.FP8_PER_TOKEN_HEAD:
                return [_to_bfloat16(from_e4m3(word, half)) for word in words for half in range(2)]
            case KVCacheDType.INT8_PER_TOKEN_HEAD:
                return [pair for word in words for pair in _from_int8(word)]
            case KVCacheDType.FP8_E5M2:
                zero = lanes.splat(0, jnp.uint32)
                return [lanes.permute(word, zero, selector) for word in words for selector in (0x1404, 0x3424)]
            case KVCacheDType.FLOAT32 | KVCacheDType.FLOAT16 | KVCacheDType.BFLOAT16:
                return list(words)
        raise UnsupportedError(f"dtype: got {self.dtype.value!r}, which attention does not decode")

    def value_pairs(self, word: jax.Array) -> list[jax.Array]:
        """A pair for each element of two tokens' units, which are the lower and the upper half of `word`.

        Elements of NVFP4 are without their block scales.
        """
        match self.dtype:
            case KVCacheDType.NVFP4 if self.converts_e2m1:
                lower, upper = jnp.uint32(0x0F0F), jnp.uint32(0xF0F0)
                even = word & lower | word >> 12 & upper
                odd = word >> 4 & lower | word >> 16 & upper
                return [_converted(codes, byte) for byte in range(2) for codes in (even, odd)]
            case KVCacheDType.NVFP4:
                return self._e2m1_pairs(lanes.permute(word, word, 0x3120), 4)
            case KVCacheDType.FP8_E4M3:
                in_order = lanes.permute(word, word, 0x3120)
                return [from_e4m3(in_order, half) for half in range(2)]
            case KVCacheDType.FP8_PER_TOKEN_HEAD:
                in_order = lanes.permute(word, word, 0x3120)
                return [_to_bfloat16(from_e4m3(in_order, half)) for half in range(2)]
            case KVCacheDType.INT8_PER_TOKEN_HEAD:
                return _from_int8(lanes.permute(word, word, 0x3120))
            case KVCacheDType.FP8_E5M2:
                zero = lanes.splat(0, jnp.uint32)
                return [lanes.permute(word, zero, selector) for selector in (0x2404, 0x3414)]
            case KVCacheDType.FLOAT32 | KVCacheDType.FLOAT16 | KVCacheDType.BFLOAT16:
                return [word]
        raise UnsupportedError(f"dtype: got {self.dtype.value!r}, which attention does not decode")

    def _e2m1_pairs(self, word: jax.Array, size: int) -> list[jax.Array]:
        """The codes of a word's first `size` bytes, 2 or 4, in the pairs of `key_dims`."""
        if self.converts_e2m1:
            return [_converted(word, byte) for byte in range(size)]
        even_odd = _e2m1_as_e4m3(word)
        return [from_e4m3(codes, half) for half in range(size // 2) for codes in even_odd]


def in_terms(x: jax.Array, y: jax.Array, count: int) -> list[jax.Array]:
    """Splits two float32 into pairs of bfloat16 terms, the largest first; the last is rounded.

    The upper half of a float32 is a bfloat16, and the remainder is a float32 with fewer significant bits.
    """
    terms = []
    for _ in range(count - 1):
        terms.append(lanes.permute(lanes.bits(x, jnp.uint32), lanes.bits(y, jnp.uint32), 0x7632))
        x, y = (
            lanes.bits(z, jnp.float32) - lanes.bits(lanes.bits(z, jnp.uint32) & jnp.uint32(0xFFFF0000), jnp.float32)
            for z in (x, y)
        )
    return [*terms, lanes.half2(x, y, jnp.bfloat16)]


def scale_pairs(word: jax.Array) -> list[jax.Array]:
    """Four e4m3 block scales as two pairs of float16: bytes 0 and 1, bytes 2 and 3."""
    return [from_e4m3(word, half) for half in range(2)]


def from_e4m3(word: jax.Array, half: int) -> jax.Array:
    """The two e4m3 numbers in a half of a word as a float16 pair."""

    def model(word: jax.Array) -> list[jax.Array]:
        stored = lax.bitcast_convert_type((word >> 16 * half).astype(jnp.uint16), jnp.float8_e4m3fn)
        return [lax.bitcast_convert_type(stored.astype(jnp.float16), jnp.uint32)]

    code = f"{{ .reg .b16 x<2>; mov.b32 {{x0, x1}}, $1; cvt.rn.f16x2.e4m3x2 $0, x{half}; }}"
    return lanes.asm(code, model, word, results=[jnp.uint32])[0]


def _to_bfloat16(pair: jax.Array) -> jax.Array:
    """A float16 pair as a bfloat16 pair, rounded."""

    def model(pair: jax.Array) -> list[jax.Array]:
        halves = [
            lax.bitcast_convert_type((pair >> 16 * half).astype(jnp.uint16), jnp.float16).astype(jnp.bfloat16)
            for half in range(2)
        ]
        low, high = (lax.bitcast_convert_type(half, jnp.uint16).astype(jnp.uint32) for half in halves)
        return [low | high << 16]

    code = (
        "{ .reg .b16 x<2>; .reg .f32 y<2>; mov.b32 {x0, x1}, $1; cvt.f32.f16 y0, x0; cvt.f32.f16 y1, x1;"
        " cvt.rn.bf16x2.f32 $0, y1, y0; }"
    )
    return lanes.asm(code, model, pair, results=[jnp.uint32])[0]


def _from_int8(word: jax.Array) -> list[jax.Array]:
    """Four int8 as two pairs of bfloat16: bytes 0 and 1, bytes 2 and 3.

    With the byte 0x43 above them, the lower seven bits of a code are the bfloat16 128 plus these bits, and its sign bit
    is 128 or 256. Their difference is the code: its sign bit counts -128.
    """
    low, sign, above = word & jnp.uint32(0x7F7F7F7F), word & jnp.uint32(0x80808080), lanes.splat(0x43434343, jnp.uint32)
    return [
        _difference(lanes.permute(low, above, selector), lanes.permute(sign, above, selector))
        for selector in (0x4140, 0x4342)
    ]


def _difference(x: jax.Array, y: jax.Array) -> jax.Array:
    """The difference of two bfloat16 pairs."""

    def model(x: jax.Array, y: jax.Array) -> list[jax.Array]:
        x, y = (lax.bitcast_convert_type(z, jnp.bfloat16).astype(jnp.float32) for z in (x, y))
        return [lax.bitcast_convert_type((x - y).astype(jnp.bfloat16), jnp.uint32)]

    return lanes.asm("sub.rn.bf16x2 $0, $1, $2;", model, x, y, results=[jnp.uint32])[0]


def e2m1_in_order(word: jax.Array) -> list[jax.Array]:
    """A word's eight e2m1 codes as four pairs of float16 in their order, divided by `E2M1_FACTOR`."""
    even, odd = _e2m1_as_e4m3(word)
    in_order = [lanes.permute(even, odd, selector) for selector in (0x5140, 0x7362)]
    return [from_e4m3(codes, half) for codes in in_order for half in range(2)]


def _e2m1_as_e4m3(word: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The even and the odd codes of a word as e4m3, divided by `E2M1_FACTOR`.

    e4m3 has the fields of e2m1 two bits higher, and a bias larger by 6.
    """
    even = (word << 2) & jnp.uint32(0x1C1C1C1C) | (word << 4) & jnp.uint32(0x80808080)
    odd = (word >> 2) & jnp.uint32(0x1C1C1C1C) | word & jnp.uint32(0x80808080)
    return even, odd


def _converted(word: jax.Array, byte: int) -> jax.Array:
    """The two e2m1 codes of a byte of a word as a float16 pair, the lower code in the lower half."""

    def model(word: jax.Array) -> list[jax.Array]:
        codes = [word >> 8 * byte + 4 * i & 0xF for i in range(2)]
        small = [((code & 7) << 9 | (code & 8) << 12).astype(jnp.uint16) for code in codes]  # times 2**-14
        values = [lax.bitcast_convert_type(x, jnp.float16).astype(jnp.float32) * np.float32(2.0**14) for x in small]
        low, high = (lax.bitcast_convert_type(x.astype(jnp.float16), jnp.uint16).astype(jnp.uint32) for x in values)
        return [low | high << 16]

    code = f"{{ .reg .b8 x<4>; mov.b32 {{x0, x1, x2, x3}}, $1; cvt.rn.f16x2.e2m1x2 $0, x{byte}; }}"
    return lanes.asm(code, model, word, results=[jnp.uint32])[0]


def scaled(pair: jax.Array, scale: jax.Array) -> jax.Array:
    """The products of two float16 pairs."""

    def model(x: jax.Array, y: jax.Array) -> list[jax.Array]:
        product = lax.bitcast_convert_type(x, jnp.float16).astype(jnp.float32) * lax.bitcast_convert_type(
            y, jnp.float16
        ).astype(jnp.float32)
        return [lax.bitcast_convert_type(product.astype(jnp.float16), jnp.uint32)]

    return lanes.asm("mul.rn.f16x2 $0, $1, $2;", model, pair, scale, results=[jnp.uint32])[0]
