"""Plant faults in a copy of the package, one at a time, and report which stage of the tests finds them.

    python tests/mutants/mutants.py [areas] [--sample N] [--stages folder test all] [--results FILE] [--jobs N]

A table `<area>.tsv` beside this file has `cost` and the seconds that the tests of the area take, then a line with a
file's path, and for each fault of it: what breaks, the old text and the new text, with tabs between them and a sign
for the end of a line in them.
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import dataclasses
import importlib
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
STAGES = ("folder", "test", "all")
NEWLINE = "\u23ce"
COMPILED = {".pyx": 10, ".pxd": 40, ".h": 60}  # seconds to compile again, about
NEEDED = (*("kvcache", "tests", "docs", "examples", "asv_benchmarks", ".ci", "setup.py", "pyproject.toml", "Makefile"),
          *("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "constraints.txt", "MANIFEST.in"))  # fmt: skip
TEST_TIMEOUT_S = 120
PACKAGES = ("hypothesis", "jsonschema", "msgspec", "numpy", "opentelemetry.sdk.metrics", "prometheus_client", "pytest",
            "transformers", "torch", "valkey", "vllm.v1.kv_offload.tiering.spec", "zmq", "zstandard")  # fmt: skip
# `make test-vllm` and its like make their environments.
ENGINE_PYTHONS = {f"tests/{engine}": ROOT / f".venv-{engine}/bin/python" for engine in ("vllm", "sglang", "lmcache")}
ENGINE_ARGUMENTS = ["--override-ini=filterwarnings=default", "--disable-warnings"]


@dataclasses.dataclass(frozen=True)
class Fault:
    """One fault: a text that occurs once in a file of the package, and the faulty text in its place."""

    area: str
    file: str
    breaks: str
    old: str
    new: str
    cost_s: float

    @property
    def id(self) -> str:
        return f"{self.file}: {self.breaks}"

    def apply(self, text: str) -> str:
        """Return a file's text with the fault. Raise ValueError if the old text does not occur exactly once."""
        count = text.count(self.old)
        if count != 1 or self.old == self.new:
            raise ValueError(f"{self.file}: {self.breaks!r} does not apply: its old text occurs {count} times")
        return text.replace(self.old, self.new)


def read_faults(folder: Path = HERE) -> list[Fault]:
    """Read the table: every fault of every area, in the order of the files."""
    faults = []
    for path in sorted(folder.glob("*.tsv")):
        cost_s, file = 0.0, ""
        for line in path.read_text().splitlines():
            cells = line.replace(NEWLINE, "\n").split("\t")
            if len(cells) == 3:
                faults.append(Fault(path.stem, file, *cells, cost_s + COMPILED.get(Path(file).suffix, 0)))
            elif line.startswith("cost "):
                cost_s = float(line[5:])
            else:
                file = line
    return faults


def read_tests(contributing: str) -> dict[str, list[str]]:
    """Return the tests of each file and folder that the table of CONTRIBUTING names."""
    tests: dict[str, list[str]] = {}
    for line in contributing.splitlines():
        cells = line.strip("|").split("|")
        if not line.startswith("|") or len(cells) != 4:
            continue
        named = [name for name in re.findall(r"tests/[\w/.]*\w", cells[2] + cells[3]) if (ROOT / name).exists()]
        folder = "kvcache/"
        for path in re.findall(r"`([\w./]+)`", cells[1]):
            # A name alone stands in the folder of the path before it; a path without `kvcache/` in the package.
            path = path if path.startswith("kvcache/") else f"kvcache/{path}" if "/" in path else folder + path
            folder = path[: path.rfind("/") + 1]
            if (ROOT / path).exists():
                known = tests.setdefault(path, [])
                known += [name for name in dict.fromkeys(named) if name not in known]
    return tests


def tests_of(file: str, tests: dict[str, list[str]]) -> list[str]:
    """Return the tests of a file: those named for it or for the innermost folder that has any."""
    for name in [file, *(f"{parent}/" for parent in Path(file).parents)]:
        if tests.get(name):
            return tests[name]
    raise ValueError(f"CONTRIBUTING names no tests for {file}")


def python_of(tests: list[str]) -> Path | None:
    """Return the Python of the engine that the tests need; None: they need none."""
    return next((path for folder, path in ENGINE_PYTHONS.items() if any(folder in name for name in tests)), None)


