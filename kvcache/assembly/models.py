"""The size of a block and the time that a hit saves, for a given model.

A token's KV is 2 x layers x KV heads x head size values; multi-head latent attention keeps one latent vector per layer.
Prefill costs about 2 FLOPs per parameter and token. Attention's share is left out, so the time saved is a lower bound.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from kvcache.options import check_int
from kvcache.registry import did_you_mean

_T = TypeVar("_T")
DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8": 1, "int8": 1}


@dataclass(frozen=True, slots=True)
class Model:
    """The shape of a model's KV cache.

    `values_per_layer` are those that one token keeps in one of `num_layers`. `num_params` are the parameters that a
    token passes through (the active ones of a mixture of experts); None: unknown. `dtype` is that of the KV cache.
    `is_latent`: with multi-head latent attention, of which every rank holds the same values. `flops_per_s` is the rate
    of prefill. Of `num_layers`, `sliding_layers` attend to the last tokens or to a chunk only. `recurrent_layers` come
    on top: they keep no KV.
    """

    name: str
    num_layers: int
    values_per_layer: int
    num_params: float | None = None
    dtype: str = "bf16"
    is_latent: bool = False
    flops_per_s: float = 400e12
    sliding_layers: int = 0
    recurrent_layers: int = 0

    def __post_init__(self) -> None:
        for field in ("num_layers", "values_per_layer"):
            check_int(field, getattr(self, field))

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's KV."""
        return self.num_layers * self.values_per_layer * DTYPE_BYTES[self.dtype]

    def saved_s(self, hit_tokens: int) -> float | None:
        """Return the least seconds of prefill that hits save, or None if the number of parameters is unknown."""
        return None if self.num_params is None else 2 * self.num_params * hit_tokens / self.flops_per_s

    @property
    def layer_note(self) -> str:
        """The assumptions for layers that are not plain attention, or ""."""
        notes = []
        if self.sliding_layers:
            notes.append(f"{self.sliding_layers} sliding layers, counted in full")
        if self.recurrent_layers:
            notes.append(f"{self.recurrent_layers} recurrent layers, not counted")
        return "; ".join(notes)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for a report."""
        names = ("name", "token_bytes", "dtype", "num_params", "flops_per_s")
        return {name: getattr(self, name) for name in names}

    def __str__(self) -> str:
        return f"{self.name}, {self.dtype}, {self.flops_per_s / 1e12:g} TFLOP/s"


def _attention(layers: int, kv_heads: int, head_size: int, params: float, **others: int) -> dict[str, Any]:
    return {"num_layers": layers, "values_per_layer": 2 * kv_heads * head_size, "num_params": params, **others}


def _latent(layers: int, params: float) -> dict[str, Any]:
    # 512 latent values and a rotary key of 64 per layer.
    return {"num_layers": layers, "values_per_layer": 576, "num_params": params, "is_latent": True}


# Layers, KV heads, head size, and the parameters that a token passes through, of the published configurations.
_MODELS = {
    "llama-3.1-8b": _attention(32, 8, 128, 8.0e9),
    "llama-3.1-70b": _attention(80, 8, 128, 70.6e9),
    "llama-3.1-405b": _attention(126, 8, 128, 405.9e9),
    "llama-3.2-1b": _attention(16, 8, 64, 1.24e9),
    "llama-3.2-3b": _attention(28, 8, 128, 3.2e9),
    "llama-3.3-70b": _attention(80, 8, 128, 70.6e9),
    "mistral-7b": _attention(32, 8, 128, 7.2e9),
    "mistral-small-24b": _attention(40, 8, 128, 23.6e9),
    "mixtral-8x7b": _attention(32, 8, 128, 12.9e9),
    "gemma-2-9b": _attention(42, 8, 256, 9.2e9, sliding_layers=21),
    "gemma-2-27b": _attention(46, 16, 128, 27.2e9, sliding_layers=23),
    "gemma-3-4b": _attention(34, 4, 256, 3.9e9, sliding_layers=29),
    "gemma-3-12b": _attention(48, 8, 256, 11.8e9, sliding_layers=40),
    "gemma-3-27b": _attention(62, 16, 128, 27.0e9, sliding_layers=52),
    "phi-4": _attention(40, 10, 128, 14.7e9),
    "yi-34b": _attention(60, 8, 128, 34.4e9),
    "qwen2.5-7b": _attention(28, 4, 128, 7.6e9),
    "qwen2.5-14b": _attention(48, 8, 128, 14.8e9),
    "qwen2.5-32b": _attention(64, 8, 128, 32.8e9),
    "qwen2.5-72b": _attention(80, 8, 128, 72.7e9),
    "qwen3-4b": _attention(36, 8, 128, 4.0e9),
    "qwen3-8b": _attention(36, 8, 128, 8.2e9),
    "qwen3-14b": _attention(40, 8, 128, 14.8e9),
    "qwen3-32b": _attention(64, 8, 128, 32.8e9),
    "qwen3-30b-a3b": _attention(48, 4, 128, 3.3e9),
    "qwen3-235b-a22b": _attention(94, 4, 128, 22.0e9),
    "gpt-oss-20b": _attention(24, 8, 64, 3.6e9, sliding_layers=12),
    "gpt-oss-120b": _attention(36, 8, 64, 5.1e9, sliding_layers=18),
    "qwen3-next-80b-a3b": _attention(12, 2, 256, 3.0e9, recurrent_layers=36),
    "llama-4-scout": _attention(48, 8, 128, 17.0e9, sliding_layers=36),
    "llama-4-maverick": _attention(48, 8, 128, 17.0e9, sliding_layers=36),
    "glm-4.5": _attention(92, 8, 128, 32.0e9),
    "glm-4.5-air": _attention(46, 8, 128, 12.0e9),
    "glm-4.6": _attention(92, 8, 128, 32.0e9),
    "deepseek-v3": _latent(61, 37.0e9),
    "deepseek-r1": _latent(61, 37.0e9),
    "kimi-k2": _latent(61, 32.0e9),
}
COUNTED = (
    "A sliding layer keeps the last tokens of a prompt only: an engine stores and loads at most what is counted. A "
    "recurrent layer keeps a state of fixed size: an engine stores states on top, and hits only where one was "
    "stored. kvcache plan --groups plans both."
)
"""What `Model.layer_note` means for a plan."""
_TAIL = re.compile(r"-(instruct|thinking|16e|17b|128e|chat|base|pt|it|hf|fp8|awq|gptq|v\d+[.]\d+|2[45]\d\d)$")


def model_names() -> list[str]:
    """Return the names that `model_of` accepts."""
    return list(_MODELS)


def model_of(name: str, dtype: str = "bf16") -> Model:
    """Return a model by name, or by the path of its Hugging Face ``config.json``.

    A name is one of `model_names`, also as the hub spells it (``Qwen/Qwen3-8B-FP8``). A path ends in ``.json``, or is a
    folder that holds a ``config.json``. Raise ValueError if the name is unknown, or the file does not describe a model.
    """
    path = config_path(name)
    if path is not None:
        return read_config(path, partial(_model_of_config, dtype=dtype))
    known = _plain(name)
    if known not in _MODELS:
        raise ValueError(
            f"unknown model {name!r}, known ones: {', '.join(_MODELS)}; or the path of its config.json"
            f"{did_you_mean(known, _MODELS)}"
        )
    return Model(known, dtype=dtype, **_MODELS[known])


def _plain(name: str) -> str:
    """Return a name as the table spells it: lower case, without organisation, vendor's prefix, tuning and release."""
    plain = name.rpartition("/")[2].lower().removeprefix("meta-")
    while (shorter := _TAIL.sub("", plain)) != plain:
        plain = shorter
    return plain


