from typing import Any, Self, final

@final
class GroupSets:
    def __new__(cls, table: Any, group_windows: list[int | None]) -> Self: ...
