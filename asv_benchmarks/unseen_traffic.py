"""Whether `gittins` keeps its promises on traffic that it was not made on: generated agents and chats.

``python -m asv_benchmarks.unseen_traffic [--requests N]`` replays seeded workloads of other shapes than the recorded
traces, at shares of their distinct blocks, and prints the hit rates of lru, amq, gittins and the offline optimum. Asked
of gittins: never more than 0.5 points under the better of lru and amq; on agents, where lru hits 15 to 60 %, at least
30 % of the gap from the better of the two to the optimum. Exit status 1 if a line falls short.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from typing import Any

from kvcache.control.cpu import CPUOffloadingManager
from kvcache.replay.agents import AgentWorkload
from kvcache.replay.chats import ChatWorkload
from kvcache.replay.compact import CompactTrace
from kvcache.replay.keys import KeyMaker
from kvcache.replay.optimum import optimal_hits
from kvcache.replay.requests import Request
from kvcache.replay.run import ReplayClock
from kvcache.request import ReqContext

SHARES = (0.02, 0.05, 0.1, 0.2, 0.4)
POLICIES = ("lru", "amq", "gittins")
MOST_BELOW = 0.5
LEAST_OF_GAP = 30.0

AGENTS: dict[str, dict[str, Any]] = {
    "agents, as the demo": {"num_users": 8},
    "agents, 40 users": {"num_users": 40, "seed": 1},
    "agents, quick tools": {"num_users": 24, "mean_tool_s": 1.5, "mean_steps": 16.0, "seed": 2},
    "agents, slow tools": {"num_users": 24, "mean_tool_s": 45.0, "seed": 3},
    "agents, many sub-agents": {"num_users": 16, "subagent_share": 0.3, "num_tool_sets": 6, "seed": 4},
    "agents, long results": {"num_users": 24, "mean_result_tokens": 2500, "max_context_tokens": 131072, "seed": 5},
}
CHATS: dict[str, dict[str, Any]] = {
    "chats, as the demo": {},
    "chats, slow readers": {"mean_think_s": 240.0, "seed": 1},
    "chats, one turn mostly": {"mean_turns": 1.5, "num_system_prompts": 60, "seed": 2},
    "chats, long": {"mean_turns": 20.0, "mean_question_tokens": 400, "mean_answer_tokens": 600, "seed": 3},
}


def hit_blocks(policy: str, num_blocks: int, trace: list[Request]) -> int:
    """Return the prefix hits of a replay."""
    clock, make_keys = ReplayClock(), KeyMaker(1)
    manager: Any = CPUOffloadingManager(16, num_blocks, policy, clock=clock)
    num_hits = 0
    for request in trace:
        clock.now_s = request.arrival_s
        keys, context = make_keys(request.hash_ids), ReqContext()
        num_hits += manager.lookup(keys, context)
        manager.touch(keys, context)
        output = manager.prepare_store(keys, context)
        if output is not None:
            manager.complete_store(output.keys_to_store, context)
        manager.on_request_finished(context)
    return num_hits


def rates(workload: Iterable[Request]) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield a capacity and the hit rate of each policy, in percent of all blocks."""
    trace = list(workload)
    compact = CompactTrace.of(trace, 16)
    num_blocks = len(set(compact.ids.tolist()))
    for capacity in [max(1, int(share * num_blocks)) for share in SHARES]:
        hits: dict[str, float] = {policy: hit_blocks(policy, capacity, trace) for policy in POLICIES}
        hits["optimum"] = int(optimal_hits(compact, capacity).sum())
        yield capacity, {name: 100.0 * count / len(compact.ids) for name, count in hits.items()}


def main() -> int:
    """Print a line per workload and capacity."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=0, help="added to each workload's own")
    arguments = parser.parse_args()
    num_short = 0
    print("workload                     blocks    lru    amq  gittins  optimum  over best  of the gap")
    for kinds, make in ((AGENTS, AgentWorkload), (CHATS, ChatWorkload)):
        for name, options in kinds.items():
            made = {**options, "seed": options.get("seed", 0) + arguments.seed, "num_requests": arguments.requests}
            for capacity, rate in rates(make(**made)):
                best = max(rate["lru"], rate["amq"])
                gain = rate["gittins"] - best
                gap = 100.0 * gain / (rate["optimum"] - best) if rate["optimum"] > best else 100.0
                is_short = gain < -MOST_BELOW or (kinds is AGENTS and 15 <= rate["lru"] <= 60 and gap < LEAST_OF_GAP)
                num_short += is_short
                print(
                    f"{name:<26} {capacity:8,} {rate['lru']:6.2f} {rate['amq']:6.2f} {rate['gittins']:8.2f} "
                    f"{rate['optimum']:8.2f} {gain:+10.2f} {gap:9.0f} %{'  short' if is_short else ''}",
                    flush=True,
                )
    return 1 if num_short else 0


if __name__ == "__main__":
    raise SystemExit(main())
