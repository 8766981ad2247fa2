"""Starts beside other starts, lookers, full memory, old owners and interrupted ones."""

import errno
import fcntl
import itertools
import logging
import os
import shutil
import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest
from node_harness import prompt, turn, wait_for

from kvcache.node import owner as owner_module
from kvcache.node import protocol
from kvcache.node.batch import count_leases
from kvcache.node.client import greeting
from kvcache.node.leases import EngineLeases
from kvcache.node.ledger import Ledger
from kvcache.node.link import spawn_owner
from kvcache.node.owner import Owner
from kvcache.node.protocol import node_folder


@contextmanager
def locked_for(path, seconds):
    """Hold a lock for a time, as another process does."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX)
    timer = threading.Timer(seconds, os.close, (fd,))
    timer.start()
    yield
    timer.join()


def test_wait_for_lock_has_no_limit(node, monkeypatch):
    """Another engine has the lock while the owner allocates its memory."""
    monkeypatch.setattr("kvcache.node.link._SPAWN_TIMEOUT_S", 0.2)
    node = node(8)
    with locked_for(node.folder / "lock", 0.5):
        assert node.engine("a").number == 0


def test_owner_waits_for_looker(node):
    folder = node_folder(f"test-{os.getpid()}-{time.monotonic_ns()}")
    with locked_for(folder / "owner.lock", 0.2):
        owner = Owner(folder)
    owner_module._remove_folder(folder)
    owner.close()
    assert not folder.exists()


def test_living_pools_are_not_locked(node, monkeypatch):
    living, service = node(8), node(8)
    living.engine("a")
    os.truncate(service.folder / "owner.lock", 1)
    locked, lock_file = [], protocol.lock_file
    monkeypatch.setattr(protocol, "lock_file", lambda path, *limit: locked.append(path) or lock_file(path, *limit))
    owner_module._remove_dead_pools(living.folder.parent)
    assert not {living.folder / "owner.lock", service.folder / "owner.lock"}.intersection(locked)


def test_oversized_pool_leaves_nothing(node, monkeypatch):
    node, allocate = node(8), os.posix_fallocate

    def fill(fd, first, length):
        allocate(fd, first, length // 2)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for fails_at in (1, 2):
        calls = []

        def fail_later(*args, calls=calls, fails_at=fails_at):
            calls.append(args)
            (fill if len(calls) == fails_at else allocate)(*args)

        monkeypatch.setattr(os, "posix_fallocate", fail_later)
        with pytest.raises(ValueError, match="No space left"):
            node.engine("a")
        monkeypatch.setattr(os, "posix_fallocate", allocate)
        assert [(node.folder / name).exists() for name in ("pool", "ledger")] == [False, False]
    assert node.engine("a").number == 0


def test_interrupted_admission_refuses_nobody(place, monkeypatch):
    """The owner is killed right after it has recorded a process, before its answer."""
    place.engine("first")
    add = Ledger.add_process

    def add_and_die(ledger, process):
        add(ledger, process)
        raise RuntimeError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "add_process", add_and_die)
        with pytest.raises(ValueError, match="killed"):
            place.engine("a")
    place.stop()
    place.start()
    assert (place.engine("b").number, place.owner.pool.ledger.names[1].item()[:1] == b"\0") == (2, False)


def test_lease_counts_exceed_16_bits():
    engine, readers, writers = EngineLeases(3, 1), np.zeros(1, np.uint64), np.zeros(1, np.uint8)
    engine.counts[0] = 65535
    count_leases(np.zeros(1, np.int64), 1, engine.counts, readers, writers, 3)
    assert (int(engine.counts[0]), int(readers[0])) == (65536, 8)


@pytest.mark.parametrize("change", [{"options": {"cache_policy": "arc"}}, {"model": "other"}])
def test_changed_configuration_ends_idle_owner(node, change):
    """An engine that meets the old owner's last minute waits for the next one."""
    node = node(8)
    node.owner._check_pool(greeting("old", node.identity, node.options))
    next_owner = threading.Thread(target=lambda: (node.thread.join(20), node.start()))
    next_owner.start()
    engine = node.engine("a", **change)
    next_owner.join()
    assert engine.owner_figures()["num_blocks"] == 8
    with pytest.raises(ValueError, match="the pool has"):
        node.engine("b")
    node.check()


def test_service_refuses_other_configuration(place):
    place.stop()
    place.start(options={"cache_policy": "arc"})
    with pytest.raises(ValueError, match="cache_policy: the pool has 'arc', this engine 'lru'"):
        place.engine("a")
    assert place.thread.is_alive()


