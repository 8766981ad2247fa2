"""RecentRequests: requests that have ended, by id, so that a hint from outside the scheduler can name one."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcache.request import ReqContext

MAX_REQUESTS = 16_384


class RecentRequests:
    """The requests that ended last, as many as name `max_keys` keys together, and at most 16,384.

    Parameters
    ----------
    max_keys : int
        Keys of all of them: of older ones, hardly a block is left.
    """

    def __init__(self, max_keys: int) -> None:
        self._max_keys = max_keys
        self._num_keys = 0
        self._by_id: OrderedDict[str, tuple[ReqContext, int]] = OrderedDict()
        # Asked in other threads than the scheduler's.
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._by_id)

    def add(self, req_context: ReqContext, num_keys: int) -> None:
        """Keep a request that has ended, in place of an older one of its id."""
        with self._lock:
            self._drop(req_context.req_id)
            self._by_id[req_context.req_id] = req_context, num_keys
            self._num_keys += num_keys
            while len(self._by_id) > 1 and (self._num_keys > self._max_keys or len(self._by_id) > MAX_REQUESTS):
                self._drop(next(iter(self._by_id)))

    def find(self, req_id: str) -> ReqContext | None:
        """Return the request of this id, or the last one whose id is this and a dash and more, as vLLM makes them."""
        with self._lock:
            if req_id in self._by_id:
                return self._by_id[req_id][0]
            start = f"{req_id}-"
            return next((kept[0] for name, kept in reversed(self._by_id.items()) if name.startswith(start)), None)

    def clear(self) -> None:
        """Forget all of them."""
        with self._lock:
            self._by_id.clear()
            self._num_keys = 0

    def _drop(self, req_id: str) -> None:
        found = self._by_id.pop(req_id, None)
        if found is not None:
            self._num_keys -= found[1]
