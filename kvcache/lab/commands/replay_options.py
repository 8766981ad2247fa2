"""The options of `kvcache replay`: their table, and what can be checked without a trace."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvcache.cli import common, model
from kvcache.options import parse_size

if TYPE_CHECKING:
    from kvcache.cli.model import Weights


def complete_formats(incomplete: str) -> list[str]:
    """Return the trace formats that begin with `incomplete`."""
    from kvcache.lab.replay.trace import trace_formats

    return [name for name in ("auto", *trace_formats()) if name.startswith(incomplete)]


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """What the command line says, in the order of ``--help``."""

    file: Annotated[
        Path,
        typer.Argument(
            help="Mooncake or Qwen-Bailian JSONL, plain, gzip or zstd (- is standard input); recorded sessions of "
            "agents, a folder or a file; or a recording of a manager (.kvlog)."
        ),
    ]
    policy: Annotated[
        str | None,
        typer.Option(
            help="Replacement policy: a name or package.module:Class; or several with commas, and min for the optimum "
            "[default: lru, or that of a recording].",
            autocompletion=common.complete_policies_or_min,
            show_default=False,
        ),
    ] = None
    blocks: Annotated[
        str | None,
        typer.Option(help="Capacity in blocks [default: 10000], or several.", metavar="N,...", show_default=False),
    ] = None
    memory: Annotated[
        str | None,
        typer.Option(help="Capacity in bytes instead, as in 4GiB or 4G.", metavar="SIZE,...", show_default=False),
    ] = None
    block_bytes: common.ReplayBlockBytesOption = None
    split: Annotated[int, typer.Option(help="Turn each listed block into this many.")] = 1
    limit: Annotated[int | None, typer.Option(help="Stop after so many requests.", show_default=False)] = None
    format: Annotated[
        str, typer.Option(help="auto, mooncake, bailian or sessions.", autocompletion=complete_formats)
    ] = "auto"
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Count bad lines and go on.")] = False
    store_threshold: common.GateOption = 0
    what_if: common.WhatIfOption = False
    data: Annotated[
        bool | None,
        typer.Option(
            "--data/--no-data",
            help="Move and compare real bytes [default for one replay], or do the bookkeeping alone.",
            show_default=False,
        ),
    ] = None
    disk: Annotated[
        str | None,
        typer.Option(
            help="A disk tier below the pool: its folder and capacity.", metavar="PATH:SIZE", show_default=False
        ),
    ] = None
    json: common.JsonOption = None
    csv: Annotated[str | None, typer.Option("--csv", help="Write a grid as CSV.", metavar="FILE")] = None
    plot: Annotated[str | None, typer.Option("--plot", help="Draw a grid: .png, .svg or .html.", metavar="FILE")] = None
    tier: Annotated[
        list[str] | None,
        typer.Option(
            "--tier",
            help="Simulate a tier below host memory, as in 1TiB@6GB/s or nvme:1TiB,4TiB@6GB/s; again for the next "
            'one. Or use a real one, as it is configured: {"type": "valkey", "url": ...}.',
            metavar="[NAME:]SIZE,...@RATE|JSON",
            show_default=False,
        ),
    ] = None
    memory_rate: Annotated[
        str, typer.Option("--memory-rate", help="Rate between host memory and the device.", metavar="RATE")
    ] = "50GB/s"
    arbiter: Annotated[
        bool,
        typer.Option("--arbiter", help="Compute what would take longer to load from a tier, and count the decisions."),
    ] = False
    engines: Annotated[
        str | None,
        typer.Option(
            help="Engines that prefill [default: as many as are busy for 80 % without a cache]; with --router several.",
            metavar="N,...",
            show_default=False,
        ),
    ] = None
    price: Annotated[
        str | None,
        typer.Option(
            help="Prices of a GiB: of host memory, and of each tier.", metavar="PRICE,...", show_default=False
        ),
    ] = None
    router: Annotated[
        str | None,
        typer.Option(
            help="Simulate a fleet: round_robin, prefix or events, or several; --engines says how many engines it has.",
            metavar="ROUTER,...",
            show_default=False,
        ),
    ] = None
    store: Annotated[
        str | None,
        typer.Option(help="The fleet's shared store, as in 10TiB; 0: none.", metavar="SIZE", show_default=False),
    ] = None
    copies: Annotated[
        str | None,
        typer.Option(
            help="The fleet's traffic: so many copies of the trace [default: as keep 80 % busy without a cache].",
            metavar="N",
            show_default=False,
        ),
    ] = None
    store_rate: Annotated[
        str, typer.Option("--store-rate", help="Rate at which one engine loads from the store.", metavar="RATE")
    ] = "5GB/s"
    store_server: Annotated[
        str,
        typer.Option(
            "--store-server",
            help="What one server of the store bears: bytes, and keys asked for.",
            metavar="RATE,KEYS/s",
        ),
    ] = "2.5GB/s,900k"
    router_events: Annotated[
        str, typer.Option("--router-events", help="Blocks in events a second that the router bears.", metavar="N")
    ] = "690k"
    jobs: Annotated[
        int | None, typer.Option(help="Processes of a grid [default: one per CPU].", show_default=False)
    ] = None
    max_memory: Annotated[
        str | None,
        typer.Option(
            "--max-memory",
            help="Memory that a grid may take [default: 80 % of what is free].",
            metavar="SIZE",
            show_default=False,
        ),
    ] = None
    sample: Annotated[float, typer.Option(help="Replay this share of the blocks, with error bars.")] = 1.0
    users: Annotated[int, typer.Option(help="Users whose sessions are merged.")] = 40
    seed: Annotated[int, typer.Option(help="Which sessions come when, and which blocks a sample holds.")] = 0
    checkpoint: Annotated[
        str | None,
        typer.Option(
            help="Keep finished cells in this file, and go on from what it holds.", metavar="FILE", show_default=False
        ),
    ] = None
    dask: Annotated[
        str | None,
        typer.Option(help="Run a grid on this Dask scheduler.", metavar="tcp://HOST:PORT", show_default=False),
    ] = None
    model_name: model.ModelOption = None
    layers: model.LayersOption = None
    heads: model.HeadsOption = None
    head_size: model.HeadSizeOption = None
    dtype: model.DtypeOption = "bf16"
    params: model.ParamsOption = None
    flops: model.FlopsOption = 400e12
    as_trace: Annotated[
        bool, typer.Option("--as-trace", help="Read a recording as a trace of the requests that came.")
    ] = False
    shrink: Annotated[
        bool,
        typer.Option("--shrink", help="Where a recording's answers differ, print few calls that show it, as a test."),
    ] = False
    shrink_seconds: Annotated[float, typer.Option("--shrink-seconds", help="How long to look for fewer calls.")] = 60.0
    quiet: common.QuietOption = False

    @property
    def policies(self) -> list[str]:
        """The policies of a trace's replay, one or several."""
        return (self.policy or "lru").split(",")


