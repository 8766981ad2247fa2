"""One request's state: its context, its key positions, and its retention hint.

A hint comes with the context, or from a client: see `kvcache.hints`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from itertools import islice
from operator import index
from typing import Any, TypeVar

from kvcache.keys import GROUP_PART

T = TypeVar("T")

NEXT_USES = ("end", "soon", "later")
"""Values of `Retention.next_use`."""

_MAX_SHOWN_CHARS = 80
_MAX_SHOWN_BITS = 256


def check_next_use(next_use: object) -> str:
    """Return `next_use` if it is one of `NEXT_USES`; ValueError otherwise."""
    if type(next_use) is not str or next_use not in NEXT_USES:
        raise ValueError(f"next_use must be one of {', '.join(map(repr, NEXT_USES))}, got {shown(next_use)}")
    return next_use


def shown(value: object) -> str:
    """Return `value` for an error message in constant time: long texts are cut, containers only named."""
    if isinstance(value, str | bytes):
        text = repr(value[:_MAX_SHOWN_CHARS])
        return text if len(value) <= _MAX_SHOWN_CHARS else f"{text}... of length {len(value):,}"
    if value is None or isinstance(value, float) or (isinstance(value, int) and value.bit_length() <= _MAX_SHOWN_BITS):
        return repr(value)
    return f"{'an' if isinstance(value, int) else 'a'} {type(value).__name__}"


@dataclass(frozen=True, slots=True)
class Retention:
    """When a request's blocks will be used next: a soft hint, never a pin.

    Parameters
    ----------
    next_use : str, optional
        ``"end"`` (never: the session is over), ``"soon"`` (within a minute: a tool is at work) or ``"later"`` (a person
        answers).

    Raises
    ------
    ValueError
        `next_use` has another value.

    Notes
    -----
    `gittins` learns the value of each next use. Under `lru` and `arc`, ``"end"`` evicts the blocks that only this
    request has used before other blocks, its tail first; the other two change nothing.
    """

    next_use: str | None = None

    def __post_init__(self) -> None:
        if self.next_use is not None:
            check_next_use(self.next_use)


class ReqContext:
    """State of one request; hashed by identity.

    Parameters
    ----------
    req_id : str
        The engine's name for the request.
    kv_transfer_params : dict, optional
        The client's parameters for KV transfer.
    retention : Retention, optional
        How long the request's blocks should stay.
    kv_hints : dict or object, optional
        The envelope of a client's or router's hints; see `kvcache.hints`.

    Notes
    -----
    A manager keeps its state of a request in the request's context, and drops it with the context.

    Attributes
    ----------
    actions : list of kvcache.hints.HintAction or None
        The actions of the client's hints, once they are parsed.
    positions : mapping of bytes to int, or None
        Where in the prompt each key's block ends, in tokens, if the engine reports it.
    request_keys : dict
        For pools and `RequestAges` only: the keys that this request has named in each pool, those of the request that
        ended last, and the number of resets.
    """

    __slots__ = (
        "__weakref__",
        "_state",
        "actions",
        "kv_hints",
        "kv_transfer_params",
        "positions",
        "req_id",
        "request_keys",
        "retention",
    )

    def __init__(
        self,
        req_id: str = "",
        kv_transfer_params: dict[str, Any] | None = None,
        retention: Retention | None = None,
        kv_hints: object = None,
    ) -> None:
        if retention is not None and not isinstance(retention, Retention):
            raise ValueError(f"retention must be a Retention or None, got {retention!r}")
        self.req_id = req_id
        self.kv_transfer_params = kv_transfer_params
        self.kv_hints = kv_hints
        self.actions: list[Any] | None = None
        self.retention = retention
        self._state: dict[type, Any] | None = None
        self.positions: dict[bytes, int] | None = None
        self.request_keys: dict[Any, Any] = {}

    def __repr__(self) -> str:
        return f"ReqContext(req_id={self.req_id!r})"

    def __getstate__(self) -> Any:
        state: Any = super().__getstate__()
        # A copy, perhaps in another process, is a request that is new to every manager.
        state[1]["request_keys"] = {}
        return state

    def set_state(self, value: object) -> None:
        """Keep `value` for this request, under its type; a later value of the same type replaces it."""
        if self._state is None:
            self._state = {}
        self._state[type(value)] = value

    def get_state(self, cls: type[T]) -> T | None:
        """Return the value that `set_state` kept under `cls`, or None."""
        return None if self._state is None else self._state.get(cls)

    def set_offload_key_position(self, key: bytes, end_token: int) -> None:
        """Set where in the prompt a key's block ends, in tokens; ValueError if `end_token` is not an int."""
        if type(end_token) is not int:
            try:
                end_token = index(end_token)
            except TypeError:
                raise ValueError(f"end_token must be an int, got {end_token!r}") from None
        if self.positions is None:
            self.positions = {}
        self.positions[key] = end_token

    def set_offload_key_positions(self, positions: dict[bytes, int]) -> None:
        """Set where in the prompt the blocks of keys end, in tokens; replaces earlier positions.

        `positions` is kept, not copied: the caller may add keys later.
        """
        if not isinstance(positions, dict):
            raise ValueError(f"positions must be a dict of keys to ints, got {positions!r}")
        self.positions = positions

    def get_offload_key_position(self, key: bytes) -> int | None:
        """Return where in the prompt a key's block ends, in tokens, or None if unknown."""
        return None if self.positions is None else self.positions.get(key)


class RequestAges:
    """Tracks which open requests are older than a manager's last reset. Such a request stores nothing until it ends.

    An engine may offer a block long after computing it. So the age of the request, not of the offer, shows whether its
    blocks may be from before the reset. A request opens when it is announced, or at its first call.
    """

    def __init__(self) -> None:
        self.num_resets = 0

    def open(self, req_context: ReqContext) -> None:
        """Note that a request is open. Its context keeps the number of resets before it."""
        req_context.request_keys.setdefault(self, self.num_resets)

    def predates(self, req_context: ReqContext | None) -> bool:
        """Return whether a request is open and older than the last reset."""
        if not isinstance(req_context, ReqContext):
            return False
        num_before: int = req_context.request_keys.get(self, self.num_resets)
        return num_before < self.num_resets

    def close(self, req_context: ReqContext) -> None:
        """Note the end of a request. The context may serve another one."""
        req_context.request_keys.pop(self, None)


def path_after(positions: dict[bytes, int], num_old: int, group: bytes, block_tokens: int) -> list[bytes]:
    """Return the path of a KV-cache group, as far as it is not among the first `num_old` keys with a position."""
    newest = list(islice(reversed(positions.items()), len(positions) - num_old))
    # Positions within a block are those of states that an engine looks for between blocks.
    return [key for key, end in newest[::-1] if key[GROUP_PART] == group and end % block_tokens == 0]


class OffloadPolicy(enum.Enum):
    """Which of a request's blocks are offloaded: only new blocks (`BLOCK_LEVEL`), or all (`REQUEST_LEVEL`)."""

    BLOCK_LEVEL = "block_level"
    REQUEST_LEVEL = "request_level"


@dataclass(frozen=True, slots=True)
class RequestOffloadingContext:
    """How one request's blocks are offloaded: its `policy` is an `OffloadPolicy`."""

    policy: OffloadPolicy = OffloadPolicy.BLOCK_LEVEL
