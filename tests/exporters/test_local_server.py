"""LocalServer: connections beyond its limits are closed, each once."""

from __future__ import annotations

import socket
import threading
import time
from socketserver import BaseRequestHandler

import pytest

from kvcache.exporters.local_server import LocalServer


def test_local_server_busy_handlers_drop_each_old_connection_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    threads = threading.active_count()
    may_end = threading.Event()

    class Busy(BaseRequestHandler):
        def handle(self) -> None:
            if self.request.recv(1):
                self.request.sendall(b"!")
                return
            may_end.wait(60)
            raise OSError("the client has gone")

    server = LocalServer(socket.AF_INET, ("127.0.0.1", 0), Busy)
    monkeypatch.setattr(server, "max_clients", 2)
    server.start("test")
    clients = [socket.create_connection(server.server_address[:2]) for _ in range(5)]
    end_s = time.monotonic() + 60
    while server.num_dropped < 3:
        assert time.monotonic() < end_s
        time.sleep(0.01)
    for client in clients[:3]:
        client.settimeout(60)
        assert client.recv(1) == b""
    server.service_actions()
    assert server.num_dropped == 3
    # A full server drops the oldest client for a new one, and answers it.
    clients.append(socket.create_connection(server.server_address[:2], timeout=60))
    clients[-1].sendall(b"?")
    assert clients[-1].recv(1) == b"!"
    may_end.set()
    server.stop()
    for client in clients:
        client.close()
    while threading.active_count() > threads:
        assert time.monotonic() < end_s
        time.sleep(0.01)
    assert capfd.readouterr().err == ""
