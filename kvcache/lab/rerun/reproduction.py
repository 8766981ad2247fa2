"""Write the calls that show a fault as a test."""

from __future__ import annotations

from typing import Any

from kvcache.lab.rerun.promises import Promises
from kvcache.lab.rerun.recorded import NOTES, Runner, answers_of
from kvcache.lab.rerun.shrink import Shrunk
from kvcache.recorder.format import Answer, Call, Events, Raised, Result, Stored
from kvcache.recorder.ops import LISTS, ONE_KEY, Op

_DEFAULTS = {"enable_events": False, "store_threshold": 0, "max_tracker_size": 64_000, "retention_share": 0.5}


def as_test(shrunk: Shrunk, suspect: str | None, trusted: str | None = None) -> str:
    """Return calls as the text of a pytest test that fails while the fault exists.

    `suspect` is the policy that shows the fault (None: that of the recording), `trusted` the one whose answers are
    expected. If no correct answers are known (None), the test checks `Promises`.
    """
    expected = None if trusted is None else Runner(shrunk.config, trusted, is_exact=False)
    actual = Runner(shrunk.config, suspect, is_exact=False)
    promises = Promises(actual)
    script = _Script()
    for record in shrunk.records:
        if record.op in NOTES:
            actual.note(record)
            if expected is not None:
                expected.note(record)
            script.note(record, actual.groups)
            continue
        answer = None if expected is None else expected.run(record)
        got = actual.run(record)
        script.call(record, got if answer is None else answer, None if expected is None else expected.last_output)
        fault = promises(record, got) if trusted is None else ""
        if fault:
            script.lines.append(f"# Broken here: {fault}.")
            has_check = hasattr(actual.manager.policy, "check")
            script.lines.append("manager.policy.check()" if has_check else "raise AssertionError")
    has_time = any(one.op is Op.CLOCK for record in shrunk.records for one in record.inputs)
    return _test_text(script.lines, dict(shrunk.config), suspect, has_time)


