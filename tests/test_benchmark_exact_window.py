"""The benchmark of exact windows writes what `attend` writes, and finds what is wrong; no test asserts a time."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags
from support.benchmark_checks import assert_measures, assert_verdicts, timed

import kvjax
from benchmarks import workload
from benchmarks.peers import beside_window
from benchmarks.peers.attention_inputs import AttentionJob
from benchmarks.peers.peer import Run
from benchmarks.serving import LLAMA_8B
from benchmarks.shapes import Step
from kvjax import KVCacheDType, window_attention

SMALL = {"num_heads": 4, "num_kv_heads": 2, "head_size": 32}
CHUNKS = Step("chunks", 2, 221, q_len=150, **SMALL)
"""Longer than rows of the ring, of which the step's tokens are gathered."""

DECODES = Step("decodes", 3, 71, **SMALL)
MIXED = Step("mixed", 3, 71, q_len=40, num_prompts=1, **SMALL)


@pytest.fixture(autouse=True)
def one_cache(monkeypatch):
    monkeypatch.setattr(AttentionJob, "num_caches", 1)
    flags.FLAGS.mark_as_parsed()


def inputs_of(row: Any) -> beside_window.WindowInputs:
    return beside_window.WindowInputs(AttentionJob(row, KVCacheDType.NVFP4))


def written(inputs: beside_window.WindowInputs, **options: bool) -> Run:
    """A run after its second call, which takes what the first returned."""
    run = beside_window.write_run(inputs, **options)
    run.call(0)
    run.wait(run.call(1))
    return run


@pytest.mark.full
def test_the_program_runs(tmp_path):
    windowed = ["kvjax", "kvjax, 64 exact"]
    expected = [
        ("attention beside a window", windowed, ["nvfp4"]),
        ("write beside a window", [*windowed, "kvjax, 64 exact, with room"], ["nvfp4"]),
    ]
    assert_measures(tmp_path, "exact_window", expected)


@pytest.mark.parametrize(
    "row",
    [CHUNKS, *(pytest.param(row, marks=pytest.mark.nightly) for row in (DECODES, MIXED))],
    ids=lambda row: row.name,
)
def test_writes_store_the_bytes_that_attend_stores(row):
    inputs = inputs_of(row)
    for options in ({}, {"with_ring": True}, {"with_ring": True, "with_room": True}):
        run = written(inputs, **options)
        run.check(None)
    _, cache, window = kvjax.attend(
        inputs.query,
        inputs.key,
        inputs.value,
        jax.tree.map(jnp.copy, inputs.caches[0]),
        inputs.metadata,
        exact_window=jax.tree.map(jnp.copy, inputs.window),
        **inputs.job.limits,
        **workload.scales(),
    )
    np.testing.assert_array_equal(cache.kv, inputs.caches[0].kv)
    np.testing.assert_array_equal(window.ring.kv, inputs.expected_ring)
    assert (inputs.expected_ring != inputs.window.ring.kv).any()


@pytest.mark.parametrize("part", ["ring", "recent"])
def test_a_wrong_write_is_found(part, monkeypatch):
    right = window_attention.write_step

    def wrong(*args: Any) -> Any:
        found = right(*args)
        cache = getattr(found, part)
        return found._replace(**{part: dataclasses.replace(cache, kv=cache.kv.at[:, 1, -1].add(1))})

    inputs = inputs_of(CHUNKS)
    monkeypatch.setattr(window_attention, "write_step", wrong)
    run = written(inputs, with_ring=True, with_room=True)
    with pytest.raises(AssertionError, match="elements differ from what they must be"):
        run.check(None)


def test_verdicts_compare_with_pages_alone():
    for operation, name, ratio, said in (
        ("attention", "64x8192", 1.07, "1.07 x pages alone: pass"),
        ("attention", "8x8192", 1.32, "1.32 x pages alone: falls short"),
        ("attention", "64x1024", 1.3, "1.30 x pages alone: pass"),
        ("attention", "chunk", 1.25, "1.25 x pages alone: falls short"),
        ("write", "64x8192", 1.3, "1.30 x pages alone: pass"),
        ("write", "chunks-2048", 1.3, "1.30 x pages alone: falls short"),
    ):
        of = f"{operation} beside a window", AttentionJob(beside_window.ROWS_BY_NAME[name], KVCacheDType.NVFP4)
        assert_verdicts((timed(*of, 100.0), []), (timed(*of, 100 * ratio, beside_window.WITH_WINDOW), [said]))


def test_rows_of_windows_take_memory_beside_pages():
    """64 exact tokens in bfloat16 take 8 MiB, pages of NVFP4 288 MiB."""
    nvfp4 = KVCacheDType.NVFP4
    assert LLAMA_8B.bytes_a_sequence(nvfp4, 64) == LLAMA_8B.bytes_a_sequence(nvfp4) + (8 << 20)
    assert LLAMA_8B.most(nvfp4, 64) == 138
