"""Tiers without bytes: host memory over other media, at capacities that this machine does not have.

The manager is the one used in production. Its tiers keep an index, hold no blocks and end every job at once, so the
counts equal those over real tiers that are fast enough.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kvcache.control.cpu import CPUOffloadingManager
from kvcache.lab.simulate.links import Queue, QueuedLink
from kvcache.lab.traces.requests import ReplayError
from kvcache.tiering.controller import TierConfig
from kvcache.tiering.manager import TieredOffloadingManager
from kvcache.tiers.base.tier import Tier, TierResult, TierStats
from kvcache.tiers.base.wear import Wear

if TYPE_CHECKING:
    from kvcache.policies.base import CachePolicy
    from kvcache.request import ReqContext

# As in a replay over a real disk: all writes of a step are under way at once.
_MAX_STORE_BLOCKS = 1024
_MOST_STEPS = 1_000_000


class SimulatedTier(Tier):
    """Holds the keys of a tier of `num_blocks` blocks under a policy; `options` are those of its index."""

    medium = "SIMULATED"

    def __init__(self, num_blocks: int, cache_policy: str = "lru", wear: Wear | None = None, **options: Any) -> None:
        self.wear = wear
        self._index = CPUOffloadingManager(1, num_blocks, cache_policy, **options)
        self.cache_policy = cache_policy
        self._num_blocks = num_blocks
        self._ended: list[TierResult] = []
        self._loading: list[bytes] = []
        self._storing: list[bytes] = []
        self.loaded_blocks = 0
        self.stored_blocks = 0

    @property
    def policy(self) -> CachePolicy:
        """The policy of its index."""
        return self._index.policy

    def lookup(self, keys: list[bytes]) -> int:
        found: int = self._index.lookup(keys)
        return found

    def touch(self, keys: list[bytes], req_context: ReqContext | None = None) -> None:
        self._index.touch(keys, req_context)

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._index.on_request_finished(req_context)

    def hint(self, request_or_keys: ReqContext | list[bytes], next_use: str) -> None:
        self._index.hint(request_or_keys, next_use)

    def submit_store(self, job_id: int, keys: list[bytes], block_ids: list[int]) -> bool:
        # As `SlotCatalog.begin_store` does.
        output = self._index.prepare_store(keys[::-1] if self.policy.reads_clock else keys)
        if output is None:
            return False
        self.stored_blocks += len(output.keys_to_store)
        self._storing += output.keys_to_store
        self._ended.append(TierResult(job_id, output.keys_to_store, removed=output.evicted_keys))
        return True

    def submit_load(self, job_id: int, keys: list[bytes], block_ids: list[int]) -> bool:
        # A store of the same step may have evicted a block that was found.
        held = [key for key in keys if self._index.lookup(key)]
        self.loaded_blocks += len(held)
        # Blocks that are being read or written are not evicted.
        self._index.prepare_load(held)
        self._loading += held
        missed = [key for key in keys if key not in set(held)] if len(held) < len(keys) else []
        self._ended.append(TierResult(job_id, held, failed=missed))
        return True

    def get_finished(self) -> list[TierResult]:
        ended, self._ended = self._ended, []
        self._index.complete_load(self._loading)
        self._index.complete_store(self._storing)
        if self.wear is not None:
            self.wear.spend(len(self._storing))
        self._loading, self._storing = [], []
        return ended

    def reset(self, version: str | int | None = None) -> None:
        self._index.reset_cache()

    def stats(self) -> TierStats:
        index = self._index.stats()
        return TierStats(
            medium=self.medium,
            num_blocks=self._num_blocks,
            num_held=index.num_blocks - index.num_free,
            stored_blocks=self.stored_blocks,
            loaded_blocks=self.loaded_blocks,
            evicted_blocks=index.evicted_blocks,
            **({} if self.wear is None else self.wear.stats()),
        )

    def shutdown(self) -> None:
        """Do nothing: no thread is running."""


class SimulatedTieredManager(TieredOffloadingManager):
    """Host memory over simulated tiers, for a replay: it waits instead of answering None, and no time passes.

    `cache_policy` is that of host memory; `clock` is the trace's own time in seconds. For an arbiter, `block_s` is the
    time in seconds that each tier takes to load a block, and `host_block_s` that from host memory to the device.
    `rules` has for each tier its write policy, whether an arbiter limits its loads, its cache policy and its
    endurance (default: write-through, no arbiter, `tier_policy`, no budget). For endurance, the whole medium has
    `wear_blocks` blocks of `block_bytes`.
    """

    def __init__(
        self,
        block_size: int,
        num_blocks: int,
        tier_blocks: Sequence[int],
        cache_policy: str,
        *,
        tier_policy: str = "lru",
        clock: Callable[[], float],
        block_s: Sequence[float] | None = None,
        host_block_s: float = 0.0,
        rules: Sequence[tuple[str, bool, str, float | str | None]] = (),
        wear_blocks: Sequence[int] = (),
        block_bytes: int = 1,
        **host_options: Any,
    ) -> None:
        rules = rules or [("write_through", False, tier_policy, None)] * len(tier_blocks)
        self.simulated = [
            SimulatedTier(blocks, policy, wear=Wear(worn, block_bytes, clock=clock), clock=clock)
            for blocks, worn, (_, _, policy, _) in zip(tier_blocks, wear_blocks or tier_blocks, rules, strict=True)
        ]
        configs = [
            TierConfig(write_policy=policy, max_store_blocks=_MAX_STORE_BLOCKS, arbiter=arbiter, endurance=endurance)
            for policy, arbiter, _, endurance in rules
        ]
        tiers = list(zip(self.simulated, configs, strict=True))
        super().__init__(block_size, num_blocks, tiers, cache_policy, clock=clock, **host_options)
        self._host_link, self._trace_clock = Queue(host_block_s), clock
        for controller, seconds in zip(self.controllers, block_s or [0.0] * len(tiers), strict=True):
            if controller.link is not None:
                controller.link = QueuedLink(seconds, self._host_link)

    def lookup(self, keys: Any = None, req_context: ReqContext | None = None, *, key: Any = None) -> bool | int:
        while (answer := super().lookup(keys, req_context, key=key)) is None:
            self._settle()
        return answer

    def states(self, keys: list[bytes]) -> bytes:
        """Return the `BlockState` of each key, in host memory or in the tier that has it."""
        return bytes(map(max, self.pool.states(keys), *(tier._index.states(keys) for tier in self.simulated)))

    def prepare_load(self, keys: Any, req_context: ReqContext | None = None) -> Any:
        self._host_link.move(len(keys), self._trace_clock())
        return super().prepare_load(keys, req_context)

    def on_request_finished(self, req_context: ReqContext, *, use_positions: bool = False) -> None:
        super().on_request_finished(req_context, use_positions=use_positions)
        self._settle()

    def _settle(self) -> None:
        for _ in range(_MOST_STEPS):
            self.on_schedule_end()
            if not self.has_pending_work():
                return
        raise ReplayError(f"a simulated tier has not ended its jobs after {_MOST_STEPS:,} steps: the log says why")
