"""Draws the plots of README and docs/benchmarks.md, and updates README's table of attention.

Run `python -m benchmarks.plots attention.json serve.json write.json` with the files of these programs from one GPU. A
file may be left out, and so is its plot.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

import kvjax
from benchmarks import bars, shapes
from benchmarks.measurement import OWN, Rows, read
from benchmarks.tables import grouped

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- attention: begin -->\n", "<!-- attention: end -->\n"

TABLE_ROW = "64x8192"
ROWS = ("64x8192", "64x4096", "64x2048", "256x1024", "8x8192", "1x8192")
"""Sequences x tokens of each; these have a measurement of cuDNN."""

CUDNN = "cuDNN"
NAMES = {CUDNN: "cuDNN, dense keys and values"}
NUM_LAYERS, BUDGET = 32, 40 << 30

COLOURS = {bars.BFLOAT16: "#56B4E9", bars.FP8: "#0072B2", bars.NVFP4: "#D55E00"}
PEER_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000", "#882255", "#999933")
"""Colour-blind-safe colours: Okabe and Ito's, and two of Tol's."""

MARKERS = "os^DvPX<*>"


def source(environment: Mapping[str, str]) -> str:
    """Returns what was measured with."""
    names = [name for name in ("driver", "jax", "torch", "flashinfer", "commit", "date") if name in environment]
    return f"{environment['device']}: {', '.join(f'{name} {environment[name]}' for name in names)}."


def table(environment: Mapping[str, str], rows: Rows) -> str:
    """Returns README's table: the times of one row, the fastest others, and what each dtype leaves room for."""
    lines = ["| | dtype | microseconds | tokens of context in 40 GiB, 32 layers |", "| --- | --- | ---: | ---: |"]
    dtypes = [*reversed(COLOURS)]
    own = [rows.find(OWN, case=TABLE_ROW, dtype=dtype).fastest for dtype in dtypes]
    others = [
        Rows(m for m in rows.find(case=TABLE_ROW, dtype=dtype) if not m.peer.startswith(OWN) and m.peer != bars.READ)
        for dtype in dtypes
    ]
    for m in filter(None, [*own, *(each.fastest for each in others)]):
        name = ("`kvjax.paged_attention`" if m is own[0] else "") if m.peer == OWN else NAMES.get(m.peer, m.peer)
        spec = kvjax.FullAttentionSpec(16, 8, 128, dtype=kvjax.parse_kv_cache_dtype(m.dtype))
        room = kvjax.max_tokens([spec] * NUM_LAYERS, BUDGET)
        lines.append(f"| {name} | {m.dtype} | {m.seconds * 1e6:.0f} | {room:,} |")
    return "\n".join([*lines, "", source(environment), ""])


def draw_attention(figure: Figure, environment: Mapping[str, str], rows: Rows) -> None:
    """Draws how many times as fast as cuDNN each dtype is in each row."""
    axes, width = figure.add_subplot(), 0.28
    dense = [rows.find(CUDNN, case=name)[0].seconds for name in ROWS]
    for number, (dtype, colour) in enumerate(COLOURS.items()):
        heights = [it / rows.find(OWN, case=name, dtype=dtype)[0].seconds for it, name in zip(dense, ROWS, strict=True)]
        x = [row + (number - 1) * width for row in range(len(ROWS))]
        drawn = axes.bar(x, heights, 0.94 * width, color=colour, label=f"kvjax, {dtype}")
        axes.bar_label(drawn, fmt="{:.2f}", padding=-14, fontsize=9, color="#222222" if number == 0 else "#ffffff")
    axes.axhline(1, color="#222222", linewidth=1)
    sizes = [[int(number) for number in name.split("x")] for name in ROWS]
    labels = [f"{count} sequence{'s' if count > 1 else ''}\nof {tokens:,} tokens" for count, tokens in sizes]
    axes.set_xticks(range(len(ROWS)), labels)
    axes.set_title("Decode attention: times as fast as cuDNN on dense bfloat16 keys and values", loc="left")
    axes.set_xlabel(f"32 query heads over 8 KV heads of 128. {source(environment)}", fontsize=8)
    axes.legend(ncols=len(COLOURS), frameon=False)


