"""Messages: vLLM's events and batches as structs.

The fields are vLLM's, so that its own decoders read them; fields that a cache does not know keep their default.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)


BlockHash = int | bytes
"""The last 8 bytes of a block's hash, unsigned and big-endian, as vLLM sends by default; or the whole hash."""


_GroupIdx = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


class BlockStored(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Blocks that came to a medium; the fields of vLLM's struct of this name.

    Each of the `block_hashes` is the parent of the next if there are `token_ids`, which are those of all blocks.
    `parent_block_hash` is the block before the first one. `medium` is ``"CPU"`` or ``"STORAGE"``, `locality`
    ``"LOCAL"``. `group_idx` is a KV-cache group, which holds `kv_cache_spec_kind` (with a window of
    `kv_cache_spec_sliding_window` tokens). `block_size`, `lora_id`, `lora_name`, `extra_keys`, `ownership`,
    `session_id` and `lookahead_token_ids` are as vLLM sends them.
    """

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[Any] | None = None
    group_idx: _GroupIdx | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: list[Any] | None = None


class BlockRemoved(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Blocks that left a medium; the fields are those of `BlockStored`.

    They are `block_hashes`, `medium`, `group_idx`, `locality` and `ownership`.
    """

    block_hashes: list[BlockHash]
    medium: str | None
    group_idx: _GroupIdx | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Every medium was emptied."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """One message: its time `ts` in seconds since the epoch, its `events` in order, and the `data_parallel_rank`."""

    ts: float
    events: list[KVEvent]
    data_parallel_rank: int | None = None


to_bytes = msgspec.msgpack.Encoder().encode
"""Returns the payload of a batch."""


def array_event(event: KVEvent) -> Any:
    """Return an event in the layout of vLLM before 0.24: an array, whose first element is the type."""
    fields = [type(event).__name__, *msgspec.structs.astuple(event)]
    while fields[-1] is None:
        fields.pop()
    return fields
