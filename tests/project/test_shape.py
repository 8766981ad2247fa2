"""Outside the lab, classes and Cython functions stay small, and local names are nouns; names of tests are short.

ruff limits the statements and arguments of functions in Python (`max-statements`, `max-args`).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(not (ROOT / "kvcache").is_dir(), reason="the sources are not beside the tests")
MAX_ATTRIBUTES = 16
MAX_CYTHON_LINES = 80
MAX_VAGUE_SHARE = 0.01
MAX_TEST_WORDS = 6
VAGUE = {"one", "found", "given", "fresh", "wanted", "own", "left"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def sources(suffix: str) -> Iterator[tuple[str, str]]:
    """Yield the name below `kvcache/` and the text of each file."""
    package = ROOT / "kvcache"
    for path in sorted(package.rglob(f"*{suffix}")):
        name = str(path.relative_to(package))
        if not name.startswith("lab/"):
            yield name, path.read_text()


def named(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.ClassDef | Function]]:
    """Yield classes and functions with their qualified names."""
    for node in ast.iter_child_nodes(tree):
        name = prefix
        if isinstance(node, ast.ClassDef | Function):
            name = f"{prefix}.{node.name}".lstrip(".")
            yield name, node
        yield from named(node, name)


@cache
def members() -> list[tuple[str, ast.ClassDef | Function]]:
    """Return the classes and functions in Python, with file and qualified name."""
    return [(f"{file}:{name}", node) for file, text in sources(".py") for name, node in named(ast.parse(text))]


def attributes(node: ast.ClassDef) -> set[str]:
    """Return the names that methods of a class assign on `self`, not those of classes within it."""
    inner = {id(part) for other in ast.walk(node) if isinstance(other, ast.ClassDef) and other is not node
             for part in ast.walk(other)}  # fmt: skip
    return {
        part.attr
        for part in ast.walk(node)
        if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store) and id(part) not in inner
        if isinstance(part.value, ast.Name) and part.value.id == "self"
    }


def cython_functions(text: str) -> Iterator[tuple[str, int]]:
    """Yield the functions of a .pyx and their lines, without docstrings."""
    text = re.sub(r'"""(?:.|\n)*?"""', '""', text)
    owner, stack = "", []
    lines = [*text.splitlines(), "end"]
    last_code = 0
    for number, line in enumerate(lines):
        if not line.strip():
            continue
        indent = len(line) - len(line.lstrip())
        is_closing = line.lstrip().startswith((")", "#"))
        while stack and indent <= stack[-1][0] and not is_closing:
            _, name, start = stack.pop()
            yield name, last_code - start + 1
        if match := re.match(r"(?:cdef |cpdef )?class (\w+)", line):
            owner = f"{match[1]}."
        elif (match := re.match(r" *(?:def|cdef|cpdef) [^=#]*?(\w+)\(", line)) and line.endswith((":", "(", ",")):
            stack.append((indent, (owner if indent else "") + match[1], number))
        last_code = number


def local_names(node: Function) -> set[str]:
    """Return the names that a function assigns; its parameters and functions within it have names of their own."""
    inner = {id(part) for other in ast.walk(node) if isinstance(other, Function) and other is not node
             for part in ast.walk(other)}  # fmt: skip
    stores = (part for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store))
    return {part.id for part in stores if id(part) not in inner}


def above(sizes: dict[str, int], limit: int) -> list[str]:
    """Return the names that exceed `limit`, with their sizes."""
    return [f"{name}: {size}, at most {limit}" for name, size in sorted(sizes.items()) if size > limit]


def test_classes_have_few_attributes():
    sizes = {name: len(attributes(node)) for name, node in members() if isinstance(node, ast.ClassDef)}
    assert above(sizes, MAX_ATTRIBUTES) == []


def test_cython_functions_are_short():
    sizes = {f"{file}:{name}": size for file, text in sources(".pyx") for name, size in cython_functions(text)}
    assert len(sizes) > 100
    assert above(sizes, MAX_CYTHON_LINES) == []


def vague_names() -> tuple[list[str], int]:
    """Return the vague local names with their functions, and the number of all local names."""
    vague, num_names = [], 0
    for name, node in members():
        if isinstance(node, Function):
            names = local_names(node)
            num_names += len(names)
            vague += [f"{name}: {local}" for local in sorted(names & VAGUE)]
    return vague, num_names


def test_local_names_say_what_they_hold():
    vague, num_names = vague_names()
    assert len(vague) <= MAX_VAGUE_SHARE * num_names, vague


def test_names_of_tests_are_short():
    paths = [*(ROOT / "tests").rglob("*.py"), *(ROOT / "kvcache" / "testing").rglob("*.py")]
    names = {name for path in paths for name in re.findall(r"def test_(\w+)\(", path.read_text())}
    assert len(names) > 1000
    assert above({name: len(name.split("_")) for name in names}, MAX_TEST_WORDS) == []
    assert [name for name in sorted(names) if re.match("(a|an|the)_", name)] == []


SHAPE = '''
class Outer:
    def method(self, x):
        """Say
        much."""
        self.a = self.b = x
        self.c, (self.d, other.e) = x
        self.a += 1
        with x as self.f:
            pass

    class Inner:
        def method(self):
            self.g = 1
'''
CYTHON = '''
cdef class Table(Base):
    cdef int a
    cdef void on_use(self, const int32_t* rows,
                     Py_ssize_t n) noexcept nogil:
        """Say
        much."""
        cdef int b = f(1)

        x()
    def other(self):
        # why
        return 1

cdef inline int last(int x) noexcept:
    return x
'''


def test_sizes_are_counted():
    nodes = dict(named(ast.parse(SHAPE)))
    assert attributes(nodes["Outer"]) == set("abcdf")
    assert attributes(nodes["Outer.Inner"]) == {"g"}
    assert dict(cython_functions(CYTHON)) == {"Table.on_use": 6, "Table.other": 3, "last": 2}
    assert above({"a": 5, "b": 9, "c": 6}, 6) == ["b: 9, at most 6"]
