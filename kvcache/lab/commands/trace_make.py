"""`kvcache trace make`: turn a log of prompts into a trace."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from kvcache.cli import common
from kvcache.lab.commands import options

EXAMPLES = """
kvcache trace make prompts.jsonl trace.jsonl --block-size 64
kvcache trace make chats.jsonl.gz trace.jsonl --tokenizer Qwen/Qwen3-8B --time-unit ms
kvcache trace make w80.oracleGeneral.zst - | kvcache plan -
"""


@dataclass(frozen=True, slots=True)
class MakeOptions(options.TraceOptions):
    """The command line, in the order of ``--help``."""

    file: options.TraceArgument
    trace: Annotated[Path, typer.Argument(help="File to write, Mooncake JSONL (- is standard output).")]
    json: common.JsonOption = None
    quiet: common.QuietOption = False


@options.takes(MakeOptions)
def make(given: MakeOptions) -> None:
    """Turn a log of prompts into a trace without text, which `plan`, `replay` and `fleet` read faster than the log."""
    from kvcache.lab.traces.make import make_trace

    log, trace, json = given.file, given.trace, given.json
    target = str(trace)
    if target == "-" == json:
        raise ValueError("TRACE and --json are both -: only one can go to standard output")
    common.check_writable("TRACE", target, log)
    common.check_writable("--json", json, log)
    # A pipe or a device is written in place; a file is replaced once the trace is complete.
    is_replaced = target != "-" and (trace.is_file() or not trace.exists())
    trace = trace.resolve() if is_replaced else trace
    unfinished = Path(f"{trace}.part") if is_replaced else trace
    try:
        with ExitStack() as open_now:
            source = open_now.enter_context(given.open())
            file = sys.stdout if target == "-" else open_now.enter_context(unfinished.open("w", encoding="utf-8"))
            bar = open_now.enter_context(common.Bar("make", "requests", given.quiet))

            def progressed(requests: int, position_bytes: int) -> None:
                if bar.is_due():
                    bar.show(position_bytes / source.size_bytes, requests)

            made = make_trace(source, file.write, given.split_of(source), progressed)
        if is_replaced:
            unfinished.replace(trace)
    finally:
        if is_replaced:
            unfinished.unlink(missing_ok=True)
    if json != "-":
        console = common.console("-" if target == "-" else json)
        skipped = f", {made.skipped_records:,} bad records skipped" if made.skipped_records else ""
        written = f"{made.requests:,} requests, {made.blocks:,} blocks of {made.block_size} tokens{skipped}"
        for line in (*made.read, written, *made.doubts):
            console.print(line, soft_wrap=True, markup=False)
        if made.requests and not made.blocks:
            console.print(f"No prompt fills a block of {made.block_size} tokens: give a smaller --block-size.")
    common.write_json(json, asdict(made))
