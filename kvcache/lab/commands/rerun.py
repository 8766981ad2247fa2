"""`kvcache rerun`: replay the calls of a recording, and show the first different answer."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from kvcache.cli import common
from kvcache.cli.common import CommandError
from kvcache.lab.commands import options

EXAMPLES = """
kvcache rerun run.kvlog
kvcache rerun run.kvlog --policy gittins
"""


def rerun(
    file: Annotated[Path, typer.Argument(help="A recording of a manager (.kvlog).")],
    policy: Annotated[
        str | None,
        typer.Option(
            help="Replacement policy [default: the recorded one].",
            autocompletion=options.complete_policies,
            show_default=False,
        ),
    ] = None,
    trusted: options.TrustedOption = False,
    json: common.JsonOption = None,
    quiet: common.QuietOption = False,
) -> None:
    """Make the calls of a recorded manager again, up to the first different answer or broken promise."""
    from kvcache.lab.report import rerun_text
    from kvcache.lab.rerun.recorded import replay_recording
    from kvcache.lab.traces.recording import Recording

    # Check first whether the file exists: its own error is clearer than "not a recording".
    if not file.exists():
        raise ValueError(f"{file} cannot be read: the file does not exist")
    if not options.is_recording(file):
        raise ValueError(f"{file} is not a recording of kvcache: kvcache replay and kvcache plan read traces")
    common.check_writable("--json", json, file)
    recorded = Recording(file, trusted)
    with common.Bar("replay", "records", quiet, total=None) as bar:
        outcome = replay_recording(recorded, policy, partial(rerun_text.watched, bar))
    difference = outcome.difference
    config = recorded.header["manager"]
    report: dict[str, Any] = {
        "file": str(file),
        "manager": config,
        "policy": policy or config.get("cache_policy"),
        "calls": outcome.num_calls,
        "skipped_calls": outcome.num_skipped,
        "lost_records": outcome.num_lost,
        "end": outcome.end,
        "removed": list(outcome.removed),
        "is_same": difference is None and outcome.num_calls > 0,
    }
    if difference is not None:
        report["difference"] = {
            "record": difference.call.number,
            "call": rerun_text.call_text(difference.call),
            "expected": rerun_text.answer_text(difference.expected),
            "got": rerun_text.answer_text(difference.got),
            "reason": difference.reason,
        }
    if json is not None:
        common.write_json(json, report)
    if not quiet or difference is not None:
        out = sys.stderr if json == "-" else sys.stdout
        print(rerun_text.summary(report), file=out)
    if not outcome.num_calls:
        raise CommandError(f"{file} has no call to compare: {outcome.end or 'nothing was recorded'}")
    if difference is not None:
        what = difference.reason or "the answer differs"
        raise CommandError(f"record {difference.call.number}, {difference.call.op.name.lower()}: {what}")
