"""`StepMetadata`: from the pool's sequences, and from what stacks for TPUs hold, the same step."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvjax
from kvjax import BlockPool, KVCacheTypeError, KVCacheValueError, PagedSequence, StepMetadata

MAX_SEQS, MAX_BLOCKS, MAX_TOKENS = 5, 6, 24  # one size for all examples: compiled once a block size

from_page_indices = jax.jit(StepMetadata.from_page_indices, static_argnames=("block_size", "num_tokens", "max_blocks"))


def sequences_of(pool: BlockPool, lengths: list[int]) -> list[PagedSequence]:
    sequences = [pool.sequence() for _ in lengths]
    for _ in range(max(lengths, default=0)):  # a token at a time: their blocks are interleaved
        growing = [one for one, length in zip(sequences, lengths, strict=True) if one.num_tokens < length]
        pool.append(growing, [1] * len(growing))
    return sequences


def assert_same(got: StepMetadata, expected: StepMetadata) -> None:
    for name in ("block_table", "seq_lens", "cu_q_lens", "slot_mapping"):
        array = np.asarray(getattr(got, name))
        assert array.dtype == np.int32, name
        np.testing.assert_array_equal(array, getattr(expected, name), err_msg=name)


def naive(sequences: list[PagedSequence], q_lens: list[int]) -> StepMetadata:
    """Entry by entry, of the sizes above."""
    table, lens = np.full((MAX_SEQS, MAX_BLOCKS), -1), np.zeros(MAX_SEQS, int)
    cu, slots = np.full(MAX_SEQS + 1, sum(q_lens)), np.full(MAX_TOKENS, -1)
    token = 0
    for i, (sequence, q_len) in enumerate(zip(sequences, q_lens, strict=True)):
        cu[i], lens[i] = token, sequence.num_tokens
        for column, block in enumerate(sequence.blocks):
            table[i, column] = block
        for position in range(sequence.num_tokens - q_len, sequence.num_tokens):
            size = sequence.pool.block_size
            slots[token] = sequence.blocks[position // size] * size + position % size
            token += 1
    return StepMetadata(table, lens, cu, slots)


STEPS = st.lists(
    st.integers(0, 12).flatmap(lambda length: st.tuples(st.just(length), st.integers(0, min(length, 4)))), max_size=5
)


@settings(max_examples=60)
@given(block_size=st.sampled_from([2, 4]), lengths=STEPS, data=st.data())
def test_the_pool_and_flat_page_indices_give_the_same_step(block_size: int, lengths, data: st.DataObject):
    pool = BlockPool(40, block_size)
    sequences, q_lens = sequences_of(pool, [length for length, _ in lengths]), [q_len for _, q_len in lengths]
    for sequence, q_len in zip(sequences, q_lens, strict=True):
        sequence.free_before(data.draw(st.integers(0, sequence.num_tokens - q_len)))
    step = StepMetadata.from_sequences(
        sequences, q_lens, num_tokens=MAX_TOKENS, num_seqs=MAX_SEQS, max_blocks=MAX_BLOCKS
    )
    expected = naive(sequences, q_lens)
    assert_same(step, expected)

    garbage = np.random.default_rng(0)
    rows = [np.append(one.blocks, garbage.integers(0, 40, MAX_BLOCKS - len(one.blocks))) for one in sequences]
    unused = garbage.integers(0, 40, (MAX_SEQS - len(rows)) * MAX_BLOCKS)
    flat = np.concatenate([*rows, unused]).astype(np.int32)
    static = {"block_size": block_size, "num_tokens": MAX_TOKENS}
    assert_same(from_page_indices(flat, step.seq_lens, step.cu_q_lens, **static), expected)

    aligned = -(-step.seq_lens // block_size) * block_size
    cu_kv_lens = np.append(0, np.cumsum(aligned)).astype(np.int32)
    packed = np.concatenate([*(one.blocks for one in sequences), np.zeros(60, np.int32)])[:60].astype(np.int32)
    packed_step = functools.partial(from_page_indices, packed, max_blocks=MAX_BLOCKS, cu_kv_lens=cu_kv_lens, **static)
    assert_same(packed_step(step.seq_lens, step.cu_q_lens), expected)

    # Rows that are not used may hold anything, where their number is given.
    used = len(sequences)
    lens, cu = step.seq_lens.copy(), step.cu_q_lens.copy()
    lens[used:], cu[used + 1 :] = garbage.integers(-3, 9, MAX_SEQS - used), garbage.integers(-3, 90, MAX_SEQS - used)
    assert_same(packed_step(lens, cu, num_seqs=np.array([used], np.int32)), expected)


def test_rows_of_length_0_write_nothing_whatever_their_queries():
    """A padded decode step of sglang-jax has a query token in every row."""
    step = StepMetadata.from_page_indices(
        np.zeros(8, np.int32), np.array([3, 0, 0], np.int32), np.arange(4, dtype=np.int32),
        block_size=2, num_tokens=3, max_blocks=2, cu_kv_lens=np.array([0, 4, 4, 4], np.int32),
    )  # fmt: skip
    assert step.slot_mapping.tolist() == [0, -1, -1]
    assert step.block_table.tolist() == [[0, 0], [-1, -1], [-1, -1]]
    assert step.token_rows()[1].tolist() == [2, -1, -1]


def test_each_token_has_a_row_and_a_position():
    pool = BlockPool(20, 4)
    step = StepMetadata.from_sequences(sequences_of(pool, [7, 3, 5, 1]), [3, 0, 1, 1], num_tokens=8, num_seqs=6)
    row, position = jax.jit(StepMetadata.token_rows)(step)
    assert row[:5].tolist() == [0, 0, 0, 2, 3]
    assert position.tolist() == [4, 5, 6, 4, 0, -1, -1, -1]


def test_the_smallest_size_that_fits_is_taken():
    pool = BlockPool(20, 4)
    sequences = sequences_of(pool, [7, 3])
    step = StepMetadata.from_sequences(sequences, [5, 1], num_tokens=(16, 4, 8), num_seqs=[2, 4], max_blocks=(1, 2, 3))
    assert (step.slot_mapping.shape, step.seq_lens.shape, step.block_table.shape) == ((8,), (2,), (2, 2))
    exact = StepMetadata.from_sequences(sequences, [5, 1])
    assert (exact.slot_mapping.shape, exact.cu_q_lens.tolist(), exact.block_table.shape) == ((6,), [0, 5, 6], (2, 2))
    nothing = StepMetadata.from_sequences([], [], num_seqs=2, max_blocks=1, num_tokens=2)
    assert (nothing.cu_q_lens.tolist(), nothing.slot_mapping.tolist()) == ([0, 0, 0], [-1, -1])
    assert nothing.token_rows()[1].tolist() == [-1, -1]


def test_a_step_is_written_and_read():
    """Two steps of a prompt and a decode together leave in the cache what one write of each sequence leaves."""
    spec = kvjax.FullAttentionSpec(4, 1, 16, dtype=kvjax.KVCacheDType.FLOAT32)
    pool = BlockPool(6, 4)
    sequences = [pool.sequence(), pool.sequence()]
    tokens = np.random.default_rng(0).standard_normal((2, 9, 1, 16)).astype(np.float32)
    cache = kvjax.KVCache.allocate(spec, 6)
    for q_lens in ([5, 1], [1, 8]):
        starts = [sequence.num_tokens for sequence in sequences]
        pool.append(sequences, q_lens)
        step = StepMetadata.from_sequences(sequences, q_lens, num_tokens=12, num_seqs=3, max_blocks=4)
        new = [tokens[i, start : start + q_len] for i, (start, q_len) in enumerate(zip(starts, q_lens, strict=True))]
        new = np.concatenate([*new, np.full((12 - sum(q_lens), 1, 16), np.nan, np.float32)])
        cache = kvjax.reshape_and_cache_flash(new, new, cache, step.slot_mapping)
    with kvjax.checked():
        keys, _ = kvjax.gather_kv(cache, step.block_table, step.seq_lens)
    for row, length in enumerate((6, 9)):
        np.testing.assert_array_equal(keys[row, :length], tokens[row, :length])
    assert not np.asarray(keys[2]).any()


def test_sequences_may_share_blocks_that_the_step_does_not_write_to():
    """Full blocks of a prefix, and a partial last block that one of them writes to."""
    pool = BlockPool(20, 4)
    first = pool.sequence()
    pool.append([first], [8])
    first.commit(np.arange(8))
    second = pool.sequence(np.arange(9))
    pool.append([first, second], [2, 1])
    step = StepMetadata.from_sequences([first, second], [2, 1])
    assert step.block_table[0, :2].tolist() == step.block_table[1, :2].tolist()
    assert len({*step.slot_mapping.tolist()}) == 3
    fork = first.fork()
    for q_lens in ([2, 0], [0, 1], [0, 0]):
        assert StepMetadata.from_sequences([first, fork], q_lens).cu_q_lens.tolist() == [0, q_lens[0], sum(q_lens)]
    pool.append([first, fork], [1, 1])
    assert len({*StepMetadata.from_sequences([first, fork], [3, 3]).slot_mapping.tolist()}) == 6


def test_sequences_that_would_write_to_the_same_slots_are_refused():
    """A sequence given twice, and a fork without an `append` since."""
    other, sequence = sequences_of(BlockPool(9, 4), [1, 6])
    with pytest.raises(KVCacheValueError, match="sequences: got a duplicate, expected each once"):
        StepMetadata.from_sequences([sequence, sequence], [1, 1])
    message = (
        r"sequences\[2\]: got new tokens in block 2, where sequences\[1\] has some too, expected a block of its own:"
        " BlockPool.append separates forks"
    )
    for q_lens in ([1, 2, 1], [0, 1, 5]):
        with pytest.raises(KVCacheValueError, match=message):
            StepMetadata.from_sequences([other, sequence, sequence.fork()], q_lens)


def test_a_step_without_sequences_has_padding_alone():
    step = StepMetadata.from_sequences([], [], num_tokens=4)
    for rows in (StepMetadata.token_rows, jax.jit(StepMetadata.token_rows)):
        assert [x.dtype for x in rows(step)] == [jnp.int32] * 2
        assert rows(step)[0].shape == (4,)
        assert rows(step)[1].tolist() == [-1] * 4
    none, cu = np.zeros(0, np.int32), np.zeros(1, np.int32)
    for build in (StepMetadata.from_page_indices, from_page_indices):
        for max_blocks in (0, 2):
            for packed in (None, cu):
                options = {"block_size": 4, "num_tokens": 2, "max_blocks": max_blocks, "cu_kv_lens": packed}
                step = build(none, none, cu, **options)
                assert step.slot_mapping.tolist() == [-1, -1]
                assert step.block_table.shape == (0, max_blocks)


def test_without_columns_of_the_block_table_nothing_is_written():
    lens, cu = np.array([3, 2], np.int32), np.array([0, 1, 2], np.int32)
    options = {"block_size": 4, "num_tokens": 3}
    packed = from_page_indices(np.arange(2), lens, cu, cu_kv_lens=np.int32([0, 4, 8]), max_blocks=0, **options)
    for step in (packed, from_page_indices(np.zeros(0, np.int32), lens, cu, **options)):
        assert step.slot_mapping.tolist() == [-1] * 3
        assert step.token_rows()[1].tolist() == [2, 1, -1]


@pytest.mark.parametrize("on_device", [False, True])
def test_int64_lengths_beyond_int32_do_not_wrap(on_device: bool):
    lens, cu = np.array([2**32 + 5, 3 - 2**32, 6], np.int64), np.array([0, 1, 2, 2**32 + 3], np.int64)
    with jax.enable_x64(on_device):
        arrays = [jnp.asarray(x) if on_device else x for x in (np.zeros((3, 1), np.int64), lens, cu, np.zeros(3, int))]
        row, position = StepMetadata(*arrays).token_rows()
    assert row.dtype == position.dtype == jnp.int32
    assert row.tolist() == [0, 1, 2]
    assert position[:2].tolist() == [2**31 - 2, -1]


def step_of(*lengths: int, **options):
    return lambda: StepMetadata.from_sequences(sequences_of(BlockPool(9, 4), list(lengths)), **options)


def given_back():
    (sequence,) = sequences_of(BlockPool(9, 4), [8])
    sequence.free_before(4)
    StepMetadata.from_sequences([sequence], [5])


def of_one(*, sequences=(), q_lens=(1,), **options):
    """A step of a sequence of 4 tokens, or of what is given."""
    return lambda: StepMetadata.from_sequences(
        sequences_of(BlockPool(9, 4), [4]) if sequences == () else sequences, q_lens, **options
    )


def flat(pages=4, lens=2, cu=3, dtype=np.int32, **options):
    arrays = [np.zeros(size, dtype) for size in (pages, lens, cu)]
    return lambda: StepMetadata.from_page_indices(*arrays, **{"block_size": 4, "num_tokens": 2, **options})


def other_pools():
    StepMetadata.from_sequences([BlockPool(1, 1).sequence(), BlockPool(1, 1).sequence()], [0, 0])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (step_of(4, q_lens=[]), KVCacheValueError, "q_lens: got 0 numbers, expected one for each of 1 sequences"),
        (step_of(4, q_lens=[5]), KVCacheValueError, r"q_lens\[0\]: got 5, expected an int of at most 4"),
        (step_of(4, q_lens=[-1]), KVCacheValueError, r"q_lens\[0\]: got -1, expected an int of at least 0"),
        (step_of(4, q_lens=[4], num_tokens=3), KVCacheValueError, "num_tokens: got 3, expected at least 4"),
        (step_of(4, q_lens=[4], num_seqs=[0]), KVCacheValueError, r"num_seqs: got \[0\], expected at least 1"),
        (step_of(9, q_lens=[4], max_blocks=(1, 2)), KVCacheValueError, r"max_blocks: got \(1, 2\), expected at least"),
        (given_back, KVCacheValueError, r"q_lens\[0\]: got 5 new tokens, the one at position 3 in a freed block"),
        (other_pools, KVCacheValueError, r"sequences\[1\]: got a sequence of another pool"),
        (of_one(sequences=[1]), KVCacheTypeError, r"sequences\[0\]: got an int, expected a PagedSequence"),
        (of_one(sequences=None), KVCacheTypeError, "sequences: got None, expected a sequence of PagedSequences"),
        (of_one(q_lens=1), KVCacheTypeError, "q_lens: got an int, expected a sequence of ints, one for each of the"),
        (of_one(q_lens=iter([1, 1])), KVCacheValueError, "q_lens: got 2 numbers, expected one for each of 1 sequences"),
        (of_one(window_rows=0), KVCacheTypeError, "window_rows: got an int, expected a sequence of ints, one for each"),
        (of_one(window_rows=[0, 1]), KVCacheValueError, "window_rows: got 2 rows, expected one for each of 1 sequence"),
        (flat(pages=5), KVCacheValueError, "page_indices: got 5 for 2 sequences, expected an equal number for each"),
        (flat(lens=0, cu=1), KVCacheValueError, "page_indices: got 4 for 0 sequences, expected an equal number"),
        (flat(cu=2), KVCacheValueError, r"cu_q_lens: got shape \(2,\), expected \[max_num_seqs \+ 1=3\]"),
        (flat(dtype=np.float32), KVCacheTypeError, "page_indices: got dtype float32, expected one of int32, int64"),
        (flat(cu_kv_lens=np.zeros(3, np.int32)), KVCacheValueError, "max_blocks: got None with cu_kv_lens, expected"),
        (flat(cu_kv_lens=np.zeros(2, np.int32), max_blocks=2), KVCacheValueError, r"cu_kv_lens: got shape \(2,\)"),
        (flat(block_size=0), KVCacheValueError, "block_size: got 0, expected an int of at least 1"),
        (flat(num_seqs=2**32 + 1), KVCacheValueError, "num_seqs: got 4294967297, expected an int of at most 2"),
        (
            flat(num_seqs=np.array([2**32 + 1])),
            KVCacheValueError,
            "num_seqs: got 4294967297, expected an int of at mos",
        ),
        (flat(num_seqs=-1), KVCacheValueError, "num_seqs: got -1, expected an int of at least 0"),
        (flat(num_seqs=np.int32(-2)), KVCacheValueError, "num_seqs: got -2, expected an int of at least 0"),
        (flat(num_seqs=1.7), KVCacheTypeError, "num_seqs: got 1.7 of type float, expected an int"),
        (
            flat(num_seqs=np.float32([1.7])),
            KVCacheTypeError,
            "num_seqs: got dtype float32, expected one of int32, int64",
        ),
        (flat(num_seqs=True), KVCacheTypeError, "num_seqs: got True of type bool, expected an int"),
        (flat(num_seqs=[1]), KVCacheTypeError, r"num_seqs: got \[1\] of type list, expected an int"),
        (
            flat(num_seqs=np.zeros(2, np.int32)),
            KVCacheValueError,
            r"num_seqs: got shape \(2,\), expected \[\] or \[1\]",
        ),
    ],
)
def test_invalid_arguments_are_refused_by_name(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.full
@pytest.mark.parametrize(("number", "used"), [(-1, 0), (0, 0), (1, 1), (2, 2), (3, 2), (2**32 + 1, 2)])
def test_a_number_of_sequences_on_the_device_is_clamped(number: int, used: int):
    lens, cu = np.array([3, 2], np.int32), np.array([0, 3, 5], np.int32)
    build = functools.partial(StepMetadata.from_page_indices, np.arange(4), lens, cu, block_size=4, num_tokens=6)
    expected = build(num_seqs=used)
    assert expected.seq_lens.tolist() == [*lens[:used], *[0] * (2 - used)]
    assert expected.cu_q_lens.tolist() == [*cu[: used + 1], *[cu[used]] * (2 - used)]
    with jax.enable_x64(number > 2**31):
        for make in (build, jax.jit(build)):
            assert_same(make(num_seqs=jnp.asarray([number])), expected)
        if number != used:
            with kvjax.checked(), pytest.raises(KVCacheValueError, match=f"num_seqs: got {number}, expected between 0"):
                build(num_seqs=jnp.asarray(number))


@pytest.mark.parametrize("page", [2**32 + 1, 2**31 - 1, 2**30, -5, -(2**40)])
def test_a_page_that_no_cache_has_is_none(page: int):
    pages, lens, cu = np.array([page, 1], np.int64), np.array([1, 1]), np.array([0, 1, 2])
    with jax.numpy_rank_promotion("raise"):
        step = StepMetadata.from_page_indices(pages, lens, cu, block_size=4, num_tokens=2)
    assert step.block_table.dtype == step.slot_mapping.dtype == jnp.int32
    assert step.slot_mapping.tolist() == [-1, 4]
    assert step.block_table[0, 0] < 0


SPECS = {
    "float32": kvjax.FullAttentionSpec(4, 2, 16, dtype=kvjax.KVCacheDType.FLOAT32),
    "fp8-diffkv": kvjax.FullAttentionSpec(4, 2, 16, 32, dtype=kvjax.KVCacheDType.FP8_E4M3, layout="HND"),
    "nvfp4-window": kvjax.SlidingWindowSpec(4, 2, 16, dtype=kvjax.KVCacheDType.NVFP4, sliding_window=3),
}
NUM_LAYERS, CHUNK, NUM_TOKENS = 2, 6, 12
LENGTHS = (17, 1, 9)


def attend_to_layers(cache, query, key, value, step, options):
    """A model's step, whose layers are a scan over one cache."""

    def run(cache, layer):
        out, cache = kvjax.attend(query, key, value, cache, step, layer=layer, max_q_len=CHUNK, **options)
        return cache, out

    return jax.lax.scan(run, cache, jnp.arange(NUM_LAYERS))


