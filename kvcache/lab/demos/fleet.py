"""Run several engines in processes over one store: their hits on blocks of other engines, and times to first block.

An engine is a scheduler's loop over a real manager, host pool and tier. Its prefill is a pause for each block; then the
block's bytes follow from its key. Every loaded block is compared with them.
"""

from __future__ import annotations

import mmap
import multiprocessing
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from queue import Empty
from typing import TYPE_CHECKING, Any

import numpy as np

from kvcache.assembly.assemble import parse_tier
from kvcache.request import ReqContext
from kvcache.tiering.manager import TieredOffloadingManager

if TYPE_CHECKING:
    from kvcache.tiers.base.tier import HostBlocks

Progress = Callable[[int], None]
"""Called with the number of engines that have ended."""
_PATIENCE_S = 120.0
_SETTLE_S = 60.0


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests that share prefixes: a system prompt, one of a few documents, and blocks of their own.

    `num_requests` and `host_blocks` are those of each engine; `prefill_s` is the time to compute a block.
    """

    num_requests: int = 24
    num_prompts: int = 2
    num_documents: int = 6
    prompt_blocks: int = 8
    document_blocks: int = 12
    own_blocks: int = 2
    block_bytes: int = 256 << 10
    host_blocks: int = 96
    prefill_s: float = 0.002
    seed: int = 0

    def requests(self, engine: int) -> list[list[bytes]]:
        """Return the keys of an engine's requests, each in prefix order."""
        dice = random.Random(self.seed * 1000 + engine)
        requests = []
        for number in range(self.num_requests):
            prompt, document = dice.randrange(self.num_prompts), dice.randrange(self.num_documents)
            keys = [f"prompt {prompt} block {i}" for i in range(self.prompt_blocks)]
            keys += [f"prompt {prompt} document {document} block {i}" for i in range(self.document_blocks)]
            keys += [f"engine {engine} request {number} block {i}" for i in range(self.own_blocks)]
            requests.append([key.encode() for key in keys])
        return requests


@dataclass(frozen=True, slots=True)
class EngineReport:
    """The counts of one engine.

    The `needed_blocks` of its requests came from its own host memory or from the store, or were computed. The bytes of
    `wrong_blocks` did not match their key. `first_block_s` holds the time to the first block of each request.
    """

    engine: int
    needed_blocks: int
    host_blocks: int
    store_blocks: int
    computed_blocks: int
    stored_blocks: int
    wrong_blocks: int
    first_block_s: list[float]
    seconds: float


@dataclass(frozen=True, slots=True)
class FleetReport:
    """The counts of engines over one store.

    `unique_blocks` are the different blocks of all requests; stored blocks beyond them were stored twice.
    """

    num_engines: int
    engines: list[EngineReport]
    unique_blocks: int
    block_bytes: int

    @property
    def hit_rate(self) -> float:
        """Share of the needed blocks that were not computed."""
        needed = sum(one.needed_blocks for one in self.engines)
        return 1 - sum(one.computed_blocks for one in self.engines) / needed

    @property
    def stored_blocks(self) -> int:
        """Blocks sent to the store by all engines."""
        return sum(one.stored_blocks for one in self.engines)

    @property
    def first_block_s(self) -> float:
        """Mean time to the first block of a request."""
        times = [value for one in self.engines for value in one.first_block_s]
        return sum(times) / len(times)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return {
            **asdict(self),
            "hit_rate": self.hit_rate,
            "stored_blocks": self.stored_blocks,
            "stored_bytes": self.stored_blocks * self.block_bytes,
            "first_block_s": self.first_block_s,
        }


def payload(key: bytes, block_bytes: int) -> HostBlocks:
    """Return the bytes of a key's block."""
    blocks: HostBlocks = np.resize(np.random.default_rng(list(key)).integers(0, 256, 4096, np.uint8), block_bytes)
    return blocks


