"""What is known of one request: its context, its positions, and its retention hint.

A hint comes with the context, or through the engine in `kv_transfer_params["kvcache"]`, where a client may have written
anything: what is no hint is ignored and counted, never raised in the engine's thread.
"""

from __future__ import annotations

import enum
import logging
import math
from dataclasses import dataclass
from operator import index
from typing import Any, TypeVar

_logger = logging.getLogger(__name__)

T = TypeVar("T")
_CENTURY_S = 100 * 365 * 86_400

NEXT_USES = ("end", "soon", "later")
"""What a request may say of the next use of its blocks."""

SOON_S = 60.0
"""What comes back within so many seconds comes soon: tools do, people mostly do not."""

_MAX_TENANT_CHARS = 256
_PRIORITY_OF = {"end": -1, "soon": 1, "later": 0}


def check_next_use(next_use: object) -> str:
    """Return `next_use` if it is one of `NEXT_USES`; ValueError otherwise."""
    if type(next_use) is not str or next_use not in NEXT_USES:
        raise ValueError(f"next_use must be one of {', '.join(map(repr, NEXT_USES))}, got {next_use!r}")
    return next_use


@dataclass(frozen=True, slots=True)
class Retention:
    """How long a request's blocks deserve to stay: a soft hint, never a pin.

    Parameters
    ----------
    priority : int
        -1 (one-shot: first out), 0 (normal), 1, 2 or 3 (last out).
    ttl_s : float, optional
        Seconds for which a raised priority holds after the request's last call; None: until it is crowded out.
    next_use : str, optional
        When the request's blocks will be used next: ``"end"`` (never: the session is over), ``"soon"`` (within a
        minute: a tool is at work) or ``"later"`` (a person answers).
    tenant : str
        Whose hint it is, at most 256 characters; set it in the gateway, not in the client. The next use that a named
        tenant says is passed over while it mostly turns out false; without a name it is always taken.

    Raises
    ------
    ValueError
        The priority is out of range, the time is not a positive finite number, the next use is none of the three, or
        the tenant is not such a str.

    Notes
    -----
    `gittins` learns what each next use is worth and ignores priorities; the other compiled policies keep blocks by
    priority. For them a next use without a priority stands for one: -1 (end), 1 for `ttl_s` or 60 seconds (soon), or
    0 (later).
    """

    priority: int = 0
    ttl_s: float | None = None
    next_use: str | None = None
    tenant: str = ""

    def __post_init__(self) -> None:
        if type(self.priority) is not int or not -1 <= self.priority <= 3:
            raise ValueError(f"priority must be an int in -1..3, got {self.priority!r}")
        ttl_s = self.ttl_s
        if ttl_s is not None and (
            isinstance(ttl_s, bool) or not isinstance(ttl_s, int | float) or not 0 < ttl_s < math.inf
        ):
            raise ValueError(f"ttl_s must be a positive number of seconds or None, got {ttl_s!r}")
        if self.next_use is not None:
            check_next_use(self.next_use)
        if not isinstance(self.tenant, str) or len(self.tenant) > _MAX_TENANT_CHARS:
            raise ValueError(f"tenant must be a str of at most {_MAX_TENANT_CHARS} characters, got {self.tenant!r}")

    @property
    def priority_class(self) -> int:
        """The priority that was given, or else that which the next use stands for."""
        return _PRIORITY_OF[self.next_use] if self.priority == 0 and self.next_use is not None else self.priority

    @property
    def ttl_ns(self) -> int:
        """The time in whole nanoseconds, at least 1 and at most a century, which nobody outlives; 0: none."""
        ttl_s = self.ttl_s
        if ttl_s is None:
            if self.priority != 0 or self.next_use != "soon":
                return 0
            ttl_s = SOON_S
        return max(1, int(min(ttl_s, _CENTURY_S) * 1e9))


