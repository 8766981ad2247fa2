"""The ledger of features names every file of kvcache in one row."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
pytestmark = pytest.mark.skipif(
    not ((DOCS / "features.py").is_file() and (DOCS.parent / "kvcache").is_dir()),
    reason="the sources are not beside the tests",
)


def test_every_file_stands_in_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOCS))
    from features import files_of

    files = files_of()
    assert files.pop("") == []
    assert [entry for entry, paths in files.items() if not paths] == []
    sys.modules.pop("features")
