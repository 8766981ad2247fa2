"""A Valkey or Redis server on loopback, for tests and benchmarks."""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_START_S = 30.0


def find_valkey() -> str | None:
    """Return the path of an installed Valkey or else Redis server, or None."""
    return shutil.which("valkey-server") or shutil.which("redis-server")


def free_port() -> int:
    """Return a loopback port that no process listens on; another process may take it at any time."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def wait_for_port(port: int, has_ended: Callable[[], bool] = lambda: False) -> None:
    """Wait until a process listens on a loopback port.

    Raise OSError after half a minute, or as soon as `has_ended` returns True.
    """
    end_s = time.monotonic() + _START_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            if has_ended() or time.monotonic() > end_s:
                raise
            time.sleep(0.02)


class ValkeyServer:
    """A server without persistence that is started, killed and started again on one port.

    Raises OSError if no server is installed or it does not start.
    """

    def __init__(self, folder: Path | str, *options: str) -> None:
        binary = find_valkey()
        if binary is None:
            raise FileNotFoundError("no valkey-server or redis-server is installed")
        self.port = free_port()
        self.url = f"valkey://127.0.0.1:{self.port}"
        self._command = [binary, "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(folder)]
        self._command += ["--save", "", "--appendonly", "no", *options]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        process = self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            wait_for_port(self.port, lambda: process.poll() is not None)
        except OSError:
            raise OSError(f"{Path(self._command[0]).name} did not start") from None

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@contextmanager
def running_valkey(*options: str) -> Iterator[int]:
    """Run a `ValkeyServer` and yield its loopback port; stop it at the end."""
    with tempfile.TemporaryDirectory() as folder:
        server = ValkeyServer(folder, *options)
        try:
            server.start()
            yield server.port
        finally:
            server.kill()
