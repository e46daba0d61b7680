"""The benchmark of the fallback runs, and times what gives the kernels' results."""

from __future__ import annotations

import numpy as np
import pytest
from absl import flags
from support.benchmark_checks import assert_measures

from benchmarks.peers import attends_fallback
from benchmarks.peers.attention_inputs import AttentionInputs, AttentionJob
from benchmarks.shapes import Step
from kvjax import KVCacheDType
from kvjax.kernels.target import Target
from kvjax.ops.route import Query, route

STEP = Step("a prompt beside a decode", 2, 71, q_len=40, num_prompts=1, num_heads=4, num_kv_heads=2, head_size=32)


@pytest.mark.full
def test_the_program_of_the_fallback_runs(tmp_path):
    pytest.importorskip("torch")
    peers = ["kvjax", "kvjax, fallback", "kvjax_torch", "kvjax_torch, fallback"]
    assert_measures(tmp_path, "fallback", [("attention to prompts", peers, ["bfloat16"])])


def test_a_negated_query_and_scale_take_the_fallback_with_the_kernels_results(monkeypatch):
    monkeypatch.setattr(AttentionJob, "num_caches", 1)
    flags.FLAGS.mark_as_parsed()
    inputs = AttentionInputs(AttentionJob(STEP, KVCacheDType.BFLOAT16))
    query = np.asarray(inputs.query)
    run = attends_fallback.jax_run(inputs)
    run.check(run.call(0))
    np.testing.assert_array_equal(np.asarray(inputs.query), query)
    call = Query(np.dtype("bfloat16"), attends_fallback.negative_scale(inputs.job) > 0, has_prompts=True)
    served = route(inputs.job.spec, call, Target())
    assert served.why_no_prompt_kernel is not None
    assert served.why_no_kernels is None
