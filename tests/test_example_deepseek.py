"""The example's DeepSeek-V3 and Kimi K2 are those of transformers: prompts in chunks, and tokens one by one."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import kvjax  # noqa: E402
from examples import deepseek  # noqa: E402

LENGTHS = (75, 9, 41)
CHUNKS = ((40, 9, 0), (34, 0, 40), (1, 0, 1))
"""Tokens of each sequence in the steps of prompts; the last of the first and of the third come alone, as decoded ones
do. A context of 40 tokens is read in two rounds.
"""


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        ("auto", 2e-5),
        pytest.param("fp8_ds_mla", 0.05, marks=pytest.mark.full),
        pytest.param("nvfp4", 0.2, marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize("name", ["deepseek-v3", "kimi-k2"])
def test_logits_are_those_of_transformers(name: str, dtype: str, tolerance: float):
    """Over caches that were full of NaN. From rounded latents a router may choose another expert for some tokens.

    Tokens of a prompt's first chunk, most of all here, read nothing from the cache: medians are of the others.
    """
    reference, model, params = deepseek.tiny_model(name)
    kv_config = kvjax.ModelKVConfig.from_hf_config(reference.config.to_dict())
    specs = kvjax.resolve_layer_specs(kv_config, dtype, block_size=8)
    caches = []
    for spec in specs:
        pages = np.full((40, spec.page_size_bytes), 0xFF, np.uint8)
        caches.append(kvjax.KVCache(jnp.array(pages.view(spec.array_dtype).reshape(spec.cache_shape(40))), spec))
    pool, rng = kvjax.BlockPool(40, 8), np.random.default_rng(0)
    tokens = [rng.integers(0, 97, length).astype(np.int32) for length in LENGTHS]
    with torch.no_grad():
        expected = [reference(torch.from_numpy(each[None]).long()).logits[0].numpy() for each in tokens]
    sequences = [pool.sequence() for _ in tokens]
    errors: list[float] = []
    of_context: list[float] = []
    for sizes in CHUNKS:
        numbers = [number for number, size in enumerate(sizes) if size]
        running, before = [sequences[i] for i in numbers], [sequences[i].num_tokens for i in numbers]
        pool.append(running, [sizes[i] for i in numbers])
        new = [tokens[i][start : start + sizes[i]] for i, start in zip(numbers, before, strict=True)]
        logits, caches = model.run(params, caches, running, new)
        for number, start, got in zip(numbers, before, logits, strict=True):
            want = expected[number][start : start + len(got)]
            own = (np.abs(got - want).max(axis=-1) / np.abs(want).max()).tolist()
            errors += own
            of_context += own if start else []
    assert (len(errors), len(of_context)) == (sum(LENGTHS), sum(sum(sizes) for sizes in CHUNKS[1:]) - CHUNKS[1][2])
    error = np.max(errors) if dtype == "auto" else np.median(of_context)
    assert error < tolerance


def test_yarn_changes_the_scale_of_logits():
    """Which follows from no size of the cache."""
    _, deepseek_v3, _ = deepseek.tiny_model("deepseek-v3")
    _, kimi_k2, _ = deepseek.tiny_model("kimi-k2")
    assert kimi_k2.sm_scale == 48**-0.5
    assert deepseek_v3.sm_scale == pytest.approx(48**-0.5 * (0.1 * np.log(40) + 1) ** 2)
