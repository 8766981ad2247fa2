"""An engine's processes die one by one: its leases stay until the last one has ended."""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from types import SimpleNamespace

import pytest
from node_harness import BLOCK_BYTES, prompt, turn

from kvcache.node.ledger import Process
from kvcache.node.protocol import start_ticks

ENGINE = f"""
import os, signal, sys
from pathlib import Path
from node_harness import key_of, prompt, turn
from kvcache.node import protocol
from kvcache.node.batch import pack_keys
from kvcache.node.client import NodeManager, greeting, register_worker
folder, identity, options = Path(sys.argv[1]), eval(sys.argv[2]), eval(sys.argv[3])
ready, done = os.pipe()
worker = os.fork()
if worker == 0:
    register_worker(folder, greeting("other", identity, options, rank=0), identity["num_blocks"], {BLOCK_BYTES})
    os.write(done, b"1")
    signal.pause()
os.read(ready, 1)
manager = NodeManager(folder, greeting("other", identity, options, num_workers=1), starts_owner=False, patience_s=10)
turn(manager, *prompt(4, 4))
keys, context = prompt(2, 4)
slots = (4).to_bytes(4, "little") + manager.prepare_store(keys, context).store_spec.block_ids.astype("<i4").tobytes()
held = prompt(1, 8)
assert manager.lookup(*held) == 8
print(worker, flush=True)
sys.stdin.readline()
_, payload, key_bytes = pack_keys([key_of(3, 0)])
late = protocol.pack(protocol.OFFER, 0, 9, payload, key_bytes) + protocol.pack(protocol.STORED, 1, 9, slots)
manager._link._sock.sendall(late)
os._exit(0)
"""


@contextmanager
def other_engine(node):
    """Start an engine that holds 8 blocks and writes 4; yield it and its worker's pid. Both are killed in the end."""
    words = [sys.executable, "-c", ENGINE, str(node.folder), repr(node.identity), repr(node.options)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as other:
        worker = int(other.stdout.readline())
        try:
            yield other, worker
        finally:
            other.kill()
            with suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)


class DeathsFirst:
    """An owner's epoll that reports ends of processes first, and waits while `gate` is not set."""

    def __init__(self, owner):
        self._poll, self._by_fd = owner._poll, owner._by_fd
        self.gate = threading.Event()
        self.gate.set()

    def poll(self, timeout_s):
        self.gate.wait()
        events = self._poll.poll(timeout_s)
        return sorted(events, key=lambda event: not isinstance(self._by_fd.get(event[0]), Process))

    def __getattr__(self, name):
        return getattr(self._poll, name)


def test_dead_engine_keeps_slots_for_worker(place):
    engine = place.engine("a", patience_s=30)
    turn(engine, *prompt(1, 8))
    engine.owner_figures()
    poll = place.owner._poll = DeathsFirst(place.owner)
    with other_engine(place) as (other, worker):
        figures = engine.owner_figures()
        assert (figures["num_pending"], figures["num_referenced"]) == (4, 8)
        # The messages and both deaths arrive together.
        poll.gate.clear()
        time.sleep(0.4)
        other.stdin.write("go\n")
        other.stdin.flush()
        other.wait(20)
        os.kill(worker, signal.SIGKILL)
        time.sleep(0.2)
        poll.gate.set()
    while not place.owner.stats["ended_engines"]:
        time.sleep(0.01)
    figures = engine.owner_figures()
    assert (figures["num_pending"], figures["num_referenced"]) == (0, 0)
    assert list(place.leases.engines) == [engine.number]
    assert engine.lookup(*prompt(2, 4)) == engine.lookup(*prompt(3, 1)) == 0
    assert engine.lookup(*prompt(1, 8)) == 8
    engine.owner_figures()
    place.check()


def test_reused_descriptor_ends_no_engine(place, monkeypatch):
    """Before the second event is handled, its descriptor is closed, and a living engine's process gets the number."""
    place.engine("a")
    place.stop()
    owner, served = place.owner, []

    def serve(source):
        served.append(source)
        owner._by_fd[101] = Process(os.getpid(), 0, -1)

    monkeypatch.setattr(owner, "_serve", serve)
    monkeypatch.setattr(owner, "_by_fd", {100: "first", 101: "second"})
    monkeypatch.setattr(owner, "_poll", SimpleNamespace(poll=lambda _: [(100, 1), (101, 1)]))
    owner.step(0)
    assert (served, owner._living_engines()) == (["first"], {0})
    monkeypatch.undo()
    place.start()


@pytest.mark.parametrize("owner_ends", [False, True])
def test_worker_alone_keeps_leases_of_engine(place, owner_ends):
    engine = place.engine("a", patience_s=30)
    turn(engine, *prompt(1, 8))
    with other_engine(place) as (other, worker):
        with pytest.raises(ValueError, match=f"engine 'other' still runs as process {other.pid}"):
            place.engine("other")
        other.kill()
        other.wait()
        time.sleep(0.3)
        figures = engine.owner_figures()
        assert (figures["num_pending"], figures["num_referenced"], figures["ended_engines"]) == (4, 8, 0)
        assert other.pid not in place.owner.pool.ledger.processes["pid"]
        if owner_ends:
            place.stop()
        os.kill(worker, signal.SIGKILL)
        if owner_ends:
            while start_ticks(worker) >= 0:
                time.sleep(0.01)
            place.start()
        while not (engine._link.is_ready and place.owner.pool if owner_ends else place.owner.stats["ended_engines"]):
            time.sleep(0.01)
            engine.owner_figures()
            engine.on_schedule_end()
        figures = engine.owner_figures()
        assert (figures["num_pending"], figures["num_referenced"]) == (0, 0)
    assert engine.lookup(*prompt(2, 4)) == 0
    # The next engine of this number did not write the blocks.
    next_one = place.engine("next")
    assert (next_one.number, next_one.lookup(*prompt(4, 4))) == (1, 4)
    assert next_one.parts()[1].stats.shared_hit_blocks == 4
    place.check()
