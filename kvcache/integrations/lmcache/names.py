"""Names: LMCache's keys as keys of a disk tier, and back. One file holds the parts that many keys share.

A key of LMCache may have a model name and a salt of any length, a key of a disk tier at most 88 bytes. So the shared
part is replaced by its digest, and the file maps digests to parts. A damaged line gives a digest that no object has.
Objects whose line is lost are still found and loaded, but not listed.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from threading import Event

from lmcache.v1.distributed.api import ObjectKey

from kvcache.background import Background
from kvcache.tiers.disk.slot_table import MAX_KEY_BYTES

DIGEST_BYTES = 16
MAX_HASH_BYTES = MAX_KEY_BYTES - DIGEST_BYTES
_MAX_DIGESTS = 1 << 16
_Common = tuple[str, int, int, str]


@lru_cache(_MAX_DIGESTS)
def _digest(common: _Common) -> bytes:
    return hashlib.blake2b(json.dumps(common).encode(), digest_size=DIGEST_BYTES).digest()


def _common(key: ObjectKey) -> _Common:
    return key.model_name, key.kv_rank, key.object_group_id, key.cache_salt


def disk_key(key: ObjectKey) -> bytes:
    """Return the tier's key of an object; objects of different keys have different ones."""
    return _digest(_common(key)) + bytes(key.chunk_hash)


class Names:
    """The file ``names`` of a directory, which one process may use at a time; it has `max_bytes` at most.

    `digests_in_use` returns the digests that must stay when the file is full. No call waits longer than `deadline_s`.
    """

    def __init__(self, path: Path, max_bytes: int, deadline_s: float, digests_in_use: Callable[[], set[bytes]]) -> None:
        self._path = path / "names"
        self._max_bytes = max_bytes
        self._deadline_s = deadline_s
        self._digests_in_use = digests_in_use
        self._common_of: dict[bytes, _Common] = {}
        self._thread: Background | None = None
        self._lock_fd = -1
        try:
            self._run(self._load)
        except OSError as error:
            self.close()
            reason = "another process uses it" if isinstance(error, BlockingIOError) else str(error)
            raise ValueError(f"directory {path} of a KVCacheL2 cannot be used: {reason}") from error

    def object_key(self, disk_key: bytes) -> ObjectKey | None:
        """Return the object key of a tier's key; None if its name was lost."""
        if (common := self._common_of.get(disk_key[:DIGEST_BYTES])) is None:
            return None
        model, rank, group, salt = common
        return ObjectKey(disk_key[DIGEST_BYTES:], model, rank, group, salt)

    def write(self, keys: list[ObjectKey]) -> None:
        """Write the names of keys that are to be stored. OSError: the file is full or hangs, or cannot be written."""
        names = {_digest(common): common for common in set(map(_common, keys))}
        if names.keys() - self._common_of.keys():
            self._run(lambda: self._write(names))

    def close(self) -> None:
        """Let another process use the directory, unless a thread that hangs may still replace the file."""
        if self._lock_fd >= 0 and not (self._thread and self._thread.is_alive):
            os.close(self._lock_fd)
            self._lock_fd = -1

    def _run(self, work: Callable[[], object]) -> None:
        """Run I/O in a thread of its own; raise its error, or an OSError if it hangs, or the work before it does."""
        errors: list[Exception] = []

        def run(_: Event) -> None:
            try:
                work()
            except Exception as error:
                errors.append(error)

        if not (self._thread and self._thread.is_alive):
            self._thread = Background("lmcache-names", run)
            if self._thread.stop(self._deadline_s):
                for error in errors:
                    raise error
                return
        raise TimeoutError(f"{self._path} has not answered within {self._deadline_s} s")

    def _load(self) -> None:
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock_fd = os.open(self._path.parent / "names.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for line in self._path.read_bytes().splitlines() if self._path.exists() else []:
            try:
                common = _common(ObjectKey(b"", *json.loads(line)))
                self._common_of[_digest(common)] = common
            except (ValueError, TypeError, RecursionError):
                continue

    def _write(self, names: dict[bytes, _Common]) -> None:
        lines = _lines(names[digest] for digest in names.keys() - self._common_of.keys())
        if self._path.exists() and self._path.stat().st_size + len(lines) > self._max_bytes:
            # Only names of objects that are held, or about to be, are kept.
            kept = {digest: self._common_of[digest] for digest in self._digests_in_use() & self._common_of.keys()}
            lines = _lines((kept | names).values())
            if len(lines) > self._max_bytes:
                raise OSError(f"{self._path} is full: {len(kept)} names of objects that are held")
            temporary = self._path.with_suffix(".new")
            with open(temporary, "wb", opener=_private) as file:
                file.write(lines)
            temporary.replace(self._path)
            self._common_of = kept
        else:
            with open(self._path, "ab", opener=_private) as file:
                file.write(lines)
        self._common_of.update(names)


def _lines(names: Iterable[_Common]) -> bytes:
    # The first line end closes a line that a killed process left half-written.
    return b"".join(b"\n%s\n" % json.dumps(common).encode() for common in names)


def _private(path: str, flags: int) -> int:
    # The file names every `cache_salt`.
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
