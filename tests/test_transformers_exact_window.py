"""Exact windows of `KvjaxCache`: queries read their last tokens as they were computed, all earlier ones as stored."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
from support.helpers import matrix

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from support.transformers_models import (  # noqa: E402
    MODELS,
    NEW_TOKENS,
    PADDING,
    RoundedCache,
    generate,
    make_cache,
    model_of,
    over_pages,
    read,
    relative_error,
    round_trip,
    scales_for,
    states,
    taking,
    text_of,
)
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache  # noqa: E402

from kvjax import KVCacheTypeError, KVCacheValueError  # noqa: E402
from kvjax.cli.memory_plan import WindowPlan  # noqa: E402
from kvjax_torch.transformers import layer as transformers_layer  # noqa: E402
from kvjax_torch.transformers_cache import KvjaxCache  # noqa: E402

CHUNKS = [14, 6, 1, 3, *[1] * 16]
ATTENTION = "exact_window_reference"


class BothCache(RoundedCache):
    """Keys and values as they were given beside what a cache rounds them to, joined along heads' elements."""

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        spec, scales = self.specs[layer_idx], self.scales[layer_idx]
        both = [
            torch.cat([states, round_trip(states, part, scale)], dim=-1)
            for states, part, scale in zip((key_states, value_states), spec.dtype.parts, scales, strict=True)
        ]
        return DynamicCache.update(self, *both, layer_idx, *args, **kwargs)


@pytest.fixture
def reference_attention() -> Iterator[dict[str, int]]:
    """transformers' plainest attention over a `BothCache`; what it yields holds the size of the window."""
    sizes: dict[str, int] = {}

    def attention(
        module: Any, query: Any, key: Any, value: Any, mask: Any, *, scaling: float, softcap: Any = None, **others: Any
    ) -> Any:
        groups = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(groups, dim=1).chunk(2, dim=-1) for x in (key, value))
        num_new, end = query.shape[2], key[0].shape[2]
        distance = torch.arange(end - num_new, end)[:, None] - torch.arange(end)
        is_near = (distance < sizes["exact_window"]).to(query.device)
        logits = torch.where(is_near, *(query @ x.transpose(2, 3) for x in key)) * scaling
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        logits = logits + mask[..., :end]
        if (sinks := others.get("s_aux")) is not None:
            logits = torch.cat([logits, sinks.view(1, -1, 1, 1).expand(*logits.shape[:3], 1)], dim=-1)
        weights = logits.softmax(dim=-1)[..., :end]
        out = (weights * is_near) @ value[0] + (weights * ~is_near) @ value[1]
        return out.transpose(1, 2), None

    AttentionInterface.register(ATTENTION, attention)
    AttentionMaskInterface.register(ATTENTION, AttentionMaskInterface()["eager"])
    yield sizes
    for registry in (AttentionInterface, AttentionMaskInterface):
        registry._global_mapping.pop(ATTENTION)


def given_scales(dtype: str) -> dict[str, float]:
    return dict(zip(("k_scale", "v_scale"), scales_for(dtype, 1.0), strict=True))


@matrix(
    {"name": [*MODELS], "dtype": ["nvfp4", "fp8_e4m3"], "size": [3, 8, 17], "q_len": [1, 4]},
    few={"name": ["gemma2", "gpt-oss"], "dtype": ["nvfp4"], "size": [8], "q_len": [1]},
)
def test_attention_is_that_of_a_float_reference(
    device: str, reference_attention: dict[str, int], name: str, dtype: str, size: int, q_len: int
):
    """Of a padded batch in chunks, with windows shorter and longer than the exact one; and closer to exact logits."""
    model, ids, scales = model_of(name, device), text_of(device), given_scales(dtype)
    mask = torch.tensor(PADDING["left"], device=device)
    exact = read(model, DynamicCache(), ids, mask, CHUNKS)[mask.bool()]
    reference_attention["exact_window"] = size
    model.set_attn_implementation(ATTENTION)
    both = BothCache(make_cache(model, dtype).specs, [tuple(scales.values())] * 2)
    expected = read(model, both, ids, mask, CHUNKS)[mask.bool()]
    got, without = (
        read(over_pages(model), make_cache(model, dtype, **scales, **options), ids, mask, CHUNKS)[mask.bool()]
        for options in ({"exact_window": size, "max_q_len": q_len}, {})
    )
    assert relative_error(got, expected) < 0.01
    assert ((got - expected).norm(dim=-1) / expected.norm(dim=-1)).median() < 1e-4
    assert relative_error(got, exact) < 0.9 * relative_error(without, exact)


