"""Names: LMCache's keys as keys of a disk tier, and back. What keys have in common stands in one file.

A key of LMCache may have a model name and a salt of any length, a key of a disk tier at most 88 bytes. So the common
part is replaced by its digest, and the file says what each digest stands for. A damaged line is another digest, which
no object has. Objects whose line is lost are still found and loaded; they are only not listed.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

from lmcache.v1.distributed.api import ObjectKey

from kvcache.background import Background
from kvcache.tiers.disk.slot_table import MAX_KEY_BYTES

DIGEST_BYTES = 16
MAX_HASH_BYTES = MAX_KEY_BYTES - DIGEST_BYTES
_MAX_UNWRITTEN = 1 << 16
_Common = tuple[str, int, int, str]


class Names:
    """The file ``names`` of a directory, which one process may use at a time; it has `max_bytes` at most.

    `digests_in_use` returns the digests that must stay when the file is full. No call waits longer than `deadline_s`.
    """

    def __init__(self, path: Path, max_bytes: int, deadline_s: float, digests_in_use: Callable[[], set[bytes]]) -> None:
        self._path = path / "names"
        self._max_bytes = max_bytes
        self._deadline_s = deadline_s
        self._digests_in_use = digests_in_use
        self._thread: Background | None = None
        self._lock_fd = -1
        self._digest_of: dict[_Common, bytes] = {}
        self._common_of: dict[bytes, _Common] = {}
        self._written: set[bytes] = set()
        try:
            self._run(self._load)
        except OSError as error:
            self.close()
            reason = "another process uses it" if isinstance(error, BlockingIOError) else str(error)
            raise ValueError(f"directory {path} of a KVCacheL2 cannot be used: {reason}") from error

    def disk_key(self, key: ObjectKey) -> bytes:
        """Return the tier's key of an object; objects of different keys have different ones."""
        common = (key.model_name, key.kv_rank, key.object_group_id, key.cache_salt)
        digest = self._digest_of.get(common) or self._learn(common)
        disk_key: bytes = digest + key.chunk_hash
        return disk_key

    def object_key(self, disk_key: bytes) -> ObjectKey | None:
        """Return the object key of a tier's key; None if its name was lost."""
        common = self._common_of.get(disk_key[:DIGEST_BYTES])
        if common is None:
            return None
        model, rank, group, salt = common
        return ObjectKey(disk_key[DIGEST_BYTES:], model, rank, group, salt)

    def write(self, disk_keys: list[bytes]) -> None:
        """Write the names of keys that are to be stored. OSError: the file is full or hangs, or cannot be written."""
        if new := {key[:DIGEST_BYTES] for key in disk_keys} - self._written:
            self._run(lambda: self._write(new))

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

    def _write(self, new: set[bytes]) -> None:
        lines = self._lines(new)
        if self._path.exists() and self._path.stat().st_size + len(lines) > self._max_bytes:
            # Only names of objects that are held, or about to be, are kept.
            kept = self._written & self._digests_in_use()
            lines = self._lines(kept | new)
            if len(lines) > self._max_bytes:
                raise OSError(f"{self._path} is full: {len(kept)} names of objects that are held")
            temporary = self._path.with_suffix(".new")
            with open(temporary, "wb", opener=_private) as file:
                file.write(lines)
            temporary.replace(self._path)
            self._written = kept | new
            return
        with open(self._path, "ab", opener=_private) as file:
            file.write(lines)
        # Another thread may iterate over the old set.
        self._written = self._written | new

    def _lines(self, digests: set[bytes]) -> bytes:
        # The first line end closes a line that a killed process left half-written.
        return b"".join(b"\n%s\n" % json.dumps(self._common_of[digest]).encode() for digest in digests)

    def _learn(self, common: _Common) -> bytes:
        if len(self._common_of) > len(self._written) + _MAX_UNWRITTEN:
            # Clients may look up any salt.
            self._common_of = {digest: self._common_of[digest] for digest in self._written}
            self._digest_of = {common: digest for digest, common in self._common_of.items()}
        digest = hashlib.blake2b(json.dumps(common).encode(), digest_size=DIGEST_BYTES).digest()
        self._digest_of[common] = digest
        self._common_of[digest] = common
        return digest

    def _load(self) -> None:
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock_fd = os.open(self._path.parent / "names.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for line in self._path.read_bytes().splitlines() if self._path.exists() else []:
            try:
                values: Any = json.loads(line)
                ObjectKey(b"", *values)
                self._written.add(self._learn(tuple(values)))
            except (ValueError, TypeError):
                continue


def _private(path: str, flags: int) -> int:
    # The file names every `cache_salt`.
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
