"""`kvcache replay --router`: engines behind a router over a shared store, in a simulation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import islice
from time import monotonic
from typing import TYPE_CHECKING, Any

from kvcache.cli import common
from kvcache.lab.commands.below import parse_rate
from kvcache.options import parse_count, parse_size

if TYPE_CHECKING:
    from kvcache.cli.model import Weights
    from kvcache.lab.commands.replay_options import BlockSize, ReplayOptions
    from kvcache.lab.replay.compact import CompactTrace
    from kvcache.lab.replay.fleet import FleetPlan, FleetResult
    from kvcache.lab.replay.requests import TraceFile

_OF_ONE_REPLAY = ("data", "what_if", "store_threshold", "disk")
_OF_A_GRID = ("tier", "price", "arbiter", "csv", "sample", "checkpoint", "dask")
_TOKENS_PER_S = 10_000
# Of one engine's pool and of the store's, as measured with 1,000 pools of 3,000 blocks (docs/scale.md).
_ROW_BYTES = 160
_REQUEST_BYTES = 96


@dataclass(frozen=True, slots=True)
class Options:
    """What is `given`, parsed; sizes in blocks."""

    given: ReplayOptions
    engines: list[int]
    routers: list[str]
    copies: int | None
    store_blocks: int
    num_blocks: int
    policy: str
    block_bytes: int | None
    store_bytes_per_s: float
    server_bytes_per_s: float
    server_keys_per_s: float
    router_events_per_s: float


def read_options(given: ReplayOptions, size: BlockSize) -> Options:
    """Check and parse what the command line says."""
    from kvcache.lab.replay.fleet import ROUTERS
    from kvcache.lab.replay.run import check_policy

    for field in fields(given):
        if field.name in (*_OF_ONE_REPLAY, *_OF_A_GRID) and getattr(given, field.name) != field.default:
            raise ValueError(f"--router excludes --{field.name.replace('_', '-')}, got --router {given.router}")
    routers = [part.strip() for part in (given.router or "").split(",")]
    for name in routers:
        if name not in ROUTERS:
            raise ValueError(f"--router must be of {', '.join(ROUTERS)}, got {given.router!r}")
    if given.engines is None:
        raise ValueError("--router needs --engines: how many engines the fleet has, as in --engines 100")
    counts = [parse_count("--engines", part) for part in given.engines.split(",")]
    rate, comma, keys = given.store_server.partition(",")
    if not comma:
        raise ValueError(
            f"--store-server must be a rate and keys a second, as in 1.5GB/s,300k, got {given.store_server!r}"
        )
    policy = common.one_policy(",".join(given.policies))
    check_policy(policy)
    common.check_writable("--json", given.json)
    if given.plot is not None:
        from kvcache.lab.replay.plot import check_plot_target

        check_plot_target(given.plot)
        if given.plot.lower().endswith(".html"):
            raise ValueError(f"--plot of a fleet must end in .png or .svg, got {given.plot!r}")
    return Options(
        given=given,
        engines=sorted(set(counts)),
        routers=list(dict.fromkeys(routers)),
        copies=None if given.copies is None else parse_count("--copies", given.copies),
        store_blocks=_store_blocks(given.store, size.known_bytes),
        num_blocks=common.parse_capacity(given.blocks, given.memory, size.num_bytes, default="10000"),
        policy=policy,
        block_bytes=size.known_bytes,
        store_bytes_per_s=parse_rate("--store-rate", given.store_rate),
        server_bytes_per_s=parse_rate("--store-server", rate),
        server_keys_per_s=parse_count("--store-server", keys.strip().removesuffix("/s")),
        router_events_per_s=parse_count("--router-events", given.router_events),
    )


def _store_blocks(text: str | None, block_bytes: int | None) -> int:
    if text is None or text.strip() == "0":
        return 0
    if block_bytes is None:
        raise ValueError(f"--store needs the size of a block, got {text!r} alone: {common.HOW_TO_SIZE}")
    num_blocks = parse_size("--store", text) // block_bytes
    if not num_blocks:
        raise ValueError(f"--store must hold at least one block of {block_bytes} bytes, got {text!r}")
    return num_blocks


def run(trace: TraceFile, options: Options, weights: Weights | None) -> None:
    """Simulate each number of engines behind each router, and report."""
    from kvcache.lab.replay.compact import CompactTrace
    from kvcache.lab.replay.fleet import FleetPlan, ScaledTrace, run_fleet
    from kvcache.lab.replay.serving import engines_for

    started = monotonic()
    compact = CompactTrace.of(islice(trace, options.given.limit), trace.block_size)
    if options.given.split > 1:
        compact = compact.split(options.given.split)
    token_s = (weights.saved_s(1) if weights else None) or 1 / _TOKENS_PER_S
    busy = engines_for(compact.arrivals_s, compact.num_tokens, token_s)
    block_bytes = options.block_bytes
    plans = [
        FleetPlan(
            num_engines=count,
            router=router,
            num_blocks=options.num_blocks,
            store_blocks=options.store_blocks,
            cache_policy=options.policy,
            token_s=token_s,
            block_load_s=(block_bytes or 0) / options.store_bytes_per_s,
        )
        for count in options.engines
        for router in options.routers
    ]
    results: list[tuple[int, FleetResult]] = []
    with common.Bar("fleet", "requests", options.given.quiet) as bar:
        scaled: dict[int, ScaledTrace] = {}
        for number, plan in enumerate(plans):
            copies = options.copies or max(1, round(plan.num_engines / busy))
            if copies not in scaled:
                _check_memory(plan, compact, copies)
                scaled = {copies: ScaledTrace(compact, copies, options.given.seed)}
            traffic = scaled[copies]
            began = monotonic()

            def progressed(done: int, number: int = number, plan: FleetPlan = plan, total: int = len(traffic)) -> None:
                if bar.is_due():
                    share = (number + done / max(1, total)) / len(plans)
                    bar.show(share, done, f"{plan.num_engines:,} engines, {plan.router}")

            found = run_fleet(traffic, plan, progressed)
            results.append((copies, replace(found, elapsed_s=monotonic() - began)))
        bar.show(1.0, len(traffic))
    cells = [_facts(copies, result, options) for copies, result in results]
    document = {
        "source": {"kind": "trace", "file": str(trace.path), "format": trace.format},
        "block_bytes": block_bytes,
        "block_size": compact.block_size,
        "token_prefill_s": token_s,
        "seed": options.given.seed,
        "limit": options.given.limit,
        "store_server": {"bytes_per_s": options.server_bytes_per_s, "keys_per_s": options.server_keys_per_s},
        "router_events_per_s": options.router_events_per_s,
        "model": weights.as_dict() if weights else None,
        "elapsed_s": monotonic() - started,
        "cells": cells,
    }
    if options.given.json != "-":
        _print(f"{trace.name} ({trace.format})", cells, document, options)
    if options.given.plot is not None:
        from kvcache.lab.replay.fleet_plot import draw_fleet

        store = "no store" if not options.store_blocks else f"a store of {options.store_blocks:,} blocks"
        footnote = (
            f"{options.num_blocks:,} blocks an engine, {store}, {1 / token_s:,.0f} tokens/s, seed {options.given.seed}"
        )
        draw_fleet(f"{trace.name}: fleets", cells, footnote, options.given.plot)
    common.write_json(options.given.json, document)


def _check_memory(plan: FleetPlan, compact: CompactTrace, copies: int) -> None:
    """Raise if a fleet's pools, full, and its requests do not fit into the memory that is free."""
    most = max(1, copies * len(compact.ids))
    blocks = plan.num_engines * min(plan.num_blocks, most) + min(plan.store_blocks, most)
    needed = _ROW_BYTES * blocks + _REQUEST_BYTES * copies * len(compact)
    usable = common.usable_bytes()
    if usable is not None and needed > usable:
        raise ValueError(
            f"a fleet of {plan.num_engines:,} engines of {plan.num_blocks:,} blocks and {copies:,} copies of the trace "
            f"needs about {common.human_bytes(needed)}, {common.human_bytes(usable)} may be taken: give it fewer"
        )


