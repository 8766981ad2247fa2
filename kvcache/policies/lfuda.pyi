from typing import final

from kvcache.core.ghosts import GhostList
from kvcache.core.policy_adapter import PolicyAdapter

@final
class LFUDACachePolicy(PolicyAdapter):
    @property
    def history(self) -> GhostList: ...
    @property
    def age(self) -> int: ...
