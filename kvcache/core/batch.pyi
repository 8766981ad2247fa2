from typing import final

@final
class Batch: ...
