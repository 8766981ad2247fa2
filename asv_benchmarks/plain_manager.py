"""A manager in plain Python: ordered dicts, blocks with slots, batch calls to a policy, no checks.

What the compiled one is measured against. It keeps the contract (references, one use of a key per request, ordering
at a request's end) and does nothing besides: it checks no argument, counts nothing and keeps no events.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice
from typing import Any

from kvcache import CPULoadStoreSpec, PrepareStoreOutput


class Block:
    """A slot of the pool; not ready while `ref_cnt` is negative."""

    __slots__ = ("block_id", "ref_cnt")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_cnt = -1


class PlainLRU:
    """One recency list."""

    def __init__(self, capacity: int) -> None:
        self.blocks: OrderedDict[bytes, Block] = OrderedDict()
        self.get = self.blocks.get
        self.insert = self.blocks.__setitem__

    def touch(self, keys: list[bytes]) -> None:
        blocks = self.blocks
        move = blocks.move_to_end
        for key in reversed(keys):
            if key in blocks:
                move(key)

    order = touch

    def evict(self, count: int, protected: set[bytes]) -> list[tuple[bytes, Block]] | None:
        victims = list(islice(eligible(self.blocks, protected), count))
        if len(victims) < count:
            return None
        for key, _ in victims:
            del self.blocks[key]
        return victims


class PlainARC:
    """Two recency lists, their ghosts, and the target that moves between them."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.t1: OrderedDict[bytes, Block] = OrderedDict()
        self.t2: OrderedDict[bytes, Block] = OrderedDict()
        self.b1: OrderedDict[bytes, None] = OrderedDict()
        self.b2: OrderedDict[bytes, None] = OrderedDict()
        self.target = 0.0

    def get(self, key: bytes) -> Block | None:
        return self.t1.get(key) or self.t2.get(key)

    def insert(self, key: bytes, block: Block) -> None:
        self.t1[key] = block
        self.b1.pop(key, None)
        self.b2.pop(key, None)

    def touch(self, keys: list[bytes]) -> None:
        t1, t2, b1, b2 = self.t1, self.t2, self.b1, self.b2
        for key in reversed(keys):
            if key in t1:
                if t1[key].ref_cnt >= 0:
                    t2[key] = t1.pop(key)
                else:
                    t1.move_to_end(key)
            elif key in t2:
                t2.move_to_end(key)
            elif key in b1:
                self.target = min(self.target + max(1.0, len(b2) / len(b1)), self.capacity)
                b1.move_to_end(key)
            elif key in b2:
                self.target = max(self.target - max(1.0, len(b1) / len(b2)), 0.0)
                b2.move_to_end(key)

    def order(self, keys: list[bytes]) -> None:
        t1, t2 = self.t1, self.t2
        for key in reversed(keys):
            if key in t1:
                t1.move_to_end(key)
            elif key in t2:
                t2.move_to_end(key)

    def evict(self, count: int, protected: set[bytes]) -> list[tuple[bytes, Block]] | None:
        old1, old2 = eligible(self.t1, protected), eligible(self.t2, protected)
        size1, target = len(self.t1), int(self.target)
        from_t1: list[tuple[bytes, Block]] = []
        victims: list[tuple[bytes, Block]] = []
        while len(victims) < count:
            victim = next(old1, None) if size1 >= target else None
            if victim is None:
                victim = next(old2, None)
                if victim is not None:
                    victims.append(victim)
                    continue
                victim = next(old1, None)
                if victim is None:
                    return None
            size1 -= 1
            from_t1.append(victim)
            victims.append(victim)
        for key, _ in from_t1:
            del self.t1[key]
            self.b1[key] = None
        for key, _ in victims:
            if self.t2.pop(key, None) is not None:
                self.b2[key] = None
        for ghosts in (self.b1, self.b2):
            while len(ghosts) > self.capacity:
                ghosts.popitem(last=False)
        return victims


def eligible(blocks: OrderedDict[bytes, Block], protected: set[bytes]) -> Iterator[tuple[bytes, Block]]:
    """Yield the blocks that may leave, oldest first."""
    return ((key, block) for key, block in blocks.items() if block.ref_cnt == 0 and key not in protected)


class PlainManager:
    """The calls of a replay, over one of the policies above."""

    def __init__(self, block_size: int, num_blocks: int, policy: str) -> None:
        self.block_size = block_size
        self.policy: Any = {"lru": PlainLRU, "arc": PlainARC}[policy](num_blocks)
        self.num_blocks = num_blocks
        self.num_fresh_used = 0
        self.freed: list[int] = []
        self.request_keys_by_pool: dict[Any, dict[bytes, None]] = {}

    def lookup(self, keys: list[bytes], context: Any) -> int:
        get = self.policy.get
        hits = 0
        for key in keys:
            block = get(key)
            if block is None or block.ref_cnt < 0:
                break
            hits += 1
        return hits

    def count(self, keys: list[bytes], context: Any) -> int:
        """Count a use of the keys that this request has not named yet, and return how many they are."""
        request_keys = self.request_keys_by_pool.setdefault(context, {})
        fresh = [key for key in keys if key not in request_keys] if request_keys else keys
        if fresh:
            self.policy.touch(fresh)
            request_keys.update(dict.fromkeys(fresh))
        return len(fresh)

    def touch(self, keys: list[bytes], context: Any) -> None:
        if self.count(keys, context) < len(keys):
            self.policy.order(keys)

    def prepare_load(self, keys: list[bytes], context: Any) -> CPULoadStoreSpec:
        self.count(keys, context)
        get = self.policy.get
        block_ids = []
        for key in keys:
            block = get(key)
            block.ref_cnt += 1
            block_ids.append(block.block_id)
        return CPULoadStoreSpec(block_ids)

    def complete_load(self, keys: list[bytes], context: Any) -> None:
        get = self.policy.get
        for key in keys:
            get(key).ref_cnt -= 1

    def prepare_store(self, keys: list[bytes], context: Any) -> PrepareStoreOutput | None:
        policy = self.policy
        get, insert = policy.get, policy.insert
        self.count(keys, context)
        new = [key for key in keys if get(key) is None]
        evicted: list[bytes] = []
        needed = len(new) - len(self.freed) - self.num_blocks + self.num_fresh_used
        if needed > 0:
            victims = policy.evict(needed, set(keys))
            if victims is None:
                return None
            evicted = [key for key, _ in victims]
            self.freed.extend([block.block_id for _, block in victims])
        block_ids = self.allocate(len(new))
        for key, block_id in zip(new, block_ids, strict=True):
            insert(key, Block(block_id))
        return PrepareStoreOutput(new, CPULoadStoreSpec(block_ids), evicted)

    def allocate(self, count: int) -> list[int]:
        first = self.num_fresh_used
        self.num_fresh_used = min(self.num_blocks, first + count)
        block_ids = list(range(first, self.num_fresh_used))
        pop = self.freed.pop
        block_ids.extend([pop() for _ in range(count - len(block_ids))])
        return block_ids

    def complete_store(self, keys: list[bytes], context: Any) -> None:
        get = self.policy.get
        for key in keys:
            block = get(key)
            if block.ref_cnt < 0:
                block.ref_cnt = 0

    def on_request_finished(self, context: Any) -> None:
        self.policy.order(list(self.request_keys_by_pool.pop(context)))