@matrix(
    {"name": [*MODELS], "padding": [*PADDING], "size": [40, 64]},
    few={"name": ["gemma3"], "padding": ["left", "a chunk of nothing"], "size": [64]},
)
def test_a_window_of_all_tokens_gives_exact_logits(device: str, name: str, padding: str, size: int):
    if name in ("gemma2", "gemma3", "gpt-oss", "mistral") and padding not in ("left", "right"):
        name = "qwen3"  # windows that padding lies in are measured otherwise
    model, ids, mask = model_of(name, device), text_of(device), torch.tensor(PADDING[padding], device=device)
    expected = read(model, DynamicCache(), ids, mask, CHUNKS)[mask.bool()]
    cache = make_cache(over_pages(model), "nvfp4", exact_window=size)
    got = read(model, cache, ids, mask, CHUNKS)[mask.bool()]
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("attention", ["kvjax", "sdpa"])
@pytest.mark.parametrize("beams", [1, 3])
def test_generation_is_that_of_dynamic_cache(device: str, attention: str, beams: int):
    """With beams that are reordered, twice with one cache."""
    model = model_of("llama", device)
    expected = generate(model, DynamicCache(), num_beams=beams)
    model.set_attn_implementation(attention)
    cache = make_cache(model, "nvfp4", num_blocks=200, exact_window=9 + NEW_TOKENS)
    for _ in range(2):
        got = generate(model, cache, num_beams=beams)
        assert got.sequences.tolist() == expected.sequences.tolist()
        for logits, wanted in zip(got.logits, expected.logits, strict=True):
            torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)
        cache.reset()


@pytest.mark.gpu
@matrix({"name": [*MODELS], "dtype": ["fp8_e4m3", "nvfp4"]}, few={"name": ["llama", "gpt-oss"], "dtype": ["nvfp4"]})
def test_bfloat16_models_see_exact_tokens_by_the_kernels(name: str, dtype: str):
    """With a window of all tokens, logits are those of a cache in the model dtype under the same kernels."""
    model, ids, chunks = over_pages(model_of(name, "cuda", torch.bfloat16)), text_of("cuda"), [20, 1, 5, *[1] * 14]
    expected = read(model, make_cache(model, "auto"), ids, None, chunks).float()
    got = read(model, make_cache(model, dtype, **given_scales(dtype), exact_window=64), ids, None, chunks).float()
    # Of most tokens: for some, rounding chooses another expert.
    assert ((got - expected).norm(dim=-1) / expected.norm(dim=-1)).median() < 0.03


def test_drafts_are_taken_back(device: str):
    """A second model proposes tokens, of which some are rejected."""
    model = over_pages(model_of("llama", device))
    cropped = []

    class Cropped(KvjaxCache):
        def crop(self, tokens_to_remove: int) -> None:
            cropped.append(int(tokens_to_remove))
            super().crop(tokens_to_remove)

    options = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
    ids = text_of(device, 1, 12)
    of_cache = {"num_blocks": 16, "block_size": 4, "kv_cache_dtype": "nvfp4", "exact_window": 8}
    alone = KvjaxCache(model.config, **of_cache)
    expected = model.generate(ids, **taking(alone), **options)
    drafting = model_of("llama", device)
    with torch.no_grad():
        drafting.lm_head.weight.add_(0.05 * torch.randn_like(drafting.lm_head.weight))
    got = model.generate(
        ids, **taking(Cropped(model.config, **of_cache, max_q_len=32)), assistant_model=drafting, **options
    )
    assert got.tolist() == expected.tolist()
    assert min(cropped) < 0


