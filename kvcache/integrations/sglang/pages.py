"""HostPages: the pages of one of SGLang's host pools as buffers, in the order of their flat form."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Buffer = npt.NDArray[np.uint8]
# Of the kinds of pools of SGLang 0.5.23; each has some of them.
_GEOMETRY = (
    *("dtype", "layout", "page_size", "layer_num", "start_layer", "end_layer", "size_per_token", "storage_format_tag"),
    *("head_num", "head_dim", "v_head_dim", "kv_cache_dim", "num_mamba_layers", "temporal_dtype", "conv_dtype"),
    *("temporal_state_shape", "temporal_state_elem_size", "conv_state_shapes", "conv_state_elem_sizes"),
)


def bytes_of(tensor: torch.Tensor) -> Buffer:
    """Return the bytes of a contiguous tensor in host memory, without a copy."""
    flat: Buffer = tensor.detach().view(-1).view(torch.uint8).numpy()
    return flat


class HostPages:
    """The pages of a host pool.

    A pool that cannot name the addresses of a page's parts is copied page by page (`is_flat`). `page_bytes` are 0 for
    a pool that holds no bytes, only indices: then other pools hold the model's pages.
    """

    def __init__(self, pool: Any) -> None:
        self.pool = pool
        self.page_size: int = getattr(pool, "page_size", 1) or 1
        self.num_pages: int = pool.size // self.page_size
        self.is_flat = False
        self._order: list[int] = []
        self.page_bytes = self._measure()

    def _measure(self) -> int:
        pool = self.pool
        if pool.kv_buffer is None and not hasattr(pool, "k_buffer"):
            return 0
        try:
            addresses, sizes = pool.get_page_buffer_meta(torch.arange(self.page_size))
        except (NotImplementedError, ValueError, AttributeError, TypeError):
            self.is_flat = True
            return int(pool.get_dummy_flat_data_page().nbytes)
        # Inside one tensor, the flat form of a page has its parts in the order of their addresses.
        is_one = isinstance(pool.kv_buffer, torch.Tensor)
        self._order = [int(i) for i in np.argsort(addresses)] if is_one else list(range(len(addresses)))
        return int(sum(sizes))

    def geometry(self) -> dict[str, str]:
        """Return what decides which bytes a page has, for the fingerprint."""
        values = {name: getattr(self.pool, name, None) for name in _GEOMETRY}
        values["class"] = type(self.pool).__name__
        return {name: str(value) for name, value in values.items() if value is not None}

    def buffers(self, host_indices: torch.Tensor, num_pages: int) -> list[list[Buffer]]:
        """Return the parts of the pages at `host_indices`, `page_size` slots each; ValueError if they are not as many.

        If `is_flat`, they are copies, which `set_pages` writes back.
        """
        if host_indices is None or host_indices.numel() != num_pages * self.page_size:
            raise ValueError(f"{num_pages} pages need {num_pages * self.page_size} slots, got {host_indices!r:.200}")
        if self.is_flat:
            return [[bytes_of(self.pool.get_data_page(i).contiguous())] for i in self._starts(host_indices)]
        addresses, sizes = self.pool.get_page_buffer_meta(host_indices)
        num_parts = len(self._order)
        return [
            [_memory(addresses[first + i], sizes[first + i]) for i in self._order]
            for first in range(0, num_parts * num_pages, num_parts)
        ]

    def set_pages(self, host_indices: torch.Tensor, buffers: Sequence[Sequence[Buffer]], answers: list[bool]) -> None:
        """Write the pages that were loaded into copies to the pool."""
        if self.is_flat:
            for start, (buffer,), is_loaded in zip(self._starts(host_indices), buffers, answers, strict=True):
                if is_loaded:
                    page = torch.from_numpy(buffer).view(self.pool.get_dummy_flat_data_page().dtype)
                    self.pool.set_from_flat_data_page(start, page)

    def _starts(self, host_indices: torch.Tensor) -> list[int]:
        starts: list[int] = host_indices[:: self.page_size].tolist()
        return starts


def _memory(address: int, num_bytes: int) -> Buffer:
    memory: Any = (ctypes.c_uint8 * num_bytes).from_address(address)
    return np.frombuffer(memory, np.uint8)
