"""Engines that are killed while they serve: the next one on the same disk tier answers right, and finds blocks.

Two kills by default, at random moments of the traffic; `KVCACHE_STRESS` multiplies them.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

NUM_KILLS = max(2, round(2 * float(os.environ.get("KVCACHE_STRESS", "1"))))
BLOCK_BYTES = 2 * 4 * 4 * 32 * 4 * 32
OPTIONS = {
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "block_size": 32,
    "num_gpu_blocks_override": 128,
    "dtype": "float32",
    "max_model_len": 2048,
    "seed": 0,
}


def serve(settings: dict[str, Any], num_answers: int, wait_s: float) -> list[dict[str, Any]]:
    """Run an engine until it has given so many answers and a moment longer; kill it, and return all its answers."""
    script = Path(__file__).with_name("serve_until_killed.py")
    answers: list[dict[str, Any]] = []
    with subprocess.Popen(
        [sys.executable, str(script), json.dumps(settings)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as engine:
        assert engine.stdout is not None
        assert engine.stderr is not None
        said: list[str] = []
        listener = threading.Thread(target=lambda: said.extend(engine.stderr or ()), daemon=True)
        listener.start()
        killer = threading.Timer(wait_s, engine.kill)
        try:
            for line in engine.stdout:
                if line.startswith("ANSWER"):
                    answers.append(json.loads(line.removeprefix("ANSWER")))
                    if len(answers) == num_answers:
                        killer.start()
        finally:
            engine.kill()
    assert len(answers) >= num_answers, "".join(said)[-4000:]
    return answers


@pytest.mark.timeout(600 * NUM_KILLS)
def test_engines_killed_in_mid_traffic_leave_no_wrong_block(
    models: Any, crowd: Any, prompts: Any, expected: Any, tmp_path: Path
) -> None:
    asked = [*crowd, *prompts]
    right = expected(asked)
    tier = {"type": "disk", "path": str(tmp_path / "kv"), "capacity": "16MiB", "deadline_s": 60}
    extra_config = {
        "spec_name": "KVCacheOffloadingSpec",
        "spec_module_path": "kvcache.integrations.vllm",
        "cpu_bytes_to_use": 40 * BLOCK_BYTES,
        "cache_policy": "lru",
        "lookup_deadline_s": 60,
        "tiers": [tier],
    }
    settings = {"model": str(models["llama"]), "prompts": asked, "options": OPTIONS, "extra_config": extra_config}
    dice = random.Random(os.environ.get("PYTHONHASHSEED", time.time()))
    first_cached = []
    for seed in range(NUM_KILLS + 1):
        answers = serve({**settings, "seed": seed}, dice.randrange(12, 30), dice.uniform(0, 0.5))
        for answer in answers:
            assert answer["tokens"] == right[answer["prompt"]], (seed, answer)
        # The crowd shares nothing: what an engine's first answer did not compute was written by engines before it.
        first = {answer["prompt"]: answer["cached"] for answer in reversed(answers)}
        first_cached.append(sum(first.get(i, 0) for i in range(len(crowd))))
    assert sum(first_cached[1:]) > 0, first_cached
