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


@contextmanager
def running_valkey(*options: str) -> Iterator[int]:
    """Run a server without persistence and yield its loopback port; stop it at the end.

    Raise OSError if no server is installed or it does not start.
    """
    binary = find_valkey()
    if binary is None:
        raise FileNotFoundError("no valkey-server or redis-server is installed")
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        command = [binary, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", folder, *options]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            try:
                wait_for_port(port, lambda: process.poll() is not None)
            except OSError:
                raise OSError(f"{Path(binary).name} did not start") from None
            yield port
        finally:
            process.terminate()
            process.wait()
