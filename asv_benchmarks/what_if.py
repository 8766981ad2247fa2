"""Cost of the live what-if to a scheduler, its time to answer, and its error."""

from __future__ import annotations

from asv_benchmarks.traces import fresh_keys, replay
from kvcache import CPUOffloadingManager
from kvcache.lab.traces.chats import ChatWorkload


class WhatIfSampling:
    """Whole replay of 1,000 generated chat requests, with the sampler and without."""

    params = ((False, True),)
    param_names = ("what_if",)
    number = 1
    warmup_time = 0

    def setup(self, what_if: bool) -> None:
        self.keys = fresh_keys(ChatWorkload(num_requests=1000), 1)
        self.manager = CPUOffloadingManager(16, 3500, what_if=what_if)

    def time_replay(self, what_if: bool) -> None:
        replay(self.manager, self.keys)


class WhatIfAnswer:
    """The answer after 1,000 generated chat requests, at six capacities."""

    def setup(self) -> None:
        self.keys = fresh_keys(ChatWorkload(num_requests=1000), 1)
        self.manager = CPUOffloadingManager(16, 3500, what_if=16_384)
        self.hits = replay(self.manager, self.keys)

    def time_answer(self) -> None:
        self.manager.what_if()

    def track_error_here(self) -> float:
        """Return the error of the estimate at the manager's own capacity."""
        estimated = self.manager.what_if().hits_at(3500)
        return abs(estimated - self.hits / sum(map(len, self.keys)))
