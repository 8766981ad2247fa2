"""The budget of a disk's writes: granted evenly, kept over restarts and kills, and blind to clocks that are set."""

import math
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache.tiers.base import wear as wear_module
from kvcache.tiers.base.wear import DAY_S, RECORD_BYTES, Wear, parse_endurance
from kvcache.tiers.disk.directory import clear_directory
from kvcache.tiers.disk.tier import DiskTier

NUM_BLOCKS = 1000


class Machine:
    """A clock, and the bytes that the lock file of a disk holds."""

    def __init__(self):
        self.now_s, self.record = 5000.0, b""

    def start(self, endurance=1.0):
        wear = Wear(NUM_BLOCKS, 4096, is_kept=True, clock=lambda: self.now_s)
        if endurance is not None:
            wear.limit(endurance)
        wear.restore(self.record)
        return wear

    def save(self, wear, is_last=False):
        self.record, num_kept = wear.record(is_last)
        wear.keep(num_kept)


def started():
    machine = Machine()
    wear = machine.start()
    machine.save(wear, is_last=True)
    wear.keep(0.0)
    return machine, wear


@pytest.mark.parametrize(
    ("given", "parsed"),
    [(3, 3.0), ("0.3", 0.3), ("6TiB/day", f"{6 << 40}/day"), (" 1 GB/day", "1000000000/day"), (1000, 1000.0)],
)
def test_endurance_is_drives_or_bytes(given, parsed):
    assert parse_endurance("endurance", given) == parsed


INVALID = [0, -1, True, None, "", "3x", "6TiB", "0/day", "nan", math.inf, 1001, [3], "6TiB/week"]


@pytest.mark.parametrize("given", INVALID)
def test_invalid_endurance_names_value(given):
    with pytest.raises(ValueError, match="endurance"):
        parse_endurance("endurance", given)


def test_bytes_count_blocks_of_slots():
    wear = Wear(NUM_BLOCKS, 4096)
    wear.limit(parse_endurance("endurance", "4MiB/day"))
    assert wear.per_day == 1024


def test_day_grants_budget_evenly():
    machine, wear = started()
    assert wear.left() == pytest.approx(NUM_BLOCKS / 1440)
    machine.now_s += DAY_S / 4
    assert wear.left() == pytest.approx(250 + NUM_BLOCKS / 1440)
    wear.spend(300)
    assert wear.left() == 0
    machine.now_s += 10 * DAY_S
    assert wear.left() == NUM_BLOCKS


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


def test_nothing_is_granted_before_record():
    wear = Machine().start()
    assert wear.left() == 0


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


def test_other_boot_grants_nothing(monkeypatch):
    machine, wear = started()
    wear.spend(1)
    machine.save(wear, is_last=True)
    machine.now_s += DAY_S
    with monkeypatch.context() as patch:
        patch.setattr(wear_module, "_boot_id", lambda: b"another.")
        again = machine.start()
        machine.save(again, is_last=True)
        assert again.stats()["left_blocks"] == 0
    assert machine.start().left() == 0


@pytest.mark.parametrize("record", [b"", b"x" * RECORD_BYTES, bytes(RECORD_BYTES), b"\xff" * 200])
def test_damaged_record_is_ignored(record):
    machine = Machine()
    machine.record = record
    wear = machine.start()
    machine.save(wear)
    wear.keep(0.0)
    assert wear.left() == pytest.approx(NUM_BLOCKS / 1440)


STEPS = st.tuples(st.sampled_from(["wait", "write", "save", "stop", "kill"]), st.integers(0, 20_000))


@given(st.lists(STEPS, max_size=60))
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


def test_disk_keeps_budget_over_restarts(tmp_path):
    rows = np.zeros((4, 4096), np.uint8)
    path, capacity = tmp_path / "tier", DiskTier.capacity_for(NUM_BLOCKS, 4096)

    def opened():
        tier = DiskTier(path, capacity, rows, flush_interval_s=0.01)
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
