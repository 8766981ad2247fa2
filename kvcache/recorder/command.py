"""The status socket's command that begins and ends a recording of a running engine."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from kvcache.control.telemetry import Command
from kvcache.options import OptionTable, choice_of, parse_size, parse_text
from kvcache.recorder.recorder import DEFAULT_MAX_BYTES, Recorder


class RecordCommand(Command):
    """Begin or end a recording of the manager's calls, or return what was recorded so far."""

    options = OptionTable(
        {
            "action": choice_of("start", "stop", "stats"),
            "file": parse_text,
            "max_bytes": parse_size,
            "salt": parse_text,
        }
    )

    def run(self, **options: Any) -> Any:
        """Return ``{"file", "num_records", "num_lost", ...}``, or ``{"file": None}`` where nothing is recorded."""
        manager: Any = self.telemetry.manager
        if manager is None:
            raise ValueError("no manager is there to be recorded")
        action = options.get("action", "stats")
        recorder = manager.recorder
        if action == "start":
            if "file" not in options:
                raise ValueError("a recording needs a file")
            recorder = Recorder(
                manager,
                options["file"],
                max_bytes=options.get("max_bytes", DEFAULT_MAX_BYTES),
                salt=options.get("salt"),
            )
        elif action == "stop":
            if recorder is None:
                raise ValueError("nothing is being recorded")
            recorder.stop()
        if recorder is None:
            return {"file": None}
        return {"file": str(recorder.path), **asdict(recorder.stats())}
