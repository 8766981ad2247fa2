"""Engines killed while they serve: the next one on the same disk finds blocks and no wrong byte.

The kills come at random moments of the traffic; `KVCACHE_STRESS` multiplies them.
"""

import os
import random
import time

import pytest
from engine_options import BLOCK_BYTES
from serve_until_killed import serve

STRESS = float(os.environ.get("KVCACHE_STRESS", "1"))
NUM_KILLS = max(2, round(2 * STRESS))


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
