"""`kvcache bench engine` with real engines, tiny: it runs to its table, and all engines answer alike."""

import json
import os
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_bench_engine_runs_three_engines(tmp_path):
    words = (
        "bench engine . --users 1 --turns 2 --prefix-tokens 256 --message-tokens 8 --layers 1 --memory 64MiB --json -"
    )
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "kvcache", *words.split()],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert [line["engine"] for line in document["lines"]] == [*["without"] * 2, *["kvcache"] * 2, "restart"]
    assert set(document["medians"]) == {"first turns", "later turns", "after a restart"}
    assert list(tmp_path.iterdir()) == []
