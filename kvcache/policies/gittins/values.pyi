from typing import Self, final

@final
class ValueTable:
    def __new__(cls) -> Self: ...
    @property
    def splits_shared(self) -> bool: ...
