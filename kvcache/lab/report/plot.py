"""Plot hit rate over capacity: a line for each policy, the offline optimum, and the unlimited cache.

At one capacity there are bars instead, one for each policy, in the parts that each medium served.
"""

from __future__ import annotations

import html
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcache.lab.report.style import INK, MEDIA_COLOURS, caption, new_figure, plain_axes, save, style_of, thinned_ticks
from kvcache.lab.simulate.cells import OPTIMUM
from kvcache.lab.simulate.targets import WRITES, figure_of
from kvcache.options import format_size

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from kvcache.lab.simulate.cells import Cell

PLOT_SUFFIXES = (".png", ".svg", ".html")

# Figures that a plan may have besides hits: their heading, and how a cell's is read.
_PRICE = "price"
_FIGURES = {"ttft_p99": "TTFT p99, s", WRITES: "drive writes a day", _PRICE: "price"}
# With more bars than these, the names would overlap.
_LEVEL_NAMES = 5
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
{tables}
<p>{footnote}</p>
</body>
</html>
"""


@dataclass(frozen=True, slots=True)
class Chart:
    """The data of a plot."""

    title: str
    cells: Sequence[Cell]
    unbounded: Cell
    block_bytes: int | None
    footnote: str
    media: tuple[str, ...] = ()

    def label(self, cell: Cell) -> str:
        """Return the name of a line or column."""
        below = [
            f"{name} {format_size(blocks * (self.block_bytes or 1))}"
            for name, blocks in zip(self.media, cell.tiers, strict=False)
        ]
        return " + ".join([cell.policy, *below])


def check_plot_target(target: str) -> None:
    """Raise ValueError if a file of this name cannot be drawn."""
    if Path(target).suffix.lower() not in PLOT_SUFFIXES:
        raise ValueError(f"--plot must end in {', '.join(PLOT_SUFFIXES)}, got {target!r}")
    import matplotlib  # noqa: F401 - reported before the work if it is missing


def draw(chart: Chart, target: str) -> None:
    """Draw `chart` into a PNG, SVG or self-contained HTML file, by the file's suffix."""
    suffix = Path(target).suffix.lower()
    # An HTML page has its own heading.
    figure = _figure(chart, "" if suffix == ".html" else chart.title)
    if suffix == ".html":
        svg = io.StringIO()
        figure.savefig(svg, format="svg", metadata={"Date": None})
        Path(target).write_text(_page(chart, svg.getvalue()), encoding="utf-8")
    else:
        save(figure, target)


def _lines(chart: Chart) -> dict[str, list[Cell]]:
    lines: dict[str, list[Cell]] = {}
    for cell in chart.cells:
        lines.setdefault(chart.label(cell), []).append(cell)
    return lines


def _capacities(chart: Chart) -> list[int]:
    return sorted({cell.num_blocks for cell in chart.cells if cell.num_blocks is not None})


def _figure(chart: Chart, title: str) -> Figure:
    figures = _figures_of(chart)
    figure = new_figure(8.4, 8.2 if figures else 5.2)
    grid = figure.add_gridspec(2 if figures else 1, max(1, len(figures)), height_ratios=(3, 2) if figures else None)
    axes = figure.add_subplot(grid[0, :])
    if len(_capacities(chart)) > 1:
        _draw_lines(figure, axes, chart)
    else:
        _draw_bars(figure, axes, chart)
    for i, (name, heading) in enumerate(figures.items()):
        _draw_figure(figure.add_subplot(grid[1, i]), chart, name, heading)
    caption(figure, title, chart.footnote)
    return figure


def _figure_of(cell: Cell, name: str) -> float | None:
    return (cell.serving or {}).get(_PRICE) if name == _PRICE else figure_of(cell, name)


def _figure_text(name: str, cell: Cell) -> str:
    value = _figure_of(cell, name)
    # The optimum has no figures.
    return "" if cell.policy == OPTIMUM or value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _figures_of(chart: Chart) -> dict[str, str]:
    """Return the figures besides hits that all cells but the optimum's have."""
    cells = [cell for cell in chart.cells if cell.policy != OPTIMUM]
    names = [name for name in _FIGURES if all(_figure_of(cell, name) is not None for cell in cells)]
    # Without a tier, nothing is written.
    return {name: _FIGURES[name] for name in names if cells and (name != WRITES or chart.media)}


