"""`kvcache selftest`: test kvcache on this machine, and report a table, a verdict and a file to send."""

from __future__ import annotations

import json as json_module
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from kvcache.cli import common

EXAMPLES = "kvcache selftest --path /mnt/nvme --json selftest.json\nkvcache selftest --vllm --device cuda"
FORMAT = 2


def selftest(
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda or another accelerator of torch.  [default: the machine's own]")
    ] = None,
    path: Annotated[Path | None, typer.Option(help="A folder on the disk to test.  [default: a temporary one]")] = None,
    store: Annotated[
        str | None, typer.Option(help="An entry of 'tiers' as JSON: a shared store to test, too.", metavar="JSON")
    ] = None,
    vllm: Annotated[bool, typer.Option("--vllm", help="Also start small engines: some minutes more.")] = False,
    minutes: Annotated[float, typer.Option(help="About how long the tests take, without engines.")] = 2.0,
    json: common.JsonOption = None,
    quiet: common.QuietOption = False,
) -> None:
    """Move blocks, kill a writer, measure rates, and compare every byte. Exits with 1 if anything is wrong."""
    if not 0.1 <= minutes <= 1440:
        raise ValueError(f"--minutes must be in 0.1..1440, got {minutes:g}")
    common.check_writable("--json", json)
    entry = _parse_store(store)

    import torch

    from kvcache.lab.selftest import copies, engine, kills, machine, rates
    from kvcache.lab.selftest.rows import SKIPPED, SLOW, WRONG, Row, guarded, private_names

    tested = machine.find_device(device)
    if path is not None and not path.is_dir():
        raise ValueError(f"--path must be a folder, got {str(path)!r}")
    share_s = 60 * minutes / 3
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="kvcache-selftest-") as temporary:
        place = Path(temporary)
        steps: list[tuple[str, Callable[[], Iterator[Row]]]] = [
            ("what this machine has", lambda: machine.found(tested)),
            ("copies", lambda: copies.check_copies(tested, share_s)),
            ("copy rates", lambda: rates.copy_rates(tested)),
            ("disk", lambda: _disk(path or place, share_s)),
        ]
        if entry is not None:
            steps.append(("shared store", lambda: kills.check_kills("shared store", entry, share_s / 2)))
        if vllm:
            steps.append(("vLLM", lambda: engine.check_engine(place, tested.type == "cpu")))
        names = private_names(path, place, Path(tempfile.gettempdir()))
        began_s = time.monotonic()
        with common.Bar("selftest", "rows", quiet or json == "-", total=len(steps)) as bar:
            for number, (name, check) in enumerate(steps):
                bar.show(number, len(rows), name)
                rows += guarded(name, check, names)
    document = {
        "format": FORMAT,
        "torch": str(torch.__version__),
        "seconds": round(time.monotonic() - began_s, 1),
        "rows": [
            {"subject": row.subject, "verdict": row.verdict, "text": row.text, "figures": row.figures} for row in rows
        ],
    }
    num_wrong, num_slow, num_skipped = (sum(row.verdict == kind for row in rows) for kind in (WRONG, SLOW, SKIPPED))
    counts = [f"{count} {name}" for count, name in ((num_slow, "suspicious"), (num_skipped, "not tested")) if count]
    found = "no fault was found" if num_skipped else "kvcache works on this machine"
    verdict = f"{found}; {' and '.join(counts) or 'every row is ok'}."
    if json is not None and json != "-":
        verdict += f" {json} holds figures, and no names of hosts, users or paths: it can be sent."
    common.report(json, document, _table(rows), "" if num_wrong else verdict)
    if num_wrong:
        subjects = ", ".join(row.subject for row in rows if row.verdict == WRONG)
        raise common.CommandError(f"{num_wrong} of {len(rows)} rows are wrong: {subjects}")


def _parse_store(text: str | None) -> dict[str, Any] | None:
    """Parse the option --store. ValueError: it is not an entry of ``tiers``."""
    if text is None:
        return None
    from kvcache.assembly.assemble import parse_tier

    try:
        entry = json_module.loads(text)
    except ValueError as error:
        raise ValueError(f"--store is not JSON: {error}") from error
    if not isinstance(entry, dict):
        raise ValueError(f"--store must be an object with a 'type', such as 'valkey', got {text}")
    parse_tier(entry)
    return entry


def _disk(folder: Path, seconds: float) -> Iterator[Any]:
    from kvcache.lab.selftest import kills, machine, rates
    from kvcache.lab.selftest.rows import SKIPPED, Row
    from kvcache.options import format_size
    from kvcache.tiers.disk.tier import DiskTier

    system = machine.file_system(folder)
    yield system
    capacity = DiskTier.capacity_for(kills.NUM_BLOCKS, kills.BLOCK_BYTES)
    if system.figures["free_bytes"] < 2 * capacity:
        yield Row("disk", f"not tested: it needs {format_size(2 * capacity)} of disk", SKIPPED)
        return
    with tempfile.TemporaryDirectory(prefix="kvcache-selftest-", dir=folder) as name:
        entry = {"type": "disk", "path": f"{name}/blocks", "capacity": capacity}
        yield from kills.check_kills("disk", entry, seconds)
        yield from rates.disk_rates(Path(name))


def _table(rows: list[Any]) -> Any:
    from rich.table import Table
    from rich.text import Text

    styles = {"ok": "green", "WRONG": "bold red", "slow?": "yellow", "skipped": "dim"}
    table = Table("tested", "result", "", show_lines=False)
    for row in rows:
        table.add_row(Text(row.subject), Text(row.text), Text(row.verdict, styles[row.verdict]))
    return table
