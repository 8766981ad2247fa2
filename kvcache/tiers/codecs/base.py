"""Codec: what makes the bytes of a block smaller, and whole again. One is one file and one line in the registry."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from kvcache.options import Options


class CannotEncodeError(ValueError):
    """A block is not stored, because its codec cannot encode it."""


class Codec(ABC):
    """Encode whole blocks; called by several threads at once.

    Attributes
    ----------
    options_type : type of Options or None
        Of the class: the options that `from_config` reads.
    is_lossy : bool
        Whether a decoded block may differ from what was encoded. Decoding itself always gives the same bytes.
    """

    options_type: ClassVar[type[Options] | None] = None
    is_lossy = False

    @classmethod
    @abstractmethod
    def from_config(cls, options: Mapping[str, Any], block_bytes: int) -> Codec:
        """Make a codec from what a user configured.

        Parameters
        ----------
        options : mapping
            The entry without ``type``.
        block_bytes : int
            Bytes of a block; 0: not known yet, only the options are checked.

        Raises
        ------
        ValueError
            An option is unknown or bad, or such blocks cannot be encoded.
        """

    @property
    @abstractmethod
    def max_bytes(self) -> int:
        """Bytes that an encoded block takes at most; a tier reserves as many."""

    @property
    @abstractmethod
    def fingerprint(self) -> dict[str, Any]:
        """What a decoder must agree with: tiers share blocks only where it is equal."""

    @abstractmethod
    def encode(self, block: memoryview, target: memoryview) -> int:
        """Write a block's code to the start of `target`, and return its length.

        Parameters
        ----------
        block : memoryview
            A whole block; not changed.
        target : memoryview
            `max_bytes` writable bytes.

        Raises
        ------
        CannotEncodeError
            This block cannot be encoded into so many bytes.
        """

    @abstractmethod
    def decode(self, code: memoryview, block: memoryview) -> None:
        """Write the block that `encode` was given, or what a lossy codec makes of it, into `block`.

        Parameters
        ----------
        code : memoryview
            What `encode` wrote, its checksum verified.
        block : memoryview
            A whole block, writable.

        Raises
        ------
        ValueError
            It is no code.
        """
