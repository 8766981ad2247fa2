"""A recording holds every call, and a replay of it returns the same answers, whatever happens to file and process."""

from __future__ import annotations

import copy
import gc
import io
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import repeat
from pathlib import Path

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from kvcache import (
    BackendOffloadingManager,
    CPUBackend,
    CPUOffloadingManager,
    MemoryTier,
    ReqContext,
    Retention,
    TierConfig,
    TieredOffloadingManager,
)
from kvcache.lab.rerun.recorded import replay_recording
from kvcache.lab.traces.recorded_trace import RecordedTrace
from kvcache.recorder import ops
from kvcache.recorder.files import MAGIC, frame_bytes, header_bytes
from kvcache.recorder.format import Raised, Recording, RecordingError
from kvcache.recorder.recorder import Recorder
from kvcache.registry import POLICIES
from kvcache.tiering.tier import TierResult

COMPILED = [name for name in POLICIES.names() if ":" not in name]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.kvlog"


@pytest.fixture
def manager():
    return CPUOffloadingManager(16, 100)


def key(number: int) -> bytes:
    return b"block %d" % number + bytes(4)


def serve(manager, num_requests):
    for number in range(num_requests):
        request(manager, [key(number * 7 + i) for i in range(7)])


def request(manager, keys):
    """Make the four calls of a request whose blocks are not loaded."""
    context = ReqContext()
    manager.lookup(keys, context)
    output = manager.prepare_store(keys, context)
    if output is not None:
        manager.complete_store(output.keys_to_store, context)
    manager.on_request_finished(context)


def replayed(path):
    """Replay a recording to its end with the same answers, and return the outcome."""
    outcome = replay_recording(Recording(path))
    assert (outcome.difference, outcome.end) == (None, "")
    return outcome


def touches(path):
    """Return the hashed keys of each recorded touch."""
    return [call.keys for call in Recording(path) if call.op is ops.Op.TOUCH]


def make_all_calls(manager, rng, num_requests, clock=None, num_prompts=30):
    """Make all kinds of valid and invalid calls, as concurrent requests would."""
    open_requests = []
    for number in range(num_requests):
        if clock is not None:
            clock[0] += rng.random()
        retention = Retention(rng.randrange(-1, 4), rng.choice((None, 5.0))) if rng.random() < 0.2 else None
        if rng.random() < 0.3:
            retention = Retention(next_use=rng.choice(("soon", "later", "end")))
        params = {"kvcache": rng.choice(({"priority": 1}, {"nonsense": 1}, 7))} if rng.random() < 0.1 else None
        context = rng.choice((ReqContext(str(number), params, retention), None))
        prompt = rng.randrange(num_prompts)
        keys = [key(100 * prompt + i) for i in range(rng.randrange(1, 14))]
        if context is not None and rng.random() < 0.3:
            for i, one in enumerate(keys):
                context.set_offload_key_position(one, 16 * (i + 1))
        num_hits = manager.lookup(keys, context) or 0
        manager.lookup(keys[0], context)
        manager.touch(tuple(keys) if rng.random() < 0.2 else keys, context)
        if clock is not None and rng.random() < 0.05:
            clock[0] -= 50
            with suppress(ValueError):  # some policies refuse it
                manager.touch(keys, context)
            clock[0] += 50
        manager.prepare_load(keys[:num_hits], context)
        open_requests.append((context, keys, num_hits))
        while len(open_requests) > 3 or (open_requests and number == num_requests - 1):
            context, keys, num_hits = open_requests.pop(rng.randrange(len(open_requests)))
            manager.complete_load(keys[:num_hits], context)
            output = manager.prepare_store(keys, context)
            if output is not None:
                stored = output.keys_to_store
                manager.complete_store(stored, context, rng.random() < 0.9) if rng.random() < 0.9 else (
                    manager.complete_store(stored, True)
                )
            for bad in ([b""], [1], [b"unknown"]):
                with pytest.raises((ValueError, KeyError)):
                    manager.complete_load(bad, context)
            if isinstance(manager, CPUOffloadingManager):
                with pytest.raises(ValueError, match="req_context"):
                    manager.touch(keys, "no request")
            if context is not None:
                if rng.random() < 0.5 and hasattr(manager, "reorder"):
                    manager.reorder(context)
                manager.on_request_finished(context, use_positions=rng.random() < 0.5)
                if hasattr(manager, "hint") and rng.random() < 0.2:
                    manager.hint(context, "soon")
        if rng.random() < 0.2:
            manager.hint(rng.choice((keys, context or keys)), rng.choice(("soon", "later", "end")))
            with pytest.raises(ValueError, match="next_use"):
                manager.hint(keys, "perhaps")
        list(manager.take_events(rng.choice((None, 2))))
        manager.on_schedule_end()
        if rng.random() < 0.005:
            for context, keys, num_hits in open_requests:
                manager.complete_load(keys[:num_hits], context)
            open_requests.clear()
            manager.reset_cache()