def config_path(name: str) -> Path | None:
    """Return the path of a ``config.json`` that `name` is, or that lies in the folder `name`; otherwise None."""
    path = Path(name) if name.endswith(".json") else Path(name) / "config.json"
    return path if name.endswith(".json") or path.is_file() else None


def read_config(path: Path, parse: Callable[[Mapping[str, Any], str], _T]) -> _T:
    """Return `parse` of a Hugging Face configuration (the language part of a multimodal one) and the model's name.

    Raise ValueError if the file cannot be read; it and those of `parse` name the file.
    """
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError("must be a JSON object")
        name = str(config.get("_name_or_path") or "").rpartition("/")[2] or path.resolve().parent.name
        nested = config.get("text_config")
        return parse(nested if isinstance(nested, Mapping) else config, name)
    except OSError as error:
        raise ValueError(f"model config {str(path)!r} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"model config {str(path)!r}: {error}") from error


def _model_of_config(config: Mapping[str, Any], name: str, dtype: str) -> Model:
    def number(*names: str) -> int | None:
        for field in names:
            value = config.get(field)
            if type(value) is int and value > 0:
                return value
        return None

    def needed(*names: str) -> int:
        value = number(*names)
        if value is None:
            raise ValueError(f"must hold a positive int {names[0]!r}, got {config.get(names[0])!r}")
        return value

    layers = needed("num_hidden_layers", "n_layer")
    # Layers of linear attention keep a state of fixed size and no KV.
    kinds = config.get("layer_types")
    kinds = [str(kind) for kind in kinds] if isinstance(kinds, list) else []
    recurrent = sum("linear" in kind or "mamba" in kind for kind in kinds)
    sliding = sum("sliding" in kind or "chunked" in kind for kind in kinds)
    kept = len(kinds) - recurrent if kinds else layers
    latent = number("kv_lora_rank")
    if latent is not None:
        values = latent + needed("qk_rope_head_dim")
    else:
        heads = needed("num_attention_heads", "n_head")
        head_size = number("head_dim", "attention_head_dim") or needed("hidden_size", "n_embd") // heads
        values = 2 * (number("num_key_value_heads") or heads) * head_size
    return Model(
        name,
        kept,
        values,
        # Layers of such a pattern are attention or an MLP, not both.
        None if "hybrid_override_pattern" in config else _params_of_config(number, layers),
        dtype,
        latent is not None,
        sliding_layers=sliding,
        recurrent_layers=recurrent,
    )


def _params_of_config(number: Any, layers: int) -> float | None:
    """Estimate the parameters that a token passes through; None if the configuration does not contain them."""
    hidden, heads, inner = number("hidden_size"), number("num_attention_heads"), number("intermediate_size")
    if hidden is None or heads is None or number("kv_lora_rank") is not None:
        return None
    head_size = number("head_dim") or hidden // heads
    attention = 2 * hidden * head_size * (heads + (number("num_key_value_heads") or heads))
    experts = number("num_experts_per_tok")
    if experts is not None:
        inner = experts * (number("moe_intermediate_size") or inner or 0)
        inner += number("shared_expert_intermediate_size") or 0
    if not inner:
        return None
    # Gate, up and down; the embedding is a lookup, the head one product for each answer.
    return float(layers * (attention + 3 * hidden * inner))
