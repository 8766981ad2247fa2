"""`kvcache status` against a running engine."""

import json
import socket
from pathlib import Path

import pytest

from kvcache import CPUOffloadingSpec, OffloadingConfig, OffloadingGroup


@pytest.fixture
def engine(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    options = {"num_cpu_blocks": 8, "cache_policy": "arc", "exporters": ["status"]}
    spec = CPUOffloadingSpec(OffloadingConfig((OffloadingGroup(16),), 16, extra_config=options))
    manager = spec.get_manager()
    manager.prepare_store([b"a"])
    manager.complete_store([b"a"])
    yield manager
    manager.shutdown()


def test_the_only_engine_is_found(engine, run):
    code, out, _ = run("status", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["parts"][0]["stats"]["stored_blocks"] == 1
    assert found["config"]["cache_policy"] == "arc"
    assert found["config"]["num_blocks"] == 8
    code, out, _ = run("status")
    assert code == 0
    assert "policy=arc" in out
    assert "stored_blocks" in out
    assert all(line == line.rstrip() for line in out.splitlines())


def test_no_engine_is_a_clear_error(run, engine, tmp_path, monkeypatch):
    engine.shutdown()
    code, _, error = run("status")
    assert code == 2
    assert "no engine answers in" in error
    code, _, error = run("status", "--socket", tmp_path / "absent")
    assert code == 1
    assert "No such file" in error


def test_a_socket_that_cannot_be_opened_leaves_the_engine_running(tmp_path, caplog, engine):
    path = engine.telemetry.exporters[0].address
    options = {"num_cpu_blocks": 8, "exporters": [{"type": "status", "path": path}]}
    manager = CPUOffloadingSpec(OffloadingConfig((OffloadingGroup(16),), 16, extra_config=options)).get_manager()
    assert "exporter StatusServer is not available" in caplog.text
    assert "is served by another process" in caplog.text
    assert manager.lookup([b"a"]) == 0


@pytest.mark.parametrize(
    ("exporters", "error"),
    [
        ("status", "must be a list of names or dicts"),
        ([{"path": "/x"}], "an exporter needs a type"),
        (["statsu"], "unknown exporter 'statsu', known ones: .*did you mean 'status'"),
        ([{"type": "status", "pth": "/x"}], "unknown options of exporter 'status': pth"),
        ([{"type": "status", "path": 7}], "path in exporter 'status' must be a str"),
        (["kvcache.keys:OffloadKey"], "must (be an Exporter|name a class)"),
    ],
)
def test_bad_options_are_refused(exporters, error):
    options = {"num_cpu_blocks": 8, "exporters": exporters}
    with pytest.raises(ValueError, match=error):
        CPUOffloadingSpec(OffloadingConfig((OffloadingGroup(16),), 16, extra_config=options))


def test_status_socket_of_ended_process_is_removed(run, engine):
    path = Path(engine.telemetry.exporters[0].address)
    ended = path.with_name(f"status-{1 << 30}.sock")
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(ended))
    assert run("status")[0] == 0
    assert path.exists()
    assert not ended.exists()
