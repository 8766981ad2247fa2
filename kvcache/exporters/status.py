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
import socket
import stat
import struct
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from kvcache.control.telemetry import Command, Exporter
from kvcache.exporters.local_server import LocalServer
from kvcache.metrics import Part, counter
from kvcache.options import Options, option, parse_text
from kvcache.registry import COMMANDS
from kvcache.transfer.shared_file import private_folder

if TYPE_CHECKING:
    from kvcache.control.telemetry import Telemetry

_LOG = logging.getLogger(__name__)
MAX_REQUEST_BYTES = 64 << 10
MAX_ANSWER_BYTES = 64 << 20
_MAX_CLIENTS = 8
_MAX_PATH_BYTES = 107  # sun_path, without its closing zero
_PEER = struct.Struct("3i")


@dataclass(frozen=True)
class StatusOptions(Options):
    """The options of a `StatusServer`."""

    where: ClassVar[str] = "exporter 'status'"

    path: str | None = option(parse_text, None, when="the socket must lie in a known place")


@dataclass(frozen=True, slots=True)
class StatusStats:
    """Counters of a status server."""

    requests: int = counter("requests", "Requests on the status socket that were answered.")
    refused_requests: int = counter("requests", "Requests on the status socket that were refused: garbage, too long.")
    refused_peers: int = counter("connections", "Connections refused: they belong to another user.")
    slow_clients: int = counter("connections", "Connections closed: too slow, or the oldest of too many.")


def default_folder() -> Path:
    """Return this user's own folder for status sockets, made if missing; ValueError if other users may enter it."""
    return private_folder(Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()))


def live_sockets() -> list[Path]:
    """Return the sockets in the default folder that an engine serves, by name; remove those of ended processes."""
    sockets = []
    for path in sorted(default_folder().glob("status-*.sock")):
        if _is_served(path):
            sockets.append(path)
        elif not Path("/proc", path.stem.removeprefix("status-")).exists():
            path.unlink(missing_ok=True)
    return sockets


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
    _check_socket(Path(path))
    request = json.dumps({"command": command, **options}).encode() + b"\n"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(timeout_s)
        try:
            client.connect(str(path))
            peer_uid = _peer_uid(client)
            if peer_uid not in (os.geteuid(), 0):
                raise ValueError(f"{path} is served by user {peer_uid}")
            # The server may have refused the connection already: its answer has the reason.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                client.sendall(request)
            with client.makefile("rb") as lines:
                answer = lines.readline(MAX_ANSWER_BYTES + 1)
        except TimeoutError as error:
            raise TimeoutError(f"{path} did not answer within {timeout_s:g} s") from error
        except OSError as error:
            raise OSError(error.errno, f"{path}: {error.strerror or error}") from error
    try:
        document = json.loads(answer)
        is_ok, text = document["ok"], "" if document["ok"] is True else document["error"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"{path} gave no answer of a kvcache engine: {answer[:100]!r}") from error
    if is_ok is not True:
        raise ValueError(f"{path}: {command}: {text!s:.1000}")
    return document.get("result")


def name_next_version(version: str | int | None, paths: Iterable[str | Path] | None = None) -> list[Path]:
    """Name the weights in force after the next reset of some engines, and return the sockets of these engines.

    Parameters
    ----------
    version : str, int or None
        The name. Engines whose weights have the same name share blocks. None: the name is withdrawn, because the update
        of the weights failed.
    paths : iterable of str or Path, optional
        Status sockets; None: those of all engines of this user in the default folder.

    Raises
    ------
    OSError, ValueError
        An engine does not answer, or refuses; see `ask`. The name is withdrawn from all engines: a later reset that is
        meant for other weights would use it.
    """
    sockets = live_sockets() if paths is None else [Path(path) for path in paths]
    for number, path in enumerate(sockets, 1):
        try:
            ask(path, "next_version", version=version)
        except BaseException:
            # This one may have the name, too: its answer may have been late.
            for named in sockets[:number]:
                with contextlib.suppress(OSError, ValueError):
                    ask(named, "next_version")
            raise
    return sockets


