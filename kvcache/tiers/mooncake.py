"""A tier on Mooncake Store: blocks that one engine stores are hits for every other engine of the same store.

Mooncake keeps blocks in memory that nodes lend to the store; its master knows where each one lies. Blocks go straight
from the host pool into that memory and back over RDMA or TCP, without a copy here. A value is the payload and
behind it its seal. Names, seals and epochs are those of `SharedStoreTier`; a block's key is written in hexadecimal.

The native client gives up after `timeout_s` if a master or a node does not answer (a load may wait for one after the
other), and does not touch host memory after that. Two of its calls hold the GIL: connecting and closing. So the tier
connects only to a master that answers; while the engine runs, another process tries first. A client is never closed,
but kept for the next tier of the process with the same arguments.

The client moves the blocks of a batch in parallel. Two batches in parallel take twice the CPU time of two in sequence,
so one thread of a tier loads and one stores, while others compute checksums and query.
"""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from threading import Lock
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from kvcache.background import python_words
from kvcache.options import choice_of, option, parse_count, parse_duration, parse_flag, parse_size, parse_text
from kvcache.tiers.base.job_tier import BlockOutcome, TierBatch
from kvcache.tiers.shared_store import SEAL_BYTES, SharedStoreTier, StoreOptions

if TYPE_CHECKING:
    from kvcache.tiers.base.tier import HostBlocks

_FORMAT = b"kvcache mooncake 2"
_EPOCH_BYTES = 8
_BUFFER_BYTES = 1 << 20
_MAINTAIN_INTERVAL_S = 2.0
# Not a call of the client: a master closes the connection at once, a stopped one does nothing.
_NONSENSE = bytes(32)
_NO_SPACE, _NOT_READY, _NOT_FOUND, _EXISTS = -200, -703, -704, -705
_ERRORS = {
    _NO_SPACE: "no space",
    -600: "invalid size",
    -707: "the lease ran out while it was read",
    -800: "transfer failed",
    -900: "the master cannot be reached",
    -901: "the master does not answer",
}


def _address(master: str, name: str = "master") -> tuple[str, int]:
    host, _, port = master.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"{name} must be 'host:port', got {master!r}")
    return host.strip("[]"), int(port)


def _parse_master(name: str, value: object) -> str:
    master = parse_text(name, value)
    _address(master, name)
    return master


@dataclass(frozen=True, kw_only=True)
class MooncakeOptions(StoreOptions):
    """The options of a `MooncakeTier`."""

    where: ClassVar[str] = "a mooncake tier"

    master: str = option(_parse_master, when="always: `host:port` of the store's master")
    num_replicas: int = option(parse_count, 1, when="a block must outlive the node that holds it")
    protocol: str = option(choice_of("tcp", "rdma"), "tcp", when="the nodes have RDMA devices")
    device: str = option(parse_text, "", when="with `rdma`: the names of the devices, comma-separated")
    lend_bytes: int = option(parse_size, 0, when="this process lends memory to the store until it ends")
    timeout_s: float = option(parse_duration, 2.0, when="a healthy master or node may take longer to answer")
    soft_pin: bool = option(parse_flag, False, when="the store must evict other values before these", rare=True)
    soft_pin_ttl_s: float | None = option(
        parse_duration, None, when="a soft pin must last longer, or less long, than the master's default", rare=True
    )
    metadata_server: str = option(
        parse_text, "P2PHANDSHAKE", when="your nodes find each other through a metadata server", rare=True
    )
    hostname: str | None = option(
        parse_text, None, when="other nodes reach this one under another address than the master does", rare=True
    )
    tenant: str = option(parse_text, "default", when="the master itself separates tenants", rare=True)
    max_batch_blocks: int = option(
        parse_count, 16, when="`kvcache bench tier` is faster with another number", rare=True
    )


# Connects and ends: 0 if there is a master.
_TRIAL = (
    "import json, os, sys\nfrom mooncake.store import MooncakeDistributedStore\n"
    "os._exit(MooncakeDistributedStore().setup(*json.loads(sys.argv[1])) != 0)"
)


