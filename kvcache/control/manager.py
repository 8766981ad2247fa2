"""The contract between an engine's scheduler and an offloading cache."""

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
    """An offloading cache, as an engine's scheduler uses it.

    Attributes
    ----------
    block_size : int
        Tokens of one offloaded block.
    medium : str
        The medium of the blocks.
    telemetry : kvcache.control.telemetry.Telemetry or None
        The source of exporters, if a spec has made the manager; closed by `shutdown`.
    recorder : kvcache.recorder.recorder.Recorder or None
        The recorder of the manager's calls; stopped by `shutdown`.

    Notes
    -----
    `keys` is any iterable of keys in prefix order, consumed once; a list is the fast path. `req_context` is the request
    of a call, if it has one. Errors are raised before anything changes: ValueError for a bad argument, KeyError for an
    unknown key, BlockStateError for a wrong reference count or state. A subclass must implement `lookup`,
    `prepare_load` and `prepare_store`; the rest has defaults.
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
            For one key, True or False; for several, the length of the longest ready prefix. None: ask again
            later, because a lower tier has not answered yet. A manager without tiers never returns None.
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
        """Reserve slots for the absent keys, and return where to write them.

        Returns
        -------
        PrepareStoreOutput or None
            None: the blocks do not fit; nothing has changed.
        """

    def complete_store(  # noqa: B027
        self, keys: Keys, req_context: ReqContext | bool | None = None, success: bool = True
    ) -> None:
        """Make written blocks ready, or drop them if `success` is False; unknown keys are ignored."""

    def stats(self) -> ManagerStats:
        """Return counters since start and gauges now; all 0 if a manager counts nothing."""
        return ManagerStats()

    def parts(self) -> list[Part]:
        """Return all statistics by component, the manager's own first; callable in any thread."""
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
        """Set when blocks will be used next; for a request's blocks also after it has ended.

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
            `next_use` is not one of the three; nothing has changed.

        Notes
        -----
        The hint also covers later uses of a running request, and replaces earlier hints. Blocks of priority 2 or 3
        keep it.
        """

    def on_schedule_end(self) -> None:  # noqa: B027
        """Called at the end of a scheduler step."""

    def reset_cache(self) -> None:
        """Forget everything; the caller has drained or dropped older jobs.

        Raises
        ------
        NotImplementedError
            This manager cannot be reset: stale blocks must not count as forgotten.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot be reset")

    def shutdown(self) -> None:
        """Release resources, stop the recorder and close the telemetry."""
        if self.recorder is not None:
            self.recorder.stop()
        if self.telemetry is not None:
            self.telemetry.close()
