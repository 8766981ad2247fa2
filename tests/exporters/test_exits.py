"""A process that ends while exporters, and a recorder run neither crashes nor hangs."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ENGINE = """
import atexit, os, sys, threading, time
from pathlib import Path

from kvcache import CPUOffloadingManager, Recorder, ReqContext
from kvcache.control.telemetry import Telemetry
from kvcache.exporters.prometheus import PrometheusExporter
from kvcache.exporters.status import StatusServer, ask

way, folder = sys.argv[1], Path(sys.argv[2])
manager = CPUOffloadingManager(16, 64, enable_events=True)
telemetry = Telemetry(manager, time_calls=True)
status, prometheus = StatusServer(telemetry, folder / "s.sock"), PrometheusExporter(telemetry, 0)
recorder = Recorder(manager, folder / "run.kvlog")

def schedule():
    for number in range(10**9):
        context, keys = ReqContext(), [b"%012d" % (number % 500 + i) for i in range(8)]
        output = manager.prepare_store(keys, context)
        if output is not None:
            manager.complete_store(output.keys_to_store, context)
        manager.on_request_finished(context)

def watch():
    while True:
        ask(folder / "s.sock", "status")

def quietly(work):
    try:
        work()
    except (OSError, ValueError):
        pass

for work in (schedule, watch):
    threading.Thread(target=quietly, args=(work,), daemon=True).start()
time.sleep(0.2)
closes = [status.close, prometheus.close, recorder.stop]
if way == "closed in half":
    closes[0]()
elif way == "at exit":
    for close in closes:
        atexit.register(close)
elif way == "dropped":
    del status, prometheus, recorder, closes, telemetry
elif way == "forked":
    child = os.fork()
    if child == 0:
        sys.exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
print("end")
"""


@pytest.mark.parametrize("way", ["left open", "closed in half", "at exit", "dropped", "forked"])
def test_process_ends_while_threads_are_busy(sockets: Path, way: str) -> None:
    # Import them here, so that a missing package skips the test.
    for name in ("msgspec", "prometheus_client"):
        importlib.import_module(name)
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-X", "faulthandler", "-c", ENGINE, way, str(sockets)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == ["end"]
    assert "Traceback" not in ended.stderr
