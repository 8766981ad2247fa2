"""The disk tier by itself: stores, restarts and refusals."""

import json
import os
import random
import shutil
from contextlib import suppress
from functools import reduce

import numpy as np
import pytest
from stores import load, store, until, wait_for_reset

from kvcache.request import ReqContext
from kvcache.tiers.disk.directory import clear_directory, directory_bytes
from kvcache.tiers.disk.header import Header, TierDirectoryError, capacity_for, num_slots_within
from kvcache.tiers.disk.maintenance import compact_tier, inspect_tier, verify_tier
from kvcache.tiers.disk.tier import DiskOptions, DiskTier

BLOCK_BYTES = 4096
NUM_HOST = 64


@pytest.mark.parametrize("block_bytes", [512, 4096, 5000, 12288, 1 << 20, "unaligned", "page_cache"])
def test_blocks_come_back_as_they_were(bench, block_bytes):
    options = {block_bytes: True} if block_bytes == "page_cache" else {"block_bytes": block_bytes}
    if block_bytes == "unaligned":
        flat = np.zeros(NUM_HOST * BLOCK_BYTES + 1, np.uint8)
        options = {"host_blocks": flat[1:].reshape(NUM_HOST, BLOCK_BYTES)}
    tier = bench.open(**options)
    assert not (tier.is_direct and block_bytes in ("unaligned", "page_cache"))
    keys = bench.keys(*range(10))
    assert store(tier, keys).done == keys
    assert tier.lookup([*keys, b"absent"]) == 10
    assert load(tier, keys[::-1]).done == keys[::-1]
    stats = tier.stats()
    assert (stats.num_held, stats.stored_blocks, stats.loaded_blocks, stats.corrupt_blocks) == (10, 10, 10, 0)


def test_oldest_block_leaves_and_is_named(bench):
    tier = bench.open(num_blocks=4)
    assert tier.submit_store(1, bench.keys(*range(5)), list(range(5))) is False
    assert (tier.stats().refused_blocks, tier.get_finished()) == (5, [])
    store(tier, bench.keys(0, 1, 2, 3))
    tier.touch(bench.keys(0, 1))
    result = store(tier, bench.keys(4, 5))
    assert result.removed == bench.keys(2, 3)
    assert [tier.lookup([key]) for key in bench.keys(0, 1, 2, 3, 4, 5)] == [1, 1, 0, 0, 1, 1]
    assert load(tier, bench.keys(0, 2)).failed == bench.keys(2)
    assert tier.stats().missed_blocks == 1


def test_restart_finds_blocks_and_recency(bench, monkeypatch):
    monkeypatch.setattr("kvcache.tiers.disk.slot_table._READ_RECORDS", 3)
    tier = bench.open(num_blocks=8)
    store(tier, bench.keys(*range(8)))
    tier.touch(bench.keys(3, 1))
    context = ReqContext()
    tier.touch(bench.keys(0), context)
    tier.on_request_finished(context)
    tier.shutdown()
    tier = bench.open(num_blocks=8)
    assert tier.lookup(bench.keys(*range(8))) == 8
    assert (tier.stats().num_held, tier.stats().stored_blocks) == (8, 0)
    assert load(tier, bench.keys(*range(8))).failed == []
    assert store(tier, bench.keys(*range(10, 18))).removed == bench.keys(2, 4, 5, 6, 7, 1, 3, 0)


def test_uses_stay_ordered_over_restarts(bench):
    bench.leave(0, 1, 2, 3, num_blocks=4)
    for _ in range(2):
        tier = bench.open(num_blocks=4)
        tier.touch(bench.keys(0))
        tier.shutdown()
    tier = bench.open(num_blocks=4)
    assert [store(tier, bench.keys(number)).removed for number in (4, 5)] == [bench.keys(1), bench.keys(2)]


