"""The specification of every built-in policy but `lru` and `gittins`, in plain dicts.

It is written from the papers and rules, not from the compiled code, so that tests can compare the two. Clarity comes
before speed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable
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

    def demote(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            block = self.get(key)
            if block is not None:
                self.t2.pop(key, None)
                self.t1[key] = block
                self.t1.move_to_end(key, last=False)

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


BUILT_IN: dict[str, type[CachePolicy]] = {
    "lru": ReferenceLRU,
    "arc": ReferenceARC,
    "gittins": ReferenceGittins,
}
