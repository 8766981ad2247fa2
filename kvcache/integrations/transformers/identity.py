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
    """A model's fingerprint, taken anew when what it computes with has changed.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        Whose.
    name : str, optional
        What stands for the weights, such as ``"org/model@revision"``. None: a digest of them.

    Notes
    -----
    The fingerprint covers the config, the weights, all buffers (those too that no checkpoint holds, such as rotary
    frequencies), tensors, numbers and names that modules keep as plain attributes, and which forward hooks stand where.
    The digest reads every tensor once, on as many threads as there are cores (SHA-256, about 1.4 GB/s a core). After
    that a call costs a look at each tensor and attribute: a tensor that was replaced, moved, cast or changed in place
    is read anew; one whose values were changed behind autograd's back (``weight.data.add_(...)``) is not noticed.
    """

    def __init__(self, model: Any, name: str | None = None) -> None:
        if name is not None and (not isinstance(name, str) or not name):
            raise ValueError(f"fingerprint must be a non-empty str or None, got {name!r}")
        self._model = model
        self._name = name
        # Per tensor what it looked like, and its digest. Tensors and hooks are held, so that nothing new is given an
        # old one's id or memory.
        self._digests: dict[str, tuple[tuple[Any, ...], bytes, torch.Tensor]] = {}
        self._hooks: list[Any] = []
        self.fingerprint()

    def fingerprint(self) -> bytes:
        """Return 32 bytes that no other model, dtype, configuration or set of active adapters has."""
        tensors, attributes = self._parts()
        seen = {name: _look_of(tensor) for name, tensor in tensors.items()}
        stale = [name for name, look in seen.items() if name not in self._digests or self._digests[name][0] != look]
        if stale:
            with ThreadPoolExecutor() as pool:
                fresh = list(pool.map(_tensor_digest, [tensors[name] for name in stale]))
            self._digests |= {
                name: (seen[name], digest, tensors[name]) for name, digest in zip(stale, fresh, strict=True)
            }
        self._digests = {name: self._digests[name] for name in seen}
        adapters = repr(_active_adapters(self._model))
        fields = [part for name in sorted(seen) for part in (name, self._digests[name][1])]
        text = json.dumps([_config_of(self._model), attributes], sort_keys=True, default=str)
        return key_seed(type(self._model).__qualname__, self._name or "", text, adapters, *fields)

    def _parts(self) -> tuple[dict[str, torch.Tensor], list[Any]]:
        """Return the tensors that the model computes with, and what else its modules keep."""
        tensors: dict[str, torch.Tensor] = {}
        attributes: list[Any] = []
        hooks: list[Any] = []
        for path, module in self._model.named_modules():
            state = vars(module)
            own = dict(module.named_buffers(recurse=False, remove_duplicate=False))
            if self._name is None:
                own |= module.named_parameters(recurse=False, remove_duplicate=False)
            for name, value in (*own.items(), *state.items()):
                if isinstance(value, torch.Tensor) and not (value.is_meta and self._name is not None):
                    tensors[f"{path}.{name}"] = value
                elif type(value) in (bool, int, float, str) and not name.startswith("_"):
                    attributes.append((path, name, value))
            # What replaces or wraps the module's own forward has no digest: who it is must do.
            called = [*state["_forward_pre_hooks"].values(), *state["_forward_hooks"].values()]
            called += [state["forward"]] if "forward" in state else []
            for hook in called:
                if hook not in self._hooks:
                    self._hooks.append(hook)
                hooks.append((path, self._hooks.index(hook)))
        return tensors, [attributes, hooks]


def _look_of(t: torch.Tensor) -> tuple[Any, ...]:
    return id(t), t.data_ptr(), t.dtype, 0 if t.is_inference() else t._version


def _config_of(model: Any) -> dict[str, Any]:
    return {name: value for name, value in model.config.to_dict().items() if name not in _NOT_IDENTITY}


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
