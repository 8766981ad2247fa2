"""What our modules expect of the installed release of vLLM: names that they import, and the order of its calls."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.util
from pathlib import Path
from typing import Any

from scheduling import BLOCK_TOKENS
from vllm.v1.kv_offload.base import OffloadingEvent

import kvcache.integrations.vllm as adapter
from kvcache.integrations.vllm.releases import installed_release

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
