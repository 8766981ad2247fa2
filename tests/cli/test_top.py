"""The output of `kvcache top`."""

import io
import itertools
import signal
import subprocess
import sys

import numpy as np
import pytest
from rich.console import Console

from kvcache import ReqContext, TieredOffloadingManager
from kvcache.cli.frames import Frame, History
from kvcache.cli.top import view
from kvcache.control.telemetry import Telemetry
from kvcache.exporters.status import StatusServer
from kvcache.tiers.memory import MemoryOptions, MemoryTier


@pytest.fixture
def telemetry(sockets, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    host_blocks = np.zeros((8, 16), dtype=np.uint8)
    manager = TieredOffloadingManager(16, 8, [MemoryTier(MemoryOptions(32 * 16), host_blocks)], "arc")
    context = ReqContext()
    output = manager.prepare_store([b"%d" % number for number in range(6)], context)
    manager.complete_store(output.keys_to_store, context)
    manager.on_request_finished(context)
    assert manager.settle()
    telemetry = Telemetry(manager, block_bytes=1 << 20, time_calls=True)
    yield telemetry
    telemetry.close()
    manager.shutdown()


def test_socket_frame_shows_media(telemetry, run):
    telemetry.exporters.append(StatusServer(telemetry))
    code, out, _ = run("top", "--once", "--interval", "0.1")
    assert code == 0
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert any(line.startswith("kvcache engine=0 rank=0 policy=arc") for line in lines)
    assert "loaded - - - 0.0% 0 blocks/s" in lines
    assert {"host 6 8 6 MiB 0 B 0 B 0", "MEMORY 6 32 6 MiB 0 B 0 B 0 works"} <= set(lines)


def shown(values, fault="", width=80, address="x", labels=None):
    """Return the lines that show one frame."""
    history = History()
    history.add(Frame(0.0, values, labels or {}))
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(view(address, history, fault))
    return console.export_text().splitlines()


def tier_values(number, medium="DISK"):
    tier = (("medium", medium), ("tier", str(number)))
    return {
        ("tier_held_blocks", tier): 1_234_567.0,
        ("tier_capacity_blocks", tier): 2_000_000.0,
        ("tier_held_bytes", tier): 1.3e13,
        ("tier_reads_breaker", (*tier, ("state", "closed"))): 0.0,
        ("tier_writes_breaker", (*tier, ("state", "closed"))): 1.0,
    }


def test_engine_with_tier_fits_small_terminal():
    values = {("capacity_blocks", ()): 1e6, ("capacity_bytes", ()): 2e12, ("needed_blocks", ()): 9e9}
    values |= {("call_worst_seconds", (("call", name),)): 0.01 for name in ("lookup", "touch", "complete_store")}
    address = "/run/user/1000/kvcache-1000/status-1234567.sock " + "x" * 80
    labels = {"engine": "0", "rank": "0", "policy": "arc"}
    lines = shown(values | tier_values(0), address=address, labels=labels)
    assert len(lines) == 13
    assert [line for line in lines if "…" in line] == [lines[0]]  # the address alone
    assert " ".join(lines[10].split()) == "DISK 1,234,567 2,000,000 11.82 TiB 0 B 0 B 0 reads paused"


def test_tiers_of_one_medium_differ():
    lines = shown(tier_values(0) | tier_values(1) | tier_values(2, "VALKEY"), width=120)
    named = [line.partition(" 1,234")[0].rstrip() for line in lines if "1,234,567" in line]
    assert named == ["DISK 0", "DISK 1", "VALKEY"]


def test_frames_without_terminal_are_printed(telemetry):
    telemetry.exporters.append(StatusServer(telemetry))
    command = "from kvcache.cli import main; main(['top', '--interval', '0.1'])"
    with subprocess.Popen([sys.executable, "-c", command], stdout=subprocess.PIPE, text=True) as process:
        heads = [line for line in itertools.islice(process.stdout, 40) if line.startswith("kvcache  engine=0")]
        process.send_signal(signal.SIGINT)
        process.stdout.read()
    assert len(heads) >= 2
    assert process.returncode == 0
    assert not any("\x1b" in head for head in heads)


def frames(*counts):
    history = History()
    for time_s, loaded, needed in counts:
        history.add(Frame(time_s, {("loaded_blocks", ()): loaded, ("needed_blocks", ()): needed}))
    return history


def test_hit_rates_are_over_their_windows():
    history = frames((0, 0, 0), (600, 500, 1000), (870, 700, 1200), (900, 701, 1300))
    assert history.ratio("loaded_blocks", "needed_blocks", 60) == pytest.approx(1 / 100)
    assert history.ratio("loaded_blocks", "needed_blocks", 300) == pytest.approx(201 / 300)
    assert history.ratio("loaded_blocks", "needed_blocks", 900) == pytest.approx(701 / 1300)
    assert frames((0, 5, 9)).ratio("loaded_blocks", "needed_blocks", 60) is None
    history.add(Frame(1801, {("loaded_blocks", ()): 800.0, ("needed_blocks", ()): 1400.0}))
    assert len(history.frames) == 1  # the others are over a quarter of an hour old


def test_restarted_engine_begins_anew():
    history = frames((0, 50, 100), (10, 0, 5), (20, 1, 10))
    assert history.ratio("loaded_blocks", "needed_blocks", 900) == pytest.approx(1 / 5)


def test_paused_and_unavailable_tiers_are_named():
    tier = (("medium", "DISK"), ("tier", "0"))
    values = {
        ("tier_held_blocks", tier): 1.0,
        ("tier_reads_breaker", (*tier, ("state", "closed"))): 1.0,
        ("tier_writes_breaker", (*tier, ("state", "closed"))): 0.0,
        ("tier_writes_breaker", (*tier, ("state", "open"))): 1.0,
        ("tier_unavailable", tier): 1.0,
        ("call_worst_seconds", (("call", "touch"),)): 0.0125,
    }
    text = "\n".join(shown(values, fault="refused", width=160))
    assert all(part in text for part in ("writes paused", "12.50 ms", "not answering: refused")), text


def test_top_without_engine_fails(run, sockets):
    code, _, text = run("top", "--once")
    assert (code, "no engine answers" in text) == (2, True), text


def test_status_names_breakers_as_top_does(telemetry, run):
    telemetry.exporters.append(StatusServer(telemetry))
    code, out, _ = run("status")
    assert code == 0
    rows = {" ".join(line.split()) for line in out.splitlines()}
    assert {"tier 0 MEMORY reads works", "tier 0 MEMORY writes works", "tier 0 MEMORY life_years -"} <= rows
