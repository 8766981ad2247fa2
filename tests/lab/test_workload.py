"""Generated chats and agents are seeded, ordered, and prefix-chained like the requests of a trace."""

from itertools import islice, pairwise

import pytest

from kvcache.lab.traces.agents import AgentWorkload
from kvcache.lab.traces.chats import ChatWorkload


def ids_of(workload):
    return [request.hash_ids.tolist() for request in workload]


@pytest.mark.parametrize("make", [ChatWorkload, AgentWorkload])
def test_seed_fixes_requests_in_order(make):
    first, again, other = (
        [(step.arrival_s, step.input_length, step.hash_ids.tolist()) for step in make(num_requests=200, seed=seed)]
        for seed in (3, 3, 4)
    )
    assert first == again != other
    arrivals = [at_s for at_s, _, _ in first]
    assert arrivals == sorted(arrivals)


def test_chats_list_full_blocks_only():
    requests = list(ChatWorkload(num_requests=500, block_size=16))
    assert len(requests) == 500
    assert all(len(r.hash_ids) == r.input_length // 16 for r in requests)
    assert max(r.input_length for r in requests) <= 16384


def test_id_always_follows_same_prefix():
    parent = {}
    for ids in ids_of(ChatWorkload(num_requests=500)):
        for before, after in pairwise([-1, *ids]):
            assert parent.setdefault(after, before) == before


def test_chats_share_system_prompts_and_grow():
    prompts = ids_of(ChatWorkload(num_requests=500, num_system_prompts=2))
    assert len({ids[0] for ids in prompts}) == 2
    extended = sum(any(ids[: len(old)] == old for old in prompts[:i]) for i, ids in enumerate(prompts))
    assert extended > 250


def test_generated_agents_loop_then_wait():
    workload = AgentWorkload(num_requests=600, seed=3, num_users=1, subagent_share=1e-9)
    requests = list(workload)
    assert len(requests) == 600
    gaps = [after.arrival_s - before.arrival_s for before, after in pairwise(requests)]
    assert min(gaps) > 0
    loops = [gap for gap in gaps if gap < 40]
    assert 0.7 < len(loops) / len(gaps) < 0.98
    assert max(gaps) > 120
    grown = sum(
        after.hash_ids[: len(before.hash_ids)].tolist() == before.hash_ids.tolist()
        for before, after in pairwise(requests)
    )
    assert grown / len(gaps) > 0.9


def test_subagents_share_the_tools_alone():
    requests = list(islice(AgentWorkload(num_users=1, num_tool_sets=1, subagent_share=1.0, seed=5), 60))
    heads = {tuple(step.hash_ids[:50].tolist()) for step in requests}
    assert len(heads) == 1
    restarts = sum(len(after.hash_ids) < len(before.hash_ids) for before, after in pairwise(requests))
    assert restarts > 3


def test_demo_runs_agents(run_json):
    argv = ("demo", "--traffic", "agents", "--no-data", "--requests", 200)
    assert run_json(*argv)["source"] == {"kind": "agents", "seed": 0}
