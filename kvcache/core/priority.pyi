from typing import final

@final
class PriorityClasses: ...
