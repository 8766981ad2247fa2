"""KeyedStore: whole blocks, from many threads, over small, full, hanging and reopened tiers."""

import os
import shutil
import threading
from dataclasses import replace

import numpy as np
import pytest
from waiting import wait_until

pytest.importorskip("xxhash")

from local_stores import LocalValkey

from kvcache.assembly.assemble import open_store, parse_tier
from kvcache.testing.tiers import ManualTier
from kvcache.tiering.controller import TierConfig
from kvcache.tiering.store import KeyedStore
from kvcache.tiers.base.tier import MAX_STEP_BLOCKS
from kvcache.tiers.disk.block_store import BlockStore
from kvcache.tiers.disk.slot_table import SlotTable
from kvcache.tiers.disk.tier import DiskTier
from kvcache.tiers.memory import MemoryOptions, MemoryTier

BLOCK_BYTES = 5000
SPLIT = 1700  # a block is two buffers of different size


def disk(path, num_blocks=64, **options):
    capacity = DiskTier.capacity_for(num_blocks, 8192)
    entry = {"type": "disk", "path": str(path), "capacity": capacity, **options}
    return open_store(parse_tier(entry), BLOCK_BYTES, {"model": "m"})


def key_of(number):
    return b"key%d" % number


def block_of(number):
    return np.random.default_rng(number).integers(0, 256, BLOCK_BYTES, np.uint8)


def put(store, numbers):
    blocks = [block_of(number) for number in numbers]
    return store.put([key_of(n) for n in numbers], [[block[:SPLIT], block[SPLIT:]] for block in blocks])


def get(store, numbers):
    """Load blocks; return which came, all of them verified here."""
    blocks = [np.zeros(BLOCK_BYTES, np.uint8) for _ in numbers]
    answers = store.get([key_of(n) for n in numbers], [[block[:SPLIT], block[SPLIT:]] for block in blocks])
    for number, block, is_loaded in zip(numbers, blocks, answers, strict=True):
        assert not is_loaded or np.array_equal(block, block_of(number))
    return answers


class GatedTier(MemoryTier):
    """Hangs in reads and writes while its gate is closed."""

    gate = threading.Event()

    def put(self, batch):
        self.gate.wait()
        super().put(batch)

    def get(self, batch):
        self.gate.wait()
        super().get(batch)


@pytest.fixture
def gated():
    GatedTier.gate = threading.Event()
    GatedTier.gate.set()
    entry = {"type": GatedTier, "capacity": "1MiB", "deadline_s": 60, "pause_s": 0.05}
    store = open_store(parse_tier(entry), BLOCK_BYTES, {})
    yield store
    GatedTier.gate.set()
    store.close()


def test_threads_load_what_was_stored(tmp_path):
    store = disk(tmp_path, 24)  # smaller than one call
    faults = []

    def work(seed):
        rng = np.random.default_rng(seed)
        try:
            for _ in range(12):
                numbers = rng.choice(40, 30, replace=False).tolist()
                assert sum(put(store, numbers)) >= 1
                get(store, numbers)
                store.touch([key_of(n) for n in numbers])
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    stats = store.stats()
    assert stats.tier.num_held <= 24
    assert stats.num_jobs == 0
    assert stats.failed_jobs == 0
    assert not stats.tier.corrupt_blocks
    assert stats.tier.loaded_blocks
    store.close()
    assert put(store, [1]) == get(store, [1]) == [False]
    assert store.num_held([key_of(1)]) == 0


def test_restart_finds_blocks_and_recency(tmp_path):
    store = disk(tmp_path, 8)
    assert all(put(store, range(8)))
    store.touch([key_of(n) for n in (0, 1, 2)])
    store.close()
    store = disk(tmp_path, 8)
    assert all(put(store, range(8, 13)))
    assert store.exists([key_of(n) for n in range(13)]) == [True] * 3 + [False] * 5 + [True] * 5
    assert get(store, [12, 3, 0]) == [True, False, True]
    assert store.delete([key_of(n) for n in (3, 12, 11)]) == [key_of(12), key_of(11)]
    assert put(store, [11]) == get(store, [11]) == [True]
    assert store.stats().tier.num_held == 7
    store.close()
    store = disk(tmp_path, 8)
    assert get(store, [10, 11, 12]) == [True, True, False]
    # The room of a deleted block is used before a block leaves.
    assert all(put(store, [20]) + get(store, [0, 1, 2, 8, 9, 10, 11]))
    assert store.delete([key_of(20)])
    assert all(put(store, [21]) + get(store, [0, 1, 2, 8, 9, 10, 11]))
    assert store.clear()
    assert not any(get(store, range(13)))
    assert all(put(store, [3]))
    store.close()
    with pytest.raises(ValueError, match="fingerprint"):
        open_store(
            parse_tier({"type": "disk", "path": str(tmp_path), "capacity": "1MiB"}), BLOCK_BYTES - 1, {"model": "m"}
        )


