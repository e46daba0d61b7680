"""`generate` on kvjax's pages: bit for bit what transformers' own cache gives, or would give for rounded tokens."""

from __future__ import annotations

import copy
import math
import re
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.helpers import matrix

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from support.transformers_models import (  # noqa: E402
    FACTOR,
    NEW_TOKENS,
    NUM_LAYERS,
    QUANTIZED,
    VOCABULARY,
    RoundedCache,
    generate,
    logits_in_steps,
    make_cache,
    make_model,
    prompts,
    relative_error,
    scales_for,
    states,
    taking,
)
from transformers import DynamicCache, FalconConfig, LlamaConfig, MistralConfig  # noqa: E402

import kvjax  # noqa: E402
from kvjax import KVCacheDType, KVCacheTypeError, KVCacheValueError, KVCacheWarning  # noqa: E402
from kvjax_torch import to_jax  # noqa: E402
from kvjax_torch.transformers_cache import KvjaxCache  # noqa: E402


def assert_same_generation(got: Any, expected: Any) -> None:
    assert got.sequences.tolist() == expected.sequences.tolist()
    assert len(got.logits) == len(expected.logits) > 0
    for step, (logits, wanted) in enumerate(zip(got.logits, expected.logits, strict=True)):
        assert torch.equal(logits, wanted), f"step {step}: {(logits - wanted).abs().max()}"


@matrix(
    {
        "dtype": ["float32", "bfloat16", "float16"],
        "model": [("sdpa", 4, "NHD", 16), ("sdpa", 2, "HND", 4), ("eager", 1, "NHD", 1)],
    }
)
def test_the_models_own_dtype_gives_the_bits_of_dynamic_cache(
    device: str, dtype: str, model: tuple[str, int, str, int]
):
    attention, num_kv_heads, layout, block_size = model
    model = make_model(device, getattr(torch, dtype), num_key_value_heads=num_kv_heads, attn_implementation=attention)
    cache = make_cache(model, num_blocks=64, layout=layout, block_size=block_size)
    assert_same_generation(generate(model, cache), generate(model, DynamicCache(config=model.config)))
    assert {spec.dtype for spec in cache.specs} == {KVCacheDType(dtype)}
    assert {layer.kv.dtype for layer in cache.layers} == {getattr(torch, dtype)}
    assert cache.get_seq_length() == 9 + NEW_TOKENS - 1
    assert cache.layers[0].block_table.num_used_blocks == 3 * math.ceil(cache.get_seq_length() / block_size)


@pytest.mark.parametrize(
    ("dtype", "model_dtype", "options"),
    [
        ("bfloat16", "float32", {}),
        ("fp8_e4m3", "float32", {}),
        ("fp8_e4m3", "bfloat16", {"layout": "HND", "k_scale": [1.0, 2.5], "v_scale": [3.0, 1.0]}),
        ("fp8_e5m2", "bfloat16", {}),
        ("fp8_e5m2", "float16", {"layout": "HND"}),
        ("nvfp4", "float32", {}),
        ("nvfp4", "bfloat16", {"layout": "HND", "v_scale_layout": "swizzled"}),
        ("nvfp4", "float16", {"v_scale_layout": "swizzled"}),
        ("fp8_k_nvfp4_v", "float32", {"layout": "HND", "v_scale_layout": "swizzled"}),
        ("int8_k_nvfp4_4over6_v", "bfloat16", {"v_scale_layout": "swizzled"}),
    ],
    ids=str,
)
def test_any_dtype_gives_the_bits_of_a_cache_of_rounded_tokens(
    device: str, dtype: str, model_dtype: str, options: dict[str, Any]
):
    model = make_model(device, getattr(torch, model_dtype))
    k_scale, v_scale = (
        scale * torch.tensor(options.get(name, 1.0))
        for name, scale in zip(("k_scale", "v_scale"), scales_for(dtype, FACTOR), strict=True)
    )
    cache = make_cache(model, dtype, **{**options, "k_scale": k_scale, "v_scale": v_scale})
    got = generate(model, cache)
    assert_same_generation(got, generate(model, RoundedCache(cache.specs, [(k_scale.numpy(), v_scale.numpy())] * 2)))
    assert not torch.equal(got.logits[0], generate(model, DynamicCache()).logits[0])


