"""A file of finished cells of a grid, one per line, so that a stopped grid can continue."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvcache.lab.simulate.cells import Cell, Job


class Checkpoint:
    """A file of finished cells; `cells` are those in the file when it was opened.

    `facts` is everything that the cells depend on beside policy and capacity: the trace's digest, the split and so on.
    Raise ValueError if the file cannot be used or belongs to another grid. Each line is flushed; a cut last line is
    removed.
    """

    def __init__(self, path: str | Path, facts: Mapping[str, Any]) -> None:
        self.cells: dict[Job, Cell] = {}
        header = json.dumps({"kvcache_grid": 1, **facts}, sort_keys=True)
        try:
            self._file = Path(path).open("a+", encoding="utf-8")  # noqa: SIM115 - open as long as the object
            self._file.seek(0)
            text = self._file.read()
            lines = text.splitlines(keepends=True)
            if lines and not lines[-1].endswith("\n"):
                self._file.truncate(len("".join(lines[:-1]).encode()))
                lines.pop()
            if not lines:
                self._append(header)
            else:
                self._take(path, lines, header)
        except OSError as error:
            raise ValueError(f"checkpoint {str(path)!r} cannot be used: {error.strerror}") from error

    def _take(self, path: str | Path, lines: list[str], header: str) -> None:
        if lines[0].strip() != header:
            self._file.close()
            found = _facts_in(lines[0])
            wanted = json.loads(header)
            names = [name for name in wanted if found.get(name) != wanted[name]]
            other = f"of another {', '.join(names)}" if found else "no checkpoint of a grid"
            raise ValueError(f"checkpoint {str(path)!r} is {other}: name another file, or remove it")
        for line in lines[1:]:
            cell = Cell.from_dict(json.loads(line))
            self.cells[Job(cell.policy, cell.num_blocks, cell.tiers)] = cell

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, cell: Cell) -> None:
        """Write one finished cell."""
        self._append(json.dumps(cell.as_dict()))

    def _append(self, line: str) -> None:
        self._file.write(line + "\n")
        self._file.flush()


def _facts_in(line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) and "kvcache_grid" in found else {}
