from typing import final

from kvcache.policies.mq import MultiQueue

@final
class AMQCachePolicy(MultiQueue): ...
