"""Policies are picked by name, by class or by path; for entry points see project/test_examples.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import kvcache.policies
from kvcache import ARCCachePolicy, CPUOffloadingManager, LRUCachePolicy
from kvcache.registry import CODECS, EXPORTERS, POLICIES, SPECS, TIERS, Registry
from kvcache.testing.reference import ReferenceLRU

BUILT_IN = ["lru", "arc", "gittins"]


def test_built_in_names_are_documented() -> None:
    assert POLICIES.names()[: len(BUILT_IN)] == BUILT_IN
    pages = Path(__file__).resolve().parents[1] / "docs" / "api"
    for registry, page in ((POLICIES, "policies.md"), (TIERS, "tiers.md")):
        # Not imported: a tier may need a package that is not here.
        names = {path.partition(":")[2] for path in registry._paths.values() if path.startswith("kvcache.")}
        text = (pages / page).read_text(encoding="utf-8")
        assert sorted(name for name in names if f"{name}\n" not in text) == []
        if registry is POLICIES:
            assert names <= set(kvcache.__all__) & set(vars(kvcache.policies))


def test_policy_resolves_by_class_or_path() -> None:
    by_class = CPUOffloadingManager(16, 4, ReferenceLRU)
    by_path = CPUOffloadingManager(16, 4, "kvcache.testing.reference:ReferenceLRU")

    assert type(by_class.policy) is type(by_path.policy) is ReferenceLRU
    assert POLICIES.resolve("kvcache.policies.arc:ARCCachePolicy") is ARCCachePolicy is POLICIES.resolve("arc")
    assert kvcache.policies.LRUCachePolicy is LRUCachePolicy is POLICIES.resolve("lru")


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ("lrru", r"unknown policy 'lrru', known ones: lru, arc, gittins.*did you mean 'lru'"),
        ("", "unknown policy ''"),
        ("no_such_package.module:Policy", "cannot be imported"),
        ("kvcache.policies.lru:NoSuchPolicy", "cannot be imported"),
        (":", "policy ':' must be 'package.module:Class'"),
        ("kvcache:", "policy 'kvcache:' must be 'package.module:Class'"),
        (".policies:LRUCachePolicy", r"policy '.policies:LRUCachePolicy' must be 'package.module:Class'"),
        ("kvcache.options:parse_size", "must name a class"),
        (7, "must be a name, a class or 'package.module:Class', got 7"),
        (None, "got None"),
    ],
)
def test_non_policy_is_refused(choice: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CPUOffloadingManager(16, 4, choice)


@pytest.mark.parametrize("registry", [POLICIES, TIERS, CODECS, SPECS, EXPORTERS])
def test_resolve_class_of_another_kind_raises(registry: Registry) -> None:
    for choice in (dict, "builtins:dict"):
        with pytest.raises(ValueError, match=f"{registry.kind} .*dict.* must be a subclass of .*, got <class 'dict'>"):
            registry.resolve(choice)


def test_registered_name_cannot_be_taken_twice() -> None:
    registry = Registry("policy", "kvcache.no_such_group", {"lru": "kvcache.policies.lru:LRUCachePolicy"})
    registry.register("mine", "kvcache.testing.reference:ReferenceLRU")
    registry.register("mine", "kvcache.testing.reference:ReferenceLRU")

    assert registry.names() == ["lru", "mine"]
    assert registry.resolve("mine") is ReferenceLRU
    with pytest.raises(ValueError, match=r"policy 'lru' is already 'kvcache\.policies\.lru:LRUCachePolicy'"):
        registry.register("lru", "kvcache.testing.reference:ReferenceLRU")
    with pytest.raises(ValueError, match="got 'no colon'"):
        registry.register("other", "no colon")
