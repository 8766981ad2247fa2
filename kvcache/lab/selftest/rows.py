"""The rows of a self-test's table, without names of hosts, users and paths."""

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
    """One result: its subject, a text, a verdict and figures."""

    subject: str
    text: str
    verdict: str = OK
    figures: dict[str, Any] = field(default_factory=dict)


def guarded(subject: str, check: Callable[[], Iterator[Row]], names: list[str]) -> Iterator[Row]:
    """Yield the rows of a check without the `names`. If it raises, yield a last row with the error."""
    try:
        for row in check():
            yield Row(row.subject, without(row.text, names), row.verdict, row.figures)
    except Exception as error:
        # A device, driver or file system may raise anything; the other checks still run.
        text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        text = f"{type(error).__name__}: {text}".removesuffix(": ")
        is_short = isinstance(error, MemoryError) or re.search("out of memory|allocate memory", text)
        text = f"stopped, too little memory: {text}" if is_short else text
        yield Row(subject, without(text, names), SKIPPED if is_short else WRONG)


def private_names(*paths: Path | None) -> list[str]:
    """Return the names to remove from a report that is sent to others: paths, and those of host and user."""
    names = [str(form) for path in (*paths, Path.home()) if path is not None for form in (path, path.absolute())]
    with suppress(Exception):  # a container may have a user without a name
        names.append(getpass.getuser())
    return sorted({*names, socket.gethostname()} - {"", "/", "root"}, key=len, reverse=True)


def without(text: str, names: list[str]) -> str:
    """Return a text with each name replaced by `***`, on one line and of bounded length."""
    for name in names:
        text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "***", text)
    return " ".join(text.split())[:300]
