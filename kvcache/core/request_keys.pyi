from typing import final

@final
class RequestKeys:
    priority: int
    ttl_ns: int
    next_use: int
    positions: dict[bytes, int] | None
    @property
    def num_named(self) -> int: ...
    @property
    def num_seen(self) -> int: ...
    def __len__(self) -> int: ...
    def __contains__(self, key: object, /) -> bool: ...
