"""The device under test: a GPU, or the simulated accelerator if KVCACHE_SIMULATED_DEVICE is 1.

The simulated one becomes the accelerator of the whole process, so `make test-device` runs these tests alone.
"""

import os
import sys
from pathlib import Path

import pytest
import torch

IS_SIMULATED = os.environ.get("KVCACHE_SIMULATED_DEVICE") == "1"
collect_ignore_glob = [] if IS_SIMULATED or torch.cuda.is_available() else ["test_*.py"]

# For `bench` and `simulated`.
sys.path.insert(0, str(Path(__file__).parent))

NUM_SCHEDULES = int(os.environ.get("KVCACHE_SCHEDULES", "20"))


def pytest_configure():
    if not IS_SIMULATED:
        return
    import simulated

    library = simulated.build()
    if library is not None:
        simulated.load(library)


def pytest_collection_modifyitems(items):
    has_device = torch.accelerator.is_available()
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker("slow")
            item.add_marker("cuda")
            if not has_device:
                item.add_marker(pytest.mark.skip(reason="the simulated device needs g++"))


@pytest.fixture(params=range(NUM_SCHEDULES if IS_SIMULATED else 1))
def bench(request):
    """A KV cache on the device, a pool and two handlers, under one schedule of the simulated device."""
    import bench

    with bench.Bench(request.param) as made:
        yield made
