"""The examples run: a policy in a package of its own, and an engine of two processes."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

pytestmark = pytest.mark.skipif(not EXAMPLES.is_dir(), reason="the examples are in the checkout only")


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Install the example of a policy beside kvcache and return the environment that sees both."""
    pytest.importorskip("setuptools")
    work = tmp_path_factory.mktemp("package")
    unwanted = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
    source = shutil.copytree(EXAMPLES / "second_chance", work / "source", ignore=unwanted)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--target", str(work / "site"), str(source)], check=True, timeout=120)
    inherited = [str(Path(part).resolve()) for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    path = os.pathsep.join([str(work / "site"), *inherited])
    return {**os.environ, "PYTHONPATH": path, "TESTS": str(source / "tests")}


def test_tests_of_the_example_policy_pass(installed):
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


def test_registry_resolves_the_example_policy(installed):
    code = (
        "import kvcache; from kvcache.registry import POLICIES;"
        "print(POLICIES.names()[-1], type(kvcache.CPUOffloadingManager(16, 4, 'second-chance').policy).__name__)"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=installed, check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["second-chance", "SecondChancePolicy"]


def run_engine(*options):
    command = [sys.executable, str(EXAMPLES / "tiny_engine"), *options]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode in (0, 1), ended.stderr
    return ended.returncode, json.loads(ended.stdout)


def test_thousand_requests_read_their_own_bytes():
    status, report = run_engine("--requests", "1000", "--policy", "arc")
    assert (status, report["faults"]) == (0, [])
    assert report["counts"]["requests"] == 1000
    assert report["left"] == {"num_referenced": 0, "num_pending": 0}
    # All of it happened: blocks came back, requests lost theirs, transfers failed.
    for event in ("loaded blocks", "preemptions", "failed loads", "failed stores"):
        assert report["counts"][event] > 10, event


@pytest.mark.parametrize("factor", ["1", "3"])
def test_other_factors_work_as_well(factor):
    status, report = run_engine("--requests", "150", "--factor", factor, "--seed", "1")
    assert (status, report["counts"]["requests"]) == (0, 150)


def test_one_changed_byte_is_noticed():
    status, report = run_engine("--requests", "200", "--corrupt-store", "1")
    assert status == 1
    assert "of group 0, layer 0, in device block" in report["faults"][0]
