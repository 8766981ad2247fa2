"""Every name that our modules import from vLLM is in the installed release."""

import ast
import importlib
from pathlib import Path

import kvcache.integrations.vllm as adapter
from kvcache.integrations.vllm.releases import installed_release

# Imported under `Release.load_source` only.
HIT_SOURCE = "vllm.v1.metrics.cache_hit_source"


def test_releases_installed_release_has_every_imported_name():
    imported = {
        (node.module, one.name)
        for path in Path(adapter.__path__[0]).glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "vllm"
        for one in node.names
    }
    assert len(imported) > 15
    for module, name in imported:
        if module != HIT_SOURCE or installed_release().load_source:
            assert hasattr(importlib.import_module(module), name), f"{module}.{name}"
