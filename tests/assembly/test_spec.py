"""One configuration, two halves that agree: sizes that must divide, options that must fit."""

import logging
import pickle

import pytest

import kvcache
from kvcache import (
    BlockStateError,
    CanonicalKVCacheRef,
    CPULoadStoreSpec,
    CPUOffloadingSpec,
    GPULoadStoreSpec,
    OffloadingConfig,
    OffloadingEvent,
    OffloadingGroup,
    OffloadingSpec,
    PrepareStoreOutput,
    TransferResult,
    make_spec,
)


def config_of(*block_sizes, hash_block_size=16, refs=(), **options):
    extra = {"num_cpu_blocks": 8} | options.pop("extra", {})
    groups = tuple(OffloadingGroup(size, (f"layer{i}",), refs) for i, size in enumerate(block_sizes or (16,)))
    return OffloadingConfig(groups, hash_block_size, extra_config=extra, **options)


def test_sizes_follow_from_the_config():
    ranks = {"decode_context_parallel_size": 2, "prefill_context_parallel_size": 3}
    spec = CPUOffloadingSpec(config_of(16, 16, **ranks, extra={"block_size": 192}))
    assert (spec.gpu_block_size, spec.hash_block_size, spec.block_size_factor) == ((96, 96), 16, 2)
    assert spec.block_size == 192
    assert spec.offload_prompt_only is True
    assert spec.extra_config == {"num_cpu_blocks": 8, "block_size": 192}


def test_groups_may_differ_in_block_size():
    spec = CPUOffloadingSpec(config_of(16, 64))
    assert spec.gpu_block_size == (16, 64)
    assert spec.block_size_factor == 1


def test_manager_matches_the_config():
    extra = {"cache_policy": "arc", "enable_events": True, "block_size": 32, "offload_prompt_only": False}
    spec = CPUOffloadingSpec(config_of(16, extra=extra))
    manager = spec.get_manager()
    assert spec.get_manager() is manager
    assert isinstance(manager.policy, kvcache.ARCCachePolicy)
    assert manager.block_size == 32
    assert manager.stats().num_blocks == 8
    assert spec.offload_prompt_only is False
    manager.prepare_store([b"a"])
    manager.complete_store([b"a"])
    assert [event.keys for event in manager.take_events()] == [[b"a"]]


def test_bytes_are_shared_by_all_workers():
    refs = (CanonicalKVCacheRef(0, 100), CanonicalKVCacheRef(1, 28))

    def spec_of(num_bytes):
        extra = {"num_cpu_blocks": None, "cpu_bytes_to_use": num_bytes, "block_size": 32}
        return CPUOffloadingSpec(config_of(16, extra=extra, refs=refs, world_size=4))

    assert spec_of(128 * 2 * 4 * 5 + 1).num_blocks == 5
    assert spec_of("5KiB").num_blocks == 5
    with pytest.raises(ValueError, match="at least one block of 1024 bytes over all 4 workers, got 1023"):
        spec_of(1023)


