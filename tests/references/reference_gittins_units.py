"""The specification of `gittins` for models with several KV-cache groups, in plain dicts, one request in one step."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from reference_gittins import ReferenceGittins

from kvcache import RequestUses, make_offload_key

WAY_BACK = 8
TOKENS_PER_BLOCK = 512
Lists = list[tuple[int, int, list[bytes]]]


class ReferenceUnits(ReferenceGittins):
    """Anchors are what `gittins` knows. Windowed keys only count the boundaries that need them."""

    def __init__(self, cache_capacity: int, group_windows: Sequence[int | None]) -> None:
        super().__init__(cache_capacity)
        self.anchor_group = list(group_windows).index(None)
        self.windows = {group: window for group, window in enumerate(group_windows) if window is not None}
        self.needs: dict[bytes, int] = {}  # of each resident windowed key: live boundaries whose set holds it
        self.boundaries: set[bytes] = set()
        self.leave_first: OrderedDict[bytes, None] = OrderedDict()
        self.stored: list[bytes] = []  # by the last request

    def request(self, path: list[bytes], prompt_tokens: int, now_ms: int) -> int:
        """Look up, use and store a request with the hashes `path`. Return its hit in positions."""
        self.path = [make_offload_key(x, self.anchor_group) for x in path]
        hit, ends = self.find_hit(prompt_tokens)
        self.now_ms = now_ms
        for key in self.path:
            self.leave_first.pop(key, None)
        uses = RequestUses()
        uses.positions = {key: TOKENS_PER_BLOCK * (i + 1) for i, key in enumerate(self.path)}
        uses.read_positions()
        uses.add(self.path)
        self.count_uses(self.path, uses)
        self.store(hit, ends)
        return hit

    @property
    def listed(self) -> Lists:
        """The lists of anchors: (class, bin, keys in path order) of each group, the oldest of a cell first."""
        return [
            (*cell, list(group.resident)) for cell in sorted(self.cells) for group in self.cells[cell] if group.resident
        ]

    def find_hit(self, prompt_tokens: int) -> tuple[int, list[int]]:
        limit = min(len(self.path), (prompt_tokens - 1) // TOKENS_PER_BLOCK)
        full = next((i for i, key in enumerate(self.path[:limit]) if key not in self.blocks), limit)
        hit = next(end for end in range(full, -1, -1) if self.is_set_resident(end))
        return hit, [end for end in sorted({full, limit}) if end > hit]

    def set_of(self, end: int) -> list[bytes]:
        """Return the windowed keys that a resumption at `end` needs, by group, shallow to deep."""
        return [
            make_offload_key(key[:-4], group)
            for group, window in self.windows.items()
            for key in self.path[max(end - window, 0) : end]
        ]

    def is_set_resident(self, end: int) -> bool:
        return all(key in self.needs for key in self.set_of(end))

    def offers(self, hit: int, ends: list[int]) -> list[bytes]:
        """Return the keys that an engine offers: those behind the hit, group by group."""
        windowed = dict.fromkeys(key for end in ends for key in self.set_of(end))
        return self.path[hit:] + sorted(windowed, key=lambda key: key[-4:])

    def store(self, hit: int, ends: list[int]) -> None:
        new: dict[bytes, int] = {}  # the absent keys, each with the index of its position
        index_of = {key[:-4]: i for i, key in enumerate(self.path)}
        stops = []
        for i, key in enumerate(self.path):
            if key not in self.blocks:
                new[key] = i
            if i + 1 in ends:
                new.update((needed, index_of[needed[:-4]]) for needed in self.set_of(i + 1) if needed not in self.needs)
                stops.append(len(new))
        stops.append(len(new))
        self.named = {*self.path, *(key for end in ends for key in self.set_of(end))}
        self.stored = list(new)[: self.free_slots(list(new.items()), stops)]
        for key in self.stored:
            self.enter(key, new[key])
        deepest = hit
        for end in ends:
            if self.path[end - 1] in self.blocks and self.is_set_resident(end):
                if self.path[end - 1] not in self.boundaries:
                    self.make_boundary(end)
                deepest = end
        for key in self.stored:
            if self.needs.get(key) == 0:
                self.leave_first.setdefault(key)
        if deepest > hit > 0 and self.path[hit - 1] in self.boundaries:
            nearest = self.path[max(hit - WAY_BACK * sum(self.windows.values()), 0) : hit - 1]
            if not self.boundaries.isdisjoint(nearest):
                self.give_up(self.path[hit - 1])
        self._trim()

    def free_slots(self, new: list[tuple[bytes, int]], stops: list[int]) -> int:
        """Evict for one unit after the other, and return how many of the new keys are stored."""
        room, start = self.cache_capacity - len(self.blocks) - len(self.needs), 0
        for stop in stops:
            need = stop - room
            if stop > start and need > 0:
                if not self.is_worth(self.path[new[start][1]], need - len(self.leave_first)):
                    return start
                room += self.evict_blocks(need)
                if room < stop:
                    return room
            start = stop
        return start

    def is_worth(self, anchor: bytes, n: int) -> bool:
        """Return whether an anchor is worth more than the cheapest three quarters of `n` listed anchors."""
        worth = self.value[self.group_of[anchor].cls][0]
        n -= n // 4
        for (cls, b), groups in self._by_value():
            if n <= 0:
                return True
            if worth <= self.value[cls][b]:
                return False
            n -= sum(len(group.resident) for group in groups)
        return n <= 0

    def evict_blocks(self, n: int) -> int:
        got, got_before = self.evict_queued(n), -1
        while got_before < got < n:
            got_before = got
            for _, groups in self._by_value():
                for group in groups:
                    while group.resident:
                        tail = next(reversed(group.resident))
                        if tail in self.named or self.kids[tail] > 0:
                            break
                        self.give_up(tail)
                        got += self.evict_queued(n - got)
                        if got == n:
                            return got
        return got

    def evict_queued(self, n: int) -> int:
        got = 0
        while got < n:
            key = next((key for key in self.leave_first if key not in self.named), None)
            if key is None:
                break
            del self.leave_first[key]
            got += 1
            if key in self.needs:
                del self.needs[key]
                continue
            parent = self.parents[key]
            self._remove(key)
            if parent is not None and self.kids[parent] == 0 and parent not in self.boundaries:
                self.queue(parent)
        return got

    def enter(self, key: bytes, index: int) -> None:
        if key != self.path[index]:
            self.needs[key] = 0
            return
        parent = self.path[index - 1] if index else None
        self._store(key, parent)
        if parent is not None:
            self.rejoin(parent)
        self.group_of[key].resident[key] = None

    def make_boundary(self, end: int) -> None:
        self.boundaries.add(self.path[end - 1])
        self.rejoin(self.path[end - 1])
        for key in self.set_of(end):
            self.needs[key] += 1
            self.leave_first.pop(key, None)

    def give_up(self, anchor: bytes) -> None:
        """End a boundary, if there is one. Windowed keys are queued before their anchor."""
        if anchor in self.boundaries:
            self.boundaries.remove(anchor)
            for group in reversed(self.windows):
                ancestor: bytes | None = anchor
                for _ in range(self.windows[group]):
                    if ancestor is None:
                        break
                    key = make_offload_key(ancestor[:-4], group)
                    self.needs[key] -= 1
                    if self.needs[key] == 0:
                        self.queue(key)
                    ancestor = self.parents[ancestor]
        if self.kids[anchor] == 0:
            self.queue(anchor)

    def queue(self, key: bytes) -> None:
        if key in self.leave_first:
            return
        if key in self.group_of:
            self.group_of[key].resident.pop(key, None)
        self.leave_first[key] = None

    def rejoin(self, anchor: bytes) -> None:
        """Return a queued anchor, which is needed again, to its group's list."""
        if anchor in self.leave_first:
            del self.leave_first[anchor]
            self.group_of[anchor].resident[anchor] = None
