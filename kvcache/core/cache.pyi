from typing import Self, final

from kvcache.core.policy import ReplacementPolicy
from kvcache.policies.base import BlockCacheOps

@final
class BlockCache(BlockCacheOps):  # type: ignore[misc]  # no base at run time, but the same methods
    @property
    def declined_blocks(self) -> int: ...
    def __new__(cls, policy: ReplacementPolicy) -> Self: ...
    def check(self) -> None: ...
