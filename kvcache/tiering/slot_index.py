"""The index of a tier that owns its space: which block lies in which slot, what leaves, and which blocks are bad.

Placement and eviction are a manager's like the host pool's own, over slots instead of host memory. What a restart
found is handed to a fresh one, least recently used first, so that recency comes back as order; it numbers blocks
0, 1, 2, ... in that order, and `_slot_of` translates its numbers to slots.

A block that was found bad or gone is quarantined: it is answered as absent and keeps its slot until it is evicted, or
until the same key is stored again and written anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np

from kvcache.control.cpu import CPUOffloadingManager

if TYPE_CHECKING:
    import numpy.typing as npt

    from kvcache.request import ReqContext
    from kvcache.specs import BlockIDsLoadStoreSpec, LoadStoreSpec


class Placement(NamedTuple):
    """Where the blocks of a store go: `keys` and `slots` in the same order, and the keys that were evicted for them."""

    keys: list[bytes]
    slots: list[int]
    evicted: list[bytes]


class SlotIndex:
    """Place blocks in slots.

    Parameters
    ----------
    num_blocks : int
        Slots, >= 1.
    cache_policy : str or type
        What leaves when all are taken.
    keys : list of bytes
        Blocks that are there already, each once, least recently used first.
    slots : sequence of int
        Where they lie.
    """

    def __init__(
        self, num_blocks: int, cache_policy: str | type, keys: list[bytes], slots: Sequence[int] | npt.NDArray[np.int64]
    ) -> None:
        self.num_blocks = num_blocks
        self._blocks = CPUOffloadingManager(1, num_blocks, cache_policy)
        self._bad: set[bytes] = set()
        self._num_restored = len(keys)
        self._slot_of: npt.NDArray[np.int64] | None = None
        if keys:
            places = np.asarray(slots, np.int64)
            output = self._blocks.prepare_store(keys)
            if output is None or len(output.keys_to_store) != len(keys) or len(places) != len(keys):
                raise ValueError(f"{len(keys)} keys in {len(places)} slots of {num_blocks} are not one slot for each")
            self._blocks.complete_store(keys)
            is_free = np.ones(num_blocks, np.bool_)
            is_free[places] = False
            if num_blocks - int(is_free.sum()) != len(keys):
                raise ValueError(f"{len(keys)} keys share slots")
            self._slot_of = np.concatenate([places, np.flatnonzero(is_free)])

    @property
    def num_held(self) -> int:
        """Blocks that can be loaded."""
        stats = self._blocks.stats()
        return stats.num_blocks - stats.num_free - stats.num_pending - len(self._bad)

    @property
    def num_stored(self) -> int:
        """Blocks stored since start, what was found there not counted."""
        return self._blocks.stats().stored_blocks - self._num_restored

    @property
    def num_evicted(self) -> int:
        """Blocks evicted since start."""
        return self._blocks.stats().evicted_blocks

    def count_held(self, keys: list[bytes]) -> int:
        """Return how many of the first keys are held."""
        num_held: int = self._blocks.lookup(keys)
        if self._bad:
            return next((i for i in range(num_held) if keys[i] in self._bad), num_held)
        return num_held

    def split_held(self, keys: list[bytes]) -> tuple[list[bytes], list[bytes]]:
        """Return the keys that are held, and those that are not."""
        if self.count_held(keys) == len(keys):
            return keys, []
        is_held = [self.count_held([key]) == 1 for key in keys]
        return (
            [key for key, one in zip(keys, is_held, strict=True) if one],
            [key for key, one in zip(keys, is_held, strict=True) if not one],
        )

    def touch(self, keys: list[bytes], req_context: ReqContext | None) -> None:
        """Note a use, in prefix order."""
        self._blocks.touch(keys, req_context)

    def locate(self, keys: list[bytes]) -> list[int]:
        """Return the slots of held blocks."""
        slots = self.pin(keys)
        self._blocks.complete_load(keys)
        return slots

    def end_request(self, req_context: ReqContext) -> None:
        """Order what a request used."""
        self._blocks.on_request_finished(req_context)

    def place(self, keys: list[bytes]) -> Placement | None:
        """Give a slot to each key that is not held, evicting as many blocks as needed; None if too few can leave."""
        output = self._blocks.prepare_store(keys)
        if output is None:
            return None
        placed, slots = output.keys_to_store, self._slots(output.store_spec)
        if self._bad:
            self._bad.difference_update(output.evicted_keys)
            again = [key for key in dict.fromkeys(keys) if key in self._bad and self._is_unused(key)]
            placed, slots = placed + again, slots + self.pin(again)
        return Placement(placed, slots, output.evicted_keys)

    def end_store(self, keys: list[bytes], done: list[bytes]) -> None:
        """Take placed blocks over: what is in `done` was written, the rest leaves."""
        again = [key for key in keys if key in self._bad] if self._bad else []
        if again:
            self._blocks.complete_load(again)
        self._bad.difference_update(done)
        if len(done) < len(keys):
            written = set(done)
            self._blocks.complete_store([key for key in keys if key not in written], success=False)
        self._blocks.complete_store(done)

    def pin(self, keys: list[bytes]) -> list[int]:
        """Take a reference on held blocks and return their slots."""
        return self._slots(self._blocks.prepare_load(keys))

    def unpin(self, keys: list[bytes]) -> None:
        """Give the references back."""
        self._blocks.complete_load(keys)

    def quarantine(self, keys: list[bytes]) -> list[bytes]:
        """Answer blocks as absent from now on; return those that were held until now."""
        fresh = [key for key in dict.fromkeys(keys) if key not in self._bad and self._blocks.lookup(key)]
        self._bad.update(fresh)
        return fresh

    def _is_unused(self, key: bytes) -> bool:
        # One that is being rewritten already has a reference, and two writers of one slot would tear it.
        block = self._blocks.policy.get(key)
        return block is not None and block.ref_cnt == 0

    def _slots(self, spec: LoadStoreSpec) -> list[int]:
        ids = cast("BlockIDsLoadStoreSpec", spec).block_ids
        slots: list[int] = (ids if self._slot_of is None else self._slot_of[ids]).tolist()
        return slots
