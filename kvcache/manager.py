"""The scheduler's half: which block is where, who reads it, and what leaves when room is needed.

A manager checks what it is called with, counts, writes events down, and leaves every loop over blocks to the batch
verbs of its policy (`kvcache.policies.verbs`). It never waits for I/O.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from kvcache.backend import Backend, CPUBackend, checked_size
from kvcache.core.gate import StoreGate
from kvcache.hints import HintReader
from kvcache.policies.base import CachePolicy
from kvcache.policies.verbs import PrimitiveVerbs
from kvcache.registry import POLICIES
from kvcache.types import (
    CPULoadStoreSpec,
    LoadStoreSpec,
    ManagerStats,
    OffloadingEvent,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
)
from kvcache.whatif import WhatIf, estimate, sampler_for

if TYPE_CHECKING:
    from kvcache.policies.verbs import BatchVerbs

Keys = Iterable[bytes]

MAX_BLOCKS = 1 << 30


class OffloadingManager(ABC):
    """What an engine's scheduler asks of an offloading cache.

    Attributes
    ----------
    block_size : int
        Tokens of one offloaded block.
    medium : str
        Where the blocks lie.

    Notes
    -----
    Wherever `keys` are asked for, any iterable of keys will do (it is consumed once); a list is the fast path.
    Errors, all checked before anything changes: ValueError for a bad argument, KeyError for an unknown key,
    BlockStateError for a wrong reference count or state.
    """

    block_size: int
    medium: str

    @abstractmethod
    def lookup(self, keys: Any, req_context: ReqContext | None = None) -> bool | int | None:
        """Say whether one key, or how many leading ones of a list or tuple, are offloaded and ready.

        Parameters
        ----------
        keys : bytes, or list or tuple of bytes
            One key, or a request's keys in prefix order.
        req_context : ReqContext, optional
            The request.

        Returns
        -------
        bool, int or None
            For one key, True or False; for several, the length of the longest leading run that is ready. None:
            ask again later, a lower tier is being asked. A manager of one tier never answers None.
        """

    @abstractmethod
    def prepare_load(self, keys: Keys, req_context: ReqContext | None = None) -> LoadStoreSpec:
        """Take a reference on each block, so that it stays until `complete_load`, and say where the blocks lie.

        Raises
        ------
        KeyError, BlockStateError
            A key is unknown, or its block is not ready; no reference has been taken.
        """

    @abstractmethod
    def touch(self, keys: Keys, req_context: ReqContext | None = None) -> None:
        """Mark blocks as recently used; `keys` are in prefix order, and the first becomes the most recent."""

    @abstractmethod
    def complete_load(self, keys: Keys, req_context: ReqContext | None = None) -> None:
        """Give back the references that `prepare_load` took.

        Raises
        ------
        KeyError, BlockStateError
            A key is unknown, or has fewer references than are given back; nothing has changed.
        """

    @abstractmethod
    def prepare_store(self, keys: Keys, req_context: ReqContext | None = None) -> PrepareStoreOutput | None:
        """Make room for the keys that are not there yet and say where to write them.

        Returns
        -------
        PrepareStoreOutput or None
            None: there is no room, and nothing has changed.
        """

    @abstractmethod
    def complete_store(self, keys: Keys, req_context: ReqContext | bool | None = None, success: bool = True) -> None:
        """Make written blocks ready, or drop them if `success` is False; unknown keys are ignored."""

    @abstractmethod
    def stats(self) -> ManagerStats:
        """Return counters since start and gauges now."""

    def take_events(self) -> Iterator[OffloadingEvent]:
        """Yield the events since the last call, each once."""
        return iter(())

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Hear of a new request, and say how its blocks are offloaded."""
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:  # noqa: B027
        """Hear of a request's end."""

    def on_schedule_end(self) -> None:  # noqa: B027
        """Hear of the end of a scheduler step."""

    @abstractmethod
    def reset_cache(self) -> None:
        """Forget everything; the caller has drained or dropped older jobs."""

    def shutdown(self) -> None:  # noqa: B027
        """Release resources."""


