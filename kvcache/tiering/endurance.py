"""Chooses the blocks that a disk with a budget of writes receives.

An SSD endures few writes a day, and most blocks are never read again. A run, the blocks of one request, is written from
its head on or not at all: a hole would make the blocks behind it useless. It is chosen if similar ones were read often.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from weakref import WeakKeyDictionary

from kvcache.request import ReqContext
from kvcache.tiers.base.wear import Wear

_STEP, _MOST_PLACES = 2, 256
"""Every second key of a run is watched, fewer of a long one: the estimate needs shares, not all keys."""

_RunClass = tuple[int, int]


class RunValues:
    """How often blocks of similar runs were used again.

    The class of a run is a pair of logarithms: of the number of its blocks that were seen before, and of its new ones.
    """

    def __init__(self, num_blocks: int) -> None:
        self._most_watched = max(1, num_blocks // _STEP)
        # By key: its class, and the blocks that it stands for.
        self._watched: OrderedDict[bytes, tuple[_RunClass, int]] = OrderedDict()
        # By class: blocks offered, and blocks used again.
        self._classes: dict[_RunClass, list[float]] = {}

    def observe(self, keys: Sequence[bytes], num_held: int) -> _RunClass:
        """Record a request's keys, in prefix order, and return their class. The tier holds the first `num_held`."""
        places = _places(len(keys))
        num_seen = num_held
        for place in places:
            earlier = self._watched.pop(keys[place], None)
            if earlier is not None:
                num_seen = max(num_seen, place + 1)
                run_class, weight = earlier
                self._classes[run_class][1] += weight
        run_class = (num_seen + 1).bit_length(), (len(keys) - num_seen).bit_length()
        # A new class begins with a value above 0, so that it is tried.
        self._classes.setdefault(run_class, [1.0, 0.3])
        self.watch(keys, num_held, run_class)
        return run_class

    def watch(self, keys: Sequence[bytes], num_held: int, run_class: _RunClass) -> None:
        """Record the offered blocks of a run: those behind the first `num_held`."""
        counts = self._classes[run_class]
        for before, place in pairwise([-1, *_places(len(keys))]):
            weight = max(0, place - max(before, num_held - 1))
            self._watched[keys[place]] = run_class, weight
            counts[0] += weight
        while len(self._watched) > self._most_watched:
            self._watched.popitem(last=False)

    def is_worth(self, run_class: _RunClass, spare: float) -> bool:
        """Return whether better classes have at most a share `spare` of all offered blocks."""
        num_offered, num_used = self._classes[run_class]
        value = num_used / num_offered
        better = sum(offered for offered, used in self._classes.values() if used / offered > value)
        return better <= spare * sum(offered for offered, _ in self._classes.values())


def _places(num_keys: int) -> list[int]:
    # A later turn of a chat begins with all blocks of this one, so the last key shows that all were seen.
    step = max(_STEP, num_keys // _MOST_PLACES)
    return [*range(step - 1, num_keys - 1, step), num_keys - 1] if num_keys else []


@dataclass(slots=True)
class _Run:
    keys: dict[bytes, None] = field(default_factory=dict)
    run_class: _RunClass | None = None
    is_chosen: bool = False


class RunChoice:
    """Chooses the runs that a tier with the budget `wear` receives; `due` has chosen blocks that are not ready yet."""

    def __init__(self, wear: Wear) -> None:
        self._wear = wear
        self._values = RunValues(wear.num_blocks)
        self._runs: WeakKeyDictionary[ReqContext, _Run] = WeakKeyDictionary()
        self.due: set[bytes] = set()
        self.num_declined = 0

    def note_use(self, keys: list[bytes], req_context: ReqContext | None) -> None:
        """Record blocks that a request loads."""
        if req_context is not None:
            self._run_of(req_context).keys.update(dict.fromkeys(keys))

    def choose(
        self,
        keys: list[bytes],
        req_context: ReqContext | None,
        find: Callable[[list[bytes]], int | None],
        num_waiting: int,
    ) -> list[bytes]:
        """Return which blocks of a request to write, head first. It stores `keys`, and may have loaded others before.

        The first call for a request decides for all of its blocks. `find` looks blocks up in the tier. `num_waiting`
        other blocks wait to be written.
        """
        run = self._run_of(req_context)
        missing = [key for key in keys if key not in run.keys]
        run.keys.update(dict.fromkeys(missing))
        if run.run_class is not None:
            self._values.watch(missing, 0, run.run_class)
        elif run.keys:
            missing = list(run.keys)
            num_held = find(missing) or 0
            run.run_class = self._values.observe(missing, num_held)
            missing = missing[num_held:]
            run.is_chosen = self._values.is_worth(run.run_class, self._wear.spare())
        room = max(0, int(self._wear.left()) - num_waiting - len(self.due))
        chosen = missing[:room] if run.is_chosen else []
        # Blocks behind a hole are useless, so later ones of the request are not written.
        if missing:
            run.is_chosen = len(chosen) == len(missing)
        self.num_declined += len(missing) - len(chosen)
        return chosen

    def _run_of(self, req_context: ReqContext | None) -> _Run:
        return _Run() if req_context is None else self._runs.setdefault(req_context, _Run())

    def writes(self, req_context: ReqContext | None) -> bool:
        """Return whether a request's blocks are written; always True without a context."""
        return req_context is None or self._run_of(req_context).is_chosen

    def end(self, req_context: ReqContext) -> None:
        """Forget a request."""
        self._runs.pop(req_context, None)

    def take_due(self, keys: Iterable[bytes]) -> list[bytes]:
        """Remove the `keys` that are due from `due`, and return them."""
        ready = [key for key in keys if key in self.due] if self.due else []
        self.due.difference_update(ready)
        return ready

    def clear(self) -> None:
        """Forget requests and blocks, but keep the values of classes."""
        self._runs.clear()
        self.due.clear()
