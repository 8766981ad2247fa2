"""Events: which blocks were stored in a medium or removed from it.

A router or an exporter keeps a view of the cache from them, in the order in which `kvcache.core.event_log` numbers
them.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class OffloadingEvent:
    """Blocks that came to a medium (`removed` False) or left it (`removed` True).

    Parameters
    ----------
    keys : list of bytes
        The blocks.
    block_size : int
        Tokens of one block.
    medium : str
        The medium's name.
    removed : bool
        Whether they left.
    number : int
        Place in the manager's log, from 1 on. A gap means that events were dropped, or a reset. Not compared.
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
