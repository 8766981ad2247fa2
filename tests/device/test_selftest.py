"""`kvcache selftest` on the device under test, and on a simulated one with faults."""

from contextlib import nullcontext

import pytest
import torch
from bench import DEVICE, LATE, keep_busy

from kvcache.lab.selftest import copies, machine, rates
from kvcache.transfer.staged import StagedCopyHandler
from kvcache.transfer.streams import DeviceStream


def verdicts(seconds=0.0):
    if LATE:
        LATE.reset(0, 0.3)
    try:
        return {row.subject: row.verdict for row in copies.check_copies(DEVICE, seconds, keep_busy)}
    finally:
        torch.accelerator.synchronize()


def test_selftest_of_device_is_right():
    assert machine.find_device(None) == DEVICE
    assert {row.subject: row.verdict for row in machine.found(DEVICE)}["pinned memory"] == "ok"
    assert verdicts() == {"copies": "ok", "a wrong order": "ok"}


def test_selftest_rates_name_both_directions(monkeypatch):
    if LATE:
        monkeypatch.setattr(rates, "_BLOCK_BYTES", 8192)
        monkeypatch.setattr(rates, "_COPY_BLOCKS", 4)
        monkeypatch.setattr(rates, "_NUM_LAYERS", 4)
        monkeypatch.setattr(rates, "_SLOW_RATIO", 0.0)
    assert [row.subject for row in rates.copy_rates(DEVICE)] == ["store rate", "load rate"]


def copy_short(stream, targets, sources):
    for target, source in zip(targets, sources, strict=True):
        target[:-1].copy_(source[:-1], non_blocking=True)


def event_of_compute(stream):
    event = torch.Event(device=stream.device, enable_timing=True)
    event.record(torch.accelerator.current_stream(stream.device))
    return event


FAULTS = {
    "missing event": (DeviceStream, "wait_for_compute", lambda _: None),
    "short copy": (DeviceStream, "copy_many", copy_short),
    "late copy": (StagedCopyHandler, "_has_ended", lambda *_: True),
    "event of the wrong stream": (DeviceStream, "record_event", event_of_compute),
}


@pytest.mark.skipif(LATE is None, reason="plants faults in a simulated device")
@pytest.mark.parametrize("fault", FAULTS)
def test_selftest_finds_planted_fault(monkeypatch, fault):
    owner, name, planted = FAULTS[fault]
    monkeypatch.setattr(owner, name, planted)
    assert verdicts()["copies"] == "WRONG"


@pytest.mark.skipif(LATE is None, reason="plants faults in a simulated device")
def test_selftest_without_late_work_is_refused(monkeypatch):
    """If the device ran all work at once, the check would see no wrong order, and must say so."""
    LATE.reset(0, 1.0)
    monkeypatch.setattr(copies.Geometry, "check", lambda *_: None)
    rows = {row.subject: row.verdict for row in copies.check_copies(DEVICE, 0, nullcontext)}
    assert rows["a wrong order"] == "WRONG"
