"""`attn_implementation="kvjax"`: models attend to pages as they do to transformers' own cache."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from support.helpers import matrix

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from support.transformers_models import (  # noqa: E402
    MODELS,
    NEW_TOKENS,
    PADDING,
    WINDOW,
    WINDOWED,
    RoundedCache,
    generate,
    logits_in_steps,
    make_cache,
    make_model,
    model_of,
    over_pages,
    positions,
    prompts,
    read,
    relative_error,
    scales_for,
    taking,
    text_of,
)
from transformers import (  # noqa: E402
    DynamicCache,
    Llama4TextConfig,
)

from kvjax import KVCacheTypeError, KVCacheValueError  # noqa: E402
from kvjax_torch.transformers import layer as transformers_layer  # noqa: E402
from kvjax_torch.transformers_cache import CACHE_ARGUMENT, KvjaxCache  # noqa: E402

CPU = torch.device("cpu")


def assert_close_generation(got: Any, expected: Any) -> None:
    """The same tokens, of logits that differ by no more than float32 sums in another order."""
    assert got.sequences.tolist() == expected.sequences.tolist()
    for step, (logits, wanted) in enumerate(zip(got.logits, expected.logits, strict=True)):
        torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4, msg=lambda words, at=step: f"{at}: {words}")


@pytest.fixture
def no_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has a cache fail that makes a layer dense."""
    monkeypatch.delattr(transformers_layer, "gather_kv")


@pytest.mark.usefixtures("no_gather")
@matrix(
    {
        "name": [*MODELS],
        "options": [{}, {"layout": "HND", "block_size": 1}, {"block_size": 16}, {"num_beams": 3}],
    },
    few={"name": ["llama", "gemma3", "gpt-oss"], "options": [{}]},
)
def test_tokens_are_those_of_dynamic_cache(device: str, name: str, options: dict[str, Any]):
    """With left padding, and windows shorter than the text."""
    model, of_cache = model_of(name, device), dict(options)
    beams = {"num_beams": of_cache.pop("num_beams")} if "num_beams" in options else {}
    expected = generate(model, DynamicCache(config=model.config), **beams)
    cache = make_cache(over_pages(model), num_blocks=200, **of_cache)
    assert_close_generation(generate(model, cache, **beams), expected)
    assert cache.get_seq_length() == 9 + NEW_TOKENS - 1


