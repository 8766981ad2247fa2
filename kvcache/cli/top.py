"""`kvcache top`: a live view of a running engine's cache."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Annotated

import typer

from kvcache.background import Background
from kvcache.cli import common
from kvcache.cli.frames import Frame, History, WhatIf, socket_reader, url_reader, what_if_reader
from kvcache.cli.status import SocketOption, find_socket
from kvcache.cli.top_view import view

# An estimate takes seconds of an engine's CPU, and changes slowly.
_WHAT_IF_S = 300.0


def top(
    socket: SocketOption = None,
    url: Annotated[
        str | None, typer.Option(help="Of /metrics, in place of a socket: http://host:port/metrics.", metavar="URL")
    ] = None,
    interval: Annotated[float, typer.Option(help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Show one frame and end.")] = False,
) -> None:
    """Watch a running engine: hit rates, media, bandwidth, tiers, and what more memory would hit.

    Where standard output is no terminal, frames follow one another as plain text.
    """
    if socket is not None and url is not None:
        raise ValueError(f"--socket and --url exclude each other, got {socket} and {url!r}")
    if not 0.1 <= interval <= 3600:
        raise ValueError(f"--interval must be 0.1 to 3600 seconds, got {interval}")
    if url is not None:
        address, look, ask_what_if = url, url_reader(url), None
    else:
        path = find_socket(socket)
        address, look, ask_what_if = str(path), socket_reader(path), what_if_reader(path)
    history = History()
    history.add(look())
    if once:
        time.sleep(interval)
        history.add(look())
        common.report_console(None).print(view(address, history, ask_what_if() if ask_what_if else None))
        return
    _watch(address, history, look, ask_what_if, interval)


def _watch(
    address: str,
    history: History,
    look: Callable[[], Frame],
    ask_what_if: Callable[[], WhatIf | None] | None,
    interval_s: float,
) -> None:
    from rich.live import Live

    estimate = None if ask_what_if is None else _Estimate(ask_what_if)
    fault = ""
    on = common.report_console(None)
    with Live(console=on, screen=True, auto_refresh=False) if on.is_terminal else nullcontext(on) as shown:
        try:
            while True:
                frame = view(address, history, None if estimate is None else estimate.latest(), fault)
                if isinstance(shown, Live):
                    shown.update(frame, refresh=True)
                else:
                    shown.print(frame, "")
                    on.file.flush()
                time.sleep(interval_s)
                try:
                    history.add(look())
                    fault = ""
                except (OSError, ValueError) as error:
                    # An engine that restarts comes back under the same address.
                    fault = str(error)
        except KeyboardInterrupt:
            pass


class _Estimate:
    """The what-if, asked for in a thread, so that frames go on meanwhile."""

    def __init__(self, ask: Callable[[], WhatIf | None]) -> None:
        self._ask = ask
        self._found: WhatIf | None = None
        self._thread: Background | None = None
        self._due_s = 0.0

    def latest(self) -> WhatIf | None:
        """Return the last estimate that has come."""
        if (self._thread is None or not self._thread.is_alive) and time.monotonic() >= self._due_s:
            self._due_s = time.monotonic() + _WHAT_IF_S
            self._thread = Background("top", self._run)
        return self._found

    def _run(self, stopping: threading.Event) -> None:
        self._found = self._ask()
