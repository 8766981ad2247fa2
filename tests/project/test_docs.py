"""Every Python block and every cheap command of the README and the documentation runs."""

from __future__ import annotations

import doctest
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [page for page in PAGES if "_build" not in page.parts and page.exists()]
# Programs of commands that no test runs as they stand, and the reason.
NOT_RUN = {
    **dict.fromkeys(("make", ".ci/run", "pytest", "ruff", "mypy", "sphinx-build"), "a stage of CI, or a part of one"),
    **dict.fromkeys(("git", "pip", "cd", "export"), "sets up an environment, as .ci/extras.py does for the pages"),
    **dict.fromkeys(("vllm", "lmcache", "curl"), "needs a model, or a server of one"),
    **dict.fromkeys(("docker", "kubectl", "valkey-cli"), "needs containers or a server"),
    "asv": "takes minutes",
}
# The same of `python` and `kvcache` outside console blocks, by how the commands begin.
NOT_RUN_OUTSIDE = {
    "python -m asv_benchmarks": "takes minutes, or needs an engine; test_benchmark_without_trace_names_it",
    "python docs/pictures.py": "takes minutes, and needs the traces",
    "python -m mypy.stubtest": "a stage of CI",
    "python -m sglang": "needs a model",
    "python -m vllm": "needs a model",
    "kvcache selftest": "takes minutes; tests/lab/test_selftest.py",
    "kvcache bench": "takes minutes",
    "kvcache": "names a file, an engine or a store of the reader; its options are checked",
}
RUN_OUTSIDE = re.compile(
    r"kvcache (options|plan --models|metrics (table|dashboard|rules)\b.*)|python docs/features[.]py"
)
LOOSE = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


class Block(NamedTuple):
    language: str
    text: str
    line: int


def blocks_of(markdown):
    for token in MarkdownIt().parse(markdown):
        if token.type == "fence" and token.map:
            yield Block(token.info.strip().strip("{}"), token.content, token.map[0] + 1)


def run_python(block, page, names):
    if block.text.lstrip().startswith(">>>"):
        examples = doctest.DocTestParser().get_doctest(block.text, names, page, page, block.line)
        report = []
        runner = doctest.DocTestRunner(optionflags=LOOSE)
        runner.run(examples, out=report.append, clear_globs=False)
        assert not runner.failures, "".join(report)
        names.update(examples.globs)
    else:
        # Padded, so that a traceback names the page's own lines.
        exec(compile("\n" * block.line + block.text, page, "exec"), names)


def run_console(block, page):
    """Run the block's `$` commands and compare their output with the lines below each."""
    commands = []
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
        first = shlex.split(command.replace("\\\n", " "), comments=True)[0]
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


def run_blocks(page, runners):
    names = {"__name__": "__main__"}
    for block in blocks_of(page.read_text()):
        if block.language in runners:
            runners[block.language](block, name_of(page), names)


def name_of(page):
    return str(page.relative_to(ROOT))


every_page = pytest.mark.parametrize("page", PAGES, ids=name_of)
WITH_COMMANDS = [page for page in PAGES if "```console" in page.read_text()]


@pytest.mark.parametrize("page", [page for page in PAGES if page not in WITH_COMMANDS], ids=name_of)
def test_blocks_of_python_pages_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_blocks(page, {"python": run_python})


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=name_of)
def test_blocks_of_command_pages_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_blocks(page, {"python": run_python, "console": lambda block, name, _: run_console(block, name)})


def test_blocks_have_language_and_line():
    page = "# Title\n\n```python\na = 1\n```\n\n- item\n\n  ```console\n  $ kvcache --help\n  ```\n"
    assert list(blocks_of(page)) == [Block("python", "a = 1\n", 3), Block("console", "$ kvcache --help\n", 9)]


def test_wrong_block_fails():
    with pytest.raises(NameError):
        run_python(Block("python", "missing\n", 1), "page", {})
    with pytest.raises(AssertionError, match="Expected"):
        run_python(Block("python", ">>> 1 + 1\n3\n", 1), "page", {})
    with pytest.raises(AssertionError, match="printed"):
        run_console(Block("console", '$ python -c "print(1)"\n2\n', 1), "page")
    with pytest.raises(AssertionError, match="neither run here"):
        run_console(Block("console", "$ unheard-of\n", 1), "page")


def commands_of(page):
    """Yield each command that a page shows, and whether it is in a console block, where it runs."""
    programs = "|".join([re.escape(name) for name in (*NOT_RUN, "python", "kvcache")])
    for token in MarkdownIt().enable("table").parse(page.read_text()):
        language, text = token.info.strip(), token.content.replace("\\\n", " ")
        if token.type == "fence" and language in ("", "bash", "console", "text"):
            start = re.escape("$ ") if language in ("console", "text") else ""
            for line in re.findall(rf"^{start}((?:{programs}) .*)", text, re.MULTILINE):
                yield line, language == "console"
        elif token.type == "inline":
            spans = [part.content for part in token.children if part.type == "code_inline"]
            yield from ((span, False) for span in spans if re.match(f"({programs}) ", span))


