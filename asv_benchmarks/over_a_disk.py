"""Hits of host memory over a simulated disk, per policy of host memory; the disk's index is `lru`, its default.

``python -m asv_benchmarks.over_a_disk TRACE`` prints a row per memory, disk and policy: hits in percent of all blocks,
hits from host memory, and blocks written to the disk.
"""

from __future__ import annotations

import sys
from pathlib import Path

from kvcache.lab.simulate.run import Replay, ReplayClock
from kvcache.lab.simulate.simulated_tier import SimulatedTieredManager
from kvcache.lab.traces.keys import KeyMaker
from kvcache.lab.traces.trace import Trace

POLICIES = ("lru", "gittins")
# Blocks of host memory and of the disk.
AGENTS = [(memory, disk) for disk in (8192, 16384) for memory in (1024, 2048, 3072)]
CHATS = [(memory, disk) for disk in (16384, 32768) for memory in (1024, 3072, 10240)]


def measure(path: Path, policy: str, memory: int, disk: int) -> tuple[float, float, int]:
    """Return the shares of blocks that hit and that host memory served, and the blocks written to the disk."""
    clock = ReplayClock()
    manager = SimulatedTieredManager(512, memory, [disk], policy, clock=clock)
    replay, make_keys, num_blocks = Replay(manager, arrivals=clock), KeyMaker(1), 0
    with Trace(path) as trace:
        for request in trace:
            replay.step(request, make_keys(request.hash_ids))
            num_blocks += len(request.hash_ids)
    (tier,) = manager.simulated
    hits = replay.tally.hit_blocks
    return hits / num_blocks, (hits - tier.loaded_blocks) / num_blocks, tier.stored_blocks


def main() -> int:
    """Print the table of one trace."""
    path = Path(sys.argv[1])
    print("memory    disk  policy     hits  from memory  blocks written")
    for memory, disk in AGENTS if "agentic" in path.name else CHATS:
        for policy in POLICIES:
            hits, from_memory, written = measure(path, policy, memory, disk)
            print(f"{memory:6} {disk:7}  {policy:8} {hits:6.1%}       {from_memory:6.1%}  {written:14,}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
