"""The README and the documentation tell the truth: every Python block runs, every cheap command too."""

from __future__ import annotations

import doctest
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [page for page in PAGES if "_build" not in page.parts]
# Setting up, which CI does by its own stages, and serving, which needs an engine.
NOT_RUN = {"git", "make", "pip", "cd", ".ci/run", "asv", "vllm", "sphinx-build"}
LOOSE = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


class Block(NamedTuple):
    language: str
    text: str
    line: int


def blocks_of(markdown: str) -> Iterator[Block]:
    for token in MarkdownIt().parse(markdown):
        if token.type == "fence" and token.map:
            yield Block(token.info.strip().strip("{}"), token.content, token.map[0] + 1)


def run_python(block: Block, page: str, names: dict[str, Any]) -> None:
    if block.text.lstrip().startswith(">>>"):
        examples = doctest.DocTestParser().get_doctest(block.text, names, page, page, block.line)
        report: list[str] = []
        runner = doctest.DocTestRunner(optionflags=LOOSE)
        runner.run(examples, out=report.append, clear_globs=False)
        assert not runner.failures, "".join(report)
        names.update(examples.globs)
    else:
        # Padded, so that a traceback names the page's own lines.
        exec(compile("\n" * block.line + block.text, page, "exec"), names)


def run_console(block: Block, page: str) -> None:
    """Run the block's `$` commands and compare what they print with the lines below them, if there are any."""
    commands: list[tuple[str, list[str]]] = []
    for line in block.text.splitlines(keepends=True):
        if line.startswith("$ "):
            commands.append((line[2:].rstrip("\n"), []))
        elif commands and commands[-1][0].endswith("\\"):
            commands[-1] = (commands[-1][0] + "\n" + line.rstrip("\n"), [])
        elif commands:
            commands[-1][1].append(line)
        else:
            pytest.fail(f"{page}:{block.line}: a console block begins with a command: $ ...")
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    for command, expected in commands:
        first = shlex.split(command.replace("\\\n", " "))[0]
        if first in NOT_RUN:
            continue
        assert first in {"kvcache", "python"}, f"{page}:{block.line}: neither run here nor known not to be: {command}"
        done = subprocess.run(
            ["bash", "-euc", command], capture_output=True, text=True, timeout=240, env=environment, check=False
        )
        assert done.returncode == 0, f"{page}:{block.line}: {command}\n{done.stdout}{done.stderr}"
        if expected:
            matches = doctest.OutputChecker().check_output("".join(expected), done.stdout, LOOSE)
            assert matches, f"{page}:{block.line}: {command} printed\n{done.stdout}"


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_every_block_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    name = str(page.relative_to(ROOT))
    for block in blocks_of(page.read_text()):
        if block.language == "python":
            run_python(block, name, names)
        elif block.language == "console":
            run_console(block, name)


def test_blocks_are_found_with_their_language_and_line() -> None:
    page = "# Title\n\n```python\na = 1\n```\n\n- item\n\n  ```console\n  $ kvcache --help\n  ```\n"
    assert list(blocks_of(page)) == [Block("python", "a = 1\n", 3), Block("console", "$ kvcache --help\n", 9)]


def test_a_wrong_block_fails() -> None:
    with pytest.raises(NameError):
        run_python(Block("python", "missing\n", 1), "page", {})
    with pytest.raises(AssertionError, match="Expected"):
        run_python(Block("python", ">>> 1 + 1\n3\n", 1), "page", {})
    with pytest.raises(AssertionError, match="printed"):
        run_console(Block("console", '$ python -c "print(1)"\n2\n', 1), "page")
    with pytest.raises(AssertionError, match="neither run here"):
        run_console(Block("console", "$ unheard-of\n", 1), "page")
