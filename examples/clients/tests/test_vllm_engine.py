"""vLLM's engine over kvjax's pages on a CPU gives what transformers gives; `make test-client-vllm` runs this.

The reference is transformers in float32, over the tokens that vLLM generated. For quantized caches it stores keys and
values in a `KvjaxCache` of the same dtype. Each test starts an engine in a process of its own.
"""

from __future__ import annotations

import contextlib
import functools
import json
import pathlib
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

import torch
import transformers
from safetensors.numpy import save_file

from examples.clients.tests import vllm_on_cpu
from kvjax_torch.transformers_cache import CACHE_ARGUMENT, KvjaxCache
from kvjax_vllm import MIXED_DTYPES

ROOT = pathlib.Path(__file__).parents[3]
RESULT = "RESULT "
"""What the line of an engine's result begins with."""
VOCABULARY, NEW_TOKENS, TIME_LIMIT = 512, 24, 600
LENGTHS = 5, 40, 100, 17, 33, 90
SHARED = 80
"""The last prompt has as many tokens of the third's."""

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "initializer_range": 0.1,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def llama() -> transformers.PreTrainedModel:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SIZES, num_hidden_layers=2, tie_word_embeddings=False)
    )


def repeating() -> transformers.PreTrainedModel:
    config = transformers.LlamaConfig(**SIZES, num_hidden_layers=2, tie_word_embeddings=True)
    return repeats(transformers.LlamaForCausalLM(config))


def repeats(model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    """Has a model like to say a token again, which drafts of n-grams find: each layer adds little to it."""
    for layer in model.model.layers:
        for added in (layer.self_attn.o_proj, layer.mlp.down_proj):
            added.weight.data *= 0.2
    return model


def gemma3() -> transformers.PreTrainedModel:
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    return transformers.Gemma3ForCausalLM(
        transformers.Gemma3TextConfig(**SIZES, num_hidden_layers=3, layer_types=kinds, sliding_window=24)
    )


def gpt_oss() -> transformers.PreTrainedModel:
    """With a dense MLP in place of experts."""
    from transformers.models.gpt_oss import modeling_gpt_oss

    class Dense(vllm_on_cpu.DenseMLP):
        def __init__(self, config: Any) -> None:
            super().__init__(config.hidden_size)

        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x), None

    kinds = ["sliding_attention", "full_attention"]
    rope = {"rope_type": "yarn", "rope_theta": 150_000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0}
    rope |= {"truncate": False, "original_max_position_embeddings": 32}
    config = transformers.GptOssConfig(
        **SIZES, num_hidden_layers=2, layer_types=kinds, sliding_window=24, rope_parameters=rope
    )
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(modeling_gpt_oss, "GptOssMLP", Dense)
        model = transformers.GptOssForCausalLM(config)
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks)
    return model


def deepseek() -> transformers.PreTrainedModel:
    """Of multi-head latent attention, with dense MLPs alone."""
    latents = {"q_lora_rank": 64, "kv_lora_rank": 256, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 48}
    sizes = SIZES | {"num_key_value_heads": SIZES["num_attention_heads"], "head_dim": 64}
    return transformers.DeepseekV3ForCausalLM(
        transformers.DeepseekV3Config(**sizes | latents, num_hidden_layers=2, first_k_dense_replace=2)
    )


def repeating_deepseek() -> transformers.PreTrainedModel:
    model = deepseek()
    model.lm_head.weight.data.copy_(model.model.embed_tokens.weight)  # vLLM's DeepSeek does not tie them
    return repeats(model)


