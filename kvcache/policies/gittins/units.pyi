from collections.abc import Iterable
from typing import final

from kvcache.policies.gittins.policy import GittinsCachePolicy

@final
class UnitGittinsPolicy(GittinsCachePolicy):
    def set_group_windows(self, group_windows: Iterable[int | None]) -> None: ...
    @property
    def lru_requests(self) -> int: ...
    @property
    def leave_first(self) -> list[bytes]: ...
    @property
    def listed(self) -> list[tuple[int, int, list[bytes]]]: ...
