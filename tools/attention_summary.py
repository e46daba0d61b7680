"""Makes README's table and plot of decode attention from the measurements in docs/kernels.md.

python tools/attention_summary.py
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import kvjax

ROOT = Path(__file__).parents[1]
MEASURED = ROOT / "docs/kernels.md"
README = ROOT / "README.md"
PLOT = ROOT / "docs/plots/nvidia-h200-attention.svg"

BEGIN, END = "<!-- attention: begin -->\n", "<!-- attention: end -->\n"

TABLE_ROW = "64x8192"
PLOT_ROWS = ("64x8192", "64x4096", "64x2048", "256x1024", "8x8192", "1x8192")
"""Sequences x tokens of each; these have a measurement of cuDNN."""

DTYPES = {"bfloat16": "#56B4E9", "fp8_e4m3": "#0072B2", "nvfp4": "#D55E00"}
"""Bars in this order, of Okabe and Ito's colours, which people with any colour vision tell apart."""

INK = {"bfloat16": "#222222", "fp8_e4m3": "#ffffff", "nvfp4": "#ffffff"}
"""Colours of the numbers on them."""

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
    """The times of one row, and what each dtype leaves room for."""
    source, rows = measurements(page)
    lines = [
        "| | dtype | microseconds | tokens of context in 40 GiB, 32 layers |",
        "| --- | --- | ---: | ---: |",
    ]
    for number, dtype in enumerate(reversed(DTYPES)):
        name = "" if number else "`kvjax.paged_attention`"
        lines.append(f"| {name} | {dtype} | {float(rows[TABLE_ROW, dtype]['us']):.0f} | {_max_tokens(dtype):,} |")
    cudnn = float(rows[TABLE_ROW, "bfloat16"]["bf16 us"])
    lines.append(f"| cuDNN, dense keys and values | bfloat16 | {cudnn:.0f} | {_max_tokens('bfloat16'):,} |")
    return "\n".join([*lines, "", source, ""])


def plot(page: str) -> str:
    """An SVG of how many times as fast as cuDNN each dtype is in each row."""
    source, rows = measurements(page)
    left, top, bottom, group, bar = 52, 64, 274, 116, 32
    per_unit = (bottom - top) / 3
    right = left + group * len(PLOT_ROWS)
    width, height = right + 16, 344
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        _text(left, 20, "Decode attention: times as fast as cuDNN on dense bfloat16 keys and values", size=14),
    ]
    for number, (dtype, colour) in enumerate(DTYPES.items()):
        x = left + 150 * number
        parts += [
            f'<rect x="{x}" y="32" width="12" height="12" fill="{colour}"/>',
            _text(x + 18, 42, f"kvjax, {dtype}"),
        ]
    for unit in range(4):
        y = bottom - per_unit * unit
        parts += [
            _line(left, right, y, "#222222" if unit == 1 else "#dddddd"),
            _text(left - 8, y + 4, f"{unit}x", anchor="end"),
        ]
    for number, name in enumerate(PLOT_ROWS):
        start = left + group * number + (group - bar * len(DTYPES)) / 2
        for place, (dtype, colour) in enumerate(DTYPES.items()):
            times = _times_as_fast(rows[name, dtype])
            x, y = start + bar * place, bottom - per_unit * times
            parts += [
                f'<rect x="{x:g}" y="{y:.1f}" width="{bar - 2}" height="{bottom - y:.1f}" fill="{colour}"/>',
                _text(x + bar / 2 - 1, y + 14, f"{times:.2f}", anchor="middle", size=11, colour=INK[dtype]),
            ]
        sequences, tokens = map(int, name.split("x"))
        middle = left + group * (number + 0.5)
        plural = "s" if sequences > 1 else ""
        parts += [
            _text(middle, bottom + 18, f"{sequences} sequence{plural}", anchor="middle"),
            _text(middle, bottom + 34, f"of {tokens:,} tokens", anchor="middle"),
        ]
    parts += [
        _text(left, height - 12, f"32 query heads over 8 KV heads of 128. {source}", size=11),
        "</svg>",
    ]
    return "\n".join([*parts, ""])


def _cells(line: str) -> Sequence[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]


def _times_as_fast(row: Row) -> float:
    if row["fastest bf16"] != "cuDNN":
        raise ValueError(f"{row['row']}: the fastest in bfloat16 is {row['fastest bf16']!r}, expected 'cuDNN'")
    return float(row["times as fast"])


def _max_tokens(dtype: str) -> int:
    spec = kvjax.FullAttentionSpec(16, 8, 128, dtype=kvjax.parse_kv_cache_dtype(dtype))
    return kvjax.max_tokens([spec] * NUM_LAYERS, BUDGET)


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 12, colour: str = "#222222") -> str:
    position = f'x="{x:g}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {position} font-size="{size}" fill="{colour}">{text}</text>'


def _line(x1: float, x2: float, y: float, colour: str) -> str:
    return f'<line x1="{x1:g}" x2="{x2:g}" y1="{y:g}" y2="{y:g}" stroke="{colour}"/>'


if __name__ == "__main__":
    main()
