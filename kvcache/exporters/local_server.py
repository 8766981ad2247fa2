"""LocalServer: a server of few clients in daemon threads, for metrics and for the status socket."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from kvcache.background import STOP_S, Background, after_fork

_LOG = logging.getLogger(__name__)
_QUEUE_SIZE = 64
_LOOK_S = 0.5  # between two checks for connections that are too old


class LocalServer:
    """Answer each connection in a thread of its own, in at most `max_clients` threads; the newest connections go first.

    If all threads are busy, the oldest connection is closed, so that its thread ends. If none ends within `wait_s`,
    because they compute, the new connection is closed. A connection older than `request_s` is closed, too.
    `num_dropped` counts all of these. ``answer(client, address)`` reads from a socket and writes to it.
    """

    request_s = 15.0
    wait_s = 0.5

    def __init__(
        self,
        family: socket.AddressFamily,
        address: Any,
        answer: Callable[[socket.socket, Any], object],
        max_clients: int = 32,
    ) -> None:
        self.max_clients = max_clients
        self.num_dropped = 0
        self.num_threads = 0
        self._answer = answer
        self._since_s: dict[socket.socket, float] = {}  # of clients that are not dropped, oldest first
        self._changed = threading.Condition()  # guards all of these, and is notified when a thread ends
        self._thread: Background | None = None
        self._socket = socket.socket(family)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind(address)
            self._socket.listen(_QUEUE_SIZE)
        except OSError as error:
            self._socket.close()
            shown = address if isinstance(address, str) else f"{address[0]}:{address[1]}"
            raise OSError(error.errno, f"{shown} cannot be opened: {error.strerror or error}") from error
        self._socket.settimeout(_LOOK_S)

    @property
    def address(self) -> Any:
        """The address as bound."""
        return self._socket.getsockname()

    @property
    def is_serving(self) -> bool:
        """Whether the thread runs. A forked child has no thread."""
        return self._thread is not None and self._thread.is_alive

    def start(self, name: str) -> None:
        """Answer from now on, in the thread ``kvcache-<name>``."""
        self._thread = Background(name, self._serve)
        # A forked child must not keep the address after its engine has ended.
        after_fork(self, lambda server: server._socket.close())  # noqa: SLF001

    def stop(self) -> None:
        """Close all connections and the socket, and wait for all threads for a bounded time.

        A forked child has no threads: it only closes its copy of the socket.
        """
        if self._thread is not None and self._thread.is_alive:
            self._thread.stopping.set()
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
            self._thread.stop()
            with self._changed:
                self._drop(len(self._since_s))
                self._changed.wait_for(lambda: not self.num_threads, STOP_S)
        self._socket.close()

    def drop_old(self) -> None:
        """Close connections that are too old."""
        with self._changed:
            end_s = time.monotonic() - self.request_s
            self._drop(sum(since_s < end_s for since_s in self._since_s.values()))

    def _serve(self, stopping: threading.Event) -> None:
        while not stopping.is_set():
            self.drop_old()
            try:
                client, address = self._socket.accept()
            except TimeoutError:
                continue
            except OSError:
                stopping.wait(0.02)  # without descriptors, the socket stays ready
                continue
            with self._changed:
                # A dropped client keeps its thread while it computes, so dropping more clients would not free a thread.
                self._drop(len(self._since_s) + 1 - self.max_clients)
                self._changed.wait_for(lambda: self.num_threads < self.max_clients, self.wait_s)
                self._since_s[client] = time.monotonic()
                self.num_threads += 1
            try:
                if self.num_threads > self.max_clients:
                    raise RuntimeError("all threads compute")
                threading.Thread(target=self._run, args=(client, address), daemon=True).start()
            except RuntimeError:  # or the system has no thread left
                self.num_dropped += 1
                self._end(client)

    def _run(self, client: socket.socket, address: Any) -> None:
        try:
            self._answer(client, address)
        except Exception:
            _LOG.debug("a client at %s was dropped", address, exc_info=True)
        finally:
            self._end(client)

    def _end(self, client: socket.socket) -> None:
        with self._changed:
            self._since_s.pop(client, None)
            self.num_threads -= 1
            with contextlib.suppress(OSError):
                client.shutdown(socket.SHUT_WR)
            client.close()
            self._changed.notify_all()

    def _drop(self, num_clients: int) -> None:
        """Close the oldest connections. The thread of each then ends; the caller holds the lock."""
        for client in [*self._since_s][: max(0, num_clients)]:
            self.num_dropped += 1
            del self._since_s[client]
            with contextlib.suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)
