"""The example engine, two processes and all, reads the bytes it wrote, and notices a single one that changed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "tiny_engine"

pytestmark = pytest.mark.skipif(not EXAMPLE.is_dir(), reason="the examples are in the checkout only")


def run_engine(*options):
    ended = subprocess.run(
        [sys.executable, str(EXAMPLE), *options], capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.returncode in (0, 1), ended.stderr
    return ended.returncode, json.loads(ended.stdout)


def test_a_thousand_requests_read_the_bytes_they_wrote():
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
