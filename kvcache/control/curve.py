"""Live what-if: estimates lru's hits at other capacities from a sample of the keys.

The scheduler's thread only logs the uses of sampled keys. The curve is computed on demand, on a copy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from kvcache.core.sampler import Sampler, run_distances
from kvcache.options import check_int
from kvcache.registry import POLICIES

if TYPE_CHECKING:
    import numpy.typing as npt

    from kvcache.control.pool import BlockPool

    Int64Array = npt.NDArray[np.int64]

DEFAULT_USES = 131_072
_MIN_USES = 1_024
# Minimum of the manager's own capacity in the sample, in blocks, unless the capacity itself is smaller.
_MIN_SCALED_BLOCKS = 64
_MULTIPLES = (0.25, 0.5, 1, 2, 4, 8)
_NUM_PARTS = 8


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
    """Estimated hits of lru at several capacities for a manager's traffic, and the share that the manager loaded.

    Attributes
    ----------
    num_blocks : int
        The manager's capacity.
    policy : str or None
        The name of its policy, or None.
    loaded_ratio : float
        Share of the needed blocks that the manager has loaded since its start, under its own policy.
    capacities : tuple of int
        Blocks, ascending.
    hit_ratios : dict of str to tuple of float
        Under ``"lru"``: per capacity, the share of all uses of a key that are prefix hits: the block and all blocks
        before it in the request are present.
    standard_errors : tuple of float
        Per capacity, the standard error of the ratio that sampling causes.
    sample_rate : float
        Share of the keys that are sampled, a power of 1/2.
    sampled_uses, uses, requests : int
        Uses of sampled keys, uses of all keys, and requests that the estimate is based on.
    notes : tuple of str
        Limits of the estimate.
    """

    num_blocks: int
    policy: str | None
    loaded_ratio: float
    capacities: tuple[int, ...]
    hit_ratios: dict[str, tuple[float, ...]]
    standard_errors: tuple[float, ...]
    sample_rate: float
    sampled_uses: int
    uses: int
    requests: int
    notes: tuple[str, ...]
    _sample: _Sample = field(repr=False, compare=False)

    def hits_at(self, capacity: int) -> float:
        """Return lru's hit ratio at any `capacity`, in blocks. ValueError: `capacity` is not an int >= 1."""
        return self._sample.hits_at(check_int("capacity", capacity))

    def gain(self, capacity: int) -> float:
        """Return the relative change of lru's hits at `capacity`, compared to now; 0.091 means 9.1 % more."""
        now, then = self.hits_at(self.num_blocks), self.hits_at(capacity)
        if now == 0:
            return math.inf if then else 0.0
        return then / now - 1

    def as_dict(self) -> dict[str, Any]:
        """Return all values as JSON types."""
        values = {declared.name: getattr(self, declared.name) for declared in fields(self) if declared.repr}
        values["hit_ratios"] = {name: list(ratios) for name, ratios in self.hit_ratios.items()}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    def __str__(self) -> str:
        loaded = f"{self.policy or 'own policy'}, loaded"
        width = max(map(len, ("blocks", loaded)))
        is_now = [capacity == self.num_blocks for capacity in self.capacities]
        named = [f"{capacity:,}{'*' * now}" for capacity, now in zip(self.capacities, is_now, strict=True)]
        rows = {
            "blocks": named,
            **{name: [f"{ratio:.1%}" for ratio in ratios] for name, ratios in self.hit_ratios.items()},
            # The errors have a row only if keys were left out.
            **({"+-": [f"{2 * error:.1%}" for error in self.standard_errors]} if any(self.standard_errors) else {}),
            loaded: [f"{self.loaded_ratio:.1%}" if now else "-" for now in is_now],
        }
        lines = ["share of blocks hit, by capacity" + ", * the present one" * any(is_now)]
        lines += [f"{name:<{width}}" + "".join(f" {cell:>11}" for cell in cells) for name, cells in rows.items()]
        here = self.num_blocks
        if self.capacities[0] <= here and 2 * here <= self.capacities[-1] and self.hits_at(here):
            lines.append(f"twice the memory: {self.gain(2 * here):+.1%} hits of lru")
        lines.append(
            f"estimated from {self.sampled_uses:,} of {self.uses:,} uses in {self.requests:,} requests, "
            f"1 key in {round(1 / self.sample_rate):,}"
        )
        return "\n".join([*lines, *self.notes])


