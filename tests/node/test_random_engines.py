"""Three engines over one pool in random orders, while they reset and start again, and the owner ends or is late.

`memory` has the key of each slot's block, as copies would leave it, and `writers` the weights of its writer: no slot
has two writers, no load gets another block or one of other weights, and in the end no slot is lost.
"""

import random
import struct

import numpy as np
import pytest
from node_harness import gated, key_of, prompt, turn, wait_for

from kvcache.node import protocol
from kvcache.node.link import State

NUM_BLOCKS = 48


class Engines:
    """Engines by name, what each of them copies, and its weights; each rule takes one of them."""

    def __init__(self, node, seed):
        self.node, self.dice = node, random.Random(seed)
        self.engines = {name: node.engine(name, weights="version:start") for name in "abc"}
        self.hostile = node.engine("hostile", weights="version:hostile")
        self.weights = dict.fromkeys(self.engines, "start")
        self.loads, self.stores, self.requests = [], [], []
        self.memory = np.memmap(node.folder / "pool", np.uint8, "r+", shape=(NUM_BLOCKS, 64))[:, :20]
        self.writers = [""] * NUM_BLOCKS
        self.num_resets = 0

    def request(self, name):
        """Return a new request of an engine, or one that goes on, perhaps beside its running copies."""
        self.requests.append((name, *prompt(self.dice.randint(0, 6), self.dice.randint(1, 10))))
        own = [one[1:] for one in self.requests[-1:] + self.requests[-9:] if one[0] == name]
        keys, context = self.dice.choice(own)
        if len(context.positions) < 14:
            # It grows by what it has computed.
            keys, grown = prompt(keys[0][7], len(context.positions) + self.dice.randint(0, 2))
            context.set_offload_key_positions(grown.positions)
        return keys, context

    def load(self, name):
        engine, (keys, context) = self.engines[name], self.request(name)
        if hits := engine.lookup(keys, context) or 0:
            slots = engine.prepare_load(keys[:hits], context).block_ids.tolist()
            assert {self.writers[slot] for slot in slots} == {self.weights[name]}
            self.loads.append((name, keys[:hits], slots, context))

    def store(self, name):
        output = self.engines[name].prepare_store(*(store := self.request(name)))
        if output is not None:
            slots = output.store_spec.block_ids.tolist()
            assert not set(slots) & {slot for *_, others, _ in self.loads + self.stores for slot in others}
            self.stores.append((name, output.keys_to_store, slots, store[1]))

    def taken(self, jobs, name=None):
        """Take any job, or all of an engine."""
        if name is None:
            return [jobs.pop(self.dice.randrange(len(jobs)))] if jobs else []
        own = [job for job in jobs if job[0] == name]
        jobs[:] = [job for job in jobs if job[0] != name]
        return own

    def end_load(self, _, of=None):
        for name, keys, slots, context in self.taken(self.loads, of):
            assert self.memory[slots].tobytes() == b"".join(keys)
            self.engines[name].complete_load(keys, context)

    def end_store(self, _, of=None):
        for name, keys, slots, context in self.taken(self.stores, of):
            self.write(name, keys, slots)
            self.engines[name].complete_store(keys, context, self.dice.random() < 0.9)

    def write(self, name, keys, slots):
        self.memory[slots] = np.frombuffer(b"".join(keys), np.uint8).reshape(-1, 20)
        for slot in slots:
            self.writers[slot] = self.weights[name]

    def end(self, _, of=None):
        for name, _, context in self.taken(self.requests, of):
            self.engines[name].on_request_finished(context, use_positions=True)

    def end_all(self, name):
        """End all that an engine does; the end of a copy returns the slots of copies from before a reset."""
        for end in (self.end_load, self.end_store, self.end):
            end(name, name)
        turn(self.engines[name], *prompt(7, 1))
        self.engines[name].owner_figures()

    def reset(self, name):
        # The worker first ends the copies of before.
        for owner, keys, slots, _ in self.stores:
            if owner == name:
                self.write(name, keys, slots)
        self.num_resets += 1
        version = self.dice.choice([None, "start", "later"])
        self.weights[name] = version or f"private {self.num_resets}"
        if version is not None and self.dice.random() < 0.5:
            self.engines[name].name_next_version(version)
            version = None
        self.engines[name].reset_cache(version)
        self.loads, self.stores = ([job for job in jobs if job[0] != name] for jobs in (self.loads, self.stores))

    def start_again(self, name):
        """End an engine once it copies nothing, and start it again, perhaps with other weights."""
        self.end_all(name)
        self.engines[name].shutdown()
        self.node.managers.remove(self.engines[name])
        self.weights[name] = self.dice.choice(["start", "later"])
        self.engines[name] = self.node.engine(name, weights=f"version:{self.weights[name]}")

    def late(self, name):
        """Let the owner be late for some calls, which miss or wait in the socket."""
        engine = self.engines[name]
        with gated(self.node.owner) as gate:
            engine._link._patience_s = 0.01
            rules = (self.load, self.store, self.end_load, self.end_store, self.end, self.reset)
            for rule in self.dice.choices(rules, k=3):
                rule(name)
            gate.set()
        engine._link._patience_s = 10.0
        wait_for(lambda: engine.on_schedule_end() or engine._link.poll() is State.READY)

    def lose(self, name):
        """Lose a connection, and the messages that have not arrived."""
        engine = self.engines[name]
        engine._link.lose(OSError("planted"))
        wait_for(lambda: engine.on_schedule_end() or engine._link.is_ready)

    def restart(self, _):
        self.node.restart()

    def send_hostile_frames(self, _):
        """Let an engine of other weights send frames that no engine sends, and connect again."""
        link, keys = self.hostile._link, b"".join(key_of(1, place) for place in range(9))
        for _ in range(self.dice.randint(1, 6)):
            count = self.dice.randint(0, 6)
            values = [self.dice.randint(-3, 70) for _ in range(count)]
            payload = self.dice.choice((
                self.dice.randbytes(count), struct.pack(f"<{count}i", *values),
                struct.pack("<I", count) + keys[: 20 * count], struct.pack("<II", 0, count) + keys[: 20 * count],
                b'{"next_use": "x"}', b"[" * 70_000,
            ))  # fmt: skip
            op = self.dice.choice([op for op in range(21) if op != protocol.RESET])
            try:
                link._sock.sendall(protocol.pack(op, self.dice.randint(0, 3), self.dice.randint(0, 3), payload, 20))
            except OSError:
                break
        link.close()
        wait_for(lambda: self.hostile.on_schedule_end() or link.is_ready)

    def check(self):
        for engine in (*self.engines.values(), self.hostile):
            assert engine.owner_figures() is not None
        self.node.check()

    def check_nothing_is_left(self):
        """End everything: nothing is left of it, also of messages that an owner's end has swallowed."""
        for name in self.engines:
            self.end_all(name)
        *_, figures = [engine.owner_figures() for engine in self.engines.values()]
        assert [engine._prompts for engine in self.engines.values()] == [{}] * 3
        assert (figures["num_referenced"], figures["num_pending"]) == (0, 0)
        self.node.check()


# Rules, and how often each is taken in a thousand steps.
RULES = {
    "load": 300, "store": 300, "end_load": 150, "end_store": 150, "end": 60, "reset": 10, "restart": 8, "late": 12,
    "lose": 6, "start_again": 8, "send_hostile_frames": 20,
}  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
def test_random_engines_match_model(node, seed, monkeypatch):
    monkeypatch.setattr("kvcache.node.client._RETRY_S", 0)
    engines = Engines(node(NUM_BLOCKS), seed)
    for step in range(300):
        name = engines.dice.choice("abc")
        getattr(engines, engines.dice.choices([*RULES], RULES.values())[0])(name)
        if engines.dice.random() < 0.5:
            engines.engines[name].on_schedule_end()
        if step % 20 == 0:
            engines.check()
    engines.check_nothing_is_left()
