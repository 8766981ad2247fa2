"""Public callables say what they take and what they return."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from enum import Enum
from typing import Any

MODULES = ["kvcache", "kvcache.testing", "kvcache.exporters.kv_events", "kvcache.integrations.transformers"]


def public_callables() -> Iterator[tuple[str, Any]]:
    """Yield public functions and classes, and the methods that a class defines itself."""
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        names = getattr(module, "__all__", None) or [
            name for name, value in vars(module).items() if getattr(value, "__module__", "") == module_name
        ]
        for name in names:
            value = getattr(module, name)
            if not callable(value) or name.startswith("_") or (inspect.isclass(value) and issubclass(value, Enum)):
                continue
            yield f"{module_name}.{name}", value
            if inspect.isclass(value):
                for method_name, method in vars(value).items():
                    method = getattr(method, "__func__", method)
                    if not method_name.startswith("_") and callable(method) and not inspect.isclass(method):
                        yield f"{module_name}.{name}.{method_name}", method


def missing_sections(value: Any) -> list[str]:
    """Return the numpydoc sections that a docstring lacks."""
    doc = inspect.cleandoc(value.__doc__ or "")
    if not doc:
        # An override is documented where it is declared.
        return []
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return []
    params = [param for param in signature.parameters.values() if param.name not in {"self", "cls"}]
    missing = []
    sections = "Parameters|Attributes" if inspect.isclass(value) else "Parameters"
    if params and not re.search(rf"^({sections})\n-+", doc, re.M):
        missing.append("Parameters")
    returns = signature.return_annotation
    if (
        not inspect.isclass(value)
        and returns not in (None, "None", inspect.Signature.empty, "NoReturn")
        and not re.search(r"^(Returns|Yields)\n-+", doc, re.M)
    ):
        missing.append("Returns")
    return missing


def test_public_callables_document_parameters_and_results() -> None:
    faults = [f"{name}: {', '.join(found)}" for name, value in public_callables() if (found := missing_sections(value))]
    assert not faults, "\n".join(faults)
