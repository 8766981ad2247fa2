"""What every shared store has from its base, on the store of docs/howto/tier.md: a dict in another process."""

import hashlib
import re
import struct
import time
from multiprocessing import Manager
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import numpy as np
import pytest
import xxhash
from blake3 import blake3
from stores import KEYS, Clock, StoreContract, blocks, found, load, load_as_is, store, until, wait_for_reset

from kvcache.tiers import shared_store
from kvcache.tiers.shared_store import SEAL_BYTES, Namespace

PAGE = Path(__file__).resolve().parents[2] / "docs" / "howto" / "tier.md"


def shown_class():
    """Return the class that the page shows."""
    (code,) = [
        code for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S) if "SharedStoreTier)" in code
    ]
    assert len(code.splitlines()) <= 60
    names = {}
    exec(compile(code, str(PAGE), "exec"), names)
    return names["DictStoreTier"]


DictStoreTier = shown_class()
DictStoreOptions = DictStoreTier.options_type


@pytest.fixture(scope="module")
def process():
    """A process that keeps dicts."""
    with Manager() as manager:
        yield manager


class TestDictStoreTier(StoreContract):
    tier_type = DictStoreTier

    @pytest.fixture(autouse=True)
    def shared_dict(self, process):
        self.place = {"shared_dict": process.dict()}


@pytest.fixture
def values():
    """The store's values, in this process: a test can change them."""
    return {}


@pytest.fixture
def open_engine(values, opened):
    def open_one(weights=None, **options):
        fingerprint = {"model": "m"} | ({} if weights is None else {"weights": weights})
        opened.append(DictStoreTier(DictStoreOptions(shared_dict=values, **options), blocks(), fingerprint))
        return opened[-1]

    return open_one


def reset_all(engines, *versions):
    for engine, version in zip(engines, versions, strict=True):
        engine.reset(version)
        wait_for_reset(engine)


LONG = "step-1/" * 10
DIGEST = hashlib.sha256(LONG.encode()).hexdigest()


@pytest.mark.parametrize(
    ("versions", "names"),
    [
        ((7, "7", 7), "aaa"),
        ((None, None, "v7", "None"), "abcd"),
        ((LONG, LONG, DIGEST, f"sha256:{DIGEST}"), "aabc"),
    ],
)
def test_engines_share_blocks_of_one_version(open_engine, versions, names):
    engines = [open_engine() for _ in versions]
    reset_all(engines, *versions)
    store(engines[0], KEYS[:4])
    assert [found(engine, KEYS[:4]) for engine in engines] == [4 * (name == "a") for name in names]
    reset_all(engines, *reversed(versions))
    held = [4 * (name == "a" and versions[0] is not None) for name in reversed(names)]
    assert [len(load(engine, KEYS[:4]).done) for engine in engines] == held


def test_late_engine_keeps_blocks_of_version(open_engine):
    early, late = open_engine(), open_engine()
    store(late, KEYS[:2])
    reset_all([early], "step 8")
    store(early, KEYS[2:4])
    reset_all([late], "step 8")
    assert [found(engine, keys) for engine in (early, late) for keys in (KEYS[2:4], KEYS[:2])] == [2, 0, 2, 0]


def test_reset_deletes_left_private_epoch_only(open_engine, values):
    first, second = open_engine(), open_engine()
    store(first, KEYS[:4])
    reset_all([first], None)
    store(first, KEYS[:3])
    assert len(values) == 1 + 4 + 3
    reset_all([first], "v7")
    assert (first.stats().undeleted_blocks, first._life.maintain(60), first.stats().undeleted_blocks) == (3, True, 0)
    assert (len(values), found(second, KEYS[:4])) == (1 + 4, 4)
    store(first, KEYS[:2])
    reset_all([first], "v8")
    reset_all([second], "v7")
    assert first._life.maintain(60)
    assert (len(values), found(second, KEYS[:4])) == (1 + 4 + 2, 2)


