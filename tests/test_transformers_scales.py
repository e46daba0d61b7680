"""Default scales of a `KvjaxCache` in NVFP4: those of the first tokens that it stores, if these are not all zeros."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from support.transformers_models import (  # noqa: E402
    NUM_LAYERS,
    make_cache,
    make_model,
    over_pages,
    positions,
    states,
    taking,
)

from kvjax_torch.transformers import layer as transformers_layer  # noqa: E402
from kvjax_torch.transformers_cache import KvjaxCache  # noqa: E402

NUM_PADDING = 8


def scales(cache: KvjaxCache) -> list[float]:
    return [scale.item() for layer in cache.layers for scale in (layer.k_scale, layer.v_scale)]


def padded_left(model: Any, padding: float) -> tuple[torch.Tensor, torch.Tensor]:
    """A text after padding whose embedding is `padding` everywhere, and its mask."""
    with torch.no_grad():
        model.model.embed_tokens.weight[0] = padding
    ids = torch.randint(1, 61, (2, 12), generator=torch.Generator().manual_seed(3))
    mask = torch.ones(2, NUM_PADDING + 12, dtype=torch.long)
    mask[:, :NUM_PADDING] = 0
    padded = torch.cat([torch.zeros(2, NUM_PADDING, dtype=torch.long), ids], dim=1)
    return padded.to(model.device), mask.to(model.device)


def read_in(model: Any, ids: torch.Tensor, mask: torch.Tensor, chunks: list[int]) -> KvjaxCache:
    cache, end = make_cache(model, "nvfp4"), 0
    for part in ids.split(chunks, dim=1):
        end += part.shape[1]
        with torch.no_grad():
            masks = {"attention_mask": mask[:, :end], "position_ids": positions(mask, end, part)}
            model(part, **masks, **taking(cache))
    return cache


def make_padded_model(device: str, attention: str) -> Any:
    return make_model(device, factor=2.0**-8, attn_implementation=attention)


@pytest.mark.parametrize("attention", ["eager", "kvjax"])
def test_a_first_chunk_of_zeros_leaves_the_scale_to_the_next(device: str, attention: str):
    model = make_padded_model(device, attention)
    ids, mask = padded_left(model, 0.0)
    got = scales(read_in(model, ids, mask, [NUM_PADDING, 12]))
    expected = scales(read_in(model, ids[:, NUM_PADDING:], mask[:, NUM_PADDING:], [12]))
    assert got == pytest.approx(expected, rel=0.5)  # in eager, later layers see padding too
    assert max(got) < 0.01


def test_padding_that_is_not_stored_counts_in_no_scale(device: str):
    model = over_pages(make_padded_model(device, "eager"))
    ids, mask = padded_left(model, 1.0)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.weight += 0.01
    expected = pytest.approx(scales(read_in(model, ids[:, NUM_PADDING:], mask[:, NUM_PADDING:], [12])), rel=1e-5)
    assert scales(read_in(model, ids, mask, [20])) == expected
    assert scales(read_in(model, ids, mask, [NUM_PADDING, 12])) == expected
    model.set_attn_implementation("sdpa")
    assert scales(read_in(model, ids, mask, [20]))[0] > 1.5 * expected.expected[0]


def test_the_scale_of_keys_and_that_of_values_wait_each_for_its_own(device: str):
    cache = make_cache(make_model(device), "nvfp4")
    ones, zeros = torch.ones((1, 2, 3, 32), device=device), torch.zeros((1, 2, 3, 32), device=device)
    for keys, values in ((ones, zeros), (2 * ones, 3 * ones), (5 * ones, 5 * ones)):
        (read_keys, read_values), _ = (cache.update(keys, values, layer) for layer in range(NUM_LAYERS))
    one = 16 / (6 * 448)
    layer = cache.layers[0]
    assert (layer.k_scale.item(), layer.v_scale.item()) == pytest.approx((one, 3 * one))
    assert (read_values[:, :, :3] == 0).all()
    for got, expected in ((read_keys, (1, 2, 5)), (read_values, (0, 3, 5))):
        assert got[0, 0, ::3, 0].tolist() == pytest.approx(expected, rel=0.1)


def test_tokens_that_are_cropped_determine_no_scale():
    cache = make_cache(make_model("cpu"), "nvfp4")
    zeros, ones = torch.zeros((1, 2, 3, 32)), torch.ones((1, 2, 1, 32))
    for step in (zeros, ones, None, 100 * ones):
        if step is None:
            cache.crop(-1)
        else:
            read = [cache.update(step, step, layer) for layer in range(NUM_LAYERS)]
    assert cache.layers[0].k_scale.item() == pytest.approx(100 * 16 / (6 * 448))
    assert read[0][0][0, 0, :, 0].tolist() == pytest.approx([0, 0, 0, 100], rel=0.1)


def test_no_scale_is_looked_for_once_all_are_set(monkeypatch: pytest.MonkeyPatch):
    """The host would wait for it in each step."""
    cache = make_cache(make_model("cpu"), "nvfp4")
    for layer in range(NUM_LAYERS):
        cache.update(*states("cpu", 1, 3), layer)
    before = scales(cache)
    monkeypatch.delattr(transformers_layer, "default_scale")
    cache.update(*states("cpu", 1, 1, seed=1), 0)
    assert scales(cache) == before
