"""A hundred thousand transfers leak no memory, threads or files."""

import json
import subprocess
import sys
from pathlib import Path


def test_a_hundred_thousand_jobs_leave_nothing_behind():
    script = Path(__file__).parents[1] / "isolated" / "transfer_leaks.py"
    ended = subprocess.run(
        [sys.executable, str(script), "100000"], capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.returncode == 0, ended.stderr
    report = json.loads(ended.stdout)
    assert report["ended"] == 100_000
    left = report["left"]
    # A leak of one job would be at least 100 bytes: 10 MB after all jobs.
    assert left["resident_bytes"] < 2 << 20
    assert left["traced_bytes"] < 64 << 10
    assert left["threads"] == left["files"] == left["threads_after_shutdown"] == 0
