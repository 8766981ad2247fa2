"""The texts of `kvcache rerun`: calls and answers in words, and the summary."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvcache.cli import common
from kvcache.lab.rerun.promises import Promises
from kvcache.lab.traces.recording import Answer
from kvcache.recorder.format import Events, Raised, Stored

if TYPE_CHECKING:
    from kvcache.lab.rerun.recorded import Runner
    from kvcache.lab.traces.recording import Call


def watched(bar: common.Bar, runner: Runner) -> Callable[[Call, Answer], str]:
    """Return a function that checks the promises of each call and shows the progress."""
    inspect = Promises(runner)

    def look(call: Call, answer: Answer) -> str:
        if bar.is_due():
            bar.show(0, call.number)
        return inspect(call, answer)

    return look


def summary(report: dict[str, Any]) -> str:
    lines = [f"{report['file']}: {report['calls']:,} calls made again under {report['policy']}"]
    if report["skipped_calls"]:
        lines.append(f"  {report['skipped_calls']:,} calls passed over: what the manager held before them is not known")
    if report["lost_records"]:
        lines.append(f"  {report['lost_records']:,} records were lost while recording")
    if report["removed"]:
        lines.append(f"  left out, because they were removed from kvcache: {', '.join(report['removed'])}")
    if report["end"]:
        lines.append(f"  read up to here: {report['end']}")
    if "difference" not in report:
        lines.append("  every answer is the same" if report["calls"] else "  there is nothing to compare")
        return "\n".join(lines)
    found = report["difference"]
    lines += [f"  record {found['record']:,}: {found['call']}", f"    expected {found['expected']}"]
    lines.append(f"    broken: {found['reason']}" if found["reason"] else f"    got      {found['got']}")
    return "\n".join(lines)


def call_text(call: Call) -> str:
    keys = _keys_text(call.keys) if call.keys or isinstance(call.keys, bytes) else ""
    request = f", request {call.context}" if call.context > 1 else ""
    return f"{call.op.name.lower()}({keys}{request})"


def _keys_text(keys: Any) -> str:
    if isinstance(keys, tuple):
        return f"{_keys_text(keys[0])}, {keys[1]!r}"
    if not isinstance(keys, list):
        return keys.hex() if isinstance(keys, bytes) else repr(keys)
    shown = ", ".join(_keys_text(key) for key in keys[:3])
    return f"[{shown}]" if len(keys) <= 3 else f"[{shown}, ... {len(keys)} keys]"


def answer_text(answer: Answer) -> str:
    match answer:
        case Stored(keys, num_evicted, ids):
            return f"{len(keys)} blocks to store in {_ids_text(ids)}, {num_evicted} evicted"
        case list():
            return f"blocks {_ids_text(answer)}"
        case Events(events):
            return f"{len(events)} events of {sum(len(keys) for keys, _ in events)} keys"
        case Raised(name):
            return f"error {name}"
    return str(answer)


def _ids_text(ids: list[int]) -> str:
    return str(ids) if len(ids) <= 12 else f"[{', '.join(map(str, ids[:12]))}, ... {len(ids)} ids]"
