"""The two files of a recording under rotation, full disks, forks and kills."""

from __future__ import annotations

import gc
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from recorder_harness import key, replayed, serve
from waiting import wait_until

from kvcache import CPUOffloadingManager
from kvcache.lab.rerun.recorded import replay_recording
from kvcache.lab.traces.recording import Recording, RecordingError
from kvcache.recorder import ops
from kvcache.recorder.files import MAGIC
from kvcache.recorder.recorder import Recorder


def test_oldest_file_of_many_goes_first(manager, tmp_path, path):
    with Recorder(manager, path, max_bytes="1MiB") as recorder:
        for i in range(300):
            manager.touch([os.urandom(32) for _ in range(1000)])
            if i == 250:
                manager.reset_cache()
            time.sleep(0.001)
    assert recorder.stats().num_lost == 0
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["run.kvlog", "run.kvlog.1"]
    assert sum(file.stat().st_size for file in files) <= 1 << 20
    assert not Recording(path).is_whole
    assert replayed(path).num_calls == 50
    assert all(file.stat().st_mode & 0o077 == 0 for file in files)


def test_restart_keeps_the_recording_before(path):
    for number in range(3):
        manager = CPUOffloadingManager(16, 100)
        with Recorder(manager, path):
            for _ in range(number + 1):
                manager.touch([key(number)])
    assert replayed(path).num_calls == 3
    assert replayed(f"{path}.1").num_calls == 2


def test_short_writes_are_continued(manager, path, monkeypatch):
    write = os.write
    with monkeypatch.context() as patch, Recorder(manager, path) as recorder:
        patch.setattr("kvcache.recorder.files.os.write", lambda fd, data: write(fd, data[:7]))
        serve(manager, 3)
        recorder.stop()
    assert replayed(path).num_calls == 12


def test_failing_disk_ends_recording_only(manager, path, monkeypatch):
    recorder = Recorder(manager, path)

    def full(fd, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kvcache.recorder.files.write_all", full)
    for number in range(5):
        assert manager.lookup([key(number)]) == 0
    recorder.stop()
    stats = recorder.stats()
    assert "No space left" in stats.error
    # The calls, and the statistics at the end.
    assert (stats.num_records, stats.num_lost) == (6, 6)
    assert manager.prepare_store([key(1)]).store_spec.block_ids.tolist() == [0]


def test_unusable_path_is_named(manager, tmp_path):
    foreign = tmp_path / "foreign", tmp_path / "second.1"
    for file in foreign:
        file.write_text("dear diary")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "taken").write_bytes(MAGIC)
    (tmp_path / "taken.1").mkdir()
    unusable = "foreign/run", "x" * 300, "/proc/self/run", "/dev/full", "nul\0byte"
    for name, reason in (
        ("foreign", "foreign is no recording, and will not be written over"),
        ("second", "second.1 is no recording, and will not be written over"),
        ("link", "link is no file"),
        ("taken", "taken.1 is no file"),
        ("taken.1", "taken.1 is no file"),
        *((name, name.split("\0")[0]) for name in unusable),
    ):
        with pytest.raises(ValueError, match=re.escape(reason)):
            Recorder(manager, tmp_path / name)
        assert manager.recorder is None
    assert {file.read_text() for file in foreign} == {"dear diary"}
    assert manager.lookup([key(1)]) == 0
    Recorder(manager, tmp_path / "run").stop()


def test_dropped_manager_leaves_a_whole_file(path):
    manager = CPUOffloadingManager(16, 4)
    recorder = Recorder(manager, path)
    manager.touch([key(1)])
    thread = recorder._thread
    del manager, recorder
    gc.collect()
    assert thread.stop(10)
    assert replayed(path).num_calls == 1


def test_foreign_file_ends_recording_at_rotation(manager, path):
    older = Path(f"{path}.1")
    with Recorder(manager, path, max_bytes=1 << 16) as recorder:
        older.write_text("not a recording")
        wait_until(lambda: serve(manager, 50) or recorder.stats().error)
    assert f"{older} is no recording" in recorder.stats().error
    assert older.read_text() == "not a recording"


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_forked_child_leaves_stopped_path_free(manager, path):
    recorder = Recorder(manager, path)
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    try:
        recorder.stop()
        Recorder(manager, path).stop()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_forked_child_records_nothing(manager, path):
    recorder = Recorder(manager, path)
    serve(manager, 1)
    child = os.fork()
    if child == 0:
        serve(manager, 50)
        recorder.stop()
        os._exit(recorder.stats().num_records != 4)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    serve(manager, 1)
    recorder.stop()
    assert replayed(path).num_calls == 8


