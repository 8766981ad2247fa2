"""The specification of every built-in policy but `lru` and `gittins`, in plain dicts.

It is written from the papers and rules, not from the compiled code, so that tests can compare the two. Clarity comes
before speed.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Container, Iterable
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from reference_gittins import ReferenceGittins

from kvcache.block import BlockStatus
from kvcache.policies.base import CachePolicy
from kvcache.testing.reference import Blocks, ReferenceLRU, Victims, eligible


def trim(ghosts: OrderedDict[bytes, Any], num_kept: int) -> None:
    """Drop the oldest entries over `num_kept`."""
    while len(ghosts) > num_kept:
        ghosts.popitem(last=False)


class ReferenceARC(ReferenceLRU):
    """Blocks seen once (`t1`) and seen again (`t2`), their ghosts (`b1`, `b2`), and a target for the length of `t1`.

    Megiddo & Modha, FAST '03. Unlike the original, it skips blocks that are in use.
    """

    def clear(self) -> None:
        self.t1: Blocks = OrderedDict()
        self.t2: Blocks = OrderedDict()
        self.b1: OrderedDict[bytes, None] = OrderedDict()
        self.b2: OrderedDict[bytes, None] = OrderedDict()
        self.target_t1_size = 0.0

    def get(self, key: bytes) -> BlockStatus | None:
        return self.t1[key] if key in self.t1 else self.t2.get(key)

    def insert(self, key: bytes, block: BlockStatus) -> None:
        self.t1[key] = block
        self.b1.pop(key, None)
        self.b2.pop(key, None)

    def remove(self, key: bytes) -> None:
        del (self.t1 if key in self.t1 else self.t2)[key]

    def touch(self, keys: Iterable[bytes]) -> None:
        t1, t2, b1, b2 = self.t1, self.t2, self.b1, self.b2
        for key in reversed(list(keys)):
            if key in t1 and t1[key].is_ready:
                t2[key] = t1.pop(key)
            elif key in b1:
                grown = self.target_t1_size + max(1.0, len(b2) / len(b1))
                self.target_t1_size = min(float(self.cache_capacity), grown)
                b1.move_to_end(key)
            elif key in b2:
                self.target_t1_size = max(0.0, self.target_t1_size - max(1.0, len(b1) / len(b2)))
                b2.move_to_end(key)
            else:
                self.order([key])

    def order(self, keys: Iterable[bytes]) -> None:
        for key in reversed(list(keys)):
            for resident in (self.t1, self.t2):
                if key in resident:
                    resident.move_to_end(key)

    def evict(self, n: int, protected: Container[bytes]) -> Victims | None:
        oldest_t1 = eligible(self.t1, self.t1, protected)
        oldest_t2 = eligible(self.t2, self.t2, protected)
        num_t1 = len(self.t1)
        victims: list[bytes] = []
        while len(victims) < n:
            from_t1_first = num_t1 >= int(self.target_t1_size)
            key = next(oldest_t1 if from_t1_first else oldest_t2, None)
            if key is None:
                key = next(oldest_t2 if from_t1_first else oldest_t1, None)
            if key is None:
                return None
            num_t1 -= key in self.t1
            victims.append(key)
        evicted = []
        for key in victims:
            resident, ghosts = (self.t1, self.b1) if key in self.t1 else (self.t2, self.b2)
            evicted.append((key, resident.pop(key)))
            ghosts[key] = None
        trim(self.b1, self.cache_capacity)
        trim(self.b2, self.cache_capacity)
        return evicted


@dataclass(slots=True)
class Rank:
    """Position of a resident block in `ReferenceMQ`."""

    uses: int
    used_at: int
    level: int = 0
    moved_at: int = 0


class ReferenceMQ(ReferenceLRU):
    """Eight recency queues by the logarithm of a block's uses. A block unused for `life` requests moves down one queue.

    Multi-Queue (Zhou, Philbin & Li, USENIX ATC '01), with a history of the uses of evicted keys.
    """

    num_queues = 8
    demotions_per_tick = 1024

    def clear(self) -> None:
        super().clear()
        self.clock = 0
        self.life = 500
        self.history: OrderedDict[bytes, Any] = OrderedDict()  # of evicted keys, oldest first
        self.ranks: dict[bytes, Rank] = {}
        self.queues: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in range(self.num_queues)]

    def insert(self, key: bytes, block: BlockStatus) -> None:
        super().insert(key, block)
        self.ranks[key] = Rank(*self.history.pop(key, (0, self.clock)))
        self._count_use(key)

    def remove(self, key: bytes) -> None:
        super().remove(key)
        del self.queues[self.ranks.pop(key).level][key]

    def use(self, keys: list[bytes], first: bool) -> None:
        if keys and first:
            self._tick()
        for key in reversed(keys):
            if key in self.blocks:
                self._count_use(key)

    def touch(self, keys: Iterable[bytes]) -> None:
        self.use(list(keys), first=True)

    def order(self, keys: Iterable[bytes]) -> None:
        for key in reversed(list(keys)):
            if key in self.blocks:
                self.queues[self.ranks[key].level].move_to_end(key)

    def evict(self, n: int, protected: Container[bytes]) -> Victims | None:
        oldest = eligible(chain(*self.queues), self.blocks, protected)
        victims = [(key, self.blocks[key]) for key in islice(oldest, n)]
        if len(victims) < n:
            return None
        for key, _ in victims:
            self.history[key] = (self.ranks[key].uses, self.ranks[key].used_at)  # and the time of the last use
            self.remove(key)
        trim(self.history, 4 * self.cache_capacity)
        return victims

    def _tick(self) -> None:
        self.clock += 1
        self._demote()

    def _demote(self) -> None:
        num_left = self.demotions_per_tick
        for level in range(self.num_queues - 1, 0, -1):
            queue = self.queues[level]
            while queue and num_left:
                oldest = next(iter(queue))
                if self.ranks[oldest].moved_at + self.life >= self.clock:
                    break
                self._move(oldest, level - 1)
                num_left -= 1

    def _count_use(self, key: bytes) -> None:
        rank = self.ranks[key]
        rank.uses += 1
        rank.used_at = self.clock
        self._move(key, min(self.num_queues, rank.uses.bit_length()) - 1)

    def _move(self, key: bytes, level: int) -> None:
        rank = self.ranks[key]
        self.queues[rank.level].pop(key, None)
        self.queues[level][key] = None
        rank.level = level
        rank.moved_at = self.clock


class ReferenceAMQ(ReferenceMQ):
    """Multi-Queue that sets `life` to the median of the distances between a key's first two uses."""

    ticks_per_setting = 64
    fewest_distances = 256
    most_distances = 65536

    def clear(self) -> None:
        super().clear()
        self.distances: Counter[int] = Counter()

    def _count_use(self, key: bytes) -> None:
        if self.ranks[key].uses == 1:
            distance = self.clock - self.ranks[key].used_at
            self.distances[self.bin_of(distance)] += 1
        super()._count_use(key)

    def _tick(self) -> None:
        self.clock += 1
        if self.clock % self.ticks_per_setting == 0:
            self._set_life()
        self._demote()

    def _set_life(self) -> None:
        num_distances = self.distances.total()
        if num_distances < self.fewest_distances:
            return
        median = sorted(self.distances.elements())[(num_distances - 1) // 2]
        self.life = 2 << (median // 2) if median % 2 else (3 << (median // 2)) >> 1
        if num_distances >= self.most_distances:
            self.distances = Counter({i: count >> 1 for i, count in self.distances.items()})

    @staticmethod
    def bin_of(distance: int) -> int:
        """Return the histogram's bin of a distance: two bins per octave."""
        if distance < 2:
            return 0
        octave = distance.bit_length() - 1
        return 2 * octave + (distance >> (octave - 1) & 1)


BUILT_IN: dict[str, type[CachePolicy]] = {
    "lru": ReferenceLRU,
    "arc": ReferenceARC,
    "mq": ReferenceMQ,
    "amq": ReferenceAMQ,
    "gittins": ReferenceGittins,
}