def largest_rounding_error(x: torch.Tensor, dtype: str) -> torch.Tensor:
    """How far each stored element may be from what was written, clipping and the smallest numbers left aside.

    fp8 rounds to 3 or 2 bits after the leading one: by at most 2^-4 or 2^-3 of the element. The widest step of e2m1 is
    from 4 to 6, where 6 stands for the largest of a block of 16; a block scale, itself e4m3, makes it up to 1 / 16
    wider: half of it is 1 / 6 * 17 / 16 of that largest.
    """
    if dtype != "nvfp4":
        return x.abs() * {"fp8_e4m3": 2**-4, "fp8_e5m2": 2**-3}[dtype]
    largest = x.unflatten(-1, (-1, 16)).abs().amax(-1, keepdim=True)
    return (largest * (17 / 96)).expand(*largest.shape[:-1], 16).flatten(-2)


class NoisyCache(DynamicCache):
    """transformers' cache with each element off by a random part of the largest error that a dtype makes."""

    def __init__(self, dtype: str):
        super().__init__()
        self.dtype, self.noise = dtype, torch.Generator().manual_seed(2)

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        noisy = (
            x + largest_rounding_error(x, self.dtype) * (2 * torch.rand(x.shape, generator=self.noise) - 1).to(x)
            for x in (key_states, value_states)
        )
        return super().update(*noisy, layer_idx, *args, **kwargs)


def logits_of_a_text(model: Any, cache: Any) -> torch.Tensor:
    """Logits `[2, 40, vocabulary]` of a fixed text: half of it prefilled, the rest fed one token at a time."""
    text = torch.randint(1, VOCABULARY, (2, 40), generator=torch.Generator().manual_seed(3)).to(model.device)
    with torch.no_grad():
        parts = [model(part, **taking(cache)).logits for part in (text[:, :20], *text[:, 20:].split(1, dim=1))]
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("scales", ["given", "ignored"])
@pytest.mark.parametrize("dtype", QUANTIZED)
def test_quantized_logits_are_within_the_error_of_rounding(device: str, dtype: str, scales: str):
    """The bound is what the model makes of noise that is spread evenly up to the largest rounding error.

    Rounding to nearest errs by that or less, so a cache that does nothing else to keys and values stays below. Seen
    were 8% of the logits' root mean square for fp8_e4m3, 16% for fp8_e5m2 and 45% for nvfp4, with caches at 6%, 12% and
    21%. Stored at scale 1 these keys and values are zeros, and the logits have nothing to do with the exact ones.
    """
    factor = 2.0**-24
    model = make_model(device, factor=factor)
    exact = logits_of_a_text(model, DynamicCache())
    bound = relative_error(logits_of_a_text(model, NoisyCache(dtype)), exact)
    k_scale, v_scale = scales_for(dtype, factor) if scales == "given" else (1.0, 1.0)
    error = relative_error(logits_of_a_text(model, make_cache(model, dtype, k_scale=k_scale, v_scale=v_scale)), exact)
    if scales == "given":
        assert 0 < error < bound
    else:
        assert error > 2 * bound


def test_an_nvfp4_scale_that_is_not_given_fits_the_first_tokens(device: str):
    factor = 2.0**-24
    model = make_model(device, factor=factor)
    cache, first = make_cache(model, "nvfp4"), DynamicCache()
    exact = logits_of_a_text(model, DynamicCache())
    bound = relative_error(logits_of_a_text(model, NoisyCache("nvfp4")), exact)
    assert 0 < relative_error(logits_of_a_text(model, cache), exact) < bound
    logits_of_a_text(model, first)
    keys, values = first.layers[0].keys[:, :, :20], first.layers[0].values[:, :, :20]
    for scale, stored in ((cache.layers[0].k_scale, keys), (cache.layers[0].v_scale, values)):
        assert scale.item() == pytest.approx(16 * stored.abs().max().item() / (6 * 448), rel=1e-6)


