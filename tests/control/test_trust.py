"""Tenants that keep what they say of their next use, and those that do not."""

from __future__ import annotations

from typing import Any

import pytest

from kvcache import CPUOffloadingManager, ReqContext, Retention
from kvcache.control import trust as trust_module
from kvcache.control.trust import MAX_WATCHED, HintTrust
from kvcache.lab.replay.run import ReplayClock
from kvcache.testing.reference import ReferenceLRU


@pytest.fixture(params=["lru", "gittins", ReferenceLRU])
def manager(request: pytest.FixtureRequest, clock: ReplayClock) -> CPUOffloadingManager:
    return CPUOffloadingManager(16, 64, request.param, clock=clock)


def serve(manager: Any, keys: list[bytes], next_use: str, tenant: str) -> ReqContext:
    context = ReqContext(retention=Retention(next_use=next_use, tenant=tenant))
    manager.touch(keys, context)
    output = manager.prepare_store(keys, context)
    manager.complete_store(output.keys_to_store, context)
    manager.on_request_finished(context)
    return context


def believed(manager: Any, tenant: str, next_use: str = "soon") -> bool:
    found: bool = manager._trust.believes(tenant, next_use)
    return found


def break_promises(manager: Any, clock: ReplayClock, tenant: str, next_use: str, count: int) -> None:
    for number in range(count):
        serve(manager, [b"%s %d" % (tenant.encode(), number), b"tail"], next_use, tenant)
        clock.now_s += 4000


def test_a_tenant_who_breaks_its_word_is_not_believed(manager: CPUOffloadingManager, clock: ReplayClock) -> None:
    break_promises(manager, clock, "liar", "soon", 4)
    assert believed(manager, "liar")
    break_promises(manager, clock, "liar", "soon", 1)
    assert not believed(manager, "liar")
    assert believed(manager, "liar", "later"), "each word is judged alone"
    assert believed(manager, "other")


def test_one_who_keeps_it_is_however_often_it_says_so(manager: CPUOffloadingManager, clock: ReplayClock) -> None:
    prompt = [b"0", b"1"]
    for turn in range(2, 40):
        serve(manager, prompt, "soon", "honest")
        clock.now_s += 30
        prompt = [*prompt, b"%d" % turn]
    assert believed(manager, "honest")


def test_what_is_not_believed_raises_nothing(clock: ReplayClock) -> None:
    manager = CPUOffloadingManager(16, 64, "lru", clock=clock)
    break_promises(manager, clock, "liar", "soon", 6)
    context = serve(manager, [b"a"], "soon", "liar")
    assert manager.stats().retained_blocks == 0
    manager.hint(context, "soon")
    assert manager.stats().retained_blocks == 0
    serve(manager, [b"b"], "soon", "honest")
    serve(manager, [b"c"], "soon", "")
    assert manager.stats().retained_blocks == 2
    # A priority of its own is no promise; nor is an end, which costs nobody else.
    serve(manager, [b"d"], "soon", "liar")
    context = ReqContext(retention=Retention(2, None, "soon", "liar"))
    manager.prepare_store([b"e"], context)
    assert manager.stats().retained_blocks == 3
    break_promises(manager, clock, "x", "end", 9)
    assert believed(manager, "x", "end")


def test_trust_is_won_back(manager: CPUOffloadingManager, clock: ReplayClock) -> None:
    break_promises(manager, clock, "t", "soon", 7)
    assert not believed(manager, "t")
    prompt = [b"0", b"1"]
    for turn in range(2, 12):
        serve(manager, prompt, "soon", "t")
        clock.now_s += 10
        prompt = [*prompt, b"%d" % turn]
    assert believed(manager, "t")


def test_what_is_said_after_the_end_is_a_promise_too(manager: CPUOffloadingManager, clock: ReplayClock) -> None:
    for number in range(6):
        context = serve(manager, [b"%d" % number, b"tail"], "end", "t")
        manager.hint(context, "soon")
        clock.now_s += 4000
    assert not believed(manager, "t")


def test_hints_without_a_tenant_are_always_taken(manager: CPUOffloadingManager, clock: ReplayClock) -> None:
    break_promises(manager, clock, "", "soon", 20)
    assert believed(manager, "")
    assert not manager._trust._tenants


def test_a_reset_forgets_what_was_watched_and_keeps_what_was_broken(
    manager: CPUOffloadingManager, clock: ReplayClock
) -> None:
    break_promises(manager, clock, "t", "soon", 6)
    serve(manager, [b"x", b"y"], "soon", "t")
    manager.reset_cache()
    assert not believed(manager, "t")
    assert not manager._trust._tenants["t"]["soon"].watched


def test_little_is_kept_of_a_tenant_and_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trust_module, "MAX_TENANTS", 3)
    trust = HintTrust()
    for number in range(5):
        for key in range(40):
            trust.watch(str(number), "soon", b"%d" % key, 0.0)
    assert list(trust._tenants) == ["2", "3", "4"]
    assert len(trust._tenants["4"]["soon"].watched) == MAX_WATCHED
    trust.settle("4", {b"1", b"2"}, 10.0)
    trust.settle("4", set(), 1000.0)
    promises = trust._tenants["4"]["soon"]
    assert (promises.num_kept, promises.num_broken, len(promises.watched)) == (2, 14, 0)
    for _ in range(6):
        for key in range(16):
            trust.watch("4", "soon", b"%d" % key, 0.0)
        trust.settle("4", {b"%d" % key for key in range(16)}, 1.0)
    assert promises.num_kept + promises.num_broken < 64


@pytest.mark.parametrize("tenant", [None, 7, b"t", "t" * 257])
def test_a_bad_tenant_is_named(tenant: Any) -> None:
    with pytest.raises(ValueError, match="tenant must be a str of at most 256 characters, got "):
        Retention(tenant=tenant)
