"""The ledger: the state of each slot of a pool, in shared memory that outlives the owner.

The owner writes it before each answer that lets a client act. `PoolLedger` wraps the pool's own operations, so that
promotions of tiers are recorded, too; a pool without a ledger has no wrapper.
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
import stat
import struct
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvcache.block import ABSENT, PENDING, READY
from kvcache.control.watch import Watch
from kvcache.node.batch import MAX_KEY_BYTES
from kvcache.node.protocol import start_ticks
from kvcache.request import ReqContext
from kvcache.specs import PrepareStoreOutput

MAX_ENGINES, MAX_PROCESSES = 64, 1024
OWNER = 255
"""The writer of blocks that no living engine wrote: promotions, and blocks of engines that have ended."""

_MAGIC = b"KVNODE04"
_HEAD = struct.Struct("<8sQ16sI")
_IDENTITY_BYTES = 64 << 10
_PROCESS = np.dtype([("pid", "<i8"), ("start", "<i8"), ("engine", "<i4"), ("rank", "<i4")])
# One array a field, because the slots of a prompt mostly lie side by side.
_FIELDS = {"readers": "<u8", "stamp": "<u8", "state": "u1", "writer": "u1", "key_bytes": "u1"}
_FIELDS["key"] = f"V{MAX_KEY_BYTES}"
_SLOT_BYTES = sum(np.dtype(kind).itemsize for kind in _FIELDS.values())
_FIRST_NAME = _HEAD.size + _IDENTITY_BYTES
_FIRST_PROCESS = _FIRST_NAME + 32 * MAX_ENGINES
# Aligned for the widest field.
_FIRST_SLOT = -(-(_FIRST_PROCESS + _PROCESS.itemsize * MAX_PROCESSES) // 8) * 8


def _slot_fields(buffer: Any, num_slots: int) -> dict[str, Any]:
    fields, start = {}, _FIRST_SLOT
    for name, kind in _FIELDS.items():
        fields[name] = np.frombuffer(buffer, kind, num_slots, start)
        start += fields[name].nbytes
    return fields


class Process(NamedTuple):
    """A process of an engine; rank -1 is its scheduler."""

    pid: int
    engine: int
    rank: int


class Ledger:
    """The ledger file of a pool: 55 bytes a slot, the names of engines, and their processes.

    An existing file must be whole and of the same `identity`; `is_recovered` says whether there was one.
    """

    def __init__(self, path: Path, num_slots: int, identity: Mapping[str, Any]) -> None:
        text = json.dumps(identity, sort_keys=True).encode()
        if len(text) > _IDENTITY_BYTES:
            raise ValueError(f"the identity of a pool must have at most {_IDENTITY_BYTES} bytes, got {len(text)}")
        num_bytes = _FIRST_SLOT + _SLOT_BYTES * num_slots
        self.is_recovered = path.exists()
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            if not self.is_recovered:
                os.posix_fallocate(fd, 0, num_bytes)
            self._mapping = mmap.mmap(fd, num_bytes)
        finally:
            os.close(fd)
        self.names = np.frombuffer(self._mapping, "V32", MAX_ENGINES, _FIRST_NAME)
        self.processes = np.frombuffer(self._mapping, _PROCESS, MAX_PROCESSES, _FIRST_PROCESS)
        fields = _slot_fields(self._mapping, num_slots)
        self.readers, self.stamp, self.state, self.writer, self.key_bytes, self.key = fields.values()
        if not self.is_recovered:
            # The magic is written last: if the owner is killed before, the file is not read as a ledger.
            self._mapping[_HEAD.size : _HEAD.size + len(text)] = text
            self._mapping[: _HEAD.size] = _HEAD.pack(b"", num_bytes, secrets.token_bytes(16), len(text))
            self._mapping[: len(_MAGIC)] = _MAGIC
        self.clock = int(self.stamp.max(initial=0))

    @property
    def pool_id(self) -> str:
        """Identifies the content of the pool's memory: a new one if the pool was made anew."""
        return bytes(self._mapping[16:32]).hex()

    def begin(self, slots: Any, keys: list[bytes], writer: int) -> None:
        """Record that slots belong to a writer, which fills them with the blocks of `keys`."""
        # First, so that a kill within the next lines leaves no half key.
        self.state[slots] = ABSENT
        self.readers[slots] = 0
        self.key[slots] = np.frombuffer(b"".join(key.ljust(MAX_KEY_BYTES, b"\0") for key in keys), self.key.dtype)
        self.key_bytes[slots] = [len(key) for key in keys]
        self.writer[slots] = writer
        self.state[slots] = PENDING

    def end(self, slots: list[int], state: int) -> None:
        """Record that written slots are ready or empty."""
        self.use(slots)
        self.state[slots] = state

    def use(self, slots: Any) -> None:
        """Record a use of slots."""
        self.clock += 1
        self.stamp[slots] = self.clock

    def slots_of(self, epoch: bytes, first: int, num_slots: int) -> Any:
        """Return those of `num_slots` slots from `first` on that hold ready blocks of an epoch."""
        part = slice(first, first + num_slots)
        starts = self.key[part].view(np.uint8).reshape(-1, MAX_KEY_BYTES)[:, : len(epoch)]
        is_of_epoch = (starts == np.frombuffer(epoch, np.uint8)).all(axis=1) & (self.state[part] == READY)
        return first + np.flatnonzero(is_of_epoch)

    def keys_of(self, slots: Iterable[int]) -> list[bytes]:
        """Return the keys of slots."""
        return [self.key[slot].item()[: self.key_bytes[slot]] for slot in slots]

    def add_process(self, process: Process) -> None:
        """Record a process of an engine. ValueError: there are too many."""
        free = np.flatnonzero(self.processes["pid"] == 0)
        if not len(free):
            raise ValueError(f"a node's pool has at most {MAX_PROCESSES} processes of engines")
        row = self.processes[free[0] : free[0] + 1]
        row["start"], row["engine"], row["rank"] = start_ticks(process.pid), process.engine, process.rank
        row["pid"] = process.pid

    def drop_process(self, process: Process) -> None:
        """Forget a process of an engine."""
        rows = self.processes
        is_same = (rows["pid"] == process.pid) & (rows["engine"] == process.engine) & (rows["rank"] == process.rank)
        rows["pid"][is_same] = 0

    def drop_engine(self, engine: int) -> None:
        """Forget an engine that holds no slot, and its processes; its blocks stay."""
        self.writer[self.writer == engine] = OWNER
        rows = self.processes["engine"] == engine
        self.processes["pid"][rows] = 0
        # Remove the name last: after a kill, the next owner drops the rest of an engine that has a name.
        self.names[engine] = b"\0" * 32

    def drop_dead(self, living: Collection[int]) -> None:
        """Forget all engines but the living ones, and their leases."""
        self.readers &= np.uint64(sum(1 << engine for engine in living))
        self.readers[self.state != READY] = 0  # only a damaged ledger has such leases
        self.writer[~np.isin(self.writer, [*living])] = OWNER
        for engine in set(range(MAX_ENGINES)).difference(living):
            if self.names[engine].item().strip(b"\0"):
                self.drop_engine(engine)


