"""A tier whose answers are recorded: with them, a replay needs no tier, and takes the same decisions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvcache.recorder.ops import TierCall

if TYPE_CHECKING:
    from kvcache.recorder.call_log import CallLog
    from kvcache.request import ReqContext

_MAX_ERROR_BYTES = 200


class RecordedTier:
    """Answers as another tier does, and records what it answered; what depends on nothing is passed through.

    Parameters
    ----------
    log : CallLog
        Where answers are recorded.
    number : int
        Which of the manager's tiers this is, from 0 on.
    tier : Tier
        Asked.
    is_timed : bool
        Whether the times of its jobs are recorded, too: an arbiter learns from them.
    """

    def __init__(self, log: CallLog, number: int, tier: Any, is_timed: bool) -> None:
        self.recorded = tier
        self._is_timed = is_timed
        self._log = log
        self._number = number

    def __getattr__(self, name: str) -> Any:
        return getattr(self.recorded, name)

    def _raised(self, call: TierCall) -> None:
        self._log.put_tier_raised(self._number, call)

    def lookup(self, keys: list[bytes]) -> int | None:
        """See `Tier.lookup`."""
        try:
            answer: int | None = self.recorded.lookup(keys)
        except Exception:
            self._raised(TierCall.LOOKUP)
            raise
        self._log.put_tier_lookup(self._number, len(keys), answer)
        return answer

    def submit_store(self, job_id: int, keys: list[bytes], block_ids: list[int]) -> bool:
        """See `Tier.submit_store`."""
        return self._submit(TierCall.SUBMIT_STORE, job_id, keys, block_ids)

    def submit_load(self, job_id: int, keys: list[bytes], block_ids: list[int]) -> bool:
        """See `Tier.submit_load`."""
        return self._submit(TierCall.SUBMIT_LOAD, job_id, keys, block_ids)

    def _submit(self, call: TierCall, job_id: int, keys: list[bytes], block_ids: list[int]) -> bool:
        is_load = call is TierCall.SUBMIT_LOAD
        submit = self.recorded.submit_load if is_load else self.recorded.submit_store
        kept = list(keys)
        try:
            is_taken = bool(submit(job_id, keys, block_ids))
        except Exception:
            self._raised(call)
            raise
        self._log.put_tier_submit(self._number, is_load, job_id, kept, is_taken)
        return is_taken

    def get_finished(self) -> Any:
        """See `Tier.get_finished`."""
        try:
            results = self.recorded.get_finished()
            if type(results) is not list:
                results = list(results)
        except Exception:
            self._raised(TierCall.GET_FINISHED)
            raise
        if results and self._is_timed:
            self._log.put_tier_times(self._number, [_times(result) for result in results])
        if results:
            self._log.put_tier_finished(self._number, [_plain(result) for result in results])
        return results

    def cancel(self, job_id: int) -> None:
        """See `Tier.cancel`."""
        self._pass(TierCall.CANCEL, self.recorded.cancel, job_id)

    def reset(self) -> None:
        """See `Tier.reset`."""
        self._pass(TierCall.RESET, self.recorded.reset)

    def touch(self, keys: list[bytes], req_context: ReqContext | None = None) -> None:
        """See `Tier.touch`."""
        self._pass(TierCall.TOUCH, self.recorded.touch, keys, req_context)

    def on_request_finished(self, req_context: ReqContext) -> None:
        """See `Tier.on_request_finished`."""
        self._pass(TierCall.REQUEST_FINISHED, self.recorded.on_request_finished, req_context)

    def _pass(self, call: TierCall, method: Any, *args: Any) -> None:
        try:
            method(*args)
        except Exception:
            self._raised(call)
            raise


def _plain(result: Any) -> tuple[int | None, list[bytes], list[bytes], list[bytes], bytes] | None:
    """Return what counts of a result, or None where a manager would take it for nonsense."""
    try:
        job_id = result.job_id
        if job_id is not None and (type(job_id) is not int or job_id < 0):
            # No job has such an id: it is dropped in the same way.
            job_id = (1 << 62) - 1
        lists = [list(result.done), list(result.failed), list(result.removed)]
        if any(type(key) is not bytes for keys in lists for key in keys):
            return None
        return job_id, *lists, str(result.error).encode()[:_MAX_ERROR_BYTES]
    except Exception:
        return None


def _times(result: Any) -> tuple[float, float] | None:
    """Return when a job began and ended, or None where that is not known or nonsense."""
    try:
        start_s, end_s = result.start_s, result.end_s
        return None if start_s is None or end_s is None else (float(start_s), float(end_s))
    except Exception:
        return None