def test_slot_forgets_its_older_block(bench):
    tier = bench.open(num_blocks=4)
    store(tier, bench.keys(0, 1, 2, 3))
    for _ in range(9):
        tier.touch(bench.keys(0))
        load(tier, bench.keys(0))
    tier.reset()
    wait_for_reset(tier)
    tier.shutdown()
    # The clock starts again.
    bench.leave(4, 5, 6, 7, num_blocks=4)
    assert inspect_tier(bench.path).uses == 0
    assert store(bench.open(num_blocks=4), bench.keys(8, 9)).removed == bench.keys(4, 5)


def test_all_slots_keep_their_recency(bench):
    """The file of recency is written in pages of 256 slots."""
    options = {"num_blocks": 600, "block_bytes": 512, "page_cache": True}
    tier = bench.open(**options)
    keys = bench.keys(*range(600))
    for first in range(0, 600, 50):
        store(tier, keys[first : first + 50])
    tier.flush()
    for number in (0, 254, 255, 256, 599):
        assert load(tier, keys[number : number + 2]).failed == []
    assert tier.load_now(keys[255:257], [[row.data] for row in tier.host_rows[:2]]) == keys[255:257]
    recency = tier._store.table.recency.copy()
    uses = {number: recency["uses"][number] for number in np.flatnonzero(recency["uses"]).tolist()}
    assert uses == {0: 1, 1: 1, 254: 1, 255: 3, 256: 3, 257: 1, 599: 1}
    tier.shutdown()
    tier = bench.open(**options)
    assert np.array_equal(tier._store.table.recency, recency)
    np.memmap(bench.path / "data", np.uint8, "r+")[255 * tier._store.directory.header.slot_bytes] ^= 1
    assert tier.load_now(keys[255:257], [[row.data] for row in tier.host_rows[:2]]) == keys[256:257]


def test_restart_after_slots_were_reused(bench, tmp_path):
    tier = bench.open(num_blocks=4, flush_interval_s=1000)
    for first in range(0, 40, 3):
        store(tier, bench.keys(first, first + 1, first + 2))
    held = [key for key in bench.keys(*range(42)) if tier.lookup([key])]
    assert len(held) == 4
    # As after a kill: recency is not written yet.
    shutil.copytree(bench.path, tmp_path / "left")
    assert store(bench.open(num_blocks=4, path=tmp_path / "left"), bench.keys(90, 91)).removed == held[:2]
    tier.shutdown()
    tier = bench.open(num_blocks=4)
    assert [key for key in bench.keys(*range(42)) if tier.lookup([key])] == held
    assert sorted(load(tier, held).done) == sorted(held)
    assert sorted(tier.delete(held[:2], timeout_s=60)) == sorted(held[:2])
    tier.shutdown()
    assert bench.open(num_blocks=4).stats().num_held == 2


def test_key_in_two_slots_prefers_later(bench):
    tier = bench.open(num_blocks=4)
    store(tier, bench.keys(1))
    tier._store.table.write(3, [99], bench.keys(1), [int(tier._store.table.checksums[0])], tier._current[1])
    tier.host_rows[1] = 0
    tier._store.write_payload(3, [tier.host_rows[0].data])
    tier._store.write_payload(0, [tier.host_rows[1].data])
    tier.shutdown()
    tier = bench.open(num_blocks=4)
    assert tier.stats().num_held == 1
    assert load(tier, bench.keys(1)).done == bench.keys(1)