class Copy:
    """A copy of the checkout in which one fault at a time is planted, and a second one that stays as it is."""

    def __init__(self, folder: Path, pristine: Path) -> None:
        self.folder = folder
        self.pristine = pristine
        self.flaky: list[str] = []
        self.servers: dict[Path, Server] = {}
        # The test files that found faults of a file of the package: they run first.
        self.finders: dict[str, Counter[str]] = defaultdict(Counter)
        shutil.copytree(pristine, folder)

    def server(self, tests: list[str]) -> Server:
        """Return the server whose environment the tests need."""
        python = python_of(tests) or Path(sys.executable)
        if python not in self.servers:
            self.servers[python] = Server(python, self.folder.parent)
        return self.servers[python]

    def close(self) -> None:
        """End the servers."""
        for server in self.servers.values():
            server.process.__exit__(None, None, None)

    def plant(self, fault: Fault) -> bool:
        """Apply a fault and compile what depends on it. Return whether it compiles."""
        path = self.folder / fault.file
        path.write_text(fault.apply(path.read_text()))
        return path.suffix not in COMPILED or build(self.folder)

    def restore(self) -> None:
        """Copy back what planting and compiling have changed."""
        for root in ("kvcache", "build"):
            for path in (self.pristine / root).rglob("*"):
                mine = self.folder / path.relative_to(self.pristine)
                if path.is_file() and path.suffix != ".pyc":
                    before, after = path.stat(), mine.stat() if mine.exists() else None
                    if after is None or (before.st_mtime_ns, before.st_size) != (after.st_mtime_ns, after.st_size):
                        shutil.copy2(path, mine)


def make_pristine(folder: Path) -> None:
    """Copy the files that the tests read, with the built modules, and compile outdated modules."""
    folder.mkdir()
    skipped = shutil.ignore_patterns("__pycache__", "_build", "html", "results")
    for name in NEEDED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=skipped)
        else:
            shutil.copy2(source, folder)
    # Objects of an earlier build in the checkout save compiling: times of files travel with them.
    for source in [ROOT / "build" / "cython", *(ROOT / "build").glob("temp.*")]:
        if source.is_dir():
            shutil.copytree(source, folder / "build" / source.name)
    if not build(folder):
        raise SystemExit("the package does not compile without any fault")
    compileall.compile_dir(folder, quiet=2)


def build(folder: Path) -> bool:
    # A fault needs no fast code, and compiles in a quarter of the time without.
    env = {**os.environ, "KVCACHE_OPTIMIZE": "0", "KVCACHE_BUILD_JOBS": "1", "PYTHONPATH": ""}
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True).returncode == 0


def serve(packages: tuple[str, ...]) -> None:
    """Import packages, then run pytest in a fork for each line of standard input, as JSON; print its exit status."""
    for name in packages:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    for line in sys.stdin:
        task = json.loads(line)
        pid = os.fork()
        if pid == 0:
            os.setsid()
            os.chdir(task["folder"])
            output = os.open(task["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for target, source in enumerate([os.open(os.devnull, os.O_RDONLY), output, output]):
                os.dup2(source, target)
            os.environ.update(task["env"])
            sys.path.insert(0, task["folder"])
            # Loops use up their CPU time, locks the test's own limit; the deadline is for what neither ends.
            resource.setrlimit(resource.RLIMIT_CPU, (int(task["limit_s"]), int(task["limit_s"]) + 5))
            sys.exit(importlib.import_module("pytest").main(task["arguments"]))
        deadline = time.monotonic() + 10 * task["limit_s"]
        status = 0, 0
        while not status[0] and time.monotonic() < deadline:
            status = os.waitpid(pid, os.WNOHANG)
            time.sleep(0.02)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        if not status[0]:
            status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status[1]), flush=True)


class Server:
    """A process that has imported what tests need, and forks for each run of pytest."""

    def __init__(self, python: Path, scratch: Path) -> None:
        # Byte code of a planted file could be taken for that of the next one; the copies bring their own.
        env = {
            **os.environ,
            "PYTHONSAFEPATH": "1",
            "PYTHONHASHSEED": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
        }
        env["PATH"] = f"{python.parent}{os.pathsep}{env['PATH']}"
        for name in ("KVCACHE_EXPECT_IN", "KVCACHE_MAX_TEST_CPU_S"):
            env.pop(name, None)
        self.process = subprocess.Popen(
            [python, Path(__file__), "--serve"], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.output = scratch / f"output-{self.process.pid}"

    def run(self, folder: Path, arguments: list[str], env: dict[str, str], limit_s: float) -> tuple[int, str]:
        """Run pytest in a folder; return its exit status and what it printed."""
        task = {"folder": str(folder), "arguments": arguments, "env": env, "limit_s": limit_s}
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({**task, "output": str(self.output)}) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline()), self.output.read_text(errors="replace")


