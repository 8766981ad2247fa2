"""`kvcache tier`: look into the folder of a disk tier, verify its blocks, pack it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcache.cli import common
from kvcache.options import parse_size

if TYPE_CHECKING:
    from kvcache.tiers.disk.maintenance import Progress, TierFacts

PathArgument = Annotated[Path, typer.Argument(help="Folder of the tier.", show_default=False)]


def build_app() -> typer.Typer:
    """Return the group of commands."""
    app = typer.Typer(help="Look into a disk tier, verify it, pack it.", no_args_is_help=True)
    app.callback()(lambda: None)
    common.add_command(app, "inspect", inspect)
    common.add_command(app, "verify", verify)
    common.add_command(app, "compact", compact)
    return app


def inspect(path: PathArgument, json: common.JsonOption = None) -> None:
    """Show the size of a disk tier, its blocks, their uses, and their model."""
    from kvcache.tiers.disk.maintenance import inspect_tier

    common.check_writable("--json", json)
    _report(inspect_tier(path), json)


def verify(
    path: PathArgument,
    wipe: Annotated[bool, typer.Option("--wipe", help="Drop the blocks that are bad.")] = False,
    json: common.JsonOption = None,
    quiet: common.QuietOption = False,
) -> None:
    """Read every block and compare its checksum."""
    from kvcache.tiers.disk.maintenance import verify_tier

    common.check_writable("--json", json)
    console = common.console(json)
    num_good, num_bad = _with_progress("verify", quiet, lambda progress: verify_tier(path, wipe, progress))
    if json != "-":
        console.print(f"{num_good:,} blocks are right, {num_bad:,} are not{' and were dropped' if wipe else ''}")
    common.write_json(json, {"path": str(path), "good_blocks": num_good, "bad_blocks": num_bad, "wiped": wipe})
    if num_bad and not wipe:
        raise common.CommandError(f"{num_bad} blocks of {path} do not verify")


def compact(
    path: PathArgument,
    capacity: Annotated[
        str | None, typer.Option(help="New capacity, as in 100GiB.", metavar="SIZE", show_default=False)
    ] = None,
    json: common.JsonOption = None,
    quiet: common.QuietOption = False,
) -> None:
    """Pack the most recent blocks together and give the rest of the disk space back."""
    from kvcache.tiers.disk.maintenance import compact_tier

    common.check_writable("--json", json)
    capacity_bytes = None if capacity is None else parse_size("--capacity", capacity)
    facts = _with_progress("compact", quiet, lambda progress: compact_tier(path, capacity_bytes, progress))
    _report(facts, json)


def _with_progress(name: str, is_quiet: bool, work: Callable[[Progress], Any]) -> Any:
    with common.Bar(name, "blocks", is_quiet, total=None) as bar:

        def progressed(num_done: int, num_blocks: int) -> None:
            if bar.is_due() or num_done == num_blocks:
                bar.show(num_done, num_done, total=num_blocks)

        return work(progressed)


def _report(facts: TierFacts, json: str | None) -> None:
    from rich.table import Table

    if json != "-":
        table = Table(show_header=False, box=None)
        for name, value in (
            ("blocks held", f"{facts.num_held:,} of {facts.num_slots:,}"),
            ("block", common.human_bytes(facts.block_bytes)),
            ("capacity", common.human_bytes(facts.capacity_bytes)),
            ("on disk", common.human_bytes(facts.bytes_on_disk)),
            ("loads of held blocks", f"{facts.uses:,}, at most {facts.most_uses:,} of one"),
            ("never loaded", f"{facts.never_used_blocks:,}"),
            ("open to other users", ", ".join(facts.shared_names) or "nothing"),
            *((f"fingerprint: {key}", str(value)) for key, value in facts.fingerprint.items()),
        ):
            table.add_row(name, value)
        console = common.console(json)
        console.print(facts.path, soft_wrap=True, markup=False)
        console.print(table)
    common.write_json(json, asdict(facts))
