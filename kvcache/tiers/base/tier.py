"""Tier: the interface of a place below host memory. Read this first.

A tier keeps copies of whole blocks under their keys. One thread, the engine's scheduler, calls it and must never wait.
So each method only reads memory and posts to or takes from queues. The I/O happens in the tier's own threads, in the
process that owns the pool of host blocks.

The life of a block below host memory::

    host block --submit_store--> (tier I/O) --get_finished--> held: lookup finds it
    host block <--submit_load--- (tier I/O) <---------- held

A *job* is some keys with one host block each. From the moment that a tier takes a job until it reports it in
`get_finished`, the job's host blocks belong to the tier: the caller keeps a reference on blocks being stored (they stay
readable) and reserves the blocks being loaded into. So a tier must keep one promise, whatever fails: **after a job was
reported, the tier does not touch its host blocks any more.** A job that hangs is reported when it ends, and not before.
The manager (`kvcache.tiering.manager`) handles deadlines, circuit breakers, write policies and events. A job that a
tier never reports costs the manager the job's host blocks, so the manager bounds the blocks under way.

`host_blocks` is the pool as a two-dimensional array of bytes, one row per block, each row contiguous:
`HostPool.array` of `kvcache.transfer.host_pool`, or any writable numpy array of that shape.
"""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from kvcache.metrics import counter, flag, gauge
from kvcache.options import Configurable
from kvcache.tiers.base.wear import Wear, describe_wear

MAX_STEP_BLOCKS = 1024
"""Blocks that one scheduler call handles at most, for all tiers together."""

if TYPE_CHECKING:
    import numpy.typing as npt

    from kvcache.request import ReqContext

    HostBlocks = npt.NDArray[np.uint8] | npt.NDArray[np.int8]


@dataclass(frozen=True, slots=True)
class TierResult:
    """The end of one job, or a change in the tier without a job.

    Parameters
    ----------
    job_id : int or None
        As given to `submit_store` or `submit_load`. None: no job; then `done` are blocks that the tier found when it
        was opened, and `removed` are blocks that left without a job.
    done : list of bytes
        Keys of blocks that were written, or read and verified. If a tier holds a key before its store begins, the key
        is neither in `done` nor in `failed`.
    failed : list of bytes
        Keys of the other blocks. A host block of a failed load holds garbage.
    removed : list of bytes
        Keys that left the tier with this job: evicted for it, or found to be bad.
    error : str
        Why I/O failed, or empty. A missing or bad block is not an I/O failure.
    start_s, end_s : float, optional
        When the job was taken, and when its last byte had moved, in seconds of one monotonic clock. None: the manager
        uses the times when it sent the job and when the tier reported it.
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
    """Gauges and counters of one tier; `kvcache.metrics.metrics_of` describes each.

    `medium` is the name in events. `unavailable_reason` is empty while the tier works, `last_error` before the first
    fault.
    """

    medium: str
    num_blocks: int = gauge(
        "blocks", "Blocks that fit; 0 if the medium decides.", exported="capacity_blocks", is_sized=True
    )
    num_held: int = gauge("blocks", "Blocks that the tier holds.", exported="held_blocks", is_sized=True)
    stored_blocks: int = counter("blocks", "Blocks that were written.", is_sized=True)
    loaded_blocks: int = counter("blocks", "Blocks that were read and verified.", is_sized=True)
    evicted_blocks: int = counter("blocks", "Blocks that made room for others.", is_sized=True)
    missed_blocks: int = counter("blocks", "Blocks that a load did not find any more.")
    corrupt_blocks: int = counter(
        "blocks", "Blocks that were not what had been written; they are computed again.", "Replace the medium."
    )
    refused_blocks: int = counter("blocks", "Blocks refused by a full queue or an unavailable tier.")
    io_errors: int = counter("operations", "Reads, writes and other operations that failed.")
    drive_writes: float = gauge("writes", "Writes of the whole capacity in the last day; 0 before a day has passed.")
    life_years: float = gauge(
        "years", "Life of an SSD rated for the budget, or for one drive write a day, at these writes; 0: unknown."
    )
    left_blocks: int = gauge(
        "blocks", "Blocks that the budget of writes covers now.", exported="write_budget_blocks", is_sized=True
    )
    undeleted_blocks: int = gauge(
        "blocks", "About so many blocks of weights that a reset has replaced are in a store and not deleted yet."
    )
    last_error: str = ""
    unavailable_reason: str = flag(
        "Whether the tier fails, or its reads or writes are paused after failures.", exported="unavailable"
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


def describe_tier(tier: TierStats) -> str:
    """Describe a tier at its start. A store's own limit is unknown, and so are its blocks."""
    size = f"{tier.num_blocks:,} blocks, {tier.num_held:,} found" if tier.num_blocks else "unknown size"
    if wear := describe_wear(tier.drive_writes, tier.life_years):
        size += f", {wear}"
    return f"tier {tier.medium} of {size}" + (
        f" (unavailable: {reason})" if (reason := tier.unavailable_reason) else ""
    )