@pytest.mark.parametrize("damage", ["flip", "zero", "swap", "truncate"])
def test_bad_block_is_a_counted_miss(bench, tmp_path, damage):
    tier = bench.open(num_blocks=4)
    store(tier, bench.keys(0, 1, 2, 3))
    with (tmp_path / "tier" / "data").open("r+b") as file:
        blocks = [file.read(BLOCK_BYTES) for _ in range(4)]
        if damage == "flip":
            blocks[3] = blocks[3][:100] + bytes([blocks[3][100] ^ 1]) + blocks[3][101:]
        elif damage == "zero":
            blocks[3] = bytes(BLOCK_BYTES)
        elif damage == "swap":
            blocks[3] = blocks[2]
        file.seek(0)
        file.write(b"".join(blocks))
        if damage == "truncate":
            file.truncate(4 * BLOCK_BYTES - 1)
    result = load(tier, bench.keys(0, 1, 2, 3))
    assert (result.done, result.failed, result.removed) == (bench.keys(0, 1, 2), bench.keys(3), bench.keys(3))
    assert result.error == ""
    assert tier.lookup(bench.keys(0, 1, 2, 3)) == 3
    assert (tier.stats().corrupt_blocks, tier.stats().num_held) == (1, 3)
    tier.shutdown()
    tier = bench.open(num_blocks=4)
    assert tier.lookup(bench.keys(0, 1, 2, 3)) == 3
    assert store(tier, bench.keys(3)).done == bench.keys(3)
    assert load(tier, bench.keys(3)).done == bench.keys(3)


def test_keys_of_any_bytes_survive(bench):
    keys = [b"\0", b"a\0\0", b"\xff" * 88, b"ab", bytes(36)]
    tier = bench.open()
    assert sorted(store(tier, [*keys, b"k" * 89]).done) == sorted(keys)
    tier.shutdown()
    tier = bench.open()
    assert sorted(load(tier, keys).done) == sorted(keys)


def test_capacity_bounds_the_new_folder(bench, tmp_path):
    capacity = 300_000
    tier = DiskTier(DiskOptions(path=tmp_path / "small", capacity=capacity), bench.host_blocks())
    bench.opened.append(tier)
    for first in range(0, 120, 30):
        assert directory_bytes(tmp_path / "small") <= capacity
        store(tier, bench.keys(*range(first, first + 30)))
    tier._store.table.flush()
    assert tier.num_blocks == num_slots_within(capacity, BLOCK_BYTES) == 39
    assert directory_bytes(tmp_path / "small") <= capacity


def test_cut_groups_consecutive_slots(bench):
    tier = bench.open(num_blocks=64)
    assert tier.cut(list(range(3, 43)), 40) == [list(range(32)), list(range(32, 40))]
    assert tier.cut([7, 3, 4, 9, 8], 5) == [[1, 2], [0, 4, 3]]


def test_threads_share_a_large_job(tmp_path):
    rows = np.zeros((4, 1 << 20), np.int8)
    tier = DiskTier(
        DiskOptions(path=tmp_path, capacity=DiskTier.capacity_for(80, 1 << 20), num_threads=4, preallocate=False), rows
    )
    assert [len(run) for run in tier.cut(list(range(3)), 3)] == [2, 1]
    assert [len(run) for run in tier.cut(list(range(12)), 12)] == [3] * 4
    assert [len(run) for run in tier.cut(list(range(0, 80, 2)), 40)] == [1] * 40
    assert [len(run) for run in tier.cut(list(range(64)), 64)] == [4] * 16
    tier.shutdown()


def test_blocks_of_edited_fingerprint_are_misses(bench):
    bench.leave(*range(8), fingerprint={"model": "a"})
    bench.edit_header(fingerprint={"model": "b"})
    assert bench.open(fingerprint={"model": "b"}).lookup(bench.keys(0)) == 0


def test_growing_and_shrinking_keep_what_fits(bench, tmp_path):
    bench.leave(*range(8), num_blocks=8)
    tier = bench.open(num_blocks=12)
    assert tier.stats().num_held == 8
    store(tier, bench.keys(*range(8, 12)))
    assert tier.stats().num_held == 12
    tier.shutdown()
    tier = bench.open(num_blocks=5)
    held = [key for key in bench.keys(*range(12)) if tier.lookup([key])]
    assert held == bench.keys(0, 1, 2, 3, 4)
    assert sorted(load(tier, held).done) == held
    assert directory_bytes(tmp_path / "tier") <= capacity_for(5, BLOCK_BYTES)


