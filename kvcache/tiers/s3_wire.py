"""Requests for single objects of a bucket, straight from and into host memory. `obstore` signs them.

Requests of `obstore` itself reserve as much memory as an answer announces, and end the process if the machine has less.
Here an answer never takes more than the memory that the caller gave, or `_MAX_TEXT_BYTES`.
"""

from __future__ import annotations

import re
import socket
import ssl
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal
from urllib.parse import SplitResult, urlsplit

import obstore

from kvcache.tiers.channel import Channel

_MAX_TEXT_BYTES = 4096
_MAX_LINES = 200
MAX_RETRIES = 2
_BACKOFF_S = 0.05
_LEAST_S = 0.001
_BUSY = (429, 500, 502, 503, 504)
# A clock may be wrong by as much.
_VALID = timedelta(hours=1)
_STATUS = re.compile(rb"HTTP/1\.(\d) (\d\d\d)[^\r\n]*\r?\n")


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer of the store: `num_bytes` is None if it does not say its length; `text` is empty if it was received."""

    status: int
    num_bytes: int | None
    text: str = ""


class BucketClient:
    """Sends requests over connections that it keeps, one for each thread that has a request under way."""

    def __init__(self, store: Any, timeout_s: float, ca_file: str | None, allows_http: bool) -> None:
        self._store, self._timeout_s, self._allows_http = store, timeout_s, allows_http
        self._ssl = ssl.create_default_context()
        if ca_file is not None:
            self._ssl.load_verify_locations(ca_file)
        self._idle: deque[tuple[socket.socket, Channel]] = deque()

    def request(
        self,
        method: Literal["GET", "PUT", "DELETE"],
        path: str,
        parts: Sequence[Any] = (),
        targets: Sequence[memoryview] = (),
        creates: bool = False,
    ) -> Answer:
        """Send `parts` as the body, and receive an object into `targets`, one after the other, if it is as long.

        With `creates`, the object must not exist yet. A busy store is asked again, within the time limit of one
        request. Raises OSError without an answer.
        """
        end_s = time.monotonic() + self._timeout_s
        for pause_s in (*(_BACKOFF_S * 2**number for number in range(MAX_RETRIES)), None):
            is_kept = bool(self._idle)
            try:
                answer = self._exchange(method, path, parts, targets, creates, end_s)
            except OSError as error:
                # The store may end a connection that was not used for some time, and then all of them.
                if is_kept and pause_s is not None and time.monotonic() < end_s:
                    self.close()
                    continue
                raise OSError(f"{type(error).__name__}: {error}") from None
            if answer.status not in _BUSY or pause_s is None or time.monotonic() + pause_s > end_s:
                break
            time.sleep(pause_s)
        return answer

    def close(self) -> None:
        """Close the connections that no request uses."""
        with suppress(IndexError):
            while True:
                self._idle.pop()[0].close()

    def _connection(self, url: SplitResult, timeout_s: float) -> tuple[socket.socket, Channel]:
        with suppress(IndexError):
            return self._idle.pop()
        host, is_tls = url.hostname or "", url.scheme == "https"
        connection = socket.create_connection((host, url.port or (443 if is_tls else 80)), timeout_s)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if is_tls:
                connection = self._ssl.wrap_socket(connection, server_hostname=host)
        except BaseException:
            connection.close()
            raise
        return connection, Channel(connection, timeout_s)

    def _exchange(
        self,
        method: Literal["GET", "PUT", "DELETE"],
        path: str,
        parts: Sequence[Any],
        targets: Sequence[memoryview],
        creates: bool,
        end_s: float,
    ) -> Answer:
        url = urlsplit(obstore.sign(self._store, method, path, _VALID))
        if url.scheme != "https" and not self._allows_http:
            # The environment may set such an address, which the library refuses for its own requests.
            raise ValueError(f"{url.scheme}://{url.netloc} is not encrypted: to use it, name it as the option endpoint")
        head = f"{method} {url.path}?{url.query} HTTP/1.1\r\nHost: {url.netloc}\r\nUser-Agent: kvcache\r\n"
        if method == "PUT":
            head += f"Content-Length: {sum(map(len, parts))}\r\n"
        if creates:
            head += "If-None-Match: *\r\n"
        connection, channel = self._connection(url, max(_LEAST_S, end_s - time.monotonic()))
        stays_open = False
        try:
            # Neither a connection nor another attempt adds to the time of a request.
            channel.limit(max(_LEAST_S, end_s - time.monotonic()))
            # A store that refuses a request may not read the rest of it.
            with suppress(BrokenPipeError):
                channel.send([f"{head}\r\n".encode(), *parts])
            status, num_bytes, stays_open = _read_head(channel)
            if targets and status == 200 and num_bytes == sum(map(len, targets)):
                for target in targets:
                    channel.reader.readinto(target)
                return Answer(status, num_bytes)
            num_text_bytes = _MAX_TEXT_BYTES if num_bytes is None else min(num_bytes, _MAX_TEXT_BYTES)
            text = b""
            # The status says enough if the rest does not come.
            with suppress(OSError):
                read = channel.reader.read1 if num_bytes is None else channel.reader.read
                text = read(num_text_bytes)
            stays_open = stays_open and len(text) == num_bytes
            return Answer(status, num_bytes, text.decode("utf-8", "replace"))
        except BaseException:
            stays_open = False
            raise
        finally:
            if stays_open:
                self._idle.append((connection, channel))
            else:
                connection.close()


def _read_head(channel: Channel) -> tuple[int, int | None, bool]:
    """Return an answer's status, the length of its body, and whether another request may follow it."""
    status, headers, version = 0, {b"": b""}, b""
    for _ in range(_MAX_LINES):
        line = channel.reader.readline(_MAX_TEXT_BYTES)
        if not status:
            if (match := _STATUS.fullmatch(line)) is None:
                raise OSError(f"the store does not speak HTTP, but sends {line[:80]!r}")
            version, status, headers = match[1], int(match[2]), {}
        elif line in (b"\r\n", b"\n"):
            if status >= 200:
                break
            # The final answer follows.
            status = 0
        else:
            name, _, value = line.partition(b":")
            headers[name.lower()] = value.strip().lower()
    else:
        raise OSError("the store sends headers without an end")
    length = b"0" if status in (204, 304) else headers.get(b"content-length", b"")
    is_plain = b"transfer-encoding" not in headers and re.fullmatch(rb"[0-9]{1,15}", length) is not None
    stays_open = version != b"0" and headers.get(b"connection") != b"close"
    return status, int(length) if is_plain else None, stays_open
