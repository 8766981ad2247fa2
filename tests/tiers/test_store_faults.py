"""Every fault of a store, under load: no wrong byte, no late answer, no call that waits; traffic comes back."""

import os
from contextlib import ExitStack

import pytest
from store_faults import BLOCK_BYTES, NUM_HOST, MooncakeFaults, Traffic, ValkeyFaults, undisturbed
from stores import VALKEY_BINARY, blocks

FAULT_S = 0.9
pytestmark = pytest.mark.slow


@pytest.fixture
def stack():
    with ExitStack() as stack:
        yield stack


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind in (ValkeyFaults, MooncakeFaults) for name in kind.NAMES]
)
def test_fault_under_load(tmp_path, stack, kind, name):
    if kind is ValkeyFaults and VALKEY_BINARY is None:
        pytest.skip("needs valkey-server or redis-server")
    if kind is MooncakeFaults and os.environ.get("KVCACHE_EXPECT_STORES") != "1":
        pytest.importorskip("mooncake.store", exc_type=ImportError)
    faults = kind(tmp_path, stack)
    host = blocks(NUM_HOST, BLOCK_BYTES)
    traffic = Traffic(faults.open_tier(host), host)
    stack.callback(traffic.manager.shutdown)
    with undisturbed():
        traffic.warm_up()
        traffic.run_through(getattr(faults, name), FAULT_S, faults.LONGEST_JOB_S)
    traffic.check()
