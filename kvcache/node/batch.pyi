from collections.abc import Collection
from typing import Any, final

import numpy as np
import numpy.typing as npt
from typing_extensions import disjoint_base

from kvcache.specs import CPULoadStoreSpec

MAX_KEY_BYTES: int

def pack_keys(keys: Collection[bytes], first: int = 0) -> tuple[list[bytes], bytes, int]: ...
def count_leases(
    slots: npt.NDArray[np.int64], step: int, counts: Any, readers: Any, writers: Any, engine: int
) -> tuple[int, int]: ...

@final
class HeldBlocks:
    keys: list[bytes]
    slots: list[int]
    def __contains__(self, key: object, /) -> bool: ...
    def add(self, keys: list[bytes], slots: bytes) -> int: ...
    def clear(self) -> None: ...
    def load_spec(self, keys: list[bytes]) -> CPULoadStoreSpec: ...

@disjoint_base
class LastLookUp:
    def remember(self, request: Any, held: HeldBlocks | None) -> None: ...
    def status(self, key: bytes, req_context: Any) -> int: ...
