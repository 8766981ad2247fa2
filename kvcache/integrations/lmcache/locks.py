"""The locks of LMCache's look-ups: each keeps an object from being evicted, until LMCache unlocks it or it lapses.

LMCache unlocks the objects of a look-up when their load ends. If the look-up dies, it never unlocks them.
"""

from __future__ import annotations

import inspect
import time
from threading import Lock
from typing import Any

_READ_TTL_S = 300.0
"""LMCache's default."""


class Locks:
    """Locks by tier key; a lock holds the tiers that have pinned the block, and lapses after `ttl_s`."""

    def __init__(self, ttl_s: float) -> None:
        self.num_lapsed = 0
        self._ttl_s = ttl_s
        self._lock = Lock()
        # By key and by id, the oldest lock first.
        self._of_key: dict[bytes, list[list[Any]]] = {}
        self._until_s: dict[int, tuple[float, bytes, list[Any]]] = {}

    def __len__(self) -> int:
        return len(self._of_key)

    def __contains__(self, key: bytes) -> bool:
        return key in self._of_key

    def add(self, keys: list[bytes], tiers_of: list[list[Any]]) -> None:
        """Lock the keys that at least one tier has pinned."""
        until_s = time.monotonic() + self._ttl_s
        with self._lock:
            for key, tiers in zip(keys, tiers_of, strict=True):
                if tiers:
                    self._of_key.setdefault(key, []).append(tiers)
                    self._until_s[id(tiers)] = until_s, key, tiers

    def release(self, keys: list[bytes]) -> None:
        """End the oldest lock of each key. If a dead look-up left it, a younger lock lapses in its place."""
        with self._lock:
            for key in keys:
                if locks := self._of_key.get(key):
                    self._end(key, locks[0])

    def unpin(self, keys: list[bytes]) -> None:
        """Allow the blocks of locked keys to be evicted; the locks stay."""
        with self._lock:
            for key in keys:
                for tiers in self._of_key.get(key, ()):
                    _unpin(key, tiers)

    def end_lapsed(self) -> None:
        """End the locks whose time has passed: LMCache has forgotten their look-ups by now."""
        now_s = time.monotonic()
        with self._lock:
            while self._until_s:
                until_s, key, tiers = next(iter(self._until_s.values()))
                if until_s > now_s:
                    break
                self._end(key, tiers)
                self.num_lapsed += 1

    def follow(self, before: Any, after: Any) -> None:
        """Pin the locked blocks of the tier `before` in the tier `after`, which has replaced it."""
        with self._lock:
            for _, key, tiers in self._until_s.values():
                if before in tiers:
                    tiers += [after] * len(after.pin([key]))

    def num_pinned(self, tier: Any) -> int:
        """Return how many objects of a tier are locked."""
        with self._lock:
            return len({key for _, key, tiers in self._until_s.values() if tier in tiers})

    def _end(self, key: bytes, tiers: list[Any]) -> None:
        del self._until_s[id(tiers)]
        # By identity: two locks of a key may hold the same tiers.
        rest = [other for other in self._of_key[key] if other is not tiers]
        if rest:
            self._of_key[key] = rest
        else:
            del self._of_key[key]
        _unpin(key, tiers)


def _unpin(key: bytes, tiers: list[Any]) -> None:
    while tiers:
        tiers.pop().unpin([key])


def read_ttl_s() -> float:
    """Return how long LMCache's own locks last, for an adapter whose constructor calls this."""
    frame = inspect.currentframe()
    while frame is not None:
        # LMCache does not pass it to an adapter. The LMCache function that makes the adapter has L1's manager.
        seconds = getattr(frame.f_locals.get("manager"), "_read_ttl_seconds", None)
        if isinstance(seconds, int | float) and seconds > 0:
            return float(seconds)
        frame = frame.f_back
    return _READ_TTL_S
