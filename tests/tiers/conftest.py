"""A disk tier under test with its pool and the blocks in it; stores of more than one file."""

import importlib
import json
import mmap
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from servers import ValkeyServer, find_valkey

# For `stores`, which more than one module here needs.
sys.path.insert(0, str(Path(__file__).parent))

BLOCK_BYTES = 4096
NUM_HOST = 64


class DiskBench:
    """Open disk tiers in `path`, store and load blocks whose payload follows from their key."""

    def __init__(self, path, opened):
        self.path = path
        self.opened = opened

    def open(self, num_blocks=16, path=None, block_bytes=BLOCK_BYTES, **options):
        # Here, where a missing package skips the test: not where the folder is collected.
        from kvcache.tiers.disk.header import capacity_for
        from kvcache.tiers.disk.tier import DiskOptions, DiskTier

        blocks = options.pop("host_blocks", None)
        blocks = self.host_blocks(block_bytes) if blocks is None else blocks
        fingerprint = options.pop("fingerprint", None)
        options = DiskOptions(path=path or self.path, capacity=capacity_for(num_blocks, block_bytes), **options)
        tier = DiskTier(options, blocks, fingerprint)
        self.opened.append(tier)
        return tier

    def leave(self, *numbers, **options):
        """Store keys in a tier that is shut down then."""
        from stores import store

        tier = self.open(**options)
        store(tier, self.keys(*numbers))
        tier.shutdown()

    def edit_header(self, **changes):
        header = self.path / "kvcache.json"
        header.write_text(json.dumps(json.loads(header.read_text()) | changes))

    @staticmethod
    def host_blocks(block_bytes=BLOCK_BYTES):
        stride = -(-block_bytes // 4096) * 4096
        flat = np.frombuffer(mmap.mmap(-1, NUM_HOST * stride), np.uint8)
        return flat.reshape(NUM_HOST, stride)[:, :block_bytes]

    @staticmethod
    def keys(*numbers):
        return [f"key-{number}".encode() for number in numbers]


@pytest.fixture
def opened():
    """The list of a test's open tiers, which are shut down after it."""
    tiers = []
    yield tiers
    for tier in tiers:
        tier.shutdown()


@pytest.fixture
def make_valkey(tmp_path):
    """Start real servers of Valkey or Redis."""
    if find_valkey() is None:
        pytest.skip("needs valkey-server or redis-server")
    servers = []

    def make(*options):
        servers.append(ValkeyServer(tmp_path, *options))
        servers[-1].start()
        servers[-1].place = {"url": servers[-1].url}
        return servers[-1]

    yield make
    for server in servers:
        server.kill()


@pytest.fixture(scope="session")
def native():
    """The class of Mooncake's real clients."""
    try:
        return importlib.import_module("mooncake.store").MooncakeDistributedStore
    except ImportError as error:
        if os.environ.get("KVCACHE_EXPECT_STORES") == "1":
            raise
        pytest.skip(f"needs the extra 'mooncake': {error}")


@pytest.fixture
def local_mooncake(monkeypatch):
    """A store of Mooncake in this process, whose master closes each connection."""
    from local_stores import MOONCAKE, STORES, Faulty, LocalMooncake
    from stores import Impostor

    from kvcache.tiers import mooncake

    master, faults = Impostor(b""), Faulty()
    monkeypatch.setattr(mooncake, "load_client", lambda _: MOONCAKE)
    monkeypatch.setattr(mooncake, "_idle_clients", {})
    monkeypatch.setattr(LocalMooncake, "faults", faults)
    faults.master = f"127.0.0.1:{master.port}"
    # Only a real client must miss it, so a loaded machine has time.
    faults.place = {"master": faults.master, "timeout_s": 20.0, "soft_pin": True, "soft_pin_ttl_s": 60.0}
    faults.values, faults.kill, faults.client_type = STORES[faults.master, "default"], master.close, LocalMooncake
    yield faults
    master.close()


@pytest.fixture
def bench(tmp_path, opened, open_files):
    yield DiskBench(tmp_path / "tier", opened)
    for tier in opened:
        tier.shutdown()
    assert open_files() == []


@pytest.fixture
def tier(bench):
    """A disk tier of 16 blocks."""
    return bench.open()
