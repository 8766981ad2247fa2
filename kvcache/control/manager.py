"""The contract between an engine's scheduler and an offloading cache."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any

from kvcache.epoch import check_version
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
        The source of exporters, if a spec created the manager. Closed by `shutdown`.
    recorder : kvcache.recorder.recorder.Recorder or None
        The recorder of the manager's calls. Stopped by `shutdown`.
    hints : kvcache.control.hints.HintBoard or None
        Executes the hints of clients and routers, if an engine drives it.

    Notes
    -----
    `keys` is any iterable of keys in prefix order and is consumed once; a list is the fast path. `req_context` is the
    request of a call, if it has one. Errors are raised before anything changes: ValueError for a bad argument, KeyError
    for an unknown key, BlockStateError for a wrong reference count or state. A subclass must implement `lookup`,
    `prepare_load` and `prepare_store`. The other methods have defaults.
    """

    block_size: int
    medium: str
    telemetry: Any = None
    recorder: Any = None
    hints: Any = None
    _next_version: str | int | None = None

    @abstractmethod
    def lookup(self, keys: Any, req_context: ReqContext | None = None) -> bool | int | None:
        """Return whether one key is offloaded and ready, or how many leading keys of a list or tuple are.

        Parameters
        ----------
        keys : bytes, or list or tuple of bytes
            One key, or a request's keys in prefix order.
        req_context : ReqContext, optional
            The request.
        key
            Keyword for one key, as engines name it, in place of `keys`. The managers of this package accept it.

        Returns
        -------
        bool, int or None
            For one key, True or False. For several keys, the length of the longest ready prefix. None means "ask again
            later": a lower tier has not answered yet. A manager without tiers never returns None.
        """

    @abstractmethod
    def prepare_load(self, keys: Keys, req_context: ReqContext | None = None) -> LoadStoreSpec:
        """Take a reference on each block, until `complete_load`, and return the blocks' locations, in key order.

        Raises
        ------
        KeyError, BlockStateError
            A key is unknown, or its block is not ready. No reference is taken.
        """

    def touch(self, keys: Keys, req_context: ReqContext | None = None) -> None:  # noqa: B027
        """Mark blocks as recently used, the first of `keys` as the most recent. Unknown keys are ignored."""

    def complete_load(self, keys: Keys, req_context: ReqContext | None = None) -> None:  # noqa: B027
        """Release the references that `prepare_load` took.

        Raises
        ------
        KeyError, BlockStateError
            A key is unknown, or has fewer references than the call releases. Nothing changes.
        """

    @abstractmethod
    def prepare_store(self, keys: Keys, req_context: ReqContext | None = None) -> PrepareStoreOutput | None:
        """Reserve slots for the absent keys, and return where to write them.

        Returns
        -------
        PrepareStoreOutput or None
            None if the blocks do not fit. Then nothing changes.
        """

    def complete_store(  # noqa: B027
        self, keys: Keys, req_context: ReqContext | bool | None = None, success: bool = True
    ) -> None:
        """Mark written blocks as ready, or drop them if `success` is False. Unknown keys are ignored."""

    def stats(self) -> ManagerStats:
        """Return counters since the start and current gauges. All are 0 if a manager counts nothing."""
        return ManagerStats()

    def parts(self) -> list[Part]:
        """Return all statistics by component, the manager's own first. May be called from any thread."""
        return [Part("", self.stats())]

    def take_events(self) -> Iterator[OffloadingEvent]:
        """Yield the events since the last call, each once."""
        return iter(())

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Called when a request begins. Return how its blocks are offloaded."""
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:  # noqa: B027
        """Called when a request has ended."""

    def hint(self, request_or_keys: ReqContext | Keys, next_use: str) -> None:  # noqa: B027
        """Set when blocks will be used next. For a request's blocks, this also works after the request has ended.

        The default does nothing: a hint is soft.

        Parameters
        ----------
        request_or_keys : ReqContext or iterable of bytes
            A running or ended request, for all keys that it has used, or keys in prefix order. Unknown keys are
            ignored.
        next_use : str
            ``"end"`` (never), ``"soon"`` (within a minute) or ``"later"``.

        Raises
        ------
        ValueError
            `next_use` is not one of the three values. Nothing changes.

        Notes
        -----
        The hint also covers later uses of a running request, and replaces earlier hints. Under `lru` and
        `arc`, ``"end"`` moves the given keys, or the blocks that only the request has used at its end, to the end of
        their list that is evicted first.
        """

    def prefetch(self, keys: Keys) -> str:
        """Begin to bring blocks from lower tiers into host memory, without a request for them.

        Return ``"accepted"``, ``"clipped"`` (only the first blocks fit), ``"deferred"`` (call again for the rest),
        ``"missing"`` (no tier holds the first one) or ``"rejected"``, as by a manager without tiers.
        """
        return "rejected"

    def demote(self, keys: Keys, req_context: ReqContext | None = None) -> str:
        """Write blocks to lower tiers now if their rule is to write them, and evict them from host memory first.

        Return an answer as `prefetch` does, ``"missing"`` if host memory has none of them. With the ended request that
        used the blocks, only those that no other request has used leave first.
        """
        return "rejected"

    def on_schedule_end(self) -> None:  # noqa: B027
        """Called at the end of a scheduler step."""

    def reset_cache(self, version: str | int | None = None) -> None:
        """Forget everything. Before, the caller must drain or drop older jobs.

        An open request may have computed its blocks before: its stores get an empty output until it ends. It may load.

        Parameters
        ----------
        version : str or int, optional
            Names the weights that later blocks are computed with, as the number of an update. Engines that are reset to
            one version share blocks through stores and pools again, and a start with this `weights_version` finds its
            blocks on disk. None: the name of `name_next_version`, or else
            these blocks belong to this process alone.

        Raises
        ------
        NotImplementedError
            This manager cannot be reset. Otherwise, stale blocks would count as forgotten.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot be reset")

    def name_next_version(self, version: str | int | None) -> None:
        """Name the weights in force after the next reset, for engines whose reset has no version; from any thread.

        Parameters
        ----------
        version : str, int or None
            The name; a later one replaces it. The next reset uses it up, also a reset that has a version of its own.
            None: the name is withdrawn, for an update that failed.

        Raises
        ------
        ValueError
            `version` is empty, or of another type. Nothing changes.
        """
        self._next_version = None if version is None else check_version(version)

    def version_of_reset(self, version: str | int | None) -> str | int | None:
        """Return the version for a reset that begins now, and forget the name set by `name_next_version`.

        Parameters
        ----------
        version : str, int or None
            That of the reset itself.

        Returns
        -------
        str, int or None
            `version`, or else the name.
        """
        if version is not None:
            check_version(version)
        name, self._next_version = self._next_version, None
        return name if version is None else version

    def shutdown(self) -> None:
        """Release resources, close the telemetry and stop the recorder."""
        if self.telemetry is not None:
            self.telemetry.close()  # before: its status socket may start a recording
        if self.recorder is not None:
            self.recorder.stop()
