"""The example's Llama and Qwen3 are those of transformers, in one step or in many, and whatever the blocks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from support.helpers import matrix

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import kvjax  # noqa: E402
from examples import llama  # noqa: E402
from kvjax.cli import main  # noqa: E402

SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.15,
    "dtype": "float32",
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e4,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS = {
    "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig, {}),
    "llama-3.1": (transformers.LlamaForCausalLM, transformers.LlamaConfig, {"rope_parameters": LLAMA3}),
    "qwen3": (transformers.Qwen3ForCausalLM, transformers.Qwen3Config, {"tie_word_embeddings": True}),
    "qwen3-windows": (
        transformers.Qwen3ForCausalLM,
        transformers.Qwen3Config,
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
}
LENGTHS = (23, 1, 14)
BLOCK_SIZE, NUM_BLOCKS = 4, 24


def save(name: str, folder: Path) -> Any:
    """A tiny model of random weights, norms included, in the folder as transformers saves it."""
    model_class, config_class, options = MODELS[name]
    torch.manual_seed(0)
    model = model_class(config_class(**SIZES, **options)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(folder, max_shard_size="40KB")
    return model


class Loaded:
    """The saved model as the example loads it, over caches that were full of NaN."""

    def __init__(self, folder: Path, kv_cache_dtype: Any = "auto", **changes: Any):
        hf_config = json.loads((folder / "config.json").read_text()) | changes
        model = kvjax.ModelKVConfig.from_hf_config(hf_config)
        self.config = llama.ModelConfig.from_hf_config(hf_config)
        self.params = llama.load_params(folder, self.config, np.float32)
        specs = kvjax.resolve_layer_specs(model, kv_cache_dtype, block_size=BLOCK_SIZE)
        caches = [kvjax.KVCache.allocate(spec, NUM_BLOCKS) for spec in specs]
        self.caches = tuple(kvjax.KVCache(jax.numpy.full_like(one.kv, np.nan), one.spec) for one in caches)
        self.pool = kvjax.BlockPool(NUM_BLOCKS, BLOCK_SIZE)

    def logits(self, sequences: Sequence[kvjax.PagedSequence], new: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Runs the new tokens of each sequence in one step; their logits."""
        q_lens = [len(tokens) for tokens in new]
        self.pool.append(sequences, q_lens)
        step = kvjax.StepMetadata.from_sequences(sequences, q_lens, num_tokens=(4, 40), num_seqs=4, max_blocks=6)
        tokens = np.pad(np.concatenate(new), (0, len(step.slot_mapping) - sum(q_lens)))
        found, self.caches = RUN(self.params, self.config, tokens, step, self.caches)
        return np.split(np.asarray(found)[: sum(q_lens)], np.cumsum(q_lens)[:-1])


def run(params, config, tokens, step, caches):
    with jax.default_matmul_precision("highest"):
        hidden, caches = llama.forward(params, config, tokens, step, caches)
        return llama.logits(params, hidden), caches


RUN = jax.jit(run, static_argnums=1, donate_argnums=4)


def prompts() -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    return [rng.integers(0, SIZES["vocab_size"], length) for length in LENGTHS]


def few(*names: str) -> list[Any]:
    """Every model; but for these they are marked `full`."""
    return [name if name in names else pytest.param(name, marks=pytest.mark.full) for name in MODELS]


ON_A_GPU = [pytest.param(name, marks=pytest.mark.gpu, id=f"{name}-on-a-gpu") for name in MODELS]


