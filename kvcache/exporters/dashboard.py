"""The Grafana dashboard and the alert rules, which are files beside this one, and the names that they may use.

`dashboard.json` lists the panels in their order, each with what sets it apart; `dashboard` adds what all have. Edit it
and `rules.yaml` by hand: a test looks up every name that they query.
"""

from __future__ import annotations

import json
import re
from importlib.resources import files
from typing import Any

from kvcache.assembly.reported import every_sample
from kvcache.exporters.status import StatusStats
from kvcache.metrics import EngineStats, OwnerStats, Part, Sample, samples_of

PREFIX = "kvcache_"
_CHOSEN = ("job", "instance", "engine")
"""Labels that a user of the dashboard chooses values of."""
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_SIZES = {"row": (24, 1), "stat": (4, 4)}
_LINES = {
    "legend": {"displayMode": "table", "placement": "bottom", "showLegend": True, "calcs": ["lastNotNull", "max"]},
    "tooltip": {"mode": "multi", "sort": "desc"},
}
_OPTIONS: dict[str, dict[str, Any]] = {
    "stat": {"reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False}, "graphMode": "area"},
    "state-timeline": {
        "showValue": "never",
        "mergeValues": True,
        "rowHeight": 0.9,
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
    },
}
_ENDS = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}


def series_names(prefix: str = PREFIX) -> set[str]:
    """Return the names of all time series that Prometheus stores.

    `prefix` is ``"kvcache_"``, or ``"vllm:kvcache_"`` under vLLM. The names of a counter end in ``_total``, those of a
    histogram in ``_bucket``, ``_sum`` and ``_count``.
    """
    # vLLM has its own metrics of copies.
    samples = _exported() if prefix == PREFIX else every_sample(with_transfers=False)
    return {prefix + sample.name + end for sample in samples for end in _ENDS[sample.kind]}


def dashboard(prefix: str = PREFIX) -> dict[str, Any]:
    """Return Grafana's JSON model of the dashboard, for import, with `prefix` as of `series_names`."""
    panels = _placed(json.loads(_read("dashboard.json", prefix)))
    name = "kvcache"
    if prefix != PREFIX:
        panels = _with_data(panels, series_names(prefix))
        name = f"kvcache ({prefix.partition(':')[0]})"
    variables = [_variable(label, prefix) for label in _CHOSEN]
    return {
        "title": name,
        "uid": "kvcache" if prefix == PREFIX else re.sub(r"\W+", "-", prefix).strip("-_"),
        "schemaVersion": 39,
        "tags": ["kvcache"],
        "time": {"from": "now-3h", "to": "now"},
        "refresh": "30s",
        "graphTooltip": 1,
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"},
                *variables,
            ]
        },
        "panels": panels,
    }


