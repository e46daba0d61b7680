"""The examples of docs/serving.md: a small engine gives each prompt what it would have alone, a mesh divides heads."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from support.helpers import compilations

import kvjax

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/serving.md").read_text()
ENGINE = (ROOT / "examples/small_engine.py").read_text()


@pytest.fixture(scope="module")
def engine() -> dict[str, Any]:
    names: dict[str, Any] = {}
    with compilations() as compiled:
        exec(compile(ENGINE, "examples/small_engine.py", "exec"), names)
    return names | {"compiled": compiled}


def continued(names: dict[str, Any], prompt: list[int], num_new_tokens: int) -> list[int]:
    """A prompt by itself, all of it again for every token."""
    known = list(prompt)
    for _ in range(num_new_tokens):
        pool = kvjax.BlockPool(4, 16)
        sequence = pool.sequence()
        pool.append([sequence], [len(known)])
        step = kvjax.StepMetadata.from_sequences([sequence], [len(known)], num_tokens=64, max_blocks=4)
        tokens = np.pad(known, (0, 64 - len(known))).astype(np.int32)
        caches = tuple(kvjax.KVCache.allocate(names["spec"], 4) for _ in range(names["NUM_LAYERS"]))
        buckets = {"max_q_len": None, "max_prompts": None}
        following, _ = names["run"](names["weights"], tokens, np.zeros(4, np.int32), step, caches, **buckets)
        known.append(int(following[0]))
    return known[len(prompt) :]


@pytest.mark.full
def test_the_engine_gives_each_prompt_its_tokens(engine):
    assert [len(request["generated"]) for request in engine["requests"]] == [6, 6, 6]
    for request in engine["requests"]:
        assert request["generated"] == continued(engine, request["prompt"], 6)


@pytest.mark.full
def test_the_engine_compiles_each_kind_of_step_once_for_committed_weights(engine):
    assert all(leaf.committed for leaf in jax.tree.leaves(engine["weights"]))
    assert sum("run" in name for name in engine["compiled"]) == 2, engine["compiled"]


def test_the_engine_gives_its_blocks_back(engine):
    assert engine["pool"].num_free == engine["num_blocks"]
    assert engine["pool"].num_cached == sum((length + 5) // 16 for length in (21, 3, 40)) - 1  # a block in common


def test_the_page_shows_the_engines_own_code():
    section = PAGE.split("## A small engine\n")[1].split("\n## ")[0]
    shown = re.findall(r"^```python\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)
    assert [re.findall(r"^def (\w+)", code, re.MULTILINE) for code in shown] == [["run"], ["start"]]
    for code in shown:
        assert f"\n{code}\n\n" in ENGINE  # whole definitions: two empty lines follow each


@pytest.mark.full
def test_the_mesh_divides_heads():
    check = "assert attended.sharding.spec == P(None, 'tensor', None), attended.sharding"
    example = (ROOT / "examples/explicit_mesh.py").read_text()
    code = "\n".join([example, check, "assert cache.sharding == by_head"])
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, **flags})
