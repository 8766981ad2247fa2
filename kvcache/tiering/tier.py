"""Tier: what a place below host memory must answer. Read this first.

A tier keeps copies of whole blocks under their keys. It is driven by one thread, the engine's scheduler, which must
never wait; so every method only looks at memory, posts to queues or takes from them, and the I/O happens in threads
of the tier's own, in the process that owns the pool of host blocks.

The life of a block below host memory::

    host block --submit_store--> (tier I/O) --get_finished--> held: lookup finds it
    host block <--submit_load--- (tier I/O) <---------- held

A *job* is some keys with one host block each. From the moment that a tier takes a job until it reports it in
`get_finished`, the job's host blocks belong to the tier: the caller keeps a reference on blocks being stored (they stay
readable) and gives nobody the blocks being loaded into. Therefore the one promise that a tier must keep, whatever
goes wrong, is this: **after a job was reported, its host blocks are not touched any more.** A job that hangs is
reported when it ends, and not before; deadlines, and what they mean to a request, are the manager's
(`kvcache.tiering.manager`), and so are circuit breakers, write policies and events. A tier that loses a job for ever
costs the manager the job's blocks, which is why the manager bounds how many it has under way.

`host_blocks` is the pool as a two-dimensional array of bytes, one row per block, each row contiguous:
`HostPool.array` of `kvcache.transfer.host_pool`, or any writable numpy array of that shape.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from kvcache.metrics import counter, flag, gauge

if TYPE_CHECKING:
    import numpy.typing as npt

    from kvcache.options import Options
    from kvcache.request import ReqContext

    HostBlocks = npt.NDArray[np.uint8] | npt.NDArray[np.int8]


@dataclass(frozen=True, slots=True)
class TierResult:
    """The end of one job, or what happened in the tier without one.

    Parameters
    ----------
    job_id : int or None
        As given to `submit_store` or `submit_load`. None: no job did this; then `done` are blocks that the tier found
        when it was opened, and `removed` are blocks that left by themselves.
    done : list of bytes
        Keys whose blocks were written, or read and verified. A key that was already held when it was to be stored
        is in neither list.
    failed : list of bytes
        Keys whose blocks were not. A host block of a failed load holds garbage.
    removed : list of bytes
        Keys that left the tier with this job: they made room, or were found bad.
    error : str
        Why I/O failed; empty if it did not. A block that was merely gone, or bad, is no I/O failure.
    start_s, end_s : float, optional
        When the job was taken, and when its last byte had moved; seconds on any one clock that never goes back. None:
        not known, and then the manager takes when it sent the job and when it was reported.
    """

    job_id: int | None
    done: list[bytes] = field(default_factory=list)
    failed: list[bytes] = field(default_factory=list)
    removed: list[bytes] = field(default_factory=list)
    error: str = ""
    start_s: float | None = None
    end_s: float | None = None


@dataclass(frozen=True, slots=True)
class TierStats:
    """Gauges now and counters since start of one tier, by its `medium`; `kvcache.metrics.metrics_of` describes each.

    All count blocks, but `io_errors`. `unavailable_reason` is empty while the tier works, `last_error` before a fault.
    """

    medium: str
    num_blocks: int = gauge(
        "blocks", "Blocks that fit; 0 where the medium decides.", exported="capacity_blocks", is_sized=True
    )
    num_held: int = gauge("blocks", "Blocks that the tier holds.", exported="held_blocks", is_sized=True)
    stored_blocks: int = counter("blocks", "Blocks that were written.", is_sized=True)
    loaded_blocks: int = counter("blocks", "Blocks that were read and verified.", is_sized=True)
    evicted_blocks: int = counter("blocks", "Blocks that made room for others.", is_sized=True)
    missed_blocks: int = counter("blocks", "Blocks that were to be read and were gone.")
    corrupt_blocks: int = counter(
        "blocks", "Blocks that were not what had been written; they are computed again.", "Replace the medium."
    )
    refused_blocks: int = counter("blocks", "Blocks turned away by a full queue or an unavailable tier.")
    io_errors: int = counter("operations", "Reads, writes and other operations that failed.")
    last_error: str = ""
    unavailable_reason: str = flag(
        "Whether the tier does not work, or is left alone after failures.", exported="unavailable"
    )


@dataclass(frozen=True, slots=True)
class CodecTierStats(TierStats):
    """`TierStats` of a tier with a codec, and the codec's name and counters.

    `raw_bytes` divided by `code_bytes` is the ratio.
    """

    codec: str = ""
    encoded_blocks: int = counter("blocks", "Blocks that a codec encoded.")
    unencodable_blocks: int = counter("blocks", "Blocks that a codec could not encode; they are not stored.")
    decoded_blocks: int = counter("blocks", "Blocks that a codec decoded and that verified.")
    raw_bytes: int = counter("bytes", "Bytes of the encoded blocks before encoding.")
    code_bytes: int = counter("bytes", "Bytes of the encoded blocks after encoding.")
    encode_s: float = counter("seconds", "Time of I/O threads in the encoder.", exported="encode_seconds")
    decode_s: float = counter("seconds", "Time of I/O threads in the decoder.", exported="decode_seconds")


class Tier(ABC):
    """A place below host memory.

    Attributes
    ----------
    options_type : type of Options or None
        Of the class: the options that `from_config` reads.
    medium : str
        The medium's name in events: ``"DISK"``.
    max_queued_blocks : int or None
        Blocks under way at most; a manager sends no more, and lets others wait. None: the tier has no bound of its own.

    Notes
    -----
    No method waits for I/O or raises because of it. All are called by one thread at a time, but `stats`, which any
    thread may call meanwhile.
    """

    options_type: ClassVar[type[Options] | None] = None
    medium: str
    max_queued_blocks: int | None = None

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        """Check `options` as `from_config` does, without opening anything; by default with `options_type`.

        Raises
        ------
        ValueError
            An option is missing, unknown or invalid.
        """
        if cls.options_type is not None:
            cls.options_type.read(options)

    @classmethod
    def unavailable_reason(cls, options: Mapping[str, Any]) -> str:
        """Return why a tier with these `options`, checked, cannot be used now, or "". May wait; changes nothing."""
        return ""

    @classmethod
    def from_config(cls, options: Mapping[str, Any], host_blocks: HostBlocks, fingerprint: Mapping[str, Any]) -> Tier:
        """Return the tier that a user configured, opened.

        Parameters
        ----------
        options : mapping
            The tier's entry of ``extra_config["tiers"]`` without ``type`` and what the manager itself reads.
        host_blocks : numpy.ndarray
            The pool, uint8 or int8, shape (num_blocks, block_bytes).
        fingerprint : mapping
            What makes blocks of one model and geometry different from another's.

        Raises
        ------
        ValueError
            An option is unknown or has a bad value.
        """
        raise NotImplementedError(f"{cls.__name__} cannot be made from a configuration")

    @abstractmethod
    def lookup(self, keys: list[bytes]) -> int | None:
        """Return how many of the first keys are held and can be loaded; None: ask again, the answer is on its way."""

    @abstractmethod
    def submit_store(self, job_id: int, keys: list[bytes], block_ids: list[int]) -> bool:
        """Start to write host blocks; return False if the tier is busy or unavailable, and took nothing.

        Parameters
        ----------
        job_id : int
            Not under way.
        keys : list of bytes
            Blocks to store.
        block_ids : list of int
            Where they are in host memory.
        """

    @abstractmethod
    def submit_load(self, job_id: int, keys: list[bytes], block_ids: list[int]) -> bool:
        """Start to read blocks into host blocks; return False if the tier is busy or unavailable, and took nothing.

        Parameters
        ----------
        job_id : int
            Not under way.
        keys : list of bytes
            Blocks to load.
        block_ids : list of int
            Where to put them in host memory.
        """

    @abstractmethod
    def get_finished(self) -> list[TierResult]:
        """Return the jobs that ended since the last call, each once, and what happened without a job."""

    def cancel(self, job_id: int) -> None:  # noqa: B027
        """Called when nobody waits for `job_id` any more: what has not begun may fail now. The default does nothing."""

    @abstractmethod
    def reset(self) -> None:
        """Forget every block; jobs under way are still reported, and leave nothing behind.

        The tier serves nothing until that is done. What would bring blocks back when the process is killed after
        this call must be out of the way before it returns; what takes longer goes on, and is `unavailable_reason`.
        """

    @abstractmethod
    def stats(self) -> TierStats:
        """Return counters since start and gauges now."""

    @abstractmethod
    def shutdown(self) -> None:
        """Stop the threads and release resources; the only method that may wait, and never for ever."""

    def touch(self, keys: list[bytes], req_context: ReqContext | None = None) -> None:  # noqa: B027
        """Called when a request uses `keys`, in prefix order; unknown ones are ignored. The default does nothing."""

    def on_request_finished(self, req_context: ReqContext) -> None:  # noqa: B027
        """Called at a request's end. The default does nothing."""


def checked_host_blocks(host_blocks: object) -> HostBlocks:
    """Return `host_blocks` if it is a writable array of bytes, a contiguous row per block; ValueError otherwise."""
    if (
        not isinstance(host_blocks, np.ndarray)
        or host_blocks.ndim != 2
        or host_blocks.dtype.itemsize != 1
        or not host_blocks.size
        or host_blocks.strides[1] != 1
        or not host_blocks.flags.writeable
    ):
        shape = (getattr(host_blocks, "dtype", type(host_blocks).__name__), getattr(host_blocks, "shape", ""))
        raise ValueError(f"host_blocks must be a writable array of bytes, shape (num_blocks, block_bytes), got {shape}")
    return host_blocks
