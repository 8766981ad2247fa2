"""A Grafana dashboard and alert rules, made from the table of metrics: a query can name only what exists.

Panels are written in the table's own names; `query` refuses one that no component exports, and the files that are
committed are compared with what this makes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kvcache.assembly.reported import every_sample
from kvcache.exporters.status import StatusStats
from kvcache.metrics import Part, Sample, samples_of

_NAME = re.compile(r"\bK_(\w+)(?:{([^}]*)})?")
# Every engine calls itself 0 unless it is told otherwise: `instance`, the scraped address, tells engines apart.
_BY = "instance, engine, rank"
_BY_TIER = f"tier, medium, {_BY}"
_ENGINE = "{{instance}} {{engine}}/{{rank}}"
_TIER = "{{medium}} {{tier}}, {{instance}} {{engine}}/{{rank}}"
_COPIES = f"{{{{source}}}} to {{{{destination}}}}, {_ENGINE}"
_VARIABLES = {"job": "Job", "instance": "Instance", "engine": "Engine"}
_SELECTED = ", ".join(f'{name}=~"${name}"' for name in _VARIABLES)
# The bound of a histogram of calls, in nanoseconds 2**28: about a quarter of a second.
_SLOW_CALL = f"{2**28 / 1e9:.9g}"


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
    samples = _exported() if prefix == "kvcache_" else every_sample()
    return {prefix + one.name + end for one in samples for end in ends[one.kind]}


def _exported() -> list[Sample]:
    """Return a sample of every metric on an engine's own ``/metrics``, that of its status socket too."""
    return [*every_sample(), *samples_of(Part("status", StatusStats()), 1, 1)]


def query(expression: str, prefix: str = "kvcache_", selector: str = "") -> str:
    """Return a PromQL expression in which ``K_name`` stands for a series, with the prefix in its place.

    Parameters
    ----------
    expression : str
        Such as ``rate(K_loaded_blocks_total[5m])``.
    prefix : str
        As for `dashboard`.
    selector : str
        Matchers that every series is given.

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
        matchers = ", ".join(one for one in (match[2], selector) if one)
        # vLLM's prefix has a colon, which PromQL takes in names.
        return name + (f"{{{matchers}}}" if matchers else "")

    return _NAME.sub(named, expression)


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel: its title, unit, what it means, its queries by their legends, and how it is drawn.

    The axis ends at `most`; a figure is red from `alarm` on; `no_value` is shown where there is nothing.
    """

    title: str
    unit: str
    text: str
    queries: dict[str, str]
    kind: str = "timeseries"
    most: float | None = None
    alarm: float | None = None
    no_value: str | None = None
    is_bars: bool = False


def _now(name: str, by: str = _BY, how: str = "sum") -> str:
    return f"{how} by ({by}) (K_{name})"


def _rate(name: str, by: str = _BY) -> str:
    return f"sum by ({by}) (rate(K_{name}[$__rate_interval]))"


def _increase(name: str, by: str = _BY) -> str:
    return f"sum by ({by}) (increase(K_{name}[$__rate_interval]))"


def _needed(by: str = _BY) -> str:
    """Return blocks needed a second, and nothing of an engine that is idle: 0 / 0 would be shown as NaN."""
    return f"({_rate('needed_blocks_total', by)} > 0)"


def _quantile(share: float, name: str, by: str) -> str:
    """Return a quantile, and nothing where nothing was observed, of which it would be NaN."""
    return f"histogram_quantile({share}, sum by (le, {by}) (rate(K_{name}_bucket[$__rate_interval]))) >= 0"


def _paused(direction: str) -> str:
    return f'max by ({_BY_TIER}) (K_tier_{direction}_breaker{{state!="closed"}})'


