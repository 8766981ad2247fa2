"""The adapter under the real engine: the same tokens with and without it, and every block where it should be."""

import statistics
import time

import pytest
import torch
from engine_options import BLOCK_BYTES

from kvcache.registry import POLICIES


class TestOneEngine:
    """Tests that share one engine; a process holds one at a time."""

    @pytest.fixture(scope="class")
    def engine(self, boot, models, expected):
        with boot(models["llama"], {"cache_policy": "lru"}) as engine:
            yield engine

    @pytest.fixture
    def fresh(self, engine):
        engine.drop_device_cache(host_too=True)
        return engine

    def test_loaded_blocks_give_same_tokens(self, fresh, prompts, crowd, expected):
        before = fresh.stats
        assert fresh.answers(prompts) == expected(prompts)
        stored = fresh.stats
        assert stored.stored_blocks - before.stored_blocks == 34
        assert stored.loaded_blocks - before.loaded_blocks == 0

        fresh.drop_device_cache()
        assert fresh.ask(prompts) == (expected(prompts), [1024] * 3)
        assert fresh.stats.loaded_blocks - stored.loaded_blocks == 34

        # The third time the device's 128 blocks have really been given to others: 7 x 21.
        assert fresh.answers(crowd) == expected(crowd)
        assert fresh.answers(prompts) == expected(prompts)
        assert fresh.stats.loaded_blocks - stored.loaded_blocks == 2 * 34
        assert fresh.stats.stored_blocks - before.stored_blocks == 34 + 7 * 20

    def test_flipped_bytes_change_every_answer(self, fresh, prompts, expected):
        fresh.answers(prompts)
        fresh.drop_device_cache()
        signs = fresh.worker._pool.tensor.view(torch.int32)
        signs.bitwise_xor_(-(2**31))
        wrong = fresh.answers(prompts)
        assert [answer == right for answer, right in zip(wrong, expected(prompts), strict=True)] == [False] * 3
        fresh.drop_device_cache()
        signs.bitwise_xor_(-(2**31))
        assert fresh.answers(prompts) == expected(prompts)

    def test_metrics_count_blocks_and_bytes(self, fresh, prompts):
        names = ("stored_blocks", "loaded_blocks", "needed_blocks")
        before = {name: fresh.metric(f"vllm:kvcache_{name}") for name in names}
        moved = {way: fresh.metric(f"vllm:kv_offload_{way}_bytes") for way in ("store", "load")}
        fresh.answers(prompts[:1])
        fresh.drop_device_cache()
        fresh.answers(prompts[:1])
        after = {name: fresh.metric(f"vllm:kvcache_{name}") - before[name] for name in names}
        assert after == {"stored_blocks": 32, "loaded_blocks": 32, "needed_blocks": 64}
        for way in moved:
            assert fresh.metric(f"vllm:kv_offload_{way}_bytes") - moved[way] == 32 * BLOCK_BYTES
        assert fresh.metric("vllm:kvcache_capacity_blocks") == fresh.stats.num_blocks == (256 << 20) // BLOCK_BYTES

    def test_hints_reach_manager_bad_are_counted(self, fresh, prompts):
        ignored = fresh.metric("vllm:kvcache_ignored_hints")
        for hint in ({"next_use": "soon"}, {"next_use": "end"}, {"priority": 9}, "soon", {"next_use": "tomorrow"}):
            fresh.generate(prompts[:1], {"kvcache": hint})
        assert fresh.metric("vllm:kvcache_ignored_hints") - ignored == 3


# All policies, with more requests, in test_scheduler.py.
@pytest.mark.slow
@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_tier_smaller_than_the_working_set(boot, models, crowd, storm, expected, policy):
    # The device holds 63 blocks, so that the storm's requests wait for each other, and some are preempted.
    extra_config = {"cpu_bytes_to_use": 50 * BLOCK_BYTES + 1, "cache_policy": policy}
    with boot(models["llama"], extra_config, num_gpu_blocks_override=64, max_model_len=1024) as engine:
        cached = 0
        for prompt in [*crowd, *reversed(crowd), *crowd]:
            tokens, (num_cached,) = engine.ask([prompt])
            assert tokens == expected([prompt])
            cached += num_cached
            engine.drop_device_cache()
        assert engine.stats.loaded_blocks * 32 == cached > 0
        loaded = engine.stats.loaded_blocks
        for _ in range(2):
            assert engine.answers(storm) == expected(storm)
            engine.drop_device_cache()
        stats = engine.stats
        assert type(engine.manager._manager.policy) is POLICIES.resolve(policy)
    assert stats.loaded_blocks > loaded
    assert stats.num_blocks == 50
    assert stats.evicted_blocks > 0
    assert stats.stored_blocks - stats.evicted_blocks == stats.num_blocks - stats.num_free
    assert (stats.num_referenced, stats.num_pending, stats.failed_blocks) == (0, 0, 0)


