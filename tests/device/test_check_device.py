"""What `kvcache check --device` measures, on the device under test."""

import torch
from bench import DEVICE, LATE, keep_busy

from kvcache.lab.bench.device import Sizes, find_device, measure


def test_measure_finds_no_byte_that_differs():
    if LATE:
        LATE.reset(0, 0.3)
    assert find_device() == DEVICE
    sizes = Sizes((4096, 8192), (1, 4), num_layers=4, pool_bytes=1 << 20, num_geometries=5, compute_rounds=2)
    report = measure(DEVICE, sizes, keep_busy)
    assert report["environment"]["device"] == DEVICE.type
    assert report["pool"]["is_pinned"]
    assert report["geometries"]["different_bytes"] == report["compute"]["different_bytes"] == 0
    assert len(report["copies"]) == 2 * 2 * 4
    torch.accelerator.synchronize()
    assert not LATE or LATE.race() == b""
