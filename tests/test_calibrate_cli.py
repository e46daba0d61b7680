"""`kvjax calibrate` as its users run it: scales of what a model stores, or one line that says what is wrong."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

from safetensors.torch import load_file, save_file  # noqa: E402
from support import tiny_models  # noqa: E402
from support.helpers import matrix  # noqa: E402
from transformers.integrations.sdpa_attention import sdpa_attention_forward  # noqa: E402
from transformers.masking_utils import sdpa_mask  # noqa: E402

import kvjax  # noqa: E402
from kvjax import KVCacheValueError  # noqa: E402
from kvjax.cli import main  # noqa: E402
from kvjax.cli.arguments import kv_cache_dtypes  # noqa: E402
from kvjax_torch.transformers.calibrate import Allowed, Options, calibrate_model  # noqa: E402
from kvjax_torch.transformers.choosing import divergence  # noqa: E402

LENGTH, WINDOW, BEGIN = 24, 5, 256
SIZES = {"vocab_size": 300, "head_dim": 32, "num_key_value_heads": 2, "dtype": "float32"}
TEXT = "The quick brown fox jumps over the lazy dog, again and again; 0123456789! Ünïcödé. " * 2
LAYER_TYPES = ["sliding_attention", "full_attention"]
CHOICE_OF_LATENTS = ["--choose", "fp8,nvfp4", "--bits", "6"]
SHARED = 2  # the last layers of gemma3n, which read an earlier layer's keys and values

type Seen = dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]]
"""Each layer's keys and values, `[num_tokens, num_kv_heads, head_size]`, and its query times softmax's scale."""


CHANGES: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 2, "max_position_embeddings": 99},
    "gemma3_text": {"layer_types": LAYER_TYPES, "num_hidden_layers": 2, "sliding_window": WINDOW},
    "gemma3n_text": {
        "layer_types": LAYER_TYPES * 2,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": SHARED,
        "sliding_window": WINDOW,
        "intermediate_size": 64,
        "activation_sparsity_pattern": None,
    },
}


def configuration(model_type: str) -> Any:
    sizes = next(tiny_models.tiny_configs(model_type))
    return tiny_models.load(model_type, tiny_models.changed(sizes, {**SIZES, **CHANGES[model_type]}))


def save_tokenizer(folder: Path) -> None:
    """One token a byte, and one that begins every sequence."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: token for token, character in enumerate(alphabet)} | {"<s>": BEGIN}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", BEGIN)]
    )
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>").save_pretrained(folder)


def save_model(folder: Path, config: Any) -> None:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for number, (name, parameter) in enumerate(model.named_parameters()):
            if name.endswith(("k_proj.weight", "v_proj.weight")):
                parameter.normal_(std=0.2 * (1 + number % 5))
    model.save_pretrained(folder)
    save_tokenizer(folder)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    folders = {name: tmp_path_factory.mktemp(name) for name in ("llama", "gemma3_text", "gemma3n_text")}
    for name, folder in folders.items():
        save_model(folder, configuration(name))
    return folders


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture
def out(tmp_path: Path) -> Path:
    folder = tmp_path / "out"
    folder.mkdir()
    return folder / "scales.safetensors"


def tokens_of_text() -> list[int]:
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    [(encoded, _)] = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(TEXT)
    return [alphabet.index(character) for character in encoded]


def what_attention_gets(folder: Path, num_samples: int) -> list[Seen]:
    """Of each sample, what each layer's attention gets."""
    tokens = tokens_of_text()
    return [
        what_attention_gets_of(folder, [BEGIN, *tokens[number * (LENGTH - 1) : (number + 1) * (LENGTH - 1)]])
        for number in range(num_samples)
    ]


def what_attention_gets_of(folder: Path, ids: Sequence[int]) -> Seen:
    """The same of given tokens, from a forward pass without a cache."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")
    seen: Seen = {}

    def spy(module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        arrays = key, value, query * kwargs["scaling"]
        seen[module.layer_idx] = tuple(x[0].transpose(0, 1).float().numpy().copy() for x in arrays)
        return sdpa_attention_forward(module, query, key, value, *args, **kwargs)

    transformers.AttentionInterface.register("spy", spy)
    transformers.AttentionMaskInterface.register("spy", sdpa_mask)
    model.set_attn_implementation("spy")
    with torch.no_grad():
        model(input_ids=torch.tensor([ids]), use_cache=False)
    return seen


def read_model(folder: Path) -> kvjax.ModelKVConfig:
    return kvjax.ModelKVConfig.from_hf_config(json.loads((folder / "config.json").read_text()))


def calibrate(model: object, text: Path, out: Path, *arguments: object) -> int:
    words = [model, "--text", text, "-o", out, "--device", "cpu", "--length", LENGTH, *arguments]
    return main(["calibrate", *map(str, words)])


def load(out: Path, folder: Path, dtype: str) -> tuple[kvjax.KVScales, ...]:
    """The file's scales, of which nothing is to be warned."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return kvjax.load_kv_scales(out, read_model(folder), dtype)


