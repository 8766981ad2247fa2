"""Find few calls that still show a fault, and write them down as a test.

Delta debugging (Zeller & Hildebrandt, TSE '02) over requests, calls and keys, in turn with smaller pools. Once calls
are left out the recorded answers mean nothing any more; so two managers are compared, under the policy that is
suspected and under one that is trusted, or one manager is held to what every manager promises.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from kvcache.recorder.format import Call
from kvcache.recorder.ops import Answer, Op
from kvcache.replay.recorded import NOTES, Runner, is_expected_error, lookup_answer

T = TypeVar("T")
Oracle = Callable[[Sequence[Call], dict[str, Any]], int]
"""Makes calls on a fresh manager; returns how many it took until the fault showed, 0 where it did not."""
_CHECK_BLOCKS = 4096
_CHECK_EVERY = 997
_STATES = ("absent", "being written", "ready")


class Promises:
    """What every manager of one medium promises, whatever its policy; checked by its answers alone."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._is_tiered = bool(runner.tiers)
        self._num_blocks: int = runner.manager.stats().num_blocks
        self._check = getattr(runner.manager.policy, "check", None)
        self._num_calls = 0
        # Key to block id and references; -1: it is being written.
        self._blocks: dict[bytes, list[int]] = {}

    def __call__(self, call: Call, answer: tuple[Any, ...]) -> str:
        """Return which promise a call's answer breaks; "" for none."""
        self._num_calls += 1
        if answer[0] is Answer.ERROR and not is_expected_error(answer[1]):
            return f"{answer[1]} was raised"
        if answer == (Answer.ERROR, "BlockStateError") and call.op is Op.PREPARE_STORE:
            return "the policy chose blocks to evict that must stay"
        fault = "" if self._is_tiered else self._follow(call, answer)
        if (
            not fault
            and self._check is not None
            and (self._num_blocks <= _CHECK_BLOCKS or self._num_calls % _CHECK_EVERY == 0)
        ):
            try:
                self._check()
            except Exception as error:
                fault = f"the policy's check fails: {type(error).__name__}: {error}"
        return fault

    def _follow(self, call: Call, answer: tuple[Any, ...]) -> str:
        blocks, keys = self._blocks, call.keys
        if answer[0] is Answer.ERROR:
            return ""
        match call.op:
            case Op.RESET:
                blocks.clear()
            case Op.LOOKUP:
                ready = 0
                while ready < len(keys) and blocks.get(keys[ready], (0, -1))[1] >= 0:
                    ready += 1
                if answer != (Answer.INT, ready):
                    return f"{ready} leading blocks are ready, lookup found {answer[1:]}"
            case Op.LOOKUP_ONE | Op.STATUS:
                state = 0 if keys not in blocks else 1 if blocks[keys][1] < 0 else 2
                expected: tuple[Any, ...] = (Answer.TRUE if state == 2 else Answer.FALSE,)
                if answer != ((Answer.INT, state) if call.op is Op.STATUS else expected):
                    return f"the block is {_STATES[state]}, the answer was {answer}"
            case Op.PREPARE_LOAD:
                if any(blocks.get(key, (0, -1))[1] < 0 for key in keys):
                    return "prepare_load gave a reference on a block that is not ready"
                if answer != (Answer.BLOCKS, [blocks[key][0] for key in keys]):
                    return "prepare_load returned other block ids than prepare_store"
                for key in keys:
                    blocks[key][1] += 1
            case Op.COMPLETE_LOAD:
                for key in keys:
                    if blocks.get(key, (0, 0))[1] < 1:
                        return "complete_load took a reference back that nobody had"
                    blocks[key][1] -= 1
            case Op.COMPLETE_STORE:
                for key in keys:
                    if key in blocks and blocks[key][1] < 0:
                        if call.flag:
                            blocks[key][1] = 0
                        else:
                            del blocks[key]
            case Op.PREPARE_STORE:
                return self._stored(set(keys), answer)
            case _:
                pass
        return ""

    def _stored(self, named: set[Any], answer: tuple[Any, ...]) -> str:
        output = self._runner.last_output
        if output is None:
            return ""
        blocks = self._blocks
        _, stored, num_evicted, ids = answer
        num_needed = max(0, len(stored) + len(blocks) - self._num_blocks)
        if num_evicted != num_needed:
            return f"{num_evicted} blocks were evicted where {num_needed} had to be"
        for key in output.evicted_keys:
            state = blocks.pop(key, None)
            if state is None:
                return "a block was evicted that was not there"
            if state[1] != 0:
                return "a block was evicted that was referenced or being written"
            if key in named:
                return "a block was evicted that the call itself named"
        used = {block_id for block_id, _ in blocks.values()}
        for key, block_id in zip(stored, ids, strict=True):
            if key in blocks or key not in named:
                return "a block is to be stored that is there, or was not named"
            if block_id in used or not 0 <= block_id < self._num_blocks:
                return f"block id {block_id} is in use, or no slot of the pool"
            used.add(block_id)
            blocks[key] = [block_id, -1]
        return ""


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
    """Return the oracle that holds one policy to `Promises`."""

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


