"""Plots times against a size, with one panel per dtype and one line per peer."""

from __future__ import annotations

import contextlib
import io
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator
from PIL import Image

from benchmarks import bars
from benchmarks.measurement import OWN, Measurement, Rows, Word
from benchmarks.tables import Operation, grouped, heading, peers, values

OWN_COLOUR, COPY_COLOUR = "#0072B2", "#808080"
COLOURS = ("#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000", "#882255", "#999933")
"""Colour-blind-safe colours that are visible on white: Okabe and Ito's, and two of Tol's."""

OWN_MARKER, MARKERS = "o", ("s", "^", "D", "v", "P", "X", "<", "*", ">", "h", "p")

COPY_LABEL = "copy of as many bytes"


PANELS_ACROSS = 3
WIDTH_INCHES, PANEL_INCHES, MARGIN_INCHES = 10.0, 2.3, 1.1
DOTS_AN_INCH, NUM_COLOURS = 160, 256

FEW_SIZES = 4  # up to this many sizes, every size has a tick
FEW_DECADES = 100.0  # below this ratio of largest to smallest time, ticks are not limited to powers of ten

type Style = Mapping[str, str]


def styles(peers: Iterable[str]) -> dict[str, Style]:
    """Returns the line style of each peer. Colours repeat with dashed lines and other markers."""
    styles: dict[str, Style] = {OWN: {"color": OWN_COLOUR, "marker": OWN_MARKER, "linestyle": "-"}}
    others = [peer for peer in dict.fromkeys(peers) if peer != OWN]
    for number, peer in enumerate(others):
        styles[peer] = {
            "color": COLOURS[number % len(COLOURS)],
            "marker": MARKERS[number % len(MARKERS)],
            "linestyle": "-" if number < len(COLOURS) else "--",
        }
    return styles


def figure(of: Operation, rows: Rows, style: Mapping[str, Style], title: str) -> Figure:
    """Plots an operation: one case, or all cases for attention and serving."""
    with _own_settings():
        if of.name == "attention":
            return _rows_of_attention(rows, title)
        return _rates(rows, title) if of.name == "serve" else _sizes(of, rows, style, title)


