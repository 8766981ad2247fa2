"""Dashboard and alert rules query only series that are exported."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvcache.exporters.dashboard import as_markdown_table, dashboard, rules, series_names

PREFIXES = ("kvcache_", "vllm:kvcache_")


@pytest.mark.parametrize("prefix", PREFIXES)
def test_every_query_names_series_that_exist(prefix: str) -> None:
    known = series_names(prefix)
    panels = [panel for panel in dashboard(prefix)["panels"] if panel["type"] != "row"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    queries += [one["query"]["query"] for one in dashboard(prefix)["templating"]["list"][1:]]
    alerts = re.findall(r"expr: (.*)", rules(prefix))
    assert (len(panels), len(alerts)) == (32 if prefix == PREFIXES[0] else 26, 9)
    for text in [*queries, *alerts]:
        named = set(re.findall(rf"(?<![\w:]){prefix}\w+", text))
        assert named or text.startswith("count(ALERTS{")  # exported by Prometheus itself
        assert named <= known, text


@pytest.mark.parametrize("prefix", PREFIXES)
def test_grafanas_own_models_read_every_field(prefix: str) -> None:
    from grafana_foundation_sdk.cog import plugins
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.models.dashboard import Dashboard

    plugins.register_default_plugins()
    made = dashboard(prefix)
    # The models drop unknown fields, and add fields that the dashboard omits.
    assert _in(made, json.loads(JSONEncoder().encode(Dashboard.from_json(made)))) == made


def _in(made: Any, read: Any) -> Any:
    """Return the fields of `read` that `made` has."""
    if isinstance(made, dict) and isinstance(read, dict):
        return {name: _in(value, read[name]) for name, value in made.items() if name in read}
    if isinstance(made, list) and isinstance(read, list) and len(made) == len(read):
        return [_in(*pair) for pair in zip(made, read, strict=True)]
    return read


def test_panels_have_own_places_and_ids() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in panels]
    assert len(set(taken)) == len(taken)


def test_commands_print_dashboard_rules_and_table(run: object) -> None:
    assert callable(run)
    code, out, _ = run("metrics", "dashboard")
    assert (code, json.loads(out)) == (0, dashboard())
    code, out, _ = run("metrics", "rules", "--prefix", "vllm:kvcache_")
    assert (code, out) == (0, rules("vllm:kvcache_"))
    code, out, _ = run("metrics", "table")
    assert (code, out) == (0, as_markdown_table())


def test_every_alert_links_its_section() -> None:
    text = rules(docs_url="https://docs.example/kvcache/")
    names = re.findall(r"alert: (\w+)", text)
    links = re.findall(r'runbook_url: "https://docs.example/kvcache/howto/operate.html#(\w+)"', text)
    assert links == [name.lower() for name in names]
    assert re.sub(r" *runbook_url: .*\n", "", text) == rules()


def test_table_names_every_metric(sockets: Path) -> None:
    from prometheus_client import CollectorRegistry, generate_latest

    from kvcache import CPUOffloadingManager
    from kvcache.control.telemetry import Telemetry
    from kvcache.exporters.prometheus import TelemetryCollector
    from kvcache.exporters.status import StatusServer

    telemetry = Telemetry(CPUOffloadingManager(16, 4), block_bytes=1, time_calls=True)
    telemetry.exporters.append(StatusServer(telemetry, sockets / "socket"))
    registry = CollectorRegistry(auto_describe=False)
    registry.register(TelemetryCollector(telemetry))
    page = generate_latest(registry).decode()
    telemetry.close()
    named = set(re.findall(r"^kvcache_\w+", page, re.MULTILINE))
    assert "kvcache_status_requests_total" in named
    assert named <= series_names()


def test_vllm_dashboard_has_no_empty_panel() -> None:
    titles = {panel["title"] for panel in dashboard("vllm:kvcache_")["panels"]}
    assert not titles & {"Transfers", "Device copies", "Copy, 99 %", "Failed copies"}
    assert {"Hit rate", "Tier state", "Alerts firing"} <= titles
