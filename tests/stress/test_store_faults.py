"""Run the faults of `tests/tiers` on real stores, one after the other, under continuous load."""

from __future__ import annotations

import os
import random
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "tiers"))
from store_faults import BLOCK_BYTES, NUM_HOST, MooncakeFaults, Traffic, ValkeyFaults, undisturbed
from stores import VALKEY_BINARY, blocks

SEED = int(os.environ.get("KVCACHE_SEED", "1"))


@pytest.mark.parametrize("kind", [ValkeyFaults, MooncakeFaults], ids=["valkey", "mooncake"])
def test_faults_one_after_the_other(tmp_path, budget, kind):
    if kind is ValkeyFaults and VALKEY_BINARY is None:
        pytest.skip("needs valkey-server or redis-server")
    if kind is MooncakeFaults:
        pytest.importorskip("mooncake.store", exc_type=ImportError)
    dice = random.Random(SEED)
    with ExitStack() as stack:
        faults = kind(tmp_path, stack)
        host = blocks(NUM_HOST, BLOCK_BYTES)
        traffic = Traffic(faults.open_tier(host), host, SEED)
        stack.callback(traffic.manager.shutdown)
        with undisturbed():
            traffic.warm_up()
            for _ in range(max(2, round(10 * budget))):
                name = dice.choice(kind.NAMES + (kind.SLOW_NAMES if budget >= 1 else ()))
                traffic.run_through(getattr(faults, name), dice.uniform(0.5, 2.0), faults.LONGEST_JOB_S)
        traffic.check()
