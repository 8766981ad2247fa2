"""The code does not grow: lines of the first page, of what its configuration runs, and of the whole.

A limit stands here in one place. A change that needs more lines takes them from elsewhere.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(not (ROOT / "README.md").is_file(), reason="the sources are not beside the tests")
README_LINES = 80
RUN_LINES = 19_050
"""Lines that are not blank, of the .py and .pyx that the processes of README's configuration import."""
SERVING_LINES, LAB_LINES, TEST_LINES = 40_350, 9_710, 43_700
"""Lines of the sources of kvcache outside of its lab, of the lab, and of the tests."""

# Makes the manager and the handlers of a configuration, and prints the modules of kvcache that this has imported.
RUN = """
import json, sys, tempfile
import torch
from kvcache import (
    CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor, OffloadingConfig, OffloadingGroup, OffloadingWorker,
    make_spec,
)

with tempfile.TemporaryDirectory() as folder:
    options = json.loads(sys.argv[1]) | {"spec_name": "tiering", "pool_folder": folder, "cpu_bytes_to_use": "1MiB"}
    options["tiers"] = [{**tier, "path": folder + "/kv", "capacity": "4MiB"} for tier in options["tiers"]]
    refs = [[CanonicalKVCacheRef(0, 4096)]]
    config = OffloadingConfig((OffloadingGroup(16, ["layer"], refs[0]),), 16, extra_config=options)
    spec = make_spec(config)
    manager = spec.get_manager()
    tensor = torch.zeros((64, 4096), dtype=torch.int8)
    worker = OffloadingWorker()
    for source, destination, handler in spec.get_handlers(
        CanonicalKVCaches([CanonicalKVCacheTensor(tensor, 4096)], refs)
    ):
        worker.register_handler(source, destination, handler)
    worker.shutdown()
    manager.shutdown()
print(*(name for name in sys.modules if name.partition(".")[0] == "kvcache"))
"""


def readme_options() -> dict[str, object]:
    """Return the options of the first configuration in README.md."""
    [text] = re.findall(r"```json\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[:1]
    options = json.loads(text)["kv_connector_extra_config"]
    del options["spec_module_path"]
    return dict(options)


def imported_files() -> set[Path]:
    """Return the sources of the modules that README's configuration imports."""
    found = subprocess.run(
        [sys.executable, "-c", RUN, json.dumps(readme_options())], capture_output=True, text=True, check=True
    )
    files: set[Path] = set()
    for name in found.stdout.split():
        path = ROOT.joinpath(*name.split("."))
        if path.is_dir():
            files.add(path / "__init__.py")
        elif path.with_suffix(".pyx").is_file():
            files.add(path.with_suffix(".pyx"))
        else:
            files.add(path.with_suffix(".py"))
    # vLLM is not installed here. Its own tiers and the pool of a node are other configurations.
    adapter = (ROOT / "kvcache/integrations/vllm").glob("*.py")
    return files | {path for path in adapter if path.name not in ("tier.py", "node.py")}


def num_lines(files: set[Path]) -> int:
    return sum(bool(line.strip()) for path in files for line in path.read_text().splitlines())


@pytest.mark.slow
def test_readme_configuration_runs_few_lines() -> None:
    pytest.importorskip("torch")
    files = imported_files()
    assert ROOT / "kvcache/tiers/disk/tier.py" in files
    assert ROOT / "kvcache/transfer/worker.py" in files
    assert num_lines(files) <= RUN_LINES


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
