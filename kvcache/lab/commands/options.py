"""The options that commands of the lab share: policies, capacities, how to read a trace and the size of its blocks."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import tzinfo
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar, get_type_hints
from zoneinfo import ZoneInfo

import typer

from kvcache.cli import common
from kvcache.options import parse_count, parse_size

if TYPE_CHECKING:
    from kvcache.assembly.models import Model
    from kvcache.lab.traces.requests import TraceFile

TEST_BLOCK_BYTES = "64KiB"
"""Bytes of a block of test data if the user names no size."""
_MOST_BLOCKS = 1 << 30  # the most rows that a block table can number

Options = TypeVar("Options")


def complete_policies(incomplete: str) -> list[str]:
    """Return the policy lists that `incomplete`, perhaps a list already, may become."""
    from kvcache.registry import POLICIES

    done, comma, last = incomplete.rpartition(",")
    return [f"{done}{comma}{name}" for name in POLICIES.names() if name.startswith(last)]


PolicyOption = Annotated[
    str, typer.Option(help="Replacement policy: a name or package.module:Class.", autocompletion=complete_policies)
]
BlocksOption = Annotated[str | None, typer.Option(help="Capacity in blocks.", metavar="N", show_default=False)]
MemoryOption = Annotated[
    str | None, typer.Option(help="Capacity in bytes instead, as in 4GiB or 4G.", metavar="SIZE", show_default=False)
]
BlockBytesOption = Annotated[str, typer.Option(help="Bytes of one block.", metavar="SIZE")]
TestBlockBytesOption = Annotated[
    str | None,
    typer.Option(
        "--block-bytes", help="Bytes of a block of test data [default: 64KiB].", metavar="SIZE", show_default=False
    ),
]
DataOption = Annotated[
    bool, typer.Option("--data/--no-data", help="Move and compare real bytes, or do the bookkeeping alone.")
]
GateOption = Annotated[int, typer.Option("--store-threshold", help="Store a block once it has been offered so often.")]
TraceArgument = Annotated[
    Path,
    typer.Argument(
        help="A trace (Mooncake or Qwen-Bailian JSONL), recorded sessions of agents (a folder or a file), a log of "
        "prompts or of token counts (JSONL, CSV, spans, vLLM's log), a libCacheSim trace, or a recording of a manager "
        "(.kvlog), in any order of time; plain, gzip or zstd (- is standard input)."
    ),
]
CapacitiesOption = Annotated[
    str | None,
    typer.Option(
        "--blocks", help="Capacities of host memory in blocks [default: 10000].", metavar="N,...", show_default=False
    ),
]
CapacitiesMemoryOption = Annotated[
    str | None,
    typer.Option("--memory", help="Or in bytes, as in 4GiB; needs --model.", metavar="SIZE,...", show_default=False),
]
SeedOption = Annotated[int, typer.Option(help="Order of recorded sessions, and what is drawn.")]
TrustedOption = Annotated[
    bool, typer.Option("--trusted", help="The recording is your own: read it even if it expands a thousandfold.")
]


def takes(options: type[Options]) -> Callable[[Callable[[Options], None]], Callable[..., None]]:
    """Make a command of a function of one dataclass, `options`, whose fields are the command's options."""

    def as_command(run: Callable[[Options], None]) -> Callable[..., None]:
        @wraps(run)
        def command(**given: object) -> None:
            run(options(**given))

        # Where typer looks; the names in inherited annotations are those of this module.
        hints = get_type_hints(options, include_extras=True)
        signature = inspect.signature(options)
        parameters = [one.replace(annotation=hints[one.name]) for one in signature.parameters.values()]
        command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return command

    return as_command


def one_policy(choice: str) -> str:
    """Return `choice` where only one policy can be used; ValueError with a hint where it is a list or the optimum."""
    if choice == "min":
        raise ValueError("--policy min is the optimum of a trace: kvcache plan FILE --policy min")
    if "," in choice:
        raise ValueError(f"--policy must name one policy, got {choice!r}: kvcache plan FILE compares several")
    return choice


def parse_capacity(blocks: str | None, memory: str | None, block_bytes: int, default: str) -> int:
    """Return the one capacity in blocks that `--blocks` or `--memory` says; ValueError if it is a list."""
    capacities = parse_capacities(blocks, memory, block_bytes, default)
    if len(capacities) > 1:
        raise ValueError(f"one capacity is needed here, got {blocks or memory!r}: kvcache plan FILE compares several")
    return capacities[0]


