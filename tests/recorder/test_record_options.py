"""Ways to start a recording: a configuration, an engine's settings, the status socket, the command line."""

from __future__ import annotations

import json
import threading

import pytest

from kvcache import CPUOffloadingManager, OffloadingConfig, OffloadingGroup, Recorder, make_spec
from kvcache.control.telemetry import Telemetry
from kvcache.integrations.vllm.settings import OUR_KEYS
from kvcache.lab.rerun.recorded import replay_recording
from kvcache.lab.traces.recording import Recording
from kvcache.recorder.command import RecordCommand
from kvcache.recorder.ops import Op


def serve(manager, num_requests=40):
    for number in range(num_requests):
        keys = [b"prompt %d %d" % (number % 9 if number % 3 else 0, i) for i in range(5)]
        output = manager.prepare_store(keys)
        manager.complete_store(output.keys_to_store)
        manager.lookup(keys)


def config_of(**options):
    return OffloadingConfig((OffloadingGroup(16, ["layer"]),), 16, extra_config={"num_cpu_blocks": 20, **options})


def test_configuration_records_from_the_first_call(tmp_path):
    path = tmp_path / "run.kvlog"
    options = {"record_max_bytes": "10MiB", "record_salt": "ours"}
    spec = make_spec(config_of(record=str(path), cache_policy="arc", **options))
    manager = spec.get_manager()
    serve(manager)
    manager.shutdown()
    outcome = replay_recording(Recording(path))
    assert (outcome.num_calls, outcome.difference) == (120, None)
    assert Recording(path).header["manager"]["cache_policy"] == "arc"


def test_bad_configuration_is_refused_at_start():
    cases = ({"record": 5}, "record"), ({"record": "x", "record_max_bytes": "lots"}, "record_max_bytes")
    for options, name in cases:
        with pytest.raises(ValueError, match=name):
            make_spec(config_of(**options))
    with pytest.raises(ValueError, match="cannot record"):
        make_spec(config_of(record="/proc/nowhere/run.kvlog")).get_manager()


def test_options_are_known_to_vllm_settings():
    assert {"record", "record_max_bytes"} <= OUR_KEYS


def test_recording_during_shutdown_is_stopped(tmp_path, monkeypatch):
    manager = CPUOffloadingManager(16, 20)
    manager.telemetry = Telemetry(manager)
    command = RecordCommand(manager.telemetry)
    with pytest.raises(ValueError, match="a recording needs a file"):
        command.run(action="start")
    begun, may_begin = threading.Event(), threading.Event()

    class SlowRecorder(Recorder):
        def __init__(self, *args, **options):
            begun.set()
            assert may_begin.wait(60)
            super().__init__(*args, **options)

    monkeypatch.setattr("kvcache.recorder.command.Recorder", SlowRecorder)
    starting = threading.Thread(target=command.run, args=("start", str(tmp_path / "slow.kvlog")))
    starting.start()
    assert begun.wait(60)

    class Exporter:
        def close(self):
            Recorder(manager, tmp_path / "late.kvlog")
            command.close()

    manager.telemetry.exporters.append(Exporter())
    manager.shutdown()
    assert manager.recorder is None
    may_begin.set()
    starting.join()
    assert manager.recorder is None
    assert [[call.op for call in Recording(path)] for path in tmp_path.iterdir()] == [[Op.STATS]] * 2


@pytest.fixture
def recorded(tmp_path):
    manager = CPUOffloadingManager(16, 20, "lru")
    with Recorder(manager, tmp_path / "run.kvlog"):
        serve(manager)
    return tmp_path / "run.kvlog"


def test_command_replays_a_recording(run, recorded):
    status, out, _ = run("rerun", recorded)
    assert (status, "120 calls made again under lru" in out) == (0, True)
    status, out, _ = run("rerun", recorded, "--json", "-", "--quiet")
    assert (status, json.loads(out)["is_same"]) == (0, True)


def test_command_shows_the_first_difference(run, recorded):
    report = recorded.parent / "report.json"
    status, out, err = run("rerun", recorded, "--policy", "gittins", "--json", report)
    assert status == 1
    assert "the answer differs" in err
    assert "expected" in out
    assert json.loads(report.read_text())["difference"]["call"].startswith(("prepare_store", "lookup"))


def test_rerun_onto_recording_is_refused(run, recorded):
    before = recorded.read_bytes()
    status, _, err = run("rerun", recorded, "--json", recorded)
    assert (status, recorded.read_bytes()) == (2, before)
    assert "--json must be another file than the one that is read" in err


def test_command_reads_recording_as_trace(run, recorded):
    options = ["--policy", "lru,min", "--blocks", "5,20", "--jobs", "1", "--quiet", "--json", "-"]
    status, out, _ = run("plan", recorded, *options)
    assert (status, json.loads(out)["source"]["format"]) == (0, "recording")


def test_command_refuses_what_is_no_recording(run, recorded):
    status, _, err = run("replay", recorded)
    assert (status, "kvcache rerun makes its calls again" in err) == (2, True)
    recorded.write_bytes(recorded.read_bytes()[:20])
    status, _, err = run("rerun", recorded)
    assert (status, "header" in err) == (2, True)


def test_recording_without_call_is_no_success(run, tmp_path):
    manager = CPUOffloadingManager(16, 10)
    Recorder(manager, tmp_path / "empty.kvlog").stop()
    status, out, err = run("rerun", tmp_path / "empty.kvlog")
    assert (status, "there is nothing to compare" in out) == (1, True)
    assert f"{tmp_path / 'empty.kvlog'} has no call to compare: nothing was recorded" in err


def test_long_replay_shows_progress(run, recorded, monkeypatch):
    assert run("rerun", recorded)[2] == ""
    monkeypatch.setenv("FORCE_COLOR", "1")
    status, out, err = run("rerun", recorded)
    assert (status, "records" in err, "records" in out) == (0, True, False)
    assert run("rerun", recorded, "--quiet")[2] == ""


@pytest.mark.parametrize("name", ["run.kvlog", "run.kvlog.3"])
@pytest.mark.parametrize("command", ["replay", "plan", "rerun"])
def test_foreign_file_is_named(run, tmp_path, name, command):
    path = tmp_path / name
    path.write_bytes(b"\xff\x00garbage\n")
    assert run(command, path) == (2, "", f"kvcache: error: {path} is not a recording of kvcache\n")
