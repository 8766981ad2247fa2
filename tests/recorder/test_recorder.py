"""A recorder writes every call of a manager, and gives the manager back as it was."""

from __future__ import annotations

import gc
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat

import numpy as np
import pytest
from recorder_harness import key, replayed, serve, touches

from kvcache import (
    BackendOffloadingManager,
    CPUBackend,
    CPUOffloadingManager,
    ReqContext,
    Retention,
    TieredOffloadingManager,
)
from kvcache.lab.traces.recording import Recording
from kvcache.recorder import ops
from kvcache.recorder.format import Raised
from kvcache.recorder.recorder import Recorder
from kvcache.testing.tiers import ManualTier


def test_stopped_manager_calls_own_methods(manager, path):
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


def test_failed_start_gives_parts_back(path):
    tier = ManualTier(8, np.zeros((8, 4), np.uint8), is_automatic=True)
    manager = TieredOffloadingManager(8, 8, [tier])

    def parts():
        return manager.controllers[0].tier, manager.clock, manager.recorder, type(manager)

    before = parts()
    manager.lookup = manager.lookup
    with pytest.raises(ValueError, match="lookup cannot be wrapped"):
        Recorder(manager, path)
    assert parts() == before
    del manager.lookup
    get_finished = tier.get_finished
    tier.get_finished = lambda: iter(get_finished())
    reset, resets = tier.reset, []
    tier.reset = lambda version: resets.append((version, reset()))
    with Recorder(manager, path):
        assert not {tier, before[1]} & {*parts()}
        manager.complete_store(manager.prepare_store([key(1)]).keys_to_store)
        assert manager.settle()
        assert manager.tier_stats()[0].written_blocks == 1
        manager.reset_cache("2")
        assert manager.settle()
    assert resets == [("2", None)]
    assert parts() == before
    manager.shutdown()


def test_single_lookups_are_written_as_runs(path):
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


def test_same_keys_are_named_once_hashed(manager, path):
    keys = [b"a secret prompt %4d" % i for i in range(1000)]
    with Recorder(manager, path):
        for _ in range(400):
            manager.touch(keys)
            manager.touch(keys[:300])
        caller_list = keys[:2]
        manager.touch(caller_list)
        caller_list.clear()
    raw = path.read_bytes()
    assert b"secret" not in raw
    assert len(raw) < 20 * 8 * len(keys) * 2
    recorded = touches(path)
    assert len(recorded) == 801
    assert recorded[-1] == recorded[0][:2]
    assert all(keys == recorded[0][: len(keys)] for keys in recorded)
    assert len(set(recorded[0])) == 1000


def test_positions_are_written_once_per_reset(manager, path):
    context = ReqContext("1", None, Retention("soon"))
    with Recorder(manager, path):
        for number in range(40):
            context.set_offload_key_position(key(number), number)
            manager.touch([key(number)], context)
        manager.reset_cache()
        manager.touch([key(0)], context)
    records = [*Recording(path)]
    names = [record.op.name for record in records]
    assert names.count("CONTEXT") == 2
    before_reset = records[: names.index("RESET_CACHE")]
    assert [len(record.keys) for record in before_reset if record.op is ops.Op.POSITIONS] == [1] * 40


def test_salt_makes_recordings_keys_alike(tmp_path):
    def recorded(name, salt):
        manager = CPUOffloadingManager(16, 8)
        with Recorder(manager, tmp_path / name, salt=salt):
            manager.touch([key(1)])
        return next(iter(Recording(tmp_path / name))).keys

    assert recorded("a", "ours") == recorded("b", "ours") != recorded("c", "theirs")
    assert recorded("d", None) != recorded("e", None)
    # The whole salt counts, however long.
    assert recorded("f", "x" * 64 + "a") != recorded("g", "x" * 64 + "b")
    assert b"ours" not in (tmp_path / "a").read_bytes()


def test_inner_calls_are_not_recorded(path):
    def clock():
        if threading.current_thread() is threading.main_thread():
            manager.status(key(1))
            with pytest.raises(ValueError, match="key"):
                manager.lookup([b""])
        return 1.0

    manager = CPUOffloadingManager(16, 100, "gittins", clock=clock)
    with Recorder(manager, path) as recorder, ThreadPoolExecutor(1) as other:
        manager.status(key(1))
        manager.touch([key(1)], ReqContext("1", None, Retention("soon")))
        manager.status(key(2))
        # The lock is free again.
        assert other.submit(manager.lookup, [key(1)]).result(60) == 0
    assert (recorder.stats().num_records, recorder.stats().num_lost) == (5, 0)
    found = [call for call in Recording(path) if call.op is not ops.Op.CONTEXT]
    assert [call.op.name for call in found] == ["STATUS", "TOUCH", "STATUS", "LOOKUP", "STATS"]
    assert {one.op for one in found[1].inputs} == {ops.Op.CLOCK}


def test_inputs_between_calls_are_not_recorded(path):
    manager = CPUOffloadingManager(16, 100)
    with Recorder(manager, path):
        for _ in range(100):
            manager.clock()
        manager.touch([key(1)])
    assert {len(call.inputs) for call in Recording(path)} == {0}


def test_recorded_keys_are_released_once_hashed(manager, path):
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


def test_mixed_long_lists_are_recorded(manager, path):
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


def test_second_of_two_recorders_is_refused(tmp_path):
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
def test_events_without_bound_are_recorded(path, max_events):
    manager = CPUOffloadingManager(16, 100, enable_events=True)
    with Recorder(manager, path):
        serve(manager, 1)
        assert [event.keys for event in manager.take_events(max_events)] == [[key(i) for i in range(7)]]
        serve(manager, 1)
    assert replayed(path).num_calls == 9


def test_stop_inside_call_does_not_wait(path, monkeypatch):
    monkeypatch.setattr("kvcache.recorder.recorder._STOP_S", 0.1)
    made = []

    def clock():
        if made:
            made[0].stop()
        return 1.0

    manager = CPUOffloadingManager(16, 100, "gittins", clock=clock)
    made.append(Recorder(manager, path))
    with ThreadPoolExecutor(1) as pool:
        made[0]._queue.lock.acquire()
        assert pool.submit(made[0].stats).result(timeout=30).num_records == 0  # it does not wait, either
        made[0]._queue.lock.release()
    manager.touch([key(1)], ReqContext("1", None, Retention("soon")))
    manager.touch([key(2)])
    assert replayed(path).num_calls == 0
