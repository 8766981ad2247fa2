"""Leases: the slots that engines read and write. Applies the messages of engines to the manager and the ledger.

A lease has no time limit: a worker may still copy, and a slot that is reused too early would get wrong bytes. A lease
ends when the engine releases it, or when every process of the engine has ended.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from itertools import compress
from typing import Any

import numpy as np

from kvcache.block import ABSENT, ASK_AGAIN, PENDING, READY
from kvcache.control.cpu import CPUOffloadingManager
from kvcache.control.hints import HintBoard
from kvcache.node import protocol
from kvcache.node.batch import count_leases
from kvcache.node.ledger import OWNER, Ledger, PoolLedger
from kvcache.node.protocol import EPOCH_BYTES, Frame, pack, unpack_actions, unpack_keys, unpack_slots
from kvcache.request import ReqContext, path_after
from kvcache.tiering.manager import TieredOffloadingManager

_STEP_SLOTS = 4096
"""Number of slots that one step searches for blocks of an epoch without engines."""


class Lease:
    """The leases of one request: its engine may read `held_keys` in `held_slots`. `keys` is its prompt."""

    def __init__(self) -> None:
        self.context = ReqContext()
        self.keys: list[bytes] = []
        # Keys and end positions that are not in the context yet. Most policies need them after the answer, if at all.
        self.unread_ends: list[tuple[list[bytes], np.ndarray[Any, Any]]] = []
        # For several groups with windows: the path was used for the positions before this one.
        self.num_path_positions = 0
        self.held_keys: list[bytes] = []
        self.held_slots: np.ndarray[Any, Any] = np.empty(0, np.int64)

    def read_ends(self) -> ReqContext:
        """Return the context with all end positions that have arrived."""
        for keys, ends in self.unread_ends:
            positions = self.context.positions or {}
            positions.update(zip(keys, ends.tolist(), strict=True))
            self.context.set_offload_key_positions(positions)
        self.unread_ends.clear()
        return self.context


class EngineLeases:
    """The leases of one engine, and its counters; `number` is its bit in the ledger."""

    def __init__(self, number: int, num_slots: int) -> None:
        self.number = number
        # The prefix of its keys in the pool, so that engines with other weights find other blocks.
        self.epoch = b""
        self.leases: defaultdict[int, Lease] = defaultdict(Lease)
        # The key that the engine writes to each slot.
        self.writing: dict[int, bytes] = {}
        # The slots of its last OFFER.
        self.offered: list[int] = []
        # The leases and the written slots from before its last reset.
        self._old_leases: list[Lease] = []
        self.old_writes: set[int] = set()
        self.num_held = 0
        self.num_shared_hits = self.num_round_trips = self.num_outages = 0
        # Leases of each slot: several requests may read it.
        self.counts = np.zeros(num_slots, np.uint32)

    def begin(self, epoch: bytes, is_reset: bool) -> None:
        """Begin an epoch. After a reset, all that the engine holds and writes is from before the reset."""
        self.epoch = epoch
        current = () if is_reset else (epoch,)
        leases = [lease for lease in self.leases.values() if lease.held_keys]
        self._old_leases = [lease for lease in leases if not lease.held_keys[0].startswith(current)]
        self.old_writes = {slot for slot, key in self.writing.items() if not key.startswith(current)}

    def is_recovering(self) -> bool:
        """Return whether the engine has slots from before its last reset. Its next copy returns them."""
        return bool(self.old_writes) or any(lease.held_keys for lease in self._old_leases)

    def needs_copy(self) -> bool:
        """Return whether all of the engine's slots are from before its last reset."""
        num_old = sum(bool(lease.held_keys) for lease in self._old_leases)
        num_leases = sum(bool(lease.held_keys) for lease in self.leases.values())
        return (num_leases, len(self.writing)) == (num_old, len(self.old_writes))