class _Script:
    """The lines of the test so far, in which keys and requests have short names."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._name_of: dict[bytes, str] = {}
        self._seen: set[int] = set()

    def named(self, keys: Any) -> str:
        """Return the text of a key, None, or a list of them."""
        if keys is None or isinstance(keys, bytes):
            if not keys:
                return repr(keys)
            return self._name_of.setdefault(keys, f'b"k{len(self._name_of)}"')
        return f"[{', '.join(map(self.named, keys))}]"

    def _context(self, number: int) -> str:
        if number < 2:
            return "object()" if number else ""
        if number not in self._seen:
            self._seen.add(number)
            self.lines.append(f"r{number} = ReqContext()")
        return f"r{number}"

    def note(self, record: Call, groups: dict[bytes, bytes]) -> None:
        """Write the hints, positions or groups that the recording holds for a request."""
        if record.op is Op.GROUPS:
            known = ", ".join(f"{self.named(key)}: {group!r}" for key, group in groups.items())
            self.lines.append(f"manager.arbitration.group_of = {{{known}}}.get")
        elif record.op is Op.POSITIONS:
            text = self._context(record.context)
            self.lines += [f"{text}.set_offload_key_position({self.named(key)}, {end})" for key, end in record.keys]
        else:
            self._seen.add(record.context)
            about: dict[str, Any] = record.flag if isinstance(record.flag, dict) else {}
            given = []
            if "kvcache" in about:
                params = {"kvcache": about["kvcache"]}
                given.append(f"kv_transfer_params={params!r}")
            if isinstance(about.get("retention"), dict):
                hint = ", ".join(f"{name}={value!r}" for name, value in about["retention"].items())
                given.append(f"retention=Retention({hint})")
            self.lines.append(f"r{record.context} = ReqContext({', '.join(given)})")

    def call(self, record: Call, answer: Answer, output: Any) -> None:
        """Write a call and an assertion of its answer; assert the evicted keys of `output` if they are known."""
        self._inputs(record)
        call = self._call_text(record)
        self.lines += self._expected(call, record, answer, output)

    def _expected(self, call: str, record: Call, answer: Answer, output: Any) -> list[str]:
        match answer:
            case Raised(name):
                return [f"with pytest.raises({name}):", f"    {call}"]
            case None if record.op in (Op.LOOKUP, Op.LOOKUP_ONE, Op.PREPARE_STORE):
                return [f"assert {call} is None"]
            case bool():
                return [f"assert {call} is {answer}"]
            case int(number):
                return [f"assert {call} == {number}"]
            case list(ids):
                return [f"assert {call}.block_ids.tolist() == {ids}"]
            case Stored(stored, _, ids):
                lines = [f"output = {call}", f"assert output.keys_to_store == {self.named(stored)}"]
                if output is not None:
                    lines.append(f"assert output.evicted_keys == {self.named(output.evicted_keys)}")
                return [*lines, f"assert output.store_spec.block_ids.tolist() == {ids}"]
            case Events(events):
                return [f"assert len(list({call})) == {len(events)}"]
            case _:
                return [call]

    def _call_text(self, record: Call) -> str:
        request = self._context(record.context)
        if record.op is Op.REPORT_PREFILLS:
            arguments = [f"{name}={value!r}" for name, value in record.flag.items()]
        elif record.op is Op.HINT:
            arguments = [request or self.named(record.keys), repr(record.flag)]
        else:
            arguments = [self.named(record.keys)] if record.op in ONE_KEY or record.op in LISTS else []
            arguments += [request] if request else []
        if record.op is Op.COMPLETE_STORE and record.flag:
            arguments.append("success=False")
        if record.op is Op.ON_REQUEST_FINISHED and record.flag:
            arguments.append("use_positions=True")
        if record.op is Op.TAKE_EVENTS and record.flag:
            arguments.append(str(record.flag - 1))
        method = "lookup" if record.op is Op.LOOKUP_ONE else record.op.name.lower()
        return f"manager.{method}({', '.join(arguments)})"

    def _inputs(self, record: Call) -> None:
        """Write the answers of the clock and the tiers during a call."""
        times = [one.value for one in record.inputs if one.op is Op.CLOCK]
        if times:
            self.lines.append(f"now[0] = {times[0]!r}")
        for tier in sorted({one.tier for one in record.inputs if one.tier >= 0}):
            answers = answers_of(record, tier)
            texts = {name: repr(values) for name, values in answers.items()}
            if "reports" in answers:
                reports = (f"[{', '.join(map(self._result, one))}]" for one in answers["reports"])
                texts["reports"] = f"[{', '.join(reports)}]"
            self.lines.append(f"tiers[{tier}].expect({', '.join(f'{name}={text}' for name, text in texts.items())})")

    def _result(self, result: Result | None) -> str:
        if result is None:
            return "None"
        lists = ", ".join(map(self.named, (result.done, result.failed, result.removed)))
        return f"Result({result.job_id}, {lists}, {result.error!r}, {result.start_s!r}, {result.end_s!r})"


def _test_text(lines: list[str], config: dict[str, Any], suspect: str | None, has_time: bool) -> str:
    tiers: list[dict[str, Any]] = config.pop("tiers", [])
    num_blocks, block_size = config.pop("num_blocks"), config.pop("block_size")
    recorded = config.pop("cache_policy")
    options = [f"{name}={value!r}" for name, value in config.items() if _DEFAULTS.get(name) != value]
    if has_time:
        options.append("clock=lambda: now[0]")
    body = "\n".join(lines)
    used = [name for name in ("BlockStateError", "ReqContext", "Retention") if name in body]
    imports = ["import pytest", ""] if "pytest." in body else []
    names = ["TierConfig", "TieredOffloadingManager"] if tiers else ["CPUOffloadingManager"]
    imports.append(f"from kvcache import {', '.join(sorted([*names, *used]))}")
    if "Result(" in body:
        imports.append("from kvcache.recorder.format import Result")
    head = ["def test_recorded_calls():"]
    if has_time:
        head.append("    now = [0.0]")
    if tiers:
        imports.append("from kvcache.lab.rerun.recorded import ScriptedTier")
        media = ", ".join(f"ScriptedTier({one['medium']!r})" for one in tiers)
        head.append(f"    tiers = [{media}]")
        rules = []
        for number, one in enumerate(tiers):
            rule = ", ".join(f"{name}={value!r}" for name, value in one.items() if name != "medium")
            rules.append(f"(tiers[{number}], TierConfig({rule}))")
        made = f"TieredOffloadingManager({block_size}, {num_blocks}, [{', '.join(rules)}]"
    else:
        made = f"CPUOffloadingManager({block_size}, {num_blocks}"
    head.append(f"    manager = {', '.join([made, repr(suspect or recorded), *options])})")
    return "\n".join([*imports, "", "", *head, *(f"    {line}" for line in lines)]) + "\n"
