"""sglang-jax's engine over pages gives what transformers gives.

`make test-client-sglang_jax SGLANG_JAX=/path` runs this, on the GPUs if there are any. Each test starts an engine in a
process of its own.

Its own backend for CPUs is no reference: at page size 16 it is wrong for several requests (its issue 1297).
"""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

if not (SOURCE := os.environ.get("SGLANG_JAX_SOURCE")):
    pytest.skip("SGLANG_JAX_SOURCE names no source tree of sglang-jax", allow_module_level=True)

import jax
import torch
import transformers

import kvjax
from examples.clients.tests import comparing

VOCABULARY = 96  # which tensor parallelism divides
BLOCK_SIZE, CHUNK = 16, 32
LENGTHS = 5, 70, 33, 16
SHARED = 50
TIME_LIMIT = 300
"""Seconds for an engine. It takes 20 on two CPU cores; for a GPU it compiles five programs of several seconds each."""

MODELS = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
}

DEVICES: dict[str, dict[str, Any]] = {
    "one device": {"device_indexes": [0]},
    "TP=2": {"device_indexes": [0, 1], "tp_size": 2},
    "DP=2": {"device_indexes": [0, 1], "tp_size": 2, "dp_size": 2},  # tp_size counts all devices
    "TP=2, DP=2": {"device_indexes": [0, 1, 2, 3], "tp_size": 4, "dp_size": 2},
}


def language_model(name: str) -> transformers.PreTrainedModel:
    config_class, model_class = MODELS[name]
    config = config_class(
        vocab_size=VOCABULARY,
        hidden_size=comparing.NUM_HEADS * comparing.HEAD_SIZE,
        intermediate_size=96,
        num_hidden_layers=comparing.NUM_LAYERS,
        num_attention_heads=comparing.NUM_HEADS,
        num_key_value_heads=comparing.NUM_KV_HEADS,
        head_dim=comparing.HEAD_SIZE,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
        dtype="float32",
    )
    torch.manual_seed(0)
    model = model_class(config).eval()
    for path, variable in model.named_parameters():
        if variable.ndim > 1:
            # As in trained models, what a layer adds is small beside what it is added to.
            torch.nn.init.normal_(variable, std=1.0 if "embed" in path else 0.125)
    return model


def run(folder: pathlib.Path, model: transformers.PreTrainedModel, rounds: list[Any], **asked: Any) -> dict[str, Any]:
    """What an engine over pages gives for rounds of prompts, each of which begins when the one before has ended."""
    model.save_pretrained(folder)
    asked = {
        "folder": str(folder),
        "rounds": rounds,
        "scales": None,
        "generate": {},
        "num_new": comparing.NUM_NEW,
        "time_limit": TIME_LIMIT,
    } | asked
    asked["options"] |= {"page_size": BLOCK_SIZE, "chunked_prefill_size": CHUNK}
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(pathlib.Path(SOURCE or "") / "python"), *sys.path])}
    if jax.default_backend() != "gpu":
        env |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    elif (num_gpus := len(asked["options"]["device_indexes"])) > jax.device_count():
        pytest.skip(f"needs {num_gpus} GPUs")
    command = [sys.executable, "-m", "examples.clients.tests.sglang_jax_engine"]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    log = folder / "stderr"
    with log.open("w") as stderr, subprocess.Popen(command, env=env, stderr=stderr, **pipes) as engine:
        # A thread of the engine that fails says why, sends SIGQUIT to its parent, and leaves the others waiting.
        handler = signal.signal(signal.SIGQUIT, lambda *_: engine.kill())
        try:
            stdout, _ = engine.communicate(json.dumps(asked))
        finally:
            signal.signal(signal.SIGQUIT, handler)
    assert engine.returncode == 0, log.read_text()[-8000:]
    found: dict[str, Any] = json.loads(stdout.splitlines()[-1])
    assert found["exit_status"] == 1  # else programs with kernels do not compile for a GPU
    assert found["in_place"]
    return found


@pytest.mark.parametrize(
    ("name", "devices", "options"),
    [
        ("llama", "one device", {}),
        ("qwen3", "one device", {"enable_mixed_chunk": True}),  # chunks of prompts beside decodes
        ("llama", "TP=2", {}),
        ("llama", "DP=2", {}),
        ("llama", "TP=2, DP=2", {}),
    ],
)
def test_float32_tokens_are_those_of_transformers(tmp_path: pathlib.Path, name: str, devices: str, options: Any):
    """Of prompts of several chunks, and of one that begins with blocks of another."""
    model, rng = language_model(name), np.random.default_rng(0)
    prompts = [rng.integers(2, VOCABULARY, length).tolist() for length in LENGTHS]
    rounds = [prompts, [[*prompts[1][:SHARED], 7, 8, 9]]]
    found = run(tmp_path, model, rounds, kv_cache_dtype="float32", options=DEVICES[devices] | options)
    for prompts, tokens in zip(rounds, found["tokens"], strict=True):
        for prompt, generated in zip(prompts, tokens, strict=True):
            expected = model.generate(
                torch.tensor([prompt]), max_new_tokens=comparing.NUM_NEW, do_sample=False, eos_token_id=None
            )
            assert generated == expected[0, len(prompt) :].tolist()
    assert found["num_cached"] == [[0] * len(LENGTHS), [SHARED // BLOCK_SIZE * BLOCK_SIZE]]
    num_ranks = DEVICES[devices].get("dp_size", 1)
    per_rank = np.array([np.reshape(step, (num_ranks, -1)).sum(axis=1) for step in found["new_tokens"]])
    assert per_rank.max() == CHUNK


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8", "nvfp4"])
def test_teacher_forced_logits_are_near_those_of_transformers(tmp_path: pathlib.Path, dtype: str):
    """Of its float32 model; the engine computes in bfloat16, for on a GPU no kernel attends with float32 queries."""
    model, texts = language_model("llama"), comparing.texts()
    with torch.no_grad():
        expected = model(torch.tensor(texts, dtype=torch.int64), use_cache=True)
    stored = expected[1].layers  # of the cache, whose name depends on transformers' version
    samples = [tuple(x.numpy().swapaxes(1, 2) for x in (layer.keys, layer.values)) for layer in stored]
    spec = kvjax.FullAttentionSpec(
        BLOCK_SIZE, comparing.NUM_KV_HEADS, comparing.HEAD_SIZE, dtype=kvjax.parse_kv_cache_dtype(dtype)
    )
    calibrated = kvjax.calibrate([spec] * comparing.NUM_LAYERS, [samples])
    scales = [tuple(map(float, each)) for each in calibrated]
    found = run(
        tmp_path,
        model,
        [texts.tolist()],
        kv_cache_dtype=dtype,
        scales=scales,
        options=DEVICES["one device"] | {"dtype": "bfloat16"},
        generate={"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": VOCABULARY},
    )
    got, logits = np.array(found["logprobs"]), expected.logits.numpy()[:, :-1].astype(np.float64)
    comparing.check(dtype, *(x - x.mean(axis=-1, keepdims=True) for x in (got, logits)))
    assert found["scales"] == [list(each) if spec.dtype.takes_scale else [] for each in scales]
    assert found["bytes_per_token"] == comparing.NUM_LAYERS * spec.page_size_bytes // BLOCK_SIZE