@pytest.mark.parametrize("first_tokens", [0.0, math.inf, math.nan])
def test_first_tokens_that_no_scale_fits_take_scale_one(device: str, first_tokens: float):
    cache = make_cache(make_model(device), "nvfp4")
    states = torch.full((1, 2, 3, 32), first_tokens, device=device)
    keys, _ = cache.update(states, states, 0)
    assert cache.layers[0].k_scale.item() == cache.layers[0].v_scale.item() == 1
    assert (keys == 0).all() or not math.isfinite(first_tokens)


@pytest.mark.parametrize("dtype", ["auto", "fp8", "nvfp4"])
def test_default_scales_are_float32_whatever_torchs_default_dtype_is(device: str, dtype: str):
    cache, states = make_cache(make_model(device), dtype), torch.ones((1, 2, 3, 32), device=device)
    torch.set_default_dtype(torch.bfloat16)
    try:
        cache.update(states, states, 0)
    finally:
        torch.set_default_dtype(torch.float32)
    assert cache.layers[0].k_scale.dtype is cache.layers[0].v_scale.dtype is torch.float32


def test_each_layer_has_its_own_dtype_scales_and_pages(device: str):
    model = make_model(device, torch.bfloat16)
    scales = [0.5 * FACTOR, torch.tensor([0.25, 0.125]) * FACTOR]
    cache = make_cache(model, "fp8", skip_layers=["0"], k_scale=scales, v_scale=FACTOR)
    rounded = RoundedCache(cache.specs, [(1.0, 1.0), (scales[1].numpy(), FACTOR)])
    assert_same_generation(generate(model, cache), generate(model, rounded))
    assert [spec.dtype.value for spec in cache.specs] == ["bfloat16", "fp8_e4m3"]
    assert [layer.kv.dtype for layer in cache.layers] == [torch.bfloat16, torch.uint8]
    assert [layer.kv.shape for layer in cache.layers] == [(32, 2, 4, 2, 32)] * 2
    assert cache.bytes_per_token == 2 * 2 * 32 * 2 + 2 * 2 * 32


def test_layers_may_have_dtypes_of_their_own():
    cache = make_cache(make_model("cpu"), {"0": "fp8", "*": "nvfp4"})
    assert [spec.dtype.value for spec in cache.specs] == ["fp8_e4m3", "nvfp4"]


def test_a_checkpoint_that_declares_fp8_gets_it():
    declared = {"kv_cache_scheme": {"num_bits": 8, "type": "float"}, "quant_method": "compressed-tensors"}
    config = LlamaConfig(num_hidden_layers=2, dtype="bfloat16", quantization_config=declared)
    assert {spec.dtype for spec in KvjaxCache(config, num_blocks=4).specs} == {KVCacheDType.FP8_E4M3}


