from typing import final

from typing_extensions import disjoint_base

from kvcache.core.ghosts import GhostList
from kvcache.core.table import ListView, Table

@disjoint_base
class MultiQueue(Table):
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
