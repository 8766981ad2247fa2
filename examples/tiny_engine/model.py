"""The engine's stand-in for a transformer: KV bytes derived from all tokens before them.

A block's bytes depend on its whole prefix, its group and its layer, so a misplaced block is always detected.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from kvcache import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor, OffloadingConfig, OffloadingGroup

BLOCK_TOKENS = 16
# Per KV-cache group the bytes of each layer's page; 16 bytes of padding follow each page, untouched by copies.
GROUPS = ((240, 240, 496), (112, 112))
# The window of each group in offloaded blocks: the second one reads only the last two before a token.
WINDOWS = (None, 2)
PADDING_BYTES = 16
PADDING = 0x5A


@dataclass(frozen=True)
class EngineConfig:
    """Configuration shared by scheduler and worker."""

    num_device_blocks: int
    offloading: OffloadingConfig


def make_config(num_device_blocks: int, num_cpu_blocks: int, factor: int, cache_policy: str) -> EngineConfig:
    """Return the configuration of an engine: offloaded blocks span `factor` device blocks."""
    refs, groups = iter(range(sum(map(len, GROUPS)))), []
    for pages in GROUPS:
        group_refs = tuple(CanonicalKVCacheRef(next(refs), page) for page in pages)
        groups.append(OffloadingGroup(BLOCK_TOKENS, (), group_refs))
    extra = {"num_cpu_blocks": num_cpu_blocks, "block_size": factor * BLOCK_TOKENS, "cache_policy": cache_policy}
    return EngineConfig(num_device_blocks, OffloadingConfig(tuple(groups), BLOCK_TOKENS, extra_config=extra))


def make_kv_caches(config: EngineConfig) -> CanonicalKVCaches:
    """Return the "device's" KV cache: one tensor per layer, with padded pages."""
    tensors = []
    for page in (page for pages in GROUPS for page in pages):
        shape = (config.num_device_blocks, page + PADDING_BYTES)
        tensors.append(CanonicalKVCacheTensor(torch.full(shape, PADDING, dtype=torch.int8), page + PADDING_BYTES))
    return CanonicalKVCaches(tensors, [list(group.refs) for group in config.offloading.groups])


def prefix_hashes(tokens: list[int], before: list[bytes]) -> list[bytes]:
    """Return one hash per full device block of `tokens`, each of everything up to its block's end."""
    hashes = list(before)
    for first in range(len(before) * BLOCK_TOKENS, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        block = np.array(tokens[first : first + BLOCK_TOKENS], np.int64).tobytes()
        hashes.append(hashlib.blake2b((hashes[-1] if hashes else b"") + block, digest_size=16).digest())
    return hashes


@lru_cache(maxsize=1 << 14)
def layer_bytes(block_hash: bytes, group_idx: int, layer_idx: int, page: int) -> np.ndarray:
    """Return the KV bytes of one layer of one block."""
    seed = hashlib.blake2b(block_hash + bytes((group_idx, layer_idx)), digest_size=8).digest()
    words = np.arange(1, page // 8 + 1, dtype=np.uint64) * np.frombuffer(seed, np.uint64)
    return words.view(np.int8)


class Model:
    """Writes blocks into a KV cache and verifies them."""

    def __init__(self, kv_caches: CanonicalKVCaches) -> None:
        self._groups = [
            [(kv_caches.tensors[ref.tensor_idx].tensor.numpy(), ref.page_size_bytes) for ref in refs]
            for refs in kv_caches.group_data_refs
        ]

    def compute(self, group_idx: int, block_id: int, block_hash: bytes) -> None:
        """Write one device block of one group."""
        for layer_idx, (rows, page) in enumerate(self._groups[group_idx]):
            rows[block_id, :page] = layer_bytes(block_hash, group_idx, layer_idx, page)

    def fault_in(self, group_idx: int, block_id: int, block_hash: bytes) -> str | None:
        """Describe the first difference in one device block of one group; None if every byte is as written."""
        for layer_idx, (rows, page) in enumerate(self._groups[group_idx]):
            where = f"block {block_hash.hex()} of group {group_idx}, layer {layer_idx}, in device block {block_id}"
            if not np.array_equal(rows[block_id, :page], layer_bytes(block_hash, group_idx, layer_idx, page)):
                return f"{where}: the bytes differ"
            if (rows[block_id, page:] != PADDING).any():
                return f"{where}: the padding was written to"
        return None
