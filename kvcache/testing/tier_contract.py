"""The contract of all tiers, as tests: subclass `TierContract`, say how a tier is opened, and run it under pytest."""

from __future__ import annotations

import mmap
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvcache.request import ReqContext

if TYPE_CHECKING:
    from kvcache.tiering.tier import HostBlocks, Tier, TierResult


class TierContract(ABC):
    """What every tier must do.

    Attributes
    ----------
    block_bytes : int
        Bytes of the blocks that the tests use.
    evicts : bool
        Whether a tier that is full makes room for new blocks.
    survives_restart : bool
        Whether a tier that is shut down and opened again at the same place still holds its blocks.
    timeout_s : float
        How long a job may take.
    """

    block_bytes = 4096
    evicts = True
    survives_restart = False
    timeout_s = 20.0

    @abstractmethod
    def open_tier(self, path: Path, host_blocks: HostBlocks, num_blocks: int) -> Tier:
        """Open a tier of `num_blocks` blocks; the same path is the same place."""

    def test_stored_blocks_are_found_and_come_back_as_they_were(self, tmp_path: Path) -> None:
        with _Bench(self, tmp_path, 16) as bench:
            assert bench.tier.lookup(_keys(0, 1)) == 0
            assert sorted(bench.store(_keys(0, 1, 2)).done) == _keys(0, 1, 2)
            assert bench.found(_keys(0, 1, 2, 3)) == 3
            assert bench.found(_keys(3, 0)) == 0
            assert sorted(bench.load(_keys(2, 0, 1)).done) == _keys(0, 1, 2)
            assert bench.tier.stats().num_held == 3

    def test_held_block_is_not_stored_again(self, tmp_path: Path) -> None:
        with _Bench(self, tmp_path, 16) as bench:
            bench.store(_keys(0, 1))
            result = bench.store(_keys(1, 2))
            assert (result.done, result.failed) == (_keys(2), [])

    def test_absent_block_fails_without_an_error(self, tmp_path: Path) -> None:
        with _Bench(self, tmp_path, 16) as bench:
            bench.store(_keys(0))
            result = bench.load(_keys(0, 7))
            assert (result.done, result.failed, result.error) == (_keys(0), _keys(7), "")

    def test_every_job_is_reported_once(self, tmp_path: Path) -> None:
        with _Bench(self, tmp_path, 64) as bench:
            taken = []
            for job_id in range(1, 33):
                key = _keys(job_id)
                bench.fill(key, job_id)
                if bench.tier.submit_store(job_id, key, [job_id]):
                    taken.append(job_id)
            assert taken
            results = bench.wait_for(set(taken))
            assert sorted(result.job_id for result in results) == taken
            assert sorted(key for result in results for key in result.done) == sorted(
                key for job_id in taken for key in _keys(job_id)
            )
            time.sleep(0.05)
            assert bench.tier.finished() == []

    def test_full_tier_makes_room_and_names_what_left(self, tmp_path: Path) -> None:
        if not self.evicts:
            return
        with _Bench(self, tmp_path, 4) as bench:
            bench.store(_keys(0, 1, 2, 3))
            bench.tier.touch(_keys(0), ReqContext())
            result = bench.store(_keys(4))
            assert len(result.removed) == 1
            assert result.removed[0] != _keys(0)[0]
            assert bench.found(result.removed) == 0
            assert bench.found(_keys(4)) == 1
            assert bench.tier.stats().num_held == 4

    def test_unknown_keys_may_be_touched(self, tmp_path: Path) -> None:
        with _Bench(self, tmp_path, 4) as bench:
            context = ReqContext()
            bench.tier.touch(_keys(0, 1), context)
            bench.tier.on_request_finished(context)
            assert bench.found(_keys(0)) == 0

    def test_reset_forgets_and_still_reports(self, tmp_path: Path) -> None:
        with _Bench(self, tmp_path, 16) as bench:
            bench.store(_keys(0, 1))
            bench.fill(_keys(2), 0)
            bench.fill(_keys(0), 1)
            jobs = set()
            if bench.tier.submit_store(91, _keys(2), [0]):
                jobs.add(91)
            if bench.tier.submit_load(92, _keys(0), [1]):
                jobs.add(92)
            bench.tier.reset()
            bench.wait_for(jobs)
            end = time.monotonic() + self.timeout_s
            while bench.tier.stats().unavailable_reason and time.monotonic() < end:
                bench.tier.finished()
                time.sleep(0.001)
            assert [bench.found([key]) for key in _keys(0, 1, 2)] == [0, 0, 0]
            assert sorted(bench.store(_keys(0, 5)).done) == _keys(0, 5)
            assert sorted(bench.load(_keys(0, 5)).done) == _keys(0, 5)

    def test_blocks_survive_a_restart(self, tmp_path: Path) -> None:
        if not self.survives_restart:
            return
        with _Bench(self, tmp_path, 16) as bench:
            bench.store(_keys(0, 1, 2))
        with _Bench(self, tmp_path, 16) as bench:
            assert sorted(bench.load(_keys(0, 1, 2)).done) == _keys(0, 1, 2)

    def test_shutdown_may_come_twice(self, tmp_path: Path) -> None:
        with _Bench(self, tmp_path, 4) as bench:
            bench.store(_keys(0))
            bench.tier.shutdown()


