"""The contract of all tiers, as tests: subclass `TierContract`, override `open_tier`, and run it under pytest.

Each failure shows the expected and the actual value, with or without pytest's assertion rewriting. If a call of the
tier hangs, the test fails; the test run does not hang.
"""

from __future__ import annotations

import mmap
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kvcache.request import ReqContext
from kvcache.testing.bounded import HangError, run_within
from kvcache.tiers.base.job_tier import JobTier
from kvcache.tiers.base.tier import Tier

if TYPE_CHECKING:
    from kvcache.tiers.base.tier import HostBlocks, TierResult

_NUM_HOST_BLOCKS = 64


class TierContract(ABC):
    """Tests that each tier must pass.

    Attributes
    ----------
    block_bytes : int
        Bytes of the blocks that the tests use.
    evicts : bool
        Whether a full tier evicts blocks for new ones and reports them.
    is_bounded : bool
        Whether the tier, not its medium, bounds the number of blocks.
    survives_restart : bool
        Whether a tier that is shut down and opened again at the same place still holds its blocks.
    timeout_s : float
        Time limit of a job or a call.
    """

    block_bytes = 4096
    evicts = True
    is_bounded = True
    survives_restart = False
    timeout_s = 20.0

    @abstractmethod
    def open_tier(self, path: Path, host_blocks: HostBlocks, num_blocks: int) -> Tier:
        """Open the tier under test. The same path must open the same storage.

        Parameters
        ----------
        path : Path
            A folder that belongs to the test, for the tier's files, or to derive a name from.
        host_blocks : numpy.ndarray
            The pool, uint8, shape (num_blocks, block_bytes).
        num_blocks : int
            Blocks that the tier must hold.

        Returns
        -------
        Tier
            The tier. The contract shuts it down.
        """

    def options(self, path: Path, num_blocks: int) -> dict[str, Any]:
        """Return the options with which `from_config` opens the tier; tested if the tier has an `options_type`.

        Parameters
        ----------
        path : Path
            As for `open_tier`.
        num_blocks : int
            Blocks of `block_bytes` that the tier must hold.
        """
        return {}

    def test_from_config_returns_an_open_tier(self, tmp_path: Path) -> None:
        with _Bench(self, tmp_path, 16) as bench:
            tier_type = bench.tier.tier_type
        if tier_type.options_type is Tier.options_type:
            pytest.skip("the tier has no options_type")
        with _Bench(self, tmp_path / "configured", 16, tier_type) as bench:
            _expect("keys stored", sorted(bench.store(_keys(0, 1)).done), _keys(0, 1))
            _expect("keys loaded", sorted(bench.load(_keys(0, 1)).done), _keys(0, 1))

    def test_exists_answers_keys_in_order(self, tmp_path: Path) -> None:
        with _Bench(self, tmp_path, 16) as bench:
            tier_type = bench.tier.tier_type
            if not issubclass(tier_type, JobTier) or tier_type.exists is JobTier.exists:
                pytest.skip("the tier owns its index, and has no exists")
            bench.store(_keys(0, 1))
            answer = [bool(is_held) for is_held in bench.tier.exists(_keys(0, 7, 1, 8, 9))]
            _expect("exists of keys 0, 7, 1, 8, 9 if 0 and 1 are held", answer, [True, False, True, False, False])

    def test_stored_blocks_are_found_and_loaded(self, tmp_path: Path) -> None:
        with _Bench(self, tmp_path, 16) as bench:
            _expect("blocks found in an empty tier", bench.found(_keys(0, 1)), 0)
            _expect("keys stored", sorted(bench.store(_keys(0, 1, 2)).done), _keys(0, 1, 2))
            _expect("blocks found of three stored and one absent", bench.found(_keys(0, 1, 2, 3)), 3)
            _expect("blocks found behind an absent one", bench.found(_keys(3, 0)), 0)
            _expect("keys loaded", sorted(bench.load(_keys(2, 0, 1)).done), _keys(0, 1, 2))
            _expect("stats().num_held", bench.tier.stats().num_held, 3)

    def test_held_block_is_not_stored_again(self, tmp_path: Path) -> None:
        with _Bench(self, tmp_path, 16) as bench:
            bench.store(_keys(0, 1))
            result = bench.store(_keys(1, 2))
            # A held key is in neither list.
            _expect("(done, failed) of a held key and a new one", (result.done, result.failed), (_keys(2), []))

    def test_absent_block_fails_without_an_error(self, tmp_path: Path) -> None:
        with _Bench(self, tmp_path, 16) as bench:
            bench.store(_keys(0))
            result = bench.load(_keys(0, 7))
            _expect(
                "(done, failed, error) of a held key and an absent one",
                (result.done, result.failed, result.error),
                (_keys(0), _keys(7), ""),
            )

    def test_every_job_is_reported_once(self, tmp_path: Path) -> None:
        with _Bench(self, tmp_path, 64) as bench:
            taken = []
            for job_id in range(1, 33):
                key = _keys(job_id)
                bench.fill(key, job_id)
                if bench.tier.submit_store(job_id, key, [job_id]):
                    taken.append(job_id)
            _expect("whether a job of 32 was taken", bool(taken), True)
            results = bench.wait_for(set(taken))
            _expect("jobs reported", sorted(bench.job_ids(results)), taken)
            done = sorted(key for result in results for key in result.done)
            _expect("keys reported as stored", done, sorted(key for job_id in taken for key in _keys(job_id)))
            time.sleep(0.05)
            _expect("jobs reported again", bench.job_ids(bench.tier.get_finished()), [])

    def test_host_blocks_outside_job_stay_untouched(self, tmp_path: Path) -> None:
        with _Bench(self, tmp_path, 16) as bench:
            bench.store(_keys(0, 1, 2))
            bench.load(_keys(0, 1))
            changed = np.flatnonzero(bench.host_blocks[2:].any(axis=1)) + 2
            _expect("host blocks that a load of blocks 0 and 1 changed", changed.tolist(), [])

    def test_full_tier_names_evicted_blocks(self, tmp_path: Path) -> None:
        if not self.evicts:
            pytest.skip("the tier does not evict")
        with _Bench(self, tmp_path, 4) as bench:
            bench.store(_keys(0, 1, 2, 3))
            bench.tier.touch(_keys(0), ReqContext())
            removed = bench.store(_keys(4)).removed
            _expect("number of keys removed for one", len(removed), 1)
            _expect("whether the block used last was removed", removed == _keys(0), False)
            _expect("blocks found that were removed", bench.found(removed), 0)
            _expect("blocks found of the one that came", bench.found(_keys(4)), 1)
            _expect("stats().num_held", bench.tier.stats().num_held, 4)

    def test_tier_stays_within_its_capacity(self, tmp_path: Path) -> None:
        if not self.is_bounded:
            pytest.skip("the tier has no bound of its own")
        with _Bench(self, tmp_path, 4) as bench:
            for number in range(12):
                if bench.submit_store(_keys(number)) is not None:
                    bench.wait_for({bench.last_job})
            held = [number for number in range(12) if bench.found(_keys(number))]
            if len(held) > 4 or bench.tier.stats().num_held > 4:
                raise AssertionError(
                    f"a tier of 4 blocks holds {len(held)}: {held}; stats().num_held {bench.tier.stats().num_held}"
                )

    def test_unknown_keys_may_be_touched(self, tmp_path: Path) -> None:
        with _Bench(self, tmp_path, 4) as bench:
            context = ReqContext()
            bench.tier.touch(_keys(0, 1), context)
            bench.tier.on_request_finished(context)
            _expect("blocks found that were only touched", bench.found(_keys(0)), 0)

    def test_job_cancels_at_any_time(self, tmp_path: Path) -> None:
        with _Bench(self, tmp_path, 16) as bench:
            bench.store(_keys(0))
            bench.tier.cancel(bench.last_job)
            bench.tier.cancel(123456)
            bench.fill(_keys(1), 1)
            if bench.tier.submit_store(91, _keys(1), [1]):
                bench.tier.cancel(91)
                (result,) = bench.wait_for({91})
                _expect("keys of a cancelled job, done or failed", result.done + result.failed, _keys(1))
            bench.store(_keys(1))
            _expect("keys loaded", sorted(bench.load(_keys(0, 1)).done), _keys(0, 1))

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
            bench.wait_until_available()
            _expect("blocks found after a reset", [bench.found([key]) for key in _keys(0, 1, 2)], [0, 0, 0])
            _expect("keys stored after a reset", sorted(bench.store(_keys(0, 5)).done), _keys(0, 5))
            _expect("keys loaded after a reset", sorted(bench.load(_keys(0, 5)).done), _keys(0, 5))

    def test_blocks_survive_a_restart(self, tmp_path: Path) -> None:
        if not self.survives_restart:
            pytest.skip("the tier does not survive a restart")
        with _Bench(self, tmp_path, 16) as bench:
            bench.store(_keys(0, 1, 2))
        with _Bench(self, tmp_path, 16) as bench:
            bench.wait_until_available()
            _expect("keys loaded after a restart", sorted(bench.load(_keys(0, 1, 2)).done), _keys(0, 1, 2))

    def test_reset_survives_a_restart(self, tmp_path: Path) -> None:
        if not self.survives_restart:
            pytest.skip("the tier does not survive a restart")
        with _Bench(self, tmp_path, 16) as bench:
            bench.store(_keys(0, 1, 2))
            bench.tier.reset()
            bench.wait_until_available()
            bench.store(_keys(3))
        with _Bench(self, tmp_path, 16) as bench:
            bench.wait_until_available()
            # The reset had no version, so the last blocks are private, and this start has other weights.
            _expect("blocks of a reset found after a restart", bench.found(_keys(3)), 0)
            if self.is_bounded:
                # A shared store still has the blocks of the fingerprint, for engines that were not reset.
                _expect("blocks found after a reset and a restart", bench.found(_keys(0, 1, 2)), 0)

    def test_shutdown_may_come_twice(self, tmp_path: Path) -> None:
        with _Bench(self, tmp_path, 4) as bench:
            bench.store(_keys(0))
            bench.tier.shutdown()