def test_deleted_blocks_stay_away_after_kill(tmp_path, monkeypatch):
    """The directory at the time when `delete` returns; one of the blocks is being read, and the first try fails."""
    store = disk(tmp_path / "live", flush_interval_s=3600)
    assert all(put(store, range(4)))
    store._controller.tier.pin([key_of(1)])
    void = SlotTable.void
    monkeypatch.setattr(SlotTable, "void", lambda *args: monkeypatch.undo() or void(*args, None))
    for numbers in ([0], [1], [2]):
        assert store.delete([key_of(n) for n in numbers]) == [key_of(n) for n in numbers]
    shutil.copytree(tmp_path / "live", tmp_path / "killed")
    store.close()
    for name in ("live", "killed"):
        store = disk(tmp_path / name)
        assert get(store, range(4)) == [False] * 3 + [True]
        store.close()


def test_hanging_tier_leaves_buffers_alone(gated):
    assert all(put(gated, range(4)))
    GatedTier.gate.clear()
    gated._config = replace(gated._config, deadline_s=0.05)  # while the tier hangs: a loaded machine may need longer
    block, source = np.zeros(BLOCK_BYTES, np.uint8), block_of(9)
    assert gated.get([key_of(0)], [block]) == [False]
    assert gated.put([key_of(9)], [source]) == [False]
    source[:] = 0  # the engine reuses it
    for _ in range(5):
        assert not any(get(gated, range(4)) + put(gated, range(100, 110)))
    assert gated.stats().stuck_blocks
    GatedTier.gate.set()
    gated._config = replace(gated._config, deadline_s=60)
    wait_until(lambda: all(put(gated, [20]) + get(gated, [0, 1, 2, 3])))
    assert not block.any()  # the late read went into a row of the store
    get(gated, [9, *range(100, 110)])  # absent, or what was stored
    assert gated.stats().stuck_blocks == 0
    assert all(put(gated, range(200, 260)) + get(gated, range(200, 260)))


def test_put_answers_for_what_is_held(gated, tmp_path, monkeypatch):
    """Bad blocks are stored once their readers have ended, and blocks that another call stores once that has failed."""
    store = disk(tmp_path, deadline_s=1)
    tier = store._controller.tier
    assert put(store, [1]) == [True]
    assert tier.pin([key_of(1)])
    np.memmap(tmp_path / "data", np.uint8, "r+")[:] = 0
    assert get(store, [1]) == put(store, [1, 2])[:1] == get(store, [1]) == [False]
    store._config = replace(store._config, deadline_s=60)
    threading.Timer(0.1, tier.unpin, [[key_of(1)]]).start()
    assert put(store, [1, 2, 1]) == get(store, [1, 2, 1]) == [True] * 3
    store.close()

    answers, begun = [], threading.Event()

    def fail(self, batch):
        begun.set()
        self.gate.wait()
        monkeypatch.undo()
        raise OSError("once")

    monkeypatch.setattr(GatedTier, "put", fail)
    GatedTier.gate.clear()
    store = KeyedStore(lambda rows: (GatedTier(MemoryOptions(1 << 20), rows), gated._config), BLOCK_BYTES)
    threads = [threading.Thread(target=lambda: answers.append(put(store, [1]))) for _ in range(2)]
    for thread in threads:
        thread.start()
        begun.wait()
    GatedTier.gate.set()
    for thread in threads:
        thread.join()
    assert [True] in answers
    assert get(store, [1]) == [True]
    store.close()


