"""Returns the host memory left on the machine and in the cgroups of this process.

A pool that does not fit is a clear error at the start. Without it, the kernel would kill the process later.
"""

from __future__ import annotations

import os
import re
from pathlib import Path


def memory_left(folder: Path | None = None) -> tuple[int, str] | None:
    """Return the bytes that this process may still allocate, and the name of the limit; None if no limit is known.

    `folder` is the folder of the shared-memory file.
    """
    limits = [_machine_memory(Path("/")), _cgroup_memory(Path("/"))]
    limits += [] if folder is None else [_shared_memory(folder)]
    return min(((max(limit[0], 0), limit[1]) for limit in limits if limit is not None), default=None)


def check_memory(num_bytes: int, folder: Path | None = None) -> None:
    """Raise ValueError with the memory left and the name of the limit if `num_bytes` do not fit; see `memory_left`."""
    limit = memory_left(folder)
    if limit is not None and num_bytes > limit[0]:
        remaining, source = limit
        raise ValueError(
            f"a pool of {num_bytes} bytes ({_gib(num_bytes)} GiB) does not fit into host memory: "
            f"{remaining} bytes ({_gib(remaining)} GiB) are left by {source}"
        )


def _gib(num_bytes: int) -> str:
    tenths = num_bytes * 10 >> 30  # a size may exceed the range of a float
    return f"{tenths // 10}.{tenths % 10}"


def _shared_memory(folder: Path) -> tuple[int, str] | None:
    """Return the free bytes of a folder's file system; None if the folder is missing or has no limit of its own."""
    try:
        disk = os.statvfs(folder)
    except OSError:
        return None
    return (disk.f_bavail * disk.f_frsize, f"the file system of {folder}") if disk.f_blocks else None


def _machine_memory(root: Path) -> tuple[int, str] | None:
    try:
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024, "the machine (MemAvailable)"
    except (OSError, ValueError, IndexError):
        pass  # a sandbox may show another format
    return None


def _cgroup_memory(root: Path) -> tuple[int, str] | None:
    """Return the memory left in the tightest cgroup this process is in, of version 1 or 2; None without a limit."""
    try:
        text = (root / "proc/self/cgroup").read_text()
    except (OSError, ValueError):
        return None
    limits = []
    mount = root / "sys/fs/cgroup"
    for controllers, group in re.findall(r"^\d+:([^:]*):(.*)$", text, re.MULTILINE):
        if not controllers:
            limits += _limits(mount, group, "memory.max", "memory.current", "inactive_file", "active_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "total_active_file")
            limits += _limits(mount / "memory", group, *names)
    return min(limits, default=None)


def _limits(mount: Path, group: str, limit_name: str, usage_name: str, *reclaimable: str) -> list[tuple[int, str]]:
    # A container may see its own group at the root of the mount, so every visible level counts.
    path = Path(group.lstrip("/"))
    limits = []
    for level in (path, *path.parents):
        directory = mount / level
        try:
            limit = (directory / limit_name).read_text().strip()
            usage = int((directory / usage_name).read_text())
            stat = (directory / "memory.stat").read_text().split()
            if limit != "max":
                # The kernel drops the page cache before it enforces the limit.
                counters = dict(zip(stat[::2], stat[1::2], strict=True))
                usage -= sum(int(counters.get(name, 0)) for name in reclaimable)
                limits.append((int(limit) - usage, f"{directory / limit_name} = {limit}"))
        except (OSError, ValueError):
            continue
    return limits
