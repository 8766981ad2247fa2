"""A build states its commit in its version, so that pip replaces one build by another."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytest.importorskip("Cython")
pytestmark = [
    pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="setup.py is in the checkout only"),
    pytest.mark.skipif(shutil.which("git") is None, reason="no git"),
]


def run(folder, *command):
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "PYTHONSAFEPATH": "1"}
    environment.pop("KVCACHE_COMMIT", None)
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.strip().splitlines()


def setup(folder, *command):
    return run(folder, sys.executable, "setup.py", "--quiet", *command)[-1:]


def commit(folder):
    run(folder, "git", "add", "--all")
    run(folder, "git", "-c", "user.name=a", "-c", "user.email=a@example.org", "commit", "--quiet", "--message", "a")
    return run(folder, "git", "rev-parse", "--short=9", "HEAD")[0]


@pytest.fixture
def checkout(tmp_path):
    """Return a repository of one commit with the build files and two modules, nothing compiled."""
    folder = tmp_path / "checkout"
    (folder / "kvcache").mkdir(parents=True)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "kvcache/version.py"):
        shutil.copy(ROOT / name, folder / name)
    (folder / "kvcache" / "__init__.py").touch()
    (folder / ".gitignore").write_text("build/\ndist/\n")
    run(folder, "git", "init", "--quiet")
    return folder


def built_version(folder):
    setup(folder, "build_py", "--build-lib", "out")
    names = {}
    exec((folder / "out" / "kvcache" / "version.py").read_text(), names)
    return names["__version__"]


def test_version_of_two_commits_differs(checkout):
    first = commit(checkout)
    assert setup(checkout, "--version") == [f"0.1.0.dev0+g{first}"]
    assert built_version(checkout) == f"0.1.0.dev0+g{first}"
    (checkout / "kvcache" / "__init__.py").write_text("a = 1\n")
    assert setup(checkout, "--version") == [f"0.1.0.dev0+g{first}.dirty"]
    second = commit(checkout)
    assert setup(checkout, "--version") == [f"0.1.0.dev0+g{second}"]
    assert built_version(checkout) == f"0.1.0.dev0+g{second}"
    # The source stays as it is: an sdist holds it as git tracks it.
    assert '"0.1.0.dev0"' in (checkout / "kvcache" / "version.py").read_text()


def test_sdist_version_is_its_commits(checkout, tmp_path):
    version = f"0.1.0.dev0+g{commit(checkout)}"
    setup(checkout, "sdist")
    shutil.unpack_archive(checkout / "dist" / f"kvcache-{version}.tar.gz", tmp_path)
    unpacked = tmp_path / f"kvcache-{version}"
    assert setup(unpacked, "--version") == [version]
    assert built_version(unpacked) == version


def test_version_without_git_has_no_commit(checkout):
    shutil.rmtree(checkout / ".git")
    assert setup(checkout, "--version") == ["0.1.0.dev0"]
    assert built_version(checkout) == "0.1.0.dev0"


def test_version_of_release_has_no_commit(checkout):
    path = checkout / "kvcache" / "version.py"
    path.write_text(path.read_text().replace('"0.1.0.dev0"', '"0.1.0"'))
    commit(checkout)
    assert setup(checkout, "--version") == ["0.1.0"]
    assert built_version(checkout) == "0.1.0"
