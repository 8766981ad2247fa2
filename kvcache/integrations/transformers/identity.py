"""The fingerprint of a model, which is part of every block key besides token ids.

Attributes, hooks, versions of tensors and samples of their elements are cheap to look at and separate models that
differ slightly. They do not show every change, so `PrefixCache` also computes the end of every hit again.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvcache.integrations.transformers.samples import EmbeddingRows, TensorSamples
from kvcache.keys import key_seed

# Fields of a config that describe its origin, not the computation.
_NOT_IDENTITY = ("_name_or_path", "transformers_version", "architectures")
_OF_EVERY_MODULE = frozenset(vars(torch.nn.Module()))


class ModelIdentity:
    """Fingerprint of a model, taken again for every request.

    If a `name` identifies the weights, such as ``"org/model@revision"``, parameters are not looked at.

    Config, autocast, and numbers, names and containers of them that modules keep as attributes (peft's active adapters
    and their scaling among them) are part of the fingerprint: if they change back, older blocks are found again. A
    tensor that was replaced, moved, cast or changed in place, a hook and a forward each begin a new generation.

    `forms` are the dtypes and devices of all tensors, and the dtype of autocast: they decide those of keys and values.
    """

    def __init__(self, model: Any, name: str | None = None) -> None:
        if name is not None and (not isinstance(name, str) or not name):
            raise ValueError(f"fingerprint must be a non-empty str or None, got {name!r}")
        self._model = model
        self._name = name
        self._looks: dict[Any, Any] = {}
        # These references keep the ids and addresses in `_looks` from being reused.
        self._held: list[Any] = []
        self._samples = TensorSamples(())
        self._rows: EmbeddingRows | None = None
        self.forms: frozenset[Any] = frozenset()
        self.generation = 0
        self.fingerprint()

    def fingerprint(self) -> bytes:
        """Return 32 bytes that differ if the model, its dtype, configuration or active adapters differ."""
        looks: dict[Any, Any] = {}
        held: list[Any] = []
        seen: list[torch.Tensor] = []
        attributes = []
        forms = set()
        for path, module in self._model.named_modules():
            state = vars(module)
            parameters = state["_parameters"]
            forms.update([(value.dtype, value.device) for value in parameters.values() if value is not None])
            tensors = dict(state["_buffers"]) | ({} if self._name is not None else parameters)
            for name, value in (*tensors.items(), *state.items()):
                if isinstance(value, torch.Tensor):
                    if value.is_meta and self._name is None:
                        raise ValueError("some of the model's weights are not in memory: name the model, fingerprint=")
                    looks[path, name] = _look_of(value)
                    seen.append(value)
                elif name not in _OF_EVERY_MODULE and _is_plain(value):
                    attributes.append((path, name, repr(value)))
            # Functions have no digest; their identity stands for it.
            called = [type(module).forward, state.get("forward")]
            called += [*state["_forward_pre_hooks"].values(), *state["_forward_hooks"].values()]
            looks[path] = [id(function) for function in called]
            held += called
        # The samples view the tensors that `looks` describes, so they are compared only if these are the same ones.
        if looks != self._looks or self._samples.differ():
            self._looks, self._held = looks, held + seen
            self._samples = TensorSamples(seen)
            self._rows = None if self._name is not None else EmbeddingRows(self._model)
            self.generation += 1
        device = self._model.device.type
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        self.forms = frozenset((*forms, autocast))
        config = {name: value for name, value in self._model.config.to_dict().items() if name not in _NOT_IDENTITY}
        text = json.dumps([config, str(autocast), attributes], sort_keys=True, default=str)
        return key_seed(type(self._model).__qualname__, self._name or "", str(self.generation), text)

    def row_digests(self, ids: npt.NDArray[np.int64], start: int) -> npt.NDArray[np.int64] | None:
        """Return a digest of the embedding of each token, from position `start` on; None if no table is large."""
        return self._rows.digests(ids, start) if self._rows else None

    def forget(self, generation: int) -> None:
        """Begin a new generation, unless `generation` has ended already: no older block is found again."""
        if self.generation == generation:
            self.generation += 1


def _look_of(t: torch.Tensor) -> tuple[Any, ...]:
    return id(t), t.data_ptr(), t.dtype, 0 if t.is_inference() else t._version


def _is_plain(value: Any) -> bool:
    """Return whether a value is a number, a name, or a container of such."""
    if isinstance(value, dict):
        return all(map(_is_plain, value)) and all(map(_is_plain, value.values()))
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)
