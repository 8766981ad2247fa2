"""Find few calls that still show a fault.

Delta debugging (Zeller & Hildebrandt, TSE '02) over requests, calls and keys, in turn with smaller pools. After calls
have been removed, the recorded answers are no longer valid. So the search compares a manager under the suspected
policy with one under a trusted policy, or checks a single manager against `Promises`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from msgspec.structs import replace

from kvcache.lab.rerun.promises import Promises
from kvcache.lab.rerun.recorded import NOTES, Runner
from kvcache.recorder.format import Answer, Call

T = TypeVar("T")
Oracle = Callable[[Sequence[Call], dict[str, Any]], int]
"""Makes calls on a fresh manager; returns how many it took until the fault showed, 0 where it did not."""


def differs_from(suspect: str | type | None, trusted: str | type) -> Oracle:
    """Return the oracle that compares two policies, call by call."""

    def oracle(records: Sequence[Call], config: dict[str, Any]) -> int:
        runners = [Runner(config, policy, is_exact=False) for policy in (suspect, trusted)]
        for number, record in enumerate(records, 1):
            if record.op in NOTES:
                for runner in runners:
                    runner.note(record)
                continue
            answers = [_whole(runner, runner.run(record)) for runner in runners]
            if answers[0] != answers[1]:
                return number
        return 0

    return oracle


def breaks_promises(suspect: str | type | None) -> Oracle:
    """Return the oracle that checks one policy with `Promises`."""

    def oracle(records: Sequence[Call], config: dict[str, Any]) -> int:
        runner = Runner(config, suspect, is_exact=False)
        promises = Promises(runner)
        for number, record in enumerate(records, 1):
            if record.op in NOTES:
                runner.note(record)
            elif promises(record, runner.run(record)):
                return number
        return 0

    return oracle


def _whole(runner: Runner, answer: Answer) -> Any:
    output = runner.last_output
    return answer if output is None else (answer, output.evicted_keys)


def minimize(items: Sequence[T], shows: Callable[[list[T]], bool]) -> list[T]:
    """Return a subsequence of `items` that still shows a fault, from which no single item can be removed.

    `shows` returns whether some of the items show it. `TimeoutError` ends the search with the best result so far.
    """
    kept = list(items)
    num_parts = 2
    try:
        while len(kept) >= 2:
            size = -(-len(kept) // num_parts)
            for first in range(0, len(kept), size):
                rest = kept[:first] + kept[first + size :]
                if rest and shows(rest):
                    kept = rest
                    num_parts = max(2, num_parts - 1)
                    break
            else:
                if size == 1:
                    break
                num_parts = min(len(kept), 2 * num_parts)
    except TimeoutError:
        pass
    return kept


@dataclass(frozen=True, slots=True)
class Shrunk:
    """A few calls that show a fault, the configuration of their manager, and the number of trials."""

    records: list[Call]
    config: dict[str, Any]
    num_runs: int

    @property
    def num_calls(self) -> int:
        """Calls of the manager."""
        return sum(record.op not in NOTES for record in self.records)


def shrink(records: Sequence[Call], config: dict[str, Any], oracle: Oracle, max_s: float = 60.0) -> Shrunk | None:
    """Return a few records that show the fault of an oracle, or None if the records do not show it.

    `records` begin with the first call of a manager made with `config`. After `max_s`, checked between two trials,
    return the best result so far.
    """
    end_s = time.monotonic() + max_s
    num_runs = 0

    def shown(some: Sequence[Call], with_config: dict[str, Any]) -> int:
        nonlocal num_runs
        num_runs += 1
        if num_runs > 1 and time.monotonic() > end_s:
            raise TimeoutError
        return oracle(some, with_config)

    last = shown(records, config)
    if not last:
        return None
    kept = list(records[:last])
    try:
        while True:
            before = (len(kept), config["num_blocks"], sum(map(_num_keys, kept)))
            kept, config = _fewer_blocks(kept, config, shown)
            kept = _fewer(kept, config, shown, _by_request)
            kept = _fewer(kept, config, shown, lambda records: [[record] for record in records])
            kept = _fewer_keys(kept, config, shown)
            if (len(kept), config["num_blocks"], sum(map(_num_keys, kept))) == before:
                break
    except TimeoutError:
        pass
    return Shrunk(kept, config, num_runs)


Shown = Callable[[Sequence[Call], "dict[str, Any]"], int]


def _num_keys(record: Call) -> int:
    return len(record.keys) if isinstance(record.keys, list) else 0


def _fewer_blocks(records: list[Call], config: dict[str, Any], shown: Shown) -> tuple[list[Call], dict[str, Any]]:
    num_blocks = 1
    while num_blocks < config["num_blocks"]:
        smaller = {**config, "num_blocks": num_blocks}
        if last := shown(records, smaller):
            return records[:last], smaller
        # One by one, then by doubling.
        num_blocks = num_blocks + 1 if num_blocks < 8 else 2 * num_blocks
    return records, config


def _fewer(
    records: list[Call], config: dict[str, Any], shown: Shown, grouped: Callable[[list[Call]], list[list[Call]]]
) -> list[Call]:
    def joined(groups: list[list[Call]]) -> list[Call]:
        return sorted((record for group in groups for record in group), key=lambda record: record.number)

    kept = joined(minimize(grouped(records), lambda groups: shown(joined(groups), config) > 0))
    return kept[: shown(kept, config)]


def _by_request(records: list[Call]) -> list[list[Call]]:
    groups: dict[int, list[Call]] = {}
    for record in records:
        # A record without a request forms its own group.
        groups.setdefault(record.context if record.context > 1 else -record.number - 1, []).append(record)
    return list(groups.values())


def _fewer_keys(records: list[Call], config: dict[str, Any], shown: Shown) -> list[Call]:
    keys = list(dict.fromkeys(key for record in records if _is_batch(record) for key in record.keys))

    def with_only(some: list[Any]) -> list[Call]:
        wanted = set(some)
        return [
            replace(record, keys=[key for key in record.keys if key in wanted]) if _is_batch(record) else record
            for record in records
        ]

    kept = with_only(minimize(keys, lambda some: shown(with_only(some), config) > 0))
    return kept[: shown(kept, config)]


def _is_batch(record: Call) -> bool:
    return isinstance(record.keys, list) and record.op not in NOTES
