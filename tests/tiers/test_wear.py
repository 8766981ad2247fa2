"""The budget of a disk's writes: granted evenly, kept over restarts and kills, and blind to clocks that are set."""

import math
import struct
import time
import zlib

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvcache import TieredOffloadingManager
from kvcache.tiering.controller import TierConfig
from kvcache.tiers.base import wear as wear_module
from kvcache.tiers.base.tier import describe_tier
from kvcache.tiers.base.wear import DAY_S, RECORD_BYTES, Wear, parse_endurance
from kvcache.tiers.disk.directory import clear_directory
from kvcache.tiers.disk.tier import DiskOptions, DiskTier

NUM_BLOCKS = 1000


class Machine:
    """A clock, and the bytes that the lock file of a disk holds."""

    def __init__(self):
        self.now_s, self.record = 5000.0, b""

    def start(self, endurance=1.0, record_s=0.0):
        wear = Wear(NUM_BLOCKS, 4096, record_s, clock=lambda: self.now_s)
        if endurance is not None:
            wear.limit(endurance)
        wear.restore(self.record)
        return wear

    def save(self, wear, is_last=False):
        self.record, num_kept = wear.record(is_last)
        wear.keep(num_kept)


def left_after_record(machine, wear):
    """The whole budget, as if nothing were kept for the time after a kill."""
    machine.save(wear, is_last=True)
    wear.keep(0.0)
    return wear.left()


def started():
    machine = Machine()
    wear = machine.start()
    left_after_record(machine, wear)
    return machine, wear


@pytest.mark.parametrize(
    ("given", "parsed"),
    [(3, 3.0), ("0.3", 0.3), ("6TiB/day", f"{6 << 40}/day"), (" 1 GB/day", "1000000000/day"), (1000, 1000.0)],
)
def test_endurance_is_drives_or_bytes(given, parsed):
    assert parse_endurance("endurance", given) == parsed


INVALID = [0, -1, True, None, "", "3x", "3_0", "6TiB", "0/day", "nan", math.inf, 1001, [3], "6TiB/week"]


@pytest.mark.parametrize("given", INVALID)
def test_invalid_endurance_names_value(given):
    with pytest.raises(ValueError, match="endurance"):
        parse_endurance("endurance", given)


def test_day_grants_budget_evenly():
    assert Machine().start().left() == 0, "nothing is granted before a record"
    machine, wear = started()
    assert wear.left() == pytest.approx(NUM_BLOCKS / 1440)
    machine.now_s += DAY_S / 4
    assert left_after_record(machine, wear) == pytest.approx(250 + NUM_BLOCKS / 1440)
    wear.spend(300)
    assert wear.left() == 0
    machine.now_s += 10 * DAY_S
    assert left_after_record(machine, wear) == NUM_BLOCKS


def test_unlimited_disk_counts_writes_only():
    machine = Machine()
    wear = machine.start(endurance=None)
    wear.spend(500)
    assert wear.left() == math.inf
    assert wear.spare() == 1
    assert wear.stats() == {"drive_writes": 0, "life_years": 0, "left_blocks": 0}
    machine.now_s += DAY_S
    assert wear.stats() == {"drive_writes": 0.5, "life_years": 10, "left_blocks": 0}


def test_drive_writes_fade():
    machine, wear = started()
    machine.now_s += DAY_S
    wear.spend(NUM_BLOCKS)
    assert wear.stats()["drive_writes"] == pytest.approx(1)
    machine.now_s += DAY_S
    assert wear.stats()["drive_writes"] == pytest.approx(0.5)


def test_kill_loses_what_was_ahead():
    machine, wear = started()
    machine.now_s += DAY_S / 2
    machine.save(wear)
    left = wear.left()
    assert left == pytest.approx(NUM_BLOCKS * 300 / DAY_S)
    wear.spend(int(left))
    again = machine.start()
    again.keep(0.0)
    assert again.left() == pytest.approx(NUM_BLOCKS * (DAY_S / 2 + 60 - 300) / DAY_S)


