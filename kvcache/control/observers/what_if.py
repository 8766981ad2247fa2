"""The what-if of running traffic: estimates the hits of other capacities and policies from a sample of the keys.

The scheduler's thread only logs the uses of sampled keys. An estimate is computed on demand, on a copy.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from kvcache.control.pool import BlockPool
from kvcache.core.policy_adapter import PolicyAdapter
from kvcache.core.sampler import Sampler, pass_requests, run_distances
from kvcache.options import check_int
from kvcache.policies.base import CachePolicy
from kvcache.registry import POLICIES
from kvcache.request import ReqContext

if TYPE_CHECKING:
    import numpy.typing as npt

    Int64Array = npt.NDArray[np.int64]

DEFAULT_USES = 131_072
_MIN_USES = 1_024
# Minimum of the manager's own capacity in the sample, in blocks, unless the capacity itself is smaller.
_MIN_SCALED_BLOCKS = 64
_MULTIPLES = (0.25, 0.5, 1, 2, 4, 8)
_NEEDS_TIME = "learns from when requests come, which is not sampled; replay a trace to compare it"
_NUM_PARTS = 8
_TURN_S = 0.0005
_PAUSE_S = 0.00005
# Its length differs from that of ghosts' keys, so no ghost ever matches it.
_ABSENT = b"-"


def sampler_for(what_if: bool | int, num_blocks: int) -> Sampler | None:
    """Return the sampler for a manager's option `what_if`, or None.

    False: none. True: a log of 131,072 uses. An int: the length of the log, at least 1,024.
    """
    if what_if is False:
        return None
    max_uses = DEFAULT_USES if what_if is True else what_if
    check_int("what_if", max_uses, _MIN_USES, (1 << 30) - 1)
    check_int("num_blocks", num_blocks)
    return Sampler(max_uses, max(0, (num_blocks // _MIN_SCALED_BLOCKS).bit_length() - 1))


@dataclass(frozen=True, slots=True)
class WhatIf:
    """Estimated hits of policies at several capacities, for the traffic of a manager.

    Attributes
    ----------
    num_blocks : int
        The manager's capacity.
    policy : str or None
        The name of its policy, or None.
    capacities : tuple of int
        Blocks, ascending.
    hit_ratios : dict of str to tuple of float
        Per policy and capacity, the share of all uses of a key that are prefix hits: the block and all blocks before it
        in the request are present.
    standard_errors : tuple of float
        Per capacity, the standard error of lru's ratio that sampling causes. Those of other policies are similar.
    sample_rate : float
        Share of the keys that are sampled, a power of 1/2.
    sampled_uses, uses, requests : int
        Uses of sampled keys, uses of all keys, and requests that the estimate is based on.
    notes : tuple of str
        Limits of the estimate.
    """

    num_blocks: int
    policy: str | None
    capacities: tuple[int, ...]
    hit_ratios: dict[str, tuple[float, ...]]
    standard_errors: tuple[float, ...]
    sample_rate: float
    sampled_uses: int
    uses: int
    requests: int
    notes: tuple[str, ...]
    _lru: _Curve = field(repr=False, compare=False)

    def hits_at(self, capacity: int, policy: str = "lru") -> float:
        """Return the hit ratio at any capacity.

        Parameters
        ----------
        capacity : int
            Blocks, >= 1. For policies other than lru, it must be within `capacities`. Between two capacities, the ratio
            is interpolated linearly over the logarithm of the capacity.
        policy : str
            One of `hit_ratios`, or lru.

        Raises
        ------
        ValueError
            The policy was not estimated, or the capacity is out of range.
        """
        check_int("capacity", capacity)
        if policy == "lru":
            return self._lru.at(capacity)
        ratios = self.hit_ratios.get(policy)
        if ratios is None:
            raise ValueError(f"policy must be one of {', '.join({'lru': 0} | self.hit_ratios)}, got {policy!r}")
        if not self.capacities[0] <= capacity <= self.capacities[-1]:
            raise ValueError(
                f"capacity must be in {self.capacities[0]}..{self.capacities[-1]} for {policy}, got {capacity}"
            )
        return float(np.interp(math.log(capacity), np.log(self.capacities), ratios))

    def gain(self, capacity: int, policy: str | None = None) -> float:
        """Return the relative change of hits compared to now; 0.091 means 9.1 % more.

        Parameters
        ----------
        capacity : int
            Blocks, as in `hits_at`.
        policy : str, optional
            Default: the manager's own policy, or lru if that was not estimated.
        """
        base = self._own
        now = self.hits_at(self.num_blocks, base)
        then = self.hits_at(capacity, base if policy is None else policy)
        if now == 0:
            return math.inf if then else 0.0
        return then / now - 1

    @property
    def _own(self) -> str:
        return self.policy if self.policy is not None and self.policy in self.hit_ratios else "lru"

    def as_dict(self) -> dict[str, Any]:
        """Return all values as JSON types."""
        values = {declared.name: getattr(self, declared.name) for declared in fields(self) if declared.repr}
        values["hit_ratios"] = {name: list(ratios) for name, ratios in self.hit_ratios.items()}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    def __str__(self) -> str:
        width = max(map(len, ("blocks", self.policy or "", *self.hit_ratios)))
        named = [f"{capacity:,}{'*' * (capacity == self.num_blocks)}" for capacity in self.capacities]
        lines = ["share of blocks hit, by capacity" + ", * the present one" * (self.num_blocks in self.capacities)]
        lines.append(f"{'blocks':<{width}}" + "".join(f" {capacity:>11}" for capacity in named))
        for name, ratios in self.hit_ratios.items():
            lines.append(f"{name:<{width}}" + "".join(f" {ratio:>11.1%}" for ratio in ratios))
        if self.policy is not None and self.policy not in self.hit_ratios:
            lines.append(f"{self.policy:<{width}} {'-':>11}  the policy in use is not estimated")
        if any(self.standard_errors):
            # For lru. The errors of the other policies are about the same.
            lines.append(f"{'+-':<{width}}" + "".join(f" {2 * error:>11.1%}" for error in self.standard_errors))
        lines += self._headlines()
        lines.append(
            f"estimated from {self.sampled_uses:,} of {self.uses:,} uses in {self.requests:,} requests, "
            f"1 key in {round(1 / self.sample_rate):,}"
        )
        return "\n".join([*lines, *self.notes])

    def _headlines(self) -> Iterator[str]:
        base, here = self._own, self.num_blocks
        if base not in self.hit_ratios or not self.capacities[0] <= here <= self.capacities[-1]:
            return
        if not self.hits_at(here, base):
            return
        if self.policy is not None and base != self.policy:
            yield f"of {self.policy} nothing is estimated; beside {base}:"
        if 2 * here <= self.capacities[-1]:
            yield f"twice the memory: {self.gain(2 * here):+.1%} hits"
        best = max(self.hit_ratios, key=lambda name: self.hits_at(here, name))
        if best != base:
            yield f"{best} instead of {base} at {here:,} blocks: {self.gain(here, best):+.1%} hits"


@dataclass(frozen=True, slots=True)
class _Curve:
    """lru at every capacity: the sorted run distances of the counted uses."""

    distances: Int64Array
    sample: _Sample

    def at(self, capacity: int) -> float:
        # A distance of num_sampled means "never used before", whatever the capacity.
        limit = min(capacity * self.sample.rate, self.sample.num_sampled)
        return self.sample.ratio(int(np.searchsorted(self.distances, limit, side="left")))


class _Sample:
    """A log of sampled uses, request by request: per use the key's hash, and the request's number.

    `rate` is the share of the keys that are sampled, and `uses` counts those of all keys. If earlier uses were dropped
    (`is_window`), the first quarter warms up the ghosts and is not counted.
    """

    def __init__(
        self, hashes: npt.NDArray[np.uint64], numbers: Int64Array, rate: float, uses: float, is_window: bool
    ) -> None:
        self.rate = rate
        self.hashes = hashes
        self.numbers = numbers
        self.num_sampled = n = len(hashes)
        keys, ids = np.unique(hashes, return_inverse=True)
        self.num_keys = len(keys)
        self.ids: Int64Array = ids.astype(np.int64)
        self.starts: Int64Array = np.flatnonzero(np.diff(numbers, prepend=-1)).astype(np.int64)
        begin = int(np.searchsorted(self.starts, n // 4)) if is_window and n else 0
        self.first_counted = begin
        self.num_counted = n - int(self.starts[begin]) if begin else n
        self.expected = uses * rate * (self.num_counted / n if n else 0.0)

    def ratio(self, num_hits: int) -> float:
        """Return the share of all uses that this number of sampled hits represents.

        A difference between the expected and the actual number of sampled uses stems from a few hot keys that are, or
        are not, in the sample. Their uses would have been hits (SHARDS_adj of the paper).
        """
        if self.expected == 0:
            return 0.0
        return min(max((num_hits + self.expected - self.num_counted) / self.expected, 0.0), 1.0)

    def lru(self) -> _Curve:
        distances = run_distances(self.ids, self.starts)
        return _Curve(np.sort(distances[self.num_sampled - self.num_counted :]), self)

    def requests(self) -> Iterator[tuple[int, int, list[bytes]]]:
        """Yield, per sampled request, its number, the number of requests since the previous one, and its keys."""
        raw = self.hashes.tobytes()
        keys = [raw[at : at + 8] for at in range(0, len(raw), 8)]
        starts = self.starts.tolist()
        numbers = self.numbers[self.starts].tolist()
        ends = [*starts, len(keys)][1:]
        for i, (begin, end) in enumerate(zip(starts, ends, strict=True)):
            yield i, numbers[i] - numbers[i - 1] if i else 1, keys[begin:end]

    def part(self, index: int, uses: int, is_window: bool) -> _Sample:
        """Return one part of the sample, as divided by the next bits of the hashes."""
        halvings = round(-math.log2(self.rate))
        bits = self.hashes << np.uint64(halvings) >> np.uint64(64 - _NUM_PARTS.bit_length() + 1)
        mine = bits == index
        return _Sample(self.hashes[mine], self.numbers[mine], self.rate / _NUM_PARTS, uses, is_window)


def estimate(
    sampler: Sampler | None,
    num_blocks: int,
    policy: type,
    policies: Iterable[str] | None = None,
    capacities: Iterable[int] | None = None,
) -> WhatIf:
    """Estimate the hits of policies at several capacities; see `CPUOffloadingManager.what_if`."""
    if sampler is None:
        raise ValueError("the manager samples nothing: make it with what_if=True")
    at = _checked_capacities(num_blocks, capacities)
    notes: list[str] = []
    chosen = _compiled(notes) if policies is None else _named(policies)
    hashes, numbers, uses, num_requests = sampler.snapshot()
    sample = _Sample(hashes, numbers, 0.5**sampler.num_halvings, uses, sampler.is_window)
    lru = sample.lru()
    ratios = {}
    # Run distances give lru at every capacity at once; any other policy is simulated at each of them.
    for name, policy_type in chosen.items():
        if name == "lru":
            ratios[name] = tuple(lru.at(capacity) for capacity in at)
        else:
            ratios[name] = tuple(sample.ratio(_ghost_hits(sample, policy_type, capacity)) for capacity in at)
    if not uses:
        notes.append("no request has finished yet")
    if sampler.is_window:
        notes.append(f"the last {uses:,} uses alone: older ones have been dropped")
    if at[0] * sample.rate < _NUM_PARTS:
        notes.append(f"capacities below {math.ceil(_NUM_PARTS / sample.rate):,} blocks are too small for this sample")
    return WhatIf(
        num_blocks=num_blocks,
        policy=POLICIES.name_of(policy),
        capacities=at,
        hit_ratios=ratios,
        standard_errors=_standard_errors(sample, uses, sampler.is_window, at),
        sample_rate=sample.rate,
        sampled_uses=sample.num_sampled,
        uses=uses,
        requests=num_requests,
        notes=tuple(notes),
        _lru=lru,
    )


def _checked_capacities(num_blocks: int, capacities: Iterable[int] | None) -> tuple[int, ...]:
    if capacities is None:
        return tuple(sorted({max(1, int(num_blocks * multiple)) for multiple in _MULTIPLES}))
    at = tuple(capacities)
    if not at:
        raise ValueError("capacities must not be empty")
    for capacity in at:
        check_int("a capacity", capacity, 1, (1 << 30) - 1)
    if any(after <= before for before, after in pairwise(at)):
        raise ValueError(f"capacities must ascend, got {at!r}")
    return at


def _named(policies: Iterable[str]) -> dict[str, type[CachePolicy]]:
    names = [policies] if isinstance(policies, str) else list(policies)
    if not names:
        raise ValueError("policies must name at least one policy, got none")
    chosen = {name: POLICIES.resolve(name) for name in names}
    for name, policy_type in chosen.items():
        if policy_type.reads_clock:
            raise ValueError(f"policy {name!r} {_NEEDS_TIME}")
    return chosen


def _compiled(notes: list[str]) -> dict[str, type[CachePolicy]]:
    chosen: dict[str, type[CachePolicy]] = {}
    for name in POLICIES.names():
        try:
            policy_type: type[CachePolicy] = POLICIES.resolve(name)
        except ValueError as error:
            notes.append(f"{name} is left out: {error}")
            continue
        if policy_type.reads_clock:
            notes.append(f"{name} is left out: it {_NEEDS_TIME}")
        elif issubclass(policy_type, PolicyAdapter):
            chosen[name] = policy_type
        else:
            notes.append(f"{name} is left out: it is not compiled; name it to have it estimated")
    return chosen


def _ghost_hits(sample: _Sample, policy: type[CachePolicy], capacity: int) -> int:
    """Return the prefix hits of the counted requests in a cache scaled down by the sample rate."""
    # More blocks than keys change nothing, but cost memory.
    num_blocks = max(1, min(round(capacity * sample.rate), sample.num_keys))
    pool = BlockPool(num_blocks, policy)
    num_hits = 0
    yield_s = time.perf_counter() + _TURN_S
    for i, gap, keys in sample.requests():
        if time.perf_counter() >= yield_s:
            # Otherwise, a scheduler that waits for the GIL would get it only every 5 ms.
            time.sleep(_PAUSE_S)
            yield_s = time.perf_counter() + _TURN_S
        if gap > 1:
            _pass(pool.policy, gap - 1)
        request = ReqContext()
        hits = pool.match_prefix(keys, request)
        if i >= sample.first_counted:
            num_hits += hits
        pool.touch(keys, request)
        output = pool.reserve(keys, request)
        if output is not None:
            pool.commit(output.keys_to_store, request)
            pool.end_request(request)
    return num_hits


def _pass(ghost: CachePolicy, num_requests: int) -> None:
    """Advance the clock of a policy that has one, for requests without sampled keys."""
    if isinstance(ghost, PolicyAdapter):
        pass_requests(ghost, num_requests)
    else:
        for _ in range(num_requests):
            ghost.use([_ABSENT], first=True)


def _standard_errors(sample: _Sample, uses: int, is_window: bool, capacities: tuple[int, ...]) -> tuple[float, ...]:
    """Return the standard error of lru's curve from sampling, from the differences between the curves of its parts."""
    if sample.rate == 1 or not uses:
        return (0.0,) * len(capacities)
    parts = [sample.part(index, uses, is_window).lru() for index in range(_NUM_PARTS)]
    curves = np.array([[part.at(capacity) for capacity in capacities] for part in parts])
    # The sample is drawn without replacement, and the other keys are at least as many.
    errors = curves.std(axis=0, ddof=1) * math.sqrt((1 - sample.rate) / _NUM_PARTS)
    return tuple(errors.tolist())