@pytest.mark.parametrize("capacity", [None, capacity_for(5, BLOCK_BYTES)])
@pytest.mark.parametrize("seed", range(3))
def test_packed_tier_keeps_recent_blocks(bench, seed, capacity, monkeypatch):
    dice, order, uses = random.Random(seed), [], {}
    tier = bench.open(num_blocks=12)
    for key in bench.keys(*(dice.randrange(16) for _ in range(60))):
        if dice.random() < 0.3:
            tier.delete([key], timeout_s=60)
        elif key in order:
            tier.touch([key])
            load(tier, [key])
            uses[key] += 1
        else:
            uses[key] = 0
            removed = store(tier, [key]).removed
            order = [held for held in order if held not in removed]
        order = [held for held in order if held != key] + [key] * tier.lookup([key])
    tier.shutdown()
    num_slots = 5 if capacity else 12
    kept = order[-num_slots:]
    with monkeypatch.context() as patch, suppress(TierDirectoryError):
        patch.setattr(os, "pwritev", lambda *_: 0)
        compact_tier(bench.path, capacity)
    assert all(map(bench.open(num_blocks=12, read_only=True).lookup, ([key] for key in kept)))
    assert compact_tier(bench.path, capacity).uses == sum(uses[key] for key in kept)
    assert verify_tier(bench.path) == (len(kept), 0)
    tier = bench.open(num_blocks=num_slots)
    assert sorted(load(tier, kept).done) == sorted(kept)
    removed = [key for new in bench.keys(*range(20, 32)) for key in store(tier, [new]).removed]
    assert removed[: len(kept)] == kept


def test_second_writer_is_refused_not_reader(bench, tier):
    store(tier, bench.keys(1, 2))
    with pytest.raises(TierDirectoryError, match=f"is in use by process {os.getpid()} on "):
        bench.open()
    with pytest.raises(TierDirectoryError, match=f"is in use by process {os.getpid()} on "):
        clear_directory(bench.path)
    assert "is in use by process" in DiskTier.unavailable_reason(DiskOptions(path=str(bench.path), capacity=1 << 20))
    reader = bench.open(read_only=True)
    assert load(reader, bench.keys(1, 2)).failed == []
    reader.maintain()
    with pytest.raises(OSError, match="Bad file descriptor"):
        reader.erase([0])
    assert (reader.submit_store(9, bench.keys(5), [0]), reader.delete(bench.keys(1))) == (False, [])
    reader.reset()
    wait_for_reset(reader)
    assert reader.lookup(bench.keys(1)) == 0
    assert load(tier, bench.keys(1, 2)).failed == []
    tier.shutdown()
    assert bench.open().stats().num_held == 2


def test_damaged_recency_costs_order_only(bench, tmp_path):
    bench.leave(0, 1, 2, num_blocks=4)
    (tmp_path / "tier" / "recency").write_bytes(b"\xff" * 4 * 16)
    tier = bench.open(num_blocks=4)
    assert tier.lookup(bench.keys(0, 1, 2)) == 3
    tier.touch(bench.keys(1))
    assert store(tier, bench.keys(3, 4)).removed == bench.keys(0)
    assert sorted(load(tier, bench.keys(1, 2, 3, 4)).done) == bench.keys(1, 2, 3, 4)


