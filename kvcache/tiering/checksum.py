"""Digests that all tiers share: the checksum of a block outside of host memory, and the namespace of a shared store."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

try:
    import xxhash
except ImportError as error:
    raise ImportError("tiers below host memory need the package xxhash: install kvcache's extra 'disk'") from error

if TYPE_CHECKING:
    Buffer = bytes | bytearray | memoryview

_PREFIX = struct.Struct("<IQ")


def checksum(key: bytes, payload: Buffer, num_bytes: int, seed: int) -> int:
    """Return the xxh3 of key, length and payload, 64 bits.

    Parameters
    ----------
    key : bytes
        The block's key.
    payload : buffer
        Its bytes, contiguous.
    num_bytes : int
        Bytes of a whole block.
    seed : int
        What makes a block of one store differ from the same block of another: a generation, a namespace.
    """
    digest = xxhash.xxh3_64(_PREFIX.pack(len(key), num_bytes) + key, seed)
    digest.update(payload)
    return digest.intdigest()


def namespace_of(store_format: bytes, fingerprint: Mapping[str, Any], block_bytes: int, salt: str) -> tuple[str, int]:
    """Return what a shared store's names begin with, and the seed of its checksums: a digest of all of these."""
    digest = hashlib.blake2b(digest_size=16)
    described = json.dumps(dict(fingerprint), sort_keys=True, default=str).encode()
    for part in (store_format, described, str(block_bytes).encode(), salt.encode()):
        digest.update(len(part).to_bytes(8, "big") + part)
    return f"kvcache:{digest.hexdigest()}", int.from_bytes(digest.digest()[:8], "big")
