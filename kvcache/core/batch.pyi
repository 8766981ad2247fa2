from typing import NoReturn, final

@final
class Batch:
    def __reduce__(self) -> NoReturn: ...
