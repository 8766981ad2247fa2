"""Whose KV data it is: a digest of a model's config and weights, and of the adapters that are active.

Two models that differ anywhere get different keys, so that a store shared by several serves each only its own.
"""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from kvcache.keys import key_seed

_CHUNK_BYTES = 1 << 28
# What a config says of where it came from, not of what it computes.
_NOT_IDENTITY = ("_name_or_path", "transformers_version", "architectures")


class ModelIdentity:
    """A model's fingerprint, taken anew when its weights have changed.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        Whose.
    name : str, optional
        What stands for config and weights, such as ``"org/model@revision"``. None: a digest of both.

    Notes
    -----
    The digest reads every weight once, on as many threads as there are cores (SHA-256, about 1.4 GB/s a core). After
    that a call costs a look at each tensor: one that was replaced, moved, cast or changed in place is noticed; one
    whose values were changed behind autograd's back (``weight.data.add_(...)``) is not.
    """

    def __init__(self, model: Any, name: str | None = None) -> None:
        if name is not None and (not isinstance(name, str) or not name):
            raise ValueError(f"fingerprint must be a non-empty str or None, got {name!r}")
        self._model = model
        self._name = name
        self._seen: list[tuple[Any, ...]] = []
        self._held: dict[str, torch.Tensor] = {}
        self._digest = b""
        self.fingerprint()

    def fingerprint(self) -> bytes:
        """Return 32 bytes that no other model, dtype or set of active adapters has."""
        adapters = repr(_active_adapters(self._model))
        if self._name is not None:
            return key_seed(self._name, adapters)
        tensors = self._model.state_dict(keep_vars=True)
        seen = [(id(t), t.data_ptr(), t.dtype, 0 if t.is_inference() else t._version) for t in tensors.values()]
        if seen != self._seen:
            self._digest = _digest(self._model, tensors)
            # Held, so that no new tensor is given an old one's id or memory.
            self._seen, self._held = seen, tensors
        return key_seed(self._digest, adapters)


def _digest(model: Any, tensors: dict[str, torch.Tensor]) -> bytes:
    config = {name: value for name, value in model.config.to_dict().items() if name not in _NOT_IDENTITY}
    with ThreadPoolExecutor() as pool:
        digests = list(pool.map(_tensor_digest, tensors.values()))
    text = json.dumps(config, sort_keys=True, default=str)
    fields = [f for name, digest in zip(tensors, digests, strict=True) for f in (name, digest)]
    return key_seed(type(model).__qualname__, text, *fields)


def _tensor_digest(tensor: torch.Tensor) -> bytes:
    if tensor.is_meta:
        raise ValueError("some of the model's weights are not in memory: name the model with fingerprint=")
    digest = hashlib.sha256(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    flat = tensor.detach().contiguous().flatten().view(torch.uint8)
    for start in range(0, flat.numel(), _CHUNK_BYTES):
        digest.update(flat[start : start + _CHUNK_BYTES].cpu().numpy().data)
    return digest.digest()


def _active_adapters(model: Any) -> list[Any]:
    """Return which adapters (peft's) take part in each adapted module, or nothing where there are none."""
    if not getattr(model, "peft_config", None):
        return []
    return [
        (name, list(module.active_adapters), module.disable_adapters, list(module.merged_adapters))
        for name, module in model.named_modules()
        if hasattr(module, "merged_adapters")
    ]
