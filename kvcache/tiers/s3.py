"""A tier in a bucket of an object store that speaks S3: blocks of one engine are hits for all engines of the bucket.

A value is an object: the payload, followed by its seal. One request uploads it from host memory, and creates the object
only if it is missing. A download goes straight into host memory (`s3_wire`), after its length was compared. Names,
seals and epochs are those of `SharedStoreTier`, with slashes in place of colons, below the option `prefix`. A bucket
has no size limit: a lifecycle rule has to expire objects.

Credentials come from the environment or the platform: `obstore` reads them, renews those that expire, and signs
requests. The payload is not part of the signature: the seal covers it.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import BaseError, NotFoundError
from obstore.store import S3Store

from kvcache.background import Background, python_words
from kvcache.options import option, parse_text, parse_threads, read_small_file
from kvcache.tiers.base.job_tier import BlockOutcome, TierBatch
from kvcache.tiers.s3_wire import MAX_RETRIES, Answer, BucketClient
from kvcache.tiers.shared_store import SEAL_BYTES, SharedStoreTier, StoreOptions

if TYPE_CHECKING:
    from kvcache.tiers.base.tier import HostBlocks

_FORMAT = b"kvcache s3 1"
_EPOCH = re.compile(rb"[0-9a-f]{16}")
_EPOCH_BYTES = 16
_PREFIX = re.compile(r"(?=.{1,256}$)[\w=-][\w.=-]*(?:/[\w=-][\w.=-]*)*/?", re.ASCII)
_MAINTAIN_INTERVAL_S = 60.0
_ABSENT_S = 5.0
_MAX_QUESTIONS = 64
"""Maximum number of requests under way for one query."""
_MAX_LISTED = 1000
# A name is twice as long in hexadecimal, and some servers allow 255 characters between two slashes.
_MAX_KEY_BYTES = 120
_NO_BUCKET = "NoSuchBucket"
REFUSED = frozenset(
    {"AccessDenied", "AccountProblem", "AllAccessDisabled", "InvalidAccessKeyId", "InvalidSecurity", "NotSignedUp"}
    | {"SignatureDoesNotMatch", "UnauthorizedAccess"}
)
"""Codes of refused credentials. Any other error may be temporary, so the engine starts."""
# A wrong clock may be corrected later, so this is not a fault of the credentials.
_SKEWED = re.compile("Request has expired|not yet valid")
NOT_FOLLOWED = (
    *("AWS_SKIP_SIGNATURE", "AWS_REQUEST_PAYER", "AWS_S3_EXPRESS", "AWS_SERVER_SIDE_ENCRYPTION", "AWS_SSE_KMS_KEY_ID"),
    *("AWS_SSE_BUCKET_KEY_ENABLED", "AWS_SSE_CUSTOMER_KEY_BASE64"),
)
"""Environment variables that the library applies to its own requests, and `s3_wire` cannot."""
# Statuses of a download that has come, of another request that was done, and of an object that exists.
_LOADED, _DONE, _EXISTS = (200,), (200, 201, 204), (409, 412)
_CLIENT_OPTIONS = ("bucket", "endpoint", "region", "timeout_s", "ca_file")
_WAIT_S = 1.0
"""How long a reset may wait for the deletion of private blocks."""
_DELETE_S = 30
"""How long one process deletes private blocks."""
_DELETE_BYTES = 256 << 20
"""Memory for an answer in this process. Without a limit, the library allocates what a listing announces."""
_DELETE = (
    "import json, sys\nfrom kvcache.tiers.s3 import S3Options, delete_under, limit_process\nlimit_process()\n"
    "options, start = json.loads(sys.argv[1])\n"
    "try: delete_under(S3Options(**options), start)\nexcept OSError as error: sys.exit(str(error))"
)
_BACKOFF = {"init_backoff": timedelta(milliseconds=50), "max_backoff": timedelta(seconds=1), "base": 2}


def _parse_bucket(name: str, value: object) -> str:
    # The library aborts its thread if a name does not form a valid URL.
    if not isinstance(value, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{1,253}[A-Za-z0-9]", value):
        raise ValueError(f"{name} must be the name of a bucket: 3 to 255 letters, digits or '._-', got {value!r}")
    return value


def _parse_prefix(name: str, value: object) -> str:
    # No part begins with a dot, so none is '.' or '..'.
    if not isinstance(value, str) or not _PREFIX.fullmatch(value):
        raise ValueError(f"{name} must be names of letters, digits and '._=-' between single slashes, got {value!r}")
    return value.removesuffix("/")


def _parse_endpoint(name: str, value: object) -> str:
    url = parse_text(name, value)
    parts = urlsplit(url)
    try:
        is_plain = parts.username is None and parts.port != 0 and not (parts.query or parts.fragment)
    except ValueError:
        is_plain = False
    if not is_plain or parts.scheme not in ("http", "https") or not re.fullmatch(r"[\w.\[\]:-]+", parts.netloc, re.A):
        # The URL may hold a password.
        raise ValueError(f"{name} must be 'https://host:port' or 'http://host:port', without user and query")
    if parts.path not in ("", "/"):
        raise ValueError(f"{name} must have no path: `prefix` names one, got {parts.path!r}")
    return f"{parts.scheme}://{parts.netloc}"


@dataclass(frozen=True, kw_only=True)
class S3Options(StoreOptions):
    """The options of an `S3Tier`."""

    where: ClassVar[str] = "an s3 tier"

    bucket: str = option(_parse_bucket, when="always: the bucket, which must exist")
    prefix: str = option(_parse_prefix, "", when="the bucket holds other objects, too: all names begin with this")
    endpoint: str | None = option(
        _parse_endpoint, None, when="the store is not AWS: `https://host:port`, or `http://` in a network of your own"
    )
    region: str | None = option(parse_text, None, when="the bucket is not in the region that `AWS_REGION` names")
    ca_file: str | None = option(parse_text, None, when="the store's certificate is signed by your own authority")
    num_threads: int = option(parse_threads, 16, when="the link needs more, or fewer, requests under way", rare=True)


class _QueryLoop(asyncio.SelectorEventLoop):
    """The event loop of all queries, in its own thread: a new loop for each query would need new descriptors."""

    def __init__(self) -> None:
        super().__init__()
        self._thread = Background("s3-queries", lambda _: self.run_forever())

    def __del__(self) -> None:
        """Log nothing: a loop that got no descriptors has none to close."""

    def end(self) -> None:
        """End the thread; no query may be under way."""
        self.call_soon_threadsafe(self.stop)
        self._thread.stop()
        self.close()


class S3Tier(SharedStoreTier):
    """Keep blocks in a bucket of AWS S3, or of a store that speaks its protocol.

    Parameters
    ----------
    options : S3Options
        The bucket and the rest; see :doc:`/howto/options`.
    host_blocks : numpy.ndarray
        The pool, uint8 or int8, shape (num_blocks, block_bytes).
    fingerprint : mapping, optional
        Identifies the model and the geometry of the blocks.

    Raises
    ------
    ValueError
        The bucket does not exist, or the credentials are refused. An unreachable store is not an
        error: the tier works once it answers.
    """

    options_type = S3Options
    uses_arbiter = True

    def __init__(
        self, options: S3Options, host_blocks: HostBlocks, fingerprint: Mapping[str, Any] | None = None
    ) -> None:
        self._address = _address(options)
        self._root = f"{options.prefix}/" if options.prefix else ""
        self._options = options
        self._store = _store_of(options)
        self._client = BucketClient(
            self._store, options.timeout_s, options.ca_file, (options.endpoint or "").startswith("http://")
        )
        self._query_loop: _QueryLoop | None = None
        self._deletion: subprocess.Popen[str] | None = None
        super().__init__(
            options,
            host_blocks,
            fingerprint,
            "S3",
            _FORMAT,
            # A thread has one request under way.
            max_batch_blocks=1,
            max_key_bytes=_MAX_KEY_BYTES,
            maintain_interval_s=_MAINTAIN_INTERVAL_S,
            absent_s=_ABSENT_S,
        )

    def __repr__(self) -> str:
        return f"S3Tier({self._address!r})"

    def store_name(self, key: bytes) -> bytes:
        return super().store_name(key.hex().encode())

    def read_epoch(self) -> str | None:
        epoch = bytearray(_EPOCH_BYTES)
        answer = self._send("GET", self.epoch_name, targets=[memoryview(epoch)])
        if answer is None:
            return None
        if answer.num_bytes != _EPOCH_BYTES or not _EPOCH.fullmatch(epoch):
            raise OSError(f"{self._address} has a foreign object as {self._path(self.epoch_name)}")
        return epoch.decode()

    def announce_epoch(self, epoch: str, replace: bool) -> None:
        self._send("PUT", self.epoch_name, parts=[epoch.encode()], creates=not replace)

    def connect(self) -> None:
        if self._query_loop is None:
            self._query_loop = _QueryLoop()

    def are_held(self, names: list[bytes]) -> Sequence[bool]:
        async def ask() -> list[bool | BaseException]:
            turns = asyncio.Semaphore(_MAX_QUESTIONS)

            async def is_held(name: bytes) -> bool:
                async with turns:
                    try:
                        await obstore.head_async(self._store, self._path(name))
                    except (FileNotFoundError, NotFoundError):
                        return False
                    return True

            # Wait for all answers, also after an error: the library's threads must not find the loop closed.
            return await asyncio.gather(*map(is_held, names), return_exceptions=True)

        if self._query_loop is None:
            raise OSError(f"{self._address}: no descriptors for look-ups")
        with _os_errors(self._address):
            answers = asyncio.run_coroutine_threadsafe(ask(), self._query_loop).result()
            for answer in answers:
                if isinstance(answer, BaseException):
                    raise answer
        return [answer is True for answer in answers]

    def put_values(self, names: list[bytes], batch: TierBatch, seal: Callable[[int], bytes]) -> Sequence[int]:
        outcomes = []
        for i, (name, buffer) in enumerate(zip(names, batch.buffers, strict=True)):
            # The store is not asked before whether it holds the block: that would cost a round trip for each.
            answer = self._send("PUT", name, parts=[buffer, seal(i)], creates=not self.is_bad(batch.keys[i]))
            is_held = answer is not None and answer.status in _EXISTS
            outcomes.append(BlockOutcome.HELD if is_held else BlockOutcome.DONE)
        return outcomes

    def get_values(
        self, names: list[bytes], batch: TierBatch, received: Callable[[int, memoryview | None], None]
    ) -> None:
        seal = memoryview(bytearray(SEAL_BYTES))
        for i, (name, buffer) in enumerate(zip(names, batch.buffers, strict=True)):
            if (answer := self._send("GET", name, targets=[buffer, seal])) is not None:
                received(i, seal if answer.num_bytes == self.block_bytes + SEAL_BYTES else None)

    def delete_values(self, names: list[bytes]) -> None:
        for name in names:
            self._send("DELETE", name)

    def delete_older(self, prefix: bytes) -> bool:
        # Runs in its own process, which ends if an answer needs too much memory, and may continue after this call.
        if self._deletion is None:
            options = {name: getattr(self._options, name) for name in _CLIENT_OPTIONS}
            words = python_words(_DELETE, json.dumps([options, self._path(prefix)]))
            self._deletion = subprocess.Popen(words, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        try:
            _, errors = self._deletion.communicate(timeout=_WAIT_S)
        except subprocess.TimeoutExpired:
            return False
        code, self._deletion = self._deletion.returncode, None
        if code not in (0, -signal.SIGALRM):
            raise OSError((errors.splitlines() or [f"the process that deletes has ended with {code}"])[-1])
        # After the alarm, the next process lists the objects that are left.
        return code == 0

    def close(self) -> None:
        self._client.close()
        if self._query_loop is not None:
            self._query_loop.end()
        if self._deletion is not None:
            self._deletion.kill()
            self._deletion.communicate()

    def _send(self, method: Literal["GET", "PUT", "DELETE"], name: bytes, **options: Any) -> Answer | None:
        """Return the store's answer, None if it has no such object; OSError if it refuses the request."""
        with _os_errors(self._address):
            answer = self._client.request(method, self._path(name), **options)
        done = _LOADED if method == "GET" else (*_DONE, *_EXISTS) if options.get("creates") else _DONE
        if answer.status in done:
            return answer
        # The text of a success may be a block.
        shown = "" if answer.status < 300 else _shown(answer.text)
        fault = _fault_of(shown)
        if answer.status == 404 and method != "PUT" and fault is not FileNotFoundError:
            return None
        raise fault(f"{self._address}: {shown or f'status {answer.status}'}")

    def _path(self, name: bytes) -> str:
        return self._root + name.decode("latin-1").replace(":", "/")


