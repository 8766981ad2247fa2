"""Our spec under vLLM's own scheduler and connector, every block's content checked, without a model.

What the connector does with a manager and a worker: order of stores and loads, waiting for blocks that are on their
way, preemption, aborts, resets, several KV-cache groups. The worker is one of dictionaries (scheduling.py).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scheduling import BLOCK_TOKENS, ModelFreeEngine, write_config
from vllm.v1.request import RequestStatus

from kvcache.registry import POLICIES

FULL = (None,)
HYBRID = (None, 4 * BLOCK_TOKENS)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("config"))


@pytest.fixture
def make(model: Path) -> Iterator[Any]:
    """A function that makes an engine; it is shut down at the end."""
    made = []

    def build(*args: Any, **options: Any) -> ModelFreeEngine:
        made.append(ModelFreeEngine(model, *args, **options))
        return made[-1]

    yield build
    for engine in made:
        engine.scheduler.shutdown()


def tokens(seed: int, num_blocks: int) -> list[int]:
    return random.Random(seed).choices(range(3, 500), k=num_blocks * BLOCK_TOKENS)


def storm(seed: int, num_requests: int = 60, longest: int = 12) -> Iterator[tuple[float, list[int]]]:
    """Requests that leave one of three common stems at any token, a few in every simulated second."""
    dice = random.Random(seed)
    stems = [tokens(stem, longest) for stem in range(3)]
    for number in range(num_requests):
        stem = dice.choice(stems)
        yield number * 0.15, stem[: dice.randrange(1, len(stem))] + tokens(1000 + number, dice.randrange(1, 4)) + [2]


def is_idle(engine: ModelFreeEngine) -> bool:
    stats = engine.stats
    return (stats.num_pending, stats.num_referenced, stats.failed_blocks, len(engine.scheduler.requests)) == (
        0,
        0,
        0,
        0,
    )


@pytest.mark.parametrize("policy", POLICIES.names())
@pytest.mark.parametrize("windows", [FULL, HYBRID], ids=["full", "hybrid"])
def test_every_block_is_what_was_stored_under_pressure(make: Any, policy: str, windows: Any) -> None:
    # The device holds two or three requests, the host a fifth of all blocks.
    engine = make(64, 40, step_tokens=96, transfer_steps=2, windows=windows, cache_policy=policy, max_model_len=1024)
    engine.serve(storm(1), max_tokens=20)
    stats = engine.stats
    assert is_idle(engine)
    assert engine.loaded_blocks == stats.loaded_blocks > 0
    assert stats.evicted_blocks > 0
    assert stats.stored_blocks - stats.evicted_blocks == stats.num_blocks - stats.num_free


def test_preempted_requests_come_back_from_the_host(make: Any) -> None:
    engine = make(24, 200, step_tokens=64, max_num_seqs=8, max_model_len=1024)
    for number in range(4):
        engine.add(str(number), [*tokens(number, 4), 2], max_tokens=60)
    engine.drain()
    assert engine.num_preemptions > 0
    assert engine.loaded_blocks > 0
    assert is_idle(engine)


def test_second_request_waits_for_blocks_that_are_being_stored(make: Any) -> None:
    engine = make(200, 100, step_tokens=1024, transfer_steps=5, has_device_cache=False)
    engine.add("first", [*tokens(0, 8), 2])
    engine.step()
    engine.step()  # its store is under way
    assert engine.stats.num_pending == 8
    engine.add("second", [*tokens(0, 8), 2])
    engine.drain()
    assert (engine.stats.stored_blocks, engine.stats.loaded_blocks) == (8, 8)


def test_aborted_requests_leave_no_references_behind(make: Any) -> None:
    engine = make(64, 60, step_tokens=64, transfer_steps=3, max_model_len=1024)
    dice = random.Random(5)
    for number, (_, token_ids) in enumerate(storm(2, 80)):
        engine.add(str(number), token_ids, max_tokens=8)
        engine.step()
        if dice.random() < 0.4 and engine.scheduler.requests:
            victim = dice.choice(sorted(engine.scheduler.requests))
            engine.scheduler.finish_requests(victim, RequestStatus.FINISHED_ABORTED)
    engine.drain()
    assert is_idle(engine)
    assert engine.loaded_blocks > 0


def test_nothing_old_is_loaded_after_a_reset_in_the_middle(make: Any) -> None:
    engine = make(200, 100, step_tokens=64, transfer_steps=3, max_model_len=1024)
    for number, (_, token_ids) in enumerate(storm(3, 60)):
        engine.add(str(number), token_ids, max_tokens=4)
        engine.step()
        if number % 20 == 19:
            engine.drain()
            assert engine.scheduler.reset_prefix_cache(reset_connector=True)
            engine.forget_host()
            assert engine.stats.num_free == engine.stats.num_blocks
    engine.drain()
    assert is_idle(engine)


def test_running_requests_stored_in_chunks_lose_their_tails_first(make: Any) -> None:
    # Two long prompts are computed a few blocks a step, in turn, and fill the host together.
    engine = make(400, 48, step_tokens=4 * BLOCK_TOKENS, has_device_cache=False, cache_policy="lru")
    first, second = tokens(1, 32), tokens(2, 32)
    engine.serve(iter([(0.0, [*first, 2]), (0.0, [*second, 2])]))
    stats = engine.stats
    assert stats.evicted_blocks == 16
    before = stats.loaded_blocks
    for number, prompt in enumerate((first, second)):
        engine.add(f"again{number}", [*prompt, 2])
        engine.drain()
        loaded = engine.stats.loaded_blocks - before
        # A head that had been evicted would leave nothing to load, whatever is left behind it.
        assert loaded > 0, f"request {number}"
        before = engine.stats.loaded_blocks