@pytest.mark.parametrize(
    ("model_type", "dtype", "per_head"),
    [("llama", "nvfp4", False), ("gemma3_text", "fp8", True), ("gemma3n_text", "fp8", False)],
)
def test_scales_are_those_of_what_attention_gets(models, text, out, capsys, model_type, dtype, per_head):
    """Of all tokens, those behind a window too; layers that share another's keys and values have none."""
    folder = models[model_type]
    options = ["--dtype", dtype, "--samples", "3"] + ["--per-head"] * per_head
    assert calibrate(folder, text, out, *options) == 0
    samples = what_attention_gets(folder, 3)
    model, largest = read_model(folder), kvjax.parse_kv_cache_dtype(dtype).info.max
    assert len(model.layers_without_cache) == (SHARED if model_type == "gemma3n_text" else 0)
    assert any(layer.sliding_window for layer in model.layers) == (model_type != "llama")
    for index, scales in zip(model.layer_indices, load(out, folder, dtype), strict=True):
        for kind, scale in enumerate(scales):
            magnitudes = np.abs(np.concatenate([sample[index][kind] for sample in samples]))
            amax = magnitudes.max(axis=(0, 2)) if per_head else magnitudes.max()
            np.testing.assert_allclose(scale, amax / np.float32(largest), rtol=1e-6)
            assert scale.dtype == np.float32
            assert np.shape(scale) == np.shape(amax)
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")][2:]
    assert [int(row.split("|")[1]) for row in rows] == list(model.layer_indices)
    keys = np.concatenate([sample[model.layer_indices[0]][0] for sample in samples])
    assert float(rows[0].split("|")[4]) == pytest.approx(float(np.abs(keys).max()), rel=1e-3)


def test_the_file_says_what_it_is_for(models, text, out):
    folder = models["llama"]
    assert calibrate(folder, text, out, "--samples", "2") == 0
    with safe_open(out, "numpy") as file:
        assert sorted(file.keys()) == sorted(
            f"model.layers.{layer}.self_attn.attn.{kind}_scale" for layer in (0, 1) for kind in "kv"
        )
        assert file.metadata() == {
            "kvjax_version": kvjax.__version__,
            "kvjax_amax_divisor": "2688",
            "kv_cache_dtype": "nvfp4",
            "model": str(folder),
            "method": "amax",
            "num_samples": "2",
            "sample_length": f"{LENGTH}",
        }
    assert [file.name for file in out.parent.iterdir()] == [out.name]
    # The same magnitudes fit another dtype.
    for fp8, nvfp4 in zip(load(out, folder, "fp8"), load(out, folder, "nvfp4"), strict=True):
        np.testing.assert_allclose(fp8, np.array(nvfp4) * 6, rtol=1e-6)


def test_keys_that_take_no_scale_have_none_in_the_file(models, text, out, capsys):
    folder, dtype = models["llama"], "int8_k_nvfp4_v"
    assert calibrate(folder, text, out, "--dtype", dtype, "--samples", "2") == 0
    with safe_open(out, "numpy") as file:
        assert sorted(file.keys()) == [f"model.layers.{layer}.self_attn.attn.v_scale" for layer in (0, 1)]
        assert file.metadata()["kvjax_amax_divisor"] == "2688"
    values = [np.concatenate([sample[layer][1] for sample in what_attention_gets(folder, 2)]) for layer in (0, 1)]
    expected = [(1, np.abs(of_layer).max() / np.float32(2688)) for of_layer in values]
    np.testing.assert_allclose(load(out, folder, dtype), expected, rtol=1e-6)
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")][2:]
    assert [row.split("|")[5].strip() for row in rows] == ["-", "-"]