@pytest.mark.parametrize("policy", COMPILED)
def test_recording_replays_to_the_same_answers(path, policy):
    clock = [5.0]
    manager = CPUOffloadingManager(16, 60, policy, True, store_threshold=2, clock=lambda: clock[0])
    with Recorder(manager, path) as recorder:
        make_all_calls(manager, random.Random(7), 500, clock)
    stats = recorder.stats()
    assert (stats.num_lost, stats.error) == (0, "")
    outcome = replayed(path)
    assert outcome.num_skipped == 0
    assert outcome.num_calls > 5000
    # The replay compares answers: another policy, or a changed answer, gives a difference.
    other = "lru" if policy != "lru" else "mq"
    assert replay_recording(Recording(path), other).difference is not None


@pytest.mark.parametrize("write_policy", ["write_through", "write_back", "write_through_selective"])
def test_tiered_recording_needs_no_tier_to_replay(path, write_policy):
    rng = random.Random(write_policy)

    class Moody(MemoryTier):
        """A tier that rejects, fails and reports at random."""

        def submit_load(self, job_id, keys, block_ids):
            if rng.random() < 0.1:
                raise OSError("moody")
            return rng.random() < 0.9 and super().submit_load(job_id, keys, block_ids)

        def lookup(self, keys):
            return rng.choice((None, -5, "nonsense")) if rng.random() < 0.1 else super().lookup(keys)

    host = np.zeros((40, 64), np.uint8)
    tiers = [
        (Moody(64 * 300, host), TierConfig(write_policy=write_policy, pause_s=0.001, deadline_s=0.05)),
        (MemoryTier(64 * 600, host), TierConfig()),
    ]
    manager = TieredOffloadingManager(16, 40, tiers, "arc", True)
    with Recorder(manager, path):
        # The manager pauses a tier after a slow job; then more requests are needed to promote blocks.
        for step in range(300):
            make_all_calls(manager, rng, 10)
            manager.settle(10)
            promoted = sum(stats.promoted_blocks for stats in manager.tier_stats())
            if step >= 30 and promoted > 10:
                break
    manager.shutdown()
    replayed(path)
    assert promoted > 10


