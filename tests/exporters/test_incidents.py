"""Scripted incidents of engines in a real Prometheus: each alert fires in its own incident, and every panel has data.

Engines run on a simulated clock, in steps of five minutes. Prometheus gets the metrics that they count.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine import Engine
from servers import free_port
from waiting import wait_until

from kvcache import DiskTier, ReqContext, TierConfig, TieredOffloadingManager
from kvcache.control.telemetry import Telemetry
from kvcache.core.histogram import Histogram
from kvcache.exporters.dashboard import dashboard, rules
from kvcache.exporters.prometheus import TelemetryCollector
from kvcache.metrics import (
    JOB_EXPONENTS,
    EngineStats,
    EvictionStats,
    HistogramData,
    NodeStats,
    OwnerStats,
    Part,
    TransferStats,
)
from kvcache.testing.tiers import ManualTier
from kvcache.tiers.base.tier import TierResult
from kvcache.tiers.base.wear import DAY_S, Wear, uptime_s
from kvcache.tiers.disk.tier import DiskOptions

STEP_MIN = 5
# Two hours of yesterday, and the same two of today; the incident begins half an hour into today's.
YESTERDAY = range(0, 2 * 60 + 1, STEP_MIN)
TODAY = range(24 * 60, 26 * 60 + 1, STEP_MIN)
INCIDENT_MIN = 24 * 60 + 30
NUM_BLOCKS = 120
Series = dict[str, dict[int, float]]
ALERTS = [
    {name: text.strip("'").replace("''", "'") for name, text in re.findall(r"(\w+): (.+)", "alert" + rule)}
    for rule in rules().split("- alert")[1:]
]


class ScriptedTier(ManualTier):
    """A tier whose jobs end at once, unless `fault` makes them fail (``"error"``), stay (``"hang"``) or end late."""

    medium = "DISK"

    def __init__(self) -> None:
        super().__init__(1000)
        self.fault = ""

    def lookup(self, keys: list[bytes]) -> int | None:
        if self.fault == "slow":
            self.fault = ""
            time.sleep(0.3)
        return super().lookup(keys)

    def get_finished(self) -> list[TierResult]:
        while self.pending and self.fault != "hang":
            self.end(self.pending[0], "no such host" if self.fault == "error" else "")
        return super().get_finished()


class TieredEngine(Engine):
    """A scheduler's loop over a manager with one tier, on a simulated clock."""

    def __init__(self, name: str, tier: Any = None) -> None:
        self.name = name
        self.now_s = 1000.0
        self.tier = ScriptedTier() if tier is None else tier
        config = TierConfig(deadline_s=5.0, pause_s=1e6)
        super().__init__(
            TieredOffloadingManager(16, NUM_BLOCKS, [(self.tier, config)], enable_events=True, clock=lambda: self.now_s)
        )
        # Calls take real time, which the test does not control, so only the slow engine times them.
        self.telemetry = Telemetry(self.manager, block_bytes=4096, labels={"engine": "0"}, time_calls=name == "slow")
        self.copies = Histogram(1e-9, *JOB_EXPONENTS)
        self.ages = Histogram(1e-2, 0, 26)
        self.telemetry.sources.append(self.planted)
        self.serial = 0
        self.hold = ReqContext()

    def planted(self) -> list[Part]:
        """Return the statistics of a worker, and ages at eviction, which depend on real time."""
        data = HistogramData(*self.copies.data())
        stats = TransferStats(data.count, 1, 4096 * data.count, data, data)
        parts = [Part("transfer", stats, (("source", "GPU"), ("destination", "CPU")))]
        is_alone = self.name in ("down", "idle") and bool(self.tier.fault)
        reason = "the owner has ended" * is_alone
        parts.append(Part("node", NodeStats(self.serial, 9 * (is_alone and self.name == "down"), reason)))
        if self.name == "healthy":
            parts += [Part("owner", OwnerStats()), Part("engine", EngineStats(), (("number", "0"),))]
            parts.append(Part("eviction", EvictionStats(HistogramData(*self.ages.data()))))
        return parts

    def wait(self) -> None:
        super().wait()
        self.now_s += 0.5
        time.sleep(0.001 * isinstance(self.tier, DiskTier))

    def request(self, keys: list[bytes]) -> None:
        self.now_s += 0.01
        self.copies.observe(0.002)
        self.ages.observe(60.0)
        self.serve(keys)

    def serve_step(self, is_incident: bool) -> None:
        """Serve the requests of one step, 350 blocks in all: most of a request is a known prefix, the rest is new."""
        if is_incident and self.name == "idle" and self.tier.fault:
            return
        for number in range(35):  # twenty prefixes, which do not fit into host memory
            is_new = is_incident and self.name == "cold"
            prefix = self.serial if is_new else number % 20
            self.serial += 1
            known = [b"%d prefix %d, %d" % (is_new, prefix, i) for i in range(8)]
            self.request([*known, *(b"tail %d, %d" % (self.serial, i) for i in range(2))])

    def begin(self) -> None:
        """Begin the incident that gives the engine its name."""
        if self.name == "idle":
            # The owner ends with the last request.
            self.serve_step(True)
            self.tier.fault = "none"
        if self.name in ("down", "hung"):
            self.tier.fault = {"down": "error", "hung": "hang"}[self.name]
        while self.name == "slow" and not self.worst_lookup_s() > 0.25:
            # This engine makes many calls a second, so only a sample of them is timed.
            self.tier.fault = "slow"
            self.serial += 1
            self.request([b"slow %d" % self.serial])
        if self.name == "full":
            keys = [b"held %d" % i for i in range(NUM_BLOCKS)]
            assert self.manager.prepare_store(keys, self.hold) is not None
            self.manager.complete_store(keys, self.hold)
            self.manager.on_schedule_end()
            self.manager.on_schedule_end()
            self.manager.prepare_load(keys, self.hold)

    def worst_lookup_s(self) -> float:
        calls = (part for part in self.telemetry.parts() if part.labels == (("call", "lookup"),))
        return max(part.stats.worst_seconds for part in calls)

    def sample(self, minute: int, series: Series) -> None:
        for family in TelemetryCollector(self.telemetry).collect():
            for one in family.samples:
                labels = {"job": "kvcache", "instance": f"{self.name}:9464", **one.labels}
                listed = ",".join(f"{name}={json.dumps(value)}" for name, value in sorted(labels.items()))
                series.setdefault(f"{one.name}{{{listed}}}", {})[minute] = one.value


