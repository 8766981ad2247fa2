"""`kvcache status` and `kvcache record` against a running engine."""

import socket
from pathlib import Path

import pytest

import kvcache
from kvcache import CPUOffloadingSpec, OffloadingConfig, OffloadingGroup
from kvcache.metrics import CallStats, HistogramData, Part


@pytest.fixture
def engine(sockets):
    options = {"num_cpu_blocks": 8, "cache_policy": "arc", "exporters": ["status"]}
    manager = CPUOffloadingSpec(OffloadingConfig((OffloadingGroup(16),), 16, extra_config=options)).get_manager()
    yield manager
    manager.shutdown()


def test_only_engine_is_found(engine, run, run_json):
    engine.prepare_store([b"a"])
    engine.complete_store([b"a"])
    found = run_json("status")
    assert found["parts"][0]["stats"]["stored_blocks"] == 1
    assert (found["config"]["cache_policy"], found["config"]["num_blocks"]) == ("arc", 8)
    code, out, _ = run("status")
    assert code == 0
    assert "policy=arc" in out
    assert f"kvcache {kvcache.__version__}; up " in out
    assert "stored_blocks" in out
    assert all(line == line.rstrip() for line in out.splitlines())


def test_call_above_last_bound_is_shown(engine, run):
    stats = CallStats(HistogramData((0.5, 1.0), (1, 0, 1), 2.5), 2.0)
    engine.telemetry.sources.append(lambda: [Part("call", stats, (("call", "lookup"),))])
    code, out, _ = run("status")
    assert (code, "2 times, half within 500 ms, 99 % over 1 s" in out) == (0, True)


def test_no_engine_is_a_clear_error(run, engine):
    engine.shutdown()
    code, _, error = run("status")
    assert (code, "no engine answers in" in error) == (2, True)


def test_socket_of_ended_process_is_removed(run, engine):
    path = Path(engine.telemetry.exporters[0].address)
    ended = path.with_name(f"status-{1 << 30}.sock")
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(ended))
    assert run("status")[0] == 0
    assert path.exists()
    assert not ended.exists()


def test_recording_of_running_engine_replays(engine, run, run_json, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run("record", "show") == (0, "nothing is being recorded\n", "")
    code, out, _ = run("record", "start", "run.kvlog", "--max-bytes", "64KiB", "--salt", "s")
    assert code == 0
    assert out.startswith(f"{tmp_path / 'run.kvlog'} is being recorded: 0 records, ")
    engine.prepare_store([b"a", b"b"])
    engine.complete_store([b"a", b"b"])
    found = run_json("record", "stop")
    assert (found["file"], found["num_lost"], found["error"]) == (str(tmp_path / "run.kvlog"), 0, "")
    assert found["num_records"] >= 2
    code, out, _ = run("rerun", tmp_path / "run.kvlog")
    assert (code, "every answer is the same" in out) == (0, True)


def test_what_cannot_be_recorded_is_named(engine, run, tmp_path):
    (tmp_path / "file").write_text("")
    target = tmp_path / "run.kvlog"
    for argv, status, message in (
        (["stop"], 2, "nothing is being recorded"),
        (["start", tmp_path / "file" / "run.kvlog"], 2, str(tmp_path / "file")),
        (["start", target, "--max-bytes", "much"], 2, "--max-bytes must be bytes >= 1 or a size such as"),
        (["start", target, "--max-bytes", "1KiB"], 2, "max_bytes"),
        (["start", target], 0, ""),
        (["start", tmp_path / "other.kvlog"], 2, "record"),
    ):
        code, _, error = run("record", *argv)
        assert (code, message in error) == (status, True), error
    assert engine.prepare_store([b"a"]) is not None
