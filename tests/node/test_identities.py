"""Engines that update their weights, reset, start and end in random order never load a block of other weights.

Each block holds the weights that wrote it and its writer. 1,000 steps in CI; ``KVCACHE_STRESS=10``: 10,000.
"""

import os
import random
import shutil
import time

import numpy as np
import pytest
from node_harness import prompt
from servers import ValkeyServer, find_valkey

from kvcache import TieredOffloadingManager
from kvcache.epoch import named

pytest.importorskip("xxhash")
NUM_STEPS = int(1000 * float(os.environ.get("KVCACHE_STRESS", "1")))
NUM_ENGINES, NUM_DOCUMENTS = 3, 6
CHECKPOINT = {"model": "m", "weights": "sha256:checkpoint"}
pytestmark = [pytest.mark.slow, pytest.mark.timeout(120 + NUM_STEPS / 10)]


class TieredEngine:
    """An engine over host memory, a directory of its own and a common server; `version` is its `weights_version`."""

    def __init__(self, place, number, version):
        from kvcache.tiers import valkey
        from kvcache.tiers.disk.tier import DiskOptions, DiskTier

        # Whether it soon notices that the server has lost the epoch.
        valkey._EPOCH_INTERVAL_S = (0.02, 5.0)[number % 2]
        self.rows = np.zeros((8, 4096), np.uint8)
        fingerprint = named(CHECKPOINT, version)
        path = place.folder / f"disk-{number}"
        tiers = [
            DiskTier(
                DiskOptions(path=path, capacity=DiskTier.capacity_for(16, 4096), preallocate=False),
                self.rows,
                fingerprint,
            ),
            valkey.ValkeyTier(valkey.ValkeyOptions(url=place.server.url, timeout_s=2.0), self.rows, fingerprint),
        ]
        self.manager = TieredOffloadingManager(16, 8, tiers)

    def find(self, keys, context):
        end_s = time.monotonic() + 10
        while (num_found := self.manager.lookup(keys, context)) is None and time.monotonic() < end_s:
            self.manager.on_schedule_end()
            time.sleep(0.0002)
        return num_found or 0

    def wait(self):
        self.manager.settle(5.0)


class Tiers:
    def __init__(self, folder):
        if find_valkey() is None:
            pytest.skip("needs valkey-server or redis-server")
        pytest.importorskip("valkey")
        self.folder, self.server = folder, ValkeyServer(folder)
        self.server.start()

    def disturb(self):
        self.server.kill()
        self.server.start()

    def close(self):
        self.server.kill()


class Run:
    """Engines by their number, the weights of each, and the blocks loaded; `names` are the weights with a version."""

    def __init__(self, place, seed):
        self.place, self.dice = place, random.Random(seed)
        self.engines, self.weights, self.names = {}, {}, {}
        # Requests of each engine that go on, perhaps over a reset: keys, context and the weights that computed them.
        self.running = {}
        self.last_weights = self.num_loaded = self.num_shared = self.num_after_reset = self.num_wrong = 0

    def step(self):
        number = self.dice.randrange(NUM_ENGINES)
        if number not in self.engines:
            return self.start(number)
        action = self.dice.random()
        if action < 0.08:
            self.update(number)
        elif action < 0.12:
            self.engines.pop(number).manager.shutdown()
        elif action < 0.125:
            self.place.disturb()
        else:
            self.serve(number)
        return None

    def start(self, number):
        version = self.dice.choice([None, None, *self.names])
        self.weights[number] = 0 if version is None else self.names[version]
        self.engines[number], self.running[number] = TieredEngine(self.place, number, version), []

    def update(self, number):
        """Update the weights of an engine, to new ones or to those of a version, and reset it once or twice."""
        manager = self.engines[number].manager
        version = self.dice.choice([None, "new", "new", *self.names])
        if version in (None, "new"):
            self.last_weights += 1
            weights = self.last_weights
            if version == "new":
                version = f"step {weights}"
                self.names[version] = weights
        else:
            weights = self.names[version]
        self.weights[number] = weights
        way = self.dice.randrange(3)
        if version is not None and way:
            manager.name_next_version(version)
        manager.reset_cache(version if not way else None)
        if way == 2:
            manager.reset_cache()
        while len(self.names) > 4:
            self.names.pop(next(iter(self.names)))

    def serve(self, number):
        engine, weights = self.engines[number], self.weights[number]
        manager, rows, running = engine.manager, engine.rows, self.running[number]
        keys, context = prompt(self.dice.randrange(NUM_DOCUMENTS), 3)
        manager.on_new_request(context)
        if self.dice.random() < 0.3:
            running.append((keys, context, weights))
            return
        num_found = engine.find(keys, context)
        if num_found:
            for block_id in manager.prepare_load(keys[:num_found], context).block_ids.tolist():
                wrote, writer = rows[block_id][:16].view(np.int64).tolist()
                self.num_loaded += 1
                self.num_shared += writer != number
                self.num_after_reset += weights > 0
                self.num_wrong += wrote != weights
            manager.complete_load(keys[:num_found], context)
        self.store(number, keys[num_found:], context, weights)
        while running and self.dice.random() < 0.3:
            self.store(number, *running.pop(self.dice.randrange(len(running))))

    def store(self, number, keys, context, weights):
        """Store the rest of a request's blocks, which `weights` computed, and end the request."""
        engine, manager, rows = self.engines[number], self.engines[number].manager, self.engines[number].rows
        output = manager.prepare_store(keys, context) if keys else None
        if output is not None:
            for block_id in output.store_spec.block_ids.tolist():
                rows[block_id][:16].view(np.int64)[:] = weights, number
            manager.complete_store(output.keys_to_store, context)
        manager.on_request_finished(context, use_positions=True)
        manager.on_schedule_end()
        if self.dice.random() < 0.5:
            engine.wait()


def test_no_block_of_other_weights(tmp_path, monkeypatch):
    place = Tiers(tmp_path)
    monkeypatch.setattr("kvcache.tiers.valkey._EPOCH_INTERVAL_S", 5.0)
    run = Run(place, seed=46)
    try:
        for _ in range(NUM_STEPS):
            run.step()
            assert run.num_wrong == 0
        print({name: count for name, count in vars(run).items() if name.startswith("num_")})
        # They load, share and go on after updates, or nothing was tested.
        assert min(run.num_loaded, run.num_shared, run.num_after_reset) > NUM_STEPS / 50
    finally:
        for engine in run.engines.values():
            engine.manager.shutdown()
        place.close()
        shutil.rmtree(tmp_path, ignore_errors=True)
