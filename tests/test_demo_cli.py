"""`kvjax demo` as its users run it: the table's numbers hang together, and what goes wrong is said in a line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import jax
import pytest
from support.helpers import matrix

import kvjax
from kvjax.cli import main
from kvjax.demo import text

INCLUDED = ["demo", "--no-pretrained"]
SMALL = ["--tokens", "96", "--sequences", "6"]


FEW = [kvjax.KVCacheDType.FLOAT32, kvjax.KVCacheDType.NVFP4]
DTYPES = pytest.mark.parametrize(
    "result",
    [
        pytest.param(FEW, marks=pytest.mark.full),
        pytest.param(kvjax.STORED_KV_CACHE_DTYPES, marks=pytest.mark.nightly),
    ],
    ids=["few", "all"],
    indirect=True,
    scope="module",
)


@pytest.fixture(scope="module")
def result(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What `--json` prints for these dtypes, on short text."""
    command = [sys.executable, "-W", "error", "-m", "kvjax", *INCLUDED, "--json", "--scales", *SMALL]
    if request.param is FEW:
        command += [f"--dtype={dtype.value}" for dtype in FEW]
    # Two programs are compiled for each dtype; unoptimized, that takes a fifth of the time.
    environment = os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def rows(result) -> dict[str, dict[str, Any]]:
    return {row["dtype"]: row for row in result["rows"]}


@DTYPES
def test_every_dtype_has_its_row(result, request):
    expected = request.node.callspec.params["result"]
    assert [row["dtype"] for row in result["rows"]] == [dtype.value for dtype in expected]


@DTYPES
def test_the_model_beats_byte_frequencies(result):
    assert result["dense_float32_bits_per_byte"] < 0.75 * result["unigram_bits_per_byte"]


@DTYPES
def test_a_float32_cache_loses_nothing(result, rows):
    row = rows["float32"]
    assert row["greedy_agreement"] == 1
    assert row["bits_per_byte"] == pytest.approx(result["dense_float32_bits_per_byte"], abs=1e-5)
    assert row["attention_error"] < 1e-4 * row["attention_rms"]


# Attention averages values, each rounded by half a step of its dtype: 2**-11 of it in float16, 2**-8 in bfloat16, 2**-4
# in fp8_e4m3, 2**-3 in fp8_e5m2, up to a sixth of the largest of its block in nvfp4. Rounded keys move the weights as
# well; the bounds leave room for that, and none for a wrong scale or a wrong block.
@DTYPES
def test_narrow_dtypes_stay_near_float32(rows):
    allowed = {
        "float16": (1e-3, 0.99),
        "bfloat16": (5e-3, 0.98),
        "fp8_e4m3": (0.03, 0.94),
        "fp8_e5m2": (0.06, 0.90),
        "fp8_per_token_head": (0.03, 0.94),
        "int8_per_token_head": (0.03, 0.94),
        "nvfp4": (0.08, 0.85),
        "nvfp4_4over6": (0.08, 0.85),
        "fp8_k_nvfp4_v": (0.08, 0.85),
        "fp8_k_nvfp4_4over6_v": (0.08, 0.85),
        "int8_k_nvfp4_v": (0.08, 0.85),
        "int8_k_nvfp4_4over6_v": (0.08, 0.85),
    }
    assert len(rows) > 1
    for dtype in rows.keys() - {"float32"}:
        (bits, agreement), row = allowed[dtype], rows[dtype]
        assert row["bits_per_byte"] == pytest.approx(rows["float32"]["bits_per_byte"], abs=bits), dtype
        assert agreement <= row["greedy_agreement"] <= 1, dtype


@DTYPES
def test_fewer_bits_err_more(rows):
    in_order = ("float32", "float16", "bfloat16", "fp8_e4m3", "nvfp4")
    errors = [rows[dtype]["attention_error"] for dtype in in_order if dtype in rows]
    assert errors == sorted(errors)
    assert len(set(errors)) == len(errors)


@DTYPES
def test_memory_is_what_the_specs_say(rows):
    # Four layers, keys and values, two heads of 64.
    elements = 4 * 2 * 2 * 64
    expected = {
        "float32": 4 * elements,
        "float16": 2 * elements,
        "bfloat16": 2 * elements,
        "fp8_e4m3": elements,
        "fp8_e5m2": elements,
        "fp8_per_token_head": elements * 68 // 64,
        "int8_per_token_head": elements * 68 // 64,
        "nvfp4": elements * 9 // 16,
        "nvfp4_4over6": elements * 9 // 16,
        "fp8_k_nvfp4_v": elements // 2 + elements * 9 // 32,
        "fp8_k_nvfp4_4over6_v": elements // 2 + elements * 9 // 32,
        "int8_k_nvfp4_v": elements * 68 // 128 + elements * 9 // 32,
        "int8_k_nvfp4_4over6_v": elements * 68 // 128 + elements * 9 // 32,
    }
    for dtype, row in rows.items():
        assert row["bytes_per_token"] == expected[dtype]
        assert 0 <= 2**30 - row["tokens_per_gib"] * row["bytes_per_token"] < 16 * row["bytes_per_token"]