@pytest.mark.parametrize(("num_blocks", "num_resets"), [(48, 2), (256, 2), (256, 8)])
def test_resets_amid_stores_keep_pool(node, num_blocks, num_resets):
    """No copy ends between the resets, and the engines are not told the ends of older ones."""
    node = node(num_blocks)
    engines, documents = [node.engine("a"), node.engine("b")], itertools.count()
    for _ in range(num_resets):
        for engine in engines:
            for _ in range(num_blocks // 8):
                engine.prepare_store(*prompt(next(documents), 8))
        for engine in engines:
            engine.reset_cache()
    for engine in engines:
        turn(engine, *prompt(next(documents), 4))
        for _ in range(20):
            document = next(documents)
            turn(engine, *prompt(document, 4))
            assert turn(engine, *prompt(document, 4)) == 4
    figures = engines[0].owner_figures()
    assert (figures["num_pending"], figures["num_referenced"]) == (0, 0)
    node.check()


def test_engines_leave_slots_for_recovery(engine, other):
    assert len(engine.prepare_store(*prompt(1, 32)).keys_to_store) == 32
    assert other.prepare_store(*prompt(2, 29)) is None
    assert len(other.prepare_store(*prompt(2, 28)).keys_to_store) == 28


def test_outages_are_logged_once_a_minute(place, engine, caplog, monkeypatch):
    with caplog.at_level(logging.INFO, "kvcache.node"):
        for _ in range(5):
            engine._link.lose(OSError("planted"))
            wait_for(lambda: engine.on_schedule_end() or engine._link.is_ready)
            engine.on_schedule_end()
        place.engine("b")
        # An outage that follows within the minute is not logged, so the last line must not claim an answer.
        assert not [record for record in caplog.records if "again" in record.getMessage()]
        monkeypatch.setattr("kvcache.node.link._STABLE_S", 0.0)
        for _ in range(3):
            engine.on_schedule_end()
    texts = [record.getMessage() for record in caplog.records]
    assert len([text for text in texts if "does not answer" in text]) == 1
    assert texts.count(f"the owner of {place.folder} answers again, for 0 s now") == 1
    assert f"process {os.getpid()} joins: engine 1 (b), rank -1" in texts


@pytest.mark.parametrize("error", [errno.EMFILE, errno.EAGAIN, errno.ENOSPC])
def test_failed_start_is_tried_again(place, monkeypatch, caplog, error):
    """Without a descriptor, a process or space for the log, an engine goes on without an owner."""
    engine, link_module = place.engine("a"), "kvcache.node.link"
    engine._link.starts_owner = True
    monkeypatch.setattr(f"{link_module}._RESTART_S", 0.0)
    monkeypatch.setattr("kvcache.node.client._RETRY_S", 0.0)
    place.stop()
    engine.owner_figures()
    starts = []

    def refuse(*_, **__):
        starts.append(1)
        raise OSError(error, os.strerror(error))

    with monkeypatch.context() as patch:
        patch.setattr(f"{link_module}.subprocess.Popen", refuse)
        for _ in range(3):
            engine.on_schedule_end()
            assert engine.lookup(*prompt(1, 4)) == 0
    assert len(starts) == 3
    assert [record.getMessage() for record in caplog.records if "can be started" in record.getMessage()]
    place.start()
    wait_for(lambda: engine.on_schedule_end() or engine._link.is_ready)


def test_start_needs_no_thread(node, monkeypatch):
    """The owner serves, also if the thread that waits for the child cannot be started."""
    started = []

    class Child:
        wait = started.clear

    def refuse(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("kvcache.node.link.subprocess.Popen", lambda words, **_: started.append(words) or Child())
    monkeypatch.setattr(threading.Thread, "start", refuse)
    folder = node_folder(f"test-{os.getpid()}-{time.monotonic_ns()}")
    spawn_owner(folder)
    assert started[0][-1] == str(folder)
    shutil.rmtree(folder)


def test_engine_knows_what_pool_holds(node):
    node = node(64, {"cache_policy": "lru", "tiers": [{"type": "memory", "capacity": "4KiB"}]})
    turn(node.engine("a"), *prompt(1, 24))
    used, tier = node.engine("b").found
    assert (used, tier.startswith("tier MEMORY of 64 blocks")) == ("24 of 64 blocks in use", True)


def test_owner_without_descriptors_says_so(place, monkeypatch):
    listener = place.owner._listener

    class Exhausted:
        """A listener that has no file descriptor left, but for the spare one."""

        num_calls = 0

        def accept(self):
            self.num_calls += 1
            if self.num_calls % 2:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return listener.accept()

        def __getattr__(self, name):
            return getattr(listener, name)

    place.owner._listener = Exhausted()
    start_s = time.monotonic()
    with pytest.raises(ValueError, match="refuses the engine: the owner: Too many open files"):
        place.engine("a")
    place.owner._listener = listener

    def refuse(*_):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pidfd_open", refuse)
        with pytest.raises(ValueError, match=r"no connection to the pool in .*: Too many open files"):
            place.engine("a")
    assert time.monotonic() - start_s < 20
    assert place.engine("a").number == 0
