"""HintTrust, held beside its specification."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvcache.control import trust as trust_module
from kvcache.control.trust import HintTrust
from kvcache.testing.reference_trust import ReferenceTrust

TENANTS = ("a", "b", "c")
NEXT_USES = ("soon", "later", "end")
TENANT = st.sampled_from(TENANTS)
COUNTS = st.sampled_from([0, 1, 3, 15, 17])


class TrustMachine(RuleBasedStateMachine):
    """`HintTrust` beside its specification."""

    def __init__(self) -> None:
        super().__init__()
        self.patched = pytest.MonkeyPatch()
        self.patched.setattr(trust_module, "MAX_TENANTS", 2)
        self.trust = HintTrust()
        self.specified = ReferenceTrust(max_tenants=2)
        self.trusts: tuple[HintTrust | ReferenceTrust, ...] = (self.trust, self.specified)
        self.now_s = 0.0

    def teardown(self) -> None:
        self.patched.undo()

    @rule(tenant=TENANT, next_use=st.sampled_from(NEXT_USES), first=st.integers(0, 2), n=COUNTS)
    def promise(self, tenant: str, next_use: str, first: int, n: int) -> None:
        for key in range(first, first + n):
            for trust in self.trusts:
                trust.watch(tenant, next_use, b"%d" % key, self.now_s)

    @rule(tenant=TENANT, first=st.integers(0, 2), n=COUNTS, after_s=st.sampled_from([0.0, 60.0, 120.0, 3600.0]))
    def come_back(self, tenant: str, first: int, n: int, after_s: float) -> None:
        self.now_s += after_s
        for trust in self.trusts:
            trust.settle(tenant, {b"%d" % key for key in range(first, first + n)}, self.now_s)

    @rule(tenant=TENANT, is_kept=st.booleans(), n=st.integers(1, 5), count=COUNTS)
    def promise_and_keep_or_break(self, tenant: str, is_kept: bool, n: int, count: int) -> None:
        for _ in range(n):
            self.promise(tenant, "soon", 0, count)
            self.come_back(tenant, 0, count * is_kept, 121.0 * (not is_kept))

    @rule()
    def reset(self) -> None:
        for trust in self.trusts:
            trust.clear()

    @invariant()
    def know_and_believe_the_same(self) -> None:
        compiled, specified = self.trust, self.specified
        for tenant in TENANTS:
            for next_use in NEXT_USES:
                word = tenant, next_use
                found = compiled._tenants.get(tenant, {}).get(next_use)
                watched = [(until_s, key) for *of, key, until_s in specified.open if tuple(of) == word]
                counts = specified.num_kept[word], specified.num_broken[word]
                if found is None:
                    assert (watched, counts) == ([], (0, 0)), word
                else:
                    assert sorted(found.watched) == sorted(watched), word
                    assert (found.num_kept, found.num_broken) == counts, word
                assert compiled.believes(*word) == specified.believes(*word), word


TrustMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
TestAgreesWithItsReference = TrustMachine.TestCase