def run_stage(server: Server, folder: Path, stage: str, tests: list[str], limit_s: float, without: list[str]) -> str:
    """Run the tests of a stage until one fails; return its name, "hangs", "crashes", or "" if all pass."""
    shared = [path for path in (ROOT.parent / "shared", ROOT.parent.parent / "shared") if (path / "traces").is_dir()]
    env = {"PYTHONPATH": str(folder), "CI": "true"}
    env |= {"KVCACHE_SHARED": str(shared[0])} if shared and "KVCACHE_SHARED" not in os.environ else {}
    marks = {
        "folder": "not slow or cuda",
        "test": "not slow and not other_policy",
        "all": "slow or other_policy or hypothesis",
    }
    if stage == "all" or any("tests/device" in name for name in tests):
        env |= {"KVCACHE_SIMULATED_DEVICE": "1", "KVCACHE_SCHEDULES": "6"}
    if stage != "folder" and not any("::" in name for name in tests):
        tests = ["tests"]
    # Rewritten assertions say more, and take longer.
    arguments = ["-x", "-q", "--assert=plain", "-p", "no:cacheprovider", f"--timeout={TEST_TIMEOUT_S}"]
    arguments += ["--hypothesis-profile=few", "-m", marks[stage], "--ignore-glob=tests/mutants"]
    arguments += ENGINE_ARGUMENTS if python_of(tests) else [f"--ignore-glob={folder}" for folder in ENGINE_PYTHONS]
    status, output = server.run(folder, [*arguments, *(f"--deselect={name}" for name in without), *tests], env, limit_s)
    if status in (0, 5):
        return ""
    failed = re.search(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", output, re.MULTILINE)
    return failed[1] if failed else "hangs" if status in (-signal.SIGXCPU, -signal.SIGKILL) else "crashes"


def nearest(file: str, tests: list[str], finders: Counter[str]) -> list[str]:
    """Return the test files that found most faults of a file so far, and those named like it."""
    named = [path for name in tests for path in sorted((ROOT / name).glob(f"**/test_*{Path(file).stem}*.py"))]
    most = [name for name, _ in finders.most_common(2)]
    return list(dict.fromkeys([*most, *(path.relative_to(ROOT).as_posix() for path in named)]))


def _by_device(tests: list[str]) -> list[list[str]]:
    return [[name for name in tests if ("tests/device" in name) == is_device] for is_device in (False, True)]


def try_fault(copy: Copy, fault: Fault, stages: list[str], limit_s: float) -> dict[str, object]:
    """Plant one fault, run the stages until one finds it, and return the result."""
    started = time.monotonic()
    tests = tests_of(fault.file, read_tests((copy.pristine / "CONTRIBUTING.md").read_text()))
    server = copy.server(tests)
    near = nearest(fault.file, tests, copy.finders[fault.file])
    found, how, flaky = "", "", copy.flaky
    try:
        if not copy.plant(fault):
            found, how = "folder", "does not compile"
        for stage in stages if not found else []:
            # To import all tests takes longer than to run those that are likely to find the fault.
            steps = [near, tests] if near and stage == "folder" else [tests]
            # The simulated device becomes the accelerator of a whole process.
            steps = [part for step in steps for part in _by_device(step) if part]
            while steps and not found:
                how = run_stage(server, copy.folder, stage, steps[0], limit_s, flaky)
                # A test that fails without the fault, too, has found nothing: go on without it.
                if "tests/" in how and run_stage(server, copy.pristine, stage, [how], limit_s, []) == how:
                    flaky.append(how)
                    continue
                found = stage if how else ""
                del steps[0]
    finally:
        copy.restore()
    copy.finders[fault.file].update([how.split("::")[0]] if "::" in how else [])
    seconds = round(time.monotonic() - started, 1)
    return {"fault": fault.id, "area": fault.area, "found": found, "by": how, "stages": stages, "flaky": [*flaky],
            "seconds": seconds}  # fmt: skip


def draw(faults: list[Fault], count: int, budget_s: float, rng: random.Random) -> list[Fault]:
    """Draw faults in random order, as many as the budget allows; those that would exceed it are passed over."""
    chosen: list[Fault] = []
    for fault in rng.sample(faults, len(faults)):
        if len(chosen) < count and fault.cost_s <= budget_s:
            chosen.append(fault)
            budget_s -= fault.cost_s
    return chosen


def table(results: list[dict[str, object]], faults: list[Fault]) -> str:
    """Return the results by area, and the faults that were not found."""
    by_area = {area: Counter() for area in sorted({fault.area for fault in faults})}
    for result in results:
        by_area[str(result["area"])][str(result["found"])] += 1
    total: Counter[str] = sum(by_area.values(), Counter())
    lines = [f"{'area':<14}{'faults':>8}{'run':>6}" + "".join(f"{name:>8}" for name in (*STAGES, "not")) + "   found"]
    for area, counts in [*by_area.items(), ("all areas", total)]:
        known, run = sum(area in (fault.area, "all areas") for fault in faults), counts.total()
        share = f"{1 - counts[''] / run:>8.0%}" if run else f"{'-':>8}"
        cells = "".join(f"{counts[name]:>8}" for name in (*STAGES, ""))
        lines.append(f"{area:<14}{known:>8}{run:>6}{cells}{share}")
    missed = [f"  {result['fault']}" for result in results if not result["found"]]
    return "\n".join([*lines, *(["not found:"] if missed else []), *missed])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("areas", nargs="*", help="names of areas, or parts of files' paths (default: all)")
    parser.add_argument("--sample", type=int, help="draw this number of faults")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6), help="of the sample")
    parser.add_argument("--budget-s", type=float, default=float("inf"), help="CPU time that a sample may need, about")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--limit-s", type=float, default=300, help="CPU time of a stage; beyond it, a fault is found")
    parser.add_argument("--results", type=Path, help="JSON lines, appended; a fault in it is not run again")
    parser.add_argument("--least-share", type=float, default=0, help="exit with 1 if a smaller share is found")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.serve:
        serve(PACKAGES)
        return 0
    named = read_tests((ROOT / "CONTRIBUTING.md").read_text())
    faults = []
    for fault in read_faults():
        fault.apply((ROOT / fault.file).read_text())
        python = python_of(tests_of(fault.file, named))
        faults += [fault] if python is None or python.exists() else []
    areas = args.areas or [""]
    chosen = [fault for fault in faults if any(area in (fault.area, "") or area in fault.file for area in areas)]
    if args.sample:
        print(f"a sample of {args.sample}, --seed {args.seed}", flush=True)
        chosen = draw(chosen, args.sample, args.budget_s, random.Random(args.seed))
    lines = args.results.read_text().splitlines() if args.results is not None and args.results.exists() else []
    ids = {fault.id for fault in chosen}
    results = {row["fault"]: row for row in map(json.loads, lines) if row["fault"] in ids}
    # A fault that was not found is run again if a later stage is asked for.
    todo = [one for one in chosen if one.id not in results or not (
        results[one.id]["found"] or set(args.stages) <= set(results[one.id]["stages"]))]  # fmt: skip
    if todo:
        with tempfile.TemporaryDirectory(prefix="mutants-") as scratch:
            make_pristine(Path(scratch, "pristine"))
            copies: SimpleQueue[Copy] = SimpleQueue()
            for i in range(args.jobs):
                copies.put(Copy(Path(scratch, f"copy{i}"), Path(scratch, "pristine")))

            def run(fault: Fault) -> dict[str, object]:
                copy = copies.get()
                try:
                    return try_fault(copy, fault, args.stages, args.limit_s)
                finally:
                    copies.put(copy)

            with ThreadPoolExecutor(args.jobs) as pool:
                for result in pool.map(run, todo):
                    results[str(result["fault"])] = result
                    verdict = f"{result['found'] or 'NOT FOUND'} {result['by']}"
                    print(f"{result['seconds']:6} s  {result['fault']}: {verdict}", flush=True)
                    if args.results is not None:
                        with args.results.open("a") as file:
                            file.write(json.dumps(result) + "\n")
            while not copies.empty():
                copies.get().close()
    print(table(list(results.values()), chosen))
    share = sum(bool(row["found"]) for row in results.values()) / len(results) if results else 1.0
    return int(share < args.least_share)


if __name__ == "__main__":
    sys.exit(main())
