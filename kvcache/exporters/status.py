"""The status socket: a running engine answers requests of its own user on this machine.

A unix socket that only its owner reaches: in a folder of mode 0700, itself of mode 0600, and with the peer's user id
checked. One request a connection: a line of JSON, ``{"command": "status"}``, answered by a line,
``{"ok": true, "result": ...}`` or ``{"ok": false, "error": "..."}``. Requests that are invalid, too long or too slow
are refused and counted. Nothing here runs in the scheduler's thread.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import select
import socket
import stat
import struct
import tempfile
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from kvcache.control.telemetry import Command, Exporter
from kvcache.exporters.commands import run_command
from kvcache.metrics import Part, counter
from kvcache.options import Options, option, parse_text
from kvcache.registry import COMMANDS
from kvcache.transfer.shared_file import private_folder

if TYPE_CHECKING:
    from kvcache.control.telemetry import Telemetry

_LOG = logging.getLogger(__name__)
MAX_REQUEST_BYTES = 64 << 10
MAX_ANSWER_BYTES = 64 << 20
MAX_CLIENTS = 8
RECEIVE_S = 2.0
SEND_S = 5.0
_CLOSE_S = 2.0
_LOCK_S = 5.0
_MAX_PATH_BYTES = 107  # sun_path, without its closing zero
_PEER = struct.Struct("3i")


@dataclass(frozen=True)
class StatusOptions(Options):
    """The options of a `StatusServer`."""

    where: ClassVar[str] = "exporter 'status'"

    path: str | None = option(parse_text, None, when="the socket must lie in a known place")


@dataclass(frozen=True, slots=True)
class StatusStats:
    """Counters of a status server.

    Parameters
    ----------
    requests, refused_requests, refused_peers, slow_clients : int
        Counters.
    """

    requests: int = counter("requests", "Requests on the status socket that were answered.")
    refused_requests: int = counter("requests", "Requests on the status socket that were refused: garbage, too long.")
    refused_peers: int = counter("connections", "Connections refused: of another user, or too many at a time.")
    slow_clients: int = counter("connections", "Connections closed because the client stood still.")


def default_folder() -> Path:
    """Return this user's own folder for status sockets, made if it is missing.

    Raises
    ------
    ValueError
        The folder belongs to, or is open to, another user.
    """
    return private_folder(Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()))


def live_sockets() -> list[Path]:
    """Return the sockets in the default folder that an engine serves, by name; remove those of ended processes."""
    found = []
    for path in sorted(default_folder().glob("status-*.sock")):
        if _is_served(path):
            found.append(path)
        elif not Path("/proc", path.stem.removeprefix("status-")).exists():
            path.unlink(missing_ok=True)
    return found


def ask(path: str | Path, command: str, timeout_s: float = 10.0, **options: Any) -> Any:
    """Send a request to a status socket and return the answer.

    Parameters
    ----------
    path : str or Path
        The socket.
    command : str
        A name of `COMMANDS`.
    timeout_s : float
        How long to wait.
    **options
        Of the command.

    Raises
    ------
    OSError
        There is no answer, or none in time.
    ValueError
        The path is not a socket of this user, the answer is not an engine's, or the request was refused. The message
        names the path and the reason.
    """
    _check_ours(Path(path))
    request = json.dumps({"command": command, **options}).encode() + b"\n"
    end_s = time.monotonic() + timeout_s
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(timeout_s)
        try:
            _connect(client, path, end_s)
            peer_uid = _peer_uid(client)
            if peer_uid in (os.geteuid(), 0):
                # The server may have refused the connection already: its answer has the reason.
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    client.sendall(request)
                answer = _receive_line(client, MAX_ANSWER_BYTES, end_s)
        except TimeoutError as error:
            raise TimeoutError(f"{path} did not answer within {timeout_s:g} s") from error
        except ConnectionRefusedError as error:
            raise OSError(error.errno, f"{path}: nobody listens there: {error.strerror}") from error
        except OSError as error:
            raise OSError(error.errno, f"{path}: {error.strerror or error}") from error
        except ValueError as error:
            raise ValueError(f"{path} gave no answer of a kvcache engine: {error}") from error
    if peer_uid not in (os.geteuid(), 0):
        raise ValueError(f"{path} is served by user {peer_uid}")
    try:
        found = json.loads(answer)
        is_ok, text = found["ok"], "" if found["ok"] is True else found["error"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"{path} gave no answer of a kvcache engine: {answer[:100]!r}") from error
    if is_ok is not True:
        raise ValueError(f"{path}: {command}: {text!s:.1000}")
    return found.get("result")


class StatusServer(Exporter):
    """Answer questions on a unix socket.

    Parameters
    ----------
    telemetry : Telemetry
        Of the engine; the server's own counters are added to its sources.
    path : str or Path, optional
        The socket, in a folder that only this user may enter; left out: ``status-<pid>.sock`` in `default_folder`.

    Raises
    ------
    ValueError
        The path is too long, is not a socket, or other users may enter its folder.
    OSError
        Another process serves this path, or the socket cannot be made.
    """

    def __init__(self, telemetry: Telemetry, path: str | Path | None = None) -> None:
        self.path = default_folder() / f"status-{os.getpid()}.sock" if path is None else Path(path).absolute()
        if len(os.fsencode(self.path)) > _MAX_PATH_BYTES:
            raise ValueError(f"the path of a socket must have at most {_MAX_PATH_BYTES} bytes, got {self.path}")
        self.telemetry = telemetry
        self._stats = StatusStats()
        self._commands: dict[str, Command] = {}
        self._lock = threading.Lock()
        self._clients: set[threading.Thread] = set()
        self._owner = os.getpid()
        self._is_closed = False
        self._listener = _listen(self.path)
        self._file = self.path.lstat().st_ino
        self._wake, self._woken = os.pipe()
        telemetry.sources.append(self._parts)
        self._thread = threading.Thread(target=self._serve, name="kvcache-status", daemon=True)
        self._thread.start()
        _SERVERS.add(self)

    options_type = StatusOptions

    @classmethod
    def unavailable_reason(cls, options: Mapping[str, Any]) -> str:
        path = StatusOptions.read(options).path
        if path is None or not Path(path).exists():
            return ""
        try:
            _check_ours(Path(path))
        except (OSError, ValueError) as error:
            return str(error)
        return f"{path} is served by another process" if _is_served(Path(path)) else ""

    @classmethod
    def from_config(cls, options: Mapping[str, Any], telemetry: Telemetry) -> StatusServer:
        return cls(telemetry, StatusOptions.read(options).path)

    @property
    def address(self) -> str:
        return str(self.path)

    def stats(self) -> StatusStats:
        """Return counters since start."""
        return self._stats

    def close(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self.telemetry.sources.remove(self._parts)
        if self._owner != os.getpid():
            return  # a forked child owns neither the socket nor the threads
        os.write(self._woken, b"x")
        self._thread.join(_CLOSE_S)
        with contextlib.suppress(OSError):
            # While the listener is open no other file has its number.
            if self.path.lstat().st_ino == self._file:
                self.path.unlink()
        self._listener.close()
        end_s = time.monotonic() + _CLOSE_S
        for client in [*self._clients]:
            client.join(max(0.0, end_s - time.monotonic()))
        for command in self._commands.values():
            try:
                command.close()
            except Exception:
                _LOG.exception("a command of the status socket did not close")

    def leave_to_parent(self) -> None:
        """Close the socket in a forked child, which must not keep it open after its engine has ended."""
        self._listener.close()

    def _parts(self) -> Iterable[Part]:
        return [Part("status", self._stats)]

    def _count(self, name: str) -> None:
        with self._lock:
            self._stats = replace(self._stats, **{name: getattr(self._stats, name) + 1})

    def _serve(self) -> None:
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        while True:
            events = dict(poll.poll())
            if self._wake in events:
                os.close(self._wake)
                os.close(self._woken)
                return
            try:
                client, _ = self._listener.accept()
            except OSError:
                time.sleep(0.1)  # out of descriptors, say: the engine needs them more
                continue
            self._admit(client)

    def _admit(self, client: socket.socket) -> None:
        try:
            if _peer_uid(client) not in (os.geteuid(), 0):
                raise PermissionError("the socket is another user's")
            with self._lock:
                if len(self._clients) >= MAX_CLIENTS:
                    raise PermissionError(f"{MAX_CLIENTS} requests are being answered, try again")
                thread = threading.Thread(target=self._talk, args=(client,), name="kvcache-status-client", daemon=True)
                self._clients.add(thread)
            try:
                thread.start()
            except RuntimeError:
                with self._lock:
                    self._clients.discard(thread)
                raise
        except (OSError, RuntimeError) as error:
            self._count("refused_peers")
            _refuse(client, str(error))

    def _talk(self, client: socket.socket) -> None:
        try:
            self._answer(client)
        except TimeoutError:
            self._count("slow_clients")
        except OSError:
            self._count("refused_requests")  # it left before it was answered
        finally:
            client.close()
            with self._lock:
                self._clients.discard(threading.current_thread())

    def _answer(self, client: socket.socket) -> None:
        client.settimeout(RECEIVE_S)
        if not client.recv(1, socket.MSG_PEEK):
            return  # the client only checked that the path is served, as `live_sockets` does
        try:
            line = _receive_line(client, MAX_REQUEST_BYTES, time.monotonic() + RECEIVE_S)
            result = self._run(line)
            answer = json.dumps({"ok": True, "result": result}, allow_nan=False).encode() + b"\n"
        except TimeoutError:
            raise
        except (ValueError, OSError, RecursionError) as error:
            self._count("refused_requests")
            _refuse(client, str(error) or type(error).__name__)
            return
        except Exception as error:
            _LOG.exception("a request on the status socket failed")
            _refuse(client, f"the request failed: {type(error).__name__}: {error}")
            return
        client.settimeout(SEND_S)
        client.sendall(answer)
        self._count("requests")

    def _run(self, line: bytes) -> Any:
        try:
            request = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"a request must be a line of JSON, got {line[:100]!r}") from error
        name = request.pop("command", None) if isinstance(request, dict) else None
        if not isinstance(name, str):
            raise ValueError(f"a request must be an object with a command, got {line[:100]!r}")
        return run_command(self._command(name), request)

    def _command(self, name: str) -> Command:
        if name not in COMMANDS.names():  # no path to a class of the client's choice
            raise ValueError(f"unknown command {name[:100]!r}, known ones: {', '.join(COMMANDS.names())}")
        with self._lock:
            found = self._commands.get(name)
            if found is None:
                if self._is_closed:
                    raise ValueError("the engine is shutting down")
                chosen = COMMANDS.resolve(name)
                if not issubclass(chosen, Command):
                    raise ValueError(f"command {name!r} must be a Command, got {chosen!r}")
                found = self._commands[name] = chosen(self.telemetry)
        return found


_SERVERS: weakref.WeakSet[StatusServer] = weakref.WeakSet()


def _leave_all_to_parent() -> None:
    for server in [*_SERVERS]:
        server.leave_to_parent()


os.register_at_fork(after_in_child=_leave_all_to_parent)


def _listen(path: Path) -> socket.socket:
    """Return a listening socket at `path`; a socket that no process serves is replaced."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    folder = path.parent.stat()
    if folder.st_uid not in (os.geteuid(), 0) or (folder.st_uid == os.geteuid() and folder.st_mode & 0o077):
        mode = oct(folder.st_mode & 0o777)
        raise ValueError(
            f"the folder of a status socket must be this user's alone (chmod 700), {path.parent} has owner "
            f"{folder.st_uid} and mode {mode}"
        )
    with _locked(path.parent):
        if path.is_symlink() or path.exists():
            if not stat.S_ISSOCK(path.lstat().st_mode):
                raise ValueError(f"{path} is no socket, and is left alone")
            _check_ours(path)
            if _is_served(path):
                raise OSError(f"{path} is served by another process")
            path.unlink()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(str(path))
            path.chmod(0o600)
            listener.listen(2 * MAX_CLIENTS)
            listener.setblocking(False)
        except OSError as error:
            listener.close()
            raise OSError(error.errno, f"{path} cannot be opened: {error.strerror}") from error
    return listener


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a lock while a dead socket is replaced: two processes would remove each other's."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        end_s = time.monotonic() + _LOCK_S
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() >= end_s:
                    raise OSError(f"{folder} has been locked by another process for {_LOCK_S:g} s") from error
                time.sleep(0.01)
        yield
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)  # a child that is being forked has the same open file
        os.close(fd)


