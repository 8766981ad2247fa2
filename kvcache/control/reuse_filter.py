"""ReuseFilter: admit a key to be stored only once it has been offered often enough.

In Python because it is off by default. An offer costs less than a microsecond.
"""

from __future__ import annotations

from collections import OrderedDict

from kvcache.control.atomic import Guard, atomic
from kvcache.options import check_int


class ReuseFilter:
    """Count how often keys are offered, in a table of the keys offered last.

    `threshold` offers, >= 2, admit a key. The table remembers `max_tracker_size` keys, and all of the latest call; the
    key that was offered longest ago is forgotten first.
    """

    def __init__(self, threshold: int, max_tracker_size: int = 64_000) -> None:
        self.threshold = check_int("store_threshold", threshold, 2, (1 << 31) - 1)
        self.max_tracker_size = check_int("max_tracker_size", max_tracker_size, 1, (1 << 29) - 1)
        self.guard = Guard()
        self._offers: OrderedDict[bytes, int] = OrderedDict()

    @atomic
    def clear(self) -> None:
        """Forget all offers."""
        self._offers.clear()

    @atomic
    def admit(self, keys: list[bytes]) -> bytearray:
        """Count an offer of each key, once per call. Return 1 for each key that may be stored, otherwise 0."""
        for key in keys:
            if type(key) is not bytes or not key:
                raise ValueError(f"key must be exact, non-empty bytes, got {key!r}")
        offers, distinct = self._offers, dict.fromkeys(keys)
        for key in distinct:
            offers[key] = offers.pop(key, 0) + 1
        admitted = bytearray([offers[key] >= self.threshold for key in keys])
        for _ in range(min(len(offers) - self.max_tracker_size, len(offers) - len(distinct))):
            offers.popitem(last=False)
        return admitted
