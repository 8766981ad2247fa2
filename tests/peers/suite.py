"""Run one suite of an engine's own tests with ours in the place of its parts, and count.

``python suite.py MODULE[:PLACE] RELEASE SOURCES [pytest's arguments]``. The module beside this one names TESTS below
SOURCES, PASSES (how many must pass, by release), and EXCLUDED (tests and the reason why each must fail), and puts our
parts in place when it is imported.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import pytest


class Count:
    """A plugin of pytest: an excluded test must exist and fail, and the known number of the others must pass."""

    def __init__(self, name: str, suite: Any, release: str) -> None:
        self._name, self._release = name, release
        self._expected = suite.PASSES.get(release)
        self._excluded = suite.EXCLUDED
        self._unused = set(suite.EXCLUDED)
        self._num_passed = 0

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            for name in (item.name, item.name.partition("[")[0]):
                if name in self._excluded:
                    self._unused.discard(name)
                    item.add_marker(pytest.mark.xfail(reason=self._excluded[name], strict=True))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._num_passed += report.when == "call" and report.passed

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._unused or self._num_passed != self._expected:
            session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        terminalreporter.write_line(
            f"{self._name} {self._release}: {self._num_passed} passed, "
            f"{self._expected or 'an unknown number'} must pass"
            + (f"; excluded tests not found: {sorted(self._unused)}" if self._unused else "")
        )


def main(name: str, release: str, sources: str, *arguments: str) -> int:
    """Return pytest's status."""
    module, _, os.environ["PEERS_PLACE"] = name.partition(":")
    os.environ["PEERS_RELEASE"] = release
    os.chdir(sources)
    sys.path[:0] = [sources, str(Path(__file__).parent)]
    suite = importlib.import_module(module)
    options = [
        "-q",
        "-c",
        os.devnull,
        "-p",
        "no:cacheprovider",
        "--disable-warnings",
        "--show-capture=no",
        "--tb=short",
        "--timeout=600",
        f"--rootdir={sources}",
    ]
    return pytest.main([*options, *suite.TESTS, *arguments], plugins=[Count(name, suite, release)])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
