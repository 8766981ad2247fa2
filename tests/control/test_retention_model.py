"""Retention hints of the compiled policies against their specification, under random requests, times and shares."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule, run_state_machine_as_test

from kvcache import CPUOffloadingManager, ReqContext, Retention
from kvcache.request import NEXT_USES
from kvcache.testing import REFERENCE_POLICIES, CacheMachine, RetainingReferenceManager
from kvcache.testing.machine import KEYS

_next_uses = st.sampled_from(NEXT_USES)
_hints = st.one_of(
    st.none(),
    st.builds(lambda next_use, ttl_s: Retention(0, ttl_s, next_use), _next_uses, st.sampled_from((None, 7))),
    st.builds(Retention, st.integers(-1, 3), st.one_of(st.none(), st.sampled_from((1, 2.5, 7, 40)))),
)
_prefixes = st.builds(lambda start, length: list(KEYS[start : start + length]), st.integers(0, 14), st.integers(1, 6))


class RetentionMachine(CacheMachine):
    """Requests with hints under a clock that the machine moves: the compiled manager beside its specification."""

    @initialize(
        capacity=st.integers(1, 8),
        share=st.sampled_from((0.5, 0.5, 1, 0.25, 0)),
        hints=st.lists(_hints, min_size=3, max_size=3),
        start_s=st.sampled_from((0, 12.5, -3)),
    )
    def start(self, capacity: int, share: float, hints: list[Retention | None], start_s: float) -> None:
        self.now_s = start_s
        options: dict[str, Any] = {
            "enable_events": True,
            "retention_share": share,
            "clock": lambda: self.now_s,
            **self.manager_options,
        }
        self.specified = RetainingReferenceManager(16, capacity, REFERENCE_POLICIES[self.policy], **options)
        self.managers = {
            "specification": self.specified,
            "CPU manager": CPUOffloadingManager(16, capacity, self.policy, **options),
        }
        self.contexts = [ReqContext(retention=hint) for hint in hints]

    @rule(slot=st.integers(1, 3), hint=_hints)
    def forget_context(self, slot: int, hint: Retention | None) -> None:
        self.contexts[slot - 1] = ReqContext(retention=hint)

    @rule(seconds=st.sampled_from((0.5, 1, 2.5, 7, 40)))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(keys=_prefixes, hint=_hints, success=st.booleans(), form=st.just((list, True)))
    def serve_with_a_hint(self, keys: list[bytes], hint: Retention | None, success: bool, form: Any) -> None:
        self.contexts[0] = ReqContext(retention=hint)
        self._call("touch", keys, 1, form)
        self.store(keys, 1, form, "success" if success else "failure")
        self.nothing_tells_them_apart()
        self.finish(1)

    @rule(keys=_prefixes, slot=st.integers(0, 3), next_use=_next_uses)
    def hint(self, keys: list[bytes], slot: int, next_use: str) -> None:
        self._all(lambda manager: manager.hint(self._context(slot) or list(keys), next_use))

    @rule(num=st.integers(1, 8))
    def crowd_out(self, num: int) -> None:
        # All that may leave does, so that the whole order of eviction is seen.
        for i in range(num):
            key = b"crowd %d" % i
            self._call("prepare_store", [key], 0, (list, False))
            self._call("complete_store", [key], 0, (list, False))


GATED = {"policy": "arc", "manager_options": {"store_threshold": 2, "max_tracker_size": 5}}
MACHINES = {name: {"policy": name} for name, twin in REFERENCE_POLICIES.items() if not twin.declines} | {"gated": GATED}


@pytest.mark.parametrize("name", MACHINES)
def test_hints_agree_with_their_specification(name: str) -> None:
    run_state_machine_as_test(type(f"RetentionMachine[{name}]", (RetentionMachine,), MACHINES[name]))