_idle_clients: dict[tuple[Any, ...], list[Any]] = {}
"""Connected clients of closed tiers, by their arguments."""


class MooncakeTier(SharedStoreTier):
    """Keep blocks in a Mooncake Store.

    Parameters
    ----------
    options : MooncakeOptions
        The store's master and the rest; see :doc:`/howto/options`.
    host_blocks : numpy.ndarray
        The pool, uint8 or int8, shape (num_blocks, block_bytes); it is registered with the store's transfer engine.
    fingerprint : mapping, optional
        Identifies the model and the geometry of the blocks. An unreachable master is not an error: the tier works once
        it answers.
    """

    options_type = MooncakeOptions

    def __init__(
        self, options: MooncakeOptions, host_blocks: HostBlocks, fingerprint: Mapping[str, Any] | None = None
    ) -> None:
        self._master = _address(options.master)
        self._native = load_client(options.timeout_s)
        self._hostname, self._timeout_s = options.hostname, options.timeout_s
        self._setup = (
            options.metadata_server,
            options.lend_bytes,
            _BUFFER_BYTES,
            options.protocol,
            options.device,
            options.master,
        )
        self._tenant = options.tenant
        self._config = self._native.ReplicateConfig()
        self._config.replica_num = options.num_replicas
        self._config.data_type = self._native.ObjectDataType.KVCACHE
        if options.soft_pin:
            self._config.soft_pin_action = self._native.SoftPinAction.ENABLE
            if options.soft_pin_ttl_s is not None:
                self._config.soft_pin_ttl_ms = max(1, int(options.soft_pin_ttl_s * 1000))
        self._pinned = self._native.ReplicateConfig()
        self._pinned.with_hard_pin = True
        self._store: Any = None
        self._setup_of_store: tuple[Any, ...] = ()
        # One for each direction. A lock has no order, so loads could keep stores from a common one for ever.
        self._storing, self._loading = Lock(), Lock()
        # A call of the client waits for the master and for a node, and behind those of all other threads.
        # A slow link may need longer than `timeout_s`, which bounds a stall.
        self._turn_s = max(60.0, 2 * options.timeout_s * options.num_threads)
        self._is_starting = True
        super().__init__(
            options,
            host_blocks,
            fingerprint,
            "MOONCAKE",
            _FORMAT,
            max_batch_blocks=options.max_batch_blocks,
            maintain_interval_s=_MAINTAIN_INTERVAL_S,
            open_timeout_s=2 * options.timeout_s,
        )

    @classmethod
    def unavailable_reason(cls, options: MooncakeOptions) -> str:
        try:
            load_client(options.timeout_s)
            # This detects a missing master at once, and without a client.
            socket.create_connection(_address(options.master), timeout=options.timeout_s).close()
        except (OSError, ImportError) as error:
            return f"{options.master} cannot be used: {error}"
        # The trial block may lie in memory that this process lends, and needs little of it.
        return super().unavailable_reason(replace(options, lend_bytes=min(options.lend_bytes, 1 << 26)))

    def __repr__(self) -> str:
        return f"MooncakeTier({self._setup[-1]!r})"

    def open(self) -> None:
        # One seal per host row, registered like the rows; the last one carries the epoch.
        self._seals = np.zeros((len(self.host_rows) + 1, SEAL_BYTES), np.uint8)
        try:
            super().open()
        finally:
            self._is_starting = False

    def name_of(self, key: bytes) -> str:
        """Return the name of a block in the store."""
        return self.store_name(key).decode("latin-1")

    def store_name(self, key: bytes) -> bytes:
        return super().store_name(key.hex().encode())

    def connect(self) -> None:
        if self._store is not None:
            return
        arguments = (self._checked_host(), *self._setup)
        if idle := _idle_clients.get((*arguments, self._tenant)):
            store = idle.pop()
        else:
            if not self._is_starting:
                _try_in_a_process((*arguments[:2], 0, *arguments[3:]))
            store = self._native.MooncakeDistributedStore()
            if (answer := store.setup(*arguments, tenant_id=self._tenant)) != 0:
                raise self._error("setup", answer)
        try:
            for address, num_bytes in self._regions():
                if (answer := store.register_buffer(address, num_bytes)) != 0:
                    raise self._error("register_buffer", answer)
        except BaseException:
            self._keep(store, (*arguments, self._tenant))
            raise
        self._store, self._setup_of_store = store, (*arguments, self._tenant)

    def read_epoch(self) -> str | None:
        store, carrier = self._connected(), self._seals[-1, :_EPOCH_BYTES]
        answer = store.get_into(self.epoch_name.decode(), carrier.ctypes.data, _EPOCH_BYTES)
        if answer == _NOT_FOUND:
            return None
        if answer != _EPOCH_BYTES:
            raise self._error("get", answer)
        return carrier.tobytes().hex()

    def announce_epoch(self, epoch: str, replace: bool) -> None:
        store, carrier = self._connected(), self._seals[-1, :_EPOCH_BYTES]
        carrier[:] = np.frombuffer(bytes.fromhex(epoch), np.uint8)
        write = store.upsert_from if replace else store.put_from
        answer = write(self.epoch_name.decode(), carrier.ctypes.data, _EPOCH_BYTES, self._pinned)
        if answer not in (0, _EXISTS):
            raise self._error("write of the epoch", answer)

    def are_held(self, names: list[bytes]) -> Sequence[bool]:
        answers = self._connected().batch_is_exist(_texts(names))
        if (worst := min(answers, default=0)) < 0:
            raise self._error("exists", worst)
        return [answer == 1 for answer in answers]

    def put_values(self, names: list[bytes], batch: TierBatch, seal: Callable[[int], bytes]) -> Sequence[int]:
        store, held = self._connected(), self.are_held(names)
        if bad := [i for i, is_held in enumerate(held) if is_held and self.is_bad(batch.keys[i])]:
            # The client cannot overwrite a value from several buffers.
            self.delete_values([names[i] for i in bad])
            held = [is_held and i not in bad for i, is_held in enumerate(held)]
        outcomes = [BlockOutcome.HELD if is_held else BlockOutcome.REFUSED for is_held in held]
        absent = [i for i, is_held in enumerate(held) if not is_held]
        if not absent:
            return outcomes
        for i in absent:
            self._seals[batch.block_ids[i]].data[:] = seal(i)
        parts = self._parts(batch, absent)
        with self._turn(self._storing):
            answers = store.batch_put_from_multi_buffers(_texts([names[i] for i in absent]), *parts, self._config)
        for i, answer in zip(absent, answers, strict=True):
            if answer == 0:
                outcomes[i] = BlockOutcome.DONE
            elif answer == _EXISTS:
                outcomes[i] = BlockOutcome.HELD
            elif answer != _NO_SPACE:
                raise self._error("put", answer)
        return outcomes

    def get_values(
        self, names: list[bytes], batch: TierBatch, received: Callable[[int, memoryview | None], None]
    ) -> None:
        store, texts = self._connected(), _texts(names)
        parts = self._parts(batch, range(len(names)))
        with self._turn(self._loading):
            answers = store.batch_get_into_multi_buffers(texts, *parts)
        for i, answer in enumerate(answers):
            if answer == self.block_bytes + SEAL_BYTES:
                received(i, self._seals[batch.block_ids[i]].data)
            elif answer in (_NOT_FOUND, _NOT_READY):
                continue
            elif answer >= 0 or self._is_of_another_size(store, texts[i]):
                received(i, None)
            else:
                raise self._error("get", answer)

    def delete_values(self, names: list[bytes]) -> None:
        answers = self._connected().batch_remove(_texts(names), True)
        if failed := [answer for answer in answers if answer not in (0, _NOT_FOUND, _NOT_READY)]:
            raise self._error("remove", failed[0])

    def delete_older(self, prefix: bytes) -> None:
        num_removed = self._connected().remove_by_regex(f"^{prefix.decode()}", True)
        if num_removed < 0:
            raise self._error("remove", num_removed)

    def close(self) -> None:
        if self._store is not None:
            self._keep(self._store, self._setup_of_store)

    def _parts(self, batch: TierBatch, positions: Sequence[int]) -> tuple[list[list[int]], list[list[int]]]:
        """Return the addresses of payload and seal of some blocks, and their lengths."""
        start, addresses = self._seals.ctypes.data, batch.addresses
        pairs = [[addresses[i], start + SEAL_BYTES * batch.block_ids[i]] for i in positions]
        return pairs, [[self.block_bytes, SEAL_BYTES]] * len(pairs)

    @contextmanager
    def _turn(self, lock: Lock) -> Iterator[None]:
        if not lock.acquire(timeout=self._turn_s):
            raise OSError(f"{self._setup[-1]}: other batches kept the client for {self._turn_s} s")
        try:
            yield
        finally:
            lock.release()

    def _is_of_another_size(self, store: Any, name: str) -> bool:
        num_bytes: int = store.get_size(name)
        return num_bytes >= 0 and num_bytes != self.block_bytes + SEAL_BYTES

    def _connected(self) -> Any:
        if self._store is None:
            raise OSError(f"no connection to {self._setup[-1]} yet")
        return self._store

    def _checked_host(self) -> str:
        """Return this node's name; OSError if the master does not answer."""
        with socket.create_connection(self._master, timeout=self._timeout_s) as probe:
            probe.sendall(_NONSENSE)
            try:
                probe.recv(1)
            except ConnectionResetError:
                pass
            except TimeoutError:
                raise OSError(f"{self._setup[-1]} takes connections, and does not answer") from None
            return self._hostname or str(probe.getsockname()[0])

    def _regions(self) -> list[tuple[int, int]]:
        """Return address and size of the memory that the client reads and writes."""
        rows = self.host_rows
        num_bytes = (len(rows) - 1) * rows.strides[0] + self.block_bytes
        return [(rows.ctypes.data, num_bytes), (self._seals.ctypes.data, self._seals.nbytes)]

    def _keep(self, store: Any, setup: tuple[Any, ...]) -> None:
        """Keep a client for the next tier with the same arguments, without this tier's memory."""
        for address, _ in self._regions():
            store.unregister_buffer(address)
        _idle_clients.setdefault(setup, []).append(store)

    def _error(self, call: str, answer: int) -> OSError:
        return OSError(f"{self._setup[-1]}: {call} failed: {_ERRORS.get(answer, 'error')} ({answer})")


