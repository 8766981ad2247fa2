"""The NUMA node of a device: memory that a thread touches first lies on the node whose CPUs run the thread."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

_SYS = Path("/sys")


def device_node(device: torch.device) -> int | None:
    """Return the NUMA node of an accelerator, or None if the system does not name it."""
    try:
        # Older releases of torch lack the address.
        about: Any = torch.cuda.get_device_properties(device)
        address = f"{about.pci_domain_id:04x}:{about.pci_bus_id:02x}:{about.pci_device_id:02x}.0"
        node = int((_SYS / "bus/pci/devices" / address / "numa_node").read_text())
    except (OSError, ValueError, AttributeError, AssertionError, RuntimeError):
        return None
    return node if node >= 0 else None


def run_on_node(node: int | None) -> None:
    """Keep the calling thread on the CPUs of a node; without effect if the process may use none of them."""
    if node is None:
        return
    try:
        ranges = (_SYS / f"devices/system/node/node{node}/cpulist").read_text().strip().split(",")
        ends = [(part.split("-")[0], part.split("-")[-1]) for part in ranges]
        cpus = {cpu for first, last in ends for cpu in range(int(first), int(last) + 1)}
        os.sched_setaffinity(0, cpus & os.sched_getaffinity(0))
    except (OSError, ValueError):
        pass  # an empty set is an OSError
