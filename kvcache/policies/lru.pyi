from typing import final

from kvcache.core.table import Table

@final
class LRUCachePolicy(Table): ...
