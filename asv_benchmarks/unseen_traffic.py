"""Whether `gittins` keeps its promises on traffic that it was not made on: generated agents and chats.

``python -m asv_benchmarks.unseen_traffic [--seeds N ...] [--only NAME] [--requests N] [--bound]`` replays seeded
workloads of other shapes than the recorded traces, at shares of their distinct blocks, and prints the hit rates of lru,
amq, gittins and the offline optimum. Asked of gittins: never more than 0.5 points under the better of lru and amq; on
agents, where lru hits 15 to 60 %, at least 30 % of the gap from the better of the two to the optimum. Exit status 1 if
a line falls short. With ``--bound`` the lines that are asked for 30 % also say how much of the gap two others close
(`unhinted`): a gittins that was told when each class comes back, and a bound for policies that know little more.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from asv_benchmarks.unhinted import BlindBound, CountingGittins, told_gittins
from kvcache.control.cpu import CPUOffloadingManager
from kvcache.lab.replay.agents import AgentWorkload
from kvcache.lab.replay.chats import ChatWorkload
from kvcache.lab.replay.compact import CompactTrace
from kvcache.lab.replay.keys import KeyMaker
from kvcache.lab.replay.optimum import optimal_hits
from kvcache.lab.replay.requests import Request
from kvcache.lab.replay.run import ReplayClock
from kvcache.policies.base import CachePolicy
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


def hit_blocks(policy: str | type[CachePolicy], num_blocks: int, trace: list[Request]) -> int:
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


def rates(workload: Iterable[Request], with_bound: bool = False) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield a capacity and the hit rate of each policy, in percent of all blocks."""
    trace = list(workload)
    compact = CompactTrace.of(trace, 16)
    num_blocks = len(set(compact.ids.tolist()))
    bound = BlindBound(compact) if with_bound else None
    told: type[CachePolicy] | None = None
    for capacity in [max(1, int(share * num_blocks)) for share in SHARES]:
        hits: dict[str, float] = {policy: hit_blocks(policy, capacity, trace) for policy in POLICIES}
        hits["optimum"] = int(optimal_hits(compact, capacity).sum())
        if bound is not None and must_close(100.0 * hits["lru"] / len(compact.ids)):
            if told is None:
                hit_blocks(CountingGittins, num_blocks, trace)
                told = told_gittins(CountingGittins.last)
            hits["told"] = hit_blocks(told, capacity, trace)
            hits["bound"] = min(bound.hits(capacity), hits["optimum"])
        yield capacity, {name: 100.0 * count / len(compact.ids) for name, count in hits.items()}


def must_close(lru_rate: float) -> bool:
    """Return whether gittins must close 30 % of the gap on agents where lru hits so much."""
    return 15 <= lru_rate <= 60


def of_gap(rate: float, best: float, optimum: float) -> float:
    """Return how much of the gap from the better of lru and amq to the optimum a rate closes, in percent."""
    return 100.0 * (rate - best) / (optimum - best) if optimum > best else 100.0


def main() -> int:
    """Print a line per seed, workload and capacity, and a summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="each is added to every workload's own")
    parser.add_argument("--only", default="", help="part of the names of the workloads to replay")
    parser.add_argument("--bound", action="store_true", help="say what could be hit without hints (minutes a line)")
    arguments = parser.parse_args()
    workloads = [
        (seed, kinds is AGENTS, name, make(**{**made, "seed": made.get("seed", 0) + seed}))
        for seed in arguments.seeds
        for kinds, make in ((AGENTS, AgentWorkload), (CHATS, ChatWorkload))
        for name, options in kinds.items()
        if arguments.only in name
        for made in [{**options, "num_requests": arguments.requests}]
    ]
    if not workloads:
        parser.error(f"--only: no workload's name contains {arguments.only!r}")
    gains: list[float] = []
    gaps: list[float] = []  # of agents where lru hits 15 to 60 %
    print(
        "  seed workload                     blocks    lru    amq  gittins  optimum  over best  of the gap"
        + "   told  bound" * arguments.bound
    )
    for num_done, (seed, is_agents, name, workload) in enumerate(workloads):
        print(f"workload {num_done + 1} of {len(workloads)}", end="\r", file=sys.stderr, flush=True)
        for capacity, rate in rates(workload, arguments.bound and is_agents):
            best = max(rate["lru"], rate["amq"])
            gains.append(rate["gittins"] - best)
            gap = of_gap(rate["gittins"], best, rate["optimum"])
            is_short = gains[-1] < -MOST_BELOW
            if is_agents and must_close(rate["lru"]):
                gaps.append(gap)
                is_short |= gap < LEAST_OF_GAP
            bound = "".join(
                f" {of_gap(rate[name], best, rate['optimum']):4.0f} %" for name in ("told", "bound") if name in rate
            )
            print(
                f"{seed:6} {name:<26} {capacity:8,} {rate['lru']:6.2f} {rate['amq']:6.2f} {rate['gittins']:8.2f} "
                f"{rate['optimum']:8.2f} {gains[-1]:+10.2f} {gap:9.0f} %{bound}{'  short' if is_short else ''}",
                flush=True,
            )
    num_below = sum(gain < -MOST_BELOW for gain in gains)
    num_closed = sum(gap >= LEAST_OF_GAP for gap in gaps)
    print(
        f"{len(gains)} rows: at worst {min(gains):+.2f} points, {num_below} more than {MOST_BELOW} under, "
        f"on average {sum(gains) / len(gains):+.2f}"
    )
    if gaps:
        print(
            f"{len(gaps)} rows of agents, lru at 15 to 60 %: {num_closed} close {LEAST_OF_GAP:.0f} % of the gap; "
            f"{sum(gaps) / len(gaps):.0f} % on average, {min(gaps):.0f} % at worst"
        )
    return 1 if num_below or num_closed < len(gaps) else 0


if __name__ == "__main__":
    raise SystemExit(main())
