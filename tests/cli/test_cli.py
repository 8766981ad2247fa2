"""The command line: its output, its exit status, and one clear line for every invalid input."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

import kvcache
from kvcache.cli.common import complete_policies, format_seconds, parse_capacities
from kvcache.lab.commands.mount import RENAMED, build_command

TRACE = [
    {"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [0, 1]},
    {"timestamp": 5, "input_length": 1024, "output_length": 1, "hash_ids": [0, 1]},
    {"timestamp": 9, "input_length": 1400, "output_length": 1, "hash_ids": [0, 1, 2]},
]


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in TRACE))
    return path


def error_of(run, *argv):
    status, _, err = run(*argv)
    lines = [line for line in err.splitlines() if "kvcache: error: " in line]
    assert status == 2
    assert len(lines) == 1
    assert "Traceback" not in err
    return lines[0].removeprefix("kvcache: error: ")


def test_replay_counts_hits_and_prints_a_table(run, trace):
    status, out, err = run("replay", trace, "--no-data", "--blocks", 2)
    assert (status, err) == (0, "")
    assert "block hit rate" in out
    assert "57.14% (4 of 7)" in out
    assert "bookkeeping per request" in out


def test_size_of_test_data_is_not_taken_for_memory(run, trace):
    argv = ("replay", trace, "--blocks", 2)
    _, out, _ = run(*argv)
    assert "(128 KiB)" not in out
    assert "64 KiB a block (--model gives real sizes)" in out
    assert "test data" not in run(*argv, "--no-data")[1]
    assert json.loads(run(*argv, "--no-data", "--json")[1])["block_bytes"] is None
    assert "2 blocks of 512 tokens (128 KiB)" in run(*argv, "--block-bytes", "64KiB")[1]
    assert "2 blocks of 512 tokens (128 MiB)" in run(*argv, "--model", "llama-3.1-8b", "--no-data")[1]


def test_pool_without_room_is_told_the_way_out(run, trace):
    error = error_of(run, "replay", trace, "--blocks", 1 << 29, "--model", "llama-3.1-8b")
    assert "does not fit into host memory" in error
    assert error.endswith("; --no-data needs none")


def test_replay_writes_json_to_a_file_or_to_standard_output(run, trace, tmp_path):
    target = tmp_path / "out.json"
    argv = ("replay", trace, "--no-data", "--block-size", ":256", "--limit", 2)
    assert run(*argv, "--json", target)[0] == 0
    written = json.loads(target.read_text())
    _, out, _ = run(*argv, "--json")
    printed = json.loads(out)
    for document in (written, printed):
        assert document["source"] == {"kind": "trace", "file": str(trace), "format": "mooncake", "skipped_lines": 0}
        assert (document["requests"], document["blocks"], document["hit_blocks"]) == (2, 8, 4)
        assert (document["tokens"], document["hit_tokens"], document["block_size"]) == (2048, 1024, 256)
        assert document["data"] is None


def test_demo_needs_no_file(run):
    argv = ("demo", "--no-data", "--requests", 300, "--blocks", 500, "--json")
    documents = [json.loads(run(*argv)[1]) for _ in range(2)]
    assert documents[0]["requests"] == 300
    assert documents[0]["evicted_blocks"] > 0
    assert documents[0]["hit_blocks"] == documents[1]["hit_blocks"] > 0


def test_gate_stores_what_was_offered_often_enough(run, trace):
    argv = ("replay", trace, "--no-data", "--store-threshold", 2, "--json")
    document = json.loads(run(*argv)[1])
    assert (document["store_threshold"], document["stored_blocks"], document["hit_blocks"]) == (2, 2, 2)


def test_what_if_tells_of_other_capacities(run):
    argv = ("demo", "--no-data", "--requests", 300, "--blocks", 2000, "--what-if")
    _, out, _ = run(*argv)
    assert "twice the memory" in out
    assert json.loads(run(*argv, "--json")[1])["what_if"]["capacities"]


def test_bad_lines_can_be_skipped_and_are_counted(run, trace):
    with trace.open("a") as file:
        file.write('{"timestamp": 1}\n')
    assert error_of(run, "replay", trace, "--no-data").startswith(f"{trace}:4: lacks 'hash_ids'")
    status, out, _ = run("replay", trace, "--no-data", "--skip-bad", "--json")
    assert status == 0
    assert json.loads(out)["source"]["skipped_lines"] == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--policy", "fifo"), "unknown policy 'fifo', known ones: lru, arc"),
        (("--policy", "nowhere:Policy"), "policy 'nowhere:Policy' cannot be imported"),
        (("--policy", "builtins:dict"), "policy 'builtins:dict' must be a subclass of CachePolicy, got <class"),
        (("--blocks", "0"), "--blocks must be a whole number >= 1, such as 10000 or '10k', got '0'"),
        (("--blocks", "ten"), "--blocks must be a whole number >= 1, such as 10000 or '10k', got 'ten'"),
        (("--model", "70b"), "--model 70b may mean parameters; name the model"),
        (("--memory", "256GiB"), "--memory needs the size of a block, got '256GiB' alone: --model names it"),
        (
            ("--memory", "4GiX", "--block-bytes", "64K"),
            "--memory must be bytes >= 1 or a size such as '64GiB', '64GB' or '1.5TiB', got '4GiX'",
        ),
        (
            ("--memory", "1KiB", "--block-bytes", "64KiB"),
            "--memory must hold at least one block of 65536 bytes, got '1KiB'",
        ),
        (
            ("--memory", "1GiB", "--blocks", "4", "--block-bytes", "1K"),
            "--blocks and --memory exclude each other, got '4' and '1GiB'",
        ),
        (
            ("--block-bytes", "-1"),
            "--block-bytes must be bytes >= 1 or a size such as '64GiB', '64GB' or '1.5TiB', got '-1'",
        ),
        (("--block-size", ":7"), "--block-size: 7 tokens must divide the 512 of a listed block (1, 2, 4, 8, 16, 32"),
        (("--store-threshold", "-1"), "--store-threshold must be >= 0, got -1"),
        (("--policy", "lru,arc"), "--policy must name one policy, got 'lru,arc': kvcache plan FILE compares several"),
        (("--blocks", "1,2"), "one capacity is needed here, got '1,2': kvcache plan FILE compares several"),
        (("--tier", "1TiB@6GB/s"), "--tier SIZE@RATE is simulated by kvcache plan; a replay takes PATH:SIZE or JSON"),
        (("--limit", "0"), "--limit must be >= 1, got 0"),
        (("--block-size", "x"), "--block-size must be a whole number >= 1, such as 10000 or '10k', got 'x'"),
        (("--json", "missing/out.json"), "--json cannot be written: 'missing/out.json': No such file or directory"),
    ],
)
def test_bad_option_is_named(run, trace, options, message):
    assert error_of(run, "replay", trace, "--no-data", *options).startswith(message)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--requests", "0"), "--requests must be >= 1, got 0"),
        (("--seed", "-1"), "--seed must be >= 0, got -1"),
        (("--turns", "nan"), "--turns must be >= 1, got nan"),
        (("--memory", "99999TiB"), "--memory must be less than 2**30 blocks (65536 bytes each), got '99999TiB'"),
        (("--blocks", "1073741824"), "--blocks must be less than 2**30 blocks (65536 bytes each), got '1073741824'"),
        (("--policy", "lru,arc"), "--policy must name one policy, got 'lru,arc': kvcache plan FILE compares several"),
        (("--policy", "min"), "--policy min is the optimum of a trace: kvcache plan FILE --policy min"),
    ],
)
def test_bad_demo_option_is_named(run, options, message):
    assert error_of(run, "demo", "--no-data", *options) == message


def test_refused_command_leaves_no_output_behind(run, trace, tmp_path):
    target = tmp_path / "out.json"
    error_of(run, "replay", trace, "--no-data", "--json", target, "--block-size", ":7")
    assert not target.exists()


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


def test_missing_trace_is_named(run, tmp_path):
    path = tmp_path / "missing.jsonl"
    assert error_of(run, "replay", path) == f"cannot open trace {path}: No such file or directory"


def test_memory_is_turned_into_whole_blocks():
    assert parse_capacities(None, "1MiB,2.5MiB", 1 << 20, "1") == [1, 2]
    assert parse_capacities("10,20", None, 1, "1") == [10, 20]
    assert parse_capacities(None, None, 1, "5") == [5]


def test_capacities_may_come_in_any_order_and_in_thousands():
    assert parse_capacities("20,10k,1.5k,20", None, 1, "1") == [20, 1500, 10_000]
    assert parse_capacities(None, "2G,1GiB,1.5G", 1 << 30, "1") == [1, 2]


def test_trace_is_read_from_standard_input(trace):
    argv = ["replay", "-", "--no-data", "--blocks", "2", "--json"]
    code = f"from kvcache.cli import main; main({argv})"
    with trace.open("rb") as file:
        done = subprocess.run([sys.executable, "-c", code], stdin=file, capture_output=True, text=True, check=False)
    assert (done.stderr, done.returncode) == ("", 0)
    document = json.loads(done.stdout)
    assert (document["source"]["file"], document["hit_blocks"]) == ("-", 4)


def test_progress_goes_to_standard_error_and_only_to_a_terminal(monkeypatch, run, trace):
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


def test_completion_goes_on_behind_a_comma():
    assert complete_policies("l")[0] == "lru"
    assert complete_policies("lru,ar") == ["lru,arc"]


@pytest.mark.parametrize("option", sorted(RENAMED))
def test_old_option_of_replay_is_answered_with_the_new_spelling(run, trace, option):
    if option in ("--store-threshold", "--limit", "--block-bytes"):
        argv = ("plan", trace, option, "1")
    else:
        argv = ("replay", trace, option, "1")
    assert error_of(run, *argv) == f"{option} of the old kvcache replay is now {RENAMED[option]}"
    assert error_of(run, *argv[:2], f"{option}=1").endswith(RENAMED[option])


@pytest.mark.parametrize("name", ["replay", "plan", "fleet", "rerun"])
def test_lab_command_has_at_most_16_options_and_examples_that_parse(run, name):
    command = build_command(name, name)
    assert sum(param.param_type_name == "option" for param in command.params) <= 16
    _, out, _ = run(name, "--help")
    lines = out.partition("Examples:")[2].replace("\\\n", " ").splitlines()
    examples = [shlex.split(line) for line in lines if line.strip()]
    assert len(examples) >= 2
    for program, called, *words in examples:
        assert (program, called) == ("kvcache", name)
        build_command(name, name).make_context(name, words)


def imported_by(code):
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\n{code}\nprint(*sys.modules)"], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


def test_building_the_command_line_imports_nothing_heavy():
    modules = imported_by("from kvcache.cli import build_app; build_app()")
    assert not modules & {"torch", "numpy", "rich", "matplotlib", "kvcache.control.cpu"}


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.0, "0 s"), (2e-6, "2 us"), (119.6, "120 s"), (125, "2 min 05 s"), (9864, "2 h 44 min"), (187_000, "2 d 3 h")],
)
def test_format_seconds_uses_units_that_a_person_reads(seconds, shown):
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