def _expect(what: str, actual: object, expected: object) -> None:
    if actual != expected:
        raise AssertionError(f"{what}: expected {expected!r}, got {actual!r}")


class _Watched:
    """Calls a tier with a time limit."""

    def __init__(self, open_tier: Callable[[], Tier], timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._hangs = False
        self._tier = self._call("open_tier", open_tier)
        if not isinstance(self._tier, Tier):
            raise AssertionError(f"expected a Tier to be opened, got {self._tier!r}")

    @property
    def tier_type(self) -> Any:
        return type(self._tier)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args: self._call(name, getattr(self._tier, name), *args)

    def _call(self, name: str, method: Callable[..., Any], *args: Any) -> Any:
        if self._hangs:
            return None
        try:
            return run_within(self._timeout_s, lambda: method(*args), name)
        except HangError:
            self._hangs = True
            raise


class _Bench:
    """A tier under test and its pool of host blocks."""

    def __init__(self, contract: TierContract, path: Path, num_blocks: int, configured: Any = None) -> None:
        block_bytes = contract.block_bytes
        flat = np.frombuffer(mmap.mmap(-1, _NUM_HOST_BLOCKS * block_bytes), np.uint8)
        self.host_blocks = flat.reshape(_NUM_HOST_BLOCKS, block_bytes)
        self._timeout_s = contract.timeout_s

        def open_tier() -> Tier:
            if configured is None:
                return contract.open_tier(path / "tier", self.host_blocks, num_blocks)
            options = contract.options(path / "tier", num_blocks)
            try:
                tier: Tier = configured.from_config(options, self.host_blocks, {"model": "contract"})
            except (TypeError, ValueError) as error:
                raise AssertionError(
                    f"from_config raised {error!r} for {options}; override TierContract.options"
                ) from error
            return tier

        self.tier = _Watched(open_tier, contract.timeout_s)
        self.last_job = 1000
        self._early: list[TierResult] = []

    def __enter__(self) -> _Bench:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.tier.shutdown()

    def fill(self, keys: list[bytes], first_block: int) -> None:
        for i, key in enumerate(keys):
            self.host_blocks[first_block + i] = _payload(key, self.host_blocks.shape[1])

    def submit_store(self, keys: list[bytes]) -> int | None:
        """Submit a job, and retry while the tier is busy. Return its id, or None if the tier never accepts it."""
        self.fill(keys, 0)
        self.last_job += 1
        return self.last_job if self.tier.submit_store(self.last_job, keys, list(range(len(keys)))) else None

    def store(self, keys: list[bytes]) -> TierResult:
        if self.submit_store(keys) is None:
            raise AssertionError(f"submit_store of {keys} was refused: {self.tier.stats()}")
        return self.wait_for({self.last_job})[0]

    def load(self, keys: list[bytes]) -> TierResult:
        self.host_blocks[:] = 0
        self.last_job += 1
        if not self.tier.submit_load(self.last_job, keys, list(range(len(keys)))):
            raise AssertionError(f"submit_load of {keys} was refused: {self.tier.stats()}")
        result = self.wait_for({self.last_job})[0]
        for key in result.done:
            expected = _payload(key, self.host_blocks.shape[1])
            loaded = self.host_blocks[keys.index(key)]
            if not np.array_equal(loaded, expected):
                wrong = np.flatnonzero(loaded != expected)
                raise AssertionError(f"{len(wrong)} bytes of {key!r} are wrong, the first at {wrong[0]}")
        return result

    def found(self, keys: list[bytes]) -> int:
        """Repeat `lookup` until it returns an answer, and return it."""
        end_s = time.monotonic() + self._timeout_s
        while (answer := self.tier.lookup(keys)) is None:
            if time.monotonic() > end_s:
                raise AssertionError(f"lookup of {keys} still answers None after {self._timeout_s} s")
            self._early += self.tier.get_finished()
            time.sleep(0.001)
        num_held: int = answer
        return num_held

    def wait_for(self, job_ids: set[int]) -> list[TierResult]:
        """Return the results of jobs, and everything else that was reported with them."""
        results, self._early = self._early, []
        results = [result for result in results if result.job_id is not None]
        end_s = time.monotonic() + self._timeout_s
        while set(self.job_ids(results)) != job_ids:
            if time.monotonic() > end_s:
                raise AssertionError(f"jobs {sorted(job_ids)} did not all end in {self._timeout_s} s, but {results}")
            results += [result for result in self.tier.get_finished() if result.job_id is not None]
            time.sleep(0.001)
        return results

    def wait_until_available(self) -> None:
        """Wait for the end of a reset, or of opening."""
        end_s = time.monotonic() + self._timeout_s
        while reason := self.tier.stats().unavailable_reason:
            if time.monotonic() > end_s:
                raise AssertionError(f"the tier is still unavailable after {self._timeout_s} s: {reason}")
            self._early += self.tier.get_finished()
            time.sleep(0.001)

    @staticmethod
    def job_ids(results: list[TierResult]) -> list[int]:
        return [result.job_id for result in results if result.job_id is not None]


def _keys(*numbers: int) -> list[bytes]:
    return [b"contract-%03d" % number for number in numbers]


def _payload(key: bytes, num_bytes: int) -> HostBlocks:
    payload: HostBlocks = np.random.default_rng(list(key)).integers(1, 256, num_bytes, np.uint8)
    return payload
