"""KVCacheL2: LMCache's objects in a bounded, checksummed directory of disk tiers, one for each object size.

LMCache's threads submit tasks and are woken by event descriptors. Threads of our own run the tasks, and each ends after
a deadline. A task that is reported leaves LMCache's memory alone.
"""

from __future__ import annotations

import heapq
import logging
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from queue import SimpleQueue
from threading import Event, Lock, RLock
from typing import Any

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import KeyEntry, KeyListPage, ObjectKey
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import AdapterUsage, L2AdapterInterface
from lmcache.v1.platform import create_event_notifier

from kvcache.assembly.assemble import open_exporters
from kvcache.background import Background
from kvcache.control.telemetry import Telemetry
from kvcache.integrations.lmcache.locks import Locks, read_ttl_s
from kvcache.integrations.lmcache.names import DIGEST_BYTES, MAX_HASH_BYTES, Names, disk_key
from kvcache.integrations.lmcache.settings import L2Settings
from kvcache.integrations.lmcache.sizes import Sizes
from kvcache.metrics import Part
from kvcache.tiers.base.log_limiter import LogLimiter

_LOG = logging.getLogger(__name__)
_MAX_WAIT_S = 60.0
"""LMCache takes its memory back after minutes (its lock TTLs), so a task that waited longer is not begun."""
_QUEUES = ("store", "load", "load")
"""The queue of each thread."""


