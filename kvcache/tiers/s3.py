"""A tier in a bucket of an object store that speaks S3: blocks of one engine are hits for all engines of the bucket.

A value is an object: the payload, followed by its seal. One request uploads it from host memory, and creates the object
only if it is missing. A download is copied into host memory as it arrives, after its length was compared. An
object of another length is not read, because it may be larger than memory. Names, seals and epochs are those of
`SharedStoreTier`, with slashes in place of colons, below the option `prefix`. A bucket has no size limit: a
lifecycle rule has to expire objects.

Credentials come from the environment or the platform (`obstore` reads them and renews those that expire). The payload
is not part of a request's signature: the seal covers it.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PermissionDeniedError, UnauthenticatedError
from obstore.store import S3Store

from kvcache.options import Component, Options, option, parse_duration, parse_size, parse_text, parse_threads
from kvcache.tiers.base.codec import Codec, parse_codec
from kvcache.tiers.base.job_tier import BlockOutcome, TierBatch
from kvcache.tiers.base.log_limiter import LogLimiter
from kvcache.tiers.shared_store import SEAL_BYTES, SharedStoreTier

if TYPE_CHECKING:
    from kvcache.tiers.base.tier import HostBlocks

_LOG = logging.getLogger(__name__)
_FORMAT = b"kvcache s3 1"
_EPOCH = re.compile(r"[0-9a-f]{16}")
_PREFIX = re.compile(r"(?=.{1,256}$)[\w=-][\w.=-]*(?:/[\w=-][\w.=-]*)*/?", re.ASCII)
_MAINTAIN_INTERVAL_S = 60.0
_ABSENT_S = 5.0
_MAX_QUESTIONS = 64
"""Maximum number of requests under way for one query."""
_CHUNK_BYTES = 1 << 16
_MAX_LISTED = 1000
# A name is twice as long in hexadecimal, and some servers allow 255 characters between two slashes.
_MAX_KEY_BYTES = 120
_NO_BUCKET, _SKEWED = "NoSuchBucket", "RequestTimeTooSkewed"
_MAX_RETRIES = 2
_BACKOFF = {"init_backoff": timedelta(milliseconds=50), "max_backoff": timedelta(seconds=1), "base": 2}


def _parse_bucket(name: str, value: object) -> str:
    # The library aborts its thread if a name does not form a valid URL.
    if not isinstance(value, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{1,253}[A-Za-z0-9]", value):
        raise ValueError(f"{name} must be the name of a bucket: letters, digits, '.', '_' and '-', got {value!r}")
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


@dataclass(frozen=True)
class S3Options(Options):
    """The options of an `S3Tier`."""

    where: ClassVar[str] = "an s3 tier"

    bucket: str = option(_parse_bucket, when="always: the bucket, which must exist")
    prefix: str = option(_parse_prefix, "", when="the bucket holds other objects, too: all names begin with this")
    endpoint: str | None = option(
        _parse_endpoint, None, when="the store is not AWS: `https://host:port`, or `http://` in a network of your own"
    )
    region: str | None = option(parse_text, None, when="the bucket is not in the region that `AWS_REGION` names")
    salt: str = option(parse_text, "", when="tenants share the bucket: a secret of one tenant's engines")
    timeout_s: float = option(parse_duration, 5.0, when="a request of a healthy store may take longer, or must not")
    ca_file: str | None = option(parse_text, None, when="the store's certificate is signed by your own authority")
    num_threads: int = option(parse_threads, 16, when="the link needs more, or fewer, requests under way", rare=True)
    max_queued_bytes: int = option(
        parse_size, 256 << 20, when="more, or fewer, bytes may be under way at a time", rare=True
    )
    codec: Component | None = option(parse_codec, None, when="blocks must take fewer bytes, or be encrypted")


class S3Tier(SharedStoreTier):
    """Keep blocks in a bucket of AWS S3, or of a store that speaks its protocol.

    Parameters
    ----------
    bucket : str
        The bucket's name.
    host_blocks : numpy.ndarray
        The pool, uint8 or int8, shape (num_blocks, block_bytes).
    fingerprint : mapping, optional
        Identifies the model and the geometry of the blocks.
    codec : Codec, optional
        Encodes the blocks.
    **options
        The tier's other options; see :doc:`/howto/options`.

    Raises
    ------
    ValueError
        An option is invalid, the bucket does not exist, or the credentials are refused. An unreachable store is not an
        error: the tier works once it answers.
    """

    options_type = S3Options
    uses_arbiter = True

    def __init__(
        self,
        bucket: str,
        host_blocks: HostBlocks,
        *,
        fingerprint: Mapping[str, Any] | None = None,
        codec: Codec | None = None,
        **options: Any,
    ) -> None:
        values = S3Options(bucket=bucket, **options)
        self._address = _address(values)
        self._root = f"{values.prefix}/" if values.prefix else ""
        self._store = _store_of(values)
        self._warnings = LogLimiter(_LOG)
        super().__init__(
            host_blocks,
            "S3",
            _FORMAT,
            fingerprint=fingerprint,
            salt=values.salt,
            codec=codec,
            num_threads=values.num_threads,
            max_queued_bytes=values.max_queued_bytes,
            # A thread has one request under way.
            max_batch_blocks=1,
            max_key_bytes=_MAX_KEY_BYTES,
            maintain_interval_s=_MAINTAIN_INTERVAL_S,
            query_deadline_s=values.timeout_s,
            open_timeout_s=values.timeout_s,
            absent_s=_ABSENT_S,
        )

    def __repr__(self) -> str:
        return f"S3Tier({self._address!r})"

    def store_name(self, key: bytes) -> bytes:
        return super().store_name(key.hex().encode())

    def read_epoch(self) -> str | None:
        with _os_errors(self._address):
            answer = self._get(self.epoch_name)
            if answer is None:
                return None
            epoch = bytes(answer.bytes()).decode("latin-1") if answer.meta["size"] == 16 else ""
        if not _EPOCH.fullmatch(epoch):
            raise OSError(f"{self._address} has a foreign object as {self._path(self.epoch_name)}")
        return epoch

    def announce_epoch(self, epoch: str, replace: bool) -> None:
        mode: Any = "overwrite" if replace else "create"
        with _os_errors(self._address), suppress(AlreadyExistsError):
            obstore.put(self._store, self._path(self.epoch_name), epoch.encode(), mode=mode, use_multipart=False)

    def are_held(self, names: list[bytes]) -> Sequence[bool]:
        async def ask() -> list[bool | BaseException]:
            turns = asyncio.Semaphore(_MAX_QUESTIONS)

            async def is_held(name: bytes) -> bool:
                async with turns:
                    try:
                        await obstore.head_async(self._store, self._path(name))
                    except FileNotFoundError:
                        return False
                    return True

            # Wait for all answers, also after an error: the library's threads must not find the loop closed.
            return await asyncio.gather(*map(is_held, names), return_exceptions=True)

        with _os_errors(self._address):
            answers = asyncio.run(ask())
            for answer in answers:
                if isinstance(answer, BaseException):
                    raise answer
        return [answer is True for answer in answers]

    def put_values(self, names: list[bytes], batch: TierBatch, seal: Callable[[int], bytes]) -> Sequence[int]:
        outcomes = [BlockOutcome.DONE] * len(names)
        for i, (name, buffer) in enumerate(zip(names, batch.buffers, strict=True)):
            with _os_errors(self._address):
                try:
                    # The store is not asked before whether it holds the block: that would cost a round trip for each.
                    value = iter((buffer, seal(i)))
                    obstore.put(self._store, self._path(name), value, mode="create", use_multipart=False)
                except AlreadyExistsError:
                    outcomes[i] = BlockOutcome.HELD
        return outcomes

    def get_values(
        self, names: list[bytes], batch: TierBatch, received: Callable[[int, bytearray | None], None]
    ) -> None:
        for i, (name, buffer) in enumerate(zip(names, batch.buffers, strict=True)):
            seal: bytearray | None = None
            with _os_errors(self._address):
                answer = self._get(name)
                if answer is None:
                    continue
                if answer.meta["size"] == self.block_bytes + SEAL_BYTES:
                    seal, num_bytes = bytearray(), 0
                    for part in answer.stream(min_chunk_size=_CHUNK_BYTES):
                        chunk = memoryview(part)
                        payload = chunk[: self.block_bytes - num_bytes]
                        buffer[num_bytes : num_bytes + len(payload)] = payload
                        num_bytes += len(payload)
                        seal += chunk[len(payload) :]
            received(i, seal)

    def delete_values(self, names: list[bytes]) -> None:
        try:
            with _os_errors(self._address):
                obstore.delete(self._store, [self._path(name) for name in names])
        except OSError as error:
            # Without this right, the objects stay, and are misses.
            self._warnings.warn("delete", "%s", error)

    def delete_older(self, prefix: bytes) -> None:
        try:
            with _os_errors(self._address):
                _delete_under(self._store, self._path(prefix))
        except PermissionError as error:
            self._warnings.warn("delete", "%s", error)

    def _path(self, name: bytes) -> str:
        return self._root + name.decode("latin-1").replace(":", "/")

    def _get(self, name: bytes) -> Any:
        """Return the store's answer, its body not read yet; None if it has no such object."""
        try:
            return obstore.get(self._store, self._path(name))
        except FileNotFoundError as error:
            if _NO_BUCKET in str(error):
                raise
            return None


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
        with _os_errors(_address(values)):
            return _delete_under(store, start)
    except OSError as error:
        raise ValueError(f"{error}") from None


