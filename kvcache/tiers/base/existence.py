"""Answers to existence queries of a medium that keeps its own index, remembered for a bounded time.

I/O threads query the store. Until an answer comes, a look-up returns "ask again"; after the deadline, "absent".
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

MAX_STEP_KEYS = 4096
"""Keys that one look-up queries at most; it bounds the scheduler's call. Later look-ups query the rest."""
_MAX_ASKED_KEYS = 1 << 16
"""Keys in queries under way at most; further keys count as absent."""


class ExistenceCache:
    """Remembers which keys a medium holds: the last `max_keys` answers, for `held_s` or `absent_s`."""

    def __init__(self, held_s: float, absent_s: float, deadline_s: float, max_keys: int) -> None:
        self._held_s = held_s
        self._absent_s = absent_s
        self._deadline_s = deadline_s
        self._max_keys = max_keys
        self._until_s: OrderedDict[bytes, float] = OrderedDict()
        self._held: set[bytes] = set()
        # An answer is used at least once, however short its time. Otherwise a slow caller would query for ever.
        self._unread: set[bytes] = set()
        self._asked: dict[bytes, float] = {}

    @property
    def num_held(self) -> int:
        """Keys that are remembered as held."""
        return len(self._held)

    def count_held(self, keys: list[bytes], now_s: float) -> tuple[int, list[bytes], bool]:
        """Return how many of the first keys are held, the keys to query, and whether a query is under way."""
        until_s, held, unread, asked = self._until_s, self._held, self._unread, self._asked
        unknown: list[bytes] = []
        is_waiting = False
        num_held = len(keys)
        for position, key in enumerate(keys):
            if key in unread or until_s.get(key, now_s) > now_s:
                unread.discard(key)
                if key in held:
                    continue
                num_held = position
                break
            deadline_s = asked.get(key)
            if deadline_s is None:
                if len(unknown) == MAX_STEP_KEYS:
                    break
                if len(asked) + len(unknown) >= _MAX_ASKED_KEYS:
                    num_held = position
                    break
                unknown.append(key)
            elif now_s < deadline_s:
                is_waiting = True
            else:
                # The answer is late; until it comes, the key counts as absent.
                num_held = position
                break
        return num_held, unknown, is_waiting

    def ask(self, keys: list[bytes], now_s: float) -> None:
        """Record that keys are being queried."""
        self._asked.update(dict.fromkeys(keys, now_s + self._deadline_s))

    def answer(self, keys: list[bytes], is_held: Sequence[bool], now_s: float) -> None:
        """Record the answer of a query."""
        for key in keys:
            self._asked.pop(key, None)
        self._unread.update(keys)
        self.learn([key for key, answer in zip(keys, is_held, strict=True) if answer], True, now_s)
        self.learn([key for key, answer in zip(keys, is_held, strict=True) if not answer], False, now_s)

    def is_held(self, key: bytes, now_s: float) -> bool:
        """Return whether a key is remembered as held."""
        return key in self._held and self._until_s[key] > now_s

    def learn(self, keys: list[bytes], is_held: bool, now_s: float) -> None:
        """Remember whether the medium holds keys."""
        until_s = now_s + (self._held_s if is_held else self._absent_s)
        for key in keys:
            self._until_s[key] = until_s
            self._until_s.move_to_end(key)
        (self._held.update if is_held else self._held.difference_update)(keys)
        while len(self._until_s) > self._max_keys:
            forgotten = self._until_s.popitem(last=False)[0]
            self._held.discard(forgotten)
            self._unread.discard(forgotten)
