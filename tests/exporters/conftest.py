"""Fixtures of KV events; and the modules beside the tests can be imported."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def publisher() -> Iterator[Any]:
    """A publisher of whole hashes, which can be compared with keys."""
    harness = importlib.import_module("kv_harness")
    with harness.open_publisher() as made:
        yield made