def dense(query, key, value, window):
    """Causal attention of one whole sequence in float64."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    key, value = (np.repeat(x, query.shape[1] // x.shape[1], axis=1) for x in (key, value))
    logits = np.einsum("qhd,khd->hqk", query, key) / np.sqrt(query.shape[2])
    age = np.arange(len(query))[:, None] - np.arange(len(query))
    seen = (age >= 0) & (age < (window or len(query)))
    weights = np.exp(np.where(seen, logits, -np.inf) - np.max(logits, axis=2, keepdims=True, where=seen, initial=-1e9))
    return np.einsum("hqk,khd->qhd", weights / weights.sum(axis=2, keepdims=True), value)


@pytest.mark.parametrize("name", [pytest.param("float32", marks=pytest.mark.full), "fp8-diffkv", "nvfp4-window"])
def test_attention_in_steps_is_that_of_whole_sequences(name: str):
    """Prompts in chunks beside sequences that decode, over what the cache gives back of keys and values."""
    spec = SPECS[name]
    rng = np.random.default_rng(0)
    new = [rng.standard_normal((length, 6 + 2 + 2, 32), np.float32) for length in LENGTHS]
    parts = [(x[:, :6, :16], x[:, 6:8, :16], x[:, 8:, : spec.head_size_v]) for x in new]
    pool = BlockPool(12, spec.block_size)
    sequences = [pool.sequence() for _ in LENGTHS]
    scales = {"k_scale": np.float32([0.01, 0.02]), "v_scale": np.float32(0.015)} if spec.dtype.is_quantized else {}
    cache = kvjax.KVCache.allocate(spec, pool.num_blocks, num_layers=NUM_LAYERS, **scales)
    address = cache.kv.unsafe_buffer_pointer()
    run = jax.jit(functools.partial(attend_to_layers, options={"unique_slots": True}), donate_argnums=0)
    attended: list[list[np.ndarray]] = [[] for _ in LENGTHS]
    while any(one.num_tokens < length for one, length in zip(sequences, LENGTHS, strict=True)):
        starts = [one.num_tokens for one in sequences]
        q_lens = [
            min(length - start, CHUNK if i == 0 else 2)
            for i, (start, length) in enumerate(zip(starts, LENGTHS, strict=True))
        ]
        pool.append(sequences, q_lens)
        step = StepMetadata.from_sequences(sequences, q_lens, num_tokens=NUM_TOKENS, num_seqs=4, max_blocks=6)
        rows = [
            np.concatenate(
                [part[half][start : start + q_len] for part, start, q_len in zip(parts, starts, q_lens, strict=True)]
            )
            for half in range(3)
        ]
        padding = ((0, NUM_TOKENS - sum(q_lens)), (0, 0), (0, 0))
        rows = [np.pad(x, padding, constant_values=np.nan) for x in rows]
        cache, out = run(cache, *rows, step)
        assert not np.asarray(out[:, sum(q_lens) :]).any()
        for i, of_one in enumerate(np.split(np.asarray(out)[:, : sum(q_lens)], np.cumsum(q_lens)[:-1], axis=1)):
            attended[i].append(of_one)
    assert cache.kv.unsafe_buffer_pointer() == address
    for i, (one, part) in enumerate(zip(sequences, parts, strict=True)):
        got = np.concatenate(attended[i], axis=1)
        for layer in range(NUM_LAYERS):
            stored = kvjax.gather_kv(
                cache, np.array([one.blocks]), np.array([one.num_tokens]), layer=layer, dtype=np.float32
            )
            key, value = (np.asarray(x)[0, : one.num_tokens] for x in stored)
            np.testing.assert_allclose(got[layer], dense(part[0], key, value, spec.sliding_window), rtol=0, atol=1e-5)
            assert np.abs(key - part[1]).max() < 0.6  # what was stored is what was given, as near as the dtype has it


def test_options_reach_the_write_and_the_attention():
    spec = SPECS["nvfp4-window"]
    rng = np.random.default_rng(1)
    query, key, value = (rng.standard_normal((3, heads, 16), np.float32) for heads in (6, 2, 2))
    cache = kvjax.KVCache.allocate(spec, 4)
    step = StepMetadata(*(np.array(x, np.int32) for x in ([[2]], [3], [0, 3], [8, 9, 10])))
    options = {
        "sm_scale": 0.3,
        "sliding_window": 2,
        "logits_soft_cap": 2.0,
        "sinks": np.linspace(0, 1, 6, dtype=np.float32),
    }
    scales = {"k_scale": 0.01, "v_scale": 0.02}
    got, written = kvjax.attend(query, key, value, cache, step, **options, **scales, implementation="xla")
    expected_cache = kvjax.reshape_and_cache_flash(key, value, cache, step.slot_mapping, **scales)
    np.testing.assert_array_equal(written.kv, expected_cache.kv)
    tables = step.block_table, step.seq_lens, step.cu_q_lens
    expected = kvjax.ragged_paged_attention(query, expected_cache, *tables, **options, **scales)
    np.testing.assert_array_equal(got, expected)
    with pytest.raises(kvjax.UnsupportedError, match="reshape_and_cache_flash: implementation 'mosaic' cannot serve"):
        kvjax.attend(query, key, value, cache, step, implementation="mosaic")


def test_a_tree_reaches_the_attention_and_has_no_place_in_an_exact_window():
    rng = np.random.default_rng(1)
    query, key, value = (rng.standard_normal((3, heads, 16), np.float32) for heads in (6, 2, 2))
    cache = kvjax.KVCache.allocate(SPECS["float32"], 4)
    step = StepMetadata(*(np.array(x, np.int32) for x in ([[2]], [3], [0, 3], [8, 9, 10])))
    mask = np.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]], bool)
    got, written = kvjax.attend(query, key, value, cache, step, tree_mask=mask, sliding_window=2)
    tables = step.block_table, step.seq_lens, step.cu_q_lens
    expected = kvjax.ragged_paged_attention(query, written, *tables, tree_mask=mask, sliding_window=2)
    np.testing.assert_array_equal(got, expected)
    branch = np.array([0, 2])
    of_branch = StepMetadata(*(np.array(x, np.int32) for x in ([[2]], [2], [0, 2], [8, 9])))
    rows = query[branch], key[branch], value[branch]
    alone, _ = kvjax.attend(*rows, cache, of_branch, sliding_window=2)
    np.testing.assert_allclose(np.asarray(got)[branch], alone, rtol=0, atol=1e-6)
    window = kvjax.ExactWindow.allocate(SPECS["float32"], 1, 16)
    with pytest.raises(kvjax.UnsupportedError, match="tree_mask: got one with an exact window, expected None"):
        kvjax.attend(query, key, value, cache, step, exact_window=window, tree_mask=mask)


@pytest.mark.parametrize("batch", [(1, 6), (2, 3), (6, 1)])
def test_a_batch_of_equally_many_tokens_is_taken_as_it_comes(batch: tuple[int, int]):
    """The second row of the batch, padded to 3 tokens, has one."""
    rng = np.random.default_rng(3)
    rows = [rng.standard_normal((6, heads, 16), np.float32) for heads in (6, 2, 2)]
    cache = kvjax.KVCache.allocate(SPECS["float32"], 4)
    step = StepMetadata(*(np.array(x, np.int32) for x in ([[2], [1]], [3, 1], [0, 3, 4], [8, 9, 10, 4, -1, -1])))
    expected, expected_cache = kvjax.attend(*rows, cache, step)
    got, written = jax.jit(kvjax.attend)(*(x.reshape(*batch, *x.shape[1:]) for x in rows), cache, step)
    np.testing.assert_allclose(got, expected.reshape(*batch, *expected.shape[1:]), rtol=0, atol=1e-6)
    np.testing.assert_array_equal(written.kv, expected_cache.kv)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"metadata": None}, KVCacheTypeError, "metadata: got None, expected a StepMetadata"),
        ({"cache": 3}, KVCacheTypeError, "cache: got an int, expected a KVCache"),
        (
            {"query": np.zeros((2, 6, 16), np.float32)},
            KVCacheValueError,
            "query: got shape (2, 6, 16), expected [num_to",
        ),
        (
            {"query": np.zeros((2, 2, 6, 16), np.float32)},
            KVCacheValueError,
            "query: got shape (2, 2, 6, 16), expected batch * time to be the metadata's num_tokens=3",
        ),
        (
            {"query": np.zeros((1, 3, 6, 16), np.float32)},
            KVCacheValueError,
            "key: got shape (3, 2, 16), expected the query's (1, 3), then",
        ),
        (
            {"key": np.zeros((4, 2, 16), np.float32)},
            KVCacheValueError,
            "key: got shape (4, 2, 16), expected the query's (3,), then",
        ),
        ({"layer": 0}, KVCacheValueError, "layer: got 0 for a cache without num_layers"),
    ],
)
def test_a_step_of_other_rows_is_refused(changes, error, message):
    x = np.zeros((3, 2, 16), np.float32)
    step = StepMetadata(*(np.array(x, np.int32) for x in ([[2]], [3], [0, 3], [8, 9, 10])))
    cache = kvjax.KVCache.allocate(SPECS["float32"], 4)
    arguments = {"query": np.zeros((3, 6, 16), np.float32), "key": x, "value": x, "cache": cache, "metadata": step}
    with pytest.raises(error) as raised:
        kvjax.attend(**arguments | changes)
    assert str(raised.value).startswith(message)
