"""Runs PTX on the CPU: inline code without memory accesses, for many threads at once."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import ml_dtypes
import numpy as np

Word = np.ndarray
"""A register of all threads: uint32, or bool of predicates."""


def run(code: str, results: int, operands: Sequence[np.ndarray]) -> list[Word]:
    """Runs code that writes `$0` and so on and reads the operands after those: 32 bits wide, `[threads]`.

    Where threads diverge at a branch forward, some wait at its label. Backward, all that are active branch.
    """
    registers = {f"${results + i}": operand.view(np.uint32) for i, operand in enumerate(operands)}
    threads = len(operands[0])
    scopes: list[dict[str, Word]] = [registers]
    waiting: dict[str, np.ndarray] = {}
    active = np.ones(threads, bool)
    tokens = list(re.finditer(r"[{}](?=\s|$)|(\w+):|([@.\w][^;]*);", code))
    labels = {token[1]: i for i, token in enumerate(tokens) if token[1]}
    number = 0
    while number < len(tokens):
        text, label, statement = tokens[number][0], tokens[number][1], tokens[number][2]
        number += 1
        if text in "{}":
            scopes = [*scopes, {}] if text == "{" else scopes[:-1]
        elif label:
            active = active | waiting.pop(label, False)
        elif statement.startswith(".reg"):
            scopes[-1] |= dict.fromkeys(_declared(statement))
        elif branch := re.fullmatch(r"(?:@(!?)(\w+) )?bra (\w+)", statement):
            negated, predicate, label = branch.groups()
            if not active.any():
                continue
            taken = active & (_read(scopes, predicate, threads) ^ bool(negated)) if predicate else active
            if labels[label] < number:
                assert (taken == active).all()
                number = labels[label]
            else:
                waiting[label] = waiting.get(label, False) | taken
                active = active & ~taken
        elif active.any():
            _execute(statement, scopes, active)
    assert active.all()
    return [registers[f"${i}"] for i in range(results)]


def _declared(statement: str) -> list[str]:
    names = []
    for name in re.findall(r"\w+(?:<\d+>)?(?=,|$)", statement):
        base, _, count = name.removesuffix(">").partition("<")
        names += [f"{base}{i}" for i in range(int(count))] if count else [base]
    return names


def _read(scopes: Sequence[dict[str, Word]], name: str, threads: int) -> Word:
    if name[:2] in ("0f", "0d"):
        return np.full(threads, int(name[2:], 16), np.uint32 if name[1] == "f" else np.uint64)
    if re.fullmatch(r"-?\d\w*", name):
        return np.full(threads, int(name, 0) % 2**32, np.uint32)
    return next(scope[name] for scope in reversed(scopes) if name in scope)


def _write(scopes: Sequence[dict[str, Word]], name: str, value: Word, active: np.ndarray) -> None:
    scope = next((scope for scope in reversed(scopes) if name in scope), scopes[0])
    old = scope.get(name)
    scope[name] = value if old is None else np.where(active, value, old)


def _execute(statement: str, scopes: Sequence[dict[str, Word]], active: np.ndarray) -> None:
    opcode, rest = statement.split(None, 1)
    names = re.findall(r"[$\w-]+", rest)
    threads = len(active)
    destinations = 2 if re.match(r"[{]|\w+[|]", rest) else 1
    sources = [_read(scopes, name, threads) for name in names[destinations:]]
    with np.errstate(all="ignore"):
        results = _compute(opcode, sources, destinations)
    for name, value in zip(names, results, strict=False):
        _write(scopes, name, value, active)


def _compute(opcode: str, sources: list[Word], destinations: int) -> list[Word]:
    if opcode == "mov.b32" and destinations == 2:
        return [sources[0] & 0xFFFF, sources[0] >> 16]
    if opcode == "mov.b32" and len(sources) == 2:
        return [sources[0] | sources[1] << 16]
    return [_OPCODES[opcode](*sources)]


def _of_floats(run: Callable[..., np.ndarray]) -> Callable[..., Word]:
    def of_words(*sources: Word) -> Word:
        return run(*(x.view(np.float32) for x in sources)).astype(np.float32).view(np.uint32)

    return of_words


def _of_integers(run: Callable[..., np.ndarray]) -> Callable[..., Word]:
    return lambda *sources: run(*(x.astype(np.int64) for x in sources)).astype(np.uint64).astype(np.uint32)


def _of_doubles(run: Callable[..., np.ndarray]) -> Callable[..., Word]:
    return lambda *sources: run(*(x.view(np.float64) for x in sources)).astype(np.float64).view(np.uint64)


def _compare(run: Callable[..., np.ndarray], kind: type) -> Callable[..., np.ndarray]:
    return lambda x, y: run(x.view(kind), y.view(kind))


def _flush(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < np.float32(2.0**-126), np.copysign(np.float32(0), x), x)


def _fma(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """Rounded once: the float64 sum is rounded to odd first."""
    product, addend = x.astype(np.float64) * y, z.astype(np.float64)
    total = product + addend
    of_addend = total - product
    error = (product - (total - of_addend)) + (addend - of_addend)
    is_even = total.view(np.uint64) & 1 == 0
    toward = np.where(error > 0, np.inf, -np.inf)
    odd = np.where(np.isfinite(total) & (error != 0) & is_even, np.nextafter(total, toward), total)
    return odd.astype(np.float32)


def _fma_of_doubles(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    return (x.astype(np.longdouble) * y + z).astype(np.float64)


def _about_reciprocal(x: np.ndarray) -> np.ndarray:
    """Off by one unit in the last place, which the hardware's may be."""
    x = _flush(x)
    exact = (1 / x.astype(np.float64)).astype(np.float32)
    return _flush(np.where(np.isfinite(exact), np.nextafter(exact, np.float32(0)), exact))