class _PolicyManager(OffloadingManager):
    """One tier of blocks under one policy: the whole of the manager's contract, over batch verbs."""

    def __init__(
        self,
        block_size: int,
        medium: str,
        num_blocks: int,
        verbs: BatchVerbs,
        enable_events: bool,
        *,
        store_threshold: int = 0,
        max_tracker_size: int = 64_000,
        what_if: bool | int = False,
        retention_share: float = 0.5,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if type(store_threshold) is not int or store_threshold < 0:
            raise ValueError(f"store_threshold must be an int >= 0, got {store_threshold!r}")
        if isinstance(retention_share, bool) or not isinstance(retention_share, int | float) or not (
            0 <= retention_share <= 1
        ):
            raise ValueError(f"retention_share must be a number in 0..1, got {retention_share!r}")
        if not callable(clock):
            raise ValueError(f"clock must be callable, got {clock!r}")
        self.block_size = block_size
        self.medium = medium
        self._num_blocks = num_blocks
        self._verbs = verbs
        self._gate = StoreGate(store_threshold, max_tracker_size) if store_threshold > 1 else None
        self._sampler = sampler_for(what_if, num_blocks, verbs)
        self._hints = HintReader()
        self._max_raised = int(retention_share * num_blocks)
        self._clock = clock
        self._start_s = 0.0
        self._now_s: float | None = None  # None until a request gives a hint: nobody else pays for the clock
        self._events: list[OffloadingEvent] | None = [] if enable_events else None
        self._lookups = 0
        self._looked_up_blocks = 0
        self._hit_blocks = 0
        self._loaded_blocks = 0
        self._stored_blocks = 0
        self._evicted_blocks = 0
        self._rejected_stores = 0
        self._failed_blocks = 0

    @property
    def policy(self) -> CachePolicy:
        """The policy that decides what leaves."""
        return self._verbs.current_policy()

    _policy = policy

    def _trail(self, req_context: ReqContext | None) -> Any:
        if req_context is None:
            return None
        try:
            trails = req_context._trails
        except AttributeError:
            raise ValueError(f"req_context must be a ReqContext or None, got {req_context!r}") from None
        if trails is not None:
            trail = trails.get(self)
            if trail is not None:
                return trail
        else:
            trails = req_context._trails = {}
        hint = self._hints.of(req_context)
        if hint is None or hint.priority == 0:
            trail = self._verbs.open_request()
        else:
            if self._now_s is None:
                now_s = self._clock()
                if not math.isfinite(now_s):
                    raise ValueError(f"the clock must give finite seconds, got {now_s!r}")
                self._start_s = self._now_s = now_s
            trail = self._verbs.open_request(hint.priority, hint.ttl_ns)
        trails[self] = trail
        return trail

    def _advance(self) -> None:
        now_s = self._clock()
        if not now_s >= self._now_s:  # type: ignore[operator]
            raise ValueError(f"the clock went back from {self._now_s} to {now_s} s")
        self._now_s = now_s
        self._verbs.advance(int((now_s - self._start_s) * 1e9), self._max_raised)

    def lookup(self, keys: Any, req_context: ReqContext | None = None) -> bool | int:
        if isinstance(keys, bytes):
            # Engines that ask key by key ask often: one key is no reason to open a trail.
            hits = self._verbs.leading([keys], None)
            self._lookups += 1
            self._looked_up_blocks += 1
            self._hit_blocks += hits
            return hits == 1
        if type(keys) is not list:
            keys = _key_list(keys)
        hits = self._verbs.leading(keys, self._trail(req_context))
        self._lookups += 1
        self._looked_up_blocks += len(keys)
        self._hit_blocks += hits
        return hits

    def prepare_load(self, keys: Keys, req_context: ReqContext | None = None) -> LoadStoreSpec:
        if type(keys) is not list:
            keys = _key_list(keys)
        trail = self._trail(req_context)
        if self._now_s is not None:
            self._advance()
        spec = self._verbs.pin(keys, trail)
        self._loaded_blocks += len(keys)
        return spec

    def touch(self, keys: Keys, req_context: ReqContext | None = None) -> None:
        if type(keys) is not list:
            keys = _key_list(keys)
        trail = self._trail(req_context)
        if self._now_s is not None:
            self._advance()
        self._verbs.touch(keys, trail)
        if trail is None and self._sampler is not None:
            self._sampler.take_keys(keys)

    def complete_load(self, keys: Keys, req_context: ReqContext | None = None) -> None:
        self._verbs.unpin(_key_list(keys), self._trail(req_context))

    def prepare_store(self, keys: Keys, req_context: ReqContext | None = None) -> PrepareStoreOutput | None:
        if type(keys) is not list:
            keys = _key_list(keys)
        trail = self._trail(req_context)
        if self._now_s is not None:
            self._advance()
        output = self._verbs.reserve(keys, trail, None if self._gate is None else self._gate.admit(keys))
        if output is None:
            self._rejected_stores += 1
            return None
        evicted = output.evicted_keys
        if evicted:
            self._evicted_blocks += len(evicted)
            if self._events is not None:
                self._events.append(OffloadingEvent(list(evicted), self.block_size, self.medium, True))
        return output

    def complete_store(self, keys: Keys, req_context: ReqContext | bool | None = None, success: bool = True) -> None:
        if isinstance(req_context, bool):
            success, req_context = req_context, None
        if type(keys) is not list:
            keys = _key_list(keys)
        trail = self._trail(req_context)
        if not success:
            self._failed_blocks += self._verbs.abort(keys, trail)
            return
        ready = self._verbs.commit(keys, trail)
        self._stored_blocks += len(ready)
        if ready and self._events is not None:
            self._events.append(OffloadingEvent(list(ready), self.block_size, self.medium, False))

    def take_events(self) -> Iterator[OffloadingEvent]:
        if self._events is None:
            return iter(())
        events, self._events = self._events, []
        return iter(events)

    def on_request_finished(self, req_context: ReqContext) -> None:
        try:
            trails = req_context._trails
        except AttributeError:
            raise ValueError(f"req_context must be a ReqContext, got {req_context!r}") from None
        if self._now_s is not None:
            self._advance()
        trail = None if trails is None else trails.pop(self, None)
        if trail is not None:
            self._verbs.finish(trail, req_context._positions)
            if self._sampler is not None:
                self._sampler.take(trail)

    def reset_cache(self) -> None:
        self._verbs.reset()
        if self._gate is not None:
            self._gate.clear()
        if self._sampler is not None:
            self._sampler.reset()

    def what_if(
        self, policies: str | Iterable[str] | None = None, capacities: Iterable[int] | None = None
    ) -> WhatIf:
        """Estimate what other policies and capacities would have hit on the requests that have finished.

        Parameters
        ----------
        policies : str or iterable of str, optional
            Names of policies; left out: all registered ones that are compiled.
        capacities : iterable of int, optional
            Blocks, ascending; left out: 1/4, 1/2, 1, 2, 4 and 8 times the manager's own.

        Raises
        ------
        ValueError
            The manager was made without `what_if`, a policy is not known, or the capacities do not ascend from 1.

        Notes
        -----
        Milliseconds for lru alone, seconds for all: ask from a thread other than the scheduler's. It works on a copy.
        """
        if self._sampler is None:
            raise ValueError("the manager samples nothing: make it with what_if=True")
        return estimate(self._sampler, self._num_blocks, type(self.policy), policies, capacities)

    def stats(self) -> ManagerStats:
        verbs = self._verbs
        return ManagerStats(
            num_blocks=self._num_blocks,
            num_free=verbs.num_free,
            num_referenced=verbs.num_referenced,
            num_pending=verbs.num_pending,
            lookups=self._lookups,
            looked_up_blocks=self._looked_up_blocks,
            hit_blocks=self._hit_blocks,
            loaded_blocks=self._loaded_blocks,
            stored_blocks=self._stored_blocks,
            evicted_blocks=self._evicted_blocks,
            rejected_stores=self._rejected_stores,
            failed_blocks=self._failed_blocks,
            gated_blocks=verbs.gated_blocks,
            retained_blocks=verbs.num_raised,
            ignored_hints=self._hints.num_ignored,
        )


class BackendOffloadingManager(_PolicyManager):
    """Offload to the blocks of any backend.

    Parameters
    ----------
    backend : Backend
        Where blocks are allocated; its free blocks now are the capacity.
    cache_policy : str or type
        A policy's name, class or ``"package.module:Class"``.
    enable_events : bool
        Whether `take_events` has anything to tell.
    store_threshold, max_tracker_size, what_if
        As in `CPUOffloadingManager`.

    Raises
    ------
    ValueError
        The policy is not known, or the backend has no free block.
    """

    def __init__(
        self,
        backend: Backend,
        cache_policy: str | type = "lru",
        enable_events: bool = False,
        *,
        store_threshold: int = 0,
        max_tracker_size: int = 64_000,
        what_if: bool | int = False,
    ) -> None:
        capacity = checked_size("free blocks of the backend", backend.get_num_free_blocks())
        policy = _new_policy(cache_policy, capacity)
        self.backend = backend
        super().__init__(
            backend.block_size,
            backend.medium,
            capacity,
            PrimitiveVerbs(policy, backend),
            enable_events,
            store_threshold=store_threshold,
            max_tracker_size=max_tracker_size,
            what_if=what_if,
        )


class CPUOffloadingManager(_PolicyManager):
    """Offload to a pool of blocks in host memory.

    Parameters
    ----------
    block_size : int
        Tokens of one offloaded block, >= 1.
    num_blocks : int
        Slots of the pool, >= 1.
    cache_policy : str or type
        A policy's name, class or ``"package.module:Class"``.
    enable_events : bool
        Whether `take_events` has anything to tell.
    store_threshold : int
        A key is stored only once it has been offered so often; 0 and 1: at once.
    max_tracker_size : int
        Keys whose offers are remembered.
    what_if : bool or int
        Whether to sample the keys for the method `what_if`; an int is the number of sampled uses that are kept, 12
        bytes each, at least 1,024 (True: 131,072).
    retention_share : float
        Share of the blocks, 0 to 1, that may be held at a raised priority; beyond it those nearest their end fall back.
    clock : callable
        Returns seconds that never go back; asked only once a request has given a retention hint.

    Raises
    ------
    ValueError
        A size is not a positive int, or the policy is not known (the message lists the known ones).

    Notes
    -----
    Block ids are observable: fresh ids 0, 1, 2, ... first; once all have been handed out, the last freed is the first
    reused, and evicted blocks are freed in eviction order.
    """

    def __init__(
        self,
        block_size: int,
        num_blocks: int,
        cache_policy: str | type = "lru",
        enable_events: bool = False,
        *,
        store_threshold: int = 0,
        max_tracker_size: int = 64_000,
        what_if: bool | int = False,
        retention_share: float = 0.5,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        checked_size("block_size", block_size)
        if checked_size("num_blocks", num_blocks) >= MAX_BLOCKS:
            raise ValueError(f"num_blocks must be < 2**30, got {num_blocks}")
        policy = _new_policy(cache_policy, num_blocks)
        verbs = policy.native(num_blocks) or PrimitiveVerbs(policy, CPUBackend(block_size, num_blocks))
        super().__init__(
            block_size,
            CPULoadStoreSpec.medium(),
            num_blocks,
            verbs,
            enable_events,
            store_threshold=store_threshold,
            max_tracker_size=max_tracker_size,
            what_if=what_if,
            retention_share=retention_share,
            clock=clock,
        )


def _new_policy(cache_policy: str | type, capacity: int) -> CachePolicy:
    chosen = POLICIES.resolve(cache_policy)
    if not issubclass(chosen, CachePolicy):
        raise ValueError(f"cache_policy must be a CachePolicy, got {chosen!r}")
    return chosen(capacity)


def _key_list(keys: Any) -> list[bytes]:
    # Callers in a hot path leave lists out themselves: the call costs as much as the check.
    if type(keys) is list:
        return keys
    if isinstance(keys, bytes | str):
        raise ValueError(f"keys must be an iterable of keys, got one {type(keys).__name__}: {keys!r}")
    try:
        return list(keys)
    except TypeError:
        raise ValueError(f"keys must be an iterable of keys, got {keys!r}") from None
