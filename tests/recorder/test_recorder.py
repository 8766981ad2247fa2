"""A recording holds every call, and a replay of it returns the same answers."""

from __future__ import annotations

import copy
import gc
import io
import os
import random
import signal
import subprocess
import sys
import threading
import time
import zlib
from itertools import islice
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
from kvcache.control.backend import Backend
from kvcache.lab.rerun.recorded import replay_recording
from kvcache.lab.traces.recorded_trace import RecordedTrace
from kvcache.recorder import ops
from kvcache.recorder.files import frame_bytes, header_bytes
from kvcache.recorder.format import Raised, Recording, RecordingError
from kvcache.recorder.recorder import Recorder
from kvcache.registry import POLICIES
from kvcache.tiering.tier import TierResult

COMPILED = [name for name in POLICIES.names() if ":" not in name]


def key(number: int) -> bytes:
    return b"block %d" % number + bytes(4)


def serve(manager, rng, num_requests, clock=None, num_prompts=30):
    """Make all kinds of valid and invalid calls, as concurrent requests would."""
    open_requests = []
    for number in range(num_requests):
        if clock is not None:
            clock[0] += rng.random()
        retention = Retention(rng.randrange(-1, 4), rng.choice((None, 5.0))) if rng.random() < 0.2 else None
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
def test_recording_replays_to_the_same_answers(tmp_path, policy):
    clock = [5.0]
    manager = CPUOffloadingManager(16, 60, policy, True, store_threshold=2, clock=lambda: clock[0])
    with Recorder(manager, tmp_path / "run.kvlog") as recorder:
        serve(manager, random.Random(7), 500, clock)
    stats = recorder.stats()
    assert (stats.num_lost, stats.error) == (0, "")
    outcome = replay_recording(Recording(tmp_path / "run.kvlog"))
    assert (outcome.difference, outcome.end, outcome.num_skipped) == (None, "", 0)
    assert outcome.num_calls > 5000
    # The replay compares answers: another policy, or a changed answer, gives a difference.
    other = "lru" if policy != "lru" else "mq"
    assert replay_recording(Recording(tmp_path / "run.kvlog"), other).difference is not None


@pytest.mark.parametrize("write_policy", ["write_through", "write_back", "write_through_selective"])
def test_tiered_recording_needs_no_tier_to_replay(tmp_path, write_policy):
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
    manager = TieredOffloadingManager(
        16,
        40,
        [
            (Moody(64 * 300, host), TierConfig(write_policy=write_policy, pause_s=0.001, deadline_s=0.05)),
            (MemoryTier(64 * 600, host), TierConfig()),
        ],
        "arc",
        True,
    )
    with Recorder(manager, tmp_path / "run.kvlog"):
        # The manager pauses a tier after a slow job; then more requests are needed to promote blocks.
        for step in range(300):
            serve(manager, rng, 10)
            manager.settle(10)
            promoted = sum(stats.promoted_blocks for stats in manager.tier_stats())
            if step >= 30 and promoted > 10:
                break
    manager.shutdown()
    outcome = replay_recording(Recording(tmp_path / "run.kvlog"))
    assert (outcome.difference, outcome.end) == (None, "")
    assert promoted > 10


@pytest.mark.parametrize("is_key_by_key", [False, True])
def test_recording_of_an_arbiter_replays_to_the_same_decisions(tmp_path, is_key_by_key):
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
    with Recorder(manager, tmp_path / "run.kvlog"):
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
    outcome = replay_recording(Recording(tmp_path / "run.kvlog"))
    assert (outcome.difference, outcome.end) == (None, "")
    # The arbiter learned from the times: without them it decides differently.
    if not is_key_by_key:
        assert replay_recording(Timeless(tmp_path / "run.kvlog")).difference is not None


class Timeless(Recording):
    """A recording without the times of jobs."""

    def __iter__(self):
        for call in super().__iter__():
            yield replace(call, inputs=[timeless(one) for one in call.inputs])


