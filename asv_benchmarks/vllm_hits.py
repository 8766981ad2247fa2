"""Hits of policies under vLLM's own scheduler, beside the replay's; it takes minutes.

``python -m asv_benchmarks.vllm_hits TRACE --policy lru,gittins --blocks 1000,3000`` serves the trace as token streams
through vLLM's scheduler, its connector and our adapter, without a model: at its own times, several requests at once,
prompts computed in chunks. The device keeps no prefixes, so the loaded blocks are the replay's hits. A listed
block is 16 tokens here, and a step of 0.1 s computes 16 blocks.

``--windows 1`` or ``mamba,mamba`` adds groups of KV caches with these windows in blocks; `--blocks` then counts blocks
of each group, and ``replay`` is what the first policy serves. The device caches `--device` blocks, 0: none.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from kvcache import CPUOffloadingManager
from kvcache.lab.simulate.run import Replay, ReplayClock
from kvcache.lab.traces.keys import KeyMaker
from kvcache.lab.traces.trace import Trace

NUM_DEVICE_BLOCKS = 20_000
TESTS = Path(__file__).parents[1] / "tests" / "vllm"


def prompts(trace: Path, num_requests: int | None, has_parts: bool = True) -> Iterator[tuple[float, list[int]]]:
    """Yield when each request arrives, and its tokens: whole blocks, and one token that must be computed.

    `has_parts`: a block that a prompt fills in part counts as a whole one.
    """
    from scheduling import BLOCK_TOKENS

    with Trace(trace) as requests:
        for request in islice(requests, num_requests):
            hash_ids = request.hash_ids.tolist()[: None if has_parts else request.input_length // 512]
            tokens = [hash_id + 3 for hash_id in hash_ids for _ in range(BLOCK_TOKENS)]
            yield request.arrival_s, [*tokens, 2]


def served(
    model: Path, arguments: argparse.Namespace, policy: str, num_blocks: int, windows: list[int | str | None]
) -> Any:
    """Serve the trace, and return the engine."""
    from scheduling import ModelFreeEngine

    engine = ModelFreeEngine(
        model,
        arguments.device or NUM_DEVICE_BLOCKS * len(windows),
        num_blocks * len(windows),
        windows=windows,
        has_device_cache=bool(arguments.device),
        max_num_seqs=256,
        cache_policy=policy,
    )
    engine.serve(prompts(arguments.trace, arguments.requests, has_parts=len(windows) == 1), max_tokens=2)
    return engine


def replayed(trace: Path, num_requests: int | None, policy: str, num_blocks: int) -> int:
    """Return the prefix hits of a replay."""
    clock, make_keys = ReplayClock(), KeyMaker(1)
    replay = Replay(CPUOffloadingManager(512, num_blocks, policy, clock=clock), arrivals=clock)
    with Trace(trace) as requests:
        return sum(replay.step(request, make_keys(request.hash_ids)) for request in islice(requests, num_requests))


def main() -> int:
    """Print a line per policy and capacity; 1 if one is more than 3 % below the replay."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--policy", default="lru")
    parser.add_argument("--blocks", default="1000")
    parser.add_argument("--requests", type=int, help="only so many of the first")
    parser.add_argument("--windows", default="")
    parser.add_argument("--device", type=int, default=0)
    arguments = parser.parse_args()
    os.environ.update(
        VLLM_CPU_KVCACHE_SPACE="1",
        HF_HUB_OFFLINE="1",
        VLLM_LOGGING_LEVEL="ERROR",
        VLLM_NO_USAGE_STATS="1",
        VLLM_ALLOW_LONG_MAX_MODEL_LEN="1",
    )
    sys.path.insert(0, str(TESTS))
    from scheduling import BLOCK_TOKENS, MAMBA, write_config

    windows = [None, *(MAMBA if w == MAMBA else int(w) * BLOCK_TOKENS for w in arguments.windows.split(",") if w)]
    num_short, hits = 0, {}
    print("policy    blocks     replay     served   ratio    stored  refused  seconds")
    with tempfile.TemporaryDirectory() as folder:
        model = write_config(Path(folder))
        for policy in arguments.policy.split(","):
            for num_blocks in map(int, arguments.blocks.split(",")):
                start = time.monotonic()
                engine = served(model, arguments, policy, num_blocks, windows)
                stats = engine.stats
                if len(windows) == 1:
                    expected = replayed(arguments.trace, arguments.requests, policy, num_blocks)
                else:
                    expected = hits.setdefault(num_blocks, engine.loaded_positions)
                ratio = engine.loaded_positions / expected
                print(
                    f"{policy:<8} {num_blocks:7,} {expected:10,} {engine.loaded_positions:10,} {ratio:7.3f} "
                    f"{stats.stored_blocks:9,} {stats.rejected_stores:8,} {time.monotonic() - start:8.0f}",
                    flush=True,
                )
                num_short += ratio < 0.97
    return 1 if num_short else 0


if __name__ == "__main__":
    sys.exit(main())
