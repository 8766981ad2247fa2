"""`kvcache replay`: choose between a recording that is run again, a fleet, a grid of what-ifs, and one replay."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvcache.cli import common, model
from kvcache.lab.commands import below, replay_options
from kvcache.lab.commands.replay_options import BlockSize, ReplayOptions
from kvcache.options import parse_size

if TYPE_CHECKING:
    from kvcache.cli.model import Weights
    from kvcache.lab.commands.below import TierChoice
    from kvcache.lab.replay.requests import TraceFile
    from kvcache.lab.replay.tiered import DiskChoice, TierEntry


@common.takes(ReplayOptions)
def replay(given: ReplayOptions) -> None:
    """Replay a request trace: look up, load, store and evict its blocks, with real bytes that are compared.

    Several policies or capacities, the policy min, --csv or --plot simulate a grid on all cores, bookkeeping alone.
    --router simulates many engines over a shared store.
    A recording of a manager is run again, call by call, up to the first different answer.
    """
    from kvcache.recorder.format import is_recording

    if not given.as_trace and is_recording(given.file):
        from kvcache.lab.commands import recorded

        recorded.run(given.file, given.policy, given.json, given.shrink, given.shrink_seconds, given.quiet)
        return
    if given.shrink:
        raise ValueError(f"--shrink is for recordings, {given.file} is none")
    if _is_named_as_recording(given.file) and not is_recording(given.file):
        raise ValueError(f"{given.file} is no recording of kvcache")
    weights = model.weights_of(
        given.model_name, given.layers, given.heads, given.head_size, given.dtype, given.params, given.flops
    )
    size = replay_options.block_size(given, weights)
    replay_options.check(given)
    real_tier = _real_tier(given)
    tiers = [] if real_tier is not None else below.parse_tiers(given.tier)
    _check_tiers(given, tiers, size, weights)

    with _open(given) as trace:
        size = size.of_trace(weights, trace.block_size, given.split)
        if given.router is not None:
            from kvcache.lab.commands import fleet

            fleet.run(trace, fleet.read_options(given, size), weights)
            return
        capacities = common.parse_capacities(given.blocks, given.memory, size.num_bytes, default="10000")
        if _is_grid(given, capacities, tiers):
            from kvcache.lab.commands import grid, grid_report

            _refuse_in_grid(given, len(capacities), real_tier)
            targets = grid_report.Targets(given.json, given.csv, given.plot, given.checkpoint)
            targets.check()
            result = grid.run(trace, grid.read_options(given, size, capacities, tiers), weights)
            grid_report.report(result, trace, targets)
        else:
            _replay_once(trace, given, size, capacities[0], weights, real_tier or _disk_choice(given.disk))


def _real_tier(given: ReplayOptions) -> TierEntry | None:
    """Return the one real tier that is named, None if all are simulated."""
    texts = given.tier or []
    if not any(text.lstrip().startswith("{") for text in texts):
        return None
    if len(texts) > 1 or given.disk is not None:
        raise ValueError("--tier takes one real tier, without another --tier and without --disk")
    from kvcache.lab.commands.bench_tier import read_entry
    from kvcache.lab.replay.tiered import TierEntry

    return TierEntry(read_entry(texts[0], "--tier"))


def _check_tiers(given: ReplayOptions, tiers: list[TierChoice], size: BlockSize, weights: Weights | None) -> None:
    """Raise ValueError where simulated tiers lack what they need, or the arbiter does."""
    if tiers and not size.is_known:
        raise ValueError(
            f"--tier needs the size of a block, got {(given.tier or [''])[0]!r} alone: {common.HOW_TO_SIZE}"
        )
    if tiers and given.policies == ["min"]:
        raise ValueError(
            "--policy min is the optimum of host memory alone and knows no tiers, got --tier "
            f"{(given.tier or [''])[0]!r}: name a policy beside it, or leave --tier out"
        )
    if given.arbiter and not (tiers and weights is not None and weights.saved_s(1)):
        shown = weights.model.name if weights else "no model"
        raise ValueError(
            "--arbiter weighs loading from a tier against computing: it needs --tier, and a model whose --params are "
            f"known, such as --model llama-3.1-8b; got {len(tiers)} tiers and {shown}"
        )


def _is_named_as_recording(file: Path) -> bool:
    return file.exists() and ".kvlog" in file.suffixes


def _open(given: ReplayOptions) -> TraceFile:
    from kvcache.lab.replay.recorded_trace import RecordedTrace
    from kvcache.lab.replay.trace import open_trace

    if given.as_trace:
        return RecordedTrace(given.file)
    return open_trace(given.file, given.format, given.skip_bad, given.users, given.seed)


def _is_grid(given: ReplayOptions, capacities: list[int], tiers: list[TierChoice]) -> bool:
    return (
        len(given.policies) > 1
        or len(capacities) > 1
        or given.policies == ["min"]
        or bool(tiers)
        or given.sample < 1
        or any(target is not None for target in (given.csv, given.plot, given.checkpoint, given.dask))
    )


def _refuse_in_grid(given: ReplayOptions, num_capacities: int, real_tier: TierEntry | None) -> None:
    """Raise ValueError for what only one replay can do."""
    got = f"got {','.join(given.policies)!r}"
    if given.data:
        raise ValueError(
            "--data replays one policy at one capacity, without --csv, --plot, --tier and --sample; "
            f"{got} and {num_capacities} capacities"
        )
    if given.what_if:
        raise ValueError(f"--what-if is for one policy at one capacity, {got} and {num_capacities}")
    if real_tier is not None:
        raise ValueError(f"--tier of a real tier replays one policy at one capacity, {got}")
    if given.disk is not None:
        raise ValueError(f"--disk replays one policy at one capacity, {got} and {num_capacities}")


def _replay_once(
    trace: TraceFile,
    given: ReplayOptions,
    size: BlockSize,
    num_blocks: int,
    weights: Weights | None,
    disk: DiskChoice | TierEntry | None,
) -> None:
    from kvcache.lab.commands import session

    if given.what_if and disk is not None:
        option, shown = ("--tier", "") if given.disk is None else ("--disk", f", got {given.disk!r}")
        raise ValueError(f"--what-if and {option} exclude each other{shown}")
    settings = session.Settings(
        policy=given.policies[0],
        num_blocks=num_blocks,
        block_bytes=size.num_bytes,
        sized=size.is_known,
        split=given.split,
        limit=given.limit,
        data=given.data is not False,
        json_target=given.json,
        weights=weights,
        store_threshold=given.store_threshold,
        what_if=given.what_if,
        disk=disk,
        is_quiet=given.quiet,
    )
    session.run(
        trace,
        f"{trace.name} ({trace.format})",
        settings,
        lambda done: max(trace.position_bytes / trace.size_bytes, done / given.limit if given.limit else 0.0),
        lambda: {
            "kind": "trace",
            "file": str(given.file),
            "format": trace.format,
            "skipped_lines": trace.num_skipped,
        },
    )


def _disk_choice(text: str | None) -> DiskChoice | None:
    if text is None:
        return None
    from kvcache.lab.replay.tiered import DiskChoice

    folder, colon, size = text.rpartition(":")
    if not folder or not colon:
        raise ValueError(f"--disk must be PATH:SIZE, as in /mnt/nvme/kv:100GiB, got {text!r}")
    return DiskChoice(Path(folder), parse_size("--disk", size))
