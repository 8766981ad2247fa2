"""Every fault of a store, under load: no wrong byte, no late answer, no call that waits; traffic comes back."""

import os
from contextlib import ExitStack

import pytest
from local_stores import FaultyS3
from store_faults import BLOCK_BYTES, NUM_HOST, MooncakeFaults, S3Faults, Traffic, ValkeyFaults, undisturbed
from stores import VALKEY_BINARY, blocks, set_credentials

FAULT_S = 0.9
NUM_SPOILT = int(os.environ.get("KVCACHE_SPOILT_ANSWERS", "2000"))
pytestmark = pytest.mark.slow


@pytest.fixture
def stack():
    with ExitStack() as stack:
        yield stack


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind in (ValkeyFaults, MooncakeFaults, S3Faults) for name in kind.NAMES]
)
def test_fault_under_load(tmp_path, stack, monkeypatch, kind, name):
    if kind is ValkeyFaults and VALKEY_BINARY is None:
        pytest.skip("needs valkey-server or redis-server")
    if kind is MooncakeFaults and os.environ.get("KVCACHE_EXPECT_STORES") != "1":
        pytest.importorskip("mooncake.store", exc_type=ImportError)
    set_credentials(monkeypatch)
    faults = kind(tmp_path, stack)
    host = blocks(NUM_HOST, BLOCK_BYTES)
    traffic = Traffic(faults.open_tier(host), host)
    stack.callback(traffic.manager.shutdown)
    with undisturbed():
        traffic.warm_up()
        traffic.run_through(faults.begin(name), FAULT_S, faults.LONGEST_JOB_S)
    traffic.check()


def test_spoilt_answers_of_bucket_are_misses(stack, monkeypatch):
    set_credentials(monkeypatch)
    from kvcache.tiers.s3 import S3Options, S3Tier

    server = FaultyS3(share=0.2)
    stack.callback(server.close)
    host = blocks(NUM_HOST, BLOCK_BYTES)
    traffic = Traffic(S3Tier(S3Options(**server.place, timeout_s=0.4), host), host, max_failures=1 << 20)
    stack.callback(traffic.manager.shutdown)
    with undisturbed():
        traffic.run_until(lambda: server.num_faults >= NUM_SPOILT, limit_s=200.0)
        before = traffic.counts()
    assert min(before) > 100, "blocks are loaded and stored in spite of them"
    traffic.check()