def test_disk_too_small_fails_at_start(bench, tmp_path, monkeypatch):
    class AlmostFull:
        f_bavail, f_frsize = 3, 4096

    monkeypatch.setattr(os, "statvfs", lambda path: AlmostFull)
    with pytest.raises(TierDirectoryError, match=r"needs 67[0-9]+ bytes more on its disk, which has 12288 free"):
        bench.open(num_blocks=16)
    assert directory_bytes(tmp_path / "tier") < 16 * BLOCK_BYTES
    tier = bench.open(num_blocks=16, preallocate=False)
    assert store(tier, bench.keys(1)).done == bench.keys(1)
    tier.shutdown()
    monkeypatch.undo()
    bench.open(num_blocks=16).shutdown()
    monkeypatch.setattr(os, "statvfs", lambda path: AlmostFull)
    assert load(bench.open(num_blocks=16), bench.keys(1)).done == bench.keys(1)


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize(
    ("name", "length", "kept"),
    [
        ("data", 2 * 4096 + 100, 2),
        ("data", 0, 0),
        ("data", None, 0),
        ("records", 3 * 128 + 127, 3),
        ("records", 0, 0),
        ("records", None, 0),
        ("recency", 100, 5),
        ("recency", 0, 5),
        ("recency", None, 5),
    ],
)
def test_cut_file_costs_its_blocks_only(bench, tmp_path, caplog, name, length, kept, read_only):
    tier = bench.open(num_blocks=8)
    for key in range(5):
        store(tier, bench.keys(key))
    tier.shutdown()
    file = tmp_path / "tier" / name
    whole = file.stat().st_size
    if length is None:
        file.unlink()
    else:
        os.truncate(file, length)
    for use in (inspect_tier, verify_tier):
        with suppress(TierDirectoryError):
            use(tmp_path / "tier")
    with pytest.raises(TierDirectoryError, match=f"it has {length or 0}; open the tier to keep what is whole, or del"):
        compact_tier(tmp_path / "tier")
    if read_only and length is None:
        with suppress(TierDirectoryError):
            bench.open(num_blocks=8, read_only=True)
        return
    tier = bench.open(num_blocks=8, read_only=read_only)
    for key in range(5):
        assert load(tier, bench.keys(key)).done == (bench.keys(key) if key < kept else [])
    assert tier.lookup(bench.keys(*range(5))) == kept
    if read_only:
        assert file.stat().st_size == length
        return
    slots = 8 if name == "recency" else kept
    assert f"{name} has {length or 0} of {whole} bytes; {slots} of 8 slots are kept" in caplog.text
    assert store(tier, bench.keys(6)).done == bench.keys(6)
    tier.shutdown()
    assert file.stat().st_size == whole
    compact_tier(tmp_path / "tier")
    caplog.clear()
    tier = bench.open(num_blocks=8)
    assert "was cut" not in caplog.text
    assert tier.lookup(bench.keys(*range(5))) == kept
    assert load(tier, bench.keys(6)).done == bench.keys(6)


@pytest.mark.parametrize("name", ["data", "records", "recency"])
def test_overlong_file_is_refused(bench, tmp_path, name):
    bench.open().shutdown()
    file = tmp_path / "tier" / name
    os.truncate(file, file.stat().st_size + 1)
    with pytest.raises(TierDirectoryError, match=f"{name} must have [0-9]+ bytes, it has .*delete the directory"):
        bench.open()


