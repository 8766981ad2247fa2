"""gittins for models with several groups of KV caches above a tier, as vLLM's own scheduler calls it.

The tier and the worker copy by block id: every block that a request reads is checked (scheduling.py).
"""

import random

import pytest
from scheduling import BLOCK_TOKENS, MAMBA, SLIDING, STATES, storm, tokens

from kvcache.tiers.memory import MemoryTier

TWO_FULL = (None, 4 * BLOCK_TOKENS, None)
MODELS = pytest.mark.parametrize("windows", [SLIDING, STATES, TWO_FULL], ids=["sliding", "states", "two full"])
ENGINE = None


class ContentTier(MemoryTier):
    """A tier whose blocks are those of the engine's dictionary of host blocks."""

    def submit_store(self, job_id, keys, block_ids):
        self.contents = getattr(self, "contents", {})
        self.contents.update((key, ENGINE._host[block_id, 0]) for key, block_id in zip(keys, block_ids, strict=True))
        return super().submit_store(job_id, keys, block_ids)

    def submit_load(self, job_id, keys, block_ids):
        for key, block_id in zip(keys, block_ids, strict=True):
            ENGINE._host[block_id, 0] = self.contents[key]
        return super().submit_load(job_id, keys, block_ids)


@pytest.fixture
def make(make_engine):
    def build(windows, num_host_blocks=40, num_tiers=1, **options):
        global ENGINE
        tier = {"type": f"{__name__}:ContentTier", "capacity": "4MiB", "deadline_s": 100000}
        options = {"step_tokens": 4 * BLOCK_TOKENS, "max_model_len": 4096, "lookup_deadline_s": 100000, **options}
        # Blocks that processes share are whole pages.
        options["cpu_bytes_to_use"] = num_host_blocks * 4096
        ENGINE = make_engine(400, num_host_blocks, windows=windows, tiers=[tier] * num_tiers, **options)
        ENGINE.policy = ENGINE.manager._manager.policy
        return ENGINE

    return build


def serve(engine, prompt):
    """Serve a prompt with an empty device cache. Return how many of its positions were loaded."""
    num_loaded = engine.serve_alone(prompt)
    engine.manager._tiered.settle()
    engine.policy.check()
    return num_loaded


@MODELS
@pytest.mark.parametrize("num_tiers", [1, 2])
def test_loads_from_tier_are_resumed(make, windows, num_tiers):
    engine = make(windows, num_tiers=num_tiers)
    assert type(engine.policy).__name__ == "UnitGittinsPolicy"
    first = tokens(1, 10)
    assert serve(engine, first) == 0
    for seed in range(2, 8):
        serve(engine, tokens(seed, 10))
    assert serve(engine, first) == 10
    assert sum(stats.promoted_blocks for stats in engine.manager._tiered.tier_stats()) > 0
    assert engine.policy.lru_requests == 0


@MODELS
def test_share_keeps_its_size(make, windows):
    engine = make(windows)
    for seed in [*range(6), *range(6)]:
        serve(engine, tokens(seed % 6, 10))
    stats = engine.manager._tiered.tier_stats()[0]
    assert stats.written_blocks > 40
    # The share has two slots; what passes beyond them leaves with the next store.
    assert len(engine.policy.passing) <= 2 + 12


def test_small_memory_moves_only_loadable_blocks(make):
    engine = make(SLIDING, 12)
    # Ten blocks and a window of four are more than 12.
    for seed in [*range(5), *range(5)]:
        assert serve(engine, tokens(seed, 10)) == 0
    tier = engine.manager._tiered.tier_stats()[0]
    assert (engine.stats.stored_blocks, tier.written_blocks, tier.promoted_blocks) == (0, 0, 0)
    assert (engine.stats.needed_blocks, engine.stats.rejected_stores) == (10 * 14, 0)
    assert [serve(engine, tokens(seed, 6)) for seed in [*range(5), *range(5)]] == [0] * 5 + [6] * 5
    # A longer prompt resumes behind the head that fits.
    assert serve(engine, tokens(0, 6) + tokens(9, 6)) == 6


def test_small_memory_of_lru_stores_head(make):
    engine = make(SLIDING, 12, cache_policy="lru", step_tokens=256, retention_interval=None)
    # vLLM offers windows at all blocks, so a prompt is resumed behind any of them.
    assert [serve(engine, tokens(seed, 16)) for seed in [*range(5), *range(5)]] == [0] * 5 + [6] * 5
    assert (engine.stats.stored_blocks, engine.stats.loaded_blocks) == (120, 50)
    # Each batch was refused once, and its 32 blocks count as needed, or the ten that are loaded and 20 others.
    assert (engine.stats.rejected_stores, engine.stats.needed_blocks) == (10, 5 * 32 + 5 * 30)


def test_small_memory_lru_cuts_no_window(make):
    engine = make(SLIDING, 12, cache_policy="lru", step_tokens=256)
    # The blocks of a window at the end of ten do not fit; a prompt of eight has room for them.
    for seed in [*range(5), *range(5)]:
        assert serve(engine, tokens(seed, 10)) == 0
    tier = engine.manager._tiered.tier_stats()[0]
    assert (engine.stats.stored_blocks, tier.written_blocks, tier.promoted_blocks) == (0, 0, 0)
    assert [serve(engine, tokens(seed, 8)) for seed in [*range(5), *range(5)]] == [0] * 5 + [8] * 5


@pytest.mark.parametrize("windows", [SLIDING, STATES, TWO_FULL, (3 * BLOCK_TOKENS, None, MAMBA)])
def test_storm_over_tier_keeps_invariants(make, windows):
    engine = make(windows, 50, transfer_steps=3)
    for _ in storm([engine], 120, 12, 79, random.Random(7)):
        engine.policy.check()
    # Until the next step reports its end, a request that waited for a tier holds its blocks.
    engine.step()
    engine.drain()
    assert engine.manager._tiered.settle()
    assert (engine.stats.num_pending, engine.stats.num_referenced, len(engine.scheduler.requests)) == (0, 0, 0)
    assert min(engine.loaded_positions, engine.manager._tiered.tier_stats()[0].promoted_blocks) > 0
