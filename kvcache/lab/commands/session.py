"""Run one replay with a progress bar, and report it as a table and as JSON, for `demo` and `replay`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Any

from rich.table import Table

from kvcache.cli import common
from kvcache.control.cpu import CPUOffloadingManager
from kvcache.lab.simulate.run import Replay, ReplayClock
from kvcache.lab.traces.keys import KeyMaker, split_block_size
from kvcache.lab.traces.requests import ReplayError
from kvcache.options import format_size
from kvcache.registry import POLICIES
from kvcache.transfer.free_memory import check_memory

if TYPE_CHECKING:
    from kvcache.assembly.models import Model
    from kvcache.lab.simulate.tiered import DiskChoice
    from kvcache.lab.traces.chats import ChatWorkload
    from kvcache.lab.traces.compact import CompactTrace
    from kvcache.lab.traces.requests import Request


@dataclass(frozen=True, slots=True)
class Settings:
    """The options of a single replay, checked.

    Without a size by the user (`sized`), `block_bytes` is the size of the test data.
    """

    policy: str
    num_blocks: int
    block_bytes: int
    sized: bool
    split: int
    data: bool
    json_target: str | None
    model: Model | None = None
    store_threshold: int = 0
    tier: DiskChoice | dict[str, Any] | None = None
    is_quiet: bool = False


def run(
    source: CompactTrace | ChatWorkload,
    title: str,
    settings: Settings,
    progressed: Callable[[int], float],
    facts: Callable[[], dict[str, Any]],
) -> None:
    """Replay `source` and report under `title`.

    `progressed` returns the share of the work that is done after so many requests; `facts`, called at the end, returns
    the JSON's description of the source.
    """
    block_size = split_block_size(source.block_size, settings.split)
    make_keys = KeyMaker(settings.split)
    POLICIES.resolve(settings.policy)
    common.check_writable("--json", settings.json_target)

    started = monotonic()
    with ExitStack() as open_now:
        # Check before the pool is mapped: if the memory is missing, a write to the mapping kills the process.
        if settings.data or settings.tier is not None:
            _check_memory(settings)
        payload = None
        if settings.data:
            from kvcache.lab.simulate.payload import VerifiedPayload

            payload = open_now.enter_context(VerifiedPayload(settings.num_blocks, settings.block_bytes))
        tiered = None
        if settings.tier is None:
            arrivals = ReplayClock()
            manager = CPUOffloadingManager(
                block_size,
                settings.num_blocks,
                settings.policy,
                store_threshold=settings.store_threshold,
                clock=arrivals,
            )
            replay = Replay(manager, payload, arrivals=arrivals)
        else:
            from kvcache.lab.simulate.tiered import patient_manager
            from kvcache.tiers.base.tier import host_rows

            blocks = payload.pool.array if payload else host_rows(settings.num_blocks, settings.block_bytes)
            below = patient_manager(
                block_size, settings.policy, settings.tier, blocks, title, store_threshold=settings.store_threshold
            )
            tiered = open_now.enter_context(below)
            replay = Replay(tiered, payload, tiered.clock)
        try:
            _drive(replay, source, make_keys, settings.is_quiet, progressed)
        except ReplayError as error:
            raise common.CommandError(str(error)) from error
        moved = payload.as_dict() if payload else None
        disk = tiered.as_dict() if tiered else None
    counted = replay.tally.as_dict()
    elapsed_s = monotonic() - started
    document = {
        "source": facts(),
        "policy": settings.policy,
        "num_blocks": settings.num_blocks,
        "block_bytes": settings.block_bytes if settings.sized or settings.data or settings.tier else None,
        "block_size": block_size,
        "elapsed_s": elapsed_s,
        **counted,
        "store_threshold": settings.store_threshold,
        "data": moved,
        **({"disk": disk} if disk else {}),
        "model": settings.model.as_dict() if settings.model else None,
        "saved_prefill_s": settings.model.saved_s(counted["hit_tokens"]) if settings.model else None,
    }
    if settings.json_target != "-":
        _print(title, document, settings)
    common.write_json(settings.json_target, document)


def _print(title: str, document: dict[str, Any], settings: Settings) -> None:
    console = common.console(settings.json_target)
    console.print(title, soft_wrap=True, markup=False)
    console.print(_table(document, settings))
    for doubt in document["source"].get("doubts", ()):
        console.print(doubt, soft_wrap=True, markup=False)
    moved = document["data"]
    if moved is not None and moved["verified_blocks"]:
        console.print(f"{moved['verified_blocks']:,} loaded blocks were compared with what was stored: all equal.")


def _check_memory(settings: Settings) -> None:
    try:
        check_memory(settings.num_blocks * settings.block_bytes)
    except ValueError as error:
        if settings.tier is not None:
            raise ValueError(f"{error}; kvcache plan --tier 1TiB@6GB/s simulates a tier of any size") from error
        raise ValueError(f"{error}; --no-data needs none") from error


def _drive(
    replay: Replay,
    requests: Iterable[Request],
    make_keys: Callable[[Any], list[bytes]],
    is_quiet: bool,
    progressed: Callable[[int], float],
) -> None:
    tally = replay.tally
    # Refresh only between requests: a thread of the bar would add to the times of the manager's calls.
    with common.Bar("replay", "requests", is_quiet) as bar:
        for request in requests:
            replay.step(request, make_keys(request.hash_ids))
            if bar.is_due():
                bar.show(progressed(tally.requests), tally.requests, f"{tally.token_hit_rate:.1%} of tokens hit")
        bar.show(1.0, tally.requests, f"{tally.token_hit_rate:.1%} of tokens hit")


def _table(document: dict[str, Any], settings: Settings) -> Any:
    table = Table(show_header=False)
    table.add_column()
    table.add_column(justify="right")
    times = document["bookkeeping_us"]
    skipped = document["source"].get("skipped_lines")
    rows = [
        ("policy", document["policy"]),
        *_sizes(document, settings),
        ("requests", f"{document['requests']:,}"),
        *([("bad lines skipped", f"{skipped:,}")] if skipped else []),
        ("tokens", f"{document['tokens']:,}"),
        ("token hit rate", f"{document['token_hit_rate']:.2%} ({document['hit_tokens']:,})"),
        ("block hit rate", f"{document['block_hit_rate']:.2%} ({document['hit_blocks']:,} of {document['blocks']:,})"),
        ("stored", f"{document['stored_blocks']:,} blocks"),
        ("loaded", f"{document['loaded_blocks']:,} blocks"),
        ("evicted", f"{document['evicted_blocks']:,} blocks"),
        ("rejected", f"{document['rejected_requests']:,} requests"),
    ]
    disk = document.get("disk")
    if disk is not None:
        stats = disk["tier"]
        # A medium with its own index does not count held blocks.
        held = f", {stats['num_held']:,} of {stats['num_blocks']:,} held" if stats["num_blocks"] else ""
        found = f"{disk['found_blocks']:,} blocks found, " if stats["num_blocks"] else ""
        moved = f"{stats['stored_blocks']:,} stored, {stats['loaded_blocks']:,} loaded"
        rows.append((f"{stats['medium'].lower()} tier", f"{found}{moved}{held}"))
    if document["saved_prefill_s"] is not None:
        rows.append(("prefill saved, at least", f"{document['saved_prefill_s']:,.1f} s ({settings.model})"))
    data = document["data"]
    if data is not None:
        rows += [
            ("bytes moved", format_size(data["store_bytes"] + data["load_bytes"])),
            ("store, load rate", f"{data['store_gb_per_s']:.2f} GB/s, {data['load_gb_per_s']:.2f} GB/s"),
        ]
    rows += [
        ("bookkeeping per request", f"p50 {times['p50']:.1f} us, p99 {times['p99']:.1f} us, max {times['max']:.1f} us"),
        ("time", f"{document['elapsed_s']:.1f} s, of it bookkeeping {times['total'] / 1e6:.2f} s"),
    ]
    for label, value in rows:
        table.add_row(label, value)
    return table


def _sizes(document: dict[str, Any], settings: Settings) -> Iterator[tuple[str, str]]:
    blocks = f"{settings.num_blocks:,} blocks of {document['block_size']} tokens"
    if settings.sized:
        yield "capacity", f"{blocks} ({format_size(settings.num_blocks * settings.block_bytes)})"
        return
    yield "capacity", blocks
    if document["block_bytes"] is not None:
        hint = " (--model gives real sizes)" if document["source"]["kind"] == "trace" else ""
        yield "test data", f"{format_size(settings.block_bytes)} a block{hint}"
