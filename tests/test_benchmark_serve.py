"""The benchmark of serving: what fits, what is read, whose steps are whose, its bars and its table."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest
from absl import flags

import kvjax
from benchmarks import bars, serving, shapes, timing
from benchmarks.bars import MAX_SEQS, SAME_SEQS
from benchmarks.measurement import Measurement, Rows
from benchmarks.operations import SERVE
from benchmarks.peers import serves_dense, serves_torch
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


def test_bytes_that_a_step_reads():
    leaves = jax.tree.leaves(llama.parameter_shapes(LLAMA_8B.config), is_leaf=lambda leaf: isinstance(leaf, tuple))
    assert sum(int(np.prod(leaf)) for leaf in leaves) == 8_030_261_248  # what the model's card says
    assert LLAMA_8B.weight_bytes == 2 * (8_030_261_248 - 128_256 * 4_096)
    job = ServeJob(LLAMA_8B, BFLOAT16, 32)
    assert job.bytes_moved - LLAMA_8B.weight_bytes == 32 * 8_160 * (128 << 10)
    tied = dataclasses.replace(TINY, config=dataclasses.replace(TINY.config, tie_word_embeddings=True))
    assert tied.weight_bytes == TINY.weight_bytes


def test_jobs_are_those_of_the_rows():
    every = serving.jobs(LLAMA_8B, shapes.TIMED_DTYPES, [*serving.ROWS.values()])
    assert [(job.dtype, job.num_seqs) for job in every] == [
        *((BFLOAT16, number) for number in (8, 32, 40)),
        *((FP8, number) for number in (8, 32, 64, 80)),
        *((NVFP4, number) for number in (8, 32, 64, 142)),
    ]
    assert [job.rows for job in every[:3]] == ["", SAME_SEQS, MAX_SEQS]
    assert [job.num_seqs for job in serving.jobs(LLAMA_8B, [NVFP4], [MAX_SEQS])] == [142]


def test_full_sequences_are_served_to_their_ends():
    found = serving.serve(ServeJob(TINY, NVFP4, 3))
    assert len(found.steps.samples) == TINY.tail - 1 - serving.WARM_UP_STEPS
    assert all(0 < host <= step for host, step in zip(found.host.samples, found.steps.samples, strict=True))


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
def test_dense_caches_are_attended_to_as_pages_are():
    """The same tokens in pages and in dense arrays."""
    of, number = TINY, 3
    weights = serving.params(of)
    pool = kvjax.BlockPool(number * 4, shapes.BLOCK_SIZE)
    sequences = [pool.sequence() for _ in range(number)]
    lengths = [17, 30, 42]
    pool.append(sequences, lengths)
    spec = of.spec(BFLOAT16)
    caches = tuple(kvjax.KVCache.allocate(spec, pool.num_blocks) for _ in range(of.config.num_hidden_layers))
    rng = np.random.default_rng(0)
    tokens = rng.standard_normal((2, 2, sum(lengths), 2, 16)).astype("float32").astype(jax.numpy.bfloat16)
    dense = []
    for layer, (key, value) in enumerate(tokens):
        slots = np.concatenate([each.slots(0, each.num_tokens) for each in sequences])
        cache = kvjax.reshape_and_cache_flash(key, value, caches[layer], slots)
        caches = (*caches[:layer], cache, *caches[layer + 1 :])
        table = kvjax.StepMetadata.from_sequences(sequences, [0] * number, max_blocks=4)
        dense.append(kvjax.gather_kv(cache, table.block_table, table.seq_lens))
    pool.append(sequences, [1] * number)
    step = kvjax.StepMetadata.from_sequences(sequences, [1] * number, max_blocks=4)
    ids = np.arange(number, dtype=np.int32)
    attend = functools.partial(serves_dense.attend, implementation="xla")
    with jax.default_matmul_precision("highest"):
        run = jax.jit(llama.forward, static_argnames=("config", "attend"))
        paged, _ = run(weights, of.config, ids, step, caches)
        got, _ = run(weights, of.config, ids, step, tuple(dense), attend=attend)
    error = np.linalg.norm(np.asarray(got - paged, np.float64)) / np.linalg.norm(np.asarray(paged, np.float64))
    assert error < 0.02


@pytest.mark.full
@pytest.mark.parametrize("name", [serves_torch.STATIC, serves_torch.KVJAX_CACHE])
def test_transformers_generates_from_full_caches(name):
    pytest.importorskip("transformers")
    job = ServeJob(TINY, BFLOAT16, TINY.same)
    assert serves_torch.serves(name, job)
    assert serves_torch.filled_cache(name, job, 30).get_seq_length() == 30
    lm = serves_torch.model(TINY)
    shapes_of = {name: tuple(each.shape) for name, each in lm.named_parameters()}
    assert shapes_of["model.layers.1.self_attn.k_proj.weight"] == (2 * 16, 64)
    assert len(serves_torch.serve(name, job).samples) == 2
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
    found = SERVE.chosen(rows)
    assert [(KVCacheDType(each.dtype), each.subject["num_seqs"]) for each in found] == [
        *[(BFLOAT16, 32), (BFLOAT16, 40), (FP8, 8), (FP8, 80), (NVFP4, 32), (NVFP4, 142)]
    ]
    assert [bars.verdicts(each, rows) for each in found] == [
        ["1.00 x reading: pass", "3.0% of a step exposed: pass"],
        ["1.20 x reading: falls short", "8.3% of a step exposed: falls short"],
        [],
        ["1.41 x bf16 tokens/s: falls short", "3.0% of a step exposed: pass"],
        ["0.80 x bf16: falls short", "3.0% of a step exposed: pass"],
        ["2.66 x bf16 tokens/s: pass", "3.0% of a step exposed: pass"],
    ]
    assert SERVE.bars(rows) == " 6 of 10 bars hold."
    words = {column.heading: column.text(found[-1], rows) for column in SERVE.columns}
    assert words["tokens a second"] == "8,875"
    assert (words["step, ms"], words["host, ms"], words["x bf16's step"]) == ("16", "1", "-")
    assert [str(bar) for bar in bars.of(found[-1])] == [">= 2.20 x bf16 tokens/s", "<= 5.0% of a step exposed"]


def test_peers_and_devices_without_a_reading_rate_have_no_bars():
    assert bars.of(line(NVFP4, 142, 16.0, read_ns=None)) == []
    assert bars.of(dataclasses.replace(line(BFLOAT16, 40, 12.0), peer="cuDNN, dense")) == []
