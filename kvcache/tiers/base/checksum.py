"""Checksums of blocks outside of host memory."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import TYPE_CHECKING

try:
    import xxhash
except ImportError as error:
    raise ImportError("tiers below host memory need the package xxhash: install kvcache's extra 'disk'") from error

if TYPE_CHECKING:
    Buffer = bytes | bytearray | memoryview

_PREFIX = struct.Struct("<IQ")


def checksum(key: bytes, payload: Buffer, num_bytes: int, seed: int) -> int:
    """Return the 64-bit xxh3 of key, length and contiguous payload; each store has its own `seed`."""
    return checksum_of_parts(key, [payload], num_bytes, seed)


def checksum_of_parts(key: bytes, parts: Iterable[Buffer], num_bytes: int, seed: int) -> int:
    """Return the `checksum` of a payload that lies in several buffers."""
    digest = xxhash.xxh3_64(key_prefix(key, num_bytes), seed)
    for part in parts:
        digest.update(part)
    return digest.intdigest()


def wide_checksum(key: bytes, payload: Buffer, seed: int) -> bytes:
    """Return the 128-bit xxh3 of key, length and payload."""
    digest = xxhash.xxh3_128(key_prefix(key, len(payload)), seed)
    digest.update(payload)
    return digest.digest()


def key_prefix(key: bytes, num_bytes: int) -> bytes:
    """Return the bytes that a checksum covers before the payload of `num_bytes`."""
    return _PREFIX.pack(len(key), num_bytes) + key
