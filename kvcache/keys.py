"""Keys of blocks: their parts, and the keys of a prompt's blocks by a chained SHA-256.

A chained hash lets a key name a block and all tokens before it. The hash is a cryptographic one, because a collision
that can be crafted would serve one user's KV data to another. hashlib's SHA-256 needs no dependency and keys a million
tokens in well under 100 ms; BLAKE3 is slower on inputs as short as a block.
"""

from __future__ import annotations

import hashlib
from typing import Any, NewType

import numpy as np

from kvcache.options import check_int

OffloadKey = NewType("OffloadKey", bytes)
"""A block hash followed by its KV-cache group index (4 bytes, big-endian, unsigned), as exact `bytes`."""
KEY_BYTES = 32
"""Length of a seed and of a key."""
_GROUP_BYTES = 4
_FORMAT = b"kvcache.block-keys.1"
_MAX_TOKEN_ID = (1 << 32) - 1


def as_key_list(keys: Any) -> list[bytes]:
    """Return an iterable of keys as a list: itself where it is one, and otherwise a new one.

    ValueError if it is one key, or no iterable.
    """
    if type(keys) is list:
        return keys
    if isinstance(keys, bytes | str):
        raise ValueError(f"keys must be an iterable of keys, got one {type(keys).__name__}: {keys!r}")
    try:
        return list(keys)
    except TypeError:
        raise ValueError(f"keys must be an iterable of keys, got {keys!r}") from None


def make_offload_key(block_hash: bytes, group_idx: int) -> OffloadKey:
    """Join a block hash and a KV-cache group index to a key.

    Parameters
    ----------
    block_hash : bytes
        Hash of the block, at least one byte.
    group_idx : int
        KV-cache group, 0 <= group_idx < 2**32.

    Returns
    -------
    OffloadKey
        The hash, then the index as 4 bytes.

    Raises
    ------
    ValueError
        The hash is not bytes or empty, or the index does not fit four bytes.
    """
    if not isinstance(block_hash, bytes) or not block_hash:
        raise ValueError(f"block_hash must be non-empty bytes, got {block_hash!r}")
    if not isinstance(group_idx, int) or not 0 <= group_idx < 1 << 32:
        raise ValueError(f"group_idx must be an int in 0..2**32-1, got {group_idx!r}")
    return OffloadKey(bytes(block_hash) + group_idx.to_bytes(_GROUP_BYTES, "big"))


HASH_PART, GROUP_PART = slice(None, -_GROUP_BYTES), slice(-_GROUP_BYTES, None)
"""The parts of a key: its block hash, and the index of its group as bytes."""


def get_offload_block_hash(key: bytes) -> bytes:
    """Return the block hash of a key made by `make_offload_key`."""
    return _checked_key(key)[HASH_PART]


def get_offload_group_idx(key: bytes) -> int:
    """Return the KV-cache group index of a key made by `make_offload_key`."""
    return int.from_bytes(_checked_key(key)[GROUP_PART], "big")


def _checked_key(key: bytes) -> bytes:
    if not isinstance(key, bytes) or len(key) <= _GROUP_BYTES:
        raise ValueError(f"key must be bytes longer than {_GROUP_BYTES}, got {key!r}")
    return key


def key_seed(*fields: str | bytes | int) -> bytes:
    """Hash what the blocks of one chain have in common: model, dtype, adapter, tenant, block size.

    Parameters
    ----------
    *fields : str, bytes or int
        In an order that the caller keeps. Each is hashed with its type and its length, so that no two different
        sequences of fields are the same bytes.

    Returns
    -------
    bytes
        32 bytes, the `seed` of `block_keys`.

    Raises
    ------
    ValueError
        A field has another type.
    """
    digest = hashlib.sha256(_FORMAT)
    for field in fields:
        if type(field) is str:
            kind, data = b"s", field.encode()
        elif type(field) is bytes:
            kind, data = b"b", field
        elif type(field) is int:
            kind, data = b"i", str(field).encode()
        else:
            raise ValueError(f"a seed's field must be str, bytes or int, got {field!r}")
        digest.update(kind + len(data).to_bytes(8, "little") + data)
    return digest.digest()


def block_keys(token_ids: Any, block_size: int, seed: bytes) -> list[bytes]:
    """Return the key of each whole block of a prompt, in prefix order.

    Parameters
    ----------
    token_ids : array_like of int
        Shape (n,), each in 0..2**32-1. An integer array is the fast path.
    block_size : int
        Tokens of one block, >= 1. What does not fill a block at the end gets no key.
    seed : bytes
        32 bytes: `key_seed`'s, or the key of the block before the first one, to go on with a chain.

    Returns
    -------
    list of bytes
        ``SHA-256(key before || the block's ids)``, ids as 4 bytes each, little-endian; 32 bytes a key.

    Raises
    ------
    ValueError
        The ids are not a one-dimensional sequence of ints in range, the block size is not an int >= 1, or the seed is
        not 32 bytes.
    """
    check_int("block_size", block_size)
    if not isinstance(seed, bytes) or len(seed) != KEY_BYTES:
        raise ValueError(f"seed must be {KEY_BYTES} bytes, got {seed!r}")
    ids = np.asarray(token_ids)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise ValueError(f"token_ids must be a one-dimensional sequence of integers, got {token_ids!r}")
    if ids.size and (low := int(ids.min())) < 0:
        raise ValueError(f"token ids must be in 0..{_MAX_TOKEN_ID}, got {low}")
    if ids.size and (high := int(ids.max())) > _MAX_TOKEN_ID:
        raise ValueError(f"token ids must be in 0..{_MAX_TOKEN_ID}, got {high}")
    # Every message is the seed's 32 bytes and 4 bytes an id: no two prefixes are hashed from the same bytes.
    data = ids.astype("<u4", copy=False).tobytes()
    step = 4 * block_size
    sha256 = hashlib.sha256
    keys = []
    key = seed
    for start in range(0, len(data) - step + 1, step):
        key = sha256(key + data[start : start + step]).digest()
        keys.append(key)
    return keys