class KVCacheL2(L2AdapterInterface):
    """An L2 adapter of LMCache (``"type": "plugin"``); `params` are the ``adapter_params``, see `L2Settings`.

    ValueError: an option is missing, unknown or invalid, or the directory cannot be used.
    """

    def __init__(self, params: dict[str, Any], l1_memory_desc: Any = None) -> None:
        self._settings = L2Settings.parse(params)
        super().__init__(max_capacity_bytes=self._settings.options.capacity)
        self._warnings = LogLimiter(_LOG)
        self._task_ids = count()
        self._results: dict[int, Any] = {}
        self._stored: dict[int, L2StoreResult] = {}
        self._locks = Locks(read_ttl_s())
        self._lock = Lock()
        self._telling = RLock()
        self._has_name = self._is_closed = False
        deadline_s = self._settings.tier.config.deadline_s
        self._names = Names(self._settings.path, self._settings.names_bytes, deadline_s, self._digests_in_use)
        try:
            self._sizes = Sizes(self._settings, self._locks.follow)
        except BaseException:
            self._names.close()
            raise
        self._notifiers = [create_event_notifier() for _ in range(3)]
        self._queues = {name: SimpleQueue[Any]() for name in _QUEUES}
        self._threads = [Background(f"lmcache-{name}", partial(_run_tasks, self._queues[name])) for name in _QUEUES]
        self._telemetry = Telemetry(None, labels={"engine": "lmcache"}, config=self._settings.tier.describe())
        self._telemetry.sources.append(self._parts)
        open_exporters(self._settings.exporters, self._telemetry)

    def get_store_event_fd(self) -> int:
        return int(self._notifiers[0].fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        return int(self._notifiers[1].fileno())

    def get_load_event_fd(self) -> int:
        return int(self._notifiers[2].fileno())

    def submit_store_task(self, keys: list[ObjectKey], objects: list[Any]) -> int:
        return self._submit("store", lambda: self._store(keys, objects), L2StoreResult(False, 0), self._stored, 0)

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        with self._lock:
            stored = dict(self._stored)
            self._stored.clear()
        return stored

    def submit_lookup_and_lock_task(self, keys: list[ObjectKey], group_layout_descs: Any = None) -> int:
        task_id = next(self._task_ids)
        self._end(task_id, _bitmap(self._look_up(keys)), self._results, 1)
        return task_id

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        with self._lock:
            return self._results.pop(task_id, None)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        self._locks.release([disk_key(key) for key in keys])

    def submit_load_task(self, keys: list[ObjectKey], objects: list[Any]) -> int:
        return self._submit("load", lambda: self._load(keys, objects), Bitmap(len(keys)), self._results, 2)

    query_load_result = query_lookup_and_lock_result

    def delete(self, keys: list[ObjectKey]) -> None:
        """Delete the objects that are not locked, also on disk; waits for ``deadline_s`` at most for each size."""
        self._locks.end_lapsed()
        disk_keys = [key for key in map(disk_key, keys) if key not in self._locks]
        for objects in self._sizes.all():
            objects.note([], objects.store.delete(disk_keys))
        self._tell()

    def list_l2_keys(self, model_name: str | None = None, page_size: int = 500, cursor: str | None = None) -> Any:
        if page_size <= 0:
            raise ValueError(f"page_size must be positive, got {page_size}")
        size_text, _, key_text = (cursor or "0.").partition(".")
        after = int(size_text), bytes.fromhex(key_text)
        with self._telling:
            self._tell()
            places = ((objects.size, key) for objects in self._sizes.all() for key in objects.keys)
            page = heapq.nsmallest(page_size, (place for place in places if place > after))
        named = [(self._names.object_key(key), size) for size, key in page]
        entries = [
            KeyEntry(key.to_encoded_object_key(), size)
            for key, size in named
            if key is not None and model_name in (None, key.model_name)
        ]
        return KeyListPage(tuple(entries), f"{page[-1][0]}.{page[-1][1].hex()}" if len(page) == page_size else None)

    def get_usage(self) -> AdapterUsage:
        self._tell()
        return super().get_usage()

    def set_backend_identity(self, name: str, shared: bool = False) -> None:
        super().set_backend_identity(name, shared)
        self._has_name = True
        self._tell()

    def register_listener(self, listener: Any) -> None:
        """Register a listener, and notify it of the objects that are held already."""
        with self._telling:
            self._tell()
            super().register_listener(listener)
            for objects in self._sizes.all():
                if keys := [self._names.object_key(key) for key, is_told in objects.keys.items() if is_told]:
                    listener.on_l2_keys_stored(keys, [objects.size] * len(keys))

    def report_status(self) -> dict[str, Any]:
        self._tell()
        self._locks.end_lapsed()
        tiers = {str(objects.size): objects.store.stats().tier for objects in self._sizes.all()}
        is_open = not any(tier.unavailable_reason for tier in tiers.values())
        # If all objects of a size are locked, its tier cannot store any.
        stores = [objects.store for objects in self._sizes.all()]
        has_room = all(self._locks.num_pinned(store.tier) < store.tier.num_blocks for store in stores)
        shown = ("num_held", "num_blocks", "corrupt_blocks", "unavailable_reason", "last_error")
        return {
            "is_healthy": is_open and has_room,
            "type": "KVCacheL2",
            "path": str(self._settings.path),
            "num_locked": len(self._locks),
            "lapsed_locks": self._locks.num_lapsed,
            "refused_sizes": sorted(self._sizes.refused),
            "sizes": {size: {name: getattr(tier, name) for name in shown} for size, tier in tiers.items()},
        }

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._telemetry.close()
        for name, thread in zip(_QUEUES, self._threads, strict=True):
            thread.stopping.set()
            self._queues[name].put(None)
        for thread in self._threads:
            thread.stop(2 * self._settings.tier.config.deadline_s)
        self._sizes.close()
        self._names.close()
        for notifier in self._notifiers:
            notifier.close()

    def _submit(self, queue: str, work: Callable[[], Any], failure: Any, results: dict[int, Any], place: int) -> int:
        task_id, start_s = next(self._task_ids), time.monotonic()

        def run() -> None:
            result = failure
            try:
                if time.monotonic() - start_s < _MAX_WAIT_S:
                    result = work()
                self._tell()
            except Exception as error:
                self._warnings.warn(queue, "KVCacheL2: a %s failed: %s: %s", queue, type(error).__name__, error)
            self._end(task_id, result, results, place)

        self._queues[queue].put(run)
        return task_id

    def _end(self, task_id: int, result: Any, results: dict[int, Any], place: int) -> None:
        with self._lock:
            results[task_id] = result
        # A call or a task that is late finds the notifiers closed.
        if not self._is_closed:
            self._notifiers[place].notify()

    def _store(self, keys: list[ObjectKey], memory: list[Any]) -> L2StoreResult:
        self._locks.end_lapsed()
        self._names.write(keys)
        num_bytes, is_whole = 0, True
        for size, (disk_keys, buffers, _) in self._by_size(keys, memory).items():
            if any(len(key) > DIGEST_BYTES + MAX_HASH_BYTES for key in disk_keys):
                raise ValueError(f"chunk hashes have at most {MAX_HASH_BYTES} bytes, got {max(map(len, disk_keys))}")
            store = self._sizes.opened(size).store
            held = store.exists(disk_keys)
            answers = store.put(disk_keys, buffers)
            num_bytes += size * sum(is_stored and not was for is_stored, was in zip(answers, held, strict=True))
            is_whole = is_whole and all(answers)
        return L2StoreResult(is_whole, num_bytes)

    def _load(self, keys: list[ObjectKey], memory: list[Any]) -> Bitmap:
        answers = [False] * len(keys)
        for size, (disk_keys, buffers, places) in self._by_size(keys, memory).items():
            # An object of another size is a miss.
            if (objects := self._sizes.get(size)) is not None:
                objects.store.touch(disk_keys)
                for place, is_loaded in zip(places, objects.store.get(disk_keys, buffers), strict=True):
                    answers[place] = is_loaded
        # A lock on a bad object would only keep the next store from using its slot.
        self._locks.unpin([disk_key(key) for key, is_loaded in zip(keys, answers, strict=True) if not is_loaded])
        if loaded := [key for key, is_loaded in zip(keys, answers, strict=True) if is_loaded]:
            self._notify_keys_accessed(loaded)
        return _bitmap(answers)

    def _by_size(
        self, keys: list[ObjectKey], memory: list[Any]
    ) -> dict[int, tuple[list[bytes], list[memoryview], list[int]]]:
        """Return by size the tier's keys, the buffers, and the places in the task."""
        groups: dict[int, tuple[list[bytes], list[memoryview], list[int]]] = {}
        for place, (key, item) in enumerate(zip(keys, memory, strict=True)):
            buffer = item.byte_array
            disk_keys, buffers, places = groups.setdefault(len(buffer), ([], [], []))
            disk_keys.append(disk_key(key))
            buffers.append(buffer)
            places.append(place)
        return groups

    def _look_up(self, keys: list[ObjectKey]) -> list[bool]:
        self._locks.end_lapsed()
        disk_keys = [disk_key(key) for key in keys]
        tiers_of: list[list[Any]] = [[] for _ in keys]
        for objects in self._sizes.all():
            tier, answers = objects.store.tier, objects.store.exists(disk_keys)
            # A block may have been evicted since.
            pinned = set(tier.pin([key for key, is_held in zip(disk_keys, answers, strict=True) if is_held]))
            for key, tiers in zip(disk_keys, tiers_of, strict=True):
                tiers += [tier] if key in pinned else []
        is_found = [bool(tiers) for tiers in tiers_of]
        self._locks.add(disk_keys, tiers_of)
        return is_found

    def _tell(self) -> None:
        """Notify LMCache of the objects that were stored and removed."""
        if not self._has_name:
            # LMCache names an adapter after it has made it, and events carry the name.
            return
        with self._telling:
            changes = self._sizes.changes
            while changes:
                objects, stored, removed = changes.popleft()
                if isinstance(removed, frozenset):
                    removed = [key for key in objects.keys if key not in removed]
                gone = [key for key in removed if objects.keys.pop(key, False)]
                came = [key for key in stored if key not in objects.keys]
                named = {key: self._names.object_key(key) for key in gone + came}
                objects.keys.update((key, named[key] is not None) for key in came)
                for keys, notify in ((gone, self._notify_keys_deleted), (came, self._notify_keys_stored)):
                    if object_keys := [name for key in keys if (name := named[key]) is not None]:
                        notify(object_keys, [objects.size] * len(object_keys))

    def _digests_in_use(self) -> set[bytes]:
        with self._telling:
            self._tell()
            return {key[:DIGEST_BYTES] for objects in self._sizes.all() for key in objects.keys}

    def _parts(self) -> list[Part]:
        return [part for objects in self._sizes.all() for part in objects.store.parts()]


def _run_tasks(queue: SimpleQueue[Any], stopping: Event) -> None:
    while (task := queue.get()) is not None and not stopping.is_set():
        try:
            task()
        except Exception:
            # LMCache's notifiers may raise, and later tasks must still run.
            _LOG.exception("KVCacheL2: a task failed")


def _bitmap(answers: list[bool]) -> Bitmap:
    bitmap = Bitmap(len(answers))
    for place, answer in enumerate(answers):
        if answer:
            bitmap.set(place)
    return bitmap
