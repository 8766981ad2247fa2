"""The option that names a model: the size of a token's KV, and the time to compute it."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from kvcache.options import parse_size

if TYPE_CHECKING:
    from kvcache.assembly.models import Model

HOW_TO_SIZE = (
    "--model names it: llama-3.1-8b, a config.json, a shape such as 32x8x128, or the bytes of a token's KV, 128KiB"
)
"""How the size of a block is given, for errors."""
_SHAPE = re.compile(r"(\d+)x(\d+)x(\d+)")
_SIZE = re.compile(r"\d[\d.]*\s*[kmg]?i?b?", re.IGNORECASE)


def complete_models(incomplete: str) -> list[str]:
    """Return the models whose names begin with `incomplete`."""
    from kvcache.assembly.models import model_names

    return [name for name in model_names() if name.startswith(incomplete)]


ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="The model: a name, a config.json, LAYERSxHEADSxSIZE, or the bytes of a token's KV. Behind commas: the "
        "dtype of the KV, params=8e9, and flops=400e12 (FLOP/s of prefill).",
        metavar="MODEL,...",
        autocompletion=complete_models,
        show_default=False,
    ),
]


def read_model(text: str | None) -> Model | None:
    """Return the model that `--model` names, or None if the option is not given.

    >>> read_model("llama-3.1-8b,fp8").token_bytes
    65536
    """
    from kvcache.assembly.models import DTYPE_BYTES, Model, model_of

    if text is None:
        return None
    name, *parts = (part.strip() for part in text.split(","))
    dtype, numbers = None, dict.fromkeys(("params", "flops"), 0.0)
    for part in parts:
        key, _, value = part.partition("=")
        if key in numbers:
            numbers[key] = _number(key, value, text)
        elif part in DTYPE_BYTES:
            dtype = part
        else:
            known = ", ".join(DTYPE_BYTES)
            raise ValueError(f"--model takes {known}, params=N and flops=N behind the name, got {part!r} in {text!r}")
    if shape := _SHAPE.fullmatch(name):
        layers, heads, head_size = map(int, shape.groups())
        shown = f"{layers} layers x {heads} heads x {head_size}"
        model = Model(shown, layers, 2 * heads * head_size, None, dtype or "bf16")
    elif _SIZE.fullmatch(name):
        if name.isalnum() and name[:-1].isdecimal() and name[-1] in "bB":
            raise ValueError(f"--model {name} may mean parameters; name the model, or give a token's bytes as a number")
        if dtype is not None:
            raise ValueError(f"--model takes no dtype behind the bytes of a token, got {text!r}")
        # A value of int8 is one byte.
        model = Model(f"{name} a token", 1, parse_size("--model", name), None, "int8")
    else:
        model = model_of(name, dtype or "bf16")
    if numbers["params"]:
        model = replace(model, num_params=numbers["params"])
    return replace(model, flops_per_s=numbers["flops"]) if numbers["flops"] else model


def _number(key: str, value: str, text: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise ValueError(f"--model: {key} must be a number > 0, got {text!r}")
    return number