def run_fleet(
    entry: Mapping[str, Any],
    num_engines: int,
    workload: Workload,
    in_turn: bool = False,
    progress: Progress | None = None,
) -> FleetReport:
    """Run engines in processes over one store, all at once or each after the end of the one before.

    `entry` is an entry of ``extra_config["tiers"]``; `progress` is called when an engine has ended.
    """
    parse_tier(entry)
    context = multiprocessing.get_context("spawn")
    reports: Queue[EngineReport | str] = context.Queue()
    engines: list[EngineReport] = []
    groups = [[number] for number in range(num_engines)] if in_turn else [list(range(num_engines))]
    for group in groups:
        start = context.Barrier(len(group))
        processes = [
            context.Process(target=_run_engine, args=(dict(entry), number, workload, start, reports), daemon=True)
            for number in group
        ]
        for process in processes:
            process.start()
        try:
            for _ in group:
                try:
                    report = reports.get(timeout=_PATIENCE_S)
                except Empty:
                    raise OSError(f"an engine did not end within {_PATIENCE_S:.0f} s") from None
                if isinstance(report, str):
                    raise OSError(f"an engine failed: {report}")
                engines.append(report)
                if progress is not None:
                    progress(len(engines))
        finally:
            for process in processes:
                process.join(1.0)
                process.terminate()
    unique = {key for number in range(num_engines) for keys in workload.requests(number) for key in keys}
    return FleetReport(num_engines, sorted(engines, key=lambda one: one.engine), len(unique), workload.block_bytes)


def _run_engine(
    entry: dict[str, Any], number: int, workload: Workload, start: Barrier, reports: Queue[EngineReport | str]
) -> None:
    try:
        reports.put(_serve(entry, number, workload, start))
    except BaseException as error:
        reports.put(f"{type(error).__name__}: {error}")
        start.abort()


def _serve(entry: dict[str, Any], number: int, workload: Workload, start: Barrier) -> EngineReport:
    size = workload.block_bytes
    flat = np.frombuffer(mmap.mmap(-1, workload.host_blocks * size), np.uint8)
    host: HostBlocks = flat.reshape(workload.host_blocks, size)
    settings = parse_tier({"deadline_s": 10.0, **entry})
    tier = settings.make(host, {"model": "fleet", "block_bytes": size})
    manager = TieredOffloadingManager(16, workload.host_blocks, [(tier, settings.config)], deadline_s=10.0)
    needed = computed = wrong = 0
    first_block_s = []
    try:
        start.wait(_PATIENCE_S)
        begun = time.perf_counter()
        for keys in workload.requests(number):
            asked = time.perf_counter()
            request = ReqContext()
            while (num_found := manager.lookup(keys, request)) is None:
                manager.on_schedule_end()
                time.sleep(0.0005)
            if num_found:
                ids = manager.prepare_load(keys[:num_found], request).block_ids  # type: ignore[attr-defined]
                wrong += sum(
                    not np.array_equal(host[block_id], payload(key, size))
                    for key, block_id in zip(keys, ids, strict=False)
                )
                manager.complete_load(keys[:num_found], request)
                first_block_s.append(time.perf_counter() - asked)
            for i, _ in enumerate(keys[num_found:]):
                time.sleep(workload.prefill_s)
                if not num_found and not i:
                    first_block_s.append(time.perf_counter() - asked)
            needed += len(keys)
            computed += len(keys) - num_found
            output = manager.prepare_store(keys[num_found:], request)
            if output is not None:
                ids = output.store_spec.block_ids  # type: ignore[attr-defined]
                for key, block_id in zip(output.keys_to_store, ids, strict=True):
                    host[block_id] = payload(key, size)
                manager.complete_store(output.keys_to_store, request)
            manager.on_request_finished(request)
            manager.on_schedule_end()
        manager.settle(_SETTLE_S)
        seconds = time.perf_counter() - begun
        (stats,) = manager.tier_stats()
        # A promoted block may serve several requests from host memory afterwards.
        promoted = stats.promoted_blocks
        return EngineReport(
            number,
            needed,
            needed - computed - promoted,
            promoted,
            computed,
            stats.tier.stored_blocks,
            wrong,
            first_block_s,
            seconds,
        )
    finally:
        manager.shutdown()