def _facts(copies: int, result: FleetResult, options: Options) -> dict[str, Any]:
    facts = result.as_dict()
    plan = facts.pop("plan")
    blocks = max(1, result.blocks)
    facts = {"engines": plan["num_engines"], "router": plan["router"], "copies": copies, **facts}
    facts["num_blocks"], facts["store_capacity_blocks"] = plan["num_blocks"], plan["store_blocks"]
    for name in ("local", "store", "missed"):
        facts[f"{name}_share"] = facts[f"{name}_blocks"] / blocks
    queries = facts["queries_per_s"]
    facts["queries_saved"] = {
        "remembering": _saved(queries["single"]["mean"], queries["single_remembered"]["mean"]),
        "batching": _saved(queries["single"]["mean"], queries["batched"]["mean"]),
        "both": _saved(queries["single"]["mean"], queries["batched_remembered"]["mean"]),
    }
    facts["limits"] = dict(_limits(result, options))
    return facts


def _saved(before: float, after: float) -> float:
    return 1 - after / before if before else 0.0


def _limits(result: FleetResult, options: Options) -> Iterator[tuple[str, float]]:
    """Yield how many servers of the store, or routers, the busiest minute takes, by what they bear."""
    read, written = result.read_blocks_per_s.peak, result.written_blocks_per_s.peak
    if options.block_bytes is not None and result.plan.store_blocks:
        yield "store_bytes", (read + written) * options.block_bytes / options.server_bytes_per_s
    if result.plan.store_blocks:
        yield "store_queries", result.query_keys_per_s.peak / options.server_keys_per_s
    if result.plan.router == "events":
        yield "router_events", result.events_per_s.peak / options.router_events_per_s


