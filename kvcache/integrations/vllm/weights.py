"""Digests of whole weight files: a tier is opened with them, and each file is read once only.

Samples would miss an edit of one row. Reading hundreds of GB at every start would cost minutes. So digests are kept in
a small file of the user's cache folder, with the size, the times and the inode of the file that they belong to.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import stat
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

_LEAF_BYTES = 4 << 20
_MAX_THREADS = 16
_MAX_FILES = 4096
_MAX_CACHE_BYTES = 4 << 20
# These writes do not change a file's times: one in the same tick of the file system's clock, and one by a mapping to a
# page that is already dirty. The kernel writes pages of a disk after 30 s, and those of a file in memory never.
_SETTLED_S = 60.0
_IN_MEMORY = (0x01021994, 0x858458F6)
"""The magic numbers of tmpfs and ramfs."""
# Look of a file: size, mtime_ns, ctime_ns, inode.
_Look = list[int]


def cache_path() -> Path:
    """Return the file that digests are kept in; its folder may not exist."""
    folder = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not folder.is_absolute():
        try:
            folder = Path.home() / ".cache"
        except RuntimeError:  # a user id without a name, as in some containers
            folder = Path(tempfile.gettempdir(), f"cache-{os.geteuid()}")
    return folder / "kvcache" / "weights.json"


def digest_of_files(files: list[Path], on_read: Callable[[int], None] | None = None) -> str:
    """Return a digest of the contents of all `files`, in this order; their paths and times do not matter.

    `on_read` is called with the number of bytes that have to be read, before they are. OSError: a file is unreadable.
    """
    paths = [path.resolve() for path in files]
    known = _read_cache()
    looks = [_look_of(path.stat()) for path in paths]
    in_memory = [_is_in_memory(path) for path in paths]
    unread = [i for i, path in enumerate(paths) if in_memory[i] or known.get(str(path), [])[:-1] != looks[i]]
    if unread and on_read is not None:
        on_read(sum(looks[i][0] for i in unread))
    changes: dict[str, list[int | str]] = {}
    digests = {i: str(known[str(path)][-1]) for i, path in enumerate(paths) if i not in unread}
    # Leaves of one file are hashed in several threads: hashlib releases the GIL, and models come as one file, too.
    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1), "kvcache-weights") as threads:
        for i in unread:
            digests[i], look = _digest_of(paths[i], threads)
            if not in_memory[i] and look == looks[i] and max(look[1:3]) / 1e9 < time.time() - _SETTLED_S:
                changes[str(paths[i])] = [*look, digests[i]]
    if changes:
        _write_cache({**known, **changes})
    whole = hashlib.sha256("".join(digests[i] for i in range(len(paths))).encode())
    return f"sha256:{whole.hexdigest()[:32]}"


def _digest_of(path: Path, threads: ThreadPoolExecutor) -> tuple[str, _Look]:
    """Return a file's digest, and its look if it did not change meanwhile (otherwise an empty one)."""
    with path.open("rb", buffering=0) as file:
        fd = file.fileno()
        look = _look_of(os.fstat(fd))
        digest = hashlib.sha256(f"{look[0]};".encode())

        def leaf(offset: int) -> bytes:
            leaf_digest, end = hashlib.sha256(), min(offset + _LEAF_BYTES, look[0])
            # A network file system may return less than was asked for.
            while offset < end and (data := os.pread(fd, end - offset, offset)):
                leaf_digest.update(data)
                offset += len(data)
            return leaf_digest.digest()

        for part in threads.map(leaf, range(0, look[0], _LEAF_BYTES)):
            digest.update(part)
        return digest.hexdigest(), look if _look_of(os.fstat(fd)) == look else []


def _is_in_memory(path: Path) -> bool:
    """Return whether a file lies on a file system in memory, or on an unknown one."""
    # The first field of `struct statfs` is the type.
    status = (ctypes.c_long * 64)()
    failed = ctypes.CDLL(None).statfs(os.fsencode(path), status)
    return bool(failed) or status[0] & 0xFFFFFFFF in _IN_MEMORY


def _look_of(status: os.stat_result) -> _Look:
    # A program can restore the mtime after a write, but not the ctime.
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def _read_cache() -> dict[str, list[int | str]]:
    """Return the entries of the cache; none if the file is missing, broken, or another user can write to it."""
    with suppress(OSError, ValueError, RecursionError):
        fd = os.open(cache_path(), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(fd, "rb") as file:
            status = os.fstat(fd)
            # An entry vouches for weights, so only this user may have written it.
            is_own = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o022
            if is_own and status.st_size <= _MAX_CACHE_BYTES:
                entries = json.loads(file.read(_MAX_CACHE_BYTES))
                if isinstance(entries, dict):
                    return {path: entry for path, entry in entries.items() if _is_entry(entry)}
    return {}


def _is_entry(entry: object) -> bool:
    if not isinstance(entry, list) or len(entry) != 5 or not all(type(part) is int for part in entry[:4]):
        return False
    return isinstance(entry[4], str) and len(entry[4]) == 64 and set(entry[4]) <= set("0123456789abcdef")


def _write_cache(entries: dict[str, list[int | str]]) -> None:
    """Replace the cache; of two engines that start together, one may lose its entries and read the files again."""
    # The newest entries are last. Without the limit, checkpoints of a training run would fill the file.
    text = json.dumps(dict(list(entries.items())[-_MAX_FILES:]))
    path = cache_path()
    with suppress(OSError):
        path.parent.mkdir(0o700, parents=True, exist_ok=True)
        fd, name = tempfile.mkstemp(prefix=".weights-", dir=path.parent)
        try:
            with os.fdopen(fd, "w") as file:
                file.write(text)
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink()
            raise