def test_waiting_calls_share_rows(gated):
    """Calls that find no free rows wait for those of others, and store everything."""
    store = KeyedStore(
        lambda rows: (GatedTier(MemoryOptions(1 << 20), rows), gated._config), BLOCK_BYTES, staging_bytes=1
    )
    answers = {}
    threads = [
        threading.Thread(target=lambda i=i: answers.update({i: put(store, range(20 * i, 20 * i + 20))}))
        for i in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(map(all, answers.values()))
    assert all(get(store, range(120)))
    store.close()


def test_cached_blocks_load_in_caller(tmp_path, monkeypatch):
    """Blocks in the page cache come while reads of the disk fail, verified; others do not."""
    probe = tmp_path / "probe"
    probe.write_bytes(b"1")
    with probe.open("rb") as file:
        try:
            os.preadv(file.fileno(), [bytearray(1)], 0, os.RWF_NOWAIT)
        except OSError as error:
            pytest.skip(f"the file system has no reads without a wait: {error}")

    def fail(*_):
        raise OSError("read")

    store = disk(tmp_path / "tier")
    assert all(put(store, range(40)))
    with monkeypatch.context() as patch:
        patch.setattr(BlockStore, "read_payload", fail)
        assert all(get(store, range(40)))
        assert store.stats().tier.loaded_blocks == 40
    assert set(store.tier._opened().table.recency["uses"].tolist()) >= {1}
    assert get(store, [1, 1, 99]) == [True, True, False]
    data = np.memmap(tmp_path / "tier" / "data", np.uint8, "r+")
    data[100] ^= 1
    answers = get(store, range(40))
    assert (answers.count(False), store.stats().tier.corrupt_blocks) == (1, 1)
    assert put(store, [answers.index(False)]) == [True]
    assert all(get(store, range(40)))
    store.clear()
    assert not any(get(store, range(40)))
    store.close()
    assert not any(get(store, range(40)))


@pytest.mark.parametrize("page_cache", [None, False])
def test_direct_reads_run_in_threads(tmp_path, monkeypatch, page_cache):
    """Past the page cache every read waits for the disk. By default an engine's store is not past it."""
    options = {} if page_cache is None else {"page_cache": page_cache}
    capacity = DiskTier.capacity_for(8, 4096)
    entry = {"type": "disk", "path": str(tmp_path), "capacity": capacity, **options}
    store = open_store(parse_tier(entry), 4096, {"model": "m"})
    if page_cache is None:
        assert not store.tier.is_direct
    elif not store.tier.is_direct:
        pytest.skip("the file system has no direct I/O")
    else:
        monkeypatch.setattr(BlockStore, "read_cached", None)
    assert store.put([b"k"], [b"1" * 4096]) == [True]
    buffer = bytearray(4096)
    assert store.get([b"k"], [buffer]) == [True]
    assert buffer == b"1" * 4096
    assert not store.stats().tier.last_error
    store.close()


def test_invalid_arguments_change_nothing(gated):
    block = block_of(1)
    for keys, buffers, text in (
        ([b"a"], [], "as many buffers"),
        ([b"a"], [block[:-1]], "a block has 5000 bytes"),
        ([b"a"], [[block, block]], "a block has 5000 bytes"),
        ([b"a"], [bytes(BLOCK_BYTES)], "writable"),
    ):
        with pytest.raises(ValueError, match=text):
            gated.get(keys, buffers)
    assert gated.put([b"a", b"a"], [bytes(BLOCK_BYTES)] * 2) == [True, True]
    copies = np.ones((2, BLOCK_BYTES), np.uint8)
    assert gated.get([b"a", b"a"], list(copies)) == [True, True]
    assert not copies.any()
    assert [part.labels for part in gated.parts()] == [(("tier", "0"), ("medium", "MEMORY"))]


def test_changes_are_reported_pinned_blocks_stay(tmp_path):
    from kvcache.assembly.assemble import open_tiers

    events, tiers = [], []
    settings = parse_tier({"type": "disk", "path": str(tmp_path), "capacity": DiskTier.capacity_for(8, 8192)})

    def open_tier(rows):
        tiers.append(open_tiers((settings,), rows, {})[0])
        return tiers[-1]

    for count in (8, 16):
        store = KeyedStore(open_tier, BLOCK_BYTES, on_change=lambda stored, removed: events.append((stored, removed)))
        tier = tiers[-1][0]
        assert tier.pin([key_of(0), key_of(99)]) == ([] if count == 8 else [key_of(0)])
        for number in range(count - 8, count):
            put(store, [number])
        held = set()
        for stored, removed in events:
            held = (held - set(removed)) | set(stored)
        assert held == {key_of(n) for n in (range(8) if count == 8 else [0, *range(9, 16)])}
        if count == 16:
            np.memmap(tmp_path / "data", np.uint8, "r+")[:] = 0
            assert get(store, [9]) == [False]
            assert events[-1] == ([], [key_of(9)])
        store.close()


class SteppedStore(KeyedStore):
    """Four rows a direction over a tier that ends one job when a call waits, while `hangs` only a load."""

    def __init__(self, staging_bytes=1):
        self.now_s, self.hangs, self.stored = 0.0, False, []
        config = TierConfig(deadline_s=1.0, pause_s=0.5)
        super().__init__(
            lambda rows: (ManualTier(64, rows), config),
            BLOCK_BYTES,
            staging_bytes=staging_bytes,
            on_change=lambda stored, removed: self.stored.extend(stored),
        )

    def clock(self):
        return self.now_s

    def _sleep(self, num_ended):
        self.now_s += 0.2
        for job in [job for job in self.tier.pending if job.is_load or not self.hangs][:1]:
            self.tier.end(job)


def test_refused_jobs_are_halved_in_order(monkeypatch):
    """The head of a prefix is stored last, so that it is the most recent."""
    store, jobs = SteppedStore(staging_bytes=64 * 8192), []
    for take in (store.tier.submit_store, store.tier.submit_load):

        def submit(job_id, keys, block_ids, take=take):
            jobs.append([int(key[3:]) for key in keys])
            return len(keys) <= 2 and take(job_id, keys, block_ids)

        monkeypatch.setattr(store.tier, take.__name__, submit)
    assert all(put(store, range(4)) + get(store, range(4)))
    assert jobs == [[3, 2, 1, 0], [1, 0], [3, 2], [0, 1, 2, 3], [0, 1], [2, 3]]
    # A refused job gives its rows back.
    assert all(put(store, range(first, first + 4)) == [True] * 4 for first in range(4, 84, 4))


def test_rows_of_hanging_stores_come_back():
    store = SteppedStore()
    assert put(store, [0]) == [True]
    store.hangs = True
    assert not any(put(store, range(1, 20)))
    store.now_s += 0.5
    before_s = store.now_s
    assert not any(put(store, range(1, 20)))
    assert store.now_s == before_s  # no row is left to wait for
    assert get(store, [0]) == [True]
    store.hangs = False
    while store.tier.pending:
        store.tier.end(store.tier.pending[0])
    assert all(put(store, range(20, 40)))
    assert store.stored == [key_of(n) for n in (0, *range(1, 5), *range(20, 40))]
    assert all(get(store, [0, 1, 4, *range(20, 40)]))


def test_paused_reads_ask_tier_nothing(monkeypatch):
    store, asked = SteppedStore(), []
    put(store, [0])
    monkeypatch.setattr(store.tier, "load_now", lambda keys, _: asked.append(keys) or [], raising=False)
    monkeypatch.setattr(store.tier, "lookup", lambda _: 1 / 0)
    assert [store.num_held([key_of(0)]) for _ in range(3)] == [0] * 3
    assert (store.get([key_of(0)], [bytearray(BLOCK_BYTES)]), asked) == ([False], [])


def test_failed_reset_is_tried_again(monkeypatch):
    store, versions = SteppedStore(), []
    put(store, range(3))
    with monkeypatch.context() as patch:
        patch.setattr(store.tier, "reset", lambda *version: versions.append(version) or patch.undo() or 1 / 0)
        assert store.clear()
    assert versions == [(None,)]
    assert store.now_s > 0.5
    assert store.exists([key_of(0)]) == [False]


def test_page_put_after_clear_is_new(tmp_path):
    """SGLang and LMCache name no requests: what they computed before a clear, they must not put after it."""
    store = disk(tmp_path)
    assert put(store, [1, 2]) == [True, True]
    assert store.clear("v1")
    assert get(store, [1, 2]) == [False, False]
    assert put(store, [1]) == [True]
    assert get(store, [1, 2]) == [True, False]
    store.close()


def test_clears_without_name_share_nothing():
    """A start, and a server beside it, may have other weights than those of an equally many-th clear."""
    pytest.importorskip("valkey")
    server = LocalValkey()
    entry = parse_tier({"type": "valkey", "url": server.url, "deadline_s": 5})
    numbers, held = range(8), []
    for _ in range(3):
        stores = [open_store(entry, BLOCK_BYTES, {"model": "m"}) for _ in range(2)]
        for _ in range(2):
            assert [store.clear() for store in stores] == [True, True]
            held += [any(get(store, numbers)) for store in stores]
            assert all(put(stores[0], numbers))
            assert all(get(stores[0], numbers))
            held += [any(get(stores[1], numbers))]
        for store in stores:
            store.close()
    server.kill()
    assert not any(held)


@pytest.mark.parametrize("is_load", [False, True])
def test_clear_ends_running_calls(monkeypatch, is_load):
    """A call that spans an update of the weights neither stores old blocks nor returns them."""
    store = SteppedStore()
    assert all(put(store, range(12)))
    sleep, clears = SteppedStore._sleep, []

    def clear_first(self, num_ended):
        if len(self.tier.pending) and not clears:
            clears.append(self.tier.pending)
            self._num_clears += 1
            self._controller.reset(self.clock(), "step 2")
        sleep(self, num_ended)

    monkeypatch.setattr(SteppedStore, "_sleep", clear_first)
    assert (get if is_load else put)(store, range(*((0, 12) if is_load else (12, 24)))) == [False] * 12
    assert len(clears) == 1
    assert not any(store.exists([key_of(n) for n in range(24)]))
    assert all(put(store, range(12)) + get(store, range(12)))


def test_close_passes_on_every_use(monkeypatch):
    store, told = SteppedStore(), []
    monkeypatch.setattr(store.tier, "touch", lambda keys, _: told.extend(keys))
    keys = [key_of(n) for n in range(3 * MAX_STEP_BLOCKS)]
    put(store, [0])
    store.touch(keys)
    assert told
    store.close()
    assert sorted(told) == sorted(keys)
    assert store.exists(keys[:2]) == [False, False]
