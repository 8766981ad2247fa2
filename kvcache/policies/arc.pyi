from typing import final

from kvcache.core.ghosts import GhostList
from kvcache.core.policy_adapter import ListView, PolicyAdapter

@final
class ARCCachePolicy(PolicyAdapter):
    @property
    def t1(self) -> ListView: ...
    @property
    def t2(self) -> ListView: ...
    @property
    def b1(self) -> GhostList: ...
    @property
    def b2(self) -> GhostList: ...
    target_t1_size: float
