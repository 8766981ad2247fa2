"""Epoch: identifies the weights that blocks were computed with. Tiers and pools keep blocks of different epochs apart.

A fingerprint is read once, at an engine's start, but a running engine may replace its weights. So the weights are not a
fixed part of a block's name or of a directory: the epoch identifies them, and each reset begins a new one. Its kinds:

=========== ===================================================== =========================================
kind        the weights are                                       its blocks are found by
=========== ===================================================== =========================================
FINGERPRINT those of the engine's start, by the field ``weights`` engines of the same fingerprint
VERSION     named by `weights_version` or by a reset              engines that use the same name
PRIVATE     unknown: a reset did not name them                    the process that was reset, until it ends
=========== ===================================================== =========================================
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Self

WEIGHTS = "weights"
"""The field of a fingerprint that describes the weights."""
_MAX_NAME = 64


class EpochKind(Enum):
    """The kind of an epoch; its value begins the field ``weights`` of a fingerprint."""

    FINGERPRINT = ""
    VERSION = "version:"
    PRIVATE = "private:"


@dataclass(frozen=True, slots=True)
class Epoch:
    """An epoch; `name` is unique within `kind`, and empty if the weights of a fingerprint are unknown."""

    kind: EpochKind
    name: str

    @classmethod
    def of_version(cls, version: str | int) -> Self:
        """Return the epoch of named weights; 5 and "5" are one version. ValueError: the version is invalid."""
        text = str(check_version(version))
        # A tier's header has a limited length. A digest's text is longer than any version that is kept as it is.
        is_short = len(text) <= _MAX_NAME
        return cls(EpochKind.VERSION, text if is_short else f"sha256:{hashlib.sha256(text.encode()).hexdigest()}")

    @classmethod
    def after_reset(cls, version: str | int | None) -> Self:
        """Return the epoch that a reset begins: that of a version, or without one a new private epoch."""
        return cls(EpochKind.PRIVATE, secrets.token_hex(8)) if version is None else cls.of_version(version)

    @classmethod
    def of(cls, fingerprint: Mapping[str, Any]) -> Self:
        """Return the epoch that a fingerprint describes."""
        weights = fingerprint.get(WEIGHTS)
        for kind in (EpochKind.VERSION, EpochKind.PRIVATE):
            if isinstance(weights, str) and weights.startswith(kind.value):
                return cls(kind, weights.removeprefix(kind.value))
        return cls(EpochKind.FINGERPRINT, "" if weights is None else str(weights))

    @property
    def weights(self) -> str:
        """The field ``weights`` of a fingerprint."""
        return self.kind.value + self.name

    def of_fingerprint(self, fingerprint: Mapping[str, Any]) -> dict[str, Any]:
        """Return a fingerprint of these weights."""
        return {**fingerprint, WEIGHTS: self.weights}

    def digest(self, key: bytes = b"") -> bytes:
        """Return 8 bytes that stand for this epoch."""
        return hashlib.blake2b(self.weights.encode(), key=key, digest_size=8, person=b"epoch").digest()


def check_version(version: object) -> str | int:
    """Return a version; ValueError unless it is a number or a text that is not empty, and can be encoded."""
    if isinstance(version, bool) or not isinstance(version, str | int) or version == "":
        raise ValueError(f"version must be a str or an int, got {version!r}")
    # A ValueError: half of a surrogate pair, or more digits than Python converts. Later, it would stop a reset.
    str(version).encode()
    return version


def parse_version(name: str, value: object) -> str | int:
    """Parse an option that names weights; ValueError names it."""
    try:
        return check_version(value)
    except ValueError:
        raise ValueError(f"{name} must be a str that is not empty, or an int, got {value!r}") from None


def named(fingerprint: Mapping[str, Any], version: str | int | None) -> dict[str, Any]:
    """Return a fingerprint whose weights are those of `version`; None: its own."""
    return dict(fingerprint) if version is None else Epoch.of_version(version).of_fingerprint(fingerprint)


def without_weights(fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    """Return a fingerprint without its weights."""
    return {name: value for name, value in fingerprint.items() if name != WEIGHTS}
