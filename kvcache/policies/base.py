"""What a replacement policy must answer: five primitives, and the batch operations. Read this first.

Five primitives make a policy. A manager calls batch operations only: their default bodies
(`kvcache.control.generic_cache`) are written in terms of the five, and compiled policies bring their own.
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
    """The keys that one request has used, in the order of their first use: what a policy may know of a request.

    Attributes
    ----------
    keys : dict
        Each used key and its position in the prompt; where that is not known, that of the key used before it.
    positions : dict or None
        Where in the prompt the request's keys stand, used or not, as far as the engine knows; it may grow.
    next_use : str or None
        When the request's blocks will be used next: ``"end"`` (never), ``"soon"``, ``"later"``; None: it did not say.
    policy_state : object
        What the policy remembers of the request; None at first.
    """

    __slots__ = (
        "_num_read",
        "_positioned",
        "_predecessors",
        "epoch",
        "keys",
        "last_position",
        "next_use",
        "policy_state",
        "positions",
    )

    def __init__(self, next_use: str | None = None) -> None:
        self.positions: dict[bytes, int] | None = None
        self.next_use = next_use
        self.epoch: object = None
        self.forget()

    def forget(self) -> None:
        """Start afresh, after a reset of the cache."""
        self.keys: dict[bytes, int] = {}
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
        """Keys of the request, used or not, whose positions are known; 0: none."""
        return self._num_read

    def __contains__(self, key: object) -> bool:
        return key in self.keys

    def read_positions(self) -> None:
        """Read the positions added since the last time; changed ones are not seen."""
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
        """Remove the keys added last, where counting their use failed."""
        for key in keys:
            del self.keys[key]
            self._positioned.discard(key)

    def is_last(self, key: bytes) -> bool:
        """Return whether no key of the request stands behind `key`, where positions are known."""
        return key in self._positioned and self.keys[key] == self.last_position

    def predecessor(self, key: bytes) -> bytes | None:
        """Return the used key before `key` in the prompt, or None at the head."""
        if len(self._predecessors) != len(self.keys):
            ordered = sorted(self.keys, key=self.keys.__getitem__)
            self._predecessors = dict(zip(ordered, [None, *ordered], strict=False))
        return self._predecessors[key]


class CachePolicy(ABC):
    """Decide which blocks leave when room is needed.

    Parameters
    ----------
    cache_capacity : int
        Blocks that the cache holds, >= 1.

    Raises
    ------
    ValueError
        The capacity is not a positive int.

    Notes
    -----
    Write `get`, `insert`, `remove`, `touch` and `evict` and the policy runs under every manager. The other methods
    have defaults. A policy holds the very `BlockStatus` objects that it is given; their `ref_cnt` changes
    while it holds them, and a block whose `ref_cnt` is not 0 must be passed over by `evict`.
    """

    declines: ClassVar[bool] = False
    """Whether it may take fewer keys than a store offers; a store is then never refused, and `make_room` is asked."""

    reads_clock: ClassVar[bool] = False
    """Whether the manager sets `now_ms`, a time in milliseconds, before the first use that a request counts."""

    stores_all: bool = False
    """Set by a manager with tiers below: `make_room` must take every key for which blocks can leave."""

    def __init__(self, cache_capacity: int) -> None:
        self.cache_capacity = check_int("cache_capacity", cache_capacity)

    @abstractmethod
    def get(self, key: bytes) -> BlockStatus | None:
        """Return the block of `key`, the object that was inserted, or None; this is no use of it."""

    @abstractmethod
    def insert(self, key: bytes, block: BlockStatus) -> None:
        """Take a block in that is not there yet, at the most-recent end.

        Parameters
        ----------
        key : bytes
            Not in the cache yet.
        block : BlockStatus
            To be kept; its `ref_cnt` changes while it is in the cache.
        """

    @abstractmethod
    def remove(self, key: bytes) -> None:
        """Remove a block without remembering it; KeyError if it is not there."""

    @abstractmethod
    def touch(self, keys: Iterable[bytes]) -> None:
        """Count one use of each key, from last to first; keys that are not there are ignored."""

    @abstractmethod
    def evict(self, n: int, protected: Container[bytes]) -> list[tuple[bytes, BlockStatus]] | None:
        """Let exactly `n` blocks go, none referenced, unready or protected; or None, and nothing has changed.

        Parameters
        ----------
        n : int
            Blocks to evict, 0 <= n.
        protected : container of bytes
            Keys that must stay.

        Returns
        -------
        list of (bytes, BlockStatus), or None
            Exactly `n` victims in eviction order; None if there are fewer, and nothing has changed then.
        """

    def gauges(self) -> dict[str, float]:
        """Return what the policy would show of itself now, by name; called in any thread, cheap, and changes nothing.

        Exporters give each as ``kvcache_policy_quantity`` with its name as a label. Empty by default.
        """
        return {}

    def order(self, keys: Iterable[bytes]) -> None:  # noqa: B027
        """Move each key, from last to first, to the most-recent end where it stands; no use is counted.

        The default does nothing.
        """

    def use(self, keys: list[bytes], first: bool) -> None:
        """Count one use of each key for one request; `first` on the first call for that request.

        A policy whose clock counts requests advances it only if `first`. The default is `touch`.
        """
        self.touch(keys)

    def count_uses(self, keys: list[bytes], request: RequestUses) -> None:
        """Count one use of each key, all different, that `request` has just used for the first time.

        The default is `use`.
        """
        self.use(keys, first=len(request.keys) == len(keys))

    def make_room(
        self, keys: list[bytes], num_free: int, offered: list[bytes], request: RequestUses | None
    ) -> tuple[int, list[tuple[bytes, BlockStatus]]]:
        """Return how many of the first `keys` to store, and the blocks that leave for them.

        Parameters
        ----------
        keys : list of bytes
            Absent keys, in prefix order; those taken are inserted next.
        num_free : int
            Free slots: with exactly so many fewer blocks than keys are taken.
        offered : list of bytes
            All different keys of the call, which must stay.
        request : RequestUses or None
            The request, which has used them.

        Returns
        -------
        tuple of (int, list of (bytes, BlockStatus))
            Keys taken, and victims in eviction order.

        Notes
        -----
        Asked only if `declines`. The default takes all keys, or none.
        """
        victims = self.evict(max(0, len(keys) - num_free), set(offered))
        return (0, []) if victims is None else (len(keys), victims)

    def hint(self, keys: list[bytes], next_use: str) -> None:  # noqa: B027
        """Take what was said of keys after they were used: ``"end"``, ``"soon"`` or ``"later"``.

        The default does nothing. What a request said when it began is in `RequestUses.next_use`.

        Parameters
        ----------
        keys : list of bytes
            In prefix order; unknown ones are ignored.
        next_use : str
            When they will be used next.
        """

    def clear(self) -> None:
        """Forget everything, ghosts and adaptive state too.

        The default raises NotImplementedError; the manager then makes a fresh instance.
        """
        raise NotImplementedError

    def native(self, num_blocks: int) -> BlockCacheOps | None:
        """Return the policy's own batch operations over a pool of `num_blocks` slots, or None for the default ones.

        Compiled policies own their pool and answer with themselves.
        """
        return None


class BlockCacheOps(Protocol):
    """What a manager asks of a policy, a list of keys at a time.

    `request_keys` is what `open_request` made for the request, or None where no request is known. Every operation
    checks all its keys before it changes anything.
    """

    lookups: int
    looked_up_blocks: int
    hit_blocks: int
    gated_blocks: int

    @property
    def declined_blocks(self) -> int:
        """Of the gated blocks, those that the policy did not take."""

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
        """Return the policy; after `reset` it may be another one."""

    @property
    def num_raised(self) -> int:
        """Blocks held at a raised priority."""

    def keep_events(self, events: EventLog, medium: str) -> None:
        """Add what comes to `medium` and leaves it to `events`, in the same step as it does; called once, at first."""

    def open_request(self, priority: int = 0, ttl_ns: int = 0, next_use: str | None = None, num_keys: int = 0) -> Any:
        """Return the (empty) keys of a new request, with its retention hint (`ttl_ns` 0: no end).

        `num_keys` is about how many it will name, as far as is known.
        """

    def advance(self, elapsed_s: float, max_raised: int) -> None:
        """Let raised blocks whose time is over fall back; at most `max_raised` may be held from now on."""

    def needs_time(self, request_keys: Any, positions: dict[bytes, int] | None) -> bool:
        """Return whether `advance` is due before a request's use of keys, and take the request's positions.

        Due it is at every use; to a policy that reads the clock, at the first of a request.
        """

    def has_used(self, request_keys: Any) -> bool:
        """Return whether a request has used a key since the last reset."""

    def lookup(self, keys: list[bytes], request_keys: Any) -> int:
        """Return how many of the first keys are ready, and count the look-up."""

    def match_prefix(self, keys: list[bytes], request_keys: Any, start: int = 0) -> int:
        """Return where the run of ready keys that begins at `start` ends (`start` itself: it is not ready).

        This is neither counted nor a use.
        """

    def status_of(self, key: bytes) -> int:
        """Return the state of one key, 0 absent, 1 being written, 2 ready, and count the look-up."""

    def status(self, keys: list[bytes]) -> bytes:
        """Return the state of each key as one byte: 0 absent, 1 being written, 2 ready."""

    def locate(self, keys: list[bytes]) -> list[int]:
        """Return the id of each key's block, without taking a reference; -1 where it is absent or being written."""

    def touch(self, keys: list[bytes], request_keys: Any) -> None:
        """Count a use of each key (once per request), then order those that were counted before."""

    def pin(self, keys: list[bytes], request_keys: Any) -> LoadStoreSpec:
        """Take a reference on each key's block and return where the blocks lie."""

    def unpin(self, keys: list[bytes], request_keys: Any) -> None:
        """Give the references back."""

    def reserve(self, keys: list[bytes], request_keys: Any, admit: bytearray | None) -> PrepareStoreOutput | None:
        """Make room for the absent keys (where `admit` is given: those it marks with 1); None if that cannot be."""

    def commit(self, keys: list[bytes], request_keys: Any) -> list[bytes]:
        """Make written blocks ready and return their keys: `keys` itself where it is all of them."""

    def abort(self, keys: list[bytes], request_keys: Any) -> int:
        """Drop blocks that were being written and return how many."""

    def reorder(self, request_keys: Any, positions: dict[bytes, int] | None) -> None:
        """Order the keys that a running request used, so that its head is evicted after its tail."""

    def end_request(self, request_keys: Any, positions: dict[bytes, int] | None, use_positions: bool = False) -> None:
        """Order all keys that the request used, by their positions in the prompt or as first used.

        With `use_positions` every key of `positions` is used, if it was not before.
        """

    def take_hint(
        self,
        keys: list[bytes] | None,
        request_keys: Any,
        positions: dict[bytes, int] | None,
        next_use: str,
        priority: int,
        ttl_ns: int,
    ) -> None:
        """Take a hint that comes after the uses: for `keys`, or if that is None, for the keys that the request used.

        `next_use` stands for `priority` and `ttl_ns` where a policy knows priorities alone. Later uses of the request
        carry the hint, too.
        """

    def withhold(self, block_ids: Iterable[int]) -> None:
        """Give these free slots to no key until `give_back` or `reset`."""

    def give_back(self, block_ids: Iterable[int]) -> None:
        """Free slots that were withheld, in the order given."""

    def reset(self) -> None:
        """Forget everything; block ids start again at 0."""
