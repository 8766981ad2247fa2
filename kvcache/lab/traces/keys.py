"""Turn the ids of a trace into offload keys: new `bytes` for every request, as engines make them.

Ids are prefix-chained, so an id determines a block's hash. All digests of a request come from one vectorised mix (about
50 ns a key).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import numpy.typing as npt

    from kvcache.lab.traces.requests import Request

_KEY_BYTES = 36
_BATCH_IDS = 4096
# Four streams of SplitMix64 (Steele, Lea & Flood, OOPSLA '14), started apart.
_WORDS = np.array([0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD6E8FEB86659FD93], dtype=np.uint64)
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))


def _mix(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    words ^= words >> _SHIFTS[0]
    words *= _MULTIPLIERS[0]
    words ^= words >> _SHIFTS[1]
    words *= _MULTIPLIERS[1]
    words ^= words >> _SHIFTS[2]
    return words


def mixed(ids: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """Return a hash of each id, for sampling and sharding."""
    return _mix(ids.astype(np.uint64) + _WORDS[0])


class KeyMaker:
    """Makes the keys of a request: a 32-byte digest of each id, then the index of KV-cache group 0.

    Each listed id becomes `split` keys.
    """

    def __init__(self, split: int = 1) -> None:
        if type(split) is not int or split < 1:
            raise ValueError(f"split must be an int >= 1, got {split!r}")
        self.split = split
        self._part = np.arange(split, dtype=np.uint64)[None, :, None] * _WORDS[::-1]

    def __call__(self, hash_ids: npt.NDArray[np.int64]) -> list[bytes]:
        """Return `split` new key objects per id, in order."""
        words = _mix(hash_ids.astype(np.uint64)[:, None] + _WORDS)
        if self.split > 1:
            words = _mix((words[:, None, :] + self._part).reshape(-1, 4))
        keys = np.zeros((len(words), _KEY_BYTES), dtype=np.uint8)
        keys[:, :32] = words.astype("<u8", copy=False).view(np.uint8)
        made: list[bytes] = keys.view(f"V{_KEY_BYTES}")[:, 0].tolist()
        return made

    def keyed(self, steps: Iterable[tuple[int, Request]]) -> Iterator[tuple[int, Request, list[bytes]]]:
        """Yield each step with the keys of its request, which are made for many requests at once.

        A mix of few ids costs as much as one of hundreds, and requests of a trace have few.
        """
        batch: list[tuple[int, Request]] = []
        num_ids = 0
        for step in steps:
            batch.append(step)
            num_ids += len(step[1].hash_ids)
            if num_ids >= _BATCH_IDS:
                yield from self._keys_of(batch)
                batch, num_ids = [], 0
        yield from self._keys_of(batch)

    def _keys_of(self, batch: list[tuple[int, Request]]) -> Iterator[tuple[int, Request, list[bytes]]]:
        if not batch:
            return
        keys = self(np.concatenate([request.hash_ids for _, request in batch]))
        begin = 0
        for gap, request in batch:
            end = begin + self.split * len(request.hash_ids)
            yield gap, request, keys[begin:end]
            begin = end


def split_block_size(block_size: int, split: int) -> int:
    """Return the tokens of one key if each listed block becomes `split` keys; ValueError if they do not divide."""
    if type(split) is not int or split < 1 or block_size % split:
        raise ValueError(f"split must divide the {block_size} tokens of a block, got {split!r}")
    return block_size // split