@pytest.mark.parametrize("name", [*few("llama-3.1"), *ON_A_GPU])
def test_logits_are_those_of_transformers(name: str, tmp_path: Path):
    model = save(name, tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    with torch.no_grad():
        expected = [model(torch.from_numpy(tokens)[None]).logits[0].numpy() for tokens in prompts()]

    loaded = Loaded(tmp_path)
    at_once = loaded.logits([loaded.pool.sequence() for _ in LENGTHS], prompts())
    for got, wanted in zip(at_once, expected, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=2e-5)

    loaded = Loaded(tmp_path)
    sequences, parts = [loaded.pool.sequence() for _ in LENGTHS], [[] for _ in LENGTHS]
    # Chunks of one prompt beside the decodes of another, and rows without new tokens.
    for q_lens in ([10, 1, 0], [9, 0, 14], *[[1, 0, 0]] * 4):
        starts = [sequence.num_tokens for sequence in sequences]
        new = [tokens[s : s + n] for tokens, s, n in zip(prompts(), starts, q_lens, strict=True)]
        for part, found in zip(parts, loaded.logits(sequences, new), strict=True):
            part.append(found)
    for part, whole in zip(parts, expected, strict=True):
        np.testing.assert_allclose(np.concatenate(part), whole, rtol=1e-4, atol=2e-5)


@pytest.mark.full  # the engine of docs/serving.md does so in every run
@pytest.mark.parametrize("name", MODELS)
def test_it_generates_the_tokens_of_transformers_and_reuses_prefixes(name: str, tmp_path: Path):
    model = save(name, tmp_path)
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = [model.generate(torch.from_numpy(tokens)[None], **options)[0].tolist() for tokens in prompts()]
    loaded = Loaded(tmp_path)

    def generate() -> list[list[int]]:
        given = [tokens.tolist() for tokens in prompts()]
        with jax.default_matmul_precision("highest"):
            found, loaded.caches = llama.generate(
                loaded.params, loaded.config, loaded.caches, loaded.pool, given, 6, chunk=8
            )
        return found

    assert generate() == expected
    assert loaded.pool.num_free == NUM_BLOCKS
    assert loaded.pool.sequence(prompts()[0]).num_tokens == 20
    assert generate() == expected


@pytest.mark.parametrize("form", [pytest.param("one cache", marks=pytest.mark.full), "scan"])
def test_layers_of_one_cache_and_layers_in_a_scan_are_the_same(form: str, tmp_path: Path):
    save("llama-3.1", tmp_path)
    loaded, other = Loaded(tmp_path), Loaded(tmp_path)
    kv = jax.numpy.stack([cache.kv for cache in other.caches], axis=1)
    other.caches = kvjax.KVCache(kv, loaded.caches[0].spec, num_layers=len(loaded.caches))
    if form == "scan":
        other.params = llama.stacked(other.params)
    steps = [each.logits([each.pool.sequence() for _ in LENGTHS], prompts()) for each in (loaded, other)]
    for expected, got in zip(*steps, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    for layer, cache in enumerate(loaded.caches):
        np.testing.assert_allclose(other.caches.kv[:, layer], cache.kv, rtol=1e-5, atol=1e-6)


def test_only_quantized_layers_get_exact_windows_and_take_what_the_plan_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    save("llama", tmp_path)
    arguments = "--kv-cache-dtype=0=float32,*=nvfp4", "--exact-window=40", "--max-seqs=3"
    assert main(["plan", "--config", str(tmp_path), "--json", *arguments]) == 0
    caches = llama.with_exact_windows(Loaded(tmp_path, {"0": "float32", "*": "nvfp4"}).caches, 3, 40)
    assert [type(each) for each in caches] == [kvjax.KVCache, llama.Windowed]
    counted = json.loads(capsys.readouterr().out)["exact_window"]["bytes"]
    assert counted == sum(each.window.ring.kv.nbytes for each in caches if isinstance(each, llama.Windowed))


@pytest.mark.full
def test_layers_with_and_without_an_exact_window_generate_the_tokens_of_transformers(tmp_path: Path):
    """Windows hold whole sequences: tokens that the NVFP4 layer read from its pages would show."""
    model = save("llama", tmp_path)
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = [model.generate(torch.from_numpy(tokens)[None], **options)[0].tolist() for tokens in prompts()]
    loaded = Loaded(tmp_path, {"0": "float32", "*": "nvfp4"})
    loaded.caches = llama.with_exact_windows(loaded.caches, 3, 40)
    given = [tokens.tolist() for tokens in prompts()]
    for prefix in (0, 20):  # after a prefix hit a row is filled with what the pages hold
        assert loaded.pool.num_cached_tokens(given[0]) == prefix
        with jax.default_matmul_precision("highest"):
            found, loaded.caches = llama.generate(
                loaded.params, loaded.config, loaded.caches, loaded.pool, given, 6, chunk=8
            )
        assert [tokens[: len(prompt)] for tokens, prompt in zip(found, given, strict=True)] == given
        assert prefix or found == expected


@matrix({"dtype": ["bfloat16", "fp8_e4m3", "nvfp4"]}, few={"dtype": ["nvfp4"]})
def test_every_kind_of_cache_serves(dtype: str, tmp_path: Path):
    model = save("llama", tmp_path)
    loaded = Loaded(tmp_path, dtype)
    (found,) = loaded.logits([loaded.pool.sequence()], [prompts()[0]])
    with torch.no_grad():
        exact = model(torch.from_numpy(prompts()[0])[None]).logits[0].numpy()
    error = np.sqrt(np.mean((found - exact) ** 2) / np.mean(exact**2))
    assert 1e-5 < error < {"bfloat16": 0.01, "fp8_e4m3": 0.1, "nvfp4": 0.3}[dtype]


def test_configurations_of_transformers_4_are_read_too():
    old = {**SIZES, "model_type": "llama", "rms_norm_eps": 1e-5, "rope_theta": 5e5}
    del old["head_dim"], old["num_key_value_heads"]
    read = llama.ModelConfig.from_hf_config(old)
    assert (read.rope_theta, read.rope_scaling, read.head_dim, read.num_key_value_heads) == (5e5, None, 8, 6)
    scaling = {key: value for key, value in LLAMA3.items() if key != "rope_theta"}
    read = llama.ModelConfig.from_hf_config(old | {"rope_scaling": scaling})
    assert read.rope_theta == 5e5
    assert read.rope_scaling == llama.Llama3Scaling(4.0, 1.0, 4.0, 64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gemma"}, "model_type: got 'gemma', expected one of"),
        ({"attention_bias": True}, "attention_bias: got True"),
        ({"hidden_act": "gelu"}, "hidden_act: got 'gelu'"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type: got 'yarn', expected one of 'default', 'llama3'"),
        ({"num_hidden_layers": 1}, r"got tensor 'model.layers.1"),
        ({"num_hidden_layers": 3}, r"got no tensor 'model.layers.2"),
        ({"intermediate_size": 40}, r"gate_proj.weight: got shape \(160, 48\)"),
    ],
)
def test_what_it_does_not_compute_is_refused(change: dict[str, Any], message: str, tmp_path: Path):
    save("llama", tmp_path)
    with pytest.raises(ValueError, match=message):
        Loaded(tmp_path, **change)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_random_parameters_are_those_of_a_checkpoint_of_the_shape(dtype: str):
    config = llama.ModelConfig(50, 32, 48, 2, 4, 2, 8, qk_norm=True)
    params = llama.random_params(config, jax.random.key(0), dtype)
    assert jax.tree.map(lambda leaf: leaf.shape, params) == llama.parameter_shapes(config)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {dtype}
    first, second = params["layers"][0]["down"], params["layers"][1]["down"]
    assert not (first == second).all()
    assert np.std(np.asarray(first, np.float32)) == pytest.approx(48**-0.5, rel=0.1)


def test_a_number_of_devices_that_does_not_divide_a_model_is_refused():
    config = llama.ModelConfig(64, 64, 96, 1, 8, 2, 8)
    assert llama.share(config, 2).num_key_value_heads == 1
    with pytest.raises(ValueError, match="num_attention_heads: got 8, expected a multiple of the 3 devices"):
        llama.share(config, 3)
    with pytest.raises(ValueError, match="num_key_value_heads: got 2, expected a multiple of the 4 devices"):
        llama.share(config, 4)
