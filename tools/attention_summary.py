"""Makes README's table and plot of decode attention from the measurements in docs/notes/benchmarks-attention.md.

python tools/attention_summary.py
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

import kvjax

ROOT = Path(__file__).parents[1]
MEASURED = ROOT / "docs/notes/benchmarks-attention.md"
README = ROOT / "README.md"
PLOT = ROOT / "docs/plots/nvidia-h200-attention.svg"

BEGIN, END = "<!-- attention: begin -->\n", "<!-- attention: end -->\n"

TABLE_ROW = "64x8192"
PLOT_ROWS = ("64x8192", "64x4096", "64x2048", "256x1024", "8x8192", "1x8192")
"""Sequences x tokens of each; these have a measurement of cuDNN."""

DTYPES = {"bfloat16": ("#56B4E9", "#222222"), "fp8_e4m3": ("#0072B2", "#ffffff"), "nvfp4": ("#D55E00", "#ffffff")}
"""Bars in this order: their colors, Okabe and Ito's, and those of the numbers on them."""

BAR_WIDTH = 0.28

NUM_LAYERS, BUDGET = 32, 40 * 2**30

type Row = Mapping[str, str]


def main() -> None:
    """Rewrites both in place."""
    page = MEASURED.read_text()
    before, rest = README.read_text().split(BEGIN)
    _, after = rest.split(END)
    README.write_text(f"{before}{BEGIN}{table(page)}{END}{after}")
    PLOT.write_text(plot(page))


def measurements(page: str) -> tuple[str, Mapping[tuple[str, str], Row]]:
    """What the rows were measured with, and the rows by their name and dtype."""
    section = page.split(BEGIN)[1].split(END)[0]
    header, _, *rows = (_cells(line) for line in section.splitlines() if line.startswith("|"))
    named = [dict(zip(header, row, strict=True)) for row in rows]
    return section.splitlines()[0], {(row["row"], row["dtype"]): row for row in named}


def table(page: str) -> str:
    """The times of one row, those of the fastest others, and what each dtype leaves room for."""
    source, rows = measurements(page)
    lines = [
        "| | dtype | microseconds | tokens of context in 40 GiB, 32 layers |",
        "| --- | --- | ---: | ---: |",
    ]
    for number, dtype in enumerate(reversed(DTYPES)):
        name = "" if number else "`kvjax.paged_attention`"
        lines.append(f"| {name} | {dtype} | {float(rows[TABLE_ROW, dtype]['us']):.0f} | {_max_tokens(dtype):,} |")
    names = {"cuDNN": "cuDNN, dense keys and values"}
    for dtype in reversed(DTYPES):
        row = rows[TABLE_ROW, dtype]
        if row["next best"] == "-":
            continue
        name = names.get(row["next best"], row["next best"])
        lines.append(f"| {name} | {dtype} | {float(row['its us']):.0f} | {_max_tokens(dtype):,} |")
    return "\n".join([*lines, "", source, ""])


def plot(page: str) -> str:
    """An SVG of how many times as fast as cuDNN each dtype is in each row; its text is text."""
    source, rows = measurements(page)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "kvjax"}):
        figure = Figure(figsize=(9, 4), layout="constrained")
        axes = figure.add_subplot()
        for number, (dtype, (color, label_color)) in enumerate(DTYPES.items()):
            heights = [_times_as_fast(rows, name, dtype) for name in PLOT_ROWS]
            x = [row + (number - 1) * BAR_WIDTH for row in range(len(PLOT_ROWS))]
            bars = axes.bar(x, heights, 0.94 * BAR_WIDTH, color=color, label=f"kvjax, {dtype}")
            axes.bar_label(bars, fmt="{:.2f}", padding=-14, fontsize=9, color=label_color)
        axes.axhline(1, color="#222222", linewidth=1)
        axes.set_xticks(range(len(PLOT_ROWS)), [_row_label(name) for name in PLOT_ROWS])
        axes.set_yticks(range(4), [f"{times}x" for times in range(4)])
        axes.set_title("Decode attention: times as fast as cuDNN on dense bfloat16 keys and values", loc="left")
        axes.set_xlabel(f"32 query heads over 8 KV heads of 128. {source}", fontsize=8)
        axes.legend(ncols=len(DTYPES), frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
        svg = io.StringIO()
        figure.savefig(svg, format="svg", metadata={"Date": None})
    return svg.getvalue()


def _row_label(name: str) -> str:
    sequences, tokens = map(int, name.split("x"))
    return f"{sequences} sequence{'s' if sequences > 1 else ''}\nof {tokens:,} tokens"


def _cells(line: str) -> Sequence[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]


def _times_as_fast(rows: Mapping[tuple[str, str], Row], name: str, dtype: str) -> float:
    dense = rows[name, "bfloat16"]
    if dense["next best"] != "cuDNN":
        raise ValueError(f"{name}: the fastest other in bfloat16 is {dense['next best']!r}, expected 'cuDNN'")
    return float(dense["its us"]) / float(rows[name, dtype]["us"])


def _max_tokens(dtype: str) -> int:
    spec = kvjax.FullAttentionSpec(16, 8, 128, dtype=kvjax.parse_kv_cache_dtype(dtype))
    return kvjax.max_tokens([spec] * NUM_LAYERS, BUDGET)


if __name__ == "__main__":
    main()