@pytest.mark.parametrize("dtype", ["float32", "fp8", "nvfp4"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_the_pages_are_those_of_a_kvjax_cache(device: str, dtype: str, layout: str):
    cache = make_cache(make_model(device), dtype, layout=layout)
    read_by_torch = cache.update(*states(device, 3, 11), 1)
    layer = cache.layers[1]
    read_by_jax = kvjax.gather_kv(
        kvjax.KVCache(to_jax(layer.kv), layer.spec, k_scale=to_jax(layer.k_scale), v_scale=to_jax(layer.v_scale)),
        layer.block_table.rows(),
        np.full(3, 11, np.int32),
        dtype=np.float32,
    )
    for by_jax, by_torch in zip(read_by_jax, read_by_torch, strict=True):
        np.testing.assert_array_equal(np.asarray(by_jax)[:, :11], by_torch.transpose(1, 2).cpu().numpy())


def test_blocks_are_taken_as_sequences_grow_and_given_back(device: str):
    cache = make_cache(make_model(device), num_blocks=6)
    used = []
    for num_new in (3, 1, 1, 4):
        cache.update(*states(device, 2, num_new), 0)
        cache.update(*states(device, 2, num_new), 1)
        used.append(cache.layers[0].block_table.num_used_blocks)
    assert used == [2, 2, 4, 6]
    pages = [layer.kv.clone() for layer in cache.layers]
    with pytest.raises(KVCacheValueError, match="got 6 blocks of 4 tokens, expected at least 8 to hold 2 sequences"):
        cache.update(*states(device, 2, 4), 0)
    assert all(torch.equal(layer.kv, before) for layer, before in zip(cache.layers, pages, strict=True))
    assert cache.get_seq_length() == 9
    assert cache.get_max_length() == 24
    cache.crop(-5)
    assert (cache.get_seq_length(), cache.layers[0].block_table.num_used_blocks) == (4, 2)
    cache.reset()
    assert (cache.get_seq_length(), cache.layers[0].block_table.num_used_blocks) == (0, 0)
    cache.update(*states(device, 1, 24), 0)  # as many as there are, and for another batch


def test_generation_past_the_blocks_there_are_says_how_many_it_takes(device: str):
    model = make_model(device)
    message = r"num_blocks: got 11 blocks of 4 tokens, expected at least 12 to hold 3 sequences of 13 tokens"
    with pytest.raises(KVCacheValueError, match=message):
        generate(model, make_cache(model, num_blocks=11))


def test_a_cache_that_is_reset_serves_again(device: str):
    model = make_model(device)
    cache = make_cache(model, "nvfp4", num_blocks=15)
    first = generate(model, cache)
    cache.reset()
    assert_same_generation(generate(model, cache), first)


@pytest.mark.parametrize("num_beams", [2, 5])
def test_beams_are_those_of_dynamic_cache_and_share_blocks(device: str, num_beams: int):
    model = make_model(device)
    num_alone = 3 * num_beams * 5  # blocks of sequences of 20 tokens that share none
    cache = make_cache(model, num_blocks=num_alone)
    found = generate(model, cache, num_beams=num_beams)
    assert_same_generation(found, generate(model, DynamicCache(), num_beams=num_beams))
    assert cache.layers[0].block_table.num_used_blocks < num_alone


def test_drafts_are_taken_back(device: str):
    """Prompt lookup writes candidates and crops those that the model rejects."""
    model = make_model(device)
    prompt = torch.tensor([[3, 4, 5, 6, 3, 4, 5, 6, 3, 4]], device=device)
    options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    cropped = []

    class Watched(KvjaxCache):
        def crop(self, tokens_to_remove: int) -> None:
            cropped.append(tokens_to_remove)
            super().crop(tokens_to_remove)

    caches = Watched(model.config, num_blocks=40, block_size=4), DynamicCache()
    found, expected = (
        model.generate(prompt, **taking(cache), prompt_lookup_num_tokens=3, **options) for cache in caches
    )
    assert found.tolist() == expected.tolist()
    assert min(cropped) < 0


def test_a_prompt_in_chunks_and_a_second_turn_have_the_tokens_of_dynamic_cache(device: str):
    model = make_model(device)
    caches = make_cache(model, num_blocks=64), DynamicCache()
    for turn in range(2):
        text = torch.randint(1, VOCABULARY, (2, 11 + 30 * turn), generator=torch.Generator().manual_seed(4)).to(device)
        options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "prefill_chunk_size": 4}
        found, expected = (model.generate(text, **taking(cache), **options) for cache in caches)
        assert found.tolist() == expected.tolist()
    assert caches[0].get_seq_length() == caches[1].get_seq_length() > 41


def test_a_batch_is_repeated_and_chosen_from(device: str):
    cache, plain = make_cache(make_model(device)), DynamicCache()
    for one in (cache, plain):
        for layer in range(NUM_LAYERS):
            one.update(*states(device, 2, 6, seed=1), layer)
        one.batch_repeat_interleave(2)
        one.batch_select_indices(torch.tensor([True, False, True, True], device=device))
        one.reorder_cache(torch.tensor([1, 0, 1], device=device))
        one.crop(-1)
    new = states(device, 3, 2, seed=2)
    for got, expected in zip(cache.update(*new, 0), plain.update(*new, 0), strict=True):
        assert torch.equal(got, expected)
        assert got.stride() == expected.stride()


def test_a_copied_prompt_can_be_continued_twice(device: str):
    model = make_model(device)
    cache, found = make_cache(model), []
    prompt = prompts(device)
    with torch.no_grad():
        model(input_ids=prompt["input_ids"][:, :8], **taking(cache))
    for one in (copy.deepcopy(cache), cache):
        found.append(generate(model, one))
    assert_same_generation(*found)


def test_reordering_an_empty_cache_does_nothing(device: str):
    cache = make_cache(make_model(device))
    cache.reorder_cache(torch.tensor([1, 0]))
    assert cache.get_seq_length() == 0
    for layer in range(NUM_LAYERS):
        cache.update(*states(device, 2, 6), layer)
    cache.reset()
    cache.batch_select_indices(torch.tensor([5]))  # of no sequence now, nor of one before
    assert cache.get_seq_length() == 0
    for layer in range(NUM_LAYERS):
        assert len(cache.update(*states(device, 3, 6), layer)[0]) == 3


@pytest.mark.parametrize("indices", [[2, 0, 2], [True, False, True]], ids=str)
def test_sequences_are_chosen_by_a_list(indices: list[int] | list[bool]):
    cache, plain = make_cache(make_model("cpu")), DynamicCache()
    for one in (cache, plain):
        for layer in range(NUM_LAYERS):
            one.update(*states("cpu", 3, 6), layer)
        one.batch_select_indices(indices)
    new = states("cpu", len(plain.layers[0].keys), 1, seed=1)
    assert torch.equal(cache.update(*new, 0)[0], plain.update(*new, 0)[0])


def test_a_sliding_window_is_the_models_mask(device: str):
    changes = {"sliding_window": 5, "attn_implementation": "eager"}
    model = make_model(device, config_class=MistralConfig, **changes)
    cache = make_cache(model)
    assert_same_generation(generate(model, cache), generate(model, DynamicCache()))
    assert {spec.sliding_window for spec in cache.specs} == {5}


def test_a_cache_that_was_filled_in_inference_mode_can_be_gone_on_with(device: str):
    model = make_model(device)
    tokens, found = prompts(device), []
    for cache in (make_cache(model), DynamicCache()):
        with torch.inference_mode():
            model(**{name: part[:, :5] for name, part in tokens.items()}, **taking(cache))
        found.append(generate(model, cache))
    assert_same_generation(*found)


def test_a_model_in_another_dtype_than_its_configuration_says_is_refused(device: str):
    model = make_model(device).to(torch.bfloat16)
    with pytest.raises(KVCacheTypeError, match=r"got dtype torch.bfloat16, expected torch.float32 as the config"):
        generate(model, make_cache(model))
    cache = make_cache(model, model_dtype=model.dtype)
    assert_same_generation(generate(model, cache), generate(model, DynamicCache()))


def test_another_batch_is_refused_until_the_cache_is_empty(device: str):
    cache = make_cache(make_model(device))
    for layer in range(NUM_LAYERS):
        cache.update(*states(device, 2, 3), layer)
    with pytest.raises(KVCacheValueError, match="key_states: got a batch of 3, expected 2"):
        cache.update(*states(device, 3, 1), 0)


def test_a_forward_pass_that_wants_gradients_is_refused(device: str):
    model = make_model(device)
    with pytest.raises(KVCacheTypeError, match="a write into a cache has no gradient"):
        model(**prompts(device), **taking(make_cache(model)))


LLAMA = LlamaConfig(num_hidden_layers=2, dtype="bfloat16")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_blocks": 0}, KVCacheValueError, "num_blocks: got 0, expected an int of at least 1"),
        ({"kv_cache_dtype": "fp9"}, KVCacheValueError, "kv_cache_dtype: got 'fp9', expected one of auto"),
        ({"skip_layers": [2]}, KVCacheValueError, "skip_layers: got 2, expected one of a layer index from 0 to 1"),
        ({"k_scale": [1.0]}, KVCacheValueError, "k_scale: got 1 scales, expected one for each of 2 layers"),
        ({"v_scale": "1"}, KVCacheTypeError, "v_scale: got '1' of type str, expected a number"),
        ({"v_scale": [1.0, 1e38]}, KVCacheValueError, "v_scale: got 1e.38, expected between 7.9e-31"),
        ({"v_scale": [1.0, -2.0]}, KVCacheValueError, "v_scale: got -2.0, expected between 7.9e-31"),
        ({"model_dtype": torch.float64}, KVCacheValueError, "model dtype: got torch.float64, expected one of float32"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], error: type, message: str):
    with pytest.raises(error, match=message):
        KvjaxCache(LLAMA, **{"num_blocks": 4, **options})