def timeless(one):
    if one.op is not ops.Op.TIER_FINISHED:
        return one
    return replace(one, value=[result and replace(result, start_s=None, end_s=None) for result in one.value])


def test_stopped_manager_calls_its_own_methods_again(tmp_path):
    manager = CPUOffloadingManager(16, 8)
    before = {name: getattr(manager, name) for name in ("lookup", "prepare_store", "take_events")}
    recorder = Recorder(manager, tmp_path / "run.kvlog")
    assert manager.recorder is recorder
    with pytest.raises(ValueError, match="recorded already"):
        Recorder(manager, tmp_path / "other.kvlog")
    recorder.stop()
    recorder.stop()
    assert {name: getattr(manager, name) for name in before} == before
    assert manager.recorder is None
    manager.prepare_store([key(1)])
    assert [record.op for record in Recording(tmp_path / "run.kvlog")] == [ops.Op.STATS]


def test_recording_that_begins_late_replays_from_the_next_reset(tmp_path):
    manager = CPUOffloadingManager(16, 30, "arc")
    serve(manager, random.Random(1), 50)
    context = ReqContext("spans both")
    manager.lookup([key(1)], context)
    with Recorder(manager, tmp_path / "run.kvlog"):
        manager.touch([key(1)], context)
        manager.reset_cache()
        manager.touch([key(1)], context)
        serve(manager, random.Random(2), 50)
    outcome = replay_recording(Recording(tmp_path / "run.kvlog"))
    assert outcome.difference is None
    assert outcome.num_skipped == 1
    with Recorder(manager, tmp_path / "late.kvlog"):
        manager.touch([key(1)])
    with pytest.raises(RecordingError, match="at work already"):
        replay_recording(Recording(tmp_path / "late.kvlog"))


def test_look_ups_one_by_one_are_written_as_runs(tmp_path):
    manager = CPUOffloadingManager(16, 400)
    keys = [key(number) for number in range(300)]
    with Recorder(manager, tmp_path / "run.kvlog", salt="ours") as recorder:
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
    calls = [call for call in Recording(tmp_path / "run.kvlog") if call.op is ops.Op.STATUS]
    assert [call.answer for call in calls[:201]] == [2] * 200 + [0]
    assert calls[-1].answer == Raised("ValueError")
    hashes = [call.keys for call in calls[:201]]
    assert len(set(hashes)) == 201
    assert all([call.keys for call in calls[start : start + 201]] == hashes for start in range(0, 300 * 201, 201))
    loaded = [call.keys for call in Recording(tmp_path / "run.kvlog") if call.op is ops.Op.PREPARE_LOAD]
    assert loaded == [hashes[:200]] * 300
    assert [call.number for call in Recording(tmp_path / "run.kvlog")] == list(range(recorder.stats().num_records))
    assert replay_recording(Recording(tmp_path / "run.kvlog")).difference is None


@pytest.mark.parametrize("policy", ["lru", "gittins"])
def test_hints_and_clocks_that_go_back_replay(tmp_path, policy):
    rng = random.Random(3)
    clock = [5.0]
    manager = CPUOffloadingManager(16, 60, policy, True, clock=lambda: clock[0])
    num_refused = 0
    with Recorder(manager, tmp_path / "run.kvlog"):
        running = []
        for number in range(600):
            clock[0] += rng.random()
            said = Retention(next_use=rng.choice(("soon", "later", "end")))
            context = ReqContext(str(number), None, rng.choice((said, None)))
            keys = [key(100 * rng.randrange(30) + i) for i in range(rng.randrange(1, 14))]
            if rng.random() < 0.05:
                clock[0] -= 50
                try:
                    manager.touch(keys, context)
                except ValueError:
                    num_refused += 1
                clock[0] += 50
            if rng.random() < 0.8:
                output = manager.prepare_store(keys, context)
                if output is not None:
                    manager.complete_store(output.keys_to_store, context)
            running.append(context)
            if rng.random() < 0.8:
                ended = running.pop(rng.randrange(len(running)))
                manager.on_request_finished(ended)
                if rng.random() < 0.3:
                    manager.hint(ended, "soon")
            if number == 300:
                manager.reset_cache()
    assert num_refused > 0 or policy == "gittins"
    outcome = replay_recording(Recording(tmp_path / "run.kvlog"))
    assert (outcome.difference, outcome.end, outcome.num_skipped) == (None, "", 0)


