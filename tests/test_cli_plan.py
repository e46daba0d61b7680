"""`kvjax plan` as its users and programs run it: exact figures for public models, and what it says of bad arguments."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from kvjax.cli import BROKEN_PIPE, main

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "tests/data/configs"
LLAMA = str(CONFIGS / "Llama-3.1-8B-Instruct.json")
GPT_OSS = str(CONFIGS / "gpt-oss-20b.json")
PLAN_PAGE = (ROOT / "docs/plan.md").read_text()

Plan = Callable[..., dict[str, Any]]


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]) -> Plan:
    def run(config: str, *arguments: str) -> dict[str, Any]:
        assert main(["plan", "--json", "--config", config, *arguments]) == 0
        out, err = capsys.readouterr()
        assert err == ""
        return json.loads(out)

    return run


def test_a_plan_holds_every_figure_of_a_model(plan: Plan):
    """Llama 3.1 8B: 32 layers of 8 KV heads of 128; an NVFP4 row is 72 bytes."""
    assert plan(LLAMA, "--kv-cache-dtype", "nvfp4", "--memory", "40GiB") == {
        "warnings": [],
        "num_layers": 32,
        "layers_without_cache": [],
        "model_dtype": "bfloat16",
        "tensor_parallel": 1,
        "memory_bytes": 40 * 2**30,
        "state_bytes": 0,
        "max_seqs": 0,
        "groups": [
            {
                "layers": list(range(32)),
                "attention": "full_attention",
                "sliding_window": None,
                "num_kv_heads": 8,
                "head_size": 128,
                "head_size_v": 128,
                "kv_lora_rank": None,
                "qk_rope_head_dim": None,
                "dtype": "nvfp4",
                "source": "user",
                "skipped": False,
                "per_head_scales": False,
                "scales": None,
                "layout": "NHD",
                "v_scale_layout": "linear",
                "block_size": 16,
                "bytes_per_token": 1152,
                "page_bytes": 18432,
                "padding_bytes": 0,
            }
        ],
        "totals": {"bytes_per_token": 32 * 1152, "tokens": 1_165_072, "one_table_tokens": 1_165_072},
        "bfloat16": {"bytes_per_token": 32 * 4096, "tokens": 327_680, "one_table_tokens": 327_680},
        "ratio": 1_165_072 / 327_680,
        "exact_window": None,
    }


def keys(document: Any, prefix: str = "") -> set[str]:
    if isinstance(document, dict):
        return {found for key, value in document.items() for found in keys(value, f"{prefix}.{key}".lstrip("."))}
    if isinstance(document, list) and document and isinstance(document[0], dict):
        return {found for entry in document for found in keys(entry, f"{prefix}[]")}
    return {prefix}


def test_the_keys_are_the_documented_ones(plan: Plan):
    documented = re.findall(r"^- `([a-z0-9_.\[\]]+)`:", PLAN_PAGE, re.MULTILINE)
    assert keys(plan(GPT_OSS, "--exact-window=64", "--max-seqs=8")) == set(documented)
    assert len(documented) == len(set(documented)) == 37


def test_the_command_prints_the_documented_output(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    [(command, printed)] = re.findall(r"```console\n\$ kvjax (.*)\n((?s:.*?))```", PLAN_PAGE)
    monkeypatch.chdir(ROOT)
    assert main(shlex.split(command)) == 0
    assert capsys.readouterr().out == printed


def pages(document: dict[str, Any]) -> list[tuple[Any, ...]]:
    fields = ("dtype", "source", "skipped", "block_size", "page_bytes", "padding_bytes")
    return [(len(group["layers"]), *(group[field] for field in fields)) for group in document["groups"]]


def test_mixed_dtypes_share_pages(plan: Plan):
    document = plan(LLAMA, "--kv-cache-dtype", "nvfp4", "--skip-layers", "0", "31", "--memory", "40GiB")
    assert pages(document) == [
        (2, "bfloat16", "model", True, 16, 65536, 0),
        (30, "nvfp4", "user", False, 48, 65536, 10240),
    ]
    assert [group["layers"] for group in document["groups"]] == [[0, 31], list(range(1, 31))]
    # 655,360 pages: for each 48 tokens 3 in each of two layers and 1 in each of thirty, 36 in all, leave 16 pages.
    bytes_per_token = 2 * 4096 + 30 * 1152
    assert document["totals"] == {
        "bytes_per_token": bytes_per_token,
        "tokens": 655_360 // 36 * 48,
        "one_table_tokens": 40 * 2**30 // (16 * bytes_per_token) * 16,
    }


def test_a_kind_of_layers_is_skipped(plan: Plan):
    document = plan(GPT_OSS, "--kv-cache-dtype", "fp8", "--skip-layers", "sliding_window")
    assert pages(document) == [
        (12, "bfloat16", "model", True, 16, 32768, 0),
        (12, "fp8_e4m3", "user", False, 32, 32768, 0),
    ]
    assert [group["sliding_window"] for group in document["groups"]] == [128, None]
    assert [group["attention"] for group in document["groups"]] == ["sliding_window", "full_attention"]


def test_exact_windows_leave_less_for_pages(plan: Plan, capsys: pytest.CaptureFixture[str]):
    """A row of Llama's is 64 tokens of 8 KV heads of 2 * 128 elements of bfloat16: 262,144 bytes a layer."""
    arguments = "--kv-cache-dtype=nvfp4", "--skip-layers=0", "--exact-window=64", "--max-seqs=100"
    window = 31 * 100 * 262_144
    document = plan(LLAMA, *arguments, f"--memory={40 * 2**30 + window}")
    assert document["exact_window"] == {"size": 64, "max_seqs": 100, "bytes": window}
    assert document["totals"] == plan(LLAMA, *arguments[:2], "--memory=40GiB")["totals"]
    shared = plan(LLAMA, *arguments, "--tensor-parallel=4")["exact_window"]
    assert shared["bytes"] == window / 4
    with pytest.raises(SystemExit):
        main(["plan", "--config", LLAMA, *arguments, "--memory=1MiB"])
    assert f"exact_window: got {window:,} bytes for 100 sequences, expected at most 1,048,5" in capsys.readouterr().err
    main(["plan", "--config", LLAMA, *arguments])
    assert f"exact windows of 64 tokens of 100 sequences: {window:,} bytes of these" in capsys.readouterr().out


