"""`kvcache fleet`: simulate engines behind a router over a shared store."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcache.cli import common
from kvcache.cli.model import HOW_TO_SIZE, ModelOption, read_model
from kvcache.lab.commands import options
from kvcache.lab.commands.tiers import parse_rate
from kvcache.options import format_size, parse_count, parse_share, parse_size
from kvcache.registry import POLICIES

if TYPE_CHECKING:
    from kvcache.lab.fleet.routers import FleetPlan
    from kvcache.lab.traces.compact import CompactTrace
    from kvcache.lab.traces.requests import TraceFile

EXAMPLES = """
kvcache fleet trace.jsonl --model llama-3.1-8b --memory 512GiB --engines 10,100
kvcache fleet trace.jsonl --model llama-3.1-70b --memory 512GiB \\
    --engines 1000 --router round_robin,prefix --store 200TiB@5GB/s
"""
_TOKENS_PER_S = 10_000
# Bytes per block of an engine's pool and of the store, measured with 1,000 pools of 3,000 blocks (docs/scale.md).
_ROW_BYTES = 160
_REQUEST_BYTES = 96


@dataclass(frozen=True, slots=True)
class FleetOptions(options.TraceOptions):
    """The command line, in the order of ``--help``."""

    file: options.TraceArgument
    engines: Annotated[
        str,
        typer.Option(
            help="Engines of the fleet, and how many restarts empty their memory; several fleets are compared.",
            metavar="N[:RESTARTS],...",
        ),
    ]
    router: Annotated[
        str,
        typer.Option(
            help="round_robin, prefix, events (with the share of lost messages: events:1%) or known (perfect "
            "knowledge); several are compared.",
            metavar="ROUTER,...",
        ),
    ] = "prefix"
    one_pool: Annotated[
        bool,
        typer.Option("--one-pool", help="Compare one pool of all engines, as large as theirs together (node_pool)."),
    ] = False
    policy: options.PolicyOption = "lru"
    blocks: Annotated[
        str | None,
        typer.Option(
            help="Blocks of host memory of an engine and of its disk [default: 10000], and the rate at which one "
            "engine loads from host memory [default: no time].",
            metavar="N[+DISK][@RATE]",
            show_default=False,
        ),
    ] = None
    memory: options.MemoryOption = None
    model_text: ModelOption = None
    store: Annotated[
        str | None,
        typer.Option(
            help="The shared store, and the rate at which one engine loads from it [default: 5GB/s].",
            metavar="SIZE[@RATE]",
            show_default=False,
        ),
    ] = None
    server: Annotated[
        str,
        typer.Option(
            help="Limits of one server of the store (bytes, keys asked) and of the router (blocks in events).",
            metavar="RATE,KEYS[,EVENTS]",
        ),
    ] = "2.5GB/s,900k,690k"
    copies: Annotated[
        str | None,
        typer.Option(
            help="Copies of the trace at once [default: as many as keep the engines 80 % busy without a cache]; "
            "@70%: its times are stretched until the engines are that busy.",
            metavar="N[@BUSY]",
            show_default=False,
        ),
    ] = None
    plot: Annotated[
        str | None,
        typer.Option("--save", "--plot", help="Draw it: .png or .svg.", metavar="FILE", show_default=False),
    ] = None
    json: common.JsonOption = None
    quiet: common.QuietOption = False


@options.takes(FleetOptions)
def fleet(given: FleetOptions) -> None:
    """Simulate engines behind a router over a shared store: hits, times, and the load of store and router.

    Every engine has host memory of its own. The traffic is copies of the trace, which share system prompts only.
    """
    model = read_model(given.model_text)
    if given.memory is not None and model is None:
        raise ValueError(f"--memory needs the size of a block, got {given.memory!r} alone: {HOW_TO_SIZE}")
    with given.open() as trace, tempfile.TemporaryDirectory(prefix="kvcache-trace-") as folder:
        split = given.split_of(trace)
        block_bytes = options.block_bytes_of(model, trace, split)
        token_s = (model.saved_s(1) if model else None) or 1 / _TOKENS_PER_S
        plans = read_plans(given, block_bytes, token_s)
        document = {
            "source": {"kind": "trace", "file": str(trace.path), "format": trace.format},
            "block_bytes": block_bytes,
            "block_size": trace.block_size // split,
            "token_prefill_s": token_s,
            "seed": given.seed,
            **read_server(given.server),
            "model": model.as_dict() if model else None,
        }
        common.check_writable("--json", given.json, given.file)
        common.check_writable("--save", given.plot, given.file)
        if given.plot is not None:
            from kvcache.lab.report.plot import check_plot_target

            check_plot_target(given.plot)
            if given.plot.lower().endswith(".html"):
                raise ValueError(f"--save of a fleet must end in .png or .svg, got {given.plot!r}")
        run(trace, split, plans, given, document, Path(folder))


def read_plans(given: FleetOptions, block_bytes: int | None, token_s: float) -> list[FleetPlan]:
    """Check and parse the options of the fleets: each number of engines behind each router."""
    from kvcache.lab.fleet.routers import ONE_POOL, ROUTERS, FleetPlan

    # Each once, in the order of the option.
    routers: dict[tuple[str, float], None] = {}
    for name, lost in map(_with_fault, given.router.split(",")):
        if name not in ROUTERS:
            raise ValueError(f"--router must be of {', '.join(ROUTERS)}, got {given.router!r}")
        routers[name, parse_share("--router", lost)] = None
    if given.one_pool:
        routers[ONE_POOL, 0.0] = None
    POLICIES.resolve(options.one_policy(given.policy))
    _copies_of(given.copies)
    capacity, _, host_rate = (given.blocks or "").partition("@")
    if host_rate and block_bytes is None:
        raise ValueError(f"--blocks with a rate needs the size of a block, got {given.blocks!r}: {HOW_TO_SIZE}")
    blocks, _, disk_blocks = capacity.partition("+")
    store, _, store_rate = (given.store or "0").partition("@")
    engines = {
        (parse_count("--engines", count), parse_count("--engines", restarts, 0))
        for count, restarts in map(_with_fault, given.engines.split(","))
    }
    common_to_all = partial(
        FleetPlan,
        num_blocks=options.parse_capacity(blocks or None, given.memory, block_bytes or 1, default="10000"),
        store_blocks=_store_blocks(store, block_bytes),
        cache_policy=given.policy,
        token_s=token_s,
        block_load_s=(block_bytes or 0) / parse_rate("--store", store_rate or "5GB/s"),
        host_load_s=(block_bytes or 0) / parse_rate("--blocks", host_rate) if host_rate else 0.0,
        disk_blocks=parse_count("--blocks", disk_blocks or "0", 0),
        seed=given.seed,
    )
    return [
        common_to_all(num_engines=count, router=name, lost=lost, restarts=restarts)
        for count, restarts in sorted(engines)
        for name, lost in routers
    ]


def read_server(text: str) -> dict[str, Any]:
    """Return the limits of ``--server`` as a report holds them."""
    rate, *counts = [part.strip().removesuffix("/s") for part in text.split(",")]
    if len(counts) not in (1, 2):
        raise ValueError(f"--server must be RATE,KEYS[,EVENTS], as in 2.5GB/s,900k,690k, got {text!r}")
    keys_per_s, events_per_s = (parse_count("--server", count) for count in (*counts, "690k")[:2])
    return {
        "store_server": {"bytes_per_s": parse_rate("--server", f"{rate}/s"), "keys_per_s": keys_per_s},
        "router_events_per_s": events_per_s,
    }


def _with_fault(part: str) -> tuple[str, str]:
    name, _, fault = part.strip().partition(":")
    return name, fault or "0"


def _copies_of(text: str | None) -> tuple[int, float]:
    """Return the number of copies and the load without a cache; 0: not given."""
    count, at, busy = (text or "").partition("@")
    load = parse_share("--copies", busy) if at else 0.0
    if at and not load:
        raise ValueError(f"--copies must be N@BUSY with a share above 0, got {text!r}")
    return parse_count("--copies", count) if count else 0, load


def _store_blocks(text: str, block_bytes: int | None) -> int:
    if text.strip() == "0":
        return 0
    if block_bytes is None:
        raise ValueError(f"--store needs the size of a block, got {text!r} alone: {HOW_TO_SIZE}")
    num_blocks = parse_size("--store", text) // block_bytes
    if not num_blocks:
        raise ValueError(f"--store must hold at least one block of {block_bytes} bytes, got {text!r}")
    return num_blocks


def run(
    trace: TraceFile, split: int, plans: list[FleetPlan], given: FleetOptions, document: dict[str, Any], folder: Path
) -> None:
    """Simulate each fleet, and report: `document` holds the facts of all, `folder` receives the trace."""
    from kvcache.lab.fleet.scaled_trace import ScaledTrace
    from kvcache.lab.fleet.simulation import run_fleet
    from kvcache.lab.report.fleet_tables import facts_of, print_fleets
    from kvcache.lab.simulate.reading import doubts, lines_read, read_trace
    from kvcache.lab.simulate.serving import engines_for

    started = monotonic()
    with common.Bar("reading", "%", given.quiet) as bar:
        compact = read_trace(trace, folder, bar)
    token_s = document["token_prefill_s"]
    document["doubts"] = doubts(compact, trace.num_untimed)
    if split > 1:
        compact = compact.split(split)
    busy = engines_for(compact.arrivals_s, compact.num_tokens, token_s)
    num_copies, load = _copies_of(given.copies)
    cells = []
    with common.Bar("fleet", "requests", given.quiet) as bar:
        scaled: dict[tuple[int, float], ScaledTrace] = {}
        for number, plan in enumerate(plans):
            copies = num_copies or max(1, round(plan.num_engines / busy))
            # How much longer the trace takes at the load.
            span_s = float(compact.arrivals_s[-1] - compact.arrivals_s[0]) if len(compact) else 0.0
            work_s = copies * compact.num_tokens * token_s / plan.num_engines
            stretch = work_s / (load * span_s) if load and span_s else 1.0
            if (copies, stretch) not in scaled:
                _check_memory(plan, compact, copies)
                slower = replace(compact, arrivals_s=compact.arrivals_s * stretch)
                scaled = {(copies, stretch): ScaledTrace(slower, copies, given.seed)}
            traffic = scaled[copies, stretch]
            began = monotonic()

            def progressed(done: int, number: int = number, plan: FleetPlan = plan, total: int = len(traffic)) -> None:
                if bar.is_due():
                    share = (number + done / max(1, total)) / len(plans)
                    bar.show(share, done, f"{plan.num_engines:,} engines, {plan.router}")

            found = run_fleet(traffic, plan, progressed)
            cells.append(facts_of(copies, replace(found, elapsed_s=monotonic() - began), document))
        bar.show(1.0, len(traffic))
    document |= {"elapsed_s": monotonic() - started, "cells": cells}
    if given.json != "-":
        title = "\n".join([*lines_read(trace, compact), f"{trace.name} ({trace.format})"])
        print_fleets(title, document, given.json)
    if given.plot is not None:
        from kvcache.lab.report.fleet_plot import draw_fleet

        store = f"a store of {plans[0].store_blocks:,} blocks" if plans[0].store_blocks else "no store"
        footnote = (
            f"{trace.name}: {plans[0].num_blocks:,} blocks an engine, {store}, "
            f"{1 / token_s:,.0f} tokens/s, seed {given.seed}"
        )
        draw_fleet(cells, footnote, given.plot)
    common.write_json(given.json, document)


def _check_memory(plan: FleetPlan, compact: CompactTrace, copies: int) -> None:
    """Raise ValueError if the full pools and the requests of a fleet do not fit into the free memory."""
    from kvcache.lab.simulate.plan import usable_bytes

    most = max(1, copies * len(compact.ids))
    blocks = plan.num_engines * (min(plan.num_blocks, most) + min(plan.disk_blocks, most)) + min(
        plan.store_blocks, most
    )
    needed = _ROW_BYTES * blocks + _REQUEST_BYTES * copies * len(compact)
    usable = usable_bytes()
    if usable is not None and needed > usable:
        raise ValueError(
            f"a fleet of {plan.num_engines:,} engines of {plan.num_blocks:,} blocks and {copies:,} copies of the trace "
            f"needs about {format_size(needed)}, {format_size(usable)} may be taken: give it fewer"
        )
