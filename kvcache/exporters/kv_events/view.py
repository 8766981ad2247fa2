"""BlockView: the blocks that each medium of a publisher holds, as a router sees them."""

from __future__ import annotations

import numpy as np

from kvcache.exporters.kv_events.wire import AllBlocksCleared, BlockHash, BlockStored, EventBatch

_INT_BYTES = 8
_WORD = 1 << 64


class BlockView:
    """The blocks that each medium holds, as a router sees them; for one thread."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, int], set[bytes]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._held.values()))

    def media(self) -> dict[str, frozenset[tuple[bytes, int]]]:
        """Return the blocks of each medium that holds any, as (block hash, group index)."""
        blocks: dict[str, set[tuple[bytes, int]]] = {}
        for (medium, group_idx), hashes in self._held.items():
            if hashes:
                blocks.setdefault(medium, set()).update((block_hash, group_idx) for block_hash in hashes)
        return {medium: frozenset(held) for medium, held in blocks.items()}

    def holds(self, medium: str, block_hash: BlockHash, group_idx: int = 0) -> bool:
        """Return whether `medium` holds the block `block_hash` of the KV-cache group `group_idx`.

        A publisher with int hashes sends the last 8 bytes of `block_hash` only.
        """
        hashes = self._held.get((medium, group_idx), ())
        if isinstance(block_hash, int):
            [block_hash] = _as_bytes([block_hash])
        return block_hash in hashes or short_hash(block_hash) in hashes

    def clear(self) -> None:
        """Empty every medium."""
        self._held = {}

    def apply(self, batch: EventBatch) -> None:
        """Apply the events of `batch`, in order."""
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                self.clear()
                continue
            held = self._held.setdefault((event.medium or "", event.group_idx or 0), set())
            hashes = _as_bytes(event.block_hashes)
            if isinstance(event, BlockStored):
                held.update(hashes)
            else:
                held.difference_update(hashes)


def short_hash(block_hash: bytes) -> bytes:
    """Return the last 8 bytes of a hash, zeros in front of a shorter one."""
    return block_hash[-_INT_BYTES:].rjust(_INT_BYTES, b"\0")


def as_ints(hashes: list[bytes]) -> list[BlockHash]:
    """Return the last 8 bytes of each hash as an unsigned integer, big-endian, as vLLM does."""
    numbers: list[BlockHash] = np.frombuffer(b"".join(map(short_hash, hashes)), ">u8").tolist()
    return numbers


def _as_bytes(hashes: list[BlockHash]) -> list[bytes]:
    """Return integers, signed or not, as 8 bytes."""
    return [
        block_hash if isinstance(block_hash, bytes) else (block_hash % _WORD).to_bytes(_INT_BYTES, "big")
        for block_hash in hashes
    ]
