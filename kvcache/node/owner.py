"""The owner of a node's pool: a process without torch that runs one manager for all engines of a machine.

It serves a Unix socket in one thread. All messages of all engines therefore apply in one total order. It ends a minute
after its last engine, and as a service never.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import math
import os
import select
import signal
import socket
import struct
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from kvcache.assembly.assemble import OffloadSettings, open_manager
from kvcache.metrics import EngineStats, OwnerStats, Part
from kvcache.node import protocol
from kvcache.node.leases import EngineLeases, NodeLeases
from kvcache.node.ledger import MAX_ENGINES, MAX_PROCESSES, Ledger, Process, read_ledger
from kvcache.node.protocol import Frame, FrameReader, differences, pack, unpack_hello
from kvcache.tiering.manager import TieredOffloadingManager
from kvcache.tiers.base.tier import describe_tier
from kvcache.transfer.shared_file import SharedBlocks, remove_unmapped

_LOG = logging.getLogger(__name__)
LINGER_S, _RETIRE_S = 60.0, 5.0
_POLL_S, _TIER_POLL_S = 0.25, 0.001
_NICE = -10
_LOCK_S, _REFUSE_S = 0.5, 0.05
_MAX_OUTBOX_BYTES = 64 << 20


class Connection:
    """One client's socket."""

    def __init__(self, sock: socket.socket, max_bytes: int) -> None:
        self.sock = sock
        self.pid, self.uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        self.reader = FrameReader(max_bytes)
        self.outbox = b""
        self.pidfd = -1
        self.has_greeted = False
        # Set by the greeting of a scheduler.
        self.engine: EngineLeases | None = None


class NodePool:
    """The memory, the ledger and the manager of a node's pool. The first engine's greeting describes them.

    The files of a killed owner are used again if they are whole and belong to the same model.
    ValueError: the memory does not suffice, an option is invalid, or living engines use a pool of another identity.
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        self.identity, self.options = dict(identity), dict(options)
        self._paths = pool_path, ledger_path = folder / "pool", folder / "ledger"
        sizes = {name: identity[name] for name in ("num_blocks", "block_bytes", "block_size")}
        num_blocks, block_bytes = sizes["num_blocks"], sizes["block_bytes"]
        # A service does not know its engines' windows, so these are not among the options. Tiers do not depend on them.
        settings = OffloadSettings.parse_part({**options, "group_windows": identity.get("group_windows")})
        fingerprint = {name: value for name, value in identity.items() if name != "group_windows"}
        reason, old_identity, self.processes = read_ledger(ledger_path)
        if not reason and (problems := differences(old_identity, self.identity)):
            # Living engines map the old memory and would read the blocks of another model from it.
            if self.processes:
                raise ValueError("; ".join(problems))
            reason = "of another model or size"
        if not pool_path.exists() or pool_path.stat().st_size != num_blocks * block_bytes:
            reason = reason or "without its memory"
        if reason:
            if reason != "missing":
                _LOG.warning("the pool in %s starts empty: its ledger is %s", folder, reason)
            self.processes = []
            self.unlink()
        with ExitStack() as stack:
            if reason:
                # Also remove the part of a file that was written before /dev/shm was full.
                stack.callback(self.unlink)
            self.shared = SharedBlocks(pool_path, num_blocks, block_bytes, is_owner=False)
            stack.callback(self.shared.close)
            self.inode = pool_path.stat().st_ino
            self.ledger = Ledger(ledger_path, num_blocks, self.identity)
            engines = {process.engine for process in self.processes}
            self.ledger.drop_dead(engines)
            shared = self.shared if settings.tiers else None
            labels = {"engine": folder.name}
            self.manager = open_manager(settings, **sizes, shared=shared, fingerprint=fingerprint, labels=labels)
            self.has_tiers = isinstance(self.manager, TieredOffloadingManager)
            stack.callback(self.close)
            self.leases = NodeLeases(self.manager, self.ledger)
            for engine in engines:
                self.leases.add_engine(engine)
            stack.pop_all()

    def unlink(self) -> None:
        """Remove the files; the memory is freed when no process maps it any more."""
        for path in self._paths:
            path.unlink(missing_ok=True)

    def describe(self) -> list[str]:
        """Return what the pool and its tiers hold, as a line of an engine's log."""
        pool = self.manager.pool
        tiers = self.manager.tier_stats() if isinstance(self.manager, TieredOffloadingManager) else []
        in_use = f"{pool.num_blocks - pool.num_free:,} of {pool.num_blocks:,} blocks in use"
        return [in_use, *(describe_tier(stats.tier) for stats in tiers)]

    def close(self) -> None:
        """Shut the manager and its tiers down; the files stay."""
        self.manager.shutdown()
        if not self.has_tiers:
            self.shared.close()