def test_interrupted_resize_is_finished(bench, tmp_path):
    bench.leave(*range(8), num_blocks=8)
    bench.edit_header(num_slots=4, resizing=True)
    (bench.path / "kvcache.json.new").touch(0o600)
    assert DiskTier.unavailable_reason(DiskOptions(path=str(bench.path), capacity=1 << 20)) == ""
    tier = bench.open(num_blocks=4)
    assert tier.lookup(bench.keys(0, 1, 2, 3)) == 4
    header = tmp_path / "tier" / "kvcache.json"
    assert json.loads(header.read_text())["resizing"] is False
    tier.shutdown()
    header.unlink()
    assert bench.open(num_blocks=4).stats().num_held == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"capacity": 5000}, "capacity_bytes must be >= [0-9]+ to hold one block of 4096 bytes, got 5000"),
        ({"host_blocks": np.zeros((4, 4096), np.float32)}, "host_blocks must be a writable array of bytes"),
        ({"num_threads": 0}, "num_threads in a disk tier must be a whole number >= 1, .* got 0"),
        ({"flush_interval_s": -1}, "flush_interval_s in a disk tier must be a number of seconds > 0 .* got -1"),
        ({"cache_policy": "nope"}, "unknown policy 'nope'"),
        ({"fingerprint": {"model": object()}}, "fingerprint must be JSON-serializable"),
        (
            {"fingerprint": {"model": reduce(lambda inner, _: [inner], range(100_000), [])}},
            "fingerprint must be JSON-serializable",
        ),
        ({"fingerprint": {"model": float("nan")}}, "fingerprint must be JSON-serializable"),
        ({"fingerprint": {"model": "m" * 20000}}, "fingerprint must be at most 16384 bytes of JSON"),
        ({"path": "/dev/null/tier"}, "cannot be written: Not a directory"),
        ({"path": "missing", "read_only": True}, "cannot be read: No such file"),
    ],
)
def test_bad_arguments_name_the_value(bench, options, message):
    others = [name for name in options if name in ("host_blocks", "fingerprint")]
    arguments = {"host_blocks": bench.host_blocks()} | {name: options[name] for name in others}
    usual = {"path": bench.path, "capacity": 1 << 20}
    changed = {name: value for name, value in options.items() if name not in others}
    with pytest.raises(ValueError, match=message):
        DiskTier(DiskOptions(**usual | changed), **arguments)
    DiskTier(DiskOptions(**usual), bench.host_blocks()).shutdown()


def test_another_model_is_refused(bench):
    bench.open(fingerprint={"model": "a", "dims": (1, 2)}).shutdown()
    bench.open(fingerprint={"model": "a", "dims": [1, 2]}).shutdown()
    for fingerprint, block_bytes, difference in (
        ({"model": "b", "dims": [1, 2]}, 4096, "fingerprint: model 'a' is not 'b'; choose"),
        # In Python, 1 and True are equal.
        ({"model": "a", "dims": [True, 2]}, 4096, "fingerprint"),
        ({"model": "a", "dims": [1, 2]}, 8192, "block_bytes: 4096 is not 8192"),
    ):
        with pytest.raises(TierDirectoryError, match=f"blocks of another {difference}"):
            bench.open(block_bytes=block_bytes, fingerprint=fingerprint)


@pytest.mark.parametrize("is_moved", [False, True])
def test_removed_folder_makes_the_tier_quiet(bench, tmp_path, is_moved, caplog):
    tier = bench.open(flush_interval_s=0.01)
    store(tier, bench.keys(1))
    if is_moved:
        (tmp_path / "tier").rename(tmp_path / "moved")
    else:
        shutil.rmtree(tmp_path / "tier")
    until(lambda: f"disk tier: directory {tmp_path / 'tier'} was removed" in caplog.text)
    assert tier.stats().unavailable_reason == f"directory {tmp_path / 'tier'} was removed"
    # The space is released right after the reason is set.
    size = 16 * BLOCK_BYTES if is_moved else 0
    until(lambda: os.fstat(tier._store.fd).st_size == size)
    for _ in range(3):
        tier.maintain()
    assert caplog.text.count("was removed") == 1
    assert tier.lookup(bench.keys(1)) == 0
    assert tier.submit_store(5, bench.keys(2), [0]) is False


@pytest.mark.parametrize("block_bytes", [1, 4096, 5000, 2 << 20])
def test_capacity_covers_every_slots_extent(block_bytes):
    # ext4 keeps 12 bytes for each extent, and at worst every slot is one.
    capacity = 1 << 40
    num_slots = num_slots_within(capacity, block_bytes)
    files = sum(Header.fresh(block_bytes, num_slots, {}).file_bytes().values())
    assert files + 12 * num_slots <= capacity
    assert capacity_for(num_slots, block_bytes) <= capacity < capacity_for(num_slots + 1, block_bytes)
