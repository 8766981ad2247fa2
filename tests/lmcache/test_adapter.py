"""KVCacheL2 as LMCache's controllers call it: sizes, locks, capacity, restarts, damage, and a disk that fails."""

import errno
import inspect
import shutil
import subprocess
import sys
import threading
import time
from operator import attrgetter
from types import SimpleNamespace

import numpy as np
import pytest
from l2_harness import Harness, MemoryObject, answer, content, object_key
from lmcache.v1.distributed import l1_manager, storage_manager
from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig
from waiting import wait_until

from kvcache.integrations.lmcache import locks, names
from kvcache.tiers.disk.block_store import BlockStore
from kvcache.tiers.disk.slot_table import SlotTable

MIB = 1 << 20


def disk_bytes(path):
    return sum(entry.lstat().st_blocks * 512 for entry in [path, *path.rglob("*")])


def objects(numbers, num_bytes=MIB // 4, **names):
    return {object_key(n, **names): content([n, num_bytes, *map(ord, str(names))], num_bytes) for n in numbers}


def test_objects_of_all_names_come_back(harness, tmp_path):
    l2, every = harness(), {}
    names = [{}, {"model": "org-SEP-m"}, {"salt": "s" * 128}, {"rank": 7}, {"group": 3}, {"model": "m" * 4000}]
    for name in names:
        for stored in (objects(range(4), **name), objects(range(4, 8), 100_000, **name)):
            assert l2.store(stored) == sum(map(len, stored.values()))
            every.update(stored)
    assert l2.store(objects(range(4))) == 0  # held already
    salts = ("", "s" * 128)
    expected = {salt: sum(len(array) for key, array in every.items() if key.cache_salt == salt) for salt in salts}
    for _ in range(2):
        assert l2.look_up([object_key(99), *every, object_key(98)]) == list(range(1, len(every) + 1))
        assert l2.load(every) == list(range(len(every)))
        assert sorted(l2.keys(), key=repr) == sorted(every, key=repr)
        assert sorted(l2.keys(model="org-SEP-m"), key=repr) == sorted(list(every)[8:16], key=repr)
        assert l2.usage() == expected
        # As after a restart.
        l2.adapter.close()
        l2 = harness()
    assert l2.load({object_key(0): content(0, 100_000)}) == []  # of another size
    assert l2.store({**objects([9]), **objects([9], model="new")}) > 0
    # Each name has a line. Other users cannot read the file.
    assert sum(map(bool, (tmp_path / "l2" / "names").read_bytes().splitlines())) == len(names) + 1
    assert (tmp_path / "l2" / "names").stat().st_mode & 0o077 == 0


def test_capacity_holds_and_locked_objects_stay(harness, tmp_path):
    l2 = harness(capacity="24MiB")
    locked = objects(range(3))
    assert l2.store(locked) > 0
    assert l2.look_up(list(locked)) == [0, 1, 2]
    for first in range(3, 150, 7):
        numbers = range(first, first + 7)
        assert l2.store(objects(numbers)) > 0
        assert l2.store(objects(numbers, 3 * MIB // 8)) > 0
        assert disk_bytes(tmp_path / "l2") <= 24 * MIB
        assert sum(l2.usage().values()) <= 24 * MIB
        l2.load(objects(range(first, first + 2)))
    assert l2.load(locked) == [0, 1, 2]
    l2.adapter.delete(list(locked))
    assert l2.load(locked) == [0, 1, 2]
    l2.adapter.submit_unlock(list(locked))
    assert l2.adapter.report_status()["num_locked"] == 0
    assert l2.store(objects(range(200, 260))) > 0
    assert l2.load(locked) == []
    assert len(l2.keys()) == sum(size["num_held"] for size in l2.adapter.report_status()["sizes"].values())


def test_hot_objects_stay_after_restart(harness):
    l2 = harness(capacity="9MiB")
    hot = objects(range(8))
    for numbers in (range(8), range(8, 30)):
        assert l2.store(objects(numbers)) > 0
    assert l2.load(hot) == list(range(8))
    l2.adapter.close()
    l2 = harness(capacity="9MiB")
    assert l2.store(objects(range(30, 48))) > 0
    assert l2.load(hot) == list(range(8))


def test_deleted_objects_stay_away(harness):
    l2 = harness()
    kept, deleted = objects(range(4)), objects(range(4), salt="tenant")
    l2.store({**kept, **deleted})
    listener = Listener()
    l2.adapter.register_listener(listener)
    assert listener.keys == {*kept, *deleted}
    l2.adapter.delete([*deleted, object_key(77)])
    assert l2.load({**deleted, **objects([3])}) == [4]
    assert (listener.keys, listener.accessed) == (set(kept), [object_key(3)])
    for _ in range(2):
        assert l2.load({**kept, **deleted}) == [0, 1, 2, 3]
        assert l2.usage() == {"": MIB}
        l2.adapter.close()
        l2 = harness()
    l2.adapter.register_listener(listener)
    assert l2.store(deleted) == MIB
    assert listener.keys == {*kept, *deleted}
    assert l2.load(deleted) == [0, 1, 2, 3]


class Listener:
    """The keys that an adapter announced, as LMCache's eviction keeps them, and its events in order."""

    def __init__(self):
        self.keys, self.accessed, self.events = set(), [], []

    def on_l2_keys_stored(self, keys, sizes):
        self.keys.update(keys)
        self.events.append(("stored", set(keys)))

    def on_l2_keys_deleted(self, keys):
        self.keys.difference_update(keys)
        self.events.append(("deleted", set(keys)))

    def on_l2_keys_accessed(self, keys):
        assert set(keys) <= self.keys
        self.accessed += keys

    def take(self, adapter):
        """Return the events since the last call."""
        adapter.get_usage()
        events, self.events = self.events, []
        return events


def test_new_size_announces_its_difference(harness):
    l2, log = harness(capacity="24MiB"), Listener()
    l2.adapter.register_listener(log)
    small = objects(range(300), 4096)
    assert l2.store(small) > 0
    assert {key for kind, keys in log.take(l2.adapter) for key in keys if kind == "stored"} == set(small)
    # All small objects still fit beside the first object of another size.
    large = objects(range(1000, 1001), 8192)
    assert l2.store(large) > 0
    assert log.take(l2.adapter) == [("stored", set(large))]
    held = set(l2.keys())
    # Of a third size, whose objects take room from the others.
    huge = objects(range(2000, 2001))
    assert l2.store(huge) > 0
    deleted = held - set(l2.keys())
    assert 200 < len(deleted) < 300
    assert log.take(l2.adapter) == [("deleted", deleted), ("stored", set(huge))]
    assert l2.load(large | huge) == [0, 1]


def flip(data, slot_bytes):
    for start in range(0, len(data), slot_bytes):
        data[start + 1000] ^= 1


def swap(data, slot_bytes):
    data[: 4 * slot_bytes] = np.roll(data[: 4 * slot_bytes], slot_bytes)


def cut(data, slot_bytes):
    data[:] = 0


@pytest.mark.parametrize("damage", [flip, swap, cut])
@pytest.mark.parametrize("is_live", [True, False])
def test_damaged_objects_are_misses(harness, tmp_path, damage, is_live):
    l2, stored = harness(), objects(range(4))
    l2.store(stored)
    for _ in range(0 if is_live else 1):
        l2.adapter.close()
    data = np.memmap(tmp_path / "l2" / "objects-262144" / "data", np.uint8, "r+")
    damage(data, MIB // 4)
    data.flush()
    l2 = l2 if is_live else harness()
    l2.look_up(list(stored))  # a lock on damaged objects
    assert l2.load(stored) == []
    assert l2.usage() == {}
    assert l2.look_up(list(stored)) == []
    assert l2.store(stored) == MIB
    l2.adapter.submit_unlock(list(stored))
    assert l2.load(stored) == [0, 1, 2, 3]


@pytest.mark.parametrize("method", ["read_payload", "write_payload"])
def test_hanging_disk_ends_tasks(harness, monkeypatch, method):
    l2, gate = harness(deadline_s=0.3, pause_s=0.1), threading.Event()
    held, new = objects(range(4)), objects(range(4, 8))
    l2.store(held)
    move = getattr(BlockStore, method)
    monkeypatch.setattr(BlockStore, method, lambda *args: gate.wait(20) and move(*args))
    monkeypatch.setattr(BlockStore, "read_cached", lambda *_: False)
    start_s, buffers = time.monotonic(), [np.full(MIB // 4, 7, np.uint8) for _ in held]
    if method == "read_payload":
        task = l2.adapter.submit_load_task(list(held), list(map(MemoryObject, buffers)))
        assert answer(lambda: l2.adapter.query_load_result(task)).popcount() == 0
    else:
        memory = {key: array.copy() for key, array in new.items()}
        assert not l2.store(memory).is_successful()
        for array in memory.values():
            array[:] = 7  # LMCache uses its memory again, while the tier still writes
    assert time.monotonic() - start_s < 15, "waits for the gate"
    assert not l2.adapter.report_status()["is_healthy"]
    gate.set()
    time.sleep(0.3)
    assert all((buffer == 7).all() for buffer in buffers)
    l2.load(new)  # whole or missing
    wait_until(lambda: l2.load(held) == [0, 1, 2, 3] and l2.store(new).is_successful())
    assert l2.load(new) == [0, 1, 2, 3]


def test_hanging_deletes_end_after_deadline(harness, monkeypatch, tmp_path):
    l2, gate, held, new = harness(deadline_s=0.3), threading.Event(), objects(range(4)), objects([1], salt="b")
    assert l2.store(held) == MIB
    private = names._private
    monkeypatch.setattr(names, "_private", lambda *args: gate.wait(60) and private(*args))
    for salt in "ab":
        assert not l2.store(objects([1], salt=salt)).is_successful()
    assert l2.load(held) == [0, 1, 2, 3]
    assert l2.store(objects([9])) == MIB // 4
    with monkeypatch.context() as patch:
        patch.setattr(SlotTable, "void", lambda *args: gate.wait(60))
        patch.setattr(names.Names, "_load", lambda _: gate.wait(60))
        l2.adapter.delete([object_key(0)])
        with pytest.raises(ValueError, match="has not answered"):
            Harness(tmp_path / "hangs", deadline_s=0.3)
    gate.set()
    wait_until(lambda: l2.store(new).is_successful())
    assert l2.load(new) == [0]
    assert sorted(map(attrgetter("cache_salt"), l2.keys())) == [""] * 4 + ["b"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EFBIG])
def test_full_disk_fails_stores_only(harness, monkeypatch, number):
    l2, held = harness(pause_s=0.05), objects(range(4))
    l2.store(held)

    def refuse(*args):
        raise OSError(number, "no room")

    with monkeypatch.context() as patch:
        patch.setattr(BlockStore, "write_payload", refuse)
        assert not l2.store(objects(range(4, 8))).is_successful()
        assert l2.load(held) == [0, 1, 2, 3]
        assert l2.look_up([object_key(5)]) == []
    time.sleep(0.1)
    assert l2.store(objects(range(4, 8))) == MIB
    # A task of two sizes, of which only the last one can be written.
    write, both = BlockStore.write_payload, {**objects([10]), **objects([11], 100_000)}
    monkeypatch.setattr(
        BlockStore, "write_payload", lambda *args: refuse() if len(args[2][0]) > MIB // 5 else write(*args)
    )
    assert not l2.store(both).is_successful()
    assert l2.load(both) == [1]


def test_task_that_waited_too_long_fails(harness, monkeypatch):
    l2, held = harness(), objects(range(2))
    l2.store(held)
    monkeypatch.setattr("kvcache.integrations.lmcache.adapter._MAX_WAIT_S", 0.0)
    assert l2.load(held) == []
    assert not l2.store(objects(range(2, 4))).is_successful()


def test_removed_directory_is_reported(harness, tmp_path):
    l2, held = harness(flush_interval_s=0.05), objects(range(4))
    l2.store({**held, **objects([0], 100_000, salt="other")})
    shutil.rmtree(tmp_path / "l2" / "objects-262144")
    wait_until(lambda: not l2.adapter.report_status()["is_healthy"])
    shutil.rmtree(tmp_path / "l2")
    assert l2.look_up(list(held)) == []
    assert l2.load(held) == []
    assert not l2.store(objects(range(9))).is_successful()
    assert not l2.store(objects(range(9), 100_000, salt="new")).is_successful()
    l2.adapter.delete(list(held))


@pytest.mark.parametrize("num_steps", [1, 30])
def test_killed_process_leaves_what_it_answered(harness, tmp_path, num_steps):
    code = f"import sys; sys.path = {sys.path!r}; import l2_harness; l2_harness.store_and_delete(sys.argv[1])"
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "l2")], stdout=subprocess.PIPE) as process:
        steps = [process.stdout.readline().split() for _ in range(num_steps)]
        process.kill()
    l2, states, sizes = harness(), {int(number): step for step, number in steps}, (MIB // 4, 100_000)
    for number, step in states.items():
        # Without an answer, a deletion may have begun.
        if step == b"deleted" or number % 3:
            kept = l2.load({object_key(number, salt=str(number)): content(number, sizes[number % 2])})
            assert kept == [0] * (step == b"stored")
    listed = l2.keys()
    assert sum(l2.usage().values()) == sum(sizes[int(key.cache_salt) % 2] for key in listed)


def test_names_of_gone_objects_make_room(harness, tmp_path):
    l2 = harness(capacity="4MiB")
    for number in range(300):
        salt = f"{number:0>128}"
        assert l2.store(objects([number], salt=salt)) > 0
        assert l2.load(objects([0], salt=f"{0:0>128}")) == [0]
    assert (tmp_path / "l2" / "names").stat().st_size <= 4 * MIB // 128
    # Also a name that was dropped is written again.
    assert l2.store(objects([1], salt=f"{1:0>128}")) > 0
    for _ in range(2):
        assert len(l2.keys()) == l2.adapter.report_status()["sizes"]["262144"]["num_held"] > 8
        l2.adapter.close()
        l2 = harness(capacity="4MiB")


def test_damaged_names_lose_names_only(harness, tmp_path):
    l2, stored = harness(), objects(range(4))
    l2.store(stored)
    l2.adapter.close()
    lines = [b"[" * 100_000, bytes(1000), b"\xff[1]", b"null", b'[["m"], 1, 0, ""]', b"{}"]
    (tmp_path / "l2" / "names").write_bytes(b"\n".join(lines))
    l2, listener, new = harness(), Listener(), objects([5], salt="new")
    assert l2.load(stored) == [0, 1, 2, 3]
    l2.adapter.register_listener(listener)
    assert (l2.keys(), listener.keys) == ([], set())
    assert l2.store(new) > 0
    l2.adapter.close()
    assert harness().keys() == list(new)


def test_closed_adapter_takes_late_calls(harness):
    l2, stored = harness(), objects(range(2))
    l2.store(stored)
    l2.adapter.close()
    assert l2.look_up(list(stored)) == []
    l2.adapter.submit_load_task(list(stored), [None, None])
    l2.adapter.delete(list(stored))
    l2.adapter.submit_unlock(list(stored))


def test_directory_has_one_owner(harness, tmp_path):
    l2 = harness(capacity="24MiB")
    with pytest.raises(ValueError, match="another process uses it"):
        harness()
    for number in range(20):
        assert l2.store(objects([1], 4096 * (number + 1))).is_successful() == (number < 16)
    assert not l2.store(objects([2], 25 * MIB)).is_successful()
    assert len(l2.adapter.report_status()["sizes"]) == 16
    assert len(l2.adapter.report_status()["refused_sizes"]) == 5
    l2.adapter.close()
    # A start that fails leaves the directory to the next one.
    folder, aside = tmp_path / "l2" / "objects-65536", tmp_path / "aside"
    folder.rename(aside)
    folder.touch()
    with pytest.raises((OSError, ValueError), match="objects-65536"):
        harness()
    folder.unlink()
    aside.rename(folder)
    assert harness().load(objects([1], 4096)) == [0]


@pytest.fixture
def later(monkeypatch):
    """Return a function that lets time pass for locks."""
    passed_s = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + passed_s[0])
    monkeypatch.setattr(locks, "time", clock)
    return lambda seconds: passed_s.__setitem__(0, passed_s[0] + seconds)


def test_locks_of_dead_lookups_lapse(harness, later):
    l2 = harness(capacity="9MiB")
    numbers = range(l2.adapter._settings.num_slots([MIB // 4]))
    assert l2.store(objects(numbers)) > 0
    assert len(l2.look_up(list(objects(numbers)))) == len(numbers)
    status = l2.adapter.report_status()
    assert (status["num_locked"], status["lapsed_locks"]) == (len(numbers), 0)
    # Nothing can be stored, and the status is unhealthy.
    assert status["is_healthy"] is False
    assert l2.store(objects([900])) == -1
    later(299)
    assert l2.look_up([object_key(0)]) == [0]
    assert l2.adapter.report_status()["lapsed_locks"] == 0
    later(2)
    assert l2.store(objects([901])) > 0
    status = l2.adapter.report_status()
    # The lock of a look-up that may still live stays.
    assert (status["num_locked"], status["lapsed_locks"], status["is_healthy"]) == (1, len(numbers), True)
    l2.adapter.submit_unlock([object_key(0)])
    assert l2.adapter.report_status()["num_locked"] == 0


def test_unlock_ends_oldest_lock(harness, later):
    l2, key = harness(), object_key(0)
    l2.store(objects([0]))
    l2.look_up([key])
    later(200)
    l2.look_up([key])
    l2.adapter.submit_unlock([key])
    later(200)
    assert (l2.adapter.report_status()["num_locked"], l2.adapter.report_status()["lapsed_locks"]) == (1, 0)
    later(200)
    assert (l2.adapter.report_status()["num_locked"], l2.adapter.report_status()["lapsed_locks"]) == (0, 1)


def test_locks_last_as_long_as_lmcaches(tmp_path):
    """LMCache makes the adapter, for an L1 whose locks last 20 s."""
    config = PluginL2AdapterConfig(
        "kvcache.integrations.lmcache", "KVCacheL2", {"kind": "disk", "path": str(tmp_path), "capacity": "9MiB"}
    )
    l1 = SimpleNamespace(_read_ttl_seconds=20, get_l1_memory_desc=lambda: None)
    maker = SimpleNamespace(_l1_by_tag={config.affinity_tag: l1}, _next_adapter_id=0)
    _, adapter, _ = storage_manager.StorageManager._build_l2_adapter(maker, config)
    assert adapter._locks._ttl_s == 20
    adapter.close()
    assert "self._read_ttl_seconds = config.read_ttl_seconds" in inspect.getsource(l1_manager.L1Manager)
