"""Steps that stop halfway, and models that `KvjaxCache` serves in part or not at all."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from support.transformers_models import (  # noqa: E402
    NUM_LAYERS,
    VOCABULARY,
    make_cache,
    make_model,
    states,
    taking,
)
from transformers import AutoModelForCausalLM, DynamicCache  # noqa: E402

from kvjax import KVCacheTypeError, KVCacheValueError, KVCacheWarning, UnsupportedError  # noqa: E402
from kvjax_torch.transformers_cache import CACHE_ARGUMENT, KvjaxCache  # noqa: E402

SIZES = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": NUM_LAYERS}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}


def model_with(device: str, attention: str, **changes: Any) -> Any:
    return make_model(device, factor=1.0, attn_implementation=attention, **changes)


def text(device: str, num_tokens: int, seed: int = 5) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, (2, num_tokens), generator=torch.Generator().manual_seed(seed)).to(device)


def logits(model: Any, cache: Any, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Those of the tokens, without padding's."""
    with torch.no_grad():
        out = model(ids, attention_mask=mask, **taking(cache)).logits
    return out if mask is None else out[mask[:, -ids.shape[1] :].bool()]


def test_the_argument_is_the_one_that_models_and_generate_take():
    for function in (transformers.LlamaForCausalLM.forward, transformers.LlamaModel.forward):
        assert CACHE_ARGUMENT in inspect.signature(function).parameters


@pytest.mark.skipif(CACHE_ARGUMENT == "cache", reason="this transformers takes cache=")
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_cache_that_a_model_ignores_says_so(attention: str):
    model, ids = model_with("cpu", attention), text("cpu", 4)
    cache = make_cache(model)
    with torch.no_grad():
        model(ids, cache=cache)
    with pytest.warns(KVCacheWarning, match=r"no model stored a token .* ignores cache= .* pass past_key_values="):
        del cache
    cache = make_cache(model)
    logits(model, cache, ids)
    with warnings.catch_warnings(action="error"):
        del cache


def test_a_step_that_raises_leaves_its_padding_to_none(device: str):
    model, ids = model_with(device, "kvjax"), text(device, 8)
    left, right = (
        torch.tensor(mask, device=device) for mask in ([[0] * 3 + [1] * 5, [1] * 8], [[1] * 6 + [0] * 2] * 2)
    )
    cache = make_cache(model)
    with pytest.raises(KVCacheTypeError, match="a write into a cache has no gradient"):
        model(ids, attention_mask=left, **taking(cache))
    expected = logits(model, make_cache(model), ids, right)
    assert torch.equal(logits(model, cache, ids, right), expected)