class DamagedDisk(TieredEngine):
    """An engine over a real disk tier, whose file the test overwrites."""

    def __init__(self, folder: Path) -> None:
        self.data = folder / "data"
        pool = np.zeros((NUM_BLOCKS, 4096), dtype=np.uint8)
        super().__init__("damaged", DiskTier(DiskOptions(path=folder, capacity=1 << 20), pool, {}))

    def serve_step(self, is_incident: bool) -> None:
        pass

    def begin(self) -> None:
        keys = [b"%32d" % i for i in range(NUM_BLOCKS + 10)]
        for key in keys:
            self.request([key])
            assert self.manager.settle()
        with self.data.open("r+b", buffering=0) as file:
            os.pwrite(file.fileno(), b"\xff" * self.data.stat().st_size, 0)
        # Five drive writes on the day before.
        now_s = uptime_s()
        times = iter([now_s - DAY_S])
        busy = Wear(self.tier.wear.num_blocks, 4096, clock=lambda: next(times, now_s))
        busy.spend(5 * busy.num_blocks)
        self.tier.wear.restore(busy.record()[0])
        self.request(keys[:1])


@pytest.fixture(scope="module")
def series(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Series]:
    """Run every engine through both days; return its metrics by series and minute."""
    engines = [TieredEngine(name) for name in ("healthy", "cold", "down", "hung", "full", "slow", "idle")]
    engines.append(DamagedDisk(tmp_path_factory.mktemp("disk")))
    found: Series = {}
    for minute in [*YESTERDAY, *TODAY]:
        for engine in engines:
            if minute < TODAY[0] and engine.name not in ("healthy", "cold"):
                continue  # another instance name yesterday, as after an update
            engine.now_s = 1000.0 + 60 * minute
            if minute == INCIDENT_MIN:
                engine.begin()
            engine.serve_step(minute >= INCIDENT_MIN)
            engine.sample(minute, found)
    yield found
    for engine in engines:
        engine.telemetry.close()
        engine.manager.shutdown()