def _saturated(x: np.ndarray) -> np.ndarray:
    return np.where(np.isnan(x), np.float32(0), np.clip(x, 0, 1))


def _prmt(x: Word, y: Word, selector: Word) -> Word:
    both = x.astype(np.uint64) | y.astype(np.uint64) << np.uint64(32)
    result = np.zeros_like(x)
    for i in range(4):
        nibble = (selector >> 4 * i & 0xF).astype(np.uint64)
        byte = (both >> (nibble & np.uint64(7)) * np.uint64(8)).astype(np.uint32) & 0xFF
        byte = np.where(nibble >= 8, (byte >> 7) * 0xFF, byte)
        result |= byte.astype(np.uint32) << 8 * i
    return result


def _pack_nibbles(high: Word, low: Word, codes: Word) -> Word:
    nibbles = [np.clip(x.view(np.int32), -8, 7).astype(np.uint32) & 0xF for x in (low, high)]
    return codes << 8 | nibbles[1] << 4 | nibbles[0]


def _bytes(x: Word) -> list[np.ndarray]:
    return [x.astype(np.int64) >> 8 * i & 0xFF for i in range(4)]


def _dp2a(first: int) -> Callable[..., Word]:
    def dot(x: Word, y: Word, total: Word) -> Word:
        halves = [x.astype(np.int64) >> shift & 0xFFFF for shift in (0, 16)]
        pair = zip(halves, _bytes(y)[first : first + 2], strict=True)
        return (sum(a * b for a, b in pair) + total).astype(np.uint64).astype(np.uint32)

    return dot


def _e4m3_pair(high: Word, low: Word) -> Word:
    """Saturating, with one NaN."""
    codes = [np.clip(x.view(np.float32), -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8) for x in (high, low)]
    codes = [np.where(np.isnan(x.view(np.float32)), 0x7F, c) for x, c in zip((high, low), codes, strict=True)]
    return codes[0].astype(np.uint32) << 8 | codes[1]


def _halves_of_e4m3(x: Word) -> Word:
    codes = [(x >> shift & 0xFF).astype(np.uint8).view(ml_dtypes.float8_e4m3fn) for shift in (0, 8)]
    halves = [each.astype(np.float16).view(np.uint16).astype(np.uint32) for each in codes]
    return halves[1] << 16 | halves[0]


def _pair_of(kind: type) -> Callable[..., Word]:
    def pair(high: Word, low: Word) -> Word:
        halves = [x.view(np.float32).astype(kind) for x in (low, high)]
        bits = [np.where(np.isnan(x), 0x7FFF, x.view(np.uint16)).astype(np.uint32) for x in halves]
        return bits[0] | bits[1] << 16

    return pair


def _product_of_halves(x: Word, y: Word) -> Word:
    product = x.view(np.float16) * y.view(np.float16)
    return np.where(np.isnan(product), np.uint16(0x7FFF), product.view(np.uint16)).view(np.uint32)


