"""A tier on Valkey or Redis: blocks that one engine stores are hits for every other engine on the same server.

A value is a seal and then the payload. Each one is read and written by one command, pipelined, straight from and into
host memory (`valkey_wire`). Values that the server holds are not sent again. The server does memory limits, eviction
and persistence. Names, seals and epochs are those of `SharedStoreTier`.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import urlsplit

from valkey import Valkey, ValkeyCluster, exceptions
from valkey.backoff import NoBackoff
from valkey.retry import Retry

from kvcache.options import (
    option,
    parse_count,
    parse_duration,
    parse_flag,
    parse_text,
    read_small_file,
    without_secrets,
)
from kvcache.tiers.base.job_tier import BlockOutcome, TierBatch
from kvcache.tiers.shared_store import SEAL_BYTES, SharedStoreTier, StoreOptions
from kvcache.tiers.valkey_wire import MISSING, ServerChannel, ServerError, channel, pack, pack_set

if TYPE_CHECKING:
    from kvcache.tiers.base.tier import HostBlocks

PASSWORD_VARIABLE = "KVCACHE_VALKEY_PASSWORD"
_FORMAT = b"kvcache valkey 2"
_EPOCH_INTERVAL_S = 5.0
# The server keeps unsent answers in memory, so a connection awaits at most twice this many bytes.
_WINDOW_BYTES = 1 << 20
# A store sends this many bytes; then it waits, and asks which of the next blocks another engine has stored.
_STORE_WINDOW_BYTES = 4 << 20
# How long a call deletes the blocks of a private epoch; the next one goes on.
_DELETE_S = 1.0
CLIENT_ERRORS = (exceptions.ValkeyError, exceptions.ValkeyClusterException, exceptions.ChildDeadlockedError)
"""The roots of the client's own exceptions."""
REFUSED: tuple[type[Exception], ...] = (exceptions.AuthenticationError, exceptions.AuthorizationError)
REFUSED += (exceptions.AuthenticationWrongNumberOfArgsError,)
"""Errors of refused credentials, which end an engine's start. After other errors, it starts without the server."""
_SCHEMES = ("valkey", "valkeys", "redis", "rediss", "unix")


def _parse_url(name: str, value: object) -> str:
    url = parse_text(name, value)
    parts = urlsplit(url)
    shown = without_secrets(url) if "//" in url else url.rpartition("@")[2]
    if parts.scheme not in _SCHEMES or "//" not in url:
        raise ValueError(
            f"{name} must begin with one of {', '.join(f'{scheme}://' for scheme in _SCHEMES)}, got {shown!r}"
        )
    try:
        _ = parts.port
    except ValueError:
        raise ValueError(f"{name} must have a port in 0..65535, got {shown!r}") from None
    return url


@dataclass(frozen=True, kw_only=True)
class ValkeyOptions(StoreOptions):
    """The options of a `ValkeyTier`."""

    where: ClassVar[str] = "a valkey tier"

    url: str = option(_parse_url, when="always: `valkey://host:port/db`, `valkeys://...` for TLS, `unix:///path`")
    cluster: bool = option(parse_flag, False, when="the server is a cluster")
    ttl_s: float | None = option(parse_duration, None, when="the server must forget blocks after some time")
    password: str | None = option(
        parse_text, None, when="the server needs one, and the environment does not hold `KVCACHE_VALKEY_PASSWORD`"
    )
    ca_file: str | None = option(
        parse_text, None, when="the certificate of a TLS server is signed by an authority of your own"
    )
    username: str | None = option(parse_text, None, when="the server needs one that is not in `url`", rare=True)
    max_batch_blocks: int = option(
        parse_count, 16, when="`kvcache bench tier` is faster with another number", rare=True
    )

    def check_together(self, where: str) -> None:
        parts = urlsplit(self.url)
        if self.cluster and (parts.scheme == "unix" or parts.path not in ("", "/", "/0")):
            raise ValueError(f"cluster of {where} needs a url of host and port, without a database, got {parts.path!r}")


