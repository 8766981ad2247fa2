"""Objects of several sizes in one directory: a store per size, all with the same number of slots."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from threading import RLock
from typing import Any

from kvcache.assembly.assemble import open_store
from kvcache.epoch import named
from kvcache.integrations.lmcache.settings import MAX_SIZES, L2Settings
from kvcache.tiers.base.tier import MAX_STEP_BLOCKS

Change = tuple["Objects", list[bytes], list[bytes] | frozenset[bytes]]
"""Stored keys, and keys removed before them; or a set of the keys that stayed, if the size was opened again."""


class Objects:
    """The objects of one size: the `store`, and the `keys` that the adapter has accepted.

    A value of `keys` is True if LMCache knows of the object. Changes are appended to `changes`. If the size was open
    `before`, its keys are known already.
    """

    def __init__(
        self, settings: L2Settings, size: int, num_slots: int, changes: deque[Change], before: Objects | None = None
    ) -> None:
        self.size = size
        self.keys: dict[bytes, bool] = {} if before is None else before.keys
        self._changes: deque[Change] = deque()
        tier, labels = settings.tier_of(size, num_slots), (("tier", str(size)),)
        identity = named({"engine": "lmcache"}, settings.exporters.weights_version)
        self.store = open_store(tier, size, identity, labels=labels, on_change=self.note)
        # What the directory held is announced in steps, one for each call.
        for _ in range(self.store.stats().tier.num_held // MAX_STEP_BLOCKS + 2):
            self.store.stats()
        if before is not None:
            # Only the difference is reported to LMCache: objects that stayed are neither removed nor stored again.
            changes.append((self, [], frozenset(key for _, stored, _ in self._changes for key in stored)))
        changes.extend(self._changes)
        self._changes = changes

    def note(self, stored: list[bytes], removed: list[bytes]) -> None:
        """Add a change."""
        if stored or removed:
            self._changes.append((self, stored, removed))


class Sizes:
    """The stores of all object sizes in a directory; ValueError: it cannot be used.

    `on_replace` is called when a size was opened again with fewer slots, with its tier before and after.
    """

    def __init__(self, settings: L2Settings, on_replace: Callable[[Any, Any], None]) -> None:
        self.changes: deque[Change] = deque()
        self.refused: set[int] = set()
        self._settings = settings
        self._on_replace = on_replace
        self._by_size: dict[int, Objects] = {}
        self._lock = RLock()
        try:
            self._open(settings.sizes_found())
        except BaseException:
            self.close()
            raise

    def all(self) -> list[Objects]:
        """Return the objects of every size."""
        return list(self._by_size.values())

    def get(self, size: int) -> Objects | None:
        """Return the objects of a size, or None if no object has it."""
        return self._by_size.get(size)

    def opened(self, size: int) -> Objects:
        """Return the objects of a size; its first object gives each size a new share. ValueError: it is not stored."""
        with self._lock:
            if size in self.refused:
                raise ValueError(f"objects of {size} bytes are not stored")
            if size not in self._by_size:
                try:
                    if len(self._by_size) >= MAX_SIZES:
                        raise ValueError(f"objects have more than {MAX_SIZES} sizes, not stored: {size} bytes")
                    self._open([*self._by_size, size])
                except ValueError:
                    self.refused.add(size)
                    raise
            return self._by_size[size]

    def close(self) -> None:
        """Close the stores."""
        for objects in self.all():
            objects.store.close()

    def _open(self, sizes: list[int]) -> None:
        num_slots = self._settings.num_slots(sizes) if sizes else 0
        # A new size comes last, when the others have shrunk.
        for size in sizes:
            if before := self._by_size.pop(size, None):
                before.store.close()
            self._by_size[size] = Objects(self._settings, size, num_slots, self.changes, before)
            if before:
                self._on_replace(before.store.tier, self._by_size[size].store.tier)
