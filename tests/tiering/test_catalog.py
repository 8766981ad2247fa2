"""Catalogs against a model, the life of a tier step by step, and the rows of a codec."""

import random
import threading
import zlib

import numpy as np
import pytest
from stores import until

from kvcache import ReqContext
from kvcache.tiering import lifecycle
from kvcache.tiering.batch import BlockOutcome, TierBatch
from kvcache.tiering.catalog import Catalog, RemoteCatalog, SlotCatalog
from kvcache.tiering.codec import CannotEncodeError, Codec
from kvcache.tiering.codec_stage import CodecStage
from kvcache.tiering.existence import ExistenceCache
from kvcache.tiering.lifecycle import ControlSteps, Lifecycle, State

KEYS = [bytes([number]) * 4 for number in range(1, 13)]


class CatalogModel:
    """A SlotCatalog whose every answer is compared with the state of each key: written, held or bad."""

    def __init__(self, rng, policy):
        self.catalog, self.rng = SlotCatalog(6, policy, KEYS[:2], [4, 1]), rng
        self.states = dict.fromkeys(KEYS[:2], "held")
        self.slots = dict(zip(KEYS, [4, 1], strict=False))
        self.stores, self.loads, self.last_seq = [], [], 0

    def store(self, keys):
        placement = self.catalog.begin_store(keys)
        if placement is None:
            return
        for key in placement.evicted:
            assert self.states.pop(key) in ("held", "bad")
            del self.slots[key]
        busy = {key for job in (*self.stores, *self.loads) for key in job}
        again = {key for key in keys if self.states.get(key) == "bad" and key not in busy}
        absent = {key for key in keys if key not in self.states}
        # Only a policy that declines blocks leaves some out.
        assert again <= set(placement.keys) <= absent | again
        assert len(placement.keys) == len(absent | again) or self.catalog._keeps_paths
        assert placement.seqs == [*range(self.last_seq + 1, self.last_seq + 1 + len(placement.keys))]
        self.last_seq += len(placement.keys)
        for key, slot in zip(placement.keys, placement.slots, strict=True):
            assert self.slots.setdefault(key, slot) == slot
            self.states.setdefault(key, "written")
        assert len(set(self.slots.values())) == len(self.slots) <= 6
        if placement.keys:
            self.stores.append(placement.keys)

    def end_store(self, _):
        if self.stores:
            keys = self.stores.pop(self.rng.randrange(len(self.stores)))
            stored = [key for key in keys if self.rng.random() < 0.7]
            self.catalog.end_store(keys, stored)
            self.states.update(dict.fromkeys(stored, "held"))
            for key in keys:
                if self.states[key] == "written":
                    del self.states[key], self.slots[key]

    def load(self, keys):
        held, slots, missed = self.catalog.begin_load(keys)
        assert held == [key for key in keys if self.states.get(key) == "held"]
        assert (slots, sorted([*held, *missed])) == ([self.slots[key] for key in held], sorted(keys))
        self.loads.append(held)

    def end_load(self, _):
        if self.loads:
            self.catalog.end_load(self.loads.pop())

    def forget(self, keys):
        lost = [key for key in keys[:2] if self.states.get(key) == "held"]
        assert sorted(self.catalog.forget(keys[:2])) == sorted(lost)
        self.states.update(dict.fromkeys(lost, "bad"))

    def touch(self, keys):
        num_held = next((i for i, key in enumerate(keys) if self.states.get(key) != "held"), len(keys))
        assert self.catalog.touch(keys, ReqContext()) == [self.slots[key] for key in keys[:num_held]]
        self.last_seq += num_held
        assert self.catalog.last_seq == self.last_seq
        assert self.catalog.find(keys) == num_held
        assert self.catalog.num_held == list(self.states.values()).count("held")


@pytest.mark.parametrize("policy", ["lru", "gittins"])
def test_slot_catalog_agrees_with_its_model(policy):
    for seed in range(12):
        rng = random.Random(seed)
        model = CatalogModel(rng, policy)
        steps = [model.store, model.end_store, model.load, model.end_load, model.forget, model.touch]
        for _ in range(120):
            rng.choice(steps)(rng.sample(KEYS, rng.randint(1, 4)))


def test_policy_of_paths_gets_the_head_of_a_prompt_first():
    catalog, prompt = SlotCatalog(8, "gittins", [], ()), KEYS[:4]
    plain = SlotCatalog(8, "lru", [], ())
    assert catalog.begin_store(prompt[::-1]).keys == prompt
    assert plain.begin_store(prompt[::-1]).keys == prompt[::-1]


