"""The Grafana dashboard and the alert rules, which are files beside this one, and the names that they may use.

Edit `dashboard.json` in Grafana and `rules.yaml` by hand; a test looks up every name that they query.
"""

from __future__ import annotations

import json
import re
from importlib.resources import files
from typing import Any

from kvcache.assembly.reported import every_sample
from kvcache.exporters.status import StatusStats
from kvcache.metrics import Part, Sample, samples_of

PREFIX = "kvcache_"
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
    made: dict[str, Any] = json.loads(_read("dashboard.json", prefix))
    if prefix != PREFIX:
        made["panels"] = _with_data(made["panels"], series_names(prefix))
        made["title"] = f"kvcache ({prefix.partition(':')[0]})"
        made["uid"] = re.sub(r"\W+", "-", prefix).strip("-_")
    return made


def _with_data(panels: list[dict[str, Any]], names: set[str]) -> list[dict[str, Any]]:
    """Return the panels that query a known series or an alert, without rows that are left empty."""
    queries = {id(panel): " ".join(target["expr"] for target in panel.get("targets", ())) for panel in panels}
    shown = [
        panel
        for panel in panels
        if panel["type"] == "row"
        or "ALERTS" in queries[id(panel)]
        or names & set(re.findall(r"[\w:]+", queries[id(panel)]))
    ]
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
    for one in _exported():
        name = f"{PREFIX}{one.name}{'_total' if one.kind == 'counter' else ''}"
        labels = ", ".join(f"`{label}`" for label, _ in one.labels)
        rows.setdefault(name, f"| `{name}` | {one.kind} | {labels} | {one.help} |\n")
    return "| name | kind | labels | meaning |\n|---|---|---|---|\n" + "".join(rows.values())


def _exported() -> list[Sample]:
    """Return a sample of every metric on an engine's own ``/metrics``, that of its status socket too."""
    return [*every_sample(), *samples_of(Part("status", StatusStats()), 1, 1)]


def _read(name: str, prefix: str) -> str:
    text = files("kvcache.exporters").joinpath(name).read_text(encoding="utf-8")
    # vLLM's label `engine` is unique; it has no label `rank`.
    return text if prefix == PREFIX else text.replace(PREFIX, prefix).replace("/{{rank}}", "")
