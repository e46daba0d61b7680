"""The report of benchmark runs tells every measurement, draws it, and says which file it cannot take, and why."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from absl.testing import flagsaver

from benchmarks import output, tables
from benchmarks.measurement import ResultsError, Rows
from benchmarks.operations import OPERATIONS
from benchmarks.report import __main__ as report_program
from benchmarks.report import pages, results
from benchmarks.timing import CLOCK_WORDS

ROOT = Path(__file__).parents[1]
US = 1e-6


def measurement(peer: str, num_tokens: int, dtype: str = "bfloat16", *, us: float = 10.0, **changes: object) -> dict:
    """A measurement whose samples lie evenly around `us` microseconds, a tenth of it to each side."""
    samples = [us * US * share for share in (0.9, 0.95, 1.0, 1.05, 1.1)]
    return {
        "operation": "write",
        "case": "llama-3.1-8b",
        "num_kv_heads": 8,
        "head_size": 128,
        "dtype": dtype,
        "layout": "NHD",
        "slots": "scattered",
        "num_tokens": num_tokens,
        "peer": peer,
        "clock": "CUPTI",
        "seconds": us * US,
        "samples": samples,
        "bytes_moved": 8_000 * num_tokens,
        "copy_seconds": 5 * US,
        "kernels": ["a_kernel"],
        "unknown to readers": {"of": [1, None]},
    } | changes


def contents(*measurements: dict, device: str = "NVIDIA H200", **changes: object) -> dict:
    environment = {"device": device, "driver": "575.1", "date": "2026-11-21", "command": "python -m benchmarks.write"}
    file = {"schema": 1, "program": "benchmarks.write", "environment": environment, "measurements": [*measurements]}
    return file | changes


def writes() -> dict:
    """Two dtypes in three sizes, by one to three peers."""
    found = [
        measurement(peer, num_tokens, dtype, us=base + num_tokens / 100)
        for num_tokens in (1, 64, 1_024)
        for dtype, peers in (("bfloat16", {"kvjax": 10.0, "vLLM": 20.0, "copy_": 40.0}), ("nvfp4", {"kvjax": 8.0}))
        for peer, base in peers.items()
    ]
    copies = [{"bytes_moved": 8_000, "seconds": 2 * US, "samples": [2 * US]}]
    skipped = [{"what": "FlashInfer", "reason": "not importable: <module>\nat line 3"}]
    return contents(*found, copy_rates=copies, skipped=skipped)


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    def save(file: object, name: str = "write.json") -> Path:
        path = tmp_path / name
        path.write_text(file if isinstance(file, str) else json.dumps(file))
        return path

    return save


def report_of(*paths: Path) -> pages.Report:
    folder = paths[0].parent
    docs = folder / "docs"
    return pages.Report(results.read(paths), docs / "benchmarks.md", docs / "plots", docs / "notes")


def notes_of(*paths: Path) -> str:
    """The page with every time."""
    return pages.notes(report_of(*paths), "NVIDIA H200")


def drawn_of(report: pages.Report) -> tuple[tables.Operation, list]:
    [timed] = report.timed("NVIDIA H200")
    return timed.of, timed.plots()["llama-3.1-8b"]


def rows_below(page: str, *words: str) -> list[list[str]]:
    """The cells of the first table after these words, each found after the one before."""
    for word in words:
        page = page[page.index(word) + len(word) :]
    table = re.search(r"(?:^\|.*\n)+", page, re.MULTILINE)
    header, _, *rows = ([cell.strip() for cell in line.strip("|\n").split(" | ")] for line in table[0].splitlines())
    return [header, *rows]


def test_the_page_of_a_small_file(save):
    file = contents(
        measurement("kvjax", 1),
        measurement("vLLM", 1, us=15.0),
        measurement("kvjax", 64, us=20.0, copy_seconds=None),
        measurement("vLLM", 64, us=5.0, bytes_moved=None),
        skipped=[{"what": "FlashInfer", "reason": "not importable: <module>\nat line 3"}],
    )
    path = save(file)
    page, notes = pages.page(report_of(path)), notes_of(path)
    [link] = re.findall(r"\[the\s+method\]\(([^)]*)\)", page)
    assert (path.parent / "docs" / link).resolve() == ROOT / "benchmarks/README.md"
    assert "[NVIDIA H200](notes/benchmarks-nvidia-h200.md)" in page.replace("\n", " ")
    assert page[page.index("## ") :] == (
        """\
