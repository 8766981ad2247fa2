"""Run a tiny engine with an offloaded KV cache, and check every byte that its requests read.

python examples/tiny_engine --requests 1000
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # `python -m tiny_engine` leaves it out

from model import BLOCK_TOKENS, GROUPS, make_config
from scheduler import Request, Scheduler
from worker import run_worker

SYSTEM_PROMPT_BLOCKS = 4
MAX_BLOCKS = 40


def chats(num_requests: int, seed: int) -> Iterator[Request]:
    """Yield the turns of chats: each prompt repeats its chat's history and adds some tokens."""
    rng = random.Random(seed)
    systems = [[rng.randrange(50_000) for _ in range(SYSTEM_PROMPT_BLOCKS * BLOCK_TOKENS)] for _ in range(3)]
    histories: list[list[int]] = [list(rng.choice(systems)) for _ in range(8)]
    for req_id in range(num_requests):
        turn = rng.randrange(len(histories))
        histories[turn] += [rng.randrange(50_000) for _ in range(rng.randrange(1, 6) * BLOCK_TOKENS + 5)]
        num_output = rng.randrange(1, 5)
        if len(histories[turn]) // BLOCK_TOKENS + num_output > MAX_BLOCKS:
            histories[turn] = list(rng.choice(systems))
        # Generated blocks begin where the prompt's full blocks end.
        whole = len(histories[turn]) // BLOCK_TOKENS * BLOCK_TOKENS
        yield Request(req_id, histories[turn][:whole], num_output)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--device-blocks", type=int, default=160)
    parser.add_argument("--cpu-blocks", type=int, default=240)
    parser.add_argument("--factor", type=int, default=2, help="device blocks in an offloaded block")
    parser.add_argument("--policy", default="lru")
    parser.add_argument("--failure-rate", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--corrupt-store", type=int, metavar="N", help="change a byte of the pool after N stores")
    options = parser.parse_args()
    if options.device_blocks < MAX_BLOCKS * len(GROUPS):
        parser.error(f"--device-blocks must be >= {MAX_BLOCKS * len(GROUPS)}: the largest request needs as many")
    config = make_config(options.device_blocks, options.cpu_blocks, options.factor, options.policy)
    spawn = multiprocessing.get_context("spawn")
    pipe, far_end = spawn.Pipe()
    arguments = (far_end, config, options.failure_rate, options.seed, options.corrupt_store)
    process = spawn.Process(target=run_worker, args=arguments, daemon=True)
    process.start()
    far_end.close()
    scheduler = Scheduler(pipe, config)
    started = time.perf_counter()
    for request in chats(options.requests, options.seed):
        scheduler.add(request)
    while scheduler.has_work and not scheduler.faults:
        scheduler.step()
    pipe.send(None)
    process.join()
    counts = dict(sorted(scheduler.counts.items())) | {"seconds": round(time.perf_counter() - started, 3)}
    stats = scheduler.manager.stats()
    left = {"num_referenced": stats.num_referenced, "num_pending": stats.num_pending}
    print(json.dumps({"counts": counts, "left": left, "faults": scheduler.faults}, indent=2))
    return 1 if scheduler.faults else 0


if __name__ == "__main__":
    sys.exit(main())
