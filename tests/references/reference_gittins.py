"""The specification of `gittins` in plain dicts: reuse timing, learned per class of blocks and age.

Written from the rules alone: ordered dicts for every queue, no rows, and every value recomputed when it is needed.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from kvcache.block import BlockStatus
from kvcache.policies.base import CachePolicy, RequestUses

# Ages in ticks of 2,048 ms: 0, then four steps per octave.
EDGES = [0, *sorted({(m << b) >> 2 for b in range(1, 15) for m in range(4, 8)} - {0, 1})]
NUM_BINS = len(EDGES) - 1
CLASSES_PER_HINT = 8
NEXT_USES = (None, "end", "soon", "later")
# Classes of shared blocks, in use while `splits_shared`.
FIRST_SHARED = CLASSES_PER_HINT * len(NEXT_USES)
NUM_SHARED = 4
BINS, CLASSES = range(NUM_BINS), range(FIRST_SHARED + NUM_SHARED)

Cell = tuple[int, int]
Row = tuple[int, ...]  # a count or a chance for each bin
Parts = tuple[tuple[int, int, int], ...]
Victims = list[tuple[bytes, BlockStatus]]


@dataclass(eq=False)
class Group:
    """Known keys with the same request as last use and the same class."""

    t0: int
    cls: int
    length: int
    bin: int = 0
    num_known: int = 0
    resident: OrderedDict[bytes, None] = field(default_factory=OrderedDict)  # in path order


@dataclass
class Progress:
    """State of a request: whether it continues an older one, and the groups that it may join."""

    continues: bool = False
    num_leading: int = 0
    all_known: bool = True
    groups: dict[int, Group] = field(default_factory=dict)


class ReferenceGittins(CachePolicy):
    """Keep the blocks with the highest expected uses per unit of occupancy time, as learned from their class and age.

    The rules are the project's own. Compare LHD (Beckmann, Chen & Cidon, NSDI '18) and the Gittins index.
    """

    declines = True
    reads_clock = True

    ticks_shift = 11
    memory_factor = 4
    touches_per_table = 64
    ageing_steps = 256
    halving_total = 1 << 21
    most_passed = 2048
    passing_share = 20
    prior = 4096
    prior_few = 512  # for shared blocks and the hint `end`
    most_sharing = 15
    widely_shared = 2
    judged_bins = range(1, 7)  # ages of 4 to 16 s
    fewest_again = 1024
    most_again = 65536

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self.now_ms = 0
        self.clear()

    def clear(self) -> None:
        self.start_ms: int | None = None
        self.now = 0
        self.touches = 0
        self.group_of: dict[bytes, Group] = {}
        self.blocks: dict[bytes, BlockStatus | None] = {}
        # Of each resident key: its parent's key, and the number of its resident children.
        self.parents: dict[bytes, bytes | None] = {}
        self.kids: Counter[bytes] = Counter()
        self.memory: OrderedDict[bytes, None] = OrderedDict()
        # Resident keys of the first-in-first-out share, oldest first. Only `stores_all` adds any.
        self.passing: OrderedDict[bytes, None] = OrderedDict()
        self.cells: defaultdict[Cell, OrderedDict[Group, None]] = defaultdict(OrderedDict)
        self.num_groups: Counter[int] = Counter()  # by class, for classes that have groups
        # For each known key: about the logarithm of the number of requests that used it and continued no older request.
        self.sharing: dict[bytes, int] = {}
        self.num_again = 0  # uses of keys 4 to 16 s after their previous use, halved at times
        self.num_shared = 0  # of these, uses of widely shared keys
        self.splits_shared = False
        # By class: of successive ages, the expected uses and time, and the probability of growing older.
        self.parts: list[Parts] = [() for _ in CLASSES]
        self.value = [[0] * NUM_BINS for _ in CLASSES]
        self._forget_counts()
        # Incremented by `clear`, to invalidate the groups that open requests refer to.
        self.era = object()
        self._rebuild()

    @property
    def num_remembered(self) -> int:
        return len(self.memory)

    @property
    def worths(self) -> list[int]:
        """The value, per class, of a block that has just been used, for requests without a hint."""
        return [values[0] for values in self.value[:CLASSES_PER_HINT]]

    def get(self, key: bytes) -> BlockStatus | None:
        return self.blocks.get(key)

    def insert(self, key: bytes, block: BlockStatus) -> None:
        if key not in self.blocks:
            self._recall([key], [key], None)
            self._store(key, None)
            self.group_of[key].resident[key] = None
        self.blocks[key] = block

    def remove(self, key: bytes) -> None:
        self._remove(key)
        self._trim()

    def touch(self, keys: Iterable[bytes]) -> None:
        # Treat a call without a request as a request of its own.
        request = RequestUses()
        request.add(list(dict.fromkeys(keys)))
        self.count_uses(list(request.keys), request)

    def evict(self, n: int, protected: Container[bytes]) -> Victims | None:
        if n > sum(self._is_idle(key, protected) for key in self.blocks):
            return None
        victims = self._select(n, protected, None)
        if len(victims) < n:
            # The remaining blocks have resident children in use. Then the head of a path is evicted before its tail.
            rest = [key for key in self.blocks if self._is_idle(key, protected)]
            victims += [(key, self._remove(key)) for key in rest[: n - len(victims)]]
        self._trim()
        return victims

    def count_uses(self, keys: list[bytes], request: RequestUses) -> None:
        if not keys:
            return
        progress, is_first = self._progress(request)
        self._trim()
        self._tick()
        if is_first:
            self.touches += 1
            if self.touches % self.touches_per_table == 0:
                self._judge_sharing()
                self._rebuild()
        self._age()
        self._see_prefix(keys, progress)
        known = {key for key in keys if key in self.group_of}
        lowest = self._lowest_value() if self.passing else 0
        for key in keys:
            if key in known:
                group = self.group_of[key]
                if group.bin in self.judged_bins:
                    self.num_again += 1
                    self.num_shared += self.sharing[key] >= self.widely_shared
                self.hit[group.cls][group.bin] += 1
                self.total += 1
                group.resident.pop(key, None)
                self.memory.pop(key, None)
                self._leave(key)
        length = _length(keys, request)
        shared: dict[int, Group] = {}
        for key in keys:
            sharing = self._share(key, not progress.continues) if key in known else 0
            self.sharing[key] = sharing
            # The end of a session is not that of blocks which other sessions have used.
            hint = None if request.next_use == "end" and sharing else request.next_use
            if sharing and self.splits_shared and hint is None:
                joined = self._join_group(key, FIRST_SHARED + (sharing - 1) // 4, shared, length)
            else:
                cls = 4 * progress.continues + 2 * (not _is_last(key, keys, request)) + (key in known)
                cls += CLASSES_PER_HINT * NEXT_USES.index(hint)
                joined = self._join_group(key, cls, progress.groups, length)
            if key not in self.blocks:
                self.memory[key] = None
            elif key not in self.passing or self.value[joined.cls][0] > lowest:
                self.passing.pop(key, None)
                joined.resident[key] = None

    def hint(self, keys: list[bytes], next_use: str | None) -> None:
        """Move known keys to the classes of another hint. Their age starts at 0."""
        self._tick()
        groups: dict[int, Group] = {}
        for key in dict.fromkeys(keys):
            group = self.group_of.get(key)
            if group is None or (next_use == "end" and self.sharing[key]):
                continue
            if group.cls < FIRST_SHARED and NEXT_USES[group.cls // CLASSES_PER_HINT] != next_use:
                self.moved[group.cls][group.bin][NEXT_USES.index(next_use)] += 1
                self.total += 1
            self._leave(key)
            group.resident.pop(key, None)
            was = group.cls % CLASSES_PER_HINT if group.cls < FIRST_SHARED else 3
            cls = CLASSES_PER_HINT * NEXT_USES.index(next_use) + was
            joined = self._join_group(key, cls, groups, group.length)
            if key not in self.blocks:
                self.memory.move_to_end(key)
            elif key not in self.passing:
                joined.resident[key] = None

    def _tick(self) -> None:
        if self.start_ms is None:
            self.start_ms = self.now_ms
        self.now = max(self.now, (self.now_ms - self.start_ms) >> self.ticks_shift)

    def _share(self, key: bytes, by_new_session: bool) -> int:
        """Count a use of a known key, and return its sharing: sharing n is raised with probability 1 / 2**n."""
        sharing = self.sharing[key]
        draw = self.touches * 2654435761 % (1 << 32)
        if by_new_session and sharing < self.most_sharing and draw >> (32 - (sharing + 1) // 2) == 0:
            sharing += 1
        return sharing

    def _judge_sharing(self) -> None:
        """Split off shared blocks if over 9/16 of the uses after seconds are widely shared; merge them below 3/8."""
        if self.num_again >= self.fewest_again:
            splits = 16 * self.num_shared > (6 if self.splits_shared else 9) * self.num_again
            if splits and not self.splits_shared:
                # The counts so far are of classes that contained the shared blocks.
                self._forget_counts()
            self.splits_shared = splits
        if self.num_again >= self.most_again:
            self.num_again >>= 1
            self.num_shared >>= 1

    def _forget_counts(self) -> None:
        # By class and bin: uses, keys that grew older unused, and keys that a late hint moved, by hint.
        self.hit = [[0] * NUM_BINS for _ in CLASSES]
        self.sur = [[0] * NUM_BINS for _ in CLASSES]
        self.moved = [[[0] * len(NEXT_USES) for _ in BINS] for _ in CLASSES]
        self.total = 0

    def _progress(self, request: RequestUses) -> tuple[Progress, bool]:
        kept = request.policy_state
        if kept is not None and kept[0] is self.era:
            return kept[1], False
        progress = Progress()
        request.policy_state = (self.era, progress)
        return progress, True

    def _see_prefix(self, keys: list[bytes], progress: Progress) -> None:
        if not progress.all_known:
            return
        num_leading = next((i for i, key in enumerate(keys) if key not in self.group_of), len(keys))
        progress.all_known = num_leading == len(keys)
        progress.num_leading += num_leading
        if num_leading and not progress.continues:
            progress.continues = progress.num_leading + 1 >= self.group_of[keys[num_leading - 1]].length

    def _age(self) -> None:
        num_left = self.ageing_steps
        for cls in sorted(self.num_groups):
            for b in range(NUM_BINS - 1):
                queue = self.cells[cls, b]
                while queue:
                    oldest = next(iter(queue))
                    if self.now - oldest.t0 < EDGES[b + 1]:
                        break
                    if num_left == 0:
                        return
                    num_left -= 1
                    self.sur[cls][b] += oldest.num_known
                    self.total += oldest.num_known
                    del queue[oldest]
                    oldest.bin += 1
                    self.cells[cls, b + 1][oldest] = None

    def make_room(
        self, keys: list[bytes], num_free: int, offered: list[bytes], request: RequestUses | None
    ) -> tuple[int, Victims]:
        is_move = self.stores_all and request is None
        if not self.stores_all:
            keys = self._without_holes(keys, offered, request)
        if not is_move:
            self._recall(keys, offered, request)
        num_needed = len(keys) - num_free
        num_grouped = 0 if is_move else len(keys)
        victims: Victims = []
        if num_needed > 0:
            named = {*offered, *(() if request is None else request.keys)}
            if self.stores_all:
                victims, num_passing = self._make_way(num_needed, named, None if is_move else keys[num_free:])
                num_grouped = 0 if is_move else len(keys) - num_passing
            else:
                victims = self._select_passing(num_needed, named)
                if len(victims) < num_needed:
                    waiting = keys[num_free + len(victims) :]
                    victims += self._select(num_needed - len(victims), named, waiting)
            keys = keys[: num_free + len(victims)]
        for key in keys:
            self._store(key, _predecessor(key, offered, request))
        for key in keys[:num_grouped]:
            self.group_of[key].resident[key] = None
        # The tail of a prompt is evicted before its head.
        self.passing.update(dict.fromkeys(reversed(keys[num_grouped:])))
        self._trim()
        return len(keys), victims

    def _make_way(self, n: int, named: Container[bytes], waiting: list[bytes] | None) -> tuple[Victims, int]:
        """Evict up to `n` blocks, whatever the values of the `waiting` keys (None: the keys are being moved).

        Return the victims, and the number of waiting keys that become passing.
        """
        share = max(1, self.cache_capacity // self.passing_share)
        victims = self._select_passing(min(n, len(self.passing) - share), named)
        if waiting is not None and len(victims) < n:
            victims += self._select(n - len(victims), named, waiting[len(victims) :])
        num_passing = n - len(victims)
        num_over = len(self.passing) + num_passing - share
        victims += self._select_passing(min(num_passing, num_over), named)
        if len(victims) < n:
            victims += self._select(n - len(victims), named, None)
        victims += self._select_passing(n - len(victims), named)
        return victims, num_passing

    def _select_passing(self, n: int, named: Container[bytes]) -> Victims:
        victims: Victims = []
        for key in list(self.passing):
            if len(victims) >= n:
                break
            if self._may_leave(key, named):
                victims.append((key, self._remove(key)))
        return victims

    def _may_leave(self, key: bytes, named: Container[bytes]) -> bool:
        return self._is_idle(key, named) and self.kids[key] == 0

    def _is_idle(self, key: bytes, protected: Container[bytes]) -> bool:
        block = self.blocks[key]
        return block is not None and block.ref_cnt == 0 and key not in protected

    def _lowest_value(self) -> int:
        """Return the value of the least valuable cell that holds resident blocks, or -1."""
        return next((self.value[cls][b] for (cls, b), _ in self._by_value()), -1)

    def _by_value(self) -> list[tuple[Cell, list[Group]]]:
        """Return the cells with resident blocks, the least valuable first, and their groups with such blocks."""
        found = [(cell, [group for group in queue if group.resident]) for cell, queue in self.cells.items()]
        return sorted(
            ((cell, groups) for cell, groups in found if groups),
            key=lambda one: (self.value[one[0][0]][one[0][1]], -one[0][1], one[0][0]),
        )

    def _recall(self, keys: Sequence[bytes], offered: Sequence[bytes], request: RequestUses | None) -> None:
        """Add keys again that were dropped from the memory after their use."""
        groups: dict[int, Group] = {}
        for key in keys:
            if key not in self.group_of:
                self.sharing[key] = 0
                cls = 0 if _is_last(key, offered, request) else 2
                self._join_group(key, _hinted(cls, request), groups, _length(offered, request))
                self.memory[key] = None

    def _without_holes(self, keys: list[bytes], offered: Sequence[bytes], request: RequestUses | None) -> list[bytes]:
        taken: dict[bytes, None] = {}
        for key in keys:
            predecessor = _predecessor(key, offered, request)
            if predecessor is not None and predecessor not in self.blocks and predecessor not in taken:
                break
            taken[key] = None
        return list(taken)

    def _select(self, num_needed: int, named: Container[bytes], waiting: list[bytes] | None) -> Victims:
        """Evict up to `num_needed` blocks, each worth less than the key of `waiting` that replaces it."""
        victims: Victims = []
        num_left = self.most_passed
        while len(victims) < num_needed:
            num_before = len(victims)
            for cell, groups in self._by_value():
                if self._is_over(cell, victims, waiting):
                    return victims
                for group in groups:
                    while group.resident:
                        tail = next(reversed(group.resident))
                        if not self._may_leave(tail, named):
                            break
                        if self._is_over(cell, victims, waiting):
                            return victims
                        victims.append((tail, self._remove(tail)))
                        if len(victims) == num_needed:
                            return victims
                    if group.resident:
                        num_left -= 1
                        if num_left == 0:
                            return victims
            if len(victims) == num_before:
                break
        return victims

    def _is_over(self, cell: Cell, victims: Victims, waiting: list[bytes] | None) -> bool:
        if waiting is None:
            return False
        newcomer = self.group_of[waiting[len(victims)]]
        return self.value[newcomer.cls][0] <= self.value[cell[0]][cell[1]]

    def _remove(self, key: bytes) -> BlockStatus | None:
        """Remove a block and return it. If its key was known, it stays known."""
        block = self.blocks.pop(key)
        self.passing.pop(key, None)
        if key in self.group_of:
            self.group_of[key].resident.pop(key, None)
            self.memory[key] = None
        parent = self.parents.pop(key)
        # A parent may have been removed and stored again. Its count then does not include the older children.
        if parent in self.blocks and self.kids[parent] > 0:
            self.kids[parent] -= 1
        return block

    def _store(self, key: bytes, predecessor: bytes | None) -> None:
        self.memory.pop(key, None)
        parent = predecessor if predecessor in self.blocks else None
        if parent is not None:
            self.kids[parent] += 1
        self.blocks[key], self.parents[key], self.kids[key] = None, parent, 0

    def _join_group(self, key: bytes, cls: int, groups: dict[int, Group], length: int) -> Group:
        group = groups.get(cls % CLASSES_PER_HINT)
        if group is None or group.num_known == 0 or group.bin != 0 or group.cls != cls:
            group = groups[cls % CLASSES_PER_HINT] = Group(self.now, cls, length)
            self.cells[cls, 0][group] = None
            self.num_groups[cls] += 1
        group.num_known += 1
        self.group_of[key] = group
        return group

    def _leave(self, key: bytes) -> None:
        group = self.group_of.pop(key)
        group.num_known -= 1
        if group.num_known == 0:
            del self.cells[group.cls, group.bin][group]
            self.num_groups[group.cls] -= 1
            if self.num_groups[group.cls] == 0:
                del self.num_groups[group.cls]

    def _trim(self) -> None:
        while len(self.memory) > self.memory_factor * self.cache_capacity:
            oldest, _ = self.memory.popitem(last=False)
            self._leave(oldest)
            del self.sharing[oldest]

    def _rebuild(self) -> None:
        if self.total >= self.halving_total:
            self.hit = [[count >> 1 for count in counts] for counts in self.hit]
            self.sur = [[count >> 1 for count in counts] for counts in self.sur]
            self.moved = [[[count >> 1 for count in by_hint] for by_hint in bins] for bins in self.moved]
            self.total = sum(map(sum, self.hit + self.sur)) + sum(sum(map(sum, bins)) for bins in self.moved)
        chance = 4096
        chances = []
        hits, survivals = (map(sum, zip(*counts, strict=True)) for counts in (self.hit, self.sur))
        for num_hit, num_sur in zip(hits, survivals, strict=True):
            chance = ((num_hit << 16) + 2048 * chance) // (num_hit + num_sur + 2048)
            chances.append(chance)
        for cls in CLASSES:
            is_shared, is_end = cls >= FIRST_SHARED, cls // CLASSES_PER_HINT == NEXT_USES.index("end")
            prior = 0 if is_end else 65536 if is_shared or cls % 2 else 32768
            # A late hint moves keys to the class of another hint.
            soon, later = (self.parts[CLASSES_PER_HINT * hint + cls % CLASSES_PER_HINT] for hint in range(2, 4))
            are_moved = any(map(any, self.moved[cls]))
            self.value[cls], self.parts[cls] = values_of(
                tuple(self.hit[cls]),
                tuple(self.sur[cls]),
                tuple(map(tuple, self.moved[cls])),
                tuple(chances),
                prior,
                self.prior_few if is_shared or is_end else self.prior,
                ((), (), soon, later) if are_moved else (),
                tuple(self.value[cls]) if are_moved else (),
            )


@lru_cache(maxsize=256)  # most classes are empty: they share their values
def values_of(
    hit: Row,
    sur: Row,
    moved: tuple[Row, ...],
    chances: Row,
    prior: int,
    weight: int,
    targets: tuple[Parts, ...],
    before: Row,
) -> tuple[list[int], Parts]:
    """Return the value of each bin of a class, and its parts. `before`: the values in the table before."""
    counts = [hit[b] + sur[b] + sum(moved[b]) for b in BINS]
    expected = sum(counts[b] * chances[b] for b in BINS) >> 16
    factor = ((sum(hit) << 16) + 1024 * prior) // (expected + 1024)
    values = [0] * NUM_BINS
    stack: list[tuple[int, int, int]] = []
    for b in range(NUM_BINS - 1, -1, -1):
        guess = min(64512, (factor * chances[b]) >> 16)
        h = min(64512, ((hit[b] << 16) + weight * guess) // (counts[b] + weight))
        uses, time, stays = h, (EDGES[b + 1] - EDGES[b]) * (65536 - h // 2), 65536 - h
        for hint, num_moved in enumerate(moved[b]):
            leaves = min(stays, (num_moved << 16) // (counts[b] + weight))
            stays -= leaves
            # In the class that they are moved to, keys stay while they are worth more than here.
            for more_uses, more_time, still_stays in targets[hint] if leaves else ():
                if (more_uses << 32) // more_time <= before[b]:
                    break
                uses += leaves * more_uses >> 16
                time += leaves * more_time >> 16
                leaves = leaves * still_stays >> 16
        while stack and stack[-1][0] * time > uses * stack[-1][1]:
            more_uses, more_time, still_stays = stack.pop()
            uses += stays * more_uses >> 16
            time += stays * more_time >> 16
            stays = stays * still_stays >> 16
        stack.append((uses, time, stays))
        values[b] = (uses << 32) // time
    return values, tuple(reversed(stack))


def _hinted(cls: int, request: RequestUses | None) -> int:
    return cls if request is None else CLASSES_PER_HINT * NEXT_USES.index(request.next_use) + cls


def _is_last(key: bytes, keys: Sequence[bytes], request: RequestUses | None) -> bool:
    if request is not None and request.length:
        return request.is_last(key)
    return key == keys[-1]


def _length(keys: Sequence[bytes], request: RequestUses | None) -> int:
    return request.length if request is not None and request.length else len(keys)


def _predecessor(key: bytes, offered: Sequence[bytes], request: RequestUses | None) -> bytes | None:
    if request is not None:
        return request.predecessor(key)
    at = offered.index(key)
    return offered[at - 1] if at else None
