"""Codec: encodes blocks for a tier, and decodes them. A codec is one file and one line in the registry."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from kvcache.registry import CODECS
from kvcache.tiering.tier import checked_host_blocks

if TYPE_CHECKING:
    from kvcache.options import Options
    from kvcache.tiering.tier import HostBlocks

HEADER_BYTES = 32
_ROW_ALIGNMENT = 4096


class CannotEncodeError(ValueError):
    """A block is not stored, because its codec cannot encode it."""


class Codec(ABC):
    """Encode whole blocks; called by several threads at once.

    Attributes
    ----------
    options_type : type of Options or None
        Of the class: the options that `from_config` reads.
    is_lossy : bool
        Whether a decoded block may differ from the one that was encoded. Decoding one code always gives the same bytes.
    """

    options_type: ClassVar[type[Options] | None] = None
    is_lossy = False

    @classmethod
    def from_config(cls, options: Mapping[str, Any], block_bytes: int) -> Codec:
        """Make a codec from a user's configuration.

        Parameters
        ----------
        options : mapping
            The entry without ``type``.
        block_bytes : int
            Bytes of a block; 0: not known yet, only the options are checked.

        Raises
        ------
        ValueError
            An option is unknown or bad, or blocks of this size cannot be encoded.
        """
        if cls.options_type is None:
            raise NotImplementedError(f"{cls.__name__} needs an options_type to be made from a configuration")
        return cls(block_bytes, **cls.options_type.read(options).arguments())  # type: ignore[call-arg]

    @property
    @abstractmethod
    def max_bytes(self) -> int:
        """The longest code in bytes; a tier reserves as many for each block."""

    @property
    @abstractmethod
    def fingerprint(self) -> dict[str, Any]:
        """Tiers share blocks only if this is equal; ``codec`` is the codec's name."""

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
        """Decode `code` into `block`.

        Parameters
        ----------
        code : memoryview
            A result of `encode`, its checksum verified.
        block : memoryview
            A whole block, writable.

        Raises
        ------
        ValueError
            `code` is not a code.
        """


CodecMaker = Callable[[int], Codec]
"""Makes a codec for blocks of so many bytes."""


def parse_codec(name: str, value: object) -> CodecMaker:
    """Parse the option `codec` of a tier; return a function that makes the codec for a size of blocks."""
    if not isinstance(value, Mapping) or "type" not in value:
        raise ValueError(f"{name} must be a dict with a type, one of {', '.join(CODECS.names())}, got {value!r}")
    codec = CODECS.resolve(value["type"])
    make = partial(codec.from_config, {option: one for option, one in value.items() if option != "type"})
    make(0)
    return make


def make_codec(make: CodecMaker | None, host_blocks: HostBlocks) -> Codec | None:
    """Return the codec that `parse_codec` parsed, for blocks of this pool."""
    return None if make is None else make(checked_host_blocks(host_blocks).shape[1])


def stored_form(
    codec: Codec | None, host_blocks: HostBlocks, fingerprint: Mapping[str, Any] | None
) -> tuple[int, dict[str, Any]]:
    """Return the bytes of a block as a tier stores it, and the fingerprint of such blocks."""
    block_bytes: int = checked_host_blocks(host_blocks).shape[1]
    if codec is None:
        return block_bytes, dict(fingerprint or {})
    row_bytes = -(-(HEADER_BYTES + codec.max_bytes) // _ROW_ALIGNMENT) * _ROW_ALIGNMENT
    return row_bytes, {**(fingerprint or {}), **codec.fingerprint}