@pytest.fixture(scope="module")
def latent_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"vocab_size": 300, "num_hidden_layers": 2, "max_position_embeddings": 99, "dtype": "float32"}
    config = tiny_models.changed(next(tiny_models.tiny_configs("deepseek_v3")), sizes)
    folder = tmp_path_factory.mktemp("deepseek_v3")
    save_model(folder, tiny_models.load("deepseek_v3", config))
    return folder


@pytest.mark.parametrize("dtype", ["nvfp4", "fp8"])
def test_latents_have_one_scale(latent_model, text, out, capsys, dtype):
    """That of what `kv_b_proj` gets; in fp8 of rope keys too, the last columns of keys."""
    assert calibrate(latent_model, text, out, "--dtype", dtype, "--samples", "1") == 0
    loaded = transformers.AutoModelForCausalLM.from_pretrained(latent_model, attn_implementation="eager")
    latents: dict[int, Any] = {}
    for index, layer in enumerate(loaded.model.layers):
        layer.self_attn.kv_b_proj.register_forward_pre_hook(
            lambda module, inputs, index=index: latents.setdefault(index, inputs[0])
        )
    keys = what_attention_gets(latent_model, 1)[0]
    ids = [BEGIN, *tokens_of_text()[: LENGTH - 1]]
    with torch.no_grad():
        loaded(input_ids=torch.tensor([ids]), use_cache=False)
    model, largest = read_model(latent_model), kvjax.parse_kv_cache_dtype(dtype).info.max
    rope = loaded.config.qk_rope_head_dim
    for index, scales in enumerate(load(out, latent_model, dtype)):
        magnitudes = [float(latents[index].abs().max())]
        if dtype == "fp8":
            magnitudes.append(float(np.abs(keys[index][0][..., -rope:]).max()))
        np.testing.assert_allclose(scales, (max(magnitudes) / largest, 1), rtol=1e-5)
    assert [layer.is_mla for layer in model.layers] == [True, True]
    with safe_open(out, "numpy") as file:
        assert sorted(file.keys()) == [f"model.layers.{layer}.self_attn.attn.k_scale" for layer in (0, 1)]
    header, _, first, *_ = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert [cell.strip() for cell in header.split("|")[4:7]] == ["largest latent", "k_scale", "largest rope key"]
    assert first.split("|")[7].strip() == "-"
    if dtype == "nvfp4":  # which says nothing of rope keys
        with pytest.raises(
            KVCacheValueError, match=r"^checkpoint: got scales for nvfp4, .* expected .* --dtype fp8_e4"
        ):
            load(out, latent_model, "fp8")
    else:
        in_nvfp4, in_fp8 = (float(load(out, latent_model, each)[0].k_scale) for each in ("nvfp4", "fp8"))
        assert in_nvfp4 == pytest.approx(in_fp8 / 6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--choose", "int8_per_token_head,fp8", "--bits", "9"],
            "--choose: got a model of multi-head latent attention",
        ),
        (CHOICE_OF_LATENTS, "--choose: got a model of multi-head latent attention (MLA), expected --dtype"),
        (["--dtype", "int8_k_nvfp4_v"], "kv_cache_dtype of layer 0: got 'int8_k_nvfp4_v', expected one of"),
        (["--dtype", "fp8", "--per-head"], "per_head: got True, expected False: latents (MLA) have one scale"),
    ],
)
def test_what_is_refused_of_latents_is_refused_before_the_model_is_loaded(
    latent_model, text, out, capsys, arguments, message, monkeypatch
):
    from kvjax_torch.transformers import calibrate as of_models

    monkeypatch.delattr(of_models, "_load")
    assert calibrate(latent_model, text, out, *arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["nvfp4", "fp8"])
