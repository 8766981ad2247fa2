"""From configuration to a host pool with tiers below it.

A tier's threads read and write host blocks in the scheduler's process, and handlers copy them in the workers'; so the
pool is a file in shared memory that all of them map. A block's bytes of all ranks lie side by side in it.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from kvcache.assembly.assemble import OffloadSettings, open_manager, read_pool_path
from kvcache.assembly.base import HandlerOf, OffloadingSpec
from kvcache.assembly.config import OffloadingConfig
from kvcache.assembly.cpu import CPUOffloadingSpec
from kvcache.control.manager import OffloadingManager
from kvcache.specs import CanonicalKVCaches, CPULoadStoreSpec, GPULoadStoreSpec
from kvcache.transfer.shared_file import PREFIX, SharedBlocks

_ALIGN_BYTES = 4096


def rank_bytes_of(num_bytes: int) -> int:
    """Return the bytes that one rank's part of a shared block takes: `num_bytes`, and what aligns the next part."""
    return -(-num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES


class TieringOffloadingSpec(CPUOffloadingSpec):
    """Offload to host memory, and from there to tiers below it.

    Parameters
    ----------
    config : OffloadingConfig
        Its `extra_config` lists the ``tiers`` (see `kvcache.assembly.assemble.read_tiers`), and may set the
        options of tiers of `kvcache.assembly.assemble.OffloadSettings`. Every group needs its refs, because they hold
        the size of a block. The rest is as for `CPUOffloadingSpec`.

    Raises
    ------
    ValueError
        See `CPUOffloadingSpec`; or a tier's options are invalid.
    """

    option_names = OffloadingSpec.option_names | OffloadSettings.keys()

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        self._part_bytes = rank_bytes_of(self.rank_bytes())
        self._pool_path = read_pool_path(self.settings, f"{PREFIX}{self._identity()}")

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What makes these blocks different from those of another model, dtype or geometry."""
        config = self.config
        return {
            "model": config.model_name,
            "dtype": config.dtype,
            "groups": [
                [group.block_size, list(group.layer_names), [ref.page_size_bytes for ref in group.refs]]
                for group in config.groups
            ],
            "block_size_factor": self.block_size_factor,
            "world_size": config.world_size,
            "context_parallel": [config.decode_context_parallel_size, config.prefill_context_parallel_size],
        }

    def _read_settings(self) -> OffloadSettings:
        if self.extra_config.get("tiers") is None:
            raise ValueError("tiers in extra_config must be a list of dicts, got None")
        if not self.rank_bytes():
            raise ValueError("tiers need the refs of every group, because they hold the size of a block")
        return OffloadSettings.read(self.extra_config)

    def _make_manager(self) -> OffloadingManager:
        block_bytes = self._part_bytes * self.config.world_size
        shared = SharedBlocks(self._pool_path, self.num_blocks, block_bytes, is_owner=True)
        return open_manager(
            self.settings,
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            shared=shared,
            fingerprint=self.fingerprint,
        )

    def _make_handlers(self, kv_caches: CanonicalKVCaches) -> list[HandlerOf]:
        from kvcache.transfer.shared_pool import shared_pool_handlers

        config = self.config
        shared = SharedBlocks(self._pool_path, self.num_blocks, self._part_bytes * config.world_size, is_owner=False)
        self.pool, store, load = shared_pool_handlers(
            kv_caches, shared, config.rank, self._part_bytes, self.block_size_factor, self.settings.num_copy_threads
        )
        return [(GPULoadStoreSpec, CPULoadStoreSpec, store), (CPULoadStoreSpec, GPULoadStoreSpec, load)]

    def _identity(self) -> str:
        text = json.dumps([self.fingerprint, self.extra_config["tiers"], self.num_blocks], sort_keys=True, default=repr)
        return hashlib.sha256(text.encode()).hexdigest()[:24]
