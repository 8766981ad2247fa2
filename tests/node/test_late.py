"""A late owner that is not dead: the connection stays, and only late answers are lost."""

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import pytest
from node_harness import gated, key_of, prompt, turn, wait_for
from waiting import kill_and_wait

from kvcache import ReqContext
from kvcache.node import protocol
from kvcache.node.client import NodeManager, greeting
from kvcache.node.link import State
from kvcache.node.protocol import node_folder


def test_late_look_up_misses_alone(place):
    engine = place.engine("a", patience_s=0.1)
    turn(engine, *prompt(1, 8))
    assert wait_for(lambda: engine.owner_figures()) is not None
    sock = engine._link._sock
    keys, context = prompt(1, 8)
    with gated(place.owner) as gate:
        assert engine.lookup(keys, context) == 0
        start_s = time.monotonic()
        # No call waits a second time, and the gauge of an idle engine shows that the pool is unavailable.
        assert [engine.lookup(*prompt(1, 8)) for _ in range(50)] == [0] * 50
        assert engine.prepare_store([key_of(2, 0)], ReqContext()) is None
        engine.on_schedule_end()
        assert time.monotonic() - start_s < 2.5
        stats = engine.parts()[1].stats
        assert (stats.outages, stats.unavailable) == (1, "the owner does not answer")
        gate.set()
        # Threads that read statistics leave the late answer to the scheduler's thread.
        wait_for(lambda: not engine.parts()[1].stats.unavailable)
        assert engine._link.state is State.LATE
    assert engine.parts()[1].stats.outages == 1
    # The late answer's blocks are not held, and the same request finds them at its next look-up.
    figures = wait_for(engine.owner_figures)
    assert (figures["num_referenced"], figures["dropped_clients"]) == (0, 0)
    assert wait_for(lambda: engine.lookup(keys, context)) == 8
    assert (engine._link._sock, place.leases.engines[0].num_outages) == (sock, 1)
    engine.on_request_finished(context)
    engine._link._patience_s = 10
    engine.owner_figures()
    place.check()


def test_idle_engine_returns_late_slots(place):
    """The last store of an engine is late, and the engine makes no later call."""
    engine, other = place.engine("a", patience_s=0.05), place.engine("b")
    keys, context = prompt(1, 8)
    with gated(place.owner) as gate:
        assert engine.prepare_store(keys, context) is None
        engine.on_request_finished(context, use_positions=True)
        gate.set()
        wait_for(lambda: other.owner_figures() and place.leases.engines[engine.number].num_outages)
    assert other.owner_figures()["num_free"] == 64
    assert engine.stats().rejected_stores == 0
    # The engine ignores the late answer, whose slots may have another writer now.
    assert other.prepare_store(*prompt(1, 8)).keys_to_store == keys
    wait_for(lambda: engine._link.poll() is State.READY)
    engine.on_schedule_end()
    assert other.owner_figures()["num_pending"] == 8
    place.check()


@pytest.mark.parametrize("ends_first", [False, True])
def test_idle_engine_joins_next_owner(place, monkeypatch, ends_first):
    """An owner ends before or after the last call of an engine, whose slots the next owner keeps until it greets."""
    other = place.engine("b")
    monkeypatch.setattr("kvcache.node.client._IDLE_S", 0.02)
    engine = place.engine("a")
    turn(engine, *prompt(1, 8))
    keys, context = prompt(2, 8)
    held = prompt(1, 8)
    assert engine.lookup(*held) == 8
    engine.prepare_store(keys, context)
    engine.owner_figures()
    with gated(place.owner) as gate:
        if not ends_first:
            engine.complete_store(keys, context)
            for request in (context, held[1]):
                engine.on_request_finished(request)
        place.owner.stop()
        gate.set()
        place.thread.join(10)
    if ends_first:
        engine.complete_store(keys, context)
        for request in (context, held[1]):
            engine.on_request_finished(request)
    place.start()
    wait_for(lambda: other.owner_figures() or other.on_schedule_end() or other._link.is_ready)
    wait_for(lambda: (figures := other.owner_figures()) and figures["num_pending"] + figures["num_referenced"] == 0)
    place.check()


def test_late_hybrid_blocks_return(node):
    """A hybrid model's later question is late while the blocks of its first one are being loaded."""
    node = node(64, {"cache_policy": "lru", "tiers": [{"type": "memory", "capacity": "4KiB"}]})
    engine = node.engine("a", num_groups=2)
    keys, context = prompt(1, 4)
    turn(engine, keys[:2], ReqContext(), use_positions=False)
    assert [engine.status(key, context) for key in keys[:3]] == [2, 2, 0]
    turn(engine, keys[2:3], ReqContext(), use_positions=False)
    engine.owner_figures()
    engine._link._patience_s = 0.05
    with gated(node.owner) as gate:
        assert engine.status(keys[2], context) == 0
        assert engine.prepare_load(keys[:2], context).block_ids.tolist() == [0, 1]
        gate.set()
        wait_for(lambda: engine._link.poll() is State.READY)
    engine._link._patience_s = 10
    assert engine.owner_figures()["num_referenced"] == 3
    engine.complete_load(keys[:2], context)
    # A write to the tier, which holds its block, may still run.
    wait_for(lambda: engine.owner_figures()["num_referenced"] == 0)