MODELS = {of.__name__: of for of in (llama, repeating, gemma3, gpt_oss, deepseek, repeating_deepseek)}


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Makes a model of a type and saves it: the model and its folder."""

    @functools.cache
    def make(model_type: str) -> tuple[transformers.PreTrainedModel, pathlib.Path]:
        torch.manual_seed(0)
        model, folder = MODELS[model_type]().float().eval(), tmp_path_factory.mktemp(model_type)
        model.save_pretrained(folder)
        return model, folder

    return make


@functools.cache
def prompts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    made = [rng.integers(3, VOCABULARY, length).tolist() for length in LENGTHS]
    return [*made, [*made[2][:SHARED], 5, 6, 7]]


def serve(
    folder: pathlib.Path,
    model_type: str,
    tmp_path: pathlib.Path,
    python: str | pathlib.Path = sys.executable,
    sources: tuple[pathlib.Path, ...] = (ROOT, ROOT / "interop"),
    several_processes: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Runs an engine on all prompts. In one process the result names the kinds of steps."""
    plugin = tmp_path / "plugin"
    vllm_on_cpu.entry_point(plugin)
    job = {
        "model": str(folder),
        "model_type": model_type,
        "options": options,
        "prompts": prompts(),
        "new_tokens": NEW_TOKENS,
        "kinds": not several_processes,
    }
    done = subprocess.run(
        [python, "-m", "examples.clients.tests.vllm_engine"],
        input=json.dumps(job),
        env=vllm_on_cpu.environment(plugin, *sources, several_processes=several_processes),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT,
    )
    assert done.returncode == 0, done.stderr[-6000:] + done.stdout[-2000:]
    [result] = [line for line in done.stdout.splitlines() if line.startswith(RESULT)]  # processes end after it
    return json.loads(result.removeprefix(RESULT))


def compare(model: transformers.PreTrainedModel, served: dict[str, Any], cache_options: dict[str, Any] | None) -> float:
    """The largest difference of a generated token's log-probability; each token must be transformers' likeliest."""
    worst, gap = differences(model, served, cache_options)
    assert gap <= 2 * worst + 1e-6  # likeliest, or as likely
    return worst


def deviation(
    model: transformers.PreTrainedModel, served: dict[str, Any], cache_options: dict[str, Any] | None
) -> float:
    """The largest difference from a model that need not be the one that was served."""
    return differences(model, served, cache_options)[0]


def differences(
    model: transformers.PreTrainedModel, served: dict[str, Any], cache_options: dict[str, Any] | None
) -> tuple[float, float]:
    """The largest difference of a log-probability, and how much likelier transformers finds another token at most."""
    worst = gap = 0.0
    for prompt, sequence in zip(prompts(), served["sequences"], strict=True):
        tokens = sequence["tokens"]
        assert len(tokens) == NEW_TOKENS
        cache = None
        if cache_options is not None:
            cache = KvjaxCache(model.config, num_blocks=32, block_size=16, **cache_options)
        with torch.no_grad():
            options = {CACHE_ARGUMENT: cache, "use_cache": cache is not None}
            logits = model(torch.tensor([prompt + tokens]), **options).logits
        expected = logits[0, len(prompt) - 1 : -1].double().log_softmax(-1)
        own = expected[range(NEW_TOKENS), tokens]
        found = torch.tensor(sequence["logprobs"], dtype=torch.float64)
        worst = max(worst, (own - found).abs().max().item())
        gap = max(gap, (expected.max(-1).values - own).max().item())
    return worst, gap


@pytest.mark.parametrize("model_type", ["llama", "gemma3", "gpt_oss"])
def test_a_model_in_float32_gives_what_transformers_gives(saved: Any, tmp_path: pathlib.Path, model_type: str):
    model, folder = saved(model_type)
    served = serve(folder, model_type, tmp_path)
    error = compare(model, served, None)
    print(f"{model_type}: log-probabilities of float32 deviate by {error:.1e}")
    assert error < 1e-3
    assert served["sequences"][-1]["cached"] >= SHARED // 16 * 16 - 16 or model_type != "llama"


MLA: dict[str, Any] = {"attention_backend": "KVJAX_MLA"}

QUANTIZED = "fp8", "fp8_e5m2", "int8_per_token_head", "nvfp4", "nvfp4_4over6", *MIXED_DTYPES


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_a_quantized_cache_gives_what_transformers_gives_over_the_same(saved: Any, tmp_path: pathlib.Path, dtype: str):
    model, folder = saved("llama")
    # One block is vLLM's own. Others hold the first four prompts, but not all that comes after them.
    served = serve(folder, "llama", tmp_path, kv_cache_dtype=dtype, num_gpu_blocks_override=17, disable_log_stats=False)
    assert served["counts"]["num_preemptions"] > 0
    assert {"prompts", "decodes", "prompts beside decodes"} <= {*served["kinds"]}
    error = compare(model, served, {"kv_cache_dtype": dtype, "k_scale": 1.0, "v_scale": 1.0})
    print(f"llama, {dtype}: log-probabilities deviate by {error:.1e}")
    assert error < 0.05


