"""HintBoard: executes the hints of clients and routers on one manager, and answers each action.

The thread that drives the manager drains the board in each step, and never waits for it. A hint is soft: it holds no
block, and a step handles a bounded number of actions and keys.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from kvcache.hints import DEMOTE, END_SESSION, KINDS, OTHER, PREFETCH, HintAction, actions_of, parse_hints
from kvcache.metrics import HintStats, Part
from kvcache.request import ReqContext

_LOG = logging.getLogger(__name__)
_MAX_WAITING, _MAX_SESSIONS, _MAX_SESSION_KEYS, _MAX_HASH_CHARS = 1024, 4096, 1 << 20, 128
_STEP_ACTIONS, _STEP_KEYS = 32, 512
_PATIENCE_S, _ANSWER_S, _IDLE_S = 5.0, 1.0, 0.02
"""How long a deferred action is tried again, how long `ask` waits, and after how long without steps it makes them."""


@dataclass(slots=True)
class _Waiting:
    """An action that waits until `end_s` at most, and the ended request that it is about, if it is about one."""

    action: HintAction
    end_s: float
    target: ReqContext | None = None
    answer: str = ""


@dataclass(slots=True)
class _Wishes:
    """What a request asks for itself: the session that it belongs to, and whether it is demoted at its end."""

    session_id: str | None = None
    is_demoted: bool = False


class HintBoard:
    """The sessions that clients named, and the actions that wait to be executed on `manager`.

    Without a manager, host memory is somebody else's: all is rejected but next uses of requests. `owns_keys`: keys are
    block hashes and a group, and other threads may drive the manager while it is idle; not so in a node's pool.
    """

    def __init__(self, manager: Any = None, owns_keys: bool = True) -> None:
        self._manager = manager
        self._owns_keys = owns_keys
        # The last request of each session, and how many keys it has.
        self._sessions: OrderedDict[str, tuple[ReqContext, int]] = OrderedDict()
        self._num_keys = 0
        self._waiting: deque[_Waiting] = deque()
        self._counts: Counter[tuple[str, str]] = Counter()
        self._counting, self._draining = threading.Lock(), threading.Lock()
        self._num_steps = 0
        if manager is not None:
            manager.hints = self
            if manager.telemetry is not None:
                manager.telemetry.sources.append(self.parts)

    def parts(self) -> list[Part]:
        """Return the number of answers by type of action. May be called from any thread."""
        by_kind: dict[str, dict[str, int]] = {}
        with self._counting:
            for (kind, answer), number in self._counts.items():
                by_kind.setdefault(kind, {})[answer] = number
        return [Part("hint", HintStats(**answers), (("type", kind),)) for kind, answers in sorted(by_kind.items())]

    def begin(self, req_context: ReqContext, actions: Iterable[HintAction] | None = None) -> None:
        """Take in the actions of a new request: those that it carries, or these."""
        if actions is None:
            actions = actions_of(req_context) if req_context.may_have_hints else ()
        wishes = _Wishes()
        for action in actions:
            if action.answer or action.is_own_use:
                # The pool reads a next use when the request first uses a block.
                wishes.session_id = action.session_id or wishes.session_id
                self._count(action, action.answer or "accepted")
            elif action == HintAction(DEMOTE, reason=action.reason) and self._manager is not None:
                wishes.is_demoted = True
            elif action.kind != PREFETCH and action.hashes is not None:
                # A client may know the hashes of blocks that others use.
                self._count(action, "rejected")
            else:
                self._add(_Waiting(action, time.monotonic() + _PATIENCE_S))
        if wishes != _Wishes():
            req_context.set_state(wishes)

    def end(self, req_context: ReqContext) -> None:
        """Note that a request has ended: from now on, the name of its session stands for its blocks."""
        wishes = req_context.get_state(_Wishes)
        if wishes is not None and wishes.is_demoted:
            self._add(_Waiting(HintAction(DEMOTE), time.monotonic() + _PATIENCE_S, req_context))
        if wishes is not None and wishes.session_id is not None:
            self._forget(wishes.session_id)
            num_keys = len(req_context.positions or ())
            self._sessions[wishes.session_id] = req_context, num_keys
            self._num_keys += num_keys
            while len(self._sessions) > _MAX_SESSIONS or self._num_keys > _MAX_SESSION_KEYS:
                self._forget(next(iter(self._sessions)))

    def ask(self, message: object) -> list[str]:
        """Have the steps execute a message, and return their answers; "" where there is none within a second.

        Callable in any thread but the manager's. An engine without requests makes no steps, so this thread makes them.
        ValueError: the message is neither an envelope nor the short form.
        """
        end_s = time.monotonic() + _PATIENCE_S
        posted = [_Waiting(action, end_s, None, action.answer) for action in parse_hints(message)]
        for one in posted:
            if one.answer:
                self._count(one.action, one.answer)
            else:
                self._add(one)
        end_s, num_steps = time.monotonic() + _ANSWER_S, self._num_steps
        while self._waiting and time.monotonic() < end_s:
            time.sleep(_IDLE_S)
            if self._num_steps != num_steps or not self._owns_keys:
                # The engine makes steps: deferred actions are in good hands.
                if all(one.answer for one in posted):
                    break
                num_steps = self._num_steps
            elif self._manager is not None:
                self.step()
                self._manager.on_schedule_end()
                num_steps = self._num_steps
        return [one.answer for one in posted]

    def step(self) -> None:
        """Execute actions that wait, a bounded number. Does nothing while another thread does."""
        self._num_steps += 1
        if not self._waiting or not self._draining.acquire(blocking=False):
            return
        try:
            num_keys, now_s = 0, time.monotonic()
            for _ in range(min(_STEP_ACTIONS, len(self._waiting))):
                one = self._waiting.popleft()
                try:
                    answer, num_named = self._execute(one)
                except Exception:
                    _LOG.exception("a hint of type %s failed", one.action.kind)
                    answer, num_named = "rejected", 0
                if answer != one.answer:
                    one.answer = answer
                    self._count(one.action, answer)
                if answer == "deferred" and now_s < one.end_s:
                    self._waiting.append(one)
                num_keys += num_named
                if num_keys >= _STEP_KEYS:
                    break
        finally:
            self._draining.release()

    def _execute(self, one: _Waiting) -> tuple[str, int]:
        """Execute one action; return the answer, and the number of keys that it named."""
        action, manager, target = one.action, self._manager, one.target
        keys = self._keys_of(action.hashes or ())
        if action.hashes is None and action.session_id is not None:
            target = self._sessions.get(action.session_id, (None, 0))[0]
            if target is None and manager is not None:
                return "missing", 0
        if target is not None:
            keys = list(target.positions or ())
        if manager is None or not keys:
            return "rejected", len(action.hashes or ())
        if action.kind == PREFETCH:
            return manager.prefetch(keys), len(keys)
        if action.kind == DEMOTE:
            return manager.demote(target or keys), len(keys)
        if action.next_use is not None:
            manager.hint(target or keys, action.next_use)
        if action.kind == END_SESSION and action.session_id is not None:
            self._forget(action.session_id)
        return "accepted", len(keys)

    def _keys_of(self, hashes: Iterable[object]) -> list[bytes]:
        """Return the keys of block hashes in hex, in each group of KV caches; other values are left out."""
        found = []
        for text in hashes if self._owns_keys else ():
            if type(text) is str and 0 < len(text) <= _MAX_HASH_CHARS:
                with suppress(ValueError):
                    found.append(bytes.fromhex(text))
        groups = range(len(self._manager.pool.configuration().get("group_windows") or "1")) if found else ()
        return [one + group.to_bytes(4, "big") for group in groups for one in found if one]

    def _add(self, one: _Waiting) -> None:
        if len(self._waiting) < _MAX_WAITING:
            self._waiting.append(one)
        else:
            one.answer = "rejected"
            self._count(one.action, one.answer)

    def _count(self, action: HintAction, answer: str) -> None:
        with self._counting:
            self._counts[action.kind if action.kind in KINDS else OTHER, answer] += 1

    def _forget(self, name: str) -> None:
        self._num_keys -= self._sessions.pop(name, (None, 0))[1]
