"""Recordings and calls stay correct beside other recorders, forks and threads, and with a file that blocks."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kvcache import CPUOffloadingManager, ReqContext, Retention
from kvcache.lab.rerun.recorded import replay_recording
from kvcache.recorder.format import Recording, RecordingError
from kvcache.recorder.ops import Op
from kvcache.recorder.recorder import Recorder


def key(number: int) -> bytes:
    return b"block %d" % number + bytes(4)


def serve(manager: CPUOffloadingManager, num_requests: int) -> None:
    for number in range(num_requests):
        context = ReqContext(str(number))
        keys = [key(number * 7 + i) for i in range(7)]
        manager.lookup(keys, context)
        output = manager.prepare_store(keys, context)
        assert output is not None
        manager.complete_store(output.keys_to_store, context)
        manager.on_request_finished(context)


def test_foreign_file_under_the_name_of_the_older_one_is_left_alone(tmp_path):
    foreign = tmp_path / "run.1"
    foreign.write_text("not a recording")
    manager = CPUOffloadingManager(16, 100)
    with pytest.raises(ValueError, match=r"run\.1 is no recording, and will not be written over"):
        Recorder(manager, tmp_path / "run")
    assert foreign.read_text() == "not a recording"
    assert manager.recorder is None


def test_foreign_file_that_comes_later_ends_the_recording_at_a_rotation(tmp_path):
    manager = CPUOffloadingManager(16, 100)
    with Recorder(manager, tmp_path / "run", max_bytes=1 << 16) as recorder:
        (tmp_path / "run.1").write_text("not a recording")
        end_s = time.monotonic() + 60
        while not recorder.stats().error:
            serve(manager, 50)
            assert time.monotonic() < end_s
    assert "run.1 is no recording" in recorder.stats().error
    assert (tmp_path / "run.1").read_text() == "not a recording"


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_path_is_free_after_stop_though_a_forked_child_lives(tmp_path):
    manager = CPUOffloadingManager(16, 100)
    recorder = Recorder(manager, tmp_path / "run")
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    try:
        recorder.stop()
        Recorder(manager, tmp_path / "run").stop()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_forked_child_records_nothing_and_leaves_the_file_alone(tmp_path):
    manager = CPUOffloadingManager(16, 100)
    recorder = Recorder(manager, tmp_path / "run")
    serve(manager, 1)
    child = os.fork()
    if child == 0:
        serve(manager, 50)
        recorder.stop()
        os._exit(recorder.stats().num_records != 4)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    serve(manager, 1)
    recorder.stop()
    outcome = replay_recording(Recording(tmp_path / "run"))
    assert (outcome.num_calls, outcome.difference, outcome.end) == (8, None, "")


def test_one_of_two_recorders_that_begin_at_once_is_refused(tmp_path):
    for number in range(20):
        manager = CPUOffloadingManager(16, 100)
        barrier = threading.Barrier(2)
        begun: list[Recorder] = []
        refused: list[str] = []

        def begin(
            name: str,
            manager: CPUOffloadingManager = manager,
            barrier: threading.Barrier = barrier,
            begun: list[Recorder] = begun,
            refused: list[str] = refused,
        ) -> None:
            barrier.wait()
            try:
                begun.append(Recorder(manager, tmp_path / name))
            except ValueError as error:
                refused.append(str(error))

        threads = [threading.Thread(target=begin, args=(f"{number}.{one}.log",)) for one in "ab"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(begun) == 1
        assert refused == [f"the manager is being recorded already, to {begun[0].path}"]
        serve(manager, 3)
        begun[0].stop()
        outcome = replay_recording(Recording(begun[0].path))
        assert (outcome.num_calls, outcome.difference) == (12, None)


@pytest.mark.parametrize("max_events", [2**64 - 1, 2**64, 10**40])
def test_events_taken_without_a_bound_that_counts_are_recorded(tmp_path, max_events):
    manager = CPUOffloadingManager(16, 100, enable_events=True)
    with Recorder(manager, tmp_path / "run"):
        serve(manager, 1)
        assert [event.keys for event in manager.take_events(max_events)] == [[key(i) for i in range(7)]]
        serve(manager, 1)
    outcome = replay_recording(Recording(tmp_path / "run"))
    assert (outcome.num_calls, outcome.difference) == (9, None)


@pytest.mark.parametrize("num_keys", [500, 3_700, 4_200, 30_000, 600_000])
def test_record_longer_than_the_bound_is_lost_and_does_not_break_it(tmp_path, num_keys):
    manager = CPUOffloadingManager(16, 100)
    long = [os.urandom(16) for _ in range(num_keys)]
    with Recorder(manager, tmp_path / "run", max_bytes="64KiB", buffer_bytes="1MiB") as recorder:
        manager.touch(long[:5])
        manager.touch(long)
        manager.touch(long[:7])
    is_lost = num_keys > 4_000  # half of 64 KiB, at 8 bytes a key
    assert recorder.stats().num_lost == is_lost
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 1 << 16
    recorded = [len(call.keys) for call in Recording(tmp_path / "run") if call.op is Op.TOUCH]
    assert recorded == ([5, 7] if is_lost else [5, num_keys, 7])
    outcome = replay_recording(Recording(tmp_path / "run"))
    assert (outcome.num_calls, outcome.num_lost, outcome.difference) == (len(recorded) - is_lost, is_lost, None)


def test_record_longer_than_the_buffer_is_lost(tmp_path):
    manager = CPUOffloadingManager(16, 100)
    long = [os.urandom(16) for _ in range(60_000)]
    with Recorder(manager, tmp_path / "run", buffer_bytes="900KiB") as recorder:
        for _ in range(3):
            manager.touch(long + long)
        for _ in range(50):
            manager.touch(long[:1000])
    assert recorder.stats().num_lost == 3
    recorded = [call for call in Recording(tmp_path / "run") if call.op is Op.TOUCH]
    assert len(recorded) == 50


# A recording omits a call that another thread is making when the recording begins.
@pytest.mark.parametrize(("num_threads", "begins_late"), [(1, False), (3, False), (1, True)])
def test_recordings_that_begin_and_end_beside_calls_replay(tmp_path, num_threads, begins_late):
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    num_replayed = 0
    try:
        for cycle in range(50):
            num_replayed += record_beside_calls(tmp_path / f"{cycle}", cycle, num_threads, begins_late)
    finally:
        sys.setswitchinterval(before)
    # A recording that begins late is replayed from its first reset, if it has one.
    assert num_replayed > 0


def record_beside_calls(path, seed, num_threads, begins_late):
    """Record some of the calls of several threads; return how many were replayed with the same answers."""
    manager = CPUOffloadingManager(16, 60, "lru", True)
    is_over = threading.Event()
    failures = []

    def work(seed):
        rng = random.Random(seed)
        try:
            while not is_over.is_set():
                context = ReqContext("", None, None)
                prompt = rng.randrange(20)
                keys = [key(100 * prompt + i) for i in range(rng.randrange(1, 12))]
                manager.lookup(keys, context)
                manager.touch(keys, context)
                output = manager.prepare_store(keys, context)
                if output is not None:
                    manager.complete_store(output.keys_to_store, context)
                list(manager.take_events())
                manager.on_request_finished(context)
                if rng.random() < 0.05:
                    manager.reset_cache()
                time.sleep(1e-4)
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=work, args=(100 * seed + number,)) for number in range(num_threads)]
    rng = random.Random(seed)
    recorder = None if begins_late else Recorder(manager, path)
    manager.lookup([key(1)])  # a late recording is not one from the manager's first call
    for thread in threads:
        thread.start()
    try:
        if recorder is None:
            time.sleep(rng.random() * 0.002)
            recorder = Recorder(manager, path)
        time.sleep(rng.random() * 0.01)
        recorder.stop()
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    assert failures == []
    try:
        outcome = replay_recording(Recording(path))
    except RecordingError:
        assert begins_late
        return 0
    assert outcome.difference is None
    return outcome.num_calls


@pytest.mark.slow
def test_recorder_that_is_stopped_inside_a_call_does_not_wait_for_it(tmp_path):
    made = []

    def clock():
        if made:
            made[0].stop()
        return 1.0

    manager = CPUOffloadingManager(16, 100, clock=clock)
    made.append(Recorder(manager, tmp_path / "run"))
    manager.touch([key(1)], ReqContext("1", None, Retention(priority=1)))
    manager.touch([key(2)])
    outcome = replay_recording(Recording(tmp_path / "run"))
    assert (outcome.difference, outcome.num_calls) == (None, 0)


def run_recorder(tmp_path, code, **options):
    """Run `code` in its own process, where `manager` is recorded to ``run`` and `serve` makes calls."""
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
        [sys.executable, "-c", begin + code, tmp_path / "run", "64KiB"], text=True, stdout=subprocess.PIPE, **options
    )


@pytest.mark.parametrize("seed", range(3))
def test_kill_at_any_moment_leaves_what_was_written_whole(tmp_path, seed):
    rng = random.Random(seed)
    for number in range(3):
        path = tmp_path / str(number)
        path.mkdir()
        code = "print(flush=True)\nfor number in range(10**9): serve(number)"
        with run_recorder(path, code) as child:
            child.stdout.readline()
            time.sleep(rng.random() * 0.2)
            child.kill()
        recording = Recording(path / "run")
        calls = list(recording)
        assert recording.end == "" or "cut" in recording.end or "missing" in recording.end
        if recording.is_whole:
            outcome = replay_recording(Recording(path / "run"))
            assert outcome.difference is None
            assert outcome.num_calls == len(calls)
        # The old recording does not prevent a new one.
        manager = CPUOffloadingManager(16, 50)
        Recorder(manager, path / "run").stop()
        assert [call.op for call in Recording(path / "run")] == [Op.STATS]
        assert (path / "run.1").exists() or "missing" in recording.end


@pytest.mark.parametrize("num_bytes", [None, 0, 3, 8, 20, 100])
def test_kill_between_two_files_leaves_the_older_ones(tmp_path, num_bytes):
    manager = CPUOffloadingManager(16, 100)
    with Recorder(manager, tmp_path / "run"):
        serve(manager, 3)
    whole = (tmp_path / "run").read_bytes()
    (tmp_path / "run").replace(tmp_path / "run.1")
    if num_bytes is not None:
        (tmp_path / "run").write_bytes(whole[:num_bytes])
    recording = Recording(tmp_path / "run")
    outcome = replay_recording(recording)
    assert (outcome.num_calls, outcome.difference) == (12, None)
    assert outcome.end == recording.end != ""
    assert str(tmp_path / "run") in outcome.end
    # A later recorder treats these files as a recording, and works.
    with Recorder(manager, tmp_path / "run"):
        manager.reset_cache()
    assert replay_recording(Recording(tmp_path / "run")).num_calls == 1
    (tmp_path / "alone").write_bytes(whole[: num_bytes or 0])
    with pytest.raises(RecordingError, match="alone"):
        Recording(tmp_path / "alone")


@pytest.mark.parametrize("end", ["pass", "sys.exit(3)", "raise KeyError", "del manager"])
def test_process_that_ends_without_stop_leaves_a_whole_file(tmp_path, end):
    with run_recorder(tmp_path, f"for number in range(20): serve(number)\n{end}", stderr=subprocess.DEVNULL) as child:
        child.wait(60)
    outcome = replay_recording(Recording(tmp_path / "run"))
    assert (outcome.num_calls, outcome.difference, outcome.end) == (80, None, "")


def test_disk_that_is_full_ends_the_recording_at_the_last_whole_frame(tmp_path):
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
    with run_recorder(tmp_path, code, stderr=subprocess.DEVNULL) as child:
        error, numbers = child.communicate(timeout=60)[0].splitlines()
    num_records, num_lost = map(int, numbers.split())
    assert "File too large" in error
    assert child.returncode == 0
    outcome = replay_recording(Recording(tmp_path / "run"))
    assert outcome.difference is None
    assert outcome.end == "" or "is cut at byte" in outcome.end
    assert num_lost > 0
    assert outcome.num_calls == num_records - num_lost


def test_path_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "taken").write_bytes(b"KVCLOG\r\n")
    (tmp_path / "taken.1").mkdir()
    manager = CPUOffloadingManager(16, 100)
    for path in (
        tmp_path / "file" / "run",
        tmp_path / ("x" * 300),
        tmp_path / "taken",
        Path("/proc/self/run"),
        Path("/dev/full"),
        tmp_path / "nul\0byte",
    ):
        with pytest.raises(ValueError, match=re.escape(str(path).split("\0")[0])):
            Recorder(manager, path)
        assert manager.recorder is None
    serve(manager, 3)
    with Recorder(manager, tmp_path / "run"):
        pass
