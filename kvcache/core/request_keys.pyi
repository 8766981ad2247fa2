from typing import final

@final
class RequestKeys:
    @property
    def num_seen(self) -> int: ...
