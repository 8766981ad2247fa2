"""HintBoard: executes the hints of clients and routers on one manager, and answers each action.

The thread that drives the manager drains the board in each step, and never waits for it. A hint is soft: it holds no
block, and a step handles a bounded number of actions and keys.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, OrderedDict, defaultdict, deque
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from kvcache.hints import DEMOTE, END_SESSION, PREFETCH, HintAction, actions_of, parse_hints
from kvcache.metrics import HintStats, Part
from kvcache.request import ReqContext

_LOG = logging.getLogger(__name__)
_MAX_WAITING, _MAX_SESSIONS, _MAX_SESSION_KEYS, _MAX_HASH_CHARS = 1024, 4096, 1 << 20, 128
_STEP_KEYS, _ACTION_KEYS, _MAX_KEYS = 512, 16, 2048
"""Keys after which a step ends; those that the work of an action without keys equals; keys of the hashes of one."""
_PATIENCE_S, _ANSWER_S, _IDLE_S = 5.0, 1.0, 0.02
"""How long a deferred action is tried again, how long `ask` waits, and after how long without steps it makes them."""


@dataclass(slots=True)
class _Waiting:
    """An action that waits until `end_s` at most, and the ended request that it is about, if it is about one."""

    action: HintAction
    end_s: float
    target: ReqContext | None = None
    answer: str = ""


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
        self._counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._counting, self._draining = threading.Lock(), threading.Lock()
        self._num_steps = 0
        if manager is not None:
            manager.hints = self
            if manager.telemetry is not None:
                manager.telemetry.sources.append(self.parts)

    def parts(self) -> list[Part]:
        """Return the number of answers by type of action. May be called from any thread."""
        with self._counting:
            return [Part("hint", HintStats(**named), (("type", kind),)) for kind, named in sorted(self._counts.items())]

    def begin(self, req_context: ReqContext) -> None:
        """Take in the actions that a new request carries."""
        for action in actions_of(req_context):
            answer = action.answer
            if action.is_own and action.kind not in (PREFETCH, DEMOTE):
                # The pool reads a next use when the request first uses a block.
                answer = "accepted"
            elif action.hashes is not None and action.kind != PREFETCH:
                # A client may know the hashes of blocks that others use.
                answer = "rejected"
            if not (action.is_own and action.kind == DEMOTE and self._manager is not None):
                self._add(action, answer)

    def end(self, req_context: ReqContext) -> None:
        """Note that a request has ended: from now on, the name of its session stands for its blocks."""
        own = [action for action in actions_of(req_context) if action.is_own and self._manager is not None]
        if any(action.kind == DEMOTE for action in own):
            self._add(HintAction(DEMOTE), target=req_context)
        for name in [action.session_id for action in own if action.session_id is not None][-1:]:
            self._forget(name)
            num_keys = len(req_context.positions or ())
            self._sessions[name] = req_context, num_keys
            self._num_keys += num_keys
            while len(self._sessions) > _MAX_SESSIONS or self._num_keys > _MAX_SESSION_KEYS:
                self._forget(next(iter(self._sessions)))

    def ask(self, message: object) -> list[str]:
        """Have the steps execute a message, and return their last answers within a second; "" if missing.

        Callable in any thread but the manager's. An engine without requests makes no steps, so this thread makes them.
        ValueError: the message is neither an envelope nor the short form.
        """
        posted = [self._add(action, action.answer) for action in parse_hints(message)]
        end_s = time.monotonic() + _ANSWER_S
        while any(one.answer in ("", "deferred") for one in posted) and time.monotonic() < end_s:
            num_steps = self._num_steps
            time.sleep(_IDLE_S)
            if self._num_steps == num_steps and self._owns_keys and self._manager is not None:
                self.step()
                self._manager.on_schedule_end()
        return [one.answer for one in posted]

    def step(self) -> None:
        """Execute actions that wait, a bounded number. Does nothing while another thread does."""
        self._num_steps += 1
        if not self._waiting or not self._draining.acquire(blocking=False):
            return
        try:
            num_left, now_s = _STEP_KEYS, time.monotonic()
            for _ in range(len(self._waiting)):
                one = self._waiting.popleft()
                try:
                    answer, num_keys = self._execute(one.action, one.target)
                except Exception:
                    _LOG.exception("a hint of type %s failed", one.action.kind)
                    answer, num_keys = "rejected", 0
                self._answer(one, answer)
                if answer == "deferred" and now_s < one.end_s:
                    self._waiting.append(one)
                num_left -= _ACTION_KEYS + num_keys
                if num_left <= 0:
                    break
        finally:
            self._draining.release()

    def _execute(self, action: HintAction, target: ReqContext | None) -> tuple[str, int]:
        """Execute one action; return the answer, and the number of keys that it named."""
        manager = self._manager
        if manager is None or (action.hashes is not None and not self._owns_keys):
            return "rejected", 0
        if action.hashes is None and action.session_id is not None:
            target = self._sessions.get(action.session_id, (None, 0))[0]
            if target is None:
                return "missing", 0
        groups = range(len(manager.pool.group_windows or "1"))
        hashes, most = action.hashes or [], _MAX_KEYS // len(groups)
        keys = _keys_of(hashes[:most], groups) if target is None else list(target.positions or ())
        if not keys:
            return "rejected", 0
        answer = "accepted"
        if action.kind == PREFETCH:
            answer = manager.prefetch(keys)
        elif action.kind == DEMOTE:
            answer = manager.demote(keys, target)
        elif action.next_use is not None:
            manager.hint(target or keys, action.next_use)
        if action.kind == END_SESSION and action.session_id is not None:
            self._forget(action.session_id)
        return "clipped" if answer == "accepted" and len(hashes) > most else answer, len(keys)

    def _add(self, action: HintAction, answer: str = "", target: ReqContext | None = None) -> _Waiting:
        """Answer an action, or have it wait for that."""
        one = _Waiting(action, time.monotonic() + _PATIENCE_S, target)
        if answer or len(self._waiting) >= _MAX_WAITING:
            self._answer(one, answer or "rejected")
        else:
            self._waiting.append(one)
        return one

    def _answer(self, one: _Waiting, answer: str) -> None:
        if answer != one.answer:
            one.answer = answer
            with self._counting:
                self._counts[one.action.kind][answer] += 1

    def _forget(self, name: str) -> None:
        self._num_keys -= self._sessions.pop(name, (None, 0))[1]


def _keys_of(hashes: list[object], groups: range) -> list[bytes]:
    """Return the keys of block hashes in hex, in each group of KV caches; other values are left out."""
    found = []
    for text in hashes:
        with suppress(ValueError):
            found.append(bytes.fromhex(text[:_MAX_HASH_CHARS] if type(text) is str else ""))
    return [one + group.to_bytes(4, "big") for group in groups for one in found if one]
