"""What the bookkeeping of a policy costs beside lru's, in one run.

``python -m asv_benchmarks.policy_cost [POLICY ...] [--blocks N,...] [--trace TRACE]`` replays a trace through lru and
the policies in turn, and prints per capacity the least CPU time of each, in nanoseconds a key for the whole cycle of a
request, and its ratio to lru's. Keys are made before the clock starts; `gittins` reads the trace's own clock.
"""

from __future__ import annotations

import argparse
import gc
from functools import partial
from pathlib import Path
from time import process_time
from typing import Any

from asv_benchmarks.calls import groups_scenario, least_of
from asv_benchmarks.traces import MISSING, agents_path, conversation_path, fresh_keys, serve
from kvcache import CPUOffloadingManager
from kvcache.lab.simulate.run import ReplayClock
from kvcache.lab.traces.chats import ChatWorkload
from kvcache.lab.traces.trace import Trace
from kvcache.registry import POLICIES

NUM_ROUNDS = 5
CAPACITIES = {"conversation": (3000, 10000, 30000), "agents": (500, 2000, 8000)}


def cost(policy: str, num_blocks: int, arrivals: list[float], keys_of_requests: list[list[bytes]]) -> float:
    """Return the CPU seconds of one replay."""
    clock = ReplayClock()
    manager: Any = CPUOffloadingManager(512, num_blocks, policy, clock=clock)
    gc.collect()
    gc.disable()
    start = process_time()
    for clock.now_s, keys in zip(arrivals, keys_of_requests, strict=True):
        serve(manager, keys)
    spent = process_time() - start
    gc.enable()
    return spent


def least_costs(policies: list[str], num_blocks: int, requests: list[Any]) -> dict[str, float]:
    """Return nanoseconds a key of each policy: the least of `NUM_ROUNDS` rounds in which they take turns."""
    arrivals = [request.arrival_s for request in requests]
    spent: dict[str, list[float]] = {policy: [] for policy in policies}
    num_keys = 0
    for _ in range(NUM_ROUNDS):
        for policy in policies:
            keys = fresh_keys(requests, 1)
            num_keys = sum(map(len, keys))
            spent[policy].append(cost(policy, num_blocks, arrivals, keys))
    return {policy: min(seconds) / num_keys * 1e9 for policy, seconds in spent.items()}


class CostAgainstLru:
    """The cost of a policy's bookkeeping on generated chats, as a multiple of lru's in the same run."""

    params = (POLICIES.names(),)
    param_names = ("policy",)
    unit = "ratio"

    def track_cost_against_lru(self, policy: str) -> float:
        costs = least_costs(list(dict.fromkeys(["lru", policy])), 3500, list(ChatWorkload(num_requests=1000)))
        return costs[policy] / costs["lru"]


class CostOfGroupsAgainstLru:
    """The cost of gittins with four KV-cache groups on generated chats, as a multiple of lru's with the same keys.

    Each store offers 4 positions, or the whole prompt.
    """

    params = (4, 1 << 20)
    param_names = ("step",)
    unit = "ratio"

    def track_cost_of_groups(self, step: int) -> float:
        requests = list(ChatWorkload(num_requests=1000))
        pairs = list(zip([request.arrival_s for request in requests], fresh_keys(requests, 1), strict=True))
        costs = {
            policy: sum(ns for _, ns in least_of(partial(groups_scenario, policy, 14_000, pairs, step), NUM_ROUNDS))
            for policy in ("lru", "gittins")
        }
        return costs["gittins"] / costs["lru"]


def main() -> int:
    """Print a line per trace and capacity."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("policies", nargs="*", default=["gittins"])
    parser.add_argument("--blocks", help="capacities; otherwise three of each trace")
    parser.add_argument("--trace", type=Path)
    arguments = parser.parse_args()
    policies = list(dict.fromkeys(["lru", *arguments.policies]))
    traces = {"conversation": conversation_path(), "agents": agents_path()}
    if arguments.trace:
        traces = {arguments.trace.name: arguments.trace}
    for name, path in traces.items():
        if path is None:
            print(f"{name}: {MISSING}")
            continue
        with Trace(path) as trace:
            requests = list(trace)
        for num_blocks in [int(n) for n in arguments.blocks.split(",")] if arguments.blocks else CAPACITIES[name]:
            costs = least_costs(policies, num_blocks, requests)
            shown = "  ".join(f"{policy} {ns:4.0f} ns {ns / costs['lru']:5.2f}" for policy, ns in costs.items())
            print(f"{name:<14} {num_blocks:7,}  {shown}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
