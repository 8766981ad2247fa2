"""The contents of a tier: its own slots (`SlotCatalog`), or the answers of a medium with an index (`RemoteCatalog`).

A `JobTier` asks its catalog which blocks it can load and which it has to write, and never how the catalog knows. One
thread at a time calls a catalog, under the tier's lock; only the I/O threads begin a query without it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvcache.block import READY
from kvcache.control.pool import BlockPool
from kvcache.specs import block_ids_of
from kvcache.tiers.base.existence import ExistenceCache
from kvcache.tiers.base.io_threads import Task

if TYPE_CHECKING:
    import numpy.typing as npt

    from kvcache.request import ReqContext

MAX_QUERY_KEYS = 1024
"""Keys of one call of `exists` at most."""
_HELD_S = 10.0
"""For how long a key is taken for held after an answer."""
_MAX_REMEMBERED_KEYS = 1 << 20
_MAX_WITHHELD = 1 << 15
"""Slots that one call withholds at most; it bounds the scheduler's call."""
_AGAIN_S = 1.0
"""How long slots without space stay withheld. Then one is tried, later two, four, ..., until a store fails again."""


@dataclass(frozen=True, slots=True)
class TierContents:
    """The blocks that `open` found.

    Parameters
    ----------
    num_blocks : int
        Slots of the tier.
    keys : list of bytes
        The blocks in the tier, each once, least recently used first.
    slots : sequence of int
        Their slots.
    last_seq : int
        The largest sequence number of a block so far; the next store gets the one after it.
    """

    num_blocks: int
    keys: list[bytes] = field(default_factory=list)
    slots: Sequence[int] | npt.NDArray[np.int64] = ()
    last_seq: int = 0


class Placement(NamedTuple):
    """The blocks that a job has to move, those that cannot be loaded, and the keys that were evicted for a store.

    `slots`, and for stores `seqs`, have one number per key in a tier that owns its space.
    """

    keys: list[bytes]
    slots: list[int] | None
    seqs: list[int] | None
    missed: list[bytes]
    evicted: list[bytes]


class Catalog:
    """Holds no block: the catalog of a tier that has not opened yet, and the interface of the others."""

    last_seq = 0
    """The largest sequence number of a block so far."""

    @property
    def num_held(self) -> int:
        """Blocks that can be loaded, as far as known."""
        return 0

    @property
    def num_evicted(self) -> int:
        """Blocks evicted since the catalog was made."""
        return 0

    def find(self, keys: list[bytes]) -> int | None:
        """Return how many of the first keys can be loaded; None: not known yet."""
        return 0

    def begin_store(self, keys: list[bytes]) -> Placement | None:
        """Return which of `keys` have to be written, and where; None: too few blocks can be evicted for them."""
        return Placement([], None, None, [], [])

    def end_store(self, keys: list[bytes], stored: list[bytes]) -> None:
        """End the store of `keys`, which `begin_store` returned: the medium holds those in `stored`."""

    def withhold(self, has_space: npt.NDArray[np.bool_], under_way: list[bytes]) -> None:
        """Stop using the free slots without space for a while; `under_way` are the keys being written."""

    def begin_load(self, keys: list[bytes]) -> Placement:
        """Reference the blocks that can be loaded, and return them; the others are missed."""
        return Placement([], None, None, keys, [])

    def end_load(self, keys: list[bytes]) -> None:
        """Release the references."""

    def forget(self, lost: list[bytes], corrupt: Sequence[bytes] = ()) -> list[bytes]:
        """Count blocks as absent from now on; return those that were held. Those in `corrupt` until stored again."""
        return []

    def is_bad(self, key: bytes) -> bool:
        """Return whether the medium may hold a block that could not be read; any thread may ask."""
        return False

    def delete(self, keys: list[bytes]) -> list[bytes]:
        """Count blocks as absent until they are stored again, and evict them first; return those that were held."""
        return self.forget(keys, keys)

    def begin_erase(self) -> tuple[list[bytes], list[int]]:
        """Reference deleted blocks, so that their slots are not written, and return their slots."""
        return [], []

    def end_erase(self, keys: list[bytes], is_erased: bool) -> None:
        """Release the blocks of `begin_erase`, which returns those that were not erased again."""

    def touch(self, keys: list[bytes], req_context: ReqContext | None) -> list[int]:
        """Record a use of `keys`, in prefix order; return the slots of the held ones."""
        return []

    def end_request(self, req_context: ReqContext) -> None:
        """Order the blocks that a request used."""

    def hint(self, request_or_keys: ReqContext | list[bytes], next_use: str) -> None:
        """Apply a hint of next use; see `OffloadingManager.hint`."""

    def announce(self, max_blocks: int) -> list[bytes]:
        """Return the next blocks that were found at the start and are still held."""
        return []


