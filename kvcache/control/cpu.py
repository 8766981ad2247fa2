"""The managers of one medium: a pool of blocks that implements the manager's contract."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from kvcache.control.backend import Backend
from kvcache.control.manager import OffloadingManager
from kvcache.control.pool import BlockPool
from kvcache.options import check_int
from kvcache.request import ReqContext, RequestOffloadingContext
from kvcache.specs import CPULoadStoreSpec


class PoolManager(BlockPool, OffloadingManager):
    """A pool of blocks that answers an engine's scheduler: maps the contract's methods to the pool's operations."""

    prepare_load = BlockPool.pin
    complete_load = BlockPool.unpin
    prepare_store = BlockPool.reserve
    on_request_finished = BlockPool.end_request
    parts = BlockPool.parts

    @property
    def pool(self) -> BlockPool:
        """The manager itself."""
        return self

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self.ages.open(req_context)
        return super().on_new_request(req_context)

    def reset_cache(self, version: str | int | None = None) -> None:
        self.version_of_reset(version)
        self.ages.num_resets += 1
        self.reset()


class BackendOffloadingManager(PoolManager):
    """Offload to the blocks of any backend.

    Parameters
    ----------
    backend : Backend
        Allocates the blocks. Its current number of free blocks is the capacity.
    cache_policy, enable_events, store_threshold, max_tracker_size
        As in `CPUOffloadingManager`.

    Raises
    ------
    ValueError
        The policy is unknown, or the backend has no free block.
    """

    def __init__(
        self,
        backend: Backend,
        cache_policy: str | type = "lru",
        enable_events: bool = False,
        *,
        store_threshold: int = 0,
        max_tracker_size: int = 64_000,
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
        Whether to record events for `take_events`.
    store_threshold : int
        A key is stored only after this number of offers. 0 and 1: at once.
    max_tracker_size : int
        Limit of keys whose offers are remembered.
    clock : callable
        Returns seconds of a monotonic clock. Read only for a policy that needs the time, such as `gittins`.
    group_windows : sequence of int or None, optional
        Window of each KV-cache group in blocks (Mamba: 1), by group index; None for a group without a window. Set it
        for `gittins` when a model has several groups. Before the first `prepare_load` or `prepare_store` of a request,
        its context must name the positions of the prompt, and `touch` its keys of the first group without a window.
        Keys of the other such groups are evicted with them: offer both in one call. Requests without positions, or with
        keys of an unknown group, are served by lru.

    Raises
    ------
    ValueError
        A size is not a positive int, the policy is unknown (the message lists the known policies), a window is no int
        >= 1, every group has a window, or the policy has no rule for several groups.

    Notes
    -----
    Block ids are observable. Fresh ids 0, 1, 2, ... are used first. After that, the slot freed last is reused first.
    Evicted blocks are freed in eviction order.
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
        clock: Callable[[], float] = time.monotonic,
        group_windows: Sequence[int | None] | None = None,
    ) -> None:
        super().__init__(
            num_blocks,
            cache_policy,
            block_size=block_size,
            medium=CPULoadStoreSpec.medium(),
            enable_events=enable_events,
            store_threshold=store_threshold,
            max_tracker_size=max_tracker_size,
            clock=clock,
            group_windows=group_windows,
        )
