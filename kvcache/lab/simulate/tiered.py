"""A replay over a host pool with a real tier below it: requests wait for their blocks, as an engine's would."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import numpy as np

from kvcache.assembly.assemble import read_tiers
from kvcache.tiering.controller import TierConfig
from kvcache.tiering.manager import TieredOffloadingManager
from kvcache.tiers.disk.tier import DiskTier

if TYPE_CHECKING:
    from kvcache.request import ReqContext
    from kvcache.tiering.tier import HostBlocks, Tier

_PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class DiskChoice:
    """Where the disk tier of a replay is, and how large it may be."""

    path: Path
    capacity_bytes: int


@dataclass(frozen=True, slots=True)
class TierEntry:
    """Any tier, as an entry of ``extra_config["tiers"]``."""

    entry: dict[str, Any]


class PatientManager(TieredOffloadingManager):
    """A tiered manager for a scheduler that has nothing else to do: it waits instead of answering None.

    A request's stores are on disk before the next request comes, so that a replay gives the same counts every time.
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
        """Return nanoseconds that stand still while the manager waits, where a scheduler would do something else."""
        return perf_counter_ns() - self._waited_ns

    _waited_ns = 0
    found_blocks = 0  # in the folder, before the first request

    def as_dict(self) -> dict[str, Any]:
        """Return what the tier did, for a report."""
        return {"found_blocks": self.found_blocks, **asdict(self.tier_stats()[0])}


@contextmanager
def patient_manager(
    block_size: int,
    policy: str,
    below: DiskChoice | TierEntry,
    host_blocks: HostBlocks,
    source: str = "",
    **host_options: Any,
) -> Iterator[PatientManager]:
    """Open the tier and a manager above it, a disk under the manager's policy; close the tier at the end.

    `source` says whose blocks these are: a trace's ids mean nothing beside another trace, whose folder is refused.

    Raises
    ------
    ValueError
        The policy is not known, or the folder cannot be used.
    """
    fingerprint = {"source": source, "block_size": block_size}
    tier: Tier
    if isinstance(below, TierEntry):
        (settings,) = read_tiers([below.entry], "--tier")
        tier = settings.tier.from_config(settings.options, host_blocks, fingerprint)
    else:
        tier = DiskTier(
            below.path,
            below.capacity_bytes,
            host_blocks,
            fingerprint=fingerprint,
            cache_policy=policy,
            preallocate=False,
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


def plain_host_blocks(num_blocks: int, block_bytes: int) -> HostBlocks:
    """Return host blocks for a replay that compares no bytes."""
    flat = np.frombuffer(mmap.mmap(-1, num_blocks * block_bytes), np.uint8)
    return flat.reshape(num_blocks, block_bytes)
