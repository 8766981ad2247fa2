"""Generated chats are seeded, ordered, and prefix-chained like the requests of a trace."""

from itertools import pairwise

from kvcache.lab.traces.chats import ChatWorkload


def ids_of(workload):
    return [request.hash_ids.tolist() for request in workload]


def test_seed_fixes_requests_in_order():
    first, again, other = (
        [(step.arrival_s, step.input_length, step.hash_ids.tolist()) for step in ChatWorkload(200, seed)]
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
