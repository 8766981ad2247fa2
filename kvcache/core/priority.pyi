from typing import final

@final
class PriorityClasses:
    def __len__(self) -> int: ...