def check_command(line):
    """Parse a command line of kvcache without running it: an unknown command or option raises."""
    from typer.main import get_command

    from kvcache.cli import _with_json_target, build_app

    words = shlex.split(line, comments=True)[1:]
    words = list(itertools.takewhile(lambda word: word not in (">", "|", "&&", ";"), words))
    command = get_command(build_app())
    while words and hasattr(command, "commands") and not words[0].startswith("-"):
        found, words = command.get_command(None, words[0]), words[1:]
        assert found is not None, f"no such command: {line}"
        command = found
    if not hasattr(command, "commands") and "--help" not in words:
        command.make_context(line, _with_json_target(words))


@every_page
def test_every_shown_command_has_its_options(page):
    for line, is_block in commands_of(page):
        # Not a line of the log, nor a command that is only named.
        if not line.startswith("kvcache ") or line.startswith("kvcache offloads") or "kvcache x " in line:
            continue
        try:
            check_command(line)
        except Exception as error:
            if not is_block and "No such" not in str(error):
                continue  # named without its arguments
            pytest.fail(f"{page.relative_to(ROOT)}: {line}: {error}")


@every_page
def test_shown_command_runs_or_is_listed(page, tmp_path):
    """Commands in console blocks run above; here those in the text, as far as they name nothing of the reader."""
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    makefile = (ROOT / "Makefile").read_text() if (ROOT / "Makefile").exists() else ""
    for line, is_run in commands_of(page):
        words = line.partition(" #")[0].split()
        if not is_run and RUN_OUTSIDE.fullmatch(line):
            folder = ROOT if words[0] == "python" else tmp_path
            done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)
            assert (done.returncode, bool(done.stdout)) == (0, True), f"{line}\n{done.stderr}"
        elif words[0] == "make":
            targets = [word for word in words[1:] if re.fullmatch("[a-z-]+", word) and word not in ("-k", "pytest")]
            assert [name for name in targets if not re.search(rf"(?m)^{name}\b[^=]*:", makefile)] == [], line
        elif words[:2] == ["python", "-m"] and words[2].startswith("asv_benchmarks."):
            assert (ROOT / words[2].replace(".", "/")).with_suffix(".py").exists(), line
        elif words[0] == "pytest":
            assert all((ROOT / word).exists() or word == "test_fewest.py" for word in words[1:]), line
        else:
            assert words[0] in NOT_RUN or is_run or any(line.startswith(start) for start in NOT_RUN_OUTSIDE), line


@pytest.mark.parametrize("words", ["side_by_side", "policy_cost gittins", "recording", "events"])
def test_benchmark_without_trace_names_it(tmp_path, words):
    """From a checkout with kvcache, and from no other folder."""
    for name in ("asv_benchmarks", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    module, *rest = words.split()
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", f"asv_benchmarks.{module}", *rest],
        env=os.environ | {"PYTHONPATH": path, "KVCACHE_SHARED": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert "conversation_trace.jsonl of FAST25-release/traces" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


@every_page
def test_every_configuration_has_valid_options(page, tmp_path):
    from kvcache.cli.findings import check_file

    for block in blocks_of(page.read_text()):
        if block.language == "json" and re.search("cpu_bytes_to_use|KVCacheL2", block.text):
            # A salt as the pages print it is refused.
            given = json.loads(block.text.replace("0f7c...a91e", "0" * 32))
            (tmp_path / "config.json").write_text(json.dumps(given.get("kv_transfer_config", given)))
            found = check_file(tmp_path / "config.json", 0, 1, None)
            wrong = [one for one in found if one.subject in ("options", "connector")]
            assert not wrong, f"{page.relative_to(ROOT)}:{block.line}: {wrong}"


def test_unknown_command_or_option_is_found():
    for line in ("kvcache stats", "kvcache status --jsn", "kvcache metrics dashbord"):
        with pytest.raises(Exception, match=r"stats|jsn|dashbord"):
            check_command(line)


@every_page
def test_every_metric_that_is_named_exists(page):
    from kvcache.exporters.dashboard import series_names

    named = set(re.findall(r"\b((?:vllm:)?kvcache_[a-z_]*[a-z])\b(?![.*])", page.read_text()))
    known = series_names() | series_names("vllm:kvcache_")
    histograms = {name.removesuffix("_bucket") for name in known if name.endswith("_bucket")}
    assert named <= known | histograms, named - known - histograms


def test_every_alert_has_its_section():
    from kvcache.exporters.dashboard import rules

    page = (ROOT / "docs" / "howto" / "operate.md").read_text()
    shown = re.findall(r"^### (KVCache\w+)\n\n(.*?)(?=^##)", page, re.MULTILINE | re.DOTALL)
    assert {name for name, _ in shown} == set(re.findall(r"alert: (\w+)", rules()))
    for name, text in shown:
        assert all(f"*{part}*" in text for part in ("Means", "Confirm", "Do")), name


def test_every_named_panel_exists():
    from kvcache.exporters.dashboard import dashboard

    titles = {panel["title"] for panel in dashboard()["panels"]}
    page = (ROOT / "docs" / "howto" / "operate.md").read_text()
    confirms = re.findall(r"\*Confirm\*:(.*?)\n\n", page, re.DOTALL)
    named = {name for text in confirms for name in re.findall(r"\*([A-Z][^*]+)\*", text)}
    assert len(named) == 6
    assert named <= titles