_LIMITS = {"store_bytes": "the store's bytes", "store_queries": "the store's queries", "router_events": "events"}


def _print(title: str, cells: list[dict[str, Any]], document: dict[str, Any], options: Options) -> None:
    console = common.console(options.given.json)
    store = "no store"
    if options.store_blocks:
        store = f"a store of {options.store_blocks:,} blocks"
        if options.block_bytes:
            store += f" ({common.human_bytes(options.store_blocks * options.block_bytes)})"
    console.print(
        f"{title}: {options.num_blocks:,} blocks of {document['block_size']} tokens an engine, {store}, "
        f"{1 / document['token_prefill_s']:,.0f} tokens/s of prefill",
        soft_wrap=True,
        markup=False,
    )
    heads = ("engines", "router", "copies", "host memory", "store", "computed", "TTFT p50", "p99", "busy", "imbalance")
    lines: list[tuple[str, ...]] = [
        (
            f"{cell['engines']:,}",
            cell["router"],
            f"{cell['copies']:,}",
            f"{cell['local_share']:.2%}",
            f"{cell['store_share']:.2%}",
            f"{cell['missed_share']:.2%}",
            f"{cell['ttft_p50_s']:.2f} s",
            f"{cell['ttft_p99_s']:.1f} s",
            f"{cell['busy']:.0%}",
            f"{cell['imbalance']:.2f}",
        )
        for cell in cells
    ]
    console.print(common.plain_table(heads, lines), crop=False)
    console.print("a second, in the busiest minute: the store's traffic, existence queries, blocks in events")
    unit = options.block_bytes
    heads = ("engines", "router", "read", "written", "queries", "remembered", "batched", "both", "keys", "events")
    lines = [
        (
            f"{cell['engines']:,}",
            cell["router"],
            *(_traffic(cell[name]["peak"], unit) for name in ("read_blocks_per_s", "written_blocks_per_s")),
            *(f"{load['peak']:,.0f}" for load in cell["queries_per_s"].values()),
            f"{cell['query_keys_per_s']['peak']:,.0f}",
            f"{cell['events_per_s']['peak']:,.0f}",
        )
        for cell in cells
    ]
    console.print(common.plain_table(heads, lines), crop=False)
    for cell in cells:
        console.print(_breaks(cell), soft_wrap=True)


def _breaks(cell: dict[str, Any]) -> str:
    limits: dict[str, float] = cell["limits"]
    fleet = f"{cell['engines']:,} engines, {cell['router']}"
    if not limits:
        return f"{fleet}: no store and no events to bear"
    needs = ", ".join(f"{share:.3g} for {_LIMITS[name]}" for name, share in limits.items())
    first = max(limits, key=lambda name: limits[name])
    verdict = "one of each bears it" if limits[first] <= 1 else f"{_LIMITS[first]} break first"
    return f"{fleet}: servers needed in the busiest minute: {needs}; {verdict}"


def _traffic(blocks_per_s: float, block_bytes: int | None) -> str:
    if block_bytes is None:
        return f"{blocks_per_s:,.1f} blocks"
    return f"{blocks_per_s * block_bytes / 1e9:,.2f} GB"