class LedgerFile(NamedTuple):
    """The content of a ledger's file, or why it is not a whole ledger.

    `fault` is that reason, or "". In a faulty ledger the other fields are empty. `identity` is that of the pool,
    and `processes` are the recorded processes that still run.
    """

    fault: str
    identity: dict[str, Any]
    processes: list[Process]


def read_ledger(path: Path) -> LedgerFile:
    """Read a ledger without changing it. Any content is tolerated: a faulty ledger affects only its own pool."""
    try:
        # Opening a FIFO must not block.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return LedgerFile("missing", {}, [])
    except OSError as error:
        return LedgerFile(f"not readable ({error.strerror})", {}, [])
    try:
        status = os.fstat(fd)
        head = os.read(fd, _HEAD.size).ljust(_HEAD.size, b"\0") if stat.S_ISREG(status.st_mode) else bytes(_HEAD.size)
        magic, length, _, num_text = _HEAD.unpack(head)
        if magic != _MAGIC:
            return LedgerFile("of another version" if magic.startswith(_MAGIC[:6]) else "not a ledger", {}, [])
        # An owner allocates the whole file. A file with holes is refused: it may be larger than memory.
        if not _FIRST_SLOT < length == status.st_size <= status.st_blocks * 512 or num_text > _IDENTITY_BYTES:
            return LedgerFile("truncated", {}, [])
        mapping = mmap.mmap(fd, length, access=mmap.ACCESS_READ)
    finally:
        os.close(fd)
    # A new owner must not fail on flipped bytes. A flipped byte of a key is harmless: no engine asks for that block.
    identity: Any = None
    with suppress(ValueError, RecursionError):
        identity = json.loads(mapping[_HEAD.size : _HEAD.size + num_text])
    identity = identity if isinstance(identity, dict) else {}
    num_slots, block_bytes = (identity.get(name) for name in ("num_blocks", "block_bytes"))
    if type(num_slots) is not int or length != _FIRST_SLOT + _SLOT_BYTES * num_slots:
        return LedgerFile("damaged", {}, [])
    slots = _slot_fields(mapping, num_slots)
    rows = np.frombuffer(mapping, _PROCESS, MAX_PROCESSES, _FIRST_PROCESS)
    is_used = slots["state"] != ABSENT
    keys = slots["key"][is_used].tolist()
    rows = rows[rows["pid"] != 0]
    is_whole = (
        (type(block_bytes) is int and block_bytes > 0)
        and (slots["state"] <= max(PENDING, READY)).all()
        and (slots["stamp"] < 1 << 63).all()
        and np.isin(slots["key_bytes"][is_used], range(1, MAX_KEY_BYTES + 1)).all()
        and len(set(keys)) == len(keys)
        and np.isin(rows["engine"], range(MAX_ENGINES)).all()
    )
    if not is_whole:
        return LedgerFile("damaged", {}, [])
    # A process that has ended has no start time.
    processes = [Process(pid, *member) for pid, start, *member in rows.tolist() if start_ticks(pid) == start >= 0]
    return LedgerFile("", identity, processes)


