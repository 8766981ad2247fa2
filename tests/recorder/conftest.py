"""Fixtures of recordings; and the modules beside the tests can be imported."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kvcache import CPUOffloadingManager

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.kvlog"


@pytest.fixture
def manager():
    return CPUOffloadingManager(16, 100)
