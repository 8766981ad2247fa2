"""Blocks of before a reset that vLLM's device cache may still hold, which later requests find there and offer.

While requests run, vLLM's reset of its device cache does nothing and returns False. The connector is reset all the
same, and is told neither this nor which blocks a request finds on the device.
"""

from __future__ import annotations

from typing import Any

_MAX_HEADS = 1 << 16


class DeviceCache:
    """Which requests may store, as all that they read from the device was computed after the last reset.

    vLLM looks the first block of a prompt up only if it is not on the device. Then no block behind it is there either,
    because the device evicts the tail of a prompt before its head: requests with this head store from then on. That
    holds if `is_exact`: there is one group of KV caches, and an offloaded block is one block of the device. Otherwise
    no request stores anything until a reset with no request on the device.
    """

    def __init__(self) -> None:
        self.is_exact = False
        # Requests that were scheduled and have not ended, and those with a load under way.
        self._holders: set[str] = set()
        self._loading: set[str] = set()
        # The holders at the last reset, until the next step.
        self._suspects: set[str] | None = None
        # First blocks of prompts that the device did not hold at some time since the reset. None: it holds newer ones.
        self.heads: dict[bytes, None] | None = None

    def reset(self) -> None:
        """Note a reset. If requests have blocks on the device, it may go on to hold blocks of before."""
        is_stale = bool(self._holders or self._loading)
        self.heads = {} if is_stale else None
        self._suspects = self._holders.copy() if is_stale and not self._loading else None
        # vLLM drops the transfers under way.
        self._loading.clear()

    def end_step(self, context: Any) -> None:
        """Note the requests that a step has scheduled for the first time, and those preempted since the last step."""
        new, preempted = ((), ()) if context is None else (context.new_req_ids, context.preempted_req_ids)
        self._holders.update(new)
        if self._suspects is not None:
            # A step preempts some of the running requests, and only a reset all: then it has emptied the device.
            if self._suspects.issubset(preempted):
                self.heads = None
            self._suspects = None

    def begin(self, req_id: str) -> None:
        """Note that a request may have blocks on the device."""
        self._holders.add(req_id)

    def begin_load(self, req_id: str) -> None:
        """Note that a load fills blocks of a request, which cannot be preempted before its end."""
        self._holders.add(req_id)
        self._loading.add(req_id)

    def end_load(self, req_id: str) -> None:
        """Note the end of a load."""
        self._loading.discard(req_id)

    def end_request(self, req_id: str) -> None:
        """Note the end of a request."""
        self._holders.discard(req_id)

    def note_lookup(self, key: bytes, request: Any) -> None:
        """Note that the device does not hold a block that an `EngineRequest` looks up."""
        if self.heads is not None and key == request.head:
            self.heads[key] = None
            if len(self.heads) > _MAX_HEADS:
                del self.heads[next(iter(self.heads))]

    def may_store(self, request: Any) -> bool:
        """Return whether no block that a request read on the device is older than the last reset."""
        return self.heads is None or (self.is_exact and request.head in self.heads)
