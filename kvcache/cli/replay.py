"""`kvcache replay`: run a request trace through manager and handlers, or through a grid of what-ifs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvcache.cli import below, common, fleet, model
from kvcache.options import parse_count, parse_size

if TYPE_CHECKING:
    from kvcache.replay.recorded_trace import RecordedTrace
    from kvcache.replay.sessions import SessionTrace
    from kvcache.replay.tiered import DiskChoice, TierEntry
    from kvcache.replay.trace import Trace


def complete_formats(incomplete: str) -> list[str]:
    """Return the trace formats that begin with `incomplete`."""
    from kvcache.replay.trace import trace_formats

    return [name for name in ("auto", *trace_formats()) if name.startswith(incomplete)]


def replay(
    file: Annotated[
        Path,
        typer.Argument(
            help="Mooncake or Qwen-Bailian JSONL, plain, gzip or zstd (- is standard input); recorded sessions of "
            "agents, a folder or a file; or a recording of a manager (.kvlog)."
        ),
    ],
    policy: Annotated[
        str | None,
        typer.Option(
            help="Replacement policy: a name or package.module:Class; or several with commas, and min for the optimum "
            "[default: lru, or that of a recording].",
            autocompletion=common.complete_policies_or_min,
            show_default=False,
        ),
    ] = None,
    blocks: Annotated[
        str | None,
        typer.Option(help="Capacity in blocks [default: 10000], or several.", metavar="N,...", show_default=False),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(help="Capacity in bytes instead, as in 4GiB or 4G.", metavar="SIZE,...", show_default=False),
    ] = None,
    block_bytes: common.ReplayBlockBytesOption = None,
    split: Annotated[int, typer.Option(help="Turn each listed block into this many.")] = 1,
    limit: Annotated[int | None, typer.Option(help="Stop after so many requests.", show_default=False)] = None,
    format: Annotated[  # noqa: A002 - the option's name
        str, typer.Option(help="auto, mooncake, bailian or sessions.", autocompletion=complete_formats)
    ] = "auto",
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Count bad lines and go on.")] = False,
    store_threshold: common.GateOption = 0,
    what_if: common.WhatIfOption = False,
    data: Annotated[
        bool | None,
        typer.Option(
            "--data/--no-data",
            help="Move and compare real bytes [default for one replay], or do the bookkeeping alone.",
            show_default=False,
        ),
    ] = None,
    disk: Annotated[
        str | None,
        typer.Option(
            help="A disk tier below the pool: its folder and capacity.", metavar="PATH:SIZE", show_default=False
        ),
    ] = None,
    json: common.JsonOption = None,
    csv: Annotated[str | None, typer.Option("--csv", help="Write a grid as CSV.", metavar="FILE")] = None,
    plot: Annotated[
        str | None, typer.Option("--plot", help="Draw a grid: .png, .svg or .html.", metavar="FILE")
    ] = None,
    tier: below.TierOption = None,
    memory_rate: below.MemoryRateOption = "50GB/s",
    arbiter: below.ArbiterOption = False,
    engines: below.EnginesOption = None,
    price: below.PriceOption = None,
    router: fleet.RouterOption = None,
    store: fleet.StoreOption = None,
    copies: fleet.CopiesOption = None,
    store_rate: fleet.StoreRateOption = "5GB/s",
    store_server: fleet.ServerOption = "2.5GB/s,900k",
    router_events: fleet.RouterEventsOption = "690k",
    jobs: Annotated[
        int | None, typer.Option(help="Processes of a grid [default: one per CPU].", show_default=False)
    ] = None,
    max_memory: Annotated[
        str | None,
        typer.Option(
            "--max-memory",
            help="Memory that a grid may take [default: 80 % of what is free].",
            metavar="SIZE",
            show_default=False,
        ),
    ] = None,
    sample: Annotated[float, typer.Option(help="Replay this share of the blocks, with error bars.")] = 1.0,
    users: Annotated[int, typer.Option(help="Users whose sessions are merged.")] = 40,
    seed: Annotated[int, typer.Option(help="Which sessions come when, and which blocks a sample holds.")] = 0,
    hints: Annotated[
        float | None,
        typer.Option(
            help="Simulate clients that say when they come back, and are wrong in this share of the requests.",
            metavar="ERROR",
            show_default=False,
        ),
    ] = None,
    checkpoint: Annotated[
        str | None,
        typer.Option(
            help="Keep finished cells in this file, and go on from what it holds.", metavar="FILE", show_default=False
        ),
    ] = None,
    dask: Annotated[
        str | None,
        typer.Option(help="Run a grid on this Dask scheduler.", metavar="tcp://HOST:PORT", show_default=False),
    ] = None,
    model_name: model.ModelOption = None,
    layers: model.LayersOption = None,
    heads: model.HeadsOption = None,
    head_size: model.HeadSizeOption = None,
    dtype: model.DtypeOption = "bf16",
    params: model.ParamsOption = None,
    flops: model.FlopsOption = 400e12,
    as_trace: Annotated[
        bool, typer.Option("--as-trace", help="Read a recording as a trace of the requests that came.")
    ] = False,
    shrink: Annotated[
        bool,
        typer.Option("--shrink", help="Where a recording's answers differ, print few calls that show it, as a test."),
    ] = False,
    shrink_seconds: Annotated[float, typer.Option("--shrink-seconds", help="How long to look for fewer calls.")] = 60.0,
    quiet: common.QuietOption = False,
) -> None:
    """Replay a request trace: look up, load, store and evict its blocks, with real bytes that are compared.

    Several policies or capacities, the policy min, --csv or --plot simulate a grid on all cores, bookkeeping alone.
    --router simulates many engines over a shared store.
    A recording of a manager is run again, call by call, up to the first different answer.
    """
    from kvcache.recorder.format import is_recording

    if not as_trace and is_recording(file):
        from kvcache.cli import recorded

        recorded.run(file, policy, json, shrink, shrink_seconds, quiet)
        return
    if shrink:
        raise ValueError(f"--shrink is for recordings, {file} is none")
    policy = policy or "lru"
    from kvcache.cli import grid, session
    from kvcache.replay.keys import split_block_size

    weights = model.weights_of(model_name, layers, heads, head_size, dtype, params, flops)
    if weights is not None and block_bytes is not None:
        raise ValueError(f"--block-bytes and a model exclude each other, got {block_bytes!r} and {weights.model.name}")
    if memory is not None and blocks is None and weights is None and block_bytes is None:
        raise ValueError(f"--memory needs the size of a block, got {memory!r} alone: {common.HOW_TO_SIZE}")
    bytes_per_block = parse_size("--block-bytes", block_bytes or common.TEST_BLOCK_BYTES)
    sized = weights is not None or block_bytes is not None
    if limit is not None:
        common.at_least("--limit", limit, 1)
    if jobs is not None:
        common.at_least("--jobs", jobs, 1)
    common.at_least("--store-threshold", store_threshold, 0)
    if not 0 < sample <= 1:
        raise ValueError(f"--sample must be a share > 0 and <= 1, got {sample}")
    if hints is not None and not 0 <= hints <= 1:
        raise ValueError(f"--hints must be a share of wrong hints in 0..1, got {hints}")
    common.at_least("--seed", seed, 0)
    if router is None:
        for option, value in (("--store", store), ("--copies", copies)):
            if value is not None:
                raise ValueError(f"{option} needs --router: one of round_robin, prefix, events, got {value!r}")
        if engines is not None and "," in engines:
            raise ValueError(f"--engines takes several numbers with --router only, got {engines!r}")
    num_engines = None if engines is None or router is not None else parse_count("--engines", engines)
    policies = policy.split(",")
    entry = _tier_entry(tier, disk)
    tiers = [] if entry is not None else below.parse_tiers(tier)
    if tiers and not sized:
        raise ValueError(
            f"--tier needs the size of a block, got {tier[0] if tier else ''!r} alone: {common.HOW_TO_SIZE}"
        )
    if tiers and policies == ["min"]:
        raise ValueError(
            "--policy min is the optimum of host memory alone and knows no tiers, got --tier "
            f"{tier[0] if tier else ''!r}: name a policy beside it, or leave --tier out"
        )

    if arbiter and not (tiers and weights is not None and weights.saved_s(1)):
        shown = weights.model.name if weights else "no model"
        raise ValueError(
            "--arbiter weighs loading from a tier against computing: it needs --tier, and a model whose --params are "
            f"known, such as --model llama-3.1-8b; got {len(tiers)} tiers and {shown}"
        )
    if arbiter and sample < 1:
        raise ValueError(f"--arbiter needs whole prefixes: leave out --sample, got {sample}")

    with _open(file, format, skip_bad, common.at_least("--users", users, 1), seed, as_trace) as trace:
        if weights is not None:
            bytes_per_block = weights.model.token_bytes * split_block_size(trace.block_size, split)
        if router is not None:
            given = {
                "--data": data,
                "--what-if": what_if,
                "--disk": disk is not None,
                "--csv": csv is not None,
                "--tier": bool(tiers),
                "--sample": sample < 1,
                "--hints": hints is not None,
                "--checkpoint": checkpoint is not None,
                "--dask": dask is not None,
                "--store-threshold": store_threshold,
                "--price": price is not None,
                "--arbiter": arbiter,
            }
            for option, is_given in given.items():
                if is_given:
                    raise ValueError(f"--router excludes {option}, got --router {router}")
            settings_of_fleet = fleet.read_options(
                router=router,
                engines=engines,
                copies=copies,
                store=store,
                store_rate=store_rate,
                server=store_server,
                router_events=router_events,
                block_bytes=bytes_per_block if sized else None,
                num_blocks=common.parse_capacity(blocks, memory, bytes_per_block, default="10000"),
                policy=common.one_policy(policy),
                seed=seed,
                limit=limit,
                split=split,
                is_quiet=quiet,
                json=json,
                plot=plot,
            )
            fleet.run(trace, settings_of_fleet, weights)
            return
        capacities = common.parse_capacities(blocks, memory, bytes_per_block, default="10000")
        is_grid = (
            len(policies) > 1
            or len(capacities) > 1
            or policies == ["min"]
            or bool(tiers)
            or sample < 1
            or hints is not None
        )
        if is_grid or any(target is not None for target in (csv, plot, checkpoint, dask)):
            if data:
                raise ValueError(
                    "--data replays one policy at one capacity, without --csv, --plot, --tier, --sample and --hints; "
                    f"got {policy!r} and {len(capacities)} capacities"
                )
            if what_if:
                raise ValueError(f"--what-if is for one policy at one capacity, got {policy!r} and {len(capacities)}")
            if entry is not None:
                raise ValueError(f"--tier of a real tier replays one policy at one capacity, got {policy!r}")
            if disk is not None:
                raise ValueError(f"--disk replays one policy at one capacity, got {policy!r} and {len(capacities)}")
            targets = grid.Targets(json, csv, plot, checkpoint)
            options = grid.Options(
                block_bytes=bytes_per_block if sized else None,
                split=split,
                store_threshold=store_threshold,
                limit=limit,
                jobs=jobs,
                is_quiet=quiet,
                sample=sample,
                seed=seed,
                max_memory_bytes=None if max_memory is None else parse_size("--max-memory", max_memory),
                dask=dask,
                tiers=tiers,
                prices=below.parse_prices(price, 1 + len(tiers)),
                memory_bytes_per_s=below.parse_rate("--memory-rate", memory_rate),
                engines=num_engines,
                hint_error=hints,
                arbiter=arbiter,
            )
            grid.run(trace, policies, capacities, options, weights, targets)
            return
        if what_if and disk is not None:
            raise ValueError(f"--what-if and --disk exclude each other, got {disk!r}")
        if what_if and entry is not None:
            raise ValueError("--what-if and --tier exclude each other")
        settings = session.Settings(
            policy=policy,
            num_blocks=capacities[0],
            block_bytes=bytes_per_block,
            sized=sized,
            split=split,
            limit=limit,
            data=data is not False,
            json_target=json,
            weights=weights,
            store_threshold=store_threshold,
            what_if=what_if,
            disk=entry or _disk_choice(disk),
            is_quiet=quiet,
        )
        session.run(
            trace,
            f"{trace.name} ({trace.format})",
            settings,
            lambda done: max(trace.position_bytes / trace.size_bytes, done / limit if limit else 0.0),
            lambda: {
                "kind": "trace",
                "file": str(file),
                "format": trace.format,
                "skipped_lines": trace.num_skipped,
            },
        )


def _tier_entry(tiers: list[str] | None, disk: str | None) -> TierEntry | None:
    """Return the one real tier that is named, None if all are simulated."""
    if not any(text.lstrip().startswith("{") for text in tiers or ()):
        return None
    if len(tiers or ()) > 1 or disk is not None:
        raise ValueError("--tier takes one real tier, without another --tier and without --disk")
    from kvcache.cli.bench_tier import read_entry
    from kvcache.replay.tiered import TierEntry

    return TierEntry(read_entry((tiers or [""])[0], "--tier"))


def _open(
    file: Path, trace_format: str, skip_bad: bool, users: int, seed: int, as_trace: bool
) -> Trace | SessionTrace | RecordedTrace:
    from kvcache.replay.recorded_trace import RecordedTrace
    from kvcache.replay.trace import open_trace

    return RecordedTrace(file) if as_trace else open_trace(file, trace_format, skip_bad, users, seed)


def _disk_choice(text: str | None) -> DiskChoice | None:
    if text is None:
        return None
    from kvcache.replay.tiered import DiskChoice

    folder, colon, size = text.rpartition(":")
    if not folder or not colon:
        raise ValueError(f"--disk must be PATH:SIZE, as in /mnt/nvme/kv:100GiB, got {text!r}")
    return DiskChoice(Path(folder), parse_size("--disk", size))
