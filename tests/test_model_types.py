"""The table of model types against its judge: the cache that transformers itself keeps of a tiny model of each type."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from kvjax import ModelKVConfig
from kvjax.hf_config.default_sizes import DEFAULT_SIZES
from kvjax.hf_config.model_types import MODEL_TYPES
from kvjax.hf_config.plain_keys import COMPOSITES, UNSUPPORTED

transformers = pytest.importorskip("transformers")
pytest.importorskip("torch")

from support import tiny_models  # noqa: E402

PAGE = (Path(__file__).parents[1] / "docs/notes/models.md").read_text()
ROWS = {
    model_type: verdict
    for verdict, types in re.findall(r"^\| (.*) \| (`\S+`(?: `\S+`)*) \|$", PAGE, re.MULTILINE)
    for model_type in re.findall(r"`(\S+)`", types)
}
VERSION = re.search(r"^transformers (\S+):$", PAGE, re.MULTILINE)

# Each of the mechanisms, and types that were read wrong before there was a table.
REPRESENTATIVE = ("bamba", "deepseek_v3", "falcon", "gemma4_text", "jetmoe", "mllama", "recurrent_gemma", "zamba2")


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder) -> None:
    """Whatever transformers warns of while it builds a model is not what is tested here."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers.logging.set_verbosity_error()


def check(model_type: str) -> None:
    verdict = tiny_models.judge(model_type)
    assert verdict.status != "WRONG", verdict
    if VERSION and VERSION[1] == transformers.__version__:
        assert str(verdict) == ROWS[model_type]


@pytest.mark.parametrize("model_type", REPRESENTATIVE)
def test_what_is_read_is_what_transformers_keeps(model_type: str):
    check(model_type)


@pytest.mark.nightly
@pytest.mark.parametrize("model_type", [kind for kind in tiny_models.CAUSAL_MODEL_TYPES if kind not in REPRESENTATIVE])
def test_what_is_read_is_what_transformers_keeps_of_every_type(model_type: str):
    check(model_type)


def test_the_page_has_a_row_for_every_type_and_none_is_wrong():
    if VERSION and VERSION[1] == transformers.__version__:
        assert set(ROWS) == set(tiny_models.CAUSAL_MODEL_TYPES)
    assert {row.split(" | ")[0] for row in ROWS.values()} <= {"right", "right, warned", "refused", "not judged"}
    for model_type, row in ROWS.items():
        if model_type in MODEL_TYPES:
            assert row.startswith("right"), model_type
        if model_type in UNSUPPORTED:
            assert row.startswith("refused"), model_type


def misread(model_type: str) -> list[str]:
    """What is filled in otherwise than transformers does, in a file of the type's own defaults and in a small one."""
    config = tiny_models.CONFIG_MAPPING[model_type]().to_dict() | {"dtype": "float32"}
    config.pop("transformers_version")
    files = [config, next(iter(tiny_models.tiny_configs(model_type)))]
    return [wrong for file in files for wrong in tiny_models.misread_without_a_key(model_type, file)]


@pytest.mark.parametrize("model_type", ["mistral", "gemma2", "qwen3"])
def test_what_a_file_leaves_out_is_what_transformers_fills_in(model_type: str):
    assert misread(model_type) == []


def test_sizes_that_a_file_leaves_out_are_those_of_transformers():
    for model_type in DEFAULT_SIZES.keys() & {*tiny_models.CONFIG_MAPPING}:
        config, names = tiny_models.CONFIG_MAPPING[model_type]().to_dict(), MODEL_TYPES[model_type].names
        for key, size in DEFAULT_SIZES[model_type].items():
            given = {config[name] for name in (key, *names.get(key, ())) if config.get(name) is not None}
            assert given <= {size}, (model_type, key)
    [layer] = {*ModelKVConfig.from_hf_config({"model_type": "llama"}, model_dtype="float16").layers}
    assert (layer.num_kv_heads, layer.head_size) == (32, 128)


@pytest.mark.nightly
@pytest.mark.parametrize("model_type", [kind for kind in MODEL_TYPES if kind in tiny_models.CONFIG_MAPPING])
def test_what_a_file_leaves_out_is_what_transformers_fills_in_of_every_type(model_type: str):
    assert misread(model_type) == []


@pytest.mark.full
def test_every_configuration_of_transformers_is_read_by_the_table_or_refused_or_warned_of():
    silent = []
    for model_type in tiny_models.CONFIG_MAPPING:
        try:
            config: dict[str, Any] = tiny_models.CONFIG_MAPPING[model_type]().to_dict() | {"dtype": "float32"}
            layers, warned = tiny_models.read_layers(config)
        except Exception:  # kvjax refuses, or transformers has no such configuration
            continue
        if config["model_type"] in COMPOSITES:
            # Nothing beside the language model's part counts.
            text = config.get("text_config", config)
            assert layers == tiny_models.read_layers({**text, "dtype": "float32"})[0], model_type
        elif not warned and config["model_type"] not in MODEL_TYPES:
            silent.append(model_type)
    assert silent == []