@pytest.mark.parametrize("page_bytes", [1000, 4096, 9216, 4097])
@pytest.mark.parametrize("world_size", [1, 3])
def test_pool_file_fits_its_bytes(tmp_path, page_bytes, world_size):
    """Parts of blocks are aligned in a pool's file, and the number of blocks counts that."""
    extra = {"spec_name": "tiering", "pool_folder": str(tmp_path), "tiers": [{"type": "memory", "capacity": "1MiB"}]}
    extra |= {"num_cpu_blocks": None, "cpu_bytes_to_use": "1MiB"}
    refs = (CanonicalKVCacheRef(0, page_bytes),)
    spec = make_spec(config_of(16, extra=extra, refs=refs, world_size=world_size))
    part_bytes = -(-page_bytes // 4096) * 4096
    manager = spec.get_manager()
    try:
        assert manager.stats().num_blocks == (1 << 20) // (part_bytes * world_size)
        [pool] = tmp_path.rglob("kvcache-pool-*")
        assert pool.stat().st_size <= 1 << 20
    finally:
        manager.shutdown()


@pytest.mark.parametrize(
    ("sizes", "extra", "message"),
    [
        ([24], {}, "group 0, 24 tokens on each of 1 context-parallel ranks, must be a multiple of .* 16"),
        ([16, 24], {}, "group 1, 24 tokens"),
        ([16], {"block_size": 24}, "block_size must be a multiple of the device's 16, got 24"),
        ([16], {"block_size": 0}, "block_size in extra_config must be a whole number >= 1"),
        ([16, 32], {"block_size": 32}, r"needs groups of one device block size, got \(16, 32\)"),
        ([16], {"block_size": "x"}, "block_size in extra_config must be .*, got 'x'"),
        ([16], {"offload_prompt_only": 1}, "offload_prompt_only in extra_config must be a bool"),
        ([16], {"num_cpu_blocks": None}, "one of num_cpu_blocks and cpu_bytes_to_use"),
        ([16], {"cpu_bytes_to_use": 1}, "got num_cpu_blocks=8 and cpu_bytes_to_use=1"),
        ([16], {"num_cpu_blocks": None, "cpu_bytes_to_use": 1 << 30}, "needs the refs of every group"),
        ([16], {"tiers": []}, "tiers need spec_name 'tiering'"),
        ([16], {"exporters": ["kvcache.keys:OffloadKey"]}, "must (be an Exporter|name a class)"),
    ],
)
def test_config_that_does_not_fit_raises(sizes, extra, message):
    with pytest.raises(ValueError, match=message):
        CPUOffloadingSpec(config_of(*sizes, extra=extra))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"groups": ()}, "groups must be OffloadingGroups, at least one"),
        ({"groups": (16,)}, "groups must be OffloadingGroups"),
        ({"hash_block_size": 0}, "hash_block_size must be an int >= 1, got 0"),
        ({"world_size": 0}, "world_size must be an int >= 1, got 0"),
        ({"decode_context_parallel_size": 1.0}, "decode_context_parallel_size must be an int >= 1, got 1.0"),
        ({"rank": 1}, r"rank must be an int in 0\.\.0, got 1"),
        ({"extra_config": None}, "extra_config must be a dict, got None"),
    ],
)
def test_config_out_of_range_raises(arguments, message):
    with pytest.raises(ValueError, match=message):
        OffloadingConfig(**({"groups": (OffloadingGroup(16),), "hash_block_size": 16} | arguments))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0,), "block_size of a group must be an int >= 1, got 0"),
        ((16, "layer.0"), r"layer_names of a group must be a sequence of str, got 'layer\.0'"),
        ((16, (), ((0, 8),)), r"refs of a group must be .* CanonicalKVCacheRef, got \(\(0, 8\),\)"),
    ],
)
def test_group_out_of_range_raises(arguments, message):
    with pytest.raises(ValueError, match=message):
        OffloadingGroup(*arguments)


def test_spec_is_chosen_by_name():
    assert type(make_spec(config_of())) is CPUOffloadingSpec
    by_path = config_of(extra={"spec_name": "kvcache.assembly.spec:CPUOffloadingSpec"})
    assert type(make_spec(by_path)) is CPUOffloadingSpec
    with pytest.raises(ValueError, match="unknown spec 'gpu', known ones: cpu"):
        make_spec(config_of(extra={"spec_name": "gpu"}))
    with pytest.raises(ValueError, match="must be a subclass of OffloadingSpec"):
        make_spec(config_of(extra={"spec_name": "kvcache.request:ReqContext"}))
    assert issubclass(CPUOffloadingSpec, OffloadingSpec)


def test_unknown_options_are_told_not_swallowed(caplog):
    with caplog.at_level(logging.WARNING):
        make_spec(config_of(extra={"cache_polcy": "arc", "zzz": 1, "spec_name": "cpu"}))
    (record,) = caplog.records
    assert record.getMessage() == (
        "kvcache does not know these keys of extra_config: cache_polcy (did you mean 'cache_policy'?), zzz"
    )
    caplog.clear()
    make_spec(config_of(extra={"block_size": 32, "offload_prompt_only": False, "store_threshold": 2}))
    assert not caplog.records


def test_foreign_spec_warns_of_unknown_options(caplog):
    class Silent(CPUOffloadingSpec):
        pass

    class Speaking(CPUOffloadingSpec):
        option_names = CPUOffloadingSpec.option_names | {"colour", "tiers"}

    config = config_of(extra={"colour": "red", "shade": 1, "tiers": []})
    Silent(config)
    assert not caplog.records
    Speaking(config)
    assert [record.getMessage() for record in caplog.records] == [
        "kvcache does not know these keys of extra_config: shade"
    ]


