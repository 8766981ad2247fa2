from typing import Self, final

@final
class Batch: ...

@final
class BlockTable:
    def __new__(cls, cache_capacity: int, num_lists: int = 1, keeps_queues: bool = True) -> Self: ...