@pytest.mark.parametrize("dtype", ["nvfp4", "fp8_e4m3"])
def test_what_is_read_back_ends_with_exact_tokens(device: str, dtype: str):
    """Whatever the chunks, and after crops: shallow ones keep the window exact, deep ones leave what the pages hold."""
    model, (keys, values) = model_of("llama", device), states(device, 2, 40)
    plain, cache = (
        make_cache(model, dtype, **given_scales(dtype), **options)
        for options in ({}, {"exact_window": 8, "max_q_len": 3})
    )

    def append(end: int, num: int, num_exact: int = 8) -> None:
        new = [x[:, :, end - num : end] for x in (keys, values)]
        stored, got = (one.layers[0].update(*new) for one in (plain, cache))
        for rounded, read_back, given in zip(stored, got, (keys, values), strict=True):
            assert torch.equal(read_back[:, :, : end - num_exact], rounded[:, :, : end - num_exact])
            assert torch.equal(read_back[:, :, end - num_exact :], given[:, :, end - num_exact : end])
            assert not torch.equal(read_back, rounded)

    def crop(num_tokens: int) -> None:
        for one in (plain, cache):
            one.layers[1]._steps.lengths[1] = one.layers[0].num_tokens  # the other layer takes no part
            one.crop(-num_tokens)

    append(13, 13)
    for end in (14, 19):
        for one in (plain, cache):
            one.layers[1]._steps.lengths[1] = one.layers[0].num_tokens
        append(end, end - (13 if end == 14 else 14))
    crop(2)
    append(18, 1)
    crop(12)
    append(7, 1, num_exact=1)
    for one in (plain, cache):
        one.layers[1]._steps.lengths[1] = 7
    append(8, 1, num_exact=2)
    cache.reset()
    plain.reset()
    append(3, 3, num_exact=3)


def test_sequences_are_repeated_and_chosen(device: str):
    model = over_pages(model_of("llama", device))
    ids, options = text_of(device, 3, 24), {"num_blocks": 200, "exact_window": 6}
    chosen = torch.tensor([2, 0, 0, 1, 2], device=device)
    cache, expected = (make_cache(model, "nvfp4", **given_scales("nvfp4"), **options) for _ in range(2))
    wanted = read(model, expected, ids[chosen], None, [20, 1, 1, 2])
    read(model, cache, ids[:, :20], None, [20])
    cache.reorder_cache(chosen)
    kept = copy.deepcopy(cache)
    for one in (cache, kept):
        got = read(model, one, ids[chosen, 20:], None, [1, 1, 2])
        torch.testing.assert_close(got, wanted[:, 20:], rtol=1e-4, atol=1e-4)


def test_a_step_that_stopped_halfway_is_done_again(device: str, monkeypatch: pytest.MonkeyPatch):
    """What it wrote over older tokens is then read from the pages, or was far enough away."""
    model, ids = over_pages(model_of("llama", device)), text_of(device, 2, 24)
    options = {"num_blocks": 100, "exact_window": 16, "max_q_len": 17}
    cache, expected = (make_cache(model, "nvfp4", **given_scales("nvfp4"), **options) for _ in range(2))
    wanted = read(model, expected, ids, None, [20, 4])
    read(model, cache, ids[:, :20], None, [20])
    store, calls = transformers_layer.KvjaxLayer._store, []

    def failing(self: Any, *args: Any) -> None:
        calls.append(self)
        if len(calls) == 2:
            raise MemoryError
        store(self, *args)

    monkeypatch.setattr(transformers_layer.KvjaxLayer, "_store", failing)
    with pytest.raises(MemoryError), torch.no_grad():
        model(ids[:, 20:].flip(1), **taking(cache))
    cache.crop(20 - cache.get_seq_length())
    with torch.no_grad():
        got = model(ids[:, 20:], **taking(cache)).logits
    torch.testing.assert_close(got, wanted[:, 20:], rtol=1e-4, atol=1e-4)


def test_quantized_layers_alone_have_windows():
    """As `kvjax plan` counts them."""
    model = model_of("llama", "cpu")
    cache = make_cache(model, "nvfp4", skip_layers=[0], exact_window=20)
    assert cache.exact_window_bytes == WindowPlan.of(cache.specs, 20, 1).bytes == 32 * 2 * 2 * 32 * 4
    keys, values = states("cpu", 3, 5)
    for layer in cache.layers:
        layer.update(keys, values)
    first, second = cache._steps.recent
    assert first is None
    ring = second.window
    assert sum(x.numel() * x.element_size() for x in (ring.key_cache, ring.value_cache)) == 3 * cache.exact_window_bytes
    assert make_cache(model, "nvfp4").exact_window_bytes == 0


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"exact_window": 0}, KVCacheValueError, "exact_window: got 0, expected"),
        ({"exact_window": "64"}, KVCacheTypeError, "exact_window: got "),
        ({"exact_window": 8, "max_q_len": 0}, KVCacheValueError, "max_q_len: got 0, expected"),
        ({"max_q_len": 0}, KVCacheValueError, "max_q_len: got 0, expected"),
        ({"max_q_len": 3}, KVCacheValueError, "max_q_len: got 3 without an exact_window"),
    ],
)
def test_invalid_sizes_of_a_window_are_refused(options: dict[str, Any], error: type, message: str):
    with pytest.raises(error, match=message):
        make_cache(model_of("llama", "cpu"), "nvfp4", **options)
