"""A file of finished cells of a grid, one per line, so that a stopped grid can continue."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
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
            # Open as long as the object. Another file of any bytes may be named, and must stay as it is.
            self._file = Path(path).open("a+", encoding="utf-8", errors="surrogateescape")  # noqa: SIM115
            self._file.seek(0)
            lines = self._file.read().splitlines(keepends=True)
            if lines and not f"{header}\n".startswith(lines[0]):
                self._file.close()
                raise ValueError(
                    f"checkpoint {str(path)!r} is {_fault_of(lines[0], header)}: name another file, or remove it"
                )
            if lines and not lines[-1].endswith("\n"):
                self._file.truncate(len("".join(lines[:-1]).encode(errors="surrogateescape")))
                lines.pop()
            if not lines:
                self._append(header)
        except OSError as error:
            raise ValueError(f"checkpoint {str(path)!r} cannot be used: {error.strerror}") from error
        for number, line in enumerate(lines[1:], 2):
            try:
                cell = Cell.from_dict(json.loads(line))
            except (ValueError, TypeError, AttributeError) as error:
                self._file.close()
                raise ValueError(f"checkpoint {str(path)!r}: line {number} is no cell: {line[:80]!r}") from error
            self.cells[Job(cell.policy, cell.num_blocks, cell.tiers)] = cell

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, cell: Cell) -> None:
        """Write one finished cell."""
        self._append(json.dumps(asdict(cell)))

    def _append(self, line: str) -> None:
        self._file.write(line + "\n")
        self._file.flush()


def _fault_of(line: str, header: str) -> str:
    """Return what differs between a file's first line and the header that it must be."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or "kvcache_grid" not in found:
        return "no checkpoint of a grid"
    wanted = json.loads(header)
    return f"of another {', '.join(name for name in wanted | found if found.get(name) != wanted.get(name))}"
