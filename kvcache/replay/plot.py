"""Draw hit rate over capacity: a line per policy, the offline optimum as ceiling, the unbounded cache as rim."""

from __future__ import annotations

import html
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcache.replay.grid import OPTIMUM

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from kvcache.replay.grid import Cell

PLOT_SUFFIXES = (".png", ".svg", ".html")

# Okabe & Ito's colours without yellow, which is lost on white; told apart by the colour-blind, too.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = "osD^vPX"
_INK = "#333333"
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; color: #333; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }}
svg {{ max-width: 100%; height: auto; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
th, td {{ padding: .25rem .9rem; text-align: right; border-bottom: 1px solid #ddd; }}
</style>
</head>
<body>
<h1>{title}</h1>
{figure}
<table>
<tr><th>blocks</th>{heads}</tr>
{rows}
</table>
<p>{footnote}</p>
</body>
</html>
"""


@dataclass(frozen=True, slots=True)
class Chart:
    """What a drawing shows.

    Parameters
    ----------
    title : str
        Its heading.
    cells : sequence of Cell
        Policies at capacities.
    unbounded : Cell
        The cache without limit.
    block_bytes : int or None
        Bytes of one block, for the second axis; None: not known, and no such axis.
    footnote : str
        How the figures came about.
    """

    title: str
    cells: Sequence[Cell]
    unbounded: Cell
    block_bytes: int | None
    footnote: str


def check_plot_target(target: str) -> None:
    """Raise if nothing can be drawn into a file of this name.

    Raises
    ------
    ValueError
        The suffix is not one of `PLOT_SUFFIXES`, or matplotlib is not installed.
    """
    if Path(target).suffix.lower() not in PLOT_SUFFIXES:
        raise ValueError(f"--plot must end in {', '.join(PLOT_SUFFIXES)}, got {target!r}")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ValueError("--plot needs matplotlib: install kvcache's extra 'plot'") from None


def draw(chart: Chart, target: str) -> None:
    """Draw `chart` into a PNG, SVG or self-contained HTML file, by the file's suffix."""
    figure = _figure(chart)
    suffix = Path(target).suffix.lower()
    if suffix == ".html":
        svg = io.StringIO()
        figure.savefig(svg, format="svg", metadata={"Date": None})
        Path(target).write_text(_page(chart, svg.getvalue()), encoding="utf-8")
    else:
        # Without a date the same figures give the same file.
        figure.savefig(target, format=suffix[1:], dpi=160, metadata={"Date": None} if suffix == ".svg" else None)


def _lines(chart: Chart) -> dict[str, list[Cell]]:
    lines: dict[str, list[Cell]] = {}
    for cell in chart.cells:
        lines.setdefault(cell.policy, []).append(cell)
    return lines


def _figure(chart: Chart) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, NullLocator, PercentFormatter

    figure = Figure(figsize=(8.4, 5.2), layout="constrained")
    figure.get_layout_engine().set(rect=(0.01, 0.01, 0.97, 0.98))  # type: ignore[union-attr, call-arg]
    axes = figure.subplots()
    capacities = sorted({cell.num_blocks for cell in chart.cells if cell.num_blocks is not None})
    rim = chart.unbounded.block_hit_rate
    lines = _lines(chart)

    ceiling = lines.pop(OPTIMUM, None)
    if ceiling is not None:
        xs, ys = _points(ceiling)
        style: dict[str, Any] = {"color": _INK, "linestyle": (0, (5, 2)), "linewidth": 1.6}
        if len(xs) == 1:
            style |= {"marker": "_", "markersize": 16}
        axes.plot(xs, ys, label="optimum (knows the future)", **style)
        axes.fill_between(xs, ys, 1.0, color="#EDEDED", linewidth=0, zorder=0)
    for i, (policy, cells) in enumerate(lines.items()):
        xs, ys = _points(cells)
        style = {"color": _COLOURS[i % len(_COLOURS)], "marker": _MARKERS[i % len(_MARKERS)]}
        axes.plot(xs, ys, linewidth=2, markersize=5.5, label=policy, clip_on=False, zorder=3, **style)
    axes.axhline(rim, color=_INK, linestyle=":", linewidth=1.2)
    axes.annotate(
        f"unbounded cache: {rim:.1%}",
        (0.015, rim),
        xycoords=("axes fraction", "data"),
        xytext=(0, 4),
        textcoords="offset points",
        color=_INK,
        fontsize=9,
    )

    axes.set_xscale("log")
    if len(capacities) > 1:
        axes.set_xlim(capacities[0], capacities[-1])
    else:
        axes.set_xlim(capacities[0] / 2, capacities[0] * 2)
    ticks = _thinned(capacities)
    axes.set_xticks(ticks)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda blocks, _: _short(blocks)))
    axes.set_ylim(0, max(rim * 1.12, 0.01))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0 if rim > 0.05 else 1))
    axes.set_xlabel("capacity, blocks")
    axes.set_ylabel("blocks hit, as a leading run")
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines["right"].set_visible(False)
    if chart.block_bytes is None:
        axes.spines["top"].set_visible(False)
    else:
        bytes_axis = axes.secondary_xaxis("top")
        bytes_axis.set_xticks(ticks, [_short_bytes(blocks * chart.block_bytes) for blocks in ticks])
        bytes_axis.xaxis.set_minor_locator(NullLocator())
        bytes_axis.set_xlabel(f"memory at {_short_bytes(chart.block_bytes)} a block", fontsize=9)
        bytes_axis.tick_params(labelsize=9)
    axes.legend(loc="best", frameon=True, framealpha=0.9, edgecolor="none")
    figure.suptitle(chart.title, x=0.01, ha="left", fontsize=12, fontweight="bold", parse_math=False)
    figure.supxlabel(chart.footnote, x=0.01, ha="left", fontsize=8, color="#666666", parse_math=False)
    return figure


def _points(cells: Sequence[Cell]) -> tuple[list[int], list[float]]:
    return [cell.num_blocks or 0 for cell in cells], [cell.block_hit_rate for cell in cells]


def _thinned(capacities: Sequence[int]) -> list[int]:
    """Leave out ticks that would stand on each other: closer than a twelfth of the axis, which is logarithmic."""
    ratio = (capacities[-1] / capacities[0]) ** (1 / 12)
    ticks: list[int] = []
    for capacity in capacities:
        if not ticks or capacity >= ticks[-1] * ratio:
            ticks.append(capacity)
    return ticks


def _short(count: float) -> str:
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return f"{count:.0f}"


def _short_bytes(count: float) -> str:
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"


def _page(chart: Chart, svg: str) -> str:
    lines = _lines(chart)
    memory_head = () if chart.block_bytes is None else ("memory",)
    cell_at = {(cell.policy, cell.num_blocks): cell for cell in chart.cells}
    rows = []
    for blocks in sorted({cell.num_blocks for cell in chart.cells if cell.num_blocks is not None}):
        rates = "".join(f"<td>{cell_at[policy, blocks].block_hit_rate:.2%}</td>" for policy in lines)
        memory = "" if chart.block_bytes is None else f"<td>{_short_bytes(blocks * chart.block_bytes)}</td>"
        rows.append(f"<tr><td>{blocks:,}</td>{memory}{rates}</tr>")
    return _PAGE.format(
        title=html.escape(chart.title),
        # The XML declaration and the doctype have no place inside a page.
        figure=svg[svg.index("<svg") :],
        heads="".join(f"<th>{html.escape(name)}</th>" for name in (*memory_head, *lines)),
        rows="\n".join(rows),
        footnote=html.escape(chart.footnote),
    )
