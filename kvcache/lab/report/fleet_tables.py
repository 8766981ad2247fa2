"""The tables of simulated fleets: hits, the store's traffic, and the first limit that is reached."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kvcache.cli import common
from kvcache.lab.report.plan_tables import plain_table
from kvcache.options import format_size

if TYPE_CHECKING:
    from kvcache.lab.fleet.simulation import FleetResult


def facts_of(copies: int, result: FleetResult, document: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of one fleet for a report."""
    facts = asdict(result)
    plan = facts.pop("plan")
    blocks = max(1, result.blocks)
    lost = f":{plan['lost']:.3g}" if plan["lost"] else ""
    facts = {"engines": plan["num_engines"], "router": plan["router"] + lost, "copies": copies, **facts}
    facts["restarts"], facts["disk_capacity_blocks"] = plan["restarts"], plan["disk_blocks"]
    facts["num_blocks"], facts["store_capacity_blocks"] = plan["num_blocks"], plan["store_blocks"]
    for name in ("local", "disk", "store", "missed"):
        facts[f"{name}_share"] = facts[f"{name}_blocks"] / blocks
    queries = facts["queries_per_s"]
    facts["queries_saved"] = {
        "remembering": _saved(queries["single"]["mean"], queries["single_remembered"]["mean"]),
        "batching": _saved(queries["single"]["mean"], queries["batched"]["mean"]),
        "both": _saved(queries["single"]["mean"], queries["batched_remembered"]["mean"]),
    }
    facts["limits"] = dict(_limits(result, document))
    return facts


def _saved(before: float, after: float) -> float:
    return 1 - after / before if before else 0.0


def _limits(result: FleetResult, document: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield how many servers of the store, or routers, the busiest minute requires."""
    server, blocks_per_s = document["store_server"], result.read_blocks_per_s.peak + result.written_blocks_per_s.peak
    # A store needs the size of a block.
    if result.plan.store_blocks:
        yield "store_bytes", blocks_per_s * document["block_bytes"] / server["bytes_per_s"]
        yield "store_queries", result.query_keys_per_s.peak / server["keys_per_s"]
    if result.plan.router in ("events", "known"):
        yield "router_events", result.events_per_s.peak / document["router_events_per_s"]


_LIMITS = {"store_bytes": "the store's bytes", "store_queries": "the store's queries", "router_events": "events"}


def print_fleets(title: str, document: dict[str, Any], json: str | None) -> None:
    """Print the tables of several fleets."""
    console = common.console(json)
    cells, block_bytes = document["cells"], document["block_bytes"]
    # All fleets of a call have equal capacities; those of the first stand for all.
    num_blocks, disk_blocks, store_blocks = (
        cells[0][name] for name in ("num_blocks", "disk_capacity_blocks", "store_capacity_blocks")
    )
    store = "no store"
    if store_blocks:
        store = f"a store of {store_blocks:,} blocks ({format_size(store_blocks * block_bytes)})"
    disk = f" and {disk_blocks:,} on disk" if disk_blocks else ""
    console.print(
        f"{title}: {num_blocks:,} blocks{disk} of {document['block_size']} tokens an engine, {store}, "
        f"{1 / document['token_prefill_s']:,.0f} tokens/s of prefill",
        soft_wrap=True,
        markup=False,
    )
    places = ("host memory", "disk", "store", "computed")
    heads = ("engines", "router", "copies", *places, "TTFT p50", "p99", "busy", "imbalance")
    lines: list[tuple[str, ...]] = [
        (
            f"{cell['engines']:,}",
            cell["router"],
            f"{cell['copies']:,}",
            f"{cell['local_share']:.2%}",
            f"{cell['disk_share']:.2%}",
            f"{cell['store_share']:.2%}",
            f"{cell['missed_share']:.2%}",
            common.format_seconds(cell["ttft_p50_s"]),
            common.format_seconds(cell["ttft_p99_s"]),
            f"{cell['busy']:.0%}",
            f"{cell['imbalance']:.2f}",
        )
        for cell in cells
    ]
    console.print(plain_table(heads, lines), crop=False)
    if store_blocks:
        console.print(
            "a second, in the busiest minute: the store's traffic, existence queries (as they are; with answers "
            "remembered; batched; both), the keys of the last, blocks in events",
            soft_wrap=True,
        )
        names = ("engines", "router", "read", "written", "queries", "remembered", "batched", "both", "keys", "events")
        lines = [
            (
                f"{cell['engines']:,}",
                cell["router"],
                *(_traffic(cell[name]["peak"], block_bytes) for name in ("read_blocks_per_s", "written_blocks_per_s")),
                *(f"{load['peak']:,.0f}" for load in cell["queries_per_s"].values()),
                f"{cell['query_keys_per_s']['peak']:,.0f}",
                f"{cell['events_per_s']['peak']:,.0f}",
            )
            for cell in cells
        ]
        console.print(plain_table(names, lines), crop=False)
    for cell in cells:
        console.print(_breaks(cell), soft_wrap=True)
    for doubt in document["doubts"]:
        console.print(doubt, soft_wrap=True)


def _breaks(cell: dict[str, Any]) -> str:
    limits: dict[str, float] = cell["limits"]
    fleet = f"{cell['engines']:,} engines, {cell['router']}"
    if not limits:
        return f"{fleet}: no store and no events to bear"
    needs = ", ".join(f"{share:.3g} for {_LIMITS[name]}" for name, share in limits.items())
    first = max(limits, key=lambda name: limits[name])
    verdict = "one of each is enough" if limits[first] <= 1 else f"{_LIMITS[first]} break first"
    return f"{fleet}: servers needed in the busiest minute: {needs}; {verdict}"


def _traffic(blocks_per_s: float, block_bytes: int | None) -> str:
    if block_bytes is None:
        return f"{blocks_per_s:,.1f} blocks"
    return f"{blocks_per_s * block_bytes / 1e9:,.2f} GB"
