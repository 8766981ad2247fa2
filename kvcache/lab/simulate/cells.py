"""One cell of a grid: a trace under one policy at one capacity, optionally over tiers or for a shard of a sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from kvcache.control.cpu import CPUOffloadingManager
from kvcache.lab.simulate.groups import GroupReplay, Groups
from kvcache.lab.simulate.hinted import HintedReplay
from kvcache.lab.simulate.optimum import optimal_hits
from kvcache.lab.simulate.run import Replay, ReplayClock
from kvcache.lab.simulate.serving import Flow, Serving, price_of, weigh
from kvcache.lab.simulate.simulated_tier import SimulatedTieredManager
from kvcache.lab.traces.compact import next_uses
from kvcache.lab.traces.keys import KeyMaker, split_block_size
from kvcache.registry import POLICIES

if TYPE_CHECKING:
    from kvcache.lab.simulate.choices import TierRule
    from kvcache.lab.traces.compact import CompactTrace
    from kvcache.lab.traces.requests import Int64Array

OPTIMUM = "min"
"""The name of the offline optimum, which a grid lists among the policies."""

_PROGRESS_REQUESTS = 64
_SHOWN_DECISIONS = 5


@dataclass(frozen=True, slots=True)
class Job:
    """The part of a grid that one process replays.

    `num_blocks` None, for ``"min"`` alone, is no limit; `tiers` are blocks; `shard` is that of a sample.
    """

    policy: str
    num_blocks: int | None
    tiers: tuple[int, ...] = ()
    shard: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """How every job of a grid is replayed.

    Each listed id becomes `split` keys. `num_shards` parts of a sample are replayed separately to estimate the error.
    `rules` has for each tier its write policy, whether an arbiter limits loads (this needs `serving` with a prefill
    rate), its cache policy and its endurance; empty: write-through, no arbiter, lru and no budget. `groups` are those
    of a hybrid model; None: one group. `has_hints`: clients send honest hints of next use.
    """

    split: int = 1
    num_shards: int = 1
    serving: Serving | None = None
    rules: tuple[TierRule, ...] = ()
    groups: Groups | None = None
    has_hints: bool = False

    @property
    def num_groups(self) -> int:
        """Keys of a position: one for each KV-cache group."""
        return 1 if self.groups is None else len(self.groups.windows)


@dataclass(frozen=True, slots=True)
class Cell:
    """One policy at one capacity; counts that the optimum does not have are None.

    `tiers` are blocks of each tier, `serving` is the answer of `serving.weigh`, `block_hit_error` the standard error of
    `block_hit_rate` (samples only), and `arbiter` counts decisions and shows the last few.
    """

    policy: str
    num_blocks: int | None
    requests: int
    tokens: int
    hit_tokens: int
    token_hit_rate: float
    blocks: int
    hit_blocks: int
    block_hit_rate: float
    stored_blocks: int | None = None
    evicted_blocks: int | None = None
    rejected_requests: int | None = None
    bookkeeping_us: dict[str, float] | None = None
    tiers: tuple[int, ...] = ()
    block_hit_error: float | None = None
    serving: dict[str, Any] | None = field(default=None, compare=False)
    arbiter: dict[str, Any] | None = None

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Cell:
        """Return the cell whose fields these are, also from JSON."""
        return cls(**fields | {"tiers": tuple(fields.get("tiers", ()))})


def run_job(
    trace: CompactTrace,
    job: Job,
    plan: Plan,
    progressed: Callable[[int], None] | None = None,
    nexts: Int64Array | None = None,
) -> Cell:
    """Replay a trace in this process; the cell of a shard estimates the whole trace."""
    report = progressed or (lambda done: None)
    if plan.num_shards > 1:
        trace, nexts = trace.shard(job.shard, plan.num_shards), None
    if job.policy == OPTIMUM and plan.groups is not None:
        # No optimum of several groups is known: a cache without a limit shows the most hits.
        num_ids = np.count_nonzero(np.asarray(next_uses(trace)[0] if nexts is None else nexts) == -1)
        most = max(1, int(num_ids)) * plan.split * plan.num_groups
        cell = replace(_replayed(trace, Job("lru", most), plan, report), policy=OPTIMUM)
    elif job.policy == OPTIMUM:
        cell = _optimum(trace, _scaled(job.num_blocks, trace.rate), plan.split, report, nexts)
    else:
        cell = _replayed(trace, job, plan, report)
    report(len(trace.ids))
    return replace(_estimated(cell, trace, plan.split), num_blocks=job.num_blocks, tiers=job.tiers)


def joined(cells: Sequence[Cell]) -> Cell:
    """Return one cell for all shards of a sample, with the standard error of its block hit rate."""
    rates = np.array([cell.block_hit_rate for cell in cells])
    first = cells[0]
    counts: dict[str, Any] = {
        name: None if getattr(first, name) is None else round(float(np.mean([getattr(cell, name) for cell in cells])))
        for name in ("hit_tokens", "hit_blocks", "stored_blocks", "evicted_blocks")
    }
    return replace(
        first,
        **counts,
        block_hit_rate=float(rates.mean()),
        token_hit_rate=float(np.mean([cell.token_hit_rate for cell in cells])),
        rejected_requests=None,
        bookkeeping_us=None,
        block_hit_error=float(rates.std(ddof=1) / len(rates) ** 0.5),
    )


def _scaled(num_blocks: int | None, rate: float) -> int | None:
    return num_blocks if num_blocks is None or rate == 1 else max(1, round(num_blocks * rate))


def _replayed(trace: CompactTrace, job: Job, plan: Plan, report: Callable[[int], None]) -> Cell:
    block_size = split_block_size(trace.block_size, plan.split)
    num_blocks = _scaled(job.num_blocks, trace.rate)
    assert num_blocks is not None
    arrivals = ReplayClock()
    options: dict[str, Any] = {"clock": arrivals}
    if plan.groups is not None and POLICIES.resolve(job.policy).group_policy is not None:
        options["group_windows"] = plan.groups.windows
    # A tier never needs more blocks than the trace names.
    most = max(1, len(trace.ids) * plan.split * plan.num_groups)
    below = []
    simulated: SimulatedTieredManager | None = None
    if job.tiers:
        tiers = [min(_scaled(blocks, trace.rate) or 1, most) for blocks in job.tiers]
        serving = plan.serving
        if serving is not None:
            options["block_s"] = [
                serving.block_bytes / medium.bytes_per_s for medium in serving.media[1 : 1 + len(tiers)]
            ]
            options["host_block_s"] = serving.block_bytes / serving.media[0].bytes_per_s
            if serving.token_prefill_s is not None and any(rule[1] for rule in plan.rules):
                options["prefill_tokens_per_s"] = 1 / serving.token_prefill_s
        options["rules"] = plan.rules[: len(tiers)]
        options["wear_blocks"] = [_scaled(blocks, trace.rate) or 1 for blocks in job.tiers]
        options["block_bytes"] = 1 if serving is None else serving.block_bytes
        simulated = SimulatedTieredManager(block_size, min(num_blocks, most), tiers, job.policy, **options)
        manager: CPUOffloadingManager | SimulatedTieredManager = simulated
        below = simulated.simulated
    else:
        manager = CPUOffloadingManager(block_size, min(num_blocks, most), job.policy, **options)
    replay = Replay(manager, arrivals=arrivals)
    if plan.groups is not None:
        replay = GroupReplay(manager, plan.groups, arrivals)
    elif plan.has_hints:
        replay = HintedReplay(manager, trace, arrivals)
    make_keys = KeyMaker(plan.split)
    needs_flow = plan.serving is not None and trace.rate == 1
    # Cumulative, per request: hits, blocks stored, and for each tier blocks loaded and stored.
    counts = np.zeros((len(trace) + 1 if needs_flow else 1, 3 + 2 * len(below)), dtype=np.int64)
    # In a sample, skip requests without sampled blocks.
    steps = trace.filled() if trace.rate < 1 else ((1, request) for request in trace)
    done, number, tally = 0, 0, replay.tally
    for gap, request, keys in make_keys.keyed(steps):
        number += gap
        if number % _PROGRESS_REQUESTS == 0:
            report(done)
        replay.step(request, keys)
        done += len(request.hash_ids)
        if needs_flow:
            row = [tally.loaded_blocks, tally.stored_blocks, tally.hit_tokens]
            counts[number] = row + [count for tier in below for count in (tier.loaded_blocks, tier.stored_blocks)]
    counted = tally.as_dict()
    del counted["loaded_blocks"]
    counted["requests"] = len(trace)
    weighed = None
    if plan.serving is not None and needs_flow:
        moved = np.diff(counts, axis=0)
        loads, stores = moved[:, 3::2], moved[:, 4::2]
        flow = Flow(
            np.column_stack([moved[:, 0] - loads.sum(axis=1), loads]),
            np.column_stack([moved[:, 1] + loads.sum(axis=1), stores]),
            moved[:, 2],
        )
        used = replace(plan.serving, media=plan.serving.media[: 1 + len(below)])
        weighed = weigh(np.asarray(trace.arrivals_s), np.asarray(trace.input_lengths), flow, used)
        weighed["price"] = price_of((job.num_blocks or 0, *job.tiers), used)
        for medium, blocks in zip(weighed["media"][1:], job.tiers, strict=True):
            written = medium["write_bytes_per_day"]
            medium["drive_writes_per_day"] = None if written is None else written / (blocks * used.block_bytes)
    elif below:
        lower = [tier.loaded_blocks for tier in below]
        hits = [tally.loaded_blocks - sum(lower), *lower]
        weighed = {"media": [{"hit_blocks": count} for count in hits]}
    arbiter = None
    if simulated is not None and simulated.arbiter is not None:
        stats = simulated.stats()
        arbiter = {
            "loads": stats.arbiter_loads,
            "cuts": stats.arbiter_cuts,
            "cut_blocks": stats.arbiter_cut_blocks,
            "decisions": list(simulated.arbiter.decisions)[-_SHOWN_DECISIONS:],
        }
    return Cell(job.policy, job.num_blocks, **counted, serving=weighed, arbiter=arbiter)


def _optimum(
    trace: CompactTrace,
    num_blocks: int | None,
    split: int,
    report: Callable[[int], None],
    nexts: Int64Array | None,
) -> Cell:
    block_size = split_block_size(trace.block_size, split)
    hits = optimal_hits(trace, num_blocks, report, split, nexts)
    lengths = np.asarray(trace.input_lengths)
    hit_tokens = int(np.minimum(hits * block_size, lengths).sum())
    tokens, hit_blocks, blocks = int(lengths.sum()), int(hits.sum()), len(trace.ids) * split
    return Cell(
        policy=OPTIMUM,
        num_blocks=num_blocks,
        requests=len(trace),
        tokens=tokens,
        hit_tokens=hit_tokens,
        token_hit_rate=hit_tokens / max(1, tokens),
        blocks=blocks,
        hit_blocks=hit_blocks,
        block_hit_rate=hit_blocks / max(1, blocks),
    )


def _estimated(cell: Cell, trace: CompactTrace, split: int) -> Cell:
    """Estimate the whole trace from a sample's cell.

    If more or fewer sampled uses than expected came, a few hot blocks are, or are not, in the sample; their uses would
    have been hits (SHARDS_adj of Waldspurger et al., FAST '15).
    """
    if trace.rate == 1:
        return cell

    def share(hits: int, sampled: int, whole: int) -> float:
        expected = whole * trace.rate
        return min(max((hits + expected - sampled) / expected, 0.0), 1.0) if expected else 0.0

    # A sample has only its own uses; the counts of the whole trace were recorded when it was drawn.
    blocks, tokens = trace.num_blocks * split, trace.num_tokens
    block_rate = share(cell.hit_blocks, cell.blocks, blocks)
    token_rate = share(cell.hit_tokens, cell.tokens, tokens)

    def grown(count: int | None) -> int | None:
        return None if count is None else round(count / trace.rate)

    return replace(
        cell,
        tokens=tokens,
        blocks=blocks,
        hit_blocks=round(block_rate * blocks),
        hit_tokens=round(token_rate * tokens),
        block_hit_rate=block_rate,
        token_hit_rate=token_rate,
        stored_blocks=grown(cell.stored_blocks),
        evicted_blocks=grown(cell.evicted_blocks),
    )
