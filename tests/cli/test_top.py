"""`kvcache top`: what it shows, from a socket and from a page of metrics."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from kvcache import ReqContext, TieredOffloadingManager
from kvcache.cli.frames import Frame, History, parse_metrics
from kvcache.cli.top_view import view
from kvcache.control.telemetry import Telemetry
from kvcache.exporters.prometheus import start_server
from kvcache.exporters.status import StatusServer
from kvcache.tiers.memory import MemoryTier

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def telemetry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Telemetry]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "160")
    host_blocks = np.zeros((8, 16), dtype=np.uint8)
    manager = TieredOffloadingManager(16, 8, [MemoryTier(32, host_blocks)], "arc", what_if=True)
    context = ReqContext()
    output = manager.prepare_store([b"%d" % number for number in range(6)], context)
    assert output is not None
    manager.complete_store(output.keys_to_store, context)
    manager.on_request_finished(context)
    assert manager.settle()
    telemetry = Telemetry(manager, block_bytes=1 << 20, time_calls=True)
    yield telemetry
    telemetry.close()
    manager.shutdown()


def test_a_frame_from_the_socket_shows_media_tiers_and_the_what_if(telemetry: Telemetry, run: Run) -> None:
    telemetry.exporters.append(StatusServer(telemetry))
    code, out, _ = run("top", "--once", "--interval", "0.1")
    assert code == 0
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert any(line.startswith("kvcache engine=0 rank=0 policy=arc") for line in lines)
    assert "loaded - - - 0.0% 0 blocks" in lines
    assert "host memory 6 8 6 MiB 0 B 0 B 0 in use" in lines
    assert "MEMORY 6 32 6 MiB 0 B 0 B 0 backlog works" in lines
    assert any(line.startswith("policy 2 4 8* 16 32 64") for line in lines)
    assert any(line.startswith("arc*") for line in lines)


def test_a_page_of_metrics_shows_the_same(telemetry: Telemetry, run: Run) -> None:
    exporter = start_server(telemetry, 0)
    code, out, _ = run("top", "--once", "--interval", "0.1", "--url", exporter.address)
    assert code == 0
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "host memory 6 8 6 MiB 0 B 0 B 0 in use" in lines
    assert "MEMORY 6 32 6 MiB 0 B 0 B 0 backlog works" in lines
    exporter.close()


def frames(*counts: tuple[float, float, float]) -> History:
    history = History()
    for time_s, loaded, needed in counts:
        history.add(Frame(time_s, {("loaded_blocks", ()): loaded, ("needed_blocks", ()): needed}))
    return history


def test_hit_rates_are_over_their_windows() -> None:
    history = frames((0, 0, 0), (600, 500, 1000), (870, 700, 1200), (900, 701, 1300))
    assert history.ratio("loaded_blocks", "needed_blocks", 60) == pytest.approx(1 / 100)
    assert history.ratio("loaded_blocks", "needed_blocks", 300) == pytest.approx(201 / 300)
    assert history.ratio("loaded_blocks", "needed_blocks", 900) == pytest.approx(701 / 1300)
    assert frames((0, 5, 9)).ratio("loaded_blocks", "needed_blocks", 60) is None
    history.add(Frame(1801, {("loaded_blocks", ()): 800.0, ("needed_blocks", ()): 1400.0}))
    assert len(history.frames) == 1  # the others are over a quarter of an hour old


def test_an_engine_that_restarts_begins_anew() -> None:
    history = frames((0, 50, 100), (10, 0, 5), (20, 1, 10))
    assert history.ratio("loaded_blocks", "needed_blocks", 900) == pytest.approx(1 / 5)


def test_paused_and_unavailable_tiers_are_named() -> None:
    tier = (("medium", "DISK"), ("tier", "0"))
    values = {
        ("tier_held_blocks", tier): 1.0,
        ("tier_reads_breaker", (*tier, ("state", "closed"))): 1.0,
        ("tier_writes_breaker", (*tier, ("state", "closed"))): 0.0,
        ("tier_writes_breaker", (*tier, ("state", "open"))): 1.0,
        ("tier_unavailable", tier): 1.0,
        ("call_worst_seconds", (("call", "touch"),)): 0.0125,
    }
    history = History()
    history.add(Frame(0.0, values))
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(view("x", history, None, "refused"))
    text = console.export_text()
    assert "writes paused" in text
    assert "12.50 ms" in text
    assert "not answering: refused" in text


@pytest.mark.parametrize(
    ("arguments", "status", "error"),
    [
        (("--url", "ftp://x"), 2, "must begin with http"),
        (("--url", "http://127.0.0.1:1/metrics"), 1, "does not answer"),
        (("--url", "http://x", "--socket", "y"), 2, "exclude each other"),
        (("--interval", "0", "--once"), 2, "must be 0.1 to 3600 seconds"),
        (("--once", "--socket", "/absent.sock"), 1, "No such file"),
        (("--once",), 2, "no engine answers"),
    ],
)
def test_bad_input_is_a_clear_error(
    arguments: tuple[str, ...], status: int, error: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    code, _, text = run("top", *arguments)
    assert (code, error in text) == (status, True), text


@pytest.mark.parametrize("text", ["<html>", "garbage {{", "up 1\n", "", json.dumps({"a": 1})])
def test_a_page_of_something_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"http://x (is no page of metrics|shows nothing of kvcache)"):
        parse_metrics(text, 0.0, "http://x")


def test_vllms_names_are_read_alike() -> None:
    frame = parse_metrics('vllm:kvcache_loaded_blocks_total{engine="0",model_name="m"} 7\n', 1.0, "x")
    assert frame.get("loaded_blocks") == 7
    assert frame.labels == {"engine": "0", "model_name": "m"}