class _Bench:
    """A tier under test and its pool of 64 host blocks."""

    def __init__(self, contract: TierContract, path: Path, num_blocks: int) -> None:
        block_bytes = contract.block_bytes
        flat = np.frombuffer(mmap.mmap(-1, 64 * block_bytes), np.uint8)
        self.host_blocks = flat.reshape(64, block_bytes)
        self.tier = contract.open_tier(path / "tier", self.host_blocks, num_blocks)
        self._timeout_s = contract.timeout_s
        self._num_jobs = 1000

    def __enter__(self) -> _Bench:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.tier.shutdown()

    def fill(self, keys: list[bytes], first_block: int) -> None:
        for i, key in enumerate(keys):
            self.host_blocks[first_block + i] = _payload(key, self.host_blocks.shape[1])

    def store(self, keys: list[bytes]) -> TierResult:
        self.fill(keys, 0)
        self._num_jobs += 1
        assert self.tier.submit_store(self._num_jobs, keys, list(range(len(keys))))
        return self.wait_for({self._num_jobs})[0]

    def load(self, keys: list[bytes]) -> TierResult:
        self.host_blocks[:] = 0
        self._num_jobs += 1
        assert self.tier.submit_load(self._num_jobs, keys, list(range(len(keys))))
        result = self.wait_for({self._num_jobs})[0]
        for key in result.done:
            expected = _payload(key, self.host_blocks.shape[1])
            assert np.array_equal(self.host_blocks[keys.index(key)], expected), f"wrong bytes of {key!r}"
        return result

    def found(self, keys: list[bytes]) -> int:
        end = time.monotonic() + self._timeout_s
        while (answer := self.tier.lookup(keys)) is None:
            assert time.monotonic() < end, "lookup answers None for ever"
            time.sleep(0.001)
        return answer

    def wait_for(self, job_ids: set[int]) -> list[TierResult]:
        results: list[TierResult] = []
        end = time.monotonic() + self._timeout_s
        while {result.job_id for result in results} != job_ids:
            assert time.monotonic() < end, f"jobs {job_ids} did not all end: {results}"
            results += self.tier.finished()
            time.sleep(0.001)
        return results


def _keys(*numbers: int) -> list[bytes]:
    return [b"contract-%03d" % number for number in numbers]


def _payload(key: bytes, num_bytes: int) -> HostBlocks:
    payload: HostBlocks = np.random.default_rng(list(key)).integers(0, 256, num_bytes, np.uint8)
    return payload