ROWS: dict[str, list[Panel]] = {
    "Now": [
        Panel(
            "Hit rate, all engines",
            "percentunit",
            "Share of the blocks that the devices lacked that was loaded and not computed. Idle: none were needed.",
            {
                "hit rate": "sum(rate(K_loaded_blocks_total[$__rate_interval]))"
                " / (sum(rate(K_needed_blocks_total[$__rate_interval])) > 0)"
            },
            "stat",
            most=1,
            no_value="idle",
        ),
        Panel(
            "Engines",
            "none",
            "Engines that are scraped. Fewer than you run: look at Prometheus' targets.",
            {"engines": f"count(max by ({_BY}) (K_capacity_blocks))"},
            "stat",
            no_value="none",
        ),
        Panel(
            "Alerts firing",
            "none",
            "Alerts of kvcache's rules, where Prometheus evaluates them.",
            {"alerts": 'count(ALERTS{alertname=~"KVCache.*", alertstate="firing"}) or vector(0)'},
            "stat",
            alarm=1,
        ),
        Panel(
            "Tiers not available",
            "none",
            "Tiers that do not work, or are left alone after failures.",
            {"tiers": f"sum({_now('tier_unavailable', _BY_TIER, 'max')})"},
            "stat",
            alarm=1,
            no_value="no tiers",
        ),
        Panel(
            "Stores rejected",
            "none",
            "In the time shown: stores for which no room could be made.",
            {"stores": "sum(increase(K_rejected_stores_total[$__range]))"},
            "stat",
            alarm=1,
            no_value="0",
        ),
        Panel(
            "Corrupt blocks",
            "none",
            "In the time shown: blocks that a tier gave back with other bytes than were written. This is never normal.",
            {"blocks": "sum(increase(K_tier_corrupt_blocks_total[$__range]))"},
            "stat",
            alarm=0.5,
            no_value="no tiers",
        ),
    ],
    "Hits": [
        Panel(
            "Hit rate",
            "percentunit",
            "Share of the blocks a request's device lacked that was loaded and not computed. A gap: none were needed.",
            {_ENGINE: f"{_rate('loaded_blocks_total')} / {_needed()}"},
            most=1,
        ),
        Panel(
            "Hit rate by medium",
            "percentunit",
            "What host memory hit by itself, and what tiers brought back.",
            {
                f"host memory, {_ENGINE}": f"({_rate('loaded_blocks_total')} - "
                f"{_rate('promoted_loaded_blocks_total')}) / {_needed()}",
                _TIER: f"{_rate('tier_promoted_blocks_total', _BY_TIER)} / on ({_BY}) group_left () {_needed()}",
            },
            most=1,
        ),
        Panel(
            "Tokens spared",
            "suffix:tokens/s",
            "Tokens a second that were loaded and not computed.",
            {_ENGINE: _rate("loaded_tokens_total")},
        ),
    ],
    "Memory": [
        Panel(
            "Host blocks",
            "short",
            "Blocks of host memory by what they do. Being loaded or written near capacity: stores will be rejected.",
            {
                f"capacity, {_ENGINE}": _now("capacity_blocks"),
                f"free, {_ENGINE}": _now("free_blocks"),
                f"being loaded, {_ENGINE}": _now("referenced_blocks"),
                f"being written, {_ENGINE}": _now("pending_blocks"),
                f"retained, {_ENGINE}": _now("retained_blocks"),
            },
        ),
        Panel(
            "Age at eviction",
            "s",
            "Time from a block's store to its eviction. Shorter than users' pauses: more memory would hit more. "
            "A gap: nothing was evicted.",
            {
                f"half, {_ENGINE}": _quantile(0.5, "eviction_age_seconds", _BY),
                f"a tenth, {_ENGINE}": _quantile(0.1, "eviction_age_seconds", _BY),
            },
        ),
        Panel(
            "Stored, loaded and evicted",
            "Bps",
            "Bytes a second that came to host memory, were read from it, and left it.",
            {
                f"stored, {_ENGINE}": _rate("stored_bytes_total"),
                f"loaded, {_ENGINE}": _rate("loaded_bytes_total"),
                f"evicted, {_ENGINE}": _rate("evicted_bytes_total"),
            },
        ),
    ],
    "Scheduler's thread": [
        Panel(
            "Call, 99 %",
            "s",
            "What 99 of 100 calls stay below, by kind, over the engines chosen; the next power of two.",
            {"{{call}}": _quantile(0.99, "call_duration_seconds", "call")},
        ),
        Panel(
            "Worst call so far",
            "s",
            "The scheduler waited so long, once since its start.",
            {"{{call}}": _now("call_worst_seconds", "call", "max")},
        ),
        Panel(
            "Rejected and dropped",
            "none",
            "In each interval: stores without room, blocks whose write failed or that were not admitted, events that "
            "nobody took.",
            {
                f"rejected stores, {_ENGINE}": _increase("rejected_stores_total"),
                f"failed blocks, {_ENGINE}": _increase("failed_blocks_total"),
                f"gated blocks, {_ENGINE}": _increase("gated_blocks_total"),
                f"dropped events, {_ENGINE}": _increase("event_dropped_total"),
            },
            is_bars=True,
        ),
    ],
    "Tiers": [
        Panel(
            "Tier state",
            "none",
            "Not available: the tier does not work, or a breaker keeps jobs from it. Its last error: `kvcache status`.",
            {
                _TIER: _now("tier_unavailable", _BY_TIER, "max"),
                f"reads of {_TIER}": _paused("reads"),
                f"writes of {_TIER}": _paused("writes"),
            },
            "state-timeline",
            alarm=1,
        ),
        Panel(
            "Tier bytes",
            "bytes",
            "Bytes that tiers hold, and may hold; a capacity of 0: the medium decides.",
            {
                f"held, {_TIER}": _now("tier_held_bytes", _BY_TIER),
                f"capacity, {_TIER}": _now("tier_capacity_bytes", _BY_TIER),
            },
        ),
        Panel(
            "Tier bandwidth",
            "Bps",
            "Bytes a second read and written.",
            {
                f"read, {_TIER}": _rate("tier_promoted_bytes_total", _BY_TIER),
                f"written, {_TIER}": _rate("tier_written_bytes_total", _BY_TIER),
            },
        ),
        Panel(
            "Promotion and write, 99 %",
            "s",
            "How long jobs of a tier take, and how long requests wait for tiers. A gap: there were none.",
            {
                f"promotion, {_TIER}": _quantile(0.99, "tier_promotion_seconds", _BY_TIER),
                f"write, {_TIER}": _quantile(0.99, "tier_write_seconds", _BY_TIER),
                f"a request's wait, {_ENGINE}": _quantile(0.99, "promotion_wait_seconds", _BY),
            },
        ),
        Panel(
            "Tier queues",
            "short",
            "Blocks that wait to be written or are under way, and blocks that a tier which hangs keeps from the pool.",
            {
                f"backlog, {_TIER}": _now("tier_backlog_blocks", _BY_TIER),
                f"loading, {_TIER}": _now("tier_loading_blocks", _BY_TIER),
                f"storing, {_TIER}": _now("tier_storing_blocks", _BY_TIER),
                f"stuck, {_TIER}": _now("tier_stuck_blocks", _BY_TIER),
                f"waiting requests, {_ENGINE}": _now("promotion_waiting_requests"),
            },
        ),
        Panel(
            "Tier faults",
            "none",
            "In each interval.",
            {
                f"corrupt blocks, {_TIER}": _increase("tier_corrupt_blocks_total", _BY_TIER),
                f"I/O errors, {_TIER}": _increase("tier_io_errors_total", _BY_TIER),
                f"failed jobs, {_TIER}": _increase("tier_failed_jobs_total", _BY_TIER),
                f"overdue jobs, {_TIER}": _increase("tier_overdue_jobs_total", _BY_TIER),
                f"dropped blocks, {_TIER}": _increase("tier_dropped_blocks_total", _BY_TIER),
            },
            is_bars=True,
        ),
    ],
    "Transfers": [
        Panel(
            "Device copies",
            "Bps",
            "Bytes a second between device and host, where workers report. vLLM has metrics of its own for them.",
            {_COPIES: _rate("transfer_moved_bytes_total", f"source, destination, {_BY}")},
        ),
        Panel(
            "Copy, 99 %",
            "s",
            "How long a job of copies takes.",
            {"{{source}} to {{destination}}": _quantile(0.99, "transfer_duration_seconds", "source, destination")},
        ),
        Panel(
            "Failed copies",
            "none",
            "In each interval: jobs of copies that failed. Their blocks were computed again, or not stored.",
            {_COPIES: _increase("transfer_failed_jobs_total", f"source, destination, {_BY}")},
            is_bars=True,
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


# What a scrape adds to a series (job, instance, a cluster's own labels) stays on an alert, so that it can be routed.
_LOADED, _NEEDED = (f"sum without (policy) (rate(K_{name}_blocks_total%s))" for name in ("loaded", "needed"))
_WHERE = "engine {{ $labels.engine }} at {{ $labels.instance }}"
ALERTS = (
    Alert(
        "KVCacheTierUnavailable",
        "K_tier_unavailable == 1",
        2,
        "warning",
        f"Tier {{{{ $labels.medium }}}} of {_WHERE} does not work or is left alone.",
        "Look at the engine's log and at `kvcache status` for its last error; requests go on without the tier.",
    ),
    Alert(
        "KVCacheTierHangs",
        "K_tier_stuck_blocks > 0",
        2,
        "warning",
        f"Tier {{{{ $labels.medium }}}} of {_WHERE} hangs, and keeps {{{{ $value }}}} blocks from the pool.",
        "Check the mount or the server: the blocks come back when it answers, or when the engine is restarted.",
    ),
    Alert(
        "KVCacheHitRateFell",
        f"{_LOADED} / {_NEEDED} < 0.5 * ({_LOADED} / {_NEEDED}) and {_NEEDED} > 1"
        % ("[15m]", "[15m]", "[1h] offset 1d", "[1h] offset 1d", "[15m]"),
        30,
        "warning",
        f"Of what it needs, {_WHERE} hits less than half of what it did a day ago.",
        "Compare traffic and routing with yesterday's; ask `kvcache top` what more memory would hit.",
    ),
    Alert(
        "KVCacheStoresRejected",
        "rate(K_rejected_stores_total[10m]) > 0.1",
        10,
        "warning",
        f"There is no room for new blocks in {_WHERE}.",
        "All blocks are in use: loads are slow, a tier hangs on to blocks, or host memory is too small.",
    ),
    Alert(
        "KVCacheCorruptBlocks",
        "increase(K_tier_corrupt_blocks_total[1h]) > 0",
        0,
        "critical",
        f"Tier {{{{ $labels.medium }}}} of {_WHERE} gave back other bytes than were written.",
        "The blocks are computed again and nothing wrong is served. Check the medium, and replace it.",
    ),
    Alert(
        "KVCacheSchedulerBlocked",
        "increase(K_call_duration_seconds_count[1h]) - ignoring (le)"
        f' increase(K_call_duration_seconds_bucket{{le="{_SLOW_CALL}"}}[1h]) > 0.5',
        0,
        "info",
        f"In the last hour a call {{{{ $labels.call }}}} of {_WHERE} kept its scheduler for over 0.25 s.",
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
        width, height = (4, 4) if members[0].kind == "stat" else (8, 8)
        per_line = 24 // width
        for number, panel in enumerate(members):
            place = _at(width * (number % per_line), y + height * (number // per_line), width, height)
            panels.append(_panel(panel, len(panels) + 1, place, prefix))
        y += height * -(-len(members) // per_line)
    return {
        "title": "kvcache" if prefix == "kvcache_" else f"kvcache ({prefix.split(':')[0]})",
        "uid": re.sub(r"\W+", "-", prefix).strip("-_"),
        "schemaVersion": 39,
        "tags": ["kvcache"],
        "time": {"from": "now-3h", "to": "now"},
        "refresh": "30s",
        "graphTooltip": 1,  # the cursor is at one moment in all panels
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"},
                *(_variable(name, label, prefix) for name, label in _VARIABLES.items()),
            ]
        },
        "panels": panels,
    }


def _panel(panel: Panel, number: int, place: dict[str, int], prefix: str) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.most is not None:
        defaults["max"] = panel.most
    if panel.no_value is not None:
        defaults["noValue"] = panel.no_value
    if panel.unit == "none":
        defaults["decimals"] = 0  # `increase` extrapolates: 1 may be shown as 1.05
    if panel.kind != "timeseries":
        steps: list[dict[str, Any]] = [{"color": "text" if panel.alarm is None else "green", "value": None}]
        if panel.alarm is not None:
            steps.append({"color": "red", "value": panel.alarm})
        defaults["thresholds"] = {"mode": "absolute", "steps": steps}
        defaults["color"] = {"mode": "thresholds"}
    options: dict[str, Any]
    if panel.kind == "stat":
        options = {"reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False}, "graphMode": "area"}
        if panel.alarm is not None:
            options["colorMode"] = "background"
    else:
        legend = {"displayMode": "table", "placement": "bottom", "showLegend": True, "calcs": ["lastNotNull", "max"]}
        options = {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}}
    if panel.kind == "state-timeline":
        states = {"0": {"text": "works", "color": "green"}, "1": {"text": "not available", "color": "red"}}
        defaults["mappings"] = [{"type": "value", "options": states}]
        legend = {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []}
        options = {"showValue": "never", "mergeValues": True, "rowHeight": 0.9, "legend": legend}
    if panel.is_bars:
        defaults["custom"] = {"drawStyle": "bars", "fillOpacity": 60, "stacking": {"mode": "normal"}}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.text,
        "datasource": _DATASOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "gridPos": place,
        "targets": [
            {
                "refId": chr(65 + i),
                "expr": query(expression, prefix, _SELECTED),
                # vLLM tells engines apart by one number.
                "legendFormat": legend if prefix == "kvcache_" else legend.replace("/{{rank}}", ""),
            }
            for i, (legend, expression) in enumerate(panel.queries.items())
        ],
    }


_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


def _variable(name: str, label: str, prefix: str) -> dict[str, Any]:
    """Return a variable that offers a label's values, all of them by default."""
    values = query(f"label_values(K_capacity_blocks, {name})", prefix)
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": _DATASOURCE,
        "query": {"query": values, "refId": name},
        "refresh": 2,  # when the time range changes
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
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
    for one in _exported():
        name = f"kvcache_{one.name}{'_total' if one.kind == 'counter' else ''}"
        if name not in seen:
            seen.add(name)
            labels = ", ".join(f"`{label}`" for label in _label_names(one.labels))
            lines.append(f"| `{name}` | {one.kind} | {labels} | {one.help} |")
    return "\n".join(lines) + "\n"


def _label_names(labels: Iterable[tuple[str, str]]) -> list[str]:
    return [name for name, _ in labels]
