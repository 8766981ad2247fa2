"""Hints of clients and routers: one parser for a request's `kv_hints`, our short form, and the status socket.

Anybody may send anything. So types and lengths are checked before a value is read, nothing longer than a field is
formatted, hashed or copied, and any message takes less than 50 microseconds. Invalid parts are ignored and counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, NamedTuple

from kvcache.request import ReqContext, Retention, check_next_use, shown

NEXT_USE, RETAIN, PREFETCH, DEMOTE, END_SESSION = KINDS = (
    "kv.next_use", "kv.retain", "kv.prefetch", "kv.demote", "kv.end_session",
)  # fmt: skip
"""Types of actions that are executed, each in version `ACTION_VERSION`."""
OTHER = "other"
ACTION_VERSION = "1.0"
PROTOCOL_VERSIONS = ("0.1", "1.0")
MAX_ACTIONS, MAX_HASHES, MAX_NAME_CHARS = 8, 512, 128
"""Limits of one message: further actions are ignored, and so is an action with more hashes or a longer name."""
_SOON_S, _MAX_S = 60, 366 * 86_400
_SHORT_FIELDS = ("next_use", "session_id", "priority", "ttl_s")
"""Fields of the short form. The last two are ignored: older clients send them."""


class HintAction(NamedTuple):
    """One action: its type, when its target is used next, and the target: a session, block hashes, or the request.

    `answer` is empty if the action can be executed. `reason` names the part that is ignored.
    """

    kind: str
    next_use: str | None = None
    session_id: str | None = None
    hashes: list[Any] | None = None
    answer: str = ""
    reason: str = ""

    @property
    def is_own(self) -> bool:
        """Whether its target is the request that carries it: a next use only names the session that this belongs to."""
        is_own = self.session_id is None or self.kind in (NEXT_USE, RETAIN)
        return is_own and self.hashes is None and not self.answer


def parse_hints(message: object) -> list[HintAction]:
    """Return the actions of an envelope, a dict or an object with its fields, or of the short form.

    ValueError: it is neither; the message names the first invalid field.
    """
    if type(message) is not dict and not hasattr(message, "actions"):
        raise ValueError(f"it must be a dict, got {shown(message)}")
    if type(message) is dict and "actions" not in message:
        for name in islice(message, len(_SHORT_FIELDS) + 1):
            if type(name) is not str or name not in _SHORT_FIELDS:
                raise ValueError(f"it may hold next_use and session_id, got {shown(name)}")
        return [_read(NEXT_USE, message)]
    if _field(message, "protocol_version") not in PROTOCOL_VERSIONS:
        raise ValueError(f"its protocol_version is unknown: got {shown(_field(message, 'protocol_version'))}")
    actions = _field(message, "actions")
    if type(actions) is not list:
        raise ValueError(f"its actions must be a list, got {shown(actions)}")
    found = [_action(action) for action in actions[:MAX_ACTIONS]]
    if len(actions) > MAX_ACTIONS:
        found.append(HintAction(OTHER, answer="ignored", reason=f"only the first {MAX_ACTIONS} actions are read"))
    return found


def _action(action: object) -> HintAction:
    kind, payload = _field(action, "action_type"), _field(action, "payload")
    if type(kind) is not str or kind not in KINDS:
        return HintAction(OTHER, answer="ignored", reason=f"an action's type is unknown: got {shown(kind)}")
    try:
        if (version := _field(action, "action_version")) != ACTION_VERSION:
            raise ValueError(f"{kind} has an unknown version: got {shown(version)}")
        if type(payload) is not dict:
            raise ValueError(f"the payload of {kind} must be a dict, got {shown(payload)}")
        return _read(kind, payload)
    except ValueError as error:
        return HintAction(kind, answer="ignored", reason=str(error))


def _read(kind: str, payload: dict[Any, Any]) -> HintAction:
    next_use = "end" if kind == END_SESSION else None
    if kind in (NEXT_USE, RETAIN):
        next_use = _next_use(payload.get("next_use" if kind == NEXT_USE else "ttl_s"), kind == RETAIN)
    name, hashes = payload.get("session_id"), payload.get("block_hashes")
    if name is not None and not (type(name) is str and 0 < len(name) <= MAX_NAME_CHARS):
        raise ValueError(f"session_id must be a str of 1 to {MAX_NAME_CHARS} characters, got {shown(name)}")
    if hashes is not None and not (type(hashes) is list and 0 < len(hashes) <= MAX_HASHES):
        raise ValueError(f"block_hashes must be a list of 1 to {MAX_HASHES}, got {shown(hashes)}")
    is_useless = "priority" in payload or ("ttl_s" in payload and kind != RETAIN)
    return HintAction(kind, next_use, name, hashes, "", "a priority has no effect, use next_use" if is_useless else "")


def _field(value: object, name: str) -> Any:
    return value.get(name) if type(value) is dict else getattr(value, name, None)


def _next_use(value: object, is_seconds: bool = False) -> str | None:
    """Return the next use that a word names, or a number of seconds until then."""
    if type(value) in (int, float) and 0 <= value <= _MAX_S:  # type: ignore[operator]
        return "soon" if value <= _SOON_S else "later"  # type: ignore[operator]
    if is_seconds:
        raise ValueError(f"ttl_s must be seconds in 0..{_MAX_S}, got {shown(value)}")
    return None if value is None else check_next_use(value)


def actions_of(req_context: ReqContext) -> Sequence[HintAction]:
    """Return the actions of our field of a request, of its `kv_hints`, and its `retention` as the last one.

    They are read once: the request's context keeps them. An invalid message is an ignored action.
    """
    if req_context.actions is None:
        params: Any = req_context.kv_transfer_params
        if params is None and req_context.kv_hints is None and req_context.retention is None:
            return ()
        messages = [params["kvcache"]] if isinstance(params, dict) and "kvcache" in params else []
        if req_context.kv_hints is not None:
            messages.append(req_context.kv_hints)
        actions: list[HintAction] = []
        for message in messages:
            try:
                actions += parse_hints(message)
            except ValueError as error:
                actions.append(HintAction(OTHER, answer="ignored", reason=str(error)))
        if (retention := req_context.retention) is not None:
            if not isinstance(retention, Retention):
                raise ValueError(f"retention must be a Retention or None, got {retention!r}")
            actions.append(HintAction(NEXT_USE, retention.next_use))
        req_context.actions = actions
    return req_context.actions


def own_use(actions: Iterable[HintAction]) -> str | None:
    """Return the next use of the request that carries the actions: the last one that they name."""
    uses = [action.next_use for action in actions if action.next_use is not None and action.is_own]
    return uses[-1] if uses else None
