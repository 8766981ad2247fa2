"""`kvcache fleet-demo`: engines in processes over one real store."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcache.cli import common
from kvcache.lab.bench.servers import find_valkey, running_valkey
from kvcache.lab.commands.bench_tier import read_entry
from kvcache.options import format_size

if TYPE_CHECKING:
    from kvcache.lab.demos.fleet import FleetReport


def fleet_demo(
    entry: Annotated[
        str | None,
        typer.Argument(help="A tier on a store that runs; without it a Valkey or Redis server is started."),
    ] = None,
    widths: Annotated[str, typer.Option(help="Numbers of engines that begin together.", metavar="N,...")] = "1,2,4,8",
    requests: Annotated[int, typer.Option(help="Requests of each engine.")] = 12,
    plot: Annotated[
        str | None, typer.Option(help="Draw the widths into this picture.", metavar="FILE", show_default=False)
    ] = None,
    json: common.JsonOption = None,
    quiet: common.QuietOption = False,
) -> None:
    """Run up to 8 engines over one server: one computes a prefix, the others load it."""
    from rich.table import Table

    from kvcache.lab.demos.fleet import Workload, run_fleet

    try:
        counts = [int(part) for part in widths.split(",")]
    except ValueError:
        counts = [0]
    if not all(1 <= count <= 64 for count in counts):
        raise ValueError(f"--widths must be numbers of engines in 1..64, such as 1,2,4,8, got {widths!r}")
    common.at_least("--requests", requests, 1)
    common.check_writable("--json", json)
    if plot is not None:
        common.check_writable("--plot", plot)
    workload = Workload(num_requests=requests)
    console = common.console(json)
    given = None if entry is None else read_entry(entry, "the tier")
    with _store(given) as tier, common.Bar("fleet", "engines", quiet, total=2 + sum(counts)) as bar:
        num_ended = 0

        def run(count: int, in_turn: bool) -> FleetReport:
            nonlocal num_ended
            salted = {**tier, "salt": f"fleet-demo {secrets.token_hex(8)}"}
            before = num_ended

            def ended(number: int) -> None:
                bar.show(before + number, before + number, f"{count} engines")

            report = run_fleet(salted, count, workload, in_turn, ended)
            num_ended += count
            return report

        pair = run(2, True)
        reports = [run(count, False) for count in counts]
    if json != "-":
        table = Table(title="one engine after the other", box=None, title_justify="left")
        for name in ("engine", "needed", "own memory", "from the store", "computed", "wrong", "to first block"):
            table.add_column(name, justify="right")
        for one in pair.engines:
            mean_s = sum(one.first_block_s) / len(one.first_block_s)
            cells = (one.engine + 1, one.needed_blocks, one.host_blocks, one.store_blocks, one.computed_blocks)
            table.add_row(*map(str, cells), str(one.wrong_blocks), f"{mean_s * 1e3:.1f} ms")
        console.print(table)
        table = Table(title="engines that begin together", box=None, title_justify="left")
        for name in ("engines", "hit rate", "stored", "of these twice", "bytes stored", "to first block"):
            table.add_column(name, justify="right")
        for report in reports:
            table.add_row(
                str(report.num_engines),
                f"{report.hit_rate:.1%}",
                str(report.stored_blocks),
                str(max(0, report.stored_blocks - report.unique_blocks)),
                format_size(report.stored_blocks * report.block_bytes),
                f"{report.first_block_s * 1e3:.1f} ms",
            )
        console.print(table)
    if plot is not None:
        _draw(plot, reports)
    document = {"one_after_the_other": pair.as_dict(), "together": [report.as_dict() for report in reports]}
    common.write_json(json, document)
    num_wrong = sum(one.wrong_blocks for report in (pair, *reports) for one in report.engines)
    if num_wrong:
        raise common.CommandError(f"{num_wrong} loaded blocks held wrong bytes")


@contextmanager
def _store(entry: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """Yield the entry, or the entry of a server that is stopped at the end."""
    if entry is not None:
        yield entry
        return
    if find_valkey() is None:
        raise common.CommandError("no valkey-server or redis-server is installed; name a tier on a store that runs")
    with ExitStack() as stack:
        try:
            port = stack.enter_context(running_valkey("--maxmemory", "4gb", "--maxmemory-policy", "allkeys-lru"))
        except OSError as error:
            raise common.CommandError(str(error)) from None
        yield {"type": "valkey", "url": f"valkey://127.0.0.1:{port}"}


def _draw(path: str, reports: list[FleetReport]) -> None:
    from kvcache.lab.report import style

    figure = style.new_figure(10.5, 3.8)
    axes = figure.subplots(1, 3)
    counts = [report.num_engines for report in reports]
    panels = (
        ("hit rate, %", [100 * report.hit_rate for report in reports]),
        ("MB stored", [report.stored_blocks * report.block_bytes / 1e6 for report in reports]),
        ("ms to the first block", [1e3 * report.first_block_s for report in reports]),
    )
    for axis, (title, values), colour in zip(axes, panels, style.COLOURS, strict=False):
        style.plain_axes(axis)
        axis.plot(counts, values, marker="o", color=colour)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("engines on one server")
        axis.set_xticks(counts)
        axis.set_ylim(bottom=0)
    unique = [report.unique_blocks * report.block_bytes / 1e6 for report in reports]
    axes[1].plot(counts, unique, linestyle="--", color=style.INK, label="different blocks")
    axes[1].legend(frameon=False, fontsize=8)
    style.caption(figure, "Engines that share prefixes through one store", style.machine())
    figure.savefig(path, dpi=150)
