"""What must not hurt a recording, or be hurt by one: neighbours, forks, threads, a file that stands still."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from kvcache import CPUOffloadingManager, ReqContext
from kvcache.recorder.format import Recording
from kvcache.recorder.recorder import Recorder
from kvcache.replay.recorded import replay_recording


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


@pytest.mark.parametrize("number", [1, 3, 4])
def test_foreign_file_under_the_name_of_an_older_one_is_left_alone(tmp_path, number):
    for older in range(1, number):
        (tmp_path / f"run.{older}").touch()
    foreign = tmp_path / f"run.{number}"
    foreign.write_text("not a recording")
    manager = CPUOffloadingManager(16, 100)
    with pytest.raises(ValueError, match=f"run.{number} is no recording, and will not be written over"):
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


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_lost_records_cost_no_memory(tmp_path):
    manager = CPUOffloadingManager(16, 100)
    recorder = Recorder(manager, tmp_path / "run", buffer_bytes="64KiB")
    child = os.fork()
    if child == 0:
        # No thread of the recorder's runs here: every call is lost once the buffer is full.
        while recorder.stats().num_lost < 1000:
            serve(manager, 50)
        os._exit(min(recorder._wakes.qsize(), 255))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) <= 1
    recorder.stop()


def test_list_of_keys_that_grows_while_its_call_is_recorded_is_no_record(tmp_path):
    keys = [key(number) for number in range(4)]
    more = [key(number) for number in range(200_000)]

    def clock() -> float:
        keys.extend(more)
        more.clear()
        return 1.0

    manager = CPUOffloadingManager(16, 100)
    with Recorder(manager, tmp_path / "run", clock=clock) as recorder:
        manager.touch(keys)
        manager.touch(keys[:4])
    outcome = replay_recording(Recording(tmp_path / "run"))
    assert outcome.difference is None
    assert outcome.num_calls + recorder.stats().num_lost == 2


@pytest.mark.parametrize("max_events", [2**64 - 1, 2**64, 10**40])
def test_events_taken_without_a_bound_that_counts_are_recorded(tmp_path, max_events):
    manager = CPUOffloadingManager(16, 100, enable_events=True)
    with Recorder(manager, tmp_path / "run"):
        serve(manager, 1)
        assert [event.keys for event in manager.take_events(max_events)] == [[key(i) for i in range(7)]]
        serve(manager, 1)
    outcome = replay_recording(Recording(tmp_path / "run"))
    assert (outcome.num_calls, outcome.difference) == (9, None)
