"""`import kvcache` is cheap: no engine, no torch, and few modules."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import kvcache
from kvcache.background import python_words

BENCHMARKS = Path(__file__).resolve().parents[2] / "asv_benchmarks"


def run(code):
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_import_loads_no_engine_or_torch():
    names = "torch", "vllm", "transformers", "typer", "rich", "matplotlib"
    assert run(f"import sys, kvcache; print([name for name in {names} if name in sys.modules])") == "[]\n"


def test_control_plane_runs_without_torch():
    code = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "import kvcache\n"
        "manager = kvcache.CPUOffloadingManager(16, 2)\n"
        "manager.prepare_store([b'a'])\n"
        "manager.complete_store([b'a'])\n"
        "print(manager.lookup([b'a', b'b']))\n"
    )
    assert run(code) == "1\n"


def test_import_brings_few_modules_beyond_numpy():
    # Counted, not timed: a loaded machine imports slowly.
    code = (
        "import sys, numpy\n"
        "before = set(sys.modules)\n"
        "import kvcache, kvcache.control.cpu, kvcache.policies.lru\n"
        "print(len(set(sys.modules) - before))\n"
    )
    assert int(run(code)) < 100


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A checkout that is not compiled."""
    folder = tmp_path_factory.mktemp("checkout")
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(Path(kvcache.__file__).parent, folder / "kvcache", ignore=ignored)
    if BENCHMARKS.is_dir():
        shutil.copytree(BENCHMARKS, folder / BENCHMARKS.name, ignore=ignored)
    return folder


@pytest.mark.parametrize(
    "words",
    [
        ["-c", "from kvcache import CPUOffloadingManager"],
        ["-c", "import kvcache.integrations.vllm.startup"],
        ["-m", "kvcache", "--version"],
        *(["-m", f"asv_benchmarks.{path.stem}"] for path in sorted(BENCHMARKS.glob("[!_]*.py"))),
    ],
    ids=lambda words: words[1].replace(" ", "_"),
)
def test_every_door_of_sources_explains_itself(sources, words):
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, cwd=sources, env=environment)
    assert done.returncode == 1
    assert f"is not compiled in {sources / 'kvcache'}: Python took it from a folder of its sources" in done.stderr
    assert words[0] == "-c" or "Traceback" not in done.stderr or "kvcache" in words


def test_processes_import_nothing_from_directory(tmp_path):
    """All processes of the package are started by `python_words`, with -P."""
    folder = Path(kvcache.__file__).parent
    users = [path.name for path in folder.rglob("*.py") if "sys.executable" in path.read_text()]
    assert users == ["background.py"]
    (tmp_path / "json.py").write_text("raise SystemExit(3)")
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    words = python_words("import json, kvcache\nprint(kvcache.__file__)")
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.endswith("/kvcache/__init__.py\n")


def test_every_public_name_is_importable():
    for name in kvcache.__all__:
        assert getattr(kvcache, name) is not None
        assert name in dir(kvcache)


def test_star_import_omits_missing_packages():
    code = (
        "import sys; sys.modules['xxhash'] = None\n"
        "from kvcache import *\n"
        "assert 'DiskTier' not in globals() and CPUOffloadingManager\n"
        "import kvcache, pydoc\n"
        "assert 'CPUOffloadingManager' in pydoc.render_doc(kvcache)\n"
        "try: kvcache.DiskTier\n"
        "except ImportError as error: assert \"extra 'disk'\" in str(error)\n"
        "else: raise AssertionError\n"
    )
    run(code)


def test_exporter_without_package_names_extra():
    run(
        "import sys; sys.modules['prometheus_client'] = None\n"
        "from kvcache.registry import EXPORTERS\n"
        "try: EXPORTERS.resolve('prometheus')\n"
        "except ValueError as error: assert \"pip install 'kvcache[prometheus]'\" in str(error), error\n"
        "else: raise AssertionError\n"
    )


def test_recorder_without_msgspec_names_the_extra(tmp_path):
    run(
        "import sys; sys.modules['msgspec'] = None\n"
        "from kvcache import OffloadingConfig, OffloadingGroup, Recorder, make_spec\n"
        "config = OffloadingConfig((OffloadingGroup(16, ['layer']),), 16, extra_config={'num_cpu_blocks': 20})\n"
        "manager = make_spec(config).get_manager()\n"
        f"config.extra_config['record'] = {str(tmp_path / 'run')!r}\n"
        "for begin in (lambda: Recorder(manager, config.extra_config['record']), make_spec(config).get_manager):\n"
        "    try: begin()\n"
        "    except ValueError as error: assert \"pip install 'kvcache[record]'\" in str(error), error\n"
        "    else: raise AssertionError\n"
    )
    assert not [*tmp_path.iterdir()]
