"""`benchmarks.accuracy` measures any Llama in a GGUF file, and README's table is made of what it wrote."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gguf")
pytest.importorskip("tokenizers")

from support.tiny_gguf import write_gguf

from benchmarks import accuracy_words
from kvjax.demo import gguf_file

full = pytest.mark.full  # a whole run of the program

ROOT = Path(__file__).parents[1]
DTYPES = ["float32", "fp8_e4m3", "nvfp4"]
ROTATED = "fp8_e4m3, keys rotated"
WINDOWED = "nvfp4_4over6, 24 exact"


def run(command: list[str]) -> None:
    """Most of a smoke run's time goes to compiling."""
    environment = os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a smoke run wrote."""
    folder = tmp_path_factory.mktemp("accuracy")
    write_gguf(folder / "tiny.gguf")
    command = [sys.executable, "-m", "benchmarks.accuracy", "--smoke", f"--model={folder}", "--bits=6"]
    command += [
        f"--dtypes={','.join(DTYPES)}",
        "--positions=0,40",
        "--exact_windows=24",
        f"--json={folder / 'accuracy.json'}",
    ]
    run(command)
    return folder / "accuracy.json"


@pytest.fixture(scope="module")
def rows(document) -> dict[tuple[str, int], dict[str, Any]]:
    return {(row["dtype"], row["position"]): row for row in json.loads(document.read_text())["rows"]}


@full
def test_every_dtype_and_choice_has_a_row_at_each_position(rows):
    chosen = [
        f"chosen, at most 6 bits{rotated}{exact}" for rotated in ("", ", keys rotated") for exact in ("", ", 24 exact")
    ]
    assert [*rows] == [(name, position) for position in (0, 40) for name in (*DTYPES, ROTATED, WINDOWED, *chosen)]
    assert {name: row["bits"] for (name, _), row in rows.items() if name in DTYPES} == {
        "float32": 32,
        "fp8_e4m3": 8,
        "nvfp4": 4.5,
    }
    assert (rows[ROTATED, 0]["bits"], rows[WINDOWED, 0]["bits"]) == (8, 4.5)
    assert all(row["bits"] <= 6 for (name, _), row in rows.items() if name in chosen)


@full
def test_a_float32_cache_does_not_diverge_and_fewer_bits_do_more(rows):
    for measure in ("text", "recall"):
        for position in (0, 40):
            exact, fp8, nvfp4, windowed = (rows[dtype, position][measure] for dtype in (*DTYPES, WINDOWED))
            assert (exact["kl"], exact["kl_error"], exact["agreement"]) == (0, 0, 1)
            assert 0 <= exact["accuracy"] <= 1
            assert 0 < fp8["kl"] < nvfp4["kl"]
            assert 0 < windowed["kl"] < nvfp4["kl"]


@full
def test_readmes_table_is_made_of_the_file(document, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    import update_readme

    before = (ROOT / "README.md").read_text()
    (tmp_path / "README.md").write_text(before)
    monkeypatch.setattr(update_readme, "ROOT", tmp_path)
    update_readme.main([str(document)])
    marks = "<!-- accuracy: begin -->\n", "<!-- accuracy: end -->"
    (head, table, tail), (old_head, _, old_tail) = (
        re.split("|".join(map(re.escape, marks)), text) for text in ((tmp_path / "README.md").read_text(), before)
    )
    assert (head, tail) == (old_head, old_tail)
    assert table.startswith("| dtype ")
    assert "| nvfp4 " in table
    assert "1 texts and 2 lists of 32 tokens. Standard errors are over texts and over lists" in table


def test_words_are_those_of_running_text_as_often_as_it_has_them():
    prose = "The cat, as the dog did, saw the x2 of a_b\nand naïve cats."
    assert accuracy_words.running_words(prose) == ["as", "the", "dog", "saw", "the", "of", "and"]


def test_each_list_has_its_own_words_twice_whatever_the_number_of_lists(tmp_path):
    tokenizer = gguf_file.read(write_gguf(tmp_path / "tiny.gguf")).tokenizer
    words = ["the", "the", "cat", "dog"]

    def lists(num_lists: int, seed: int) -> list[list[int]]:
        made = accuracy_words.repeated(
            words, lambda text: tokenizer.encode(text).ids, num_lists=num_lists, num_tokens=400, seed=seed
        )
        return [one.tolist() for one in made]

    three, others = lists(3, 0), lists(3, 1)
    assert lists(2, 0) == three[:2]
    assert len({tuple(one) for one in three + others}) == 6
    for one in three + others:
        assert len(one) == 400
        assert one[:200] == one[200:]
        *complete, _ = tokenizer.decode(one[:200]).split()
        assert {*complete} == {*words}
        assert 0.3 < complete.count("the") / len(complete) < 0.7


@full
def test_products_in_fp8_add_to_the_error_of_storing(tmp_path: Path):
    write_gguf(tmp_path / "tiny.gguf")
    command = [sys.executable, "-m", "benchmarks.product_accuracy", "--smoke", f"--model={tmp_path}"]
    command += ["--dtypes=fp8_e4m3,nvfp4", f"--markdown={tmp_path / 'table.md'}"]
    run(command)
    table, facts = (tmp_path / "table.md").read_text().split("\n\n")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    names = "random", "random, queries times 4", "model, scales 1", "model, calibrated"
    assert [row[:2] for row in rows] == [[name, dtype] for name in names for dtype in ("fp8_e4m3", "nvfp4")]
    for name, dtype, *cells, lse in rows:
        stored, stored_in_fp8, written, written_in_fp8 = (float(cell.removesuffix("%")) for cell in cells)
        assert 0.1 < stored < 0.3 < 1 < stored_in_fp8 < 20, (name, dtype)
        assert stored_in_fp8 < written_in_fp8 < 40, (name, dtype)
        assert stored < written < 1.05 * written_in_fp8, (name, dtype)
        assert 0 < float(lse) < 1
    assert "models of the kernels' roundings" in facts