def test_the_default_dtype_is_that_of_the_checkpoint(plan: Plan):
    config = str(CONFIGS / "Laguna-XS.2-FP8.json")
    assert {(dtype, source, skipped) for _, dtype, source, skipped, *_ in pages(plan(config))} == {
        ("fp8_e4m3", "checkpoint", False)
    }
    skipping = plan(config, "--skip-layers", "full_attention")
    assert [group[1:4] for group in pages(skipping)] == [
        ("bfloat16", "model", True),
        ("fp8_e4m3", "checkpoint", False),
    ]


def test_the_default_dtype_without_a_declaration_is_that_of_the_model(plan: Plan):
    document = plan(LLAMA)
    assert pages(document) == [(32, "bfloat16", "model", False, 16, 65536, 0)]
    assert (document["memory_bytes"], document["ratio"]) == (2**30, 1)


def test_scales_for_each_head_are_told(plan: Plan, tmp_path: Path):
    scheme = {"num_bits": 8, "type": "float", "strategy": "attn_head"}
    config = json.loads(Path(LLAMA).read_text()) | {"quantization_config": {"kv_cache_scheme": scheme}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    [group] = plan(str(tmp_path))["groups"]
    assert (group["dtype"], group["per_head_scales"]) == ("fp8_e4m3", True)


LAYER_MAP = "0-1=bfloat16,full_attention=nvfp4,3=half,*=fp8"


def test_each_layer_may_have_a_dtype_of_its_own(plan: Plan, capsys: pytest.CaptureFixture[str]):
    """Of gpt-oss even layers slide. A page is as large as the largest layer's, 16 tokens of 8 x 64 x 2 in 16 bits."""
    document = plan(GPT_OSS, "--kv-cache-dtype", LAYER_MAP, "--skip-layers", "22-23")
    assert pages(document) == [
        (1, "bfloat16", "user", False, 16, 32768, 0),
        (1, "bfloat16", "user", False, 16, 32768, 0),
        (10, "fp8_e4m3", "user", False, 32, 32768, 0),
        (1, "float16", "user", False, 16, 32768, 0),
        (9, "nvfp4", "user", False, 48, 32768, 5120),
        (1, "bfloat16", "model", True, 16, 32768, 0),
        (1, "bfloat16", "model", True, 16, 32768, 0),
    ]
    assert [group["layers"][:2] for group in document["groups"]] == [[0], [1], [2, 4], [3], [5, 7], [22], [23]]
    assert document["totals"]["bytes_per_token"] == 5 * 2048 + 10 * 1024 + 9 * 576
    assert main(["plan", "--config", GPT_OSS, "--kv-cache-dtype", LAYER_MAP]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| 1")]
    assert [row.split("|")[3].strip() for row in rows] == ["bfloat16", "bfloat16", "fp8_e4m3", "float16", "nvfp4"]


def test_layers_that_are_not_named_have_the_dtype_of_the_checkpoint(plan: Plan, tmp_path: Path):
    layers = {f"model.layers.{layer}.self_attn": {"quant_algo": "NVFP4" if layer > 3 else "FP8"} for layer in range(30)}
    declared = {"kv_cache_quant_algo": "MIXED_PRECISION", "kv_cache_quantized_layers": layers}
    config = json.loads(Path(LLAMA).read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    quantization = declared | {"kv_cache_schema_version": 1}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))
    document = plan(str(tmp_path), "--kv-cache-dtype", "0=float32", "--skip-layers", "29")
    assert [(group["layers"], group["dtype"], group["source"], group["skipped"]) for group in document["groups"]] == [
        ([0], "float32", "user", False),
        ([1, 2, 3], "fp8_e4m3", "checkpoint", False),
        (list(range(4, 29)), "nvfp4", "checkpoint", False),
        ([29], "bfloat16", "model", True),
        ([30, 31], "bfloat16", "model", False),
    ]
    assert len({group["page_bytes"] for group in document["groups"]}) == 1


def test_values_are_planned_with_their_own_head_size(plan: Plan):
    document = plan(str(CONFIGS / "MiMo-V2-Flash.json"), "--kv-cache-dtype", "nvfp4")
    assert [(group["head_size"], group["head_size_v"]) for group in document["groups"]] == [(192, 128)] * 2
    assert [group["bytes_per_token"] for group in document["groups"]] == [720, 1440]
    assert document["totals"]["bytes_per_token"] == 9 * 720 + 39 * 1440


DEEPSEEK = {"model_type": "deepseek_v3", "kv_lora_rank": 512, "qk_rope_head_dim": 64, "dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("dtype", "bytes_per_token", "devices"),
    [("auto", 1152, 1), ("fp8", 576, 8), ("fp8_ds_mla", 656, 1), ("nvfp4", 416, 16)],
)
def test_every_device_holds_all_latents(plan: Plan, tmp_path: Path, dtype: str, bytes_per_token: int, devices: int):
    """Every device has those of all query heads."""
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK))
    options = "--kv-cache-dtype", dtype, "--block-size", "64", "--tensor-parallel", str(devices)
    document = plan(str(tmp_path), *options)
    [group] = document["groups"]
    assert (group["kv_lora_rank"], group["qk_rope_head_dim"], len(group["layers"])) == (512, 64, 61)
    assert (group["num_kv_heads"], group["head_size"], group["head_size_v"]) == (1, 576, 512)
    assert (group["bytes_per_token"], group["page_bytes"]) == (bytes_per_token, 64 * bytes_per_token)
    assert document["totals"]["tokens"] == 2**30 // (61 * 64 * bytes_per_token) * 64
    skipped = plan(str(tmp_path), *options, "--skip-layers", "0-2")
    assert skipped["totals"]["bytes_per_token"] == 3 * 1152 + 58 * bytes_per_token


