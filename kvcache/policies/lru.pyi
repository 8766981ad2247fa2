from typing import final

from kvcache.core.policy_adapter import PolicyAdapter

@final
class LRUCachePolicy(PolicyAdapter): ...
