"""`kvcache trace make`: turn a log of prompts into a trace."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from kvcache.cli import common
from kvcache.options import parse_count

EXAMPLES = """
kvcache trace make prompts.jsonl trace.jsonl --block-size 64
kvcache trace make chats.jsonl.gz trace.jsonl --tokenizer Qwen/Qwen3-8B --time-unit ms
kvcache trace make w80.oracleGeneral.zst - | kvcache plan -
"""


def make(
    log: Annotated[
        Path,
        typer.Argument(
            help="JSONL with token ids, text or messages, token counts of conversations (JSONL, CSV), sessions of "
            "AIPerf or Dynamo, or a libCacheSim trace (oracleGeneral, CSV with a header); plain, gzip or zstd (- is "
            "standard input)."
        ),
    ],
    trace: Annotated[Path, typer.Argument(help="File to write, Mooncake JSONL (- is standard output).")],
    block_size: Annotated[str, typer.Option(help="Tokens of a block.", metavar="N")] = "16",
    tokenizer: Annotated[
        str | None,
        typer.Option(help="Folder or Hugging Face name of the tokenizer of text.", metavar="NAME", show_default=False),
    ] = None,
    log_format: Annotated[
        Literal["jsonl", "oracleGeneral", "csv"] | None,
        typer.Option("--format", help="Format of the log [default: by its name, else jsonl].", show_default=False),
    ] = None,
    time_unit: Annotated[
        Literal["s", "ms", "us", "ns"] | None,
        typer.Option(
            help="Unit of times that are numbers [default: s; ms for sessions of AIPerf or Dynamo].", show_default=False
        ),
    ] = None,
    shared_tokens: Annotated[
        int, typer.Option(help="Of token counts of conversations: tokens of the system prompt that all share.")
    ] = 0,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Count bad records and go on.")] = False,
    json: common.JsonOption = None,
    quiet: common.QuietOption = False,
) -> None:
    """Turn a log of prompts into a trace, which `plan`, `replay` and `fleet` read."""
    from kvcache.lab.traces.make import load_tokenizer, make_trace

    tokens = parse_count("--block-size", block_size)
    common.at_least("--shared-tokens", shared_tokens, 0)
    target = str(trace)
    if target == "-" == json:
        raise ValueError("TRACE and --json are both -: only one can go to standard output")
    common.check_writable("TRACE", target, log)
    common.check_writable("--json", json, log)
    tokenize = None if tokenizer is None else load_tokenizer(tokenizer)
    size_bytes = log.stat().st_size if log.is_file() else 0
    # A pipe or a device is written in place; a file is replaced once the trace is complete.
    is_replaced = target != "-" and (trace.is_file() or not trace.exists())
    trace = trace.resolve() if is_replaced else trace
    unfinished = Path(f"{trace}.part") if is_replaced else trace
    try:
        with ExitStack() as open_now:
            file = sys.stdout if target == "-" else open_now.enter_context(unfinished.open("w", encoding="utf-8"))
            bar = open_now.enter_context(common.Bar("make", "requests", quiet))

            def progressed(requests: int, position_bytes: int) -> None:
                if bar.is_due():
                    bar.show(position_bytes / size_bytes if size_bytes else 0.0, requests)

            made = make_trace(
                log,
                file.write,
                tokens,
                log_format=log_format,
                tokenize=tokenize,
                time_unit=time_unit,
                shared_tokens=shared_tokens,
                skip_bad=skip_bad,
                progressed=progressed,
            )
        if is_replaced:
            unfinished.replace(trace)
    finally:
        if is_replaced:
            unfinished.unlink(missing_ok=True)
    if json != "-":
        console = common.console("-" if target == "-" else json)
        skipped = f", {made.skipped_records:,} bad records skipped" if made.skipped_records else ""
        console.print(
            f"{made.requests:,} requests, {made.blocks:,} blocks of {made.block_size} tokens{skipped}", soft_wrap=True
        )
        if made.requests and not made.blocks:
            console.print(f"No prompt fills a block of {made.block_size} tokens: give a smaller --block-size.")
        for doubt in made.doubts:
            console.print(doubt, soft_wrap=True, markup=False)
        if made.expanded_records:
            console.print(
                f"{made.expanded_records:,} records hold a conversation of several answers: each answer is a request.",
                soft_wrap=True,
            )
    common.write_json(json, asdict(made))
