from collections.abc import Sequence
from typing import Self

import numpy as np
import numpy.typing as npt
from typing_extensions import disjoint_base

from kvcache.transfer._native.plan import Geometry

_Ids = npt.NDArray[np.int64]

@disjoint_base
class CopyQueue:
    def __new__(cls, geometry: Geometry, to_host: bool, num_threads: int = 0, inline_bytes: int = 131072) -> Self: ...
    def submit(
        self,
        job_id: int,
        device_ids: _Ids,
        group_sizes: Sequence[int],
        block_indices: Sequence[int],
        host_ids: _Ids,
        lost: bool = False,
    ) -> int: ...
    def get_finished(self) -> list[tuple[int, bool, int, float]]: ...
    def wait(self, sequence: int, most_s: float = ...) -> None: ...
    def close(self, abandon: bool = False) -> None: ...
