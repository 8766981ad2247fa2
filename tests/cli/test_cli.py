"""The command line: its output, its exit status, and one clear line for every invalid input."""

import contextlib
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer

pytest.importorskip("typer")
pytest.importorskip("rich")

import kvcache
from kvcache.cli.common import format_seconds
from kvcache.lab.commands.mount import build_command
from kvcache.lab.commands.options import parse_capacities


@pytest.fixture
def trace(write_trace):
    return write_trace([[0, 1], [0, 1], [0, 1, 2]])


def test_replay_prints_a_table_of_hits(run, trace):
    status, out, err = run("replay", trace, "--no-data", "--blocks", 2)
    assert (status, err) == (0, "")
    assert "block hit rate" in out
    assert "57.14% (4 of 7)" in out
    assert "bookkeeping per request" in out


def test_test_data_size_is_not_memory(run, trace):
    argv = ("replay", trace, "--blocks", 2)
    _, out, _ = run(*argv)
    assert "(128 KiB)" not in out
    assert "64 KiB a block (--model gives real sizes)" in out
    assert "test data" not in run(*argv, "--no-data")[1]
    assert json.loads(run(*argv, "--no-data", "--json")[1])["block_bytes"] is None
    assert "2 blocks of 512 tokens (128 KiB)" in run(*argv, "--block-bytes", "64KiB")[1]
    assert "2 blocks of 512 tokens (128 MiB)" in run(*argv, "--model", "llama-3.1-8b", "--no-data")[1]


def test_replay_writes_json_anywhere(run, run_json, trace, tmp_path):
    argv = ("replay", trace, "--no-data", "--block-size", ":256")
    assert run(*argv, "--json", tmp_path / "out.json")[0] == 0
    for document in (json.loads((tmp_path / "out.json").read_text()), run_json(*argv)):
        assert document["source"] == {"kind": "trace", "file": str(trace), "format": "mooncake", "skipped_lines": 0}
        assert (document["requests"], document["blocks"], document["hit_blocks"]) == (3, 14, 8)
        assert (document["tokens"], document["hit_tokens"], document["block_size"]) == (3584, 2048, 256)
        assert document["data"] is None


def test_demo_needs_no_file(run_json):
    argv = ("demo", "--no-data", "--requests", 300, "--blocks", 500)
    document = run_json(*argv)
    assert document["requests"] == 300
    assert document["evicted_blocks"] > 0
    assert document["hit_blocks"] == run_json(*argv)["hit_blocks"] > 0


def test_gate_stores_blocks_offered_often_enough(run_json, trace):
    document = run_json("replay", trace, "--no-data", "--store-threshold", 2)
    assert (document["store_threshold"], document["stored_blocks"], document["hit_blocks"]) == (2, 2, 2)