def test_latents_in_float32_give_what_transformers_gives(saved: Any, tmp_path: pathlib.Path):
    model, folder = saved("deepseek")
    # As above, the pool does not hold all sequences to their ends.
    served = serve(folder, "deepseek", tmp_path, num_gpu_blocks_override=17, disable_log_stats=False, **MLA)
    error = compare(model, served, None)
    print(f"deepseek: log-probabilities of float32 deviate by {error:.1e}")
    assert error < 1e-3
    assert served["counts"]["num_preemptions"] > 0
    assert {"prompts", "decodes", "prompts beside decodes", "prompts with a context"} <= {*served["kinds"]}


@contextlib.contextmanager
def fp8_latents(model: transformers.PreTrainedModel, scales: list[float]) -> Iterator[None]:
    """Has tokens after the prompt attend to latents and rope keys as they are stored; prompts attend to their own."""

    def rounded(x: torch.Tensor, module: Any) -> torch.Tensor:
        scale = scales[module.layer_idx]
        return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale

    def expand(module: Any, projection: Any, args: Any, _: Any) -> None:
        module.stored = torch.nn.functional.linear(rounded(args[0], module), projection.weight)

    def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **_: Any) -> Any:
        num_heads, num_tokens = query.shape[1:3]
        nope, prompt = module.qk_nope_head_dim, num_tokens - NEW_TOKENS
        expanded = module.stored.reshape(1, num_tokens, num_heads, -1).transpose(1, 2)
        keys, values = expanded.split([nope, value.shape[-1]], -1)
        stored = torch.cat([keys, rounded(key[..., nope:], module)], -1), values
        parts = [
            torch.nn.functional.scaled_dot_product_attention(query, *of, is_causal=True, scale=scaling)
            for of in ((key, value), stored)
        ]
        return torch.cat([parts[0][:, :, :prompt], parts[1][:, :, prompt:]], 2).transpose(1, 2).contiguous(), None

    before = model.config._attn_implementation
    transformers.AttentionInterface.register("fp8_latents", attend)
    layers = [layer.self_attn for layer in model.model.layers]
    hooks = [of.kv_b_proj.register_forward_hook(functools.partial(expand, of)) for of in layers]
    model.set_attn_implementation("fp8_latents")
    try:
        yield
    finally:
        model.set_attn_implementation(before)
        for hook in hooks:
            hook.remove()


def test_fp8_latents_take_their_scales_from_a_file(saved: Any, tmp_path: pathlib.Path):
    """vLLM's gather on a CPU reads no fp8, so that prompts come whole."""
    model, folder = saved("deepseek")
    scales = [0.01, 0.03]
    options = {"kv_cache_dtype": "fp8", "enable_prefix_caching": False, "max_num_batched_tokens": 512, **MLA}
    setting = write_scales(tmp_path, {"k_scale": scales})
    served = serve(folder, "deepseek", tmp_path, additional_config=setting, **options)
    with fp8_latents(model, scales):
        error = compare(model, served, None)
    print(f"deepseek, fp8 with scales: log-probabilities deviate by {error:.1e}")
    assert error < 0.05
    with fp8_latents(model, [0.03, 0.01]):
        assert deviation(model, served, None) > 4 * error


def write_scales(tmp_path: pathlib.Path, scales: dict[str, list[Any]]) -> dict[str, Any]:
    """Writes a file of the scales of each layer, by `k_scale` and `v_scale`: the setting that names it."""
    file = tmp_path / "scales.safetensors"
    named = {f"model.layers.{at}.self_attn.{kind}": each for kind, of in scales.items() for at, each in enumerate(of)}
    save_file({name: np.array(scale, np.float32) for name, scale in named.items()}, file)
    return {"kvjax": {"scales": str(file)}}


