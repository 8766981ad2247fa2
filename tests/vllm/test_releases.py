"""Names that our modules import from vLLM, in the installed release and in wheels that are only read.

`VLLM_WHEELS` lists wheels, separated by colons: CUDA builds, say, which cannot be installed here.
"""

from __future__ import annotations

import ast
import importlib
import os
import zipfile
from pathlib import Path

import pytest

import kvcache.integrations.vllm as adapter
from kvcache.integrations.vllm.releases import installed_release

WHEELS = [name for name in os.environ.get("VLLM_WHEELS", "").split(":") if name]
# In branches that `Release` allows for some releases only.
OF_SOME_RELEASES = {"vllm.v1.metrics.cache_hit_source": "load_source"}


def imported_names() -> set[tuple[str, str]]:
    """Return module and name of every import from vLLM in our package."""
    found = set()
    for path in Path(adapter.__path__[0]).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "vllm":
                found |= {(node.module, one.name) for one in node.names}
    assert len(found) > 15
    return found


def names_in(source: str) -> set[str]:
    """Return the names that a module's source binds at its top level."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {one.asname or one.name for one in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)  # vllm/__init__.py and platforms import by strings
    return found


def test_installed_release_has_imported_names() -> None:
    for module, name in imported_names():
        if module in OF_SOME_RELEASES and not getattr(installed_release(), OF_SOME_RELEASES[module]):
            continue
        assert hasattr(importlib.import_module(module), name), f"{module}.{name}"


@pytest.mark.skipif(not WHEELS, reason="needs VLLM_WHEELS")
@pytest.mark.parametrize("wheel", WHEELS, ids=lambda wheel: Path(wheel).name)
def test_releases_wheel_has_every_imported_name(wheel: str) -> None:
    with zipfile.ZipFile(wheel) as files:
        known = set(files.namelist())
        for module, name in imported_names():
            base = module.replace(".", "/")
            path = f"{base}.py" if f"{base}.py" in known else f"{base}/__init__.py"
            if module in OF_SOME_RELEASES and path not in known:
                continue
            assert path in known, module
            if f"{base}/{name}.py" not in known:
                assert name in names_in(files.read(path).decode()), f"{module}.{name}"
