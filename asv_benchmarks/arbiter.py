"""Time to first token with an arbiter, with every block loaded and with none, on a virtual clock over a real manager.

``python -m asv_benchmarks.arbiter [SCENARIO ...]`` prints the mean seconds of each way, and how much of the time the
arbiter saves against the other two. Only the tiers and the engine's computation are simulated, so two commits can be
compared exactly: the same seed gives the same requests.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from kvcache.request import ReqContext
from kvcache.testing.tiers import ManualTier
from kvcache.tiering.controller import TierConfig
from kvcache.tiering.manager import TieredOffloadingManager
from kvcache.tiers.base.tier import TierResult

BLOCK_TOKENS = 16
HOST_BLOCKS = 20_000
LONG_S = 1e5
"""A deadline that no request reaches."""
WAYS = ("always", "never", "arbiter")
SHORT = (1, 2, 3, 5, 8, 13, 21, 34, 48)
LONG = (16, 64, 128, 256, 512, 1024)
Seconds = Callable[[float, random.Random], float]


def constant(seconds: float) -> Seconds:
    return lambda now_s, rng: seconds


def varying(median_s: float) -> Seconds:
    return lambda now_s, rng: rng.lognormvariate(math.log(median_s), 1.0)


def stalling(seconds: float, share: float, stall_s: float) -> Seconds:
    return lambda now_s, rng: stall_s if rng.random() < share else seconds


def alternating(fast_s: float, slow_s: float) -> Seconds:
    return lambda now_s, rng: slow_s if int(now_s / 60) % 2 else fast_s


def slow_at_first(seconds: float, first_s: float) -> Seconds:
    return lambda now_s, rng: first_s if now_s < 3 else seconds


@dataclass(frozen=True)
class Scenario:
    """Requests over one or two tiers.

    `tiers` have a latency of each job and seconds of a block. The first block of a prompt takes `first_s` to compute
    and the one at `doubles_at` twice as long. Requests come `gap_s` apart, or at random if `is_random`; then several
    are under way, and with `is_one_gpu` one is computed at a time. The first tier has `split` of the blocks and host
    memory `in_host`. A tier answers a look-up after `exists_s`. The first requests have the lengths `begin`.
    """

    tiers: Sequence[tuple[Seconds, Seconds]]
    lengths: Sequence[int] = LONG
    gap_s: float = 6.0
    first_s: float = 0.002
    doubles_at: float = 2048
    is_random: bool = False
    is_one_gpu: bool = False
    split: float = 1.0
    in_host: float = 0.0
    exists_s: float = 0.0
    step_s: float = 0.03
    begin: Sequence[int] = ()

    def compute_s(self, first: int, last: int) -> float:
        """Return the seconds of computing blocks `first` to `last` of a prompt."""
        return self.first_s * (last - first + (last * last - first * first) / 2 / self.doubles_at)


def short(latency: Seconds, block_s: float, **options: object) -> Scenario:
    """Return a scenario of short prompts and a steep prefill."""
    given = {"lengths": SHORT, "gap_s": 3.0, "first_s": 0.014, "doubles_at": 24, "step_s": 0.003} | options
    return Scenario([(latency, constant(block_s))], **given)  # type: ignore[arg-type]


SCENARIOS = {
    "slow link": short(constant(0.0005), 0.021),
    "fast link": short(constant(0.0005), 0.0026),
    "slow first load": short(slow_at_first(0.0005, 0.21), 0.0026, begin=(1, 1), gap_s=0.7),
    "even": Scenario([(constant(0.02), constant(0.0022))]),
    "bucket": Scenario([(constant(0.2), constant(0.001))]),
    "varying latency": Scenario([(varying(0.1), constant(0.0012))]),
    "stalls": Scenario([(stalling(0.02, 0.03, 8.0), constant(0.0008))], gap_s=10),
    "regimes": Scenario([(constant(0.01), alternating(0.0008, 0.008))]),
    "steep prefill": Scenario([(constant(0.02), constant(0.0022))], first_s=0.001, doubles_at=300, gap_s=5),
    "half in host": Scenario([(constant(0.02), constant(0.0022))], first_s=0.001, doubles_at=300, in_host=0.5),
    "two tiers": Scenario([(constant(0.001), constant(0.0003)), (constant(0.3), constant(0.004))], split=0.5),
    "several requests": Scenario([(constant(0.02), constant(0.0012))], gap_s=1 / 1.2, is_random=True),
    "one gpu": Scenario([(constant(0.02), constant(0.0016))], gap_s=1 / 1.2, is_random=True, is_one_gpu=True),
    "overload": Scenario([(constant(0.02), constant(0.0022))], gap_s=1 / 1.5, is_random=True, is_one_gpu=True),
    "slow look-ups": Scenario(
        [(constant(0.1), constant(0.001))], lengths=(4, 8, 16, 32, 64), gap_s=3, exists_s=0.05, step_s=0.004
    ),
}


class LinkTier(ManualTier):
    """A tier that loads one job after the other over a link."""

    medium = "LINK"

    def __init__(self, scenario: Scenario, number: int, clock: Callable[[], float], seed: int) -> None:
        super().__init__(1_000_000)
        self.medium = f"LINK{number}"
        self.clock = clock
        self._latency_s, self._block_s = scenario.tiers[number]
        self._exists_s = scenario.exists_s
        self._rng = random.Random(seed)
        self._free_s = 0.0
        self._times_s: dict[int, tuple[float, float]] = {}
        self._answers_s: dict[tuple[bytes, int], float] = {}

    def hold(self, number: int, keys: list[bytes]) -> None:
        """Store the keys of one prompt at once."""
        if keys:
            self.submit_store(-1 - number, keys, [0] * len(keys))
            self.end(self.pending[-1])
            self._results = [result for result in self._results if result.job_id != -1 - number]

    def lookup(self, keys: list[bytes]) -> int | None:
        if self._exists_s:
            answer_s = self._answers_s.setdefault((keys[0], len(keys)), self.clock() + self._exists_s)
            if self.clock() < answer_s:
                return None
        return super().lookup(keys)

    def submit_load(self, job_id: int, keys: list[bytes], block_ids: list[int]) -> bool:
        now_s = self.clock()
        begin_s = max(now_s + self._latency_s(now_s, self._rng), self._free_s)
        self._free_s = begin_s + self._block_s(now_s, self._rng) * len(keys)
        self._times_s[job_id] = (now_s, self._free_s)
        return super().submit_load(job_id, keys, block_ids)

    def next_end_s(self) -> float:
        return min((end_s for _, end_s in self._times_s.values()), default=math.inf)

    def get_finished(self) -> list[TierResult]:
        for job in list(self.pending):
            if job.job_id not in self._times_s or self._times_s[job.job_id][1] <= self.clock() + 1e-12:
                self.end(job)
        results = []
        for result in super().get_finished():
            start_s, end_s = self._times_s.pop(result.job_id or 0, (None, None))
            results.append(replace(result, start_s=start_s, end_s=end_s))
        return results


@dataclass
class Engine:
    """Requests of one scenario over a manager; `way` is one of `WAYS`."""

    scenario: Scenario
    way: str
    seed: int = 1
    now_s: float = 0.0
    # The end of each computation under way, its number, its request and its blocks.
    computing: list[tuple[float, int, ReqContext, int, int, float]] = field(default_factory=list)
    gpu_free_s: float = 0.0

    def __post_init__(self) -> None:
        scenario, clock = self.scenario, lambda: self.now_s
        self.tiers = [LinkTier(scenario, i, clock, self.seed + i) for i in range(len(scenario.tiers))]
        rule = TierConfig(arbiter=self.way == "arbiter", deadline_s=LONG_S, max_store_blocks=100_000)
        tiers = [(tier, rule) for tier in self.tiers]
        self.manager = TieredOffloadingManager(BLOCK_TOKENS, HOST_BLOCKS, tiers, deadline_s=LONG_S, clock=clock)

    def first_tokens_s(self, num_requests: int) -> list[float]:
        """Return the seconds to first token of each request, in the order in which they were answered."""
        requests = list(self._requests(num_requests))
        waiting: list[tuple[float, list[bytes], int, ReqContext]] = []
        seconds: list[float] = []
        names = itertools.count()
        while requests or waiting or self.computing:
            self._advance(requests[0][0] if requests else math.inf, bool(waiting))
            while requests and requests[0][0] <= self.now_s:
                begin_s, length, is_held = requests.pop(0)
                keys, in_host = self._prompt(next(names), length, is_held)
                waiting.append((begin_s, keys, in_host, ReqContext()))
            asked, waiting = waiting, []
            for request in asked:
                begin_s, keys, in_host, context = request
                num_hits = in_host if self.way == "never" else self.manager.lookup(keys, context)
                if num_hits is None:
                    waiting.append(request)
                else:
                    seconds.append(self._compute(keys, num_hits, context, len(seconds)) - begin_s)
            self.manager.on_schedule_end()
        return seconds

    def _requests(self, num_requests: int) -> list[tuple[float, int, bool]]:
        """Return arrivals, lengths and whether a tier has the prompt; the others teach the prefill rate."""
        scenario, rng, arrival_s = self.scenario, random.Random(self.seed), 0.0
        requests = []
        for i in range(num_requests):
            arrival_s += rng.expovariate(1 / scenario.gap_s) if scenario.is_random else scenario.gap_s
            length = scenario.begin[i] if i < len(scenario.begin) else rng.choice(scenario.lengths)
            requests.append((arrival_s, length, i >= num_requests // 10 or i % 2 == 1))
        return requests

    def _prompt(self, number: int, length: int, is_held: bool) -> tuple[list[bytes], int]:
        keys = [b"%08d.%08d\0\0\0\0" % (number, i) for i in range(length)]
        if is_held:
            split = int(length * self.scenario.split)
            for tier, part in zip(self.tiers, (keys[:split], keys[split:]), strict=False):
                tier.hold(number, part)
        in_host = int(length * self.scenario.in_host)
        if in_host:
            self.manager.prepare_store(keys[:in_host], ReqContext())
            self.manager.pool.commit(keys[:in_host], None)
        return keys, in_host

    def _advance(self, arrival_s: float, is_waiting: bool) -> None:
        """Go to the next event, and end the computations that are due."""
        events = [arrival_s, *(tier.next_end_s() for tier in self.tiers), *(item[0] for item in self.computing[:1])]
        if is_waiting:
            events.append(self.now_s + self.scenario.step_s)
        self.now_s = max(self.now_s + 1e-4, min(events))
        while self.computing and self.computing[0][0] <= self.now_s:
            _, _, context, first, last, seconds = heapq.heappop(self.computing)
            if last > first:
                self.manager.report_prefill(first * BLOCK_TOKENS, (last - first) * BLOCK_TOKENS, seconds)
            self.manager.on_request_finished(context)
        self.manager.on_schedule_end()

    def _compute(self, keys: list[bytes], num_hits: int, context: ReqContext, number: int) -> float:
        """Load the hits and begin to compute the rest; return the time when that ends."""
        if self.way != "never":
            self.manager.prepare_load(keys[:num_hits], context)
            self.manager.complete_load(keys[:num_hits], context)
        # The last token of a prompt is always computed, with a block of its own.
        last = len(keys) + (self.scenario.lengths is not SHORT)
        seconds = self.scenario.compute_s(num_hits, last)
        begin_s = max(self.gpu_free_s, self.now_s) if self.scenario.is_one_gpu else self.now_s
        self.gpu_free_s = begin_s + seconds
        heapq.heappush(self.computing, (self.gpu_free_s, number, context, num_hits, last, seconds))
        return self.gpu_free_s


def measure(name: str, num_requests: int = 200, seeds: int = 2) -> dict[str, float]:
    """Return the mean seconds to first token by way, after a tenth of the requests; a slow first load counts."""
    scenario = SCENARIOS[name]
    skipped = 0 if scenario.begin else num_requests // 10
    return {
        way: statistics.mean(
            statistics.mean(Engine(scenario, way, seed).first_tokens_s(num_requests)[skipped:])
            for seed in range(1, seeds + 1)
        )
        for way in WAYS
    }


class FirstTokens:
    """The arbiter's mean time to first token over the better one of always and never loading."""

    params: ClassVar = [list(SCENARIOS)]
    param_names: ClassVar = ["scenario"]
    timeout = 600
    unit = "ratio"

    def track_ratio(self, scenario: str) -> float:
        seconds = measure(scenario)
        return seconds["arbiter"] / min(seconds["always"], seconds["never"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", help="default: all")
    print(f"{'scenario':18}", *(f"{way:>9}" for way in WAYS), "saves of always, of never", sep="  ")
    for name in parser.parse_args().scenarios or SCENARIOS:
        seconds = measure(name)
        saved = (f"{1 - seconds['arbiter'] / seconds[way]:8.1%}" for way in WAYS[:2])
        print(f"{name:18}", *(f"{seconds[way]:9.4f}" for way in WAYS), *saved, sep="  ", flush=True)


if __name__ == "__main__":
    main()