def test_keys_and_values_of_different_sizes_are_refused():
    config = LlamaConfig(num_hidden_layers=2, dtype="bfloat16", v_head_dim=64)
    with pytest.raises(KVCacheValueError, match="config: got head sizes 128 of keys and 64 of values"):
        KvjaxCache(config, num_blocks=4)


def test_a_model_with_layers_that_keep_no_keys_and_values_is_refused():
    config = transformers.Qwen3NextConfig(num_hidden_layers=4, dtype="float32")
    with pytest.raises(KVCacheValueError, match="got 3 of 4 layers without a KV cache of their own"):
        KvjaxCache(config, num_blocks=4)


@pytest.mark.parametrize(
    "changes",
    [{}, {"multi_query": False}, {"new_decoder_architecture": True, "num_kv_heads": 2}],
    ids=["one KV head", "as many KV heads", "KV heads repeated"],
)
@pytest.mark.filterwarnings("ignore::kvjax.KVCacheWarning")
def test_falcons_store_what_they_hand_over(device: str, changes: dict[str, Any]):
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    config = FalconConfig(**sizes, **changes)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().to(device)
    assert_same_generation(generate(model, make_cache(model)), generate(model, DynamicCache()))


def test_heads_that_a_model_repeats_are_stored_so(device: str):
    cache = make_cache(make_model(device))
    repeated = [x.repeat_interleave(2, dim=1) for x in states(device, 2, 5)]
    with pytest.warns(KVCacheWarning, match="got 4 heads, each of the configuration's 2 KV heads repeated: .* 2 times"):
        stored = cache.update(*repeated, 0)
    assert all(torch.equal(got, given) for got, given in zip(stored, repeated, strict=True))
    assert [spec.num_kv_heads for spec in cache.specs] == [4, 2]
    message = r"key_states: got 3 heads of size 32, expected 2 of size 32 as the configuration says"
    with pytest.raises(KVCacheValueError, match=message):
        cache.update(*(x[:, :3] for x in repeated), 1)


