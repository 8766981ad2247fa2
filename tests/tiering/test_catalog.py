"""Catalogs against a model, and the life of a tier step by step."""

import random
import threading
from types import SimpleNamespace

import pytest
from stores import until

from kvcache import ReqContext
from kvcache.tiers.base import catalog as catalog_module
from kvcache.tiers.base import lifecycle
from kvcache.tiers.base.batch import Counts
from kvcache.tiers.base.catalog import Catalog, RemoteCatalog, SlotCatalog
from kvcache.tiers.base.io_threads import IOThreads
from kvcache.tiers.base.lifecycle import Lifecycle, State

KEYS = [bytes([number]) * 4 for number in range(1, 13)]


class CatalogModel:
    """A SlotCatalog whose every answer is compared with the state of each key: written, held or bad."""

    def __init__(self, rng, policy):
        self.catalog, self.rng = SlotCatalog(6, policy, KEYS[:2], [4, 1]), rng
        self.states = dict.fromkeys(KEYS[:2], "held")
        self.slots = dict(zip(KEYS, [4, 1], strict=False))
        self.stores, self.loads, self.last_seq = [], [], 0
        self.deleted = set()

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
        self.deleted -= {*placement.keys, *placement.evicted}
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
                elif self.states[key] == "bad":
                    self.deleted.add(key)

    def load(self, keys):
        held, slots, _, missed, _ = self.catalog.begin_load(keys)
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

    def delete(self, keys):
        held = [key for key in keys[:2] if self.states.get(key) == "held"]
        assert self.catalog.delete(keys[:2]) == held
        self.states.update(dict.fromkeys(held, "bad"))
        self.deleted.update(held)

    def erase(self, _):
        """Blocks that are being read are erased, too."""
        keys, slots = self.catalog.begin_erase()
        assert (set(keys), slots) == (self.deleted, [self.slots[key] for key in keys])
        is_erased = self.rng.random() < 0.7
        self.catalog.end_erase(keys, is_erased)
        self.deleted -= set(keys) if is_erased else set()

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
        steps += [model.delete, model.erase]
        for _ in range(120):
            rng.choice(steps)(rng.sample(KEYS, rng.randint(1, 4)))


def test_policy_of_paths_gets_head_first():
    catalog, prompt = SlotCatalog(8, "gittins", [], ()), KEYS[:4]
    plain = SlotCatalog(8, "lru", [], ())
    assert catalog.begin_store(prompt[::-1]).keys == prompt
    assert plain.begin_store(prompt[::-1]).keys == prompt[::-1]


def test_found_blocks_leave_oldest_first():
    """Blocks that a restart found, least recent first, leave a policy that keeps paths in this order, too."""
    catalog = SlotCatalog(4, "gittins", KEYS[:4], [3, 1, 0, 2])
    evicted = []
    for key in KEYS[4:7]:
        for _ in range(2):  # used again, so it is worth more than blocks of unknown use
            catalog.touch([key], ReqContext())
        placement = catalog.begin_store([key])
        evicted += placement.evicted
        catalog.end_store(placement.keys, placement.keys)
    assert evicted == KEYS[:3]
    assert catalog.begin_load([KEYS[3]]).slots == [2]


def test_deleted_block_stored_again_stays():
    catalog = SlotCatalog(2, "lru", KEYS[:2], [0, 1])
    catalog.delete(KEYS[1:2])
    catalog.end_store(catalog.begin_store(KEYS[1:2]).keys, KEYS[1:2])
    assert catalog.begin_store(KEYS[2:3]).evicted == KEYS[:1]
    # A key that a job names twice is written once.
    catalog.forget(KEYS[1:2], KEYS[1:2])
    assert catalog.begin_store(KEYS[1:2] * 2).keys == KEYS[1:2]


def test_query_takes_keys_that_wait(monkeypatch):
    monkeypatch.setattr(catalog_module, "MAX_QUERY_KEYS", 4)
    queries, asked = [], []

    def exists(keys):
        asked.append(list(keys))
        return [True] * len(keys)

    catalog = RemoteCatalog(exists, queries.append, 10.0, 60.0)
    for key in KEYS[:5]:
        assert catalog.find([key]) is None
    queries[0].run()
    assert catalog.find(KEYS[5:7]) is None
    for query in queries[1:]:
        query.run()
    assert asked == [KEYS[:4], KEYS[4:7]]
    for query in queries:
        query.end()
    assert catalog.find(KEYS[:7]) == 7
    # A late answer makes no corrupt block whole.
    catalog.forget(KEYS[:1], KEYS[:1])
    queries[0].end()
    assert (catalog.find(KEYS[:1]), catalog.begin_store(KEYS[:2]).keys) == (0, KEYS[:1])


def test_last_reset_opens_tier(monkeypatch):
    monkeypatch.setattr(lifecycle, "RETRY_S", 0.001)
    gate, begun, errors = threading.Semaphore(0), [], []
    catalogs = {generation: Catalog() for generation in (1, 2, 3)}

    def clear(generation):
        begun.append(generation)
        gate.acquire()
        if errors:
            raise errors.pop()
        made.append(catalogs[generation])

    def nothing(*_):
        pass

    made = [Catalog()]
    medium = SimpleNamespace(
        medium="TEST", num_blocks=0, open=gate.acquire, clear=clear, maintain=nothing, close=nothing
    )
    life = Lifecycle(medium, lambda *_: made[-1], IOThreads(1, "test"), threading.RLock(), None, Counts())
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