def test_stop_counts_writes_under_way(tmp_path):
    """The scheduler stops the tier, and never reads the ends of its writes."""
    path, capacity = tmp_path / "kv", DiskTier.capacity_for(1000, 4096)
    for stop in range(3):
        tier = DiskTier(DiskOptions(path=path, capacity=capacity), np.zeros((8, 4096), np.uint8))
        assert tier.submit_store(1, [b"%d %d" % (stop, place) for place in range(8)], list(range(8)))
        tier.shutdown()
        assert DiskTier.recorded_wear(path, capacity)._num_written == pytest.approx(8 * (stop + 1))


def test_other_boot_grants_nothing(monkeypatch):
    machine, wear = started()
    wear.spend(1)
    machine.save(wear, is_last=True)
    record = machine.record
    machine.now_s += DAY_S
    with monkeypatch.context() as patch:
        patch.setattr(wear_module, "_boot_id", lambda: b"another.")
        assert left_after_record(machine, machine.start()) == 0
    machine.record = record
    assert left_after_record(machine, machine.start()) == NUM_BLOCKS


def crafted(*values):
    body = struct.pack("<8s4d8s", b"kvwear 1", *values, wear_module._boot_id())
    return body + zlib.crc32(body).to_bytes(4, "little")


CHANGED = crafted(1e9, 0.0, 0.0, 0.0)[:-1] + b"?"


@pytest.mark.parametrize("record", [b"", b"x" * RECORD_BYTES, bytes(RECORD_BYTES), b"\xff" * 200, CHANGED])
def test_damaged_record_is_ignored(record):
    machine = Machine()
    machine.record = record
    wear = machine.start()
    machine.save(wear)
    wear.keep(0.0)
    assert wear.left() == pytest.approx(NUM_BLOCKS / 1440)


STEPS = st.tuples(st.sampled_from(["wait", "write", "save", "stop", "kill"]), st.integers(0, 20_000))


@given(st.lists(STEPS, max_size=60))
@example([("save", 0), ("wait", 87), ("write", 1), ("kill", 0), ("save", 0), ("write", 1)])
def test_spending_never_exceeds_grants(steps):
    machine = Machine()
    wear, spent = machine.start(), 0
    begin_s = machine.now_s
    for action, amount in steps:
        if action == "wait":
            machine.now_s += amount
        elif action == "write":
            num_blocks = min(amount, int(wear.left()))
            wear.spend(num_blocks)
            spent += num_blocks
        elif action == "save":
            machine.save(wear)
        else:
            if action == "stop":
                machine.save(wear, is_last=True)
            wear = machine.start()
        assert spent <= NUM_BLOCKS * (60 + machine.now_s - begin_s) / DAY_S + 1e-6
        assert wear.left() <= NUM_BLOCKS


RESTARTED = [(f"{int(per_day * 4096)}/day", per_day, 100, 240, 0.0, 900) for per_day in (1, 1.5, 7, 100, 239)]
RARELY_RECORDED = [(10.0, 10 * NUM_BLOCKS, 2, record_s, record_s, 0) for record_s in (600.0, 3600.0)]


@pytest.mark.parametrize(
    ("endurance", "per_day", "num_days", "step_s", "record_s", "process_steps"),
    [(1.0, NUM_BLOCKS, 1, 60, 0.0, 360), *RESTARTED, *RARELY_RECORDED],
)
def test_full_demand_spends_budget(endurance, per_day, num_days, step_s, record_s, process_steps):
    """Every fourth process is killed. All of the budget is spent in each period, however rare the record."""
    machine, num_steps = Machine(), int(num_days * DAY_S / step_s)
    wear = machine.start(endurance, record_s)
    machine.save(wear)
    for _ in range(3 if num_days < 100 else 1):
        written = 0
        for step in range(num_steps):
            machine.now_s += step_s
            num_blocks = int(wear.left())
            wear.spend(num_blocks)
            written += num_blocks
            if process_steps and step % process_steps == process_steps // 2:
                if step // process_steps % 4:
                    machine.save(wear, is_last=True)
                wear = machine.start(endurance, record_s)
            machine.save(wear)
        assert written == pytest.approx(num_days * per_day, rel=0.05 if record_s else 0.01)


