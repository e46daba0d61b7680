"""The benchmark of attention: its rows and its peers' arguments; no test asserts a time."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags
from support.helpers import matrix
from support.interpret_mode import interpret_mode

from benchmarks import bars, shapes
from benchmarks.peers import attends, attends_flashinfer, attends_vllm, read
from benchmarks.peers.attention_inputs import FP8_ERROR, OWN_ERROR, AttentionInputs, AttentionJob
from benchmarks.shapes import BLOCK_SIZE, AttentionRow, Step
from kvjax import CacheLayout, KVCacheDType

BFLOAT16, FP8, NVFP4 = shapes.TIMED_DTYPES
NHD, HND = CacheLayout
TINY = AttentionRow("tiny", 3, 64, num_heads=4, num_kv_heads=2, head_size=32)
TINY_MIXED = Step("tiny", 3, 61, num_heads=4, num_kv_heads=2, head_size=32, q_len=20, num_prompts=1)


@pytest.fixture(autouse=True)
def one_cache(monkeypatch):
    """As few bytes as there can be, and flags that can be read."""
    monkeypatch.setattr(AttentionJob, "num_caches", 2)
    flags.FLAGS.mark_as_parsed()


def test_each_target_has_a_row():
    held = {name: bar.measure for bar in bars.BARS if bar.operation == "attention" for name in bar.where["case"]}
    assert {*held} <= {row.name for row in shapes.ATTENTION_ROWS}
    of_two = bars.X_WINDOW, bars.X_ONE_TOKEN, bars.X_NHD
    assert {row.name for row in shapes.ATTENTION_ROWS if row.base} == {name for name in held if held[name] in of_two}
    for row in shapes.ATTENTION_ROWS:
        assert row.base is None or shapes.ATTENTION_ROWS_BY_NAME[row.base].base is None
    every = shapes.ATTENTION_ROWS + shapes.HOST_ATTENTION_ROWS + shapes.SMOKE_ATTENTION_ROWS
    assert len(shapes.ATTENTION_ROWS_BY_NAME) == len(every)


@pytest.mark.parametrize(
    ("row", "pages"),
    [
        (TINY, 3 * 4),
        (dataclasses.replace(TINY, seq_len=65), 3 * 5),
        (dataclasses.replace(TINY, window=16), 3 * 1),
        (dataclasses.replace(TINY, window=17), 3 * 2),
        (dataclasses.replace(TINY, window=16, q_len=4), 3 * 2),
        (dataclasses.replace(TINY, window=1_000), 3 * 4),
        (dataclasses.replace(TINY, varied=True), 2 + 3 + 4),
    ],
)
def test_the_pages_that_a_call_reads_are_counted(row, pages):
    job = AttentionJob(row, NVFP4)
    assert row.num_blocks_read == pages
    # A token's keys and values of two heads of 32: two codes a byte and a scale for 16.
    assert job.page_bytes == pages * BLOCK_SIZE * 2 * 2 * (32 // 2 + 32 // 16)
    assert job.bytes_moved == job.page_bytes + 4 * (pages + 3) + 2 * (3 * row.q_len * 4 * 32 * 2)  # query and result


def test_the_read_kernel_reads_every_word():
    words = np.random.default_rng(0).integers(-(2**31), 2**31, 3 * read.BLOCK_WORDS, dtype=np.int32)
    first = np.bitwise_xor.reduce(words.reshape(3, read.VECTORS, -1), axis=1).sum(-1, dtype=np.int32)
    with interpret_mode():
        np.testing.assert_array_equal(read.read(jnp.asarray(words)), first)
        for index in (0, read.BLOCK_WORDS - 1, read.BLOCK_WORDS, words.size - 1):
            changed = words.copy()
            changed[index] ^= 1
            differs = np.asarray(read.read(jnp.asarray(changed))) != first
            assert differs.tolist() == [block == index // read.BLOCK_WORDS for block in range(3)]


def test_a_wrong_result_is_found():
    inputs = AttentionInputs(AttentionJob(TINY, BFLOAT16))
    run = attends.KVJAX.prepare(inputs)
    right = np.asarray(run.call(0), np.float32)
    run.check(right)
    for wrong, message in ((right * 1.01, "1.0.% off"), (right[::-1], "off"), (right * np.nan, "are NaN or infinite")):
        with pytest.raises(AssertionError, match=message):
            run.check(wrong)


# They need a GPU, where each result is checked before it is timed.
OTHERS = (attends.READ, attends_vllm.FA3, *attends_flashinfer.KEYS)
PEERS = {peer.name: peer for peer in (*attends.PEERS, *attends.STEP_PEERS) if peer not in OTHERS}
TINY_ROWS = {
    "plain": TINY,
    "4 tokens": dataclasses.replace(TINY, q_len=4),
    "window": dataclasses.replace(TINY, window=32),
    "window, 4 tokens, HND": dataclasses.replace(TINY, q_len=4, window=20, layout=HND),
    "partial page": dataclasses.replace(TINY, seq_len=61),
    "of 21, 42 and 64 tokens": dataclasses.replace(TINY, varied=True),
    "mixed": TINY_MIXED,
    "speculative": dataclasses.replace(TINY_MIXED, q_len=4, num_prompts=None),
    "whole": dataclasses.replace(TINY_MIXED, seq_len=48, q_len=48, num_prompts=None),
    "shared": dataclasses.replace(TINY_MIXED, q_len=1, num_prompts=None, prefix_len=32),
    "window and soft cap": dataclasses.replace(TINY_MIXED, window=10, logits_soft_cap=0.5),
}


def is_served(peer: str, row: str, dtype: KVCacheDType) -> bool:
    of, is_step = PEERS[peer], TINY_ROWS[row].is_step
    return of in (attends.STEP_PEERS if is_step else attends.PEERS) and of.serves(AttentionJob(TINY_ROWS[row], dtype))


@pytest.mark.full
@matrix(
    {"peer": [*PEERS], "row": [*TINY_ROWS], "dtype": shapes.TIMED_DTYPES},
    few={"dtype": [BFLOAT16, NVFP4]},
    valid=lambda case: is_served(**case),
)
def test_peers_attend_to_what_kvjax_attends_to(peer, row, dtype):
    of, inputs = PEERS[peer], AttentionInputs(AttentionJob(TINY_ROWS[row], dtype))
    if of in (attends.SDPA, attends.IN_TORCH, attends.IN_FP8_IN_TORCH):
        pytest.importorskip("kvjax_torch")
    most = FP8_ERROR if of in (attends.IN_FP8, attends.IN_FP8_IN_TORCH) else OWN_ERROR
    run = of.prepare(inputs)
    for number in range(2):
        run.wait(attended := run.call(number))
        assert run.check(attended)["error"] < most


def test_a_step_packs_tokens_and_shares_pages():
    job = AttentionJob(TINY_MIXED, NVFP4)
    assert (TINY_MIXED.cu_q_lens.tolist(), job.query_shape) == ([0, 20, 21, 22], (22, 4, 32))
    assert {19, 20, 21} <= {*job.sampled.tolist()}  # the last token of each sequence
    _, lens = AttentionInputs(job).sampled_sequences
    lengths = dict(zip(job.sampled.tolist(), lens.tolist(), strict=True))
    assert (lengths[0], lengths[19], lengths[20]) == (42, 61, 61)
    shared = dataclasses.replace(TINY_MIXED, q_len=1, num_prompts=None, prefix_len=32)
    assert shared.num_blocks_read == shared.num_blocks == 2 + 3 * 2
    assert shared.table(np.arange(8)).tolist() == [[0, 1, 2, 3], [0, 1, 4, 5], [0, 1, 6, 7]]
