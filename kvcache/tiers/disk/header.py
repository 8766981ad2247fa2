"""The header of a disk tier's directory: its format, the geometry of its files, and the model that it belongs to.

The capacity fixes the size of each file, so the directory is bounded from its first byte. A *generation* holds the
blocks that were stored between two resets. Its seed, a digest of format, block size, fingerprint and a random salt,
goes into each record's seal and each block's checksum, so bytes of another model, another directory or an earlier
generation do not verify.

The field ``weights`` of the fingerprint describes the blocks, not the configuration: a reset replaces it. If a version
names the weights, or they are private, a start with other weights opens the directory under a new generation.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from kvcache.epoch import Epoch, EpochKind, without_weights
from kvcache.options import check_int

FORMAT = "kvcache disk tier"
VERSION = 3
RECORD_BYTES = 128
RECENCY_BYTES = 16
ALIGN_BYTES = 4096
_EXTENT_BYTES = 16
"""What a file system needs per slot to remember where it lies, at worst (ext4: 12)."""
_FIXED_BYTES = 128 << 10
"""The folder, the small files twice over, and the rounding of each file."""
_MAX_FINGERPRINT_BYTES = 16 << 10
MAX_HEADER_BYTES = 32 << 10
_MAX_EPOCH = (1 << 32) - 1
_MAX_SALT = (1 << 64) - 1
_MAX_FILE_BYTES = 1 << 62

DATA, RECORDS, RECENCY, HEADER = "data", "records", "recency", "kvcache.json"


class TierDirectoryError(ValueError):
    """A directory cannot be used: it is not writable, in use, damaged, or holds something else."""


class Generation(NamedTuple):
    """What the records and checksums that count carry."""

    epoch: int
    seed: int


@dataclass(frozen=True, slots=True)
class Header:
    """The contents of `kvcache.json`.

    `epoch` counts the resets and starts again at 1 after the largest number. `salt` is 64 random bits, drawn at every
    reset. If `resizing`, the files may still have the lengths of an earlier capacity.
    """

    block_bytes: int
    num_slots: int
    epoch: int
    salt: int
    fingerprint: dict[str, Any]
    resizing: bool = False

    @property
    def slot_bytes(self) -> int:
        """From one slot of `data` to the next."""
        return -(-self.block_bytes // ALIGN_BYTES) * ALIGN_BYTES

    @property
    def generation(self) -> Generation:
        """What records and checksums must carry to count."""
        text = json.dumps([FORMAT, VERSION, self.block_bytes, self.fingerprint, self.salt], sort_keys=True)
        return Generation(self.epoch, int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little"))

    @classmethod
    def parsed(cls, values: Any, path: Path) -> Header:
        """Check what the header file of `path` holds; a value that no tier has written is one of many errors."""
        name, version = values.pop("format"), values.pop("version")
        if (name, version) != (FORMAT, VERSION):
            raise TierDirectoryError(
                f"directory {path} is of format {name!r} version {version!r}, not {FORMAT!r} version {VERSION}"
            )
        header = cls(**values)
        for name in ("block_bytes", "num_slots"):
            check_int(name, getattr(header, name))
        for name, most in (("epoch", _MAX_EPOCH), ("salt", _MAX_SALT)):
            check_int(name, getattr(header, name), 1, most)
        if max(header.file_bytes().values()) > _MAX_FILE_BYTES:
            raise ValueError(f"num_slots {header.num_slots} of block_bytes {header.block_bytes} fit into no file")
        if type(header.resizing) is not bool:
            raise ValueError(f"resizing must be true or false, got {header.resizing!r}")
        if not isinstance(header.fingerprint, dict):
            raise ValueError(f"fingerprint must be an object, got {header.fingerprint!r}")
        return header

    def text(self) -> str:
        """Return the contents of the header file; ValueError if the fingerprint is too long for it."""
        if len(json.dumps(self.fingerprint)) > _MAX_FINGERPRINT_BYTES:
            raise TierDirectoryError(f"fingerprint must be at most {_MAX_FINGERPRINT_BYTES} bytes of JSON")
        values = {"format": FORMAT, "version": VERSION, **asdict(self)}
        text = json.dumps(values, indent=1, sort_keys=True)
        return text if len(text) <= MAX_HEADER_BYTES else json.dumps(values, sort_keys=True)

    def check_same(self, expected: Header, path: Path) -> None:
        """Raise a TierDirectoryError unless this header of `path` has the blocks of the header `expected`.

        Weights may differ if a version names them or they are private: see `has_weights_of`.
        """
        kinds = {Epoch.of(header.fingerprint).kind for header in (self, expected)}
        compare = dict if kinds == {EpochKind.FINGERPRINT} else without_weights
        pairs = {
            "block_bytes": (self.block_bytes, expected.block_bytes),
            "fingerprint": (compare(self.fingerprint), compare(expected.fingerprint)),
        }
        for name, (stored, value) in pairs.items():
            # As JSON: to Python, 1 and true are equal.
            if json.dumps(stored, sort_keys=True) != json.dumps(value, sort_keys=True):
                raise TierDirectoryError(
                    f"disk tier directory {path} holds blocks of another {name}: {_differences(stored, value)}; "
                    f"choose another directory, or delete this one"
                )

    def has_weights_of(self, other: Header) -> bool:
        """Return whether the blocks were computed with the weights of the header `other`."""
        return Epoch.of(self.fingerprint) == Epoch.of(other.fingerprint)

    @classmethod
    def fresh(cls, block_bytes: int, num_slots: int, fingerprint: dict[str, Any]) -> Header:
        """Return the header of a directory that holds nothing yet."""
        return cls(block_bytes, num_slots, 1, _new_salt(), fingerprint)

    def after_reset(self, fingerprint: dict[str, Any]) -> Header:
        """Return a header that makes all present records invalid; `fingerprint` may have other weights."""
        return replace(self, epoch=self.epoch % _MAX_EPOCH + 1, salt=_new_salt(), fingerprint=fingerprint)

    def file_bytes(self) -> dict[str, int]:
        """Return the length that each file of slots must have."""
        return {
            DATA: self.num_slots * self.slot_bytes,
            RECORDS: self.num_slots * RECORD_BYTES,
            RECENCY: self.num_slots * RECENCY_BYTES,
        }


def num_slots_within(capacity_bytes: int, block_bytes: int) -> int:
    """Return how many blocks a directory of at most `capacity_bytes` holds, metadata included."""
    check_int("capacity_bytes", capacity_bytes)
    check_int("block_bytes", block_bytes)
    num_slots = (capacity_bytes - _FIXED_BYTES) // _bytes_per_slot(block_bytes)
    if num_slots < 1:
        least = capacity_for(1, block_bytes)
        raise ValueError(
            f"capacity_bytes must be >= {least} to hold one block of {block_bytes} bytes, got {capacity_bytes}"
        )
    return num_slots


def capacity_for(num_blocks: int, block_bytes: int) -> int:
    """Return the smallest `capacity_bytes` that holds `num_blocks` blocks."""
    return check_int("num_blocks", num_blocks) * _bytes_per_slot(block_bytes) + _FIXED_BYTES


def _bytes_per_slot(block_bytes: int) -> int:
    slot_bytes = -(-block_bytes // ALIGN_BYTES) * ALIGN_BYTES
    return slot_bytes + RECORD_BYTES + RECENCY_BYTES + _EXTENT_BYTES


def _new_salt() -> int:
    # A lock file without a mark reads as 0.
    return secrets.randbits(64) | 1


def _differences(stored: Any, value: Any, name: str = "") -> str:
    """Return what differs, field by field where both are objects; long values are cut."""
    if not (isinstance(stored, dict) and isinstance(value, dict)):
        shown = (text if len(text) <= 80 else f"{text[:80]}..." for text in (repr(stored), repr(value)))
        return f"{name} {' is not '.join(shown)}".lstrip()
    fields = {**stored, **value}
    pairs = {field: (stored.get(field), value.get(field)) for field in fields}
    return ", ".join(
        _differences(*pair, f"{name}.{field}".lstrip("."))
        for field, pair in pairs.items()
        if json.dumps(pair[0], sort_keys=True) != json.dumps(pair[1], sort_keys=True)
    )
