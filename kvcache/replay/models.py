"""What a block weighs and what a hit saves, for a given model.

A token's KV is 2 (K and V) x layers x KV heads x head size values; models with multi-head latent attention keep one
latent vector per layer instead. Prefill costs about 2 FLOPs per parameter and token; attention's share, which grows
with the length of the prompt, is left out, so the time saved is a lower bound.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass

_DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8": 1, "int8": 1}


@dataclass(frozen=True, slots=True)
class Model:
    """The shape of a model's KV cache.

    Parameters
    ----------
    name : str
        What reports call it.
    num_layers : int
        Layers that keep KV.
    values_per_layer : int
        Numbers that one token keeps in one layer.
    num_params : float, optional
        Parameters that a token passes through (the active ones of a mixture of experts); None: not known.
    dtype : str
        Of the KV cache: bf16, fp16, fp32, fp8 or int8.

    Raises
    ------
    ValueError
        A number is not positive, or the dtype is not known.
    """

    name: str
    num_layers: int
    values_per_layer: int
    num_params: float | None = None
    dtype: str = "bf16"

    def __post_init__(self) -> None:
        for field in ("num_layers", "values_per_layer"):
            value = getattr(self, field)
            if type(value) is not int or value < 1:
                raise ValueError(f"{field} must be an int >= 1, got {value!r}")
        if self.num_params is not None and not 0 < self.num_params < math.inf:
            raise ValueError(f"num_params must be a number > 0, got {self.num_params!r}")
        if self.dtype not in _DTYPE_BYTES:
            raise ValueError(f"unknown dtype {self.dtype!r}, known ones: {', '.join(_DTYPE_BYTES)}")

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's KV."""
        return self.num_layers * self.values_per_layer * _DTYPE_BYTES[self.dtype]

    def saved_prefill_s(self, num_tokens: int, flops_per_s: float) -> float | None:
        """Return the seconds of prefill that `num_tokens` hit tokens save at this rate; None if it is not known."""
        return None if self.num_params is None else 2 * self.num_params * num_tokens / flops_per_s


def _attention(layers: int, kv_heads: int, head_size: int, params: float) -> tuple[int, int, float]:
    return layers, 2 * kv_heads * head_size, params


# Layers, values per layer and token, parameters a token passes through; from the models' published configurations.
_MODELS = {
    "llama-3.1-8b": _attention(32, 8, 128, 8.0e9),
    "llama-3.1-70b": _attention(80, 8, 128, 70.6e9),
    "llama-3.1-405b": _attention(126, 8, 128, 405.9e9),
    "mistral-7b": _attention(32, 8, 128, 7.2e9),
    "qwen2.5-7b": _attention(28, 4, 128, 7.6e9),
    "qwen2.5-72b": _attention(80, 8, 128, 72.7e9),
    "qwen3-8b": _attention(36, 8, 128, 8.2e9),
    "qwen3-32b": _attention(64, 8, 128, 32.8e9),
    "qwen3-235b-a22b": _attention(94, 4, 128, 22.0e9),
    # 512 latent values and a rotary key of 64 per layer.
    "deepseek-v3": (61, 576, 37.0e9),
    "kimi-k2": (61, 576, 32.0e9),
}


def dtype_names() -> list[str]:
    """Return the dtypes that a `Model` knows."""
    return list(_DTYPE_BYTES)


def model_names() -> list[str]:
    """Return the models that `model_of` knows."""
    return list(_MODELS)


def model_of(name: str, dtype: str = "bf16") -> Model:
    """Return a model by name; ValueError listing the known ones otherwise."""
    if name not in _MODELS:
        close = difflib.get_close_matches(name.lower(), _MODELS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"unknown model {name!r}, known ones: {', '.join(_MODELS)}{hint}")
    return Model(name, *_MODELS[name], dtype=dtype)
