"""Counters and gauges: the one table of what is counted, from which stats, exporters and the docs' table come.

A field of a statistics class carries its own line of the table (`counter`, `gauge`), so that a name, its unit and its
help stand in one place; `metrics_of` reads them back.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class Metric:
    """One line of the table.

    Parameters
    ----------
    name : str
        The field of the statistics class, and the attribute of the pool that it is read from.
    kind : str
        ``"counter"`` (since start, only grows) or ``"gauge"`` (now).
    unit : str
        What is counted: ``"blocks"``, ``"calls"``, ``"requests"``, ``"jobs"``.
    help : str
        One sentence.
    reading : str
        How to use it, where that is not plain.
    """

    name: str
    kind: str
    unit: str
    help: str
    reading: str = ""


def counter(unit: str, text: str, reading: str = "") -> Any:
    """Return a dataclass field, 0 by default, that is a counter since start."""
    return field(default=0, metadata={"metric": ("counter", unit, text, reading)})


def gauge(unit: str, text: str, reading: str = "") -> Any:
    """Return a dataclass field, 0 by default, that is a gauge of now."""
    return field(default=0, metadata={"metric": ("gauge", unit, text, reading)})


def metrics_of(stats: Any) -> tuple[Metric, ...]:
    """Return the table's lines of a statistics class, in the order of its fields."""
    return tuple(Metric(one.name, *one.metadata["metric"]) for one in fields(stats) if "metric" in one.metadata)


@dataclass(frozen=True, slots=True)
class ManagerStats:
    """Counters since start and gauges now of one pool; `kvcache.metrics.MANAGER_METRICS` describes each.

    Parameters
    ----------
    num_blocks, num_free, num_referenced, num_pending : int
        Gauges: slots of the pool, free ones, blocks being read, blocks being written.
    lookups, looked_up_blocks, hit_blocks : int
        Calls of `lookup`, the keys they named, and those that were ready.
    loaded_blocks, stored_blocks, evicted_blocks : int
        Blocks that `prepare_load` referenced, that `complete_store` made ready, that were evicted.
    rejected_stores, failed_blocks, gated_blocks : int
        Calls of `prepare_store` without room, blocks whose store failed, blocks that were not admitted.
    retained_blocks, ignored_hints : int
        Blocks at a raised priority now; hints that were malformed.
    """

    num_blocks: int = gauge("blocks", "Blocks that the pool holds.")
    num_free: int = gauge("blocks", "Slots that hold no block.")
    num_referenced: int = gauge("blocks", "Blocks that are being loaded, or held for it.")
    num_pending: int = gauge("blocks", "Blocks that are being written.")
    lookups: int = counter("calls", "Calls of lookup.")
    looked_up_blocks: int = counter(
        "blocks",
        "Blocks that lookup was asked for.",
        "An engine that asks key by key stops at the first miss: use needed_blocks for ratios.",
    )
    hit_blocks: int = counter("blocks", "Blocks that lookup found ready.")
    loaded_blocks: int = counter("blocks", "Blocks handed out to be loaded.")
    stored_blocks: int = counter("blocks", "Blocks that were written and became ready.")
    evicted_blocks: int = counter("blocks", "Blocks that made room for others.")
    rejected_stores: int = counter("calls", "Stores that were refused because no room could be made.")
    failed_blocks: int = counter("blocks", "Blocks dropped because their write failed.")
    gated_blocks: int = counter("blocks", "Blocks that were offered and not admitted.")
    declined_blocks: int = counter("blocks", "Of the gated blocks, those that the policy did not take.")
    retained_blocks: int = gauge("blocks", "Blocks held at a raised priority.")
    ignored_hints: int = counter("requests", "Requests whose retention hint made no sense.")
    needed_blocks: int = counter(
        "blocks",
        "Blocks of requests that the device did not hold: loaded, or computed and offered for storing.",
        "rate(loaded_blocks) / rate(needed_blocks) is the share that was spared computing, over any window.",
    )


MANAGER_METRICS = metrics_of(ManagerStats)
"""What a manager counts."""


def as_markdown(metrics: Iterable[Metric]) -> str:
    """Return the table as the docs show it."""
    lines = ["| name | kind | unit | meaning |", "|---|---|---|---|"]
    lines += [
        f"| `{one.name}` | {one.kind} | {one.unit} | {' '.join(filter(None, (one.help, one.reading)))} |"
        for one in metrics
    ]
    return "\n".join(lines) + "\n"
