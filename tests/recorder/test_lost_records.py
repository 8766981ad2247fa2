"""Records beyond a bound are lost alone, and counted."""

from __future__ import annotations

import os
import threading
import time

import pytest
from recorder_harness import key, replayed, touches

from kvcache import ReqContext
from kvcache.lab.traces.recording import Recording
from kvcache.recorder import ops
from kvcache.recorder import recorder as recorder_module
from kvcache.recorder.recorder import Recorder


@pytest.mark.parametrize("num_calls", [3000, 300_000])
def test_full_buffer_counts_lost_records(manager, path, monkeypatch, num_calls):
    gate = threading.Event()
    # A disk that hangs.
    monkeypatch.setattr("kvcache.recorder.files.write_all", lambda fd, data: gate.wait(30) and os.write(fd, data))
    gate.set()
    recorder = Recorder(manager, path, buffer_bytes="1MiB")
    gate.clear()
    for _ in range(num_calls):
        if num_calls == 3000:
            manager.touch([os.urandom(32) for _ in range(200)])
        else:  # a run of equal answers
            manager.status(b"same")
    lost = recorder.stats().num_lost
    gate.set()
    assert lost > 1000
    while recorder.stats().num_bytes < 1000:
        time.sleep(0.01)
    time.sleep(2 * recorder_module._FLUSH_S)
    manager.reset_cache()
    manager.touch([key(number) for number in range(200)])
    recorder.stop()
    recording = Recording(path, is_trusted=True)
    assert [len(call.keys) for call in recording][-2] == 200
    assert recording.num_lost == lost


def test_lost_record_splits_its_run(manager, path):
    long = [os.urandom(16) for _ in range(60_000)]
    with Recorder(manager, path, buffer_bytes="900KiB") as recorder:
        manager.status(key(1))
        manager.touch(long)
        manager.status(key(2))
    assert recorder.stats().num_records == 4
    found = [call.op for call in Recording(path)]
    assert found == [ops.Op.STATUS, ops.Op.LOST, ops.Op.STATUS, ops.Op.STATS]


def test_taken_run_gets_no_keys(monkeypatch, manager, path):
    monkeypatch.setattr(recorder_module, "_FLUSH_S", 60)
    with Recorder(manager, path) as recorder:
        manager.status(key(1))
        taken = recorder._queue.take()
        manager.status(key(2))
        assert [record[1] for records in (taken, recorder._queue.take()) for record in records] == [[key(1)], [key(2)]]
        assert recorder.stats().num_records == 2


def test_unencodable_record_is_lost_alone(manager, path):
    with Recorder(manager, path) as recorder:
        manager.touch([key(1)])
        with pytest.raises(ValueError, match="next_use"):
            manager.hint([key(1)], "\ud800")
        manager.touch([key(2)])
    assert recorder.stats().num_lost == 1
    assert [len(keys) for keys in touches(path)] == [1, 1]
    assert replayed(path).num_lost == 1


@pytest.mark.parametrize("num_keys", [500, 3_700, 4_200, 30_000, 600_000])
def test_record_beyond_bound_is_lost_alone(manager, tmp_path, path, num_keys):
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


def test_positions_beyond_bound_count_as_lost(manager, path):
    request = ReqContext()
    request.set_offload_key_positions({os.urandom(16): number for number in range(3000)})
    with Recorder(manager, path, max_bytes=24_000) as recorder:
        manager.touch([b"last"], request)
    assert recorder.stats().num_lost == 1
    recording = Recording(path)
    assert [call.op for call in recording if call.op < ops.Op.CONTEXT] == [ops.Op.TOUCH]
    assert recording.num_lost == 1
