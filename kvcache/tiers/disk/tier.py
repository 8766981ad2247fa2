"""The disk tier: blocks in one file of fixed slots, verified on every load, found again after a restart.

`JobTier` keeps jobs, threads, the index of slots and resets. This module moves runs of consecutive slots, gives the
blocks of an opened directory to the index, and makes everything durable once per interval.

A reset first writes a mark of a few bytes, which counts if the process is killed, then durably a header of another
generation and of the weights of the reset (`kvcache.epoch`); stores begin after that. A run carries the generation in
which it began, so records that an older run still writes are not valid.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from kvcache.background import Background
from kvcache.epoch import Epoch
from kvcache.options import (
    Component,
    Options,
    option,
    parse_count,
    parse_duration,
    parse_flag,
    parse_policy,
    parse_size,
    parse_text,
    parse_threads,
)
from kvcache.tiers.base.codec import make_codec, parse_codec, stored_form
from kvcache.tiers.base.job_tier import BlockOutcome, JobTier, TierBatch, TierContents
from kvcache.tiers.base.log_limiter import LogLimiter
from kvcache.tiers.base.medium import consecutive
from kvcache.tiers.base.wear import Wear
from kvcache.tiers.disk.block_store import BlockStore
from kvcache.tiers.disk.directory import TierDirectory, refusal_of, reported
from kvcache.tiers.disk.header import Header, TierDirectoryError, capacity_for, num_slots_within
from kvcache.tiers.disk.slot_table import MAX_KEY_BYTES

if TYPE_CHECKING:
    import numpy.typing as npt

    from kvcache.tiers.base.tier import HostBlocks

MAX_RUN_BLOCKS = 32
"""Slots in one system call at most. Work between two calls holds the GIL, and the scheduler waits for it."""
SHARED_BYTES = 2 << 20
"""Jobs of more bytes are divided among the threads. Smaller calls would take more time for Python than for the disk."""
_LOG = logging.getLogger(__name__)
_MARK_S = 0.02
"""How long `reset` waits for its mark, which takes a fraction of that unless the disk hangs."""
_CLOSE_S = 5.0
_PLACEHOLDERS = ("{dp_rank}", "{rank}")


def _parse_path(name: str, value: object) -> str:
    path = parse_text(name, str(value) if isinstance(value, Path) else value)
    for placeholder in re.findall(r"[{][^{}/]*[}]", path):
        # {model} is valid with a node's pool only, which replaces it before the tier is made.
        if placeholder not in (*_PLACEHOLDERS, "{model}"):
            known = " and ".join(_PLACEHOLDERS)
            raise ValueError(f"{name} has the unknown placeholder {placeholder}; known ones: {known}, got {path!r}")
    return path


@dataclass(frozen=True)
class DiskOptions(Options):
    """The options of a `DiskTier`."""

    where: ClassVar[str] = "a disk tier"

    path: str = option(
        _parse_path,
        when="always: the tier's directory; under vLLM and SGLang `{dp_rank}` in it is the data-parallel rank",
    )
    capacity: int = option(parse_size, when="always: bytes on disk at most, metadata included")
    cache_policy: str | type = option(parse_policy, "lru", when="another policy hits more in a tier of this size")
    read_only: bool = option(parse_flag, False, when="the tier serves what the directory holds and must not change it")
    num_threads: int = option(parse_threads, 4, when="`kvcache bench disk` is faster with another number", rare=True)
    flush_interval_s: float = option(
        parse_duration, 1.0, when="a loss of power may cost more, or must cost less, than a second", rare=True
    )
    max_queued_blocks: int = option(
        parse_count, 65536, when="more, or fewer, blocks may be under way at a time", rare=True
    )
    max_io_bytes: int = option(parse_size, 4 << 20, when="the disk needs larger, or smaller, operations", rare=True)
    preallocate: bool = option(
        parse_flag, True, when="the tier must not take its whole capacity at its start", rare=True
    )
    page_cache: bool | None = option(
        parse_flag,
        None,
        when="free host memory should cache recent blocks, or must not (SGLang and LMCache: true by default)",
        rare=True,
    )
    open_timeout_s: float = option(
        parse_duration, 10.0, when="the engine's start should wait longer, or less long, for the directory", rare=True
    )
    codec: Component | None = option(parse_codec, None, when="blocks must take fewer bytes in the tier")


class DiskTier(JobTier):
    """Keep blocks in a directory of a local disk.

    Parameters
    ----------
    options : DiskOptions
        The directory, its capacity and the rest; see :doc:`/howto/options`. The directory is made if it is missing. One
        process may write to it at a time.
    host_blocks : numpy.ndarray
        The pool, uint8 or int8, shape (num_blocks, block_bytes); for direct I/O, blocks start at multiples of 4096.
    fingerprint : mapping, optional
        The model, dtype and geometry of the blocks, JSON-serializable; a directory of another fingerprint is refused.

    Raises
    ------
    TierDirectoryError
        The directory cannot be used; the message says why. It is a ValueError.
    ValueError
        The capacity is below one block, or `fingerprint` is invalid.
    """

    options_type = DiskOptions
    wear: Wear

    def __init__(
        self, options: DiskOptions, host_blocks: HostBlocks, fingerprint: Mapping[str, Any] | None = None
    ) -> None:
        codec = make_codec(options.codec, host_blocks)
        block_bytes, described = stored_form(codec, host_blocks, fingerprint)
        try:
            plain = json.loads(json.dumps(described, allow_nan=False))
        except RecursionError:
            raise ValueError("fingerprint must be JSON-serializable, got one nested too deeply") from None
        except (TypeError, ValueError) as error:
            raise ValueError(f"fingerprint must be JSON-serializable, got {fingerprint!r}") from error
        self.path = Path(options.path)
        self._options = options
        self._header = Header.fresh(block_bytes, num_slots_within(options.capacity, block_bytes), plain)
        # Consecutive slots move in one call only if no padding lies between two blocks.
        is_packed = self._header.slot_bytes == block_bytes
        max_run_blocks = max(1, min(MAX_RUN_BLOCKS, options.max_io_bytes // block_bytes)) if is_packed else 1
        self._shared_blocks = SHARED_BYTES // block_bytes
        self.wear = Wear(self._header.num_slots, self._header.slot_bytes, options.flush_interval_s)
        self._store: BlockStore | None = None
        self._current = (0, self._header.generation)
        self._marks: list[Background] = []
        self._is_removed = False
        self._is_late = False
        self._warnings = LogLimiter(_LOG)
        super().__init__(
            host_blocks,
            "DISK",
            codec=codec,
            fingerprint=fingerprint,
            num_blocks=self._header.num_slots,
            cache_policy=options.cache_policy,
            num_threads=options.num_threads,
            max_queued_blocks=options.max_queued_blocks,
            max_batch_blocks=max_run_blocks,
            max_key_bytes=MAX_KEY_BYTES,
            open_timeout_s=options.open_timeout_s,
            maintain_interval_s=options.flush_interval_s,
            read_only=options.read_only,
        )
        self._is_late = self._store is None
        if self._is_late:
            _LOG.warning(
                "disk tier: directory %s has not opened within %s s; going on without it until it does",
                self.path,
                options.open_timeout_s,
            )

    @classmethod
    def unavailable_reason(cls, options: DiskOptions) -> str:
        return refusal_of(options.path, options.read_only)

    @staticmethod
    def capacity_for(num_blocks: int, block_bytes: int) -> int:
        """Return the smallest `capacity_bytes` that holds `num_blocks` blocks of `block_bytes`."""
        return capacity_for(num_blocks, block_bytes)

    @staticmethod
    def missing_bytes(path: Path, capacity_bytes: int) -> int | None:
        """Return the bytes that a tier of `capacity_bytes` still lacks at `path`, or None without a tier there."""
        try:
            with closing(TierDirectory(path, None, read_only=True)) as directory:
                header = directory.header
                return directory.missing_bytes(num_slots_within(capacity_bytes, header.block_bytes))
        except (OSError, ValueError):
            return None

    @staticmethod
    def recorded_fingerprint(path: Path) -> dict[str, Any] | None:
        """Return the fingerprint of the blocks at `path`, or None without a tier there."""
        with suppress(OSError, ValueError), closing(TierDirectory(path, None, read_only=True)) as directory:
            return directory.header.fingerprint
        return None

    @staticmethod
    def recorded_wear(path: Path, capacity_bytes: int, block_bytes: int = 0) -> Wear | None:
        """Return the wear recorded at `path`, for a tier of `capacity_bytes`.

        Without a tier there, return that of a new one, or None if its `block_bytes` are unknown or do not fit.
        """
        record = b""
        with suppress(OSError, ValueError), closing(TierDirectory(path, None, read_only=True)) as directory:
            block_bytes, record = directory.header.block_bytes, directory.read_wear()
        with suppress(ValueError):
            header = Header.fresh(block_bytes, num_slots_within(capacity_bytes, block_bytes), {})
            wear = Wear(header.num_slots, header.slot_bytes, record_s=0.0)
            wear.restore(record)
            return wear
        return None

    @property
    def is_direct(self) -> bool:
        """Whether I/O passes the page cache by; False until the directory is open."""
        return self._store is not None and self._store.is_direct

    def flush(self) -> None:
        """Make all stored blocks durable, and write recency; waits for the disk."""
        self._opened().flush()

    def open(self) -> TierContents:
        """Open the directory, and return its blocks, least recent first."""
        try:
            with ExitStack() as undo, reported(self.path, "opened"):
                return self._open(undo)
        except Exception as error:
            if self._is_late:
                _LOG.warning("disk tier: %s", error)
            raise

    def get(self, batch: TierBatch) -> list[BlockOutcome] | None:
        store, (_, generation) = self._opened(), self._current
        first_slot = _first_slot(batch)
        with self._warning_of("load"):
            is_good = store.read(first_slot, batch.keys, batch.buffers, generation)
        if all(is_good):
            return None
        text = "disk tier %s: %d blocks did not verify and count as misses, read from slot %d on"
        self._warnings.warn("corrupt", text, self.path, is_good.count(False), first_slot)
        return [BlockOutcome.DONE if good else BlockOutcome.CORRUPT for good in is_good]

    def get_now(self, slots: list[int], keys: list[bytes], buffers: list[list[memoryview]]) -> list[bool]:
        store, (_, generation) = self._opened(), self._current
        if store.is_direct:
            return [False] * len(keys)
        answers = []
        for slot, key, parts in zip(slots, keys, buffers, strict=True):
            answers.append(store.read_cached(slot, key, parts, generation))
            if answers[-1]:
                store.table.count_use(slot, 1)
        return answers

    def put(self, batch: TierBatch) -> list[BlockOutcome] | None:
        store, (number, generation) = self._opened(), self._current
        if batch.generation != number:
            # A reset has come in between.
            return [BlockOutcome.REFUSED] * len(batch.keys)
        with self._warning_of("store"):
            store.write(_first_slot(batch), batch.seqs or [], batch.keys, batch.buffers, generation)
        return None

    def clear(self, generation: int) -> None:
        """Begin a new generation with the reset's weights, durably. A read-only directory does not change."""
        store = self._opened()
        header = store.directory.header
        if not self._options.read_only:
            header = header.after_reset(Epoch.after_reset(self.version).of_fingerprint(header.fingerprint))
            with self._warning_of("reset"):
                store.directory.write_header(header)
        self._current = (generation, header.generation)

    def mark_reset(self) -> None:
        """Wait for the mark of a reset, but not for a disk that hangs."""
        if self._options.read_only or self._store is None:
            return
        directory = self._store.directory
        salt = directory.header.salt

        def mark_void(_: Event) -> None:
            with suppress(OSError), self._warning_of("reset"):
                directory.mark_void(salt)

        mark = Background("disk-mark", mark_void)
        mark.stop(_MARK_S)
        self._marks = [thread for thread in [*self._marks, mark] if thread.is_alive]

    def has_space(self) -> npt.NDArray[np.bool_]:
        return self._opened().table.has_space

    def erase(self, slots: list[int]) -> None:
        table = self._opened().table
        with self._warning_of("erase"):
            for slot in slots:
                table.void(slot, 1)

    def maintain(self) -> None:
        """Write recency and make everything durable; notice that the directory was removed."""
        store = self._store
        if store is None or self._options.read_only or self._is_removed:
            return
        with self._warning_of("flush"):
            if store.directory.is_present(store.fd):
                store.flush()
                self._record_wear(store)
                return
            self._is_removed = True
            reason = f"directory {self.path} was removed"
            self.set_unavailable(reason)
            _LOG.warning("disk tier: %s", reason)
            if not os.fstat(store.fd).st_nlink:
                # Open and deleted, it would take its space until the engine ends.
                os.ftruncate(store.fd, 0)

    def _record_wear(self, store: BlockStore, is_last: bool = False) -> None:
        record, num_kept = self.wear.record(is_last)
        store.directory.write_wear(record)
        self.wear.keep(num_kept)

    def close(self) -> None:
        """Close the files, unless a thread that hangs may still use them."""
        if all(mark.stop(_CLOSE_S) for mark in self._marks) and self._store is not None:
            if not (self._options.read_only or self._is_removed):
                with suppress(OSError), self._warning_of("close"):
                    self._record_wear(self._store, is_last=True)
            self._store.close()

    def cut(self, slots: list[int] | None, num_blocks: int) -> list[list[int]]:
        places = slots or []
        share = max(1, self._shared_blocks, math.ceil(num_blocks / self._options.num_threads))
        size = min(share, self.max_batch_blocks)
        if places and places == list(range(places[0], places[0] + num_blocks)):
            return consecutive(num_blocks, size)
        runs: list[list[int]] = []
        expected = -1
        for i in sorted(range(num_blocks), key=places.__getitem__):
            if places[i] != expected or len(runs[-1]) == size:
                runs.append([])
            runs[-1].append(i)
            expected = places[i] + 1
        return runs

    def on_stored(self, batch: TierBatch) -> None:
        first_slot = _first_slot(batch)
        slots = np.arange(first_slot, first_slot + len(batch.keys))
        self._opened().table.stamp(slots, np.array(batch.seqs, np.uint64))

    def on_loaded(self, batch: TierBatch) -> None:
        self._opened().table.count_use(_first_slot(batch), len(batch.keys))

    def on_used(self, slots: list[int], last_seq: int) -> None:
        # The head of the prefix is the latest.
        self._opened().table.stamp(np.array(slots), last_seq - np.arange(len(slots), dtype=np.uint64))

    def _open(self, undo: ExitStack) -> TierContents:
        directory = TierDirectory(self.path, self._header, self._options.read_only)
        undo.callback(directory.close)
        is_allocated = self._options.preallocate and not self._options.read_only and directory.allocate()
        store = BlockStore(directory, self.host_rows, self._options.read_only, bool(self._options.page_cache))
        undo.callback(store.close)
        store.table.has_space[:] = is_allocated
        self.wear.restore(directory.read_wear())
        keys, slots, seqs, times = store.table.load()
        undo.pop_all()
        if len(set(keys)) < len(keys):
            # A key stands in two slots. Only the record of the older slot is left.
            latest: dict[bytes, int] = {}
            for i, key in enumerate(keys):
                if key not in latest or seqs[i] > seqs[latest[key]]:
                    latest[key] = i
            kept = sorted(latest.values())
            keys, slots = [keys[i] for i in kept], slots[kept]
        self._store, self._current = store, (0, directory.header.generation)
        return TierContents(directory.header.num_slots, keys, slots, int(times[-1]) if len(times) else 0)

    def _opened(self) -> BlockStore:
        if self._store is None:
            raise TierDirectoryError(f"disk tier directory {self.path} is not open yet")
        return self._store

    @contextmanager
    def _warning_of(self, operation: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            text = "disk tier %s: a %s failed: %s: %s"
            cause = f"{operation} {error.errno}"
            self._warnings.warn(cause, text, self.path, operation, type(error).__name__, error)
            raise


def _first_slot(batch: TierBatch) -> int:
    if not batch.slots:
        raise ValueError(f"batch of job {batch.job_id} has no slots")
    return batch.slots[0]
