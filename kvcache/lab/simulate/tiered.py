"""A replay over a host pool and a real tier: requests wait for their blocks, as in an engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from kvcache.assembly.assemble import parse_tier
from kvcache.tiering.controller import TierConfig
from kvcache.tiering.manager import TieredOffloadingManager
from kvcache.tiers.disk.tier import DiskOptions, DiskTier

if TYPE_CHECKING:
    from kvcache.request import ReqContext
    from kvcache.tiers.base.tier import HostBlocks, Tier

_PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class DiskChoice:
    """The folder and the capacity of a replay's disk tier."""

    path: Path
    capacity_bytes: int


class PatientManager(TieredOffloadingManager):
    """A tiered manager that waits instead of answering None.

    It writes a request's stores before the next request, so that every replay gives the same counts.
    """

    def lookup(self, keys: Any = None, req_context: ReqContext | None = None, *, key: Any = None) -> bool | int:
        while (answer := super().lookup(keys, req_context, key=key)) is None:
            self.settle(_PATIENCE_S)
        return answer

    def on_request_finished(self, req_context: ReqContext, *, use_positions: bool = False) -> None:
        super().on_request_finished(req_context, use_positions=use_positions)
        self.settle(_PATIENCE_S)

    def settle(self, timeout_s: float = 30.0) -> bool:
        self.on_schedule_end()
        start = perf_counter_ns()
        try:
            return super().settle(timeout_s)
        finally:
            self._waited_ns += perf_counter_ns() - start

    def clock(self) -> int:
        """Return nanoseconds that do not advance while the manager waits."""
        return perf_counter_ns() - self._waited_ns

    _waited_ns = 0
    found_blocks = 0  # in the folder, before the first request

    def as_dict(self) -> dict[str, Any]:
        """Return the tier's counts for a report."""
        return {"found_blocks": self.found_blocks, **asdict(self.tier_stats()[0])}


@contextmanager
def patient_manager(
    block_size: int,
    policy: str,
    below: DiskChoice | dict[str, Any],
    host_blocks: HostBlocks,
    source: str = "",
    **host_options: Any,
) -> Iterator[PatientManager]:
    """Open the tier and a manager above it; close the tier at the end. A disk has the manager's policy.

    `below` is a disk, or any tier as an entry of ``extra_config["tiers"]``.
    `source` names the trace: a folder that holds blocks of another trace is refused. Raise ValueError if the policy is
    unknown or the folder cannot be used.
    """
    fingerprint = {"source": source, "block_size": block_size}
    tier: Tier
    if isinstance(below, dict):
        settings = parse_tier(below)
        tier = settings.make(host_blocks, fingerprint)
    else:
        tier = DiskTier(
            DiskOptions(path=str(below.path), capacity=below.capacity_bytes, cache_policy=policy, preallocate=False),
            host_blocks,
            fingerprint,
        )
    rule = TierConfig(deadline_s=_PATIENCE_S, max_store_blocks=1024)
    try:
        manager = PatientManager(
            block_size, len(host_blocks), [(tier, rule)], policy, deadline_s=_PATIENCE_S, **host_options
        )
        manager.found_blocks = tier.stats().num_held
        yield manager
    finally:
        tier.shutdown()