@matrix({"name": ["llama", *WINDOWED], "dtype": ["auto", "nvfp4"]}, few={"name": ["gemma3", "gpt-oss"]})
def test_windows_give_blocks_back(device: str, name: str, dtype: str):
    """Of each sequence, as many blocks as a window and a step's tokens can lie in."""
    model, ids, chunks = model_of(name, device), text_of(device), [6, 1, 9, 3, *[1] * 21]
    scales = dict(zip(("k_scale", "v_scale"), scales_for(dtype, 1.0), strict=True))
    dense = (
        DynamicCache() if dtype == "auto" else RoundedCache(make_cache(model, dtype).specs, [(*scales.values(),)] * 2)
    )
    expected = read(model, dense, ids, None, chunks)
    most = 2 * (-(-(WINDOW - 1 + max(chunks)) // 4) + 1)
    cache = make_cache(over_pages(model), dtype, num_blocks=20, num_window_blocks=most, **scales)
    assert relative_error(read(model, cache, ids, None, chunks), expected) < (1e-5 if dtype == "auto" else 0.01)
    for layer in cache.layers:
        windowed = layer.spec.sliding_window is not None
        assert layer.block_table.num_used_blocks <= (2 * (-(-WINDOW // 4) + 1) if windowed else 20)
        assert len(layer.kv) == (most if windowed else 20)
    if name != "llama":
        with pytest.raises(
            KVCacheValueError, match=f"num_window_blocks: got {most} blocks of 4 tokens, expected at lea"
        ):
            read(model, cache, text_of(device, 2, 20), None, [20])


@pytest.mark.parametrize("name", ["mistral", "gpt-oss"])
def test_a_long_prompt_in_chunks_needs_few_window_blocks(device: str, name: str):
    model, ids = model_of(name, device), text_of(device, 2, 61)
    options = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None, "prefill_chunk_size": 8}
    expected = model.generate(ids, **taking(DynamicCache()), **options)
    cache = make_cache(over_pages(model), num_blocks=36, num_window_blocks=2 * (-(-(WINDOW - 1 + 8) // 4) + 1))
    assert model.generate(ids, **taking(cache), **options).tolist() == expected.tolist()


@matrix({"name": [*MODELS], "dtype": ["fp8_e4m3", "fp8_e5m2", "nvfp4"]}, few={"name": ["llama"]})
def test_attention_sees_what_was_stored(device: str, name: str, dtype: str):
    """Also of the prompt's own tokens: a dense cache of keys and values that were rounded alike gives the same.

    Sums in another order may round a number of a later layer to the next code, which then changes logits a little.
    """
    model, ids, chunks = model_of(name, device), text_of(device), [14, 6, 1, 3, *[1] * 16]
    mask = torch.tensor(PADDING["left"], device=device)
    scales = dict(zip(("k_scale", "v_scale"), scales_for(dtype, 1.0), strict=True))
    options = {"v_scale_layout": "swizzled"} if dtype == "nvfp4" else {"layout": "HND"}
    rounded = RoundedCache(make_cache(model, dtype, **options).specs, [tuple(scales.values())] * 2)
    expected, exact = (read(model, cache, ids, mask, chunks)[mask.bool()] for cache in (rounded, DynamicCache()))
    cache = make_cache(over_pages(model), dtype, **scales, **options)
    got = read(model, cache, ids, mask, chunks)[mask.bool()]
    assert relative_error(got, expected) < min(0.01, 0.2 * relative_error(exact, expected))
    differences = (got - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert differences.median() < 1e-4


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("name", ["llama", "gpt-oss"])
def test_padding_is_neither_stored_nor_seen(device: str, name: str, padding: str):
    mask = torch.tensor(PADDING[padding], device=device)
    if name == "gpt-oss" and padding not in ("left", "right"):
        pytest.skip("windows that padding lies in are measured otherwise")
    model, ids, chunks = model_of(name, device), text_of(device), [9, 6, 5, 1, 1, 12, *[1] * 6]
    expected = read(model, DynamicCache(), ids, mask, chunks)
    cache = make_cache(over_pages(model), num_blocks=20)
    got = read(model, cache, ids, mask, chunks)
    shown = mask.bool()
    torch.testing.assert_close(got[shown], expected[shown], rtol=1e-4, atol=1e-4)
    if name == "llama":
        blocks = sum(-(-num_tokens // 4) for num_tokens in mask.sum(dim=1).tolist())
        assert cache.layers[0].block_table.num_used_blocks == blocks


def test_a_window_counts_tokens_and_no_padding(device: str):
    """As transformers' flash attention does, which leaves padding out too; its other masks count positions."""
    model, ids = over_pages(model_of("mistral", device)), text_of(device, 1, 20)
    mask = torch.tensor([[1] * 8 + [0] * 3 + [1] * 9], device=device)
    padded = read(model, make_cache(model), ids, mask, [8, 6, 6])
    alone = read(model, make_cache(model), ids[mask.bool()][None], None, [8, 3, 6])
    torch.testing.assert_close(padded[mask.bool()], alone[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_drafts_are_taken_back(device: str, name: str):
    model = model_of(name, device)
    prompt = torch.tensor([[3, 4, 5, 6, 3, 4, 5, 6, 3, 4]], device=device)
    options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None, "prompt_lookup_num_tokens": 3}
    expected = model.generate(prompt, **taking(DynamicCache()), **options)
    cropped = []

    class Watched(KvjaxCache):
        def crop(self, tokens_to_remove: int) -> None:
            cropped.append(tokens_to_remove)
            super().crop(tokens_to_remove)

    cache = Watched(over_pages(model).config, num_blocks=12, block_size=4)
    assert model.generate(prompt, **taking(cache), **options).tolist() == expected.tolist()
    assert min(cropped) < 0


def test_a_crop_past_blocks_that_were_given_back_is_refused(device: str):
    model = over_pages(model_of("gemma3", device))
    cache, ids = make_cache(model), text_of(device)
    expected = read(model, cache, ids, None, [20, 12, 8])
    cache.crop(-8)  # the last step can always be taken back
    again = read(model, cache, ids[:, 32:], None, [8])
    torch.testing.assert_close(again, expected[:, 32:], rtol=1e-5, atol=1e-5)
    message = r"tokens_to_remove: got -20, expected at most the tokens of the last step or all: blocks that the sliding"
    with pytest.raises(KVCacheValueError, match=message):
        cache.crop(-20)
    more = text_of(device, 2, 3)  # nothing was cropped in any layer
    longer = read(model, make_cache(model), torch.cat([ids, more], dim=1), None, [43])[:, 40:]
    torch.testing.assert_close(read(model, cache, more, None, [3]), longer, rtol=1e-5, atol=1e-5)
    cache.crop(-43)
    torch.testing.assert_close(read(model, cache, ids, None, [40]), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("few", ["num_blocks", "num_window_blocks"])
def test_the_last_step_can_be_taken_back_after_one_that_had_no_blocks(device: str, few: str):
    model, ids = over_pages(model_of("gemma3", device)), text_of(device, 1)
    sizes = {"num_blocks": 9, "num_window_blocks": 20} if few == "num_blocks" else {"num_window_blocks": 4}
    cache, whole = (make_cache(model, **options) for options in (sizes, {}))
    expected = read(model, whole, ids, None, [40])
    read(model, cache, ids[:, :36], None, [6] * 6)
    tables = [table.rows() for table in cache.block_tables.values()]
    with pytest.raises(KVCacheValueError, match=rf"^{few}: got {sizes[few]} blocks of 4 tokens, expected at least"):
        read(model, cache, text_of(device, 1, 20), None, [20])
    assert all(map(np.array_equal, tables, (table.rows() for table in cache.block_tables.values())))
    cache.crop(-6)
    torch.testing.assert_close(read(model, cache, ids[:, 30:36], None, [6]), expected[:, 30:36], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_padding", [0, 3])
def test_a_refused_crop_names_the_number_that_it_got(device: str, num_padding: int, monkeypatch: pytest.MonkeyPatch):
    """Though a step has failed since, whose tokens no layer has."""
    model, ids = over_pages(model_of("gemma3", device)), text_of(device, 1)
    mask = torch.ones_like(ids)
    mask[:, 30 : 30 + num_padding] = 0
    cache = make_cache(model)
    read(model, cache, ids[:, :34], mask[:, :34], [20, 14])
    with monkeypatch.context() as patch:
        patch.delattr(transformers_layer.KvjaxLayer, "_store")
        with pytest.raises(AttributeError, match="_store"), torch.no_grad():
            model(ids[:, 34:], attention_mask=mask, **taking(cache))
    with pytest.raises(KVCacheValueError, match=r"^tokens_to_remove: got -20, expected at most the tokens of the last"):
        cache.crop(-20)


def test_a_second_turn_and_a_copy_go_on_with_what_is_stored(device: str):
    model = model_of("gpt-oss", device)
    first = generate(model, DynamicCache())
    mask = torch.cat([prompts(device)["attention_mask"], torch.ones(3, NEW_TOKENS, device=device).long()], dim=1)
    turn = {"input_ids": first.sequences, "attention_mask": mask, "max_new_tokens": 4}
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = model.generate(**turn, **taking(first[CACHE_ARGUMENT]), **options)
    cache = make_cache(over_pages(model), "auto", num_blocks=64)
    assert_close_generation(generate(model, cache), first)
    for one in (copy.deepcopy(cache), cache):
        assert model.generate(**turn, **taking(one), **options).tolist() == expected.tolist()


def test_a_copy_follows_its_models_attention(device: str):
    """The model's configuration, which says what attends, is not copied: a copy serves the same model."""
    model, ids = model_of("llama", device), text_of(device)
    expected = read(model, DynamicCache(), ids, None, [20, 20])
    cache = make_cache(model)
    first = read(model, cache, ids[:, :20], None, [20])
    copied = copy.deepcopy(cache)
    assert not {layer.kv.data_ptr() for layer in cache.layers} & {layer.kv.data_ptr() for layer in copied.layers}
    for one in (copied, cache):
        got = torch.cat([first, read(over_pages(model), one, ids[:, 20:], None, [20])], dim=1)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_sequences_are_repeated_and_chosen_with_their_padding(device: str):
    model, ids = over_pages(model_of("llama", device)), text_of(device, 2, 20)
    mask = torch.tensor([[0] * 6 + [1] * 14, [1] * 20], device=device)
    cache = make_cache(model)
    expected = read(model, cache, ids, mask, [16, 4])
    cache.crop(-4)
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.tensor([3, 0, 1], device=device))
    rows = [1, 0, 0]
    positions_ = positions(mask, 20, ids[:, 16:])[rows]
    with torch.no_grad():
        inputs = {"attention_mask": mask[rows], "position_ids": positions_, **taking(cache)}
        got = model(ids[rows, 16:], **inputs).logits
    torch.testing.assert_close(got, expected[rows, 16:], rtol=1e-5, atol=1e-5)


def test_a_model_may_change_its_attention_between_steps(device: str):
    model, ids = model_of("gemma3", device), text_of(device)
    expected = read(model, DynamicCache(), ids, None, [20, 20])
    cache, got = make_cache(model), []
    for attention, part in zip(("sdpa", "kvjax", "eager", "kvjax"), ids.split(10, dim=1), strict=True):
        model.set_attn_implementation(attention)
        with torch.no_grad():
            got.append(model(part, **taking(cache)).logits)
    torch.testing.assert_close(torch.cat(got, dim=1), expected, rtol=1e-4, atol=1e-4)


def test_layers_have_dtypes_of_their_own(device: str):
    model, ids, chunks = model_of("gpt-oss", device), text_of(device), [20, *[1] * 20]
    scales = [1.0, scales_for("fp8_e4m3", 1.0)[0]]
    cache = make_cache(model, "fp8", skip_layers=["sliding_window"], k_scale=scales, v_scale=scales)
    expected = read(model, RoundedCache(cache.specs, [(scale, scale) for scale in scales]), ids, None, chunks)
    assert relative_error(read(over_pages(model), cache, ids, None, chunks), expected) < 0.01
    assert [layer.kv.dtype for layer in cache.layers] == [torch.float32, torch.uint8]


@pytest.mark.full
def test_a_compiled_model_breaks_its_graph_at_attention(device: str):
    model = over_pages(model_of("llama", device))
    compiled, eager = (logits_in_steps(model, make_cache(model), is_compiled=each) for each in (True, False))
    assert all(map(torch.equal, compiled, eager))


def test_other_caches_are_refused(device: str):
    model = over_pages(model_of("llama", device))
    ids = text_of(device)
    message = (
        rf"{CACHE_ARGUMENT}: got keys of type Tensor, expected attn_implementation='kvjax' with {CACHE_ARGUMENT}=Kvj"
    )
    other = make_cache(make_model(device))
    for cache in (DynamicCache(), other):
        with pytest.raises(KVCacheTypeError, match=message), torch.no_grad():
            model(ids, **taking(cache))
    with pytest.raises(KVCacheTypeError, match=message), torch.no_grad():
        model(ids, use_cache=False)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_other_attention_is_refused(device: str, attention: str):
    cache = make_cache(over_pages(model_of("llama", device)))
    model = make_model(device, attn_implementation=attention)
    message = r"keys and values of a KvjaxCache are in pages, which transformers' attention interface alone can read"
    with pytest.raises((AttributeError, KVCacheTypeError), match=message), torch.no_grad():
        model(text_of(device), **taking(cache))


def test_operations_on_states_in_pages_are_refused():
    cache = make_cache(over_pages(model_of("llama", "cpu")))
    states = torch.zeros(1, 2, 3, 32)
    keys, _ = cache.update(states, states, 0)
    for use in (lambda: torch.matmul(states, keys), lambda: torch.add(keys, 1)):
        with pytest.raises(KVCacheTypeError, match=r"(matmul|add): keys and values of a KvjaxCache are in pages"):
            use()
    with pytest.raises(AttributeError, match="transpose: keys and values of a KvjaxCache are in pages"):
        keys.transpose(1, 2)
    assert cache.get_seq_length() == 0


def test_padding_that_changes_is_refused(device: str):
    model, ids = over_pages(model_of("llama", device)), text_of(device, 2, 12)
    mask = torch.tensor([[0] * 3 + [1] * 9, [1] * 12], device=device)
    cache = make_cache(model)
    read(model, cache, ids[:, :8], mask[:, :8], [8])
    message = "attention_mask: got a token at position 0 of sequence 0, expected padding, as the cache holds it"
    moved = torch.tensor([[1] * 4 + [0] * 3 + [1] * 5, [1] * 12], device=device)
    for masks in ({}, {"attention_mask": moved}):
        with pytest.raises(KVCacheValueError, match=message), torch.no_grad():
            model(ids[:, 8:], **taking(cache), **masks)
    model.set_attn_implementation("sdpa")
    message = "got 'sdpa' for a cache that was filled with 'kvjax'"
    with pytest.raises(KVCacheValueError, match=message), torch.no_grad():
        model(ids[:, 8:], **taking(cache), attention_mask=mask)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"attention_mask": torch.ones(2, 1, 8, 8)}, r"attention_mask: got shape \[2, 1, 8, 8\], expected \[2, 8\]"),
        ({"attention_mask": torch.tensor([[0, 1, 1]] * 2)}, r"attention_mask: got shape \[2, 3\], expected \[2, 8\]"),
    ],
    ids=["four dimensions", "too short"],
)
def test_masks_that_are_not_of_padding_are_refused(inputs: dict[str, torch.Tensor], message: str):
    model = over_pages(model_of("llama", "cpu"))
    with pytest.raises(KVCacheValueError, match=message), torch.no_grad():
        model(text_of("cpu", 2, 8), **taking(make_cache(model)), **inputs)


def test_attention_that_is_not_causal_is_refused():
    model = over_pages(model_of("gemma3", "cpu"))
    model.config.is_causal = False
    message = r"attn_implementation: got 'kvjax' for a mask that is not a causal one, with or without a sliding window"
    with pytest.raises(KVCacheValueError, match=message), torch.no_grad():
        model(text_of("cpu"), **taking(make_cache(model)))


def test_attention_in_chunks_is_refused_past_the_first():
    experts = {"num_local_experts": 2, "intermediate_size_mlp": 64, "attention_chunk_size": 16}
    model = make_model("cpu", config_class=Llama4TextConfig, factor=1.0, attn_implementation="eager", **experts)
    ids = text_of("cpu")
    expected = read(model, DynamicCache(), ids[:, :16], None, [8, 8])
    cache = make_cache(over_pages(model))
    torch.testing.assert_close(read(model, cache, ids[:, :16], None, [8, 8]), expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(KVCacheValueError, match="got 'kvjax' for attention in chunks of 16 tokens and 17 tokens"):
        read(model, cache, ids[:, :1], None, [1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dropout": 0.5}, "dropout: got 0.5, expected 0 for"),
        ({"is_causal": False}, "is_causal: got False, expected True for"),
        ({"position_bias": torch.zeros(1)}, "position_bias: got a tensor, expected None for"),
        ({"cu_seq_lens_q": torch.tensor([0, 1, 3])}, "cu_seq_lens_q: got a tensor, expected None for"),
        ({"cu_seq_lens_k": torch.tensor([0, 1, 3])}, "cu_seq_lens_k: got a tensor, expected None for"),
        ({"sliding_window": 7}, "sliding_window: got 7, expected 5 as the configuration says"),
        ({"sliding_window": None}, "sliding_window: got None, expected 5 as the configuration says"),
        ({"query": torch.zeros(1, 4, 2, 32)}, "query: got 2 tokens, expected the 3 of the keys"),
    ],
    ids=str,
)
def test_unsupported_arguments_of_attention_are_refused(arguments: dict[str, Any], message: str):
    model = over_pages(model_of("mistral", "cpu"))
    states = torch.zeros(1, 2, 3, 32)
    keys, values = make_cache(model).update(states, states, 0)
    given = {"query": torch.zeros(1, 4, 3, 32), "key": keys, "value": values, "attention_mask": None, **arguments}
    attention = transformers.AttentionInterface()["kvjax"]
    with pytest.raises(KVCacheValueError, match=message):
        attention(model.model.layers[0].self_attn, **given)


def test_a_window_that_the_configuration_does_not_tell_is_the_modules():
    model = over_pages(model_of("llama", "cpu"))
    states, cache = torch.randn(1, 2, 9, 32), make_cache(model)
    attention, module = transformers.AttentionInterface()["kvjax"], model.model.layers[0].self_attn
    out, _ = attention(module, torch.randn(1, 4, 9, 32), *cache.update(states, states, 0), None, sliding_window=1)
    expected = states.repeat_interleave(2, dim=1).transpose(1, 2)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@matrix({"name": [*MODELS], "dtype": ["auto", "fp8_e4m3", "nvfp4"]})
def test_bfloat16_models_decode_by_the_kernel(name: str, dtype: str):
    """Logits of a fixed text, against a dense cache of the same stored values under the model's own attention."""
    model, ids, chunks = model_of(name, "cuda", torch.bfloat16), text_of("cuda"), [20, 1, 5, *[1] * 14]
    k_scale, v_scale = scales_for(dtype, 1.0)
    specs = make_cache(model, dtype).specs
    expected = read(model, RoundedCache(specs, [(k_scale, v_scale)] * 2), ids, None, chunks).float()
    cache = make_cache(over_pages(model), dtype, k_scale=k_scale, v_scale=v_scale)
    got = read(model, cache, ids, None, chunks).float()
    mask = torch.tensor(PADDING["left"], device="cuda")
    padded = read(model, make_cache(model, dtype, k_scale=k_scale, v_scale=v_scale), ids, mask, chunks).float()
    # Of most tokens: for some, rounding chooses another expert.
    for one, other in ((got, expected), (padded[1], got[1])):
        assert ((one - other).norm(dim=-1) / other.norm(dim=-1)).median() < 0.03


@pytest.mark.gpu
def test_a_decode_step_takes_no_memory_for_a_dense_layer():
    model = over_pages(make_model("cuda", torch.bfloat16, factor=1.0, num_key_value_heads=4, head_dim=64))
    cache, ids = make_cache(model, "nvfp4", num_blocks=4 * 257, block_size=16), text_of("cuda", 4, 4096)
    with torch.no_grad():
        for part in ids.split([2048, 2047, 1], dim=1):  # the last compiles
            model(part, **taking(cache), logits_to_keep=1)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        model(ids[:, :1], **taking(cache))
        torch.cuda.synchronize()
    dense = 4 * 4096 * 2 * 4 * 64 * 2
    assert torch.cuda.max_memory_allocated() - before < dense / 2
