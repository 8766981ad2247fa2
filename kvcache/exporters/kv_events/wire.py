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


class BlockStored(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Blocks that came to a medium; the fields of vLLM's struct of this name.

    Parameters
    ----------
    block_hashes : list of bytes
        The blocks.
    parent_block_hash : bytes or None
        Always None.
    token_ids : list of int
        Always empty.
    block_size : int
        Tokens of a block.
    lora_id, lora_name : None
        Not known here.
    medium : str
        ``"CPU"`` or ``"STORAGE"``.
    group_idx : int
        KV-cache group.
    locality : str
        ``"LOCAL"``.
    """

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
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


class BlockRemoved(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Blocks that left a medium; the fields of vLLM's struct of this name.

    Parameters
    ----------
    block_hashes : list of bytes
        The blocks.
    medium : str
        ``"CPU"`` or ``"STORAGE"``.
    group_idx : int
        KV-cache group.
    locality : str
        ``"LOCAL"``.
    """

    block_hashes: list[bytes]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Every medium was emptied."""


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
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
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
