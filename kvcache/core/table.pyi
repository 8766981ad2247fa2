from typing import Self, final

@final
class Batch: ...

@final
class BlockTable:
    def __new__(
        cls, cache_capacity: int, num_lists: int = 1, ranked: bool = False, keeps_queues: bool = True
    ) -> Self: ...
