"""Wear: counts the blocks written to a disk, and limits them to a daily budget.

An SSD endures 0.3 to 3 writes of its capacity a day. The budget is a token bucket: it grows evenly, and holds at most
the writes of one day. It uses the machine's uptime, so setting the system clock does not change it.
"""

from __future__ import annotations

import math
import struct
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import RLock
from typing import Any

from kvcache.options import parse_size

DAY_S = 86_400.0
SHORT_LIFE_YEARS = 3
"""Below it, `kvcache check` warns, as the alert KVCacheDiskWearsOut does."""
_WARRANTY_YEARS = 5
"""An SSD endures its rated drive writes a day for this time."""
_START_S = 60.0
"""A new budget holds the growth of this time."""
_SPARE_S = 120.0
"""A budget of at least the growth of this time covers every block; a smaller one only blocks of better classes."""
_AHEAD_S = 300.0
"""The budget of at least this time, or one block, may be spent before the next record. A kill loses it, so that it is
never spent twice."""
_MAGIC = b"kvwear 1"
_RECORD = struct.Struct("<8s4d8s")


def parse_endurance(name: str, value: object) -> float | str:
    """Parse drive writes a day, such as 3, or bytes a day, such as ``"6TiB/day"``."""
    text = str(value).strip().lower()
    if isinstance(value, str) and text.endswith("/day"):
        return f"{parse_size(name, text.removesuffix('/day'))}/day"
    # float() also reads "3_0".
    with suppress(ValueError):
        drives = float(text) if "_" not in text else math.nan
        if not isinstance(value, bool) and 0 < drives <= 1000:
            return drives
    raise ValueError(f"{name} must be drive writes a day, such as 3, or bytes such as '6TiB/day', got {value!r}")


def describe_wear(drive_writes: float, life_years: float) -> str:
    """Describe the rates of `Wear.stats`; return "" before a day was observed."""
    if not drive_writes:
        return ""
    rated = life_years * drive_writes / _WARRANTY_YEARS
    return f"{drive_writes:.2g} drive writes a day: an SSD rated for {rated:.2g} lives {life_years:.2g} years"


