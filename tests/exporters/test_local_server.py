"""LocalServer: its threads are bounded, connections beyond its limits are closed, and all of it ends with `stop`."""

from __future__ import annotations

import socket
import threading

import pytest
from waiting import wait_until

from kvcache.exporters.local_server import LocalServer


def connect(server: LocalServer) -> socket.socket:
    return socket.create_connection(server.address, timeout=60)


def answer_of(client: socket.socket) -> bytes:
    """Return the answer, or nothing if the server closed the connection."""
    try:
        return client.recv(1)
    except ConnectionResetError:
        return b""


def echo(client: socket.socket, address: object) -> None:
    if client.recv(1):
        client.sendall(b"!")
        return
    raise OSError("the client has gone")


def test_full_server_drops_oldest_idle_clients(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    server = LocalServer(socket.AF_INET, ("127.0.0.1", 0), echo, max_clients=2)
    monkeypatch.setattr(server, "wait_s", 60.0)
    server.start("test")
    clients = [connect(server) for _ in range(5)]
    assert [answer_of(client) for client in clients[:3]] == [b""] * 3
    wait_until(lambda: server.num_dropped == 3)
    server.drop_old()
    assert server.num_dropped == 3
    clients.append(connect(server))
    clients[-1].sendall(b"?")
    assert answer_of(clients[-1]) == b"!"
    server.stop()
    assert server.num_threads == 0
    for client in clients:
        client.close()
    assert capfd.readouterr().err == ""


def test_computing_threads_refuse_new_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = {*threading.enumerate()}
    may_end = threading.Event()
    started = threading.Semaphore(0)

    def compute(client: socket.socket, address: object) -> None:
        started.release()
        may_end.wait(60)
        echo(client, address)

    server = LocalServer(socket.AF_INET, ("127.0.0.1", 0), compute, max_clients=2)
    monkeypatch.setattr(server, "wait_s", 0.0)
    server.start("test")
    clients = [connect(server) for _ in range(2)]
    for _ in clients:
        assert started.acquire(timeout=60)
    refused = [connect(server) for _ in range(20)]
    assert [answer_of(client) for client in refused] == [b""] * 20
    assert server.num_threads == 2
    assert not started.acquire(blocking=False)
    # Only the oldest client was dropped for them: its thread did not end, so a second drop would be in vain.
    assert server.num_dropped == 21
    may_end.set()
    clients[1].sendall(b"?")
    assert answer_of(clients[1]) == b"!"
    wait_until(lambda: server.num_threads == 0)
    server.stop()
    for client in (*clients, *refused):
        client.close()
    wait_until(lambda: {*threading.enumerate()} <= threads)
