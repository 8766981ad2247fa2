"""Samples of a model's tensors: which elements changed since the last request, at a small part of a forward's cost.

A write through ``weight.data`` leaves no trace in the tensor. So some bits of every row are kept and compared, and of
large embeddings the rows that a prompt uses: a changed row of a token, of a position or of an expert also changes
keys and values that the verification of a hit does not compute again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

# Smaller tensors are compared whole.
_WHOLE_ELEMENTS = 1 << 14
_SAMPLES_PER_ROW = 2
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MULTIPLIER = 0x9E3779B97F4A7C15 - (1 << 64)  # odd, as int64


class TensorSamples:
    """Elements of each of `tensors` as they are now: all of a small one, at least two of every row of a large one.

    A tensor whose bits torch cannot view (a packed or wrapped one) is left out.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        views: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for tensor in {(t.data_ptr(), t.shape, t.stride()): t for t in tensors if not t.is_meta}.values():
            bits = _bits_of(tensor)
            if bits is not None and bits.numel():
                views.setdefault((bits.dtype, bits.device), []).append(_sample(bits))
        self._views = list(views.values())
        self._taken = self._take()

    def differ(self) -> bool:
        """Return whether an element has changed since the constructor."""
        # One comparison for each dtype and device, and not one for each tensor: each waits for the device.
        return not all(torch.equal(now, taken) for now, taken in zip(self._take(), self._taken, strict=True))

    @torch.no_grad()
    def _take(self) -> list[torch.Tensor]:
        return [torch.cat([view.flatten() for view in views]) for views in self._views]


class EmbeddingRows:
    """Digests of the rows of a model's embeddings that a token uses: by its id, and by its position.

    Embeddings that `TensorSamples` compares whole are left out.
    """

    def __init__(self, model: Any) -> None:
        tables = [module.weight for module in model.modules() if isinstance(module, torch.nn.Embedding)]
        self._tables = [
            bits
            for table in {id(table): table for table in tables}.values()
            if table.numel() > _WHOLE_ELEMENTS and table.ndim == 2 and (bits := _bits_of(table)) is not None
        ]
        self._by_id = model.get_input_embeddings().weight.data_ptr()

    @torch.no_grad()
    def digests(self, ids: npt.NDArray[np.int64], start: int) -> npt.NDArray[np.int64]:
        """Return a digest for each of consecutive tokens, the first one at position `start`."""
        total = torch.zeros(len(ids), dtype=torch.int64)
        positions = np.arange(start, start + len(ids))
        for table in self._tables:
            # Positions begin at row 2 in some models. Other tables than the first one may be read by token id, too.
            rows = [ids] if table.data_ptr() == self._by_id else [ids, positions, positions + 2]
            factors = torch.arange(1, 2 * table.shape[1], 2, device=table.device) * _MULTIPLIER
            for which in rows:
                used = table[torch.from_numpy(which).clamp(max=len(table) - 1).to(table.device)]
                total = total * _MULTIPLIER + (used.long() * factors).sum(1).cpu()
        return total.numpy()

    def __len__(self) -> int:
        return len(self._tables)


def _bits_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """View a tensor as integers; None if torch cannot."""
    dtype = _BITS.get(tensor.element_size())
    # A subclass that wraps other tensors has no memory of its own.
    is_wrapper = hasattr(tensor, "__tensor_flatten__")
    if dtype is None or tensor.is_quantized or is_wrapper or tensor.layout is not torch.strided:
        return None
    return None if tensor.is_conj() or tensor.is_neg() else tensor.detach().view(dtype)


def _sample(bits: torch.Tensor) -> torch.Tensor:
    """View a part of a tensor: every row, and different columns of neighbouring rows."""
    if bits.ndim < 2 or bits.numel() <= _WHOLE_ELEMENTS:
        return bits
    # In the order of its memory, a transposed tensor can be viewed flat, too.
    bits = bits.permute(sorted(range(bits.ndim), key=bits.stride, reverse=True))
    columns = bits.shape[-1]
    # With a common divisor, the samples of all rows would lie in the same few columns.
    step = next(step for step in range(max(1, columns // _SAMPLES_PER_ROW), 0, -1) if math.gcd(step, columns) == 1)
    return bits.view(-1)[::step] if bits.is_contiguous() else bits[..., ::step]
