"""The index of a tier that owns its space: the slot of each block, eviction, and bad blocks.

A `BlockPool` places and evicts blocks, over slots instead of host memory. A bad or missing block is quarantined: it
counts as absent and keeps its slot until it is evicted or its key is stored again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np

from kvcache.control.pool import BlockPool

if TYPE_CHECKING:
    import numpy.typing as npt

    from kvcache.request import ReqContext
    from kvcache.specs import BlockIDsLoadStoreSpec, LoadStoreSpec


_READY = 2


class Placement(NamedTuple):
    """Slots for the blocks of a store, in the order of `keys`, and the keys that were evicted for them."""

    keys: list[bytes]
    slots: list[int]
    evicted: list[bytes]


class SlotIndex:
    """Places blocks in `num_blocks` slots; `keys` lie in `slots` already, each once, least recently used first."""

    def __init__(
        self, num_blocks: int, cache_policy: str | type, keys: list[bytes], slots: Sequence[int] | npt.NDArray[np.int64]
    ) -> None:
        self.num_blocks = num_blocks
        self._blocks = BlockPool(num_blocks, cache_policy)
        # A store names the tail of a prompt first. A policy that keeps paths needs the head first.
        self._keeps_paths = self._blocks.policy.reads_clock
        self._bad: set[bytes] = set()
        # The pool numbers the blocks that were found 0, 1, 2, ..., in the order of their use.
        self._slot_of: npt.NDArray[np.int64] | None = None
        if keys:
            places = np.asarray(slots, np.int64)
            output = self._blocks.reserve(keys, is_move=True)
            if output is None or len(output.keys_to_store) != len(keys) or len(places) != len(keys):
                raise ValueError(f"{len(keys)} keys in {len(places)} slots of {num_blocks} are not one slot for each")
            self._blocks.commit(keys, is_move=True)
            is_free = np.ones(num_blocks, np.bool_)
            is_free[places] = False
            if num_blocks - int(is_free.sum()) != len(keys):
                raise ValueError(f"{len(keys)} keys share slots")
            self._slot_of = np.concatenate([places, np.flatnonzero(is_free)])

    @property
    def num_held(self) -> int:
        """Blocks that can be loaded."""
        blocks = self._blocks
        return blocks.num_blocks - blocks.num_free - blocks.num_pending - len(self._bad)

    @property
    def num_evicted(self) -> int:
        """Blocks evicted since start."""
        return self._blocks.evicted_blocks

    def count_held(self, keys: list[bytes]) -> int:
        """Return how many of the first keys are held."""
        num_held = self._blocks.match_prefix(keys)
        if self._bad:
            return next((i for i in range(num_held) if keys[i] in self._bad), num_held)
        return num_held

    def split_held(self, keys: list[bytes]) -> tuple[list[bytes], list[bytes]]:
        """Return the keys that are held, and those that are not."""
        if self.count_held(keys) == len(keys):
            return keys, []
        held = {key for key, state in zip(keys, self._blocks.states(keys), strict=True) if state == _READY} - self._bad
        return [key for key in keys if key in held], [key for key in keys if key not in held]

    def touch(self, keys: list[bytes], req_context: ReqContext | None) -> None:
        """Record a use of `keys`, in prefix order."""
        self._blocks.touch(keys, req_context)

    def locate(self, keys: list[bytes]) -> list[int]:
        """Return the slots of held blocks."""
        return self._slots(np.array(self._blocks.locate(keys), np.int64))

    def end_request(self, req_context: ReqContext) -> None:
        """Order the blocks that a request used."""
        self._blocks.end_request(req_context)

    def place(self, keys: list[bytes]) -> Placement | None:
        """Reserve a slot for each key that is not held; return None if too few blocks can be evicted for them."""
        output = self._blocks.reserve(keys[::-1] if self._keeps_paths else keys)
        if output is None:
            return None
        placed, slots = output.keys_to_store, self._slots(_block_ids(output.store_spec))
        if self._bad:
            self._bad.difference_update(output.evicted_keys)
            again = [key for key in dict.fromkeys(keys) if key in self._bad and self._is_unused(key)]
            placed, slots = placed + again, slots + self.pin(again)
        return Placement(placed, slots, output.evicted_keys)

    def end_store(self, keys: list[bytes], done: list[bytes]) -> None:
        """End the store of placed blocks: those in `done` are held now, the others are dropped."""
        again = [key for key in keys if key in self._bad] if self._bad else []
        if again:
            self._blocks.unpin(again)
        if self._bad:
            self._bad.difference_update(done)
        if len(done) < len(keys):
            written = set(done)
            self._blocks.abort([key for key in keys if key not in written])
        self._blocks.commit(done)

    def pin(self, keys: list[bytes]) -> list[int]:
        """Reference held blocks and return their slots."""
        return self._slots(_block_ids(self._blocks.pin(keys)))

    def unpin(self, keys: list[bytes]) -> None:
        """Release the references."""
        self._blocks.unpin(keys)

    def quarantine(self, keys: list[bytes]) -> list[bytes]:
        """Count blocks as absent from now on; return those that were held until now."""
        fresh = list(dict.fromkeys(self.split_held(keys)[0]))
        self._bad.update(fresh)
        return fresh

    def _is_unused(self, key: bytes) -> bool:
        # A block that is being rewritten has a reference. Two writers of one slot would tear it.
        block = self._blocks.policy.get(key)
        return block is not None and block.ref_cnt == 0

    def _slots(self, ids: npt.NDArray[np.int64]) -> list[int]:
        slots: list[int] = (ids if self._slot_of is None else self._slot_of[ids]).tolist()
        return slots


def _block_ids(spec: LoadStoreSpec) -> npt.NDArray[np.int64]:
    return cast("BlockIDsLoadStoreSpec", spec).block_ids
