"""Scripts of `tests/isolated` in processes of their own: nothing leaks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


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
