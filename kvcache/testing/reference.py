"""The specification of the default policy and of the store gate, in plain dicts.

The twins of the other built-in policies are in the repository, `tests/references`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Container, Iterable, Iterator
from itertools import islice

from kvcache.block import BlockStatus
from kvcache.policies.base import CachePolicy

Blocks = OrderedDict[bytes, BlockStatus]
Victims = list[tuple[bytes, BlockStatus]]


def eligible(order: Iterable[bytes], blocks: dict[bytes, BlockStatus], protected: Container[bytes]) -> Iterator[bytes]:
    """Yield the keys of evictable blocks: not referenced, not being written, not protected."""
    return (key for key in order if blocks[key].ref_cnt == 0 and key not in protected)


class ReferenceLRU(CachePolicy):
    """One recency list, oldest first. `clear` sets all state, also of subclasses."""

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self.clear()

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

    def demote(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            if key in self.blocks:
                self.blocks.move_to_end(key, last=False)

    def evict(self, n: int, protected: Container[bytes]) -> Victims | None:
        victims = list(islice(eligible(self.blocks, self.blocks, protected), n))
        if len(victims) < n:
            return None
        return [(key, self.blocks.pop(key)) for key in victims]


REFERENCE_POLICIES: dict[str, type[CachePolicy]] = {"lru": ReferenceLRU}
"""Plain-Python twins of compiled policies by name; add the twin of yours."""


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
