"""A Grafana dashboard and alert rules, made from the table of metrics: a query can name only what exists.

Panels are written in the table's own names; `query` refuses one that no component exports, and the files that are
committed are compared with what this makes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kvcache.spec.reported import every_sample

_NAME = re.compile(r"\bK_(\w+)")
_BY = "engine, rank"
_BY_TIER = f"medium, {_BY}"


def series_names(prefix: str = "kvcache_") -> set[str]:
    """Return the names of all time series that Prometheus stores.

    Parameters
    ----------
    prefix : str
        ``"kvcache_"``, or ``"vllm:kvcache_"`` under vLLM.

    Returns
    -------
    set of str
        A counter's end in ``_total``, a histogram's in ``_bucket``, ``_sum`` and ``_count``.
    """
    ends = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
    return {prefix + one.name + end for one in every_sample() for end in ends[one.kind]}


def query(expression: str, prefix: str = "kvcache_") -> str:
    """Return a PromQL expression in which ``K_name`` stands for a series, with the prefix in its place.

    Raises
    ------
    ValueError
        No component exports a series of that name.
    """
    known = series_names(prefix)

    def named(match: re.Match[str]) -> str:
        name = prefix + match[1]
        if name not in known:
            raise ValueError(f"no component exports {name!r}")
        # vLLM's prefix has a colon, which PromQL takes in names.
        return name

    return _NAME.sub(named, expression)


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel: its title, unit, what it means, and its queries by their legends."""

    title: str
    unit: str
    text: str
    queries: dict[str, str]
    kind: str = "timeseries"


def _now(name: str, by: str = _BY, how: str = "sum") -> str:
    return f"{how} by ({by}) (K_{name})"


def _rate(name: str, by: str = _BY) -> str:
    return f"sum by ({by}) (rate(K_{name}[$__rate_interval]))"


def _quantile(share: float, name: str, by: str) -> str:
    return f"histogram_quantile({share}, sum by (le, {by}) (rate(K_{name}_bucket[$__rate_interval])))"


