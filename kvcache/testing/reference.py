"""The specification of every policy and of the store gate, in plain dicts.

It is written from the papers and rules, not from the compiled code, so that tests can compare the two. Clarity comes
before speed.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Collection, Container, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from kvcache.block import BlockStatus
from kvcache.policies.base import CachePolicy
from kvcache.testing.reference_gittins import ReferenceGittins

Blocks = OrderedDict[bytes, BlockStatus]
Victims = list[tuple[bytes, BlockStatus]]


def _eligible(order: Iterable[bytes], blocks: dict[bytes, BlockStatus], protected: Container[bytes]) -> Iterator[bytes]:
    """Yield the keys of evictable blocks: not referenced, not being written, not protected."""
    return (key for key in order if blocks[key].ref_cnt == 0 and key not in protected)


class _Reference(CachePolicy):
    """A policy whose state is all set by `clear`."""

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self.clear()


class ReferenceLRU(_Reference):
    """One recency list, oldest first."""

    def clear(self) -> None:
        self.blocks: Blocks = OrderedDict()

    def get(self, key: bytes) -> BlockStatus | None:
        return self.blocks.get(key)

    def insert(self, key: bytes, block: BlockStatus) -> None:
        self.blocks[key] = block

    def remove(self, key: bytes) -> None:
        del self.blocks[key]

    def touch(self, keys: Iterable[bytes]) -> None:
        for key in reversed(list(keys)):
            if key in self.blocks:
                self.blocks.move_to_end(key)

    order = touch

    def evict(self, n: int, protected: Container[bytes]) -> Victims | None:
        victims = list(islice(_eligible(self.blocks, self.blocks, protected), n))
        if len(victims) < n:
            return None
        return [(key, self.blocks.pop(key)) for key in victims]


class ReferenceARC(_Reference):
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
        oldest_t1 = _eligible(self.t1, self.t1, protected)
        oldest_t2 = _eligible(self.t2, self.t2, protected)
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
        for ghosts in (self.b1, self.b2):
            while len(ghosts) > self.cache_capacity:
                ghosts.popitem(last=False)
        return evicted


@dataclass(slots=True)
class _Ranked:
    """State of a resident block in the frequency policies."""

    block: BlockStatus
    uses: int
    used_at: int
    level: int = 0
    moved_at: int = 0


class ReferenceMQ(_Reference):
    """Eight recency queues by the logarithm of a block's uses. A block unused for `life` requests moves down one queue.

    Multi-Queue (Zhou, Philbin & Li, USENIX ATC '01), with a history of the uses of evicted keys.
    """

    num_queues = 8
    demotions_per_tick = 1024

    def clear(self) -> None:
        self.clock = 0
        self.life = 500
        self.ranked: dict[bytes, _Ranked] = {}
        self.queues: list[Blocks] = [OrderedDict() for _ in range(self.num_queues)]
        # Evicted keys, oldest first: number of uses, and time of the last use.
        self.history: OrderedDict[bytes, tuple[int, int]] = OrderedDict()

    def get(self, key: bytes) -> BlockStatus | None:
        return self.ranked[key].block if key in self.ranked else None

    def insert(self, key: bytes, block: BlockStatus) -> None:
        uses, used_at = self.history.pop(key, (0, self.clock))
        self.ranked[key] = _Ranked(block, uses, used_at)
        self._count_use(key)

    def remove(self, key: bytes) -> None:
        del self.queues[self.ranked.pop(key).level][key]

    def touch(self, keys: Iterable[bytes]) -> None:
        self.use(list(keys), first=True)

    def use(self, keys: list[bytes], first: bool) -> None:
        if not keys:
            return
        if first:
            self._tick()
        for key in reversed(keys):
            if key in self.ranked:
                self._count_use(key)

    def order(self, keys: Iterable[bytes]) -> None:
        for key in reversed(list(keys)):
            if key in self.ranked:
                self.queues[self.ranked[key].level].move_to_end(key)

    def evict(self, n: int, protected: Container[bytes]) -> Victims | None:
        oldest = (key for queue in self.queues for key in _eligible(queue, queue, protected))
        victims = [(key, self.ranked[key].block) for key in islice(oldest, n)]
        if len(victims) < n:
            return None
        for key, _ in victims:
            self.history[key] = (self.ranked[key].uses, self.ranked[key].used_at)
            self.remove(key)
        while len(self.history) > 4 * self.cache_capacity:
            self.history.popitem(last=False)
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
                if self.ranked[oldest].moved_at + self.life >= self.clock:
                    break
                self._move(oldest, level - 1)
                num_left -= 1

    def _count_use(self, key: bytes) -> None:
        ranked = self.ranked[key]
        ranked.uses += 1
        ranked.used_at = self.clock
        self._move(key, min(self.num_queues - 1, ranked.uses.bit_length() - 1))

    def _move(self, key: bytes, level: int) -> None:
        ranked = self.ranked[key]
        self.queues[ranked.level].pop(key, None)
        self.queues[level][key] = ranked.block
        ranked.level = level
        ranked.moved_at = self.clock


class ReferenceAMQ(ReferenceMQ):
    """Multi-Queue that sets `life` to the median of the distances between a key's first two uses."""

    ticks_per_setting = 64
    fewest_distances = 256
    most_distances = 65536

    def clear(self) -> None:
        super().clear()
        self.distances: Counter[int] = Counter()

    def _count_use(self, key: bytes) -> None:
        if self.ranked[key].uses == 1:
            distance = self.clock - self.ranked[key].used_at
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
        num_below = 0
        for i in sorted(self.distances):
            num_below += self.distances[i]
            if num_below >= (num_distances + 1) // 2:
                self.life = 2 << (i // 2) if i % 2 else (3 << (i // 2)) >> 1
                break
        if num_distances >= self.most_distances:
            self.distances = Counter({i: count >> 1 for i, count in self.distances.items()})

    @staticmethod
    def bin_of(distance: int) -> int:
        """Return the histogram's bin of a distance: two bins per octave."""
        if distance < 2:
            return 0
        octave = distance.bit_length() - 1
        return 2 * octave + (distance >> (octave - 1) & 1)


class ReferenceLFUDA(_Reference):
    """Least frequently used with dynamic ageing. A block's value is its uses plus the age of the cache at its last use.

    A history keeps the uses of evicted keys.
    """

    def clear(self) -> None:
        self.age = 0
        self.sequence = 0
        self.blocks: dict[bytes, BlockStatus] = {}
        self.uses: dict[bytes, int] = {}
        # (value, sequence number): the smallest is evicted first.
        self.rank: dict[bytes, tuple[int, int]] = {}
        self.history: OrderedDict[bytes, int] = OrderedDict()

    def get(self, key: bytes) -> BlockStatus | None:
        return self.blocks.get(key)

    def insert(self, key: bytes, block: BlockStatus) -> None:
        self.blocks[key] = block
        self.uses[key] = self.history.pop(key, 0)
        self._count_use(key)

    def remove(self, key: bytes) -> None:
        del self.blocks[key], self.uses[key], self.rank[key]

    def touch(self, keys: Iterable[bytes]) -> None:
        for key in reversed(list(keys)):
            if key in self.blocks:
                self._count_use(key)

    def order(self, keys: Iterable[bytes]) -> None:
        for key in reversed(list(keys)):
            if key in self.blocks:
                self._rank(key, self.rank[key][0])

    def evict(self, n: int, protected: Container[bytes]) -> Victims | None:
        lowest = heapq.nsmallest(n, _eligible(self.blocks, self.blocks, protected), key=self.rank.__getitem__)
        if len(lowest) < n:
            return None
        victims = []
        for key in lowest:
            self.age = max(self.age, self.rank[key][0])
            self.history[key] = self.uses[key]
            victims.append((key, self.blocks[key]))
            self.remove(key)
        while len(self.history) > 4 * self.cache_capacity:
            self.history.popitem(last=False)
        return victims

    def _count_use(self, key: bytes) -> None:
        self.uses[key] += 1
        self._rank(key, self.age + self.uses[key])

    def _rank(self, key: bytes, worth: int) -> None:
        self.sequence += 1
        self.rank[key] = (worth, self.sequence)


REFERENCE_POLICIES: dict[str, type[CachePolicy]] = {
    "lru": ReferenceLRU,
    "arc": ReferenceARC,
    "mq": ReferenceMQ,
    "amq": ReferenceAMQ,
    "lfuda": ReferenceLFUDA,
    "gittins": ReferenceGittins,
}
"""The plain-Python twin of every built-in policy."""


class ReferenceGate:
    """Admit a key after it was offered `threshold` times, within the limits of a bounded table.

    The table holds at most `max_tracker_size` keys, apart from those of one call.
    """

    def __init__(self, threshold: int, max_tracker_size: int = 64_000) -> None:
        self.threshold = threshold
        self.max_tracker_size = max_tracker_size
        self.offers: OrderedDict[bytes, int] = OrderedDict()

    def admitted(self, keys: Collection[bytes]) -> set[bytes]:
        """Count one offer of each key of a call, and return the keys that may be stored."""
        offered = dict.fromkeys(keys)
        for key in offered:
            self.offers[key] = self.offers.pop(key, 0) + 1
        # The keys of this call are the youngest. Drop only older keys.
        for _ in range(min(len(self.offers) - self.max_tracker_size, len(self.offers) - len(offered))):
            self.offers.popitem(last=False)
        return {key for key in offered if self.offers[key] >= self.threshold}
