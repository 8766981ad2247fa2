"""second-chance: first in, first out; a block used since its insertion is passed over once (Corbató, 1968)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable

from kvcache import BlockStatus, CachePolicy


class SecondChancePolicy(CachePolicy):
    """Evict the oldest block without a use since its insertion or since it was last passed over."""

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self._blocks: OrderedDict[bytes, BlockStatus] = OrderedDict()
        self._used: set[bytes] = set()

    def get(self, key: bytes) -> BlockStatus | None:
        return self._blocks.get(key)

    def insert(self, key: bytes, block: BlockStatus) -> None:
        self._blocks[key] = block

    def remove(self, key: bytes) -> None:
        del self._blocks[key]
        self._used.discard(key)

    def touch(self, keys: Iterable[bytes]) -> None:
        self._used.update(key for key in keys if key in self._blocks)

    def order(self, keys: Iterable[bytes]) -> None:
        # A prefix's tail must leave before its head, which is useless without it.
        for key in reversed(list(keys)):
            if key in self._blocks:
                self._blocks.move_to_end(key)

    def evict(self, n: int, protected: Container[bytes]) -> list[tuple[bytes, BlockStatus]] | None:
        free = [key for key, block in self._blocks.items() if block.ref_cnt == 0 and key not in protected]
        if len(free) < n:
            return None
        unused = [key for key in free if key not in self._used]
        chosen = (unused + [key for key in free if key in self._used])[:n]
        # Those that stand before the last victim were let past: to the back, as if new.
        for key in free[: free.index(chosen[-1])] if len(unused) >= n > 0 else free if n else ():
            if key in self._used:
                self._used.discard(key)
                self._blocks.move_to_end(key)
        return [(key, self._take(key)) for key in chosen]

    def _take(self, key: bytes) -> BlockStatus:
        block = self._blocks[key]
        self.remove(key)
        return block
