"""Hints that move blocks: what each action does to host memory and a tier, its answers, and its limits."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import numpy as np
import pytest
from engine import Engine
from stores import Clock

from kvcache import CPUOffloadingManager, ReqContext, hints
from kvcache.block import ABSENT, READY
from kvcache.control.hints import HintBoard
from kvcache.control.telemetry import Telemetry
from kvcache.exporters.status import StatusServer, send_hints
from kvcache.hints import parse_hints
from kvcache.recorder.recorder import Recorder
from kvcache.tiering.controller import TierConfig
from kvcache.tiering.manager import TieredOffloadingManager
from kvcache.tiers.memory import MemoryOptions, MemoryTier

NUM_BLOCKS = 16


class Bench(Engine):
    """A manager over a tier in memory, and its board."""

    def __init__(self, policy="lru", num_blocks=NUM_BLOCKS, group_windows=None, **rule):
        self.host = np.zeros((num_blocks, 8), np.uint8)
        tier = MemoryTier(MemoryOptions(capacity=80_000), self.host)
        self.manager = TieredOffloadingManager(
            16, num_blocks, [(tier, TierConfig(**rule))], policy, clock=Clock(), group_windows=group_windows
        )
        self.board = HintBoard(self.manager)

    def run(self, *keys, hints=None, params=None):
        """Serve a request that stores its blocks."""
        context = ReqContext(kv_hints=hints, kv_transfer_params=params and {"kvcache": params})
        context.set_offload_key_positions({key: place for place, key in enumerate(keys)})
        self.board.begin(context)
        self.manager.lookup(list(keys), context)
        output = self.manager.prepare_store(list(keys), context)
        self.manager.complete_store(output.keys_to_store, context)
        self.manager.on_request_finished(context)
        self.board.end(context)
        self.settle()

    def settle(self):
        self.board.step()
        assert self.manager.settle()

    def fill(self, first=0):
        """Evict all other blocks."""
        self.run(*(b"fill%04d" % number for number in range(first, first + len(self.host))))

    def states(self, *keys):
        return list(self.manager.pool.states(list(keys)))

    def counts(self, kind):
        """Return the answers to actions of a type that were given, with their numbers."""
        parts = {dict(part.labels)["type"]: part.stats for part in self.board.parts()}
        return {name: getattr(parts[kind], name) for name in parts[kind].__slots__ if getattr(parts[kind], name)}


def action(kind, **payload):
    one = {"action_id": "1", "action_type": kind, "action_version": "1.0", "payload": payload}
    return {"protocol_version": "0.1", "message_id": "m", "actions": [one]}


A, B, C = (bytes([number]) * 4 + bytes(4) for number in (1, 2, 3))
SHORT = {"next_use": "soon", "session_id": "s"}


@pytest.mark.parametrize("policy", ["lru", "arc", "gittins"])
@pytest.mark.parametrize("target", [{"session_id": "s"}, {"block_hashes": [key[:4].hex() for key in (A, B, C)]}])
def test_prefetch_brings_blocks_back(policy, target):
    bench = Bench(policy)
    bench.run(A, B, C, params=SHORT)
    bench.fill()
    assert bench.states(A, B) == [ABSENT, ABSENT]
    assert bench.board.ask(action("kv.prefetch", **target)) == ["clipped"]
    bench.settle()
    # An eighth of the slots of other blocks, no more, however often it is asked.
    for _ in range(5):
        bench.board.ask(action("kv.prefetch", **target))
        bench.settle()
    assert bench.states(A, B, C) == [READY, READY, ABSENT]
    found = bench.manager.lookup([A, B], context := ReqContext())
    bench.manager.prepare_load([A, B], context)
    bench.manager.complete_load([A, B], context)
    assert found == 2
    assert bench.board.ask(action("kv.prefetch", **target)) == ["accepted"]
    assert bench.counts("kv.prefetch")["rejected"] == 5


@pytest.mark.parametrize(
    "target", [{"session_id": "s"}, {"block_hashes": [(b"h%03d" % number).hex() for number in range(3)]}]
)
def test_hybrid_prefetch_brings_last_windows(target):
    bench = Bench("gittins", 64, [None, 1])
    full, windowed = ([b"h%03d" % number + bytes([0, 0, 0, group]) for number in range(3)] for group in (0, 1))
    bench.run(*full, *windowed, params=SHORT)
    for first in range(0, 256, 64):
        bench.fill(first)
    assert bench.states(*full, *windowed) == [ABSENT] * 6
    assert bench.board.ask(action("kv.prefetch", **target)) == ["accepted"]
    bench.settle()
    assert bench.states(*full, *windowed) == [READY] * 3 + [ABSENT] * 2 + [READY]


@pytest.mark.parametrize("policy", ["lru", "arc", "gittins"])
def test_end_of_hashes_evicts_them_first(policy):
    bench = Bench(policy)
    bench.run(A, B)
    bench.run(C)
    assert bench.board.ask(action("kv.next_use", next_use="end", block_hashes=[C[:4].hex()])) == ["accepted"]
    bench.run(*(b"y%d" % number for number in range(NUM_BLOCKS - 2)))
    assert bench.states(A, B, C) == [READY, READY, ABSENT]


@pytest.mark.parametrize("policy", ["lru", "arc", "gittins"])
def test_prefetch_evicts_none_of_its_own(policy):
    bench = Bench(policy)
    keys = [b"own%d" % number + bytes(4) for number in range(8)]
    bench.run(*keys, params=SHORT)
    bench.run(*(b"y%d" % number for number in range(NUM_BLOCKS - 6)))
    assert bench.states(*keys).count(ABSENT) == 2
    assert bench.board.ask(action("kv.prefetch", session_id="s")) == ["accepted"]
    bench.settle()
    assert bench.states(*keys) == [READY] * 8


def test_prefetch_takes_all_free_slots():
    bench = Bench()
    bench.run(A, B, C, params=SHORT)
    bench.fill()
    bench.manager.complete_store(bench.manager.prepare_store([b"x%d" % i for i in range(9)]).keys_to_store, None, False)
    assert bench.board.ask(action("kv.prefetch", session_id="s")) == ["accepted"]
    bench.settle()
    assert bench.states(A, B, C) == [READY] * 3


def test_prefetch_comes_after_waiting_requests():
    bench = Bench()
    bench.run(A, B, params=SHORT)
    bench.run(C)
    bench.fill()
    context = ReqContext()
    assert bench.manager.lookup([C], context) is None
    bench.board.begin(ReqContext(kv_hints=action("kv.prefetch", session_id="s")))
    bench.board.step()
    assert bench.counts("kv.prefetch") == {"deferred": 1}
    bench.manager.on_schedule_end()
    bench.settle()
    assert bench.counts("kv.prefetch") == {"deferred": 1, "accepted": 1}
    assert bench.states(A, B, C) == [READY] * 3


@pytest.mark.parametrize("rule", [{"write_policy": "write_back"}, {"write_policy": "write_through_selective"}, {}])
def test_demote_writes_and_leaves_first(rule):
    bench = Bench(**rule)
    bench.run(A, B, hints=action("kv.demote"))
    bench.settle()
    bench.run(C)
    for number in range(NUM_BLOCKS - 1):
        bench.run(b"z%d" % number)
    assert bench.states(A, B, C) == [ABSENT, ABSENT, READY]
    assert bench.manager.controllers[0].tier.lookup([A, B]) == 2


def test_end_of_session_forgets_it():
    bench = Bench()
    bench.run(A, B, params=SHORT)
    assert bench.board.ask(action("kv.end_session", session_id="s")) == ["accepted"]
    assert bench.board.ask(action("kv.prefetch", session_id="s")) == ["missing"]
    bench.run(*(b"y%d" % number for number in range(NUM_BLOCKS - 1)))
    assert bench.states(A, B) == [READY, ABSENT]


def test_client_names_no_hashes_of_others():
    bench = Bench()
    bench.run(A)
    for kind in ("kv.demote", "kv.end_session"):
        bench.board.begin(ReqContext(kv_hints=action(kind, block_hashes=[A[:4].hex()])))
        assert bench.counts(kind) == {"rejected": 1}
    assert bench.board.ask(action("kv.demote", block_hashes=[A[:4].hex(), "zz", 3, ""])) == ["accepted"]


def test_manager_without_tiers_rejects_moves():
    manager = CPUOffloadingManager(16, 8)
    board = HintBoard(manager)
    named = {"block_hashes": ["01"]}
    assert board.ask(action("kv.prefetch", **named)) == ["rejected"]
    assert board.ask(action("kv.demote", **named)) == ["rejected"]
    assert board.ask(action("kv.next_use", next_use="soon", **named)) == ["accepted"]


def test_socket_executes_hints_of_idle_engine(sockets: Path):
    bench = Bench()
    server = StatusServer(telemetry := Telemetry(bench.manager), sockets / "s.sock")
    try:
        bench.run(A, B, params=SHORT)
        bench.fill()
        assert send_hints(action("kv.prefetch", session_id="s"), [server.path]) == [["accepted"]]
        assert bench.manager.settle()
        assert bench.states(A, B) == [READY, READY]
        with pytest.raises(ValueError, match="it must be a dict, got None"):
            send_hints(None, [server.path])
        bench.manager.hints = None
        with pytest.raises(ValueError, match="executes no hints"):
            send_hints(SHORT, [server.path])
    finally:
        server.close()
        telemetry.close()


def test_scheduler_does_not_wait_for_asker():
    bench = Bench()
    with bench.board._draining:
        bench.board.begin(ReqContext(kv_hints=action("kv.prefetch", session_id="s")))
        stepper = threading.Thread(target=bench.board.step)
        stepper.start()
        stepper.join(30)
        assert not stepper.is_alive()


def test_step_reads_bounded_number_of_keys(monkeypatch):
    bench = Bench(num_blocks=2048)
    bench.run(*(b"%04d" % number + bytes(4) for number in range(256)), params=SHORT)
    bench.fill()
    assert bench.board.ask(action("kv.prefetch", session_id="s")) == ["accepted"]
    bench.settle()
    for _ in range(1000):
        bench.board.begin(ReqContext(kv_hints=action("kv.prefetch", block_hashes=["ff"])))
    num_read, states = [], bench.manager.pool.states
    monkeypatch.setattr(bench.manager.pool, "states", lambda keys: num_read.append(len(keys)) or states(keys))
    bench.board.step()
    # Those that came before are counted once, and each action names one key.
    assert 256 < sum(num_read) <= 256 + 512 // 16


def test_hints_are_parsed_once(monkeypatch, tmp_path):
    pytest.importorskip("msgspec")
    messages = []
    monkeypatch.setattr(hints, "parse_hints", lambda message: messages.append(message) or parse_hints(message))
    bench = Bench()
    with Recorder(bench.manager, tmp_path / "calls.kvrec"):
        bench.run(A, hints=action("kv.demote"), params=SHORT)
    assert messages == [SHORT, action("kv.demote")]
    assert bench.counts("kv.demote") == bench.counts("kv.next_use") == {"accepted": 1}


def test_hostile_sender_changes_few_hits():
    def hits(num_messages):
        rng, bench = random.Random(3), Bench("gittins", 128)
        attack = random.Random(4)
        for turn in range(600):
            session = rng.randrange(60)
            bench.run(
                *(b"%02d%02d" % (session, place) + bytes(4) for place in range(rng.randrange(1, 9))), params=SHORT
            )
            for _ in range(num_messages):
                kind = attack.choice(["kv.prefetch", "kv.demote", "kv.end_session", "kv.next_use", "kv.retain", "x"])
                target = attack.choice([{"session_id": str(turn)}, {"block_hashes": ["00"]}, {}])
                bench.board.begin(ReqContext(kv_hints=action(kind, next_use="end", ttl_s=1, **target)))
        return bench.manager.stats().hit_blocks, len(bench.board._waiting)

    (alone, _), (attacked, num_waiting) = hits(0), hits(20)
    assert abs(attacked - alone) <= alone / 100
    assert num_waiting <= 1024