class _Sample:
    """A log of sampled uses, request by request: per use the key's hash, and the request's number; lru's hits on it.

    `rate` is the share of the keys that are sampled, and `uses` counts those of all keys. If earlier uses were dropped
    (`is_window`), the first quarter warms up the cache and is not counted.
    """

    def __init__(
        self, hashes: npt.NDArray[np.uint64], numbers: Int64Array, rate: float, uses: float, is_window: bool
    ) -> None:
        self.rate = rate
        self.hashes = hashes
        self.numbers = numbers
        self.num_sampled = n = len(hashes)
        _, ids = np.unique(hashes, return_inverse=True)
        starts: Int64Array = np.flatnonzero(np.diff(numbers, prepend=-1)).astype(np.int64)
        begin = int(np.searchsorted(starts, n // 4)) if is_window and n else 0
        self.num_counted = n - int(starts[begin]) if begin else n
        self.expected = uses * rate * (self.num_counted / n if n else 0.0)
        # The run distances of the counted uses, ascending.
        self.distances = np.sort(run_distances(ids.astype(np.int64), starts)[n - self.num_counted :])

    def hits_at(self, capacity: int) -> float:
        """Return the share of all uses that lru hits at a capacity.

        A difference between the expected and the actual number of sampled uses stems from a few hot keys that are, or
        are not, in the sample. Their uses would have been hits (SHARDS_adj of the paper).
        """
        if self.expected == 0:
            return 0.0
        # A distance of num_sampled means "never used before": a miss at any capacity.
        limit = min(capacity * self.rate, self.num_sampled)
        num_hits = int(np.searchsorted(self.distances, limit, side="left"))
        return min(max((num_hits + self.expected - self.num_counted) / self.expected, 0.0), 1.0)

    def part(self, index: int, uses: int, is_window: bool) -> _Sample:
        """Return one part of the sample, as divided by the next bits of the hashes."""
        halvings = round(-math.log2(self.rate))
        bits = self.hashes << np.uint64(halvings) >> np.uint64(64 - _NUM_PARTS.bit_length() + 1)
        mine = bits == index
        return _Sample(self.hashes[mine], self.numbers[mine], self.rate / _NUM_PARTS, uses, is_window)


def estimate(sampler: Sampler | None, pool: BlockPool, capacities: Iterable[int] | None = None) -> WhatIf:
    """Estimate the hits of a pool's traffic at several capacities; see `CPUOffloadingManager.what_if`."""
    if sampler is None:
        raise ValueError("the manager samples nothing: make it with what_if=True")
    at = _checked_capacities(pool.num_blocks, capacities)
    hashes, numbers, uses, num_requests = sampler.snapshot()
    sample = _Sample(hashes, numbers, 0.5**sampler.num_halvings, uses, sampler.is_window)
    notes = []
    if not uses:
        notes.append("no request has finished yet")
    if sampler.is_window:
        notes.append(f"the last {uses:,} uses alone: older ones have been dropped")
    if at[0] * sample.rate < _NUM_PARTS:
        notes.append(f"capacities below {math.ceil(_NUM_PARTS / sample.rate):,} blocks are too small for this sample")
    return WhatIf(
        num_blocks=pool.num_blocks,
        policy=POLICIES.name_of(type(pool.policy)),
        loaded_ratio=pool.loaded_blocks / max(1, pool.needed_blocks),
        capacities=at,
        hit_ratios={"lru": tuple(map(sample.hits_at, at))},
        standard_errors=_standard_errors(sample, uses, sampler.is_window, at),
        sample_rate=sample.rate,
        sampled_uses=sample.num_sampled,
        uses=uses,
        requests=num_requests,
        notes=tuple(notes),
        _sample=sample,
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


def _standard_errors(sample: _Sample, uses: int, is_window: bool, capacities: tuple[int, ...]) -> tuple[float, ...]:
    """Return the standard error of the curve from sampling, from the differences between the curves of its parts."""
    if sample.rate == 1 or not uses:
        return (0.0,) * len(capacities)
    parts = [sample.part(index, uses, is_window) for index in range(_NUM_PARTS)]
    curves = np.array([[part.hits_at(capacity) for capacity in capacities] for part in parts])
    # The sample is drawn without replacement, and the other keys are at least as many.
    errors = curves.std(axis=0, ddof=1) * math.sqrt((1 - sample.rate) / _NUM_PARTS)
    return tuple(errors.tolist())