def _variable(label: str, prefix: str) -> dict[str, Any]:
    """Return the variable that chooses values of a label, all by default."""
    return {
        "name": label,
        "label": label.capitalize(),
        "type": "query",
        "datasource": _SOURCE,
        "query": {"query": f"label_values({prefix}capacity_blocks, {label})", "refId": label},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def _placed(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return Grafana's panels: from left to right in 24 columns, each row of panels below a title."""
    panels: list[dict[str, Any]] = []
    x = y = height = 0
    for number, entry in enumerate(entries, 1):
        width, new_height = _SIZES.get(entry["type"], (8, 8))
        if x + width > 24:
            x, y = 0, y + height
        height = new_height
        place = {"x": x, "y": y, "w": width, "h": height}
        panels.append({**_panel(entry), "id": number, "gridPos": place})
        x += width
    return panels


def _panel(entry: dict[str, Any]) -> dict[str, Any]:
    """Return a panel without its place."""
    fields = dict(entry)
    kind, title = fields.pop("type"), fields.pop("title")
    if kind == "row":
        return {"type": kind, "title": title, "panels": []}
    description, queries, red = fields.pop("description"), fields.pop("targets"), fields.pop("red", None)
    if kind != "timeseries" and "unit" not in fields:
        fields |= {"unit": "none", "decimals": 0}
    if kind in ("stat", "state-timeline"):
        steps = [{"color": "text", "value": None}]
        if red is not None:
            steps = [{"color": "green", "value": None}, {"color": "red", "value": red}]
        fields |= {"thresholds": {"mode": "absolute", "steps": steps}, "color": {"mode": "thresholds"}}
    if kind == "bars":
        fields["custom"] = {"drawStyle": "bars", "fillOpacity": 60, "stacking": {"mode": "normal"}}
    if kind == "state-timeline":
        states = {"0": {"text": "works", "color": "green"}, "1": {"text": "unavailable", "color": "red"}}
        fields["mappings"] = [{"type": "value", "options": states}]
    options = dict(_OPTIONS.get(kind, _LINES))
    if kind == "stat" and red is not None:
        options["colorMode"] = "background"
    # Every query is limited to the engines that the user has chosen.
    chosen = ", ".join(f'{label}=~"${label}"' for label in _CHOSEN)
    return {
        "type": "timeseries" if kind == "bars" else kind,
        "title": title,
        "description": description,
        "datasource": _SOURCE,
        "fieldConfig": {"defaults": {"min": 0, **fields}, "overrides": []},
        "options": options,
        "targets": [
            {"refId": chr(ord("A") + i), "expr": query.replace("$chosen", chosen), "legendFormat": legend}
            for i, (legend, query) in enumerate(queries.items())
        ],
    }


def _with_data(panels: list[dict[str, Any]], names: set[str]) -> list[dict[str, Any]]:
    """Return the panels that query a known series or an alert, without rows that are left empty."""

    def has_data(panel: dict[str, Any]) -> bool:
        query = " ".join(target["expr"] for target in panel.get("targets", ()))
        return panel["type"] == "row" or "ALERTS" in query or not names.isdisjoint(re.findall(r"[\w:]+", query))

    shown = [*filter(has_data, panels)]
    following = [*shown[1:], {"type": "row"}]
    return [
        panel for panel, after in zip(shown, following, strict=True) if panel["type"] != "row" or after["type"] != "row"
    ]


def rules(prefix: str = PREFIX, docs_url: str | None = None) -> str:
    """Return the alert rules as YAML, with `prefix` as of `series_names`.

    With the address of these pages, `docs_url`, each alert has a `runbook_url`, its section on the operator's page.
    """
    text = _read("rules.yaml", prefix)
    if docs_url is None:
        return text
    page = f"{docs_url.rstrip('/')}/howto/operate.html"
    return re.sub(
        r"- alert: (\w+)\n(?:.*\n)*?( +)annotations:\n",
        lambda alert: f"{alert[0]}{alert[2]}  runbook_url: {json.dumps(f'{page}#{alert[1].lower()}')}\n",
        text,
    )


def as_markdown_table() -> str:
    """Return every exported metric as the docs show it."""
    rows: dict[str, str] = {}
    for sample in _exported():
        name = f"{PREFIX}{sample.name}{'_total' if sample.kind == 'counter' else ''}"
        labels = ", ".join(f"`{label}`" for label, _ in sample.labels)
        rows.setdefault(name, f"| `{name}` | {sample.kind} | {labels} | {sample.help} |\n")
    return "| name | kind | labels | meaning |\n|---|---|---|---|\n" + "".join(rows.values())


def _exported() -> list[Sample]:
    """Return a sample of every metric of an engine, its status socket, and the owner of a node's pool."""
    engine = Part("engine", EngineStats(), (("number", "0"),))
    others = Part("status", StatusStats()), Part("owner", OwnerStats()), engine
    return [*every_sample(), *(sample for part in others for sample in samples_of(part, 1, 1))]


def _read(name: str, prefix: str) -> str:
    text = files("kvcache.exporters").joinpath(name).read_text(encoding="utf-8")
    # vLLM's label `engine` is unique; it has no label `rank`.
    return text if prefix == PREFIX else text.replace(PREFIX, prefix).replace("/{{rank}}", "")