class ReqContext:
    """What is known of one request; hashed by identity.

    Parameters
    ----------
    req_id : str
        The engine's name for the request.
    kv_transfer_params : dict, optional
        What the client sent along for KV transfer.
    retention : Retention, optional
        How long the request's blocks deserve to stay.

    Notes
    -----
    A manager keeps what it must remember of a request in its context, so a context that is dropped is forgotten.

    Attributes
    ----------
    positions : mapping of bytes to int, or None
        Where in the prompt each key's block ends, in tokens, as far as the engine has said.
    request_keys : dict
        For pools only: which keys this request has named in each of them, and those of the request that ended last.
    promise : tuple of (str, str, float), or None
        For pools only: the tenant, what it said of the next use, and when the request began, in seconds.
    """

    __slots__ = (
        "__weakref__",
        "_state",
        "kv_transfer_params",
        "positions",
        "promise",
        "req_id",
        "request_keys",
        "retention",
    )

    def __init__(
        self,
        req_id: str = "",
        kv_transfer_params: dict[str, Any] | None = None,
        retention: Retention | None = None,
    ) -> None:
        if retention is not None and not isinstance(retention, Retention):
            raise ValueError(f"retention must be a Retention or None, got {retention!r}")
        self.req_id = req_id
        self.kv_transfer_params = kv_transfer_params
        self.retention = retention
        self._state: dict[type, Any] | None = None
        self.positions: dict[bytes, int] | None = None
        self.request_keys: dict[Any, Any] = {}
        self.promise: tuple[str, str, float] | None = None

    def __repr__(self) -> str:
        return f"ReqContext(req_id={self.req_id!r})"

    def __getstate__(self) -> Any:
        state: Any = super().__getstate__()
        # A copy, perhaps in another process, is a request that no manager has met.
        state[1]["request_keys"] = {}
        state[1]["promise"] = None
        return state

    def set_state(self, value: object) -> None:
        """Keep `value` for this request, under its type; a later value of the same type replaces it."""
        if self._state is None:
            self._state = {}
        self._state[type(value)] = value

    def get_state(self, cls: type[T]) -> T | None:
        """Return what `set_state` kept under `cls`, or None."""
        return None if self._state is None else self._state.get(cls)

    def set_offload_key_position(self, key: bytes, end_token: int) -> None:
        """Set where in the prompt a key's block ends, in tokens; ValueError where that is no int.

        Parameters
        ----------
        key : bytes
            A block's key.
        end_token : int
            Tokens of the prompt up to the block's end.
        """
        if type(end_token) is not int:
            try:
                end_token = index(end_token)
            except TypeError:
                raise ValueError(f"end_token must be an int, got {end_token!r}") from None
        if self.positions is None:
            self.positions = {}
        self.positions[key] = end_token

    def set_offload_key_positions(self, positions: dict[bytes, int]) -> None:
        """Set where in the prompt the blocks of keys end, in tokens, in place of what was set before.

        Parameters
        ----------
        positions : dict of bytes to int
            Kept, not copied: what the caller adds to it later is known, too.
        """
        if not isinstance(positions, dict):
            raise ValueError(f"positions must be a dict of keys to ints, got {positions!r}")
        self.positions = positions

    def get_offload_key_position(self, key: bytes) -> int | None:
        """Return where in the prompt a key's block ends, in tokens, or None if unknown."""
        return None if self.positions is None else self.positions.get(key)


class HintReader:
    """Read the hints of one manager's requests, and count those that are none."""

    def __init__(self) -> None:
        self.num_ignored = 0

    def of(self, req_context: ReqContext) -> Retention | None:
        """Return the request's hint, or None."""
        retention = req_context.retention
        if retention is not None:
            if not isinstance(retention, Retention):
                raise ValueError(f"retention must be a Retention or None, got {retention!r}")
            return retention
        params: Any = req_context.kv_transfer_params
        if not isinstance(params, dict) or "kvcache" not in params:
            return None
        try:
            return Retention(**params["kvcache"])
        except (TypeError, ValueError) as error:
            if self.num_ignored == 0:
                _logger.warning("ignoring the retention hint %.200r: %.200s", params["kvcache"], error)
            self.num_ignored += 1
            return None


class OffloadPolicy(enum.Enum):
    """Which of a request's blocks are offloaded.

    Parameters
    ----------
    value : str
        ``"block_level"`` (only new blocks) or ``"request_level"`` (all of a request).
    """

    BLOCK_LEVEL = "block_level"
    REQUEST_LEVEL = "request_level"


@dataclass(frozen=True, slots=True)
class RequestOffloadingContext:
    """How one request's blocks are offloaded: only new blocks (`BLOCK_LEVEL`), or all (`REQUEST_LEVEL`).

    Parameters
    ----------
    policy : OffloadPolicy
        Which of the request's blocks are offloaded.
    """

    policy: OffloadPolicy = OffloadPolicy.BLOCK_LEVEL