## NVIDIA H200

### Write

Write: llama-3.1-8b, KV heads 8, head size 128, layout NHD, slots scattered; clock CUPTI.
Of all others, the time as a multiple of kvjax's: above 1 kvjax is faster.

| dtype    | tokens | kvjax, microseconds |  GB/s (share) |  vLLM |
| -------- | -----: | ------------------: | ------------: | ----: |
| bfloat16 |      1 |                10.0 | 0.800 (50.0%) | 1.50x |
| bfloat16 |     64 |                20.0 |          25.6 | 0.25x |

Share: of the rate of a copy that moves as many bytes; of few tokens all times are latencies.

![write, llama-3.1-8b, NVIDIA H200](plots/nvidia-h200-write-llama-3.1-8b.png)

```console
$ python -m benchmarks.write
```

driver 575.1, date 2026-11-21.
"""
    )
    assert notes.startswith("# Every time on NVIDIA H200\n\nEach table of [benchmarks.md](../benchmarks.md) in full.")
    assert notes[notes.index("```console") :] == (
        """\
```console
$ python -m benchmarks.write
```

|        | measured with |
| ------ | ------------- |
| driver | 575.1         |
| date   | 2026-11-21    |

## Write

Medians of 5 calls each; clock CUPTI.

![write, llama-3.1-8b, NVIDIA H200](../plots/nvidia-h200-write-llama-3.1-8b.png)

<details><summary>llama-3.1-8b: 4 times</summary>

KV heads 8, head size 128, layout NHD, slots scattered.

Microseconds:

| dtype    | tokens |            kvjax |             vLLM |
| -------- | -----: | ---------------: | ---------------: |
| bfloat16 |      1 | 10.0 (9.10-10.9) | 15.0 (13.7-16.4) |
| bfloat16 |     64 | 20.0 (18.2-21.8) | 5.00 (4.55-5.45) |

GB/s (share):

| dtype    | tokens | MB moved | copy |         kvjax |          vLLM |
| -------- | -----: | -------: | ---: | ------------: | ------------: |
| bfloat16 |      1 |  0.00800 | 5.00 | 0.800 (50.0%) | 0.533 (33.3%) |
| bfloat16 |     64 |    0.512 | 5.00 |          25.6 |             - |

</details>

## Not measured

