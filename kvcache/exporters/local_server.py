"""LocalServer: a server of few clients in daemon threads, for metrics and for the status socket."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from socketserver import BaseRequestHandler, TCPServer, ThreadingMixIn
from typing import Any

from kvcache.background import STOP_S, Background, after_fork

_LOG = logging.getLogger(__name__)


class LocalServer(ThreadingMixIn, TCPServer):
    """Answer each connection in a thread of its own, in at most `max_clients` threads; the newest connections go first.

    If all threads are busy, the oldest connection is closed, so that its thread ends. If none ends within `wait_s`,
    because they compute, the new connection is closed. A connection older than `request_s` is closed, too.
    `num_dropped` counts all of these.
    """

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 64
    max_clients = 32
    request_s = 15.0
    wait_s = 0.5

    def __init__(self, family: socket.AddressFamily, address: Any, handler: type[BaseRequestHandler]) -> None:
        self.address_family = family
        self.num_dropped = 0
        self.num_threads = 0
        self._since_s: dict[Any, float] = {}  # of clients that are not dropped, oldest first
        self._changed = threading.Condition()  # guards all of these, and is notified when a thread ends
        self._thread: Background | None = None
        try:
            super().__init__(address, handler)
        except OSError as error:
            shown = address if isinstance(address, str) else f"{address[0]}:{address[1]}"
            raise OSError(error.errno, f"{shown} cannot be opened: {error.strerror or error}") from error

    @property
    def is_serving(self) -> bool:
        """Whether the thread runs. A forked child has no thread."""
        return self._thread is not None and self._thread.is_alive

    def start(self, name: str) -> None:
        """Answer from now on, in the thread ``kvcache-<name>``."""
        self._thread = Background(name, lambda stopping: self.serve_forever())
        # A forked child must not keep the address after its engine has ended.
        after_fork(self, lambda server: server.socket.close())

    def stop(self) -> None:
        """Close all connections and the socket, and wait for all threads for a bounded time.

        A forked child has no threads: it only closes its copy of the socket.
        """
        if self.is_serving:
            with contextlib.suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
            self.shutdown()
            with self._changed:
                self._drop(len(self._since_s))
                self._changed.wait_for(lambda: not self.num_threads, STOP_S)
        self.server_close()

    def get_request(self) -> Any:
        try:
            return super().get_request()
        except OSError:
            time.sleep(0.02)  # without descriptors, the socket stays ready
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._changed:
            # A dropped client that still computes keeps its thread: dropping more clients would not free one sooner.
            self._drop(len(self._since_s) + 1 - self.max_clients)
            self._changed.wait_for(lambda: self.num_threads < self.max_clients, self.wait_s)
            if self.num_threads >= self.max_clients:
                self.num_dropped += 1
                super().shutdown_request(request)
                return
            self._since_s[request] = time.monotonic()
            self.num_threads += 1
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._end_thread()  # it did not start
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._end_thread()

    def _end_thread(self) -> None:
        with self._changed:
            self.num_threads -= 1
            self._changed.notify_all()

    def shutdown_request(self, request: Any) -> None:
        with self._changed:
            self._since_s.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Close connections that are too old; the thread calls this twice a second."""
        with self._changed:
            end_s = time.monotonic() - self.request_s
            self._drop(sum(since_s < end_s for since_s in self._since_s.values()))

    def _drop(self, num_clients: int) -> None:
        """Close the oldest connections. The thread of each then ends; the caller holds the lock."""
        for client in [*self._since_s][: max(0, num_clients)]:
            self.num_dropped += 1
            del self._since_s[client]
            with contextlib.suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        _LOG.debug("a client at %s was dropped", client_address, exc_info=True)
