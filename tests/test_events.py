"""The event log numbers events, bounds them, and keeps them in the order in which the cache changed."""

from __future__ import annotations

import gc
import threading

from kvcache import CPUOffloadingManager, OffloadingEvent
from kvcache.events import EventLog


def test_events_are_numbered_and_taken_once_in_pieces() -> None:
    log = EventLog(16)
    for key in (b"a", b"b", b"c"):
        log.add([key], "CPU", False)
    log.add([], "CPU", True)
    assert [(event.number, event.keys) for event in log.take(2)] == [(1, [b"a"]), (2, [b"b"])]
    assert [event.number for event in log.take()] == [3]
    assert list(log.take()) == []


def test_the_number_is_no_part_of_an_events_value() -> None:
    log = EventLog(16)
    log.add([b"a"], "CPU", False)
    assert list(log.take()) == [OffloadingEvent([b"a"], 16, "CPU", False)]


def test_events_that_nobody_takes_are_dropped_oldest_first() -> None:
    log = EventLog(16, max_keys=4)
    for key in (b"a", b"b", b"c"):
        log.add([key, key], "CPU", False)
    assert (len(log), log.num_dropped) == (2, 1)
    log.add([b"x"] * 9, "CPU", False)
    assert [(event.number, len(event.keys)) for event in log.take()] == [(4, 9)]
    log.add([b"y"], "CPU", False)
    assert len(log) == 1


def test_a_managers_event_list_is_bounded() -> None:
    manager = CPUOffloadingManager(16, 2, enable_events=True)
    assert manager.events is not None
    manager.events.max_keys = 10
    for i in range(1000):
        keys = [b"%d" % i]
        manager.prepare_store(keys)
        manager.complete_store(keys)
    events = list(manager.take_events())
    assert (len(events), events[-1].number, manager.events.num_dropped) == (10, 1998, 1988)


def test_a_reset_drops_untaken_events_and_numbers_go_on() -> None:
    manager = CPUOffloadingManager(16, 2, enable_events=True)
    manager.prepare_store([b"a"])
    manager.complete_store([b"a"])
    manager.reset_cache()
    assert list(manager.take_events()) == []
    manager.prepare_store([b"b"])
    manager.complete_store([b"b"])
    assert [(event.keys, event.number) for event in manager.take_events()] == [([b"b"], 2)]


def test_finalizers_do_not_run_between_a_change_and_its_event() -> None:
    log = EventLog(16)
    with log, log:
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with log:
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_threads_that_change_a_cache_leave_events_in_order() -> None:
    manager = CPUOffloadingManager(16, 2, enable_events=True)

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