def test_query_takes_keys_until_a_thread_begins_it():
    queries, asked = [], []

    def exists(keys):
        asked.append(list(keys))
        return [True] * len(keys)

    catalog = RemoteCatalog(ExistenceCache(10.0, 10.0, 60.0, 100), exists, queries.append, 3)
    for key in KEYS[:5]:
        assert catalog.find([key]) is None
    queries[0].run()
    assert catalog.find(KEYS[5:6]) is None
    begun = catalog.begin_query(queries[1])
    assert catalog.find(KEYS[6:7]) is None
    begun(queries[1].keys)
    queries[2].run()
    assert asked == [KEYS[:3], KEYS[3:6], KEYS[6:7]]
    for query in queries:
        query.is_held = [True] * len(query.keys)
        query.end()
    assert catalog.find(KEYS[:7]) == 7


def test_only_the_last_reset_opens_a_tier(monkeypatch):
    monkeypatch.setattr(lifecycle, "RETRY_S", 0.001)
    gate, begun, errors = threading.Semaphore(0), [], []
    catalogs = {generation: Catalog() for generation in (1, 2, 3)}

    def clear(generation):
        begun.append(generation)
        gate.acquire()
        if errors:
            raise errors.pop()
        return catalogs[generation]

    steps = ControlSteps(lambda: gate.acquire() and Catalog(), clear, lambda: None, lambda: None)
    life = Lifecycle(steps, threading.RLock(), "test", None, lambda text: None)
    life.start(0.001)
    assert life.reason == "opening"
    # A reset while the tier opens.
    assert life.begin_reset("one")
    life.order_clear()
    gate.release()
    until(lambda: begun == [1])
    assert (life.state, life.reason) == (State.RESETTING, "reset under way")
    # Another one while the first is made durable.
    assert life.begin_reset("two")
    life.order_clear()
    gate.release()
    until(lambda: begun == [1, 2])
    assert (life.end_reset(), life.state) == (None, State.RESETTING)
    errors.append(OSError("read-only"))
    gate.release()
    until(lambda: life.reason == "reset failed: OSError: read-only")
    gate.release()
    until(life.end_reset)
    assert (life.state, life.reason, life.catalog) == (State.OPEN, "", catalogs[2])
    # A reset that is durable does not open the tier once another one has begun.
    gate.release()
    assert life.begin_reset("three")
    assert life.reason == "reset under way"
    life.order_clear()
    until(lambda: begun[-1] == 3)
    assert life.shut()
    assert not life.begin_reset("four")
    assert (life.generation, life.version, life.reason) == (3, "three", "shut down")
    life.join(10.0)


class PackingCodec(Codec):
    """Codes of many lengths; with `is_wrong` it decodes something else."""

    is_wrong = False
    max_bytes = 600
    fingerprint = {"codec": "packing"}  # noqa: RUF012

    def __init__(self):
        self.num_decoded = 0

    def encode(self, block, target):
        code = zlib.compress(block)
        if len(code) > len(target):
            raise CannotEncodeError
        target[: len(code)] = code
        return len(code)

    def decode(self, code, block):
        self.num_decoded += 1
        block[:] = bytes(len(block)) if self.is_wrong else zlib.decompress(code)


def test_codec_row_depends_on_its_block_alone_and_is_verified():
    rng, codec = np.random.default_rng(3), PackingCodec()
    host = np.zeros((4, 512), np.uint8)
    for i, length in enumerate((500, 60, 300, 8)):
        host[i, :length] = rng.integers(1, 256, length, np.uint8)
    used = CodecStage(codec, host, 1, 1)
    rows = {}

    def batch_of(i, is_load):
        return TierBatch(1, is_load, [KEYS[i]], [i], None, None, 0, host)

    def keep(batch):
        rows[batch.keys[0]] = bytes(batch.buffers[0])

    for i in range(4):
        CodecStage(codec, host, 1, 1).put(batch_of(i, is_load=False), keep)
        expected = dict(rows)
        used.put(batch_of(i, is_load=False), keep)
        assert rows == expected
    before, codec.num_decoded = host.copy(), 0
    host[:] = 0

    def fetch(batch, damaged=()):
        row = bytearray(rows[batch.keys[0]])
        for at in damaged:
            row[at] ^= 0xFF
        batch.buffers[0][:] = row

    for at in (0, 8, 9, 15, 16, 24, 40):
        assert used.get(batch_of(0, is_load=True), lambda batch, at=at: fetch(batch, [at])) == [BlockOutcome.CORRUPT]
    codec.num_decoded = 0
    assert used.get(batch_of(0, is_load=True), lambda batch: [BlockOutcome.ABSENT]) == [BlockOutcome.ABSENT]
    assert codec.num_decoded == 0
    assert used.get(batch_of(2, is_load=True), fetch) == [BlockOutcome.DONE]
    assert (host[2] == before[2]).all()
    codec.is_wrong = True
    assert used.get(batch_of(0, is_load=True), fetch) == [BlockOutcome.CORRUPT]
