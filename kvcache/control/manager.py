"""The manager's contract: what an engine's scheduler asks of an offloading cache."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any

from kvcache.events import OffloadingEvent
from kvcache.metrics import ManagerStats, Part
from kvcache.request import ReqContext, RequestOffloadingContext
from kvcache.specs import LoadStoreSpec, PrepareStoreOutput

Keys = Iterable[bytes]


class OffloadingManager(ABC):
    """What an engine's scheduler asks of an offloading cache.

    Attributes
    ----------
    block_size : int
        Tokens of one offloaded block.
    medium : str
        Where the blocks lie.
    telemetry : kvcache.control.telemetry.Telemetry or None
        What exporters read, where a spec has made the manager; closed by `shutdown`.
    recorder : kvcache.recorder.recorder.Recorder or None
        What records the manager's calls; stopped by `shutdown`.

    Notes
    -----
    Wherever `keys` are asked for, any iterable of keys in prefix order will do (it is consumed once); a list is the
    fast path. `req_context` is the request that a call is for, where it is for one. Errors, all checked before anything
    changes: ValueError for a bad argument, KeyError for an unknown key, BlockStateError for a wrong reference count or
    state. A subclass must write `lookup`, `prepare_load` and `prepare_store`; the rest has defaults.
    """

    block_size: int
    medium: str
    telemetry: Any = None
    recorder: Any = None

    @abstractmethod
    def lookup(self, keys: Any, req_context: ReqContext | None = None) -> bool | int | None:
        """Return whether one key, or how many leading ones of a list or tuple, are offloaded and ready.

        Parameters
        ----------
        keys : bytes, or list or tuple of bytes
            One key, or a request's keys in prefix order.
        req_context : ReqContext, optional
            The request.
        key
            Keyword, in place of `keys`: what engines call one key. Managers of this package take it.

        Returns
        -------
        bool, int or None
            For one key, True or False; for several, the length of the longest leading run that is ready. None:
            ask again later, a lower tier is being asked. A manager of one tier never answers None.
        """

    @abstractmethod
    def prepare_load(self, keys: Keys, req_context: ReqContext | None = None) -> LoadStoreSpec:
        """Take a reference on each block, which stays until `complete_load`, and return where they lie, in key order.

        Raises
        ------
        KeyError, BlockStateError
            A key is unknown, or its block is not ready; no reference has been taken.
        """

    def touch(self, keys: Keys, req_context: ReqContext | None = None) -> None:  # noqa: B027
        """Mark blocks as recently used, the first of `keys` as the most recent; unknown ones are ignored."""

    def complete_load(self, keys: Keys, req_context: ReqContext | None = None) -> None:  # noqa: B027
        """Give back the references that `prepare_load` took.

        Raises
        ------
        KeyError, BlockStateError
            A key is unknown, or has fewer references than are given back; nothing has changed.
        """

    @abstractmethod
    def prepare_store(self, keys: Keys, req_context: ReqContext | None = None) -> PrepareStoreOutput | None:
        """Make room for the keys that are not there yet, and return where to write them.

        Returns
        -------
        PrepareStoreOutput or None
            None: there is no room, and nothing has changed.
        """

    def complete_store(  # noqa: B027
        self, keys: Keys, req_context: ReqContext | bool | None = None, success: bool = True
    ) -> None:
        """Make written blocks ready, or drop them if `success` is False; unknown keys are ignored."""

    def stats(self) -> ManagerStats:
        """Return counters since start and gauges now; all 0 where a manager counts nothing."""
        return ManagerStats()

    def parts(self) -> list[Part]:
        """Return everything that is counted, by component, the manager's own first; callable in any thread."""
        return [Part("", self.stats())]

    def take_events(self) -> Iterator[OffloadingEvent]:
        """Yield the events since the last call, each once."""
        return iter(())

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Called when a request begins; return how its blocks are offloaded."""
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:  # noqa: B027
        """Called when a request has ended."""

    def hint(self, request_or_keys: ReqContext | Keys, next_use: str) -> None:  # noqa: B027
        """Say when blocks will be used next, once that is known; a request's blocks also after it has ended.

        The default does nothing: a hint is soft.

        Parameters
        ----------
        request_or_keys : ReqContext or iterable of bytes
            A request that runs or has ended, for all keys that it has used; or keys in prefix order, of which unknown
            ones are ignored.
        next_use : str
            ``"end"`` (never), ``"soon"`` (within a minute) or ``"later"``.

        Raises
        ------
        ValueError
            `next_use` is none of the three; nothing has changed.

        Notes
        -----
        Uses of a running request that follow carry the hint, too, and it replaces what the request said before. What
        is held at priority 2 or 3 stays so.
        """

    def on_schedule_end(self) -> None:  # noqa: B027
        """Called at the end of a scheduler step."""

    def reset_cache(self) -> None:
        """Forget everything; the caller has drained or dropped older jobs.

        Raises
        ------
        NotImplementedError
            This manager cannot: stale blocks must not pass for forgotten ones.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot be reset")

    def shutdown(self) -> None:
        """Release resources, and close what reports and what records the manager."""
        if self.recorder is not None:
            self.recorder.stop()
        if self.telemetry is not None:
            self.telemetry.close()
