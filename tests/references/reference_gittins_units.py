"""The specification of `gittins` for models with several KV-cache groups, in plain dicts, as an engine serves them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from reference_gittins import ReferenceGittins

from kvcache import RequestUses, make_offload_key

WAY_BACK = 8
TOKENS_PER_BLOCK = 512
Lists = list[tuple[int, int, list[bytes]]]


@dataclass
class Serving:
    """A request: its anchors, and how far it was decided. `mode` is new, open, declined or lru."""

    path: list[bytes]
    uses: RequestUses
    named: dict[bytes, bool] = field(default_factory=dict)  # each used key, and whether it was offered
    mode: str = "new"
    loaded: int = 0
    hit: int = 0
    has_hit_end: bool = False
    has_passed_hit: bool = False
    ends: list[int] = field(default_factory=list)
    num_decided: int = 0
    num_prompt: int = 0  # positions of the path at the first offer
    has_reply_end: bool = False


class ReferenceUnits(ReferenceGittins):
    """Anchors are what `gittins` knows. Windowed keys only count the boundaries that need them.

    Above a tier, the rule has all slots but a share, through which the other blocks pass, first in, first out.
    """

    def __init__(self, cache_capacity: int, group_windows: Sequence[int | None], is_above_tier: bool = False) -> None:
        self.share_slots = max(1, cache_capacity // 20) if is_above_tier else 0
        self.is_above_tier = is_above_tier
        self.in_share: OrderedDict[bytes, None] = OrderedDict()
        self.num_slots = cache_capacity
        self.num_evicted = 0  # by the last store
        super().__init__(cache_capacity - self.share_slots)
        self.anchor_group = list(group_windows).index(None)
        self.windows = {group: window for group, window in enumerate(group_windows) if window is not None}
        # The other groups without a window: their keys are stored and removed with the anchor.
        self.companion_groups = [group for group, window in enumerate(group_windows) if window is None][1:]
        self.num_full = 1 + len(self.companion_groups)
        self.needs: dict[bytes, int] = {}  # of each resident key that is no anchor: live boundaries whose set holds it
        self.boundaries: set[bytes] = set()
        self.leave_first: OrderedDict[bytes, None] = OrderedDict()
        self.pending: set[bytes] = set()
        self.failed: set[bytes] = set()  # keys that `fail` is removing
        self.stored: list[bytes] = []  # by the last store
        self.lru_requests = 0

    def request(self, path: list[bytes], prompt_tokens: int, now_ms: int) -> int:
        """Serve a request with the hashes `path` in one step. Return its hit in positions."""
        request = self.open(path, now_ms)
        hit, ends = self.find_hit(request.path, prompt_tokens)
        self.load(request, hit)
        self.offer(request, self.offers(request.path, hit, ends))
        self.pending.clear()
        self.end(request)
        return hit

    def open(self, path: list[bytes], now_ms: int, num_known: int | None = None) -> Serving:
        """Begin a request, and use its anchors. `num_known`: the request names so many positions only; 0: none."""
        request = Serving([make_offload_key(x, self.anchor_group) for x in path], RequestUses())
        self.now_ms = now_ms
        if num_known != 0:
            request.uses.positions = {key: TOKENS_PER_BLOCK * (i + 1) for i, key in enumerate(request.path)}
            request.uses.read_positions()
        self.use(request, request.path)
        return request

    def extend(self, request: Serving, more: list[bytes]) -> None:
        """Append the hashes `more` of a reply to a request's path, and use their anchors."""
        anchors = [make_offload_key(x, self.anchor_group) for x in more]
        request.path += anchors
        request.uses.positions |= {key: TOKENS_PER_BLOCK * (request.path.index(key) + 1) for key in anchors}
        request.uses.read_positions()
        self.use(request, anchors)

    def group_of_key(self, key: bytes) -> int:
        """Return the KV-cache group of a key, or -1 if it is unknown."""
        group = int.from_bytes(key[-4:], "big")
        known = (self.anchor_group, *self.windows, *self.companion_groups)
        return group if len(key) > 4 and group in known else -1

    def is_anchor(self, key: bytes) -> bool:
        return self.group_of_key(key) == self.anchor_group

    def use(self, request: Serving, keys: list[bytes], is_store: bool = False) -> None:
        new = [key for key in keys if key not in request.named]
        request.named.update(dict.fromkeys(new, False))
        if new and (request.uses.positions is None or any(self.group_of_key(key) < 0 for key in new)):
            self.lru_requests += request.mode != "lru"
            request.mode = "lru"
        for key in new if not is_store else []:
            if self.group_of_key(key) not in (-1, self.anchor_group) and request.uses.positions is not None:
                request.loaded = max(request.loaded, self.index_in(request, key) + 1)
        if request.mode == "lru":
            for key in reversed(new):
                if key in self.leave_first:
                    self.leave_first.move_to_end(key)
            return
        anchors = [key for key in new if self.is_anchor(key)]
        for key in anchors:
            self.rejoin(key, is_listed=False)
        request.uses.add(anchors)
        self.count_uses(anchors, request.uses)

    def anchor_of(self, key: bytes) -> bytes:
        return make_offload_key(key[:-4], self.anchor_group)

    def index_in(self, request: Serving, key: bytes) -> int:
        return request.path.index(self.anchor_of(key))

    def load(self, request: Serving, hit: int) -> None:
        self.use(request, self.full(request.path[:hit]) + self.set_of(request.path, hit))

    def full(self, path: list[bytes]) -> list[bytes]:
        """Return the keys of all groups without a window, group by group."""
        return path + [make_offload_key(key[:-4], group) for group in self.companion_groups for key in path]

    def companions(self, anchor: bytes) -> list[bytes]:
        """Return the resident keys that leave with an anchor."""
        keys = self.full([anchor])[1:]
        return [key for key in keys if key in self.needs and key not in self.leave_first and key not in self.failed]

    def _trim(self) -> None:
        capacity, self.cache_capacity = self.cache_capacity, self.cache_capacity // self.num_full
        super()._trim()
        self.cache_capacity = capacity

    @property
    def listed(self) -> Lists:
        """The lists of anchors: (class, bin, keys in path order) of each group, the oldest of a cell first."""
        return [
            (*cell, list(group.resident)) for cell in sorted(self.cells) for group in self.cells[cell] if group.resident
        ]

    def find_hit(self, path: list[bytes], prompt_tokens: int) -> tuple[int, list[int]]:
        limit = min(len(path), (prompt_tokens - 1) // TOKENS_PER_BLOCK)
        held = self.blocks.keys() | self.needs.keys() | self.in_share.keys()
        full = next((i for i, key in enumerate(path[:limit]) if not held.issuperset(self.full([key]))), limit)
        hit = next(end for end in range(full, -1, -1) if held.issuperset(self.set_of(path, end)))
        return hit, [end for end in sorted({full, limit}) if end > hit]

    def set_of(self, path: list[bytes], end: int) -> list[bytes]:
        """Return the windowed keys that a resumption at `end` needs, by group, shallow to deep."""
        return [
            make_offload_key(key[:-4], group)
            for group, window in self.windows.items()
            for key in path[max(end - window, 0) : end]
        ]

    def is_set_resident(self, path: list[bytes], end: int) -> bool:
        return all(key in self.needs for key in self.set_of(path, end))

    def offers(self, path: list[bytes], hit: int, ends: list[int]) -> list[bytes]:
        """Return the keys that an engine offers: those behind the hit, group by group."""
        windowed = dict.fromkeys(key for end in ends for key in self.set_of(path, end))
        return self.full(path[hit:]) + sorted(windowed, key=lambda key: key[-4:])

    def offer(self, request: Serving, keys: list[bytes]) -> None:
        """Store the keys of one call that are worth it."""
        distinct = dict.fromkeys(keys)
        again = [key for key in distinct if key in self.in_share]
        absent = [key for key in distinct if key not in self.blocks and key not in self.needs]
        absent = [key for key in absent if key not in self.in_share]
        is_first = request.mode == "new" and request.loaded > 0
        most_victims = len(absent) + min(len(self.in_share), len(again) + (len(request.named) if is_first else 0))
        loaded = [key for key in request.named if key in self.in_share and key not in distinct] if is_first else []
        loaded = [key for key in loaded if self.index_in(request, key) < request.loaded]
        self.use(request, keys, is_store=True)
        request.named.update(dict.fromkeys(keys, True))
        candidates = absent + again + loaded
        self.num_evicted = 0
        if any(self.anchor_of(key) not in request.path for key in candidates) and request.mode != "lru":
            request.mode = "lru"
            self.lru_requests += 1
        self._recall([key for key in candidates if self.is_anchor(key)], keys, request.uses)
        self.named = {*keys, *self.pending}
        if request.mode == "lru":
            room = self.num_free
            need = len(absent) - room
            room += self.make_way_for(min(need, len(self.in_share) - self.share_slots), need)
            self.stored = absent[:room]
            for key in self.stored:
                self.enter(key, None)
                self.queue(key)
        else:
            if request.mode == "new":
                self.find_ends(request, keys)
            self.move_reply_end(request, keys)
            if not request.has_reply_end:
                self.move_ends(request, keys, candidates)
            if self.is_above_tier:
                # A tier is never read for what host memory cannot hold at once.
                most = len(request.path)
                if self.num_full * most + sum(self.windows.values()) > self.num_slots:
                    most = max((end for end in request.ends if self.fits(request.path, end)), default=0)
                candidates = [key for key in candidates if self.index_in(request, key) < most]
                absent = [key for key in absent if self.index_in(request, key) < most]
            self.store(request, candidates, absent, most_victims)
        self.pending.update(self.stored)
        self._trim()

    @property
    def num_free(self) -> int:
        return self.num_slots - len(self.blocks) - len(self.needs) - len(self.in_share)

    def move_in(self, keys: list[bytes]) -> None:
        """Let blocks that a tier reads pass."""
        self.named = set(self.pending)
        self.make_way_for(len(keys) - self.num_free, len(keys) - self.num_free)
        self.stored = keys[: self.num_free]
        self.in_share.update(dict.fromkeys(self.stored))
        self._trim()

    def make_way_for(self, n: int, need: int) -> int:
        """Evict passing keys, oldest first, and where fewer than `need` are idle, others. Return how many left."""
        got = 0
        for key in [key for key in self.in_share if key not in self.pending][: max(n, 0)]:
            del self.in_share[key]
            got += 1
        return got + (self.evict_blocks(need - got) if got < need else 0)

    def find_ends(self, request: Serving, keys: list[bytes]) -> None:
        path, request.mode, request.num_prompt = request.path, "open", len(request.path)
        limit = len(path)
        if limit and path[-1] in keys:
            limit = next((end for end in range(limit, 0, -1) if self.offers_end(path, end, keys)), 0)
            limit = limit if limit > request.loaded else 0
        held = self.blocks.keys() | self.in_share.keys()
        full = next((i for i, key in enumerate(path[: limit or None]) if key not in held), limit or len(path))
        request.hit = min(full, request.loaded) or next(
            (end for end in range(full, 0, -1) if path[end - 1] in self.boundaries), 0
        )
        request.has_hit_end = self.is_above_tier and request.hit > 0 and request.loaded > 0
        request.ends = [request.hit] * request.has_hit_end
        request.ends += [end for end in sorted({full, limit}) if end > request.hit and limit >= full]

    def offers_end(self, path: list[bytes], end: int, keys: list[bytes]) -> bool:
        return any(make_offload_key(path[end - 1][:-4], group) in keys for group in self.windows)

    def move_reply_end(self, request: Serving, keys: list[bytes]) -> None:
        """Take the end of a path that has grown as an end, if the call offers windowed keys there."""
        ends, end = request.ends, len(request.path)
        if end <= request.num_prompt or not self.offers_end(request.path, end, keys):
            return
        if not request.has_reply_end:
            request.has_reply_end = True
            request.num_decided += request.num_decided > len(ends)
            ends.append(end)
        elif ends[-1] != end:
            request.hit, ends[-1] = ends[-1], end

    def move_ends(self, request: Serving, keys: list[bytes], absent: list[bytes]) -> None:
        """Take the end of a whole set that the call offers as an end, unless it offers the request's ends."""
        runs: list[list[int]] = []  # group, first and last index of consecutive absent keys
        before = (-1, -2)
        for key in absent:
            here = (self.group_of_key(key), self.index_in(request, key))
            if here[0] in self.windows:
                if before != (here[0], here[1] - 1):
                    runs.append([*here, here[1]])
                runs[-1][2] = here[1]
            before = here
        for group, first, last in runs:
            around = [
                make_offload_key(key[:-4], group)
                for key in request.path[max(last + 1 - self.windows[group], 0) : last + 2]
            ]
            has = [key in keys or key in self.needs for key in around]
            end = last + 1
            is_whole = last - first < self.windows[group] and all(has[: min(end, self.windows[group])])
            if is_whole and (end == len(request.path) or not has[-1]):
                self.add_end(request, end, keys)

    def add_end(self, request: Serving, end: int, keys: list[bytes]) -> None:
        first, path = int(request.has_hit_end), request.path
        ends, num_decided = request.ends[first:], request.num_decided - first
        if end in ends or end <= request.hit:
            return
        if ends and ends[-1] == end + 1 == len(path) and not self.offers_end(path, end + 1, keys):
            request.ends[-1] = end
            return
        if len(ends) == 2:
            if num_decided > 0 or self.offers_end(path, ends[0], keys):
                return
            del ends[0]
        elif num_decided > 0 and (num_decided > len(ends) or (ends and end < ends[0])):
            request.num_decided += 1
        request.ends = request.ends[:first] + sorted([*ends, end])

    def new_keys(self, request: Serving, absent: list[bytes]) -> list[tuple[bytes, int, int]]:
        """Return the keys that may be stored, each with its index on the path and its unit."""
        path, new, unit = request.path, {}, 0
        for i, key in enumerate(path):
            if key in absent and (i == 0 or path[i - 1] in self.blocks or path[i - 1] in new):
                new[key] = (i, unit)
            if key in self.blocks or key in new:
                new |= {companion: (i, unit) for companion in self.full([key])[1:] if companion in absent}
            if unit < len(request.ends) and i + 1 == request.ends[unit]:
                for needed in self.set_of(path, i + 1):
                    if needed in absent:
                        new.setdefault(needed, (self.index_in(request, needed), unit))
                unit += 1
        return [(key, *place) for key, place in new.items()]

    def fits(self, path: list[bytes], end: int) -> bool:
        return self.num_full * end + len(self.set_of(path, end)) <= self.num_slots

    def store(self, request: Serving, candidates: list[bytes], absent: list[bytes], most_victims: int) -> None:
        path = request.path
        places = self.new_keys(request, candidates)
        self.named.update(path, *(self.set_of(path, end) for end in request.ends))
        num_stored, new = self.free_slots(request, places), [key for key, _, _ in places]
        num_forced = 0 if num_stored else self.force_loads(request, new)
        kept, passing = new[: num_stored + num_forced], []
        if self.is_above_tier:
            kept, passing = self.pass_on(kept, new, absent, most_victims)
        for key in kept:
            index = self.index_in(request, key)
            self.enter(key, path[index - 1] if index and self.is_anchor(key) else None)
            if self.group_of_key(key) in self.companion_groups and self.anchor_of(key) in self.blocks:
                self.needs[key] = 1
            elif self.group_of_key(key) in self.companion_groups:
                self.queue(key)
            if self.is_anchor(key):
                self.group_of[key].resident[key] = None
        self.stored = [key for key in kept + passing if key in absent]
        self.in_share.update(dict.fromkeys(passing))
        if not num_forced:
            self.complete(request)
            return
        for key in kept:
            if self.needs.get(key) == 0:
                self.queue(key)
        for key in kept:
            if key in self.blocks and self.kids[key] == 0 and key not in self.boundaries:
                self.queue(key)

    def force_loads(self, request: Serving, new: list[bytes]) -> int:
        """Make room for the first loads without a test, if more are declined than pass. Return their number."""
        is_load = [key in self.in_share and self.index_in(request, key) < request.loaded for key in new]
        num_loads = [*is_load, False].index(False)
        if not self.is_above_tier or num_loads <= self.share_slots:
            return 0
        self.complete(request)
        room = max(0, self.cache_capacity - len(self.blocks) - len(self.needs))
        num_forced = num_loads - self.share_slots
        return min(num_forced, room + self.evict_blocks(num_forced - room))

    def pass_on(
        self, kept: list[bytes], new: list[bytes], absent: list[bytes], most_victims: int
    ) -> tuple[list[bytes], list[bytes]]:
        """Return the keys that the rule keeps, and the absent keys that pass, in their order."""
        passing = [key for key in new[len(kept) :] if key in absent] + [key for key in absent if key not in new]
        need = sum(key in absent for key in kept) + len(passing) - self.num_free
        for key in kept:
            self.in_share.pop(key, None)
        over = min(len(self.in_share) + len(passing) - self.share_slots, most_victims - self.num_evicted)
        need -= self.make_way_for(max(need, over), need)
        dropped = [key for key in reversed(kept + passing) if key in absent][: max(need, 0)]
        return [key for key in kept if key not in dropped], [key for key in passing if key not in dropped]

    def complete(self, request: Serving) -> None:
        """Make the boundaries whose sets are complete, and give up the one that the request has passed."""
        path = request.path
        deepest = request.hit
        for end in request.ends[request.has_hit_end and request.has_passed_hit :]:
            if path[end - 1] in self.boundaries or (self.is_chain(path, end) and self.is_set_resident(path, end)):
                if path[end - 1] not in self.boundaries:
                    self.make_boundary(path, end)
                deepest = end
        hit = request.hit
        request.has_passed_hit = request.has_passed_hit or deepest > hit > 0
        if deepest > hit > 0 and path[hit - 1] in self.boundaries:
            nearest = path[max(hit - WAY_BACK * sum(self.windows.values()), 0) : hit - 1]
            if not self.boundaries.isdisjoint(nearest):
                self.give_up(path[hit - 1])

    def is_chain(self, path: list[bytes], end: int) -> bool:
        reach = path[max(end - max(self.windows.values()), 0) : end]
        return all(key in self.blocks for key in reach) and all(
            self.parent_of(key) == parent for parent, key in pairwise(reach)
        )

    def parent_of(self, key: bytes) -> bytes | None:
        parent = self.parents[key]
        return parent if parent in self.blocks else None

    def free_slots(self, request: Serving, new: list[tuple[bytes, int, int]]) -> int:
        """Decide and evict for one unit after the other, and return how many of the new keys are stored."""
        room, start = max(0, self.cache_capacity - len(self.blocks) - len(self.needs)), 0
        while start < len(new) and request.mode == "open":
            unit = new[start][2]
            stop = next((i for i in range(start, len(new)) if new[i][2] != unit), len(new))
            if unit >= request.num_decided:
                request.num_decided = unit + 1
                need = self.num_absent(request, unit) - room
                queued = len(self.leave_first)
                queued += (self.num_full - 1) * sum(key in self.group_of for key in self.leave_first)
                num_anchors = max(0, need - queued + self.num_full - 1) // self.num_full
                if need > 0 and not self.is_worth(request.path[new[start][1]], num_anchors):
                    request.mode = "declined"
                    break
            room += self.evict_blocks(stop - room)
            if room < stop:
                request.mode = "declined"
                while room > 0 and self.group_of_key(new[room][0]) in self.companion_groups:
                    room -= 1
                return room
            start = stop
        return start

    def num_absent(self, request: Serving, unit: int) -> int:
        """Return the number of absent keys up to the end of a unit."""
        ends = request.ends[: unit + 1]
        stop = request.ends[unit] if unit < len(request.ends) else None
        needed = {key for end in ends for key in self.set_of(request.path, end)}
        num_anchors = sum(key not in self.blocks for key in request.path[:stop])
        return sum(key not in self.needs for key in needed) + self.num_full * num_anchors

    def is_worth(self, anchor: bytes, n: int) -> bool:
        """Return whether an anchor is worth more than the cheapest three quarters of `n` listed anchors."""
        worth = self.value[self.group_of[anchor].cls if anchor in self.group_of else 0][0]
        n -= max(n, 0) // 4
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
                        if not self.is_idle(tail) or self.kids[tail] > 0:
                            break
                        self.give_up(tail)
                        got += self.evict_queued(n - got)
                        if got >= n:
                            return got
        return got

    def is_idle(self, key: bytes) -> bool:
        return self.named.isdisjoint([key, *(self.companions(key) if key in self.group_of else [])])

    def evict_queued(self, n: int) -> int:
        got = 0
        while got < n:
            key = next((key for key in self.leave_first if self.is_idle(key)), None)
            if key is None:
                break
            del self.leave_first[key]
            got += 1
            self.num_evicted += 1
            if key in self.needs:
                del self.needs[key]
                continue
            companions = self.companions(key)
            self.drop(key)
            for companion in companions:
                del self.needs[companion]
            got += len(companions)
            self.num_evicted += len(companions)
        return got

    def drop(self, anchor: bytes) -> None:
        had_kids = self.kids.get(parent := self.parent_of(anchor), 0) > 0
        self._remove(anchor)
        if had_kids and self.kids[parent] == 0 and parent not in self.boundaries:
            self.queue(parent)

    def enter(self, key: bytes, parent: bytes | None) -> None:
        if not self.is_anchor(key):
            self.needs[key] = 0
            return
        self._store(key, parent)
        if parent is not None:
            self.rejoin(parent)

    def make_boundary(self, path: list[bytes], end: int) -> None:
        self.boundaries.add(path[end - 1])
        self.rejoin(path[end - 1])
        for key in self.set_of(path, end):
            self.needs[key] += 1
            self.leave_first.pop(key, None)

    def end(self, request: Serving) -> None:
        """Queue windowed keys that no boundary needs, and the last anchor of a prompt that was not offered whole."""
        for key in request.named:
            if self.needs.get(key) == 0:
                self.queue(key)
        if request.mode == "lru":
            return
        num_resident = next((i for i, key in enumerate(request.path) if key not in self.blocks), len(request.path))
        if (
            self.is_above_tier
            and num_resident < len(request.path)
            and (request.path[num_resident] in self.in_share or num_resident < request.loaded)
        ):
            return
        last = request.path[num_resident - 1] if 0 < num_resident < len(request.path) else None
        if last is not None and not request.named[request.path[num_resident]] and last not in self.boundaries:
            self.give_up(last)

    def fail(self, request: Serving, keys: Iterable[bytes]) -> None:
        """Remove keys whose store failed. The request's boundaries that need them end."""
        failed = [key for key in keys if key in self.pending]
        if not failed:
            return
        self.pending.difference_update(failed)
        for key in [key for key in failed if key in self.in_share]:
            del self.in_share[key]
            failed.remove(key)
        for key in failed:
            self.leave_first.pop(key, None)
            if key in self.group_of:
                self.group_of[key].resident.pop(key, None)
        self.failed = set(failed)
        for anchor in [key for key in failed if key in self.group_of]:
            for key in self.companions(anchor):
                self.needs[key] = 0
                self.queue(key)
        for end in request.ends if request.mode != "lru" else []:
            if request.path[end - 1] in self.boundaries:
                has_set = all(key in self.needs and key not in failed for key in self.set_of(request.path, end))
                if not has_set or not self.failed.isdisjoint(self.full(request.path[:end])):
                    self.give_up(request.path[end - 1])
        for key in failed:
            if key in self.boundaries:
                self.give_up(key)
        for key in failed:
            if key in self.needs:
                del self.needs[key]
            else:
                self.drop(key)
        self.failed = set()
        self._trim()

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
                    if self.needs.get(key, 0) > 0:
                        self.needs[key] -= 1
                        if self.needs[key] == 0:
                            self.queue(key)
                    ancestor = self.parent_of(ancestor)
        if self.kids[anchor] == 0:
            self.queue(anchor)

    def queue(self, key: bytes) -> None:
        if key in self.leave_first or key in self.failed:
            return
        if key in self.group_of:
            self.group_of[key].resident.pop(key, None)
        self.leave_first[key] = None

    def rejoin(self, anchor: bytes, is_listed: bool = True) -> None:
        """Return a queued anchor, which is needed again, to its group's list."""
        if anchor in self.leave_first:
            del self.leave_first[anchor]
            if is_listed:
                self.group_of[anchor].resident[anchor] = None
