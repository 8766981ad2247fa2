"""A codec around any tier: blocks are encoded on their way down and decoded on their way up, in threads.

The tier below sees blocks of its own: rows of a staging area, each with a header, the code and nothing behind it. The
header carries two checksums, of the code and of what it decodes to, so that what is stored is verified and so is what
comes back, with a lossy codec too. Stages of a job are passed on by whoever calls `get_finished`, and only look at
memory: encoding, decoding and I/O happen in threads.
"""

from __future__ import annotations

import mmap
import struct
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np

from kvcache.options import parse_count, parse_size
from kvcache.registry import CODECS, TIERS
from kvcache.tiering.checksum import checksum
from kvcache.tiering.io_threads import LOAD, STORE, IOThreads
from kvcache.tiering.job_tier import JobTier
from kvcache.tiering.tier import Tier, TierResult, TierStats, checked_host_blocks
from kvcache.tiers.codecs.base import CannotEncodeError, Codec

if TYPE_CHECKING:
    from kvcache.request import ReqContext
    from kvcache.tiering.tier import HostBlocks

_HEADER = struct.Struct("<8sQQQ")
_MAGIC = b"kvcodec1"
_ROW_ALIGNMENT = 4096
_MAX_PART_BLOCKS = 16
_SHUTDOWN_S = 5.0
_OWN_OPTIONS = ("codec", "staging", "codec_threads")


@dataclass(frozen=True, slots=True)
class CodecTierStats(TierStats):
    """`TierStats` of the tier below, and what its codec did.

    Parameters
    ----------
    codec : str
        Its name.
    encoded_blocks, unencodable_blocks, decoded_blocks : int
        Counters; what cannot be encoded is refused.
    raw_bytes, code_bytes : int
        Of the encoded blocks, before and after: their quotient is the ratio.
    encode_s, decode_s : float
        Time in threads.
    """

    codec: str = ""
    encoded_blocks: int = 0
    unencodable_blocks: int = 0
    decoded_blocks: int = 0
    raw_bytes: int = 0
    code_bytes: int = 0
    encode_s: float = 0.0
    decode_s: float = 0.0


class _Job:
    """A job of the caller's: what has not begun, what is under way, and the outcome so far."""

    __slots__ = ("done", "error", "failed", "is_cancelled", "is_load", "num_left", "removed")

    def __init__(self, is_load: bool, num_blocks: int) -> None:
        self.is_load = is_load
        self.num_left = num_blocks
        self.is_cancelled = False
        self.done: list[bytes] = []
        self.failed: list[bytes] = []
        self.removed: list[bytes] = []
        self.error = ""


class _Part:
    """Some blocks of a job, each with a row of the staging area while it has begun."""

    def __init__(self, tier: CodecTier, job_id: int, job: _Job, keys: list[bytes], block_ids: list[int]) -> None:
        self.job_id, self.job = job_id, job
        self.keys, self.block_ids = keys, block_ids
        self.rows: list[int] = []
        self.is_good: list[bool] = []
        self.num_code_bytes = 0
        self.seconds = 0.0
        self.error = ""
        self.generation = tier.generation
        self._tier = tier

    def run(self) -> None:
        start = time.perf_counter()
        step = self._tier.decode_row if self.job.is_load else self._tier.encode_row
        for key, block_id, row in zip(self.keys, self.block_ids, self.rows, strict=True):
            num_bytes = step(key, block_id, row)
            self.is_good.append(num_bytes > 0)
            self.num_code_bytes += num_bytes
        self.seconds = time.perf_counter() - start


