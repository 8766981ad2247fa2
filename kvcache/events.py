"""Events: which blocks came to a medium or left it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class OffloadingEvent:
    """Blocks that came to a medium (`removed` False) or left it (`removed` True)."""

    keys: list[bytes]
    block_size: int
    medium: str
    removed: bool

    @property
    def block_hashes(self) -> list[bytes]:
        """The older name of `keys`."""
        return self.keys
