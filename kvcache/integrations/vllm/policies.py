"""Our policies under vLLM's own manager: ``"eviction_policy": "Amq", "cache_policy_module_path": <this module>``.

vLLM's manager owns the chunks, and each policy here selects victims with a compiled one of ours. It cannot decline a
store, because vLLM's manager has no call for it.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from vllm.v1.kv_offload.cpu.policies.base import CachePolicy

from kvcache.block import BlockStatus
from kvcache.integrations.vllm.settings import POLICY_NAMES
from kvcache.registry import POLICIES

__all__ = [*POLICY_NAMES]


class _Counted:
    """The keys that one request has used so far."""

    __slots__ = ("keys", "owner")

    def __init__(self, owner: object) -> None:
        self.owner = owner
        self.keys: set[bytes] = set()


class _Policy(CachePolicy):
    """A compiled policy over vLLM's chunks; its name is that of the class in lower case."""

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self._policy: Any = POLICIES.resolve(type(self).__name__.lower())(cache_capacity)
        self._reads_clock = getattr(self._policy, "reads_clock", False)
        self._chunks: dict[bytes, Any] = {}
        # Requests that began before a reset count from anew.
        self._era = object()

    # The policy's clock: monotonic seconds.
    clock = staticmethod(time.monotonic)

    def get(self, key: bytes) -> Any:
        return self._chunks.get(key)

    def insert(self, key: bytes, chunk: Any, req_context: Any = None) -> None:
        # Both structures have one layout, so the compiled policy reads vLLM's reference count in place.
        self._policy.insert(key, BlockStatus.from_buffer(chunk))
        self._chunks[key] = chunk

    def remove(self, key: bytes) -> None:
        self._policy.remove(key)
        del self._chunks[key]

    def evict(self, n: int, protected: Collection[bytes]) -> list[tuple[bytes, Any]] | None:
        victims = self._policy.evict(n, protected)
        return victims and [(key, self._chunks.pop(key)) for key, _ in victims]

    def clear(self) -> None:
        self._policy.clear()
        self._chunks.clear()
        self._era = object()

    def touch(self, keys: Iterable[bytes], req_context: Any) -> None:
        self._count(list(keys), req_context)

    on_store_miss = on_request_access = touch

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[bytes]],
        insertion_only_keys: set[bytes],
        reused_keys: set[bytes],
        req_context: Any,
    ) -> None:
        positions = _positions(req_context)
        keys = sorted((key for group in key_groups for key in group), key=lambda key: positions.get(key, 0))
        self._count(keys, req_context)
        # The head of a prompt is evicted after its tail.
        self._policy.order(keys)

    def _count(self, keys: list[bytes], req_context: Any) -> None:
        """Count one use a request of each key, whether it is in the cache or not."""
        counted = req_context.get_state(_Counted)
        if counted is None or counted.owner is not self._era:
            counted = _Counted(self._era)
            req_context.set_state(counted)
        new_keys = [key for key in dict.fromkeys(keys) if key not in counted.keys]
        if not new_keys:
            return
        if not counted.keys and (positions := _positions(req_context)):
            # vLLM 0.32 names loaded keys at the request's end only. They precede the first key that is stored.
            last = max(positions.get(key, 0) for key in new_keys)
            earlier = [key for key, at in positions.items() if at < last and key in self._chunks]
            new_keys = sorted(dict.fromkeys([*earlier, *new_keys]), key=lambda key: positions.get(key, 0))
        if self._reads_clock:
            self._policy.now_ms = int(self.clock() * 1000)
        self._policy.use(new_keys, not counted.keys)
        counted.keys.update(new_keys)


def _positions(req_context: Any) -> dict[bytes, int]:
    """Return where in the prompt each key's block ends; empty before vLLM 0.31."""
    return getattr(req_context, "_offload_key_positions", {})


# vLLM finds each by its name. `Lru` differs from vLLM's own in the position of blocks in use only.
for _name in __all__:
    globals()[_name] = type(_name, (_Policy,), {"__module__": __name__})