def _listed(store: S3Store, start: str) -> Iterator[list[str]]:
    """Yield the paths that begin with `start`, many at a time."""
    # The store lists whole folders, and none whose name only begins with this one's.
    for listed in obstore.list(store, start.rpartition("/")[0], chunk_size=_MAX_LISTED):
        yield [entry["path"] for entry in listed if entry["path"].startswith(start)]


def _delete_under(store: S3Store, start: str) -> int:
    num_deleted = 0
    for paths in _listed(store, start):
        if paths:
            obstore.delete(store, paths)
            num_deleted += len(paths)
    return num_deleted


def _address(values: S3Options) -> str:
    place = f"{values.bucket}/{values.prefix}".removesuffix("/")
    return f"s3://{place}" + (f" at {values.endpoint}" if values.endpoint else "")


def _store_of(values: S3Options) -> S3Store:
    time_limit = timedelta(seconds=values.timeout_s)
    client: Any = {"timeout": time_limit, "connect_timeout": time_limit}
    config: Any = {"unsigned_payload": True}
    if values.endpoint is not None:
        config["endpoint"] = values.endpoint
        client["allow_http"] = values.endpoint.startswith("http://")
    if values.region is not None:
        config["region"] = values.region
    # A request to a busy server (503) is retried, but not after the time limit of one request.
    retries: Any = {"max_retries": _MAX_RETRIES, "retry_timeout": time_limit, "backoff": _BACKOFF}
    try:
        if values.ca_file is not None:
            client["root_certificate"] = Path(values.ca_file).read_bytes()
        return S3Store(values.bucket, config=config, client_options=client, retry_config=retries)
    except (BaseError, OSError) as error:
        raise ValueError(f"{_address(values)} cannot be used: {_shown(error)}") from None


@contextmanager
def _os_errors(address: str) -> Iterator[None]:
    """Raise the library's errors as OSError: PermissionError if the store refuses the credentials."""
    try:
        yield
    except BaseException as error:
        text = f"{address}: {_shown(error)}"
        # A wrong clock may be corrected later, so this is not a fault of the credentials.
        if isinstance(error, PermissionDeniedError | UnauthenticatedError) and _SKEWED not in text:
            raise PermissionError(text) from None
        if isinstance(error, FileNotFoundError):
            raise FileNotFoundError(text) from None
        # The library's threads may panic, and a panic is not an Exception.
        if isinstance(error, BaseError) or type(error).__name__ == "PanicException":
            raise OSError(text) from None
        raise


def _shown(error: BaseException) -> str:
    """Return the store's code and message, or else the end of the first line: its start repeats the request."""
    text = str(error)
    answer = re.search(r"<Code>(\w+)</Code>(?:.*?<Message>([^<]*)</Message>)?", text, re.DOTALL)
    if answer is not None:
        return f"{answer[1]}: {answer[2] or 'no message'}"[:200]
    return (text.splitlines() or [""])[0].rpartition(" - ")[2].rstrip(": ")[:200]
