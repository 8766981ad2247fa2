"""Run the commands of README, quickstart, how-tos and Dockerfiles, each with exactly the extras that its page names.

An environment sees the Python of `make test`, the wheel of the checkout, and the packages that pip would install for
its extras: the wheel's metadata names them, and they are linked from `.venv`, which has all of them. Nothing is
downloaded, and environments share what Python compiles.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from markdown_it import MarkdownIt
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]

# The extras with which the blocks of a page run, up to its first commands; of WHOLE, all blocks. A page names its
# extras, but for `cli`: the quickstart says that the command `kvcache` needs it. `+` is before a package.
PAGES = {
    "README.md": "cli,disk",
    "docs/quickstart.md": "cli",
    "docs/howto/agents.md": "",
    "docs/howto/backend.md": "",
    "docs/howto/codec.md": "",
    "docs/howto/commands.md": "cli",
    "docs/howto/containers.md": "cli",
    "docs/howto/dataplane.md": "cli",
    "docs/howto/engine.md": "",
    "docs/howto/exporter.md": "",
    "docs/howto/gpu.md": "cli",
    "docs/howto/lmcache.md": "cli,disk,prometheus",
    "docs/howto/node.md": "cli",
    "docs/howto/operate.md": "cli,prometheus",
    "docs/howto/options.md": "cli",
    "docs/howto/own-traces.md": "cli",
    "docs/howto/policy.md": "",
    "docs/howto/record.md": "cli,record",
    "docs/howto/replay.md": "cli,plot",
    "docs/howto/retention.md": "",
    "docs/howto/rl.md": "",
    "docs/howto/routers.md": "cli,+msgspec,+pyzmq",
    "docs/howto/sglang.md": "cli,disk,prometheus",
    "docs/howto/stores.md": "cli,s3,valkey",
    "docs/howto/tier.md": "",
    "docs/howto/tiers.md": "cli,disk",
    "docs/howto/transformers.md": "cli,plot,transformers",
    "docs/howto/vllm.md": "cli,disk",
    "docs/howto/which-policy.md": "cli,disk",
}
WHOLE = ("README.md", "docs/quickstart.md")
PLANNER = (
    "kvcache plan trace.jsonl --blocks 20,100 --model llama-3.1-8b --policy lru,gittins --tier 100MiB@1GB/s",
    "kvcache replay trace.jsonl --blocks 100 --no-data",
    "kvcache fleet trace.jsonl --engines 2 --blocks 100",
)
# A missing package, or a fault: `kvcache check` may find that this machine lacks the memory or the disk of an example.
REFUSED = "pip install|Traceback"
CHECK = ["kvcache", "check", "config.json"]


STEPS = """
import doctest, json, subprocess
names = {"__name__": "__main__"}
for kind, text in json.load(open("steps.json")):
    if kind == "python":
        exec(text, names)
    elif kind == "console":
        subprocess.run(["bash", "-euc", text], check=True)
    elif kind == "doctest":
        runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
        examples = doctest.DocTestParser().get_doctest(text, names, "page", "page", 0)
        assert not runner.run(examples, clear_globs=False).failed
        names.update(examples.globs)
