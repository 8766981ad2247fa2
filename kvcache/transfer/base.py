"""The interface of handlers: each one runs an engine's copies of one direction.

A handler checks a job in the call that submits it. Later errors do not raise in the engine's thread; `get_finished`
reports them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Iterable

from kvcache.specs import CPULoadStoreSpec, GPULoadStoreSpec, LoadStoreSpec, TransferResult

TransferSpec = tuple[LoadStoreSpec, LoadStoreSpec]
"""Source and destination of a job's blocks."""


class OffloadingHandler(ABC):
    """Moves blocks in one direction, in the order in which the jobs were submitted."""

    @abstractmethod
    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        """Start a job and return before it ends.

        Parameters
        ----------
        job_id : int
            Identifies the job until `get_finished` has returned it.
        spec : tuple of (LoadStoreSpec, LoadStoreSpec)
            Source and destination; may be reused as soon as the call returns.

        Returns
        -------
        bool
            True: `get_finished` will return the job. False: the handler refuses the job.

        Raises
        ------
        ValueError
            The specs do not fit the geometry or each other, or the id is in use; no byte has moved.
        """

    @abstractmethod
    def get_finished(self) -> list[TransferResult]:
        """Return the jobs that ended since the last call, in the order of their submission; each one once."""

    @abstractmethod
    def wait(self, job_ids: Iterable[int]) -> None:
        """Return once the jobs `job_ids` have ended; unknown and ended ones are ignored.

        `get_finished` still returns them.
        """

    def shutdown(self, wait: bool = True) -> None:  # noqa: B027
        """Refuse further jobs, and return when none is in flight; does nothing by default.

        With `wait`, jobs in flight run to their end; otherwise they are reported as failed.
        """


def check_job_id(job_id: int, in_flight: Container[int]) -> None:
    """Raise ValueError if `job_id` is not an int64 or is in flight."""
    if type(job_id) is not int or not -(1 << 63) <= job_id < 1 << 63:
        raise ValueError(f"job_id must be an int64, got {job_id!r}")
    if job_id in in_flight:
        raise ValueError(f"job_id {job_id} is in flight")


def checked_pair(spec: TransferSpec) -> TransferSpec:
    """Return the two sides of a job, or raise ValueError if it is not a pair of specs."""
    if not isinstance(spec, tuple) or [isinstance(side, LoadStoreSpec) for side in spec] != [True, True]:
        raise ValueError(f"a transfer is a tuple of two LoadStoreSpecs, source and destination, got {spec!r}")
    return spec


def checked_specs(spec: TransferSpec, to_host: bool) -> tuple[GPULoadStoreSpec, CPULoadStoreSpec]:
    """Return the device's and the host's side of a job, or raise ValueError if they are not these two."""
    # The common case first: isinstance of an abstract class is slow.
    if isinstance(spec, tuple) and len(spec) == 2:
        device, host = spec if to_host else spec[::-1]
        if isinstance(device, GPULoadStoreSpec) and isinstance(host, CPULoadStoreSpec):
            return device, host
    source, destination = checked_pair(spec)
    want = "(GPULoadStoreSpec, CPULoadStoreSpec)" if to_host else "(CPULoadStoreSpec, GPULoadStoreSpec)"
    raise ValueError(f"this handler's jobs are {want}, got ({type(source).__name__}, {type(destination).__name__})")
