"""The specification of `HintTrust` in plain Python: one list of open promises, and two counts for each tenant's word.

Written from the rules alone; every answer is worked out when it is asked for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container

WITHIN_S = {"soon": 120.0, "later": 3600.0}


class ReferenceTrust:
    """Promises of the tenants that gave hints last, at most `max_tenants` of them."""

    credit = 4
    max_watched = 16
    halving_count = 64

    def __init__(self, max_tenants: int = 1024) -> None:
        self.max_tenants = max_tenants
        self.tenants: list[str] = []  # in the order of their last promise
        self.open: list[tuple[str, str, bytes, float]] = []  # tenant, word, key, until when
        self.num_kept: Counter[tuple[str, str]] = Counter()
        self.num_broken: Counter[tuple[str, str]] = Counter()

    def believes(self, tenant: str, next_use: str) -> bool:
        """Return whether a tenant's word counts."""
        word = tenant, next_use
        return self.num_broken[word] - self.num_kept[word] < self.credit

    def settle(self, tenant: str, named: Container[bytes], began_s: float) -> None:
        """Take in which keys one of the tenant's requests named, which began then."""
        settled = set()
        for promise in [promise for promise in self.open if promise[0] == tenant]:
            _, next_use, key, until_s = promise
            is_broken = began_s > until_s
            if is_broken or key in named:
                (self.num_broken if is_broken else self.num_kept)[tenant, next_use] += 1
                self.open.remove(promise)
                settled.add((tenant, next_use))
        for word in settled:
            if self.num_kept[word] + self.num_broken[word] >= self.halving_count:
                self.num_kept[word] //= 2
                self.num_broken[word] //= 2

    def watch(self, tenant: str, next_use: str, key: bytes, now_s: float) -> None:
        """Note that the tenant has promised to name a key again, unless enough of that is being watched."""
        if next_use not in WITHIN_S:
            return
        self.tenants = [*(other for other in self.tenants if other != tenant), tenant]
        if len(self.tenants) > self.max_tenants:
            self._forget(self.tenants.pop(0))
        if sum(promise[:2] == (tenant, next_use) for promise in self.open) < self.max_watched:
            self.open.append((tenant, next_use, key, now_s + WITHIN_S[next_use]))

    def clear(self) -> None:
        """Forget what is being watched, after a reset."""
        self.open = []

    def _forget(self, tenant: str) -> None:
        self.open = [promise for promise in self.open if promise[0] != tenant]
        for next_use in WITHIN_S:
            del self.num_kept[tenant, next_use], self.num_broken[tenant, next_use]
