"""Every configuration of the documentation and of the tests is parsed as before, and refused with the same errors.

`configurations.json` holds one configuration a line, the function that reads it, and its result: the options that
differ from their defaults, or the errors.
"""

from __future__ import annotations

import importlib
import json
import re
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

from kvcache.assembly.assemble import OffloadSettings, TierSettings, parse_tier
from kvcache.integrations.vllm.settings import Placement, read_config, read_tier
from kvcache.options import Component, OptionError

CASES = [json.loads(line) for line in Path(__file__).with_name("configurations.json").read_text().splitlines()]
PACKAGES = {"disk": "xxhash", "mooncake": "xxhash", "valkey": "valkey", "zstd": "zstandard", "fp8": "torch"}
PACKAGES |= {"prometheus": "prometheus_client"}


def described(value: Any) -> Any:
    """Return a parsed value as JSON has it; of options, those that differ from their defaults."""
    if isinstance(value, TierSettings):
        return [value.cls.__name__, described(value.config), described(value.options)]
    if isinstance(value, Component):
        return [value.cls.__name__, described(value.options)]
    if isinstance(value, Placement):
        settings = described(value.settings)
        # As the other options, without the policy that they have by default.
        return {name: one for name, one in {**settings, "cache_policy": value.policy}.items() if one != "lru"}
    if is_dataclass(value) and not isinstance(value, type):
        named = {one.name: (getattr(value, one.name), one.default) for one in fields(value)}
        return {name: described(one) for name, (one, default) in named.items() if default is MISSING or one != default}
    if isinstance(value, type):
        return f"{value.__module__}:{value.__qualname__}"
    if isinstance(value, dict):
        return {str(name): described(one) for name, one in value.items()}
    return [described(one) for one in value] if isinstance(value, list | tuple) else value


def result_of(case: dict[str, Any]) -> Any:
    reader, given = case["reader"], case["given"]
    try:
        if reader == "pool":
            parsed: Any = OffloadSettings.parse_part(given, case.get("where", ""))
        elif reader == "tier":
            parsed = parse_tier(given)
        elif reader == "vllm tier":
            parsed = read_tier(given)
        else:
            parsed = read_config(given, case.get("num_groups", 1))
    except ValueError as error:
        problems = error.problems if isinstance(error, OptionError) else [str(error)]
        # A new policy or option changes the lists of known ones only.
        return {"errors": [re.sub(r"(known ones: |one of )[^;:]*?(?=$|;|, got )", r"\1", text) for text in problems]}
    return {"result": described(parsed)}


def _types(given: Any) -> set[str]:
    """Return the names of the components in a configuration."""
    if isinstance(given, dict):
        named = {one for key, one in given.items() if key in ("type", "kind") and isinstance(one, str)}
        return named.union(*map(_types, given.values()))
    if isinstance(given, list):
        return set().union(*({one} if isinstance(one, str) else _types(one) for one in given))
    return set()


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['reader']}-{json.dumps(case['given'])[:60]}")
def test_configuration_gives_recorded_result(case: dict[str, Any]) -> None:
    for name in sorted(_types(case["given"]) & PACKAGES.keys()):
        # Without its package, a component is refused for another reason.
        importlib.import_module(PACKAGES[name])
    assert result_of(case) == {name: case[name] for name in ("result", "errors") if name in case}
