"""`KvjaxCache(key_rotation=...)` stores rotated keys, and attention is that of what they decode to."""

from __future__ import annotations

from typing import Any

import pytest
from support.helpers import matrix

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from support.transformers_models import (  # noqa: E402
    NEW_TOKENS,
    PADDING,
    RoundedCache,
    generate,
    make_cache,
    model_of,
    read,
    relative_error,
    scales_for,
    text_of,
)
from transformers import DynamicCache  # noqa: E402

import kvjax_torch  # noqa: E402
from kvjax import KVCacheTypeError, KVCacheValueError  # noqa: E402

CHUNKS = [14, 6, 1, 3, *[1] * 16]
ATTENTIONS = ["kvjax", "eager"]


class RotatedCache(RoundedCache):
    """Of keys that were rotated, rounded and rotated back, in the second layer."""

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        if layer_idx != 1:
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        rotated = kvjax_torch.hadamard_transform(key_states)
        keys, values = super().update(rotated, value_states, layer_idx, *args, **kwargs)
        return kvjax_torch.hadamard_transform(keys), values


@matrix(
    {"name": ["llama", "gemma3", "gpt-oss"], "attention": ATTENTIONS, "dtype": ["nvfp4", "fp8_e4m3"]},
    few={"name": ["llama"], "attention": ATTENTIONS, "dtype": ["nvfp4"]},
)
def test_attention_sees_rotated_keys(device: str, name: str, attention: str, dtype: str):
    model, ids = model_of(name, device), text_of(device)
    mask = torch.tensor(PADDING["left"], device=device)
    scales = scales_for(dtype, 1.0)
    rounded = RotatedCache(make_cache(model, dtype).specs, [scales] * 2)
    expected, exact = (read(model, cache, ids, mask, CHUNKS)[mask.bool()] for cache in (rounded, DynamicCache()))
    model.set_attn_implementation(attention)
    cache = make_cache(model, dtype, k_scale=scales[0], v_scale=scales[1], key_rotation=[1])
    got = read(model, cache, ids, mask, CHUNKS)[mask.bool()]
    assert relative_error(got, expected) < min(0.01, 0.2 * relative_error(exact, expected))
    assert ((got - expected).norm(dim=-1) / expected.norm(dim=-1)).median() < 1e-4


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_exact_tokens_stay_exact(device: str, attention: str):
    """In a window of all tokens, with the default scales; and in the model dtype."""
    model = model_of("llama", device)
    expected = generate(model, DynamicCache())
    model.set_attn_implementation(attention)
    for dtype, options in (("nvfp4", {"exact_window": 9 + NEW_TOKENS}), ("auto", {})):
        got = generate(model, make_cache(model, dtype, key_rotation=(0, 1), **options))
        assert got.sequences.tolist() == expected.sequences.tolist()
        for logits, wanted in zip(got.logits, expected.logits, strict=True):
            torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("layers", "error", "message"),
    [
        ((2,), KVCacheValueError, "key_rotation: got 2, expected indices of the 2 layers"),
        ((True,), KVCacheValueError, "key_rotation: got True, expected indices of the 2 layers"),
        ("0", KVCacheTypeError, "key_rotation: got "),
        (True, KVCacheTypeError, "key_rotation: got "),
    ],
)
def test_invalid_layers_to_rotate_are_refused(layers: Any, error: type, message: str):
    with pytest.raises(error, match=message):
        make_cache(model_of("llama", "cpu"), "nvfp4", key_rotation=layers)
