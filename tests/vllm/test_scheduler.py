"""Our spec under vLLM's own scheduler and connector, every block's content checked, without a model.

The tests cover the order of stores and loads, waiting for blocks that are being stored, preemption, aborts, resets,
several KV-cache groups and the arbiter. The worker copies between dictionaries (scheduling.py).
"""

import os
import random
from dataclasses import replace

import pytest
from scheduling import BLOCK_TOKENS, CLOCK, SLIDING, tokens
from vllm.v1.request import RequestStatus

from kvcache.registry import POLICIES
from kvcache.tiers.memory import MemoryTier

FULL = (None,)
NUM_RANDOM_STEPS = int(1000 * float(os.environ.get("KVCACHE_STRESS", "1")))


def storm(seed, num_requests=60, longest=12):
    """Requests that leave one of three common stems at any token, a few in every simulated second."""
    dice = random.Random(seed)
    stems = [tokens(stem, longest) for stem in range(3)]
    for number in range(num_requests):
        stem = dice.choice(stems)
        yield number * 0.15, stem[: dice.randrange(1, len(stem))] + tokens(1000 + number, dice.randrange(1, 4)) + [2]


def is_idle(engine):
    stats = engine.stats
    return not (stats.num_pending or stats.num_referenced or stats.failed_blocks or engine.scheduler.requests)


@pytest.mark.parametrize("policy", POLICIES.names())
@pytest.mark.parametrize("windows", [FULL, SLIDING], ids=["full", "hybrid"])
def test_blocks_under_pressure_are_as_stored(make_engine, policy, windows):
    # The device holds two or three requests, the host a fifth of all blocks.
    engine = make_engine(
        64, 40, step_tokens=96, transfer_steps=2, windows=windows, cache_policy=policy, max_model_len=1024
    )
    engine.serve(storm(1), max_tokens=20)
    stats = engine.stats
    assert is_idle(engine)
    assert engine.loaded_blocks == stats.loaded_blocks > 0
    assert stats.evicted_blocks > 0
    assert stats.stored_blocks - stats.evicted_blocks == stats.num_blocks - stats.num_free


def test_preempted_requests_return_from_host(make_engine):
    engine = make_engine(24, 200, step_tokens=64, max_num_seqs=8, max_model_len=1024)
    for number in range(4):
        engine.add(str(number), [*tokens(number, 4), 2], max_tokens=60)
    engine.drain()
    assert engine.num_preemptions > 0
    assert engine.loaded_blocks > 0
    assert is_idle(engine)


def test_second_request_waits_for_stores(make_engine):
    engine = make_engine(200, 100, step_tokens=1024, transfer_steps=5, has_device_cache=False)
    engine.add("first", [*tokens(0, 8), 2])
    engine.step()
    engine.step()  # its store is under way
    assert engine.stats.num_pending == 8
    engine.add("second", [*tokens(0, 8), 2])
    engine.drain()
    assert (engine.stats.stored_blocks, engine.stats.loaded_blocks) == (8, 8)


def test_chunked_requests_lose_tails_first(make_engine):
    # Two long prompts are computed a few blocks a step, in turn, and fill the host together.
    engine = make_engine(400, 48, step_tokens=4 * BLOCK_TOKENS, has_device_cache=False, cache_policy="lru")
    first, second = tokens(1, 32), tokens(2, 32)
    engine.serve(iter([(0.0, [*first, 2]), (0.0, [*second, 2])]))
    stats = engine.stats
    assert stats.evicted_blocks == 16
    for number, prompt in enumerate((first, second)):
        before = engine.stats.loaded_blocks
        engine.add(f"again{number}", [*prompt, 2])
        engine.drain()
        # Without its head, the rest of a prompt is not loaded.
        assert engine.stats.loaded_blocks > before, f"request {number}"


def test_loaded_tokens_are_no_prefill(make_engine):
    tier = {"type": "memory", "capacity": "64MiB", "arbiter": True}
    engine = make_engine(400, 200, has_device_cache=False, cpu_bytes_to_use=200 * 4096, tiers=[tier])
    prompt, reports = tokens(1, 64), []
    engine.manager._tiered.report_prefills = lambda parts, seconds: reports.append((*parts, round(seconds, 3)))
    for number, token_ids in enumerate([prompt, prompt + tokens(2, 48)]):
        engine.add(str(number), [*token_ids, 2])
        engine.drain()
        CLOCK.now_s += 100  # no request runs
    assert reports == [((first, 256), 0.1) for first in range(0, 7 * 256, 256)]
    assert engine.loaded_blocks == 64
    assert engine.manager._watch._end_of == {}


