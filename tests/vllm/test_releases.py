"""Names that our modules import from vLLM, in the installed release and in wheels that are only read.

`VLLM_WHEELS` lists wheels, separated by colons: CUDA builds, say, which cannot be installed here.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.util
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
from scheduling import BLOCK_TOKENS
from vllm.v1.kv_offload.base import OffloadingEvent

import kvcache.integrations.vllm as adapter
from kvcache.integrations.vllm.releases import installed_release

WHEELS = [name for name in os.environ.get("VLLM_WHEELS", "").split(":") if name]


CALLS = (
    *("on_new_request", "lookup", "prepare_load", "complete_load", "prepare_store", "complete_store"),
    *("on_request_finished", "on_schedule_end", "take_events"),
)


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
        has_name = hasattr(importlib.import_module(module), name) or importlib.util.find_spec(f"{module}.{name}")
        assert has_name, f"{module}.{name}"


def test_installed_release_differs_as_table_says() -> None:
    fields = {field.name for field in dataclasses.fields(OffloadingEvent)}
    assert ("metadata_only" in fields) is installed_release().metadata_only


def test_scheduler_calls_in_known_order(make_engine: Any) -> None:
    engine = make_engine(200, 100, step_tokens=1024, has_device_cache=False)
    calls: list[str] = []

    def record(name: str) -> None:
        method = getattr(engine.manager, name)

        def recorded(*args: Any, **options: Any) -> Any:
            if calls[-1:] != [name]:
                calls.append(name)
            return method(*args, **options)

        setattr(engine.manager, name, recorded)

    for name in CALLS:
        record(name)
    for number in range(2):
        engine.add(str(number), [*range(1, 8 * BLOCK_TOKENS + 1), 2])
        engine.drain()
    end, last = ["on_schedule_end"], installed_release().ends_step_last
    steps = [
        ["on_new_request", "lookup", *(["prepare_store", *end] if last else [*end, "prepare_store"])],
        ["on_request_finished", *end] if last else [*end, "on_request_finished"],
        [*end, "complete_store"],
        # The second request loads what the first one stored.
        ["on_new_request", "lookup", "prepare_load", *end],
        [*end, "complete_load"],
        end,
    ]
    assert calls == [call for step in steps for call in (*step, "take_events")]


@pytest.mark.skipif(not WHEELS, reason="needs VLLM_WHEELS")
@pytest.mark.parametrize("wheel", WHEELS, ids=lambda wheel: Path(wheel).name)
def test_releases_wheel_has_every_imported_name(wheel: str) -> None:
    with zipfile.ZipFile(wheel) as files:
        known = set(files.namelist())
        for module, name in imported_names():
            base = module.replace(".", "/")
            path = f"{base}.py" if f"{base}.py" in known else f"{base}/__init__.py"
            assert path in known, module
            if f"{base}/{name}.py" not in known:
                assert name in names_in(files.read(path).decode()), f"{module}.{name}"