@dataclass(frozen=True, slots=True)
class BlockSize:
    """How large a block is; where nobody has said (`is_known` is False), it is the size of the test data alone."""

    num_bytes: int
    is_known: bool

    @property
    def known_bytes(self) -> int | None:
        """The size, None where nobody has said."""
        return self.num_bytes if self.is_known else None

    def of_trace(self, weights: Weights | None, block_tokens: int, split: int) -> BlockSize:
        """Return the size that a model gives the blocks of a trace; this one where there is no model."""
        from kvcache.lab.replay.keys import split_block_size

        if weights is None:
            return self
        return BlockSize(weights.model.token_bytes * split_block_size(block_tokens, split), True)


def block_size(given: ReplayOptions, weights: Weights | None) -> BlockSize:
    """Return what is known of a block's size before the trace is open; ValueError where options exclude each other."""
    if weights is not None and given.block_bytes is not None:
        raise ValueError(
            f"--block-bytes and a model exclude each other, got {given.block_bytes!r} and {weights.model.name}"
        )
    is_known = weights is not None or given.block_bytes is not None
    if given.memory is not None and given.blocks is None and not is_known:
        raise ValueError(f"--memory needs the size of a block, got {given.memory!r} alone: {common.HOW_TO_SIZE}")
    return BlockSize(parse_size("--block-bytes", given.block_bytes or common.TEST_BLOCK_BYTES), is_known)


def check(given: ReplayOptions) -> None:
    """Raise ValueError for numbers out of range, and for options of a fleet where none is asked for."""
    for option, value, least in (
        ("--limit", given.limit, 1),
        ("--jobs", given.jobs, 1),
        ("--users", given.users, 1),
        ("--store-threshold", given.store_threshold, 0),
        ("--seed", given.seed, 0),
    ):
        if value is not None:
            common.at_least(option, value, least)
    if not 0 < given.sample <= 1:
        raise ValueError(f"--sample must be a share > 0 and <= 1, got {given.sample}")
    if given.arbiter and given.sample < 1:
        raise ValueError(f"--arbiter needs whole prefixes: leave out --sample, got {given.sample}")
    if given.router is not None:
        return
    for option, text in (("--store", given.store), ("--copies", given.copies)):
        if text is not None:
            raise ValueError(f"{option} needs --router: one of round_robin, prefix, events, got {text!r}")
    if given.engines is not None and "," in given.engines:
        raise ValueError(f"--engines takes several numbers with --router only, got {given.engines!r}")