@pytest.mark.parametrize("is_key_by_key", [False, True])
def test_recording_of_an_arbiter_replays_to_the_same_decisions(path, is_key_by_key):
    rng = random.Random(9)

    class Slow(MemoryTier):
        """A tier that reports random durations of its jobs."""

        def get_finished(self):
            results = []
            for one in super().get_finished():
                start_s = one.start_s or 0.0
                end_s = start_s + rng.random() * rng.choice((1e-3, 5e-2))
                times = rng.choice(((start_s, end_s), (None, None), (start_s, float("nan"))))
                results.append(TierResult(one.job_id, one.done, one.failed, one.removed, one.error, *times))
            return results

    host = np.zeros((60, 64), np.uint8)
    tiers = [
        (Slow(64 * 200, host), TierConfig(arbiter=True, deadline_s=5)),
        (MemoryTier(64 * 600, host), TierConfig(arbiter=True, deadline_s=5)),
    ]
    given = {"prefill_tokens_per_s": {0: 2000, 4096: 1000}} if is_key_by_key else {}
    manager = TieredOffloadingManager(16, 60, tiers, "arc", True, **given)
    with Recorder(manager, path):
        for number in range(400):
            context = ReqContext(str(number))
            prompt = rng.randrange(40)
            # Two groups with interleaved keys.
            keys = [b"%d %d" % (prompt, i // 2) + bytes([0, 0, 0, i % 2]) for i in range(2 * rng.randrange(1, 14))]
            if is_key_by_key:
                context.set_offload_key_positions({key: 16 * (i // 2 + 1) for i, key in enumerate(keys)})
                hits = 0
                while hits < len(keys) and manager.status(keys[hits], context) == 2:
                    hits += 1
            else:
                hits = manager.lookup(keys, context) or 0
            manager.on_schedule_end()
            if rng.random() < 0.3:
                manager.settle(10)
                manager.on_schedule_end()
                hits = max(hits, manager.lookup(keys[:1], context) or 0)
            loaded = keys[: min(hits, manager.pool.match_prefix(keys))]
            manager.prepare_load(loaded, context)
            manager.complete_load(loaded, context)
            output = manager.prepare_store(keys, context)
            if output is not None:
                manager.complete_store(output.keys_to_store, context)
            manager.report_prefill(16 * hits, rng.randrange(1, 400), rng.random() * 0.1)
            manager.on_request_finished(context)
            if rng.random() < 0.2:
                list(manager.take_events())
    stats = manager.stats()
    manager.shutdown()
    assert min(stats.arbiter_loads, stats.arbiter_cuts, stats.arbiter_cut_blocks) > 0, stats
    replayed(path)
    # The arbiter learned from the times: without them it decides differently.
    if not is_key_by_key:
        assert replay_recording(Timeless(path)).difference is not None


class Timeless(Recording):
    """A recording without the times of jobs."""

    def __iter__(self):
        for call in super().__iter__():
            yield replace(call, inputs=[timeless(one) for one in call.inputs])


def timeless(one):
    if one.op is not ops.Op.TIER_FINISHED:
        return one
    return replace(one, value=[result and replace(result, start_s=None, end_s=None) for result in one.value])


def test_stopped_manager_calls_its_own_methods_again(manager, path):
    before = {name: getattr(manager, name) for name in ("lookup", "prepare_store", "take_events")}
    recorder = Recorder(manager, path)
    assert manager.recorder is recorder
    with pytest.raises(ValueError, match="recorded already"):
        Recorder(manager, f"{path}.other")
    recorder.stop()
    recorder.stop()
    assert {name: getattr(manager, name) for name in before} == before
    assert manager.recorder is None
    manager.prepare_store([key(1)])
    assert [record.op for record in Recording(path)] == [ops.Op.STATS]


def test_recording_that_begins_late_replays_from_the_next_reset(tmp_path, path):
    manager = CPUOffloadingManager(16, 30, "arc")
    make_all_calls(manager, random.Random(1), 50)
    context = ReqContext("spans both")
    manager.lookup([key(1)], context)
    with Recorder(manager, path):
        manager.touch([key(1)], context)
        manager.reset_cache()
        manager.touch([key(1)], context)
        make_all_calls(manager, random.Random(2), 50)
    assert replayed(path).num_skipped == 1
    with Recorder(manager, tmp_path / "late.kvlog"):
        manager.touch([key(1)])
    with pytest.raises(RecordingError, match="at work already"):
        replay_recording(Recording(tmp_path / "late.kvlog"))


def test_look_ups_one_by_one_are_written_as_runs(path):
    manager = CPUOffloadingManager(16, 400)
    keys = [key(number) for number in range(300)]
    with Recorder(manager, path, salt="ours") as recorder:
        manager.complete_store(manager.prepare_store(keys[:200]).keys_to_store)
        for _ in range(300):
            for one in keys:
                if manager.status(one) != 2:
                    break
            manager.prepare_load(keys[:200])
            manager.complete_load(keys[:200])
        with pytest.raises(ValueError, match="key"):
            manager.status(b"")
        assert manager.lookup(keys[0]) is True
    assert (recorder.stats().num_records, recorder.stats().num_lost) == (2 + 300 * 203 + 3, 0)
    records = [*Recording(path)]
    calls = [call for call in records if call.op is ops.Op.STATUS]
    assert [call.answer for call in calls[:201]] == [2] * 200 + [0]
    assert calls[-1].answer == Raised("ValueError")
    hashes = [call.keys for call in calls[:201]]
    assert len(set(hashes)) == 201
    assert all([call.keys for call in calls[start : start + 201]] == hashes for start in range(0, 300 * 201, 201))
    loaded = [call.keys for call in records if call.op is ops.Op.PREPARE_LOAD]
    assert loaded == [hashes[:200]] * 300
    assert [call.number for call in records] == list(range(recorder.stats().num_records))
    replayed(path)


def test_same_keys_are_named_once_and_never_in_clear(manager, path):
    keys = [b"a secret prompt %4d" % i for i in range(1000)]
    with Recorder(manager, path):
        for _ in range(400):
            manager.touch(keys)
            manager.touch(keys[:300])
    raw = path.read_bytes()
    assert b"secret" not in raw
    assert len(raw) < 20 * 8 * len(keys) * 2
    recorded = touches(path)
    assert len(recorded) == 800
    assert all(keys == recorded[0][: len(keys)] for keys in recorded)
    assert len(set(recorded[0])) == 1000


def test_salt_makes_keys_of_two_recordings_alike(tmp_path):
    def recorded(name, salt):
        manager = CPUOffloadingManager(16, 8)
        with Recorder(manager, tmp_path / name, salt=salt):
            manager.touch([key(1)])
        return next(iter(Recording(tmp_path / name))).keys

    assert recorded("a", "ours") == recorded("b", "ours") != recorded("c", "theirs")
    assert recorded("d", None) != recorded("e", None)
    assert b"ours" not in (tmp_path / "a").read_bytes()


def test_files_are_bounded_and_the_oldest_goes_first(manager, tmp_path, path):
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


def test_full_buffer_loses_records_and_counts_them(manager, path, monkeypatch):
    gate = threading.Event()
    # A disk that hangs.
    monkeypatch.setattr("kvcache.recorder.files.write_all", lambda fd, data: gate.wait(30) and os.write(fd, data))
    gate.set()
    recorder = Recorder(manager, path, buffer_bytes="1MiB")
    gate.clear()
    for _ in range(3000):
        manager.touch([os.urandom(32) for _ in range(200)])
    lost = recorder.stats().num_lost
    gate.set()
    assert lost > 1000
    while recorder.stats().num_bytes < 1000:
        time.sleep(0.01)
    time.sleep(0.1)
    manager.reset_cache()
    manager.touch([key(1)])
    recorder.stop()
    assert replayed(path).num_lost == lost


def test_lost_record_between_equal_answers_splits_their_run(manager, path):
    long = [os.urandom(16) for _ in range(60_000)]
    with Recorder(manager, path, buffer_bytes="900KiB") as recorder:
        manager.status(key(1))
        manager.touch(long)
        manager.status(key(2))
    assert recorder.stats().num_records == 4
    found = [call.op for call in Recording(path)]
    assert found == [ops.Op.STATUS, ops.Op.LOST, ops.Op.STATUS, ops.Op.STATS]


def test_calls_inside_a_recorded_call_are_not_recorded(path):
    def clock():
        if threading.current_thread() is threading.main_thread():
            manager.status(key(1))
            with pytest.raises(ValueError, match="key"):
                manager.lookup([b""])
        return 1.0

    manager = CPUOffloadingManager(16, 100, clock=clock)
    with Recorder(manager, path) as recorder, ThreadPoolExecutor(1) as other:
        manager.status(key(1))
        manager.touch([key(1)], ReqContext("1", None, Retention(priority=1)))
        manager.status(key(2))
        # The lock is free again.
        assert other.submit(manager.lookup, [key(1)]).result(60) == 0
    assert (recorder.stats().num_records, recorder.stats().num_lost) == (5, 0)
    found = [call for call in Recording(path) if call.op is not ops.Op.CONTEXT]
    assert [call.op.name for call in found] == ["STATUS", "TOUCH", "STATUS", "LOOKUP", "STATS"]
    assert {one.op for one in found[1].inputs} == {ops.Op.CLOCK}


def test_record_that_cannot_be_encoded_is_lost_alone(manager, path):
    with Recorder(manager, path) as recorder:
        manager.touch([key(1)])
        with pytest.raises(ValueError, match="next_use"):
            manager.hint([key(1)], "\ud800")
        manager.touch([key(2)])
    assert recorder.stats().num_lost == 1
    assert [len(keys) for keys in touches(path)] == [1, 1]
    assert replayed(path).num_lost == 1


def test_recorded_keys_are_let_go_of_once_they_are_hashed(manager, path):
    keys = [key(number) for number in range(10_000)]
    before = [sys.getrefcount(one) for one in keys]
    with Recorder(manager, path):
        for start in range(0, 10_000, 50):
            manager.lookup(keys[start : start + 50])
            manager.lookup(keys[start : start + 2])
        manager.touch(keys)  # larger than a chunk
    assert [sys.getrefcount(one) for one in keys] == before
    calls = [call for call in Recording(path) if call.keys is not None and call.op is ops.Op.LOOKUP]
    assert [len(call.keys) for call in calls] == [50, 2] * 200
    assert len({one for call in calls for one in call.keys}) == 10_000


def test_long_lists_with_something_else_among_their_keys_are_recorded(manager, path):
    class Odd:
        """The caller drops the last reference to such an object, not the recorder's thread."""

        def __del__(self):
            ended_in.append(threading.current_thread())

    ended_in = []
    with Recorder(manager, path):
        for odd in (b"", 1, Odd(), bytearray(b"x")):
            for _ in range(2):
                with pytest.raises(ValueError, match="key"):
                    manager.touch([key(1), odd, key(2), key(3)])
        del odd
        gc.collect()
        time.sleep(0.01)
        is_ended = bool(ended_in)
    assert is_ended
    assert ended_in == [threading.current_thread()]
    recorded = touches(path)
    assert [keys[1] for keys in recorded] == [b"", b""] + [None] * 6
    assert {tuple(keys[:1] + keys[2:]) for keys in recorded} == {tuple(recorded[0][:1] + recorded[0][2:])}
    replayed(path)


def test_failing_disk_ends_the_recording_and_nothing_else(manager, path, monkeypatch):
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


def test_wrong_options_and_managers_are_refused(tmp_path, path):
    manager = CPUOffloadingManager(16, 4)
    for options in ({"max_bytes": 100}, {"max_bytes": "x"}, {"salt": ""}, {"salt": 5}, {"buffer_bytes": 0}):
        with pytest.raises(ValueError, match=next(iter(options))):
            Recorder(manager, path, **options)
    with Recorder(manager, path), pytest.raises(ValueError, match="another manager"):
        Recorder(CPUOffloadingManager(16, 4), path)

    class Own(CPUBackend):
        pass

    for other, reason in ((object(), "cannot record"), (BackendOffloadingManager(Own(16, 4)), "allocated by a Own")):
        with pytest.raises(ValueError, match=reason):
            Recorder(other, tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_path_that_cannot_be_recorded_to_is_named(manager, tmp_path):
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


def test_dropped_manager_is_freed_and_leaves_a_whole_file(path):
    manager = CPUOffloadingManager(16, 4)
    recorder = Recorder(manager, path)
    manager.touch([key(1)])
    thread = recorder._thread
    del manager, recorder
    gc.collect()
    assert thread.stop(10)
    assert replayed(path).num_calls == 1


def test_foreign_file_that_comes_later_ends_the_recording_at_a_rotation(manager, path):
    older = Path(f"{path}.1")
    with Recorder(manager, path, max_bytes=1 << 16) as recorder:
        older.write_text("not a recording")
        end_s = time.monotonic() + 60
        while not recorder.stats().error:
            serve(manager, 50)
            assert time.monotonic() < end_s
    assert f"{older} is no recording" in recorder.stats().error
    assert older.read_text() == "not a recording"


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_path_is_free_after_stop_though_a_forked_child_lives(manager, path):
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
def test_forked_child_records_nothing_and_leaves_the_file_alone(manager, path):
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


def test_one_of_two_recorders_that_begin_at_once_is_refused(tmp_path):
    def begin(manager, barrier, path):
        barrier.wait()
        try:
            return Recorder(manager, path)
        except ValueError as error:
            return str(error)

    with ThreadPoolExecutor(2) as pool:
        for number in range(20):
            manager = CPUOffloadingManager(16, 100)
            paths = [tmp_path / f"{number}.{one}" for one in "ab"]
            made = pool.map(begin, repeat(manager), repeat(threading.Barrier(2)), paths)
            refused, begun = sorted(made, key=lambda one: isinstance(one, Recorder))
            assert refused == f"the manager is being recorded already, to {begun.path}"
            serve(manager, 3)
            begun.stop()
            assert replayed(begun.path).num_calls == 12


@pytest.mark.parametrize("max_events", [2**64 - 1, 2**64, 10**40])
def test_events_taken_without_a_bound_that_counts_are_recorded(path, max_events):
    manager = CPUOffloadingManager(16, 100, enable_events=True)
    with Recorder(manager, path):
        serve(manager, 1)
        assert [event.keys for event in manager.take_events(max_events)] == [[key(i) for i in range(7)]]
        serve(manager, 1)
    assert replayed(path).num_calls == 9


@pytest.mark.parametrize("num_keys", [500, 3_700, 4_200, 30_000, 600_000])
def test_record_longer_than_the_bound_is_lost_and_does_not_break_it(manager, tmp_path, path, num_keys):
    long = [os.urandom(16) for _ in range(num_keys)]
    with Recorder(manager, path, max_bytes="64KiB", buffer_bytes="1MiB") as recorder:
        manager.touch(long[:5])
        manager.touch(long)
        manager.touch(long[:7])
    is_lost = num_keys > 4_000  # half of 64 KiB, at 8 bytes a key
    assert recorder.stats().num_lost == is_lost
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 1 << 16
    recorded = [*map(len, touches(path))]
    assert recorded == ([5, 7] if is_lost else [5, num_keys, 7])
    outcome = replayed(path)
    assert (outcome.num_calls, outcome.num_lost) == (len(recorded) - is_lost, is_lost)


def test_positions_longer_than_the_bound_are_counted_as_lost(manager, path):
    request = ReqContext()
    request.set_offload_key_positions({os.urandom(16): number for number in range(3000)})
    with Recorder(manager, path, max_bytes=24_000) as recorder:
        manager.touch([b"last"], request)
    assert recorder.stats().num_lost == 1
    recording = Recording(path)
    assert [call.op for call in recording if call.op < ops.Op.CONTEXT] == [ops.Op.TOUCH]
    assert recording.num_lost == 1


def test_record_longer_than_the_buffer_is_lost(manager, path):
    long = [os.urandom(16) for _ in range(60_000)]
    with Recorder(manager, path, buffer_bytes="900KiB") as recorder:
        for _ in range(3):
            manager.touch(long + long)
        for _ in range(50):
            manager.touch(long[:1000])
    assert recorder.stats().num_lost == 3
    assert len(touches(path)) == 50


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
                prompt = rng.randrange(20)
                request(manager, [key(100 * prompt + i) for i in range(rng.randrange(1, 12))])
                list(manager.take_events())
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


def test_recorder_that_is_stopped_inside_a_call_does_not_wait_for_it(path, monkeypatch):
    monkeypatch.setattr("kvcache.recorder.recorder._STOP_S", 0.1)
    made = []

    def clock():
        if made:
            made[0].stop()
        return 1.0

    manager = CPUOffloadingManager(16, 100, clock=clock)
    made.append(Recorder(manager, path))
    with ThreadPoolExecutor(1) as pool:
        made[0]._queue.lock.acquire()
        assert pool.submit(made[0].stats).result(timeout=30).num_records == 0  # it does not wait, either
        made[0]._queue.lock.release()
    manager.touch([key(1)], ReqContext("1", None, Retention(priority=1)))
    manager.touch([key(2)])
    assert replayed(path).num_calls == 0


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
        Recorder(CPUOffloadingManager(16, 50), path).stop()
        assert [call.op for call in Recording(path)] == [ops.Op.STATS]
        assert Path(f"{path}.1").exists() or "missing" in recording.end


@pytest.mark.parametrize("num_bytes", [None, 0, 3, 8, 20, 100])
def test_kill_between_two_files_leaves_the_older_ones(manager, tmp_path, path, num_bytes):
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
def test_process_that_ends_without_stop_leaves_a_whole_file(path, end):
    with run_recorder(path, f"for number in range(20): serve(number)\n{end}", stderr=subprocess.DEVNULL) as child:
        child.wait(60)
    assert replayed(path).num_calls == 80


def test_disk_that_is_full_ends_the_recording_at_the_last_whole_frame(path):
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


def test_recording_is_a_trace(manager, path):
    now = [100.0]
    with Recorder(manager, path, clock=lambda: now[0]):
        for number in range(5):
            now[0] += 2.5
            context = ReqContext()
            keys = [key(10 * (number % 2) + i) for i in range(4)]
            manager.lookup(keys, context)
            manager.prepare_store(keys, context)
            manager.on_request_finished(context)
        now[0] += 2.5
        manager.lookup([key(1), key(2)])
        manager.prepare_store([key(1), key(2)])
    with RecordedTrace(path) as trace:
        requests = list(trace)
    assert trace.block_size == 16
    assert [len(one.hash_ids) for one in requests] == [4, 4, 4, 4, 4, 2]
    assert [round(one.arrival_s, 2) for one in requests] == [0, 2.5, 5, 7.5, 10, 12.5]
    assert requests[0].hash_ids.tolist() == requests[2].hash_ids.tolist() != requests[1].hash_ids.tolist()
    assert requests[5].hash_ids.tolist() == requests[0].hash_ids.tolist()[1:3]
    assert requests[0].input_length == 64


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / "run.kvlog"
    manager = CPUOffloadingManager(16, 20, "arc", True)
    with Recorder(manager, path):
        make_all_calls(manager, random.Random(3), 4)
    return path.read_bytes()


def read_all(path, data):
    path.write_bytes(data)
    recording = Recording(path)
    return list(recording), recording.end


def frame_starts(data):
    starts = [12]  # after the magic bytes and the version
    while starts[-1] < len(data):
        starts.append(starts[-1] + 4 + int.from_bytes(data[starts[-1] : starts[-1] + 4], "little"))
    return starts


def test_cut_recording_is_read_up_to_the_cut(path, whole):
    records, end = read_all(path, whole)
    assert end == ""
    for length in range(0, len(whole), 3):
        try:
            found, end = read_all(path, whole[:length])
        except RecordingError:
            continue
        assert found == records[: len(found)]
        assert end or length in frame_starts(whole)


def test_foreign_files_are_named(path):
    for data in (b"", b"KVC", b'{"timestamp": 0}', os.urandom(100), b"KVCLOG\r\n", header_bytes({"no": "manager"})):
        with pytest.raises(RecordingError, match=r"run\.kvlog"):
            read_all(path, data)
    later = bytearray(header_bytes({"manager": {}}))
    later[8] = 9
    with pytest.raises(RecordingError, match="of format 9, this kvcache reads format 6"):
        read_all(path, bytes(later))


def test_flipped_bytes_are_found(path, whole):
    rng = random.Random(11)
    records, _ = read_all(path, whole)
    for _ in range(500):
        damaged = bytearray(whole)
        for _ in range(rng.randrange(1, 4)):
            damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        try:
            found, end = read_all(path, bytes(damaged))
        except RecordingError:
            continue
        assert found == records or end


# Run by hand with KVCACHE_STRESS=100 for a million cases.
NUM_FUZZED = 10_000 * int(os.environ.get("KVCACHE_STRESS", "1"))


@pytest.mark.parametrize("kind", range(4))
def test_recording_with_hostile_frame_ends_in_a_clear_error(monkeypatch, whole, kind):
    """The checksum of the frame is right, but its content is arbitrary."""
    config = {"block_size": 16, "num_blocks": 20, "cache_policy": "arc", "enable_events": True}
    header = header_bytes({"manager": config, "is_from_start": True})
    start = frame_starts(whole)[1] + 4
    _, rows = msgspec.msgpack.decode(zlib.decompress(whole[start:], 31))
    content = b""
    monkeypatch.setattr(Path, "open", lambda self, mode: io.BytesIO(content))
    num_damaged = 0
    for seed in range(NUM_FUZZED // 4):
        content = header + frame_bytes(hostile_bytes(random.Random(seed), kind, rows))
        try:
            recording = Recording("hostile.kvlog")
            if seed % 10:
                list(recording)
            else:
                replay_recording(recording)
            num_damaged += bool(recording.end)
        except RecordingError:
            num_damaged += 1
    assert num_damaged > 0


ODD_VALUES = (
    None, True, -1, 0, 1, 7, 1 << 40, (1 << 64) - 1, 0.5, float("nan"), "x", b"", b"\0" * 8, b"\1" + bytes(15), b"123",
    [], {}, [1, 2, 3], [[0]], {"priority": 9},
)  # fmt: skip


def hostile_bytes(rng, kind, rows):
    """Return bytes, unusual rows, or recorded rows with a few values replaced or removed."""
    if kind == 0:
        return rng.choice((b"", b"\x92\x00")) + rng.randbytes(rng.randrange(200))
    if kind == 1:
        rows = [[rng.choice(list(ops.Op)), *(rng.choice(ODD_VALUES) for _ in range(rng.randrange(7)))] for _ in "row"]
        return msgspec.msgpack.encode((0, rows))
    rows = copy.deepcopy(rng.sample(rows, min(30, len(rows))))
    for row in rng.sample(rows, 1 + len(rows) // 8):
        at = rng.randrange(len(row))
        if isinstance(row[at], list) and row[at] and rng.random() < 0.7:
            row, at = row[at], rng.randrange(len(row[at]))
        row[at] = rng.choice(ODD_VALUES)
        if kind == 3:
            del row[rng.randrange(len(row))]
    return msgspec.msgpack.encode((0, rows))


def test_configuration_of_strangers_is_not_trusted(path):
    for config, message in (
        ({"block_size": 16, "num_blocks": 1 << 29, "cache_policy": "lru"}, "memory"),
        ({"block_size": 16, "num_blocks": 4, "cache_policy": "os:PathLike"}, "--policy"),
        ({"block_size": 16, "num_blocks": 4, "cache_policy": ["lru"]}, "policy"),
        ({"block_size": "x", "num_blocks": 4, "cache_policy": "lru"}, "block_size"),
        ({"block_size": 16, "cache_policy": "lru"}, "num_blocks"),
        ({"block_size": 16, "num_blocks": 4, "cache_policy": "lru", "surprise": 1}, "surprise"),
        ({"block_size": 16, "num_blocks": 4, "cache_policy": "lru", "tiers": [{"medium": "X", "rule": 1}]}, "rule"),
    ):
        path.write_bytes(header_bytes({"manager": config, "is_from_start": True}))
        with pytest.raises(RecordingError, match=message):
            replay_recording(Recording(path))
