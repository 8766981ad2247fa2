"""What must not hurt a recording, or be hurt by one: neighbours, forks, threads, a file that stands still."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time

import pytest

from kvcache import CPUOffloadingManager, ReqContext, Retention
from kvcache.recorder.format import Recording, RecordingError
from kvcache.recorder.ops import Op
from kvcache.recorder.recorder import Recorder
from kvcache.replay.recorded import replay_recording
from kvcache.testing import REFERENCE_POLICIES


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
        before = sys.getallocatedblocks()
        while recorder.stats().num_lost < 10_000:
            serve(manager, 50)
        os._exit(sys.getallocatedblocks() - before > 1000)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
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


@pytest.mark.parametrize("num_keys", [500, 1_800, 2_100, 30_000, 600_000])
def test_record_longer_than_the_bound_is_lost_and_does_not_break_it(tmp_path, num_keys):
    manager = CPUOffloadingManager(16, 100)
    long = [os.urandom(16) for _ in range(num_keys)]
    with Recorder(manager, tmp_path / "run", max_bytes="64KiB", buffer_bytes="1MiB") as recorder:
        manager.touch(long[:5])
        manager.touch(long)
        manager.touch(long[:7])
    is_lost = num_keys > 2_000  # a fourth of 64 KiB, at 8 bytes a key
    assert recorder.stats().num_lost == is_lost
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 1 << 16
    recorded = [len(call.keys) for call in Recording(tmp_path / "run") if call.op is Op.TOUCH]
    assert recorded == ([5, 7] if is_lost else [5, num_keys, 7])
    outcome = replay_recording(Recording(tmp_path / "run"))
    assert (outcome.num_calls, outcome.num_lost, outcome.difference) == (len(recorded) - is_lost, is_lost, None)


def test_record_longer_than_the_buffer_is_lost(tmp_path):
    manager = CPUOffloadingManager(16, 100)
    long = [os.urandom(16) for _ in range(60_000)]
    with Recorder(manager, tmp_path / "run", buffer_bytes="512KiB") as recorder:
        for _ in range(3):
            manager.touch(long + long)
        for _ in range(100):
            manager.touch(long[:1000])
    assert recorder.stats().num_lost == 3
    recorded = [call for call in Recording(tmp_path / "run") if call.op is Op.TOUCH]
    assert len(recorded) == 100


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("begins_late", [False, True])
def test_recordings_that_begin_and_end_beside_calls_replay(tmp_path, num_threads, begins_late):
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        pytest.skip("without a GIL, what other threads run is not known")
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    num_replayed = 0
    try:
        for cycle in range(50):
            num_replayed += record_beside_calls(tmp_path / f"{cycle}", cycle, num_threads, begins_late)
    finally:
        sys.setswitchinterval(before)
    # One that begins late is replayed from a reset on, if there is one in it.
    assert num_replayed > 0


def record_beside_calls(path, seed, num_threads, begins_late):
    """Record a part of what threads do, and return how many calls were made again with the same answers."""
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


@pytest.mark.parametrize("is_at_stop", [False, True])
def test_recorder_put_on_or_off_inside_a_call_waits_for_nobody(tmp_path, is_at_stop):
    made = []

    class Clock:
        def __call__(self):
            if is_at_stop and made:
                made[0].stop()
            elif not is_at_stop and not made:
                made.append(Recorder(manager, tmp_path / "run"))
            return 1.0

    manager = CPUOffloadingManager(16, 100, clock=Clock())
    if is_at_stop:
        made.append(Recorder(manager, tmp_path / "run"))
    manager.touch([key(1)], ReqContext("1", None, Retention(priority=1)))
    manager.touch([key(2)])
    made[0].stop()
    if not is_at_stop:
        with pytest.raises(RecordingError, match="at work already"):
            replay_recording(Recording(tmp_path / "run"))
        manager.reset_cache()
        return
    outcome = replay_recording(Recording(tmp_path / "run"))
    assert (outcome.difference, outcome.num_calls) == (None, 0)


def test_calls_whose_order_is_not_known_end_what_can_be_replayed(tmp_path):
    """Two threads make calls under a policy in Python, which lets others run in the midst of them."""
    is_over = threading.Event()

    class Slow(REFERENCE_POLICIES["lru"]):
        def touch(self, keys):
            assert threading.current_thread() is threading.main_thread() or is_over.wait(60)
            super().touch(keys)

    manager = CPUOffloadingManager(16, 100, Slow)
    with Recorder(manager, tmp_path / "run") as recorder:
        serve(manager, 3)
        threads = [threading.Thread(target=manager.touch, args=([key(number)],)) for number in range(2)]
        for thread in threads:
            thread.start()
        end_s = time.monotonic() + 60
        while recorder.stats().num_overlapped == 0:
            time.sleep(0.001)
            assert time.monotonic() < end_s
        is_over.set()
        for thread in threads:
            thread.join()
        serve(manager, 3)
    assert (recorder.stats().num_overlapped, recorder.stats().num_lost) == (1, 1)
    outcome = replay_recording(Recording(tmp_path / "run"), "lru")
    assert (outcome.difference, outcome.num_lost, outcome.num_calls) == (None, 1, 12)
