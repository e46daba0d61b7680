"""What tests of every implementation of paged attention share: cases, their exact results and what error they may have.

A case is built in numpy alone, from the formulas of reference.py: tokens are put as bytes into the slots that a
call may use, and every other byte of the cache is poison, as every entry of a block table that no row needs is garbage.
An implementation is a function `attend(query, cache, block_table, seq_lens, **options) -> (out, lse)` of arrays that
takes `paged_attention`'s options; the whole suite is `check(case, attend)` for every case, `check_alone` where results
are not to depend on the rest of a batch, and the tests of tests/test_attention.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from kvjax import AttentionSpec, FullAttentionSpec, KVCache, KVCacheDType
from support import cache_model, reference
from support.helpers import FP8_NAMES, INPUT_DTYPES, assert_same_bytes, cache_from_bytes, covering

Attend = Callable[..., tuple[np.ndarray, np.ndarray]]

NAN, ZERO = 0xFF, 0
"""Bytes to fill a cache with: as elements of every dtype, and as NVFP4's block scales, the first are NaN."""

LENGTHS = {
    "few": (5, 0, 17),
    "mixed": (0, 1, 15, 16, 17, 1328),
    "long": (100_000, 1, 0, 17),
    "one": (77,),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One kind of call.

    `tree`: whether rows see some of the other query tokens alone, in sequences of up to `tree_rows` rows if it is set.

    `scales`: "one", "scalar" or "per_head". `q_lens`: of each sequence how many of its `q_len` rows there are, the last
    ones, where that is not all of them.
    """

    dtype: str = "bfloat16"
    query_dtype: str = "bfloat16"
    layout: str = "NHD"
    v_scale_layout: str = "linear"
    head_size: int = 64
    head_size_v: int | None = None
    block_size: int = 16
    num_kv_heads: int = 2
    group: int = 2
    q_len: int = 1
    lengths: str | tuple[int, ...] = "few"
    q_lens: tuple[int, ...] | None = None
    window: int | None = None
    cap: float | None = None
    sinks: bool = False
    scales: str = "one"
    sm_scale: float | None = None
    tree: bool = False
    tree_rows: int | None = None

    @property
    def spec(self) -> AttentionSpec:
        """Of the cache."""
        return FullAttentionSpec(
            self.block_size,
            self.num_kv_heads,
            self.head_size,
            self.head_size_v,
            dtype=KVCacheDType(self.dtype),
            layout=self.layout,
            v_scale_layout=self.v_scale_layout,
        )

    @property
    def seq_lens(self) -> np.ndarray:
        """Tokens of each sequence."""
        return np.array(LENGTHS[self.lengths] if isinstance(self.lengths, str) else self.lengths, np.int32)

    def __str__(self) -> str:
        """What differs from the plainest case."""
        changed = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        }
        return "-".join(f"{name}={value}" for name, value in changed.items()) or "plain"


def check_large_values(attend: Attend, dtype: str, num_tokens: int, num_seqs: int = 1) -> None:
    """Values whose mean float32 holds and whose sum it does not: all equal, or near the largest of either sign."""
    spec = FullAttentionSpec(16, 1, 64, dtype=KVCacheDType(dtype))
    num_blocks = -(-num_tokens // 16)
    rng, element = np.random.default_rng(0), spec.storage_dtype
    keys = rng.standard_normal((num_blocks, 16, 1, 64))
    signs = np.where(np.arange(64) < 32, 1.0, rng.choice([1.0, -1.0], keys.shape))
    values = (3e38 * signs).astype(np.float32)
    pages = np.stack([keys, values], axis=1).astype(element)
    cache = cache_from_bytes(pages.view(np.uint8), spec, num_blocks)
    query = rng.standard_normal((num_seqs, 2, 64)).astype(ml_dtypes.bfloat16)
    tables = np.tile(np.arange(num_blocks, dtype=np.int32), (num_seqs, 1)), np.full(num_seqs, num_tokens, np.int32)
    out = np.asarray(attend(query, cache, *tables)[0], np.float64)
    stored = pages.astype(np.float64).swapaxes(0, 1).reshape(2, -1, 64)[:, :num_tokens]
    logits = np.asarray(query, np.float64) @ stored[0].T / 8
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    expected = weights / weights.sum(axis=-1, keepdims=True) @ stored[1]
    np.testing.assert_allclose(out / 3e38, expected / 3e38, atol=2e-2)


def is_valid(case: dict[str, Any]) -> bool:
    """Whether there is such a cache, and it does not take minutes."""
    can_swizzle, takes_per_head = "nvfp4" in case["dtype"], case["dtype"] in FP8_NAMES
    swizzles = case["v_scale_layout"] == "swizzled"
    if (swizzles and not (can_swizzle and case["block_size"] % 4 == 0)) or (
        case["scales"] == "per_head" and not takes_per_head
    ):
        return False
    heads = case["num_kv_heads"] * case["group"] * case["q_len"]
    return case["lengths"] != "long" or (heads <= 8 and case["head_size"] == 64 and case["block_size"] >= 16)


AXES: dict[str, Sequence[Any]] = {
    "dtype": ("float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2", "nvfp4"),
    "query_dtype": ("bfloat16", "float16", "float32"),
    "layout": ("NHD", "HND"),
    "v_scale_layout": ("linear", "swizzled"),
    "head_size": (64, 80, 96, 112, 128, 192, 256),
    "head_size_v": (None, 64, 128),
    "block_size": (1, 8, 16, 32, 784),
    "num_kv_heads": (1, 2, 3, 8),
    "group": (1, 2, 3, 4, 5, 7, 8, 12, 16),
    "q_len": (1, 2, 3, 4, 8),
    "lengths": ("mixed", "few", "long", "one"),
    "window": (None, 1, 16, 127, 1024),
    "cap": (None, 50.0),
    "sinks": (False, True),
    "scales": ("one", "scalar", "per_head"),
}
"""Everything that a kernel may have to be written for."""


def cases(strength: int) -> list[Case]:
    """Cases that together hold every valid combination of the values of so many axes."""
    return [Case(**case) for case in covering(AXES, is_valid, strength)]


@dataclasses.dataclass(frozen=True)
class Problem:
    """A call, and what the bytes that it may use stand for.

    Attributes:
      args: query, cache, block table and lengths.
      options: of the call.
      keys: of each sequence float32 `[length, num_kv_heads, head_size]`, 0 where no row sees the token.
      values: likewise.
    """

    case: Case
    args: tuple[np.ndarray, KVCache, np.ndarray, np.ndarray]
    options: dict[str, Any]
    keys: list[np.ndarray]
    values: list[np.ndarray]

    def run(self, attend: Attend) -> tuple[np.ndarray, np.ndarray]:
        """The results of an implementation, of the shapes and dtypes that they have to have."""
        out, lse = map(np.asarray, attend(*self.args, **self.options))
        query, spec = self.args[0], self.case.spec
        assert (out.shape, out.dtype) == ((*query.shape[:-1], spec.head_size_v), query.dtype)
        assert (lse.shape, lse.dtype) == (query.shape[:-1], np.float32)
        return out, lse


def build(
    case: Case, *, seed: int = 0, fill: int = NAN, garbage: Sequence[int] = (-1, 2**31 - 1, -(2**31), 0)
) -> Problem:
    """The call of a case.

    Two problems of one case and seed differ in what must not matter alone: `fill` is every byte that no row may see,
    also of pages that a table names before a window, and of `garbage` are the entries of the tables where no row sees a
    token, in turns; 0 stands for a block of the cache that nobody may see.
    """
    spec, seq_lens, rng = case.spec, case.seq_lens, np.random.default_rng(seed)
    first = first_seen(case)
    max_blocks = max(int(-(-seq_lens.max(initial=0) // spec.block_size)), 1) + 1
    needed = [
        range(start // spec.block_size, -(-end // spec.block_size)) for start, end in zip(first, seq_lens, strict=True)
    ]
    num_blocks = sum(map(len, needed)) + 2
    blocks = iter(rng.permutation(np.arange(1, num_blocks)))  # block 0 is nobody's
    block_table = np.resize(np.array(garbage, np.int32), (len(seq_lens), max_blocks))
    for row, columns in zip(block_table, needed, strict=True):
        row[columns.start : columns.stop] = [next(blocks) for _ in columns]

    scales = {
        "one": (np.float32(1), np.float32(1)),
        "scalar": (np.float32(0.37), np.float32(2.3)),
        "per_head": tuple(np.float32([0.37, 2.3])[:, None] * np.linspace(0.5, 2, spec.num_kv_heads, dtype=np.float32)),
    }[case.scales]
    pages = np.full((num_blocks, spec.page_size_bytes), fill, np.uint8)
    dense: list[list[np.ndarray]] = [[], []]
    for seq, (start, end) in enumerate(zip(first, seq_lens, strict=True)):
        position = np.arange(start, end)
        block, token = block_table[seq, position // spec.block_size], position % spec.block_size
        for half, size in enumerate((spec.head_size, spec.head_size_v)):
            x = rng.standard_normal((len(position), spec.num_kv_heads, size)).astype(np.float32)
            rows = reference.encode(x, reference.part(spec, half), scales[half])
            for at, stored in zip(cache_model.offsets(spec, half), rows, strict=True):
                pages[block[:, None, None], at[token]] = stored
            decoded = np.zeros((end, spec.num_kv_heads, size), np.float32)
            decoded[start:] = reference.decode(rows, reference.part(spec, half), scales[half])
            dense[half].append(decoded)

    shape = (len(seq_lens), case.q_len, case.num_kv_heads * case.group, case.head_size)
    query = rng.standard_normal(shape).astype(np.float32).astype(INPUT_DTYPES[case.query_dtype])
    options = {"k_scale": scales[0], "v_scale": scales[1], "sm_scale": case.sm_scale}
    options |= {"sliding_window": case.window, "logits_soft_cap": case.cap}
    options["sinks"] = (2 * rng.standard_normal(shape[2])).astype(np.float32) if case.sinks else None
    if case.tree:
        width = case.tree_rows or case.q_len
        seen = rng.random((len(seq_lens), width, width)) < 0.5  # later tokens too, which nobody sees
        options["tree_mask"] = seen | np.eye(width, dtype=bool)
    args = query, cache_from_bytes(pages, spec, num_blocks), block_table, seq_lens
    return Problem(case, args, options, *dense)


def first_seen(case: Case) -> np.ndarray:
    """The first token of each sequence that a row of its query sees."""
    q_lens = np.full(len(case.seq_lens), case.q_len) if case.q_lens is None else np.array(case.q_lens)
    before = case.seq_lens if case.window is None else case.window + q_lens - 1
    return np.where(q_lens > 0, np.maximum(case.seq_lens - before, 0), case.seq_lens)


@dataclasses.dataclass(frozen=True)
class Expected:
    """Results of one sequence in float64, `[q_len, num_heads, ...]`, and what errors they may have."""

    out: np.ndarray
    lse: np.ndarray
    out_max: float
    out_rms: float
    lse_max: float


def expected(problem: Problem, seq: int) -> Expected:
    """Attention in float64, and twice the error of attention with float32 logits whose weights are rounded to bfloat16.

    The allowance for float32's own rounding, which matters where the weights of few tokens are exact, goes by the
    largest sum of magnitudes that a logit is made of.
    """
    query, keys, values = problem.args[0][seq], problem.keys[seq], problem.values[seq]
    out, lse, magnitude = attention(problem, query, keys, values, seq, np.float64)
    # Which weights are rounded up depends on the logit that they are relative to.
    rounded = [attention(problem, query, keys, values, seq, np.float32, shift)[0] for shift in (0.0, 0.5)]
    error = np.max([np.abs(each.astype(query.dtype).astype(np.float64) - out) for each in rounded], axis=0)
    float32_eps = float(np.finfo(np.float32).eps)
    logits_error = float32_eps * (8 * magnitude + 16)
    floor = logits_error * np.abs(values).max(initial=0)
    return Expected(out, lse, 2 * error.max(initial=0) + floor, 2 * _rms(error) + floor, 4 * logits_error)


def expected_in_fp8(problem: Problem, seq: int) -> Expected:
    """Attention in float64, and twice the error of the same with operands and weights rounded to e4m3.

    For results that tensor cores sum with some 14 bits, a hundredth of their magnitude is allowed besides, and 0.05 of
    the log-sum-exp.
    """
    query, keys, values = problem.args[0][seq], problem.keys[seq], problem.values[seq]
    out, lse, _ = attention(problem, query, keys, values, seq, np.float64)
    rows = query.astype(np.float64)
    power = 2.0 ** np.ceil(np.log2(np.abs(rows).max(axis=-1, keepdims=True)) - 8)
    operands = _to_e4m3(rows / power) * power, *map(_with_four_bits, (keys, values))
    rounded, rounded_lse, _ = attention(problem, *operands, seq, np.float64, in_fp8=True)
    error, lse_error = np.abs(rounded - out), np.abs(rounded_lse - lse)[np.isfinite(lse)]
    floor = 0.01 * _rms(out)
    largest = 4 * error.max(initial=0) + 0.1 * np.abs(out).max(initial=0)
    return Expected(out, lse, largest, 2 * _rms(error) + floor, 2 * lse_error.max(initial=0) + 0.05)


def _with_four_bits(x: np.ndarray) -> np.ndarray:
    """Rounded to the significant bits of e4m3, whatever the exponent."""
    fraction, exponent = np.frexp(x.astype(np.float64))
    return np.ldexp(np.round(fraction * 16) / 16, exponent)


def _to_e4m3(x: np.ndarray) -> np.ndarray:
    return np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)


def attention(
    problem: Problem,
    query: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    seq: int,
    dtype: Any,
    shift: float = 0.0,
    in_fp8: bool = False,
) -> tuple[np.ndarray, np.ndarray, float]:
    """Of one sequence `[q_len, num_heads, head_size_v]`, `[q_len, num_heads]` and the largest sum in a logit.

    In float32 the weights go to bfloat16 before they meet the values, as they do on tensor cores, relative to a logit
    whose binary logarithm is `shift` above the largest. With `in_fp8` they go to e4m3, 256 for the power of two above
    the largest one, and their sum is that of the rounded ones.
    """
    case, sinks = problem.case, problem.options["sinks"]
    q_len, num_heads, head_size = query.shape
    sm_scale = dtype(head_size**-0.5 if case.sm_scale is None else case.sm_scale)
    grouped = query.astype(dtype).reshape(q_len, case.num_kv_heads, case.group, head_size)
    out = np.zeros((q_len, case.num_kv_heads, case.group, values.shape[-1]))
    lse = np.full((q_len, case.num_kv_heads, case.group), -np.inf)
    magnitude = 0.0
    for row in range(q_len):
        seen = seen_tokens(problem, len(keys), q_len, row, seq)
        for head in range(case.num_kv_heads):
            k, v, q = keys[seen, head].astype(dtype), values[seen, head].astype(dtype), grouped[row, head]
            logits = q @ k.T * sm_scale
            magnitude = max(magnitude, (np.abs(q) @ np.abs(k).T * abs(sm_scale)).max(initial=0))
            if case.cap is not None:
                logits = dtype(case.cap) * np.tanh(logits / dtype(case.cap))
            sink = np.full(case.group, -np.inf) if sinks is None else sinks.reshape(-1, case.group)[head]
            largest = np.maximum(logits.max(axis=-1, initial=-np.inf), sink.astype(dtype))[:, None]
            if not len(k) and sinks is None:
                continue
            if in_fp8:
                largest = np.ceil(largest * np.log2(np.e)) / np.log2(np.e)
            weights = np.exp(logits - largest)
            if in_fp8:
                weights = _to_e4m3(256 * weights) / 256
            total = weights.sum(axis=-1) + np.exp(sink - largest[:, 0])
            if dtype is np.float32:
                unit = np.float32(2**-shift)
                weights = (weights * unit).astype(ml_dtypes.bfloat16).astype(np.float32) / unit
            out[row, head] = weights @ v / total[:, None]
            lse[row, head] = largest[:, 0] + np.log(total)
    return out.reshape(q_len, num_heads, -1), lse.reshape(q_len, num_heads), float(magnitude)


def seen_tokens(problem: Problem, length: int, q_len: int, row: int, seq: int) -> np.ndarray:
    """The tokens that a row of the query sees, in order.

    In a tree, positions are those of the tokens before the query, and then the depths of the query tokens.
    """
    context, window = length - q_len, problem.case.window
    stored = np.arange(max(context + row + 1, 0))
    position, seen = stored, np.full(len(stored), True)
    if problem.case.tree and q_len <= problem.options["tree_mask"].shape[1]:
        mask = np.tril(problem.options["tree_mask"][seq])[:q_len, :q_len]
        depth = mask.sum(axis=1) - mask.diagonal()
        position = np.where(stored < context, stored, context + depth[np.maximum(stored - context, 0)])
        seen = (stored < context) | mask[row, np.maximum(stored - context, 0)]
        row = int(depth[row])
    if window is not None:
        seen &= position > context + row - window
    return stored[seen]


def error_shares(problem: Problem, out: np.ndarray) -> list[float]:
    """Of each sequence that has tokens, its root mean square error over that of weights rounded to bfloat16."""
    shares = []
    for seq in np.flatnonzero(problem.case.seq_lens):
        want = expected(problem, seq)
        shares.append(2 * _rms(out[seq].astype(np.float64) - want.out) / want.out_rms)
    return shares


def _rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(x**2))) if x.size else 0.0


def assert_right(
    problem: Problem,
    out: Sequence[np.ndarray],
    lse: Sequence[np.ndarray],
    *,
    lse_factor: float = 1,
    max_factor: float = 1,
    in_fp8: Callable[[int], bool] = lambda q_len: False,
) -> None:
    """Holds results against `expected`, each sequence by its own errors, and rows that see nothing exactly.

    Query and results are arrays of all sequences, or lists of one for each, which may have different numbers of rows.
    `lse_factor` is what rounding of the logits adds to their error, `max_factor` what rounding of partial results adds
    to the largest one of results. Of sequences whose number of rows is `in_fp8`, errors are those of `expected_in_fp8`.
    """
    for seq, length in enumerate(problem.case.seq_lens):
        q_len = len(out[seq])
        if not q_len:
            continue
        want = expected_in_fp8(problem, seq) if in_fp8(q_len) else expected(problem, seq)
        nothing = np.arange(q_len) < q_len - length
        assert not out[seq][nothing].astype(np.float32).any(), f"sequence {seq} sees nothing, and is not 0"
        error = np.abs(out[seq].astype(np.float64) - want.out)
        rms = _rms(error)
        message = f"sequence {seq} of length {length}: largest error {error.max():.3g}, rms {rms:.3g}"
        out_max = max_factor * want.out_max
        assert error.max() <= out_max, f"{message}, expected at most {out_max:.3g}"
        assert rms <= want.out_rms, f"{message}, expected rms at most {want.out_rms:.3g}"
        has_denominator = ~np.isneginf(want.lse)
        np.testing.assert_array_equal(~np.isneginf(lse[seq]), has_denominator)
        lse_error = np.abs(lse[seq][has_denominator].astype(np.float64) - want.lse[has_denominator]).max(initial=0)
        lse_max = lse_factor * want.lse_max
        assert lse_error <= lse_max, f"{message}; of lse {lse_error:.3g}, expected at most {lse_max:.3g}"


def check(case: Case, attend: Attend, *, seed: int = 0) -> None:
    """Right, the same bits when called again, and the same bits whatever is where nobody may look."""
    problem = build(case, seed=seed)
    results = problem.run(attend)
    # Where values have a scale of their token, what is rounded is the weight times the scale.
    has_row_scales = case.spec.dtype.parts[1].info.block == "row"
    assert_right(problem, *results, max_factor=1.5 if has_row_scales else 1)
    for other in (
        problem,
        build(case, seed=seed, fill=ZERO, garbage=(-1,)),
        build(case, seed=seed, garbage=(0, 7, -3)),
    ):
        for got, first in zip(other.run(attend), results, strict=True):
            assert_same_bytes(got, first)


def check_alone(case: Case, attend: Attend, *, sequences: Iterable[int]) -> None:
    """The same bits of a sequence that is the only one, of a narrower table, and elsewhere in another batch."""
    problem = build(case)
    query, cache, table, seq_lens = problem.args
    results = problem.run(attend)
    for seq in sequences:
        blocks = -(-int(seq_lens[seq]) // problem.case.block_size)
        for batch, width in (([seq], blocks + 1), ([*range(seq, len(seq_lens)), *range(seq)][::-1], None)):
            part = dataclasses.replace(problem, args=(query[batch], cache, table[batch, :width], seq_lens[batch]))
            for got, whole in zip(part.run(attend), results, strict=True):
                assert_same_bytes(got[batch.index(seq)], whole[seq])