@pytest.mark.parametrize("attention", ["sdpa", "kvjax"])
@pytest.mark.parametrize("heal", ["crop", "reset"])
def test_a_step_that_stops_in_mid_model_is_taken_back_before_the_next(
    device: str, attention: str, heal: str, monkeypatch: pytest.MonkeyPatch
):
    model, ids = model_with(device, attention), text(device, 12)
    cache, whole = make_cache(model), make_cache(model)
    expected = torch.cat([logits(model, whole, part) for part in ids.split(6, dim=1)], dim=1)
    logits(model, cache, ids[:, :6])

    def out_of_memory(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("for the test")

    with monkeypatch.context() as patch:
        patch.setattr(model.model.layers[0].mlp, "forward", out_of_memory)
        with pytest.raises(torch.OutOfMemoryError, match="for the test"):
            logits(model, cache, ids[:, 6:])
    message = (
        rf"{CACHE_ARGUMENT}: got layers of 6 to 12 tokens, .* cache\.crop\(-6\) removes its tokens, cache\.reset\(\)"
    )
    for retried in (ids[:, 6:], ids[:, :1]):
        with pytest.raises(KVCacheValueError, match=message):
            logits(model, cache, retried)
    if heal == "crop":
        cache.crop(-6)
        assert torch.equal(logits(model, cache, ids[:, 6:]), expected[:, 6:])
    else:
        cache.reset()
        assert torch.equal(torch.cat([logits(model, cache, part) for part in ids.split(6, dim=1)], dim=1), expected)


@pytest.mark.parametrize("attention", ["eager", "kvjax"])
@pytest.mark.parametrize("padding", [0, 2])
@pytest.mark.parametrize("options", [{}, {"prefill_chunk_size": 4}], ids=["whole", "chunks"])
def test_a_prompt_that_stopped_halfway_is_not_generated_from_again(
    attention: str, padding: int, options: dict[str, int], monkeypatch: pytest.MonkeyPatch
):
    """Neither the mask, which fits no more, nor an empty chunk is what the error speaks of."""
    model, ids = model_with("cpu", attention), text("cpu", 8)
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    cache = make_cache(model)
    prompt = {"input_ids": ids, "attention_mask": mask, "pad_token_id": 0, "max_new_tokens": 2, **taking(cache)}

    def out_of_memory(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("for the test")

    with monkeypatch.context() as patch:
        patch.setattr(model.model.layers[1].self_attn, "forward", out_of_memory)
        with pytest.raises(torch.OutOfMemoryError, match="for the test"):
            model.generate(**prompt)
    message = rf"^{CACHE_ARGUMENT}: got layers of 0 to 8 tokens, .* cache\.crop\(-8\) removes its tokens"
    with pytest.raises(KVCacheValueError, match=message):
        model.generate(**prompt, **options)
    if attention == "kvjax":
        with pytest.raises(KVCacheValueError, match=message):
            logits(model, cache, ids, mask)
    cache.crop(-8)
    assert model.generate(**prompt, **options).shape == (2, 10)


@pytest.mark.parametrize("dtype", ["auto", "fp8"])
def test_autocast_leaves_keys_and_values_in_the_model_dtype(device: str, dtype: str):
    model = model_with(device, "sdpa")
    cache, dense = make_cache(model, dtype), DynamicCache()
    ids = text(device, 12)
    with torch.autocast(device, torch.bfloat16):
        got, expected = (
            torch.cat([logits(model, one, part) for part in ids.split([8, 1, 3], dim=1)], dim=1)
            for one in (cache, dense)
        )
        model.set_attn_implementation("kvjax")
        over_pages = torch.cat(
            [
                logits(model, again, part)
                for again in [make_cache(model, dtype)]
                for part in ids.split([8, 1, 3], dim=1)
            ],
            dim=1,
        )
    if dtype == "auto":
        assert torch.equal(got, expected)
        assert cache.layers[0].kv.dtype == torch.float32
    for one in (got, over_pages):
        assert ((one - expected).norm() / expected.norm()).item() < (0.02 if dtype == "auto" else 0.2)


def test_a_rank_of_a_tensor_parallel_model_stores_its_share_of_the_heads(device: str):
    """Half of the heads of a model: the configuration is the whole model's, as on each rank."""
    model, ids = model_with(device, "kvjax", num_key_value_heads=4), text(device, 9)
    for layer in model.model.layers:
        attention = layer.self_attn
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
            projection.weight = torch.nn.Parameter(projection.weight[:64])
        attention.o_proj.weight = torch.nn.Parameter(attention.o_proj.weight[:, :64])
    cache = make_cache(model)
    got = torch.cat([logits(model, cache, part) for part in ids.split([8, 1], dim=1)], dim=1)
    assert [spec.num_kv_heads for spec in cache.specs] == [2, 2]
    model.set_attn_implementation("sdpa")
    torch.testing.assert_close(got, logits(model, DynamicCache(), ids), rtol=1e-4, atol=1e-4)


def test_pages_are_not_offloaded():
    cache = make_cache(make_model("cpu"))
    cache.update(*states("cpu", 1, 3), 0)
    for act in (lambda: cache.offload(0), cache.layers[0].offload, cache.layers[0].prefetch):
        with pytest.raises(UnsupportedError, match="offload: a KvjaxCache does not move its pages to the host"):
            act()
    assert cache.get_seq_length() == 3


def test_towers_attend_with_sdpa_under_the_name_of_the_whole_model(device: str):
    vision = transformers.SiglipVisionConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=4
    )
    language = transformers.LlamaConfig(**SIZES, **HEADS, dtype="float32", initializer_range=0.15)
    config = transformers.LlavaConfig(
        text_config=language, vision_config=vision, image_token_id=60, image_seq_length=16,
        vision_feature_select_strategy="full", vision_feature_layer=-1,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlavaForConditionalGeneration(config).eval().to(device)
    ids = torch.cat([text(device, 3), torch.full((2, 16), 60, device=device), text(device, 4)], dim=1)
    pixels, found = torch.randn(2, 3, 16, 16, device=device), []
    for attention in ("sdpa", "kvjax"):
        model.set_attn_implementation(attention)
        cache = DynamicCache() if attention == "sdpa" else make_cache(model)
        with torch.no_grad():
            found.append(model(input_ids=ids, pixel_values=pixels, **taking(cache)).logits)
    assert model.config.vision_config._attn_implementation == "kvjax"
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


def test_a_model_that_computes_with_keys_and_values_itself_is_refused_before_it_stores_any(device: str):
    config = transformers.DiffLlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2, dtype="float32")
    model = AutoModelForCausalLM.from_config(config).eval().to(device)
    cache = KvjaxCache(model.config, num_blocks=16, block_size=4)
    ids = text(device, 5)
    assert torch.equal(logits(model, cache, ids), logits(model, DynamicCache(), ids))
    cache.reset()
    model.set_attn_implementation("kvjax")
    message = (
        "in pages, which transformers' attention interface alone can read, .* expected 'sdpa' or 'eager' for a model"
    )
    with pytest.raises((AttributeError, KVCacheTypeError), match=message):
        logits(model, cache, ids)
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("name", ["FalconH1", "InklingText"])
def test_layers_with_a_state_beside_keys_and_values_are_refused(name: str):
    config_class = getattr(transformers, f"{name}Config", None)
    if config_class is None:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    config = config_class(dtype="float32")
    message = rf"config: got a {config.model_type} model, whose layer 0 has a Linear\w+ in .* and no state"
    with pytest.raises(KVCacheValueError, match=message):
        KvjaxCache(config, num_blocks=4)


@pytest.mark.parametrize("name", ["KyutaiSpeechToText", "Moshi", "MoshiDepth"])
def test_models_whose_masks_lack_their_window_are_refused(name: str):
    config_class = getattr(transformers, f"{name}Config")
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    config = config_class(num_hidden_layers=2, hidden_size=64, ffn_dim=128, **heads, sliding_window=6, dtype="float32")
    message = (
        rf"^config: got a {config.model_type} model, whose masks lack its sliding window of 6 tokens, .* use"
        r" transformers' DynamicCache\(config=model\.config\)"
    )
    ignored = warnings.catch_warnings(action="ignore", category=KVCacheWarning)  # types that kvjax does not know
    with ignored, pytest.raises(UnsupportedError, match=message):
        KvjaxCache(config, num_blocks=4)
