"""examples/shared_prefix.py runs, and its two ways agree."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[1] / "examples" / "shared_prefix.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("shared_prefix", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.full
@pytest.mark.parametrize(
    "arguments",
    [
        [],
        pytest.param(["--sequences=5", "--dtype=bfloat16", "--own=16", "--heads=4"], marks=pytest.mark.full),
        pytest.param(
            ["--sequences=64", "--prefix=8192", "--own=256", "--heads=32", "--kv-heads=8", "--head-size=128"],
            marks=pytest.mark.gpu,
        ),
    ],
    ids=str,
)
def test_attention_over_a_shared_prefix_agrees_with_attention_over_the_whole(example, capsys, arguments):
    example.main(arguments)
    found = re.search(r"largest difference: (\S+), of values up to (\S+)\n", capsys.readouterr().out)
    assert float(found[1]) <= 0.02 * float(found[2])
    assert float(found[2]) > 0.05


def test_a_prefix_of_whole_blocks_is_asked_for(example, capsys):
    with pytest.raises(SystemExit):
        example.main(["--prefix=17"])
    assert "--prefix: got 17, expected a multiple of the block size, 16" in capsys.readouterr().err
