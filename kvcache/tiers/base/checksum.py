"""Checksums of blocks outside of host memory, and names and seals of blocks in a store that engines share."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

try:
    import xxhash
except ImportError as error:
    raise ImportError("tiers below host memory need the package xxhash: install kvcache's extra 'disk'") from error

if TYPE_CHECKING:
    from kvcache.epoch import Epoch

    Buffer = bytes | bytearray | memoryview

SEAL_BYTES = 16
_PREFIX = struct.Struct("<IQ")


def checksum(key: bytes, payload: Buffer, num_bytes: int, seed: int) -> int:
    """Return the 64-bit xxh3 of key, length and contiguous payload; each store has its own `seed`."""
    return checksum_of_parts(key, [payload], num_bytes, seed)


def checksum_of_parts(key: bytes, parts: Iterable[Buffer], num_bytes: int, seed: int) -> int:
    """Return the `checksum` of a payload that lies in several buffers."""
    digest = xxhash.xxh3_64(_PREFIX.pack(len(key), num_bytes) + key, seed)
    for part in parts:
        digest.update(part)
    return digest.intdigest()


class Namespace:
    """Names and seals of one model's blocks in a shared store.

    Engines agree on both if they agree on the format, the fingerprint, the size of a block and the salt. A seal covers
    the block's name, epoch included, and its payload. With a salt it is a keyed BLAKE3 digest, which no client forges
    that does not know the salt. Without one it is an xxh3 that detects accidents. Its key cannot be derived from names.
    Each name in the store begins with `prefix`.
    """

    def __init__(self, store_format: bytes, fingerprint: Mapping[str, Any], block_bytes: int, salt: str) -> None:
        described = json.dumps(dict(fingerprint), sort_keys=True, default=str).encode()
        parts = b"".join(
            len(part).to_bytes(8, "big") + part for part in (store_format, described, str(block_bytes).encode())
        )
        secret = hashlib.blake2b(salt.encode()).digest()
        self.prefix = "kvcache:" + hashlib.blake2b(parts, key=secret, digest_size=16, person=b"name").hexdigest()
        self._key = hashlib.blake2b(parts, key=secret, digest_size=32, person=b"seal").digest()
        self._blake3: Any = None
        if salt:
            try:
                from blake3 import blake3
            except ImportError as error:
                raise ImportError(
                    f"a salt needs the package blake3: install kvcache's extra 'valkey', 'mooncake' or 's3' ({error})"
                ) from error
            self._blake3 = blake3

    def epoch_of(self, epoch: Epoch) -> str:
        """Return the part of names that stands for an epoch, 16 hexadecimal digits."""
        return epoch.digest(self._key).hex()

    def seal(self, name: bytes, payload: Buffer) -> bytes:
        """Return the seal of the block that is stored as `name`, `SEAL_BYTES` bytes."""
        start = _PREFIX.pack(len(name), len(payload)) + name
        if self._blake3 is not None:
            digest = self._blake3(start, key=self._key)
            digest.update(payload)
            return bytes(digest.digest(SEAL_BYTES))
        digest = xxhash.xxh3_128(start, int.from_bytes(self._key[:8], "big"))
        digest.update(payload)
        return bytes(digest.digest())