def _sizes(of: Operation, rows: Rows, style: Mapping[str, Style], title: str) -> Figure:
    """Plots times against a size and, below them, the share of the copy rate if copies were measured."""
    has_copies = any(each.copy for each in rows)
    kinds = (_draw_times, _draw_shares) if has_copies else (_draw_times,)
    bands = [*itertools.batched(values(rows, "dtype"), PANELS_ACROSS)]
    down, across = len(bands) * len(kinds), len(bands[0])
    made = Figure(figsize=(WIDTH_INCHES, MARGIN_INCHES + PANEL_INCHES * down), layout="constrained")
    made.suptitle(title, fontsize=11)
    panels = made.subplots(down, across, squeeze=False, sharex=True)
    for row, column in itertools.product(range(down), range(across)):
        panel, band, kind = panels[row, column], bands[row // len(kinds)], row % len(kinds)
        if column >= len(band):
            panel.set_axis_off()
            continue
        if (row, column) != (kind, 0):
            panel.sharey(panels[kind, 0])
        kinds[kind](panel, of, _lines(of, rows, band[column]), style)
        panel.set_xscale("log")
        panel.set_xlabel(heading(of.against or "") if kind == len(kinds) - 1 else "")
        panel.set_ylabel(panel.get_ylabel() if column == 0 else "")
        panel.tick_params(labelleft=column == 0, labelbottom=kind == len(kinds) - 1)
        if kind == 0 and band[column] is not None:
            panel.set_title(str(band[column]), fontsize="medium")
    _set_ticks(panels[0, 0], sorted({_size(of, each) for each in rows}))
    if has_copies:
        panels[1, 0].set_ylim(bottom=0.0)
    _add_legend(made, [*style, COPY_LABEL])
    return made


def _size(of: Operation, m: Measurement) -> int:
    return int(m.subject[of.against or ""])


def _lines(of: Operation, rows: Rows, dtype: Word | None) -> list[list[Measurement]]:
    """Returns one line per peer for a dtype, sorted by size."""
    found = Rows(each for each in rows if each.subject.get("dtype") == dtype)
    return [sorted(found.find(peer), key=lambda each: _size(of, each)) for peer in peers(found)]


def _rows_of_attention(rows: Rows, title: str) -> Figure:
    """Plots a group of bars per row: one for each dtype of kvjax, and one for the fastest bfloat16 alternative."""
    cases = [*dict.fromkeys(str(each.subject["case"]) for each in rows)]
    own = grouped((each for each in rows if each.peer == OWN), lambda each: each.dtype)
    others = [each for each in rows.find(dtype=bars.BFLOAT16) if each.peer not in (OWN, "kvjax xla", bars.READ)]
    fastest = {str(each.subject["case"]): each for each in sorted(others, key=lambda each: -each.seconds)}
    names = ", ".join(dict.fromkeys(each.peer for each in fastest.values()))
    times = {f"kvjax, {dtype}": {str(m.subject["case"]): m for m in found} for dtype, found in own.items()}
    if fastest:
        times = {f"{names}, bfloat16": fastest, **times}
    made = Figure(figsize=(WIDTH_INCHES, MARGIN_INCHES + 1.6 * PANEL_INCHES), layout="constrained")
    made.suptitle(title, fontsize=11)
    panel, width = made.subplots(), 0.8 / len(times)
    for number, ((label, found), colour) in enumerate(
        zip(times.items(), ([COPY_COLOUR] if fastest else []) + [OWN_COLOUR, *COLOURS], strict=False)
    ):
        places = [cases.index(case) + (number - (len(times) - 1) / 2) * width for case in found]
        panel.bar(places, [each.seconds * 1e6 for each in found.values()], width, label=label, color=colour)
    panel.set_ylabel("microseconds")
    panel.set_xticks(range(len(cases)), cases, rotation=30, ha="right", fontsize=8)
    made.legend(loc="outside lower center", ncols=4)
    return made


def _rates(rows: Rows, title: str) -> Figure:
    """Plots tokens per second against the number of sequences, with one line per dtype and peer."""
    lines = grouped(rows, lambda each: (each.peer, each.dtype))
    dtypes = [*dict.fromkeys(dtype for _, dtype in lines)]
    others = [*dict.fromkeys(peer for peer, _ in lines if peer != OWN)]
    made = Figure(figsize=(WIDTH_INCHES * 0.7, MARGIN_INCHES + 1.4 * PANEL_INCHES), layout="constrained")
    made.suptitle(title, fontsize=11)
    panel = made.subplots()
    for (peer, dtype), line in lines.items():
        line.sort(key=lambda each: each.subject["num_seqs"])
        panel.plot(
            [int(each.subject["num_seqs"]) for each in line],
            [bars.tokens_a_second(each) for each in line],
            label=f"{peer}, {dtype}",
            color=(OWN_COLOUR, *COLOURS)[dtypes.index(dtype)],
            marker=OWN_MARKER if peer == OWN else MARKERS[others.index(peer)],
            linestyle="-" if peer == OWN else "--",
        )
    panel.set_xlabel("sequences")
    panel.set_ylabel("tokens a second")
    panel.set_xlim(left=0)
    panel.set_ylim(bottom=0)
    panel.yaxis.set_major_formatter(FuncFormatter(_short))
    made.legend(loc="outside lower center", ncols=3)
    return made


def save(figure: Figure, path: Path) -> None:
    """Writes a PNG without date and version metadata. The reduced palette makes the file two thirds smaller."""
    drawn = io.BytesIO()
    with _own_settings():
        figure.savefig(drawn, format="png", dpi=DOTS_AN_INCH)
    with Image.open(drawn) as image:
        image.convert("RGB").quantize(NUM_COLOURS, dither=Image.Dither.NONE).save(path, format="png", optimize=True)


@contextlib.contextmanager
def _own_settings() -> Iterator[None]:
    """Applies matplotlib's defaults and our settings, ignoring the user's configuration files."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(
            {
                "text.parse_math": False,
                "axes.grid": True,
                "grid.alpha": 0.3,
                "axes.spines.top": False,
                "axes.spines.right": False,
            }
        )
        yield


def _draw_times(panel: Axes, of: Operation, lines: list[list[Measurement]], style: Mapping[str, Style]) -> None:
    panel.set_yscale("log")
    panel.set_ylabel("microseconds")
    copies: dict[int, float] = {}
    for line in lines:
        sizes = [_size(of, each) for each in line]
        low, high = ([bound * 1e6 for bound in bounds] for bounds in zip(*(m.times.spread for m in line), strict=True))
        panel.fill_between(sizes, low, high, color=style[line[0].peer]["color"], alpha=0.15, linewidth=0)
        _plot(panel, sizes, [each.seconds * 1e6 for each in line], line[0].peer, style)
        copies |= {size: each.copy.seconds * 1e6 for size, each in zip(sizes, line, strict=True) if each.copy}
    if copies:
        times = [copies[size] for size in sorted(copies)]
        panel.plot(sorted(copies), times, color=COPY_COLOUR, linestyle=":", label=COPY_LABEL)


def _draw_shares(panel: Axes, of: Operation, lines: list[list[Measurement]], style: Mapping[str, Style]) -> None:
    panel.set_ylabel("share of the copy's rate")
    panel.yaxis.set_major_formatter(FuncFormatter(_percent))
    for line in lines:
        found = [each for each in line if each.copy]
        _plot(panel, [_size(of, m) for m in found], [m.copy_share or 0.0 for m in found], line[0].peer, style)


def _plot(panel: Axes, sizes: Sequence[int], heights: Sequence[float], peer: str, style: Mapping[str, Style]) -> None:
    own = peer == OWN
    panel.plot(
        sizes,
        heights,
        label=peer,
        linewidth=2.2 if own else 1.2,
        markersize=5.5 if own else 4.5,
        zorder=3 if own else 2,
        **style[peer],  # type: ignore[arg-type]
    )


def _set_ticks(times: Axes, sizes: Sequence[int]) -> None:
    """Sets the ticks of all panels, which share their axes with `times`."""
    few = len(sizes) <= FEW_SIZES and sizes[-1] < 1e6
    times.xaxis.set_major_locator(FixedLocator(sizes) if few else _powers(*times.get_xlim()))
    times.xaxis.set_minor_locator(NullLocator())
    times.xaxis.set_major_formatter(FuncFormatter(_short))
    times.yaxis.set_major_locator(_powers(*times.get_ylim()))
    times.yaxis.set_major_formatter(FuncFormatter(_short))
    times.yaxis.set_minor_formatter(NullFormatter())


def _powers(low: float, high: float) -> LogLocator:
    return LogLocator() if high / low > FEW_DECADES else LogLocator(subs=(1.0, 2.0, 5.0))


def _short(value: float, _: int) -> str:
    for power, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= max(power, 1e4) and (value % power == 0 or value >= 1e6):
            return f"{value / power:.4g}{letter}"
    return f"{value:,.10g}"


def _percent(value: float, _: int) -> str:
    return f"{value * 100:.3g}%"


def _add_legend(figure: Figure, order: Sequence[str]) -> None:
    lines = {str(line.get_label()): line for panel in figure.axes for line in panel.get_lines()}
    shown = [name for name in order if name in lines]
    figure.legend([lines[name] for name in shown], shown, loc="outside lower center", ncols=min(len(shown), 5))
