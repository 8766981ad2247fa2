from typing import Self, final

import numpy as np
import numpy.typing as npt

@final
class NextUses:
    @property
    def num_ids(self) -> int: ...
    def __new__(cls, part: int = 0, num_parts: int = 1) -> Self: ...
    def link(self, ids: npt.NDArray[np.int64], bounds: npt.NDArray[np.int64], nexts: npt.NDArray[np.int64]) -> None: ...

@final
class NearestUses:
    def __new__(cls, num_places: int, room: int) -> Self: ...
    def step(
        self, nexts: npt.NDArray[np.int64], bounds: npt.NDArray[np.int64], hits: npt.NDArray[np.int64], parts: int = 1
    ) -> None: ...
