"""The interface of replacement policies: five primitives, and the batch operations. Read this first.

A policy consists of five primitives. A manager calls only batch operations. Their defaults
(`kvcache.control.generic_cache`) use the five primitives; compiled policies implement their own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Iterable
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from kvcache.options import check_int

if TYPE_CHECKING:
    from kvcache.block import BlockStatus
    from kvcache.core.event_log import EventLog
    from kvcache.specs import LoadStoreSpec, PrepareStoreOutput


class RequestUses:
    """The keys that one request has used, in the order of first use, as seen by a policy.

    Attributes
    ----------
    keys : dict
        Each used key and its position in the prompt, or, if unknown, the position of the key used before it.
    positions : dict or None
        Positions in the prompt of the request's keys, used or not, as far as the engine knows. It may grow.
    next_use : str or None
        Next use of the request's blocks: ``"end"`` (never), ``"soon"`` or ``"later"``. None if no hint was given.
    stored : dict
        The blocks that it has stored.
    has_ended : bool
        Whether the request has ended.
    policy_state : object
        State that the policy keeps for the request; initially None.
    """

    __slots__ = (
        "_num_read",
        "_positioned",
        "_predecessors",
        "epoch",
        "has_ended",
        "keys",
        "last_position",
        "next_use",
        "policy_state",
        "positions",
        "stored",
    )

    def __init__(self, next_use: str | None = None) -> None:
        self.positions: dict[bytes, int] | None = None
        self.next_use = next_use
        self.epoch: object = None
        self.has_ended = False
        self.forget()

    def forget(self) -> None:
        """Clear all keys, after a reset of the cache."""
        self.keys: dict[bytes, int] = {}
        self.stored: dict[bytes, BlockStatus] = {}
        self.policy_state: Any = None
        self.last_position: int | None = None
        self._num_read = 0
        self._positioned: set[bytes] = set()
        self._predecessors: dict[bytes, bytes | None] = {}

    @property
    def num_seen(self) -> int:
        """Keys used so far."""
        return len(self.keys)

    @property
    def length(self) -> int:
        """Number of the request's keys, used or not, whose positions are known."""
        return self._num_read

    def __contains__(self, key: object) -> bool:
        return key in self.keys

    def read_positions(self) -> None:
        """Read the positions added since the last call. Changed positions are ignored."""
        if self.positions is not None:
            for position in islice(self.positions.values(), self._num_read, None):
                self.last_position = position if self.last_position is None else max(position, self.last_position)
                self._num_read += 1

    def add(self, keys: list[bytes]) -> None:
        """Append keys that the request uses for the first time."""
        positions = self.positions if self._num_read and self.positions is not None else {}
        last = next(reversed(self.keys.values())) if self.keys else -1
        for key in keys:
            if key in positions:
                self._positioned.add(key)
            last = self.keys[key] = positions.get(key, last)

    def take_back(self, keys: list[bytes]) -> None:
        """Remove the keys added last, because counting their use failed."""
        for key in keys:
            del self.keys[key]
            self._positioned.discard(key)

    def is_last(self, key: bytes) -> bool:
        """Return whether no known position of the request is greater than that of `key`."""
        return key in self._positioned and self.keys[key] == self.last_position

    def predecessor(self, key: bytes) -> bytes | None:
        """Return the used key before `key` in the prompt, or None at the head."""
        if len(self._predecessors) != len(self.keys):
            ordered = sorted(self.keys, key=self.keys.__getitem__)
            self._predecessors = dict(zip(ordered, [None, *ordered], strict=False))
        return self._predecessors[key]


