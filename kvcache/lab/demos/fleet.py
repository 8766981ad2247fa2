"""Several engines in processes of their own over one store: what they hit that another one computed, and how soon.

An engine here is a scheduler's loop over a real manager, host pool and tier. Its prefill is a pause for each block,
after which the block's bytes follow from its key; every block that is loaded is compared with them.
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

from kvcache.assembly.assemble import read_tiers
from kvcache.request import ReqContext
from kvcache.tiering.manager import TieredOffloadingManager

if TYPE_CHECKING:
    from kvcache.tiering.tier import HostBlocks

Progress = Callable[[int], None]
"""Called with the number of engines that have ended."""
_PATIENCE_S = 120.0
_SETTLE_S = 60.0


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests that share prefixes: a system prompt, then one of a few documents, then what is the request's own.

    Parameters
    ----------
    num_requests : int
        Of each engine.
    num_prompts, num_documents : int
        Shared system prompts; documents behind each of them.
    prompt_blocks, document_blocks, own_blocks : int
        Their lengths.
    block_bytes : int
        Bytes of a block.
    host_blocks : int
        Blocks of each engine's host pool.
    prefill_s : float
        How long an engine computes for a block.
    seed : int
        The same seed, the same requests.
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
    """What one engine did.

    Parameters
    ----------
    engine : int
        Its number.
    needed_blocks, host_blocks, store_blocks, computed_blocks : int
        Blocks of its requests; of these from its own host memory, from the store, and computed.
    stored_blocks : int
        Blocks that it sent to the store.
    wrong_blocks : int
        Loaded blocks whose bytes were not those of their key.
    first_block_s : list of float
        Per request, until its first block was there.
    seconds : float
        For all requests.
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
    """What engines over one store did.

    `unique_blocks` are the different blocks of all requests: what is stored beyond them was stored twice.
    """

    num_engines: int
    engines: list[EngineReport]
    unique_blocks: int
    block_bytes: int

    @property
    def hit_rate(self) -> float:
        """Share of the needed blocks that no engine had to compute."""
        needed = sum(one.needed_blocks for one in self.engines)
        return 1 - sum(one.computed_blocks for one in self.engines) / needed

    @property
    def stored_blocks(self) -> int:
        """Blocks sent to the store, by all."""
        return sum(one.stored_blocks for one in self.engines)

    @property
    def first_block_s(self) -> float:
        """Mean time to the first block of a request."""
        times = [value for one in self.engines for value in one.first_block_s]
        return sum(times) / len(times)

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        return {
            **asdict(self),
            "hit_rate": self.hit_rate,
            "stored_blocks": self.stored_blocks,
            "stored_bytes": self.stored_blocks * self.block_bytes,
            "first_block_s": self.first_block_s,
        }


def payload(key: bytes, block_bytes: int) -> HostBlocks:
    """Return the bytes that a block's key stands for."""
    blocks: HostBlocks = np.resize(np.random.default_rng(list(key)).integers(0, 256, 4096, np.uint8), block_bytes)
    return blocks


def run_fleet(
    entry: Mapping[str, Any],
    num_engines: int,
    workload: Workload,
    in_turn: bool = False,
    progress: Progress | None = None,
) -> FleetReport:
    """Run engines in processes of their own over one store.

    Parameters
    ----------
    entry : mapping
        The tier, as an entry of ``extra_config["tiers"]``.
    num_engines : int
        Processes.
    workload : Workload
        What they are asked.
    in_turn : bool
        Whether an engine begins when the one before has ended; else all at once.
    progress : callable, optional
        Called when an engine has ended.
    """
    read_tiers([entry], "a tier")
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
    (settings,) = read_tiers([{"deadline_s": 10.0, **entry}], "a tier")
    tier = settings.tier.from_config(settings.options, host, {"model": "fleet", "block_bytes": size})
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
        # A block that was promoted may serve several requests from host memory afterwards.
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
