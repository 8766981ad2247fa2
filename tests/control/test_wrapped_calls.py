"""WrappedCalls: what is called while several wrap one manager, and that nothing stays behind."""

from __future__ import annotations

import gc
import itertools
import sys
import sysconfig
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from kvcache import CPUOffloadingManager, Recorder
from kvcache.control.telemetry import Telemetry
from kvcache.control.wrapped_calls import WrappedCalls
from kvcache.lab.rerun.recorded import replay_recording
from kvcache.recorder.format import Recording
from kvcache.testing.reference import REFERENCE_POLICIES


class Noting:
    """Notes who was called, around whom."""

    def __init__(self, label: str, notes: list[str], may_pause: bool = False) -> None:
        self.label, self.notes, self.may_pause = label, notes, may_pause
        self.names = ("touch", "lookup", "no such method")

    def wrap(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            self.notes.append(f"{self.label}.{name}")
            return method(*args, **kwargs)

        return noted


def test_wrappers_come_and_go_in_any_order() -> None:
    for order in itertools.permutations(range(3)):
        notes: list[str] = []
        manager = CPUOffloadingManager(16, 4)
        calls = WrappedCalls.of(manager)
        assert WrappedCalls.of(manager) is calls
        wrappers = [Noting("a", notes), Noting("b", notes, may_pause=True), Noting("c", notes)]
        for i in order:
            calls.add(wrappers[i])
        inner = ["a", "c"] if order.index(0) < order.index(2) else ["c", "a"]
        active = [*inner, "b"]
        assert manager.lookup(keys=[b"k"], req_context=None) == 0
        assert notes == [f"{label}.lookup" for label in reversed(active)]
        assert isinstance(manager, CPUOffloadingManager)
        for i in order:
            calls.remove(wrappers[i])
            calls.remove(wrappers[i])
            active.remove(wrappers[i].label)
            notes.clear()
            manager.touch([b"k"])
            assert notes == [f"{label}.touch" for label in reversed(active)]
        assert type(manager) is CPUOffloadingManager
        assert manager.lookups == 1


def test_a_pause_makes_no_class() -> None:
    notes: list[str] = []
    manager = CPUOffloadingManager(16, 4)
    calls, pausing = WrappedCalls.of(manager), Noting("p", notes, may_pause=True)
    calls.add(pausing)
    calls.add(Noting("a", notes))
    classes = set()
    for turn in range(6):
        calls.pause(pausing, turn % 2 == 1)
        calls.pause(pausing, turn % 2 == 1)
        classes.add(type(manager))
        notes.clear()
        manager.touch([])
        assert notes == (["a.touch"] if turn % 2 else ["p.touch", "a.touch"])
    assert len(classes) == 2


def test_a_replaced_method_is_refused_and_nothing_changes(tmp_path: Any) -> None:
    manager = CPUOffloadingManager(16, 4, REFERENCE_POLICIES["lru"])
    manager.touch = lambda keys, req_context=None: None  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="touch cannot be wrapped"):
        Recorder(manager, tmp_path / "run.kvlog")
    assert type(manager) is CPUOffloadingManager
    assert manager.recorder is None


@pytest.mark.parametrize("is_timed_first", [False, True])
@pytest.mark.parametrize("is_timed_longer", [False, True])
def test_a_manager_is_timed_and_recorded_at_once(tmp_path: Any, is_timed_first: bool, is_timed_longer: bool) -> None:
    manager = CPUOffloadingManager(16, 4)
    telemetry = Telemetry(manager, time_calls=True) if is_timed_first else None
    recorder = Recorder(manager, tmp_path / "run.kvlog")
    telemetry = telemetry or Telemetry(manager, time_calls=True)
    for number in range(300):  # more than are timed at a stretch
        output = manager.prepare_store([b"%d" % number])
        assert output is not None
        manager.complete_store(output.keys_to_store)
    ends = (recorder.stop, telemetry.close) if is_timed_longer else (telemetry.close, recorder.stop)
    for end in ends:
        end()
        manager.touch([b"0"])
    assert type(manager) is CPUOffloadingManager
    timed = {dict(part.labels)["call"]: part.stats for part in telemetry.parts() if part.name == "call"}
    assert timed["prepare_store"].duration_seconds.count >= 50
    outcome = replay_recording(Recording(tmp_path / "run.kvlog"))
    assert (outcome.difference, outcome.num_calls) == (None, 600 + (not is_timed_longer))


@pytest.mark.skipif(
    bool(sysconfig.get_config_var("Py_GIL_DISABLED")) and sys.version_info < (3, 14),
    reason="this build keeps every class, and what it refers to, once a second thread has run",
)
def test_a_wrapped_manager_is_freed() -> None:
    manager = CPUOffloadingManager(16, 4)
    WrappedCalls.of(manager).add(Noting("a", []))
    manager.touch([b"k"])
    found = weakref.ref(manager)
    del manager
    gc.collect()
    assert found() is None
