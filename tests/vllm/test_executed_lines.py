"""The lines that README's configuration executes: functions that ran, and all lines outside of functions.

A profile function sees functions in Python. Those in Cython, of which many run without the GIL and some in threads of
C, are counted by gcov in a build of their own (KVCACHE_COVERAGE): Cython marks each C function with its line.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_options import BLOCK_BYTES
from test_limits import EXECUTED_LINES

ROOT = Path(__file__).resolve().parents[2]
COVERAGE = ROOT / "build" / "coverage"
"""Where the build with KVCACHE_COVERAGE leaves its objects; gcov counts beside them."""
HEAD = re.compile(r" *(def|cdef|cpdef) (?!class )[^=]*?\w+\(")


def functions(path: Path) -> list[set[int]]:
    """Return the lines of each function of a file, decorators included."""
    text = path.read_text()
    if path.suffix == ".pyx":
        return cython_functions(text.splitlines())
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    starts = [min([node.lineno, *(part.lineno for part in node.decorator_list)]) for node in nodes]
    return [{*range(start, (node.end_lineno or 0) + 1)} for start, node in zip(starts, nodes, strict=True)]


def cython_functions(lines: list[str]) -> list[set[int]]:
    spans, first, indent = [], 0, -1
    for number, line in enumerate([*lines, "end"], 1):
        code = line.partition("#")[0].rstrip()
        depth = len(code) - len(code.lstrip())
        # A signature of several lines ends at the depth of its first one.
        if not code or depth > indent >= 0 or code.lstrip().startswith(")"):
            continue
        if indent >= 0:
            spans.append({*range(first, number)})
            first, indent = 0, -1
        if code.lstrip().startswith("@"):
            first = first or number
        elif HEAD.match(code) and code.endswith((":", "(", ",")):
            first, indent = first or number, depth
        else:
            first = 0
    return spans


def compiled_calls() -> Iterator[tuple[str, int]]:
    """Yield file and first line of each function in Cython that ran."""
    counts = [str(path) for path in COVERAGE.rglob("*.gcda")]
    found = subprocess.run(["gcov", "--json-format", "--stdout", *counts], capture_output=True, text=True, check=True)
    for document in map(json.loads, found.stdout.splitlines()):
        for file in document["files"]:
            for function in file["functions"]:
                is_body = function["name"].startswith(("__pyx_f_", "__pyx_pf_"))  # of cdef and def; the rest is glue
                if is_body and function["execution_count"] and file["file"].endswith(".pyx"):
                    yield file["file"], function["start_line"]


def executed_lines(modules: list[str], calls: set[tuple[str, int]]) -> dict[str, int]:
    """Return how many lines that are not blank were executed in each file."""
    counts = {}
    for name in modules:
        base = ROOT.joinpath(*name.split("."))
        [path] = [path for path in (base / "__init__.py", *map(base.with_suffix, (".py", ".pyx"))) if path.is_file()]
        file = str(path.relative_to(ROOT))
        spans = functions(path)
        # Lambdas and generators count as their function.
        called = {line for called_file, line in calls if called_file == file}
        left_out = set().union(*spans) - set().union(*(span for span in spans if span & called))
        lines = enumerate(path.read_text().splitlines(), 1)
        counts[file] = sum(bool(line.strip()) and number not in left_out for number, line in lines)
    return counts


@pytest.mark.slow
def test_readme_configuration_executes_few_lines(models: dict[str, Path], tmp_path: Path) -> None:
    covered = os.environ.get("KVCACHE_COVERED")
    if covered is None:
        pytest.skip("KVCACHE_COVERED names no build that counts lines; tests/vllm/run makes one")
    for path in COVERAGE.rglob("*.gcda"):
        path.unlink()
    config = json.loads(re.findall(r"```json\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[0])
    options = config["kv_connector_extra_config"]
    options["cpu_bytes_to_use"] = 40 * BLOCK_BYTES
    [tier] = options["tiers"]
    tier.update(path=str(tmp_path / "kv"), capacity="64MiB")
    script = Path(__file__).with_name("readme_engine.py")
    ended = subprocess.run(
        [sys.executable, str(script), str(models["llama"]), json.dumps(config)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([covered, *sys.path])},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    ran = json.loads(ended.stdout.splitlines()[-1])
    assert min(ran["counts"].values()) > 0, ran["counts"]
    assert ran["counts"]["loaded"] > ran["counts"]["promoted"]
    python = {(str(Path(file).relative_to(covered)), line) for file, line in ran["called"] if file.startswith(covered)}
    compiled = {*compiled_calls()}
    counts = executed_lines(ran["modules"], python | compiled)
    unknown = compiled - {(file, line) for file in counts for span in functions(ROOT / file) for line in span}
    sources = [(ROOT / file).read_text().splitlines()[line - 1] for file, line in unknown]
    assert [text for text in sources if not text.lstrip().startswith(("cdef readonly", "cdef public"))] == []
    print(json.dumps(counts))  # shown with -s
    assert sum(counts.values()) <= EXECUTED_LINES
