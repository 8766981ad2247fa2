"""The table of planted faults applies to the package as it stands, and the driver distinguishes found faults."""

from __future__ import annotations

import ast
import importlib.util
import random
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def driver() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutants_driver", Path(__file__).with_name("mutants.py"))
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def syntax_errors(file: str, texts: list[str]) -> list[str]:
    errors = []
    for text in texts if file.endswith(".py") else ():
        try:
            ast.parse(text)
        except SyntaxError as error:
            errors.append(f"{file}: {error}")
    return errors


def test_every_fault_applies_once(driver: ModuleType) -> None:
    faults = driver.read_faults()
    assert len(faults) >= 250
    assert len({fault.id for fault in faults}) == len(faults)
    stale: list[str] = []
    for file in {fault.file for fault in faults}:
        source = planted = (ROOT / file).read_text()
        alone, others = [], []
        for fault in [fault for fault in faults if fault.file == file]:
            try:
                alone.append(fault.apply(source))
            except ValueError as error:
                stale.append(str(error))
                continue
            # To parse a file once for all of its faults takes a tenth of the time.
            if planted.count(fault.old) == 1:
                planted = planted.replace(fault.old, fault.new)
            else:
                others.append(alone[-1])
        stale += syntax_errors(file, [planted, *others]) and syntax_errors(file, alone)
    assert not stale, "\n".join(stale)


def test_contributing_names_tests_of_every_module(driver: ModuleType) -> None:
    tests = driver.read_tests((ROOT / "CONTRIBUTING.md").read_text())
    for path in (ROOT / "kvcache").rglob("*.py*"):
        file = path.relative_to(ROOT).as_posix()
        if path.suffix in (".py", ".pyx") and "/" in file.removeprefix("kvcache/") and path.stat().st_size:
            assert driver.tests_of(file, tests), file


def test_read_tests_joins_rows(driver: ModuleType) -> None:
    text = (
        "| a | `kvcache/core/`, `kvcache/control/pool.py`, `cpu.py` | `tests/core` | `make build` |\n"
        "| b | `kvcache/control/pool.py` | `tests/missing.py` | `pytest tests/control` |\n"
    )
    tests = driver.read_tests(text)
    assert tests["kvcache/control/pool.py"] == ["tests/core", "tests/control"]
    assert tests["kvcache/control/cpu.py"] == ["tests/core"]
    assert driver.tests_of("kvcache/core/table.pyx", tests) == ["tests/core"]
    with pytest.raises(ValueError, match="names no tests for"):
        driver.tests_of("kvcache/keys.py", tests)


def test_sample_stays_within_its_budget(driver: ModuleType) -> None:
    faults = driver.read_faults()
    first, second = (driver.draw(faults, 20, 240, random.Random(seed)) for seed in (1, 2))
    assert 15 <= len(set(first)) == len(first) <= 20
    assert set(first) != set(second)
    assert sum(fault.cost_s for fault in first) <= 240
    assert driver.draw(faults, 20, 240, random.Random(1)) == first


@pytest.mark.slow
def test_faults_are_found_missed_and_restored(driver: ModuleType, tmp_path: Path) -> None:
    pristine = tmp_path / "pristine"
    files = {
        "CONTRIBUTING.md": "| a | `kvcache/keys.py` | `tests/test_keys.py` | `pytest` |\n",
        "kvcache/keys.py": "A = 1\nB = 2\n",
        "tests/conftest.py": "from hypothesis import settings\nsettings.register_profile('few')\n",
        "tests/test_keys.py": "import runpy\nKEYS = runpy.run_path('kvcache/keys.py')\n\n"
        "def test_fails():\n    assert False\n\ndef test_a():\n    assert KEYS['A'] == 1\n",
        "tests/test_other.py": "import runpy\n\ndef test_b():\n    assert runpy.run_path('kvcache/keys.py')['B'] < 9\n",
    }
    for name, text in files.items():
        (pristine / name).parent.mkdir(parents=True, exist_ok=True)
        (pristine / name).write_text(text)
    (pristine / "build").mkdir()
    copy = driver.Copy(tmp_path / "copy", pristine)

    def found(old: str, new: str) -> tuple[str, str]:
        fault = driver.Fault("words", "kvcache/keys.py", "a number", old, new, 1.0)
        result = driver.try_fault(copy, fault, ["folder", "test"], 60)
        # A test that fails without the fault proves nothing.
        assert "tests/test_keys.py::test_fails" in result["flaky"]
        assert (copy.folder / "kvcache/keys.py").read_text() == files["kvcache/keys.py"]
        return result["found"], result["by"]

    assert found("A = 1", "A = 2") == ("folder", "tests/test_keys.py::test_a")
    assert found("B = 2", "B = 10") == ("test", "tests/test_other.py::test_b")
    assert found("B = 2", "B = 3") == ("", "")
    with pytest.raises(ValueError, match="its old text occurs 0 times"):
        found("C = 1", "C = 2")
    copy.close()
