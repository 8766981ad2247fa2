"""Add the parameters and types of compiled classes, which only their stubs declare, to the API pages."""

from __future__ import annotations

import ast
import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx


@cache
def declared(module: str) -> dict[str, ast.FunctionDef]:
    """Return the functions and methods of a module's stub by qualified name; a class stands for its constructor."""
    spec = importlib.util.find_spec(module)
    stub = None if spec is None or spec.origin is None else Path(spec.origin.partition(".cpython")[0] + ".pyi")
    if stub is None or not stub.exists():
        return {}
    found = {}
    for node in ast.parse(stub.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = node
        elif isinstance(node, ast.ClassDef):
            for part in node.body:
                if isinstance(part, ast.FunctionDef):
                    is_constructor = part.name in ("__init__", "__new__")
                    found[node.name if is_constructor else f"{node.name}.{part.name}"] = part
    return found


def add_parameters(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Append the parameters that the stub declares, unless the docstring has its own."""
    if what not in ("class", "method", "function") or any("Parameters" in line for line in lines):
        return
    # A constructor may be that of a base class.
    owners = obj.__mro__ if what == "class" else [getattr(obj, "__objclass__", obj)]
    for owner in owners:
        qualified = owner.__qualname__ if what == "class" else getattr(obj, "__qualname__", "")
        if function := declared(getattr(owner, "__module__", None) or "builtins").get(qualified):
            break
    else:
        return
    lines.append("")
    for one in [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]:
        if one.arg not in ("self", "cls") and one.annotation is not None:
            lines += [f":param {one.arg}:", f":type {one.arg}: {ast.unparse(one.annotation)}"]
    lines.append("")


def setup(app: Sphinx) -> dict[str, bool]:
    """Run after numpydoc, which turns the sections of a docstring into fields."""
    app.connect("autodoc-process-docstring", add_parameters, priority=900)
    return {"parallel_read_safe": True}