def draw_serve(figure: Figure, environment: Mapping[str, str], rows: Rows) -> None:
    """Draws one device's tokens a second against the number of sequences."""
    axes = figure.add_subplot()
    lines = grouped((m for m in rows if m.subject.get("devices", 1) == 1), lambda m: (m.peer, m.dtype))
    peers = [*dict.fromkeys(peer for peer, _ in lines)]
    for (peer, dtype), line in lines.items():
        line.sort(key=lambda m: m.subject["num_seqs"])
        style: Any = {"color": COLOURS[dtype], "marker": MARKERS[peers.index(peer)], "label": f"{peer}, {dtype}"}
        numbers = [m.subject["num_seqs"] for m in line]
        axes.plot(numbers, [*map(bars.tokens_a_second, line)], linestyle="-" if peer == OWN else "--", **style)
    axes.set_title("Decode steps of Llama-3.1-8B's shape: tokens a second", loc="left")
    axes.set_xlabel(f"sequences of 8,192 tokens. {source(environment)}", fontsize=8)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.legend(fontsize=8, frameon=False)


def draw_write(figure: Figure, environment: Mapping[str, str], rows: Rows) -> None:
    """Draws times against the number of tokens, a panel for each dtype."""
    rows = rows.find(case=shapes.LLAMA_8B.name, layout="NHD", slots=shapes.Slots.SCATTERED.value)
    peers = [*dict.fromkeys(m.peer for m in rows)]
    for axes, dtype in zip(figure.subplots(1, len(COLOURS), sharey=True), COLOURS, strict=True):
        for peer, line in grouped(rows.find(dtype=dtype), lambda m: m.peer).items():
            line.sort(key=lambda m: m.subject["num_tokens"])
            number = peers.index(peer)
            style: Any = {"color": PEER_COLOURS[number % len(PEER_COLOURS)], "marker": MARKERS[number % len(MARKERS)]}
            numbers = [m.subject["num_tokens"] for m in line]
            axes.loglog(numbers, [m.seconds * 1e6 for m in line], label=peer, markersize=4, **style)
        axes.set_title(dtype, fontsize="medium")
        axes.set_xlabel("tokens")
    figure.axes[0].set_ylabel("microseconds")
    figure.suptitle(f"Writes, 8 KV heads of 128. {source(environment)}", fontsize=9)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, fontsize=8)


SETTINGS: Any = {"svg.fonttype": "none", "svg.hashsalt": "kvjax"}
SETTINGS |= dict.fromkeys(("axes.spines.top", "axes.spines.right"), False)
DRAWN = {"attention": (draw_attention, (9, 4)), "serve": (draw_serve, (8, 4.5)), "write": (draw_write, (10, 4.5))}
"""What draws an operation, and the size of its figure."""


def main(paths: Sequence[str], root: Path = ROOT) -> None:
    """Writes docs/plots/<device>-<operation>.svg for each file, and README's table from that of attention."""
    if not paths:
        raise SystemExit(f"expected JSON files of {', '.join(DRAWN)}, got none")
    for path in paths:
        environment, rows = read(Path(path))
        rows = Rows(m for m in rows if m.operation in DRAWN)
        device = environment["device"].lower().replace(" ", "-")
        for operation, some in grouped(rows, lambda m: m.operation).items():
            with matplotlib.rc_context(SETTINGS):
                draw, size = DRAWN[operation]
                draw(figure := Figure(figsize=size, layout="constrained"), environment, some)
                figure.savefig(root / f"docs/plots/{device}-{operation}.svg", metadata={"Date": None})
            if operation == "attention":
                readme = root / "README.md"
                before, rest = readme.read_text().split(BEGIN)
                _, after = rest.split(END)
                readme.write_text(f"{before}{BEGIN}{table(environment, some)}{END}{after}")


if __name__ == "__main__":
    main(sys.argv[1:])
