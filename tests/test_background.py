"""Threads beside the scheduler: they stop when asked, and neither their errors nor a fork reach the caller."""

from __future__ import annotations

import os
import threading

import pytest

from kvcache.background import Background


def test_background_runs_until_stopped() -> None:
    ended = threading.Event()
    thread = Background("test", lambda stopping: (stopping.wait(60), ended.set()))
    assert thread.is_alive
    assert thread.stop(60)
    assert ended.is_set()
    assert thread.stop(60)


def test_step_that_raises_is_called_again(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[int] = []
    twice = threading.Event()

    def step() -> None:
        calls.append(1)
        if len(calls) == 1:
            raise OSError("first")
        twice.set()

    thread = Background.every(0.001, "test", step)
    assert twice.wait(60)
    assert thread.stop(60)
    assert "a step of the thread kvcache-test failed" in caplog.text


def test_background_stop_calls_the_last_step() -> None:
    calls: list[int] = []
    thread = Background.every(3600, "test", lambda: calls.append(1))
    assert thread.stop(60)
    assert calls == [1]


def test_hanging_background_is_left_after_timeout() -> None:
    release = threading.Event()
    thread = Background("test", lambda stopping: release.wait(60))
    assert not thread.stop(0.01)
    release.set()
    assert thread.stop(60)


def test_background_error_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def fail(stopping: threading.Event) -> None:
        raise ValueError("broken")

    assert Background("test", fail).stop(60)
    assert "the thread kvcache-test ended" in caplog.text


def test_stop_in_own_thread_returns() -> None:
    found: list[bool] = []
    made = threading.Event()

    def run(stopping: threading.Event) -> None:
        made.wait(60)
        found.append(thread.stop(60))

    thread = Background("test", run)
    made.set()
    assert thread.stop(60)
    assert found == [False]


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_forked_child_has_no_background_thread() -> None:
    thread = Background("test", lambda stopping: stopping.wait(60))
    child = os.fork()
    if not child:
        os._exit(0 if not thread.is_alive and thread.stop(60) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert thread.stop(60)
