"""A tier whose answers are recorded. A replay uses them to make the same decisions without the tier."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from kvcache.recorder.ops import Op

if TYPE_CHECKING:
    from kvcache.recorder.calls import CallQueue

_MAX_ERROR_CHARS = 200
_NO_JOB = (1 << 62) - 1
_RECORDED = frozenset(
    {"lookup", "submit_store", "submit_load", "get_finished", "cancel", "reset", "touch", "on_request_finished"}
)
"""Methods whose answers or exceptions have an effect on a manager."""


class RecordedTier:
    """Wraps another tier, and records the answers that decisions depend on.

    `number` is the index of this tier among the manager's tiers, from 0 on.
    """

    def __init__(self, queue: CallQueue, number: int, tier: Any) -> None:
        self.recorded = tier
        self._queue = queue
        self._number = number

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.recorded, name)
        if name not in _RECORDED:
            return method
        return partial(self._call, name, method)

    def _call(self, name: str, method: Any, *args: Any) -> Any:
        put, number = self._queue.put_input, self._number
        try:
            answer = method(*args)
            if name == "get_finished":
                answer = list(answer)
        except Exception:
            put(Op.TIER_RAISED, name, number)
            raise
        if name == "lookup":
            is_valid = answer is None or (type(answer) is int and answer >= 0)
            put(Op.TIER_LOOKUP, answer if is_valid else -2, number)
        elif name.startswith("submit_"):
            put(Op.TIER_SUBMIT, args[0] if answer else None, number)
        elif name == "get_finished" and answer:
            results = [_plain(result) for result in answer]
            num_keys = sum(len(keys) for result in results if result is not None for keys in result[1:4])
            put(Op.TIER_FINISHED, results, number, num_keys)
        return answer


def _plain(result: Any) -> tuple[Any, ...] | None:
    """Return the recorded part of a result, or None for a result that a manager ignores as invalid."""
    try:
        job_id = result.job_id
        if job_id is not None and (type(job_id) is not int or job_id < 0):
            job_id = _NO_JOB  # belongs to no job, as this one
        lists = [list(result.done), list(result.failed), list(result.removed)]
        if any(type(key) is not bytes for keys in lists for key in keys):
            return None
        error = str(result.error)[:_MAX_ERROR_CHARS]
    except Exception:
        return None
    try:
        times = float(result.start_s), float(result.end_s)
    except Exception:
        return job_id, *lists, error, None, None  # unknown or invalid
    return job_id, *lists, error, *times
