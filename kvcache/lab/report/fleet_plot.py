"""Plot the hits of fleets and the load of their store over the number of engines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvcache.lab.report.style import COLOURS, MARKERS, caption, new_figure, plain_axes, save, thinned_ticks


def draw_fleet(cells: Sequence[dict[str, Any]], footnote: str, target: str) -> None:
    """Draw the share of blocks hit, and the keys queried and blocks moved a second."""
    from matplotlib.ticker import LogLocator, NullLocator, PercentFormatter

    figure = new_figure(11.0, 5.2)
    hits, traffic = figure.subplots(1, 2)
    has_store = any(cell["store_capacity_blocks"] for cell in cells)
    ticks = thinned_ticks(sorted({cell["engines"] for cell in cells}))
    routers = list(dict.fromkeys(cell["router"] for cell in cells))
    for axes in (hits, traffic):
        plain_axes(axes)
        if len(ticks) > 1:
            axes.set_xscale("log")
            axes.set_xticks(ticks, [f"{engines:,}" for engines in ticks])
            axes.xaxis.set_minor_locator(NullLocator())
            axes.set_xlabel("engines")
        else:
            # With one number of engines, a line would be a point at the edge, so give each router its own place.
            axes.set_xticks(range(len(routers)), [router.replace("_", " ") for router in routers])
            axes.set_xlim(-0.6, len(routers) - 0.4)
            axes.set_xlabel(f"{ticks[0]:,} engines, by router")
    for i, router in enumerate(routers):
        mine = [cell for cell in cells if cell["router"] == router]
        engines = [cell["engines"] for cell in mine] if len(ticks) > 1 else [i]
        style: dict[str, Any] = {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)]}
        hits.plot(engines, [1 - cell["missed_share"] for cell in mine], label=router.replace("_", " "), **style)
        if has_store:
            hits.plot(engines, [cell["local_share"] for cell in mine], linestyle=":", fillstyle="none", **style)
        moved = [cell["read_blocks_per_s"]["peak"] + cell["written_blocks_per_s"]["peak"] for cell in mine]
        if has_store:
            traffic.plot(engines, moved, **style)
            traffic.plot(
                engines, [cell["query_keys_per_s"]["peak"] for cell in mine], linestyle="--", fillstyle="none", **style
            )
        else:
            traffic.plot(engines, [cell["events_per_s"]["peak"] for cell in mine], linestyle="-.", **style)
    hits.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    hits.set_ylim(0, 1)
    own = "; hollow: in the engine's own memory" if has_store else ", in the engine's own memory"
    hits.set_title(f"Blocks hit{own}", loc="left", fontsize=10)
    traffic.set_yscale("log")
    # Plain numbers, also if the axis spans less than a power of ten.
    traffic.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    traffic.yaxis.set_major_formatter("{x:,g}")
    traffic.yaxis.set_minor_locator(NullLocator())
    # At least a power of ten, or small differences look large.
    bottom, top = traffic.get_ylim()
    traffic.set_ylim(min(bottom, top / 10), 1.2 * top)
    what = "Blocks moved; hollow: keys queried" if has_store else "Blocks in events"
    traffic.set_title(f"{what}; a second, busiest minute", loc="left", fontsize=10)
    figure.legend(loc="outside right upper", frameon=False)
    caption(figure, "Hits and traffic of a fleet, by router", footnote)
    save(figure, target)
