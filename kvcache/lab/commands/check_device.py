"""`kvcache check --device`: what this machine's device does with kvcache's copies, as a table and a file to send."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvcache.cli import common
from kvcache.options import format_size

DEFAULT_FILE = "kvcache-device.json"


def check_device(json: str | None) -> None:
    """Measure the accelerator or the CPU, write the report, and fail if a byte differs."""
    import torch

    from kvcache.lab.bench.device import find_device, measure

    json = DEFAULT_FILE if json is None else json
    common.check_writable("--json", json)
    device = find_device()
    with common.console(json).status("") as status:
        report = measure(device, show=status.update)
    written = f"written to {json}: versions and figures, no names of hosts or users"
    common.report(json, report, *_shown(report), written)
    engine = (report["vllm"] or {}).get("geometries") or {"different_bytes": 0}
    different = sum(part["different_bytes"] for part in (report["geometries"], report["compute"], engine))
    if different:
        raise common.CommandError(f"{different} bytes differ after copies on {device} with torch {torch.__version__}")


def _shown(report: dict[str, Any]) -> Iterator[Any]:
    from rich.table import Table

    environment = report["environment"].items()
    facts = [(name.replace("_", " "), str(value)) for name, value in environment if value not in ("", None)]
    pool = report["pool"]
    pages = ", ".join(f"node {node}: {count} pages" for node, count in pool["pages_per_numa_node"].items())
    facts.append(("pool", f"{format_size(pool['bytes'])}, touched at {pool['touch_gb_per_s']:.1f} GB/s; {pages}"))
    if pool["pin_gb_per_s"] is not None:
        facts.append(("pinning", f"{pool['pin_gb_per_s']:.1f} GB/s"))
    yield common.facts_table(facts)
    rates = {(r["direction"], r["block_bytes"], r["num_blocks"], r["way"].split(",")[0]): r for r in report["copies"]}
    engine = report["vllm"]
    others = ("vllm", "one large copy") if engine and not engine["error"] else ("one large copy",)
    table = Table("blocks", "of", title="scattered blocks: GB/s, and the ratio to one large copy", title_justify="left")
    directions = list(dict.fromkeys(rate["direction"] for rate in report["copies"]))
    for direction in directions:
        table.add_column(direction, justify="right")
        for other in others:
            table.add_column(other.replace(" large", ""), justify="right")
    for size, count in dict.fromkeys((rate["block_bytes"], rate["num_blocks"]) for rate in report["copies"]):
        cells = []
        for direction in directions:
            ours = rates[direction, size, count, "kvcache"]
            rest = [f"{rates[direction, size, count, other]['gb_per_s']:.2f}" for other in others]
            cells += [f"{ours['gb_per_s']:.2f} {ours['ratio']:.2f}", *rest]
        table.add_row(str(count), format_size(size), *cells)
    yield table
    if engine:
        found = engine["error"] or f"{engine['geometries']['different_bytes']} bytes differ"
        yield f"the worker of vLLM {engine['version']}: {found}"
    found, beside = report["geometries"], report["compute"]
    yield f"{found['number']} random geometries: {found['different_bytes']} of {found['compared_bytes']:,} bytes differ"
    ratio = beside["both_s"] / max(beside["copy_s"], beside["compute_s"])
    yield (
        f"{format_size(beside['bytes'])} beside compute: {ratio:.2f} times as long as the longer of the two; "
        f"{beside['different_bytes']} bytes differ"
    )
