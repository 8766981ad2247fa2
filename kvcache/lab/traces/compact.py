"""A whole trace as arrays in files, which all processes of a grid map instead of holding them in memory.

Arrays are read in pieces and their pages given back, so a trace may be larger than memory.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import math
import mmap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from kvcache.lab.traces.keys import mixed, split_block_size
from kvcache.lab.traces.nearest import NextUses
from kvcache.lab.traces.requests import Request

if TYPE_CHECKING:
    import numpy.typing as npt

    from kvcache.lab.traces.requests import Float64Array, Int64Array

_ARRAYS = {"ids": "<i8", "bounds": "<i8", "input_lengths": "<i8", "arrivals_s": "<f8", "output_lengths": "<i8"}
_FACTS = ("block_size", "rate", "all_blocks", "all_tokens", "digest", "num_late")
_PIECE_IDS = 1 << 18
# The ids of a run of the merge sort: 64 MiB, and as much again for their places.
_RUN_IDS = 1 << 23
# Memory per id while its next use is searched, including the growth of the table.
_ID_BYTES = 96
_LEAST_BYTES = 16 << 20
_COUNTED_SHARE = 64
# Sampling and sharding must use different bits of the hash.
_PART_SALT = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class CompactTrace:
    """A whole trace in four arrays.

    `ids` holds the ids of all requests, one after the other; request i has those from ``bounds[i]`` to ``bounds[i +
    1]``, `input_lengths` tokens (of a sample: those of its sampled blocks) and arrives at `arrivals_s`. The tokens of
    answers, `output_lengths`, are None if they do not matter. `rate` is the share of the ids that a sample kept;
    `all_blocks` and `all_tokens` count the whole trace, 0 if it is not a sample. `digest` identifies the trace,
    `num_late` requests were sorted; `folder` holds its files if they are mapped.
    """

    ids: Int64Array
    bounds: Int64Array
    input_lengths: Int64Array
    arrivals_s: Float64Array
    block_size: int
    rate: float = 1.0
    all_blocks: int = 0
    all_tokens: int = 0
    digest: str = field(default="", compare=False)
    num_late: int = field(default=0, compare=False)
    folder: Path | None = field(default=None, compare=False)
    output_lengths: Int64Array | None = field(default=None, compare=False)

    @classmethod
    def of(cls, requests: Iterable[Request], block_size: int) -> CompactTrace:
        """Gather requests in memory."""
        parts, lengths, arrivals = [], [], []
        for request in requests:
            parts.append(request.hash_ids)
            lengths.append(request.input_length)
            arrivals.append(request.arrival_s)
        bounds = np.cumsum([0, *map(len, parts)], dtype=np.int64)
        ids = np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
        return cls(ids, bounds, np.array(lengths, dtype=np.int64), np.array(arrivals, dtype=np.float64), block_size)

    @classmethod
    def spool(
        cls, requests: Iterable[Request], block_size: int, folder: Path, rate: float = 1.0, seed: int = 0
    ) -> CompactTrace:
        """Write requests to files in `folder`, in order of arrival (equal times keep their order), and map them.

        A share `rate` of the ids is kept, the same ones in every request, chosen by `seed`.
        """
        digest = hashlib.blake2b(f"{block_size} {rate} {seed if rate < 1 else 0}".encode(), digest_size=16)
        num_ids = all_blocks = all_tokens = 0
        num_late, latest_s = 0, -math.inf
        files = {name: (folder / f"{name}.raw").open("wb", 1 << 18) for name in _ARRAYS}
        try:
            files["bounds"].write(np.int64(0).tobytes())
            for request in requests:
                ids, length = request.hash_ids, request.input_length
                num_late += request.arrival_s < latest_s
                latest_s = max(latest_s, request.arrival_s)
                all_blocks += len(ids)
                all_tokens += length
                if rate < 1:
                    kept = _is_sampled(ids, rate, seed)
                    # The last block may be partial.
                    tail = length - block_size * (len(ids) - 1) if len(ids) else 0
                    is_last_kept = bool(len(ids)) and bool(kept[-1])
                    ids = ids[kept]
                    length = block_size * (len(ids) - is_last_kept) + max(0, min(tail, block_size)) * is_last_kept
                num_ids += len(ids)
                raw = np.ascontiguousarray(ids, dtype="<i8").tobytes()
                digest.update(raw)
                digest.update(b"%d %r\n" % (request.input_length, request.arrival_s))
                files["ids"].write(raw)
                files["bounds"].write(np.int64(num_ids).tobytes())
                files["input_lengths"].write(np.int64(length).tobytes())
                files["arrivals_s"].write(np.float64(request.arrival_s).tobytes())
                files["output_lengths"].write(np.int64(request.output_length).tobytes())
        finally:
            for file in files.values():
                file.close()
        facts = (block_size, rate, all_blocks, all_tokens, digest.hexdigest(), num_late)
        text = json.dumps(dict(zip(_FACTS, facts, strict=True)))
        (folder / "trace.json").write_text(text)
        if num_late:
            # An external merge sort: runs are sorted in their files, and a piece of each is in memory while they merge.
            runs = cls.load(folder, "r+")._sort_runs()  # noqa: SLF001
            folder /= "sorted"
            folder.mkdir()
            cls.spool(heapq.merge(*runs, key=lambda request: request.arrival_s), block_size, folder)
            (folder / "trace.json").write_text(text)
        return cls.load(folder)

    def _sort_runs(self) -> list[Iterator[Request]]:
        """Sort the requests of each run in its files, which are mapped for writing; return the runs."""
        runs = []
        for first, last in self.pieces(_RUN_IDS):
            order = first + np.argsort(self.arrivals_s[first:last], kind="stable")
            begins, counts = self.bounds[order], self.bounds[order + 1] - self.bounds[order]
            ends = np.cumsum(counts)
            places = np.repeat(begins - (ends - counts), counts) + np.arange(ends[-1])
            origin = int(self.bounds[first])
            self.ids[origin : origin + len(places)] = self.ids[places]
            self.bounds[first + 1 : last + 1] = origin + ends
            for values in (self.input_lengths, self.arrivals_s, self.output_lengths):
                values[first:last] = values[order]  # type: ignore[index]
            give_back(self.ids)
            runs.append(self._between(first, last))
        return runs

    def save(self, folder: Path) -> None:
        """Write the arrays to `folder`, for `load`."""
        for name, dtype in _ARRAYS.items():
            values = np.zeros(len(self)) if getattr(self, name) is None else getattr(self, name)
            np.ascontiguousarray(values, dtype).tofile(folder / f"{name}.raw")
        (folder / "trace.json").write_text(json.dumps({name: getattr(self, name) for name in _FACTS}))

    @classmethod
    def load(cls, folder: Path, mode: Literal["r", "r+"] = "r") -> CompactTrace:
        """Map the files that `save` or `spool` wrote to `folder`."""
        arrays = {name: _mapped(folder / f"{name}.raw", dtype, mode) for name, dtype in _ARRAYS.items()}
        facts = json.loads((folder / "trace.json").read_text())
        return cls(**arrays, **facts, folder=folder)

    def __len__(self) -> int:
        return len(self.input_lengths)

    def __iter__(self) -> Iterator[Request]:
        return self._between(0, len(self))

    def _between(self, begin: int, end: int) -> Iterator[Request]:
        ids = np.asarray(self.ids)  # slices of a memory map cost a microsecond each
        for first, last in self.pieces(_PIECE_IDS, begin, end):
            bounds = self.bounds[first : last + 1].tolist()
            lengths, arrivals = self.input_lengths[first:last].tolist(), self.arrivals_s[first:last].tolist()
            outputs = [0] * len(lengths) if self.output_lengths is None else self.output_lengths[first:last].tolist()
            for i, length in enumerate(lengths):
                yield Request(ids[bounds[i] : bounds[i + 1]], length, outputs[i], arrivals[i])
            give_back(self.ids)

    def filled(self) -> Iterator[tuple[int, Request]]:
        """Yield each request that names a block, and how many requests came since the one before, itself included.

        Most requests of a sample name none; a loop over all of them would take longer than the replay.
        """
        previous, ids = -1, np.asarray(self.ids)
        for first, last in self.pieces():
            bounds = np.asarray(self.bounds[first : last + 1])
            numbers = np.flatnonzero(np.diff(bounds))
            begins, ends = bounds[numbers].tolist(), bounds[numbers + 1].tolist()
            lengths = self.input_lengths[first + numbers].tolist()
            arrivals = self.arrivals_s[first + numbers].tolist()
            for i, number in enumerate((first + numbers).tolist()):
                yield number - previous, Request(ids[begins[i] : ends[i]], lengths[i], 0, arrivals[i])
                previous = number
            give_back(self.ids)

    def pieces(self, num_ids: int = _PIECE_IDS, first: int = 0, end: int | None = None) -> Iterator[tuple[int, int]]:
        """Yield the first request and the end of pieces of about `num_ids` ids, and at most as many requests."""
        end = len(self) if end is None else end
        while first < end:
            limit = int(self.bounds[first]) + num_ids
            last = max(first + 1, int(np.searchsorted(self.bounds, limit, side="right")) - 1)
            last = min(last, first + num_ids, end)
            yield first, last
            first = last

    @property
    def num_tokens(self) -> int:
        """Tokens of all prompts, with the blocks that a sample leaves out."""
        return self.all_tokens or int(self.input_lengths.sum())

    @property
    def num_blocks(self) -> int:
        """Blocks of all requests, with those that a sample leaves out."""
        return self.all_blocks or len(self.ids)

    def split(self, parts: int) -> CompactTrace:
        """Return the trace with `parts` ids in place of each; ids are renumbered."""
        block_size = split_block_size(self.block_size, parts)
        _, dense = np.unique(self.ids, return_inverse=True)
        ids = (dense.astype(np.int64)[:, None] * parts + np.arange(parts)).ravel()
        return CompactTrace(ids, self.bounds * parts, self.input_lengths, self.arrivals_s, block_size)

    def shard(self, index: int, num_shards: int) -> CompactTrace:
        """Return one of `num_shards` parts of a sample, by a hash of the ids, in memory."""
        ids, counts = [], []
        for first, last in self.pieces():
            bounds = self.bounds[first : last + 1]
            piece = np.asarray(self.ids[int(bounds[0]) : int(bounds[-1])])
            mine = mixed(piece ^ np.int64(_PART_SALT >> np.uint64(1))) % np.uint64(num_shards) == index
            before = np.concatenate(([0], np.cumsum(mine)))
            counts.append(np.diff(before[bounds - bounds[0]]))
            ids.append(piece[mine])
            give_back(self.ids)
        kept = np.concatenate(counts) if counts else np.empty(0, np.int64)
        # Estimated in proportion, because the sample does not know which block is the partial one.
        shares = kept / np.maximum(np.diff(self.bounds), 1)
        return CompactTrace(
            np.concatenate(ids) if ids else np.empty(0, np.int64),
            np.concatenate(([0], np.cumsum(kept))).astype(np.int64),
            np.round(self.input_lengths * shares).astype(np.int64),
            np.asarray(self.arrivals_s),
            self.block_size,
            self.rate / num_shards,
            self.num_blocks,
            self.num_tokens,
        )


def next_uses(trace: CompactTrace, folder: Path | None = None, max_bytes: int | None = None) -> tuple[Int64Array, int]:
    """Return for every place of a trace the place where the next request names its id, and the number of different ids.

    int64: -1 without a next use, -2 if the same request has named the id before. With `folder` the array is a mapped
    file. `max_bytes`, at least 16 MiB, bounds the table of ids: the trace is read once for each part of the ids that
    fits.
    """
    num_places = len(trace.ids)
    if folder is None:
        nexts = np.empty(num_places, dtype=np.int64)
    else:
        nexts = np.lib.format.open_memmap(folder / "nexts.npy", mode="w+", dtype=np.int64, shape=(num_places,))
    num_parts = 1
    if max_bytes is not None:
        num_parts = -(-_about_distinct(trace) * _ID_BYTES // max(max_bytes, _LEAST_BYTES)) or 1
    pieces = list(trace.pieces())
    distinct = 0
    for part in range(num_parts):
        uses = NextUses(part, num_parts)
        for first, last in reversed(pieces):
            bounds = np.ascontiguousarray(trace.bounds[first : last + 1])
            begin, end = int(bounds[0]), int(bounds[-1])
            uses.link(np.ascontiguousarray(trace.ids[begin:end]), bounds, nexts[begin:end])
            give_back(trace.ids)
            give_back(nexts)
        distinct += uses.num_ids
    return nexts, distinct


def _about_distinct(trace: CompactTrace) -> int:
    """Return about how many different ids a trace names, counted from one id in 64."""
    found = np.empty(0, np.int64)
    for first, last in trace.pieces():
        ids = trace.ids[int(trace.bounds[first]) : int(trace.bounds[last])]
        found = np.union1d(found, ids[mixed(ids) % np.uint64(_COUNTED_SHARE) == 0])
        give_back(trace.ids)
    return min(len(trace.ids), _COUNTED_SHARE * (len(found) + 1))


def give_back(array: Any) -> None:
    """Release the pages of a mapped file; they are read again when needed."""
    base = getattr(array, "base", None)
    if isinstance(base, mmap.mmap):
        base.madvise(mmap.MADV_DONTNEED)


def _mapped(path: Path, dtype: str, mode: Literal["r", "r+"]) -> Any:
    # An empty file cannot be mapped.
    return np.memmap(path, dtype=dtype, mode=mode) if path.stat().st_size else np.empty(0, dtype=dtype)


def _is_sampled(ids: Int64Array, rate: float, seed: int) -> npt.NDArray[np.bool_]:
    return mixed(ids ^ np.int64(seed)) < np.uint64(min(rate * 2.0**64, 2.0**64 - 2048))
