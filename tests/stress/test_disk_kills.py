"""Kill the writer of a disk tier at random: no wrong byte, no completed store is lost, no reset block returns."""

import json
import os
import subprocess
import sys
from pathlib import Path

NUM_KILLS = int(os.environ.get("KVCACHE_KILLS", "0")) or round(30 * float(os.environ.get("KVCACHE_STRESS", "1")))


def test_killed_writers_leave_no_wrong_byte_and_lose_nothing_done(tmp_path):
    script = Path(__file__).parents[1] / "isolated" / "disk_kills.py"
    command = [sys.executable, str(script), str(tmp_path / "tier"), str(NUM_KILLS), "7"]
    child = subprocess.run(command, capture_output=True, text=True, timeout=60 + 3 * NUM_KILLS, check=False)
    assert child.returncode == 0, child.stderr
    counts = json.loads(child.stdout)
    print(counts)
    assert counts["kills"] == NUM_KILLS
    assert (counts["wrong"], counts["missing"], counts["stale"], counts["above_capacity"]) == (0, 0, 0, 0)
    assert counts["unlike_own_checker"] == 0
    assert counts["done"] > 20 * NUM_KILLS
    assert counts["verified"] > 20 * NUM_KILLS
    assert counts["resets"] > NUM_KILLS // 4
