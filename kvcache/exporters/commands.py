"""The commands of the status socket: one class per command, each a line of `COMMANDS`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from kvcache.control.telemetry import Command
from kvcache.epoch import parse_version
from kvcache.metrics import HistogramData, Sample
from kvcache.options import Options, option


class StatusCommand(Command):
    """All counters and gauges, by component, and the configuration in effect."""

    def run(self, **options: Any) -> Any:
        """Return a snapshot as JSON."""
        return {**self.telemetry.snapshot().as_dict(), "config": _plain(self.telemetry.config)}


class SamplesCommand(Command):
    """All counters and gauges, under the names that exporters use."""

    def run(self, **options: Any) -> Any:
        """Return ``{"time_s", "labels", "samples": [[name, kind, labels, value], ...]}``."""
        snapshot = self.telemetry.snapshot()
        return {
            "time_s": snapshot.time_s,
            "labels": dict(snapshot.labels),
            "samples": [
                [sample.name, sample.kind, dict(sample.labels), _value(sample)] for sample in snapshot.samples()
            ],
        }


@dataclass(frozen=True)
class NextVersionOptions(Options):
    """The options of a `NextVersionCommand`."""

    version: str | int | None = option(
        parse_version, None, when="always, unless a name is to be withdrawn: that of the weights after the next reset"
    )


class NextVersionCommand(Command):
    """Name the weights in force after the next reset of the cache, for engines whose reset has no version."""

    options = NextVersionOptions

    def run(self, **options: Any) -> Any:
        """Return ``{"version": ...}``."""
        if self.telemetry.manager is None:
            raise ValueError("no manager is there to be reset")
        version = options.get("version")
        self.telemetry.manager.name_next_version(version)
        return {"version": version}


@dataclass(frozen=True)
class HintsOptions(Options):
    """The options of a `HintsCommand`."""

    hints: Any = option(lambda name, value: value, None, when="always: an envelope or its short form")


class HintsCommand(Command):
    """Execute hints that come without a request."""

    options = HintsOptions

    def run(self, **options: Any) -> Any:
        """Return ``{"answers": [...]}``, one for each action."""
        manager = self.telemetry.manager
        if manager is None or manager.hints is None:
            raise ValueError("this process executes no hints; an engine of a node's pool leaves them to the owner")
        return {"answers": manager.hints.ask(options.get("hints"))}


def _value(sample: Sample) -> Any:
    return asdict(sample.value) if isinstance(sample.value, HistogramData) else sample.value


def _plain(value: Any) -> Any:
    """Return a value for JSON; values of other types become text."""
    if isinstance(value, Mapping):
        return {str(name): _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if value is None or isinstance(value, str | bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return str(value)
