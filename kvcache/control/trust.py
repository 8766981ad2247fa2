"""HintTrust: which tenants keep what they say of their next use; hints of one that does not are passed over.

A policy learns what a hint is worth on the whole, so a few false ones are covered by the many true ones. Who said it
tells them apart: of each tenant some requests are watched, to see whether their prompts come back as was said.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Container
from typing import TypeAlias

from kvcache.request import SOON_S

WITHIN_S = {"soon": 2 * SOON_S, "later": 3600.0}
"""For so long after it was given a promise may still be kept; ``"end"`` promises nothing that others would pay for."""

MAX_TENANTS = 1024
MAX_WATCHED = 16
_CREDIT = 4
_HALVING_COUNT = 64


class _Promises:
    """What one tenant has promised by one word: how often it was kept, and what is being watched."""

    def __init__(self) -> None:
        self.num_kept = 0
        self.num_broken = 0
        self.watched: deque[tuple[float, bytes]] = deque()  # until when, and a key that must be named by then

    def settle(self, named: Container[bytes], began_s: float) -> None:
        """Take in a request that began then and has named these keys."""
        for _ in range(len(self.watched)):
            until_s, key = self.watched.popleft()
            if began_s > until_s:
                self.num_broken += 1
            elif key in named:
                self.num_kept += 1
            else:
                self.watched.append((until_s, key))
        if self.num_kept + self.num_broken >= _HALVING_COUNT:
            self.num_kept >>= 1
            self.num_broken >>= 1


_Tenant: TypeAlias = dict[str, _Promises]


class HintTrust:
    """Promises of the tenants that gave hints last, at most 1,024 of them.

    Notes
    -----
    A tenant is believed until four more of its watched promises were broken than kept; what is watched goes on being
    so, and can win it back. Both counts are halved at 64, so that what it did long ago is forgotten.
    """

    def __init__(self) -> None:
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()
        self._lock = threading.Lock()

    def believes(self, tenant: str, next_use: str) -> bool:
        """Return whether a tenant's word counts."""
        promises = self._tenants.get(tenant, {}).get(next_use)
        return promises is None or promises.num_broken < promises.num_kept + _CREDIT

    def settle(self, tenant: str, named: Container[bytes], began_s: float) -> None:
        """Take in which keys one of the tenant's requests named, which began then."""
        with self._lock:
            for promises in self._tenants.get(tenant, {}).values():
                promises.settle(named, began_s)

    def watch(self, tenant: str, next_use: str, key: bytes, now_s: float) -> None:
        """Note that the tenant has promised to name a key again, unless enough of that is being watched."""
        within_s = WITHIN_S.get(next_use)
        if within_s is None:
            return
        with self._lock:
            promises = self._tenants.setdefault(tenant, {}).setdefault(next_use, _Promises())
            self._tenants.move_to_end(tenant)
            if len(self._tenants) > MAX_TENANTS:
                self._tenants.popitem(last=False)
            if len(promises.watched) < MAX_WATCHED:
                promises.watched.append((now_s + within_s, key))

    def clear(self) -> None:
        """Forget what is being watched, after a reset; what tenants have kept and broken stands."""
        with self._lock:
            for tenant in self._tenants.values():
                for promises in tenant.values():
                    promises.watched.clear()
