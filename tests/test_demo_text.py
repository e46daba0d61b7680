"""The demo's text: the same split everywhere, no file on both sides, and what byte frequencies alone achieve."""

from __future__ import annotations

import numpy as np
import pytest

from kvjax.demo import text


@pytest.fixture(scope="module")
def files() -> tuple[str, ...]:
    return text.source_files(text.standard_library())


def test_the_split_of_a_path_never_changes():
    # Written down, not computed: weights in use were trained on this split.
    held_out = {"ast.py", "typing.py", "locale.py", "unittest/case.py", "tomllib/_parser.py"}
    training = {"argparse.py", "os.py", "json/decoder.py", "asyncio/tasks.py", "inspect.py"}
    assert {path for path in held_out | training if text.is_held_out(path)} == held_out


def test_every_file_is_either_for_training_or_held_out(files):
    training, held_out = text.split(files)
    assert set(training).isdisjoint(held_out)
    assert sorted(training + held_out) == list(files)


def test_training_and_held_out_texts_are_large_enough(files):
    training, held_out = (text.read(text.standard_library(), side) for side in text.split(files))
    assert training.size > 4_000_000
    assert 0.02 < held_out.size / training.size < 0.2


def test_only_modules_of_the_standard_library_are_text(tmp_path):
    kept = {"os.py", "json/decoder.py", "email/mime/text.py"}
    left_out = {
        "mine.py",
        "site-packages/numpy/core.py",
        "test/test_os.py",
        "unittest/test/test_case.py",
        "encodings/cp037.py",
        "os.txt",
    }
    for name in kept | left_out:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1\n")
    assert set(text.source_files(tmp_path)) == kept


def test_a_python_without_its_sources_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=f"no standard library sources under {tmp_path}"):
        text.source_files(tmp_path)


def test_read_joins_files_in_order(tmp_path):
    (tmp_path / "a.py").write_bytes(b"one\xff")
    (tmp_path / "b.py").write_bytes(b"two")
    assert text.read(tmp_path, ["b.py", "a.py"]).tobytes() == b"twoone\xff"


def test_excerpts_start_lines_and_repeat_with_the_seed():
    lines = np.frombuffer(b"".join(b"%04d abc\n" % number for number in range(200)), np.uint8)
    lengths = [9, 31, 100]
    pieces = text.excerpts(lines, lengths, np.random.default_rng(3))
    assert [len(piece) for piece in pieces] == lengths
    for piece in pieces:
        assert piece[:4].tobytes().isdigit()
        assert piece[4:9].tobytes() == b" abc\n"
    again = text.excerpts(lines, lengths, np.random.default_rng(3))
    assert all(np.array_equal(one, other) for one, other in zip(pieces, again, strict=True))


def test_unigram_bits_are_the_entropy_of_the_frequencies():
    # Four bytes, equally often, so often that add-one smoothing of the other 252 is lost: two bits each.
    training = np.tile(np.frombuffer(b"abcd", np.uint8), 1_000_000)
    assert text.unigram_bits_per_byte(training, training[:100]) == pytest.approx(2.0, abs=1e-3)


def test_a_byte_that_training_lacks_costs_a_finite_number_of_bits():
    training = np.zeros(256, np.uint8)
    assert text.unigram_bits_per_byte(training, np.array([7], np.uint8)) == pytest.approx(9.0)  # one in 512