def test_recordings_begin_and_end_while_calls_are_made(tmp_path):
    manager = CPUOffloadingManager(16, 200, enable_events=True)
    is_over = threading.Event()
    failures = []

    def work():
        number = 0
        while not is_over.is_set():
            try:
                serve(manager, random.Random(number), 20)
            except BaseException as error:
                failures.append(error)
                raise
            number += 1

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    worker = threading.Thread(target=work)
    worker.start()
    try:
        for number in range(40):
            recorder = Recorder(manager, tmp_path / f"{number}.kvlog")
            time.sleep(0.01)
            recorder.stop()
    finally:
        is_over.set()
        worker.join()
        sys.setswitchinterval(before)
    assert failures == []
    assert sum(len(list(Recording(tmp_path / f"{number}.kvlog"))) for number in range(40)) > 100


def test_same_keys_are_named_once_and_never_in_clear(tmp_path):
    manager = CPUOffloadingManager(16, 2000)
    keys = [b"a secret prompt %4d" % i for i in range(1000)]
    with Recorder(manager, tmp_path / "run.kvlog"):
        for _ in range(20):
            context = ReqContext()
            for _ in range(20):
                manager.touch(keys, context)
                manager.touch(keys[:300], context)
    raw = (tmp_path / "run.kvlog").read_bytes()
    assert b"secret" not in raw
    assert len(raw) < 20 * 8 * len(keys) * 2
    calls = [record for record in Recording(tmp_path / "run.kvlog") if record.op is ops.Op.TOUCH]
    assert len(calls) == 800
    assert all(call.keys == calls[0].keys[: len(call.keys)] for call in calls)
    assert len(set(calls[0].keys)) == 1000


def test_salt_makes_keys_of_two_recordings_alike(tmp_path):
    def recorded(name, salt):
        manager = CPUOffloadingManager(16, 8)
        with Recorder(manager, tmp_path / name, salt=salt):
            manager.touch([key(1)])
        return next(iter(Recording(tmp_path / name))).keys

    assert recorded("a", "ours") == recorded("b", "ours") != recorded("c", "theirs")
    assert recorded("d", None) != recorded("e", None)
    assert b"ours" not in (tmp_path / "a").read_bytes()


def test_files_are_bounded_and_the_oldest_goes_first(tmp_path):
    manager = CPUOffloadingManager(16, 100)
    with Recorder(manager, tmp_path / "run.kvlog", max_bytes="1MiB") as recorder:
        for i in range(300):
            manager.touch([os.urandom(32) for _ in range(1000)])
            if i == 250:
                manager.reset_cache()
            time.sleep(0.001)
    assert recorder.stats().num_lost == 0
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["run.kvlog", "run.kvlog.1"]
    assert sum(file.stat().st_size for file in files) <= 1 << 20
    recording = Recording(tmp_path / "run.kvlog")
    assert not recording.is_whole
    outcome = replay_recording(recording)
    assert (outcome.difference, outcome.num_calls) == (None, 50)
    assert all(file.stat().st_mode & 0o077 == 0 for file in files)


def test_restart_keeps_the_recording_before(tmp_path):
    for number in range(3):
        manager = CPUOffloadingManager(16, 100)
        with Recorder(manager, tmp_path / "run.kvlog"):
            for _ in range(number + 1):
                manager.touch([key(number)])
    assert replay_recording(Recording(tmp_path / "run.kvlog")).num_calls == 3
    assert replay_recording(Recording(tmp_path / "run.kvlog.1")).num_calls == 2


