from typing import NoReturn, Self, final

@final
class BlockTable:
    def __new__(
        cls, cache_capacity: int, num_lists: int = 1, ranked: bool = False, keeps_queues: bool = True
    ) -> Self: ...
    def __reduce__(self) -> NoReturn: ...