class CachePolicy(ABC):
    """Decide which blocks to evict when room is needed.

    Parameters
    ----------
    cache_capacity : int
        Capacity of the cache in blocks, >= 1.

    Raises
    ------
    ValueError
        The capacity is not a positive int.

    Notes
    -----
    A policy that implements `get`, `insert`, `remove`, `touch` and `evict` runs under every manager. The other methods
    have defaults. A policy keeps the `BlockStatus` objects that it is given. Their `ref_cnt` changes meanwhile, and
    `evict` must skip a block whose `ref_cnt` is not 0.
    """

    declines: ClassVar[bool] = False
    """Whether it may take fewer keys than a store offers; a store is then never refused, and `make_room` is asked."""

    reads_clock: ClassVar[bool] = False
    """Whether the manager sets `now_ms`, a time in milliseconds, before the first use that a request counts."""

    group_policy: ClassVar[str | None] = None
    """The policy that replaces it for models with several KV-cache groups; it has `set_group_windows`."""

    stores_all: bool = False
    """Set by a manager with tiers below: `make_room` must take every key for which blocks can leave."""

    def __init__(self, cache_capacity: int) -> None:
        self.cache_capacity = check_int("cache_capacity", cache_capacity)

    @abstractmethod
    def get(self, key: bytes) -> BlockStatus | None:
        """Return the block of `key` (the object that was inserted), or None. This does not count as a use."""

    @abstractmethod
    def insert(self, key: bytes, block: BlockStatus) -> None:
        """Insert a block at the most-recent end.

        Parameters
        ----------
        key : bytes
            A key that is not in the cache.
        block : BlockStatus
            The block to keep. Its `ref_cnt` changes while it is in the cache.
        """

    @abstractmethod
    def remove(self, key: bytes) -> None:
        """Remove a block without remembering it. Raise KeyError if it is not in the cache."""

    @abstractmethod
    def touch(self, keys: Iterable[bytes]) -> None:
        """Count one use of each key, from last to first. Unknown keys are ignored."""

    @abstractmethod
    def evict(self, n: int, protected: Container[bytes]) -> list[tuple[bytes, BlockStatus]] | None:
        """Evict exactly `n` ready, unreferenced, unprotected blocks. If fewer are eligible, return None.

        Parameters
        ----------
        n : int
            Number of blocks to evict, >= 0.
        protected : container of bytes
            Keys that must not be evicted.

        Returns
        -------
        list of (bytes, BlockStatus), or None
            Exactly `n` victims in eviction order. If fewer are eligible, None, and nothing changes.
        """

    def gauges(self) -> dict[str, float]:
        """Return the policy's current gauges by name. May be called from any thread; must be cheap and change nothing.

        Exporters publish each as ``kvcache_policy_quantity``, with its name as a label. Empty by default.
        """
        return {}

    def order(self, keys: Iterable[bytes]) -> None:  # noqa: B027
        """Move each key, from last to first, to the most-recent end of its list. Count no use.

        The default does nothing.
        """

    def demote(self, keys: Iterable[bytes]) -> None:  # noqa: B027
        """Move each key, from first to last, to the least-recent end: the last one is evicted first.

        Nothing is expected to use these blocks; a use undoes it. Unknown keys are ignored. The default does nothing.
        """

    def use(self, keys: list[bytes], first: bool) -> None:
        """Count one use of each key for one request. `first` is true on the first call for that request.

        A policy whose clock counts requests advances it only if `first`. The default is `touch`.
        """
        self.touch(keys)

    def count_uses(self, keys: list[bytes], request: RequestUses) -> None:
        """Count one use of each key that `request` has just used for the first time. The keys are distinct.

        The default is `use`.
        """
        self.use(keys, first=len(request.keys) == len(keys))

    def make_room(
        self, keys: list[bytes], num_free: int, offered: list[bytes], request: RequestUses | None
    ) -> tuple[int, list[tuple[bytes, BlockStatus]]]:
        """Return how many leading `keys` to store, and the blocks to evict for them.

        Parameters
        ----------
        keys : list of bytes
            Absent keys, in prefix order. The accepted keys are inserted next.
        num_free : int
            Free slots. Victims are needed only for keys beyond this number.
        offered : list of bytes
            All distinct keys of the call. They must not be evicted.
        request : RequestUses or None
            The request, which has already used the keys.

        Returns
        -------
        tuple of (int, list of (bytes, BlockStatus))
            Number of accepted keys, and victims in eviction order.

        Notes
        -----
        Called only if `declines` is true. The default accepts all keys, or none.
        """
        victims = self.evict(max(0, len(keys) - num_free), set(offered))
        return (0, []) if victims is None else (len(keys), victims)

    def hint(self, keys: list[bytes], next_use: str) -> None:  # noqa: B027
        """Handle a hint for keys that arrives after their use: ``"end"``, ``"soon"`` or ``"later"``.

        The default does nothing. A hint given at the start of a request is in `RequestUses.next_use`.

        Parameters
        ----------
        keys : list of bytes
            In prefix order. Unknown keys are ignored.
        next_use : str
            When the keys will be used next.
        """

    def clear(self) -> None:
        """Forget everything, including ghosts and adaptive state.

        The default raises NotImplementedError; the manager then creates a new instance.
        """
        raise NotImplementedError

    def native(self, num_blocks: int) -> BlockCacheOps | None:
        """Return the policy's own batch operations over a pool of `num_blocks` slots, or None to use the default ones.

        A compiled policy returns a compiled cache over its own table, once.
        """
        return None


