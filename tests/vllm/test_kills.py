"""Engines and managers killed while they serve: the next one on the same disk finds blocks and no wrong byte.

The kills come at random moments of the traffic; `KVCACHE_STRESS` multiplies them.
"""

import multiprocessing
import os
import random
import time
from pathlib import Path

import pytest
from engine_options import BLOCK_BYTES
from engine_tiering import PAGE
from serve_until_killed import NUM_SLOTS, serve, store_until_killed

from kvcache.tiers.disk.directory import directory_bytes
from kvcache.tiers.disk.header import capacity_for
from kvcache.transfer.shared_file import leftover_files

STRESS = float(os.environ.get("KVCACHE_STRESS", "1"))
NUM_KILLS, NUM_TIER_KILLS = max(2, round(2 * STRESS)), round(20 * STRESS)


@pytest.mark.slow
@pytest.mark.timeout(600 * NUM_KILLS)
def test_killed_engines_leave_no_wrong_block(models, crowd, prompts, expected, tmp_path):
    asked = [*crowd, *prompts]
    right = expected(asked)
    tier = {"type": "disk", "path": str(tmp_path / "kv"), "capacity": "16MiB", "deadline_s": 60}
    extra_config = {
        "cpu_bytes_to_use": 40 * BLOCK_BYTES,
        "cache_policy": "lru",
        "lookup_deadline_s": 60,
        "tiers": [tier],
    }
    settings = {"model": str(models["llama"]), "prompts": asked, "extra_config": extra_config}
    dice = random.Random(os.environ.get("PYTHONHASHSEED", time.time()))
    first_cached = []
    for seed in range(NUM_KILLS + 1):
        answers = serve({**settings, "seed": seed}, dice.randrange(12, 30), dice.uniform(0, 0.5))
        for answer in answers:
            assert answer["tokens"] == right[answer["prompt"]], (seed, answer)
        # The prompts share no blocks, so an earlier engine wrote every block loaded for a first answer.
        first = {answer["prompt"]: answer["cached"] for answer in reversed(answers)}
        first_cached.append(sum(first.get(i, 0) for i in range(len(crowd))))
    assert sum(first_cached[1:]) > 0, first_cached


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_killed_processes_leave_no_wrong_block(tmp_path, monkeypatch):
    # One import of vLLM serves all processes; the server of forks finds modules by this variable only.
    folders = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(folders))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["engine_tiering"])
    dice = random.Random(time.time())
    path = str(tmp_path / "kv")
    found, regions = [], []
    for seed in range(NUM_TIER_KILLS):
        ours, theirs = context.Pipe()
        process = context.Process(target=store_until_killed, args=(path, seed, theirs), daemon=True)
        process.start()
        theirs.close()
        try:
            assert ours.poll(300), "the process did not begin"
            found.append(ours.recv())
            assert type(found[-1]) is int, found[-1]
            regions.append(Path(f"/dev/shm/vllm_offload_{ours.recv()}.mmap"))
            failed = ours.poll(dice.uniform(0, 0.3))
            assert not failed, ours.recv()
        finally:
            process.kill()
            process.join()
    # Each start removes the host blocks of the killed process before it.
    assert [region.exists() for region in regions] == [False] * (NUM_TIER_KILLS - 1) + [True]
    assert regions[-1] in [region for region, _ in leftover_files(remove=True)]
    assert found[0] == 0
    assert max(found) > NUM_SLOTS // 2
    assert directory_bytes(Path(path)) <= capacity_for(NUM_SLOTS, PAGE)
