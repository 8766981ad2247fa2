from typing import final

@final
class RequestKeys:
    found_position: int
    @property
    def num_seen(self) -> int: ...