"""


class Environments:
    """Environments of named packages, in a temporary folder, over links to the packages of this Python."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._found = {
            canonicalize_name(dist.name): dist for dist in importlib.metadata.distributions() if dist.name != "kvcache"
        }
        wheel = next((ROOT / "build" / "wheel").glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder / "kvcache")
        self._own = next(importlib.metadata.distributions(path=[str(folder / "kvcache")]))

    def make(self, name: str, requirements: list[str]) -> Path:
        """Return the folder of commands of a new environment with `requirements` and all that they require."""
        closure: set[str] = set()
        self._close(requirements, closure)
        home = self._folder / name
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
        site = next(home.glob("lib/python*/site-packages"))
        folders = [self._folder / "kvcache", *(self._linked(part) for part in sorted(closure))]
        (site / "packages.pth").write_text("".join(f"{part}\n" for part in folders))
        command = home / "bin" / "kvcache"
        # As pip writes it: processes of a plan import it again.
        text = 'from kvcache.cli import main\n\nif __name__ == "__main__":\n    main()\n'
        command.write_text(f"#!{home}/bin/python\n{text}")
        command.chmod(0o755)
        return home / "bin"

    def required(self, extras: str) -> list[str]:
        """Return what the wheel requires with a list of extras, and packages after `+`; SystemExit if it lacks one."""
        packages = {part for part in extras.split(",") if part.startswith("+")}
        names = {part for part in extras.split(",") if part} - packages
        if missing := names - set(self._own.metadata.get_all("Provides-Extra") or ()):
            sys.exit(f"error: kvcache has no extra {', '.join(sorted(missing))}")
        return [*_requirements(self._own, names), *(package[1:] for package in sorted(packages))]

    def _close(self, requirements: list[str], closure: set[str], around: tuple[str, ...] = ()) -> None:
        for text in requirements:
            required = Requirement(text)
            name = canonicalize_name(required.name)
            if name not in self._found:
                sys.exit(f"error: {name} is not in the environment of `make test`")
            # Extras of one package may require those of another, and each other.
            if (asked := f"{name}{sorted(required.extras)}") not in around:
                closure.add(name)
                self._close(_requirements(self._found[name], set(required.extras)), closure, (*around, asked))

    def _linked(self, name: str) -> Path:
        """Return a folder that holds the files of one package alone, compiled ones included."""
        home = self._folder / "packages" / name
        if home.exists():
            return home
        dist = self._found[name]
        base = Path(str(dist.locate_file("")))
        for part in dist.files or ():
            if ".." in part.parts or part.suffix == ".pyc":
                continue
            source = base / part
            compiled = source.parent / "__pycache__" / f"{source.stem}.{sys.implementation.cache_tag}.pyc"
            for file in (source, compiled) if source.suffix == ".py" and compiled.exists() else (source,):
                target = home / file.relative_to(base)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.hardlink_to(file)
        return home


def _requirements(dist: importlib.metadata.Distribution, extras: set[str]) -> list[str]:
    parsed = [Requirement(text) for text in dist.requires or ()]
    choices = [{"extra": extra} for extra in extras or {""}]
    return [str(one).partition(";")[0] for one in parsed if not one.marker or any(map(one.marker.evaluate, choices))]


def run(title: str, bin_folder: Path, folder: Path, command: list[str]) -> None:
    """Run a command in an environment; SystemExit if it fails. A check of a configuration may find all but REFUSED."""
    environment = {**os.environ, "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}", "PYTHONSAFEPATH": "1"}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    output = done.stdout + done.stderr
    if re.search(REFUSED, output) if command == CHECK else done.returncode:
        sys.exit(f"error: {title}: {' '.join(command)[:200]}\n{output}")


def blocks_of(page: str) -> list[tuple[str, str]]:
    """Return the languages and texts of the blocks of a page that run: all, or those up to its first commands."""
    tokens = MarkdownIt().parse((ROOT / page).read_text())
    blocks = [(token.info.strip(), token.content) for token in tokens if token.type == "fence"]
    blocks = [block for block in blocks if block[0] in ("python", "console", "json")]
    if page in WHOLE:
        return blocks
    # Commands may need the files that blocks above them write.
    kinds = ["command" if "$ kvcache" in text else language for language, text in blocks]
    last = next((kinds.index(kind) for kind in ("command", "python", "json") if kind in kinds), -1)
    return blocks[: last + 1]


def run_page(page: str, bin_folder: Path, folder: Path) -> int:
    """Run the blocks of a page in `folder`, in one process: commands may ask what a Python block started."""
    steps = []
    for language, text in blocks_of(page):
        if language == "console":
            found = re.findall(r"^\$ (kvcache .*)", text.replace("\\\n", " "), re.MULTILINE)
            steps += [(language, command) for command in found]
        elif language == "json" and "cpu_bytes_to_use" in text:
            (folder / "config.json").write_text(text)
            run(page, bin_folder, folder, CHECK)
            steps.append((language, text))
        elif language == "python":
            steps.append(("doctest" if text.lstrip().startswith(">>>") else language, text))
    (folder / "steps.json").write_text(json.dumps(steps))
    run(page, bin_folder, folder, ["python", "-c", STEPS])
    return len(steps)