@pytest.mark.slow
def test_blocks_larger_than_the_engines(boot, models, prompts, expected):
    with boot(models["llama"], {"block_size": 96}) as engine:
        assert engine.answers(prompts) == expected(prompts)
        # 10 whole blocks of 96 tokens; the shared 1,000 tokens hold all of them.
        assert engine.stats.stored_blocks == 10
        engine.drop_device_cache()
        # Leaves five device blocks behind, so the load starts in the middle of an offloaded block.
        engine.generate([prompts[0][:165]])
        loaded = engine.stats.loaded_blocks
        assert engine.ask(prompts[:1]) == (expected(prompts[:1]), [960])
        assert engine.stats.loaded_blocks - loaded == 9


@pytest.mark.slow
def test_hybrid_model_with_several_groups(boot, models, prompts):
    options = {"num_gpu_blocks_override": 300, "disable_hybrid_kv_cache_manager": False}
    with boot(models["hybrid"], None, **options) as engine:
        expected = engine.answers(prompts)
    assert len({tuple(answer) for answer in expected}) == 3
    with boot(models["hybrid"], {"blocks_per_chunk": 2}, **options) as engine:
        assert engine.answers(prompts) == expected
        for _ in range(2):
            engine.drop_device_cache()
            assert engine.ask(prompts) == (expected, [1024] * 3)
        assert engine.stats.loaded_blocks > 0


@pytest.mark.slow
def test_events_are_accepted_by_every_router(boot, models, crowd, sockets):
    import msgspec
    import zmq
    from consumers import READERS, TAKEN
    from vllm.config import KVEventsConfig
    from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch

    endpoint = f"ipc://{sockets}/events"
    frames = []
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.subscribe(b"kv@")
        socket.connect(endpoint)
        events_config = KVEventsConfig(
            enable_kv_cache_events=True, publisher="zmq", endpoint=endpoint, topic="kv@host@model"
        )
        extra_config = {
            "cpu_bytes_to_use": 30 * BLOCK_BYTES,
            "cache_policy": "lru",
            "self_describing_kv_events": True,
        }
        with boot(models["llama"], extra_config, kv_events_config=events_config) as engine:
            for prompt in (*crowd[:2], [3]):
                engine.generate([prompt])
            stats = engine.stats
            while socket.poll(1000):
                frames.append(socket.recv_multipart())
    events = [event for *_, payload in frames for event in msgspec.msgpack.decode(payload, type=KVEventBatch).events]
    is_ours = [getattr(event, "medium", None) == "CPU" for event in events]
    ours = [event for event, found in zip(events, is_ours, strict=True) if found]
    stored = [event for event in ours if isinstance(event, BlockStored)]
    removed = [block_hash for event in ours if isinstance(event, BlockRemoved) for block_hash in event.block_hashes]
    told = {tuple(event.token_ids): event.block_hashes[0] for event in stored}
    assert told.keys() == {tuple(prompt[i : i + 32]) for prompt in crowd[:2] for i in range(0, 640, 32)}
    assert len(stored) == stats.stored_blocks == 40
    # Room for 30: the first prompt's tail goes before its head.
    assert set(removed) == {told[tuple(crowd[0][i : i + 32])] for i in range(320, 640, 32)}
    assert len(removed) == stats.evicted_blocks == 10
    for name in ("llm-d", "Dynamo", "AIBrix", "vllm-router"):
        reader = READERS[name](32)
        verdicts = [verdict for topic, _, payload in frames for verdict in reader.feed(topic, payload)]
        assert {verdict for verdict, found in zip(verdicts, is_ours, strict=True) if found} == {TAKEN}, name
        [host] = [blocks for medium, blocks in reader.blocks.items() if medium.lower() in ("cpu", "hostpinned")]
        assert host == {block_hash % 2**64 for block_hash in {*told.values()} - {*removed}}, name


@pytest.mark.slow
def test_loading_costs_quarter_of_computing(boot, models, tokens):
    prefix = tokens(0, 2000)
    with boot(models["tall"], {}) as engine:

        def first_token_s(seed, host_too):
            engine.drop_device_cache(host_too)
            start = time.perf_counter()
            engine.generate([prefix + tokens(seed, 7)], max_tokens=1)
            return time.perf_counter() - start

        compute, load = [], []
        for seed in range(7):
            compute.append(first_token_s(seed, host_too=True))
            # The last store is submitted in the next step.
            engine.generate([[3]])
            load.append(first_token_s(seed, host_too=False))
        assert engine.stats.loaded_blocks == 7 * 62
    assert statistics.median(compute) >= 4 * statistics.median(load)
