"""The status socket: its answers, and that no request can harm the engine."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until

from kvcache import CPUOffloadingManager
from kvcache.control.telemetry import Command, Telemetry
from kvcache.exporters import status as status_module
from kvcache.exporters.status import StatusServer, ask, live_sockets, name_next_version
from kvcache.options import Options, option, parse_count
from kvcache.registry import COMMANDS


@pytest.fixture
def manager() -> CPUOffloadingManager:
    manager = CPUOffloadingManager(16, 8, "arc")
    output = manager.prepare_store([b"a", b"b"])
    assert output is not None
    manager.complete_store(output.keys_to_store)
    return manager


@pytest.fixture
def server(manager: CPUOffloadingManager, sockets: Path) -> Iterator[StatusServer]:
    telemetry = Telemetry(manager, block_bytes=4096, config={"password_file": Path("/x")})
    server = StatusServer(telemetry, sockets / "s.sock")
    yield server
    server.close()


def raw(server: StatusServer, data: bytes) -> dict[str, Any]:
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(10)
        client.connect(str(server.path))
        # The server may refuse the request before all bytes are sent.
        with contextlib.suppress(OSError):
            client.sendall(data)
            client.shutdown(socket.SHUT_WR)
        with client.makefile("rb") as lines:
            found: dict[str, Any] = json.loads(lines.readline())
    return found


def test_status_answers_with_what_is_counted(server: StatusServer) -> None:
    found = ask(server.path, "status")
    assert found["labels"] == {"engine": "0", "rank": "0", "policy": "arc"}
    assert (found["block_size"], found["block_bytes"]) == (16, 4096)
    manager, *policy, own = found["parts"]
    assert [part["name"] for part in policy] == ["policy"] * 5
    assert (manager["name"], manager["stats"]["stored_blocks"], manager["stats"]["num_free"]) == ("manager", 2, 6)
    assert (own["name"], own["stats"]["requests"]) == ("status", 0)
    assert found["config"] == {"password_file": "/x"}
    wait_until(lambda: server.stats().requests == 1)


def test_next_version_reaches_next_reset(server: StatusServer, manager: CPUOffloadingManager) -> None:
    assert name_next_version("step 7", [server.path]) == [server.path]
    assert manager.version_of_reset(None) == "step 7"
    assert ask(server.path, "next_version", version=8) == {"version": 8}
    assert [manager.version_of_reset(None) for _ in range(2)] == [8, None]
    for options in ({"version": ""}, {"version": 1.5}):
        with pytest.raises(ValueError, match="version"):
            ask(server.path, "next_version", **options)
    assert manager.version_of_reset(None) is None


def test_name_of_some_is_withdrawn(server: StatusServer, manager: CPUOffloadingManager, tmp_path: Path) -> None:
    """A later reset, for other weights, must not use the name of an update that was given up."""
    with pytest.raises(FileNotFoundError):
        name_next_version("step 7", [server.path, tmp_path / "ended"])
    assert manager.version_of_reset(None) is None
    assert ask(server.path, "next_version", version="step 8") == {"version": "step 8"}
    assert name_next_version(None, [server.path]) == [server.path]
    assert manager.version_of_reset(None) is None


def test_socket_is_its_owners_alone(server: StatusServer) -> None:
    found = server.path.lstat()
    assert stat.S_ISSOCK(found.st_mode)
    assert (found.st_mode & 0o777, found.st_uid) == (0o600, os.geteuid())


def test_probe_of_server_is_not_counted(server: StatusServer) -> None:
    for _ in range(3):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(server.path))
    assert ask(server.path, "status")["parts"]
    wait_until(lambda: server.stats().requests == 1)
    assert server.stats().refused_requests == 0


@pytest.mark.parametrize(
    ("sent", "error"),
    [
        (b"garbage\n", "must be a line of JSON"),
        (b"\xff\xfe\x00", "must be a line of JSON"),
        (b"[" * 60_000 + b"\n", "must be a line of JSON"),
        (b"[]\n", "must be an object with a command"),
        (b'{"command": 7}\n', "must be an object with a command"),
        (b'{"command": "stat"}\n', "unknown command 'stat', known ones: status"),
        (b'{"command": "os:system"}\n', "unknown command 'os:system'"),
        (b'{"command": "status", "version": 1}\n', "unknown options of the request: version"),
        (b"x" * 5_000_000, "at most 65536 bytes"),
    ],
    ids=range(9),
)
def test_garbage_is_refused_and_counted(server: StatusServer, sent: bytes, error: str) -> None:
    answer = raw(server, sent)
    assert answer["ok"] is False
    assert error in answer["error"]
    assert server.stats().refused_requests == 1
    assert ask(server.path, "status")["parts"]


def test_silent_server_ends_the_wait(sockets: Path) -> None:
    path = sockets / "other.sock"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        with pytest.raises(TimeoutError, match=r"did not answer within 0\.1 s"):
            ask(path, "status", timeout_s=0.1)


@pytest.mark.parametrize("sent", [b'{"command": ', b" "])
def test_stalling_client_is_dropped(server: StatusServer, monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr(server._server, "request_s", 0.2)
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(server.path))
        client.sendall(sent)
        assert ask(server.path, "status")["parts"]  # the slow client does not block others
        if sent == b" ":
            client.setblocking(False)
            with pytest.raises(BrokenPipeError):
                wait_until(lambda: client.send(sent) == 0)
        else:
            client.settimeout(10)
            while client.recv(1 << 10):
                pass
    assert server.stats().slow_clients == 1


def test_peer_is_known_by_user_id(server: StatusServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_module, "_peer_uid", lambda connected: os.geteuid() + 12345)
    assert "another user's" in raw(server, b'{"command": "status"}\n')["error"]
    assert server.stats().refused_peers == 1
    with pytest.raises(ValueError, match="is served by user"):
        ask(server.path, "status")


def test_served_path_is_refused_dead_replaced(
    server: StatusServer, manager: CPUOffloadingManager, sockets: Path
) -> None:
    with pytest.raises(OSError, match="is served by another process"):
        StatusServer(Telemetry(manager), server.path)
    dead = sockets / "dead.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(dead))
    again = StatusServer(Telemetry(manager), dead)
    assert ask(dead, "status")["parts"]
    again.close()
    assert not dead.exists()


def test_socket_of_another_kind_stays(manager: CPUOffloadingManager, sockets: Path) -> None:
    path = sockets / "log.sock"
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as peer,
    ):
        other.bind(str(path))
        with pytest.raises(OSError, match="is served by another process"):
            StatusServer(Telemetry(manager), path)
        peer.connect(str(path))
        peer.send(b"x")
        assert other.recv(1) == b"x"


def test_simultaneous_servers_leave_one_serving(manager: CPUOffloadingManager, sockets: Path) -> None:
    path = sockets / "s.sock"

    def begin(start: threading.Barrier, engine: str) -> StatusServer | OSError:
        start.wait()
        try:
            return StatusServer(Telemetry(manager, labels={"engine": engine}), path)
        except OSError as error:
            return error

    with ThreadPoolExecutor(4) as pool:
        for _ in range(20):
            with socket.socket(socket.AF_UNIX) as left:
                left.bind(str(path))
            begun = [*pool.map(begin, repeat(threading.Barrier(4)), "abcd")]
            [server] = [one for one in begun if isinstance(one, StatusServer)]
            assert ask(path, "status")["labels"]["engine"] == server.telemetry.labels["engine"]
            server.close()
            assert not path.exists()


FORKING_ENGINE = """
import os, signal, sys
from kvcache import CPUOffloadingManager
from kvcache.control.telemetry import Telemetry
from kvcache.exporters.status import StatusServer

