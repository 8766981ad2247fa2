"""Codec: encodes blocks for a tier, and decodes them. A codec is one file and one line in the registry."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvcache.options import Component, Configurable, OptionError
from kvcache.registry import CODECS
from kvcache.tiers.base.tier import checked_host_blocks

if TYPE_CHECKING:
    from kvcache.tiers.base.tier import HostBlocks

HEADER_BYTES = 32
_ROW_ALIGNMENT = 4096


class CannotEncodeError(ValueError):
    """A block is not stored, because its codec cannot encode it."""


class Codec(Configurable, ABC):
    """Encode whole blocks; called by several threads at once. A configuration names it as a `Configurable`.

    Attributes
    ----------
    is_lossy : bool
        Whether a decoded block may differ from the one that was encoded. Decoding one code always gives the same bytes.
    is_authenticated : bool
        Whether `decode_named` itself refuses every changed code. The tier then keeps no checksum beside the code: a
        checksum of the block would confirm a guess of its bytes.
    """

    is_lossy = False
    is_authenticated = False

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

    def encode_named(self, name: bytes, block: memoryview, target: memoryview) -> int:
        """Encode the block `name`, which is a digest of the tier's fingerprint and the block's key; see `encode`."""
        return self.encode(block, target)

    def decode_named(self, name: bytes, code: memoryview, block: memoryview) -> None:
        """Decode the block `name`; see `decode`."""
        self.decode(code, block)


def parse_codec(name: str, value: object) -> Component:
    """Parse the option `codec` of a tier: the codec's class and options, from which `make_codec` makes it."""
    if isinstance(value, Component):
        return value
    if not isinstance(value, Mapping) or "type" not in value:
        raise OptionError(f"{name} must be a dict with a type, one of {', '.join(CODECS.names())}, got {value!r}")
    options = {option: text for option, text in value.items() if option != "type"}
    codec = Component.parse(CODECS.resolve(value["type"]), options)
    # Its constructor checks the ranges of its options.
    codec.make(0)
    return codec


def make_codec(codec: Component | None, host_blocks: HostBlocks) -> Codec | None:
    """Return the codec that `parse_codec` parsed, for blocks of this pool."""
    made: Codec | None = None if codec is None else codec.make(checked_host_blocks(host_blocks).shape[1])
    return made


def stored_form(
    codec: Codec | None, host_blocks: HostBlocks, fingerprint: Mapping[str, Any] | None
) -> tuple[int, dict[str, Any]]:
    """Return the bytes of a block as a tier stores it, and the fingerprint of such blocks."""
    block_bytes: int = checked_host_blocks(host_blocks).shape[1]
    if codec is None:
        return block_bytes, dict(fingerprint or {})
    row_bytes = -(-(HEADER_BYTES + codec.max_bytes) // _ROW_ALIGNMENT) * _ROW_ALIGNMENT
    return row_bytes, {**(fingerprint or {}), **codec.fingerprint}
