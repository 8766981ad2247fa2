"""`kvcache bench copy`: how fast blocks move between an engine's tensors and the pool."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from kvcache.cli import common
from kvcache.options import format_size, parse_count, parse_size

if TYPE_CHECKING:
    from kvcache.lab.bench.copy import CopyRate

_SIZES = "4KiB,16KiB,64KiB,256KiB,1MiB,4MiB"


def copy(
    sizes: Annotated[str, typer.Option(help="Block sizes.", metavar="SIZE,...")] = _SIZES,
    blocks: Annotated[int, typer.Option(help="Blocks of one job, where --bytes allows so many.")] = 1000,
    total: Annotated[str, typer.Option("--bytes", help="At most so much in one job.", metavar="SIZE")] = "256MiB",
    threads: Annotated[str, typer.Option(help="Numbers of copy threads.", metavar="N,...")] = "1,2",
    repeats: Annotated[int, typer.Option(help="Rounds; the best of each way counts.")] = 5,
    device: Annotated[str, typer.Option(help="Where the engine's tensors lie: cpu or cuda.")] = "cpu",
    json: common.JsonOption = None,
    quiet: common.QuietOption = False,
) -> None:
    """Copy scattered and contiguous blocks both ways, beside one large memcpy and torch's own ways."""
    block_sizes = [parse_size("--sizes", part) for part in sizes.split(",")]
    num_threads = [parse_count("--threads", part) for part in threads.split(",")]
    job_bytes = parse_size("--bytes", total)
    common.at_least("--blocks", blocks, 1)
    common.at_least("--repeats", repeats, 1)
    if device not in ("cpu", "cuda"):
        raise ValueError(f"--device must be cpu or cuda, got {device!r}")
    common.check_writable("--json", json)
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: there is no CUDA device")
    counts = {size: min(blocks, job_bytes // size) for size in block_sizes}
    if 0 in counts.values():
        raise ValueError(f"--bytes must hold a block of {max(block_sizes)} bytes, got {total!r}")
    rates = _measure(counts, num_threads, repeats, device, json, quiet)
    document = {"device": device, "torch": torch.__version__, "rates": [asdict(rate) for rate in rates]}
    common.write_json(json, document)


def _measure(
    counts: dict[int, int], threads: list[int], repeats: int, device: str, json: str | None, is_quiet: bool
) -> list[CopyRate]:
    from rich.table import Table

    from kvcache.lab.bench.copy import DIRECTIONS, LAYOUTS, CopyBench

    console = common.console(json)
    console.print("GB/s, and the ratio to one large copy of as many bytes")
    rates: list[CopyRate] = []
    columns = [(direction, layout) for direction in DIRECTIONS for layout in LAYOUTS]
    with common.Bar("copying", "tables", is_quiet, total=len(counts) * len(columns)) as bar:
        for done, (size, count) in enumerate(counts.items()):
            table = Table("way", title=f"{count:,} blocks of {format_size(size)}", title_justify="left")
            table.columns[0].no_wrap = True
            bench = CopyBench(size, count, threads, device)
            cells: dict[str, list[str]] = {}
            for column, (direction, layout) in enumerate(columns):
                table.add_column(f"{direction}\n{layout}", justify="right", no_wrap=True)
                bar.show(done * len(columns) + column, done, f"{format_size(size)}, {direction}, {layout}")
                for rate in bench.measure(direction, layout, repeats):
                    rates.append(rate)
                    cells.setdefault(rate.way, []).append(f"{rate.gb_per_s:.2f} {rate.ratio:.2f}")
            bench.close()
            for way, values in cells.items():
                table.add_row(way, *values)
            console.print(table)
    return rates
