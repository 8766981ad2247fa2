"""The code does not grow: lines of the first page, of what its configuration runs, and of the whole.

A limit stands here in one place. A change that needs more lines takes them from elsewhere.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(not (ROOT / "README.md").is_file(), reason="the sources are not beside the tests")
README_LINES = 80
EXECUTED_LINES = 12_197
"""Lines of .py and .pyx that README's configuration executes under vLLM (tests/vllm/test_executed_lines.py)."""
SERVING_LINES, LAB_LINES, TEST_LINES = 39_461, 11_263, 43_790
"""Lines of the sources of kvcache outside of its lab, of the lab, and of the tests."""


def test_whole_does_not_grow() -> None:
    counts: Counter[str] = Counter()
    for part in ("kvcache", "tests"):
        for path in (ROOT / part).rglob("*.*"):
            if path.suffix in (".py", ".pyx", ".pyi", ".pxd", ".h"):
                is_lab = path.is_relative_to(ROOT / "kvcache/lab")
                counts["lab" if is_lab else part] += path.read_bytes().count(b"\n")
    assert counts["kvcache"] <= SERVING_LINES
    assert counts["lab"] <= LAB_LINES
    assert counts["tests"] <= TEST_LINES


def test_readme_is_one_page() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES
