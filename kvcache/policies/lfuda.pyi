from typing import final

from kvcache.core.ghosts import GhostList
from kvcache.core.table import Table

@final
class LFUDACachePolicy(Table):
    @property
    def history(self) -> GhostList: ...
    @property
    def age(self) -> int: ...