class NodeLeases:
    """Applies the messages of engines to one manager, whose block ids are the slots of the pool.

    `engines` are the leases of each engine by its number.
    """

    def __init__(self, manager: CPUOffloadingManager | TieredOffloadingManager, ledger: Ledger) -> None:
        self.manager = manager
        self.ledger = ledger
        self.engines: dict[int, EngineLeases] = {}
        self.num_slots = len(ledger.state)
        self._limit = protocol.most_held(self.num_slots)
        self._reserve = max(1, self.num_slots // 16)
        # Whether end positions are needed before the answer to a look-up. Otherwise they are read after it.
        self._reads_ends = manager.pool.policy.reads_clock or isinstance(manager, TieredOffloadingManager)
        windows = manager.pool.group_windows
        # The group whose keys are the path of a request, if the policy knows the windows of the others.
        self._path_group = None if windows is None else windows.index(None).to_bytes(4, "big")
        self._hooks = PoolLedger(manager.pool, ledger)
        self.hints = HintBoard(manager, owns_keys=False)
        # Per epoch that no engine has any more: from which slot on its blocks must still be searched.
        self._left: dict[bytes, int] = {}

    def add_engine(self, number: int) -> EngineLeases:
        """Return the leases of an engine. If it is new here, its leases are read from the ledger."""
        if number in self.engines:
            return self.engines[number]
        engine = self.engines[number] = EngineLeases(number, self.num_slots)
        ledger = self.ledger
        held = np.flatnonzero(ledger.readers & np.uint64(1 << number))
        if len(held):
            # The ledger does not name requests. The engine's greeting does, and then replaces this lease.
            self._restore(engine, 0, held)
        for slot in np.flatnonzero((ledger.state == PENDING) & (ledger.writer == number)).tolist():
            (engine.writing[slot],) = ledger.keys_of([slot])
        return engine

    def resume(self, engine: EngineLeases, requests: list[tuple[int, list[int], list[int]]]) -> None:
        """Replace the leases of an engine by its own list: per request the slots that it reads and writes.

        ValueError: the list names slots that the engine does not hold. Nothing changes.
        """
        writes = [slot for _, _, slots in requests for slot in slots]
        for slot in (slot for _, slots, _ in requests for slot in slots):
            if not (0 <= slot < self.num_slots and engine.counts[slot]):
                raise ValueError(f"the engine does not read slot {slot}")
        if not engine.writing.keys() >= {*writes}:
            raise ValueError(f"the engine does not write each of slots {writes}")
        if len({request for request, _, _ in requests}) < len(requests) or len({*writes}) < len(writes):
            raise ValueError("the engine names a request, or a slot that it writes, twice")
        before, engine.leases = engine.leases, defaultdict(Lease)
        # Hold the slots again before the old leases end, so that no slot is free in between.
        for request, reads, _ in requests:
            if reads:
                self._restore(engine, request, np.array(reads, np.int64))
        for lease in before.values():
            self._release(engine, lease)
            self.manager.on_request_finished(lease.context)
        kept = {*writes}
        self._end_stores(engine, [slot for slot in engine.writing if slot not in kept], None, False)

    def enter(self, engine: EngineLeases, epoch: bytes, is_reset: bool) -> None:
        """Begin an epoch for an engine, which sends its prompts again. ValueError: it is not an epoch."""
        if len(epoch) not in (0, EPOCH_BYTES):
            raise ValueError(f"an epoch has {EPOCH_BYTES} bytes, got {epoch!r}")
        last_epoch = engine.epoch
        engine.begin(epoch, is_reset)
        for lease in engine.leases.values():
            lease.keys.clear()
            if epoch != last_epoch:
                # The request's prompt consists of other keys from now on.
                self.manager.on_request_finished(lease.context)
                actions = lease.context.actions
                lease.context, lease.num_path_positions = ReqContext(), 0
                lease.context.actions = actions
                lease.unread_ends.clear()
        self._leave(last_epoch)
        self._left.pop(epoch, None)

    def _leave(self, epoch: bytes) -> None:
        if epoch and all(engine.epoch != epoch for engine in self.engines.values()):
            self._left[epoch] = 0

    def step(self) -> None:
        """Execute hints, and mark some blocks of an epoch without engines to be evicted first."""
        self.hints.step()
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
            return self._acquire(engine, frame)
        if op == protocol.OFFER:
            return self._offer(engine, frame)
        if op == protocol.RESET:
            self.enter(engine, frame.payload, is_reset=True)
            return pack(protocol.DONE, 0, request)
        if op == protocol.OPEN:
            actions = unpack_actions(frame.payload)
            if request not in engine.leases:
                opened = engine.leases[request].context
                opened.actions = actions
                self.hints.begin(opened)
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
            context = lease.read_ends() if lease.num_path_positions else self._use_path(lease)
            self.manager.on_request_finished(context, use_positions=self._path_group is None and bool(frame.flag))
            self.hints.end(context)
        elif op == protocol.USE and self._path_group is not None:
            self._use(engine, frame)
        elif op == protocol.LATE:
            engine.num_outages += 1
            if frame.flag:
                self._end_stores(engine, engine.offered, None, False)
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
        """Look up the blocks of a prompt, hold those that are ready, as far as the engine has room, and answer."""
        (start,) = struct.unpack_from("<I", frame.payload)
        lease = self._extend(engine, frame, 4)
        asked, ready, state = lease.keys[start:], list[bytes](), int(ABSENT)
        if frame.flag == protocol.HYBRID:
            states = self.manager.pool.states(asked)
            ready = [key for key, found in zip(asked, states, strict=True) if found == READY]
        elif frame.flag == protocol.ONE_KEY:
            asked = asked[:1]
            if asked and isinstance(self.manager, TieredOffloadingManager):
                state = self.manager.status(asked[0], lease.context)
            ready = asked if state == READY else []
        elif (num_ready := self.manager.lookup(asked, lease.context)) is None:
            state = ASK_AGAIN
        else:
            # The client waits for a block that another request is writing, and for no later one.
            if self.manager.pool.states(asked[num_ready : num_ready + 1]) == bytes([PENDING]):
                state = PENDING
            asked = ready = asked[:num_ready]
        held = {*lease.held_keys}
        if held:
            ready = [key for key in ready if key not in held]
        room = self._room(engine)
        if len(ready) > room:
            by_position = ready
            if frame.flag == protocol.HYBRID:
                # Blocks without a window are useless without the windows behind them.
                positions = lease.read_ends().positions or {}
                by_position = sorted(ready, key=lambda key: positions.get(key, 0))
            # A block that another request of the engine holds already needs no room.
            is_new = engine.counts[self.manager.pool.locate(by_position)] == 0
            num_fit = int(np.count_nonzero(np.cumsum(is_new) <= room))
            kept, state = {*by_position[:num_fit]}, state if num_fit == len(ready) else ABSENT
            ready = [key for key in ready if key in kept]
        if not ready:
            return pack(protocol.HELD, state, frame.request, struct.pack("<I", 0))
        if self._path_group is None:
            spec = self.manager.prepare_load(ready, lease.context)
        else:
            # The engine loads a part of the blocks only, and USE names it.
            spec = self.manager.pool.pin(ready, is_move=True)
        slots = spec.block_ids  # type: ignore[attr-defined]
        num_shared = self._hold(engine, lease, ready, slots)
        engine.num_shared_hits += num_shared
        payload = struct.pack("<I", num_shared) + _slots_of(asked, ready, slots)
        return pack(protocol.HELD, state, frame.request, payload)

    def _use_path(self, lease: Lease) -> ReqContext:
        """Return the context of a request; if the policy knows windows, use the keys that its path has gained."""
        context = lease.read_ends()
        positions, num_old = context.positions or {}, lease.num_path_positions
        if self._path_group is not None and len(positions) > num_old:
            lease.num_path_positions = len(positions)
            self.manager.touch(path_after(positions, num_old, self._path_group, self.manager.block_size), context)
        return context

    def _use(self, engine: EngineLeases, frame: Frame) -> None:
        """Use the path of a request and the blocks that it loads, and release the others. ValueError: it is invalid."""
        found_tokens, num_loaded = struct.unpack_from("<II", frame.payload)
        loaded = np.frombuffer(frame.payload, "<i4", num_loaded, 8)
        lease = self._extend(engine, frame, 8 + loaded.nbytes)
        keys, slots = lease.held_keys, lease.held_slots
        is_loaded = np.isin(slots, loaded)
        if np.count_nonzero(is_loaded) < num_loaded:
            raise ValueError(f"the engine does not read each of slots {loaded.tolist()}, once")
        self.manager.pool.note_found(lease.context, found_tokens)
        self._use_path(lease)
        if num_loaded:
            lease.held_keys, lease.held_slots = [*compress(keys, is_loaded)], slots[is_loaded]
            # The load's own references, before those of the look-up end.
            self.manager.prepare_load(lease.held_keys, lease.context)
            self._count(engine, slots[~is_loaded], -1)
            self.manager.pool.unpin(keys)
            if isinstance(self.manager, TieredOffloadingManager):
                # The policy decides now which of the loaded blocks stay: the request may never store any.
                self.manager.prepare_store([], lease.context)

    def _room(self, engine: EngineLeases) -> int:
        """Return how many more slots an engine may hold or write: at most half of the pool in all.

        An engine that cannot report the ends of older copies returns their slots after its next copy. So it may exceed
        its half after a reset. But of the last, reserved slots it gets only one, and only if it has no other slot from
        after the reset. Otherwise, a few resets would use up the pool for all engines.
        """
        pool = self.manager.pool
        num_left = self.num_slots - pool.num_referenced - pool.num_pending
        num_free = num_left - self._reserve
        room = min(self._limit - engine.num_held - len(engine.writing), num_free)
        if not engine.is_recovering():
            return room
        return max(room, (num_free + 1) // 2) if num_free > 0 else min(num_left, int(engine.needs_copy()))

    def _offer(self, engine: EngineLeases, frame: Frame) -> bytes:
        """Reserve slots for the absent blocks of a store."""
        offered, _ = unpack_keys(frame.payload, frame.key_bytes, epoch=engine.epoch)
        keys, lease = offered, engine.leases[frame.request]
        output, room, engine.offered = None, self._room(engine), []
        pool = self.manager.pool
        num_needed = pool.needed_blocks
        if engine.is_recovering():
            # A part of the store is enough: its end returns the slots from before the reset.
            keys = keys[:room]
        if keys and len(keys) <= room:
            self._use_path(lease)
            self._hooks.writer = engine.number
            try:
                output = self.manager.prepare_store(keys, lease.context)
            finally:
                self._hooks.writer = OWNER
        else:
            pool.refuse(offered, lease.context)
        # What the engine computed in vain: also blocks that the policy declines, or of a refused store.
        missed = struct.pack("<I", pool.needed_blocks - num_needed)
        if output is None:
            return pack(protocol.SLOTS, 1, frame.request, missed)
        self.manager.reorder(lease.read_ends())
        slots = output.store_spec.block_ids  # type: ignore[attr-defined]
        engine.offered = slots.tolist()
        engine.writing.update(zip(engine.offered, output.keys_to_store, strict=True))
        return pack(protocol.SLOTS, 0, frame.request, missed + _slots_of(offered, output.keys_to_store, slots))

    def _end_stores(self, engine: EngineLeases, slots: list[int], context: ReqContext | None, success: bool) -> None:
        """Commit or drop stores of an engine. ValueError: it does not write these slots."""
        if len(engine.writing.keys() & slots) < len(slots):
            raise ValueError(f"the engine does not write each of slots {slots}, once")
        engine.old_writes.difference_update(slots)
        if slots:
            self.manager.complete_store([engine.writing.pop(slot) for slot in slots], context, success)

    def _restore(self, engine: EngineLeases, request: int, slots: np.ndarray[Any, Any]) -> None:
        """Hold slots for a request again, whose lease began with an earlier owner or connection."""
        keys = self.ledger.keys_of(slots)
        self.manager.pool.pin(keys, is_move=True)
        self._hold(engine, engine.leases[request], keys, slots)

    def _hold(self, engine: EngineLeases, lease: Lease, keys: list[bytes], slots: np.ndarray[Any, Any]) -> int:
        """Record leases of pinned blocks; return how many of these blocks another engine wrote."""
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
        if keys:
            lease.held_keys, lease.held_slots = [], slots[:0]
            self._count(engine, slots, -1)
            self.manager.complete_load(keys, lease.context)


def _slots_of(asked: list[bytes], keys: list[bytes], slots: np.ndarray[Any, Any]) -> bytes:
    """Return the slot of each key of `asked`, packed. Keys that are not in `keys`, and repeated ones, have -1."""
    if len(keys) < len(asked):
        slot_of = dict(zip(keys, slots.tolist(), strict=True))
        slots = np.array([slot_of.pop(key, -1) for key in asked])
    return slots.astype("<i4").tobytes()
