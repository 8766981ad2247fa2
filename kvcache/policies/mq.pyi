from typing import final

from typing_extensions import disjoint_base

from kvcache.core.ghosts import GhostList
from kvcache.core.policy_adapter import ListView, PolicyAdapter

@disjoint_base
class MultiQueue(PolicyAdapter):
    @property
    def queues(self) -> list[ListView]: ...
    @property
    def history(self) -> GhostList: ...
    @property
    def clock(self) -> int: ...
    @property
    def life(self) -> int: ...

@final
class MQCachePolicy(MultiQueue): ...

@final
class AMQCachePolicy(MultiQueue): ...
