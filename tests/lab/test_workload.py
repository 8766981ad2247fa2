"""The generated chats are seeded, ordered, and prefix-chained like the requests of a trace."""

import itertools

from kvcache.lab.traces.chats import ChatWorkload


def ids_of(workload):
    return [request.hash_ids.tolist() for request in workload]


def test_same_seed_gives_the_same_requests():
    first, again = (list(ChatWorkload(num_requests=200, seed=3)) for _ in range(2))
    assert [r.arrival_s for r in first] == [r.arrival_s for r in again]
    assert [r.hash_ids.tolist() for r in first] == [r.hash_ids.tolist() for r in again]
    assert ids_of(ChatWorkload(num_requests=200, seed=4)) != [r.hash_ids.tolist() for r in first]


def test_requests_arrive_in_order_and_list_full_blocks_only():
    requests = list(ChatWorkload(num_requests=500, block_size=16))
    assert len(requests) == 500
    assert all(a.arrival_s <= b.arrival_s for a, b in itertools.pairwise(requests))
    assert all(len(r.hash_ids) == r.input_length // 16 for r in requests)
    assert max(r.input_length for r in requests) <= 16384


def test_an_id_always_follows_the_same_prefix():
    parent = {}
    for ids in ids_of(ChatWorkload(num_requests=500)):
        for before, after in itertools.pairwise([-1, *ids]):
            assert parent.setdefault(after, before) == before


def test_chats_share_system_prompts_and_grow():
    prompts = ids_of(ChatWorkload(num_requests=500, num_system_prompts=2))
    assert len({ids[0] for ids in prompts}) == 2
    extended = sum(any(ids[: len(old)] == old for old in prompts[:i]) for i, ids in enumerate(prompts))
    assert extended > 250