@pytest.mark.parametrize("endurance", [5e-324, 0.5 / NUM_BLOCKS, "1/day", "4095/day"])
def test_budget_below_block_is_refused(tmp_path, endurance):
    """Such a budget would never be spent. A sample of a trace has a sample of the disk, and is not refused."""
    options = DiskOptions(path=tmp_path / "tier", capacity=DiskTier.capacity_for(NUM_BLOCKS, 4096))
    tier = DiskTier(options, np.zeros((4, 4096), np.uint8))
    with pytest.raises(ValueError, match=f"one block a day, got .?{endurance}.? for 1000 blocks of 4096 bytes"):
        TieredOffloadingManager(16, 4, [(tier, TierConfig(endurance=endurance))])
    tier.shutdown()
    Wear(NUM_BLOCKS, 4096).limit(endurance)


def test_disk_keeps_budget_over_restarts(tmp_path):
    rows = np.zeros((4, 4096), np.uint8)
    path, capacity = tmp_path / "tier", DiskTier.capacity_for(NUM_BLOCKS, 4096)

    def opened():
        tier = DiskTier(DiskOptions(path=path, capacity=capacity, flush_interval_s=0.01), rows)
        tier.wear.limit(1000.0)
        deadline = time.monotonic() + 20
        while not tier.wear.left() and time.monotonic() < deadline:
            time.sleep(0.01)
        return tier

    tier = opened()
    assert tier.wear.left() >= 1000 * NUM_BLOCKS * 60 / DAY_S
    tier.wear.spend(690)
    tier.shutdown()
    clear_directory(path)
    tier = opened()
    # Each second grants eleven blocks.
    assert tier.wear.stats()["left_blocks"] < 690
    tier.shutdown()


def test_life_is_known_after_restart(tmp_path):
    rows = np.zeros((4, 4096), np.uint8)
    options = DiskOptions(path=tmp_path / "tier", capacity=DiskTier.capacity_for(NUM_BLOCKS, 4096))
    machine = Machine()
    wear = machine.start(endurance=None)
    wear.spend(2 * NUM_BLOCKS)
    machine.now_s += DAY_S
    tier = DiskTier(options, rows)
    tier.wear.restore(wear.record()[0])
    tier.shutdown()
    tier = DiskTier(options, rows)
    assert "2 drive writes a day: an SSD rated for 1 lives 2.5 years" in describe_tier(tier.stats())
    tier.shutdown()
    # A tier of half the size writes its capacity twice as often. A budget names the rating.
    recorded = DiskTier.recorded_wear(options.path, DiskTier.capacity_for(NUM_BLOCKS // 2, 4096))
    recorded.limit(3.0)
    assert recorded.stats()["drive_writes"] == pytest.approx(4, rel=1e-3)
    assert recorded.stats()["life_years"] == pytest.approx(3.75, rel=1e-3)
    assert DiskTier.recorded_wear(tmp_path / "none", 1 << 20) is None


@pytest.mark.parametrize("num_blocks", [2, 10**9])
def test_budget_fits_smaller_tier(num_blocks):
    """A record counts bytes, and grants the next tier of the directory at most its day."""
    machine, wear = started()
    machine.now_s += DAY_S
    machine.save(wear, is_last=True)
    other = Wear(num_blocks, 8192, clock=lambda: machine.now_s)
    other.limit(1.0)
    other.restore(machine.record)
    assert other.left() == pytest.approx(min(num_blocks, NUM_BLOCKS / 2))


@pytest.mark.parametrize("left_bytes", [1e308, -1e308, math.nan, math.inf])
@pytest.mark.parametrize("as_of_s", [-1e308, 1e308, math.nan])
@pytest.mark.parametrize("written_bytes", [1e308, -1.0])
def test_crafted_record_grants_one_day(left_bytes, as_of_s, written_bytes):
    machine = Machine()
    machine.record = crafted(left_bytes, as_of_s, written_bytes, 1e308)
    wear = machine.start()
    wear.keep(0.0)
    assert 0 <= wear.left() <= NUM_BLOCKS
    assert all(math.isfinite(value) and value >= 0 for value in wear.stats().values())
    machine.now_s += 2 * DAY_S
    assert left_after_record(machine, wear) == NUM_BLOCKS


@pytest.mark.parametrize("endurance", [5e-324, "1/day", f"{10**300}/day"])
def test_absurd_budget_divides_nothing_by_zero(endurance):
    wear = Wear(NUM_BLOCKS, 4096)
    wear.limit(endurance)
    assert 0 <= wear.spare() <= 1
    wear.stats()
