"""gittins for models with several groups of KV caches, as vLLM's own scheduler calls it: sliding windows and Mamba.

The worker copies between dictionaries (scheduling.py): every block that a request reads is checked.
"""

import random
from types import SimpleNamespace

import pytest
from scheduling import BLOCK_TOKENS, GENERATED_TOKEN, MAMBA, SLIDING, STATES, storm, tokens
from vllm.v1.request import RequestStatus

from kvcache.integrations.vllm import spec
from kvcache.integrations.vllm.group_windows import described_groups, find_windows

MODELS = pytest.mark.parametrize("windows", [SLIDING, STATES], ids=["sliding", "states"])


@pytest.fixture
def make(make_engine):
    """A function that makes an engine, whose `calls` are its stores: (group, block) of each key, offered and stored."""

    def build(windows, num_host_blocks=100, **options):
        options = {"step_tokens": 4 * BLOCK_TOKENS, "max_model_len": 4096, **options}
        engine = make_engine(400, num_host_blocks, windows=windows, **options)
        engine.policy, engine.calls, engine.names = engine.manager._manager.policy, [], {}
        prepare = engine.manager.prepare_store

        def prepare_store(keys, context):
            output = prepare(keys, context)
            for key in keys:
                engine.names[key] = (key[-1], context.get_offload_key_position(key) // BLOCK_TOKENS)
            stored = [engine.names[key] for key in output.keys_to_store]
            engine.calls.append(([engine.names[key] for key in keys], stored))
            return output

        engine.manager.prepare_store = prepare_store
        return engine

    return build


def serve(engine, *prompts):
    """Serve prompts one after another, and return for each how many of its positions were loaded."""
    loaded = []
    for prompt in prompts:
        before, engine.calls[:] = engine.loaded_positions, []
        engine.add(f"request-{random.random()}", [*prompt, 2])
        engine.drain()
        engine.policy.check()
        loaded.append(engine.loaded_positions - before)
    return loaded


def leaving(engine):
    return [engine.names[key] for key in engine.policy.leave_first]


def keys_of(group, first, last):
    return [(group, i) for i in range(first, last + 1)]


FIRST, DEEPER, DEEPEST = tokens(1, 10), tokens(2, 4), tokens(3, 4)
# The stores of FIRST: every call of the engine, all of its keys are stored.
CALLS = {
    SLIDING: [keys_of(0, 1, 4), keys_of(0, 5, 8) + keys_of(1, 7, 8), keys_of(0, 9, 10) + keys_of(1, 9, 10)],
    # A state precedes the block whose end it describes.
    STATES: [keys_of(1, 1, 4), keys_of(1, 5, 8), [(0, 10)], [(2, 10)], keys_of(1, 9, 10)],
}
NUM_KEYS = {windows: sum(map(len, calls)) for windows, calls in CALLS.items()}


@MODELS
def test_unit_stored_in_parts_is_resumed(make, windows):
    engine = make(windows)
    assert serve(engine, FIRST) == [0]
    assert engine.calls == [(keys, keys) for keys in CALLS[windows]]
    paths = [[engine.names[key][1] for key in keys] for _, _, keys in engine.policy.listed]
    assert paths == [[10], list(range(1, 10))]
    assert leaving(engine) == []
    engine.scheduler.reset_prefix_cache()
    assert serve(engine, FIRST) == [10]
    assert engine.policy.lru_requests == 0


@MODELS
def test_declined_unit_declines_its_later_parts(make, windows):
    engine = make(windows, NUM_KEYS[windows])
    for expected in (0, 10, 10):
        assert serve(engine, FIRST) == [expected]
        engine.scheduler.reset_prefix_cache()
    assert serve(engine, tokens(9, 10)) == [0]
    assert [stored for _, stored in engine.calls] == [[]] * len(CALLS[windows])
    engine.scheduler.reset_prefix_cache()
    assert serve(engine, FIRST) == [10]


@MODELS
def test_device_hit_passes_host_boundary(make, windows):
    engine = make(windows)
    assert serve(engine, FIRST, FIRST + DEEPER, FIRST + DEEPER + DEEPEST) == [0, 0, 0]
    # One boundary in the middle is given up, the one before it stays.
    assert leaving(engine) == (keys_of(1, 11, 14)[::-1] if windows == SLIDING else [(2, 14), (0, 14)])
    engine.scheduler.reset_prefix_cache()
    assert serve(engine, FIRST + DEEPER + DEEPEST) == [18]
    engine.scheduler.reset_prefix_cache()
    assert serve(engine, FIRST + tokens(4, 1)) == [10]


@MODELS
def test_junction_on_device_becomes_boundary(make, windows):
    engine = make(windows)
    serve(engine, FIRST, FIRST[: 6 * BLOCK_TOKENS] + tokens(4, 3))
    engine.scheduler.reset_prefix_cache()
    assert serve(engine, FIRST[: 6 * BLOCK_TOKENS] + tokens(5, 3)) == [6]


def test_missed_junction_is_no_boundary(make):
    engine = make(SLIDING, has_device_cache=False)
    assert serve(engine, FIRST, *(FIRST[: 6 * BLOCK_TOKENS] + tokens(seed, 3) for seed in (4, 5))) == [0, 0, 0]
    assert serve(engine, FIRST) == [10]


@MODELS
def test_keys_outside_sets_are_declined(make, windows):
    engine = make(windows, retention_interval=None)
    serve(engine, FIRST)
    offered, stored = ({key for call in engine.calls for key in call[i]} for i in (0, 1))
    # The end of the first step is taken for a junction.
    assert offered - stored == set(keys_of(1, 5, 6) if windows == SLIDING else [(0, 8), (2, 8)])
    engine.scheduler.reset_prefix_cache()
    assert serve(engine, FIRST) == [10]


@pytest.mark.parametrize("windows", [(None, 2 * BLOCK_TOKENS), (None, 2 * BLOCK_TOKENS, MAMBA)])
def test_reply_is_resumed_behind_its_end(make, windows):
    engine = make(windows, 1000, offload_prompt_only=False, retention_interval=None)
    engine.add("turn", tokens(1, 40), max_tokens=24 * BLOCK_TOKENS + 1)
    engine.drain()
    conversation = tokens(1, 40) + [GENERATED_TOKEN] * 24 * BLOCK_TOKENS
    engine.scheduler.reset_prefix_cache()
    assert serve(engine, conversation + tokens(2, 2)) == [64]
    assert engine.policy.lru_requests == 0
    # A passed end of the reply is kept only 8 times the slots of a set behind the one before it.
    kept = {39, 40, 55, 56} if len(windows) == 2 else {40, 63}
    left = {i for group, i in leaving(engine) if group == len(windows) - 1}
    assert left == set(range(41, 65)) - kept


@MODELS
def test_aborted_request_leaves_its_end_first(make, windows):
    engine = make(windows)
    engine.add("aborted", [*FIRST, 2])
    engine.step()
    engine.step()
    engine.scheduler.finish_requests("aborted", RequestStatus.FINISHED_ABORTED)
    engine.drain()
    engine.policy.check()
    assert leaving(engine) == ([(1, 7), (1, 8), (0, 8)] if windows == SLIDING else [(1, 8)])


# Also a part of a boundary that fails after the boundary was made, when its request has ended.
@pytest.mark.parametrize(
    ("windows", "failed"), [(SLIDING, (1, 10)), (SLIDING, (1, 8)), (STATES, (1, 10)), (STATES, (2, 10))]
)
def test_failed_store_ends_its_boundary(make, windows, failed):
    engine = make(windows)
    complete, engine.manager.complete_store = (
        engine.manager.complete_store,
        lambda keys, context: complete(keys, context, success=not any(engine.names[key] == failed for key in keys)),
    )
    serve(engine, FIRST)
    engine.manager.complete_store = complete
    for expected in (0, 10):
        engine.scheduler.reset_prefix_cache()
        assert serve(engine, FIRST) == [expected]
        assert leaving(engine) == []


@MODELS
def test_reset_clears_boundaries_and_queue(make, windows):
    engine = make(windows)
    serve(engine, FIRST, FIRST + DEEPER, FIRST + DEEPER + DEEPEST)
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.forget_host()
    assert (engine.policy.leave_first, engine.policy.listed) == ([], [])
    assert serve(engine, FIRST) == [0]
    assert engine.calls == [(keys, keys) for keys in CALLS[windows]]


@pytest.mark.parametrize("windows", [(None,), SLIDING, STATES, (3 * BLOCK_TOKENS, None, MAMBA), (None, 32, None)])
def test_storm_of_aborts_failures_and_resets(make, windows):
    engine = make(windows, 50, transfer_steps=3)
    for number, _ in storm([engine], 120, 12, 79, random.Random(7)):
        if number == 79:
            engine.forget_host()
        engine.policy.check()
    stats = engine.stats
    assert (stats.num_pending, stats.num_referenced, len(engine.scheduler.requests)) == (0, 0, 0)
    assert min(engine.loaded_positions, stats.failed_blocks, stats.evicted_blocks) > 0
    assert stats.declined_blocks > 0 or len(windows) == 1


@pytest.mark.parametrize(
    ("windows", "expected"),
    [
        (SLIDING, [None, 4]),
        (STATES, [1, None, 1]),
        ((24, None, MAMBA), [2, None, 1]),
        ((None, 24, None), [None, 2, None]),
        ((None,), None),
    ],
)
def test_windows_are_those_of_vllms_connector(make, windows, expected):
    assert make(windows).manager._manager.telemetry.config.get("group_windows") == expected


@pytest.fixture
def log(monkeypatch):
    lines = []
    monkeypatch.setattr(spec.logger, "info", lambda text, *values: lines.append(text % values))
    return lines


def test_chosen_policy_is_used(make):
    assert type(make(SLIDING, cache_policy="lru").policy).__name__ == "LRUCachePolicy"


def test_named_windows_replace_those_of_vllm(make, log):
    engine = make(SLIDING, group_windows=[None, 2])
    assert engine.manager._manager.telemetry.config["group_windows"] == [None, 2]
    assert not any("without group_windows" in line for line in log)
    with pytest.raises(
        ValueError, match=r"group_windows must name the model's 2 groups of KV caches, got \[None, 2, 2\]"
    ):
        make(SLIDING, group_windows=[None, 2, 2])
    with pytest.raises(ValueError, match="the policy LRUCachePolicy has no rule for several KV-cache groups"):
        make(SLIDING, group_windows=[None, 2], cache_policy="lru")


def test_unknown_windows_use_lru_logged_once(make, log, monkeypatch):
    monkeypatch.setattr(spec, "find_windows", lambda groups, caller: find_windows([SimpleNamespace()]))
    engine = make(SLIDING)
    serve(engine, FIRST)
    assert type(engine.policy).__name__ == "LRUCachePolicy"
    reason = (
        "policy lru without group_windows, for 2 groups of KV caches: this release of vLLM does not name their windows"
    )
    assert [line for line in log if "without" in line] == [reason]


GROUP = {"sliding_window_size_in_chunks": None, "tokens_per_block": 16}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ([{}, {"tokens_per_block": 64}], r"their blocks have \[16, 64\] tokens"),
        ([{}, {"is_eagle_group": True}], r"groups \[1\] hold layers of a draft model"),
        ([{"group_id": 0}, {"group_id": 2}], r"only groups \[0, 2\] are offloaded"),
    ],
)
def test_model_without_rule_is_named(changes, reason):
    with pytest.raises(ValueError, match=reason):
        find_windows([SimpleNamespace(**(GROUP | change)) for change in changes])


@pytest.mark.parametrize(
    ("groups", "caches", "reason"),
    [
        ([SimpleNamespace()], [SimpleNamespace(is_eagle_group=False)], r"\[namespace\(\)\] .* 'group_id'"),
        ([SimpleNamespace(**GROUP, group_id=0)], [SimpleNamespace()], "'is_eagle_group'"),
        ([SimpleNamespace(**GROUP, group_id=1)], [SimpleNamespace(is_eagle_group=False)], "index out of range"),
        (None, [], "groups None of vLLM's configuration"),
    ],
)
def test_malformed_groups_are_named(groups, caches, reason):
    kv_cache_config = SimpleNamespace(kv_cache_groups=caches)
    with pytest.raises(ValueError, match=reason):
        described_groups(SimpleNamespace(groups=groups))
    assert kv_cache_config.kv_cache_groups is caches
