from typing import final

from kvcache.core.policy_adapter import PolicyAdapter

@final
class GittinsCachePolicy(PolicyAdapter):
    now_ms: int
    @property
    def reads_clock(self) -> bool: ...
    @property
    def num_remembered(self) -> int: ...
    @property
    def touches(self) -> int: ...
    @property
    def worths(self) -> list[int]: ...
