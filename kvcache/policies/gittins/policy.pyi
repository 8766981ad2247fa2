from typing_extensions import disjoint_base

from kvcache.core.policy_adapter import PolicyAdapter

@disjoint_base
class GittinsCachePolicy(PolicyAdapter):
    now_ms: int
    stores_all: bool
    @property
    def num_remembered(self) -> int: ...
    @property
    def touches(self) -> int: ...
    @property
    def num_aged(self) -> int: ...
    @property
    def num_passed(self) -> int: ...
    @property
    def splits_shared(self) -> bool: ...
    @property
    def worths(self) -> list[int]: ...
