"""Messages: vLLM's events and batches as structs, our digests, and the two special requests.

The fields are vLLM's, so that its own decoders read them; fields that a cache does not know keep their default.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

DIGEST_PREFIX = b"digest."
SNAPSHOT_REQUEST = b"snapshot"
DIGEST_REQUEST = b"digest\0\0"
"""Eight bytes, as a sequence number: a publisher that does not know the request reads a number beyond all batches."""
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
MAX_SEQ = (1 << 63) - 2
"""Batches have no greater numbers."""


BlockHash = int | bytes
"""The last 8 bytes of a block's hash, unsigned and big-endian, as vLLM sends by default; or the whole hash."""


class BlockStored(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Blocks that came to a medium; the fields of vLLM's struct of this name.

    Parameters
    ----------
    block_hashes : list of int or bytes
        The blocks, each the parent of the next if there are tokens.
    parent_block_hash : int, bytes or None
        The block before the first one. None: the first block of a prompt, or not known.
    token_ids : list of int
        The tokens of all blocks, or empty: the engine gave none. llm-d then updates known blocks only, and Dynamo
        ignores the event.
    block_size : int
        Tokens of a block.
    lora_id, lora_name : int and str, optional
        The LoRA adapter.
    medium : str
        ``"CPU"`` or ``"STORAGE"``.
    extra_keys : list, optional
        What else was hashed into each block.
    group_idx : int
        KV-cache group.
    kv_cache_spec_kind, kv_cache_spec_sliding_window : str and int, optional
        What the group holds.
    locality : str
        ``"LOCAL"``.
    """

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: list[Any] | None = None


class BlockRemoved(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Blocks that left a medium; the fields of vLLM's struct of this name.

    Parameters
    ----------
    block_hashes : list of int or bytes
        The blocks.
    medium : str
        ``"CPU"`` or ``"STORAGE"``.
    group_idx : int
        KV-cache group.
    locality : str
        ``"LOCAL"``.
    """

    block_hashes: list[BlockHash]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Every medium was emptied."""


class _StoredArray(BlockStored, array_like=True, tag="BlockStored"):
    pass


class _RemovedArray(BlockRemoved, array_like=True, tag="BlockRemoved"):
    pass


class _ClearedArray(AllBlocksCleared, array_like=True, tag="AllBlocksCleared"):
    pass


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared
_ARRAYS: dict[type[KVEvent], type[KVEvent]] = {
    BlockStored: _StoredArray,
    BlockRemoved: _RemovedArray,
    AllBlocksCleared: _ClearedArray,
}


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """One message: events, their time and the data-parallel rank.

    Parameters
    ----------
    ts : float
        Seconds since the epoch, never back.
    events : list
        In order.
    data_parallel_rank : int
        The engine's rank.
    """

    ts: float
    events: list[KVEvent]
    data_parallel_rank: int | None = None


class Digest(msgspec.Struct, omit_defaults=True):
    """The content of a view after batch `seq`: the number of blocks and the sum of their values, by medium.

    Parameters
    ----------
    seq : int
        The last batch that it covers.
    digests : dict of str to (int, int), optional
        Medium to count and sum.
    gap : int, optional
        1, from older publishers: the next batch sums up events that were too many.
    epoch : int, optional
        Drawn at the publisher's start, 53 bits: another one means another publisher, whose numbers have begun anew.
        Older publishers send none.
    """

    seq: Annotated[int, msgspec.Meta(ge=0, le=MAX_SEQ)]
    digests: dict[str, tuple[int, int]] | None = None
    gap: int | None = None
    epoch: int | None = None


def array_event(event: KVEvent) -> KVEvent:
    """Return an event in the layout of vLLM before 0.24: an array, whose first element is the type."""
    return _ARRAYS[type(event)](*msgspec.structs.astuple(event))