def _draw_figure(axes: Any, chart: Chart, name: str, heading: str) -> None:
    """Draw one figure below the hits: lines over capacities, or a bar for each line of the legend."""
    from matplotlib.ticker import NullLocator

    plain_axes(axes)
    axes.set_title(heading, loc="left", fontsize=10)
    capacities = _capacities(chart)
    lines = {label: cells for label, cells in _lines(chart).items() if label != OPTIMUM}
    for i, (label, cells) in enumerate(lines.items()):
        values = [_figure_of(cell, name) or 0.0 for cell in cells]
        style = style_of(i, label)
        if len(capacities) > 1:
            axes.plot(_points(cells)[0], values, markersize=4.5, linewidth=1.6, **style)
        else:
            axes.bar(label if len(lines) > _LEVEL_NAMES else _folded(label), values, width=0.6, color=style["color"])
    if len(capacities) > 1:
        axes.set_xscale("log")
        ticks = thinned_ticks(capacities)[:: max(1, len(_figures_of(chart)) - 1)]
        axes.set_xticks(ticks, [f"{blocks:,}" for blocks in ticks], fontsize=8)
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("blocks of memory", fontsize=8)
    else:
        rotation = 90 if len(lines) > _LEVEL_NAMES else 40 if len(lines) > 2 else 0
        axes.tick_params(axis="x", labelsize=6 if rotation == 90 else 7, labelrotation=rotation)
    axes.set_ylim(bottom=0)


def _folded(label: str) -> str:
    return label.replace(" + ", "\n+ ")


def _draw_lines(figure: Figure, axes: Any, chart: Chart) -> None:
    from matplotlib.ticker import NullLocator, PercentFormatter

    plain_axes(axes)
    capacities = _capacities(chart)
    rim = chart.unbounded.block_hit_rate
    top = max(rim * 1.12, 0.01)
    lines = _lines(chart)
    ceiling = lines.pop(OPTIMUM, None)
    if ceiling is not None:
        xs, ys = _points(ceiling)
        axes.plot(xs, ys, label="optimum (knows the future)", color=INK, linestyle=(0, (5, 2)), linewidth=1.6)
        axes.fill_between(xs, ys, top, color="#EDEDED", linewidth=0, zorder=0, label="out of any policy's reach")
    for i, (name, cells) in enumerate(lines.items()):
        xs, ys = _points(cells)
        style = style_of(i, name)
        axes.plot(xs, ys, linewidth=2, markersize=5.5, label=name, clip_on=False, zorder=3, **style)
        if any(cell.block_hit_error for cell in cells):
            errors = [2 * (cell.block_hit_error or 0.0) for cell in cells]
            axes.errorbar(xs, ys, errors, fmt="none", ecolor=style["color"], capsize=3, zorder=3)
    _draw_rim(axes, rim, chart)
    axes.set_xscale("log")
    axes.set_xlim(capacities[0], capacities[-1])
    ticks = thinned_ticks(capacities)
    axes.set_xticks(ticks, [f"{blocks:,}" for blocks in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_ylim(0, top)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0 if rim > 0.05 else 1))
    axes.set_xlabel("capacity of host memory, blocks" if chart.media else "capacity, blocks")
    axes.set_ylabel("blocks hit, as a leading run")
    if chart.block_bytes is not None:
        bytes_axis = axes.secondary_xaxis("top")
        bytes_axis.set_xticks(ticks, [format_size(blocks * chart.block_bytes) for blocks in ticks])
        bytes_axis.xaxis.set_minor_locator(NullLocator())
        bytes_axis.set_xlabel(f"memory at {format_size(chart.block_bytes)} a block", fontsize=9)
        bytes_axis.tick_params(labelsize=9)
    # Beside the lines, where it hides none of them.
    figure.legend(loc="outside right upper", frameon=False)