def _whole(runner: Runner, answer: tuple[Any, ...]) -> tuple[Any, ...]:
    output = runner.last_output
    return answer if output is None else (*answer, output.evicted_keys)


def minimize(items: Sequence[T], shows: Callable[[list[T]], bool]) -> list[T]:
    """Return a part of `items`, in order, that still shows a fault, and of which no single item can be left out.

    Parameters
    ----------
    items : sequence
        Show the fault together.
    shows : callable
        Whether some of the items do. May raise `TimeoutError` to end the search with the best so far.
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
    """Few calls that show a fault, the configuration of their manager, and how often calls were tried."""

    records: list[Call]
    config: dict[str, Any]
    num_runs: int

    @property
    def num_calls(self) -> int:
        """Calls of the manager."""
        return sum(record.op not in NOTES for record in self.records)


def shrink(records: Sequence[Call], config: dict[str, Any], oracle: Oracle, max_s: float = 60.0) -> Shrunk | None:
    """Return few records that show the fault of an oracle, or None where all of them do not.

    `records` begin with the first call of a manager made with `config`; after `max_s`, looked at between two tries,
    what was found is enough.
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
        # What belongs to no request stands alone.
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


def as_test(shrunk: Shrunk, suspect: str | None, trusted: str | None = None) -> str:
    """Return calls as the text of a pytest test that fails as long as the fault is there.

    Parameters
    ----------
    shrunk : Shrunk
        What `shrink` has found.
    suspect : str, optional
        The policy that shows the fault; None: that of the recording.
    trusted : str, optional
        The policy whose answers are expected; None: no answers are known to be right, and `Promises` is what fails.
    """
    config = dict(shrunk.config)
    policy = suspect or config["cache_policy"]
    expected = None if trusted is None else Runner(shrunk.config, trusted, is_exact=False)
    actual = Runner(shrunk.config, suspect, is_exact=False)
    promises = Promises(actual)
    name_of: dict[bytes, str] = {}
    lines: list[str] = []
    seen: set[int] = set()
    tiers: list[dict[str, Any]] = config.pop("tiers", [])
    num_blocks, block_size = config.pop("num_blocks"), config.pop("block_size")
    config.pop("cache_policy")
    defaults = {"enable_events": False, "store_threshold": 0, "max_tracker_size": 64_000, "retention_share": 0.5}
    options = [f"{name}={value!r}" for name, value in config.items() if defaults.get(name) != value]
    has_time = any(one.op is Op.CLOCK for record in shrunk.records for one in record.inputs)
    if has_time:
        options.append("clock=lambda: now[0]")

    def named(keys: Any) -> str:
        if keys is None or isinstance(keys, bytes):
            if not keys:
                return repr(keys)
            return name_of.setdefault(keys, f'b"k{len(name_of)}"')
        return "[" + ", ".join(named(key) for key in keys) + "]"

    def context(number: int) -> str:
        if number < 2:
            return "object()" if number else ""
        if number not in seen:
            seen.add(number)
            lines.append(f"r{number} = ReqContext()")
        return f"r{number}"

    for record in shrunk.records:
        if record.op is Op.CONTEXT:
            actual.note(record)
            if expected is not None:
                expected.note(record)
            seen.add(record.context)
            about = record.keys if isinstance(record.keys, dict) else {}
            given = []
            if "kvcache" in about:
                params = {"kvcache": about["kvcache"]}
                given.append(f"kv_transfer_params={params!r}")
            if isinstance(about.get("retention"), dict):
                hint = ", ".join(f"{name}={value!r}" for name, value in about["retention"].items())
                given.append(f"retention=Retention({hint})")
            lines.append(f"r{record.context} = ReqContext({', '.join(given)})")
            continue
        if record.op is Op.GROUPS:
            actual.note(record)
            if expected is not None:
                expected.note(record)
            groups = ", ".join(f"{named(key)}: {group!r}" for key, group in actual.groups.items())
            lines.append(f"manager.arbitration.group_of = {{{groups}}}.get")
            continue
        if record.op is Op.POSITIONS:
            actual.note(record)
            if expected is not None:
                expected.note(record)
            text = context(record.context)
            lines += [f"{text}.set_offload_key_position({named(key)}, {end})" for key, end in record.keys]
            continue
        lines += _inputs_text(record, named)
        request = context(record.context)
        is_plain = record.op in (Op.HINT, Op.REPORT_PREFILLS)
        arguments = [] if record.keys is None or is_plain else [named(record.keys)]
        arguments += [request] if request else []
        if record.op is Op.REPORT_PREFILLS:
            arguments = [repr(one) for one in record.keys]
        if record.op is Op.HINT:
            arguments = [request or named(record.keys[0]), repr(record.keys[1])]
        if record.op is Op.COMPLETE_STORE and not record.flag:
            arguments.append("success=False")
        if record.op is Op.REQUEST_FINISHED and record.flag:
            arguments.append("use_positions=True")
        if record.op is Op.TAKE_EVENTS and record.flag:
            arguments.append(str(record.flag - 1))
        method = _METHOD_OF.get(record.op, record.op.name.lower())
        call = f"manager.{method}({', '.join(arguments)})"
        answer = None if expected is None else expected.run(record)
        output = None if expected is None else expected.last_output
        got = actual.run(record)
        fault = promises(record, got) if trusted is None else ""
        lines += _call_text(call, record, got if answer is None else answer, output, named)
        if fault:
            lines.append(f"# Broken here: {fault}.")
            has_check = hasattr(actual.manager.policy, "check")
            lines.append("manager.policy.check()" if has_check else "raise AssertionError")
    return _test_text(lines, tiers, block_size, num_blocks, policy, options, has_time)


