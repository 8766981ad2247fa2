"""Leases: the slots that engines read and write. Applies the messages of engines to the manager and the ledger.

A lease has no time limit: a worker may still copy, and a slot that is reused too early would get wrong bytes. A lease
ends when the engine releases it, or when every process of the engine has ended.
"""

from __future__ import annotations

import struct
from collections import Counter, defaultdict
from typing import Any

import numpy as np

from kvcache.block import ABSENT, ASK_AGAIN, PENDING, READY
from kvcache.control.cpu import CPUOffloadingManager
from kvcache.node import protocol
from kvcache.node.batch import count_leases
from kvcache.node.ledger import OWNER, Ledger, PoolLedger
from kvcache.node.protocol import EPOCH_BYTES, Frame, pack, unpack_json, unpack_keys, unpack_slots
from kvcache.request import ReqContext, Retention, parse_hint
from kvcache.tiering.manager import TieredOffloadingManager

MAX_SHARE = 0.5
"""Share of the pool that the leases of one engine may hold."""
_STEP_SLOTS = 4096
"""Number of slots that one step searches for blocks of an epoch without engines."""


class Lease:
    """The leases of one request of one engine: it may read `held_keys` in `held_slots`. `keys` is its prompt."""

    __slots__ = ("context", "held_keys", "held_slots", "is_stale", "keys", "unread_ends")

    def __init__(self, retention: Retention | None = None) -> None:
        self.context = ReqContext(retention=retention)
        self.keys: list[bytes] = []
        # Keys and end positions that arrived, but are not in the context yet: most policies never need them.
        self.unread_ends: list[tuple[list[bytes], np.ndarray[Any, Any]]] = []
        self.held_keys: list[bytes] = []
        self.held_slots: np.ndarray[Any, Any] = np.empty(0, np.int64)
        # Whether its engine was reset since. The slots hold no block then, and are withheld until they are released.
        self.is_stale = False

    def read_ends(self) -> ReqContext:
        """Return the context with all end positions that have arrived."""
        for keys, ends in self.unread_ends:
            positions = dict(zip(keys, ends.tolist(), strict=True))
            self.context.set_offload_key_positions({**(self.context.positions or {}), **positions})
        self.unread_ends.clear()
        return self.context


class EngineLeases:
    """The leases of one engine, and its counters; `number` is its bit in the ledger."""

    def __init__(self, number: int, num_slots: int) -> None:
        self.number = number
        # The prefix of its keys in the pool, so that engines with other weights find other blocks.
        self.epoch = b""
        # Its leases and stores from before its last reset.
        self._left: list[Lease] = []
        self._left_stores: dict[int, bytes] = {}
        self.leases: defaultdict[int, Lease] = defaultdict(Lease)
        # The key that the engine writes to each slot, or b"" if the engine was reset since.
        self.writing: dict[int, bytes] = {}
        self.num_held = 0
        self.num_shared_hits = self.num_round_trips = self.num_outages = 0
        # Leases of each slot: several requests may read it.
        self.counts = np.zeros(num_slots, np.uint32)

    def begin(self, epoch: bytes, is_reset: bool) -> None:
        """Begin an epoch. After a reset, whatever the engine holds and writes is from before it."""
        self.epoch = epoch
        self._left = [
            lease
            for lease in self.leases.values()
            if lease.held_keys and (is_reset or not lease.held_keys[0].startswith(epoch))
        ]
        self._left_stores = {slot: key for slot, key in self.writing.items() if is_reset or not key.startswith(epoch)}

    def is_recovering(self) -> bool:
        """Return whether the engine holds slots since before its reset. Its next copy releases them."""
        # A later store to the same slot has another key, if maybe an equal one.
        is_writing = any(self.writing.get(slot) is key for slot, key in self._left_stores.items())
        if is_writing or any(lease.held_keys for lease in self._left):
            return True
        self._left, self._left_stores = [], {}
        return False