class SlotCatalog(Catalog):
    """Places blocks in `num_blocks` slots; `keys` lie in `slots` already, each once, least recently used first.

    A `BlockPool` places and evicts the blocks, over slots instead of host memory. A bad or missing block is
    quarantined: it counts as absent and keeps its slot until it is evicted or its key is stored again.
    """

    def __init__(
        self,
        num_blocks: int,
        cache_policy: str | type,
        keys: list[bytes],
        slots: Sequence[int] | npt.NDArray[np.int64],
        last_seq: int = 0,
    ) -> None:
        self.last_seq = last_seq
        self._blocks = BlockPool(num_blocks, cache_policy)
        # A store names the tail of a prompt first. A policy that keeps paths needs the head first.
        self._keeps_paths = self._blocks.policy.reads_clock
        self._bad: set[bytes] = set()
        self._deleted: set[bytes] = set()
        self._unannounced = deque(keys)
        # Ids of slots for which the disk had no room; how many of them to try next, and at what time.
        self._withheld: list[int] = []
        self._num_again, self._again_s = 1, 0.0
        # The pool numbers the blocks that were found 0, 1, 2, ..., in the order of their use.
        self._slot_of: npt.NDArray[np.int64] | None = None
        if keys:
            places = np.asarray(slots, np.int64)
            if self._keeps_paths:
                # A use stamps the head of its prompt last.
                keys, places = keys[::-1], places[::-1]
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
        blocks = self._blocks
        return blocks.num_blocks - blocks.num_free - blocks.num_pending - len(self._bad) - len(self._withheld)

    @property
    def num_evicted(self) -> int:
        return self._blocks.evicted_blocks

    def find(self, keys: list[bytes]) -> int:
        num_held = self._blocks.match_prefix(keys)
        if self._bad:
            return next((i for i in range(num_held) if keys[i] in self._bad), num_held)
        return num_held

    def begin_store(self, keys: list[bytes]) -> Placement | None:
        missed: list[bytes] = []
        if self._withheld:
            self._try_again()
        while (output := self._blocks.reserve(keys[::-1] if self._keeps_paths else keys)) is None:
            if not self._withheld or len(keys) < 2:
                return None
            # More keys than slots with space: drop the first half. The head of a prefix is last.
            middle = len(keys) // 2
            missed += keys[:middle]
            keys = keys[middle:]
        placed, slots = output.keys_to_store, self._slots(block_ids_of(output.store_spec))
        if self._bad:
            self._bad.difference_update(output.evicted_keys)
            again = [key for key in dict.fromkeys(keys) if key in self._bad and self._is_unused(key)]
            placed, slots = placed + again, slots + self._pin(again)
            self._deleted.difference_update(again)
        first_seq = self.last_seq + 1
        self.last_seq += len(placed)
        return Placement(placed, slots, list(range(first_seq, self.last_seq + 1)), missed, output.evicted_keys)

    def withhold(self, has_space: npt.NDArray[np.bool_], under_way: list[bytes]) -> None:
        blocks = [self._blocks.policy.get(key) for key in under_way]
        taken = {block.block_id for block in blocks if block is not None}.union(self._withheld)
        ids = np.flatnonzero(~(has_space if self._slot_of is None else has_space[self._slot_of]))
        free = [block_id for block_id in ids.tolist() if block_id not in taken][:_MAX_WITHHELD]
        self._blocks.withhold(free)
        self._withheld += free
        self._num_again, self._again_s = 1, time.monotonic() + _AGAIN_S

    def _try_again(self) -> None:
        """Free some of the withheld slots, if it is time: the disk may have room again."""
        if time.monotonic() >= self._again_s:
            self._blocks.give_back(self._withheld[-self._num_again :])
            del self._withheld[-self._num_again :]
            self._num_again, self._again_s = 2 * self._num_again, time.monotonic() + _AGAIN_S

    def end_store(self, keys: list[bytes], stored: list[bytes]) -> None:
        again = [key for key in keys if key in self._bad] if self._bad else []
        if again:
            self._blocks.unpin(again)
            # A store that failed may have left the old record.
            self._deleted.update(set(again).difference(stored))
            # A use cancels the "end" hint of `delete`.
            self._blocks.touch(again)
        if self._bad:
            self._bad.difference_update(stored)
        if len(stored) < len(keys):
            written = set(stored)
            self._blocks.abort([key for key in keys if key not in written])
        self._blocks.commit(stored)

    def begin_load(self, keys: list[bytes]) -> Placement:
        held, missed = self._split_held(keys)
        return Placement(held, self._pin(held), None, missed, [])

    def end_load(self, keys: list[bytes]) -> None:
        self._blocks.unpin(keys)

    def forget(self, lost: list[bytes], corrupt: Sequence[bytes] = ()) -> list[bytes]:
        held = list(dict.fromkeys(self._split_held(lost)[0]))
        self._bad.update(held)
        return held

    def touch(self, keys: list[bytes], req_context: ReqContext | None) -> list[int]:
        self._blocks.touch(keys, req_context)
        num_held = self.find(keys)
        self.last_seq += num_held
        return self._slots(np.array(self._blocks.locate(keys[:num_held]), np.int64))

    def end_request(self, req_context: ReqContext) -> None:
        self._blocks.end_request(req_context)

    def hint(self, request_or_keys: ReqContext | list[bytes], next_use: str) -> None:
        self._blocks.hint(request_or_keys, next_use)

    def delete(self, keys: list[bytes]) -> list[bytes]:
        held = self.forget(keys)
        if held:
            self._deleted.update(held)
            self._blocks.hint(held, "end")
        return held

    def begin_erase(self) -> tuple[list[bytes], list[int]]:
        self._deleted &= self._bad
        keys = list(self._deleted)
        return keys, self._pin(keys)

    def end_erase(self, keys: list[bytes], is_erased: bool) -> None:
        self.end_load(keys)
        if is_erased:
            self._deleted.difference_update(keys)

    def announce(self, max_blocks: int) -> list[bytes]:
        if not self._unannounced:
            return []
        keys = [self._unannounced.popleft() for _ in range(min(len(self._unannounced), max_blocks))]
        return self._split_held(keys)[0]

    def _split_held(self, keys: list[bytes]) -> tuple[list[bytes], list[bytes]]:
        if self.find(keys) == len(keys):
            return keys, []
        held = {key for key, state in zip(keys, self._blocks.states(keys), strict=True) if state == READY} - self._bad
        return [key for key in keys if key in held], [key for key in keys if key not in held]

    def _pin(self, keys: list[bytes]) -> list[int]:
        return self._slots(block_ids_of(self._blocks.pin(keys)))

    def _is_unused(self, key: bytes) -> bool:
        # A block that is being rewritten has a reference. Two writers of one slot would tear it.
        block = self._blocks.policy.get(key)
        return block is not None and block.ref_cnt == 0

    def _slots(self, ids: npt.NDArray[np.int64]) -> list[int]:
        slots: list[int] = (ids if self._slot_of is None else self._slot_of[ids]).tolist()
        return slots