class PoolLedger:
    """Wraps a `BlockPool`, whose block ids are slots, so that each change of its blocks reaches the ledger first.

    `writer` is the engine whose message is applied.
    """

    names: Collection[str] = ("prepare_store", "reserve", "commit", "abort")

    def __init__(self, pool: Any, ledger: Ledger) -> None:
        self._ledger = ledger
        self._pool = pool
        self.writer = OWNER
        self._pending: dict[bytes, int] = {}
        self._frees_slots = hasattr(pool.policy, "free_slots")
        if ledger.is_recovered:
            self._recover()
        Watch.of(pool).add(self)

    def wrap(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return the callable for a bound method of the pool."""
        if name in ("commit", "abort"):
            return partial(self._end, READY if name == "commit" else ABSENT, method)
        return partial(self._reserve, method)

    def _recover(self) -> None:
        """Give the empty pool the blocks of the ledger, each in its slot and in the order of their last uses.

        Unfinished stores of engines in the ledger stay reserved.
        """
        ledger, pool = self._ledger, self._pool
        ledger.state[(ledger.state == PENDING) & (ledger.writer == OWNER)] = ABSENT
        # An empty pool hands out its slots in ascending order, so each slot before the last block needs a key.
        slots = range(int(np.flatnonzero(ledger.state).max(initial=-1)) + 1)
        states = ledger.state[: len(slots)].tolist()
        keys = [key if states[i] else b"empty slot %d" % i for i, key in enumerate(ledger.keys_of(slots))]
        if keys:
            output = pool.reserve(keys, is_move=True)
            if output is None or output.keys_to_store != keys or output.store_spec.block_ids.tolist() != [*slots]:
                raise RuntimeError(f"the policy did not take back the {len(keys)} blocks of the ledger")
            pool.abort([key for key, state in zip(keys, states, strict=True) if state == ABSENT], is_move=True)
            pool.commit([key for key, state in zip(keys, states, strict=True) if state == READY], is_move=True)
        self._pending = {key: slot for slot, key in enumerate(keys) if states[slot] == PENDING}
        # The blocks of one message have one stamp: a request uses them again, the oldest ones first.
        ready = np.flatnonzero(ledger.state == READY)
        ready = ready[np.argsort(ledger.stamp[ready], kind="stable")]
        for run in np.split(ready, np.flatnonzero(np.diff(ledger.stamp[ready])) + 1):
            req_context = ReqContext()
            pool.touch([keys[slot] for slot in run.tolist()], req_context)
            pool.end_request(req_context)

    def _reserve(self, method: Callable[..., Any], *args: Any, **options: Any) -> PrepareStoreOutput | None:
        output: PrepareStoreOutput | None = method(*args, **options)
        if output is not None and output.evicted_keys and self._pool.num_free and self._frees_slots:
            # The store has not taken the slots of all blocks that it evicted.
            self._ledger.state[self._pool.policy.free_slots(len(output.evicted_keys))] = ABSENT
        if output is not None and output.keys_to_store:
            slots = output.store_spec.block_ids  # type: ignore[attr-defined]
            self._ledger.begin(slots, output.keys_to_store, self.writer)
            self._pending.update(zip(output.keys_to_store, slots.tolist(), strict=True))
        return output

    def _end(self, state: int, method: Callable[..., Any], keys: list[bytes], *args: Any, **options: Any) -> Any:
        slots = [self._pending.pop(key) for key in keys if key in self._pending]
        if slots:
            self._ledger.end(slots, state)
        return method(keys, *args, **options)
