"""One configuration with tiers: a scheduler's half and workers' halves that share memory and nothing else."""

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from kvcache import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    OffloadingConfig,
    OffloadingGroup,
    OffloadingWorker,
    ReqContext,
    TieredOffloadingManager,
    make_spec,
)

PAGE_BYTES = 3000


def config_of(tmp_path, rank=0, world_size=1, model_name="m", **extra):
    tiers = [{"type": "disk", "path": str(tmp_path / "tier"), "capacity": "2MiB", "deadline_s": 20.0}]
    options = {
        "spec_name": "tiering",
        "num_cpu_blocks": 4,
        "tiers": tiers,
        "lookup_deadline_s": 20.0,
        "pool_path": f"/dev/shm/kvcache-test-{os.getpid()}-{tmp_path.name}",
    } | extra
    refs = (CanonicalKVCacheRef(0, PAGE_BYTES), CanonicalKVCacheRef(1, PAGE_BYTES))
    groups = (OffloadingGroup(16, ("a", "b"), refs),)
    return OffloadingConfig(groups, 16, 1, 1, rank, world_size, model_name, "bf16", options)


class Worker:
    """A worker with eight device blocks, which are host tensors here."""

    def __init__(self, config):
        rng = torch.Generator().manual_seed(config.rank)
        self.tensors = [torch.randint(-128, 128, (8, PAGE_BYTES), dtype=torch.int8, generator=rng) for _ in range(2)]
        caches = CanonicalKVCaches(
            [CanonicalKVCacheTensor(tensor, PAGE_BYTES) for tensor in self.tensors],
            [[CanonicalKVCacheRef(0, PAGE_BYTES), CanonicalKVCacheRef(1, PAGE_BYTES)]],
        )
        self.worker = OffloadingWorker()
        for source, target, handler in make_spec(config).get_handlers(caches):
            self.worker.register_handler(source, target, handler)
        self.num_jobs = 0

    def move(self, source, target):
        self.num_jobs += 1
        assert self.worker.transfer_async(self.num_jobs, (source, target))
        self.worker.wait({self.num_jobs})
        assert [result.success for result in self.worker.get_finished()] == [True]


def gpu(*block_ids):
    return GPULoadStoreSpec(block_ids, (len(block_ids),), (0,))


@pytest.mark.parametrize("world_size", [1, 2])
def test_blocks_of_ranks_return_from_disk(tmp_path, world_size):
    configs = [config_of(tmp_path, rank, world_size) for rank in range(world_size)]
    manager = make_spec(configs[0]).get_manager()
    assert isinstance(manager, TieredOffloadingManager)
    try:
        workers = [Worker(config) for config in configs]
        before = [[tensor.clone() for tensor in worker.tensors] for worker in workers]
        keys = [b"%032d" % i for i in range(8)]
        for i, key in enumerate(keys):
            output = manager.prepare_store([key])
            for worker in workers:
                worker.move(gpu(i), output.store_spec)
            manager.complete_store([key])
            assert manager.settle(20)
        assert manager.tier_stats()[0].written_blocks == 8
        for worker in workers:
            for tensor in worker.tensors:
                tensor.zero_()
        for first in (0, 4):
            context = ReqContext()
            wanted = keys[first : first + 4]
            end = time.monotonic() + 20
            while (num_hits := manager.lookup(wanted, context)) is None and time.monotonic() < end:
                manager.on_schedule_end()
                time.sleep(0.001)
            assert num_hits is not None
            while num_hits < 4:
                # Half of the pool is promoted at a time, so that a dead tier cannot keep all of it.
                manager.on_request_finished(context)
                assert manager.lookup(wanted, context) is None
                assert manager.settle(20)
                num_hits = manager.lookup(wanted, context)
            spec = manager.prepare_load(wanted, context)
            for worker in workers:
                worker.move(spec, gpu(*range(first, first + 4)))
            manager.complete_load(wanted, context)
            manager.on_request_finished(context)
        for worker, tensors in zip(workers, before, strict=True):
            for tensor, expected in zip(worker.tensors, tensors, strict=True):
                assert torch.equal(tensor, expected)
    finally:
        manager.shutdown()
    assert not Path(configs[0].extra_config["pool_path"]).exists()