class Owner:
    """Serves the pool of a folder until `stop`, or until no engine has used it for `linger_s` seconds (None: never).

    A service has `options`, and refuses engines with other ones. Otherwise the first engine's options apply.
    ValueError: another owner serves this folder.
    """

    def __init__(self, folder: Path, options: Mapping[str, Any] | None = None, linger_s: float | None = LINGER_S):
        self.folder = folder
        try:
            # Another owner that looks for dead pools may hold the lock for a moment.
            self._lock = protocol.lock_file(folder / "owner.lock", _LOCK_S)
        except BlockingIOError:
            raise ValueError(f"another process owns the pool in {folder}") from None
        # A service's lock file has one byte: other owners see it without a lock, and leave its pool to the next one.
        os.ftruncate(self._lock, options is not None)
        _remove_dead_pools(folder.parent)
        self._options = options
        self._linger_s = linger_s
        self.pool: NodePool | None = None
        self.stats = dict.fromkeys(("frames", "dropped_clients", "refused_clients", "ended_engines"), 0)
        self._poll = select.epoll()
        self._by_fd: dict[int, Connection | Process] = {}
        path = folder / "socket"
        path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        path.chmod(0o600)
        self._listener.listen(MAX_ENGINES)
        self._listener.setblocking(False)
        self._poll.register(self._listener, select.EPOLLIN)
        self._spare_fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._last_use_s = time.monotonic()
        self._is_stopping, self._end_s = False, math.inf

    def run(self) -> None:
        """Serve until the end."""
        _LOG.info("process %d serves %s", os.getpid(), self.folder)
        while not self._is_stopping:
            pool = self.pool
            is_busy = pool is not None and pool.has_tiers and pool.manager.has_pending_work()  # type: ignore[union-attr]
            self.step(_TIER_POLL_S if is_busy else _POLL_S)
            if self._linger_s is not None and time.monotonic() - self._last_use_s > self._linger_s:
                self._end_unless_used()
            self._is_stopping |= time.monotonic() > self._end_s
        self.close()

    def stop(self, *_: object) -> None:
        """End after the current step. The files stay for the next owner."""
        self._is_stopping = True

    def retire(self, *_: object) -> None:
        """End when the last engine has ended, and remove the files. After `_RETIRE_S`, end and leave the files."""
        self._linger_s, self._end_s = 0.0, time.monotonic() + _RETIRE_S

    def step(self, timeout_s: float) -> None:
        """Handle the messages that have arrived, or arrive within `timeout_s`."""
        for fd, source in [(fd, self._by_fd.get(fd)) for fd, _ in self._poll.poll(timeout_s)]:
            if fd == self._listener.fileno():
                self._accept()
            elif self._by_fd.get(fd) is not source:
                # An earlier event closed this descriptor, and its number may now belong to a living process.
                continue
            elif isinstance(source, Process):
                self._on_process_end(fd, source)
            elif source is not None:
                self._serve(source)
        if self.pool is not None:
            self.pool.leases.step()
            if self.pool.has_tiers:
                self.pool.manager.on_schedule_end()
        if self._living_engines():
            self._last_use_s = time.monotonic()

    def close(self) -> None:
        """Close the sockets and the manager; the files stay."""
        for fd, source in list(self._by_fd.items()):
            if isinstance(source, Connection):
                self._drop(source)
            else:
                os.close(fd)
        self._by_fd.clear()
        self._listener.close()
        self._poll.close()
        if self.pool is not None:
            self.pool.close()
        os.close(self._spare_fd)
        os.close(self._lock)

    def parts(self) -> list[Part]:
        """Return the statistics of the owner, and of what each engine holds. May be called from any thread."""
        parts = [Part("owner", OwnerStats(**self.stats))]
        pids = {process.engine: str(process.pid) for process in self._processes() if process.rank < 0}
        for engine in [] if self.pool is None else list(self.pool.leases.engines.values()):
            counts = engine.num_shared_hits, engine.num_round_trips, engine.num_outages
            stats = EngineStats(pids.get(engine.number, ""), engine.num_held, len(engine.writing), *counts)
            parts.append(Part("engine", stats, (("number", str(engine.number)),)))
        return parts

    def _end_unless_used(self) -> None:
        # An engine that starts holds this lock until it is connected.
        try:
            fd = protocol.lock_file(self.folder / "lock", 0.0)
        except BlockingIOError:
            return
        except FileNotFoundError:  # the user's folder was removed, so no engine can come
            self._is_stopping = not self._living_engines()
            return
        try:
            # An engine that was connected just before is in the queue of the socket.
            self.step(0)
            if self._living_engines():
                return
            if self.pool is not None:
                self.pool.unlink()
            _remove_folder(self.folder)
            self._is_stopping = True
        finally:
            os.close(fd)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._refuse_unread(error)
            return
        sock.setblocking(False)
        # A greeting may list all slots of the pool, so the size of the ledger (27 bytes a slot) sets its limit.
        max_bytes = protocol.MAX_HELLO_BYTES
        with suppress(OSError):
            max_bytes += (self.folder / "ledger").stat().st_size // 2
        self._by_fd[sock.fileno()] = Connection(sock, min(max_bytes, protocol.MAX_FRAME_BYTES))
        self._poll.register(sock, select.EPOLLIN)

    def _refuse_unread(self, error: OSError) -> None:
        """Refuse the next client: if it stayed in the queue, each poll would return at once."""
        os.close(self._spare_fd)
        with suppress(OSError), self._listener.accept()[0] as client:
            _LOG.warning("a client of %s is refused: %s", self.folder, error)
            self.stats["refused_clients"] += 1
            # A client sends its greeting before it reads an answer.
            client.settimeout(_REFUSE_S)
            client.recv(1 << 16)
            client.sendall(pack(protocol.REFUSED, 0, 0, f"the owner: {error.strerror}".encode()))
        self._spare_fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _serve(self, connection: Connection) -> None:
        """Apply the messages of one client. An invalid one costs the client its connection, never its leases."""
        try:
            # Only a greeting brings a descriptor, and a plain `recv` is cheaper.
            sock, is_known = connection.sock, connection.engine is not None
            data, fds = (sock.recv(1 << 16), []) if is_known else socket.recv_fds(sock, 1 << 16, 1)[:2]
            for fd in fds:
                # A client may send any number of descriptors. Keep one.
                connection.pidfd, old_fd = fd, connection.pidfd
                if old_fd >= 0:
                    os.close(old_fd)
            if not data:
                self.stats["dropped_clients"] += not connection.has_greeted
                return self._drop(connection)
            answers = [self._answer(connection, frame) for frame in connection.reader.feed(data)]
            self._send(connection, b"".join(filter(None, answers)))
        except BlockingIOError:
            self._send(connection, b"")
        except ConnectionError:
            self._drop(connection)
        except Exception as error:
            _LOG.warning("a client of %s is dropped: %r", self.folder, error)
            self.stats["dropped_clients"] += 1
            self._drop(connection)

    def _answer(self, connection: Connection, frame: Frame) -> bytes | None:
        self.stats["frames"] += 1
        if frame.op == protocol.HELLO:
            return self._greet(connection, frame)
        if frame.op == protocol.STATS:
            connection.has_greeted = True  # `kvcache check` sends no other message
            return pack(protocol.DONE, 0, frame.request, json.dumps(self._figures()).encode())
        if connection.engine is None or self.pool is None:
            raise ValueError(f"operation {frame.op} before the greeting of a scheduler")
        answer = self.pool.leases.apply(connection.engine, frame)
        connection.engine.num_round_trips += answer is not None
        return answer

    def _figures(self) -> dict[str, Any]:
        figures = {"pid": os.getpid(), "options": self._options, **self.stats}
        if self.pool is not None:
            manager, figures["options"] = self.pool.manager.stats(), self.pool.options
            for name in ("num_blocks", "num_free", "num_referenced", "num_pending", "loaded_blocks", "stored_blocks"):
                figures[name] = getattr(manager, name)
        return figures

    def _send(self, connection: Connection, data: bytes) -> None:
        data = connection.outbox + data
        if not data:
            return None
        try:
            data = data[connection.sock.send(data) :]
        except BlockingIOError:
            pass
        except OSError:
            return self._drop(connection)
        if len(data) > _MAX_OUTBOX_BYTES:
            raise ValueError(f"it did not read {len(data)} bytes of answers")
        if data or connection.outbox:
            self._poll.modify(connection.sock, select.EPOLLIN | (select.EPOLLOUT if data else 0))
        connection.outbox = data
        return None

    def _drop(self, connection: Connection) -> None:
        """Close a connection with the messages in it. Its leases stay: the engine's workers may still copy."""
        if self._by_fd.pop(connection.sock.fileno(), None) is None:
            return
        self._poll.unregister(connection.sock)
        connection.sock.close()
        if connection.pidfd >= 0:
            os.close(connection.pidfd)

    def _drop_connections(self, engine: EngineLeases, pid: int = -1) -> None:
        """Drop the connections of an engine, and those of a process that has not greeted in them."""
        for source in list(self._by_fd.values()):
            if isinstance(source, Connection) and (
                source.engine is engine or (source.pid == pid and not source.has_greeted)
            ):
                self._drop(source)

    def _greet(self, connection: Connection, frame: Frame) -> bytes:
        """Admit a process of an engine, or refuse it with each reason."""
        if connection.engine is not None:
            raise ValueError("it greets a second time")
        connection.has_greeted = True
        hello, requests = unpack_hello(frame.payload)
        try:
            number, is_known = self._admit(connection, hello)
        except ConnectionError:
            raise
        except Exception as error:
            # A tier or an exporter, which the first engine's options name, may raise any error.
            self.stats["refused_clients"] += 1
            _LOG.warning("process of engine %r is refused: %s", hello.get("engine"), error)
            return pack(protocol.REFUSED, 0, 0, f"{error}".encode())
        assert self.pool is not None
        if hello["rank"] < 0:
            leases = self.pool.leases
            engine = leases.add_engine(number)
            # Older connections may still hold messages, or a part of a greeting, from before this list of leases.
            self._drop_connections(engine, connection.pid)
            leases.resume(engine, requests if is_known else [])
            leases.enter(engine, bytes.fromhex(hello["epoch"]), bool(hello.get("is_reset")))
            connection.engine, engine.num_outages = engine, int(hello.get("outages", 0))
            connection.reader.max_bytes = protocol.MAX_FRAME_BYTES
        answer = {"number": number, "pool_id": self.pool.ledger.pool_id, "pid": os.getpid(), "inode": self.pool.inode}
        answer["found"] = self.pool.describe()
        return pack(protocol.WELCOME, is_known, 0, json.dumps(answer).encode())

    def _admit(self, connection: Connection, hello: Mapping[str, Any]) -> tuple[int, bool]:
        """Return the number of an engine, and whether this process of it is known. ValueError: it is refused."""
        pid = connection.pid
        if connection.uid != os.geteuid():
            raise ValueError(f"the pool belongs to user {os.geteuid()}, this process to user {connection.uid}")
        if connection.pidfd < 0 or _pid_of(connection.pidfd) != pid:
            raise ValueError("engines and owner must share a pid namespace: the process of this engine is not visible")
        self._check_pool(hello)
        assert self.pool is not None
        ledger = self.pool.ledger
        name = hashlib.sha256(str(hello["engine"]).encode()).digest()
        rank, names = int(hello["rank"]), [row.item() for row in ledger.names]
        number = names.index(name) if name in names else names.index(b"\0" * 32) if b"\0" * 32 in names else -1
        if number < 0:
            raise ValueError(f"{MAX_ENGINES} engines use this pool, and no more can")
        members = [process for process in self._processes() if process.engine == number]
        is_known = any((member.pid, member.rank) == (pid, rank) for member in members)
        # A client that was welcomed before names the pool, and has leases. A second one of the process has none.
        if hello.get("pool_id") not in (None, ledger.pool_id if is_known else None):
            raise ValueError("the pool was made anew, so the slots of this engine are gone; restart the engine")
        leases = self.pool.leases.engines.get(number) if is_known and rank < 0 and "pool_id" not in hello else None
        if leases is not None and (leases.num_held or leases.writing):
            raise ValueError(f"engine {hello['engine']!r} has a scheduler in process {pid}, whose leases are in use")
        if not is_known:
            if taken := [member.pid for member in members if member.rank == rank]:
                raise ValueError(f"engine {hello['engine']!r} still runs as process {taken[0]}")
            ranks = set(range(min(hello["num_workers"], MAX_PROCESSES)))
            if missing := sorted(ranks.difference(member.rank for member in members)):
                raise ValueError(f"the workers of ranks {missing} do not map this pool: one machine, one node_pool")
            # Write the ledger before the answer: the next owner must know each process that may hold leases. Write the
            # name first: the next owner forgets a name without a process.
            process = Process(pid, number, rank)
            ledger.names[number] = name
            ledger.add_process(process)
            self._watch(connection.pidfd, process)
            connection.pidfd = -1
            _LOG.info("process %d joins: engine %d (%s), rank %d", pid, number, hello["engine"], rank)
        return number, is_known

    def _check_pool(self, hello: Mapping[str, Any]) -> None:
        """Compare an engine with the pool; the first engine decides what the pool is."""
        identity, options = hello["identity"], hello["options"]
        problems = [] if self.pool is None else differences(self.pool.identity, identity)
        expected = self._options if self.pool is None else self.pool.options
        problems += [] if expected is None else differences(expected, options)
        if hello["version"] != (version := protocol.VERSION):
            problems.append(f"the owner speaks version {version} of the protocol, this engine {hello['version']!r}")
        if problems and self._options is None and not self._living_engines():
            # The configuration was changed while no engine ran. End, and the engine starts the next owner.
            _LOG.info("ends for an engine of another configuration: %s", "; ".join(problems))
            self.stop()
            raise ConnectionAbortedError
        if problems:
            raise ValueError("; ".join(problems))
        if self.pool is None:
            pool = NodePool(self.folder, identity, options)
            self.pool = pool
            with suppress(OSError):
                # An engine's step waits for this thread only. Threads of tiers, which run already, keep their priority.
                # The call fails without the privilege.
                os.nice(_NICE)
            if pool.manager.telemetry is not None:
                pool.manager.telemetry.sources.append(self.parts)
            for process in pool.processes:
                with suppress(ProcessLookupError):
                    self._watch(os.pidfd_open(process.pid), process)
            for engine in set(pool.leases.engines).difference(self._living_engines()):
                pool.leases.bury(engine)
            _LOG.info("the pool of %s: %s", self.folder, "; ".join(pool.describe()))

    def _watch(self, pidfd: int, process: Process) -> None:
        self._by_fd[pidfd] = process
        self._poll.register(pidfd, select.EPOLLIN)
        self._last_use_s = time.monotonic()

    def _processes(self) -> list[Process]:
        return [source for source in list(self._by_fd.values()) if isinstance(source, Process)]

    def _living_engines(self) -> set[int]:
        return {process.engine for process in self._processes()}

    def _on_process_end(self, fd: int, process: Process) -> None:
        """Bury an engine when its last process has ended: then nothing copies to or from its slots."""
        self._poll.unregister(fd)
        os.close(fd)
        del self._by_fd[fd]
        pool, number = self.pool, process.engine
        assert pool is not None  # processes join after the pool is made
        pool.ledger.drop_process(process)
        if number in self._living_engines():
            return
        engine = pool.leases.add_engine(number)
        # Messages of a dead engine would apply to slots that belong to others by then.
        self._drop_connections(engine)
        pool.leases.bury(number)
        self.stats["ended_engines"] += 1
        _LOG.info("engine %d has ended", number)


