"""`kvcache replay`: one run of a trace under one policy at one capacity, with real bytes."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcache.cli import common
from kvcache.cli.model import HOW_TO_SIZE, ModelOption, read_model
from kvcache.lab.commands import options
from kvcache.options import parse_size

if TYPE_CHECKING:
    from kvcache.lab.simulate.tiered import DiskChoice

EXAMPLES = """
kvcache replay trace.jsonl --blocks 10k
kvcache replay trace.jsonl --memory 64GiB --model llama-3.1-8b --no-data
kvcache replay trace.jsonl --blocks 10k --tier /mnt/nvme/kv:1TiB
kvcache replay trace.jsonl --block-size :16 --no-data
"""


@dataclass(frozen=True, slots=True)
class ReplayOptions(options.TraceOptions):
    """The command line, in the order of ``--help``."""

    file: options.TraceArgument
    policy: options.PolicyOption = "lru"
    blocks: Annotated[
        str | None, typer.Option(help="Capacity in blocks [default: 10000].", metavar="N", show_default=False)
    ] = None
    memory: options.MemoryOption = None
    model_text: ModelOption = None
    block_bytes: options.TestBlockBytesOption = None
    data: options.DataOption = True
    tier: Annotated[
        str | None,
        typer.Option(
            help='A tier below host memory: PATH:SIZE for a disk, or its entry: {"type": "valkey", "url": ...}.',
            metavar="PATH:SIZE|JSON",
            show_default=False,
        ),
    ] = None
    store_threshold: options.GateOption = 0
    json: common.JsonOption = None
    quiet: common.QuietOption = False


@options.takes(ReplayOptions)
def replay(given: ReplayOptions) -> None:
    """Replay a trace once: look up, load, store and evict its blocks, with real bytes that are compared.

    `kvcache plan` compares policies, capacities and tiers; `kvcache rerun` runs a recording again.
    """
    from kvcache.lab.commands import session
    from kvcache.lab.simulate.reading import doubts, lines_read, read_trace

    if options.is_recording(given.file):
        raise ValueError(
            f"{given.file} is a recording: kvcache rerun makes its calls again, kvcache plan reads it as a trace"
        )
    options.one_policy(given.policy)
    common.at_least("--store-threshold", given.store_threshold, 0)
    model = read_model(given.model_text)
    if model is not None and given.block_bytes is not None:
        raise ValueError(f"--block-bytes and --model exclude each other, got {given.block_bytes!r}")
    is_sized = model is not None or given.block_bytes is not None
    if given.memory is not None and not is_sized:
        raise ValueError(
            f"--memory needs the size of a block, got {given.memory!r} alone: {HOW_TO_SIZE}; or say --block-bytes"
        )
    # Every option is checked before the trace is opened, which may take minutes to read.
    tier = None if given.tier is None else _read_tier(given.tier)
    test_bytes = parse_size("--block-bytes", given.block_bytes or options.TEST_BLOCK_BYTES)
    common.check_writable("--json", given.json, given.file)
    with given.open() as trace, tempfile.TemporaryDirectory(prefix="kvcache-trace-") as folder:
        split = given.split_of(trace)
        block_bytes = options.block_bytes_of(model, trace, split) or test_bytes
        settings = session.Settings(
            policy=given.policy,
            num_blocks=options.parse_capacity(given.blocks, given.memory, block_bytes, default="10000"),
            block_bytes=block_bytes,
            sized=is_sized,
            split=split,
            data=given.data,
            json_target=given.json,
            model=model,
            store_threshold=given.store_threshold,
            tier=tier,
            is_quiet=given.quiet,
        )
        with common.Bar("reading", "%", given.quiet) as bar:
            compact = read_trace(trace, Path(folder), bar)
        doubtful = doubts(compact, trace.num_untimed)
        session.run(
            compact,
            "\n".join([*lines_read(trace, compact), f"{trace.name} ({trace.format})"]),
            settings,
            lambda done: done / len(compact),
            lambda: trace.facts() | ({"doubts": doubtful} if doubtful else {}),
        )


def _read_tier(text: str) -> DiskChoice | dict[str, Any]:
    """Return the real tier that is below host memory."""
    from kvcache.lab.commands.bench_tier import read_entry
    from kvcache.lab.simulate.tiered import DiskChoice

    if text.lstrip().startswith("{"):
        return read_entry(text, "--tier")
    if "@" in text:
        raise ValueError(
            f"--tier SIZE@RATE is simulated by kvcache plan; a replay takes PATH:SIZE or JSON, got {text!r}"
        )
    folder, colon, size = text.rpartition(":")
    if not folder or not colon:
        raise ValueError(f"--tier must be PATH:SIZE, as in /mnt/nvme/kv:100GiB, or JSON, got {text!r}")
    return DiskChoice(Path(folder), parse_size("--tier", size))
