"""What `open_manager` does with the tiers of a configuration: secrets, deadlines, ranks, and errors at the start."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest

from kvcache import ReqContext
from kvcache.assembly.assemble import OffloadSettings, open_manager
from kvcache.control.telemetry import Exporter
from kvcache.options import Options, option, parse_text
from kvcache.policies.base import CachePolicy
from kvcache.testing.tiers import ManualTier


class Shared:
    """Host blocks in place of shared memory."""

    def __init__(self) -> None:
        self.array = np.zeros((8, 64), np.uint8)
        self.is_closed = False

    def close(self) -> None:
        # The threads of a tier use the blocks until its shutdown.
        self.is_closed = all(tier.num_shutdowns for tier in NotedTier.opened)


@dataclass(frozen=True)
class NotedOptions(Options):
    path: str = option(parse_text, "kv", when="always")
    password: str | None = option(parse_text, None, when="always")


class NotedTier(ManualTier):
    """A tier that notes where it was opened and how often it was shut down."""

    options_type = NotedOptions
    opened: ClassVar[list[NotedTier]] = []

    def __init__(self, options: NotedOptions, host_blocks: Any, fingerprint: Any) -> None:
        super().__init__(4, host_blocks)
        self.path, self.num_shutdowns = options.path, 0
        NotedTier.opened.append(self)

    def shutdown(self) -> None:
        self.num_shutdowns += 1
        super().shutdown()


class SilentTier(NotedTier):
    """A tier that never answers a look-up."""

    def lookup(self, keys: list[bytes]) -> int | None:
        return None


class FailingPolicy(CachePolicy):
    def __new__(cls, *arguments: Any) -> Any:
        raise ValueError("no memory for the table")


class FailingTier(NotedTier):
    def __init__(self, options: NotedOptions, host_blocks: Any, fingerprint: Any) -> None:
        raise ValueError("the store is gone")


@pytest.fixture(autouse=True)
def opened() -> list[NotedTier]:
    NotedTier.opened.clear()
    return NotedTier.opened


def open_with(*tiers: dict[str, Any], shared: Any = None, **options: Any) -> Any:
    rest = {name: options.pop(name) for name in ("labels", "clock") if name in options}
    settings = OffloadSettings.parse({"num_cpu_blocks": 8, "tiers": list(tiers), **options})
    return open_manager(settings, block_size=16, num_blocks=8, shared=shared or Shared(), **rest)


def test_secret_of_tier_is_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "kvcache"):
        manager = open_with({"type": NotedTier, "path": "p", "password": "hunter2"})
    shown = caplog.text + json.dumps(manager.telemetry.config)
    manager.shutdown()
    assert "hunter2" not in shown
    assert '"password": "***"' in shown


def test_lookup_deadline_is_kept() -> None:
    now_s = [0.0]
    manager = open_with({"type": SilentTier}, lookup_deadline_s="500ms", clock=lambda: now_s[0])
    request = ReqContext()
    answers = []
    for now_s[0] in (0.0, 0.4, 0.6):
        answers.append(manager.lookup([b"key"], request))
        manager.on_schedule_end()
    manager.shutdown()
    assert answers == [None, None, 0]


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({}, "the store is gone"),
        ({"record": "/proc/nowhere/x"}, "record"),
        ({"cache_policy": FailingPolicy}, "no memory for the table"),
    ],
)
def test_failed_start_shuts_tiers_down(options: dict[str, Any], fault: str, opened: list[NotedTier]) -> None:
    shared = Shared()
    tiers: list[dict[str, Any]] = [{"type": NotedTier}, {"type": NotedTier}, {"type": FailingTier}]
    with pytest.raises((ValueError, OSError), match=fault):
        open_with(*tiers[: 2 if options else 3], shared=shared, **options)
    assert [tier.num_shutdowns for tier in opened] == [1, 1]
    assert shared.is_closed


@pytest.mark.parametrize("error", [OSError, ImportError, ValueError])
def test_engine_runs_without_failing_exporter(error: type[Exception], caplog: pytest.LogCaptureFixture) -> None:
    class FailingExporter(Exporter):
        address, close = "", ManualTier.shutdown

        def __init__(self, telemetry: Any) -> None:
            raise error("no port")

    manager = open_with({"type": NotedTier}, exporters=[FailingExporter])
    assert (manager.telemetry.exporters, manager.lookup([b"key"], ReqContext())) == ([], 0)
    assert "FailingExporter is not available: no port" in caplog.text
    manager.shutdown()


def test_path_of_tier_names_rank(opened: list[NotedTier]) -> None:
    open_with({"type": NotedTier, "path": "a{rank}/b{dp_rank}/{host}"}, labels={"rank": "3"}).shutdown()
    assert [tier.path for tier in opened] == ["a3/b3/{host}"]


@pytest.mark.parametrize("name", ["{rank}", "{dp_rank}"])
def test_unknown_rank_in_path_is_refused(name: str, opened: list[NotedTier]) -> None:
    with pytest.raises(ValueError, match=f"path of NotedTier: its data-parallel rank is unknown here, got 'kv{name}'"):
        open_with({"type": NotedTier, "path": f"kv{name}"})
    assert opened == []
