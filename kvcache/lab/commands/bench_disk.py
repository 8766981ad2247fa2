"""`kvcache bench disk`: how fast a disk tier stores and loads here, checksums on."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from shutil import disk_usage
from typing import Annotated

import typer

from kvcache.cli import common
from kvcache.lab.commands import options
from kvcache.options import format_size


def disk(
    folder: Annotated[Path, typer.Argument(help="A folder on the disk to measure; a tier is made in it, and removed.")],
    block_bytes: options.BlockBytesOption = "2MiB",
    size: Annotated[str, typer.Option(help="Bytes to write and read back.", metavar="SIZE")] = "1GiB",
    threads: Annotated[int, typer.Option(help="Operations in flight.")] = 4,
    json: common.JsonOption = None,
    quiet: common.QuietOption = False,
) -> None:
    """Write blocks to a new disk tier and read them back, with checksums."""
    from kvcache.lab.bench.disk import measure_disk

    num_bytes, num_blocks = options.blocks_within(block_bytes, size)
    common.at_least("--threads", threads, 1)
    if not folder.is_dir():
        raise ValueError(f"folder must be one that exists, got {str(folder)!r}")
    free_bytes = disk_usage(folder).free
    if num_blocks * num_bytes > free_bytes:
        raise ValueError(f"--size must fit into the {format_size(free_bytes)} free in {folder}, got {size!r}")
    # Check the target first: the disk is written for minutes.
    common.check_writable("--json", json)
    with common.Bar("disk", "blocks", quiet, total=2 * num_blocks) as bar:

        def progressed(name: str, num_done: int, num_all: int) -> None:
            done = num_done + (num_all if name == "load" else 0)
            if bar.is_due() or done == 2 * num_all:
                bar.show(done, done, name)

        rates = measure_disk(
            folder / ".kvcache-bench",
            num_bytes,
            num_blocks,
            threads,
            job_blocks=max(1, (32 << 20) // num_bytes),
            in_flight=min(num_blocks, max(8, (128 << 20) // num_bytes)),
            progress=progressed,
        )
    times = (
        f"{rates.call_s_p50 * 1e6:.0f} us at the median, {rates.call_s_p99 * 1e6:.0f} us at 99 %, "
        f"{rates.call_s_max * 1e3:.2f} ms at most"
    )
    rows = (
        ("store", f"{rates.store_bytes_per_s / 1e9:.2f} GB/s, {rates.store_cpu_s_per_gb:.2f} s of CPU a GB"),
        ("load, verified", f"{rates.load_bytes_per_s / 1e9:.2f} GB/s, {rates.load_cpu_s_per_gb:.2f} s of CPU a GB"),
        ("past the page cache", "yes" if rates.is_direct else "no"),
        ("a call keeps its thread", times),
        ("open to other users", ", ".join(rates.shared_names) or "nothing"),
    )
    common.report(json, asdict(rates), common.facts_table(rows))
