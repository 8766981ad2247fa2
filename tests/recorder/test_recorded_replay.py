"""A replay of a recording returns the same answers; a recording is a trace, too."""

from __future__ import annotations

import random
import sys
import threading
import time

import numpy as np
import pytest
from engine import Engine
from msgspec.structs import replace
from recorder_harness import COMPILED, key, make_all_calls, replayed, request

from kvcache import CPUOffloadingManager, MemoryTier, ReqContext, TierConfig, TieredOffloadingManager
from kvcache.lab.rerun.recorded import replay_recording
from kvcache.lab.traces.recorded_trace import RecordedTrace
from kvcache.lab.traces.recording import Recording, RecordingError
from kvcache.recorder import ops
from kvcache.recorder.recorder import Recorder
from kvcache.tiers.base.tier import TierResult
from kvcache.tiers.memory import MemoryOptions


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
    other = "lru" if policy != "lru" else "arc"
    assert replay_recording(Recording(path), other).difference is not None


@pytest.mark.parametrize("write_policy", ["write_through", "write_back", "write_through_selective"])
def test_tiered_recording_replays_without_tier(path, write_policy):
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
        (
            Moody(MemoryOptions(64 * 64 * 300), host),
            TierConfig(write_policy=write_policy, pause_s=0.001, deadline_s=0.05),
        ),
        (MemoryTier(MemoryOptions(64 * 64 * 600), host), TierConfig()),
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
def test_arbiters_recording_replays_to_same_decisions(path, is_key_by_key):
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
        (Slow(MemoryOptions(64 * 64 * 200), host), TierConfig(arbiter=True, deadline_s=5)),
        (MemoryTier(MemoryOptions(64 * 64 * 600), host), TierConfig(arbiter=True, deadline_s=5)),
    ]
    given = {"prefill_tokens_per_s": {0: 2000, 4096: 1000}} if is_key_by_key else {}
    manager = TieredOffloadingManager(16, 60, tiers, "arc", True, **given)
    engine = Engine(manager)
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
            engine.load(loaded, context)
            engine.store(keys, context)
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


def test_late_recording_replays_from_next_reset(tmp_path, path):
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


# A recording omits a call that another thread is making when the recording begins.
@pytest.mark.parametrize(("num_threads", "begins_late"), [(1, False), (3, False), (1, True)])
def test_recordings_beside_calls_replay(tmp_path, num_threads, begins_late):
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


def test_request_over_reset_replays_alike(manager, path):
    with Recorder(manager, path):
        context = ReqContext()
        manager.lookup([key(1)], context)
        manager.reset_cache()
        for _ in range(2):  # the second time, as the next request of the same context
            manager.prepare_store([key(1)], context)
            manager.complete_store([key(1)], context)
            manager.on_request_finished(context)
    assert replayed(path).num_calls == 8


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


def test_removed_parts_of_recording_are_named(path, monkeypatch, run):
    older = {"retention": {"priority": 2, "ttl_s": 5.0, "next_use": "soon"}}
    older["kvcache"] = {"priority": 0, "ttl_s": None, "next_use": "end"}
    monkeypatch.setattr("kvcache.recorder.format._hint_of", lambda context: older)
    manager = CPUOffloadingManager(16, 8)
    options = {**manager.configuration(), "retention_share": 0.5}
    monkeypatch.setattr(manager, "configuration", lambda: options)
    context = ReqContext("1", {"kvcache": {"next_use": "end"}})
    with Recorder(manager, path):
        manager.touch([key(1)], context)
        manager.on_request_finished(context)
    code, out, _ = run("rerun", path)
    assert code == 0
    assert "left out, because they were removed from kvcache: priority, retention_share, ttl_s" in out
