"""Which blocks one tier is still to be given: a backlog for each write rule.

A scheduler cannot wait until a block is written when its slot is needed, so a tier that wants evicted blocks is written
ahead: only part of host memory may hold unwritten blocks. Beyond that, the least recently used are written, and stay
readable. If a block is evicted before it was written, the number of blocks kept clean doubles, up to the whole pool.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from kvcache.request import ReqContext

_FIRST_SHARE = 4
"""At first, one slot in so many is free or holds a written block."""


class Backlog:
    """The blocks that wait to be written to one tier, longest waiting first; by itself the rule ``"write_through"``.

    `missed` holds blocks that were not written because the tier failed: those that are still in host memory are offered
    again once it works.
    """

    def __init__(self, num_blocks: int) -> None:
        self.missed: OrderedDict[bytes, None] = OrderedDict()
        self.num_dropped = self.num_declined = 0
        self._max_blocks = num_blocks
        self._keys: deque[bytes] = deque()

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._keys)

    @property
    def is_idle(self) -> bool:
        """Whether no block waits to be written."""
        return not (self._keys or self.missed)

    def add(self, keys: list[bytes]) -> None:
        """Add blocks that became ready, in prefix order: the head of a prefix is written last, and so leaves last."""
        self.offer(reversed(keys))

    def skip(self, keys: list[bytes]) -> None:
        """Record blocks that the tier has, or that failed to become ready."""

    def use(self, keys: list[bytes], req_context: ReqContext | None) -> list[bytes]:
        """Record that a request stores or loads blocks; return those that the tier is to be given now."""
        return []

    def end_request(self, req_context: ReqContext) -> None:
        """Forget a request."""

    def offer_due(self, room: int) -> None:
        """Offer the blocks that must be written now, as many as the tier has room for."""

    def offer(self, keys: Iterable[bytes]) -> None:
        """Add keys; if there are too many, drop those that wait longest."""
        self._keys.extend(keys)
        while len(self._keys) > self._max_blocks:
            self._keys.popleft()
            self.num_dropped += 1

    def hurry(self, keys: list[bytes], room: int) -> int:
        """Offer those ready blocks that are not due yet, in prefix order; return how many had no room."""
        return 0

    def take(self, num_most: int) -> list[bytes]:
        """Remove and return at most `num_most` keys, each once."""
        return list(dict.fromkeys([self._keys.popleft() for _ in range(min(num_most, len(self._keys)))]))

    def take_missed(self, num_most: int) -> list[bytes]:
        """Remove and return at most `num_most` missed blocks, those of the latest uses; the latest is the last."""
        return [self.missed.popitem()[0] for _ in range(min(num_most, len(self.missed)))][::-1]

    def drop(self, is_paused: bool) -> None:
        """Drop the keys that wait; if the tier's writes are paused, they are offered again afterwards."""
        self.num_dropped += len(self._keys)
        if is_paused:
            self.miss(self._keys)
        self._keys.clear()

    def miss(self, keys: Iterable[bytes]) -> None:
        """Keep keys that the tier failed to write, at most as many as host memory has blocks."""
        for key in keys:
            self.missed[key] = None
            self.missed.move_to_end(key)
        while len(self.missed) > self._max_blocks:
            self.missed.popitem(last=False)

    def note_unwritten(self, num_blocks: int, is_again: bool) -> None:
        """Count blocks of a job that were not written. `is_again`: they were missed before, and are counted already."""
        if not is_again:
            self.num_dropped += num_blocks

    def touch(self, keys: list[bytes]) -> None:
        """Record a use of `keys`, in prefix order."""
        _move_to_end(self.missed, keys)

    def remove(self, keys: list[bytes]) -> None:
        """Record keys that left host memory."""
        for key in keys if self.missed else ():
            self.missed.pop(key, None)

    def clear(self) -> None:
        """Forget all blocks."""
        self._keys.clear()
        self.missed.clear()


class WriteBackBacklog(Backlog):
    """The backlog of ``"write_back"``: `dirty` holds blocks that are not due yet, least recently used first."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.dirty: OrderedDict[bytes, None] = OrderedDict()
        self._num_ahead = max(1, num_blocks // _FIRST_SHARE)

    @property
    def is_idle(self) -> bool:
        return not self.dirty and super().is_idle

    def add(self, keys: list[bytes]) -> None:
        self.dirty.update(dict.fromkeys(reversed(keys)))

    def offer_due(self, room: int) -> None:
        num_due = min(room - len(self), len(self.dirty) - (self._max_blocks - self._num_ahead))
        self.offer([self.dirty.popitem(last=False)[0] for _ in range(num_due)])

    def hurry(self, keys: list[bytes], room: int) -> int:
        late = [key for key in keys if key in self.dirty]
        for key in late[:room]:
            del self.dirty[key]
        self.offer(reversed(late[:room]))
        return len(late[room:])

    def touch(self, keys: list[bytes]) -> None:
        _move_to_end(self.dirty, keys)
        super().touch(keys)

    def remove(self, keys: list[bytes]) -> None:
        lost = [key for key in keys if key in self.dirty] if self.dirty else []
        for key in lost:
            del self.dirty[key]
        if lost:
            # They were evicted before they were written: double the number of blocks kept clean, up to all.
            self.num_dropped += len(lost)
            self._num_ahead = min(self._max_blocks, 2 * self._num_ahead)
        super().remove(keys)

    def clear(self) -> None:
        super().clear()
        self.dirty.clear()


class SelectiveBacklog(Backlog):
    """The backlog of ``"write_through_selective"``: blocks that were used `num_uses` times, once a request."""

    def __init__(self, num_blocks: int, num_uses: int) -> None:
        super().__init__(num_blocks)
        self._num_uses = num_uses
        # Its first item goes often: in a plain dict that would cost a walk over the gaps of those before.
        self._uses: OrderedDict[bytes, int] = OrderedDict()
        # The keys whose use was counted for each request.
        self._counted: WeakKeyDictionary[ReqContext, set[bytes]] = WeakKeyDictionary()

    def add(self, keys: list[bytes]) -> None:
        super().add([key for key in keys if self._uses.get(key, 1) >= self._num_uses])

    def use(self, keys: list[bytes], req_context: ReqContext | None) -> list[bytes]:
        if req_context is not None:
            counted = self._counted.setdefault(req_context, set())
            keys = [key for key in dict.fromkeys(keys) if key not in counted]
            counted.update(keys)
        # Counts of blocks that left go first.
        while len(self._uses) > 2 * self._max_blocks:
            self._uses.popitem(last=False)
        due = []
        for key in keys:
            num_uses = self._uses[key] = self._uses.get(key, 0) + 1
            if num_uses == self._num_uses:
                due.append(key)
        return due

    def hurry(self, keys: list[bytes], room: int) -> int:
        late = [key for key in keys if self._uses.get(key, 1) < self._num_uses]
        self._uses.update(dict.fromkeys(late[:room], self._num_uses))
        self.offer(reversed(late[:room]))
        return len(late[room:])

    def end_request(self, req_context: ReqContext) -> None:
        self._counted.pop(req_context, None)

    def clear(self) -> None:
        super().clear()
        self._uses.clear()
        self._counted.clear()


def _move_to_end(blocks: OrderedDict[bytes, None], keys: list[bytes]) -> None:
    for key in reversed(keys) if blocks else ():
        if key in blocks:
            blocks.move_to_end(key)