class ValkeyTier(SharedStoreTier):
    """Keep blocks on a Valkey or Redis server, or cluster.

    Parameters
    ----------
    options : ValkeyOptions
        The server and the rest; see :doc:`/howto/options`. A user and a password in `url` are used and never shown.
    host_blocks : numpy.ndarray
        The pool, uint8 or int8, shape (num_blocks, block_bytes).
    fingerprint : mapping, optional
        Identifies the model and the geometry of the blocks.

    Raises
    ------
    ValueError
        The URL or the credentials are refused. An unreachable server is not an error: the tier works once it answers.
    """

    options_type = ValkeyOptions

    def __init__(
        self, options: ValkeyOptions, host_blocks: HostBlocks, fingerprint: Mapping[str, Any] | None = None
    ) -> None:
        self._address = _address(options.url)
        self._options = options
        self._is_cluster, self._timeout_s = options.cluster, options.timeout_s
        self._ttl_ms = None if options.ttl_s is None else max(1, int(options.ttl_s * 1000))
        # One lock, because a cluster's client reads the topology while it is made.
        self._connecting = Lock()
        self._client: Any = None
        # Whether a cluster's topology must be read again.
        self._is_moved = False
        # The deletion of a prefix that has not ended yet.
        self._scan: Iterator[int] | None = None
        super().__init__(
            options,
            host_blocks,
            fingerprint,
            "VALKEY",
            _FORMAT,
            max_batch_blocks=options.max_batch_blocks,
            maintain_interval_s=_EPOCH_INTERVAL_S,
        )

    @classmethod
    def doubt(cls, options: ValkeyOptions) -> str:
        try:
            with closing(_client_of(options)) as client:
                node = client.get_valkey_connection(client.get_primaries()[0]) if options.cluster else client
                memory: dict[str, Any] = node.info("memory")
        except (*CLIENT_ERRORS, OSError, ValueError) as error:
            return f"its eviction policy is unknown: {_shown(error)}"
        limit, policy = memory.get("maxmemory"), str(memory.get("maxmemory_policy"))
        if not limit:
            return "the server has no maxmemory: it takes the machine's memory, and evicts nothing"
        # With `ttl_s`, each block has a time to live.
        if policy.startswith("allkeys-") or (options.ttl_s and policy.startswith("volatile-")):
            return ""
        return f"maxmemory-policy is {policy}: once the server is full, new blocks are refused; use allkeys-lru"

    def __repr__(self) -> str:
        return f"ValkeyTier({self._address!r})"

    def read_epoch(self) -> str | None:
        with self._os_errors():
            epoch: bytes | None = self._server().get(self.epoch_name)
        return None if epoch is None else epoch.decode("latin-1")

    def announce_epoch(self, epoch: str, replace: bool) -> None:
        with self._os_errors():
            self._server().set(self.epoch_name, epoch, nx=not replace)

    def are_held(self, names: list[bytes]) -> Sequence[bool]:
        held = [False] * len(names)

        def ask(server: ServerChannel, positions: Sequence[int]) -> None:
            server.send([pack(b"EXISTS", names[i]) for i in positions])
            for i in positions:
                held[i] = server.read_count() > 0

        self._converse(names, ask)
        return held

    def put_values(self, names: list[bytes], batch: TierBatch, seal: Callable[[int], bytes]) -> Sequence[int]:
        buffers = batch.buffers
        outcomes = [BlockOutcome.REFUSED] * len(names)
        ttl = b"" if self._ttl_ms is None else b"%d" % self._ttl_ms
        size = max(1, _STORE_WINDOW_BYTES // self.block_bytes)
        # Most blocks are new, so one command asks for all. In a cluster, its names would have to lie in one slot.
        is_counted = not (ttl or self._is_cluster)

        def ask(positions: Sequence[int]) -> list[bytes]:
            # It makes a block that the server holds as recent as if it had been stored again.
            if is_counted and positions:
                return [pack(b"TOUCH", *(names[i] for i in positions))]
            return [pack(b"PEXPIRE", names[i], ttl) if ttl else pack(b"TOUCH", names[i]) for i in positions]

        def read_held(server: ServerChannel, positions: Sequence[int]) -> list[bool]:
            if is_counted:
                num_held = server.read_count()
                if num_held in (0, len(positions)):
                    return [num_held > 0] * len(positions)
                server.send([pack(b"EXISTS", names[i]) for i in positions])
            return [server.read_count() > 0 for _ in positions]

        def store(server: ServerChannel, positions: Sequence[int]) -> None:
            # Another engine may be storing the same blocks, so this is asked right before each window.
            server.send(ask(positions[:size]))
            for first in range(0, len(positions), size):
                window = positions[first : first + size]
                absent, waiting, end = [], [], b""
                for i, is_held in zip(window, read_held(server, window), strict=True):
                    if is_held and not self.is_bad(batch.keys[i]):
                        outcomes[i] = BlockOutcome.HELD
                        continue
                    absent.append(i)
                    # The end of a command and the start of the next one are one buffer.
                    before, after = pack_set(names[i], seal(i), self.block_bytes, self._ttl_ms)
                    waiting += [end + before, buffers[i]]
                    end = after
                server.send([*waiting, b"".join([end, *ask(positions[first + size : first + 2 * size])])])
                for i in absent:
                    try:
                        if server.read_count():
                            outcomes[i] = BlockOutcome.DONE
                    except ServerError as error:
                        # A server whose memory is full refuses one block and may take the next.
                        if not str(error).startswith("OOM "):
                            raise

        self._converse(names, store)
        return outcomes

    def get_values(
        self, names: list[bytes], batch: TierBatch, received: Callable[[int, memoryview | None], None]
    ) -> None:
        buffers = batch.buffers
        window = max(1, _WINDOW_BYTES // self.block_bytes)

        def load(server: ServerChannel, positions: Sequence[int]) -> None:
            seal = memoryview(bytearray(SEAL_BYTES))
            for number, i in enumerate(positions):
                if number % window == 0:
                    # Half of the awaited answers have come.
                    first = number + window if number else 0
                    server.send([pack(b"GET", names[j]) for j in positions[first : number + 2 * window]])
                try:
                    num_bytes = server.read_value((seal, buffers[i]))
                except ServerError as error:
                    # Another client's list or set under our name.
                    if not str(error).startswith("WRONGTYPE "):
                        raise
                    num_bytes = 0
                if num_bytes != MISSING:
                    received(i, seal if num_bytes == SEAL_BYTES + self.block_bytes else None)

        self._converse(names, load)

    def delete_values(self, names: list[bytes]) -> None:
        with self._os_errors():
            server = self._server()
            for name in names:
                server.unlink(name)

    def delete_older(self, prefix: bytes) -> bool:
        # On a large server most names are others', so a scan goes on where the last call ended.
        scan, self._scan = self._scan or _unlink(self._server(), self._is_cluster, prefix + b"*"), None
        end_s = time.monotonic() + _DELETE_S
        with self._os_errors():
            for _ in scan:
                if time.monotonic() >= end_s:
                    self._scan = scan
                    return False
        return True

    def maintain(self) -> None:
        # A server that has not answered yet is tried by the next job.
        if self._client is not None:
            super().maintain()

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            if self._is_cluster:
                # Its `close` leaves the connections of a client made from a URL open.
                self._client.disconnect_connection_pools()

    def _server(self) -> Any:
        with self._connecting:
            if self._client is None:
                self._client = _client_of(self._options)
            return self._client

    @contextmanager
    def _os_errors(self) -> Iterator[None]:
        """Raise the client's errors as OSError, PermissionError if the server refuses the credentials."""
        try:
            yield
        except (*CLIENT_ERRORS, OSError, ValueError) as error:
            # A cluster's client raises its own error, caused by that of the last server.
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, REFUSED):
                cause = cause.__cause__
            if cause is None:
                raise OSError(f"{self._address}: {_shown(error)}") from None
            raise PermissionError(f"{self._address} refuses the credentials: {_shown(error)}") from None

    def _converse(self, names: list[bytes], talk: Callable[[ServerChannel, Sequence[int]], None]) -> None:
        """Call `talk` for each server that holds some of `names`, with their positions.

        If a cluster may have moved them, read its topology and call once more; after a stall, the next batch does so.
        """
        end_s = time.monotonic() + self._timeout_s
        for is_last in (False, True):
            client = self._server()
            try:
                # Another batch may be reading the topology, so a second try reads it in any case.
                if is_last or self._is_moved:
                    self._is_moved = False
                    client.nodes_manager.initialize()
                for server, positions in self._route(client, names):
                    with channel(server, self._timeout_s) as connected:
                        talk(connected, positions)
                return
            except (ServerError, *CLIENT_ERRORS, OSError) as error:
                self._is_moved = self._is_cluster
                if is_last or not self._is_cluster or time.monotonic() >= end_s:
                    raise OSError(f"{self._address}: {_shown(error)}") from None

    def _route(self, client: Any, names: list[bytes]) -> list[tuple[Any, Sequence[int]]]:
        if not self._is_cluster:
            return [(client, range(len(names)))]
        nodes: dict[str, Any] = {}
        positions: dict[str, list[int]] = {}
        for i, name in enumerate(names):
            node = client.get_node_from_key(name)
            nodes[node.name] = node
            positions.setdefault(node.name, []).append(i)
        return [(client.get_valkey_connection(node), positions[name]) for name, node in nodes.items()]


def clear_server(
    values: ValkeyOptions, prefix: str, confirm: Callable[[dict[str, int], list[str] | None], None]
) -> int:
    """Delete the names that begin with `prefix`, and return their number.

    `confirm` is called before with the number of names of each model, and with the addresses of other clients, or None
    if the user may not list them. If it raises, nothing is deleted.
    """
    pattern = prefix.encode() + b"*"
    # Counted before anything is deleted, so that `confirm` can name what would be lost and who uses it.
    counts: Counter[str] = Counter()
    clients: list[str] | None = []
    try:
        with closing(_client_of(values)) as client:
            for node in _nodes_of(client, values.cluster):
                names = node.scan_iter(match=pattern, count=1000)
                counts.update(b":".join(name.split(b":")[:2]).decode(errors="replace") for name in names)
                clients = _other_clients(node, clients)
            confirm(counts, clients)
            return sum(_unlink(client, values.cluster, pattern))
    except (*CLIENT_ERRORS, OSError) as error:
        raise ValueError(f"{_address(values.url)} cannot be used: {_shown(error)}") from None


def _nodes_of(client: Any, is_cluster: bool) -> list[Any]:
    """Return a client of each server that holds names."""
    return [client.get_valkey_connection(node) for node in client.get_primaries()] if is_cluster else [client]


def _unlink(client: Any, is_cluster: bool, pattern: bytes) -> Iterator[int]:
    """Delete the names that match; yield the number that each step of the servers' scans has deleted."""
    for node in _nodes_of(client, is_cluster):
        cursor = None
        while cursor != 0:
            # A step may find no name.
            cursor, names = node.scan(cursor or 0, match=pattern, count=1000)
            # One name a command: in a cluster, names of one command must lie in one slot.
            with node.pipeline(transaction=False) as pipeline:
                for name in names:
                    pipeline.unlink(name)
                num_deleted = sum(pipeline.execute())
            yield num_deleted


def _other_clients(node: Any, known: list[str] | None) -> list[str] | None:
    try:
        own_id = node.client_id()
        addresses = [client["addr"] for client in node.client_list(_type="normal") if int(client["id"]) != own_id]
    except exceptions.NoPermissionError:
        return None
    return None if known is None else known + addresses


def _address(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.hostname or parts.path or 'localhost'}{f':{parts.port}' if parts.port else ''}"


def _client_of(values: ValkeyOptions) -> Any:
    if values.ca_file is not None:
        # Without this check, TLS would wait for a FIFO, or read a device without end.
        read_small_file(values.ca_file)
    options = {
        "socket_timeout": values.timeout_s,
        "socket_connect_timeout": values.timeout_s,
        # The manager's breaker decides when to try again.
        "retry": Retry(NoBackoff(), 0),
        "username": values.username,
        "password": values.password or os.environ.get(PASSWORD_VARIABLE),
        "ssl_ca_certs": values.ca_file,
    }
    client_type: Any = ValkeyCluster if values.cluster else Valkey
    return client_type.from_url(values.url, **{name: value for name, value in options.items() if value})


def _shown(error: Exception) -> str:
    """Return the first line of a server's message, which may be long."""
    return (str(error).splitlines() or [""])[0][:200]
