from typing import NoReturn

from typing_extensions import disjoint_base

DEBUG: bool

@disjoint_base
class ReplacementPolicy:
    @property
    def cache_capacity(self) -> int: ...
    def __reduce__(self) -> NoReturn: ...