def test_the_table_shows_the_sizes_of_latents(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK))
    assert main(["plan", "--config", str(tmp_path), "--kv-cache-dtype", "nvfp4"]) == 0
    assert "| nvfp4 | user | latent 512 + 64 |    16 |         416 |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("config", "arguments", "message"),
    [
        (
            DEEPSEEK,
            ["--kv-cache-dtype", "fp8_e5m2"],
            "kv_cache_dtype of layer 0: got 'fp8_e5m2', expec",
        ),
        (DEEPSEEK, ["--v-scale-layout", "swizzled"], "v_scale_layout: got 'swizzled' for latents (MLA), expected 'lin"),
        (
            {"model_type": "llama", "dtype": "bfloat16"},
            ["--kv-cache-dtype", "fp8_ds_mla"],
            "FullAttentionSpec.dtype: g",
        ),
    ],
)
def test_dtypes_that_a_models_cache_does_not_have_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, config: dict[str, Any], arguments: list[str], message: str
):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert refusal(capsys, "--config", str(tmp_path), *arguments).startswith(message)


@pytest.mark.parametrize(("devices", "heads"), [(2, 4), (8, 1), (16, 1)])
def test_devices_share_the_heads(plan: Plan, devices: int, heads: int):
    document = plan(LLAMA, "--tensor-parallel", str(devices))
    [group] = document["groups"]
    assert (group["num_kv_heads"], group["bytes_per_token"]) == (heads, heads * 512)
    assert document["tensor_parallel"] == devices


