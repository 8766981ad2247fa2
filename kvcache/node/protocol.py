"""Frames between the engines of a node and the owner of its pool, and the folder where they meet.

A frame is a fixed head and a payload of numpy arrays or JSON. Block data never passes the socket. Every length is
checked before a payload is read, so a broken client costs the owner one connection.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import struct
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvcache.hints import KINDS, OTHER, HintAction
from kvcache.node.batch import MAX_KEY_BYTES
from kvcache.options import without_secrets
from kvcache.request import NEXT_USES
from kvcache.transfer.shared_file import make_private, private_folder

VERSION = 6
EPOCH_BYTES = 8
"""Length of an epoch, the prefix of an engine's keys in the pool. The epoch is empty if the weights are unknown."""
HEAD = struct.Struct("<IBBHI")
"""The length of what follows this field, operation, flag, bytes of one key, the client's number of the request."""
MAX_FRAME_BYTES = 64 << 20
HELLO, WELCOME, REFUSED, OPEN, ACQUIRE, HELD, RELEASE = range(1, 8)
OFFER, SLOTS, STORED, END, RESET, STATS, DONE, LATE, USE = range(8, 17)
MAX_HELLO_BYTES = 1 << 20
"""Limit of a greeting without leases."""
_MAX_JSON_BYTES = 64 << 10
_HINT_WORDS = {*KINDS, OTHER, *NEXT_USES, None, "", "ignored"}
# Flags of ACQUIRE. Without one, the owner looks up the leading blocks of a prompt; HYBRID: all blocks; ONE_KEY: one
# block, also in tiers. The flag of HELD is the state of the next block, and SLOTS has flag 1 if the store is refused.
# Both answers contain a count, of found blocks that other engines wrote or of offered blocks that were absent, and the
# slot of each requested block, or -1 for a block without a slot. LATE with flag 1 cancels the last OFFER: the engine
# ignores its answer.
HYBRID, ONE_KEY = 1, 2
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


