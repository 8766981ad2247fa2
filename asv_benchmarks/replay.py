"""Time and hits of a replay, per policy, and beside a plain-Python manager in the same run."""

from __future__ import annotations

from typing import Any

from asv_benchmarks.plain_manager import PlainManager
from asv_benchmarks.traces import MISSING, conversation_path, fresh_keys, replay
from kvcache import CPUOffloadingManager
from kvcache.lab.fleet.routers import FleetPlan
from kvcache.lab.fleet.scaled_trace import ScaledTrace
from kvcache.lab.fleet.simulation import run_fleet
from kvcache.lab.traces.chats import ChatWorkload
from kvcache.lab.traces.compact import CompactTrace
from kvcache.lab.traces.trace import Trace
from kvcache.registry import POLICIES


class ReplayChats:
    """Whole replay of 1,000 generated chat requests, a fifth of the working set as capacity."""

    params = (POLICIES.names(),)
    param_names = ("policy",)
    number = 1
    warmup_time = 0

    def setup(self, policy: str) -> None:
        # One replay per set-up, so that every one of them meets fresh keys and an empty cache.
        self.keys = fresh_keys(ChatWorkload(num_requests=1000), 1)
        self.manager = CPUOffloadingManager(16, 3500, policy)

    def time_replay(self, policy: str) -> None:
        replay(self.manager, self.keys)

    def track_block_hit_rate(self, policy: str) -> float:
        return replay(self.manager, self.keys) / sum(map(len, self.keys))


class ReplayConversation:
    """Whole replay of the conversation trace; skipped where the trace is not there."""

    params = (POLICIES.names(), (3000, 10000, 30000))
    param_names = ("policy", "num_blocks")
    number = 1
    warmup_time = 0

    def setup(self, policy: str, num_blocks: int) -> None:
        path = conversation_path()
        if path is None:
            raise NotImplementedError(MISSING)
        with Trace(path) as trace:
            self.keys = fresh_keys(trace, 1)
        self.manager = CPUOffloadingManager(512, num_blocks, policy)

    def time_replay(self, policy: str, num_blocks: int) -> None:
        replay(self.manager, self.keys)

    def track_prefix_hits(self, policy: str, num_blocks: int) -> int:
        return replay(self.manager, self.keys)


class CompiledAgainstPlain:
    """The same chats, 8 keys to a listed block, through the compiled manager and through one in plain Python."""

    params = (("lru", "arc"), ("compiled", "plain"))
    param_names = ("policy", "manager")
    number = 1
    warmup_time = 0

    def setup(self, policy: str, manager: str) -> None:
        self.keys = fresh_keys(ChatWorkload(num_requests=300), 8)
        make: Any = CPUOffloadingManager if manager == "compiled" else PlainManager
        self.manager = make(2, 20_000, policy)

    def time_replay(self, policy: str, manager: str) -> None:
        replay(self.manager, self.keys)


class Fleet:
    """Chats through 100 engines behind a router, over a shared store."""

    params = (("round_robin", "prefix", "events"),)
    param_names = ("router",)
    number = 1
    warmup_time = 0

    def setup(self, router: str) -> None:
        trace = CompactTrace.of(ChatWorkload(num_requests=2000, chats_per_s=20.0), 16)
        self.trace = ScaledTrace(trace, 10)

    def time_fleet(self, router: str) -> None:
        run_fleet(self.trace, FleetPlan(100, router, 2000, 200_000))