def test_blocks_and_layouts_are_what_was_asked_for(plan: Plan):
    arguments = ["--kv-cache-dtype", "nvfp4", "--block-size", "64", "--layout", "HND", "--v-scale-layout", "swizzled"]
    document = plan(LLAMA, *arguments, "--memory", "4MiB")
    [group] = document["groups"]
    assert (group["layout"], group["v_scale_layout"]) == ("HND", "swizzled")
    assert (group["block_size"], group["page_bytes"]) == (64, 64 * 1152)
    # In bfloat16 one block of 64 tokens takes 8 MiB.
    assert (document["totals"]["tokens"], document["bfloat16"]["tokens"]) == (64, 0)


def test_skipped_layers_have_no_scales_to_swizzle(plan: Plan):
    arguments = ["--kv-cache-dtype", "nvfp4", "--v-scale-layout", "swizzled", "--skip-layers", "0"]
    groups = plan(LLAMA, *arguments)["groups"]
    assert [(group["dtype"], group["v_scale_layout"]) for group in groups] == (
        [("bfloat16", "linear"), ("nvfp4", "swizzled")]
    )


def test_a_plan_of_too_little_memory_has_no_ratio(plan: Plan, capsys: pytest.CaptureFixture[str]):
    document = plan(LLAMA, "--memory", "1000")
    assert (document["totals"]["tokens"], document["bfloat16"]["tokens"], document["ratio"]) == (0, 0, None)
    assert main(["plan", "--config", LLAMA, "--memory", "1000"]) == 0
    assert capsys.readouterr().out.endswith(" GiB hold 0 tokens; with bfloat16 in every layer 0\n")


def test_a_model_dtype_may_be_given(plan: Plan):
    document = plan(LLAMA, "--model-dtype", "float32")
    assert (document["model_dtype"], document["ratio"]) == ("float32", 0.5)


FP8_CACHE = {"producer": {"name": "modelopt"}, "quantization": {"kv_cache_quant_algo": "FP8"}}
NVFP4_CACHE = {"quant_method": "modelopt", "kv_cache_quant_algo": "NVFP4"}


@pytest.mark.parametrize(
    ("in_config", "beside", "dtype"),
    [
        ({}, None, "bfloat16"),
        ({}, FP8_CACHE, "fp8_e4m3"),
        ({"quantization_config": {}}, FP8_CACHE, "fp8_e4m3"),
        ({"quantization_config": NVFP4_CACHE}, FP8_CACHE, "nvfp4"),
    ],
)
def test_a_folder_may_declare_quantization_beside(plan: Plan, tmp_path: Path, in_config, beside, dtype):
    config = json.loads(Path(LLAMA).read_text()) | in_config
    (tmp_path / "config.json").write_text(json.dumps(config))
    if beside is not None:
        (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside))
    [group] = plan(str(tmp_path))["groups"]
    assert (group["dtype"], group["source"]) == (dtype, "model" if dtype == "bfloat16" else "checkpoint")


