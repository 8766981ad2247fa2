"""`kvcache record` against a running engine."""

import json

import pytest

from kvcache import CPUOffloadingSpec, OffloadingConfig, OffloadingGroup


@pytest.fixture
def engine(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    options = {"num_cpu_blocks": 8, "exporters": ["status"]}
    spec = CPUOffloadingSpec(OffloadingConfig((OffloadingGroup(16),), 16, extra_config=options))
    manager = spec.get_manager()
    yield manager
    manager.shutdown()


def test_a_running_engine_is_recorded_and_its_file_replays(engine, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run("record", "show") == (0, "nothing is being recorded\n", "")
    code, out, _ = run("record", "start", "run.kvlog", "--max-bytes", "64KiB", "--salt", "s")
    assert code == 0
    assert out.startswith(f"{tmp_path / 'run.kvlog'} is being recorded: 0 records, ")
    engine.prepare_store([b"a", b"b"])
    engine.complete_store([b"a", b"b"])
    code, out, _ = run("record", "stop", "--json")
    found = json.loads(out)
    assert (code, found["file"], found["num_lost"], found["error"]) == (0, str(tmp_path / "run.kvlog"), 0, "")
    assert found["num_records"] >= 2
    code, out, _ = run("rerun", tmp_path / "run.kvlog")
    assert code == 0
    assert "every answer is the same" in out


def test_what_cannot_be_recorded_is_named(engine, run, tmp_path):
    code, _, error = run("record", "stop")
    assert (code, "nothing is being recorded" in error) == (2, True)
    (tmp_path / "file").write_text("")
    code, _, error = run("record", "start", tmp_path / "file" / "run.kvlog")
    assert code != 0
    assert str(tmp_path / "file") in error
    code, _, error = run("record", "start", tmp_path / "run.kvlog", "--max-bytes", "much")
    assert (code, "--max-bytes" in error, "much" in error) == (2, True, True)
    code, _, error = run("record", "start", tmp_path / "run.kvlog", "--max-bytes", "1KiB")
    assert (code, "max_bytes" in error) == (2, True)
    assert run("record", "start", tmp_path / "run.kvlog")[0] == 0
    code, _, error = run("record", "start", tmp_path / "other.kvlog")
    assert code == 2
    assert "record" in error
    assert engine.prepare_store([b"a"]) is not None
