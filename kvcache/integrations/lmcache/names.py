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
from typing import Any

from lmcache.v1.distributed.api import ObjectKey

from kvcache.tiers.disk.slot_table import MAX_KEY_BYTES

DIGEST_BYTES = 16
MAX_HASH_BYTES = MAX_KEY_BYTES - DIGEST_BYTES
_MAX_UNWRITTEN = 1 << 16
_Common = tuple[str, int, int, str]


class Names:
    """The file ``names`` of a directory, which one process may use at a time; it has `max_bytes` at most.

    `digests_in_use` returns the digests that must stay when the file is full.
    """

    def __init__(self, path: Path, max_bytes: int, digests_in_use: Callable[[], set[bytes]]) -> None:
        self._path = path / "names"
        self._max_bytes = max_bytes
        self._digests_in_use = digests_in_use
        self._digest_of: dict[_Common, bytes] = {}
        self._common_of: dict[bytes, _Common] = {}
        self._written: set[bytes] = set()
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock_fd = os.open(path / "names.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._load()
        except OSError as error:
            os.close(self._lock_fd)
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
        """Write the names of keys that are to be stored. OSError: the file is full, or cannot be written."""
        new = {key[:DIGEST_BYTES] for key in disk_keys} - self._written
        if not new:
            return
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
        self._written |= new

    def close(self) -> None:
        """Let another process use the directory."""
        os.close(self._lock_fd)

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
