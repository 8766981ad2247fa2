"""A tier whose answers are recorded. A replay uses them to make the same decisions without the tier."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvcache.recorder.ops import Op

if TYPE_CHECKING:
    from kvcache.recorder.calls import CallQueue

_MAX_ERROR_CHARS = 200
_NO_JOB = (1 << 62) - 1
_ONLY_RAISE = frozenset({"cancel", "reset", "touch", "on_request_finished"})
"""Methods whose only effect on a manager is an exception."""


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
        return (lambda *args: self._call(name, *args)) if name in _ONLY_RAISE else method

    def _call(self, name: str, *args: Any) -> Any:
        try:
            answer = getattr(self.recorded, name)(*args)
            return list(answer) if name == "get_finished" else answer
        except Exception:
            self._queue.put_input(Op.TIER_RAISED, name, self._number)
            raise

    def lookup(self, keys: list[bytes]) -> int | None:
        """See `Tier.lookup`."""
        answer: Any = self._call("lookup", keys)
        is_valid = answer is None or (type(answer) is int and answer >= 0)
        self._queue.put_input(Op.TIER_LOOKUP, answer if is_valid else -2, self._number)
        return answer  # type: ignore[no-any-return]

    def submit_store(self, job_id: int, keys: list[bytes], block_ids: list[int]) -> bool:
        """See `Tier.submit_store`."""
        return self._submit("submit_store", job_id, keys, block_ids)

    def submit_load(self, job_id: int, keys: list[bytes], block_ids: list[int]) -> bool:
        """See `Tier.submit_load`."""
        return self._submit("submit_load", job_id, keys, block_ids)

    def _submit(self, name: str, job_id: int, *args: Any) -> bool:
        is_taken = bool(self._call(name, job_id, *args))
        self._queue.put_input(Op.TIER_SUBMIT, job_id if is_taken else None, self._number)
        return is_taken

    def get_finished(self) -> Any:
        """See `Tier.get_finished`."""
        results = self._call("get_finished")
        if results:
            plain = [_plain(result) for result in results]
            num_keys = sum(len(keys) for one in plain if one is not None for keys in one[1:4])
            self._queue.put_input(Op.TIER_FINISHED, plain, self._number, num_keys)
        return results


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
