"""CachePolicy: what a replacement policy must answer. Read this first.

Five primitives make a policy; a manager never calls them one block at a time on the fast path but through the batch
verbs (`kvcache.policies.verbs`), which are written in terms of the five and which compiled policies bring themselves.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcache.policies.verbs import BatchVerbs
    from kvcache.types import BlockStatus


class CachePolicy(ABC):
    """Decide which blocks leave when room is needed.

    Parameters
    ----------
    cache_capacity : int
        Blocks that the cache holds, >= 1.

    Raises
    ------
    ValueError
        The capacity is not a positive int.

    Notes
    -----
    Write `get`, `insert`, `remove`, `touch` and `evict` and the policy runs under every manager. `order`, `use` and
    `clear` have defaults. A policy holds the very `BlockStatus` objects that it is given; their `ref_cnt` changes
    while it holds them, and a block whose `ref_cnt` is not 0 must be passed over by `evict`.
    """

    def __init__(self, cache_capacity: int) -> None:
        self.cache_capacity = checked_capacity(cache_capacity)

    @abstractmethod
    def get(self, key: bytes) -> BlockStatus | None:
        """Return the block of `key`, or None; this is no use of it."""

    @abstractmethod
    def insert(self, key: bytes, block: BlockStatus) -> None:
        """Take a block in that is not there yet, at the most-recent end."""

    @abstractmethod
    def remove(self, key: bytes) -> None:
        """Let a block go without remembering it; KeyError if it is not there."""

    @abstractmethod
    def touch(self, keys: Iterable[bytes]) -> None:
        """Count one use of each key, from last to first; keys that are not there are ignored."""

    @abstractmethod
    def evict(self, n: int, protected: Container[bytes]) -> list[tuple[bytes, BlockStatus]] | None:
        """Let exactly `n` blocks go, none referenced, unready or protected; or None, and nothing has changed."""

    def order(self, keys: Iterable[bytes]) -> None:  # noqa: B027
        """Move each key, from last to first, to the most-recent end where it stands; no use is counted.

        The default does nothing.
        """

    def use(self, keys: list[bytes], first: bool) -> None:
        """Count one use of each key for one request; `first` on the first call for that request.

        A policy whose clock counts requests advances it only if `first`. The default is `touch`.
        """
        self.touch(keys)

    def clear(self) -> None:
        """Forget everything, ghosts and adaptive state too.

        The default raises NotImplementedError; the manager then makes a fresh instance.
        """
        raise NotImplementedError

    def native(self, num_blocks: int) -> BatchVerbs | None:
        """Return batch verbs of the policy's own over a pool of `num_blocks` slots, or None to get the default ones.

        Compiled policies own their pool and answer with themselves.
        """
        return None


def checked_capacity(cache_capacity: object) -> int:
    """Return `cache_capacity` if it is a positive int; ValueError otherwise."""
    if type(cache_capacity) is not int or cache_capacity < 1:
        raise ValueError(f"cache_capacity must be an int >= 1, got {cache_capacity!r}")
    return cache_capacity
