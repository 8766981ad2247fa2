"""Without SGLang, these tests are not collected; `tests/sglang/run` has an environment for them."""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), *(str(Path(__file__).parents[1] / name) for name in ("stress", "tiers"))]
if find_spec("sglang") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def engine(monkeypatch, tmp_path):
    from host_pools import Engine, mha

    engines = []

    def start(pools=None, **options):
        extra = {"kind": "disk", "path": str(tmp_path / "tier"), "capacity": "4MiB", "deadline_s": 5}
        extra |= options.pop("extra", {})
        engines.append(Engine(monkeypatch, pools or {"kv": mha()}, extra, **options))
        return engines[-1]

    yield start
    for each in engines:
        if each.controller.storage_backend is not None:
            each.close()
