"""The managers of one medium: a pool of blocks, under the names of the manager's contract."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from kvcache.control.backend import Backend
from kvcache.control.manager import OffloadingManager
from kvcache.control.observers.what_if import WhatIf, estimate, sampler_for
from kvcache.control.pool import BlockPool
from kvcache.core.sampler import Sampler
from kvcache.options import check_int
from kvcache.specs import CPULoadStoreSpec


class PoolManager(BlockPool, OffloadingManager):
    """A pool of blocks that answers an engine's scheduler: the contract's names for the pool's operations."""

    prepare_load = BlockPool.pin
    complete_load = BlockPool.unpin
    prepare_store = BlockPool.reserve
    on_request_finished = BlockPool.end_request
    reset_cache = BlockPool.reset
    parts = BlockPool.parts

    @property
    def pool(self) -> BlockPool:
        """The manager itself."""
        return self

    def what_if(self, policies: str | Iterable[str] | None = None, capacities: Iterable[int] | None = None) -> WhatIf:
        """Estimate what other policies and capacities would have hit on the requests that have finished.

        Parameters
        ----------
        policies : str or iterable of str, optional
            Names of policies; left out: all registered ones that are compiled and read no clock.
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
        sampler = self.observer if isinstance(self.observer, Sampler) else None
        return estimate(sampler, self.num_blocks, type(self.policy), policies, capacities)


class BackendOffloadingManager(PoolManager):
    """Offload to the blocks of any backend.

    Parameters
    ----------
    backend : Backend
        Where blocks are allocated; its free blocks now are the capacity.
    cache_policy : str or type
        A policy's name, class or ``"package.module:Class"``.
    enable_events : bool
        Whether events are recorded for `take_events`.
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
        self.backend = backend
        super().__init__(
            capacity,
            cache_policy,
            block_size=backend.block_size,
            medium=backend.medium,
            backend=backend,
            enable_events=enable_events,
            store_threshold=store_threshold,
            max_tracker_size=max_tracker_size,
            observer=sampler_for(what_if, capacity),
        )


class CPUOffloadingManager(PoolManager):
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
        Whether events are recorded for `take_events`.
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
        super().__init__(
            num_blocks,
            cache_policy,
            block_size=block_size,
            medium=CPULoadStoreSpec.medium(),
            enable_events=enable_events,
            store_threshold=store_threshold,
            max_tracker_size=max_tracker_size,
            retention_share=retention_share,
            clock=clock,
            observer=sampler_for(what_if, num_blocks),
        )