def test_part_of_answer_ends_no_wait(node):
    """An owner sends its answer byte by byte: the call waits for no longer than the client's limit."""
    link, (sock, owner) = node(8).engine("a")._link, socket.socketpair()
    link._sock.close()
    link._sock, link._patience_s = sock, 0.2
    is_late = threading.Event()

    def answer():
        for byte in protocol.pack(protocol.DONE, payload=bytes(100)):
            owner.send(bytes([byte]))
            if is_late.wait(0.1):
                return

    sender = threading.Thread(target=answer)
    sender.start()
    frame = link.ask(protocol.STATS, 0, 0)
    is_late.set()
    sender.join()
    owner.close()
    assert (frame, link.counts["outages"]) == (None, 1)


def test_slow_owner_ends_no_wait(node):
    """An owner reads a few bytes at a time: a call sends for no longer than the client's limit."""
    link, (sock, owner) = node(8).engine("a")._link, socket.socketpair()
    link._sock.close()
    link._sock, has_ended, frames, feed = sock, threading.Event(), [], protocol.FrameReader().feed

    def read():
        while not has_ended.wait(0.004):
            frames.extend(feed(owner.recv(1024)))

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(40):
        link.tell(protocol.STORED, 0, 1, bytes(50_000))
    link.flush()
    has_ended.set()
    reader.join()
    assert 1_000_000 < link._num_unsent_bytes < 2_000_000
    assert link.ask(protocol.STATS, 0, 0) is None
    # The connection stays, and no byte is lost.
    while len(frames) < 42:
        link.flush()
        frames.extend(feed(owner.recv(1 << 20)))
    assert [frame.op for frame in frames[39:]] == [protocol.STORED, protocol.STATS, protocol.LATE]
    owner.close()


def test_unsent_heads_are_counted(node, monkeypatch):
    monkeypatch.setattr("kvcache.node.link._MAX_UNSENT_BYTES", 4096)
    link = node(8).engine("a")._link
    for _ in range(1000):
        link.tell(protocol.RELEASE, 0, 1)
        assert sum(map(len, link._unsent)) == link._num_unsent_bytes <= 4096


def test_stopped_owner_costs_no_memory(node, monkeypatch):
    """An owner that is stopped for long: the ends of requests are not kept without limit, nor forgotten."""
    monkeypatch.setattr("kvcache.node.link._MAX_UNSENT_BYTES", 4096)
    node = node(64)
    engine = node.engine("a", patience_s=0.05)
    turn(engine, *prompt(1, 8))
    held = prompt(1, 8)
    assert wait_for(lambda: engine.on_schedule_end() or engine.lookup(*held)) == 8
    with gated(node.owner) as gate:
        for document in range(200):
            keys, context = prompt(document, 20)
            assert engine.lookup(keys, context) == 0
            engine.on_request_finished(context, use_positions=True)
            engine.on_schedule_end()
            assert sum(map(len, engine._link._unsent)) < 8192
        gate.set()
    engine.on_request_finished(held[1])
    wait_for(lambda: engine.on_schedule_end() or (engine.owner_figures() or {}).get("num_referenced") == 0)
    node.check()


def test_many_ends_keep_connection(node, monkeypatch):
    """A step in which many requests end sends more than fits at once, and loses no connection."""
    monkeypatch.setattr("kvcache.node.link._MAX_UNSENT_BYTES", 4096)
    node = node(64)
    engine = node.engine("a")
    requests = [prompt(document, 20) for document in range(100)]
    engine.lookup(*prompt(0, 20))  # stays open, so that the ends wait for the end of the step
    for _, context in requests:
        engine.on_request_finished(context, use_positions=True)
    assert (engine.owner_figures()["dropped_clients"], engine.parts()[1].stats.outages) == (0, 0)


@contextmanager
def busy(num_processes):
    """Processes that use all of the machine's time."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(num_processes)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def share_of_hits(engine, seed):
    """Serve documents twice, each in a step of its own, and return the share of blocks found at the second time."""
    keys_of = {document: prompt(document, 16)[0] for document in range(seed, seed + 100)}
    hits = 0
    for is_second in (False, True):
        for document in keys_of:
            keys, context = prompt(document, 16)
            states = [engine.status(key, context) for key in keys]
            num_found = states.count(2)
            hits += is_second * num_found
            if num_found:
                engine.prepare_load([key for key, state in zip(keys, states, strict=True) if state == 2], context)
                engine.complete_load(keys, context)
            output = engine.prepare_store(keys, context) if num_found < len(keys) else None
            if output is not None:
                engine.complete_store(output.keys_to_store, context)
            engine.on_request_finished(context, use_positions=True)
            engine.on_schedule_end()
            time.sleep(0.002)
    return hits / (16 * len(keys_of))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize("is_privileged", [True, False])
def test_loaded_owner_keeps_hits(num_groups, is_privileged):
    """Four busy processes a core, also where the owner may not ask for a better place."""
    folder = node_folder(f"test-{os.getpid()}-{time.monotonic_ns()}")
    identity = {"num_blocks": 16384, "block_bytes": 64, "block_size": 16}
    engine = NodeManager(folder, greeting("a", identity, {"cache_policy": "lru"}), num_groups=num_groups)
    pid = wait_for(lambda: engine.on_schedule_end() or engine.owner_figures())["pid"]
    if not is_privileged:
        os.setpriority(os.PRIO_PROCESS, pid, os.getpriority(os.PRIO_PROCESS, 0))
    quiet = share_of_hits(engine, 0)
    with busy(4 * os.cpu_count()):
        loaded = share_of_hits(engine, 1000)
    stats = engine.parts()[1].stats
    print(json.dumps({"quiet": quiet, "loaded": loaded, "outages": stats.outages, "questions": stats.round_trips}))
    engine.shutdown()
    kill_and_wait(pid)
    shutil.rmtree(folder)
    assert loaded >= 0.9 * quiet > 0.8
