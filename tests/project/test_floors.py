"""The floors of docs/design.md hold: a file imports lower ones only, and of third parties what its room may."""

from __future__ import annotations

import ast
import fnmatch
import graphlib
import re
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
DESIGN = ROOT / "docs" / "design.md"
# What Cython brings itself; `cimport`s of these need no package at run time.
CYTHON_OWN = {"cpython", "cython", "libc", "libcpp", "posix"}


class Room(NamedTuple):
    floor: int
    modules: list[str]
    third_parties: set[str]


class Import(NamedTuple):
    module: str
    line: int
    typing_only: bool


def rooms():
    """Read the table of docs/design.md: floor, room, modules, third parties, purpose."""
    found = []
    for line in DESIGN.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) == 5 and cells[0].isdigit():
            modules, third_parties = re.findall(r"`([\w.*]+)`", cells[2]), re.findall(r"`(\w+)`", cells[3])
            found.append(Room(int(cells[0]), modules, set(third_parties)))
    return found


def room_of(module, table):
    for room in table:
        if any(fnmatch.fnmatchcase(module, pattern) for pattern in room.modules):
            return room
    pytest.fail(f"{module} has no place in the table of {DESIGN}: give it one")


def sources():
    """Return every module of the checkout and its files (a `.pyx` and its `.pxd` are one module)."""
    found = {}
    for path in sorted((ROOT / "kvcache").rglob("*.p*")):
        if path.suffix in {".py", ".pyx", ".pxd"}:
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            found.setdefault(module, []).append(path)
    return found


def imports_of_python(text, package):
    typing_lines = set()
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}:
            typing_lines.update(range(node.body[0].lineno, (node.body[-1].end_lineno or 0) + 1))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, node.lineno in typing_lines)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parts, *([node.module] if node.module else [])])
            for alias in node.names:
                yield Import(f"{base}.{alias.name}", node.lineno, node.lineno in typing_lines)


def imports_of_cython(text):
    blank = lambda match: "\n" * match.group().count("\n")  # noqa: E731
    text = re.sub(r'"""(?:.|\n)*?"""', blank, text)
    text = re.sub(r"#.*", "", text)
    text = re.sub(r"\(([^()]*)\)", lambda match: match.group().replace("\n", " "), text)
    for line_number, line in enumerate(text.splitlines(), 1):
        if match := re.match(r"\s*from\s+([\w.]+)\s+c?import\s+(.+)", line):
            assert not match[1].startswith("."), f"line {line_number}: write absolute imports"
            for name in re.findall(r"(\w+)(?:\s+as\s+\w+)?", match[2]):
                yield Import(f"{match[1]}.{name}", line_number, False)
        elif match := re.match(r"\s*c?import\s+(.+)", line):
            for name in match[1].split(","):
                yield Import(name.split()[0], line_number, False)


@cache
def imports_of(path, module):
    text = path.read_text()
    if path.suffix != ".py":
        return [*imports_of_cython(text)]
    return [*imports_of_python(text, module if path.stem == "__init__" else module.rpartition(".")[0])]


def target_of(wanted, known):
    """Return the module that an import names: `from package import name` may mean either of the two."""
    return next((name for name in (wanted.module, wanted.module.rpartition(".")[0]) if name in known), None)


def fault_of(module, wanted, known, table):
    """Describe the fault of one import, or return None."""
    own = room_of(module, table)
    top = wanted.module.split(".")[0]
    if top != "kvcache":
        if wanted.typing_only or top in CYTHON_OWN or top in sys.stdlib_module_names or top in own.third_parties:
            return None
        return f"{top} is not among the third parties of its room"
    # ruff (SLF001) finds private attributes. `_native` is a folder that its own package imports from.
    if re.search(r"\._(?!_|native\b)", wanted.module):
        return f"{wanted.module} is a private name"
    target = target_of(wanted, known)
    if target is None:
        return f"{wanted.module} does not exist"
    room = room_of(target, table)
    return None if room is own or room.floor < own.floor else f"{target} does not stand below it"


needs_sources = pytest.mark.skipif(not (ROOT / "kvcache").is_dir(), reason="the sources are not beside the tests")


@needs_sources
def test_every_file_imports_lower_floors_only():
    table, modules = rooms(), sources()
    faults = [
        f"{path.relative_to(ROOT)}:{wanted.line}: {module} imports {wanted.module}: {fault}"
        for module, paths in modules.items()
        for path in paths
        for wanted in imports_of(path, module)
        if (fault := fault_of(module, wanted, set(modules), table))
    ]
    assert not faults, "\n".join(faults)


@needs_sources
def test_modules_import_in_no_circle():
    """Imports for annotations count, too: a circle of types is a circle of subjects."""
    modules = sources()
    graph = {
        module: {
            target
            for path in paths
            for wanted in imports_of(path, module)
            if (target := target_of(wanted, set(modules))) not in {None, module}
        }
        for module, paths in modules.items()
    }
    graphlib.TopologicalSorter(graph).prepare()  # CycleError names the circle


@needs_sources
def test_every_place_has_a_file():
    modules = sources()
    assert [pattern for room in rooms() for pattern in room.modules if not fnmatch.filter(modules, pattern)] == []


TABLE = [
    Room(0, ["kvcache.specs", "kvcache.registry", "kvcache.request"], {"numpy"}),
    Room(1, ["kvcache.core.*"], set()),
    Room(2, ["kvcache.control.cpu"], set()),
    Room(2, ["kvcache.control.backend"], set()),
]
KNOWN = {"kvcache.specs", "kvcache.registry", "kvcache.request", "kvcache.core.policy_adapter"}
KNOWN |= {"kvcache.control.backend", "kvcache.control.cpu"}


@pytest.mark.parametrize(
    ("module", "wanted", "typing_only", "fault"),
    [
        ("kvcache.control.cpu", "kvcache.core.policy_adapter.Table", False, None),
        ("kvcache.control.cpu", "kvcache.core.policy_adapter", False, None),
        ("kvcache.registry", "kvcache.request.ReqContext", False, None),
        ("kvcache.specs", "kvcache.registry.Registry", False, None),
        ("kvcache.specs", "numpy", False, None),
        ("kvcache.core.policy_adapter", "libc.stdint.int32_t", False, None),
        ("kvcache.core.policy_adapter", "kvcache.control.cpu.CPUOffloadingManager", True, "does not stand below"),
        ("kvcache.control.cpu", "kvcache.control.backend.Backend", False, "does not stand below"),
        ("kvcache.control.cpu", "torch", False, "third parties"),
        ("kvcache.control.cpu", "kvcache.nowhere.name", False, "does not exist"),
        ("kvcache.control.cpu", "kvcache.core.policy_adapter._Table", False, "private name"),
    ],
)
def test_import_is_judged_by_the_table(module, wanted, typing_only, fault):
    answer = fault_of(module, Import(wanted, 1, typing_only), KNOWN, TABLE)
    assert answer is None if fault is None else fault in (answer or "")


def test_imports_are_read_from_every_file():
    python = "from __future__ import annotations\nif TYPE_CHECKING:\n    import torch\nfrom .base import Policy\n"
    assert set(imports_of_python(python, "kvcache.policies")) == {
        Import("__future__.annotations", 1, False),
        Import("torch", 3, True),
        Import("kvcache.policies.base.Policy", 4, False),
    }
    cython = '"""Why:\nimport nothing\n"""\ncimport cython\nfrom libc.string cimport ( # c\n    memcpy,\n    memset)\n'
    found = [wanted.module for wanted in imports_of_cython(cython)]
    assert found == ["cython", "libc.string.memcpy", "libc.string.memset"]
