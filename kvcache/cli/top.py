"""`kvcache top`: a live view of a running engine's cache."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated

import typer

from kvcache.cli import common
from kvcache.cli.frames import Frame, History, WhatIf, socket_reader, url_reader, what_if_reader
from kvcache.cli.status import SocketOption, find_socket
from kvcache.cli.top_view import view

_WHAT_IF_S = 30.0


def top(
    socket: SocketOption = None,
    url: Annotated[
        str | None, typer.Option(help="Of /metrics, in place of a socket: http://host:port/metrics.", metavar="URL")
    ] = None,
    interval: Annotated[float, typer.Option(help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Show one frame and end.")] = False,
) -> None:
    """Watch a running engine: hit rates, media, bandwidth, tiers, and what more memory would hit."""
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
        common.console(None).print(view(address, history, ask_what_if() if ask_what_if else None))
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

    next_what_if_s = 0.0
    what_if: WhatIf | None = None
    fault = ""
    with Live(console=common.console(None), screen=True, auto_refresh=False) as live:
        try:
            while True:
                if ask_what_if is not None and time.monotonic() >= next_what_if_s:
                    what_if = ask_what_if()
                    next_what_if_s = time.monotonic() + _WHAT_IF_S
                live.update(view(address, history, what_if, fault), refresh=True)
                time.sleep(interval_s)
                try:
                    history.add(look())
                    fault = ""
                except (OSError, ValueError) as error:
                    # An engine that restarts comes back under the same address.
                    fault = str(error)
        except KeyboardInterrupt:
            pass
