"""Our policies under vLLM's own CPUOffloadingManager: its hits beside those of our manager, and its state."""

import random

import pytest
from engine_tiering import EngineTiering, key, keys, tier_config
from vllm.v1.kv_offload import base
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager as EngineManager

import kvcache.integrations.vllm.policies as policies
from kvcache import CPUOffloadingManager
from kvcache.integrations.vllm.manager import KVCacheOffloadingManager
from kvcache.integrations.vllm.releases import installed_release

MODULE = "kvcache.integrations.vllm.policies"


def chats(num_requests, seed):
    """Return prompts of chats that grow turn by turn, among prompts that are asked once."""
    dice = random.Random(seed)
    chats = [[] for _ in range(40)]
    next_key, found = iter(range(1 << 30)), []
    for _ in range(num_requests):
        if dice.random() < 0.4:
            found.append([key(next(next_key)) for _ in range(dice.randrange(1, 12))])
            continue
        chat = chats[min(int(dice.expovariate(0.12)), 39)]
        if len(chat) > 30:
            chat.clear()
        chat += [key(next(next_key)) for _ in range(dice.randrange(1, 4))]
        found.append(list(chat))
    return found


def serve(manager, prompts, batch=4):
    """Serve prompts one after another as vLLM's scheduler does; return prefix hits and stored blocks."""
    num_hits = num_stored = 0
    for number, prompt in enumerate(prompts):
        context = base.ReqContext(f"request-{number}")
        for position, one in enumerate(prompt):
            context.set_offload_key_position(one, 16 * (position + 1))
        manager.on_new_request(context)
        num_found = next(
            (i for i, one in enumerate(prompt) if manager.lookup(one, context) is not base.LookupResult.HIT),
            len(prompt),
        )
        if num_found:
            manager.prepare_load(prompt[:num_found], context)
            manager.complete_load(set(prompt[:num_found]), context)
        num_hits += num_found
        for first in range(num_found, len(prompt), batch):
            output = manager.prepare_store(prompt[first : first + batch], context)
            if output is not None and output.keys_to_store:
                num_stored += len(output.keys_to_store)
                manager.complete_store(set(output.keys_to_store), context)
        manager.on_request_finished(context)
    return num_hits, num_stored


@pytest.mark.skipif(not installed_release().key_positions, reason="vLLM 0.30 passes no positions")
@pytest.mark.parametrize("name", ["Lru", "Arc", "Mq", "Amq"])
def test_policies_hit_in_vllm_like_ours(name):
    prompts = chats(3000, seed=1)
    theirs, _ = serve(EngineManager(200, name, MODULE), prompts)
    ours = KVCacheOffloadingManager(CPUOffloadingManager(16, 200, name.lower()), installed_release())
    expected, _ = serve(ours, prompts)
    assert expected > 5000
    # The managers name the keys of one request in another order.
    assert abs(theirs - expected) <= 0.01 * expected, (theirs, expected)


def test_policies_gittins_stores_every_block():
    prompts = chats(1000, seed=2)
    manager = EngineManager(200, "Gittins", MODULE)
    now = iter(range(1 << 30))
    manager._policy.clock = lambda: next(now) * 0.1
    num_hits, _ = serve(manager, prompts)
    context = base.ReqContext("after")
    assert all(manager.lookup(one, context) is base.LookupResult.HIT for one in prompts[-1])
    lru_hits, _ = serve(EngineManager(200, "lru"), prompts)
    assert num_hits > lru_hits, (num_hits, lru_hits)


@pytest.mark.parametrize("name", policies.__all__)
def test_policies_never_evict_used_blocks(name):
    manager = EngineManager(4, name, MODULE)
    context = base.ReqContext("request")
    manager.on_new_request(context)
    manager.prepare_store(keys(0, 1, 2, 3), context)
    # All are being written.
    assert manager.prepare_store(keys(4), context) is None
    manager.complete_store(keys(0, 1), context)
    manager.complete_store(keys(2), context, success=False)
    assert manager.lookup(key(2), context) is base.LookupResult.MISS
    manager.prepare_load(keys(0), context)
    output = manager.prepare_store(keys(4, 5), context)
    assert (output.keys_to_store, output.evicted_keys) == (keys(4, 5), keys(1))
    assert manager.prepare_store(keys(6), context) is None
    manager.complete_load(keys(0), context)
    manager.complete_store(keys(3, 4, 5), context)
    assert manager.prepare_store([*keys(0), *keys(6)], context).evicted_keys[0] in keys(3, 4, 5)
    manager.reset_cache()
    assert manager.lookup(key(0), context) is base.LookupResult.MISS
    manager.prepare_store(keys(0, 1, 2, 3), context)


def test_reset_policy_counts_a_request_anew():
    manager = EngineManager(2, "Lru", MODULE)
    before, after = base.ReqContext("before"), base.ReqContext("after")
    for context in (before, after):
        manager.on_new_request(context)
    manager.touch(keys(0), before)
    manager.reset_cache()
    manager.prepare_store(keys(0, 1), after)
    manager.complete_store(keys(0, 1), after)
    manager.touch(keys(0), before)
    assert manager.prepare_store(keys(2), after).evicted_keys == keys(1)


def test_policies_work_above_a_tier():
    engine = EngineTiering(
        [tier_config("memory", capacity="1MiB")], policy={"eviction_policy": "Amq", "cache_policy_module_path": MODULE}
    )
    for first in range(0, 40, 8):
        engine.store(keys(*range(first, first + 8)))
        engine.settle()
    assert engine.load(keys(*range(8))) == 8
    engine.close()
