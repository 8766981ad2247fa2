"""`kvcache check --device` on the CPU: the report fits its schema, and a byte that differs is an error."""

import json
import os
import socket
import sys
from pathlib import Path

import pytest

pytest.importorskip("jsonschema")
pytest.importorskip("torch")
pytest.importorskip("typer")

import jsonschema
import torch

from kvcache.lab.bench import device
from kvcache.lab.bench.device import Sizes, measure

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "_static" / "device-report.schema.json").read_text())
SMALL = Sizes((4096, 8192), (1, 4), num_layers=4, pool_bytes=1 << 20, num_geometries=3, compute_rounds=2)


def test_measure_cpu_report_fits_the_schema():
    steps = []
    report = json.loads(json.dumps(measure(torch.device("cpu"), SMALL, lambda: None, steps.append)))
    jsonschema.validate(report, SCHEMA)
    assert [(rate["block_bytes"], rate["num_blocks"], rate["direction"]) for rate in report["copies"][::2]] == [
        (size, count, way) for size in SMALL.block_bytes for count in SMALL.block_counts for way in ("store", "load")
    ]
    assert [rate["way"] == "one large copy" for rate in report["copies"]] == [True, False] * 8
    assert report["geometries"]["number"] == 3
    assert report["geometries"]["compared_bytes"] > 0
    assert report["geometries"]["different_bytes"] == report["compute"]["different_bytes"] == 0
    assert len(steps) == 4 + 4
    # People send the report.
    assert socket.gethostname() not in json.dumps(report)
    assert os.getcwd() not in json.dumps(report)  # noqa: PTH109


def test_handlers_that_move_nothing_are_found(monkeypatch):
    monkeypatch.setattr(device._Memory, "start", lambda *_: None)
    report = measure(torch.device("cpu"), SMALL, lambda: None)
    assert report["geometries"]["different_bytes"] > 0
    assert report["compute"]["different_bytes"] > 0


@pytest.fixture
def small(monkeypatch, tmp_path):
    monkeypatch.setattr(device, "Sizes", lambda: SMALL)
    monkeypatch.setattr(device, "find_device", lambda: torch.device("cpu"))
    monkeypatch.chdir(tmp_path)


def test_check_device_writes_table_and_file(small, run):
    status, out, _ = run("check", "--device")
    assert status == 0
    assert "0 bytes differ" in " ".join(out.split())
    jsonschema.validate(json.loads(Path("kvcache-device.json").read_text()), SCHEMA)


def test_check_device_fails_on_other_byte(small, run, monkeypatch):
    monkeypatch.setattr(device, "_compare_geometry", lambda *_: (100, 2))
    status, out, err = run("check", "--device", "--json", "-")
    assert status == 1
    assert json.loads(out)["geometries"] == {"number": 3, "compared_bytes": 300, "different_bytes": 6}
    assert "6 bytes differ after copies on cpu" in err


def test_check_device_names_missing_torch(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    status, _, err = run("check", "--device")
    assert status == 1
    assert err == "kvcache: error: this command needs the package torch, which is not installed\n"
