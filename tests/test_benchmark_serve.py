"""The benchmark of serving: what fits, what is read, whose steps are whose, its bars and its table."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from absl import flags

from benchmarks import bars, serving, shapes, timing
from benchmarks.measurement import Measurement, Rows
from benchmarks.peers import serves_torch
from benchmarks.serving import LLAMA_8B, TINY, ServeJob
from examples import llama
from kvjax import KVCacheDType

BFLOAT16, FP8, NVFP4 = shapes.TIMED_DTYPES


@pytest.fixture(autouse=True)
def parsed_flags():
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()


def test_as_many_sequences_as_fit():
    """A token of Llama-3.1-8B takes 128 KiB in bfloat16."""
    assert [LLAMA_8B.most(dtype) for dtype in shapes.TIMED_DTYPES] == [40, 80, 142]
    assert LLAMA_8B.bytes_a_sequence(BFLOAT16) == 8_192 * (128 << 10)
    assert (LLAMA_8B.seq_len - LLAMA_8B.tail) % shapes.BLOCK_SIZE == 0
    # 64 exact tokens in bfloat16 take 8 MiB, pages of NVFP4 288 MiB.
    assert LLAMA_8B.bytes_a_sequence(NVFP4, 64) == LLAMA_8B.bytes_a_sequence(NVFP4) + (8 << 20)
    assert LLAMA_8B.most(NVFP4, 64) == 138


def test_bytes_that_a_step_reads():
    leaves = jax.tree.leaves(llama.parameter_shapes(LLAMA_8B.config), is_leaf=lambda leaf: isinstance(leaf, tuple))
    assert sum(int(np.prod(leaf)) for leaf in leaves) == 8_030_261_248  # what the model's card says
    assert LLAMA_8B.weight_bytes == 2 * (8_030_261_248 - 128_256 * 4_096)
    job = ServeJob(LLAMA_8B, BFLOAT16, 32)
    assert job.bytes_moved - LLAMA_8B.weight_bytes == 32 * 8_160 * (128 << 10)
    tied = dataclasses.replace(TINY, config=dataclasses.replace(TINY.config, tie_word_embeddings=True))
    assert tied.weight_bytes == TINY.weight_bytes


@pytest.mark.full
@pytest.mark.parametrize("exact_window", [None, 20])
def test_full_sequences_are_served_to_their_ends(exact_window):
    times, facts = serving.serve(ServeJob(TINY, NVFP4, 3, exact_window))
    assert len(times.samples) == TINY.tail - 1 - serving.WARM_UP_STEPS
    assert 0 < facts["host_ns"] <= max(times.samples) * 1e9
    assert serving.check(ServeJob(TINY, NVFP4, 2, exact_window)) <= serving.HIDDEN_ERROR


@pytest.mark.full
def test_only_the_tail_is_computed():
    """The engine finds all but the last tokens in the caches, in blocks that lie apart."""
    engine, run = serving.full_engine(ServeJob(TINY, BFLOAT16, 3))
    engine.step()
    assert run.last is not None
    step = run.last[1]
    assert step.seq_lens.tolist() == [TINY.seq_len - TINY.tail + 1] * 3
    assert np.diff(step.cu_q_lens).tolist() == [1, 1, 1]
    assert not (np.diff(step.block_table[:, :3]) == 1).any()
    while not engine.is_idle:
        engine.step()
    assert run.last[1].seq_lens.tolist() == [TINY.seq_len - 1] * 3
    assert {len(np.unique(run.last[1].block_table)), engine.max_num_seqs * 4} == {12}


@pytest.mark.full
def test_a_wrong_step_is_found(monkeypatch):
    job = ServeJob(TINY, FP8, 2)
    assert serving.check(job) <= serving.HIDDEN_ERROR
    right = llama.write_and_attend

    def wrong(query: Any, *args: Any, implementation: str | None, **options: Any) -> Any:
        attended, caches = right(query, *args, implementation=implementation, **options)
        return attended * (1 if implementation == "xla" else 1.5), caches

    monkeypatch.setattr(llama, "write_and_attend", wrong)
    with pytest.raises(AssertionError, match="off those by XLA"):
        serving.check(job)


@pytest.mark.full
@pytest.mark.parametrize("name", serves_torch.NAMES)
def test_transformers_decodes_from_full_caches(name):
    pytest.importorskip("transformers")
    job = ServeJob(TINY, BFLOAT16, TINY.same)
    assert serves_torch.serves(name, job)
    times, facts = serves_torch.serve(name, job)
    assert len(times.samples) == serves_torch.SAMPLES
    assert ("error" in facts) == (name == serves_torch.PAGED)
    serves_torch.free()


@pytest.mark.full
def test_wrong_attention_over_pages_is_found(monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.setattr(serves_torch, "MAX_ERROR", 0.0)
    with pytest.raises(AssertionError, match="logits are off by"):
        serves_torch.serve(serves_torch.PAGED, ServeJob(TINY, NVFP4, TINY.same))
    serves_torch.free()


def line(dtype: KVCacheDType, num_seqs: int, milliseconds: float, **facts: Any) -> Any:
    of = ServeJob(LLAMA_8B, dtype, num_seqs)
    known = {"rows": of.rows, "device_ns": round(milliseconds * 0.97e6), "host_ns": 10**6, "read_ns": 10**7} | facts
    times = timing.Timing((milliseconds / 1e3,) * 3, timing.Clock.HOST)
    return Measurement("serve", of.subject, "kvjax", times, facts=known)


def test_bars_of_tokens_steps_reading_and_the_host():
    rows = Rows(
        [
            line(NVFP4, 142, 16.0),
            line(NVFP4, 32, 8.0),
            line(BFLOAT16, 32, 10.0),
            line(BFLOAT16, 40, 12.0, device_ns=11 * 10**6),
            line(FP8, 80, 17.0),
            line(FP8, 8, 5.0),
        ]
    )
    assert [bars.verdicts(each, rows) for each in rows] == [
        ["2.66 x bf16 tokens/s: pass", "3.0% of a step exposed: pass"],
        ["0.80 x bf16: falls short", "3.0% of a step exposed: pass"],
        ["1.00 x reading: pass", "3.0% of a step exposed: pass"],
        ["1.20 x reading: falls short", "8.3% of a step exposed: falls short"],
        ["1.41 x bf16 tokens/s: falls short", "3.0% of a step exposed: pass"],
        [],
    ]
    assert [str(bar) for bar in bars.of(rows[0])] == [">= 2.20 x bf16 tokens/s", "<= 5.0% of a step exposed"]


def test_peers_and_devices_without_a_reading_rate_have_no_bars():
    assert bars.of(line(NVFP4, 142, 16.0, read_ns=None)) == []
    assert bars.of(dataclasses.replace(line(BFLOAT16, 40, 12.0), peer="cuDNN, dense")) == []
