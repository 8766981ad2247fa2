"""UseQueue: uses of blocks that wait to be passed on to one tier.

Requests may use blocks faster than scheduler steps can pass on. So the queue is bounded: a tier that misses the oldest
uses evicts a little worse, but a queue without a bound takes all memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import groupby, islice
from operator import itemgetter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcache.request import ReqContext

_SHARE = 4
"""A step passes on one in so many of the waiting uses, so the delay stays at a few steps however many arrive."""
_ENDED = object()


class UseQueue:
    """Uses of blocks and ends of requests, oldest first.

    `step` keys or a quarter of the queue, if that is more, are reported at a time. Beyond `limit`, the oldest uses are
    dropped and counted in `num_dropped`. A longer use is reported in pieces: the last keys first, so that the first
    key becomes the most recent; with `keeps_paths` in path order, for a policy that keeps the keys of a path in order.
    """

    def __init__(self, step: int, limit: int, keeps_paths: bool = False) -> None:
        self._step = step
        self._limit = limit
        self._keeps_paths = keeps_paths
        # Lists are cheaper than merging keys, but the same keys may come many times: only a few steps' uses are lists.
        self._recent: deque[tuple[list[bytes], ReqContext | None]] = deque()
        self._num_recent = 0
        # Older than all lists: by key the request that last used it, and `_ENDED` by request. No key equals a request.
        self._merged: dict[bytes | ReqContext, object] = {}
        self.num_dropped = 0

    def __len__(self) -> int:
        return self._num_recent + len(self._merged)

    def add(self, keys: list[bytes], req_context: ReqContext | None) -> None:
        """Record a use of `keys`, in prefix order: the first key becomes the most recent."""
        ends = range(len(keys), 0, -self._step)
        for end in reversed(ends) if self._keeps_paths else ends:
            self._append(keys[max(0, end - self._step) : end], req_context)

    def end(self, req_context: ReqContext) -> None:
        """Record the end of a request."""
        self._append([], req_context)

    def _append(self, keys: list[bytes], req_context: ReqContext | None) -> None:
        self._recent.append((keys, req_context))
        self._num_recent += len(keys) or 1
        if self._num_recent > _SHARE * self._step:
            self._merge()

    def take(self) -> Iterator[tuple[list[bytes], Any]]:
        """Remove a step's entries, and yield runs of one request with keys in prefix order; no keys: it has ended."""
        if self._merged:
            self._merge()
            yield from self._take_merged()
            return
        num_taken = 0
        while self._recent and num_taken < self._step:
            keys, req_context = self._recent.popleft()
            num_taken += len(keys) or 1
            self._num_recent -= len(keys) or 1
            yield keys, req_context

    def _take_merged(self) -> Iterator[tuple[list[bytes], Any]]:
        merged = self._merged
        taken = dict(islice(merged.items(), max(self._step, len(merged) // _SHARE)))
        for entry in taken:
            del merged[entry]
        for req_context, group in groupby(taken.items(), itemgetter(1)):
            entries: list[Any] = [entry for entry, _ in group]
            if req_context is _ENDED:
                for ended in entries:
                    yield [], ended
                continue
            for first in range(0, len(entries), self._step):
                keys = entries[first : first + self._step]
                yield keys if self._keeps_paths else keys[::-1], req_context

    def clear(self) -> None:
        """Forget all uses and ends."""
        self._recent.clear()
        self._merged = {}
        self._num_recent = 0

    def _merge(self) -> None:
        """Move the lists into the dict, where each key is once, at its last use."""
        merged = self._merged
        for keys, req_context in self._recent:
            distinct = dict.fromkeys(keys)
            entries: list[Any] = [*(distinct if self._keeps_paths else reversed(distinct))] or [req_context]
            if not merged.keys().isdisjoint(entries):
                # A dict keeps the place of a key that it has.
                for entry in entries:
                    merged.pop(entry, None)
            merged.update(dict.fromkeys(entries, req_context if keys else _ENDED))
        self._recent.clear()
        self._num_recent = 0
        if len(merged) > self._limit:
            # An eighth goes at once, because a walk from the beginning of a dict also passes removed entries. Ends go
            # last: a tier may keep state for a request until then.
            num_dropped = len(merged) - self._limit * 7 // 8
            uses = [entry for entry, req_context in merged.items() if req_context is not _ENDED]
            for entry in uses[:num_dropped] or list(islice(merged, num_dropped)):
                del merged[entry]
                self.num_dropped += 1
