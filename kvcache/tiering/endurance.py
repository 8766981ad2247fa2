"""Chooses the blocks that a disk with a budget of writes receives.

An SSD endures few writes a day, and most blocks are never read again. A run, the blocks of one request, is written from
its head on or not at all: a hole would make the blocks behind it useless. It is chosen if similar ones were read often.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from kvcache.request import ReqContext
from kvcache.tiering.backlog import Backlog
from kvcache.tiers.base.wear import Wear

_MOST_PLACES = 256
"""Every second key of a run is watched, fewer of a long one: the estimate needs shares, not all keys."""
_LATER_USES = 0.9
"""Weight of the uses that are expected after a use, against this use."""

_RunClass = tuple[int, int]
_LAST: _RunClass = 0, 0


class RunValues:
    """How often blocks of similar runs were used again.

    The class of a run is a pair of logarithms: of the number of its blocks that were seen before, and of its new ones.
    The last blocks of requests are a class of their own: later requests seldom repeat one that is not full.
    """

    def __init__(self, num_blocks: int) -> None:
        # They stand for twice the tier's blocks, because a small budget replaces these slowly.
        self._most_watched = num_blocks
        # By key: its class, and the blocks that it stands for.
        self._watched: OrderedDict[bytes, tuple[_RunClass, int]] = OrderedDict()
        # By class: its blocks, and the uses after them. A new class begins with a value above 0, so that it is tried.
        self._classes: defaultdict[_RunClass, list[float]] = defaultdict(lambda: [1.0, 0.3])

    def observe(self, keys: Sequence[bytes], num_held: int) -> _RunClass:
        """Record a request's keys, in prefix order, and return their class. The tier holds the first `num_held`."""
        num_seen = num_held
        used = []
        for place in _places(0, len(keys)):
            earlier = self._watched.pop(keys[place], None)
            if earlier is not None:
                num_seen = max(num_seen, place + 1)
                used.append(earlier)
        run_class = (num_seen + 1).bit_length(), (len(keys) - num_seen).bit_length()
        num_blocks, num_uses = self._classes[run_class]
        for earlier_class, weight in used:
            self._classes[earlier_class][1] += weight * (1 + _LATER_USES * num_uses / num_blocks)
        self.watch(keys, 0, run_class)
        return run_class

    def watch(self, keys: Sequence[bytes], begin: int, run_class: _RunClass) -> None:
        """Record blocks of a run, from its place `begin` on."""
        places = _places(begin, begin + len(keys))
        for place in places:
            key_class = _LAST if place == places.stop - 1 else run_class
            self._watched[keys[place - begin]] = key_class, places.step
            self._classes[key_class][0] += places.step
        while len(self._watched) > self._most_watched:
            self._watched.popitem(last=False)

    def is_worth(self, run_class: _RunClass, spare: float) -> bool:
        """Return whether better classes have at most a share `spare` of all blocks."""
        num_blocks, num_uses = self._classes[run_class]
        value = num_uses / num_blocks
        better = sum(blocks for blocks, uses in self._classes.values() if uses / blocks > value)
        return better <= spare * sum(blocks for blocks, _ in self._classes.values())


def _places(begin: int, end: int) -> range:
    # Steps are powers of two, so that a longer request finds the places of a shorter one.
    step = 1 << max(1, (end // _MOST_PLACES).bit_length())
    return range(begin | (step - 1), end, step)


@dataclass(slots=True)
class _Run:
    keys: dict[bytes, None] = field(default_factory=dict)
    run_class: _RunClass | None = None
    is_chosen: bool = False
    # The last block so far, if it was not worth a write.
    last: list[bytes] = field(default_factory=list)


class BudgetBacklog(Backlog):
    """The backlog of a tier with the budget `wear` of writes: it receives chosen runs.

    `due` has chosen blocks that are not ready yet.
    """

    def __init__(self, num_blocks: int, wear: Wear) -> None:
        super().__init__(num_blocks)
        self._wear = wear
        self._values = RunValues(wear.num_blocks)
        self._runs: WeakKeyDictionary[ReqContext, _Run] = WeakKeyDictionary()
        self.due: set[bytes] = set()

    def use(self, keys: list[bytes], req_context: ReqContext | None) -> list[bytes]:
        if req_context is not None:
            self._run_of(req_context).keys.update(dict.fromkeys(keys))
        return []

    def choose(
        self,
        keys: list[bytes],
        req_context: ReqContext | None,
        find: Callable[[list[bytes]], int | None],
        num_waiting: int,
    ) -> list[bytes]:
        """Return which blocks of a request to write, head first. It stores `keys`, and may have loaded others before.

        The first call for a request decides for all of its blocks but the last one. A call without keys is the last for
        the request. `find` looks blocks up in the tier. `num_waiting` other blocks wait to be written.
        """
        run = self._run_of(req_context)
        missing = [key for key in keys if key not in run.keys]
        run.keys.update(dict.fromkeys(missing))
        spare = self._wear.spare()
        if run.run_class is not None:
            self._values.watch(missing, len(run.keys) - len(missing), run.run_class)
            missing = run.last + missing
        elif run.keys:
            missing = list(run.keys)
            num_held = find(missing) or 0
            run.run_class = self._values.observe(missing, num_held)
            missing = missing[num_held:]
            run.is_chosen = self._values.is_worth(run.run_class, spare)
        wanted = missing if self._values.is_worth(_LAST, spare) else missing[:-1]
        room = max(0, int(self._wear.left()) - num_waiting - len(self.due))
        chosen = wanted[:room] if run.is_chosen else []
        # Blocks behind a hole are useless, so later ones of the request are not written.
        if wanted:
            run.is_chosen = len(chosen) == len(wanted)
        run.last = missing[len(wanted) :] if keys and req_context is not None else []
        self.num_declined += len(missing) - len(chosen) - len(run.last)
        return chosen

    def _run_of(self, req_context: ReqContext | None) -> _Run:
        return _Run() if req_context is None else self._runs.setdefault(req_context, _Run())

    def writes(self, req_context: ReqContext | None) -> bool:
        """Return whether a request's blocks are written; always True without a context."""
        return req_context is None or self._run_of(req_context).is_chosen

    def add(self, keys: list[bytes]) -> None:
        super().add([key for key in keys if key in self.due] if self.due else [])
        self.skip(keys)

    def skip(self, keys: list[bytes]) -> None:
        self.due.difference_update(keys)

    def end_request(self, req_context: ReqContext) -> None:
        self._runs.pop(req_context, None)

    def clear(self) -> None:
        """Forget requests and blocks, but keep the values of classes."""
        super().clear()
        self._runs.clear()
        self.due.clear()