def planner_packages() -> list[str]:
    """Return the packages of the planner's image."""
    text = (ROOT / "examples" / "containers" / "planner.Dockerfile").read_text()
    return re.findall(r"pip install .*--constraint \S+ \\\n((?:\s+[\w ]+\\?\n?)+)", text)[0].replace("\\", "").split()


def extras_of(path: str, pattern: str) -> str:
    """Return the extras that a file names where `pattern` matches; SystemExit if it names none."""
    match = re.search(pattern, (ROOT / path).read_text())
    return match[1].replace("\\", "") if match else sys.exit(f"error: {path} names no extras: {pattern}")


def trials(environments: Environments) -> list[tuple[str, list[str], tuple[str, ...]]]:
    """Return what runs apart from pages: its name, its packages and its commands."""
    demo = extras_of("Makefile", r"(?m)^demo: \$\(VENV\)/extra-(\S+)[.]stamp")
    image = extras_of("examples/containers/vllm.Dockerfile", r"whl\)\[(\S+)\]")
    planner = extras_of("docs/quickstart.md", r'In your own environment.*\n\n.*\n\$ pip install "\.\[(\S+)\]"')
    engine = extras_of("docs/quickstart.md", r'own with a disk\ntier.*needs `pip install "\.\[(\S+)\]"')
    shown = "kvcache demo --requests 40 --no-data"
    return [
        ("make demo", environments.required(demo), (shown, *PLANNER)),
        (f"quickstart, [{planner}]", environments.required(planner), (shown, *PLANNER)),
        (f"quickstart, [{engine}]", environments.required(engine), (shown, *PLANNER, " ".join(CHECK))),
        ("planner.Dockerfile", planner_packages(), (*PLANNER, f"{PLANNER[0]} --save grid.png")),
        ("vllm.Dockerfile", environments.required(image), ("kvcache --version", *PLANNER)),
    ]


def write_inputs(folder: Path) -> None:
    """Write a trace and a configuration for the trials into `folder`."""
    lines = [
        {"timestamp": i * 100, "input_length": 1024, "output_length": 1, "hash_ids": [0, i % 9 + 1]} for i in range(50)
    ]
    (folder / "trace.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = {
        "cpu_bytes_to_use": "1MiB",
        "tiers": [{"type": "disk", "path": "kv", "capacity": "1MiB"}],
        "exporters": ["status", "prometheus"],
    }
    (folder / "config.json").write_text(json.dumps(config))


def main() -> None:
    """Check that each page names its extras, and run everything."""
    listed = {str(page.relative_to(ROOT)) for page in (ROOT / "docs" / "howto").glob("*.md")} | set(WHOLE)
    if listed != set(PAGES):
        sys.exit(f"error: PAGES lacks or invents {sorted(listed ^ set(PAGES))}")
    for page, extras in PAGES.items():
        text = (ROOT / page).read_text()
        for extra in set(extras.split(",")) - {"", "cli"}:
            named = extra[1:] if extra[0] == "+" else rf"extras? [^.\n]*`{extra}`|[.]\[[a-z,]*\b{extra}\b"
            if not re.search(named, text):
                sys.exit(f"error: {page} does not name the extra {extra}, with which its commands run here")
    # Beside the packages, so that they can be linked.
    (ROOT / "build").mkdir(exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="extras-", dir=ROOT / "build"))
    try:
        environments = Environments(work)
        by_extras = {
            extras: environments.make(f"venv-{i}", environments.required(extras))
            for i, extras in enumerate(sorted(set(PAGES.values())))
        }
        for page, extras in PAGES.items():
            folder = Path(tempfile.mkdtemp(dir=work))
            num_run = run_page(page, by_extras[extras], folder)
            print(f"{page}: {num_run} blocks and commands with [{extras}]", flush=True)
        for i, (title, requirements, commands) in enumerate(trials(environments)):
            bin_folder = environments.make(f"trial-{i}", requirements)
            folder = Path(tempfile.mkdtemp(dir=work))
            write_inputs(folder)
            for command in commands:
                run(title, bin_folder, folder, command.split())
            print(f"{title}: {len(commands)} commands", flush=True)
    finally:
        shutil.rmtree(work)


if __name__ == "__main__":
    main()
