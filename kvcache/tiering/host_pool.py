"""The host pool as the tiered manager uses it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from kvcache.control.cpu import CPUOffloadingManager
from kvcache.events import OffloadingEvent
from kvcache.metrics import ManagerStats
from kvcache.specs import BlockIDsLoadStoreSpec, LoadStoreSpec, PrepareStoreOutput

if TYPE_CHECKING:
    from kvcache.policies.base import CachePolicy
    from kvcache.request import ReqContext


class _Events:
    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._events: list[OffloadingEvent] = []

    def add(self, keys: list[bytes], medium: str, removed: bool) -> None:
        if keys:
            self._events.append(OffloadingEvent(list(keys), self._block_size, medium, removed))

    def take(self, max_events: int | None = None) -> Iterator[OffloadingEvent]:
        count = len(self._events) if max_events is None else max_events
        taken, self._events = self._events[:count], self._events[count:]
        return iter(taken)

    def clear(self) -> None:
        self._events = []


class BlockPool:
    """A pool of host blocks."""

    def __init__(
        self, num_blocks: int, cache_policy: str | type, *, block_size: int, enable_events: bool, **options: Any
    ) -> None:
        self.manager = CPUOffloadingManager(block_size, num_blocks, cache_policy, **options)
        self._cache = self.manager._cache
        self.num_blocks = num_blocks
        self.medium = self.manager.medium
        self.events = _Events(block_size) if enable_events else None
        self.lookups = self.looked_up_blocks = self.hit_blocks = 0
        self._moved_out = 0
        self._names: dict[int, bytes] = {}

    @property
    def policy(self) -> CachePolicy:
        return self.manager.policy

    def match_prefix(self, keys: list[bytes], req_context: ReqContext | None = None) -> int:
        return self._cache.match_prefix(keys, self.manager._request_keys_of(req_context))

    def status(self, keys: list[bytes]) -> bytes:
        status = getattr(self._cache, "status", None)
        if status is not None:
            found: bytes = status(keys)
            return found
        get = self.manager.policy.get
        return bytes(0 if block is None else 1 + block.is_ready for block in map(get, keys))

    def touch(self, keys: list[bytes], req_context: ReqContext | None = None) -> None:
        self.manager.touch(keys, req_context)

    def pin(self, keys: list[bytes], req_context: ReqContext | None = None, *, is_move: bool = False) -> LoadStoreSpec:
        return self._cache.pin(keys, None) if is_move else self.manager.prepare_load(keys, req_context)

    def unpin(self, keys: list[bytes], req_context: ReqContext | None = None) -> None:
        self.manager.complete_load(keys, req_context)

    def reserve(
        self, keys: list[bytes], req_context: ReqContext | None = None, *, is_move: bool = False
    ) -> PrepareStoreOutput | None:
        if not is_move:
            output = self.manager.prepare_store(keys, req_context)
        else:
            output = self._cache.reserve(keys, None, None)
            self._moved_out += 0 if output is None else len(output.evicted_keys)
        if output is not None and self.events is not None:
            self.events.add(output.evicted_keys, self.medium, True)
        return output

    def reserve_leading(self, keys: list[bytes]) -> PrepareStoreOutput | None:
        keys = keys[: self.num_blocks - self._cache.num_referenced - self._cache.num_pending]
        while keys:
            output = self.reserve(keys, is_move=True)
            if output is not None:
                return output
            keys = keys[: len(keys) // 2]
        return None

    def commit(self, keys: list[bytes], req_context: ReqContext | None = None, *, is_move: bool = False) -> list[bytes]:
        request_keys = None if is_move else self.manager._request_keys_of(req_context)
        ready = self._cache.commit(keys, request_keys)
        if not is_move:
            name = "stored_blocks" if hasattr(self.manager, "stored_blocks") else "_stored_blocks"
            setattr(self.manager, name, getattr(self.manager, name) + len(ready))
        if self.events is not None:
            self.events.add(ready, self.medium, False)
        return ready

    def abort(self, keys: list[bytes], req_context: ReqContext | None = None, *, is_move: bool = False) -> int:
        if is_move:
            return self._cache.abort(keys, None)
        self.manager.complete_store(keys, req_context, False)
        return 0

    def end_request(self, req_context: ReqContext) -> None:
        self.manager.on_request_finished(req_context)

    def reset(self) -> None:
        self.manager.reset_cache()
        if self.events is not None:
            self.events.clear()

    def withhold(self, block_ids: list[int]) -> None:
        if not block_ids:
            return
        withhold = getattr(self._cache, "withhold", None)
        if withhold is not None:
            withhold(block_ids)
            return
        names = [b"stuck-%d" % i for i in range(self.num_blocks)]
        output = self._cache.reserve(names, None, None)
        assert output is not None
        assert isinstance(output.store_spec, BlockIDsLoadStoreSpec)
        self._names = dict(zip(output.store_spec.block_ids.tolist(), names, strict=True))
        kept = set(block_ids)
        self._cache.abort([self._names[i] for i in range(self.num_blocks - 1, -1, -1) if i not in kept], None)

    def give_back(self, block_ids: list[int]) -> None:
        give_back = getattr(self._cache, "give_back", None)
        if give_back is not None:
            give_back(block_ids)
            return
        self._cache.abort([self._names[i] for i in block_ids], None)

    def take_events(self, max_events: int | None = None) -> Iterator[OffloadingEvent]:
        return iter(()) if self.events is None else self.events.take(max_events)

    def stats(self) -> ManagerStats:
        from dataclasses import replace

        host = self.manager.stats()
        return replace(
            host,
            lookups=self.lookups,
            looked_up_blocks=self.looked_up_blocks,
            hit_blocks=self.hit_blocks,
            evicted_blocks=host.evicted_blocks + self._moved_out,
        )
