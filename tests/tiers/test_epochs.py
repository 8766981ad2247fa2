"""No engine loads a block of other weights, whatever engines and servers do meanwhile.

Four processes reset their tier or start a new one, and the server is restarted empty. 1,000 resets and starts in CI;
``KVCACHE_STRESS=10`` makes it 10,000.
"""

import multiprocessing
import os
import random
import time
from types import SimpleNamespace

import numpy as np
import pytest
from stores import (
    KEYS,
    VALKEY_BINARY,
    ValkeyServer,
    blocks,
    load_as_is,
    store_as_is,
    wait_for_reset,
)

from kvcache.tiers import valkey

NUM_ENGINES = 4
NUM_ROUNDS = int(1000 * float(os.environ.get("KVCACHE_STRESS", "1")))
ROUNDS_PER_SERVER = 50
LIMIT_S = 60 + NUM_ROUNDS / 5
pytestmark = pytest.mark.slow


def add(counter, number):
    with counter.get_lock():
        counter.value += number
        return counter.value


def run_engine(engine, url, counts):
    """Reset or start again, store, load. A block holds its writer, and the identity of its writer's weights."""
    dice = random.Random(engine)
    host = blocks(8, 64)
    words = host.view(np.int64)
    tier = None
    job_id = 0
    while counts.rounds.value < NUM_ROUNDS:
        if tier is not None and dice.random() < 0.5:
            tier.reset()
            # Not until it is available: stores that failed without a server keep it unavailable until one succeeds.
            wait_for_reset(tier)
            identity = add(counts.resets, 1)
        else:
            if tier is not None:
                tier.shutdown()
            # Whether it soon notices that the server has lost the epoch.
            valkey._EPOCH_INTERVAL_S = dice.choice([0.02, 5.0])
            tier = valkey.ValkeyTier(url, host, fingerprint={"model": "m"}, timeout_s=2.0)
            identity = 0
        # It may have found no server. Once a store has succeeded it has an epoch.
        while store_as_is(tier, [b"engine %d" % engine], job_id).error:
            job_id += 1
            time.sleep(0.02)
        for _ in range(4):
            job_id += 2
            words[:, 0], words[:, 1] = identity, engine
            store_as_is(tier, dice.sample(KEYS[:16], 8), job_id)
            keys = dice.sample(KEYS[:16], 8)
            words[:] = -1
            done = set(load_as_is(tier, keys, job_id + 1).done)
            for i, key in enumerate(keys):
                if key in done:
                    add(counts.foreign, int(words[i, 0] != identity))
                    add(counts.loaded_from_others, int(words[i, 1] != engine))
        add(counts.rounds, 1)
    if tier is not None:
        tier.shutdown()


@pytest.mark.timeout(LIMIT_S + 60)
def test_blocks_of_other_weights_stay_apart(tmp_path):
    if VALKEY_BINARY is None:
        pytest.skip("needs valkey-server or redis-server")
    server = ValkeyServer(tmp_path)
    server.start()
    context = multiprocessing.get_context("spawn")
    # Each reset makes an identity of its own; engines that start share that of the fingerprint, 0.
    names = ("resets", "rounds", "loaded_from_others", "foreign")
    counts = SimpleNamespace(**{name: context.Value("q", 0) for name in names})
    engines = [
        context.Process(target=run_engine, args=(number, server.url, counts), daemon=True)
        for number in range(NUM_ENGINES)
    ]
    end_s = time.monotonic() + LIMIT_S
    num_servers = 1
    try:
        for engine in engines:
            engine.start()
        while any(engine.is_alive() for engine in engines):
            assert time.monotonic() < end_s, f"{counts.rounds.value} rounds of {NUM_ROUNDS}"
            if counts.rounds.value >= num_servers * ROUNDS_PER_SERVER:
                num_servers += 1
                server.kill()
                server.start()
            time.sleep(0.01)
    finally:
        for engine in engines:
            if engine.is_alive():
                engine.kill()
            engine.join()
        server.kill()
    assert [engine.exitcode for engine in engines] == [0] * NUM_ENGINES
    assert num_servers > NUM_ROUNDS // ROUNDS_PER_SERVER
    # They do share, or nothing was tested.
    assert counts.loaded_from_others.value > NUM_ROUNDS
    assert counts.foreign.value == 0
