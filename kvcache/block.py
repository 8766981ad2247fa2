"""BlockStatus: the slot of a block in a pool, and its references."""

from __future__ import annotations

import ctypes
from enum import IntEnum


class BlockStateError(RuntimeError):
    """A block's reference count or state does not allow the call."""


class BlockState(IntEnum):
    """The state of a key in a manager, as `status` returns it. A pool has the first three states."""

    ABSENT = 0
    PENDING = 1
    """It is being written, or a tier is bringing it back."""
    READY = 2
    ASK_AGAIN = 3
    """A tier has not answered yet whether it holds the block."""


ABSENT, PENDING, READY, ASK_AGAIN = BlockState  # a name of a module costs half of an attribute's time


class BlockStatus(ctypes.Structure):
    """The slot of one block in a pool, and its number of references.

    Parameters
    ----------
    block_id : int
        Slot in the pool, int64.

    Raises
    ------
    ValueError
        The id is no int64.

    Notes
    -----
    C layout `{int32 ref_cnt; int64 block_id}`, 16 bytes. `ref_cnt` starts at -1: not ready, being written.
    """

    _fields_ = (("ref_cnt", ctypes.c_int32), ("block_id", ctypes.c_int64))

    def __init__(self, block_id: int) -> None:
        super().__init__(-1, block_id)
        if self.block_id != block_id:
            raise ValueError(f"block_id must be an int64, got {block_id!r}")

    @property
    def is_ready(self) -> bool:
        """Whether the block's bytes are there to be read."""
        return bool(self.ref_cnt >= 0)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(block_id={self.block_id}, ref_cnt={self.ref_cnt})"