def test_managers_own_options_reach_it():
    extra = {"store_threshold": 2, "max_tracker_size": 100}
    manager = CPUOffloadingSpec(config_of(extra=extra)).get_manager()
    assert manager.prepare_store([b"a"]).keys_to_store == []
    assert manager.prepare_store([b"a"]).keys_to_store == [b"a"]


def test_what_crosses_a_process_boundary_pickles():
    refs = (CanonicalKVCacheRef(0, 100),)
    config = config_of(16, refs=refs, model_name="m", dtype="bf16")
    assert pickle.loads(pickle.dumps(config)) == config
    output = PrepareStoreOutput([b"a"], CPULoadStoreSpec([3]), [b"b"])
    assert pickle.loads(pickle.dumps(output)) == output
    for value in (OffloadingEvent([b"a"], 16, "CPU", True), TransferResult(1, True, 2, 0.5, ("GPU", "CPU"))):
        assert pickle.loads(pickle.dumps(value)) == value
    spec = pickle.loads(pickle.dumps(GPULoadStoreSpec([4, 5], [1, 1], [0, 7])))
    assert (spec.block_ids.tolist(), spec.group_sizes, spec.block_indices) == ([4, 5], (1, 1), (0, 7))
    assert str(pickle.loads(pickle.dumps(BlockStateError("x")))) == "x"


def test_worker_of_config_alone_moves_bytes():
    torch = pytest.importorskip("torch")
    refs = (CanonicalKVCacheRef(0, 32), CanonicalKVCacheRef(1, 24))
    spec = make_spec(pickle.loads(pickle.dumps(config_of(16, refs=refs, extra={"block_size": 32}))))
    tensors = [torch.randint(-128, 128, (6, 32), dtype=torch.int8) for _ in range(2)]
    kv_caches = kvcache.CanonicalKVCaches([kvcache.CanonicalKVCacheTensor(t, 32) for t in tensors], [list(refs)])
    worker = kvcache.OffloadingWorker()
    for src_type, dst_type, handler in spec.get_handlers(kv_caches):
        worker.register_handler(src_type, dst_type, handler)
    assert (spec.pool.num_blocks, spec.pool.block_bytes) == (8, 2 * 56)
    assert spec.pool.pin_failures == 0
    before = [t.clone() for t in tensors]
    worker.transfer_async(1, (GPULoadStoreSpec([5, 0, 3], [3], [1]), CPULoadStoreSpec([7, 2])))
    worker.wait([1])
    worker.transfer_async(2, (CPULoadStoreSpec([7, 2]), GPULoadStoreSpec([1, 2, 4], [3], [1])))
    worker.wait([2])
    assert [result.success for result in worker.get_finished()] == [True, True]
    assert torch.equal(tensors[0][[1, 2, 4]], before[0][[5, 0, 3]])
    assert torch.equal(tensors[1][[1, 2, 4], :24], before[1][[5, 0, 3], :24])
    assert [handler for *_, handler in spec.get_handlers(kv_caches)] == [h for *_, h in spec.get_handlers(kv_caches)]
    worker.shutdown()


def test_kv_cache_unlike_config_is_refused():
    torch = pytest.importorskip("torch")
    tensors = [kvcache.CanonicalKVCacheTensor(torch.zeros(6, 32, dtype=torch.int8), 32)]
    spec = CPUOffloadingSpec(config_of(16, refs=(CanonicalKVCacheRef(0, 32),)))
    with pytest.raises(ValueError, match="the config has 1 KV-cache groups, got 2"):
        spec.get_handlers(kvcache.CanonicalKVCaches(tensors, [[], []]))
    with pytest.raises(
        ValueError, match=r"in group 0, got \[CanonicalKVCacheRef\(tensor_idx=0, page_size_bytes=31\)\]"
    ):
        spec.get_handlers(kvcache.CanonicalKVCaches(tensors, [[CanonicalKVCacheRef(0, 31)]]))
    kv_caches = kvcache.CanonicalKVCaches(tensors, [[CanonicalKVCacheRef(0, 32)]])
    handlers = list(spec.get_handlers(kv_caches))
    with pytest.raises(ValueError, match="belong to another KV cache"):
        spec.get_handlers(kvcache.CanonicalKVCaches(tensors, [[CanonicalKVCacheRef(0, 32)]]))
    for *_, handler in handlers:
        handler.shutdown()