@pytest.mark.parametrize("quantized", [{}, {"quantization_config": NVFP4_CACHE}])
def test_a_file_is_read_as_its_folder_is(plan: Plan, tmp_path: Path, quantized: dict[str, Any]):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(Path(LLAMA).read_text()) | quantized))
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(FP8_CACHE))
    document = plan(str(config))
    assert document == plan(str(tmp_path))
    assert document["totals"]["bytes_per_token"] == (36_864 if quantized else 65_536)


def folder_with_scales(folder: Path, names: list[str], algorithm: str = "FP8") -> str:
    """A folder as ModelOpt writes it, with a tiny file of these scales of Llama's layers."""
    quantized = {"quantization_config": {"quant_method": "modelopt", "kv_cache_quant_algo": algorithm}}
    (folder / "config.json").write_text(json.dumps(json.loads(Path(LLAMA).read_text()) | quantized))
    tensors = {f"model.layers.{name}": np.float32(0.25) for name in names}
    save_file({name: np.asarray(scale) for name, scale in tensors.items()}, folder / "model.safetensors")
    return str(folder)


def test_a_folder_with_scales_of_kvjax_calibrate_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """What they were divided by is read from a single file alone."""
    config = folder_with_scales(tmp_path, [])
    scale = {"model.layers.0.self_attn.attn.k_scale": np.float32([0.25])}
    save_file(scale, tmp_path / "scales.safetensors", {"kvjax_amax_divisor": "448"})
    with pytest.raises(SystemExit):
        main(["plan", "--config", config])
    assert "checkpoint: got a folder with scales of kvjax calibrate, expected the file" in capsys.readouterr().err
    assert main(["plan", "--config", config, "--kv-cache-dtype", "bfloat16"]) == 0


MODELOPT = ["self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"]