@DTYPES
def test_every_way_to_find_scales_has_its_row(result, rows):
    ways = {(row["dtype"], row["scales"]) for row in result["scales"]}
    per_tensor = {"1", "1, other magnitudes", "amax", "percentile 99.99", "mse"}
    expected = {
        "fp8_e4m3": per_tensor | {"amax, per head", "mse, per head"},
        "fp8_e5m2": per_tensor | {"amax, per head", "mse, per head"},
        "nvfp4": per_tensor,
        "nvfp4_4over6": per_tensor,
        "fp8_k_nvfp4_v": per_tensor | {"amax, per head", "mse, per head"},
        "fp8_k_nvfp4_4over6_v": per_tensor | {"amax, per head", "mse, per head"},
        "int8_k_nvfp4_v": per_tensor,
        "int8_k_nvfp4_4over6_v": per_tensor,
    }
    assert ways == {(dtype, way) for dtype in rows for way in expected.get(dtype, ())}


@DTYPES
def test_calibrated_scales_keep_what_scales_of_1_lose(result, rows):
    table = {(row["dtype"], row["scales"]): row for row in result["scales"]}
    for dtype in {dtype for dtype, _ in table}:
        lost, amax, mse = (table[dtype, way] for way in ("1, other magnitudes", "amax", "mse"))
        # Read at once or in chunks, keys and values go through the same bytes.
        assert amax["bits_per_byte"] == pytest.approx(rows[dtype]["bits_per_byte"], abs=2e-3)
        for error in ("key_error", "value_error"):
            assert mse[error] < 1.01 * amax[error] < 0.2
        if dtype != "fp8_e5m2":  # whose range holds both magnitudes
            assert lost["key_error"] > 1.5 * amax["key_error"] or lost["value_error"] > 1.5 * amax["value_error"]
            assert lost["bits_per_byte"] > amax["bits_per_byte"]


@DTYPES
def test_blocks_were_reused_and_writes_timed(rows):
    for row in rows.values():
        assert 0 < row["blocks_reused"] <= row["blocks"]
        assert row["write_seconds_per_token"] > 0


@DTYPES
def test_the_model_continues_a_prompt(result):
    continuation = result["continuation"]
    assert continuation["dtype"] == result["rows"][-1]["dtype"]
    assert len(continuation["prompt"]) > 0
    assert len(continuation["text"]) > 0


@pytest.mark.gpu
def test_the_demo_runs_on_a_gpu(capsys):
    assert main([*INCLUDED, *SMALL]) == 0
    assert " ".join(["on", jax.devices("cuda")[0].device_kind]) in " ".join(capsys.readouterr().out.split())


@pytest.fixture
def unoptimized() -> Iterator[None]:
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.mark.full
@pytest.mark.usefixtures("unoptimized")
def test_the_table_has_a_line_for_each_dtype_asked_for(capsys):
    assert main([*INCLUDED, "--tokens", "32", "--sequences", "1", "--dtype", "fp8", "--dtype", "fp8_e4m3"]) == 0
    out, err = capsys.readouterr()
    assert err == "", "no progress display where stderr is no terminal"
    header, rule, row, blank, *_ = out.splitlines()
    assert header.split(" | ")[0].strip("| ") == "dtype"
    assert set(rule) <= set("|-: ")
    assert row.startswith("| fp8_e4m3 ")
    assert len(header) == len(rule) == len(row)
    assert blank == ""
    assert "key error" not in out, "the table of scales is printed where --scales asks for it"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dtype", "fp9"], "argument --dtype: got 'fp9', expected one of auto, float32, "),
        (["--dtype", "nvpf4"], "(did you mean 'nvfp4'?)"),
        (["--tokens", "31"], "argument --tokens: got 31, expected at least 32"),
        (["--tokens", "1000000"], "argument --tokens: got 1000000, expected at most 2048"),
        (["--sequences", "9223372036854775807"], "argument --sequences: got 9223372036854775807, expected at most 32"),
        (
            ["--dtype", "fp8_ds_mla"],
            "argument --dtype: got 'fp8_ds_mla', a dtype of latents (MLA), expected one of auto,",
        ),
        (["--sequences", "many"], "argument --sequences: got 'many', expected an integer of at least 1"),
    ],
)
def test_bad_arguments_are_refused_by_name(capsys, arguments, message):
    with pytest.raises(SystemExit) as exit_info:
        main(["demo", *arguments])
    assert exit_info.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err


def test_a_python_without_sources_is_told_so(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(text, "standard_library", lambda: tmp_path)
    assert main([*INCLUDED, "--dtype", "nvfp4"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"kvjax demo: no standard library sources under {tmp_path}")
    assert len(err.splitlines()) == 1


@matrix({"missing": ["safetensors", "tqdm"]}, few={"missing": ["tqdm"]})
def test_a_missing_extra_is_named_in_a_line(missing):
    program = f"import sys; sys.modules[{missing!r}] = None; from kvjax.cli import main; sys.exit(main({INCLUDED!r}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == f"kvjax demo: {missing} is not installed: pip install 'kvjax[demo]'\n"
    assert done.stdout == ""
