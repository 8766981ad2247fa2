"""Detect that vLLM's device cache may still hold blocks from before a reset, which later requests could offer.

While requests run, vLLM's reset of its device cache does nothing and returns False. The connector is reset, but gets
neither this result nor the blocks that a request finds on the device.
"""

from __future__ import annotations

from typing import Any

_MAX_HEADS = 1 << 16


class DeviceCache:
    """Decides which requests may store: all blocks that they read from the device are newer than the last reset.

    vLLM looks up the first block of a prompt only if the device does not hold it. Then the device holds no later block
    either, because it evicts the tail of a prompt before its head. So requests with this head store from then on. This
    needs `is_exact`: one group of KV caches, and offloaded blocks of one device block each. Otherwise, no request
    stores anything until a reset while no request is on the device.
    """

    def __init__(self) -> None:
        self.is_exact = False
        # Requests that were scheduled and have not ended, and those with a load under way.
        self._holders: set[str] = set()
        self._loading: set[str] = set()
        # The holders at the last reset, until the next step.
        self._suspects: set[str] | None = None
        # First blocks of prompts that the device lacked at some time since the reset. None: all its blocks are newer.
        self.heads: dict[bytes, None] | None = None

    def reset(self) -> None:
        """Note a reset. If requests have blocks on the device, it may keep blocks from before the reset."""
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
            # Only a reset preempts all running requests, and such a reset has emptied the device.
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