def test_the_scales_that_were_found_are_told(plan: Plan, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    config = folder_with_scales(tmp_path, [f"{layer}.{name}" for layer in range(32) for name in MODELOPT])
    [group] = plan(config, "--tensor-parallel", "4")["groups"]
    assert (group["scales"], group["num_kv_heads"]) == (MODELOPT, 2)
    assert main(["plan", "--config", str(tmp_path / "config.json"), "--skip-layers", "0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "scale" in line] == [f"scales of layers 1-31: {' and '.join(MODELOPT)}"]
    skipping, quantized = plan(config, "--skip-layers", "0")["groups"]
    assert (skipping["scales"], quantized["scales"]) == ([], MODELOPT)


def test_scales_that_are_missing_are_told(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    config = folder_with_scales(tmp_path, [f"{layer}.self_attn.kv_scale" for layer in range(30)])
    assert main(["plan", "--config", config]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(
        "warning: scales of layers 30-31 (fp8_e4m3): the checkpoint holds no scale, so 1 is used"
    )
    assert [line for line in lines[1:] if "scale" in line] == [
        "scales of layers 0-29: self_attn.kv_scale",
        "scales of layers 30-31: none, so 1",
    ]


def test_a_divisor_that_is_not_declared_is_told(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    names = [f"{layer}.{name}" for layer in range(32) for name in MODELOPT]
    assert main(["plan", "--config", folder_with_scales(tmp_path, names, "NVFP4")]) == 0
    assert capsys.readouterr().out.startswith(
        "warning: scales of layers 0-31 (nvfp4): the divisor of the scales is unknown"
    )


def test_weights_that_cannot_be_read_are_named(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    config = folder_with_scales(tmp_path, ["0.self_attn.kv_scale"])
    (tmp_path / "model.safetensors").write_bytes(b"x" * 20)
    assert refusal(capsys, "--config", config).startswith(
        f"{str(tmp_path / 'model.safetensors')!r}: got a header of 8,680,820,740,569,200,760 bytes"
    )
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"model.layers.0.self_attn.k_scale": "missing.safetensors"}})
    )
    assert refusal(capsys, "--config", config) == (
        f"{str(tmp_path / 'model.safetensors.index.json')!r}: got 'missing.safetensors' for"
        " 'model.layers.0.self_attn.k_scale', expected a file that exists"
    )


HYBRID = {
    "model_type": "qwen3_next",
    "num_hidden_layers": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "full_attention_interval": 4,
    "dtype": "bfloat16",
}


def write_config(folder: Path, config: dict[str, Any]) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return str(path)


def test_layers_without_a_cache_are_told_and_not_counted(
    plan: Plan, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    config = write_config(tmp_path, HYBRID)
    document = plan(config, "--kv-cache-dtype", "fp8", "--skip-layers", "3")
    assert [(group["layers"], group["dtype"]) for group in document["groups"]] == [([3], "bfloat16"), ([7], "fp8_e4m3")]
    assert (document["num_layers"], document["layers_without_cache"]) == (8, [0, 1, 2, 4, 5, 6])
    assert document["totals"]["bytes_per_token"] == 2 * 2 * 256 * (2 + 1)
    assert main(["plan", "--config", config]) == 0
    out = capsys.readouterr().out
    assert "\n6 layers have no KV cache of their own: 0-2, 4-6\n" in out
    assert out.endswith(f"keep {STATE:,} bytes of each sequence; 0 bytes, of 0 sequences, are counted\n")
    assert refusal(capsys, "--config", config, "--skip-layers", "4").startswith(
        "argument --skip-layers: skip_layers: got '4', expected one of a layer index from 0 to 7 that has a KV cache,"
    )


# A layer of HYBRID: 3 inputs of 2 * 16 * 128 + 32 * 128 channels in 16 bits, and 32 matrices of 128 x 128 in float32.
STATE = 6 * (3 * 8192 * 2 + 32 * 128 * 128 * 4)


def test_states_of_sequences_are_taken_from_the_memory(plan: Plan, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    config, memory = write_config(tmp_path, HYBRID), 2**30
    whole = plan(config, "--memory", str(memory))
    document = plan(config, "--memory", str(memory + 5 * STATE), "--max-seqs", "5")
    assert (document["state_bytes"], document["max_seqs"]) == (STATE, 5)
    assert (document["totals"], document["bfloat16"]) == (whole["totals"], whole["bfloat16"])
    document = plan(config, "--memory", str(memory + 5 * 1000), "--max-seqs", "5", "--state-bytes", "2000", *TWO)
    assert (document["state_bytes"], document["totals"]["tokens"]) == (1000, plan(config, *TWO)["totals"]["tokens"])
    for arguments, message in (
        (["--max-seqs", "9" * 9], f"max_seqs: got 999999999 with states of {STATE:,} bytes each, expected at most"),
        (["--max-seqs", "-1"], "argument --max-seqs: "),
    ):
        with pytest.raises(SystemExit):
            main(["plan", "--config", config, *arguments])
        assert message in capsys.readouterr().err


TWO = ("--tensor-parallel", "2")


def test_states_of_unknown_size_are_told(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    jamba = {"model_type": "jamba", "dtype": "bfloat16", "num_hidden_layers": 8}
    config = write_config(tmp_path, jamba)
    assert main(["plan", "--config", config]) == 0
    assert "a state of unknown size of each sequence, which is not counted\n" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["plan", "--config", config, "--max-seqs", "3"])
    assert "argument --max-seqs: the size of this model's states is unknown: give" in capsys.readouterr().err
    assert main(["plan", "--config", config, "--max-seqs", "3", "--state-bytes", "1MiB"]) == 0
    assert "3,145,728 bytes, of 3 sequences, are counted" in capsys.readouterr().out


def test_what_is_assumed_of_a_model_is_in_the_plan(plan: Plan, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    config = write_config(tmp_path, json.loads(Path(LLAMA).read_text()) | {"model_type": "no_such_model"})
    assumed = (
        "config.model_type: got 'no_such_model', which is unknown to kvjax; assumed 32 of 32 layers with 8 KV heads of"
        " 128 elements, heads of hidden_size / num_attention_heads"
    )
    assert main(["plan", "--config", config, "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["warnings"] == [assumed]
    assert err == f"kvjax plan: warning: {assumed}\n"
    assert main(["plan", "--config", config]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[0] == f"warning: {assumed}"
    assert err == ""
    assert plan(LLAMA)["warnings"] == []


def test_standard_input_is_read(plan: Plan, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(Path(LLAMA).read_bytes())))
    assert plan("-") == plan(LLAMA)


def test_what_the_checkpoint_leaves_unclear_is_warned_of_once(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    declared = {"quant_method": "modelopt", "kv_cache_quant_algo": "INT8"}
    config = json.loads(Path(LLAMA).read_text()) | {"quantization_config": declared}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["plan", "--json", "--config", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["groups"][0]["dtype"] == "bfloat16"
    [line] = err.splitlines()
    assert line.startswith("kvjax plan: warning: kv_cache_quant_algo: unknown ModelOpt KV cache algorithm 'INT8'")


def test_the_table_says_who_shares_and_what_slides(capsys: pytest.CaptureFixture[str]):
    assert main(["plan", "--config", GPT_OSS, "--tensor-parallel", "4", "--kv-cache-dtype", "fp8"]) == 0
    first, blank, header, rule, sliding, full, *_, last = capsys.readouterr().out.splitlines()
    assert first.startswith("24 layers, model dtype bfloat16, one of 4 devices;")
    assert blank == ""
    assert len(header) == len(rule) == len(sliding) == len(full)
    assert [cell.strip() for cell in sliding.strip("|").split("|")] == (
        ["12: 0, 2, ..., 22", "sliding_window 128", "fp8_e4m3", "user", "2 x 64", "16", "256", "4,096", "0"]
    )
    assert last.startswith("sliding layers count every token")


def test_a_closed_pipe_prints_no_error():
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "kvjax", "plan", "--config", str(CONFIGS / "gpt-oss-20b.json")]
    with open(writer, "wb") as stdout:
        done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (BROKEN_PIPE, "")


def test_no_device_is_asked_for():
    environment = os.environ | {"JAX_PLATFORMS": "no_device_may_be_asked_for"}
    command = [sys.executable, "-W", "error", "-m", "kvjax", "plan", "--config", LLAMA, "--kv-cache-dtype", "nvfp4"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "(ratio 3.55)" in done.stdout


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The line in which the command says why it refuses `arguments`."""
    with pytest.raises(SystemExit) as exit_info:
        main(["plan", *arguments])
    assert exit_info.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("usage: kvjax plan ")
    line = err.splitlines()[-1]
    assert line.startswith("kvjax plan: error: ")
    return line.removeprefix("kvjax plan: error: ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--kv-cache-dtype", "nvpf4"],
            "argument --kv-cache-dtype: got 'nvpf4', expected one of auto, float32, float16, bfloat16,"
            " fp8_e4m3, fp8_e5m2, fp8_per_token_head, int8_per_token_head, nvfp4, nvfp4_4over6, fp8_k_nvfp4_v,"
            " fp8_k_nvfp4_4over6_v, int8_k_nvfp4_v, int8_k_nvfp4_4over6_v, fp8_ds_mla, float, half, fp8 (did you mean"
            " 'nvfp4'?)",
        ),
        (
            ["--kv-cache-dtype", "0-3=nvpf4"],
            "argument --kv-cache-dtype: got 'nvpf4', expected one of auto, float32, ",
        ),
        (
            ["--kv-cache-dtype", "0=fp8,nvfp4"],
            "argument --kv-cache-dtype: got 'nvfp4', expected layers=dtype, as in '0-3=bfloat16,*=nvfp4'",
        ),
        (
            ["--kv-cache-dtype", "0=fp8,0=nvfp4"],
            "argument --kv-cache-dtype: got '0' twice, expected each key once",
        ),
        (
            ["--kv-cache-dtype", "0-32=fp8"],
            "kv_cache_dtype: got '0-32', expected one of a layer index from 0 to 31, a range such as 0-3, full_atten",
        ),
        (
            ["--kv-cache-dtype", "0-3=fp8,3=nvfp4"],
            "kv_cache_dtype: got 'fp8_e4m3' for '0-3' and 'nvfp4' for '3', expected one dtype for layer 3",
        ),
        (
            ["--model-dtype", "fp8"],
            "argument --model-dtype: got 'fp8', expected one of float32, float16, ",
        ),
        (
            ["--memory", "40G"],
            "argument --memory: got '40G', expected a number of bytes, or a number and one of B, KB,",
        ),
        (["--block-size", "0"], "argument --block-size: got 0, expected at least 1"),
        (["--tensor-parallel", "two"], "argument --tensor-parallel: got 'two', expected an integer of at least 1"),
        (
            ["--tensor-parallel", "3"],
            "argument --tensor-parallel: tensor_parallel: got 3, expected a divisor or a multiple of a layer's 8 KV",
        ),
        (["--layout", "nhd"], "argument --layout: invalid choice: 'nhd' (choose from "),
        (["--v-scale-layout", "rotated"], "argument --v-scale-layout: invalid choice: 'rotated' (choose from "),
        (
            ["--skip-layers", "0", "32"],
            "argument --skip-layers: skip_layers: got '32', expected one of a layer index from 0 to 31, a range",
        ),
        (["--skip-layers", "-1"], "argument --skip-layers: skip_layers: got '-1', expected one of a layer index from"),
        (
            ["--skip-layers", "sliding_window"],
            "argument --skip-layers: skip_layers: got 'sliding_window', expected one",
        ),
        (["--exact-window", "64"], "argument --exact-window: expected with --max-seqs, the sequences that have a"),
        (["--exact-window", "0", "--max-seqs", "1"], "argument --exact-window: got 0, expected at least 1"),
        (["--v-scale-layout", "swizzled"], "v_scale_layout: got 'swizzled' with dtype 'bfloat16', which has no block"),
        (
            ["--kv-cache-dtype", "nvfp4", "--v-scale-layout", "swizzled", "--block-size", "6"],
            "block_size: got 6, expected a multiple of 4 for v_scale_layout='swizzled'",
        ),
    ],
)
def test_bad_arguments_are_refused_by_name(capsys, arguments, message):
    assert refusal(capsys, "--config", LLAMA, *arguments).startswith(message)


def test_a_configuration_has_to_be_named(capsys):
    assert refusal(capsys) == "the following arguments are required: --config"


def test_files_that_cannot_be_read_are_named(capsys, tmp_path):
    missing = tmp_path / "missing.json"
    assert refusal(capsys, "--config", str(missing)) == (
        f"argument --config: cannot read {str(missing)!r}: No such file or directory"
    )
    assert refusal(capsys, "--config", str(tmp_path)) == (
        f"argument --config: cannot read {str(tmp_path / 'config.json')!r}: No such file or directory"
    )
    assert (
        refusal(capsys, "--config", "x" * 5000) == f"argument --config: cannot read {'x' * 5000!r}: File name too long"
    )


def test_json_that_is_nested_too_deeply_is_named(capsys, tmp_path):
    path = tmp_path / "config.json"
    path.write_bytes(b"[" * 100_000)
    assert refusal(capsys, "--config", str(path)) == f"argument --config: {str(path)!r} is nested too deeply to read"


@pytest.mark.parametrize("content", [b"", b'{"num_hidden_layers": 32', b"\xff\xfe\xff"])
def test_files_that_are_no_json_are_named(capsys, tmp_path, content):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    assert refusal(capsys, "--config", str(path)).startswith(f"argument --config: {str(path)!r} is not JSON: ")


@pytest.mark.parametrize(
    ("content", "arguments", "message"),
    [
        ([], [], "config: got [] of type list, expected a mapping"),
        ({}, [], "config: got no 'num_hidden_layers', expected a positive int"),
        (
            {"num_hidden_layers": 2, "num_key_value_heads": 8, "head_dim": 72},
            [],
            "config: got no 'dtype' or 'torch_dtype', expected one of them, or model_dtype given",
        ),
        (
            {"num_hidden_layers": 2, "num_key_value_heads": 8, "head_dim": 72, "dtype": "bfloat16"},
            ["--kv-cache-dtype", "nvfp4"],
            "head_size: got 72, expected a multiple of 16 for 'nvfp4'",
        ),
        (
            json.loads(Path(LLAMA).read_text())
            | {"quantization_config": {"kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": True}}},
            [],
            "kv_cache_scheme: got {'num_bits': 8, 'type': 'float', 'dynamic': True}: dynamic=True",
        ),
    ],
)
def test_configurations_that_no_cache_can_be_made_for_are_refused(capsys, tmp_path, content, arguments, message):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(content))
    assert refusal(capsys, "--config", str(path), *arguments).startswith(message)
