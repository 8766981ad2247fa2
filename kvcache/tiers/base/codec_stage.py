"""CodecStage: the rows in which an I/O thread encodes blocks before `put`, and from which it decodes them after `get`.

A row is a header, the code, and zeros. The header carries two checksums, of the code and of the decoded block, so both
the stored bytes and the block that comes back are verified, with a lossy codec, too. Both are 0 with a codec that
authenticates its codes.
"""

from __future__ import annotations

import hashlib
import json
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import groupby
from threading import Lock
from typing import TYPE_CHECKING, Any

from kvcache.epoch import without_weights
from kvcache.tiers.base.batch import BlockOutcome, TierBatch, checked_outcomes
from kvcache.tiers.base.checksum import checksum
from kvcache.tiers.base.codec import HEADER_BYTES, CannotEncodeError, Codec, stored_form
from kvcache.tiers.base.tier import CodecTierStats, TierStats, host_rows

if TYPE_CHECKING:
    from kvcache.tiers.base.tier import HostBlocks

    Answer = Sequence[int] | None

_HEADER = struct.Struct("<8sQQQ")
_MAGIC = b"kvcodec1"
_CONTEXT_BYTES = 16
assert _HEADER.size == HEADER_BYTES


class CodecStage:
    """Encoded rows of at most `num_threads` batches of `max_blocks` blocks that I/O threads move at the same time."""

    def __init__(
        self,
        codec: Codec,
        host_blocks: HostBlocks,
        num_threads: int,
        max_blocks: int,
        fingerprint: Mapping[str, Any] | None = None,
    ) -> None:
        self._codec = codec
        # A reset may replace the weights, so names and generations keep them apart.
        described = json.dumps(without_weights(fingerprint or {}), sort_keys=True, default=str).encode()
        self._context = hashlib.blake2b(described, digest_size=_CONTEXT_BYTES).digest()
        self._block_bytes = host_blocks.shape[1]
        row_bytes, _ = stored_form(codec, host_blocks, None)
        num_rows = num_threads * max_blocks
        self.rows = host_rows(num_rows, row_bytes)
        names = ("encoded_blocks", "unencodable_blocks", "decoded_blocks", "raw_bytes", "code_bytes")
        self._counts: dict[str, Any] = {"encode_s": 0.0, "decode_s": 0.0, **dict.fromkeys(names, 0)}
        self._lock = Lock()
        # One part of the rows for each thread.
        self._free = deque(range(0, num_rows, max_blocks))

    def put(self, batch: TierBatch, put: Callable[[TierBatch], Answer]) -> list[BlockOutcome]:
        """Encode a batch and `put` its rows; a block that cannot be encoded is refused."""
        outcomes = [BlockOutcome.REFUSED] * len(batch.keys)
        with self._part() as first:
            start_s = time.perf_counter()
            lengths = [
                self._encode(key, block, first + i)
                for i, (key, block) in enumerate(zip(batch.keys, batch.buffers, strict=True))
            ]
            num_encoded = len(lengths) - lengths.count(0)
            self._count(
                encoded_blocks=num_encoded,
                unencodable_blocks=lengths.count(0),
                raw_bytes=num_encoded * self._block_bytes,
                code_bytes=sum(lengths),
                encode_s=time.perf_counter() - start_s,
            )
            # A tier that owns its space needs runs of slots, so a refused block splits a run.
            for is_encoded, group in groupby(range(len(lengths)), key=lambda i: lengths[i] > 0):
                if is_encoded:
                    run = list(group)
                    part = batch.part(run, self.rows, [first + i for i in run])
                    outcomes[run[0] : run[-1] + 1] = checked_outcomes(put(part), part)
        return outcomes

    def get(self, batch: TierBatch, get: Callable[[TierBatch], Answer]) -> list[BlockOutcome]:
        """`get` a batch's rows and decode them; a row that does not verify is corrupt."""
        with self._part() as first:
            everything = range(len(batch.keys))
            part = batch.part(everything, self.rows, [first + i for i in everything])
            outcomes = checked_outcomes(get(part), part)
            start_s, num_decoded = time.perf_counter(), 0
            for i, (key, block) in enumerate(zip(batch.keys, batch.buffers, strict=True)):
                if outcomes[i] == BlockOutcome.DONE:
                    if self._decode(key, first + i, block):
                        num_decoded += 1
                    else:
                        outcomes[i] = BlockOutcome.CORRUPT
            self._count(decoded_blocks=num_decoded, decode_s=time.perf_counter() - start_s)
        return outcomes

    def described(self, stats: TierStats) -> TierStats:
        """Return a tier's `stats` with those of its codec."""
        return CodecTierStats(**asdict(stats), codec=str(self._codec.fingerprint["codec"]), **self._counts)

    @contextmanager
    def _part(self) -> Iterator[int]:
        first = self._free.pop()
        try:
            yield first
        finally:
            self._free.append(first)

    def _count(self, **counts: float) -> None:
        with self._lock:
            for name, number in counts.items():
                self._counts[name] += number

    def _encode(self, key: bytes, block: memoryview, row: int) -> int:
        """Encode a block into a row; return the code's length, 0 if it cannot be encoded."""
        target = self.rows[row].data
        try:
            space = target[HEADER_BYTES : HEADER_BYTES + self._codec.max_bytes]
            num_bytes = self._codec.encode_named(self._context + key, block, space)
        except CannotEncodeError:
            return 0
        code = target[HEADER_BYTES : HEADER_BYTES + num_bytes]
        decoded, sums = block, (0, 0)
        if not self._codec.is_authenticated:
            if self._codec.is_lossy:
                decoded = memoryview(bytearray(self._block_bytes))
                self._codec.decode_named(self._context + key, code, decoded)
            sums = checksum(key, code, num_bytes, 0), checksum(key, decoded, self._block_bytes, 0)
        _HEADER.pack_into(target, 0, _MAGIC, num_bytes, *sums)
        # The row still holds the end of an older block.
        self.rows[row, HEADER_BYTES + num_bytes :] = 0
        return num_bytes

    def _decode(self, key: bytes, row: int, block: memoryview) -> bool:
        """Decode a row into a block; return whether it is the block that was encoded."""
        source = self.rows[row].data
        magic, num_bytes, code_sum, block_sum = _HEADER.unpack_from(source)
        if magic != _MAGIC or not 0 < num_bytes <= self._codec.max_bytes:
            return False
        code = source[HEADER_BYTES : HEADER_BYTES + num_bytes]
        has_sums = not self._codec.is_authenticated
        if has_sums and checksum(key, code, num_bytes, 0) != code_sum:
            return False
        try:
            self._codec.decode_named(self._context + key, code, block)
        except ValueError:
            return False
        return not has_sums or bool(checksum(key, block, self._block_bytes, 0) == block_sum)
