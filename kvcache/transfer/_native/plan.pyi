from collections.abc import Sequence
from typing import Self

import numpy as np
import numpy.typing as npt
from typing_extensions import disjoint_base

_Ids = npt.NDArray[np.int64]

@disjoint_base
class Geometry:
    def __new__(
        cls,
        tensors: Sequence[tuple[int, int, int]],
        groups: Sequence[Sequence[tuple[int, int]]],
        host_address: int,
        host_stride_bytes: int,
        num_host_blocks: int,
        block_size_factor: int = 1,
        owner: object = None,
    ) -> Self: ...
    def segments(self) -> list[list[tuple[int, int, int, int, int]]]: ...
    def check(
        self, device_ids: _Ids, group_sizes: Sequence[int], block_indices: Sequence[int], host_ids: _Ids
    ) -> int: ...
    def runs(
        self, device_ids: _Ids, group_sizes: Sequence[int], block_indices: Sequence[int], host_ids: _Ids
    ) -> _Ids: ...
