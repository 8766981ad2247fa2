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
_WARRANTY_YEARS = 5
"""An SSD endures its rated drive writes a day for this time."""
_START_S = 60.0
"""A new budget holds the growth of this time."""
_SPARE_S = 120.0
"""A budget of at least the growth of this time covers every block; a smaller one only blocks of better classes."""
_AHEAD_S = 300.0
"""The growth of this time may be spent before the next record is written. A kill loses it, so none is spent twice."""
_RECORD = struct.Struct("<8s4d8s")


def parse_endurance(name: str, value: object) -> float | str:
    """Parse drive writes a day, such as 3, or bytes a day, such as ``"6TiB/day"``."""
    text = str(value).strip().lower()
    if isinstance(value, str) and text.endswith("/day"):
        return f"{parse_size(name, text.removesuffix('/day'))}/day"
    with suppress(ValueError):
        drives = float(text)
        if not isinstance(value, bool) and 0 < drives <= 1000:
            return drives
    raise ValueError(f"{name} must be drive writes a day, such as 3, or bytes such as '6TiB/day', got {value!r}")


def uptime_s() -> float:
    """Return the seconds since the machine's boot, including time in suspension."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _boot_id() -> bytes:
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_bytes()[:8]
    return b""


class Wear:
    """Writes of a disk of `num_blocks` blocks: those of the last day, and the budget for later ones.

    Without a call of `limit`, the budget is unlimited. If it `is_kept` in a record on the disk, it may be spent only as
    far as `keep` allows. `clock` is monotonic, in seconds. Any thread may call the methods.
    """

    def __init__(
        self, num_blocks: int, block_bytes: int, is_kept: bool = False, clock: Callable[[], float] = uptime_s
    ) -> None:
        self.num_blocks = num_blocks
        self.per_day = math.inf
        self._block_bytes = block_bytes
        self._clock = clock
        self._lock = RLock()
        self._as_of_s = clock()
        self._num_left = 0.0
        # The budget that the last process left, and the time since then in seconds.
        self._earlier: tuple[float, float] | None = None
        # The number of blocks in the last record. The budget must not fall below it before the next record.
        self._num_kept = math.inf if is_kept else 0.0
        # Blocks written in about the last day, and the seconds that this covers.
        self._num_written = 0.0
        self._observed_s = 0.0

    def limit(self, endurance: float | str) -> None:
        """Set the budget: drive writes a day, or ``"BYTES/day"``, as `parse_endurance` returns them."""
        with self._lock:
            if isinstance(endurance, str):
                self.per_day = int(endurance.removesuffix("/day")) / self._block_bytes
            else:
                self.per_day = endurance * self.num_blocks
            self._num_left = self.per_day * _START_S / DAY_S
            self._resume()

    def left(self) -> float:
        """Return how many blocks may be written now."""
        with self._lock:
            self._advance()
            return max(0.0, self._num_left - self._num_kept) if self.is_limited else math.inf

    @property
    def is_limited(self) -> bool:
        """Whether there is a budget."""
        return math.isfinite(self.per_day)

    def spare(self) -> float:
        """Return the share of offered blocks to write: 0 with an empty budget, 1 with an ample one."""
        return min(1.0, self.left() / (self.per_day * _SPARE_S / DAY_S)) if self.is_limited else 1.0

    def spend(self, num_blocks: int) -> None:
        """Record blocks that were written."""
        with self._lock:
            self._num_left -= num_blocks
            self._num_written += num_blocks

    def stats(self) -> dict[str, Any]:
        """Return the fields of `TierStats` on wear. Rates are 0 until a day was observed."""
        with self._lock:
            self._advance()
            is_known = self._observed_s >= DAY_S * 0.999
            drive_writes = self._num_written / self.num_blocks if is_known else 0.0
            rated = self.per_day / self.num_blocks if self.is_limited else 1.0
            left = int(self.left()) if self.is_limited else 0
            life_years = _WARRANTY_YEARS * rated / drive_writes if drive_writes else 0.0
            return {"drive_writes": drive_writes, "life_years": life_years, "left_blocks": left}

    def record(self, is_last: bool = False) -> tuple[bytes, float]:
        """Return a record to write to the disk, and the number to pass to `keep` afterwards."""
        with self._lock:
            self._advance()
            ahead = self.per_day * _AHEAD_S / DAY_S if self.is_limited and not is_last else 0.0
            num_kept = max(0.0, self._num_left - ahead)
            body = _RECORD.pack(b"kvwear 1", num_kept, self._as_of_s, self._num_written, self._observed_s, _boot_id())
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
        magic, num_left, as_of_s, num_written, observed_s, boot_id = _RECORD.unpack(body)
        if magic != b"kvwear 1" or not all(map(math.isfinite, (num_left, as_of_s, num_written, observed_s))):
            return
        with self._lock:
            self._advance()
            # After another boot, the time since the last process is unknown, and adds nothing to the budget.
            away_s = max(0.0, self._as_of_s - as_of_s) if boot_id == _boot_id() else 0.0
            self._num_written += num_written
            self._observed_s += observed_s
            self._earlier = max(0.0, num_left), away_s
            self._resume()

    def _resume(self) -> None:
        """Continue with the earlier budget, once both the record and the limit are known."""
        if self.is_limited and self._earlier is not None:
            num_left, away_s = self._earlier
            self._num_left = min(self.per_day, num_left + away_s * self.per_day / DAY_S)

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
            self._num_left = min(self.per_day, self._num_left + elapsed_s * self.per_day / DAY_S)


RECORD_BYTES = _RECORD.size + 4
