"""The rows of a self-test's table, and what keeps names of hosts, users and paths out of them."""

from __future__ import annotations

import getpass
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

OK, WRONG, SLOW, SKIPPED = "ok", "WRONG", "slow?", "skipped"


@dataclass(frozen=True, slots=True)
class Row:
    """One finding: what was tried, what came out in words and in figures, and whether it is right."""

    subject: str
    text: str
    verdict: str = OK
    figures: dict[str, Any] = field(default_factory=dict)


def guarded(subject: str, check: Callable[[], Iterator[Row]], names: list[str]) -> Iterator[Row]:
    """Yield the rows of a check. If it raises, its last row says why, without the `names`."""
    try:
        for row in check():
            yield Row(row.subject, without(row.text, names), row.verdict, row.figures)
    except Exception as error:
        # Whatever a device, a driver or a file system raises: the other checks go on.
        text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        yield Row(subject, without(f"{type(error).__name__}: {text}", names), WRONG)


def private_names(*paths: Path | None) -> list[str]:
    """Return what must not stand in a report that is sent to others: paths, and the names of host and user."""
    names = [str(form) for path in (*paths, Path.home()) if path is not None for form in (path, path.absolute())]
    with suppress(Exception):  # a container may have a user without a name
        names.append(getpass.getuser())
    return sorted({*names, socket.gethostname()} - {"", "/", "root"}, key=len, reverse=True)


def without(text: str, names: list[str]) -> str:
    """Return a text with `***` in the place of each name, on one line and of bounded length."""
    for name in names:
        text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "***", text)
    return " ".join(text.split())[:300]
