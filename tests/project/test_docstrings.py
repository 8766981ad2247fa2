"""Docstrings of public callables describe parameters and return values, in a sentence or in a section."""

import importlib
import inspect
import re
from enum import Enum

MODULES = ["kvcache", "kvcache.testing", "kvcache.integrations.transformers"]
# What these are is said once, by `OffloadingManager`.
KNOWN = {"self", "cls", "key", "keys", "req_context"}


def public_callables():
    """Yield public functions and classes, and the methods that a class is the first to define."""
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
                inherited = {attribute for base in value.__mro__[1:] for attribute in vars(base)}
                for method_name, method in vars(value).items():
                    method = getattr(method, "__func__", method)
                    is_public = not method_name.startswith("_") and method_name not in inherited
                    if is_public and callable(method) and not inspect.isclass(method):
                        yield f"{module_name}.{name}.{method_name}", method


def undocumented(value):
    """Return the parameters that a docstring does not name, and "the result" where it says nothing of that."""
    doc = inspect.cleandoc(value.__doc__ or "")
    if not doc:
        # A test, a rule of a state machine.
        return []
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return []
    if re.search(r"; see `", doc):
        return []
    in_sections = re.findall(r"^(?:Parameters|Attributes)\n-+\n(.*?)(?=\n\n\w+\n--|\Z)", doc, re.M | re.S)
    terms = [line.partition(" :")[0] for text in in_sections for line in text.splitlines() if not line.startswith(" ")]
    named = {term.strip("* ") for line in terms for term in line.split(",")} | set(re.findall(r"`(\w+)`", doc))
    # A class may leave out fields that its users never set.
    is_described = inspect.isclass(value) and in_sections
    named |= {one.name for one in getattr(value, "__dataclass_fields__", {}).values() if "metric" in one.metadata}
    missing = [] if is_described else [name for name in signature.parameters if name not in named | KNOWN]
    returns = signature.return_annotation
    if (
        not inspect.isclass(value)
        and returns not in (None, "None", inspect.Signature.empty, "NoReturn")
        and not re.search(r"^(Returns|Yields)\n-+|\b(return|yield|estimate)\b", doc, re.M | re.I)
    ):
        missing.append("the result")
    return missing


def test_public_callables_document_parameters_and_results():
    faults = [f"{name}: {', '.join(found)}" for name, value in public_callables() if (found := undocumented(value))]
    assert not faults, "\n".join(faults)