server = StatusServer(Telemetry(CPUOffloadingManager(16, 8)), sys.argv[1])
signal.alarm(120)
child = os.fork()
if child:
    print(child, flush=True)
signal.pause()
"""


def test_forked_child_keeps_no_socket(manager: CPUOffloadingManager, sockets: Path) -> None:
    path = sockets / "s.sock"
    command = [sys.executable, "-W", "ignore", "-c", FORKING_ENGINE, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as engine:
        assert engine.stdout is not None
        child = int(engine.stdout.readline())
        try:
            assert ask(path, "status")["parts"]
            engine.kill()
            engine.wait()
            with pytest.raises(OSError, match=f"{path}: Connection refused"):
                ask(path, "status")
            StatusServer(Telemetry(manager), path).close()
        finally:
            os.kill(child, signal.SIGKILL)


def test_unfit_path_raises_untouched(manager: CPUOffloadingManager, sockets: Path) -> None:
    precious = sockets / "precious"
    precious.write_text("data")
    for path, mode, message in (
        (precious, 0o700, "is no socket"),
        (sockets / "s.sock", 0o755, r"must be this user's alone \(chmod 700\)"),
        (sockets / ("x" * 107), 0o700, "at most 107 bytes"),
    ):
        sockets.chmod(mode)
        with pytest.raises(ValueError, match=message):
            StatusServer(Telemetry(manager), path)
    assert [path.name for path in sockets.iterdir()] == ["precious"]
    assert precious.read_text() == "data"


def test_default_folder_lists_who_answers(manager: CPUOffloadingManager, sockets: Path) -> None:
    assert live_sockets() == []
    server = StatusServer(Telemetry(manager))
    assert server.path.parent.stat().st_mode & 0o777 == 0o700
    assert live_sockets() == [server.path]
    server.close()
    server.close()
    assert live_sockets() == []


@dataclass(frozen=True)
class CountingOptions(Options):
    n: int = option(parse_count, when="always")


class Counting(Command):
    """A third party's command."""

    options = CountingOptions
    closed = 0

    def run(self, **options: Any) -> Any:
        if options["n"] == 13:
            raise RuntimeError("a fault")
        return options["n"] + 1

    def close(self) -> None:
        type(self).closed += 1


def test_command_is_one_class_one_line(
    server: StatusServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(COMMANDS, "_paths", {**COMMANDS._paths})
    COMMANDS.register("count", f"{__name__}:Counting")
    monkeypatch.setattr(COMMANDS, "resolve", lambda name: Counting)
    assert ask(server.path, "count", n="10k") == 10_001
    with pytest.raises(ValueError, match="n in the request must be a whole number"):
        ask(server.path, "count", n=0)
    with pytest.raises(ValueError, match="count: the request failed: RuntimeError"):
        ask(server.path, "count", n=13)
    server.close()
    assert Counting.closed == 1