def parse_capacities(blocks: str | None, memory: str | None, block_bytes: int, default: str) -> list[int]:
    """Return the capacities in blocks that `--blocks` or `--memory` list, ascending and each once."""
    if blocks is not None and memory is not None:
        raise ValueError(f"--blocks and --memory exclude each other, got {blocks!r} and {memory!r}")
    if memory is None:
        option, text = "--blocks", default if blocks is None else blocks
        capacities = [parse_count(option, part) for part in text.split(",")]
    else:
        option, text = "--memory", memory
        capacities = [parse_size(option, part) // block_bytes for part in text.split(",")]
        if 0 in capacities:
            raise ValueError(f"--memory must hold at least one block of {block_bytes} bytes, got {text!r}")
    capacities = sorted(set(capacities))
    if capacities[-1] >= _MOST_BLOCKS:
        raise ValueError(f"{option} must be less than 2**30 blocks ({block_bytes} bytes each), got {text!r}")
    return capacities


def blocks_within(block_bytes: str, size: str) -> tuple[int, int]:
    """Return the bytes of a block by `--block-bytes`, and the blocks of a measurement by `--size`."""
    num_bytes = parse_size("--block-bytes", block_bytes)
    num_blocks = parse_size("--size", size) // num_bytes
    if num_blocks < 1:
        raise ValueError(f"--size must hold at least one block of {num_bytes} bytes, got {size!r}")
    return num_bytes, num_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOptions:
    """The file to read and how to read it, the same for every command that reads traces."""

    file: TraceArgument
    block_size: Annotated[
        str | None,
        typer.Option(
            help="Tokens of a block: of one that a trace lists [default: 512 Mooncake, 16 Bailian], or of one that is "
            "made of a log [default: 16]; behind a colon those of a block to replay, as in 512:16 or :16.",
            metavar="N[:N]",
            show_default=False,
        ),
    ] = None
    time_unit: Annotated[
        Literal["s", "ms", "us", "ns"] | None,
        typer.Option(
            help="Unit of times that are numbers [default: ms for Mooncake and sessions of AIPerf, else s].",
            show_default=False,
        ),
    ] = None
    time_zone: Annotated[
        str, typer.Option(help="Zone of times in ISO 8601 without an offset, as in Europe/Berlin.", metavar="NAME")
    ] = "UTC"
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="Folder or Hugging Face name of the tokenizer of a log with text.", metavar="NAME", show_default=False
        ),
    ] = None
    prompt_fields: Annotated[
        str | None,
        typer.Option(
            help="Fields of a log that make up the prompt, in order [default: those that the format names].",
            metavar="FIELD,...",
            show_default=False,
        ),
    ] = None
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="Read only records with this value, as in model=llama-3.1-8b; again for another field.",
            metavar="FIELD=VALUE",
            show_default=False,
        ),
    ] = None
    shared_tokens: Annotated[
        int, typer.Option(help="Of token counts of conversations: tokens of the system prompt that all share.")
    ] = 0
    log_format: Annotated[
        Literal["jsonl", "oracleGeneral", "csv"] | None,
        typer.Option("--format", help="Format of the file [default: by name and content].", show_default=False),
    ] = None
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Count bad lines and go on.")] = False
    users: Annotated[int, typer.Option("--users", help="Users whose recorded sessions are merged.")] = 40
    seed: SeedOption = 0
    trusted: TrustedOption = False

    def open(self) -> TraceFile:
        """Open the trace; open a recording of a manager as a trace."""
        from kvcache.lab.traces.make import load_tokenizer
        from kvcache.lab.traces.records import plain_name
        from kvcache.lab.traces.requests import ReadOptions
        from kvcache.lab.traces.trace import open_trace

        common.at_least("--users", self.users, 1)
        common.at_least("--seed", self.seed, 0)
        common.at_least("--shared-tokens", self.shared_tokens, 0)
        listed, replayed = self._sizes
        only = {}
        for text in self.only or ():
            field, equal, value = text.partition("=")
            if not field or not equal:
                raise ValueError(f"--only must be FIELD=VALUE, got {text!r}")
            only[plain_name(field)] = value
        how = ReadOptions(
            listed,
            replayed,
            self.skip_bad,
            self.time_unit,
            _zone(self.time_zone),
            only,
            tuple(map(plain_name, filter(None, (self.prompt_fields or "").split(",")))),
            None if self.tokenizer is None else load_tokenizer(self.tokenizer),
            self.shared_tokens,
            self.log_format,
        )
        if is_recording(self.file):
            # Needs msgspec, of the extra `record`; plain traces do not.
            from kvcache.lab.traces.recorded_trace import RecordedTrace

            trace: TraceFile = RecordedTrace(self.file, self.trusted)
        else:
            trace = open_trace(self.file, how, self.users, self.seed)
        if listed not in (None, trace.block_size) and replayed != trace.block_size:
            trace.close()
            raise ValueError(f"--block-size: {self.file} says that a block has {trace.block_size} tokens, got {listed}")
        return trace

    def split_of(self, trace: TraceFile) -> int:
        """Return the number of blocks to replay for each listed block."""
        replayed = self._sizes[1]
        if replayed is None:
            return 1
        if trace.block_size % replayed:
            divisors = [str(one) for one in range(1, trace.block_size + 1) if trace.block_size % one == 0]
            raise ValueError(
                f"--block-size: {replayed} tokens must divide the {trace.block_size} of a listed block "
                f"({', '.join(divisors)}), got {self.block_size!r}"
            )
        return trace.block_size // replayed

    @property
    def _sizes(self) -> tuple[int | None, int | None]:
        listed, _, replayed = (self.block_size or "").partition(":")
        sizes = [parse_count("--block-size", size) if size else None for size in (listed, replayed)]
        return sizes[0], sizes[1]


def _zone(name: str) -> tzinfo:
    try:
        return ZoneInfo(name)
    except (ValueError, OSError, KeyError) as error:
        raise ValueError(f"--time-zone must be the name of a zone, as in Europe/Berlin, got {name!r}") from error


def is_recording(file: Path) -> bool:
    """Return whether a file is a recording of a manager; raise ValueError if it only has a recording's name."""
    from kvcache.recorder.files import MAGIC

    with suppress(OSError), file.open("rb") as opened:
        if opened.read(len(MAGIC)) == MAGIC:
            return True
    if file.exists() and ".kvlog" in file.suffixes:
        raise ValueError(f"{file} is not a recording of kvcache")
    return False


def block_bytes_of(model: Model | None, trace: TraceFile, split: int) -> int | None:
    """Return the bytes of a block to replay, or None without a model."""
    return None if model is None else model.token_bytes * (trace.block_size // split)
