"""Events: which blocks were stored in a medium or removed from it.

A router or an exporter keeps a view of the cache from them, in the order in which `kvcache.core.event_log` numbers
them.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class OffloadingEvent:
    """Blocks that came to a medium (`removed` False) or left it (`removed` True).

    The `keys` name blocks of `block_size` tokens, and `medium` is the medium's name. `number` is the place in the
    manager's log, from 1 on. A gap means that events were dropped, or a reset. It is not compared.
    """

    keys: list[bytes]
    block_size: int
    medium: str
    removed: bool
    number: int = field(default=0, compare=False)

    @property
    def block_hashes(self) -> list[bytes]:
        """The older name of `keys`."""
        return self.keys
