"""The checksum of a block that lies outside of host memory, one for all tiers: of its key, its length and its bytes."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

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

    Returns
    -------
    int
        Below 2**64.
    """
    digest = xxhash.xxh3_64(_PREFIX.pack(len(key), num_bytes) + key, seed)
    digest.update(payload)
    return digest.intdigest()