ROWS: dict[str, list[Panel]] = {
    "Hits": [
        Panel(
            "Hit rate",
            "percentunit",
            "Share of the blocks a request's device lacked that was loaded and not computed.",
            {"{{engine}}/{{rank}}": f"{_rate('loaded_blocks_total')} / {_rate('needed_blocks_total')}"},
        ),
        Panel(
            "Hit rate by medium",
            "percentunit",
            "What host memory hit by itself, and what tiers brought back.",
            {
                "host memory {{engine}}/{{rank}}": f"({_rate('loaded_blocks_total')} - "
                f"{_rate('promoted_loaded_blocks_total')}) / {_rate('needed_blocks_total')}",
                "{{medium}} {{engine}}/{{rank}}": f"{_rate('tier_promoted_blocks_total', _BY_TIER)}"
                f" / on ({_BY}) group_left {_rate('needed_blocks_total')}",
            },
        ),
        Panel(
            "Tokens spared",
            "short",
            "Tokens a second that were loaded and not computed.",
            {"{{engine}}/{{rank}}": _rate("loaded_tokens_total")},
        ),
    ],
    "Memory": [
        Panel(
            "Host blocks",
            "short",
            "Blocks of host memory by what they do.",
            {
                "capacity {{engine}}/{{rank}}": _now("capacity_blocks"),
                "free {{engine}}/{{rank}}": _now("free_blocks"),
                "being loaded {{engine}}/{{rank}}": _now("referenced_blocks"),
                "being written {{engine}}/{{rank}}": _now("pending_blocks"),
                "retained {{engine}}/{{rank}}": _now("retained_blocks"),
            },
        ),
        Panel(
            "Age at eviction",
            "s",
            "Time from a block's store to its eviction. Shorter than users' pauses: more memory would hit more.",
            {
                "half {{engine}}/{{rank}}": _quantile(0.5, "eviction_age_seconds", _BY),
                "a tenth {{engine}}/{{rank}}": _quantile(0.1, "eviction_age_seconds", _BY),
            },
        ),
        Panel(
            "Stored and evicted",
            "Bps",
            "Bytes a second that came to host memory and left it.",
            {
                "stored {{engine}}/{{rank}}": _rate("stored_bytes_total"),
                "loaded {{engine}}/{{rank}}": _rate("loaded_bytes_total"),
                "evicted {{engine}}/{{rank}}": _rate("evicted_bytes_total"),
            },
        ),
    ],
    "Scheduler's thread": [
        Panel(
            "Call, 99 %",
            "s",
            "What 99 of 100 calls stay below, by kind.",
            {"{{call}}": _quantile(0.99, "call_duration_seconds", "call")},
        ),
        Panel(
            "Worst call so far",
            "s",
            "The scheduler waited so long, once.",
            {"{{call}}": _now("call_worst_seconds", "call", "max")},
        ),
        Panel(
            "Refused and dropped",
            "short",
            "Stores without room, blocks not admitted, events nobody took, a second.",
            {
                "rejected stores {{engine}}/{{rank}}": _rate("rejected_stores_total"),
                "failed blocks {{engine}}/{{rank}}": _rate("failed_blocks_total"),
                "gated blocks {{engine}}/{{rank}}": _rate("gated_blocks_total"),
                "dropped events {{engine}}/{{rank}}": _rate("event_dropped_total"),
            },
        ),
    ],
    "Tiers": [
        Panel(
            "Tier state",
            "short",
            "1: the tier does not work, or a breaker keeps jobs from it.",
            {
                "{{medium}} {{engine}}/{{rank}}": _now("tier_unavailable", _BY_TIER, "max"),
                "{{medium}} reads paused {{engine}}/{{rank}}": _now(
                    'tier_reads_breaker{state="open"}', _BY_TIER, "max"
                ),
                "{{medium}} writes paused {{engine}}/{{rank}}": _now(
                    'tier_writes_breaker{state="open"}', _BY_TIER, "max"
                ),
            },
            "state-timeline",
        ),
        Panel(
            "Tier bytes",
            "bytes",
            "Bytes that tiers hold.",
            {"{{medium}} {{engine}}/{{rank}}": _now("tier_held_bytes", _BY_TIER)},
        ),
        Panel(
            "Tier bandwidth",
            "Bps",
            "Bytes a second read and written.",
            {
                "read {{medium}} {{engine}}/{{rank}}": _rate("tier_promoted_bytes_total", _BY_TIER),
                "written {{medium}} {{engine}}/{{rank}}": _rate("tier_written_bytes_total", _BY_TIER),
            },
        ),
        Panel(
            "Promotion and write, 99 %",
            "s",
            "How long jobs of a tier take.",
            {
                "promotion {{medium}}": _quantile(0.99, "tier_promotion_seconds", "medium"),
                "write {{medium}}": _quantile(0.99, "tier_write_seconds", "medium"),
                "a request's wait {{engine}}/{{rank}}": _quantile(0.99, "promotion_wait_seconds", _BY),
            },
        ),
        Panel(
            "Tier queues",
            "short",
            "Blocks that wait to be written or are under way.",
            {
                "backlog {{medium}} {{engine}}/{{rank}}": _now("tier_backlog_blocks", _BY_TIER),
                "loading {{medium}} {{engine}}/{{rank}}": _now("tier_loading_blocks", _BY_TIER),
                "storing {{medium}} {{engine}}/{{rank}}": _now("tier_storing_blocks", _BY_TIER),
                "waiting requests {{engine}}/{{rank}}": _now("promotion_waiting_requests"),
            },
        ),
        Panel(
            "Tier faults",
            "short",
            "A second.",
            {
                "corrupt blocks {{medium}}": _rate("tier_corrupt_blocks_total", _BY_TIER),
                "I/O errors {{medium}}": _rate("tier_io_errors_total", _BY_TIER),
                "failed jobs {{medium}}": _rate("tier_failed_jobs_total", _BY_TIER),
                "overdue jobs {{medium}}": _rate("tier_overdue_jobs_total", _BY_TIER),
                "dropped blocks {{medium}}": _rate("tier_dropped_blocks_total", _BY_TIER),
            },
        ),
    ],
    "Transfers": [
        Panel(
            "Device copies",
            "Bps",
            "Bytes a second between device and host, where workers report.",
            {"{{source}} to {{destination}}": _rate("transfer_moved_bytes_total", f"source, destination, {_BY}")},
        ),
        Panel(
            "Copy, 99 %",
            "s",
            "How long a job of copies takes.",
            {"{{source}} to {{destination}}": _quantile(0.99, "transfer_duration_seconds", "source, destination")},
        ),
    ],
}
"""What the dashboard shows."""


@dataclass(frozen=True, slots=True)
class Alert:
    """One alert rule."""

    name: str
    expression: str
    minutes: int
    severity: str
    summary: str
    action: str