class CodecTier(Tier):
    """Keep blocks in another tier, encoded.

    Parameters
    ----------
    codec : Codec
        What encodes a block of `host_blocks`.
    name : str
        The codec's, for statistics.
    open_tier : callable
        Given the staging area as its pool of host blocks and what to add to its fingerprint, returns the tier below.
    host_blocks : numpy.ndarray
        The pool, uint8 or int8, shape (num_blocks, block_bytes).
    staging_bytes : int
        Encoded blocks on their way at most; what does not fit waits.
    num_threads : int
        Blocks encoded or decoded at the same time.
    max_queued_blocks : int
        Blocks under way at most; more are refused.
    """

    def __init__(
        self,
        codec: Codec,
        name: str,
        open_tier: Any,
        host_blocks: HostBlocks,
        *,
        staging_bytes: int = 64 << 20,
        num_threads: int = 2,
        max_queued_blocks: int = 4096,
    ) -> None:
        self._host_rows = checked_host_blocks(host_blocks).view(np.uint8)
        self._codec, self._name = codec, name
        self._block_bytes = host_blocks.shape[1]
        row_bytes = -(-(_HEADER.size + codec.max_bytes) // _ROW_ALIGNMENT) * _ROW_ALIGNMENT
        num_rows = max(_MAX_PART_BLOCKS, staging_bytes // row_bytes)
        self._staging = np.frombuffer(mmap.mmap(-1, num_rows * row_bytes), np.uint8).reshape(num_rows, row_bytes)
        self._free = list(range(num_rows))
        self.max_queued_blocks: int = max_queued_blocks
        self.generation = 0
        self._num_queued = 0
        self._jobs: dict[int, _Job] = {}
        self._waiting: tuple[deque[_Part], deque[_Part]] = (deque(), deque())
        self._below: dict[int, _Part] = {}
        self._inner_ids = count(1)
        self._results: list[TierResult] = []
        self._bad: set[bytes] = set()
        self._counts: dict[str, int] = dict.fromkeys(
            ("encoded", "unencodable", "decoded", "raw", "code", "corrupt", "refused"), 0
        )
        self._seconds = {"encode": 0.0, "decode": 0.0}
        self._is_shut = False
        self._tier: Tier = open_tier(self._staging, codec.fingerprint)
        self.medium = self._tier.medium
        self._threads: IOThreads[_Part] = IOThreads(num_threads, f"kvcache-{name}")

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        tier, codec, given = _parse(options)
        codec[0].from_config(codec[1], 0)
        for name, parse in (("staging", parse_size), ("codec_threads", parse_count)):
            if options.get(name) is not None:
                parse(f"{name} of a tier with a codec", options[name])
        tier.check_options(given)

    @classmethod
    def from_config(
        cls, options: Mapping[str, Any], host_blocks: HostBlocks, fingerprint: Mapping[str, Any]
    ) -> CodecTier:
        cls.check_options(options)
        tier, (codec, codec_options), given = _parse(options)
        limits: dict[str, int] = {}
        if options.get("staging") is not None:
            limits["staging_bytes"] = parse_size("staging", options["staging"])
        if options.get("codec_threads") is not None:
            limits["num_threads"] = parse_count("codec_threads", options["codec_threads"])
        return cls(
            codec.from_config(codec_options, checked_host_blocks(host_blocks).shape[1]),
            str(options["codec"]["type"]),
            lambda staging, added: tier.from_config(given, staging, {**fingerprint, **added}),
            host_blocks,
            **limits,
        )

    def __repr__(self) -> str:
        return f"CodecTier({self._name!r}, {self._tier!r})"

    def lookup(self, keys: list[bytes]) -> int | None:
        if self._bad:
            keys = keys[: next((i for i, key in enumerate(keys) if key in self._bad), len(keys))]
        return self._tier.lookup(keys)

    def touch(self, keys: list[bytes], req_context: ReqContext | None = None) -> None:
        self._tier.touch(keys, req_context)

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._tier.on_request_finished(req_context)

    def submit_store(self, job_id: int, keys: list[bytes], block_ids: list[int]) -> bool:
        return self._submit(job_id, keys, block_ids, False)

    def submit_load(self, job_id: int, keys: list[bytes], block_ids: list[int]) -> bool:
        return self._submit(job_id, keys, block_ids, True)

    def get_finished(self) -> list[TierResult]:
        for result in self._tier.get_finished():
            if result.job_id is None:
                self._results.append(result)
            else:
                self._take_result(self._below.pop(result.job_id), result)
        while (part := self._threads.get_finished()) is not None:
            self._take_coded(part)
        self._advance()
        results, self._results = self._results, []
        return results

    def cancel(self, job_id: int) -> None:
        job = self._jobs.get(job_id)
        if job is None:
            return
        job.is_cancelled = True
        for inner_id, part in self._below.items():
            if part.job is job:
                self._tier.cancel(inner_id)
        self._drop_waiting(lambda part: part.job is job)

    def reset(self) -> None:
        self.generation += 1
        self._bad.clear()
        self._tier.reset()
        self._drop_waiting(lambda part: True)

    def stats(self) -> CodecTierStats:
        below = self._tier.stats()
        counts, values = self._counts, {one.name: getattr(below, one.name) for one in fields(TierStats)}
        values["corrupt_blocks"] += counts["corrupt"]
        values["loaded_blocks"] -= counts["corrupt"]
        values["refused_blocks"] += counts["unencodable"] + counts["refused"]
        return CodecTierStats(
            **values,
            codec=self._name,
            encoded_blocks=counts["encoded"],
            unencodable_blocks=counts["unencodable"],
            decoded_blocks=counts["decoded"],
            raw_bytes=counts["raw"],
            code_bytes=counts["code"],
            encode_s=self._seconds["encode"],
            decode_s=self._seconds["decode"],
        )

    def shutdown(self) -> None:
        if not self._is_shut:
            self._is_shut = True
            self._threads.close(_SHUTDOWN_S)
            self._tier.shutdown()

    # What threads call.

    def encode_row(self, key: bytes, block_id: int, row: int) -> int:
        """Encode a host block into a row of the staging area; return its bytes, 0 if it cannot be encoded."""
        block, target = self._host_rows[block_id].data, self._staging[row].data
        code_start = _HEADER.size
        try:
            num_bytes = self._codec.encode(block, target[code_start : code_start + self._codec.max_bytes])
        except CannotEncodeError:
            return 0
        code = target[code_start : code_start + num_bytes]
        decoded = block
        if self._codec.is_lossy:
            decoded = memoryview(bytearray(self._block_bytes))
            self._codec.decode(code, decoded)
        sums = checksum(key, code, num_bytes, 0), checksum(key, decoded, self._block_bytes, 0)
        _HEADER.pack_into(target, 0, _MAGIC, num_bytes, *sums)
        # Nothing of another block goes out with this one.
        self._staging[row, code_start + num_bytes :] = 0
        return num_bytes

    def decode_row(self, key: bytes, block_id: int, row: int) -> int:
        """Decode a row of the staging area into a host block; return its bytes, 0 if it is not what was stored."""
        source, block = self._staging[row].data, self._host_rows[block_id].data
        magic, num_bytes, code_sum, block_sum = _HEADER.unpack_from(source)
        if magic != _MAGIC or not 0 < num_bytes <= self._codec.max_bytes:
            return 0
        code = source[_HEADER.size : _HEADER.size + num_bytes]
        if checksum(key, code, num_bytes, 0) != code_sum:
            return 0
        try:
            self._codec.decode(code, block)
        except ValueError:
            return 0
        return int(num_bytes) if checksum(key, block, self._block_bytes, 0) == block_sum else 0

    # Stages of a job: store: wait, encode, below; load: wait, below, decode.

    def _submit(self, job_id: int, keys: list[bytes], block_ids: list[int], is_load: bool) -> bool:
        if job_id in self._jobs:
            raise ValueError(f"job {job_id} is still under way")
        if len(keys) != len(block_ids):
            raise ValueError(f"{len(keys)} keys need as many block ids, got {len(block_ids)}")
        unavailable = self._is_shut or bool(self._tier.stats().unavailable_reason)
        if unavailable or self._num_queued + len(keys) > self.max_queued_blocks:
            self._counts["refused"] += len(keys)
            return False
        self._num_queued += len(keys)
        job = self._jobs[job_id] = _Job(is_load, len(keys))
        for first in range(0, len(keys), _MAX_PART_BLOCKS):
            last = first + _MAX_PART_BLOCKS
            self._waiting[not is_load].append(_Part(self, job_id, job, keys[first:last], block_ids[first:last]))
        if not keys:
            self._end(job_id, job)
        self._advance()
        return True

    def _advance(self) -> None:
        """Begin what there is room for in the staging area, loads first."""
        for waiting in self._waiting:
            while waiting and len(self._free) >= len(waiting[0].keys):
                part = waiting.popleft()
                part.rows = [self._free.pop() for _ in part.keys]
                if part.job.is_load:
                    self._send_below(part)
                else:
                    self._threads.submit(part, STORE)

    def _send_below(self, part: _Part) -> None:
        inner_id = next(self._inner_ids)
        submit = self._tier.submit_load if part.job.is_load else self._tier.submit_store
        if part.job.is_cancelled or part.generation != self.generation or not submit(inner_id, part.keys, part.rows):
            self._end_part(part, [], part.keys)
        else:
            self._below[inner_id] = part

    def _take_coded(self, part: _Part) -> None:
        what = "decode" if part.job.is_load else "encode"
        self._seconds[what] += part.seconds
        if part.error:
            part.job.error = part.job.error or part.error
            self._end_part(part, [], part.keys)
            return
        good = [key for key, is_good in zip(part.keys, part.is_good, strict=True) if is_good]
        bad = [key for key, is_good in zip(part.keys, part.is_good, strict=True) if not is_good]
        self._counts["decoded" if part.job.is_load else "encoded"] += len(good)
        if part.job.is_load:
            self._counts["corrupt"] += len(bad)
            if isinstance(self._tier, JobTier):
                # A tier that owns its space gives the slot away, and takes the block again.
                self._tier.report_removed(bad)
            else:
                self._bad.update(bad)
            part.job.removed += bad
            self._end_part(part, good, bad)
            return
        self._counts["unencodable"] += len(bad)
        self._counts["raw"] += len(good) * self._block_bytes
        self._counts["code"] += part.num_code_bytes
        if bad:
            self._end_part(part, [], bad, keep=good)
        if good:
            self._send_below(part)

    def _take_result(self, part: _Part, result: TierResult) -> None:
        job = part.job
        job.removed += result.removed
        job.error = job.error or result.error
        if not job.is_load:
            self._bad.difference_update(result.done)
            # A key in neither list was there already.
            self._end_part(part, result.done, result.failed)
            return
        if result.failed:
            self._end_part(part, [], result.failed, keep=result.done)
        if result.done:
            self._threads.submit(part, LOAD)

    def _end_part(self, part: _Part, done: list[bytes], failed: list[bytes], keep: list[bytes] | None = None) -> None:
        """Take the outcome of blocks; all of the part ends but what is kept."""
        job, kept = part.job, set(keep or ())
        job.done += done
        job.failed += failed
        going = [i for i, key in enumerate(part.keys) if key not in kept]
        self._free += [part.rows[i] for i in going if part.rows]
        stay = [i for i, key in enumerate(part.keys) if key in kept]
        num_ended = len(part.keys) - len(stay)
        part.keys, part.block_ids = [part.keys[i] for i in stay], [part.block_ids[i] for i in stay]
        part.rows = [part.rows[i] for i in stay] if part.rows else []
        job.num_left -= num_ended
        self._num_queued -= num_ended
        if not job.num_left:
            self._end(part.job_id, job)

    def _end(self, job_id: int, job: _Job) -> None:
        del self._jobs[job_id]
        self._results.append(TierResult(job_id, job.done, job.failed, job.removed, job.error))

    def _drop_waiting(self, is_dropped: Any) -> None:
        for waiting in self._waiting:
            parts = list(waiting)
            waiting.clear()
            for part in parts:
                if is_dropped(part):
                    self._end_part(part, [], part.keys)
                else:
                    waiting.append(part)


def _parse(options: Mapping[str, Any]) -> tuple[type[Tier], tuple[type[Codec], dict[str, Any]], dict[str, Any]]:
    """Return the tier's class, the codec's with its options, and the tier's options."""
    codec = options.get("codec")
    if not isinstance(codec, Mapping) or "type" not in codec:
        raise ValueError(f"codec must be a dict with a type, one of {', '.join(CODECS.names())}, got {codec!r}")
    if "type" not in options:
        raise ValueError(f"a tier with a codec needs a type, one of {', '.join(TIERS.names())}, got {dict(options)!r}")
    tier, found = TIERS.resolve(options["type"]), CODECS.resolve(codec["type"])
    if not issubclass(found, Codec):
        raise ValueError(f"codec {found.__name__} must be a Codec")
    given = {name: value for name, value in options.items() if name != "type" and name not in _OWN_OPTIONS}
    return tier, (found, {name: value for name, value in codec.items() if name != "type"}), given