@pytest.mark.parametrize("dtype", ["nvfp4", "fp8_k_nvfp4_v", "int8_k_nvfp4_v"])
def test_a_file_gives_scales_to_the_layers_that_are_not_skipped(saved: Any, tmp_path: pathlib.Path, dtype: str):
    model, folder = saved("llama")
    scales = {"k_scale": [0.01, 0.02], "v_scale": [0.01, 0.005]}
    options = {"kv_cache_dtype": dtype, "kv_cache_dtype_skip_layers": ["0"]}
    served = serve(folder, "llama", tmp_path, additional_config=write_scales(tmp_path, scales), **options)
    error = compare(model, served, {"kv_cache_dtype": dtype, "skip_layers": [0], **scales})
    print(f"llama, {dtype} with scales: log-probabilities deviate by {error:.1e}")
    assert error < 0.05
    # It is the file's scales, of the layer that is not skipped.
    others = {"k_scale": [0.01, 1.0], "v_scale": [0.01, 1.0]}
    assert deviation(model, served, {"kv_cache_dtype": dtype, "skip_layers": [0], **others}) > 4 * error
    assert deviation(model, served, {"kv_cache_dtype": dtype, **scales}) > 4 * error


def test_ranks_of_tensor_parallelism_take_their_heads_scales(saved: Any, tmp_path: pathlib.Path):
    model, folder = saved("llama")
    scales: dict[str, Any] = {"k_scale": [[0.01, 0.04], [0.02, 0.01]], "v_scale": [[0.02, 0.005], [0.01, 0.03]]}
    served = serve(
        folder,
        "llama",
        tmp_path,
        several_processes=True,
        additional_config=write_scales(tmp_path, scales),
        kv_cache_dtype="fp8",
        tensor_parallel_size=2,
    )
    tensors = {kind: [torch.tensor(scale) for scale in of] for kind, of in scales.items()}
    error = compare(model, served, {"kv_cache_dtype": "fp8", **tensors})
    print(f"llama, fp8 on two ranks: log-probabilities deviate by {error:.1e}")
    assert error < 0.05
    swapped = {kind: [scale.flip(0) for scale in of] for kind, of in tensors.items()}
    assert deviation(model, served, {"kv_cache_dtype": "fp8", **swapped}) > error


@pytest.mark.parametrize(("model_type", "options"), [("repeating", {}), ("repeating_deepseek", MLA)])
def test_drafts_of_different_lengths_give_what_transformers_gives(
    saved: Any, tmp_path: pathlib.Path, model_type: str, options: dict[str, Any]
):
    model, folder = saved(model_type)
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    served = serve(folder, model_type, tmp_path, speculative_config=drafts, disable_log_stats=False, **options)
    error = compare(model, served, None)
    drafted, accepted = (served["counts"][f"spec_decode_num_{of}"] for of in ("drafts", "accepted_tokens"))
    print(f"{drafted} drafts, {accepted} tokens accepted: log-probabilities deviate by {error:.1e}")
    assert error < 1e-3
    assert accepted > 0
    assert "unequal drafts" in served["kinds"]


def test_an_installed_wheel_serves_in_processes_that_vllm_starts_and_leaves_nothing(saved: Any, tmp_path: pathlib.Path):
    """A fresh environment: kvjax comes from its wheel alone, everything else from this one."""
    model, folder = saved("llama")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "-q", "--no-deps", "--wheel-dir", tmp_path, ROOT], check=True)
    fresh = tmp_path / "fresh"
    venv.create(fresh, with_pip=False)
    [packages] = fresh.glob("lib/python*/site-packages")
    [wheel] = tmp_path.glob("kvjax-*.whl")
    into = [*pip, "--python", fresh / "bin/python"]
    subprocess.run([*into, "install", "-q", "--no-deps", wheel], check=True)
    (packages / "others.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    programs = tmp_path / "programs/examples/clients/tests"
    programs.mkdir(parents=True)
    for name in ("vllm_engine.py", "vllm_on_cpu.py"):
        shutil.copy(pathlib.Path(__file__).parent / name, programs)
    served = serve(folder, "llama", tmp_path, fresh / "bin/python", (tmp_path / "programs",), several_processes=True)
    assert pathlib.Path(served["kvjax_vllm"]).is_relative_to(packages)
    assert compare(model, served, None) < 1e-3
    subprocess.run([*into, "uninstall", "-q", "-y", "kvjax"], check=True)
    assert [path.name for path in packages.iterdir()] == ["others.pth"]