def _remove_dead_pools(parent: Path) -> None:
    """Free the memory of pools whose owner and engines have ended. A service's pool stays for the next service."""
    for folder in parent.glob("node-*"):
        # Lock only pools that look dead: an owner that starts in a locked folder waits.
        with suppress(OSError):
            if (folder / "owner.lock").lstat().st_size == 0 and not read_ledger(folder / "ledger").processes:
                lock = protocol.lock_file(folder / "owner.lock", 0.0)
                try:
                    if not read_ledger(folder / "ledger").processes:
                        remove_unmapped(folder / "pool")
                        if not (folder / "pool").exists():
                            _remove_folder(folder)
                finally:
                    os.close(lock)


def _remove_folder(folder: Path) -> None:
    """Remove the folder of a pool that has ended, under the lock of its owner."""
    for name in ("ledger", "socket", "log", "lock", "owner.lock"):
        (folder / name).unlink(missing_ok=True)
    with suppress(OSError):
        folder.rmdir()


def _pid_of(pidfd: int) -> int:
    """Return the process that a pidfd refers to, or -1."""
    with suppress(OSError, ValueError, IndexError):
        text = Path(f"/proc/self/fdinfo/{pidfd}").read_text()
        return int(text.partition("\nPid:")[2].split()[0])
    return -1


def log_to_stderr() -> None:
    """Log what operators need to know of an owner, unless the program or ``KVCACHE_LOG`` configures the log."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")


def main(folder: str) -> int:
    """Serve the pool of a folder until its engines have ended."""
    log_to_stderr()
    try:
        owner = Owner(Path(folder))
    except ValueError as error:
        # Each engine that misses an owner starts one.
        _LOG.info("process %d ends: %s", os.getpid(), error)
        return 1
    signal.signal(signal.SIGTERM, owner.retire)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    owner.run()
    return 0
