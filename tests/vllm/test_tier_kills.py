"""Processes that are killed while vLLM's manager stores to a KVCacheTier; later ones find blocks and no wrong byte."""

from __future__ import annotations

import multiprocessing
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
from engine_tiering import PAGE, EngineTiering, key, tier_config

from kvcache.tiers.disk.directory import capacity_for, directory_bytes

NUM_KILLS = round(20 * float(os.environ.get("KVCACHE_STRESS", "1")))
NUM_BLOCKS, NUM_SLOTS = 200, 64


def serve(path: str, seed: int, pipe: Any) -> None:
    """Load every block that the tier holds, and check its bytes; then store and load random ones until killed."""
    engine = open_engine(path)
    pipe.send(sum(engine.load([key(number)]) for number in range(NUM_BLOCKS)))
    dice = random.Random(seed)
    while True:
        blocks = [key(number) for number in dice.sample(range(NUM_BLOCKS), 8)]
        if not engine.load(blocks):
            engine.store(blocks)


def open_engine(path: str) -> EngineTiering:
    return EngineTiering([tier_config("disk", path=path, capacity=capacity_for(NUM_SLOTS, PAGE))], num_chunks=32)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_tier_killed_processes_leave_no_wrong_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # One import of vLLM serves all processes; the server of forks finds modules by this variable only.
    folders = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(folders))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["engine_tiering"])
    dice = random.Random(time.time())
    path = str(tmp_path / "kv")
    found = []
    for seed in range(NUM_KILLS):
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(path, seed, theirs), daemon=True)
        process.start()
        theirs.close()
        try:
            assert ours.poll(300), "the process did not begin"
            # EOFError: it failed, because it read a wrong byte or could not open the directory.
            found.append(ours.recv())
            time.sleep(dice.uniform(0, 0.3))
            assert process.is_alive()
        finally:
            process.kill()
            process.join()
            for region in Path("/dev/shm").glob("vllm_offload_kvcache-test-*"):
                region.unlink(missing_ok=True)
    assert found[0] == 0
    assert max(found) > NUM_SLOTS // 2
    assert directory_bytes(Path(path)) <= capacity_for(NUM_SLOTS, PAGE)
