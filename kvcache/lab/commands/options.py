"""The options that `replay`, `plan` and `fleet` share: how to read a trace and the size of its blocks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvcache.cli import common
from kvcache.options import parse_count

if TYPE_CHECKING:
    from kvcache.cli.model import Weights
    from kvcache.lab.traces.requests import TraceFile

FileArgument = Annotated[
    Path,
    typer.Argument(
        help="Mooncake or Qwen-Bailian JSONL, plain, gzip or zstd (- is standard input); or recorded sessions of "
        "agents, a folder or a file."
    ),
]
TraceArgument = Annotated[
    Path,
    typer.Argument(
        help="Mooncake or Qwen-Bailian JSONL, plain, gzip or zstd (- is standard input); recorded sessions of agents, "
        "a folder or a file; or a recording of a manager (.kvlog)."
    ),
]
CapacitiesOption = Annotated[
    str | None,
    typer.Option(
        "--blocks", help="Capacities of host memory in blocks [default: 10000].", metavar="N,...", show_default=False
    ),
]
MemoryOption = Annotated[
    str | None,
    typer.Option("--memory", help="Or in bytes, as in 4GiB; needs --model.", metavar="SIZE,...", show_default=False),
]
BlockSizeOption = Annotated[
    str | None,
    typer.Option(
        "--block-size",
        help="Tokens of a listed block [default: 512 Mooncake, 16 Bailian]; behind a colon those of a block to replay, "
        "as in 512:16 or :16.",
        metavar="N[:N]",
        show_default=False,
    ),
]
SkipBadOption = Annotated[bool, typer.Option("--skip-bad", help="Count bad lines and go on.")]
UsersOption = Annotated[int, typer.Option("--users", help="Users whose recorded sessions are merged.")]


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """The file and the options `--block-size`, `--skip-bad`, `--users` and `--seed`."""

    file: Path
    block_size: str | None
    skip_bad: bool
    users: int
    seed: int

    def open(self) -> TraceFile:
        """Open the trace; open a recording of a manager as a trace."""
        from kvcache.lab.traces.recorded_trace import RecordedTrace
        from kvcache.lab.traces.trace import open_trace

        common.at_least("--users", self.users, 1)
        common.at_least("--seed", self.seed, 0)
        listed = self._sizes[0]
        if is_recording(self.file):
            trace: TraceFile = RecordedTrace(self.file)
        else:
            trace = open_trace(self.file, listed, self.skip_bad, self.users, self.seed)
        if listed not in (None, trace.block_size):
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


def is_recording(file: Path) -> bool:
    """Return whether a file is a recording of a manager; raise ValueError if it only has a recording's name."""
    from kvcache.recorder.files import is_recording as has_magic

    if has_magic(file):
        return True
    if file.exists() and ".kvlog" in file.suffixes:
        raise ValueError(f"{file} is not a recording of kvcache")
    return False


def block_bytes_of(weights: Weights | None, trace: TraceFile, split: int) -> int | None:
    """Return the bytes of a block to replay, or None without a model."""
    return None if weights is None else weights.model.token_bytes * (trace.block_size // split)
