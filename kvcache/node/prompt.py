"""One request's prompt in an engine: the keys that the owner knows, and what the owner holds and reserves for it.

A look-up goes from block to block, but asks the owner once: the answer holds all blocks of the prompt that are ready.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Collection
from contextlib import suppress
from enum import Enum, auto
from itertools import islice

from kvcache.block import ABSENT, ASK_AGAIN, PENDING, READY
from kvcache.node import protocol
from kvcache.node.batch import HeldBlocks, pack_keys
from kvcache.node.link import Link, State

_MAX_PENDING_S = 1.0
"""How long a request waits for a block that another one is writing."""


class Phase(Enum):
    """What the engine knows of a request's blocks."""

    NEW = auto()
    """It knows nothing: the next look-up asks the owner."""
    ANSWERED = auto()
    """Blocks that are not held are absent."""
    WAITING = auto()
    """A block is being written or read. The look-up that asked for it has not reached it yet."""
    REPORTED = auto()
    """As WAITING, and a look-up has reached the block: the next look-up asks again."""
    FINISHED = auto()
    """The engine has finished the request. Its copies may still run."""
    ENDED = auto()
    """The owner knows that the request has ended. Its stores may still run."""


class Prompt:
    """The blocks of one request, whose number is `number`.

    With `is_hybrid`, the model has several KV-cache groups: a look-up skips blocks, and holds all that are ready. With
    `asks_tiers`, a tier may have such blocks, too: the owner is asked for each block that is not held.
    """

    def __init__(self, number: int, is_hybrid: bool = False, asks_tiers: bool = False) -> None:
        self.number, self.is_hybrid, self.asks_tiers = number, is_hybrid, asks_tiers
        # The keys that the owner knows, and the place of each, which most requests never need.
        self.keys: list[bytes] = []
        self.places: dict[bytes, int] | None = None
        self.held = HeldBlocks()
        self.writing: dict[bytes, int] = {}
        self.num_loads = 0
        self.end_positions: dict[bytes, int] = {}
        self.phase = Phase.NEW
        # The last question began at the key `first`. The key `end` is the first one behind it that is not held.
        self.first: bytes | None = None
        self.end: bytes | None = None
        # The state of the block at `end` while the request waits for it, and the time since which it waits.
        self.coming: int = PENDING
        self.since_s = 0.0
        self.found_tokens = 0
        """Where the leading run of blocks without a window ends that memory and tiers hold."""

    def status(self, key: bytes) -> int | None:
        """Return the state of a key as of the owner's last answer, or None if the owner must be asked."""
        if key in self.held:
            # While the request waits for a block, a look-up that begins at the first key asks again.
            return READY if self.phase is Phase.ANSWERED or key != self.first else None
        if self.phase in (Phase.FINISHED, Phase.ENDED):
            return ABSENT
        if self.phase is Phase.NEW or self.asks_tiers:
            return None
        if key == self.end:
            if self.phase is Phase.ANSWERED:
                return ABSENT
            if self.phase is Phase.WAITING and key != self.first:
                # The next look-up asks again when it reaches this block, even if it begins behind `first`.
                self.phase = Phase.REPORTED
                return self.coming
            return None
        place = self._place(key)
        is_behind = key != self.first and place >= 0 and (self.is_hybrid or place > self._place(self.first))
        return ABSENT if is_behind else None

    def acquire(self, link: Link, key: bytes, keys: Collection[bytes]) -> int:
        """Ask the owner for the prompt from `key` on, hold the blocks that are ready, and return the state of `key`.

        `keys` are those of the prompt, as far as the engine knows them. Without an answer in time the block is absent.
        """
        if link.poll() is not State.READY:
            return ABSENT
        if self.asks_tiers and self.phase is not Phase.NEW and self._place(key) >= 0:
            return self._acquire_one(link, key)
        self.first = self.end = key
        self.phase = Phase.ANSWERED
        try:
            payload, num_bytes = self._unsent_keys(keys)
            if self._place(key) < 0 and not payload:
                payload, num_bytes = self._unsent_keys([*self.keys, key])
        except ValueError:
            return ABSENT
        start = 0 if self.is_hybrid else max(0, self._place(key))
        answer = self._ask(link, protocol.HYBRID if self.is_hybrid else 0, start, payload, num_bytes)
        if answer is None:
            return ABSENT
        state, start = answer
        self.end = next((later for later in islice(self.keys, start, None) if later not in self.held), None)
        if state != ABSENT:
            self.coming = state
            self.phase = Phase.REPORTED if key == self.end else Phase.WAITING
        if key in self.held:
            return READY
        if self.asks_tiers:
            return self._acquire_one(link, key)
        return state if key == self.end else ABSENT

    def release(self, link: Link) -> None:
        """Return all leases of loads. The next look-up asks the owner again."""
        if self.phase is not Phase.NEW:
            link.tell(protocol.RELEASE, 0, self.number)
        self.forget()

    def use(self, link: Link, positions: dict[bytes, int] | None, keys: list[bytes], slots: bytes) -> None:
        """Report a load of held blocks, or before a store new positions. A load releases the other blocks."""
        payload, num_bytes = b"", 0
        # Until the owner's welcome, keys stay here: all are sent after it, and the places of these would be wrong.
        if link.is_ready:
            with suppress(ValueError):
                payload, num_bytes = self._unsent_keys(positions or {})
        if keys:
            self.held.clear()
            self.held.add(keys, slots)
        if keys or payload:
            head = struct.pack("<II", self.found_tokens, len(keys))
            link.tell(protocol.USE, 0, self.number, head + slots + payload, num_bytes)

    def take_written(self, keys: Collection[bytes]) -> dict[bytes, int]:
        """Remove the running stores of `keys`, and return the slot of each."""
        return {key: self.writing.pop(key) for key in keys if key in self.writing}

    def forget(self) -> None:
        """Ask the owner again at the next look-up."""
        self.held.clear()
        self.first, self.end, self.since_s = None, None, 0.0
        if self.phase not in (Phase.FINISHED, Phase.ENDED):
            self.phase = Phase.NEW

    def finish(self, positions: dict[bytes, int] | None) -> None:
        """Note that the engine has finished the request. `positions` are the end positions of its keys, if known."""
        self.phase = Phase.FINISHED
        self.end_positions = positions or {}

    def end_if_done(self, link: Link) -> bool:
        """Report the end of a finished request after its last load; return whether it has no stores left either."""
        if self.phase is Phase.FINISHED and not self.num_loads:
            payload, num_bytes = b"", 0
            with suppress(ValueError):
                payload, num_bytes = self._unsent_keys(self.end_positions)
            link.tell(protocol.END, int(bool(self.end_positions)), self.number, payload, num_bytes)
            self.phase = Phase.ENDED
            self.forget()
        return self.phase is Phase.ENDED and not self.writing

    def _acquire_one(self, link: Link, key: bytes) -> int:
        """Ask for one block of a hybrid model, which a tier may hold."""
        answer = self._ask(link, protocol.ONE_KEY, self._place(key))
        return READY if key in self.held else ABSENT if answer is None else answer[0]

    def _ask(
        self, link: Link, flag: int, start: int, payload: bytes = b"", num_bytes: int = 0
    ) -> tuple[int, int] | None:
        """Ask for the blocks from the place `start` on, and hold those that the owner finds.

        Return the state of the next block, and from which place on blocks may not be held; None without an answer.
        """
        answer = link.ask(protocol.ACQUIRE, flag, self.number, struct.pack("<I", start) + payload, num_bytes)
        if answer is None:
            # The late answer will hold blocks: release them. But if an earlier answer holds some, the engine may load
            # these next, and then all are released after the load.
            if not self.held.keys:
                self.release(link)
            return None
        link.counts["shared_hit_blocks"] += struct.unpack_from("<I", answer.payload)[0]
        end = start + len(answer.payload) // 4 - 1
        if self.held.add(self.keys[start:end], answer.payload[4:]) == end - start:
            start = end
        state = answer.flag
        if state == PENDING:
            self.since_s = self.since_s or time.monotonic()
            if time.monotonic() - self.since_s > _MAX_PENDING_S:
                return ABSENT, start
        return state if state in (PENDING, ASK_AGAIN) else ABSENT, start

    def _unsent_keys(self, keys: Collection[bytes]) -> tuple[bytes, int]:
        """Pack the keys that the owner does not know yet, with their end positions if `keys` has them.

        ValueError: the lengths of the keys differ.
        """
        num_known = len(self.keys)
        if len(keys) <= num_known:
            return b"", 0
        new, payload, num_bytes = pack_keys(keys, num_known)
        self.keys += new
        self.places = None
        return payload, num_bytes

    def _place(self, key: bytes | None) -> int:
        """Return the place of a key in the prompt that the owner knows, or -1."""
        # Most look-ups begin at the first block, and need no dict.
        if self.keys and key == self.keys[0]:
            return 0
        if self.places is None:
            self.places = {known: place for place, known in enumerate(self.keys)}
        return -1 if key is None else self.places.get(key, -1)