def test_weights_have_epochs_of_their_own(open_engine):
    engines = [open_engine(weights) for weights in (None, "sha256:a", "sha256:b", "version:7", "sha256:a")]
    for count, engine in enumerate(engines[:4], 1):
        store(engine, KEYS[:count])
    assert [found(engine, KEYS[:8]) for engine in engines] == [1, 2, 3, 4, 2]
    # From the files or by a reset: one name is one epoch.
    reset_all(engines[:1], 7)
    assert [found(engine, KEYS[:8]) for engine in engines] == [4, 2, 3, 4, 2]
    reset_all(engines[1:3], None, None)
    assert [found(engine, KEYS[:8]) for engine in (*engines, open_engine("sha256:b"))] == [4, 0, 0, 4, 2, 3]


def test_salt_separates_epochs_of_one_version(open_engine, values):
    engines = [open_engine(salt=salt) for salt in ("a", "b")]
    reset_all(engines, "v7", "v7")
    assert len({engine.epoch for engine in engines}) == 2


@pytest.mark.parametrize("step", ["_join_epoch", "put_values"])
def test_store_overtaken_by_reset_is_refused(open_engine, values, monkeypatch, step):
    """An old block gets no new name. The reset has deleted the old names before the block is written under one."""
    engine, other = open_engine(), open_engine()
    store(other, KEYS[2:3])
    reset_all([engine], None)
    method, delete_values, old, deleted = getattr(DictStoreTier, step), DictStoreTier.delete_values, engine.epoch, []

    def reset_first(self, *args):
        if self.epoch == old:
            self.reset(8)
            until(lambda: self.epoch != old)
            assert self._life.maintain(60)
        return method(self, *args)

    def delete(self, names):
        deleted.extend(name in values for name in names)
        delete_values(self, names)

    monkeypatch.setattr(DictStoreTier, step, reset_first)
    monkeypatch.setattr(DictStoreTier, "delete_values", delete)
    result = store(engine, KEYS[:2])
    assert (result.done, sorted(result.failed), deleted) == ([], KEYS[:2], [True] * (2 * (step == "put_values")))
    wait_for_reset(engine)
    assert list(values) == [engine.epoch_name, other.store_name(KEYS[2])]


@pytest.mark.parametrize("error", [OSError, PermissionError, ValueError, MemoryError])
def test_failed_deletion_waits_ever_longer(open_engine, values, monkeypatch, caplog, error):
    """An engine serves as before; one epoch that cannot be deleted does not keep the others, and is counted."""
    clock, tries, delete_older = Clock(), [], DictStoreTier.delete_older
    monkeypatch.setattr(shared_store, "time", SimpleNamespace(monotonic=clock))
    engine = open_engine()
    reset_all([engine], None)
    odd = engine.epoch.encode()
    assert store(engine, KEYS[:4]).failed == []

    def fail(self, prefix):
        tries.append(clock.now_s)
        if odd in prefix:
            raise error("not now")
        delete_older(self, prefix)

    monkeypatch.setattr(DictStoreTier, "delete_older", fail)
    reset_all([engine], None)
    store(engine, KEYS[:2])
    reset_all([engine], "v7")
    assert (store(engine, KEYS[:3]).failed, load(engine, KEYS[:3]).done, tries) == ([], KEYS[:3], [])
    for _ in range(9):
        assert engine._life.maintain(60)
        clock.now_s += 5
    # The other epoch's turn comes with the second try, whose success ends the pauses.
    assert (tries, engine.stats().undeleted_blocks) == ([100, 110, 110, 120, 140], 4)
    assert len([name for name in values if odd in name]) == 4
    assert (len(caplog.records), engine.stats().io_errors) == (1, 4)
    assert load(engine, KEYS[:3], 7).done == KEYS[:3]


def test_bytes_under_way_are_bounded(open_engine):
    assert open_engine(max_queued_bytes=9 * 4096 - 1).max_queued_blocks == 8
    assert store(open_engine(max_queued_bytes=1), KEYS[:1]).done == KEYS[:1]


def test_reset_needs_no_store(open_engine, monkeypatch):
    engine = open_engine()
    reset_all([engine], None)
    store(engine, KEYS[:4])
    for name in ("connect", "read_epoch", "announce_epoch", "delete_older", "delete_values"):
        monkeypatch.setattr(DictStoreTier, name, lambda *_: 1 / 0)
    reset_all([engine, engine], None, 8)
    assert found(engine, KEYS[:4]) == 0
    assert store(engine, KEYS[:4]).failed == []


