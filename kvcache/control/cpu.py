"""The scheduler's half: which block is where, who reads it, and what leaves when room is needed.

A manager checks what it is called with, counts, writes events down, and leaves every loop over blocks to the batch
cache of its policy (`kvcache.control.generic_cache`). It never waits for I/O.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from kvcache.control.backend import Backend, CPUBackend
from kvcache.control.generic_cache import GenericBlockCache
from kvcache.control.manager import Keys, OffloadingManager
from kvcache.control.observers.what_if import WhatIf, estimate, sampler_for
from kvcache.core.reuse_filter import ReuseFilter
from kvcache.events import OffloadingEvent
from kvcache.metrics import ManagerStats
from kvcache.options import check_int, check_share
from kvcache.policies.base import CachePolicy
from kvcache.registry import POLICIES
from kvcache.request import HintReader, ReqContext
from kvcache.specs import CPULoadStoreSpec, LoadStoreSpec, PrepareStoreOutput

if TYPE_CHECKING:
    from kvcache.policies.base import BlockCacheOps

MAX_BLOCKS = 1 << 30


class _PolicyManager(OffloadingManager):
    """One tier of blocks under one policy: the whole of the manager's contract, over batch operations."""

    def __init__(
        self,
        block_size: int,
        medium: str,
        num_blocks: int,
        cache: BlockCacheOps,
        enable_events: bool,
        *,
        store_threshold: int = 0,
        max_tracker_size: int = 64_000,
        what_if: bool | int = False,
        retention_share: float = 0.5,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_int("store_threshold", store_threshold, 0)
        check_share("retention_share", retention_share)
        if not callable(clock):
            raise ValueError(f"clock must be callable, got {clock!r}")
        self.block_size = block_size
        self.medium = medium
        self._num_blocks = num_blocks
        self._cache = cache
        self._gate = ReuseFilter(store_threshold, max_tracker_size) if store_threshold > 1 else None
        self._sampler = sampler_for(what_if, num_blocks, cache)
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
        return self._cache.current_policy()

    _policy = policy

    def _request_keys_of(self, req_context: ReqContext | None) -> Any:
        if req_context is None:
            return None
        try:
            request_keys_by_pool = req_context._request_keys
        except AttributeError:
            raise ValueError(f"req_context must be a ReqContext or None, got {req_context!r}") from None
        if request_keys_by_pool is not None:
            request_keys = request_keys_by_pool.get(self)
            if request_keys is not None:
                return request_keys
        else:
            request_keys_by_pool = req_context._request_keys = {}
        hint = self._hints.of(req_context)
        if hint is None or hint.priority == 0:
            request_keys = self._cache.open_request()
        else:
            if self._now_s is None:
                now_s = self._clock()
                if not math.isfinite(now_s):
                    raise ValueError(f"the clock must give finite seconds, got {now_s!r}")
                self._start_s = self._now_s = now_s
            request_keys = self._cache.open_request(hint.priority, hint.ttl_ns)
        request_keys_by_pool[self] = request_keys
        return request_keys

    def _advance(self) -> None:
        now_s = self._clock()
        if not now_s >= self._now_s:  # type: ignore[operator]
            raise ValueError(f"the clock went back from {self._now_s} to {now_s} s")
        self._now_s = now_s
        self._cache.advance(int((now_s - self._start_s) * 1e9), self._max_raised)

    def lookup(self, keys: Any, req_context: ReqContext | None = None) -> bool | int:
        if isinstance(keys, bytes):
            # Engines that ask key by key ask often: one key is no reason to open a request_keys.
            hits = self._cache.match_prefix([keys], None)
            self._lookups += 1
            self._looked_up_blocks += 1
            self._hit_blocks += hits
            return hits == 1
        if type(keys) is not list:
            keys = _key_list(keys)
        hits = self._cache.match_prefix(keys, self._request_keys_of(req_context))
        self._lookups += 1
        self._looked_up_blocks += len(keys)
        self._hit_blocks += hits
        return hits

    def status(self, key: bytes) -> int:
        """Return the state of one key: 0 absent, 1 being written, 2 ready; counted like `lookup`."""
        state = self._cache.status_of(key)
        self._lookups += 1
        self._looked_up_blocks += 1
        self._hit_blocks += state == 2
        return state

    def reorder(self, req_context: ReqContext) -> None:
        """Order the keys that a running request used: its head is evicted after its tail. No use is counted.

        Linear in the request's keys, however often it is called; by positions where the context knows them.
        """
        request_keys = self._request_keys_of(req_context)
        if request_keys is not None:
            self._cache.reorder(request_keys, req_context._positions)

    def prepare_load(self, keys: Keys, req_context: ReqContext | None = None) -> LoadStoreSpec:
        if type(keys) is not list:
            keys = _key_list(keys)
        request_keys = self._request_keys_of(req_context)
        if self._now_s is not None:
            self._advance()
        spec = self._cache.pin(keys, request_keys)
        self._loaded_blocks += len(keys)
        return spec

    def touch(self, keys: Keys, req_context: ReqContext | None = None) -> None:
        if type(keys) is not list:
            keys = _key_list(keys)
        request_keys = self._request_keys_of(req_context)
        if self._now_s is not None:
            self._advance()
        self._cache.touch(keys, request_keys)
        if request_keys is None and self._sampler is not None:
            self._sampler.take_keys(keys)

    def complete_load(self, keys: Keys, req_context: ReqContext | None = None) -> None:
        self._cache.unpin(_key_list(keys), self._request_keys_of(req_context))

    def prepare_store(self, keys: Keys, req_context: ReqContext | None = None) -> PrepareStoreOutput | None:
        if type(keys) is not list:
            keys = _key_list(keys)
        request_keys = self._request_keys_of(req_context)
        if self._now_s is not None:
            self._advance()
        output = self._cache.reserve(keys, request_keys, None if self._gate is None else self._gate.admit(keys))
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
        request_keys = self._request_keys_of(req_context)
        if not success:
            self._failed_blocks += self._cache.abort(keys, request_keys)
            return
        ready = self._cache.commit(keys, request_keys)
        self._stored_blocks += len(ready)
        if ready and self._events is not None:
            self._events.append(OffloadingEvent(list(ready), self.block_size, self.medium, False))

    def take_events(self) -> Iterator[OffloadingEvent]:
        if self._events is None:
            return iter(())
        events, self._events = self._events, []
        return iter(events)

    def on_request_finished(self, req_context: ReqContext, *, use_positions: bool = False) -> None:
        """Order all keys that the request used; with `use_positions` each key with a position is used first."""
        try:
            request_keys_by_pool = req_context._request_keys
        except AttributeError:
            raise ValueError(f"req_context must be a ReqContext, got {req_context!r}") from None
        if self._now_s is not None:
            self._advance()
        request_keys = None if request_keys_by_pool is None else request_keys_by_pool.pop(self, None)
        if request_keys is None and use_positions and req_context._positions:
            request_keys = self._request_keys_of(req_context)
            req_context._request_keys.pop(self)  # type: ignore[union-attr]
        if request_keys is not None:
            self._cache.end_request(request_keys, req_context._positions, use_positions)
            if self._sampler is not None:
                self._sampler.take(request_keys)

    def reset_cache(self) -> None:
        self._cache.reset()
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
        cache = self._cache
        return ManagerStats(
            num_blocks=self._num_blocks,
            num_free=cache.num_free,
            num_referenced=cache.num_referenced,
            num_pending=cache.num_pending,
            lookups=self._lookups,
            looked_up_blocks=self._looked_up_blocks,
            hit_blocks=self._hit_blocks,
            loaded_blocks=self._loaded_blocks,
            stored_blocks=self._stored_blocks,
            evicted_blocks=self._evicted_blocks,
            rejected_stores=self._rejected_stores,
            failed_blocks=self._failed_blocks,
            gated_blocks=cache.gated_blocks,
            retained_blocks=cache.num_raised,
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
        capacity = check_int("free blocks of the backend", backend.get_num_free_blocks())
        policy = _new_policy(cache_policy, capacity)
        self.backend = backend
        super().__init__(
            backend.block_size,
            backend.medium,
            capacity,
            GenericBlockCache(policy, backend),
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
        check_int("block_size", block_size)
        if check_int("num_blocks", num_blocks) >= MAX_BLOCKS:
            raise ValueError(f"num_blocks must be < 2**30, got {num_blocks}")
        policy = _new_policy(cache_policy, num_blocks)
        cache = policy.native(num_blocks) or GenericBlockCache(policy, CPUBackend(block_size, num_blocks))
        super().__init__(
            block_size,
            CPULoadStoreSpec.medium(),
            num_blocks,
            cache,
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
