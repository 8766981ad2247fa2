"""Mount the commands of `kvcache.lab`: a module is imported when its command is called, completed or listed."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from typer.core import TyperGroup

_COMMANDS = {
    "bench": ("copy", "disk", "tier"),
    "trace": ("make",),
    None: ("demo", "replay", "plan", "fleet", "rerun", "chat-demo", "selftest"),
}


def lab_module(name: str) -> Any:
    """Return a module of the laboratory's commands: loaded here alone and by name, as no file outside imports it."""
    return import_module(f"kvcache.lab.commands.{name}")


class LabGroup(TyperGroup):
    """A group of the laboratory's commands, followed by those that were added to it."""

    @property
    def _lab_names(self) -> tuple[str, ...]:
        return _COMMANDS.get(self.name, _COMMANDS[None])

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands."""
        return [*self._lab_names, *super().list_commands(ctx)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command, which is built when it is asked for."""
        if cmd_name not in self._lab_names:
            return super().get_command(ctx, cmd_name)
        group = "" if self.name not in _COMMANDS else f"{self.name}_"
        return lab_module("mount").build_command(cmd_name, group + cmd_name.replace("-", "_"))