def test_full_buffer_loses_records_and_counts_them(tmp_path, monkeypatch):
    gate = threading.Event()
    # A disk that hangs.
    monkeypatch.setattr("kvcache.recorder.files.write_all", lambda fd, data: gate.wait(30) and os.write(fd, data))
    gate.set()
    manager = CPUOffloadingManager(16, 100)
    recorder = Recorder(manager, tmp_path / "run.kvlog", buffer_bytes="1MiB")
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
    outcome = replay_recording(Recording(tmp_path / "run.kvlog"))
    assert outcome.num_lost == lost
    assert outcome.difference is None


def test_recorded_keys_are_let_go_of_once_they_are_hashed(tmp_path):
    keys = [key(number) for number in range(10_000)]
    before = [sys.getrefcount(one) for one in keys]
    manager = CPUOffloadingManager(16, 100)
    with Recorder(manager, tmp_path / "run.kvlog"):
        for start in range(0, 10_000, 50):
            manager.lookup(keys[start : start + 50])
            manager.lookup(keys[start : start + 2])
        manager.touch(keys)  # larger than a chunk
    assert [sys.getrefcount(one) for one in keys] == before
    calls = [call for call in Recording(tmp_path / "run.kvlog") if call.keys is not None and call.op is ops.Op.LOOKUP]
    assert [len(call.keys) for call in calls] == [50, 2] * 200
    assert len({one for call in calls for one in call.keys}) == 10_000


def test_long_lists_with_something_else_among_their_keys_are_recorded(tmp_path):
    class Odd:
        """The caller drops the last reference to such an object, not the recorder's thread."""

        def __del__(self):
            ended_in.append(threading.current_thread())

    ended_in = []
    manager = CPUOffloadingManager(16, 100)
    with Recorder(manager, tmp_path / "run.kvlog"):
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
    recorded = [call.keys for call in Recording(tmp_path / "run.kvlog") if call.op is ops.Op.TOUCH]
    assert [keys[1] for keys in recorded] == [b"", b""] + [None] * 6
    assert {tuple(keys[:1] + keys[2:]) for keys in recorded} == {tuple(recorded[0][:1] + recorded[0][2:])}
    assert replay_recording(Recording(tmp_path / "run.kvlog")).difference is None


def test_lists_longer_than_a_chunk_take_the_place_of_others(tmp_path):
    manager = CPUOffloadingManager(16, 100)
    long = [key(number) for number in range(60_000)]
    with Recorder(manager, tmp_path / "run.kvlog", buffer_bytes="1MiB") as recorder:
        for _ in range(20):
            manager.lookup(long)
            manager.lookup(long[:5])
            time.sleep(0.02)
        stats = recorder.stats()
    assert stats.num_records + stats.num_lost >= 40
    recorded = [call for call in Recording(tmp_path / "run.kvlog") if call.op is ops.Op.LOOKUP]
    assert {len(call.keys) for call in recorded} == {60_000, 5}


def test_failing_disk_ends_the_recording_and_nothing_else(tmp_path, monkeypatch):
    manager = CPUOffloadingManager(16, 100)
    recorder = Recorder(manager, tmp_path / "run.kvlog")

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


def test_wrong_paths_and_options_are_refused(tmp_path):
    manager = CPUOffloadingManager(16, 4)
    (tmp_path / "foreign").write_text("dear diary")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "folder").mkdir()
    for name in ("foreign", "link", "folder"):
        with pytest.raises(ValueError, match=name):
            Recorder(manager, tmp_path / name)
    assert (tmp_path / "foreign").read_text() == "dear diary"
    for options in ({"max_bytes": 100}, {"max_bytes": "x"}, {"salt": ""}, {"salt": 5}, {"buffer_bytes": 0}):
        with pytest.raises(ValueError, match=next(iter(options))):
            Recorder(manager, tmp_path / "run.kvlog", **options)
    with Recorder(manager, tmp_path / "run.kvlog"), pytest.raises(ValueError, match="another manager"):
        Recorder(CPUOffloadingManager(16, 4), tmp_path / "run.kvlog")
    with pytest.raises(ValueError, match="cannot record"):
        Recorder(object(), tmp_path / "x")

    class Own(CPUBackend):
        pass

    assert issubclass(Own, Backend)
    with pytest.raises(ValueError, match="allocated by a Own"):
        Recorder(BackendOffloadingManager(Own(16, 4)), tmp_path / "x")
    assert manager.recorder is None
    assert manager.lookup([key(1)]) == 0


