"""Events: which blocks came to a medium or left it, and which jobs have ended.

A router or an exporter keeps a view of the cache from them, in the order in which `kvcache.core.event_log` numbers
them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(slots=True)
class OffloadingEvent:
    """Blocks that came to a medium (`removed` False) or left it (`removed` True).

    Parameters
    ----------
    keys : list of bytes
        The blocks.
    block_size : int
        Tokens of one block.
    medium : str
        The medium's name.
    removed : bool
        Whether they left.
    number : int
        Place in the manager's log, from 1 on. A gap means that events were dropped, or a reset. Not compared.
    """

    keys: list[bytes]
    block_size: int
    medium: str
    removed: bool
    number: int = field(default=0, compare=False)

    @property
    def block_hashes(self) -> list[bytes]:
        """The older name of `keys`."""
        return self.keys


@dataclass(frozen=True, slots=True)
class FinishedJob:
    """A job of a tier or a transfer that has ended, for tracing.

    Parameters
    ----------
    name : str
        ``"promotion"``, ``"write"`` or ``"transfer"``.
    medium : str
        The tier's, or ``"GPU -> CPU"``.
    num_blocks, num_bytes : int
        How much it moved; 0: not known.
    end_s, seconds : float
        When it ended, since the epoch, and how long it took.
    error : str
        Why it failed; empty if it did not.
    """

    name: str
    medium: str
    num_blocks: int
    num_bytes: int
    end_s: float
    seconds: float
    error: str = ""


class JobLog:
    """A bounded queue of jobs that have ended; jobs that do not fit are counted.

    Parameters
    ----------
    max_jobs : int
        Jobs kept.
    """

    def __init__(self, max_jobs: int = 10_000) -> None:
        self._jobs: deque[FinishedJob] = deque()
        self.max_jobs = max_jobs
        self.num_dropped = 0

    def add(self, job: FinishedJob) -> None:
        """Append a job, or count it as dropped."""
        if len(self._jobs) < self.max_jobs:
            self._jobs.append(job)
        else:
            self.num_dropped += 1

    def take(self) -> Iterator[FinishedJob]:
        """Take the jobs out, oldest first; for one thread beside those that add."""
        while self._jobs:
            yield self._jobs.popleft()