def _check_ours(path: Path) -> None:
    try:
        found = path.lstat()
    except OSError as error:
        raise OSError(error.errno, f"{path}: {error.strerror}") from error
    if not stat.S_ISSOCK(found.st_mode):
        raise ValueError(f"{path} is no socket")
    if found.st_uid != os.geteuid() and os.geteuid() != 0:
        raise ValueError(f"{path} is a socket of user {found.st_uid}, not of {os.geteuid()}")


def _is_served(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(1.0)
        try:
            client.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            return True  # its queue is full, or it is a socket of another kind: it is in use
        return True


def _connect(client: socket.socket, path: str | Path, end_s: float) -> None:
    """Connect; wait while the server's queue is full."""
    while True:
        try:
            client.connect(str(path))
            return
        except BlockingIOError as error:
            if time.monotonic() >= end_s:
                raise TimeoutError(str(error)) from error
            time.sleep(0.01)


def _peer_uid(connected: socket.socket) -> int:
    return int(_PEER.unpack(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))[1])


def _receive_line(connected: socket.socket, max_bytes: int, end_s: float) -> bytes:
    """Return the bytes before the first newline or the end; raise ValueError if they are too many."""
    parts: list[bytes] = []
    num_bytes = 0
    while True:
        connected.settimeout(max(0.001, end_s - time.monotonic()))
        part = connected.recv(64 << 10)
        line, newline, _ = part.partition(b"\n")
        parts.append(line)
        num_bytes += len(line)
        if num_bytes > max_bytes:
            raise ValueError(f"a line must have at most {max_bytes} bytes")
        if newline or not part:
            return b"".join(parts)
        if time.monotonic() >= end_s:
            raise TimeoutError("the other side is too slow")


def _refuse(client: socket.socket, text: str) -> None:
    with contextlib.suppress(OSError), client:
        client.settimeout(0.2)
        client.sendall(json.dumps({"ok": False, "error": text}).encode() + b"\n")
