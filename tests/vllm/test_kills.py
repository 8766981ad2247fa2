"""Engines killed while they serve: the next one on the same disk finds blocks and no wrong byte.

The kills come at random moments of the traffic; `KVCACHE_STRESS` multiplies them.
"""

import os
import random
import signal
import threading
import time
from contextlib import suppress

import pytest
from engine_options import BLOCK_BYTES
from engine_process import running

STRESS = float(os.environ.get("KVCACHE_STRESS", "1"))
NUM_KILLS = max(2, round(2 * STRESS))


def serve_until_killed(model, extra_config, asked, dice):
    """Serve random batches of prompts, kill the engine; return number, tokens and cached tokens of each prompt."""
    answers, num_wanted, killer = [], dice.randrange(12, 30), None
    # The killed engine's pipe is broken.
    with suppress(OSError, EOFError), running(model, extra_config) as engine:
        while True:
            chosen = dice.sample(range(len(asked)), dice.randrange(1, 4))
            answers += zip(chosen, *engine.call("ask", [asked[i] for i in chosen]), strict=True)
            # The next prompts must load from host memory or the disk.
            engine.call("drop_device_cache")
            if killer is None and len(answers) >= num_wanted:
                killer = threading.Timer(dice.uniform(0, 0.5), os.kill, (engine.pid, signal.SIGKILL))
                killer.start()
    assert killer is not None, answers
    killer.join()
    return answers


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
    dice = random.Random(os.environ.get("PYTHONHASHSEED", time.time()))
    first_cached = []
    for number in range(NUM_KILLS + 1):
        answers = serve_until_killed(models["llama"], extra_config, asked, dice)
        assert [tokens for _, tokens, _ in answers] == [right[i] for i, _, _ in answers], number
        # The prompts share no blocks, so an earlier engine wrote every block loaded for a first answer.
        first = {i: cached for i, _, cached in reversed(answers)}
        first_cached.append(sum(first.get(i, 0) for i in range(len(crowd))))
    assert sum(first_cached[1:]) > 0, first_cached