@pytest.fixture
def manager(tmp_path):
    manager = make_spec(config_of(tmp_path)).get_manager()
    yield manager
    manager.shutdown()


def test_second_engine_on_pool_is_refused(manager, tmp_path):
    with pytest.raises(ValueError, match="belongs to another engine; give this one a pool_path of its own"):
        make_spec(config_of(tmp_path)).get_manager()


def test_next_process_frees_memory_of_killed(tmp_path):
    config = config_of(tmp_path)
    other = Path(f"/dev/shm/kvcache-pool-test-{os.getpid()}-{tmp_path.name}")
    code = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from kvcache.transfer.shared_file import SharedBlocks\n"
        "blocks = SharedBlocks(Path(sys.argv[1]), 4, 4096, is_owner=False)\n"
        "blocks.close()\n"
        "print('mapped', flush=True); time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(other)], stdout=subprocess.PIPE)
    try:
        assert child.stdout.readline() == b"mapped\n"
        make_spec(config).get_manager().shutdown()
        assert other.exists()
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
    make_spec(config).get_manager().shutdown()
    assert not other.exists()


def test_worker_of_gone_engine_refuses_jobs(tmp_path, caplog):
    first = make_spec(config_of(tmp_path)).get_manager()
    worker = Worker(config_of(tmp_path))
    first.shutdown()
    del first
    second = make_spec(config_of(tmp_path)).get_manager()
    try:
        output = second.prepare_store([b"a"])
        assert worker.worker.transfer_async(1, (gpu(0), output.store_spec)) is False
        assert "no manager owns the host blocks that this worker maps" in caplog.text
    finally:
        second.shutdown()


def test_another_model_is_refused(tmp_path):
    make_spec(config_of(tmp_path)).get_manager().shutdown()
    with pytest.raises(ValueError, match=r"another fingerprint: [a-z_.]*model[a-z_.]* .* is not 'other'; choose"):
        make_spec(config_of(tmp_path, model_name="other")).get_manager()
    assert not Path(config_of(tmp_path).extra_config["pool_path"]).exists()


@pytest.mark.parametrize(
    ("tier", "others", "message"),
    [
        ({"cache_policy": dict}, {}, "cache_policy in a disk tier: policy <class 'dict'> must be a subclass"),
        ({}, {"tiers": None}, "tiers in extra_config must be a list of dicts, got None"),
        ({}, {"block_size": 1 << 53}, "shared pool .* bytes.* too large"),
        ({"type": "memory", "capacity": 1}, {}, "capacity in a memory tier must be >= 8192, one block"),
        ({"type": "memory", "capacity": "8PiB"}, {}, "a pool of 9007199254740992 bytes .* does not fit"),
    ],
)
def test_spec_out_of_range_creates_nothing(tmp_path, tier, others, message):
    options = config_of(tmp_path).extra_config
    options["pool_path"] = str(tmp_path / "pool")
    options["tiers"] = [tier if "type" in tier else options["tiers"][0] | tier]
    with pytest.raises(ValueError, match=message):
        make_spec(config_of(tmp_path, **options | others)).get_manager()
    assert list(tmp_path.iterdir()) == []


def test_default_pool_differs_between_configurations(tmp_path):
    one, other = (make_spec(config_of(tmp_path, model_name=name))._identity() for name in ("a", "b"))
    assert one != other


def test_pool_in_use_has_agreed_size(tmp_path):
    path = Path(config_of(tmp_path).extra_config["pool_path"])
    path.write_bytes(bytes(5))
    path.chmod(0o600)
    try:
        with pytest.raises(ValueError, match="must have 32768 bytes, it has 5"):
            make_spec(config_of(tmp_path)).get_manager()
    finally:
        path.unlink()


def test_direct_io_works_from_shared_memory(manager, tmp_path):
    from kvcache.tiers.disk.tier import DiskOptions, DiskTier

    flat = np.zeros(3 * 8192, np.uint8)
    first = -flat.ctypes.data % 4096
    probe = DiskTier(
        DiskOptions(path=tmp_path / "probe", capacity=1 << 20), flat[first : first + 8192].reshape(1, 8192)
    )
    try:
        assert manager.controllers[0].tier.is_direct == probe.is_direct
    finally:
        probe.shutdown()