def most_held(num_slots: int) -> int:
    """Return how many slots of a pool the leases of one engine may hold."""
    return max(1, num_slots // 2)


class Frame(NamedTuple):
    """One message."""

    op: int
    flag: int
    key_bytes: int
    request: int
    payload: bytes


def pack(op: int, flag: int = 0, request: int = 0, payload: bytes = b"", key_bytes: int = 0) -> bytes:
    """Return the bytes of one frame."""
    return HEAD.pack(8 + len(payload), op, flag, key_bytes, request) + payload


class FrameReader:
    """Cuts a stream of bytes into frames of at most `max_bytes`."""

    def __init__(self, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self.max_bytes = max_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yield the frames that `data` completes. ValueError: a length is out of range."""
        buffer = self._buffer
        buffer += data
        start = 0
        try:
            while len(buffer) - start >= HEAD.size:
                length, op, flag, key_bytes, request = HEAD.unpack_from(buffer, start)
                if not 8 <= length <= self.max_bytes:
                    raise ValueError(f"a frame must have 8 to {self.max_bytes} bytes, got {length}")
                end = start + 4 + length
                if len(buffer) < end:
                    return
                payload = bytes(memoryview(buffer)[start + HEAD.size : end])
                start = end
                yield Frame(op, flag, key_bytes, request, payload)
        finally:
            del buffer[:start]


def unpack_keys(
    payload: bytes, key_bytes: int, first: int = 0, epoch: bytes = b""
) -> tuple[list[bytes], np.ndarray[Any, Any]]:
    """Return the keys with the prefix `epoch`, and the end positions that `pack_keys` wrote from byte `first` on.

    With an epoch, a key has at most `MAX_KEY_BYTES`: a longer one loses its first bytes and keeps 24 of the hash.
    ValueError: the payload has another length.
    """
    if not 1 <= key_bytes <= MAX_KEY_BYTES or len(payload) < first + 4:
        raise ValueError(f"keys must have 1 to {MAX_KEY_BYTES} bytes, got {key_bytes}")
    (num_keys,) = struct.unpack_from("<I", payload, first)
    num_left = len(payload) - first - 4 - num_keys * key_bytes
    if num_left not in (0, 4 * num_keys):
        raise ValueError(f"a list of {num_keys} keys of {key_bytes} bytes has {len(payload) - first} bytes")
    ends = np.frombuffer(payload, "<u4", num_left // 4, first + 4)
    keys = np.frombuffer(payload, f"V{key_bytes}", num_keys, first + 4 + num_left)
    if epoch:
        rows = np.empty((num_keys, min(len(epoch) + key_bytes, MAX_KEY_BYTES)), np.uint8)
        num_kept = rows.shape[1] - len(epoch)
        rows[:, : len(epoch)] = np.frombuffer(epoch, np.uint8)
        rows[:, len(epoch) :] = keys.view(np.uint8).reshape(num_keys, key_bytes)[:, key_bytes - num_kept :]
        keys = rows.reshape(-1).view(f"V{rows.shape[1]}")
    return keys.tolist(), ends


def unpack_slots(payload: bytes) -> list[int]:
    """Return the slots of STORED. ValueError: the payload has another length."""
    slots: list[int]
    num_slots, *slots = np.frombuffer(payload, "<i4").tolist()
    if num_slots != len(slots):
        raise ValueError(f"a list of {num_slots} slots has {len(slots)}")
    return slots


def unpack_actions(payload: bytes) -> list[HintAction]:
    """Return the actions of a request's hints, which its engine has parsed. ValueError or TypeError: one is invalid."""
    if len(payload) > _MAX_JSON_BYTES:
        raise ValueError(f"a hint has {len(payload)} bytes")
    actions = [HintAction(*row) for row in json.loads(payload)]
    for kind, next_use, name, _, answer, _ in actions:
        if {kind, next_use, answer} - _HINT_WORDS or type(name) not in (str, type(None)):
            raise ValueError(f"a hint has an invalid action: {payload[:80]!r}")
    return actions


def unpack_hello(payload: bytes) -> tuple[dict[str, Any], list[tuple[int, list[int], list[int]]]]:
    """Return the identity of a client, and per request the slots that it reads and writes.

    ValueError or TypeError: it is invalid.
    """
    hello = json.loads(payload)
    if not isinstance(hello, dict):
        raise ValueError("the greeting of a client must be a mapping")
    return hello, [(int(request), [*reads], [*writes]) for request, reads, writes in hello.pop("leases")]


def differences(of_pool: Mapping[str, Any], of_engine: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each name whose value differs between a pool and an engine."""
    pool, engine = without_secrets(dict(of_pool)), without_secrets(dict(of_engine))
    names = sorted(name for name in {*of_pool, *of_engine} if of_pool.get(name) != of_engine.get(name))
    return [f"{name}: the pool has {pool.get(name)!r:.200}, this engine {engine.get(name)!r:.200}" for name in names]


def check_name(name: object) -> None:
    """Raise ValueError unless `name` is a valid name of a node's pool."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"node_pool must be true or a name of 1 to 64 of A-Z, a-z, 0-9 and '._-', got {name!r}")


def node_folder(name: str) -> Path:
    """Return the private folder of a node's pool; create it if it is missing.

    ValueError: the name is invalid, or the folder belongs to another user, is open to others, or is not a folder.
    """
    check_name(name)
    return make_private(private_folder() / f"node-{name}")


def lock_file(path: Path, timeout_s: float = math.inf) -> int:
    """Create and lock a file, and return its descriptor. BlockingIOError: another process has the lock for longer.

    If the file or its folder is removed meanwhile, create it again.
    """
    end_s = time.monotonic() + timeout_s
    while True:
        path.parent.mkdir(0o700, exist_ok=True)
        fd = -1
        with suppress(FileNotFoundError):
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(fd), path.lstat()):
                    return fd
            except BlockingIOError:
                if time.monotonic() > end_s:
                    os.close(fd)
                    raise
                time.sleep(0.01)
        if fd >= 0:
            os.close(fd)


def start_ticks(pid: int) -> int:
    """Return when a process began, in clock ticks, or -1 if it has ended. With the pid it identifies a process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rsplit(b")", 1)[1].split()
    except (OSError, IndexError):
        return -1
    return -1 if fields[0] in (b"Z", b"X") else int(fields[19])