def labels_of(name: str) -> dict[str, str]:
    return dict(re.findall(r'(\w+)="([^"]*)"', name))


def values(points: dict[int, float]) -> str:
    """Return a series in the syntax of promtool's tests."""
    minutes = range(0, TODAY[-1] + 1, STEP_MIN)
    return " ".join(str(points[minute]) if minute in points else "_" for minute in minutes)


# An alert of a single event ends after an hour; the others continue.
MOMENTS = {"before": INCIDENT_MIN - STEP_MIN, "soon": INCIDENT_MIN + 2 * STEP_MIN, "after": TODAY[-1]}
FIRES = {
    "KVCacheTierUnavailable": ({"down", "hung"}, ("soon", "after")),
    "KVCacheTierHangs": ({"hung"}, ("soon", "after")),
    "KVCacheHitRateFell": ({"cold"}, ("after",)),
    "KVCacheStoresRejected": ({"full"}, ("after",)),
    "KVCacheCorruptBlocks": ({"damaged"}, ("soon",)),
    "KVCacheDiskWearsOut": ({"damaged"}, ("soon", "after")),
    "KVCacheSchedulerBlocked": ({"slow"}, ("soon",)),
    "KVCacheNodeUnavailable": ({"down"}, ("soon", "after")),
    "KVCacheNodeOutages": ({"down"}, ("soon",)),
}
"""The engines that each alert fires for, and when."""


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_alert_fires_in_its_incident_only(series: Series, alert: Any, moment: str, tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("needs promtool, of Debian's package prometheus")
    (tmp_path / "rules.yml").write_text(rules(), encoding="utf-8")
    named = set(re.findall(r"kvcache_\w+", rules()))
    given = {name: points for name, points in series.items() if name.partition("{")[0] in named}
    if alert["alert"] == "KVCacheSchedulerBlocked":
        # Other calls of this process may be slow on a loaded machine.
        given = {name: points for name, points in given.items() if labels_of(name).get("call") == "lookup"}
    expected = []
    instances, moments = FIRES[alert["alert"]]
    for instance in instances if moment in moments else ():
        own = {name: points for name, points in given.items() if labels_of(name)["instance"] == f"{instance}:9464"}
        metric = {"KVCacheHitRateFell": "loaded_blocks_total", "KVCacheStoresRejected": "rejected_stores_total"}
        metric |= {"KVCacheSchedulerBlocked": "call_duration_seconds_count"}
        shown = metric.get(alert["alert"], re.findall(r"kvcache_(\w+)", alert["expr"])[0])
        (name,) = (one for one in own if one.startswith(f"kvcache_{shown}{{"))
        labels = labels_of(name)
        if alert["alert"] == "KVCacheHitRateFell":
            del labels["policy"]
        texts = [alert["summary"], alert["action"]]
        for label, value in {**labels, "$value": f"{own[name][MOMENTS[moment]]:g}"}.items():
            texts = [text.replace(f"{{{{ $labels.{label} }}}}", value) for text in texts]
            texts = [text.replace(f"{{{{ {label} }}}}", value) for text in texts]
        annotations = dict(zip(("summary", "action"), texts, strict=True))
        expected.append({"exp_labels": {"severity": alert["severity"], **labels}, "exp_annotations": annotations})
    case = {"eval_time": f"{MOMENTS[moment]}m", "alertname": alert["alert"], "exp_alerts": expected}
    inputs = [{"series": name, "values": values(points)} for name, points in given.items()]
    test = {"interval": f"{STEP_MIN}m", "input_series": inputs, "alert_rule_test": [case]}
    (tmp_path / "test.yml").write_text(
        json.dumps({"rule_files": ["rules.yml"], "evaluation_interval": f"{STEP_MIN}m", "tests": [test]}),
        encoding="utf-8",
    )
    checked = subprocess.run([promtool, "test", "rules", "test.yml"], cwd=tmp_path, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr


class Prometheus:
    """A server with the samples of a run, which end an hour ago; it scrapes nothing."""

    def __init__(self, series: Series, folder: Path) -> None:
        self.end_s = int(time.time()) // 60 * 60 - 3600
        lines = [
            f"{name} {value} {self.end_s - 60 * (TODAY[-1] - minute)}\n"
            for name, points in series.items()
            for minute, value in points.items()
            if minute >= TODAY[0]
        ]
        (folder / "samples.txt").write_text("".join(lines) + "# EOF\n", encoding="utf-8")
        made = ["promtool", "tsdb", "create-blocks-from", "openmetrics", "samples.txt", "data"]
        subprocess.run(made, cwd=folder, check=True, capture_output=True)
        (folder / "prometheus.yml").write_text("global: {}\n", encoding="utf-8")
        address = f"127.0.0.1:{free_port()}"
        self.url, self.log = f"http://{address}", folder / "log"
        with self.log.open("wb") as log:
            options = ["--config.file=prometheus.yml", "--storage.tsdb.path=data", f"--web.listen-address={address}"]
            self.process = subprocess.Popen(["prometheus", *options], cwd=folder, stderr=log)
        wait_until(self.is_ready)

    def is_ready(self) -> bool:
        assert self.process.poll() is None, self.log.read_text(encoding="utf-8")
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/-/ready", timeout=5):
            return True
        return False

    def ask(self, expression: str) -> list[dict[str, Any]]:
        query = urllib.parse.urlencode({"query": expression, "time": self.end_s})
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/query?{query}", timeout=30) as answer:
                found = json.load(answer)
        except urllib.error.HTTPError as error:
            pytest.fail(f"{expression}: {error.read().decode()}")
        return list(found["data"]["result"])

    def panel(self, title: str, **chosen: str) -> dict[str, dict[str, float]]:
        """Return the results of each query of a panel: by legend, then by instance."""
        (panel,) = (one for one in dashboard()["panels"] if one["title"] == title)
        found = {}
        for target in panel["targets"]:
            text = target["expr"].replace("$__rate_interval", "15m").replace("$__range", "2h")
            for name in ("job", "instance", "engine"):
                text = text.replace(f"${name}", chosen.get(name, ".*"))
            assert "$" not in text
            names = ((one["metric"].get("instance", ""), one["value"][1]) for one in self.ask(text))
            found[target["legendFormat"]] = {name.removesuffix(":9464"): float(value) for name, value in names}
        return found


@pytest.fixture(scope="module")
def prometheus(series: Series, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    if shutil.which("prometheus") is None or shutil.which("promtool") is None:
        pytest.skip("needs Debian's package prometheus")
    server = Prometheus(series, tmp_path_factory.mktemp("prometheus"))
    yield server
    server.process.terminate()
    server.process.wait()


PANELS = [panel["title"] for panel in dashboard()["panels"] if panel["type"] != "row"]


@pytest.mark.parametrize("title", PANELS)
def test_every_panel_query_returns_a_number(prometheus: Prometheus, title: str) -> None:
    for legend, by_instance in prometheus.panel(title).items():
        assert by_instance, f"{legend}: no data"
        assert all(value == value for value in by_instance.values()), f"{legend}: NaN"


def test_panels_show_the_incidents(prometheus: Prometheus) -> None:
    (by_instance,) = prometheus.panel("Hit rate").values()
    assert by_instance.keys() == {"healthy", "cold", "down", "full", "hung", "slow"}  # the others need no blocks
    assert by_instance["healthy"] == pytest.approx(0.8)
    assert by_instance["cold"] == by_instance["full"] == 0
    works, reads, writes = prometheus.panel("Tier state").values()
    assert {name for name, value in works.items() if value} == {"down", "hung"}
    assert {name for name, value in writes.items() if value} == {"down", "hung"}
    assert {name for name, value in reads.items() if value} <= {"down", "hung"}
    assert prometheus.panel("Tiers unavailable") == {"tiers": {"": 2}}
    assert prometheus.panel("Engines") == {"engines": {"": 8}}
    assert prometheus.panel("Alerts firing") == {"alerts": {"": 0}}
    assert prometheus.panel("Corrupt blocks")["blocks"][""] >= 1
    assert prometheus.panel("Stores rejected")["stores"][""] > 100


def test_variables_choose_engines(prometheus: Prometheus) -> None:
    assert prometheus.panel("Engines", instance="(cold|down):9464") == {"engines": {"": 2}}
    assert prometheus.panel("Engines", job="other") == {"engines": {}}
    (by_instance,) = prometheus.panel("Hit rate", instance="cold:9464").values()
    assert by_instance == {"cold": 0}
