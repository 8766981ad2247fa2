"""What the live what-if costs a scheduler, what it takes to answer, and how far off it is."""

from __future__ import annotations

from asv_benchmarks.traces import fresh_keys, replay
from kvcache import CPUOffloadingManager
from kvcache.registry import POLICIES
from kvcache.replay.chats import ChatWorkload


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
    """The answer after 1,000 generated chat requests, one policy at six capacities."""

    # Policies that read the clock are left out of the estimate: arrival times are not sampled.
    params = ([name for name in POLICIES.names() if not getattr(POLICIES.resolve(name)(1), "reads_clock", False)],)
    param_names = ("policy",)

    def setup(self, policy: str) -> None:
        self.keys = fresh_keys(ChatWorkload(num_requests=1000), 1)
        self.manager = CPUOffloadingManager(16, 3500, policy, what_if=16_384)
        self.hits = replay(self.manager, self.keys)

    def time_answer(self, policy: str) -> None:
        self.manager.what_if(policy)

    def track_error_here(self, policy: str) -> float:
        """Return how far the estimate at the manager's own capacity is from what it hit."""
        estimated = self.manager.what_if(policy).hit_ratios[policy][2]
        return abs(estimated - self.hits / sum(map(len, self.keys)))
