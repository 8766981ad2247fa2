"""A tier whose answers are recorded. A replay uses them to make the same decisions without the tier."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvcache.recorder.ops import Op, TierCall

if TYPE_CHECKING:
    from kvcache.recorder.calls import CallQueue
    from kvcache.request import ReqContext

_MAX_ERROR_CHARS = 200
_NO_JOB = (1 << 62) - 1


class RecordedTier:
    """Wraps another tier, and records the answers that decisions depend on.

    Parameters
    ----------
    queue : CallQueue
        Takes the records.
    number : int
        Index of this tier among the manager's tiers, from 0 on.
    tier : Tier
        The wrapped tier.
    is_timed : bool
        Whether to record the times of its jobs, from which an arbiter learns.
    """

    def __init__(self, queue: CallQueue, number: int, tier: Any, is_timed: bool) -> None:
        self.recorded = tier
        self._is_timed = is_timed
        self._queue = queue
        self._number = number

    def __getattr__(self, name: str) -> Any:
        return getattr(self.recorded, name)

    def _call(self, call: TierCall, method: Any, *args: Any) -> Any:
        try:
            return method(*args)
        except Exception:
            self._queue.put_input(Op.TIER_RAISED, self._number, call)
            raise

    def lookup(self, keys: list[bytes]) -> int | None:
        """See `Tier.lookup`."""
        num_keys = len(keys)
        answer: Any = self._call(TierCall.LOOKUP, self.recorded.lookup, keys)
        is_valid = answer is None or (type(answer) is int and answer >= 0)
        self._queue.put_input(Op.TIER_LOOKUP, self._number, (num_keys, answer if is_valid else -2))
        return answer  # type: ignore[no-any-return]

    def submit_store(self, job_id: int, keys: list[bytes], block_ids: list[int]) -> bool:
        """See `Tier.submit_store`."""
        return self._submit(TierCall.SUBMIT_STORE, self.recorded.submit_store, job_id, keys, block_ids)

    def submit_load(self, job_id: int, keys: list[bytes], block_ids: list[int]) -> bool:
        """See `Tier.submit_load`."""
        return self._submit(TierCall.SUBMIT_LOAD, self.recorded.submit_load, job_id, keys, block_ids)

    def _submit(self, call: TierCall, method: Any, job_id: int, *args: Any) -> bool:
        is_taken = bool(self._call(call, method, job_id, *args))
        self._queue.put_input(Op.TIER_SUBMIT, self._number, (job_id, is_taken))
        return is_taken

    def get_finished(self) -> Any:
        """See `Tier.get_finished`."""
        results = self._call(TierCall.GET_FINISHED, lambda: list(self.recorded.get_finished()))
        if results:
            if self._is_timed:
                self._queue.put_input(Op.TIER_TIMES, self._number, [_times(result) for result in results])
            plain = [_plain(result) for result in results]
            num_keys = sum(len(keys) for one in plain if one is not None for keys in one[1:4])
            self._queue.put_input(Op.TIER_FINISHED, self._number, plain, num_keys=num_keys)
        return results

    def cancel(self, job_id: int) -> None:
        """See `Tier.cancel`."""
        self._call(TierCall.CANCEL, self.recorded.cancel, job_id)

    def reset(self) -> None:
        """See `Tier.reset`."""
        self._call(TierCall.RESET, self.recorded.reset)

    def touch(self, keys: list[bytes], req_context: ReqContext | None = None) -> None:
        """See `Tier.touch`."""
        self._call(TierCall.TOUCH, self.recorded.touch, keys, req_context)

    def on_request_finished(self, req_context: ReqContext) -> None:
        """See `Tier.on_request_finished`."""
        self._call(TierCall.REQUEST_FINISHED, self.recorded.on_request_finished, req_context)


def _plain(result: Any) -> tuple[int | None, list[bytes], list[bytes], list[bytes], str] | None:
    """Return the recorded part of a result, or None for a result that a manager ignores as invalid."""
    try:
        job_id = result.job_id
        if job_id is not None and (type(job_id) is not int or job_id < 0):
            job_id = _NO_JOB  # belongs to no job, as this one
        lists = [list(result.done), list(result.failed), list(result.removed)]
        if any(type(key) is not bytes for keys in lists for key in keys):
            return None
        return job_id, lists[0], lists[1], lists[2], str(result.error)[:_MAX_ERROR_CHARS]
    except Exception:
        return None


def _times(result: Any) -> tuple[float, float] | None:
    """Return when a job began and ended, or None if that is unknown or invalid."""
    try:
        start_s, end_s = result.start_s, result.end_s
        return None if start_s is None or end_s is None else (float(start_s), float(end_s))
    except Exception:
        return None
