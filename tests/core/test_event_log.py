"""The event log numbers events, bounds them, and keeps them in the order in which the cache changed."""

from __future__ import annotations

import pickle
import random
import subprocess
import sys
import threading

import pytest

from kvcache import CPUOffloadingManager, OffloadingEvent
from kvcache.core.event_log import EventLog

PLAIN = "reference_policies:ReferenceARC"  # five primitives in plain Python


def test_untaken_events_are_dropped_oldest_first() -> None:
    log = EventLog(16, max_keys=4)
    for key in (b"a", b"b", b"c"):
        log.add([key, key], "CPU", False)
    assert (len(log), log.num_dropped) == (2, 1)
    log.add([b"x"] * 9, "CPU", False)
    assert [(event.number, len(event.keys)) for event in log.take()] == [(4, 9)]
    log.add([b"y"], "CPU", False)
    assert list(log.take()) == [OffloadingEvent([b"y"], 16, "CPU", False)]  # its number is not compared


def test_reset_drops_events_skips_number() -> None:
    manager = CPUOffloadingManager(16, 2, enable_events=True)
    manager.prepare_store([b"a"])
    manager.complete_store([b"a"])
    manager.reset_cache()
    assert list(manager.take_events()) == []
    manager.prepare_store([b"b"])
    manager.complete_store([b"b"])
    assert [(event.keys, event.number) for event in manager.take_events()] == [([b"b"], 3)]


def test_unread_events_release_their_keys() -> None:
    log = EventLog(16)
    key = bytes(bytearray(b"a key of its own"))  # a constant may be immortal
    before = sys.getrefcount(key)
    for _ in range(40):
        log.add([key, key], "CPU", False)
    taken = log.take(30)
    next(taken)
    assert sys.getrefcount(key) == before + 80 - 2
    del taken
    log.clear()
    assert sys.getrefcount(key) == before


def test_events_in_pieces_keep_order() -> None:
    log = EventLog(16)
    draw = random.Random(3)
    made, read = [], []
    for number in range(1, 2000):
        log.add([b"%d" % number], "CPU", number % 3 == 0)
        log.add([], "CPU", True)
        made.append((number, [b"%d" % number], number % 3 == 0))
        if draw.random() < 0.2:
            read += [(event.number, event.keys, event.removed) for event in log.take(draw.randrange(8))]
    read += [(event.number, event.keys, event.removed) for event in log.take()]
    assert read == made


def test_event_keeps_keys_of_changed_list() -> None:
    manager = CPUOffloadingManager(16, 2, "lru", enable_events=True)
    keys = [b"a", b"b"]
    output = manager.prepare_store(keys)
    assert output is not None
    manager.complete_store(keys)
    keys.clear()
    output = manager.prepare_store([b"c", b"d"])
    assert output is not None
    output.evicted_keys.clear()
    assert [event.keys for event in manager.take_events()] == [[b"a", b"b"], [b"a", b"b"]]


@pytest.mark.parametrize("bad", [(b"a",), None, "a"])
def test_keys_without_list_are_refused(bad: object) -> None:
    log = EventLog(16)
    with pytest.raises(TypeError):
        log.add(bad, "CPU", False)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_keys"):
        EventLog(16, 0)
    with pytest.raises(TypeError, match="pickle"):
        pickle.dumps(log)
    with pytest.raises(TypeError, match="pickle"):
        pickle.dumps(log.take())
    assert len(log) == 0


NO_MEMORY = """
import resource
from kvcache.core.event_log import EventLog

log = EventLog(16, max_keys=1 << 30)
log.add([b"a"], "CPU", False)
many = [b"b"] * (1 << 25)
[mapped] = [int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmSize:")]
resource.setrlimit(resource.RLIMIT_AS, (mapped + (1 << 26), resource.RLIM_INFINITY))
log.add(many, "CPU", True)
assert (len(log), log.last_number) == (0, 2)
log.add([b"c"], "CPU", False)
assert [(event.number, event.keys) for event in log.take()] == [(3, [b"c"])]
"""


@pytest.mark.slow
def test_event_without_memory_leaves_a_gap() -> None:
    ended = subprocess.run([sys.executable, "-c", NO_MEMORY], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_dropped_event_running_python_keeps_log() -> None:
    log = EventLog(16, max_keys=2)
    seen: list[int] = []

    class Odd:
        def __del__(self) -> None:
            seen.append(len(log))
            log.add([b"from within"], "CPU", False)

    for _ in range(50):
        log.add([Odd()], "CPU", False)  # type: ignore[list-item]
        log.add([b"a", b"b"], "CPU", True)
    assert len(seen) == 50
    numbers = [event.number for event in log.take()]
    assert numbers == list(range(numbers[0], log.last_number + 1))


@pytest.mark.parametrize("policy", ["lru", "gittins", PLAIN])
def test_events_of_threads_are_in_order(policy: str) -> None:
    manager = CPUOffloadingManager(16, 2, policy, enable_events=True)

    def work(name: bytes) -> None:
        for _ in range(300):
            if manager.prepare_store([name]) is not None:
                manager.complete_store([name])

    threads = [threading.Thread(target=work, args=(b"%d" % i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    held: set[bytes] = set()
    for event in manager.take_events():
        if event.removed:
            assert held.issuperset(event.keys)
            held.difference_update(event.keys)
        else:
            assert held.isdisjoint(event.keys)
            held.update(event.keys)
    assert held == {key for key in (b"0", b"1", b"2", b"3") if manager.lookup(key)}
