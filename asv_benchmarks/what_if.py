"""Cost of the live what-if to a scheduler, its time to answer, and its error."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import perf_counter, sleep

from asv_benchmarks.traces import fresh_keys, replay
from kvcache import CPUOffloadingManager
from kvcache.lab.traces.chats import ChatWorkload
from kvcache.registry import POLICIES


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
        """Return the error of the estimate at the manager's own capacity."""
        estimated = self.manager.what_if(policy).hit_ratios[policy][2]
        return abs(estimated - self.hits / sum(map(len, self.keys)))


class WhatIfMeanwhile:
    """Steps per second of a scheduler that sleeps between its steps, while all policies are estimated."""

    def setup(self) -> None:
        self.manager = CPUOffloadingManager(16, 20_000, what_if=True)
        self.keys = fresh_keys(ChatWorkload(num_requests=4000), 1)
        replay(self.manager, self.keys)

    def track_share_of_steps(self) -> float:
        """Return the steps per second over those without a what-if running."""
        alone = self._steps_a_second(lambda: sleep(2.0))
        return self._steps_a_second(self.manager.what_if) / alone

    def _steps_a_second(self, meanwhile: Callable[[], object]) -> float:
        thread = threading.Thread(target=meanwhile)
        start_s, num_steps = perf_counter(), 0
        thread.start()
        while thread.is_alive():
            self.manager.lookup(self.keys[num_steps % len(self.keys)])
            sleep(0.002)
            num_steps += 1
        return num_steps / (perf_counter() - start_s)
