"""One request of a replay, and what every source of requests offers.

Readers, the workload generator and the simulation meet in these words.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt

    Int64Array = npt.NDArray[np.int64]


class ReplayError(Exception):
    """A replay has failed; nothing that it counted is worth keeping."""


class DataMismatchError(ReplayError):
    """A block came back with other bytes than were stored."""


class TransferFailedError(ReplayError):
    """A handler reported that it could not move blocks."""


class TraceError(ValueError):
    """A trace cannot be read; the message says which file, which line and what stands there."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request, as a trace lists it.

    Parameters
    ----------
    hash_ids : numpy.ndarray
        Prefix-chained ids of the prompt's blocks, head to tail; int64, shape (n,).
    input_length : int
        Tokens of the prompt.
    output_length : int
        Tokens of the answer; 0 where the trace does not say.
    arrival_s : float
        Seconds since the trace began.
    """

    hash_ids: Int64Array
    input_length: int
    output_length: int
    arrival_s: float


class Closable(ABC):
    """What a `with` statement closes."""

    @abstractmethod
    def close(self) -> None:
        """Close what is open."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RequestSource(Protocol):
    """Requests in order of arrival, with the number of tokens that one of their ids stands for."""

    @property
    def block_size(self) -> int:
        """Tokens of one listed block."""

    def __iter__(self) -> Iterator[Request]:
        """Yield the requests."""


class TraceFile(Closable):
    """Requests that are read from a file or folder, once: a context manager and an iterator.

    Attributes
    ----------
    name : str
        The path's name, for a title.
    format : str
        The format in use.
    block_size : int
        Tokens that one id stands for.
    num_skipped : int
        Bad lines or sessions that were passed over so far.
    size_bytes : int
        Of all files as they lie on disk, at least 1; a pipe's is not known.
    """

    path: Path
    name: str
    format: str
    block_size: int
    num_skipped: int
    size_bytes: int

    @property
    @abstractmethod
    def position_bytes(self) -> int:
        """How much of `size_bytes` has been read; 0 where the file is a pipe."""

    @abstractmethod
    def __iter__(self) -> Iterator[Request]:
        """Yield the requests in order of arrival."""
