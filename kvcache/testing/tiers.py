"""Tiers for tests: an in-memory tier that a test drives by hand, and a wrapper that injects faults into any tier."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from kvcache.control.cpu import CPUOffloadingManager
from kvcache.options import check_int
from kvcache.tiers.base.tier import Tier, TierResult, TierStats, checked_host_blocks

if TYPE_CHECKING:
    from kvcache.request import ReqContext
    from kvcache.tiers.base.tier import HostBlocks


@dataclass(slots=True)
class PendingJob:
    """A job that a `ManualTier` has accepted and not yet ended."""

    job_id: int
    is_load: bool
    keys: list[bytes]
    block_ids: list[int]
    moving: list[bytes]
    failed: list[bytes]
    removed: list[bytes]


class ManualTier(Tier):
    """An in-memory tier whose jobs are ended by the test.

    Parameters
    ----------
    num_blocks : int
        Capacity in blocks.
    host_blocks : numpy.ndarray, optional
        The pool. None: no bytes are moved, only keys.
    cache_policy : str or type
        The policy that selects victims when the tier is full.
    is_automatic : bool
        Whether jobs end on their own at the next `get_finished`.

    Attributes
    ----------
    pending : list of PendingJob
        Jobs that have not ended, in the order of submission.
    """

    medium = "MANUAL"

    def __init__(
        self,
        num_blocks: int,
        host_blocks: HostBlocks | None = None,
        cache_policy: str | type = "lru",
        is_automatic: bool = False,
    ) -> None:
        self._host_blocks = None if host_blocks is None else checked_host_blocks(host_blocks)
        self._index = CPUOffloadingManager(1, check_int("num_blocks", num_blocks), cache_policy)
        self.cache_policy = cache_policy
        self._is_automatic = is_automatic
        self._payloads: dict[bytes, bytes] = {}
        self._results: list[TierResult] = []
        self._counts = dict.fromkeys(("loaded", "missed", "refused", "io_errors"), 0)
        self._forget_jobs: set[int] = set()
        self.pending: list[PendingJob] = []

    def lookup(self, keys: list[bytes]) -> int | None:
        num_held: int = self._index.lookup(keys)
        return num_held

    def touch(self, keys: list[bytes], req_context: ReqContext | None = None) -> None:
        self._index.touch(keys, req_context)

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._index.on_request_finished(req_context)

    def submit_store(self, job_id: int, keys: list[bytes], block_ids: list[int]) -> bool:
        output = self._index.prepare_store(keys)
        if output is None:
            self._counts["refused"] += len(keys)
            return False
        for key in output.evicted_keys:
            self._payloads.pop(key, None)
        moving = output.keys_to_store
        self.pending.append(PendingJob(job_id, False, keys, block_ids, moving, [], output.evicted_keys))
        return True

    def submit_load(self, job_id: int, keys: list[bytes], block_ids: list[int]) -> bool:
        held = [key for key in keys if self._index.lookup([key])]
        missed = [key for key in keys if not self._index.lookup([key])]
        self._counts["missed"] += len(missed)
        self._index.prepare_load(held)
        self.pending.append(PendingJob(job_id, True, keys, block_ids, held, missed, []))
        return True

    def end(self, job: PendingJob, error: str = "") -> None:
        """End a job: move its bytes, or fail it with `error`."""
        self.pending.remove(job)
        rows = dict(zip(job.keys, job.block_ids, strict=True))
        is_void = job.job_id in self._forget_jobs
        self._forget_jobs.discard(job.job_id)
        if job.is_load:
            if not is_void:
                self._index.complete_load(job.moving)
            if not error and self._host_blocks is not None:
                for key in job.moving:
                    self._host_blocks[rows[key]] = np.frombuffer(self._payloads[key], self._host_blocks.dtype)
            self._counts["loaded"] += 0 if error else len(job.moving)
        elif not is_void:
            self._index.complete_store(job.moving, success=not error)
            if not error and self._host_blocks is not None:
                for key in job.moving:
                    self._payloads[key] = self._host_blocks[rows[key]].tobytes()
        self._counts["io_errors"] += bool(error)
        done, failed = ([], job.failed + job.moving) if error else (job.moving, job.failed)
        self._results.append(TierResult(job.job_id, done, failed, job.removed, error))

    def get_finished(self) -> list[TierResult]:
        while self._is_automatic and self.pending:
            self.end(self.pending[0])
        results, self._results = self._results, []
        return results

    def reset(self, version: str | int | None = None) -> None:
        # Loads in progress read their blocks from a copy, so nothing needs to wait.
        self._forget_jobs.update(job.job_id for job in self.pending)
        self._index.reset_cache()

    def stats(self) -> TierStats:
        index = self._index.stats()
        return TierStats(
            medium=self.medium,
            num_blocks=index.num_blocks,
            num_held=index.num_blocks - index.num_free - index.num_pending,
            stored_blocks=index.stored_blocks,
            loaded_blocks=self._counts["loaded"],
            evicted_blocks=index.evicted_blocks,
            missed_blocks=self._counts["missed"],
            refused_blocks=self._counts["refused"],
            io_errors=self._counts["io_errors"],
        )

    def shutdown(self) -> None:
        self.pending.clear()


@dataclass(frozen=True, slots=True)
class Faults:
    """Fault rates: probabilities, drawn for each job but for two of them.

    With `error_rate` a job fails as a whole, and with `refuse_rate` it is refused. With `flip_rate` a bit of a block of
    a load is flipped, which the tier detects (drawn for each block), and with `short_rate` only the first blocks of a
    load arrive. With `lost_rate` a reply is lost, and with `late_rate` it comes `delay_s` later; `is_reordering`
    shuffles the replies that are due at one time. With `unknown_rate` a look-up answers "ask again" (drawn for each).
    """

    error_rate: float = 0.0
    refuse_rate: float = 0.0
    flip_rate: float = 0.0
    short_rate: float = 0.0
    lost_rate: float = 0.0
    late_rate: float = 0.0
    delay_s: float = 0.0
    is_reordering: bool = False
    unknown_rate: float = 0.0


class FaultyTier(Tier):
    """Wraps another tier, `inner`, and injects `faults`, which `seed` draws.

    It writes garbage to the rows of `host_blocks`, the pool, whose loads failed. `clock` returns monotonic seconds.
    `num_faults` counts the injected faults, and `lost` lists the jobs whose replies were lost.
    """

    def __init__(
        self,
        inner: Tier,
        faults: Faults,
        host_blocks: HostBlocks,
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.medium = inner.medium
        self.cache_policy = inner.cache_policy
        self.inner = inner
        self.faults = faults
        self.num_faults = 0
        self.lost: list[int] = []
        self._host_blocks = checked_host_blocks(host_blocks)
        self._random = random.Random(seed)
        self._clock = clock
        self._block_ids: dict[int, dict[bytes, int]] = {}
        self._late: list[tuple[float, TierResult]] = []

    def _happens(self, rate: float) -> bool:
        if self._random.random() < rate:
            self.num_faults += 1
            return True
        return False

    def lookup(self, keys: list[bytes]) -> int | None:
        return None if self._happens(self.faults.unknown_rate) else self.inner.lookup(keys)

    def touch(self, keys: list[bytes], req_context: ReqContext | None = None) -> None:
        self.inner.touch(keys, req_context)

    def on_request_finished(self, req_context: ReqContext) -> None:
        self.inner.on_request_finished(req_context)

    def submit_store(self, job_id: int, keys: list[bytes], block_ids: list[int]) -> bool:
        return not self._happens(self.faults.refuse_rate) and self.inner.submit_store(job_id, keys, block_ids)

    def submit_load(self, job_id: int, keys: list[bytes], block_ids: list[int]) -> bool:
        if self._happens(self.faults.refuse_rate) or not self.inner.submit_load(job_id, keys, block_ids):
            return False
        self._block_ids[job_id] = dict(zip(keys, block_ids, strict=True))
        return True

    def cancel(self, job_id: int) -> None:
        self.inner.cancel(job_id)

    def get_finished(self) -> list[TierResult]:
        now_s = self._clock()
        due = [result for due_s, result in self._late if due_s <= now_s]
        self._late = [(due_s, result) for due_s, result in self._late if due_s > now_s]
        for result in self.inner.get_finished():
            if result.job_id is None:
                due.append(result)
                continue
            answer = self._tampered(result, result.job_id)
            if self._happens(self.faults.lost_rate):
                self.lost.append(result.job_id)
            elif self._happens(self.faults.late_rate):
                self._late.append((now_s + self.faults.delay_s, answer))
            else:
                due.append(answer)
        if self.faults.is_reordering:
            self._random.shuffle(due)
        return due

    def _tampered(self, result: TierResult, job_id: int) -> TierResult:
        rows = self._block_ids.pop(job_id, None)
        if self._happens(self.faults.error_rate):
            for key in result.done if rows is not None else ():
                self._spoil(rows, key)
            return replace(result, done=[], failed=result.failed + result.done, error="injected error")
        if rows is None:
            return result
        done = result.done
        if done and self._happens(self.faults.short_rate):
            done = done[: self._random.randrange(len(done))]
        done = [key for key in done if not self._happens(self.faults.flip_rate)]
        failed = [key for key in result.done if key not in set(done)]
        for key in failed:
            self._spoil(rows, key)
        return replace(result, done=done, failed=result.failed + failed)

    def _spoil(self, rows: dict[bytes, int] | None, key: bytes) -> None:
        if rows is not None:
            self._host_blocks[rows[key]].view(np.uint8)[:] ^= np.uint8(1)

    def reset(self, version: str | int | None = None) -> None:
        self.inner.reset(version)

    def stats(self) -> TierStats:
        return self.inner.stats()

    def shutdown(self) -> None:
        self.inner.shutdown()