def test_what_is_not_a_configuration_is_refused():
    for config, hint in ((make_model("cpu"), ": pass model.config"), (LlamaConfig().to_dict(), "")):
        with pytest.raises(KVCacheTypeError, match=rf"config: got a \w+, expected a transformers configuration{hint}$"):
            KvjaxCache(config, num_blocks=4)


@pytest.mark.full
def test_a_compiled_model_breaks_its_graph_at_the_cache(device: str):
    model = make_model(device)
    got = logits_in_steps(model, make_cache(model), is_compiled=True)
    assert all(map(torch.equal, got, logits_in_steps(model, DynamicCache(), is_compiled=True)))
    # Not to the bit: before torch 2.14, what is compiled gives SDPA a mask where the eager model says is_causal=True,
    # which a GPU has another kernel for.
    torch.testing.assert_close(got, logits_in_steps(model, DynamicCache(), is_compiled=False), rtol=1e-4, atol=1e-4)
    tokens = prompts(device)["input_ids"][:2]
    with torch.no_grad(), pytest.raises(Exception, match="KvjaxCache keeps its block table on the host"):
        torch.compile(model, backend="eager", fullgraph=True)(tokens, **taking(make_cache(model)))
    torch._dynamo.reset()


def test_a_crop_to_a_length_is_refused(device: str):
    with pytest.raises(KVCacheValueError, match="tokens_to_remove: got 3, expected 0 or a negative number"):
        make_cache(make_model(device)).crop(3)


EXAMPLE = Path(__file__).parents[1] / "examples/generate_with_kvjax_cache.py"


@pytest.mark.full
def test_the_example_shows_what_each_dtype_costs_and_keeps(capsys: pytest.CaptureFixture[str]):
    runpy.run_path(str(EXAMPLE))
    rows = re.findall(r"(\w+): +(\d+) bytes/token, (\d+) of 40", capsys.readouterr().out)
    assert [row[:2] for row in rows] == [("auto", "1024"), ("fp8_e4m3", "512"), ("fp8_e5m2", "512"), ("nvfp4", "288")]
    assert rows[0][2] == "40"
    assert len(EXAMPLE.read_text().splitlines()) <= 40
