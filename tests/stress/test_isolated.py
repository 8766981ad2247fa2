"""Scripts of `tests/isolated` in processes of their own: nothing leaks, and killed writers of a disk lose nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

NUM_KILLS = int(os.environ.get("KVCACHE_KILLS", "0")) or round(30 * float(os.environ.get("KVCACHE_STRESS", "1")))


def run_script(name: str, *arguments: object, timeout_s: float) -> str:
    """Run a script and return its standard output."""
    command = [sys.executable, str(Path(__file__).parents[1] / "isolated" / name), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("kind", ["cpu", "backend"])
@pytest.mark.parametrize("policy", ["lru", "arc", "kvcache.testing.reference:ReferenceLRU"])
def test_manager_churn_loses_nothing(kind: str, policy: str) -> None:
    added_references, added_blocks, added_kib, *left = map(
        int, run_script("leaks.py", kind, policy, timeout_s=120).split()
    )
    assert (added_references, added_blocks, *left) == (0, 0, 0, 0)
    assert added_kib < 16


def test_many_transfers_leave_nothing_behind() -> None:
    report = json.loads(run_script("transfer_leaks.py", 100_000, timeout_s=300))
    assert report["ended"] == 100_000
    left = report["left"]
    # A leak of one job would be at least 100 bytes: 10 MB after all jobs.
    assert left["resident_bytes"] < 2 << 20
    assert left["traced_bytes"] < 64 << 10
    assert left["threads"] == left["files"] == left["threads_after_shutdown"] == 0


def test_killed_writers_lose_nothing_done(tmp_path: Path) -> None:
    counts = json.loads(run_script("disk_kills.py", tmp_path / "tier", NUM_KILLS, 7, timeout_s=60 + 3 * NUM_KILLS))
    print(counts)
    assert counts["kills"] == NUM_KILLS
    assert (counts["wrong"], counts["missing"], counts["stale"], counts["above_capacity"]) == (0, 0, 0, 0)
    assert counts["unlike_own_checker"] == 0
    # A block that a kill has cut is a miss. Counted as corrupt, it would alert that the medium is bad.
    assert counts["torn"] == 0
    assert counts["done"] > 20 * NUM_KILLS
    assert counts["verified"] > 20 * NUM_KILLS
    assert counts["resets"] > NUM_KILLS // 4
