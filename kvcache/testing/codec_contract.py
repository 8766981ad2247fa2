"""The contract of all codecs, as tests: subclass `CodecContract`, override `make_codec`, and run it under pytest."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvcache.tiers.base.codec import CannotEncodeError

if TYPE_CHECKING:
    from kvcache.tiers.base.codec import Codec

_NAME = b"fingerprint and key"


class CodecContract(ABC):
    """Tests that each codec must pass. `block_bytes` are those of the blocks that the tests use."""

    block_bytes = 1 << 14

    @abstractmethod
    def make_codec(self, block_bytes: int) -> Codec:
        """Return the codec under test. Two calls return codecs of equal options.

        Parameters
        ----------
        block_bytes : int
            Bytes of a block.

        Returns
        -------
        Codec
            A codec for blocks of this size.
        """

    def blocks(self) -> list[bytes]:
        """Return the blocks that are encoded: zeros, small numbers, and noise. Override it for codecs of a dtype."""
        draw = np.random.default_rng(1)
        drawn = [draw.integers(0, most, self.block_bytes, np.uint8) for most in (1, 4, 16, 256)]
        return [block.tobytes() for block in drawn]

    def _encoded(self, codec: Codec, block: bytes) -> bytes | None:
        target = memoryview(bytearray(codec.max_bytes))
        try:
            length = codec.encode_named(_NAME, memoryview(bytearray(block)), target)
        except CannotEncodeError:
            return None
        assert 0 <= length <= codec.max_bytes, f"encode returned {length}, of max_bytes {codec.max_bytes}"
        return bytes(target[:length])

    def _decoded(self, codec: Codec, code: bytes) -> bytes:
        block = bytearray(b"\xa5" * self.block_bytes)
        codec.decode_named(_NAME, memoryview(bytearray(code)), memoryview(block))
        return bytes(block)

    def test_blocks_return(self) -> None:
        """A second codec of equal options decodes what the first encoded; without loss, to the same bytes."""
        codec, other = self.make_codec(self.block_bytes), self.make_codec(self.block_bytes)
        codes = [(block, code) for block in self.blocks() if (code := self._encoded(codec, block)) is not None]
        assert codes, "the codec refused every block"
        for block, code in codes:
            decoded = self._decoded(codec, code)
            assert decoded == self._decoded(other, code), "two codecs of equal options decode one code differently"
            assert codec.is_lossy or decoded == block, "a codec without is_lossy changed a block"

    def test_fingerprint_names_codec(self) -> None:
        """The fingerprint is JSON, names the codec, and is the same for equal options."""
        fingerprint = self.make_codec(self.block_bytes).fingerprint
        assert json.loads(json.dumps(fingerprint)) == fingerprint
        assert "codec" in fingerprint
        assert self.make_codec(self.block_bytes).fingerprint == fingerprint

    def test_threads_share_codec(self) -> None:
        """Several threads encode and decode at once."""
        codec, blocks = self.make_codec(self.block_bytes), self.blocks() * 16

        def there_and_back(block: bytes) -> bytes | None:
            code = self._encoded(codec, block)
            return None if code is None else self._decoded(codec, code)

        expected = [there_and_back(block) for block in blocks]
        with ThreadPoolExecutor(8) as threads:
            assert list(threads.map(there_and_back, blocks)) == expected, "threads disturb each other"

    def test_foreign_code_raises(self) -> None:
        """Decoding arbitrary bytes raises ValueError or returns a block; it raises no other error."""
        codec = self.make_codec(self.block_bytes)
        for code in (b"", b"\0", b"no code of this codec"):
            try:
                self._decoded(codec, code)
            except ValueError:
                continue

    def test_authenticated_code_refuses_changes(self) -> None:
        """A codec with is_authenticated refuses a code with one changed bit."""
        codec = self.make_codec(self.block_bytes)
        if not codec.is_authenticated:
            pytest.skip("the tier keeps a checksum beside the code")
        code = next(code for block in self.blocks() if (code := self._encoded(codec, block)) is not None)
        for place in (0, len(code) // 2, len(code) - 1):
            changed = bytearray(code)
            changed[place] ^= 1
            try:
                self._decoded(codec, bytes(changed))
            except ValueError:
                continue
            raise AssertionError(f"a code was decoded although bit 0 of byte {place} had changed")
