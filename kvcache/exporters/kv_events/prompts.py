"""PromptBlocks: the tokens and the parent of each block that a request has described, for the events of stores.

A block's event comes when its request may be gone, and again when the block moves between media.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec

from kvcache.request import Prompt

MAX_IDLE = 1 << 17
"""Blocks that no medium holds, and that may still be stored again."""


class PromptBlock(NamedTuple):
    """One block of a prompt."""

    parent: bytes | None
    token_ids: array[int]
    lora_id: int | None
    lora_name: str | None
    extra_keys: tuple[Any, ...] | None


class PromptBlocks:
    """The described blocks, by key; for one thread.

    Parameters
    ----------
    is_held : callable
        Whether any medium holds the block of a key. Blocks that are not held are kept up to `MAX_IDLE`.
    """

    def __init__(self, is_held: Callable[[bytes], bool]) -> None:
        self._is_held = is_held
        self._blocks: dict[bytes, PromptBlock] = {}
        self._idle: OrderedDict[bytes, None] = OrderedDict()

    def add(self, keys: list[bytes], prompt: Prompt, block_size: int) -> None:
        """Describe the blocks `keys`. Keys that the prompt does not name, or has too few tokens for, are ignored."""
        for key in keys:
            i = prompt.index_of(key)
            end = (i + 1) * block_size
            if i < 0 or end > len(prompt.token_ids):
                continue
            if i and not isinstance(prompt.keys[i - 1], bytes):
                raise TypeError(f"a prompt's keys must be bytes, got {prompt.keys[i - 1]!r:.80}")
            extra = None if prompt.extra_keys is None or i >= len(prompt.extra_keys) else prompt.extra_keys[i]
            # The event must be encodable.
            msgspec.msgpack.encode((prompt.lora_id, prompt.lora_name, extra))
            self._blocks[key] = PromptBlock(
                prompt.keys[i - 1][:-4] if i else None,
                array("I", prompt.token_ids[end - block_size : end]),
                prompt.lora_id,
                prompt.lora_name,
                None if extra is None else tuple(extra),
            )
            self._leave(key)

    def runs(self, hashes: list[bytes], group: bytes) -> Iterator[tuple[list[bytes], list[PromptBlock]]]:
        """Yield `hashes` in parts: chains of described blocks, each the parent of the next, or other blocks.

        Parameters
        ----------
        hashes : list of bytes
            The blocks, in order.
        group : bytes
            The end of their keys.

        Yields
        ------
        part : list of bytes
            One or more hashes.
        blocks : list of PromptBlock
            Their descriptions, or empty.
        """
        part: list[bytes] = []
        blocks: list[PromptBlock] = []
        for block_hash in hashes if self._blocks else ():
            found = self._blocks.get(block_hash + group)
            is_next = (
                found is None
                if not blocks
                else (found is not None and found.parent == part[-1] and found[2:4] == blocks[-1][2:4])
            )
            if part and not is_next:
                yield part, blocks
                part, blocks = [], []
            part.append(block_hash)
            blocks += () if found is None else (found,)
        if part or not self._blocks:
            yield part or hashes, blocks

    def remove(self, hashes: list[bytes], group: bytes) -> None:
        """Note that a medium no longer holds blocks."""
        if self._blocks:
            for block_hash in hashes:
                if block_hash + group in self._blocks:
                    self._leave(block_hash + group)

    def clear(self) -> None:
        """Note that every medium was emptied."""
        for key in self._blocks:
            self._idle[key] = None
        self._trim()

    def _leave(self, key: bytes) -> None:
        self._idle[key] = None
        self._idle.move_to_end(key)
        self._trim()

    def _trim(self) -> None:
        while len(self._idle) > MAX_IDLE:
            key, _ = self._idle.popitem(last=False)
            if not self._is_held(key):
                del self._blocks[key]