class BlockCacheOps(Protocol):
    """The operations of a policy that a manager calls, each with a list of keys.

    `request_keys` is the object that `open_request` returned, or None if the request is unknown. Every operation checks
    all its keys before it changes anything.
    """

    lookups: int
    looked_up_blocks: int
    hit_blocks: int
    gated_blocks: int

    @property
    def declined_blocks(self) -> int:
        """Gated blocks that the policy declined to store."""

    @property
    def num_free(self) -> int:
        """Slots that hold no block."""

    @property
    def num_referenced(self) -> int:
        """Blocks with at least one reference."""

    @property
    def num_pending(self) -> int:
        """Blocks being written."""

    def current_policy(self) -> CachePolicy:
        """Return the policy. After `reset`, it may be another object."""

    def keep_events(self, events: EventLog, medium: str) -> None:
        """Append an event to `events` for each change of `medium`, in the step that makes it. Called once, at first."""

    def open_request(self, next_use: str | None = None, num_keys: int = 0) -> Any:
        """Return the (empty) keys of a new request, with its hint of next use.

        `num_keys` is an estimate of the number of keys that the request will name.
        """

    def advance(self, elapsed_s: float) -> None:
        """Set the time of a policy that reads the clock."""

    def needs_time(self, request_keys: Any, positions: dict[bytes, int] | None) -> bool:
        """Set the request's positions. Return whether `advance` must be called, as before its first use of a key."""

    def has_used(self, request_keys: Any) -> bool:
        """Return whether a request has used a key since the last reset."""

    def lookup(self, keys: list[bytes], request_keys: Any) -> int:
        """Return the number of leading keys that are ready, and count the look-up."""

    def match_prefix(self, keys: list[bytes], request_keys: Any, start: int = 0) -> int:
        """Return the end of the run of ready keys that begins at `start` (`start` itself if that key is not ready).

        This counts neither a look-up nor a use.
        """

    def status_of(self, key: bytes) -> int:
        """Return the `BlockState` of one key, and count the look-up."""

    def status(self, keys: list[bytes]) -> bytes:
        """Return the `BlockState` of each key as one byte."""

    def locate(self, keys: list[bytes]) -> list[int]:
        """Return the id of each key's block, or -1 if it is absent or being written. Take no reference."""

    def touch(self, keys: list[bytes], request_keys: Any) -> None:
        """Count a use of each key (once per request), then order the keys that were counted before."""

    def pin(self, keys: list[bytes], request_keys: Any) -> LoadStoreSpec:
        """Take a reference on each key's block, and return the blocks' locations."""

    def unpin(self, keys: list[bytes], request_keys: Any) -> None:
        """Release one reference per key."""

    def reserve(
        self, keys: list[bytes], request_keys: Any, admit: bytearray | None = None
    ) -> PrepareStoreOutput | None:
        """Reserve slots for the absent keys (with `admit`, those marked 1). Return None if they do not fit."""

    def commit(self, keys: list[bytes], request_keys: Any) -> list[bytes]:
        """Mark written blocks as ready, and return their keys (`keys` itself if it is all of them)."""

    def abort(self, keys: list[bytes], request_keys: Any) -> int:
        """Drop blocks that were being written, and return their number."""

    def reorder(self, request_keys: Any, positions: dict[bytes, int] | None) -> None:
        """Order the keys that a running request used, so that its head is evicted after its tail."""

    def end_request(self, request_keys: Any, positions: dict[bytes, int] | None, use_positions: bool = False) -> None:
        """Order all keys that the request used, by position in the prompt or by first use.

        If its hint is "end", then demote the blocks that it has stored and no other request has used.
        With `use_positions`, first count a use of each key of `positions` that the request has not used.
        """

    def take_hint(
        self,
        keys: list[bytes] | None,
        request_keys: Any,
        positions: dict[bytes, int] | None,
        next_use: str,
    ) -> None:
        """Apply a hint that arrives after the uses, to `keys` or, if None, to the keys that the request used.

        Later uses by the request carry the hint, too. ``"end"`` demotes `keys`, or those of an ended request as
        `end_request` does.
        """

    def withhold(self, block_ids: Iterable[int]) -> None:
        """Keep these free slots unused until `give_back` or `reset`."""

    def give_back(self, block_ids: Iterable[int]) -> None:
        """Free withheld slots, in the order given."""

    def reset(self) -> None:
        """Forget everything. Block ids start again at 0."""
