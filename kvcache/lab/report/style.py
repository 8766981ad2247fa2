"""The style of all plots: colours for the colour-blind, a title at the left, a footnote."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe & Ito's colours without yellow, which is hardly visible on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vPX*<>phHd8"
POLICY_COLOURS = {"lru": "#0072B2", "arc": "#E69F00", "gittins": "#D55E00"}
"""The colour of each policy of kvcache, the same in every picture."""
_OTHER_COLOURS = ("#009E73", "#8C564B", "#7F7F7F", "#A6761D")
INK = "#333333"
MEDIA_COLOURS = ("#009E73", "#8FD3BD", "#C9B458", "#A6761D")
"""Host memory and the tiers below it; no policy has one of these."""
PALE = "#DDDDDD"


def style_of(index: int, label: str) -> dict[str, Any]:
    """Return colour and marker of line `index`; a label that begins with a policy has the policy's colour."""
    policy = label.partition(" ")[0]
    if policy not in POLICY_COLOURS:
        return {"color": _OTHER_COLOURS[index % len(_OTHER_COLOURS)], "marker": MARKERS[index % len(MARKERS)]}
    if label == policy:
        return {"color": POLICY_COLOURS[policy], "marker": MARKERS[list(POLICY_COLOURS).index(policy)]}
    # Lines of one policy over different tiers differ by their marker, which no policy without tiers has.
    others = MARKERS[len(POLICY_COLOURS) :]
    dashes = ("-", "--", ":", "-.")[index // len(others) % 4]
    return {"color": POLICY_COLOURS[policy], "marker": others[index % len(others)], "linestyle": dashes}


def save(figure: Figure, target: str) -> None:
    """Write a figure in the format of the file's suffix, without a date, so that equal figures give equal files."""
    suffix = Path(target).suffix.lower()[1:]
    figure.savefig(target, format=suffix, dpi=160, metadata={"Date": None} if suffix == "svg" else None)


def new_figure(width: float = 8.4, height: float = 5.2) -> Figure:
    """Return an empty figure with margins."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    figure.get_layout_engine().set(rect=(0.01, 0.01, 0.97, 0.98))  # type: ignore[union-attr, call-arg]
    return figure


def plain_axes(axes: Any) -> None:
    """Keep only horizontal grid lines and two of the four sides."""
    axes.grid(axis="y", color=PALE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines["right"].set_visible(False)
    axes.spines["top"].set_visible(False)


def thinned_ticks(capacities: Sequence[int]) -> list[int]:
    """Drop ticks that would overlap: closer than a ninth of the logarithmic axis."""
    ratio = (capacities[-1] / capacities[0]) ** (1 / 9)
    ticks: list[int] = []
    for capacity in capacities:
        if not ticks or capacity >= ticks[-1] * ratio:
            ticks.append(capacity)
    return ticks


def caption(figure: Figure, title: str, footnote: str) -> None:
    """Write the title above the plot, unless it is empty, and the footnote below."""
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold", parse_math=False)
    figure.supxlabel(footnote, x=0.01, ha="left", fontsize=8, color="#666666", parse_math=False)


def machine() -> str:
    """Return the CPU, the number of cores and the system of this machine."""
    name = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    return f"{name}, {len(os.sched_getaffinity(0))} cores, {platform.system()} {platform.release()}"