def uptime_s() -> float:
    """Return the seconds since the machine's boot, including time in suspension."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _boot_id() -> bytes:
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_bytes()[:8]
    return b""


class Wear:
    """Writes of a disk of `num_blocks` blocks: those of the last day, and the budget for later ones.

    Until `limit` is called, the budget is unlimited. With `record_s`, it is recorded on the disk about every `record_s`
    seconds, and only the part that `keep` allows may be spent. `clock` is monotonic, in seconds. Any thread may call
    the methods.
    """

    def __init__(
        self, num_blocks: int, block_bytes: int, record_s: float | None = None, clock: Callable[[], float] = uptime_s
    ) -> None:
        self.num_blocks = num_blocks
        self.per_day = math.inf
        self._is_kept = is_kept = record_s is not None
        self._ahead_s = max(_AHEAD_S, record_s or 0.0)
        self._block_bytes = block_bytes
        self._clock = clock
        self._lock = RLock()
        self._as_of_s = clock()
        self._num_left = 0.0
        # The budget that the last process left, in blocks, and the time since then in seconds.
        self._earlier: tuple[float, float] | None = None
        # The number of blocks in the last record. The budget must not fall below it before the next record.
        self._num_kept = math.inf if is_kept else 0.0
        # Blocks written in about the last day, and the seconds that this covers.
        self._num_written = 0.0
        self._observed_s = 0.0

    @property
    def is_limited(self) -> bool:
        """Whether there is a budget."""
        return math.isfinite(self.per_day)

    def limit(self, endurance: float | str) -> None:
        """Set the budget: drive writes a day, or ``"BYTES/day"``, as `parse_endurance` returns them.

        ValueError: the budget of a disk is less than a block a day.
        """
        with self._lock:
            if isinstance(endurance, str):
                per_day = int(endurance.removesuffix("/day")) / self._block_bytes
            else:
                per_day = endurance * self.num_blocks
            # A simulated disk may be a small sample of the real one.
            if self._is_kept and per_day < 1:
                text = f"{self.num_blocks} blocks of {self._block_bytes} bytes"
                raise ValueError(f"endurance must allow at least one block a day, got {endurance!r} for {text}")
            self.per_day = per_day
            self._num_left = self._growth(_START_S)
            self._resume()

    def left(self) -> float:
        """Return how many blocks may be written now."""
        with self._lock:
            self._advance()
            return max(0.0, self._num_left - self._num_kept) if self.is_limited else math.inf

    def spare(self) -> float:
        """Return the share of offered blocks to write: 0 with an empty budget, 1 with an ample one."""
        return min(1.0, self.left() / self.per_day * DAY_S / _SPARE_S) if self.is_limited else 1.0

    def spend(self, num_blocks: int) -> None:
        """Record blocks that were written."""
        with self._lock:
            self._num_left -= num_blocks
            self._num_written += num_blocks

    def stats(self) -> dict[str, Any]:
        """Return the fields of `TierStats` on wear. Rates are 0 until a day was observed."""
        with self._lock:
            left = self.left() if self.is_limited else 0.0
            self._advance()
            is_known = self._observed_s >= DAY_S * 0.999
            drive_writes = self._num_written / self.num_blocks if is_known else 0.0
            rated = self.per_day / self.num_blocks if self.is_limited else 1.0
            life_years = _WARRANTY_YEARS * rated / drive_writes if drive_writes else 0.0
            return {"drive_writes": drive_writes, "life_years": life_years, "left_blocks": int(left)}

    def record(self, is_last: bool = False) -> tuple[bytes, float]:
        """Return a record to write to the disk, and the number to pass to `keep` afterwards."""
        with self._lock:
            self._advance()
            num_kept = max(0.0, self._num_left)
            # Blocks are spent whole, so a part of one is kept.
            if not is_last and self.is_limited and num_kept >= 1:
                num_kept = max(0.0, num_kept - max(1.0, self._growth(self._ahead_s)))
            # In bytes: after `clear_directory`, the next tier of the directory may have blocks of another size.
            kept_bytes, written_bytes = num_kept * self._block_bytes, self._num_written * self._block_bytes
            body = _RECORD.pack(_MAGIC, kept_bytes, self._as_of_s, written_bytes, self._observed_s, _boot_id())
            return body + zlib.crc32(body).to_bytes(4, "little"), num_kept

    def keep(self, num_kept: float) -> None:
        """Allow the budget to be spent down to the number in the record that was written."""
        with self._lock:
            self._num_kept = num_kept

    def restore(self, record: bytes) -> None:
        """Continue with the record of an earlier process; other bytes are ignored."""
        body, checksum = record[: _RECORD.size], record[_RECORD.size :]
        if len(body) < _RECORD.size or zlib.crc32(body).to_bytes(4, "little") != checksum:
            return
        magic, kept_bytes, as_of_s, written_bytes, observed_s, boot_id = _RECORD.unpack(body)
        if magic != _MAGIC or not all(0 <= value < math.inf for value in (kept_bytes, written_bytes, observed_s)):
            return
        with self._lock:
            self._advance()
            # After another boot, the time since the last process is unknown, and adds nothing to the budget.
            away_s = self._as_of_s - as_of_s if boot_id == _boot_id() and as_of_s < self._as_of_s else 0.0
            self._num_written += written_bytes / self._block_bytes
            self._observed_s += min(observed_s, DAY_S)
            self._earlier = kept_bytes / self._block_bytes, away_s
            self._resume()

    def _resume(self) -> None:
        """Continue with the earlier budget, once both the record and the limit are known."""
        if self.is_limited and self._earlier is not None:
            num_left, away_s = self._earlier
            self._num_left = min(self.per_day, num_left + self._growth(away_s))

    def _growth(self, seconds: float) -> float:
        return self.per_day * seconds / DAY_S

    def _advance(self) -> None:
        now_s = self._clock()
        elapsed_s = max(0.0, now_s - self._as_of_s)
        self._as_of_s = now_s
        self._observed_s += elapsed_s
        if self._observed_s > DAY_S:
            # Older writes count less and less.
            self._num_written *= DAY_S / self._observed_s
            self._observed_s = DAY_S
        if self.is_limited:
            num_left, self._num_left = self._num_left, min(self.per_day, self._num_left + self._growth(elapsed_s))
            if self._is_kept:
                # After a kill, the next process adds the growth since the record.
                self._num_kept += self._num_left - num_left


RECORD_BYTES = _RECORD.size + 4