def test_nothing_that_was_seen_is_clipped(models, text, out, dtype):
    folder = models["gemma3_text"]
    assert calibrate(folder, text, out, "--dtype", dtype, "--samples", "2") == 0
    stored = what_attention_gets(folder, 2)
    specs = kvjax.resolve_layer_specs(read_model(folder), dtype)
    for layer, (spec, scales) in enumerate(zip(specs, load(out, folder, dtype), strict=True)):
        key, value = (np.concatenate([sample[layer][kind] for sample in stored]) for kind in (0, 1))
        num_blocks = -(-len(key) // spec.block_size)
        cache = kvjax.KVCache.allocate(spec, num_blocks, **scales._asdict())
        cache = kvjax.reshape_and_cache_flash(key, value, cache, np.arange(len(key)))
        read = kvjax.gather_kv(cache, np.arange(num_blocks)[None], np.array([len(key)]), dtype=np.float32)
        for x, back in zip((key, value), read, strict=True):
            back = np.asarray(back)[0, : len(x)]
            at = np.unravel_index(np.abs(x).argmax(), x.shape)
            np.testing.assert_allclose(back[at], x[at], rtol=1e-6)
            # Half of the step between the largest two codes: of e2m1 4 and 6, of e4m3fn 416 and 448.
            assert np.abs(back - x).max() <= np.abs(x).max() * (1 / 6 if dtype == "nvfp4" else 1 / 28) * 1.001


@pytest.mark.parametrize("options", [("percentile", "--percentile", "90"), ("mse",)], ids=lambda options: options[0])
def test_the_methods_are_those_of_calibrate(models, text, out, options):
    folder = models["llama"]
    assert calibrate(folder, text, out, "--samples", "2", "--method", *options) == 0
    specs = kvjax.resolve_layer_specs(read_model(folder), "nvfp4")
    samples = [[sample[layer][:2] for layer in (0, 1)] for sample in what_attention_gets(folder, 2)]
    expected = kvjax.calibrate(specs, samples, method=options[0], percentile=90)
    np.testing.assert_allclose(load(out, folder, "nvfp4"), expected, rtol=1e-6)


CHOICE = ["--choose", "fp8_e4m3,nvfp4_4over6,int8_per_token_head", "--bits", "7"]


@pytest.mark.parametrize("model_type", ["gemma3_text", pytest.param("gemma3n_text", marks=pytest.mark.nightly)])
def test_a_choice_is_that_of_what_attention_gets(models, text, out, capsys, model_type):
    """Whatever softmax's scale is: these models' is not `head_size ** -0.5`."""
    folder = models[model_type]
    assert calibrate(folder, text, out, *CHOICE, "--samples", "2") == 0
    model, size = read_model(folder), SIZES["head_dim"]
    samples = [
        [
            (query * np.float32(size**0.5), key, value)
            for key, value, query in (sample[index] for index in model.layer_indices)
        ]
        for sample in what_attention_gets(folder, 2)
    ]
    expected = kvjax.choose_layer_dtypes(model, samples, CHOICE[1].split(","), bits=7)
    with safe_open(out, "numpy") as file:
        request = file.metadata()["kv_cache_dtype"]
    resolved = kvjax.resolve_layer_dtypes(model, kv_cache_dtypes(request))
    assert dict(zip(model.layer_indices, (one.dtype for one in resolved), strict=True)) == expected.dtypes
    assert len(set(expected.dtypes.values())) > 1
    printed = capsys.readouterr().out
    assert f"scales for {request} of" in printed
    assert f"{expected.bits:.2f} bits of an element, {expected.bytes_per_token:,} bytes of a token" in printed
    specs = kvjax.resolve_layer_specs(model, expected.dtypes)
    scales = kvjax.calibrate(specs, [[layer[1:] for layer in sample] for sample in samples])
    loaded = kvjax.load_kv_scales(out, model, expected.dtypes)
    np.testing.assert_allclose(loaded, scales, rtol=1e-6)


def stored(index: int, spec: kvjax.AttentionSpec, samples: Sequence[Seen], rotates: bool) -> Callable[..., Any]:
    """A function of a layer's keys and values `[1, heads, tokens, size]`: what a cache of JAX's holds of them."""

    def rotated(x: np.ndarray) -> np.ndarray:
        return np.asarray(kvjax.hadamard_transform(x)) if rotates else x

    [scales] = kvjax.calibrate([spec], [[(rotated(sample[index][0]), sample[index][1])] for sample in samples])

    def read_back(key: torch.Tensor, value: torch.Tensor) -> list[torch.Tensor]:
        rows = [x[0].transpose(0, 1).numpy() for x in (key, value)]
        num_blocks = -(-len(rows[0]) // spec.block_size)
        cache = kvjax.KVCache.allocate(spec, num_blocks, **scales._asdict())
        cache = kvjax.reshape_and_cache_flash(rotated(rows[0]), rows[1], cache, np.arange(len(rows[0])))
        read = kvjax.gather_kv(cache, np.arange(num_blocks)[None], np.array([len(rows[0])]), dtype=np.float32)
        keys, values = (np.asarray(x)[0, : len(rows[0])] for x in read)
        return [torch.tensor(x).transpose(0, 1)[None] for x in (rotated(keys), values)]

    return read_back


def logits_with(folder: Path, ids: Sequence[int], change: Mapping[int, Callable[..., Any]]) -> np.ndarray:
    """Log-probabilities of a forward pass without a cache, in which `change` replaces keys and values of layers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")

    def spy(module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        key, value = change[module.layer_idx](key, value) if module.layer_idx in change else (key, value)
        return sdpa_attention_forward(module, query, key, value, *args, **kwargs)

    transformers.AttentionInterface.register("spy", spy)
    transformers.AttentionMaskInterface.register("spy", sdpa_mask)
    model.set_attn_implementation("spy")
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    return logits.double().log_softmax(-1).numpy()


@pytest.mark.parametrize("model_type", ["gemma3_text", pytest.param("llama", marks=pytest.mark.nightly)])
def test_a_choice_by_divergence_is_that_of_predictions_with_one_layer_stored(models, text, out, model_type):
    folder = models[model_type]
    twice = (LENGTH - 1) // 2
    tokens = tokens_of_text()
    samples = [[BEGIN, *tokens[number * twice : (number + 1) * twice] * 2] for number in range(2)]
    seen = [what_attention_gets_of(folder, ids) for ids in samples]
    model = read_model(folder)
    dtypes = ["int8_k_nvfp4_v", "nvfp4_4over6"]

    def error_of(layer: int | str, dtype: kvjax.KVCacheDType, rotates: bool) -> float:
        [spec] = [
            spec
            for index, spec in zip(model.layer_indices, kvjax.resolve_layer_specs(model, dtype), strict=True)
            if index == layer
        ]
        change = {int(layer): stored(int(layer), spec, seen, rotates)}
        divergences = []
        for ids in samples:
            expected, got = logits_with(folder, ids, {}), logits_with(folder, ids, change)
            divergences.append((np.exp(expected) * (expected - got)).sum(-1)[-twice:].mean())
        return float(np.mean(divergences))

    expected = kvjax.choose_layer_dtypes(model, None, dtypes, bits=5.5, key_rotation=True, error_of=error_of)
    options = Options(
        kvjax.KVCacheDType.NVFP4,
        Allowed(tuple(map(kvjax.KVCacheDType, dtypes)), 5.5, True, kvjax.ErrorMeasure.DIVERGENCE),
        length=LENGTH,
        twice=True,
        num_samples=2,
        device="cpu",
    )
    choice = calibrate_model(str(folder), text, options).choice
    assert choice is not None
    for got, wanted in zip(
        (*choice.errors, *choice.rotated_errors), (*expected.errors, *expected.rotated_errors), strict=True
    ):
        # Logits are float32, whose rounding depends on how many threads multiply.
        assert got == pytest.approx(wanted, rel=1e-2, abs=1e-7)
    assert (choice.dtypes, choice.key_rotation) == (expected.dtypes, expected.key_rotation)
    words = ["--choose", ",".join(dtypes), "--bits", "5.5", "--choose-by", "divergence", "--key-rotation", "--twice"]
    assert calibrate(folder, text, out, *words, "--samples", "2") == 0
    with safe_open(out, "numpy") as file:
        metadata = file.metadata()
    assert (metadata["choose_by"], metadata["twice"]) == ("divergence", "true")
    assert metadata["sample_length"] == f"{len(samples[0])}"
    resolved = kvjax.resolve_layer_dtypes(model, kv_cache_dtypes(metadata["kv_cache_dtype"]))
    assert [one.dtype for one in resolved] == [*expected.dtypes.values()]


@pytest.mark.parametrize("noise", [0.0, 1e-7])
def test_a_divergence_is_not_negative(noise):
    """But for rounding, which may make the sum of predictions that are alike so."""
    logits = torch.randn((300, 500), generator=torch.Generator().manual_seed(0))
    for seed in range(5):
        other = logits + noise * torch.randn(logits.shape, generator=torch.Generator().manual_seed(seed))
        assert 0 <= divergence(logits, other) < 1e-6


def test_scales_of_rotated_keys_are_for_models_that_rotate_them(models, text, out, capsys):
    """Queries and keys of the first layer have a large channel; the other's queries are all zero."""
    folder = models["llama"]
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        loaded.model.layers[1].self_attn.q_proj.weight.zero_()
        for projection in (loaded.model.layers[0].self_attn.q_proj, loaded.model.layers[0].self_attn.k_proj):
            projection.weight.mul_(0.05)
            projection.weight[15 :: SIZES["head_dim"]] *= 400  # the slowest rotation of RoPE's
    folder = out.with_name("outlier")
    loaded.save_pretrained(folder)
    save_tokenizer(folder)
    options = ["--choose", "nvfp4", "--bits", "4.5", "--samples", "2"]
    assert calibrate(folder, text, out, *options, "--key-rotation") == 0
    model, size = read_model(folder), SIZES["head_dim"]
    samples = [
        [(query * np.float32(size**0.5), key, value) for key, value, query in (sample[index] for index in (0, 1))]
        for sample in what_attention_gets(folder, 2)
    ]
    rotated = kvjax.choose_layer_dtypes(model, samples, ["nvfp4"], bits=4.5, key_rotation=True).key_rotation
    assert rotated == (0,)
    with safe_open(out, "numpy") as file:
        assert file.metadata()["kvjax_key_rotation"] == ",".join(map(str, rotated))
    assert f"key_rotation={list(rotated)}" in capsys.readouterr().out
    stored = [
        [
            (kvjax.hadamard_transform(key) if index in rotated else key, value)
            for index, (_, key, value) in enumerate(sample)
        ]
        for sample in samples
    ]
    expected = kvjax.calibrate(kvjax.resolve_layer_specs(model, "nvfp4"), stored)
    np.testing.assert_allclose(kvjax.load_kv_scales(out, model, "nvfp4", key_rotation=rotated), expected, rtol=1e-6)
    for wrong in ((), (0, 1)):
        with pytest.raises(kvjax.KVCacheValueError, match=rf"^key_rotation: got \({', '.join(map(str, wrong))}\)"):
            kvjax.load_kv_scales(out, model, "nvfp4", key_rotation=wrong)


def test_without_a_number_the_whole_text_is_sampled(models, text, out, capsys):
    assert calibrate(models["llama"], text, out) == 0
    num_samples = len(TEXT.encode()) // (LENGTH - 1)
    assert f"from {num_samples} samples of {LENGTH} tokens" in capsys.readouterr().out


# What is refused: in one line, with status 2, and nothing is written.

type Change = Callable[[Path, Path], list[str]]
"""Changes the model's folder and the text; returns further arguments."""


def with_nan(model: Path, text: Path) -> list[str]:
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        loaded.model.layers[1].self_attn.v_proj.weight[3, 3] = float("nan")
    loaded.save_pretrained(model)
    return []


def with_few_tokens(model: Path, text: Path) -> list[str]:
    config = configuration("llama")
    config.vocab_size = 90
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(model)
    return []


def with_pickles_only(model: Path, text: Path) -> list[str]:
    (model / "model.safetensors").unlink()
    torch.save({}, model / "pytorch_model.bin")
    return []


def with_code_of_its_own(model: Path, text: Path) -> list[str]:
    config = {"model_type": "theirs", "auto_map": {"AutoConfig": "theirs.Config"}}
    (model / "config.json").write_text(json.dumps(config))
    (model / "theirs.py").write_text(f"open({str(model / 'ran')!r}, 'w')\nclass Config: pass\n")
    return []


def change_weights(model: Path, change: Callable[[dict[str, Any]], object]) -> None:
    file = model / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def without_weights(model: Path, text: Path) -> list[str]:
    change_weights(model, lambda tensors: tensors.pop("model.layers.1.self_attn.k_proj.weight"))
    return []


def with_scales_of_weights(model: Path, text: Path) -> list[str]:
    name = "model.layers.1.self_attn.k_proj.weight"
    change_weights(model, lambda tensors: tensors.update({f"{name}_scale": torch.ones(1), f"{name}x": torch.ones(1)}))
    return []


def without_a_head(model: Path, text: Path) -> list[str]:
    change_weights(model, lambda tensors: tensors.pop("lm_head.weight"))
    return ["--choose", "fp8,nvfp4", "--bits", "9", "--choose-by", "divergence"]


def written(content: bytes) -> Change:
    def change(model: Path, text: Path) -> list[str]:
        text.write_bytes(content)
        return []

    return change


def removed(name: str) -> Change:
    def change(model: Path, text: Path) -> list[str]:
        {"text": text, "config": model / "config.json"}[name].unlink()
        return []

    return change


def passed(*arguments: str) -> Change:
    return lambda model, text: list(arguments)


REFUSED: dict[str, tuple[Change, str]] = {
    "no text file": (removed("text"), "text.txt': No such file or directory"),
    "empty text": (written(b""), "which is empty, expected some text"),
    "short text": (written(b"x" * 22), "text.txt' of 22 tokens, expected at least 23 for 1 samples of 24"),
    "too few samples": (passed("--samples", "999"), "tokens, expected at least 22,977 for 999 samples of 24"),
    "not UTF-8": (written(b"\xff" * 99), "text.txt', which is not UTF-8"),
    "no model": (removed("config"), "model: got '"),
    "NaN": (with_nan, "model: got NaN values of layer 1 for sample 0, expected finite numbers"),
    "missing weights": (without_weights, "without the weights 'model.layers.1.self_attn.k_proj.weight', expected all"),
    "scales of weights": (
        with_scales_of_weights,
        "quantized weights, whose scales 'model.layers.1.self_attn.k_proj.weight_scale' transformers does not read",
    ),
    "no head for predictions": (without_a_head, "without the weights 'lm_head.weight', expected all"),
    "other tokens": (with_few_tokens, "expected tokens below 90, the model's vocabulary"),
    "pickles": (with_pickles_only, "model: got '"),
    "remote code": (with_code_of_its_own, "model: got '"),
    "long samples": (passed("--length", "100"), "length: got 100, expected at most 99, the model's max_position"),
    "no token left": (passed("--length", "1"), "length: got 1, expected more than the tokenizer's 1 special token"),
    "a device": (passed("--device", "nonsense"), "device: got 'nonsense': "),
    "per head": (passed("--per-head"), "per_head: got True, expected False"),
    "per head of a choice": (
        passed("--choose", "nvfp4,int8_per_token_head", "--bits", "9", "--per-head"),
        "per_head: got True, expected False",
    ),
    "a choice without bits": (passed("--choose", "fp8"), "--choose, --bits: got one of them, expected both or none"),
    "bits without a choice": (passed("--bits", "5"), "--choose, --bits: got one of them, expected both or none"),
    "what to choose by without a choice": (passed("--choose-by", "attention"), "--choose-by: got it without --choose"),
    "one token twice": (passed("--length", "2", "--twice"), "more than the tokenizer's 1 special token and one, twice"),
    "too few bits of a divergence": (
        passed("--choose", "fp8,nvfp4", "--bits", "4", "--choose-by", "divergence"),
        "bits: got 4, expected at least 4.50, of the smallest dtypes",
    ),
    "rotated keys without a choice": (passed("--key-rotation"), "--key-rotation: got it without --choose, expected"),
    "a dtype beside a choice": (
        passed("--choose", "fp8,nvfp4", "--bits", "7", "--dtype", "nvfp4"),
        "--dtype: got 'nvfp4' beside --choose, expected one of them",
    ),
    "too few bits": (
        passed("--choose", "fp8,nvfp4", "--bits", "4"),
        "bits: got 4, expected at least 4.50, of the smallest dtypes",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_invalid_inputs_are_refused_and_nothing_is_written(tmp_path, text, out, capsys, case, models):
    model = tmp_path / "model"
    model.mkdir()
    for file in models["llama"].iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    change, message = REFUSED[case]
    assert calibrate(model, text, out, *change(model, text)) == 2
    printed, said = capsys.readouterr()
    last = said.splitlines()[-1]
    assert last.startswith("kvjax calibrate: error: ")
    assert message in last
    assert len(last) < 1500
    assert printed == ""
    assert list(out.parent.iterdir()) == []
    assert not (model / "ran").exists()


@pytest.mark.parametrize("name", ["/nowhere/model", "./model", "a/b/c", "~/model", "", "text.txt"])
def test_a_model_that_is_neither_a_folder_nor_a_hub_name_is_refused(text, out, capsys, name, monkeypatch):
    monkeypatch.chdir(text.parent)
    assert calibrate(name, text, out) == 2
    assert f"model: got {name!r}, which is no folder, expected a model's folder" in capsys.readouterr().err


def test_a_file_is_replaced_only_if_asked_and_only_by_a_whole_one(models, text, out, capsys):
    out.write_text("mine")
    assert calibrate(models["llama"], text, out) == 2
    assert "which exists, expected a new file, or --force" in capsys.readouterr().err
    assert calibrate(models["llama"], text, out, "--force", "--samples", "999") == 2
    assert [(file.name, file.read_text()) for file in out.parent.iterdir()] == [(out.name, "mine")]
    assert calibrate(models["llama"], text, out, "--force", "--samples", "1") == 0
    assert len(load(out, models["llama"], "nvfp4")) == 2


def test_quantized_weights_of_layers_that_transformers_drops_are_no_matter(models, text, out, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(models["llama"], model)
    name = "model.layers.2.self_attn.k_proj.weight"
    change_weights(model, lambda tensors: tensors.update({name: torch.ones(1), f"{name}_scale": torch.ones(1)}))
    assert calibrate(model, text, out, "--samples", "1") == 0


def test_a_head_is_needed_for_predictions_alone(models, text, out, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(models["llama"], model)
    without_a_head(model, text)
    assert calibrate(model, text, out, "--samples", "1") == 0


def test_what_was_computed_is_kept_where_the_path_was_taken_meanwhile(models, text, out, capsys, monkeypatch):
    def calibrate_model(*args: Any) -> Any:
        out.write_text("mine")
        return calibrate_model_of(*args)

    from kvjax_torch.transformers import calibrate as of_models

    calibrate_model_of = of_models.calibrate_model
    monkeypatch.setattr(of_models, "calibrate_model", calibrate_model)
    assert calibrate(models["llama"], text, out, "--samples", "1") == 2
    assert out.read_text() == "mine"
    [kept] = [file for file in out.parent.iterdir() if file != out]
    assert f"which exists, expected a new file, or --force; what was computed is in {str(kept)!r}" in (
        capsys.readouterr().err
    )
    assert len(load(kept, models["llama"], "nvfp4")) == 2


def test_a_choice_without_nvfp4_may_have_head_sizes_that_nvfp4_does_not_store(text, out, tmp_path, capsys):
    config = configuration("llama")
    config.head_dim = 24
    save_model(tmp_path / "model", config)
    choice = "--bits", "10", "--samples", "1", "--choose"
    assert calibrate(tmp_path / "model", text, out, *choice, "fp8,nvfp4") == 2
    assert "head_size: got 24, expected a multiple of 16 for 'nvfp4'" in capsys.readouterr().err
    assert calibrate(tmp_path / "model", text, out, *choice, "fp8,int8_per_token_head") == 0


def test_scales_of_heads_are_ignored_where_no_chosen_dtype_takes_them(models, text, out, capsys):
    choice = "--choose", "fp8,nvfp4", "--bits", "4.5", "--per-head", "--samples", "1"
    assert calibrate(models["llama"], text, out, *choice) == 0
    assert "per_head: got True, but no layer's chosen dtype takes a scale per KV head" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing/scales", "--output: got 'missing/scales', expected a file in a folder that can be written: No such"),
        (".", "expected the path of a file"),
        ("", "expected the path"),
    ],
)
def test_an_output_that_cannot_be_written_is_refused_at_once(text, out, capsys, name, message, monkeypatch):
    monkeypatch.chdir(out.parent)
    assert calibrate("no model", text, Path(name), "--force") == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dtype", "bfloat16"], "got 'bfloat16', which takes no scales, expected one of fp8_e4m3"),
        (["--dtype", "float8"], "argument --dtype: "),
        (["--choose", "fp8,float8"], "argument --choose: got 'float8'"),
        (["--percentile", "0"], "got '0', expected a number above 0 and at most 100"),
        (["--model-dtype", "int8"], "argument --model-dtype: "),
        (["--samples", "0"], "got 0, expected at least 1"),
    ],
)
def test_invalid_arguments_are_refused(text, out, capsys, arguments, message):
    with pytest.raises(SystemExit) as raised:
        calibrate("model", text, out, *arguments)
    assert raised.value.code == 2
    assert message in capsys.readouterr().err


@pytest.fixture
def without(tmp_path: Path) -> Callable[[str], str]:
    """Runs the command where a module is not installed; returns what it says."""

    def run(module: str) -> str:
        code = f"import sys; sys.modules[{module!r}] = None; from kvjax.cli import main; sys.exit(main())"
        command = [sys.executable, "-c", code, "calibrate", "model", "--text", "text", "-o", "out"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ, cwd=tmp_path)
        assert done.returncode == 2
        return done.stderr

    return run


@matrix({"module": ["torch", "transformers"]}, few={"module": ["torch"]})
def test_without_the_extra_it_says_what_to_install(without, module):
    assert without(module) == f"kvjax calibrate: error: {module} is not installed: pip install 'kvjax[transformers]'\n"