_METHOD_OF = {
    Op.LOOKUP_ONE: "lookup",
    Op.REQUEST_FINISHED: "on_request_finished",
    Op.SCHEDULE_END: "on_schedule_end",
    Op.RESET: "reset_cache",
}


def _inputs_text(record: Call, named: Callable[[Any], str]) -> list[str]:
    lines: list[str] = []
    times = [one.value for one in record.inputs if one.op is Op.CLOCK]
    if times:
        lines.append(f"now[0] = {times[0]!r}")
    by_tier: dict[int, dict[str, list[str]]] = {}
    for one in record.inputs:
        if one.tier < 0:
            continue
        script = by_tier.setdefault(one.tier, {})
        if one.op is Op.TIER_LOOKUP:
            script.setdefault("lookups", []).append(repr(lookup_answer(one.value[1])))
        elif one.op is Op.TIER_SUBMIT:
            script.setdefault("submits", []).append(f"({one.value[1]}, {bool(one.value[0] & 1)})")
        elif one.op is Op.TIER_TIMES:
            script.setdefault("times", []).append(repr(one.value))
        elif one.op is Op.TIER_RAISED:
            script.setdefault("raising", []).append(f"TierCall.{one.value.name}")
        elif one.op is Op.TIER_FINISHED:
            results = [
                "None" if result is None else f"({result[0]}, {', '.join(map(named, result[1:4]))}, {result[4]!r})"
                for result in one.value
            ]
            script.setdefault("reports", []).append(f"[{', '.join(results)}]")
    for tier, script in by_tier.items():
        told = ", ".join(f"{name}=[{', '.join(values)}]" for name, values in script.items())
        lines.append(f"tiers[{tier}].expect({told})")
    return lines


def _call_text(call: str, record: Call, answer: tuple[Any, ...], output: Any, named: Callable[[Any], str]) -> list[str]:
    match answer:
        case (Answer.ERROR, name):
            known = "BlockStateError" if name == "BlockStateError" else name
            return [f"with pytest.raises({known}):", f"    {call}"]
        case (Answer.NONE,) if record.op in (Op.LOOKUP, Op.LOOKUP_ONE, Op.PREPARE_STORE):
            return [f"assert {call} is None"]
        case (Answer.TRUE | Answer.FALSE,):
            return [f"assert {call} is {answer[0] is Answer.TRUE}"]
        case (Answer.INT, number):
            return [f"assert {call} == {number}"]
        case (Answer.BLOCKS, ids):
            return [f"assert {call}.block_ids.tolist() == {ids}"]
        case (Answer.OUTPUT, stored, _, ids):
            lines = [f"output = {call}", f"assert output.keys_to_store == {named(stored)}"]
            if output is not None:
                lines.append(f"assert output.evicted_keys == {named(output.evicted_keys)}")
            return [*lines, f"assert output.store_spec.block_ids.tolist() == {ids}"]
        case (Answer.EVENTS, number, *_):
            return [f"assert len(list({call})) == {number}"]
        case _:
            return [call]


def _test_text(
    lines: list[str],
    tiers: list[dict[str, Any]],
    block_size: int,
    num_blocks: int,
    policy: str,
    options: list[str],
    has_time: bool,
) -> str:
    body = "\n".join(lines)
    used = [name for name in ("BlockStateError", "ReqContext", "Retention") if name in body]
    imports = ["import pytest", ""] if "pytest." in body else []
    names = ["TierConfig", "TieredOffloadingManager"] if tiers else ["CPUOffloadingManager"]
    imports.append(f"from kvcache import {', '.join(sorted([*names, *used]))}")
    if "TierCall." in body:
        imports.append("from kvcache.recorder.ops import TierCall")
    head = ["def test_recorded_calls():"]
    if has_time:
        head.append("    now = [0.0]")
    if tiers:
        imports.append("from kvcache.replay.recorded import ScriptedTier")
        media = ", ".join(f"ScriptedTier({one['medium']!r})" for one in tiers)
        head.append(f"    tiers = [{media}]")
        rules = []
        for number, one in enumerate(tiers):
            rule = ", ".join(f"{name}={value!r}" for name, value in one.items() if name != "medium")
            rules.append(f"(tiers[{number}], TierConfig({rule}))")
        made = f"TieredOffloadingManager({block_size}, {num_blocks}, [{', '.join(rules)}]"
    else:
        made = f"CPUOffloadingManager({block_size}, {num_blocks}"
    head.append(f"    manager = {', '.join([made, repr(policy), *options])})")
    return "\n".join([*imports, "", "", *head, *(f"    {line}" for line in lines)]) + "\n"