def test_skipped_bad_lines_are_counted(run, run_json, trace):
    with trace.open("a") as file:
        file.write('{"timestamp": 1}\n')
    status, _, err = run("replay", trace, "--no-data")
    assert (status, err.count("\n")) == (2, 1)
    assert err.startswith(f"kvcache: error: {trace}:4: lacks 'hash_ids'")
    assert run_json("replay", trace, "--no-data", "--skip-bad")["source"]["skipped_lines"] == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_full_disk_is_named(run, trace):
    status, _, err = run("replay", trace, "--no-data", "--json", "/dev/full")
    assert (status, err) == (1, "kvcache: error: --json cannot be written: '/dev/full': No space left on device\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_full_standard_output_is_named(trace):
    code = f"from kvcache.cli import main; main(['replay', {str(trace)!r}, '--no-data', '--json'])"
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "kvcache: error: --json cannot be written: '-': No space left on device"


@pytest.mark.parametrize(
    ("blocks", "memory", "block_bytes", "capacities"),
    [
        (None, "1MiB,2.5MiB", 1 << 20, [1, 2]),
        (None, "2G,1GiB,1.5G", 1 << 30, [1, 2]),
        ("20,10k,1.5k,20", None, 1, [20, 1500, 10_000]),
        (None, None, 1, [5]),
    ],
)
def test_parse_capacities_sorts_whole_blocks(blocks, memory, block_bytes, capacities):
    assert parse_capacities(blocks, memory, block_bytes, "5") == capacities


def test_trace_is_read_from_standard_input(trace):
    argv = ["replay", "-", "--no-data", "--blocks", "2", "--json"]
    code = f"from kvcache.cli import main; main({argv})"
    with trace.open("rb") as file:
        done = subprocess.run([sys.executable, "-c", code], stdin=file, capture_output=True, text=True, check=False)
    assert (done.stderr, done.returncode) == ("", 0)
    document = json.loads(done.stdout)
    assert (document["source"]["file"], document["hit_blocks"]) == ("-", 4)


def test_progress_goes_to_a_terminal_only(monkeypatch, run, trace):
    argv = ("replay", trace, "--no-data", "--blocks", 2)
    assert run(*argv)[2] == ""
    monkeypatch.setenv("FORCE_COLOR", "1")
    _, out, err = run(*argv)
    assert "100%" in err
    assert "100%" not in out
    assert run(*argv, "--quiet")[2] == ""


def test_command_alone_prints_its_help(run):
    _, out, err = run()
    assert "Usage: kvcache" in out + err
    assert "error" not in out + err


def test_version_is_that_of_the_package(run):
    assert run("--version") == (0, f"kvcache {kvcache.__version__}\n", "")


def test_shell_completes_policies(monkeypatch, run):
    monkeypatch.setenv("_KVCACHE_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "kvcache plan --policy lru,a")
    monkeypatch.setenv("COMP_CWORD", "3")
    status, out, _ = run()
    assert status == 0
    assert out.split()[0] == "lru,arc"


@pytest.mark.parametrize(("name", "most"), [("replay", 22), ("plan", 29), ("fleet", 25), ("rerun", 16)])
def test_lab_command_limits_options_examples_parse(run, name, most):
    command = build_command(name, name)
    assert sum(param.param_type_name == "option" for param in command.params) <= most
    _, out, _ = run(name, "--help")
    lines = out.partition("Examples:")[2].replace("\\\n", " ").splitlines()
    examples = [shlex.split(line) for line in lines if line.strip()]
    assert len(examples) >= 2
    for program, called, *words in examples:
        assert (program, called) == ("kvcache", name)
        # An option such as --models prints and ends the command.
        with contextlib.suppress(typer.Exit):
            build_command(name, name).make_context(name, words)


def test_command_line_imports_nothing_heavy():
    code = "import sys\nfrom kvcache.cli import build_app; build_app()\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {*done.stdout.split()} & {"torch", "numpy", "rich", "matplotlib", "kvcache.control.cpu"}


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.0, "0 s"), (2e-6, "2 us"), (119.6, "120 s"), (125, "2 min 05 s"), (9864, "2 h 44 min"), (187_000, "2 d 3 h")],
)
def test_format_seconds_uses_readable_units(seconds, shown):
    assert format_seconds(seconds) == shown


def test_missing_extra_is_named():
    code = "import sys; sys.modules['typer'] = None; from kvcache.cli import main; main(['--help'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == (
        "kvcache: error: the command line needs typer; pip install 'kvcache[cli]', or in a checkout: "
        "pip install '.[cli]'\n"
    )


@pytest.mark.parametrize("group", [(), ("bench",), ("record",), ("tier",), ("metrics",)])
def test_lists_of_commands_cut_no_summary(group, run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERMINAL_WIDTH", "80")
    status, out, _ = run(*group, "--help")
    assert status == 0
    commands = out.partition("Commands:\n")[2]
    assert commands
    assert "..." not in commands
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.slow
def test_module_kvcache_is_the_command():
    done = subprocess.run([sys.executable, "-m", "kvcache", "--version"], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, f"kvcache {kvcache.__version__}\n")
