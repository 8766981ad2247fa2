"""Links of a simulation for an arbiter: a load waits for the loads before it, as in `serving.weigh`."""

from __future__ import annotations

import math

from kvcache.tiering.arbiter import Link


class Queue:
    """A link that moves one block after the other, each in `block_s` seconds."""

    def __init__(self, block_s: float) -> None:
        self.block_s = block_s
        self._free_s = -math.inf

    def wait_s(self, num_blocks: int, now_s: float) -> float:
        """Return the seconds until `num_blocks` more blocks would have been moved."""
        return max(self._free_s - now_s, 0.0) + self.block_s * num_blocks

    def move(self, num_blocks: int, now_s: float) -> None:
        """Move blocks after those that wait."""
        self._free_s = now_s + self.wait_s(num_blocks, now_s)


class QueuedLink(Link):
    """The link of a simulated tier, at a given rate; its blocks then wait for the link of host memory.

    The simulated tier ends every job at once, so the queue is kept here and not learned from jobs.
    """

    def __init__(self, block_s: float, host: Queue) -> None:
        super().__init__()
        self.fit.add(1, 0, block_s)
        self._queue = Queue(block_s)
        self._host = host

    def load_s(self, num_blocks: int, now_s: float) -> float:
        """Return the seconds until `num_blocks` more blocks would be on the device."""
        arrived_s = self._queue.wait_s(num_blocks, now_s)
        return max(arrived_s, self._host.wait_s(0, now_s)) + self._host.block_s * num_blocks

    def sent(self, num_blocks: int, now_s: float) -> None:
        """Queue a job."""
        self._queue.move(num_blocks, now_s)

    def ended(self, num_blocks: int, num_done: int, start_s: float, end_s: float, now_s: float) -> None:
        """Do nothing: the rate is given."""

    @property
    def is_blind(self) -> bool:
        """Return False: the rate is given."""
        return False

    def probe_blocks(self, now_s: float) -> int:
        """Return 0: the rate is given."""
        return 0
