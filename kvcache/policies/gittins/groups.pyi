from typing import Self, final

from kvcache.policies.gittins.values import ValueTable

@final
class AgedGroups:
    def __new__(cls, values: ValueTable) -> Self: ...
