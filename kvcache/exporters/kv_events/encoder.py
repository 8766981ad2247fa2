"""EventEncoder: a manager's events as events of the wire, with the tokens of blocks that requests described.

The event of a block may come when its request is gone, and comes again when the block moves between media.
"""

from __future__ import annotations

import logging
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from kvcache.events import OffloadingEvent
from kvcache.exporters.kv_events.wire import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored
from kvcache.keys import GROUP_PART, HASH_PART
from kvcache.request import Prompt

_LOG = logging.getLogger(__name__)
MAX_IDLE = 1 << 17
"""Described blocks that no medium holds, and that may still be stored again."""
EVENT_COST = 8
"""Cost of an event without keys, in keys."""
MAX_BATCH_KEYS = 1024
_MAX_PIECE_BYTES = 1 << 22
_MEDIUM_BITS = {"CPU": 1, "STORAGE": 2}


class _PromptBlock(NamedTuple):
    parent: bytes | None
    token_ids: array[int]
    lora: tuple[int | None, str | None]
    extra_keys: tuple[Any, ...] | None
    lookahead: array[int] | None


class EventEncoder:
    """Makes wire events, with the options of `KVEventPublisher`; for one thread.

    Descriptions are kept of blocks that a medium holds, and of `MAX_IDLE` others. `block_size` is the manager's.
    """

    def __init__(self, hash_format: str, spec_kinds: Sequence[tuple[str, int | None]], block_size: int = 0) -> None:
        self.block_size = block_size
        self._has_ints = hash_format == "int"
        self._spec_kinds = spec_kinds
        self._blocks: OrderedDict[bytes, _PromptBlock] = OrderedDict()
        # Of described blocks that were announced: which media hold them, as bits.
        self._media: dict[bytes, int] = {}
        self._has_warned = False

    def describe(self, keys: list[bytes], prompt: Prompt) -> None:
        """Note the tokens of the blocks `keys`. If the prompt is invalid, they are published without tokens."""
        try:
            for key in keys:
                self._describe(key, prompt)
        except (TypeError, ValueError, OverflowError, IndexError) as error:
            if not self._has_warned:
                _LOG.warning("publishing blocks without tokens: %s", error)
            self._has_warned = True
        while len(self._blocks) > MAX_IDLE + len(self._media):
            key, block = self._blocks.popitem(last=False)
            if key in self._media:
                self._blocks[key] = block

    def clear(self) -> AllBlocksCleared:
        """Note that no medium holds a block any longer, and return the event that announces it."""
        self._media.clear()
        return AllBlocksCleared()

    def _describe(self, key: bytes, prompt: Prompt) -> None:
        i = prompt.index_of(key)
        end = (i + 1) * self.block_size
        if i < 0 or end > len(prompt.token_ids):
            return
        if i and not isinstance(prompt.keys[i - 1], bytes):
            raise TypeError(f"a prompt's keys must be bytes, got {prompt.keys[i - 1]!r:.80}")
        extra = None if prompt.extra_keys is None or i >= len(prompt.extra_keys) else prompt.extra_keys[i]
        lora = prompt.lora_id, prompt.lora_name
        msgspec.msgpack.encode((lora, extra))  # raises if the event could not be encoded
        parent = prompt.keys[i - 1][:-4] if i else None
        tokens = array("I", prompt.token_ids[end - self.block_size : end])
        num_ahead = prompt.num_lookahead_tokens
        ahead = array("I", prompt.token_ids[end : end + num_ahead]) if num_ahead else None
        self._blocks[key] = _PromptBlock(parent, tokens, lora, None if extra is None else tuple(extra), ahead)
        self._blocks.move_to_end(key)

    def events(self, event: OffloadingEvent) -> Iterator[tuple[BlockStored | BlockRemoved, int]]:
        """Yield a manager's event in pieces of at most `MAX_BATCH_KEYS` keys, each with its cost in keys."""
        medium = "CPU" if event.medium == "CPU" else "STORAGE"
        self._note(event, _MEDIUM_BITS[medium])
        for group_idx, hashes in sorted(_by_group(event.keys).items()):
            for run, blocks in [(hashes, [])] if event.removed else self._runs(hashes, group_idx):
                # A token takes about as many bytes as a hash.
                num_bytes = 1 + max(map(len, run)) + (8 * self.block_size if blocks else 0)
                step = max(1, min(MAX_BATCH_KEYS, _MAX_PIECE_BYTES // num_bytes))
                for start in range(0, len(run), step):
                    piece = run[start : start + step]
                    cost = EVENT_COST + len(piece) * MAX_BATCH_KEYS // step
                    if event.removed:
                        yield BlockRemoved(self._wire_hashes(piece), medium, group_idx, locality="LOCAL"), cost
                    else:
                        size = event.block_size or self.block_size
                        yield self._stored(piece, medium, group_idx, size, blocks[start : start + step]), cost

    def _note(self, event: OffloadingEvent, bit: int) -> None:
        """Note which described blocks the event moves into or out of a medium."""
        for key in event.keys if self._blocks else ():
            if not isinstance(key, bytes) or key not in self._blocks:
                continue
            media = self._media.get(key, 0)
            if remaining := media & ~bit if event.removed else media | bit:
                self._media[key] = remaining
            else:
                self._media.pop(key, None)

    def _stored(
        self, hashes: list[bytes], medium: str, group_idx: int, block_size: int, blocks: Sequence[_PromptBlock] = ()
    ) -> BlockStored:
        """Return the event of blocks of one group; `blocks` are their descriptions, or empty."""
        kind, window = self._spec_kinds[group_idx] if group_idx < len(self._spec_kinds) else (None, None)
        event = BlockStored(
            self._wire_hashes(hashes), None, [], block_size, None, medium, None, group_idx=group_idx,
            kv_cache_spec_kind=kind, kv_cache_spec_sliding_window=window, locality="LOCAL",
        )  # fmt: skip
        if blocks:
            parent = blocks[0].parent
            event.parent_block_hash = None if parent is None else self._wire_hashes([parent])[0]
            event.token_ids = [token for block in blocks for token in block.token_ids]
            event.lora_id, event.lora_name = blocks[0].lora
            if any(block.extra_keys is not None for block in blocks):
                event.extra_keys = [block.extra_keys for block in blocks]
            if any(block.lookahead is not None for block in blocks):
                event.lookahead_token_ids = [[*(block.lookahead or ())] for block in blocks]
        return event

    def _runs(self, hashes: list[bytes], group_idx: int) -> Iterator[tuple[list[bytes], list[Any]]]:
        """Yield hashes in runs with their descriptions: chains of described blocks, or blocks without a description."""
        group = group_idx.to_bytes(4, "big")
        described = [self._blocks.get(block_hash + group) for block_hash in hashes] if self._blocks else [None]
        first = 0
        for i in range(1, len(described)):
            before, block = described[i - 1], described[i]
            if before is None or block is None:
                is_next = before is block
            else:
                is_next = block.parent == hashes[i - 1] and block.lora == before.lora
            if not is_next:
                yield hashes[first:i], described[first:i] if before is not None else []
                first = i
        yield hashes[first:], described[first:] if described[first] is not None else []

    def _wire_hashes(self, hashes: list[bytes]) -> list[BlockHash]:
        if not self._has_ints:
            return [*hashes]
        # As vLLM does: the last 8 bytes of each hash, big-endian; a shorter one has zeros in front.
        last_bytes = b"".join(block_hash[-8:].rjust(8, b"\0") for block_hash in hashes)
        numbers: list[BlockHash] = np.frombuffer(last_bytes, ">u8").tolist()
        return numbers


def _by_group(keys: list[bytes]) -> dict[int, list[bytes]]:
    """Return block hashes by group. A key of up to 4 bytes is a bare hash of group 0; other types are skipped."""
    if not set(map(type, keys)) <= {bytes}:
        keys = [key for key in keys if isinstance(key, bytes)]
    groups: dict[bytes, list[bytes]] = {}
    if len(tails := {key[GROUP_PART] for key in keys}) == 1 and min(map(len, keys)) > 4:
        groups[tails.pop()] = [key[HASH_PART] for key in keys]
    else:
        for key in keys:
            block_hash, group = (key[HASH_PART], key[GROUP_PART]) if len(key) > 4 else (key, bytes(4))
            groups.setdefault(group, []).append(block_hash)
    return {int.from_bytes(group, "big"): hashes for group, hashes in groups.items()}
