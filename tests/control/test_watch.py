"""Watch: which wrappers of a manager are called, and that nothing stays behind."""

from __future__ import annotations

import gc
import itertools
import sys
import sysconfig
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from kvcache import CPUOffloadingManager
from kvcache.control.telemetry import Telemetry
from kvcache.control.watch import Watch
from kvcache.testing.reference import REFERENCE_POLICIES


class Noting:
    """Notes which method was called, by which wrapper."""

    names = ("touch", "lookup", "no such method")

    def __init__(self, label: str, notes: list[str]) -> None:
        self.label, self.notes = label, notes

    def wrap(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            self.notes.append(f"{self.label}.{name}")
            return method(*args, **kwargs)

        return noted


def test_wrappers_in_any_order_are_called() -> None:
    for order in itertools.permutations(range(3)):
        notes: list[str] = []
        manager = CPUOffloadingManager(16, 4)
        watch = Watch.of(manager)
        assert Watch.of(manager) is watch
        wrappers = [Noting(label, notes) for label in "abc"]
        for i in order:
            watch.add(wrappers[i])
        active = [wrappers[i].label for i in order]
        assert manager.lookup(keys=[b"k"], req_context=None) == 0
        assert notes == [f"{label}.lookup" for label in reversed(active)]
        assert isinstance(manager, CPUOffloadingManager)
        for i in range(3):
            watch.remove(wrappers[i])
            watch.remove(wrappers[i])
            active.remove(wrappers[i].label)
            notes.clear()
            manager.touch([b"k"])
            assert notes == [f"{label}.touch" for label in reversed(active)]
        assert type(manager) is CPUOffloadingManager
        assert manager.lookups == 1


def test_recorder_refuses_replaced_methods(tmp_path: Any) -> None:
    pytest.importorskip("msgspec")
    from kvcache.recorder.recorder import Recorder

    manager = CPUOffloadingManager(16, 4, REFERENCE_POLICIES["lru"])
    manager.touch = lambda keys, req_context=None: None  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="touch cannot be wrapped"):
        Recorder(manager, tmp_path / "run.kvlog")
    assert type(manager) is CPUOffloadingManager
    assert manager.recorder is None


@pytest.mark.parametrize("is_timed_first", [False, True])
@pytest.mark.parametrize("is_timed_longer", [False, True])
def test_timed_and_recorded_manager_counts_both(tmp_path: Any, is_timed_first: bool, is_timed_longer: bool) -> None:
    from kvcache.lab.rerun.recorded import replay_recording
    from kvcache.lab.traces.recording import Recording
    from kvcache.recorder.recorder import Recorder

    manager = CPUOffloadingManager(16, 4)
    telemetry = Telemetry(manager, time_calls=True) if is_timed_first else None
    recorder = Recorder(manager, tmp_path / "run.kvlog")
    telemetry = telemetry or Telemetry(manager, time_calls=True)
    for number in range(300):
        output = manager.prepare_store([b"%d" % number])
        assert output is not None
        manager.complete_store(output.keys_to_store)
    ends = (recorder.stop, telemetry.close) if is_timed_longer else (telemetry.close, recorder.stop)
    for end in ends:
        end()
        manager.touch([b"0"])
    assert type(manager) is CPUOffloadingManager
    timed = {dict(part.labels)["call"]: part.stats for part in telemetry.parts() if part.name == "call"}
    assert timed["prepare_store"].duration_seconds.count == 300
    outcome = replay_recording(Recording(tmp_path / "run.kvlog"))
    assert (outcome.difference, outcome.num_calls) == (None, 600 + (not is_timed_longer))


@pytest.mark.skipif(
    bool(sysconfig.get_config_var("Py_GIL_DISABLED")) and sys.version_info < (3, 14),
    reason="this build keeps every class, and what it refers to, once a second thread has run",
)
def test_wrapped_manager_without_references_is_freed() -> None:
    manager = CPUOffloadingManager(16, 4)
    telemetry = Telemetry(manager, time_calls=True)
    Watch.of(manager).add(Noting("a", []))
    manager.touch([b"k"])
    telemetry.close()
    found = weakref.ref(manager)
    del manager, telemetry
    gc.collect()
    assert found() is None
