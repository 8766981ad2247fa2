"""The arbiter under vLLM's scheduler: the rate of prefill is learned from its steps, and slow tiers are left alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scheduling import CLOCK, ModelFreeEngine, write_config

from kvcache.tiers.memory import MemoryTier


class PacedTier(MemoryTier):
    """Host memory whose loads take 0.1 s of the simulated clock a block; a step computes 16 blocks in that time."""

    block_s = 0.1

    def submit_load(self, job_id: int, keys: list[bytes], block_ids: list[int]) -> bool:
        self.due = getattr(self, "due", {})
        self.due[job_id] = (CLOCK.now_s, CLOCK.now_s + self.block_s * len(keys))
        return super().submit_load(job_id, keys, block_ids)

    def get_finished(self) -> list[Any]:
        due, held = getattr(self, "due", {}), [*getattr(self, "held", []), *super().get_finished()]
        self.held = [result for result in held if due.get(result.job_id, (0.0, 0.0))[1] > CLOCK.now_s]
        ended = [result for result in held if result not in self.held]
        times = [due.get(result.job_id, (None, None)) for result in ended]
        return [replace(result, start_s=first, end_s=last) for result, (first, last) in zip(ended, times, strict=True)]


def test_rate_of_prefill_is_learned_and_a_slow_tier_left_alone(tmp_path: Path) -> None:
    tier = {"type": f"{__name__}:PacedTier", "capacity": "64MiB", "arbiter": True, "deadline_s": 1000}
    engine = ModelFreeEngine(
        write_config(tmp_path),
        num_device_blocks=400,
        num_host_blocks=200,
        step_tokens=256,
        step_s=0.1,
        has_device_cache=False,
        max_num_seqs=1,
        cpu_bytes_to_use=200 * 4096,
        cache_policy="lru",
        tiers=[tier],
        lookup_deadline_s=1000,
    )
    manager = engine.manager._tiered
    prompts = [[1 + (number * 7 + i) % 500 for i in range(1025)] for number in range(8)]
    for number, prompt in enumerate(prompts):
        engine.add(f"first {number}", prompt, max_tokens=4)
        engine.drain()
        manager.settle()
    # 256 tokens a step of 0.1 s.
    assert manager.arbiter.prefill.compute_s(0, 2560) == pytest.approx(1.0, rel=0.05)
    for number, prompt in enumerate(prompts[:4]):
        engine.add(f"again {number}", prompt, max_tokens=4)
        engine.drain()
    stats = manager.stats()
    # The first was loaded to learn, and given up when computing would have been done.
    assert (stats.arbiter_loads, stats.arbiter_cuts, stats.arbiter_give_ups) == (1, 3, 1)
    assert "computes: loading" in str(manager.arbiter.decisions[-1])
    engine.scheduler.shutdown()