class PacedTier(MemoryTier):
    """Host memory whose loads take 0.1 s of the simulated clock a block; a step computes 16 blocks in that time."""

    block_s = 0.1

    def submit_load(self, job_id, keys, block_ids):
        self.due = getattr(self, "due", {})
        self.due[job_id] = (CLOCK.now_s, CLOCK.now_s + self.block_s * len(keys))
        return super().submit_load(job_id, keys, block_ids)

    def get_finished(self):
        due, held = getattr(self, "due", {}), [*getattr(self, "held", []), *super().get_finished()]
        self.held = [result for result in held if due.get(result.job_id, (0.0, 0.0))[1] > CLOCK.now_s]
        ended = [result for result in held if result not in self.held]
        times = [due.get(result.job_id, (None, None)) for result in ended]
        return [replace(result, start_s=first, end_s=last) for result, (first, last) in zip(ended, times, strict=True)]


def test_learned_rate_avoids_slow_tier(make_engine):
    tier = {"type": f"{__name__}:PacedTier", "capacity": "64MiB", "arbiter": True, "deadline_s": 1000}
    options = {"cpu_bytes_to_use": 200 * 4096, "cache_policy": "lru", "tiers": [tier], "lookup_deadline_s": 1000}
    engine = make_engine(400, 200, has_device_cache=False, max_num_seqs=1, **options)
    manager = engine.manager._tiered
    prompts = [[1 + (number * 7 + i) % 500 for i in range(1025)] for number in range(8)]
    for number, prompt in enumerate(prompts):
        engine.add(f"first {number}", prompt, max_tokens=4)
        engine.drain()
        manager.settle()
    # 256 tokens a step of 0.1 s.
    assert manager.arbiter.compute_s(0, 2560) == pytest.approx(1.0, rel=0.05)
    for number, prompt in enumerate(prompts[:4]):
        engine.add(f"again {number}", prompt, max_tokens=4)
        engine.drain()
    stats = manager.stats()
    # The first was loaded to learn, and given up when computing would have been done.
    assert (stats.arbiter_loads, stats.arbiter_cuts, stats.arbiter_give_ups) == (1, 3, 1)
    assert "computes: loading" in manager.arbiter.decisions[-1]


HOST = {"reset_connector": True}
RESETS = [{}, HOST, HOST, HOST | {"reset_running_requests": True}]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("windows", "options"),
    [(FULL, {}), (FULL, {"blocks_per_chunk": 2}), (FULL, {"offload_prompt_only": False}), (SLIDING, {})],
)
def test_loads_are_of_present_weights(make_engine, windows, options):
    """Weights are updated under running requests; vLLM answers False, and its device keeps what it has."""
    dice = random.Random(59)
    engine = make_engine(60, 60, step_tokens=40, windows=windows, max_num_seqs=4, max_model_len=512, **options)
    stems = [tokens(stem, 8) for stem in range(3)]
    scheduler, answers = engine.scheduler, []
    for number in range(NUM_RANDOM_STEPS):
        if dice.random() < 0.3:
            prompt = dice.choice(stems)[: dice.randrange(1, 128)] + tokens(1000 + number, 1)[: dice.randrange(1, 16)]
            engine.add(str(number), prompt, max_tokens=dice.randrange(1, 30))
        engine.step()
        if dice.random() < 0.03 and scheduler.requests:
            scheduler.finish_requests(dice.choice(sorted(scheduler.requests)), RequestStatus.FINISHED_ABORTED)
        if dice.random() < 0.1:
            engine.drain()
            if dice.random() < 0.5:
                assert scheduler.reset_prefix_cache()
        if dice.random() < 0.02:
            reset = dice.choice(RESETS)
            try:
                answers.append(scheduler.reset_prefix_cache(**reset))
            except RuntimeError:
                continue  # a load is under way: the connector is as it was
            engine.weights += "reset_connector" in reset
    assert min(answers.count(True), answers.count(False), engine.loaded_blocks) > NUM_RANDOM_STEPS // 250