def test_dropped_manager_is_freed_and_leaves_a_whole_file(tmp_path):
    manager = CPUOffloadingManager(16, 4)
    recorder = Recorder(manager, tmp_path / "run.kvlog")
    manager.touch([key(1)])
    thread = recorder._thread
    del manager, recorder
    gc.collect()
    assert thread.stop(10)
    assert replay_recording(Recording(tmp_path / "run.kvlog")).num_calls == 1


def test_kill_leaves_a_readable_prefix(tmp_path):
    code = """
import sys, time
from kvcache import CPUOffloadingManager, Recorder
manager = CPUOffloadingManager(16, 50)
recorder = Recorder(manager, sys.argv[1], max_bytes="256KiB")
number = 0
while True:
    keys = [b"%d" % (number % 400 + i) for i in range(9)]
    output = manager.prepare_store(keys)
    manager.complete_store(output.keys_to_store)
    number += 1
    if number == 3000:
        time.sleep(1.5)
        print("ready", flush=True)
"""
    child = subprocess.Popen([sys.executable, "-c", code, tmp_path / "run.kvlog"], stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "ready\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    recording = Recording(tmp_path / "run.kvlog")
    assert len(list(recording)) > 0
    if recording.is_whole:
        outcome = replay_recording(recording)
        assert outcome.difference is None
        assert outcome.num_calls >= 6000


def test_threads_take_turns_and_replay(tmp_path):
    manager = CPUOffloadingManager(16, 500)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with Recorder(manager, tmp_path / "run.kvlog") as recorder:
            threads = [
                threading.Thread(
                    target=lambda n=n: [
                        manager.complete_store(manager.prepare_store([key(1000 * n + i)]).keys_to_store)
                        for i in range(400)
                    ]
                )
                for n in range(4)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    finally:
        sys.setswitchinterval(before)
    assert recorder.stats().num_records >= 3200
    outcome = replay_recording(Recording(tmp_path / "run.kvlog"))
    assert (outcome.difference, outcome.num_calls) == (None, 3200)


def test_recording_is_a_trace(tmp_path):
    manager = CPUOffloadingManager(16, 100)
    now = [100.0]
    with Recorder(manager, tmp_path / "run.kvlog", clock=lambda: now[0]):
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
    with RecordedTrace(tmp_path / "run.kvlog") as trace:
        requests = list(trace)
    assert trace.block_size == 16
    assert [len(one.hash_ids) for one in requests] == [4, 4, 4, 4, 4, 2]
    assert [round(one.arrival_s, 2) for one in requests] == [0, 2.5, 5, 7.5, 10, 12.5]
    assert requests[0].hash_ids.tolist() == requests[2].hash_ids.tolist() != requests[1].hash_ids.tolist()
    assert requests[5].hash_ids.tolist() == requests[0].hash_ids.tolist()[1:3]
    assert requests[0].input_length == 64


def small_recording(path):
    manager = CPUOffloadingManager(16, 20, "arc", True)
    with Recorder(manager, path):
        serve(manager, random.Random(3), 4)
    return path.read_bytes()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return small_recording(tmp_path_factory.mktemp("whole") / "run.kvlog")


def read_all(path, data):
    path.write_bytes(data)
    recording = Recording(path)
    return list(recording), recording.end


def frame_starts(data):
    starts = [12]  # after the magic bytes and the version
    while starts[-1] < len(data):
        starts.append(starts[-1] + 4 + int.from_bytes(data[starts[-1] : starts[-1] + 4], "little"))
    return starts


def test_cut_recording_is_read_up_to_the_cut(tmp_path, whole):
    records, end = read_all(tmp_path / "run.kvlog", whole)
    assert end == ""
    for length in range(0, len(whole), 3):
        try:
            found, end = read_all(tmp_path / "run.kvlog", whole[:length])
        except RecordingError:
            continue
        assert found == records[: len(found)]
        assert end or length in frame_starts(whole)


def test_foreign_files_are_named(tmp_path):
    for data in (b"", b"KVC", b'{"timestamp": 0}', os.urandom(100), b"KVCLOG\r\n", header_bytes({"no": "manager"})):
        with pytest.raises(RecordingError, match=r"run\.kvlog"):
            read_all(tmp_path / "run.kvlog", data)
    later = bytearray(header_bytes({"manager": {}}))
    later[8] = 9
    with pytest.raises(RecordingError, match="of format 9, this kvcache reads format 6"):
        read_all(tmp_path / "run.kvlog", bytes(later))


def test_flipped_bytes_are_found(tmp_path, whole):
    rng = random.Random(11)
    records, _ = read_all(tmp_path / "run.kvlog", whole)
    for _ in range(500):
        damaged = bytearray(whole)
        for _ in range(rng.randrange(1, 4)):
            damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        try:
            found, end = read_all(tmp_path / "run.kvlog", bytes(damaged))
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


def test_configuration_of_strangers_is_not_trusted(tmp_path):
    for config, message in (
        ({"block_size": 16, "num_blocks": 1 << 29, "cache_policy": "lru"}, "memory"),
        ({"block_size": 16, "num_blocks": 4, "cache_policy": "os:PathLike"}, "--policy"),
        ({"block_size": 16, "num_blocks": 4, "cache_policy": ["lru"]}, "policy"),
        ({"block_size": "x", "num_blocks": 4, "cache_policy": "lru"}, "block_size"),
        ({"block_size": 16, "cache_policy": "lru"}, "num_blocks"),
        ({"block_size": 16, "num_blocks": 4, "cache_policy": "lru", "surprise": 1}, "surprise"),
        ({"block_size": 16, "num_blocks": 4, "cache_policy": "lru", "tiers": [{"medium": "X", "rule": 1}]}, "rule"),
    ):
        path = tmp_path / "run.kvlog"
        path.write_bytes(header_bytes({"manager": config, "is_from_start": True}))
        with pytest.raises(RecordingError, match=message):
            replay_recording(Recording(path))


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_part_of_the_conversation_trace_replays_to_the_same_integers(tmp_path, shared, policy):
    from kvcache.lab.simulate.run import Replay, ReplayClock
    from kvcache.lab.traces.keys import KeyMaker
    from kvcache.lab.traces.trace import Trace

    clock = ReplayClock()
    manager = CPUOffloadingManager(512, 3_000, policy, True, clock=clock)
    replay, make_keys = Replay(manager, arrivals=clock), KeyMaker()
    limit = None if os.environ.get("KVCACHE_WHOLE_TRACES") else 1_500
    path = shared / "traces" / "mooncake_conversation.jsonl"
    with Recorder(manager, tmp_path / "run.kvlog", clock=clock) as recorder, Trace(path) as trace:
        for request in islice(trace, limit):
            replay.step(request, make_keys(request.hash_ids))
    assert recorder.stats().num_lost == 0
    outcome = replay_recording(Recording(tmp_path / "run.kvlog"))
    assert (outcome.difference, outcome.end, outcome.num_skipped) == (None, "", 0)
    assert outcome.num_calls == replay.tally.requests * 7 - replay.tally.rejected_requests
    with RecordedTrace(tmp_path / "run.kvlog") as recorded:
        again = Replay(CPUOffloadingManager(512, 3_000, policy))
        for request in recorded:
            again.step(request, make_keys(request.hash_ids))
    assert again.tally.hit_blocks == replay.tally.hit_blocks
    assert again.tally.blocks == replay.tally.blocks
