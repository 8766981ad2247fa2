"""The Grafana dashboard and the alert rules, which are files beside this one, and the names that they may use.

Edit `dashboard.json` and `rules.yaml` by hand; only the prefix of names is filled in. A test looks up every name that
they query.
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
_LAST_ROWS = "Engines of a node's pool"
"""The first row of panels for which vLLM has no series."""
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
    model: dict[str, Any] = json.loads(_read("dashboard.json", prefix))
    if prefix != PREFIX:
        titles = [panel["title"] for panel in model["panels"]]
        model["panels"] = model["panels"][: titles.index(_LAST_ROWS)]
        # Grafana replaces a dashboard of the same uid.
        model["title"] = f"kvcache ({prefix.partition(':')[0]})"
        model["uid"] = re.sub(r"\W+", "-", prefix).strip("-_")
    return model


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
