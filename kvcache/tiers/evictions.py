"""Evict ahead of need into the tiers that want evicted blocks.

A block that leaves host memory must be written before its slot is used again, and a scheduler cannot wait for that.
So a few slots are kept free: whenever they run low, the policy's next victims are evicted early, and stand-in keys
keep their slots until the tiers have written them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

from kvcache.tiers.lane import Lane, Move
from kvcache.types import PrepareStoreOutput

if TYPE_CHECKING:
    from kvcache.policies.verbs import BatchVerbs
    from kvcache.types import BlockIDsLoadStoreSpec, LoadStoreSpec

_LEAST_SHARE, _MOST_SHARE = 16, 4
"""One slot in so many is kept free, at least and at most; in between, as many as a step has needed of late."""


class EvictionReserve:
    """The slots kept free, and the blocks on their way out.

    Parameters
    ----------
    verbs : BatchVerbs
        Of the host pool.
    num_blocks : int
        Slots of the host pool.
    lanes : list of Lane
        The tiers that want evicted blocks.

    Attributes
    ----------
    leaving : dict of bytes to int
        Keys that are being written, and by how many tiers.
    """

    def __init__(self, verbs: BatchVerbs, num_blocks: int, lanes: list[Lane]) -> None:
        self._verbs = verbs
        self._lanes = lanes
        self._least = max(1, num_blocks // _LEAST_SHARE)
        self._most = max(1, num_blocks // _MOST_SHARE)
        self._num_needed = 0
        self._peak = 0
        self._prefix = os.urandom(16)
        self._num_users: dict[bytes, int] = {}
        self._block_ids: dict[bytes, int] = {}
        self._key_at: dict[int, bytes] = {}
        self.leaving: dict[bytes, int] = {}

    def note(self, output: PrepareStoreOutput, now_s: float) -> None:
        """Remember where blocks lie; those that were evicted without being written are lost, and counted."""
        self._num_needed += len(output.keys_to_store)
        for key in output.evicted_keys:
            self._block_ids.pop(key, None)
            for lane in self._lanes:
                if not lane.lookup([key], now_s):
                    lane.dropped_blocks += 1
        for key, block_id in zip(output.keys_to_store, block_ids_of(output), strict=True):
            # A key that was dropped before it became ready gave its slot away without a word.
            former = self._key_at.get(block_id)
            if former is not None and self._block_ids.get(former) == block_id:
                del self._block_ids[former]
            self._key_at[block_id] = key
            self._block_ids[key] = block_id

    def refill(self, job_ids: Iterator[int], now_s: float) -> list[bytes]:
        """Evict and write as many blocks as are missing in the reserve; return their keys."""
        self._peak = max(self._num_needed, self._peak - self._peak // 64)
        self._num_needed = 0
        num_wanted = min(self._most, max(self._least, self._peak))
        lanes = [lane for lane in self._lanes if lane.may_store(now_s)]
        room = min((lane.store_room for lane in lanes), default=0)
        num_free = self._verbs.num_free
        num_victims = min(room, num_wanted - num_free - len(self._num_users))
        if num_victims <= 0:
            return []
        # Free slots are handed out before any block leaves, so stand-ins take them too, and give them back.
        names = [self._prefix + next(job_ids).to_bytes(8, "big") for _ in range(num_free + num_victims)]
        output = self._verbs.reserve(names, None, None)
        if output is None:
            return []
        victims = output.evicted_keys
        block_ids = [self._block_ids.pop(key) for key in victims]
        name_at = dict(zip(block_ids_of(output), names, strict=True))
        stand_ins = [name_at.pop(block_id) for block_id in block_ids]
        self._verbs.abort(list(name_at.values()), None)
        _raise_all(self._num_users, stand_ins)
        for lane in lanes:
            move = Move(next(job_ids), lane, False, victims, now_s + lane.rule.deadline_s, stand_ins)
            if lane.send(move, block_ids):
                _raise_all(self._num_users, stand_ins)
                _raise_all(self.leaving, victims)
            else:
                lane.dropped_blocks += len(victims)
        self._verbs.abort(_lower_all(self._num_users, stand_ins), None)
        return victims

    def give_up(self, move: Move) -> None:
        """Hear that nobody waits for a job any more."""
        if move.stand_ins:
            _lower_all(self.leaving, move.keys)

    def end(self, move: Move) -> None:
        """Hear that a job has ended: its slots are free."""
        if not move.is_overdue:
            _lower_all(self.leaving, move.keys)
        self._verbs.abort(_lower_all(self._num_users, move.stand_ins), None)

    def clear(self) -> None:
        """Forget where blocks lie; nothing is under way."""
        self._block_ids.clear()
        self._key_at.clear()


def block_ids_of(output: PrepareStoreOutput | LoadStoreSpec) -> list[int]:
    """Return the slots that a manager named."""
    spec = output.store_spec if isinstance(output, PrepareStoreOutput) else output
    ids: list[int] = cast("BlockIDsLoadStoreSpec", spec).block_ids.tolist()
    return ids


def _raise_all(counts: dict[bytes, int], keys: list[bytes]) -> None:
    for key in keys:
        counts[key] = counts.get(key, 0) + 1


def _lower_all(counts: dict[bytes, int], keys: list[bytes]) -> list[bytes]:
    """Count down, and return the keys whose count has come to nothing."""
    gone = []
    for key in keys:
        counts[key] -= 1
        if not counts[key]:
            del counts[key]
            gone.append(key)
    return gone