def send_hints(hints: Mapping[str, Any], paths: Iterable[str | Path] | None = None) -> list[list[str]]:
    """Send hints that belong to no request to some engines; return each one's answers, "" for a missing one.

    `hints` is an envelope or its short form; `paths` are as in `name_next_version`. OSError, ValueError: as in `ask`.
    """
    sockets = live_sockets() if paths is None else paths
    return [ask(path, "hints", hints=hints)["answers"] for path in sockets]


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

    options_type = StatusOptions

    def __init__(self, telemetry: Telemetry, path: str | Path | None = None) -> None:
        self.path = default_folder() / f"status-{os.getpid()}.sock" if path is None else Path(path).absolute()
        if len(os.fsencode(self.path)) > _MAX_PATH_BYTES:
            raise ValueError(f"the path of a socket must have at most {_MAX_PATH_BYTES} bytes, got {self.path}")
        self.telemetry = telemetry
        self._commands: dict[str, Command] = {}
        self._lock = threading.Lock()
        self._counts = Counter[str]()
        self._server = _listen(self.path, self._answer)
        self._file = self.path.lstat().st_ino
        self._server.start("status")
        telemetry.sources.append(self._parts)

    @classmethod
    def unavailable_reason(cls, options: StatusOptions) -> str:
        path = options.path
        if path is None or not Path(path).exists():
            return ""
        try:
            _check_socket(Path(path))
        except (OSError, ValueError) as error:
            return str(error)
        return f"{path} is served by another process" if _is_served(Path(path)) else ""

    @property
    def address(self) -> str:
        return str(self.path)

    def stats(self) -> StatusStats:
        """Return counters since start."""
        return StatusStats(**self._counts, slow_clients=self._server.num_dropped)

    def close(self) -> None:
        if self._parts not in self.telemetry.sources:
            return
        self.telemetry.sources.remove(self._parts)
        if self._server.is_serving:  # a forked child owns neither the socket nor the threads
            with contextlib.suppress(OSError):
                # While the socket is open no other file has its number.
                if self.path.lstat().st_ino == self._file:
                    self.path.unlink()
            self._server.stop()
            for command in self._commands.values():
                try:
                    command.close()
                except Exception:
                    _LOG.exception("a command of the status socket did not close")

    def _parts(self) -> Iterable[Part]:
        return [Part("status", self.stats())]

    def _answer(self, client: socket.socket, address: object) -> None:
        """Answer a line of JSON with a line of JSON."""
        if _peer_uid(client) not in (os.geteuid(), 0):
            self._count("refused_peers")
            client.sendall(_refusal("the socket is another user's"))
            return
        with client.makefile("rb") as lines:
            line = lines.readline(MAX_REQUEST_BYTES + 1)
        if not line:
            return  # the client only checked that the path is served, as `live_sockets` does
        try:
            if len(line) > MAX_REQUEST_BYTES:
                raise ValueError(f"a request must have at most {MAX_REQUEST_BYTES} bytes")
            answer = json.dumps({"ok": True, "result": self._run(line)}, allow_nan=False).encode() + b"\n"
            self._count("requests")
        except (ValueError, OSError, RecursionError) as error:
            self._count("refused_requests")
            answer = _refusal(str(error) or type(error).__name__)
        except Exception as error:
            _LOG.exception("a request on the status socket failed")
            answer = _refusal(f"the request failed: {type(error).__name__}: {error}")
        client.sendall(answer)

    def _count(self, name: str) -> None:
        with self._lock:
            self._counts[name] += 1

    def _run(self, line: bytes) -> Any:
        try:
            request = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"a request must be a line of JSON, got {line[:100]!r}") from error
        name = request.pop("command", None) if isinstance(request, dict) else None
        if not isinstance(name, str):
            raise ValueError(f"a request must be an object with a command, got {line[:100]!r}")
        command = self._command(name)
        arguments = command.options.parse(request, "the request").arguments()
        return command.run(**{name: value for name, value in arguments.items() if value is not None})

    def _command(self, name: str) -> Command:
        if name not in COMMANDS.names():  # no path to a class of the client's choice
            raise ValueError(f"unknown command {name[:100]!r}, known ones: {', '.join(COMMANDS.names())}")
        with self._lock:
            command = self._commands.get(name)
            if command is None:
                command = self._commands[name] = COMMANDS.resolve(name)(self.telemetry)
        return command


def _refusal(text: str) -> bytes:
    return json.dumps({"ok": False, "error": text}).encode() + b"\n"


def _listen(path: Path, answer: Callable[[socket.socket, object], None]) -> LocalServer:
    """Return a server at `path`; a socket that no process serves is replaced."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    folder = path.parent.stat()
    if folder.st_uid not in (os.geteuid(), 0) or (folder.st_uid == os.geteuid() and folder.st_mode & 0o077):
        mode = oct(folder.st_mode & 0o777)
        raise ValueError(
            f"the folder of a status socket must be this user's alone (chmod 700), {path.parent} has owner "
            f"{folder.st_uid} and mode {mode}"
        )
    fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)  # two processes would remove each other's socket
        if path.is_symlink() or path.exists():
            _check_socket(path)
            if _is_served(path):
                raise OSError(f"{path} is served by another process")
            path.unlink()
        server = LocalServer(socket.AF_UNIX, str(path), answer, _MAX_CLIENTS)
        path.chmod(0o600)
        return server
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)  # a child that is being forked has the same open file
        os.close(fd)


def _check_socket(path: Path) -> None:
    try:
        status = path.lstat()
    except OSError as error:
        raise OSError(error.errno, f"{path}: {error.strerror}") from error
    if not stat.S_ISSOCK(status.st_mode):
        raise ValueError(f"{path} is no socket")


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


def _peer_uid(connected: socket.socket) -> int:
    return int(_PEER.unpack(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))[1])