def _draw_bars(figure: Figure, axes: Any, chart: Chart) -> None:
    from matplotlib.ticker import PercentFormatter

    plain_axes(axes)
    cells = list(chart.cells)
    is_level = len(cells) <= _LEVEL_NAMES
    names = [_folded(chart.label(cell)) if is_level else chart.label(cell) for cell in cells]
    # Media are stacked in the order in which a block is looked for.
    media = ("host memory", *chart.media)
    below = [0.0] * len(cells)
    for i, medium in enumerate(media):
        heights = []
        for cell in cells:
            served = (cell.serving or {}).get("media")
            hits = served[i]["hit_blocks"] if served and i < len(served) else 0
            heights.append(hits / max(1, cell.blocks) if served else cell.block_hit_rate * (i == 0))
        if any(heights):
            axes.bar(names, heights, bottom=below, width=0.6, color=MEDIA_COLOURS[i % len(MEDIA_COLOURS)], label=medium)
        below = [low + height for low, height in zip(below, heights, strict=True)]
    errors = [2 * (cell.block_hit_error or 0.0) for cell in cells]
    if any(errors):
        axes.errorbar(names, below, errors, fmt="none", ecolor=INK, capsize=4)
    for i, cell in enumerate(cells):
        axes.annotate(
            f"{cell.block_hit_rate:.1%}",
            (i, below[i]),
            (0, 4),
            textcoords="offset points",
            ha="center",
            color=INK,
            fontsize=10 if is_level else 7,
        )
    rim = chart.unbounded.block_hit_rate
    _draw_rim(axes, rim, chart)
    axes.set_xlim(-0.6, max(len(cells), 3) - 0.4)
    if not is_level:
        axes.set_xticks(range(len(cells)), names, rotation=90, fontsize=8)
    axes.set_ylim(0, max(rim * 1.12, 0.01))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0 if rim > 0.05 else 1))
    blocks = _capacities(chart)[0]
    memory = "" if chart.block_bytes is None else f" ({format_size(blocks * chart.block_bytes)})"
    axes.set_xlabel(f"{blocks:,} blocks{memory} of host memory")
    axes.set_ylabel("blocks hit, as a leading run")
    if chart.media:
        figure.legend(loc="outside right upper", frameon=False)


def _draw_rim(axes: Any, rim: float, chart: Chart) -> None:
    axes.axhline(rim, color=INK, linestyle=":", linewidth=1.2)
    axes.annotate(
        f"unbounded cache: {rim:.1%}",
        (0.015, rim),
        xycoords=("axes fraction", "data"),
        xytext=(0, 4),
        textcoords="offset points",
        color=INK,
        fontsize=9,
    )


def _points(cells: Sequence[Cell]) -> tuple[list[int], list[float]]:
    return [cell.num_blocks or 0 for cell in cells], [cell.block_hit_rate for cell in cells]


def _page(chart: Chart, svg: str) -> str:
    figures: dict[str, Callable[[Cell], str]] = {"blocks hit": lambda cell: f"{cell.block_hit_rate:.2%}"}
    for name, heading in _figures_of(chart).items():
        figures[heading] = partial(_figure_text, name)
    return _PAGE.format(
        title=html.escape(chart.title),
        # Remove the XML declaration and the doctype, which are invalid inside a page.
        figure=svg[svg.index("<svg") :],
        tables="\n".join(_table(chart, heading, text_of) for heading, text_of in figures.items()),
        footnote=html.escape(chart.footnote),
    )


def _table(chart: Chart, heading: str, text_of: Callable[[Cell], str]) -> str:
    """Return a figure of every cell as HTML: a row for each capacity, a column for each line."""
    lines = _lines(chart)
    text_at = {(label, cell.num_blocks): text_of(cell) for label, cells in lines.items() for cell in cells}
    rows = [["blocks", "memory", *lines]]
    for blocks in _capacities(chart):
        memory = format_size(blocks * (chart.block_bytes or 0))
        rows.append([f"{blocks:,}", memory, *(text_at.get((label, blocks), "") for label in lines)])
    if chart.block_bytes is None:
        rows = [[row[0], *row[2:]] for row in rows]
    cells = ["".join(f"<td>{html.escape(text)}</td>" for text in row) for row in rows]
    cells[0] = cells[0].replace("td>", "th>")
    body = "\n".join(f"<tr>{row}</tr>" for row in cells)
    return f"<h2>{html.escape(heading)}</h2>\n<table>\n{body}\n</table>"