- FlashInfer: not importable: &lt;module&gt; (write)
"""
    )


def test_every_measurement_is_on_the_page_once(save):
    file = writes()
    for number, layout in enumerate(("NHD", "HND")):
        for slots in ("padded", "contiguous"):
            file["measurements"] += [
                measurement("kvjax", count, us=100.0 + 7 * number + count, layout=layout, slots=slots)
                for count in (1, 64)
            ]
    file["measurements"] += [
        measurement("kvjax", 7, us=333.0, case="a|b"),
        measurement("CUDA", 7, us=444.0, case="a|b"),
    ]
    page = notes_of(save(file))
    times = []
    for case in ("llama-3.1-8b", "a\\|b"):
        header, *rows = rows_below(page, f"<details><summary>{case}", "Microseconds")
        times += [cell.split()[0] for row in rows for cell in row[header.index("kvjax") :] if cell != "-"]
    expected = [f"{each['seconds'] / US:.3g}" for each in file["measurements"]]
    assert sorted(f"{float(time):.3g}" for time in times) == sorted(expected)


def test_tiny_shares_are_not_zero(save):
    slow = measurement("kvjax", 1, us=16_000.0)
    assert "0.000500 (0.03%)" in notes_of(save(contents(slow)))


def test_a_file_of_each_program_makes_one_section_of_a_device(save):
    gather = contents(measurement("XLA gather", 7, operation="gather"), program="benchmarks.gather")
    gather["environment"] |= {"torch": "2.15", "driver": "576.2", "command": "python -m benchmarks.gather"}
    cpu = contents(measurement("kvjax", 1, clock="wall"), device="a CPU")
    report = report_of(save(writes()), save(gather, "gather.json"), save(cpu, "cpu.json"))
    assert re.findall("^##+ .*", pages.page(report), re.MULTILINE) == ["## NVIDIA H200", "### Write", "## a CPU"]
    page = pages.notes(report, "NVIDIA H200")
    headings = [*re.findall("^##+ .*", page, re.MULTILINE), *re.findall("^##+ .*", pages.notes(report, "a CPU"), re.M)]
    assert headings == ["## Write", "## Gather", "## Copies", "## Not measured", "## Write"]
    assert "$ python -m benchmarks.write\n$ python -m benchmarks.gather\n" in page
    rows = dict(rows_below(page, "# Every time")[1:])
    assert rows == {
        "driver": "575.1 (write); 576.2 (gather)",
        "date": "2026-11-21",
        "torch": "- (write); 2.15 (gather)",
    }


def test_times_by_two_clocks_never_stand_in_one_table(save):
    file = contents(measurement("kvjax", 1), measurement("kvjax", 1, clock="host", us=50.0))
    page = notes_of(save(file))
    assert re.findall("^## .*", page, re.MULTILINE) == ["## Write by CUPTI", "## Write by host"]
    assert rows_below(page, "## Write by CUPTI")[1:] == [["bfloat16", "1", "10.0 (9.10-10.9)"]]
    assert rows_below(page, "## Write by host")[1:] == [["bfloat16", "1", "50.0 (45.5-54.5)"]]
    file["measurements"] += [measurement("CUDA", 1, clock=clock) for clock in ("CUPTI", "host")]
    rows = Rows(results.read_run(save(file)).measurements)
    printed = "\n".join(output.operation_tables(OPERATIONS["write"], rows))
    assert printed.count("Microseconds:") == 2
    assert [*re.findall(r"^By (.*)\.$", printed, re.MULTILINE)] == [CLOCK_WORDS[clock] for clock in ("CUPTI", "host")]


def test_what_does_not_apply_may_be_missing(save):
    calls = {"operation": "bridge host", "peer": "a call", "clock": "host", "seconds": 1.0, "samples": [1.0]}
    page = notes_of(save(contents(calls)))
    assert rows_below(page, "## Bridge host", "Microseconds:") == [["a call"], ["1,000,000 (1,000,000-1,000,000)"]]
    assert "GB/s (share):" not in page


def test_only_declared_fields_are_what_a_measurement_is_about(save):
    sizes = [
        measurement("kvjax", 64, us=us, cache_bytes=size, temporary_bytes=size // 1_000, operation="host write")
        for size, us in ((1_000, 10.0), (1_000_000, 11.0))
    ]
    found = results.read([save(contents(*sizes, measurement("kvjax", 64, cache_bytes=1_000)))])
    by_size, _, write = (each for run in found["NVIDIA H200"] for each in run.measurements)
    assert by_size.subject["cache_bytes"] == 1_000
    assert by_size.facts["temporary_bytes"] == 1
    assert (write.subject.get("cache_bytes"), write.facts["cache_bytes"]) == (None, 1_000)


@pytest.mark.parametrize(
    ("operation", "sizes", "expected"),
    [
        ("write", [{"num_tokens": 1}, {"num_tokens": 64}], [1, 64]),
        ("write", [{"num_tokens": 1}, {"num_tokens": 1, "slots": "padded"}], []),
        ("write", [{"num_tokens": 64}, {"layout": "HND"}, {"num_tokens": 1}], [64, 1]),
        ("gather", [{"num_tokens": 64, "num_seqs": 8}, {"num_tokens": 128, "num_seqs": 2}], [64, 128]),
        ("gather", [{"num_seqs": 8}, {"num_seqs": 2}, {"num_tokens": 1}], []),  # a line would have two points at 7
        ("host write", [{"cache_bytes": 1}, {"cache_bytes": 2}, {"cache_bytes": 2, "num_tokens": 9}], [1, 2]),
        ("bridge host", [{"num_tokens": 1}, {"num_tokens": 64}], []),
        ("write", [{"num_tokens": 1}, {"num_tokens": 64, "dtype": "float32"}, {"num_tokens": 64}], [1, 64]),
    ],
)
def test_what_is_drawn_against_what(save, operation, sizes, expected):
    each = [measurement("kvjax", **({"num_tokens": 7, "operation": operation} | size)) for size in sizes]
    [run] = results.read([save(contents(*each))])["NVIDIA H200"]
    of = OPERATIONS[operation]
    assert [m.subject[of.against] for m in tables.drawn(of, run.measurements)] == expected


@pytest.fixture
def plots():
    pytest.importorskip("matplotlib")
    from benchmarks.report import plots

    return plots


def test_a_plot_has_a_line_for_each_dtype_and_peer(save, plots):
    figure = plots.figure(*drawn_of(report_of(save(writes()))), plots.styles(["kvjax", "vLLM", "copy_"]), "a title")
    times, nvfp4_times, shares, nvfp4_shares = figure.axes
    assert [panel.get_title() for panel in figure.axes] == ["bfloat16", "nvfp4", "", ""]

    def lines(panel) -> dict:
        return {line.get_label(): dict(zip(*line.get_data(), strict=True)) for line in panel.get_lines()}

    assert set(lines(times)) == {"kvjax", "vLLM", "copy_", plots.COPY_LABEL}
    assert set(lines(nvfp4_times)) == {"kvjax", plots.COPY_LABEL}
    assert (set(lines(shares)), set(lines(nvfp4_shares))) == ({"kvjax", "vLLM", "copy_"}, {"kvjax"})
    assert lines(times)["vLLM"] == pytest.approx({1: 20.01, 64: 20.64, 1_024: 30.24})
    assert lines(times)[plots.COPY_LABEL] == pytest.approx({1: 5.0, 64: 5.0, 1_024: 5.0})
    assert lines(shares)["kvjax"] == pytest.approx({1: 5 / 10.01, 64: 5 / 10.64, 1_024: 5 / 20.24})
    assert {panel.get_xscale() for panel in figure.axes} == {times.get_yscale()} == {"log"}
    [legend] = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["kvjax", "vLLM", "copy_", plots.COPY_LABEL]
    figure.draw_without_rendering()
    assert all(legend.get_window_extent().y1 <= panel.get_window_extent().y0 for panel in figure.axes)
    assert {line.get_color() for panel in figure.axes for line in panel.get_lines() if line.get_label() == "vLLM"} == {
        plots.styles(["kvjax", "vLLM"])["vLLM"]["color"]
    }


def test_panels_that_no_dtype_needs_stay_empty(save, plots):
    dtypes = ("float32", "float16", "bfloat16", "nvfp4")
    file = contents(*(measurement("kvjax", count, dtype) for count in (1, 64) for dtype in dtypes))
    figure = plots.figure(*drawn_of(report_of(save(file))), plots.styles([]), "a title")
    assert len(figure.axes) == 12
    assert [panel.get_title() for panel in figure.axes if panel.get_title()] == [*dtypes]
    assert [panel.axison for panel in figure.axes] == [True] * 7 + [False] * 2 + [True] + [False] * 2


def test_axes_of_less_than_a_decade_have_plain_numbers(save, plots):
    times = {64: 35.2, 2_048: 187.0}
    file = contents(*(measurement("kvjax", count, us=us, copy_seconds=None) for count, us in times.items()))
    figure = plots.figure(*drawn_of(report_of(save(file))), plots.styles([]), "a title")
    figure.draw_without_rendering()
    labels = [text.get_text() for text in figure.axes[0].get_yticklabels(which="both")]
    assert {"50", "100"} <= {label for label in labels if label} <= {"10", "20", "50", "100", "200", "500"}


def test_no_two_peers_look_alike(plots):
    names = [f"peer {number}" for number in range(20)]
    looks = {tuple(style.items()) for style in plots.styles(["kvjax", *names, "kvjax"]).values()}
    assert len(looks) == 21
    assert plots.styles(names)["peer 0"] == plots.styles(["kvjax", *names])["peer 0"]


def run_program(*names: Path, **changes: object) -> int:
    with flagsaver.flagsaver(**{name: str(value) for name, value in changes.items()}):
        return report_program.main(["benchmarks.report", *map(str, names)])


@pytest.fixture(autouse=True)
def parsed_flags():
    if not report_program.flags.FLAGS.is_parsed():
        report_program.flags.FLAGS(["benchmarks.report"])


def test_pages_and_plots_are_written(save, tmp_path, plots, capsys):
    image = pytest.importorskip("PIL.Image")
    output, folder = tmp_path / "docs/page.md", tmp_path / "docs/plots"
    path = save(writes())
    assert run_program(path, output=output, plots=folder) == 0
    [plot] = folder.iterdir()
    assert "notes/benchmarks-nvidia-h200.md" in output.read_text().replace("\n", "")
    assert plot.name == "nvidia-h200-write-llama-3.1-8b.png"
    with image.open(plot) as drawn:
        drawn.load()
        assert drawn.format == "PNG"
        assert drawn.width == 1600
        assert len(drawn.convert("RGB").getcolors(1 << 20)) > 20
    assert "Software" not in drawn.info
    text = output.read_text()
    plot_link = "![write, llama-3.1-8b, NVIDIA H200](plots/nvidia-h200-write-llama-3.1-8b.png)"
    end = "```console\n$ python -m benchmarks.write\n```\n\ndriver 575.1, date 2026-11-21.\n"
    for part in (plot_link, end, "Share: of the rate of a copy"):
        assert part in text
    assert "unique_slots" not in text  # of a column that is not there
    assert rows_below(text, "above 1")[1] == ["bfloat16", "1", "10.0", "0.799 (50.0%)", "2.00x", "4.00x"]

    first = {path: path.read_bytes() for path in (plot, output)}
    (folder / "old.png").write_bytes(b"")
    capsys.readouterr()
    assert run_program(path, output=output, plots=folder) == 0
    assert {path: path.read_bytes() for path in first} == first
    assert "old.png" in capsys.readouterr().err


def attention() -> dict:
    """One row in two dtypes."""
    subject = {"operation": "attention", "case": "64x8192", "num_heads": 32, "num_seqs": 64, "seq_len": 8_192}
    subject |= {"q_len": 1, "slots": None, "copy_seconds": None, "error": 0.0021}
    times = {"bfloat16": {"read": 460.0, "kvjax": 495.0, "cuDNN": 484.0}, "nvfp4": {"read": 132.0, "kvjax": 200.0}}
    found = [
        measurement(peer, 64, dtype, us=us, **subject) | {"num_tokens": None}
        for dtype, by_peer in times.items()
        for peer, us in by_peer.items()
    ]
    return contents(*found, program="benchmarks.attention")


def test_attention_is_told_by_row_with_its_bars(save, tmp_path, plots, capsys):
    kernels, output = tmp_path / "kernels.md", tmp_path / "page.md"
    kernels.write_text("before\n<!-- attention: begin -->\nold\n<!-- attention: end -->\nafter\n")
    paths = save(writes()), save(attention(), "attention.json")
    assert run_program(*paths, output=output, plots=tmp_path / "plots", kernels=kernels) == 0
    text, page = kernels.read_text(), output.read_text()
    assert text.startswith("before\n<!-- attention: begin -->\nNVIDIA H200: driver 575.1, date 2026-11-21.\n\n```con")
    assert text.endswith("|\n<!-- attention: end -->\nafter\n")
    assert "Medians of 5 calls; clock CUPTI. 2 of 3 bars hold." in text
    header, *rows = rows_below(text, "times as fast kvjax is")
    short = rows_below(page, "### Attention decode")
    assert short == [
        ["sequences x tokens", "fastest other, bfloat16", "kvjax, bfloat16", "kvjax, fp8_e4m3", "kvjax, nvfp4"],
        ["64x8192", "cuDNN: 484.00", "495.00 (92.9%)", "-", "200.00 (66.0%)"],
    ]
    assert "[Every row, with its bars](kernels.md)." in page
    assert "## Attention" not in (tmp_path / "notes/benchmarks-nvidia-h200.md").read_text()
    assert [row[header.index("share")] for row in rows] == ["92.9%", "66.0%"]
    assert (tmp_path / "plots/nvidia-h200-attention.png").exists()

    assert run_program(*paths, output=output, plots=tmp_path / "plots") == 0
    notes = (tmp_path / "notes/benchmarks-nvidia-h200.md").read_text()
    assert rows_below(notes, "## Attention") == [header, *rows]
    assert rows_below(notes, "<summary>64x8192: 5 times", "Microseconds")[0] == ["dtype", "kvjax", "read", "cuDNN"]
    assert "GB/s (share):" not in notes[notes.index("<summary>64x8192") :]

    assert run_program(paths[0], output=output, plots=tmp_path / "plots", kernels=kernels) == 1
    assert capsys.readouterr().err == "error: no measurements of attention\n"
    assert kernels.read_text() == text


def test_names_are_shown_as_they_are(save, tmp_path, plots):
    odd = {"case": r"$a|b <c>\frac$"}
    file = contents(*(measurement(peer, count, **odd) for peer in ("kvjax", r"$\x|$") for count in (1, 64)))
    assert run_program(save(file), output=tmp_path / "page.md", plots=tmp_path / "plots") == 0
    page = (tmp_path / "notes/benchmarks-nvidia-h200.md").read_text()
    assert "<summary>$a\\|b &lt;c&gt;\\frac$: 4 times" in page
    assert rows_below(page, "Microseconds:")[0][2:] == ["kvjax", r"$\x\|$"]
    assert [plot.name for plot in (tmp_path / "plots").iterdir()] == ["nvidia-h200-write-a-b-c-frac.png"]


def broken(*path: object, **changes: object) -> dict:
    """The file with other fields at a place; `...` stands for a field that is missing."""
    file = at = writes()
    for step in path:
        at = at[step]
    at |= changes
    for name in [name for name, value in changes.items() if value is ...]:
        del at[name]
    return file


SECOND = "measurements", 1


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("{", "write.json: not as a benchmark run writes it: Expecting property name"),
        ("[" * 100_000, "write.json: not as a benchmark run writes it: "),
        ([], "write.json: not as a benchmark run writes it: "),
        (broken(schema=...), "write.json: 'schema' is missing"),
        (broken(schema=2), "write.json: not as a benchmark run writes it: schema: got 2, expected 1"),
        (broken("environment", device=...), "write.json: 'device' is missing"),
        (broken(measurements=[]), "no measurements in "),
        (broken(*SECOND, peer=...), "write.json: measurements[1]: 'peer' is missing"),
        (broken(*SECOND, operation="wrote"), "operation: got 'wrote', expected one of ['attention', 'ragged att"),
        (broken(*SECOND, clock="sun"), "measurements[1]: not as a benchmark run writes it: 'sun' is not a valid Clock"),
        (broken(*SECOND, samples=[]), "samples: got [], expected the seconds of each repetition"),
        (broken(*SECOND, samples=[1.0, float("nan")]), "samples: got [1.0, nan], expected the seconds of"),
        (broken(measurements=[measurement("kvjax", 1)] * 2), "measurements[1]: NVIDIA H200 has a measurement of the"),
    ],
    ids=lambda value: value[-40:] if isinstance(value, str) else "",
)
def test_a_file_that_cannot_be_reported_is_named_with_what_is_wrong(save, file, message):
    with pytest.raises(ResultsError, match=re.escape(message)):
        results.read([save(file)])


def test_files_that_do_not_go_together(save, tmp_path, capsys):
    one, two = save(writes()), save(writes(), "again.json")
    assert run_program(one, two) == 1
    both = (
        rf"{two}: measurements\[0\]: NVIDIA H200 has .* already, {one}: measurements\[0\] \(write, .*, by CUPTI\); exp"
    )
    assert re.match(f"error: {both}", capsys.readouterr().err)
    assert run_program() == 1
    assert capsys.readouterr().err == "error: expected JSON files of benchmark runs, got none\n"
    assert run_program(tmp_path) == 1
    assert "Is a directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    [
        "no markers",
        "<!-- attention: begin -->\n",
        "<!-- attention: end -->\n<!-- attention: begin -->\n",
        "<!-- attention: begin -->\n<!-- attention: end -->\n" * 2,
    ],
)
def test_nothing_is_written_where_a_page_has_no_place_for_attention(save, tmp_path, plots, capsys, text):
    kernels, output = tmp_path / "kernels.md", tmp_path / "docs/page.md"
    kernels.write_text(text)
    assert run_program(save(attention()), output=output, plots=tmp_path / "docs/plots", kernels=kernels) == 1
    assert "expected one line <!-- attention: begin -->, and below it one" in capsys.readouterr().err
    assert kernels.read_text() == text
    assert not output.parent.exists()
