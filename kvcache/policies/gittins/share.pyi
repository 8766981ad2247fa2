from typing import Any, Self, final

@final
class Share:
    def __new__(cls, table: Any) -> Self: ...
    @property
    def keys(self) -> list[bytes]: ...