def clear_bucket(values: S3Options, prefix: str, confirm: Callable[[dict[str, int]], None]) -> int:
    """Delete the objects below ``values.prefix`` whose names begin with `prefix`, and return their number.

    First `confirm` is called with the number of objects of each model. If it raises, nothing is deleted.
    """
    start = (f"{values.prefix}/" if values.prefix else "") + prefix.replace(":", "/")
    counts: Counter[str] = Counter()
    try:
        store = _store_of(values)
        with _os_errors(_address(values)):
            for paths in _listed(store, start):
                counts.update(":".join(path.removeprefix(values.prefix).strip("/").split("/")[:2]) for path in paths)
        # Count all objects first, so that `confirm` can show what would be lost.
        confirm(dict(counts))
        return delete_under(values, start)
    except OSError as error:
        raise ValueError(f"{error}") from None


def _listed(store: S3Store, start: str) -> Iterator[list[str]]:
    """Yield the paths that begin with `start`, many at a time."""
    # The store lists whole folders, and none whose name only begins with this one's.
    for listed in obstore.list(store, start.rpartition("/")[0], chunk_size=_MAX_LISTED):
        yield [entry["path"] for entry in listed if entry["path"].startswith(start)]


def limit_process() -> None:
    """Bound the time and the memory of this process, which deletes objects and does nothing else."""
    signal.alarm(_DELETE_S)
    num_bytes = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize() + _DELETE_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (num_bytes, num_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def delete_under(values: S3Options, start: str) -> int:
    """Delete the objects whose paths begin with `start`, and return their number."""
    num_deleted, store = 0, _store_of(values)
    with _os_errors(_address(values)):
        for paths in _listed(store, start):
            if paths:
                obstore.delete(store, paths)
                num_deleted += len(paths)
    return num_deleted


def _address(values: S3Options) -> str:
    place = f"{values.bucket}/{values.prefix}".removesuffix("/")
    return f"s3://{place}" + (f" at {values.endpoint}" if values.endpoint else "")


def _store_of(values: S3Options) -> S3Store:
    for name in NOT_FOLLOWED:
        if os.environ.get(name, "").lower() not in ("", "0", "false"):
            raise ValueError(f"{_address(values)} cannot be used: blocks do not follow the environment's {name}")
    time_limit = timedelta(seconds=values.timeout_s)
    client: Any = {"timeout": time_limit, "connect_timeout": time_limit}
    config: Any = {"unsigned_payload": True}
    if values.endpoint is not None:
        # The environment may set either name, and the library prefers the second.
        config["endpoint"] = config["aws_endpoint_url_s3"] = values.endpoint
        client["allow_http"] = (values.endpoint or "").startswith("http://")
    if values.region is not None:
        config["region"] = values.region
    # A request to a busy server (503) is retried, but not after the time limit of one request.
    retries: Any = {"max_retries": MAX_RETRIES, "retry_timeout": time_limit, "backoff": _BACKOFF}
    try:
        if values.ca_file is not None:
            client["root_certificate"] = read_small_file(values.ca_file)
        return S3Store(values.bucket, config=config, client_options=client, retry_config=retries)
    except (BaseError, OSError) as error:
        raise ValueError(f"{_address(values)} cannot be used: {_shown(str(error))}") from None


def _fault_of(shown: str) -> type[OSError]:
    """Return the error of a refused request: refused credentials and a missing bucket end an engine's start."""
    code = shown.partition(":")[0]
    if code == _NO_BUCKET:
        return FileNotFoundError
    return PermissionError if code in REFUSED and not _SKEWED.search(shown) else OSError


@contextmanager
def _os_errors(address: str) -> Iterator[None]:
    """Raise the library's errors as OSError."""
    try:
        yield
    except BaseException as error:
        # The library's threads may panic, and a panic is not an Exception.
        if isinstance(error, BaseError | OSError | NotImplementedError) or type(error).__name__ == "PanicException":
            raise OSError(f"{address}: {_shown(str(error))}") from None
        raise


def _shown(text: str) -> str:
    """Return the store's code and message, or else the end of the first line: its start repeats the request."""
    answer = re.search(r"<Code>(\w+)</Code>(?:.*?<Message>([^<]*)</Message>)?", text, re.DOTALL)
    if answer is not None:
        return f"{answer[1]}: {answer[2] or 'no message'}"[:200]
    return (text.splitlines() or [""])[0].rpartition(" - ")[2].rstrip(": ")[:200]
