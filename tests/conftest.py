"""Fixtures and hooks of all tests: the package under test, the selection of `make test`, and the shared traces."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing import current_process
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

import kvcache
from kvcache.testing import REFERENCE_POLICIES

# A run in a shell's background inherits an ignored SIGINT, and would pass that on to the commands that tests interrupt.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path(kvcache.__file__).resolve().parent
sys.path.insert(0, str(ROOT / "tests" / "references"))

# In CI every run draws the same examples: a red run must say something about the change.
settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile(
    "ci", settings.get_profile("default"), max_examples=40, derandomize=True, database=None, print_blob=True
)
PROFILE = "ci" if os.environ.get("CI") else "default"
settings.load_profile(PROFILE)
# For builds whose code another stage tests in full: pytest --hypothesis-profile=few.
settings.register_profile("few", settings.get_profile(PROFILE), max_examples=20)

# Where only the control plane is installed, tests of the rest have nothing to run on; anywhere else a missing package
# is a failure.
NUMPY_ONLY = os.environ.get("KVCACHE_NUMPY_ONLY") == "1"
OPTIONAL = {
    *("cryptography", "grafana_foundation_sdk", "markdown_it", "matplotlib", "moto", "msgspec", "obstore"),
    *("prometheus_client", "rich", "torch", "transformers", "typer", "valkey", "vllm", "xxhash", "zmq", "zstandard"),
}


def _is_debug_build() -> bool:
    try:
        return bool(importlib.import_module("kvcache.core.policy").DEBUG)
    except ImportError:
        return False


def pytest_configure(config: pytest.Config) -> None:
    REFERENCE_POLICIES.update(importlib.import_module("reference_policies").BUILT_IN)
    wanted = os.environ.get("KVCACHE_EXPECT_IN")
    if wanted and not PACKAGE.is_relative_to(Path(wanted).resolve()):
        raise pytest.UsageError(f"kvcache was to be imported from {wanted}, it came from {PACKAGE}")
    if os.environ.get("KVCACHE_EXPECT_DEBUG") == "1" and not _is_debug_build():
        raise pytest.UsageError(f"a debug build of kvcache was expected, {PACKAGE} is none")


def pytest_report_header() -> str:
    kind = "debug" if _is_debug_build() else "release"
    return f"kvcache: {kvcache.__version__}, {kind} build, {PACKAGE}"


def not_tested() -> list[str]:
    """Return what tests skip on this machine because something other than a Python package is missing."""
    programs = {
        "alert rules and the text of /metrics: no promtool (Debian's package prometheus)": ("promtool",),
        "the valkey tier: no server (valkey-server or redis-server)": ("valkey-server", "redis-server"),
    }
    path = os.pathsep.join([os.environ.get("PATH", ""), str(Path(sys.executable).parent)])
    lacking = [what for what, names in programs.items() if not any(shutil.which(name, path=path) for name in names)]
    if _shared_folder() is None:
        lacking.append("hits on recorded traffic: no folder of traces (KVCACHE_SHARED)")
    return lacking


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say at the end what was not tested: a skip among thousands of dots is easily missed."""
    lacking = not_tested()
    if lacking:
        terminalreporter.section("not tested on this machine")
        for line in lacking:
            terminalreporter.line(line)


def _missing_package(error: BaseException | None) -> str:
    """Return the package whose absence is at the bottom of an error, or nothing."""
    while error is not None and not isinstance(error, ModuleNotFoundError):
        error = error.__cause__
    return "" if error is None else (error.name or "").split(".")[0]


@contextmanager
def _optional_packages() -> Iterator[None]:
    try:
        yield
    except (ImportError, pytest.Collector.CollectError) as error:
        name = _missing_package(error)
        if NUMPY_ONLY and name in OPTIONAL:
            pytest.skip(f"needs {name}", allow_module_level=True)
        raise


class _Module(pytest.Module):
    def _getobj(self) -> object:
        with _optional_packages():
            return super()._getobj()


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
    return _Module.from_parent(parent, path=module_path)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> object:
    with _optional_packages():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> object:
    before_s = _cpu_s()
    with _optional_packages():
        result = yield
    used_s = _cpu_s() - before_s
    if used_s > MAX_CPU_S and not item.get_closest_marker("slow"):
        pytest.fail(f"the test took {used_s:.1f} s of CPU, more than {MAX_CPU_S:g}: mark it slow", pytrace=False)
    return result


# `make test` sets it to ten times the 2 s of CONTRIBUTING.md: a loaded machine must fail no test.
MAX_CPU_S = float(os.environ.get("KVCACHE_MAX_TEST_CPU_S", "inf"))
PROCESS_NAMES = {"subprocess", "multiprocessing", "ProcessPoolExecutor", "Popen", "fork"}
OTHER_POLICIES = {"arc"}