@pytest.mark.parametrize("salt", ["", "secret"])
def test_announced_epoch_of_others_loads_nothing(open_engine, values, salt):
    """A client that may write names may send an engine to blocks of other weights, but they do not verify there."""
    other, name = open_engine("b", salt=salt), open_engine("a", salt=salt).epoch_name
    store(other, KEYS[:4])
    values[name] = other.epoch
    redirected = open_engine("a", salt=salt)
    assert load(redirected, KEYS[:2]).done == []
    assert redirected.stats().corrupt_blocks == 2
    # In an epoch of an operator's choice engines of the same weights share as before.
    values[name] = "an operator's"
    engines = [open_engine("a", salt=salt) for _ in range(2)]
    store(engines[0], KEYS)
    assert load(engines[1], KEYS).done == KEYS


@pytest.mark.parametrize("salt", ["", "0123456789abcdef"])
def test_forged_values_are_never_accepted(open_engine, values, salt):
    """A client may know all values, their names and this source code."""
    engine = open_engine(salt=salt)
    store(engine, KEYS)
    old = [values[engine.store_name(key)] for key in KEYS]
    reset_all([engine], None)
    store(engine, KEYS, 3)
    names, dice = [engine.store_name(key) for key in KEYS], np.random.default_rng(0)
    own, digest = [values[name] for name in names], bytes.fromhex(engine.prefix.split(b":")[1].decode())
    for i, name in enumerate(names):
        payload = dice.bytes(engine.block_bytes)
        body = struct.pack("<IQ", len(name), len(payload)) + name + payload
        bit = 1 << int(dice.integers(8 * len(own[i])))
        values[name] = (
            own[i][:SEAL_BYTES] + payload,
            # The seal of another name, and of an older epoch.
            own[i - 1],
            old[i],
            # The seed of the first format stood in each name.
            xxhash.xxh3_128(body, int.from_bytes(digest[:8], "big")).digest() + payload,
            xxhash.xxh3_128(body, 0).digest() + payload,
            blake3(body, key=digest * 2).digest(SEAL_BYTES) + payload,
            Namespace(b"dict store 1", {}, engine.block_bytes, "").seal(name, payload) + payload,
            (int.from_bytes(own[i], "big") ^ bit).to_bytes(len(own[i]), "big"),
        )[i % 8]
    assert (load_as_is(engine, KEYS, 4).done, engine.stats().corrupt_blocks) == ([], len(KEYS))
    assert (store(engine, KEYS, 5).failed, load(engine, KEYS, 6).done) == ([], KEYS)


def test_lost_epoch_is_announced_again(open_engine, values):
    engine, other = open_engine(), open_engine()
    store(engine, KEYS[:3])
    reset_all([other], None)
    before = values.pop(engine.epoch_name)
    other.maintain()
    assert values[engine.epoch_name] == before
    assert found(open_engine(), KEYS[:3]) == found(engine, KEYS[:3]) == 3


def test_epoch_of_faster_engine_stays(open_engine, values, monkeypatch):
    """An epoch that another engine announces between two calls of this one is not replaced."""
    engine, name = open_engine(), open_engine().epoch_name
    values[name] = "another"
    monkeypatch.setattr(DictStoreTier, "read_epoch", lambda _: None)
    engine.maintain()
    assert values[name] == "another"
    late = open_engine()
    assert "does not keep the epoch" in store(late, KEYS[:1]).error
    assert values[name] == "another"


def test_engine_starts_without_its_store(open_engine, values, monkeypatch):
    def refuse(self):
        raise OSError("no store")

    monkeypatch.setattr(DictStoreTier, "read_epoch", refuse)
    engine = open_engine()
    assert store(engine, KEYS[:2]).error == "OSError: no store"
    # Threads that start with its first answer share an epoch: another engine may be reset in between.
    epochs = iter(("one", "another"))
    monkeypatch.setattr(DictStoreTier, "read_epoch", lambda _: next(epochs))
    threads = [Thread(target=engine._join_epoch) for _ in range(2)]
    with engine._epoch_lock:
        for thread in threads:
            thread.start()
        time.sleep(0.05)
    for thread in threads:
        thread.join()
    assert (engine.epoch, next(epochs)) == ("one", "another")
    monkeypatch.undo()
    assert sorted(store(engine, KEYS[:2]).done) == KEYS[:2]
