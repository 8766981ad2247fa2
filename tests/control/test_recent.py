"""Requests that have ended, by id."""

from __future__ import annotations

import pytest

from kvcache import CPUOffloadingManager, ReqContext
from kvcache.control import recent
from kvcache.control.recent import RecentRequests
from kvcache.tiering.manager import TieredOffloadingManager


def test_the_oldest_leave_where_too_many_keys_are_named() -> None:
    kept = RecentRequests(10)
    contexts = [ReqContext(name) for name in "abc"]
    for context in contexts:
        kept.add(context, 4)
    assert [kept.find(name) for name in "abc"] == [None, *contexts[1:]]
    kept.add(contexts[1], 2)  # ended again: the youngest now
    kept.add(ReqContext("d"), 5)
    assert kept.find("b") is contexts[1]
    assert kept.find("c") is None
    large = ReqContext("e")
    kept.add(large, 99)
    assert (len(kept), kept.find("e")) == (1, large)


def test_no_more_requests_are_kept_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent, "MAX_REQUESTS", 3)
    kept = RecentRequests(1000)
    for number in range(5):
        kept.add(ReqContext(str(number)), 1)
    assert [kept.find(str(number)) is not None for number in range(5)] == [False, False, True, True, True]


def test_an_id_before_a_dash_means_the_last_such_request() -> None:
    kept = RecentRequests(10)
    first, second = ReqContext("x-1"), ReqContext("x-2")
    kept.add(first, 1)
    kept.add(second, 1)
    assert (kept.find("x"), kept.find("x-1"), kept.find("")) == (second, first, None)
    kept.clear()
    assert (kept.find("x"), len(kept)) == (None, 0)


@pytest.mark.parametrize("make", [lambda: CPUOffloadingManager(16, 8), lambda: TieredOffloadingManager(16, 8, [])])
def test_managers_keep_requests_only_once_asked(make: object) -> None:
    manager = make()  # type: ignore[operator]
    for name in ("a", "b"):
        context = ReqContext(name)
        manager.prepare_store([b"k" + name.encode()], context)
        manager.on_request_finished(context)
        manager.keep_ended_requests()
    assert manager.ended_request("a") is None
    assert manager.ended_request("b") is context
    manager.on_request_finished(ReqContext("empty"))
    assert manager.ended_request("empty") is None
