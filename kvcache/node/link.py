"""A client's connection to the owner of its pool.

A client waits for an owner for a bounded time only: its scheduler serves requests without the pool, too.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from contextlib import suppress
from enum import Enum, auto
from pathlib import Path
from typing import Any

from kvcache.background import python_words
from kvcache.node import protocol
from kvcache.node.protocol import Frame, FrameReader, pack
from kvcache.tiers.base.log_limiter import LogLimiter

_LOG = logging.getLogger(__name__)
_START_TIMEOUT_S = 600.0
"""How long an engine waits at its start, while the owner allocates the memory."""
_SPAWN_TIMEOUT_S = 30.0
_SEND_S, ANSWER_S = 0.01, 0.035
_RESTART_S = 2.0
_STABLE_S = 60.0
"""How long an owner must have answered before this is logged: the next outage is logged then, too."""
_MAX_UNSENT_BYTES = 4 << 20
_OWN_FAULTS = (errno.EMFILE, errno.ENFILE, errno.EACCES, errno.EPERM)


class State(Enum):
    """State of a connection to the owner, as the client knows it."""

    CLOSED = auto()
    """There is no connection."""
    GREETED = auto()
    """The greeting is sent, or a part of it. The owner has not answered it."""
    READY = auto()
    """The owner has welcomed the client, and has answered every message that needs an answer."""
    LATE = auto()
    """As READY, but late answers are outstanding. Until they arrive, no message that needs an answer is sent."""


class Link:
    """A connection to the owner of a folder's pool. `hello` identifies the client.

    Messages without an answer wait for the next one with an answer, or for `flush`. A call waits for an answer for at
    most `patience_s`. If the answer is late, the connection stays, because the machine may just be busy; until the late
    answers have arrived, no message is sent that needs one. With `starts_owner`, a missing owner is started.
    """

    def __init__(
        self, folder: Path, hello: dict[str, Any], starts_owner: bool = True, patience_s: float = ANSWER_S
    ) -> None:
        self.folder, self.hello, self.starts_owner = folder, hello, starts_owner
        self._patience_s = patience_s
        self._sock: socket.socket | None = None
        self._reader = FrameReader()
        self.state = State.CLOSED
        """The state at the last call; `poll` updates it."""
        self._unsent: list[bytes] = []
        self._num_unsent_bytes = 0
        # Number of late answers. The owner answers in order, so these arrive before any other.
        self._num_late = 0
        # When to greet an owner again, and when to start one again.
        self.retry_s = self._restart_s = 0.0
        self.counts = {"round_trips": 0, "outages": 0, "shared_hit_blocks": 0}
        self.fault: OSError | None = None
        """Why the last greeting failed."""
        self._warnings = LogLimiter(_LOG)
        # When the last outage was, until the end of it is logged.
        self._outage_s: float | None = None

    @property
    def is_ready(self) -> bool:
        """Whether the owner has welcomed the client."""
        return self.state in (State.READY, State.LATE)

    def poll(self) -> State:
        """Receive the late answers that have arrived, and return the state. Close if the owner has ended."""
        while self.state is State.LATE:
            try:
                frame = self.receive()
            except OSError as error:
                self.lose(error)
                break
            if frame is None:
                break
            self._num_late -= 1
            if not self._num_late:
                self.state = State.READY
        return self.state

    @property
    def has_answered(self) -> bool:
        """Whether `poll` would find an answer, or no answer is outstanding. Receives nothing: any thread may call."""
        sock, state = self._sock, self.state
        if sock is None or state is not State.LATE:
            return state is State.READY
        with suppress(OSError):
            return bool(sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        return False

    def tell(self, op: int, flag: int, request: int, payload: bytes = b"", key_bytes: int = 0) -> None:
        """Queue a message without an answer. Without a connection, drop it: the next greeting lists the leases."""
        if self.state is State.CLOSED:
            return
        self._unsent.append(frame := pack(op, flag, request, payload, key_bytes))
        self._num_unsent_bytes += len(frame)
        if self._num_unsent_bytes > _MAX_UNSENT_BYTES:
            self.flush()
            if self._num_unsent_bytes > _MAX_UNSENT_BYTES:
                # Messages for a stopped owner must not fill memory. The next greeting lists the leases instead.
                self.close()

    def ask(self, op: int, flag: int, request: int, payload: bytes = b"", key_bytes: int = 0) -> Frame | None:
        """Send a message, and return its answer, or None if the owner does not answer in time."""
        self.counts["round_trips"] += 1
        if self.poll() is not State.READY:
            return None
        self._unsent.append(pack(op, flag, request, payload, key_bytes))
        try:
            self._send()
            # An owner that does not take the question in time is late, too.
            frame = None if self._unsent else self.receive(self._patience_s)
        except OSError as error:
            self.lose(error)
            return None
        if frame is None:
            self._num_late, self.state = self._num_late + 1, State.LATE
            self._report(f"answers later than {self._patience_s * 1e3:.0f} ms")
            # The engine takes the answer for a refused store, and may make no later call: the owner frees the slots.
            self.tell(protocol.LATE, op == protocol.OFFER, request)
        return frame

    def flush(self) -> None:
        """Send the queued messages, also if an answer is late: as much as the socket takes."""
        is_answering = self.poll() is State.READY
        if is_answering and self._outage_s is not None and time.monotonic() >= self._outage_s + _STABLE_S:
            self._outage_s = None
            _LOG.info("the owner of %s answers again, for %.0f s now", self.folder, _STABLE_S)
        if self._unsent and self.is_ready:
            try:
                self._send()
            except OSError as error:
                self.lose(error)

    def check(self) -> None:
        """Notice that the owner has ended, also without a message to it."""
        if self.state is State.READY:
            try:
                self.receive()
            except OSError as error:
                self.lose(error)

    def _send(self) -> None:
        """Send what the socket takes in `_SEND_S`; to a late owner without waiting, because its socket may be full."""
        assert self._sock is not None
        data = b"".join(self._unsent)
        self._unsent.clear()
        rest = _send_some(self._sock, data, 0.0 if self.state is State.LATE else _SEND_S)
        self._unsent += [rest] if rest else []
        self._num_unsent_bytes = len(rest)

    def lose(self, error: OSError) -> None:
        """Continue without the owner. The leases stay: the ledger has them."""
        self._report(f"does not answer ({error!r}): look-ups miss until it does")
        self.close()

    def _report(self, fault: str) -> None:
        self.counts["outages"] += 1
        self.hello["outages"] = self.counts["outages"]
        self._outage_s = time.monotonic()
        self._warnings.warn("owner", "the owner of %s %s", self.folder, fault)

    def greet(self, leases: list[tuple[int, list[int], list[int]]]) -> None:
        """Connect and send the greeting. OSError: no owner listens."""
        pidfd = os.pidfd_open(os.getpid())
        sock = None
        try:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            sock.setblocking(False)
            sock.connect(str(self.folder / "socket"))
            payload = json.dumps({**self.hello, "leases": leases}).encode()
            frame = pack(protocol.HELLO, 0, 0, payload)
            sent = socket.send_fds(sock, [frame], [pidfd])
            sock.setblocking(True)
        except OSError:
            if sock is not None:
                sock.close()
            raise
        finally:
            os.close(pidfd)
        self._sock, self._reader, self.state = sock, FrameReader(), State.GREETED
        self._unsent[:] = [frame[sent:]] if sent < len(frame) else []
        self._num_unsent_bytes, self._num_late = len(frame) - sent, 0

    def meet(
        self, leases: list[tuple[int, list[int], list[int]]], timeout_s: float = 0.0, starts_owner: bool = True
    ) -> Frame | None:
        """Greet the owner unless it was greeted, and return its answer, or None if it has not arrived.

        With `starts_owner`, here and of the link, a missing owner is started, unless one was a moment before.
        """
        try:
            if self.state is State.CLOSED:
                self.greet(leases)
            if self._unsent:
                # A long greeting may take several calls.
                self._send()
            frame = None if self._unsent else self.receive(timeout_s)
        except OSError as error:
            self.close()
            self.fault = error
            is_gone = isinstance(error, ConnectionRefusedError | FileNotFoundError)
            if is_gone and starts_owner and self.starts_owner and time.monotonic() >= self._restart_s:
                self._restart_s = time.monotonic() + _RESTART_S
                try:
                    spawn_owner(self.folder)
                except OSError as start_error:
                    # A machine without a free descriptor, process or byte of /dev/shm may have one later.
                    self.fault = start_error
                    self._warnings.warn("start", "no owner of %s can be started: %r", self.folder, start_error)
            return None
        if frame is not None:
            if frame.op == protocol.REFUSED:
                self.close()
            else:
                self.state = State.READY
        return frame

    def receive(self, timeout_s: float = 0.0) -> Frame | None:
        """Return the next frame, or None if it has not arrived. OSError: the owner has ended."""
        assert self._sock is not None
        end_s = time.monotonic() + timeout_s
        data = b""  # the reader may hold the next frame already
        while True:
            for frame in self._reader.feed(data):
                return frame
            # After a part of an answer, wait for the rest only as long as is left.
            left_s = end_s - time.monotonic()
            if left_s > 0:
                # The kernel reads 0 as no limit.
                whole_s, part_us = divmod(max(1, int(left_s * 1e6)), 10**6)
                limit = struct.pack("@ll", whole_s, part_us)
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            try:
                data = self._sock.recv(1 << 16, 0 if left_s > 0 else socket.MSG_DONTWAIT)
            except BlockingIOError:
                return None
            if not data:
                raise ConnectionResetError("the owner has ended")

    def close(self) -> None:
        """Close the connection; the owner keeps the leases."""
        if self._sock is not None:
            self._sock.close()
        self._sock, self.state = None, State.CLOSED


def _send_some(sock: socket.socket, data: bytes, timeout_s: float) -> bytes:
    """Send what the socket takes within `timeout_s`, and return the rest."""
    end_s, left = time.monotonic() + timeout_s, memoryview(data)
    while left:
        try:
            left = left[sock.send(left, socket.MSG_DONTWAIT) :]
        except BlockingIOError:
            # SO_SNDTIMEO would limit each wait only, and a slow owner would make many of them.
            left_ms = (end_s - time.monotonic()) * 1e3
            if left_ms <= 0:
                break
            poll = select.poll()
            poll.register(sock, select.POLLOUT)
            poll.poll(left_ms)
    return bytes(left)


def ask_owner(folder: Path) -> dict[str, Any]:
    """Return the figures and the options of the owner that serves a folder, without joining it; {}: none answers."""
    with socket.socket(socket.AF_UNIX) as sock, suppress(OSError, ValueError):
        sock.settimeout(1.0)
        sock.connect(str(folder / "socket"))
        sock.sendall(pack(protocol.STATS))
        reader = FrameReader()
        while data := sock.recv(1 << 16):
            for frame in reader.feed(data):
                return dict(json.loads(frame.payload))
    return {}


def spawn_owner(folder: Path) -> None:
    """Start an owner process that outlives this one, unless one serves the folder already; does not wait for it."""
    # Two forks: engines end all of their children. The owner finds the modules that this process finds.
    code = "import os, sys\nif os.fork(): os._exit(0)\nfrom kvcache.node.owner import main\nsys.exit(main(sys.argv[1]))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    words = python_words(code, str(folder))
    folder.mkdir(0o700, exist_ok=True)  # the last owner has removed it
    with (folder / "log").open("ab") as log:
        child = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
        )
    # An engine's step must not wait for the interpreter to start. Without a thread, the next Popen reaps the child.
    with suppress(RuntimeError):
        threading.Thread(target=child.wait, daemon=True).start()


def connect(link: Link) -> dict[str, Any]:
    """Greet the owner; return its answer. ValueError: the engine is refused."""
    # While an engine has this lock, the owner does not end, and no other engine starts one. Another engine may have it
    # for as long as the owner allocates memory, so the time limit begins after it.
    fd = protocol.lock_file(link.folder / "lock")
    end_s = time.monotonic() + _SPAWN_TIMEOUT_S
    try:
        while time.monotonic() < end_s:
            frame = link.meet([], _START_TIMEOUT_S)
            if frame is None:
                if link.fault is not None and link.fault.errno in _OWN_FAULTS:
                    raise ValueError(f"no connection to the pool in {link.folder}: {link.fault.strerror}")
                # An owner that is ending may still have the folder's lock.
                time.sleep(0.01)
                continue
            if not link.is_ready:
                raise ValueError(f"the pool of this node in {link.folder} refuses the engine: {frame.payload.decode()}")
            answer: dict[str, Any] = json.loads(frame.payload)
            link.hello["pool_id"] = answer["pool_id"]
            return answer
    finally:
        os.close(fd)
    link.close()
    raise ValueError(f"no owner of the pool in {link.folder} answers; see {link.folder / 'log'}")