def run_recorder(path, code, **options):
    """Run `code` in its own process, where `manager` is recorded to `path` and `serve` makes calls."""
    begin = """
import os, resource, signal, sys, time
from kvcache import CPUOffloadingManager, Recorder, ReqContext
manager = CPUOffloadingManager(16, 50, "arc")
recorder = Recorder(manager, sys.argv[1], max_bytes=sys.argv[2])
def serve(number):
    context = ReqContext()
    keys = [b"%d %d" % (number % 40, i) + os.urandom(8) * (number % 3 == 0) for i in range(9)]
    manager.lookup(keys, context)
    output = manager.prepare_store(keys, context)
    manager.complete_store(output.keys_to_store, context)
    manager.on_request_finished(context)
"""
    return subprocess.Popen(
        [sys.executable, "-c", begin + code, path, "64KiB"], text=True, stdout=subprocess.PIPE, **options
    )


@pytest.mark.parametrize("rests", [False, True])
def test_kill_leaves_what_was_written_whole(tmp_path, rests):
    """A kill loses at most the last second."""
    rng = random.Random(rests)
    code = "print(flush=True)\nfor number in range(10**9): serve(number)"
    if rests:
        code = f"for number in range(20): serve(number)\ntime.sleep(1.5)\n{code}"
    for number in range(2 if rests else 8):
        path = tmp_path / str(number)
        with run_recorder(path, code) as child:
            child.stdout.readline()
            time.sleep(0 if rests else rng.random() * 0.2)
            child.kill()
        recording = Recording(path)
        calls = list(recording)
        assert recording.end == "" or "cut" in recording.end or "missing" in recording.end
        if recording.is_whole:
            outcome = replay_recording(Recording(path))
            assert outcome.difference is None
            assert outcome.num_calls == len(calls) >= 80 * rests
        # The old recording does not prevent a new one.
        manager = CPUOffloadingManager(16, 50)
        Recorder(manager, path).stop()
        assert [call.op for call in Recording(path)] == [ops.Op.STATS]
        assert Path(f"{path}.1").exists() or "missing" in recording.end


@pytest.mark.parametrize("num_bytes", [None, 0, 3, 8, 20, 100])
def test_kill_between_files_leaves_older(manager, tmp_path, path, num_bytes):
    with Recorder(manager, path):
        serve(manager, 3)
    whole = (path).read_bytes()
    (path).replace(f"{path}.1")
    if num_bytes is not None:
        (path).write_bytes(whole[:num_bytes])
    recording = Recording(path)
    outcome = replay_recording(recording)
    assert (outcome.num_calls, outcome.difference) == (12, None)
    assert outcome.end == recording.end != ""
    assert str(path) in outcome.end
    # A later recorder treats these files as a recording, and works.
    with Recorder(manager, path):
        manager.reset_cache()
    assert replayed(path).num_calls == 1
    (tmp_path / "alone").write_bytes(whole[: num_bytes or 0])
    with pytest.raises(RecordingError, match="alone"):
        Recording(tmp_path / "alone")


@pytest.mark.parametrize("end", ["pass", "sys.exit(3)", "raise KeyError", "del manager"])
def test_exit_without_stop_leaves_whole_file(path, end):
    with run_recorder(path, f"for number in range(20): serve(number)\n{end}", stderr=subprocess.DEVNULL) as child:
        child.wait(60)
    assert replayed(path).num_calls == 80


def test_full_disk_ends_at_whole_frame(path):
    code = """
resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))
number = 0
while not recorder.stats().error:
    serve(number)
    number += 1
    time.sleep(1e-4)
recorder.stop()
stats = recorder.stats()
serve(0)
print(stats.error)
print(stats.num_records, stats.num_lost)
"""
    with run_recorder(path, code, stderr=subprocess.DEVNULL) as child:
        error, numbers = child.communicate(timeout=60)[0].splitlines()
    num_records, num_lost = map(int, numbers.split())
    assert "File too large" in error
    assert child.returncode == 0
    outcome = replay_recording(Recording(path))
    assert outcome.difference is None
    assert outcome.end == "" or "is cut at byte" in outcome.end
    assert num_lost > 0
    assert outcome.num_calls == num_records - num_lost
