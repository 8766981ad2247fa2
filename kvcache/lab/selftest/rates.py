"""Rates of moved blocks, compared with the machine's best: one large copy, the link, a plain loop over a file."""

from __future__ import annotations

import mmap
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from kvcache.lab.bench.copy import DIRECTIONS, CopyBench
from kvcache.lab.bench.disk import measure_disk
from kvcache.lab.selftest.rows import OK, SKIPPED, SLOW, Row
from kvcache.options import format_size
from kvcache.transfer.free_memory import memory_left

_BLOCK_BYTES, _COPY_BLOCKS, _DISK_BLOCKS, _NUM_LAYERS = 2 << 20, 64, 64, 32
_SLOW_RATIO = 0.5
"""A rate below this share of the bare rate is suspicious. Bare rates of one machine differ by less than half."""
_LANE_GB_PER_S = {"2.5": 0.25, "5.0": 0.5, "8.0": 0.985, "16.0": 1.97, "32.0": 3.94, "64.0": 7.56}
"""GB/s of a PCIe lane by its speed in gigatransfers a second, as the kernel reports it."""


def copy_rates(device: torch.device) -> Iterator[Row]:
    """Yield the rates of scattered blocks, compared with one large copy of as many bytes and the device's link."""
    needed_bytes = 4 * _COPY_BLOCKS * _BLOCK_BYTES
    left = memory_left()
    if left is not None and left[0] < needed_bytes:
        yield Row("copy rates", f"not measured: they need {format_size(needed_bytes)} of free memory", SKIPPED)
        return
    link_gb_per_s = _link_rate(device)
    bench = CopyBench(_BLOCK_BYTES, _COPY_BLOCKS, [min(4, torch.get_num_threads())], str(device), _NUM_LAYERS)
    try:
        for direction in DIRECTIONS:
            rates = list(bench.measure(direction, "scattered", with_torch=False))
            ours, whole = rates[1], rates[0].gb_per_s
            text = f"{ours.gb_per_s:.1f} GB/s, {ours.ratio:.2f} of one large copy"
            reasons = []
            if ours.ratio < _SLOW_RATIO:
                reasons.append("other load on the device or on the cores of its NUMA node")
            if link_gb_per_s and whole < _SLOW_RATIO * link_gb_per_s:
                reasons.append("memory that is not pinned, another NUMA node, a power limit or an idle link")
            if link_gb_per_s:
                text += f"; the link's own rate is {link_gb_per_s:.0f} GB/s"
            figures = {"gb_per_s": ours.gb_per_s, "whole_gb_per_s": whole, "link_gb_per_s": link_gb_per_s}
            yield _row(f"{direction} rate", text, reasons, figures)
    finally:
        bench.close()


def disk_rates(folder: Path) -> Iterator[Row]:
    """Yield the rates of a disk tier below `folder`, compared with a loop that writes and reads one file."""
    needed_bytes = 4 * _DISK_BLOCKS * _BLOCK_BYTES
    if shutil.disk_usage(folder).free < needed_bytes:
        yield Row("disk rates", f"not measured: they need {format_size(needed_bytes)} of disk", SKIPPED)
        return
    place = folder / f"rates-{secrets.token_hex(4)}"
    bare = _bare_rates(folder / f"bare-{secrets.token_hex(4)}")
    ours = measure_disk(place, _BLOCK_BYTES, _DISK_BLOCKS)
    for name, rate, bare_rate in zip(
        ("write", "read"), (ours.store_bytes_per_s, ours.load_bytes_per_s), bare, strict=True
    ):
        ratio = rate / bare_rate
        text = f"{rate / 1e9:.2f} GB/s, {ratio:.2f} of a bare loop"
        reasons = ["a file system without direct I/O, whose loop measures the page cache"] if not ours.is_direct else []
        reasons += ["other load on the disk or the cores"]
        figures = {"gb_per_s": rate / 1e9, "bare_gb_per_s": bare_rate / 1e9, "is_direct": ours.is_direct}
        yield _row(f"disk {name} rate", text, reasons if ratio < _SLOW_RATIO else [], figures)


def _row(subject: str, text: str, reasons: list[str], figures: dict[str, Any]) -> Row:
    return Row(subject, f"{text}: {'; '.join(reasons)}" if reasons else text, SLOW if reasons else OK, figures)


def _bare_rates(path: Path) -> tuple[float, float]:
    """Write and read one file block by block, with direct I/O if possible; return both rates in bytes a second."""
    num_bytes = _DISK_BLOCKS * _BLOCK_BYTES
    buffer = mmap.mmap(-1, _BLOCK_BYTES)  # aligned, as direct I/O needs
    buffer.write(os.urandom(_BLOCK_BYTES))
    rates = []
    flags = os.O_RDWR | os.O_CREAT
    try:
        try:
            fd = os.open(path, flags | os.O_DIRECT, 0o600)
        except OSError:
            fd = os.open(path, flags, 0o600)
        with os.fdopen(fd, "r+b", buffering=0) as file:
            for move in (os.writev, os.readv):
                os.lseek(fd, 0, os.SEEK_SET)
                began_s = time.perf_counter()
                for _ in range(_DISK_BLOCKS):
                    move(fd, [buffer])
                if move is os.writev:
                    os.fsync(file.fileno())
                rates.append(num_bytes / (time.perf_counter() - began_s))
    finally:
        path.unlink(missing_ok=True)
        buffer.close()
    return rates[0], rates[1]


def _link_rate(device: torch.device) -> float:
    """Return the rate of a device's PCIe link in one direction in GB/s, as the kernel reports it; 0: unknown."""
    with suppress(Exception):  # another release of torch, or a container without this part of /sys
        found: Any = torch.cuda.get_device_properties(device)
        number = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
        place = Path("/sys/bus/pci/devices") / number
        speed = (place / "max_link_speed").read_text().split()[0]
        return _LANE_GB_PER_S[speed] * int((place / "max_link_width").read_text())
    return 0.0
