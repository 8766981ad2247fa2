"""zstd: blocks without loss, into a fixed share of their size; a block that does not fit is not stored."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, ClassVar

try:
    import zstandard
except ImportError as error:
    raise ImportError("the zstd codec needs the package zstandard: install kvcache's extra 'zstd'") from error

from kvcache.options import Options, option, parse_count, parse_share
from kvcache.tiers.base.codec import CannotEncodeError, Codec

_MAX_LEVEL = 22


@dataclass(frozen=True)
class ZstdOptions(Options):
    """The options of a `ZstdCodec`."""

    where: ClassVar[str] = "codec zstd"

    level: int = option(parse_count, 1, when="less space is worth more time: up to 22")
    share: float = option(parse_share, 0.8, when="blocks compress to another share of their size")


class ZstdCodec(Codec):
    """Compress blocks with zstd.

    Parameters
    ----------
    block_bytes : int
        Bytes of a block.
    level : int
        1 (fast) to 22.
    share : float
        Share of a block's size that a code may take; the tier saves the rest for each block.
    """

    options_type = ZstdOptions

    def __init__(self, block_bytes: int, level: int = 1, share: float = 0.8) -> None:
        if not 1 <= level <= _MAX_LEVEL:
            raise ValueError(f"level of zstd must be in 1..{_MAX_LEVEL}, got {level}")
        if not 0 < share <= 1:
            raise ValueError(f"share of zstd must be in 0..1 and not 0, got {share}")
        self._block_bytes = block_bytes
        self._level = level
        self._max_bytes = max(1, int(block_bytes * share))
        # A context serves one thread at a time.
        self._contexts = threading.local()

    @property
    def max_bytes(self) -> int:
        return self._max_bytes

    @property
    def fingerprint(self) -> dict[str, Any]:
        # Any level decodes alike; but the share decides how long a stored value is.
        return {"codec": "zstd", "max_bytes": self._max_bytes}

    def encode(self, block: memoryview, target: memoryview) -> int:
        compressor = getattr(self._contexts, "compressor", None)
        if compressor is None:
            compressor = self._contexts.compressor = zstandard.ZstdCompressor(level=self._level)
        code = compressor.compress(block)
        if len(code) > len(target):
            raise CannotEncodeError(f"compressed to {len(code)} bytes, and {len(target)} are reserved")
        target[: len(code)] = code
        return len(code)

    def decode(self, code: memoryview, block: memoryview) -> None:
        decompressor = getattr(self._contexts, "decompressor", None)
        if decompressor is None:
            decompressor = self._contexts.decompressor = zstandard.ZstdDecompressor()
        try:
            if zstandard.frame_content_size(code) != len(block):
                raise ValueError(f"the frame holds another size than {len(block)} bytes")
            block[:] = decompressor.decompress(code, max_output_size=len(block))
        except zstandard.ZstdError as error:
            raise ValueError(f"no zstd frame: {error}") from None