def _cpu_s() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests that start processes `slow`, and tests of `arc` `other_policy`."""
    known: dict[CodeType, bool] = {}
    for item in items:
        if not isinstance(item, pytest.Function):
            continue
        fixtures = [one.func for found in item._fixtureinfo.name2fixturedefs.values() for one in found]
        if any(_starts_process(function, known) for function in (item.function, *fixtures)):
            item.add_marker("slow")
        params = item.callspec.params.values() if hasattr(item, "callspec") else ()
        if any(_policy(one) in OTHER_POLICIES for one in (item.cls, *params)):
            item.add_marker("other_policy")


def _policy(param: object) -> str:
    """Return the policy that a class or a parameter of a test names, as "arc" for TestARC or "module:ReferenceARC"."""
    name = param if isinstance(param, str) else getattr(param, "__name__", "")
    return name.rpartition(":")[2].removeprefix("Test").removeprefix("Reference").removesuffix("CachePolicy").lower()


def _starts_process(function: object, known: dict[CodeType, bool]) -> bool:
    """Return whether a function or class of the tests names a way to start a process, or another one that does."""
    if isinstance(function, type):
        return any(_starts_process(member, known) for member in vars(function).values())
    function = getattr(function, "__func__", function)
    if hasattr(function, "hypothesis"):
        function = function.hypothesis.inner_test
    if not isinstance(function, FunctionType) or not function.__code__.co_filename.startswith(str(ROOT / "tests")):
        return False
    code = function.__code__
    if code not in known:
        known[code] = False  # a recursive call adds nothing
        names = set(_names(code))
        called = [function.__globals__.get(name) for name in names]
        known[code] = bool(names & PROCESS_NAMES) or any(_starts_process(one, known) for one in called)
    return known[code]


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


@pytest.fixture
def open_files(tmp_path: Path) -> Callable[[], list[str]]:
    """A function that returns this process's open files below `tmp_path`, deleted ones among them."""
    return lambda: [
        path for fd in Path("/proc/self/fd").iterdir() if (path := str(fd.resolve())).startswith(f"{tmp_path}/")
    ]


@pytest.fixture
def sockets(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of this user alone for sockets, and for status sockets without a path.

    Its own path is short, wherever TMPDIR lies: the path of a socket has at most 107 bytes.
    """
    with tempfile.TemporaryDirectory(prefix="kv-", dir="/tmp") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield Path(folder)


@pytest.fixture(autouse=True, scope="session")
def process_folder() -> Iterator[None]:
    """The folder in which a `multiprocessing.Manager` listens: its path is short, too."""
    # By this name: a fixture that names the module would mark every test as slow.
    with tempfile.TemporaryDirectory(prefix="kv-", dir="/tmp") as folder:
        current_process()._config["tempdir"] = folder  # type: ignore[attr-defined]
        yield


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run the `kvcache` command in this process; return exit status, standard output and standard error."""
    # Import here, so that a missing package can skip the test; the command would turn it into an exit status.
    for name in ("rich", "typer"):
        importlib.import_module(name)

    def command(*argv: object) -> tuple[int, str, str]:
        from kvcache.cli import main

        with pytest.raises(SystemExit) as caught:
            main([str(arg) for arg in argv])
        captured = capsys.readouterr()
        assert isinstance(caught.value.code, int)
        return caught.value.code, captured.out, captured.err

    return command


@pytest.fixture
def run_json(run: Callable[..., tuple[int, str, str]]) -> Callable[..., Any]:
    """Run a command with `--json`, and return the document that it prints."""

    def command(*argv: object) -> Any:
        status, out, err = run(*argv, "--json", "-")
        assert status == 0, err
        return json.loads(out)

    return command


@pytest.fixture
def write_trace(tmp_path: Path) -> Callable[..., Path]:
    """Write a Mooncake trace of requests, which arrive one after the other, and return its path."""

    def write(requests: Iterable[list[int]], step_ms: int = 1) -> Path:
        path = tmp_path / "trace.jsonl"
        lines = [
            {"timestamp": step_ms * i, "input_length": 512 * len(ids), "output_length": 1, "hash_ids": ids}
            for i, ids in enumerate(requests)
        ]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return path

    return write


def _shared_folder() -> Path | None:
    named = os.environ.get("KVCACHE_SHARED")
    folders = [Path(named)] if named else [ROOT.parent / "shared", ROOT.parent.parent / "shared"]
    return next((folder for folder in folders if (folder / "traces").is_dir()), None)


@pytest.fixture(scope="session")
def shared() -> Path:
    """Folder of traces and papers: `$KVCACHE_SHARED`, or `shared` beside the checkout or one level above."""
    folder = _shared_folder()
    if folder is None:
        pytest.skip("no shared traces here; KVCACHE_SHARED names their folder")
    return folder
