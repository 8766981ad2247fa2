"""The batch operations in terms of a policy's five primitives.

They are the specification, the fallback for plug-ins and the oracle of the tests; compiled policies bring operations
of their own that loop over rows.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from kvcache.block import BlockStateError, BlockStatus
from kvcache.policies.base import CachePolicy
from kvcache.specs import PrepareStoreOutput

ABSENT, PENDING, READY = range(3)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvcache.specs import LoadStoreSpec

    Backend = Any  # kvcache.control.backend.Backend stands on a higher floor


class RequestKeys:
    """The keys that one request has named, in the order first seen."""

    __slots__ = ("epoch", "keys")

    def __init__(self, epoch: object) -> None:
        self.epoch = epoch
        self.keys: dict[bytes, None] = {}


class GenericBlockCache:
    """The batch operations of a policy that has only its five primitives, over a backend's blocks.

    Parameters
    ----------
    policy : CachePolicy
        Empty, and driven by nobody else from now on.
    backend : Backend
        Where blocks are allocated.
    """

    def __init__(self, policy: CachePolicy, backend: Backend) -> None:
        self._policy = policy
        self._backend = backend
        self._resident: dict[bytes, BlockStatus] = {}
        self._withheld: dict[int, BlockStatus] = {}
        self._epoch = object()
        self._num_evictable = 0
        self.num_referenced = 0
        self.num_pending = 0
        self.gated_blocks = 0
        self.num_raised = 0

    def current_policy(self) -> CachePolicy:
        return self._policy

    @property
    def num_free(self) -> int:
        return int(self._backend.get_num_free_blocks())

    def open_request(self, priority: int = 0, ttl_ns: int = 0) -> RequestKeys:
        # A policy of five primitives knows no priorities: hints are soft, and it may ignore them.
        return RequestKeys(self._epoch)

    def _keys_of(self, request_keys: RequestKeys) -> dict[bytes, None]:
        if request_keys.epoch is not self._epoch:
            # Keys named before a reset: the request starts afresh.
            request_keys.epoch = self._epoch
            request_keys.keys = {}
        return request_keys.keys

    def advance(self, now_ns: int, max_raised: int) -> None:
        pass

    def match_prefix(self, keys: list[bytes], request_keys: RequestKeys | None, start: int = 0) -> int:
        if not 0 <= start <= len(keys):
            raise ValueError(f"start must be in 0..{len(keys)}, got {start}")
        for i in range(start, len(keys)):
            if self.status_of(keys[i]) != READY:
                return i
        return len(keys)

    def status_of(self, key: bytes) -> int:
        _check_key(key)
        block = self._policy.get(key)
        return ABSENT if block is None else READY if block.ref_cnt >= 0 else PENDING

    def status(self, keys: list[bytes]) -> bytes:
        return bytes([self.status_of(key) for key in keys])

    def locate(self, keys: list[bytes]) -> list[int]:
        _check_keys(keys)
        blocks = [self._policy.get(key) for key in keys]
        return [-1 if block is None or block.ref_cnt < 0 else int(block.block_id) for block in blocks]

    def withhold(self, block_ids: Iterable[int]) -> None:
        """Every free block is allocated once, so that those wanted can be kept."""
        wanted = set(block_ids)
        free = self._backend.allocate_blocks([b"withheld-%d" % i for i in range(self.num_free)])
        found = {block.block_id: block for block in free}
        missing = wanted - found.keys()
        kept = set() if missing else wanted
        for block in reversed(free):
            if block.block_id not in kept:
                self._backend.free(block)
        if missing:
            raise BlockStateError(f"slots are not free: {sorted(missing)}")
        self._withheld.update((block_id, found[block_id]) for block_id in wanted)

    def give_back(self, block_ids: Iterable[int]) -> None:
        ids = list(dict.fromkeys(block_ids))
        missing = [block_id for block_id in ids if block_id not in self._withheld]
        if missing:
            raise BlockStateError(f"slots are not withheld: {missing}")
        for block_id in ids:
            self._backend.free(self._withheld.pop(block_id))

    def touch(self, keys: list[bytes], request_keys: RequestKeys | None) -> None:
        _check_keys(keys)
        if request_keys is None:
            if keys:
                self._policy.touch(keys)
        elif self._count(keys, request_keys) < len(keys):
            self._policy.order(keys)

    def _count(self, keys: list[bytes], request_keys: RequestKeys | None) -> int:
        if request_keys is None:
            return 0
        seen = self._keys_of(request_keys)
        fresh = [key for key in dict.fromkeys(keys) if key not in seen]
        if fresh:
            self._policy.use(fresh, first=not seen)
            seen.update(dict.fromkeys(fresh))
        return len(fresh)

    def pin(self, keys: list[bytes], request_keys: RequestKeys | None) -> LoadStoreSpec:
        _check_keys(keys)
        blocks = []
        for key in keys:
            block = self._known(key)
            if block.ref_cnt < 0:
                raise BlockStateError(f"block is not ready: {key!r}")
            blocks.append(block)
        spec: LoadStoreSpec = self._backend.get_load_store_spec(keys, blocks)
        self._count(keys, request_keys)
        for block in blocks:
            if block.ref_cnt == 0:
                self.num_referenced += 1
                self._num_evictable -= 1
            block.ref_cnt += 1
        return spec

    def unpin(self, keys: list[bytes], request_keys: RequestKeys | None) -> None:
        _check_keys(keys)
        releases: Counter[bytes] = Counter()
        for key in keys:
            releases[key] += 1
            if self._known(key).ref_cnt < releases[key]:
                raise BlockStateError(f"block has fewer references than are given back: {key!r}")
        for key, count in releases.items():
            block = self._known(key)
            block.ref_cnt -= count
            if block.ref_cnt == 0:
                self.num_referenced -= 1
                self._num_evictable += 1

    def reserve(
        self, keys: list[bytes], request_keys: RequestKeys | None, admit: bytearray | None
    ) -> PrepareStoreOutput | None:
        _check_keys(keys)
        get, backend = self._policy.get, self._backend
        named: dict[bytes, bool] = {}
        for i, key in enumerate(keys):
            named.setdefault(key, admit is None or admit[i] == 1)
        blocks = {key: get(key) for key in named}
        new = [key for key, admitted in named.items() if admitted and blocks[key] is None]
        needed = len(new) - backend.get_num_free_blocks() if new else 0
        protected = sum(block is not None and block.ref_cnt == 0 for block in blocks.values())
        if needed > 0 and needed > self._num_evictable - protected:
            return None
        self.gated_blocks += sum(not admitted and blocks[key] is None for key, admitted in named.items())
        self._count(keys, request_keys)
        victims: list[tuple[bytes, BlockStatus]] = []
        if needed > 0:
            answer = self._policy.evict(needed, set(named))
            if answer is None:
                return None
            self._check_victims(needed, named, answer)
            victims = answer
        for key, block in victims:
            del self._resident[key]
            self._num_evictable -= 1
            backend.free(block)
        allocated = backend.allocate_blocks(new) if new else []
        if len(allocated) != len(new):
            for block in allocated:
                backend.free(block)
            raise BlockStateError(f"backend allocated {len(allocated)} blocks, {len(new)} were asked for")
        try:
            spec = backend.get_load_store_spec(new, allocated)
        except BaseException:
            for block in allocated:
                backend.free(block)
            raise
        for key, block in zip(new, allocated, strict=True):
            self._policy.insert(key, block)
            self._resident[key] = block
        self.num_pending += len(new)
        return PrepareStoreOutput(new, spec, [key for key, _ in victims])

    def commit(self, keys: list[bytes], request_keys: RequestKeys | None) -> list[bytes]:
        _check_keys(keys)
        ready = []
        for key in keys:
            block = self._policy.get(key)
            if block is not None and block.ref_cnt < 0:
                block.ref_cnt = 0
                ready.append(key)
        self.num_pending -= len(ready)
        self._num_evictable += len(ready)
        return ready

    def abort(self, keys: list[bytes], request_keys: RequestKeys | None) -> int:
        _check_keys(keys)
        num_dropped = 0
        for key in keys:
            block = self._policy.get(key)
            if block is not None and block.ref_cnt < 0:
                self._policy.remove(key)
                del self._resident[key]
                self._backend.free(block)
                num_dropped += 1
        self.num_pending -= num_dropped
        return num_dropped

    def reorder(self, request_keys: RequestKeys, positions: dict[bytes, int] | None) -> None:
        # Each time all of it: five primitives cannot put a block behind another.
        self.end_request(request_keys, positions)

    def end_request(
        self, request_keys: RequestKeys, positions: dict[bytes, int] | None, use_positions: bool = False
    ) -> None:
        if use_positions and positions:
            by_position = sorted(positions, key=positions.__getitem__)
            _check_keys(by_position)
            self._count(by_position, request_keys)
        keys = list(self._keys_of(request_keys))
        self._policy.order(keys if positions is None else sorted_by_position(keys, positions))

    def reset(self) -> None:
        resident, self._resident = self._resident, {}
        withheld, self._withheld = self._withheld, {}
        self._epoch = object()
        for block in (*resident.values(), *withheld.values()):
            self._backend.free(block)
        self._backend.reset()
        try:
            self._policy.clear()
        except NotImplementedError:
            self._policy = type(self._policy)(self._policy.cache_capacity)
        self._num_evictable = self.num_referenced = self.num_pending = 0

    def _known(self, key: bytes) -> BlockStatus:
        block = self._policy.get(key)
        if block is None:
            raise KeyError(f"block is not in the cache: {key!r}")
        return block

    def _check_victims(
        self, needed: int, protected: dict[bytes, bool], victims: list[tuple[bytes, BlockStatus]]
    ) -> None:
        fault = None
        if len(victims) != needed or len(dict(victims)) != needed:
            fault = f"returned {len(victims)} victims, exactly {needed} different ones were asked for"
        for key, block in victims:
            if self._resident.get(key) is not block:
                fault = f"returned a block that is not in the cache: {key!r}"
            elif block.ref_cnt != 0 or key in protected:
                fault = f"returned a block that must stay: {key!r}, {block!r}"
            elif self._policy.get(key) is not None:
                fault = f"returned a block that it still holds: {key!r}"
        if fault is None:
            return
        # What it let go goes back in, named or not, so that a faulty plug-in loses nobody's data.
        for key, block in self._resident.items():
            if self._policy.get(key) is None:
                self._policy.insert(key, block)
        raise BlockStateError(f"{type(self._policy).__name__}.evict {fault}")


def sorted_by_position(keys: list[bytes], positions: dict[bytes, int]) -> list[bytes]:
    """Return `keys` by position in the prompt; a key without one stays behind the key that it was named after."""
    known = []
    last = -1
    for key in keys:
        last = positions.get(key, last)
        known.append(last)
    return [keys[i] for i in sorted(range(len(keys)), key=known.__getitem__)]


def _check_key(key: object) -> None:
    if type(key) is not bytes or not key:
        raise ValueError(f"key must be exact, non-empty bytes, got {key!r}")


def _check_keys(keys: list[bytes]) -> None:
    for key in keys:
        _check_key(key)