class ExistenceQuery(Task):
    """Asks a medium which keys it holds, as a task of an I/O thread; it takes waiting keys once it begins."""

    def __init__(
        self, waiting: deque[bytes], exists: Callable[[list[bytes]], Sequence[bool]], existence: ExistenceCache
    ) -> None:
        self.keys: list[bytes] = []
        self._is_held: list[bool] = []
        self._waiting = waiting
        self._exists = exists
        # That of the catalog that asks, which a reset may replace.
        self._existence = existence

    def run(self) -> None:
        """Ask the medium."""
        with suppress(IndexError):
            while len(self.keys) < MAX_QUERY_KEYS:
                self.keys.append(self._waiting.popleft())
        answers = [bool(answer) for answer in self._exists(self.keys)] if self.keys else []
        if len(answers) != len(self.keys):
            raise ValueError(f"exists answered {len(answers)} of {len(self.keys)} keys")
        self._is_held = answers

    def end(self) -> None:
        """Remember the answers."""
        # What could not be asked counts as absent for a while, so that it is not asked at once again.
        is_held = self._is_held or [False] * len(self.keys)
        self._existence.answer(self.keys, is_held, time.monotonic())


class RemoteCatalog(Catalog):
    """Asks a medium that keeps its own index, `MAX_QUERY_KEYS` a call of `exists`, and remembers its answers.

    `submit` hands a query to the I/O threads. `absent_s` and `deadline_s` are those of an `ExistenceCache`.
    """

    def __init__(
        self,
        exists: Callable[[list[bytes]], Sequence[bool]],
        submit: Callable[[ExistenceQuery], None],
        absent_s: float,
        deadline_s: float,
    ) -> None:
        self._existence = ExistenceCache(_HELD_S, absent_s, deadline_s, _MAX_REMEMBERED_KEYS)
        self._exists = exists
        self._submit = submit
        self._bad: set[bytes] = set()
        # An engine may look up one key a call, so a query takes all that wait, and those after it find none.
        self._waiting: deque[bytes] = deque()

    @property
    def num_held(self) -> int:
        return self._existence.num_held

    def find(self, keys: list[bytes]) -> int | None:
        now_s = time.monotonic()
        if self._bad:
            keys = keys[: next((i for i, key in enumerate(keys) if key in self._bad), len(keys))]
        num_held, unknown, is_waiting = self._existence.count_held(keys, now_s)
        self._existence.ask(unknown, now_s)
        self._waiting += unknown
        for _ in range(0, len(unknown), MAX_QUERY_KEYS):
            self._submit(ExistenceQuery(self._waiting, self._exists, self._existence))
        return None if unknown or is_waiting else num_held

    def begin_store(self, keys: list[bytes]) -> Placement:
        now_s = time.monotonic()
        absent = [key for key in keys if key in self._bad or not self._existence.is_held(key, now_s)]
        return Placement(absent, None, None, [], [])

    def end_store(self, keys: list[bytes], stored: list[bytes]) -> None:
        self._bad.difference_update(stored)
        self._existence.learn(stored, True, time.monotonic())

    def begin_load(self, keys: list[bytes]) -> Placement:
        missed = [key for key in keys if key in self._bad]
        return Placement([key for key in keys if key not in self._bad], None, None, missed, [])

    def is_bad(self, key: bytes) -> bool:
        return key in self._bad

    def forget(self, lost: list[bytes], corrupt: Sequence[bytes] = ()) -> list[bytes]:
        now_s = time.monotonic()
        held = [key for key in lost if self._existence.is_held(key, now_s)]
        self._existence.learn(lost, False, now_s)
        self._bad.update(corrupt)
        return held