ALERTS = (
    Alert(
        "KVCacheTierUnavailable",
        f"max by (medium, {_BY}) (K_tier_unavailable) == 1",
        2,
        "warning",
        "Tier {{ $labels.medium }} of engine {{ $labels.engine }} does not work or is left alone.",
        "Look at the engine's log and at `kvcache status` for its last error; requests go on without the tier.",
    ),
    Alert(
        "KVCacheHitRateFell",
        f"sum by ({_BY}) (rate(K_loaded_blocks_total[15m])) / sum by ({_BY}) (rate(K_needed_blocks_total[15m]))"
        f" < 0.5 * (sum by ({_BY}) (rate(K_loaded_blocks_total[1h] offset 1d))"
        f" / sum by ({_BY}) (rate(K_needed_blocks_total[1h] offset 1d)))"
        f" and sum by ({_BY}) (rate(K_needed_blocks_total[15m])) > 1",
        30,
        "warning",
        "Engine {{ $labels.engine }} hits less than half of what it did a day ago.",
        "Compare traffic and routing with yesterday's; ask `kvcache top` what more memory would hit.",
    ),
    Alert(
        "KVCacheStoresRejected",
        f"sum by ({_BY}) (rate(K_rejected_stores_total[10m])) > 0.1",
        10,
        "warning",
        "Engine {{ $labels.engine }} has no room for new blocks.",
        "All blocks are in use: loads are slow, a tier hangs on to blocks, or host memory is too small.",
    ),
    Alert(
        "KVCacheCorruptBlocks",
        f"sum by (medium, {_BY}) (increase(K_tier_corrupt_blocks_total[1h])) > 0",
        0,
        "critical",
        "Tier {{ $labels.medium }} of engine {{ $labels.engine }} gave back other bytes than were written.",
        "The blocks are computed again and nothing wrong is served. Check the medium, and replace it.",
    ),
    Alert(
        "KVCacheSchedulerBlocked",
        f"max by (call, {_BY}) (K_call_worst_seconds) > 0.25",
        0,
        "info",
        "A call {{ $labels.call }} of engine {{ $labels.engine }} has kept its scheduler for over 250 ms.",
        "Look for swapping and stopped processes; report it with the configuration where there were none.",
    ),
)
"""The alert rules."""


def dashboard(prefix: str = "kvcache_") -> dict[str, Any]:
    """Return a Grafana dashboard.

    Parameters
    ----------
    prefix : str
        ``"kvcache_"``, or ``"vllm:kvcache_"`` under vLLM.

    Returns
    -------
    dict
        As Grafana's JSON model has it, for import; it asks for the data source.
    """
    panels: list[dict[str, Any]] = []
    y = 0
    for row, members in ROWS.items():
        panels.append({"type": "row", "title": row, "id": len(panels) + 1, "gridPos": _at(0, y, 24, 1), "panels": []})
        y += 1
        for number, panel in enumerate(members):
            panels.append(
                {
                    "id": len(panels) + 1,
                    "type": panel.kind,
                    "title": panel.title,
                    "description": panel.text,
                    "datasource": {"type": "prometheus", "uid": "${datasource}"},
                    "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
                    "gridPos": _at(8 * (number % 3), y + 8 * (number // 3), 8, 8),
                    "targets": [
                        {"refId": chr(65 + i), "expr": query(expression, prefix), "legendFormat": legend}
                        for i, (legend, expression) in enumerate(panel.queries.items())
                    ],
                }
            )
        y += 8 * -(-len(members) // 3)
    return {
        "title": "kvcache" if prefix == "kvcache_" else f"kvcache ({prefix.split(':')[0]})",
        "uid": re.sub(r"\W+", "-", prefix).strip("-_"),
        "schemaVersion": 39,
        "tags": ["kvcache"],
        "time": {"from": "now-3h", "to": "now"},
        "refresh": "30s",
        "templating": {
            "list": [{"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"}]
        },
        "panels": panels,
    }


def _at(x: int, y: int, width: int, height: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": width, "h": height}


def rules(prefix: str = "kvcache_") -> str:
    """Return alert rules as YAML.

    Parameters
    ----------
    prefix : str
        As for `dashboard`.
    """
    lines = ["groups:", "  - name: kvcache", "    rules:"]
    for alert in ALERTS:
        lines += [
            f"      - alert: {alert.name}",
            f"        expr: {_quoted(query(alert.expression, prefix))}",
            f"        for: {alert.minutes}m",
            "        labels:",
            f"          severity: {alert.severity}",
            "        annotations:",
            f"          summary: {_quoted(alert.summary)}",
            f"          action: {_quoted(alert.action)}",
        ]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def as_markdown_table() -> str:
    """Return every exported metric as the docs show it."""
    lines = ["| name | kind | labels | meaning |", "|---|---|---|---|"]
    seen: set[str] = set()
    for one in every_sample():
        name = f"kvcache_{one.name}{'_total' if one.kind == 'counter' else ''}"
        if name not in seen:
            seen.add(name)
            labels = ", ".join(f"`{label}`" for label in _label_names(one.labels))
            lines.append(f"| `{name}` | {one.kind} | {labels} | {one.help} |")
    return "\n".join(lines) + "\n"


def _label_names(labels: Iterable[tuple[str, str]]) -> list[str]:
    return [name for name, _ in labels]