class Tier(Configurable, ABC):
    """A place below host memory; a configuration names it as a `Configurable`.

    Attributes
    ----------
    medium : str
        The medium's name in events: ``"DISK"``.
    max_queued_blocks : int or None
        Blocks under way at most; a manager sends no more. None: no bound.
    cache_policy : str, type or None
        The policy that selects its victims; None: unknown. If a use is too long for one call of `touch`, it is reported
        head first to a policy that keeps paths (``gittins``), and tail first to others.
    uses_arbiter : bool
        Of the class: whether the option `arbiter` of an entry of ``tiers`` is on by default.
    wear : Wear or None
        The writes of a disk, which the tier counts when they end, and their budget; None: the medium does not wear.

    Notes
    -----
    No method but `shutdown` and `delete` waits for I/O, and none raises because of it. One thread at a time calls
    them, except `stats` and `delete`, which any thread may call.
    """

    medium: str
    max_queued_blocks: int | None = None
    cache_policy: str | type | None = None
    uses_arbiter: ClassVar[bool] = False
    wear: Wear | None = None

    @classmethod
    def make(cls, options: Any, host_blocks: HostBlocks, fingerprint: Mapping[str, Any]) -> Self:
        """Open the tier: the constructor of each class that a configuration names takes these three arguments."""
        constructor: Any = cls
        tier: Self = constructor(options, host_blocks, fingerprint)
        return tier

    @abstractmethod
    def lookup(self, keys: list[bytes]) -> int | None:
        """Return how many of the first keys are held and can be loaded; None: not known yet, ask again."""

    @abstractmethod
    def submit_store(self, job_id: int, keys: list[bytes], block_ids: list[int]) -> bool:
        """Start to write the host blocks `block_ids`; return False if the tier is busy or unavailable.

        `job_id` is not under way. If the answer is False, the tier has not taken the job.
        """

    @abstractmethod
    def submit_load(self, job_id: int, keys: list[bytes], block_ids: list[int]) -> bool:
        """Start job `job_id`, which reads blocks into the host blocks `block_ids`. Return False if it is refused."""

    @abstractmethod
    def get_finished(self) -> list[TierResult]:
        """Return the jobs that ended since the last call, each once, and changes without a job."""

    def call_on_end(self, callback: Callable[[], object]) -> None:
        """Call `callback` after work of the tier's threads has ended, from any thread; the default never calls it.

        A caller that may wait then needs no polling. `callback` must neither wait nor raise.
        """

    def cancel(self, job_id: int) -> None:
        """Called when no request waits for `job_id` any more: blocks that have not begun to move may fail now."""

    @abstractmethod
    def reset(self, version: str | int | None = None) -> None:
        """Forget every block. Jobs under way are still reported, and their blocks are not found afterwards.

        The tier serves nothing until that is done. If the process is killed after this call has returned, no old block
        may come back. Slower work goes on after the call and is the `unavailable_reason`.

        `version` names the weights that later blocks are computed with. Without one, these blocks belong to this
        process alone: no other engine finds them, and no later start. See `kvcache.epoch`.
        """

    @abstractmethod
    def stats(self) -> TierStats:
        """Return counters since start and gauges now."""

    @abstractmethod
    def shutdown(self) -> None:
        """Stop the threads and release resources; may wait for a bounded time, as `delete` may."""

    def load_now(self, keys: list[bytes], buffers: list[list[memoryview]]) -> list[bytes]:
        """Load what needs no wait for the medium into `buffers`, and return its keys; by default nothing."""
        return []

    def touch(self, keys: list[bytes], req_context: ReqContext | None = None) -> None:
        """Called when a request uses `keys`, in prefix order; unknown keys are ignored."""

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Called at a request's end."""

    def hint(self, request_or_keys: ReqContext | list[bytes], next_use: str) -> None:
        """Called with a hint that comes after the uses; the default ignores it.

        Parameters
        ----------
        request_or_keys : ReqContext or list of bytes
            The request that used the blocks, which may have ended, or keys in prefix order.
        next_use : str
            ``"end"`` (never), ``"soon"`` or ``"later"``.
        """

    def delete(self, keys: list[bytes], timeout_s: float = 0.0) -> list[bytes]:
        """Forget blocks, and return those that were held; the default forgets none.

        Waits until they stay forgotten over a restart, for `timeout_s` at most. Any thread may call it.
        """
        return []


def host_rows(num_rows: int, row_bytes: int) -> npt.NDArray[np.uint8]:
    """Return new host memory for blocks in huge pages, where the system has them.

    The kernel looks up each page for direct I/O. With pages of 4 KiB, that took more CPU time than the checksum.
    """
    memory = mmap.mmap(-1, num_rows * row_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8).reshape(num_rows, row_bytes)


def checked_host_blocks(host_blocks: object) -> HostBlocks:
    """Return `host_blocks`; raise ValueError unless it is a writable array of bytes, a contiguous row per block."""
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