class NodeLeases:
    """Applies the messages of engines to one manager, whose block ids are the slots of the pool.

    `engines` are the leases of each engine by its number.
    """

    def __init__(self, manager: CPUOffloadingManager | TieredOffloadingManager, ledger: Ledger) -> None:
        self.manager = manager
        self.ledger = ledger
        self.engines: dict[int, EngineLeases] = {}
        self.num_slots = len(ledger.state)
        self._limit = max(1, int(MAX_SHARE * self.num_slots))
        self._reserve = max(1, self.num_slots // 16)
        # Whether end positions are needed before the answer to a look-up. Otherwise they are read after it.
        self._reads_ends = manager.pool.policy.reads_clock or isinstance(manager, TieredOffloadingManager)
        self._hooks = PoolLedger(manager.pool, ledger, self._leave_blocks)
        # For each epoch without an engine, the first slot that was not searched for its blocks yet.
        self._left: dict[bytes, int] = {}

    @property
    def num_withheld(self) -> int:
        """Slots that hold no block, because engines may still copy to or from them."""
        return len(self._hooks.withheld)

    def add_engine(self, number: int) -> EngineLeases:
        """Return the leases of an engine. If it is new here, its leases are read from the ledger."""
        if number in self.engines:
            return self.engines[number]
        engine = self.engines[number] = EngineLeases(number, self.num_slots)
        ledger = self.ledger
        held = np.flatnonzero(ledger.readers & np.uint64(1 << number))
        for request, slots in enumerate((held[ledger.state[held] == READY], held[ledger.state[held] != READY])):
            if len(slots):
                lease = engine.leases[request] = Lease()
                lease.is_stale = request == 1
                self._hold(engine, lease, [] if lease.is_stale else ledger.keys_of(slots), slots)
        for slot in np.flatnonzero((ledger.state == PENDING) & (ledger.writer == number)).tolist():
            (engine.writing[slot],) = ledger.keys_of([slot])
        return engine

    def resume(self, engine: EngineLeases, requests: list[tuple[int, list[int], list[int]]]) -> None:
        """Replace the leases of an engine by its own list: per request the slots that it reads and writes.

        ValueError: the list names slots that the engine does not hold. Nothing changes.
        """
        withheld, writing = self._hooks.withheld, engine.writing
        reads = [slot for _, slots, _ in requests for slot in slots]
        writes = [slot for _, _, slots in requests for slot in slots if slot not in writing]
        for slot in reads + writes:
            if not (0 <= slot < self.num_slots and engine.counts[slot]) or (slot in writes and slot not in withheld):
                raise ValueError(f"the engine does not hold slot {slot}")
        if len({request for request, _, _ in requests}) < len(requests) or len({*writes}) < len(writes):
            raise ValueError("the engine names a request, or a slot that it writes, twice")
        before, engine.leases = engine.leases, defaultdict(Lease)
        for request, read, _ in requests:
            if read:
                lease = engine.leases[request] = Lease()
                lease.is_stale = read[0] in withheld
                if lease.is_stale:
                    withheld.update(read)
                self._hold(engine, lease, [] if lease.is_stale else self.ledger.keys_of(read), np.array(read, np.int64))
        # The ledger marks a store from before a reset like a load. Only the engine's list shows the difference.
        for slot in writes:
            writing[slot] = b""
            self._count(engine, np.array([slot]))
            withheld[slot] += 1
        for lease in before.values():
            self._release(engine, lease)
        kept = {slot for _, _, slots in requests for slot in slots}
        self._end_stores(engine, [slot for slot in writing if slot not in kept], None, False)

    def enter(self, engine: EngineLeases, epoch: bytes, is_reset: bool) -> None:
        """Begin an epoch for an engine, which sends its prompts again. ValueError: it is not an epoch."""
        if len(epoch) not in (0, EPOCH_BYTES):
            raise ValueError(f"an epoch has {EPOCH_BYTES} bytes, got {epoch!r}")
        left = engine.epoch
        engine.begin(epoch, is_reset)
        for lease in engine.leases.values():
            lease.keys.clear()
        self._leave(left)
        self._left.pop(epoch, None)

    def _leave(self, epoch: bytes) -> None:
        if epoch and all(engine.epoch != epoch for engine in self.engines.values()):
            self._left[epoch] = 0

    def step(self) -> None:
        """Mark some blocks of an epoch without engines to be evicted first."""
        if self._left:
            epoch, first = next(iter(self._left.items()))
            slots = self.ledger.slots_of(epoch, first, _STEP_SLOTS)
            if len(slots):
                self.manager.hint(self.ledger.keys_of(slots), "end")
            self._left[epoch] = first + _STEP_SLOTS
            if self._left[epoch] >= self.num_slots:
                del self._left[epoch]

    def bury(self, number: int) -> None:
        """Release all leases of an engine whose processes have all ended."""
        engine = self.engines.pop(number)
        for lease in engine.leases.values():
            self._release(engine, lease)
            self.manager.on_request_finished(lease.context)
        self._end_stores(engine, list(engine.writing), None, False)
        self.ledger.drop_engine(number)
        self._leave(engine.epoch)

    def apply(self, engine: EngineLeases, frame: Frame) -> bytes | None:
        """Apply one message, and return the answer, if it has one. ValueError or struct.error: it is invalid."""
        op, request = frame.op, frame.request
        if op == protocol.ACQUIRE:
            return self._acquire_one(engine, frame) if frame.flag == protocol.ONE_KEY else self._acquire(engine, frame)
        if op == protocol.OFFER:
            return self._offer(engine, frame)
        if op == protocol.RESET:
            self.enter(engine, frame.payload, is_reset=True)
            return pack(protocol.DONE, 0, request)
        if op == protocol.OPEN:
            engine.leases.setdefault(request, Lease(parse_hint(unpack_json(frame.payload))))
        elif op == protocol.STORED:
            # A request may end before its stores do.
            context = engine.leases[request].context if request in engine.leases else None
            self._end_stores(engine, unpack_slots(frame.payload), context, bool(frame.flag))
        elif op == protocol.RELEASE:
            if request in engine.leases:
                self._release(engine, engine.leases[request])
        elif op == protocol.END:
            lease = self._extend(engine, frame, 0)
            del engine.leases[request]
            self._release(engine, lease)
            self.manager.on_request_finished(lease.read_ends(), use_positions=bool(frame.flag))
        elif op == protocol.LATE:
            engine.num_outages += 1
        else:
            raise ValueError(f"unknown operation {op}")
        return None

    def _extend(self, engine: EngineLeases, frame: Frame, first: int) -> Lease:
        """Add the keys of a message, if it has any, to those of its request's prompt."""
        lease = engine.leases[frame.request]
        if len(frame.payload) > first:
            keys, ends = unpack_keys(frame.payload, frame.key_bytes, first, engine.epoch)
            lease.keys += keys
            if len(ends):
                lease.unread_ends.append((keys, ends))
            if self._reads_ends:
                lease.read_ends()
        return lease

    def _acquire(self, engine: EngineLeases, frame: Frame) -> bytes:
        """Look up the blocks of a prompt, and hold those that are ready: of one group the leading ones, else all."""
        (start,) = struct.unpack_from("<I", frame.payload)
        lease = self._extend(engine, frame, 4)
        keys = lease.keys[start:] if start else lease.keys
        if lease.is_stale:
            return self._answer(engine, lease, frame.request, [], [], ABSENT)
        if frame.flag == protocol.HYBRID:
            states = self.manager.pool.states(keys)
            ready = [key for key, state in zip(keys, states, strict=True) if state == READY]
            return self._answer(engine, lease, frame.request, keys, ready, ABSENT)
        num_ready = self.manager.lookup(keys, lease.context)
        if num_ready is None:
            return self._answer(engine, lease, frame.request, [], [], ASK_AGAIN)
        if num_ready == len(keys):
            return self._answer(engine, lease, frame.request, keys, keys, ABSENT)
        is_coming = self.manager.pool.states([keys[num_ready]]) == bytes([PENDING])
        ready = keys[:num_ready]
        return self._answer(engine, lease, frame.request, ready, ready, PENDING if is_coming else ABSENT)

    def _acquire_one(self, engine: EngineLeases, frame: Frame) -> bytes:
        """Look up one key of a prompt, in tiers, too."""
        (place,) = struct.unpack("<I", frame.payload)
        lease = self._extend(engine, frame, 4)
        keys = [] if lease.is_stale else lease.keys[place : place + 1]
        state: int = ABSENT
        if keys and isinstance(self.manager, TieredOffloadingManager):
            state = self.manager.status(keys[0], lease.context)
        return self._answer(engine, lease, frame.request, keys, keys if state == READY else [], state)

    def _answer(
        self, engine: EngineLeases, lease: Lease, request: int, asked: list[bytes], keys: list[bytes], state: int
    ) -> bytes:
        """Hold ready blocks for a request, at most half of the pool for an engine, and return the answer.

        `keys` are those of `asked` that are ready, `state` is that of the block behind them.
        """
        if lease.held_keys and keys:
            held = set(lease.held_keys)
            keys = [key for key in keys if key not in held]
        room = self._room(engine)
        if len(keys) > room:
            # Another request of the engine may hold a block already.
            is_new = engine.counts[self.manager.pool.locate(keys)] == 0
            num_fit = int(np.count_nonzero(np.cumsum(is_new) <= room))
            keys, state = keys[:num_fit], state if num_fit == len(keys) else ABSENT
        if not keys:
            return pack(protocol.HELD, state, request, struct.pack("<I", 0))
        try:
            slots = self.manager.prepare_load(keys, lease.context).block_ids  # type: ignore[attr-defined]
        except KeyError:  # a reset is under way
            return pack(protocol.HELD, ABSENT, request, struct.pack("<I", 0))
        num_shared = self._hold(engine, lease, keys, slots, is_pinned=True)
        engine.num_shared_hits += num_shared
        payload = struct.pack("<I", num_shared) + _slots_of(asked, keys, slots)
        return pack(protocol.HELD, state, request, payload)

    def _room(self, engine: EngineLeases) -> int:
        """Return how many more slots an engine may hold or write: at most half of the pool in all.

        The last slots are reserved for engines that recover from a reset; each may take half of the rest. Without a
        copy, an engine would never release its slots from before the reset.
        """
        pool = self.manager.pool
        num_left = self.num_slots - pool.num_referenced - pool.num_pending - self.num_withheld
        if engine.is_recovering():
            return min(self._limit, (num_left + 1) // 2)
        return min(self._limit - engine.num_held - len(engine.writing), num_left - self._reserve)

    def _offer(self, engine: EngineLeases, frame: Frame) -> bytes:
        """Reserve slots for the absent blocks of a store."""
        offered, _ = unpack_keys(frame.payload, frame.key_bytes, epoch=engine.epoch)
        keys, lease = offered, engine.leases[frame.request]
        output = None
        room = self._room(engine)
        if engine.is_recovering():
            keys = keys[:room]
        if keys and len(keys) <= room:
            self._hooks.writer = engine.number
            try:
                output = self.manager.prepare_store(keys, lease.context)
            finally:
                self._hooks.writer = OWNER
        if output is None:
            return pack(protocol.SLOTS, 1, frame.request)
        self.manager.reorder(lease.read_ends())
        slots = output.store_spec.block_ids  # type: ignore[attr-defined]
        engine.writing.update(zip(slots.tolist(), output.keys_to_store, strict=True))
        return pack(protocol.SLOTS, 0, frame.request, _slots_of(offered, output.keys_to_store, slots))

    def _end_stores(
        self, engine: EngineLeases, slots: list[int], context: ReqContext | None, success: bool
    ) -> None:
        """Commit or drop stores of an engine. ValueError: it does not write these slots."""
        if len(engine.writing.keys() & slots) < len(slots):
            raise ValueError(f"the engine does not write each of slots {slots}, once")
        keys = [engine.writing.pop(slot) for slot in slots]
        stale = [slot for slot, key in zip(slots, keys, strict=True) if not key]
        if stale:
            self._count(engine, np.array(stale), -1)
            self.manager.pool.give_back(stale)
        if len(stale) < len(slots):
            self.manager.complete_store([key for key in keys if key] if stale else keys, context, success)

    def _hold(self, engine: EngineLeases, lease: Lease, keys: list[bytes], slots: Any, is_pinned: bool = False) -> int:
        """Record leases of slots; return how many hold a block that another engine wrote."""
        if keys and not is_pinned:
            self.manager.pool.pin(keys, is_move=True)
        lease.held_keys = lease.held_keys + keys
        lease.held_slots = np.concatenate([lease.held_slots, slots]) if len(lease.held_slots) else slots
        return self._count(engine, slots)

    def _count(self, engine: EngineLeases, slots: Any, step: int = 1) -> int:
        ledger = self.ledger
        if step > 0:
            ledger.use(slots)
        num_slots, num_shared = count_leases(slots, step, engine.counts, ledger.readers, ledger.writer, engine.number)
        engine.num_held += step * num_slots
        return num_shared

    def _release(self, engine: EngineLeases, lease: Lease) -> None:
        """Return the leases of a request."""
        slots, keys = lease.held_slots, lease.held_keys
        if not len(slots):
            return
        lease.held_keys, lease.held_slots = [], slots[:0]
        self._count(engine, slots, -1)
        if lease.is_stale:
            lease.is_stale = False
            self.manager.pool.give_back(slots.tolist())
        else:
            self.manager.complete_load(keys, lease.context)

    def _leave_blocks(self) -> Counter[int]:
        """Return how many leases hold each slot. They hold no block any more: the pool is being reset."""
        num_leases: Counter[int] = Counter()
        for engine in self.engines.values():
            for lease in engine.leases.values():
                lease.is_stale = len(lease.held_slots) > 0
                num_leases.update(lease.held_slots.tolist())
            for slot, key in engine.writing.items():
                if key:
                    self._count(engine, np.array([slot]))
                    engine.writing[slot] = b""
            num_leases.update(engine.writing.keys())
            # Stores that ended since `forget`.
            self.ledger.unread(np.flatnonzero(engine.counts == 0), engine.number)
        return num_leases


def _slots_of(asked: list[bytes], keys: list[bytes], slots: np.ndarray[Any, Any]) -> bytes:
    """Return the slot of each key of `asked`, packed. Keys that are not in `keys`, and repeated ones, have -1."""
    if len(keys) < len(asked):
        slot_of = dict(zip(keys, slots.tolist(), strict=True))
        slots = np.array([slot_of.pop(key, -1) for key in asked])
    return slots.astype("<i4").tobytes()
