"""An owner in a thread, and clients of it in this process."""

import shutil
import threading
import uuid
from contextlib import contextmanager

from waiting import wait_until

from kvcache import ReqContext
from kvcache.node.client import NodeManager, greeting
from kvcache.node.ledger import OWNER
from kvcache.node.owner import Owner
from kvcache.node.protocol import node_folder

BLOCK_BYTES = 64


class Node:
    """One owner, which can be ended and replaced, and its engines."""

    def __init__(self, num_blocks=64, options=None, model="model"):
        self.folder = node_folder(f"test-{uuid.uuid4().hex[:12]}")
        self.identity = {"num_blocks": num_blocks, "block_bytes": BLOCK_BYTES, "block_size": 16, "model": model}
        self.options = options or {"cache_policy": "lru"}
        self.owner = self.thread = None
        self.managers = []
        self.start()

    def start(self, **options):
        self.owner = Owner(self.folder, **{"linger_s": None, **options})
        self.thread = threading.Thread(target=self.owner.run, daemon=True)
        self.thread.start()

    def stop(self):
        """End the owner as a kill does: its files stay."""
        self.owner.stop()
        self.thread.join()

    def restart(self):
        """End the owner, start another one, and bring every engine to it."""
        self.stop()
        self.start()
        for manager in self.managers:
            manager.owner_figures()  # without an answer
            wait_for(lambda manager=manager: manager.on_schedule_end() or manager._link.is_ready)

    def engine(self, name, options=None, patience_s=10.0, num_groups=1, num_workers=0, **identity):
        hello = greeting(name, {**self.identity, **identity}, options or self.options, num_workers=num_workers)
        manager = NodeManager(self.folder, hello, starts_owner=False, patience_s=patience_s, num_groups=num_groups)
        self.managers.append(manager)
        return manager

    @property
    def leases(self):
        return self.owner.pool.leases

    def check(self):
        """Compare the ledger with the manager, slot by slot."""
        pool, ledger = self.owner.pool.manager.pool, self.owner.pool.ledger
        # Promotions reserve slots between two messages, and belong to no engine.
        assert self.leases._hooks.writer == OWNER
        for state in (1, 2):
            slots = [slot for slot in range(pool.num_blocks) if ledger.state[slot] == state]
            keys = ledger.keys_of(slots)
            assert [block.block_id for block in map(pool.policy.get, keys)] == slots
            assert pool.states(keys) == bytes([state]) * len(keys)
        assert sum(ledger.state != 0) + pool.num_free == pool.num_blocks
        for engine in self.leases.engines.values():
            held = {slot for lease in engine.leases.values() for slot in lease.held_slots.tolist()}
            assert {slot for slot in range(pool.num_blocks) if int(ledger.readers[slot]) >> engine.number & 1} == held

    def close(self):
        for manager in self.managers:
            manager.shutdown()
        self.stop()
        if self.folder.exists():
            shutil.rmtree(self.folder)


def key_of(document, place, group=0):
    return document.to_bytes(8, "big") + place.to_bytes(8, "big") + group.to_bytes(4, "big")


def prompt(document, length, **options):
    keys = [key_of(document, place) for place in range(length)]
    context = ReqContext(**options)
    context.set_offload_key_positions({key: 16 * (place + 1) for place, key in enumerate(keys)})
    return keys, context


def turn(manager, keys, context, use_positions=True):
    """Serve a prompt as an engine does: look it up, load what is found, store the rest. Return the hits."""
    hits = 0
    if hasattr(manager, "owner_figures"):
        while hits < len(keys) and manager.status(keys[hits], context) == 2:
            hits += 1
    else:
        hits = manager.lookup(keys, context)
    if hits:
        manager.prepare_load(keys[:hits], context)
        manager.complete_load(keys[:hits], context)
    output = manager.prepare_store(keys[hits:], context) if hits < len(keys) else None
    if output is not None:
        manager.reorder(context)
        manager.complete_store(output.keys_to_store, context)
    manager.on_request_finished(context, use_positions=use_positions)
    manager.on_schedule_end()
    return hits


def wait_for(condition, timeout_s=100):
    return wait_until(condition, timeout_s)


class Gate:
    """An owner's epoll that waits while `event` is not set, as a busy or a stopped process does."""

    def __init__(self, poll):
        self._poll = poll
        self.event = threading.Event()
        self.is_waiting = threading.Event()

    def poll(self, timeout_s):
        self.is_waiting.set()
        self.event.wait()
        return self._poll.poll(timeout_s)

    def __getattr__(self, name):
        return getattr(self._poll, name)


@contextmanager
def gated(owner):
    """Keep an owner from its messages until the event is set, and in the end."""
    poll, gate = owner._poll, Gate(owner._poll)
    owner._poll = gate
    assert gate.is_waiting.wait(10)
    try:
        yield gate.event
    finally:
        owner._poll = poll
        gate.event.set()
