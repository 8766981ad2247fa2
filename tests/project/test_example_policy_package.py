"""The example of a policy in a package of its own is installed by pip, tested by its own tests, and found by name."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "second_chance"


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Install the example beside kvcache and return the environment that sees both."""
    if not EXAMPLE.is_dir():
        pytest.skip("the examples are not beside these tests")
    pytest.importorskip("setuptools")
    work = tmp_path_factory.mktemp("package")
    source = work / "source"
    source.mkdir()
    for path in EXAMPLE.rglob("*.*"):
        if path.is_file() and "__pycache__" not in path.parts and "egg-info" not in str(path):
            copy = source / path.relative_to(EXAMPLE)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
    site = work / "site"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--target", str(site), str(source)], check=True, timeout=120)
    inherited = [str(Path(part).resolve()) for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), *inherited]), "TESTS": str(source / "tests")}


def test_its_own_tests_pass(installed):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib"]
    tests = Path(installed["TESTS"])
    # The contract is run in full on every policy of the package's own.
    (tests / "conftest.py").write_text(
        "from hypothesis import settings\n"
        "settings.register_profile('few', max_examples=20, deadline=None)\n"
        "settings.load_profile('few')\n"
    )
    done = subprocess.run([*command, str(tests)], env=installed, cwd=tests, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


def test_the_registry_lists_and_resolves_it(installed):
    code = (
        "import kvcache; from kvcache.registry import POLICIES;"
        "print(POLICIES.names()[-1], type(kvcache.CPUOffloadingManager(16, 4, 'second-chance').policy).__name__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=installed, check=True, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == ["second-chance", "SecondChancePolicy"]
