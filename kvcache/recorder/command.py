"""The status socket's command that starts and stops a recording of a running engine."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from kvcache.control.telemetry import Command
from kvcache.options import Options, choice_of, option, parse_size, parse_text
from kvcache.recorder.recorder import DEFAULT_MAX_BYTES, Recorder


@dataclass(frozen=True)
class RecordOptions(Options):
    """The options of a `RecordCommand`."""

    action: str = option(choice_of("start", "stop", "stats"), "stats", when="a recording is to start or stop")
    file: str | None = option(parse_text, None, when="always to start: the recording's file")
    max_bytes: int = option(parse_size, DEFAULT_MAX_BYTES, when="all files of the recording must take less disk")
    salt: str | None = option(parse_text, None, when="recordings of several engines must hash a key alike")


class RecordCommand(Command):
    """Start or stop a recording of the manager's calls, or return its counters so far."""

    options = RecordOptions
    _is_closed = False

    def run(  # type: ignore[override]
        self, action: str = "stats", file: str = "", max_bytes: int = DEFAULT_MAX_BYTES, salt: str | None = None
    ) -> Any:
        """Return ``{"file", "num_records", "num_lost", ...}``, or ``{"file": None}`` without a recording."""
        manager: Any = self.telemetry.manager
        if manager is None:
            raise ValueError("no manager is there to be recorded")
        recorder = manager.recorder
        if action == "start":
            if not file:
                raise ValueError("a recording needs a file")
            recorder = Recorder(manager, file, max_bytes=max_bytes, salt=salt)
            if self._is_closed:  # the manager may have been shut down meanwhile
                recorder.stop()
        elif action == "stop":
            if recorder is None:
                raise ValueError("nothing is being recorded")
            recorder.stop()
        return {"file": None} if recorder is None else {"file": str(recorder.path), **asdict(recorder.stats())}

    def close(self) -> None:
        self._is_closed = True