def _texts(names: list[bytes]) -> list[str]:
    return [name.decode("latin-1") for name in names]


def _try_in_a_process(setup: tuple[Any, ...]) -> None:
    """Raise OSError unless a client can be set up with these arguments."""
    done = subprocess.run(
        python_words(_TRIAL, json.dumps(setup)),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        stdin=subprocess.DEVNULL,
        timeout=60,
        check=False,
    )
    if done.returncode != 0:
        raise OSError(f"{setup[-1]} is no Mooncake master that answers")


def load_client(timeout_s: float) -> Any:
    """Import the native client, with time limits that are not set yet; it reads them once in a process."""
    seconds = max(1, math.ceil(timeout_s))
    for name, value in (
        ("MC_RPC_TIMEOUT_MS", int(timeout_s * 1000)),
        ("MC_RPC_CONNECT_TIMEOUT_MS", int(timeout_s * 1000)),
        ("MC_TCP_PROGRESS_TIMEOUT_SEC", seconds),
        ("MC_HANDSHAKE_CONNECT_TIMEOUT", seconds),
        # By default it tries 20 times, each as long, and holds the GIL.
        ("MC_STORE_CLIENT_SETUP_RETRIES", 2),
    ):
        os.environ.setdefault(name, str(max(1, value)))
    try:
        import mooncake.store
    except ImportError as error:
        raise ImportError(
            f"the mooncake tier needs its client: install kvcache's extra 'mooncake' ({error})"
        ) from error
    return mooncake.store
