"""Managers leak no key objects and no blocks; a separate process counts them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "isolated" / "leaks.py"


@pytest.mark.parametrize("kind", ["cpu", "backend"])
@pytest.mark.parametrize("policy", ["lru", "arc", "mq", "amq", "lfuda", "kvcache.testing.reference:ReferenceLRU"])
def test_churn_loses_neither_keys_nor_blocks(kind: str, policy: str) -> None:
    command = [sys.executable, str(SCRIPT), kind, policy]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    added_references, added_blocks, added_kib, left_references, left_blocks = map(int, done.stdout.split())

    assert (added_references, added_blocks) == (0, 0)
    assert (left_references, left_blocks) == (0, 0)
    assert added_kib < 16