def _largest_or_nan(kind: type) -> Callable[..., Word]:
    def largest(x: Word, y: Word) -> Word:
        halves = [z.view(kind).reshape(-1, 2).astype(np.float32) for z in (x, y)]
        result = np.maximum(*map(np.abs, halves))
        return result.astype(kind).reshape(-1).view(np.uint32)

    return largest


_OPCODES: dict[str, Callable[..., np.ndarray]] = {
    **dict.fromkeys(("mov.b32", "mov.f32", "mov.f64", "cvt.u32.u16"), lambda x: x),
    "abs.f32": lambda x: x & 0x7FFFFFFF,
    "neg.f32": lambda x: x ^ 0x80000000,
    "mul.f32": _of_floats(np.multiply),
    "mul.rn.f32": _of_floats(np.multiply),
    "mul.rn.sat.f32": _of_floats(lambda x, y: _saturated(x * y)),
    "mul.rn.ftz.f32": _of_floats(lambda x, y: _flush(_flush(x) * _flush(y))),
    "add.f32": _of_floats(np.add),
    "add.rn.f32": _of_floats(np.add),
    "sub.f32": _of_floats(np.subtract),
    "fma.rn.f32": _of_floats(_fma),
    "fma.rn.ftz.f32": _of_floats(lambda *x: _flush(_fma(*map(_flush, x)))),
    "add.s32": _of_integers(np.add),
    "sub.u32": _of_integers(np.subtract),
    "mul.lo.u32": _of_integers(np.multiply),
    "mad.lo.u32": _of_integers(lambda x, y, z: x * y + z),
    "min.s32": lambda x, y: np.minimum(x.view(np.int32), y.view(np.int32)).view(np.uint32),
    "shl.b32": np.left_shift,
    "shr.u32": np.right_shift,
    "and.b32": np.bitwise_and,
    "or.b32": np.bitwise_or,
    **dict.fromkeys(("selp.b32", "selp.f32"), lambda x, y, condition: np.where(condition, x, y)),
    "setp.eq.f32": _compare(np.equal, np.float32),
    "setp.lt.f32": _compare(np.less, np.float32),
    "setp.gt.f32": _compare(np.greater, np.float32),
    "setp.eq.u32": _compare(np.equal, np.uint32),
    "setp.lt.u32": _compare(np.less, np.uint32),
    "setp.le.u32": _compare(np.less_equal, np.uint32),
    "max.f32": _of_floats(np.fmax),
    "max.NaN.f32": _of_floats(np.maximum),
    "rcp.approx.ftz.f32": _of_floats(_about_reciprocal),
    "cvt.f64.f32": lambda x: x.view(np.float32).astype(np.float64).view(np.uint64),
    "cvt.rn.f32.f64": lambda x: x.view(np.float64).astype(np.float32).view(np.uint32),
    "neg.f64": lambda x: x ^ np.uint64(1 << 63),
    "mul.rn.f64": _of_doubles(np.multiply),
    "fma.rn.f64": _of_doubles(_fma_of_doubles),
    "cvt.rn.f16x2.e4m3x2": _halves_of_e4m3,
    "prmt.b32": _prmt,
    "cvt.pack.sat.s4.s32.b32": _pack_nibbles,
    "cvt.rn.f32.u32": lambda x: x.astype(np.float32).view(np.uint32),
    "cvt.f32.f16": lambda x: x.astype(np.uint16).view(np.float16).astype(np.float32).view(np.uint32),
    "cvt.u16.u32": lambda x: x & 0xFFFF,
    "cvt.rn.f16x2.f32": _pair_of(np.float16),
    "cvt.rn.bf16x2.f32": _pair_of(ml_dtypes.bfloat16),
    "mul.rn.f16x2": _product_of_halves,
    "cvt.rn.satfinite.e4m3x2.f32": _e4m3_pair,
    "dp2a.lo.u32.u32": _dp2a(0),
    "dp2a.hi.u32.u32": _dp2a(2),
    "dp4a.u32.u32": lambda x, y, total: _of_integers(np.add)(
        np.sum([a * b for a, b in zip(_bytes(x), _bytes(y), strict=True)], axis=0), total
    ),
    "max.NaN.xorsign.abs.bf16x2": _largest_or_nan(ml_dtypes.bfloat16),
    "max.NaN.xorsign.abs.f16x2": _largest_or_nan(np.float16),
}
