"""Rows on the machine: the device, and the limits of memory, shared memory and the file system."""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from kvcache.lab.selftest.rows import OK, SKIPPED, WRONG, Row
from kvcache.options import format_size
from kvcache.transfer import numa, pinning
from kvcache.transfer.free_memory import memory_left
from kvcache.transfer.host_pool import HostPool
from kvcache.version import __version__

_POOL_BYTES = 64 << 20
_SHARED_MEMORY = Path("/dev/shm")


def find_device(name: str | None) -> torch.device:
    """Return the device to test: the accelerator, or without one the CPU. ValueError: torch does not find `name`."""
    accelerator = pinning.accelerator()
    if name in (None, "cpu") or (accelerator is not None and accelerator.type == name):
        return torch.device("cpu") if name == "cpu" or accelerator is None else accelerator
    found = "no accelerator" if accelerator is None else f"the accelerator {accelerator.type!r}"
    raise ValueError(f"--device {name}: torch {torch.__version__} finds {found}")


def found(device: torch.device) -> Iterator[Row]:
    """Yield rows on versions, the device, memory, pinned memory and shared memory."""
    facts = {name: value for name, value in _environment(device).items() if value not in ("", None)}
    yield Row("found", ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in facts.items()), OK, facts)
    left = memory_left()
    # The path of a cgroup may name a user or a container.
    source = "" if left is None else "a cgroup's limit" if left[1].startswith("/") else left[1]
    text = "unlimited" if left is None else f"{format_size(left[0])} left by {source}"
    yield Row("memory", text, OK, {"left_bytes": None if left is None else left[0]})
    if left is not None and left[0] < 4 * _POOL_BYTES:
        yield Row("pinned memory", f"not tried: it needs {format_size(4 * _POOL_BYTES)} of free memory", SKIPPED)
    else:
        yield _pinning(device)
    shared = shutil.disk_usage(_SHARED_MEMORY)
    # A container has 64 MiB of shared memory by default, and a pool with tiers is a file there.
    advice = "" if shared.total > 64 << 20 else ": a pool with tiers needs more (docker run --shm-size)"
    text = f"{format_size(shared.free)} of {format_size(shared.total)} free{advice}"
    yield Row("shared memory", text, SKIPPED if advice else OK, {"free_bytes": shared.free, "bytes": shared.total})


def file_system(path: Path) -> Row:
    """Return a row on the file system of `path`: kind, free space and direct I/O. OSError: it is read-only."""
    probe, is_direct = path / ".kvcache-selftest", False
    kinds = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        words, _, rest = line.partition(" - ")
        kinds[words.split()[2]] = rest.split()[0]
    number = path.stat().st_dev
    kind = kinds.get(f"{os.major(number)}:{os.minor(number)}", "unknown file system")
    os.close(os.open(probe, os.O_RDWR | os.O_CREAT, 0o600))
    try:
        with suppress(OSError):
            os.close(os.open(probe, os.O_RDWR | os.O_DIRECT))
            is_direct = True
    finally:
        probe.unlink()
    free = shutil.disk_usage(path).free
    text = f"{kind}, {format_size(free)} free, {'' if is_direct else 'no '}direct I/O"
    figures = {"kind": kind, "free_bytes": free, "is_direct": is_direct}
    return Row("file system", text, OK, figures)


def _environment(device: torch.device) -> dict[str, Any]:
    name, driver = platform.processor() or platform.machine(), ""
    if device.type != "cpu":
        module: Any = getattr(torch, device.type, None)
        name = module.get_device_name(device) if hasattr(module, "get_device_name") else device.type
        for path in ("/proc/driver/nvidia/version", "/sys/module/amdgpu/version", "/sys/module/xe/version"):
            # The version alone: the rest of the file may name the host that built the driver.
            with suppress(OSError):
                driver = driver or "".join(re.findall(r"\d+\.\d+[.\d]*", Path(path).read_text())[:1])
    return {
        "kvcache": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda or "",
        "hip": torch.version.hip or "",
        "driver": driver,
        "kernel": re.match(r"[\d.]*", platform.release())[0],  # type: ignore[index]
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "device": device.type,
        "device_name": name,
        "device_numa_node": numa.device_node(device),
    }


def _pinning(device: torch.device) -> Row:
    """Return a row on pinned memory: pin a small pool if the device needs pinned memory."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    allowed = "unlimited" if limit == resource.RLIM_INFINITY else format_size(limit)
    if device.type == "cpu":
        return Row("pinned memory", f"not needed on a CPU; the limit is {allowed}", OK, {"limit_bytes": limit})
    pool = HostPool(_POOL_BYTES >> 20, 1 << 20, device=device)
    pool.wait_ready()
    is_pinned = pool.is_pinned
    pool.close()
    text = f"{'works' if is_pinned else 'is refused: copies are slower then'}; the limit is {allowed}"
    return Row("pinned memory", text, OK if is_pinned else WRONG, {"limit_bytes": limit, "is_pinned": is_pinned})
