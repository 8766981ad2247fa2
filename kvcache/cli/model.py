"""The options that say which model a trace is weighed for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from kvcache.assembly.models import Model


def complete_models(incomplete: str) -> list[str]:
    """Return the models whose names begin with `incomplete`."""
    from kvcache.assembly.models import model_names

    return [name for name in model_names() if name.startswith(incomplete)]


def complete_dtypes(incomplete: str) -> list[str]:
    """Return the dtypes of a KV cache that begin with `incomplete`."""
    from kvcache.assembly.models import dtype_names

    return [name for name in dtype_names() if name.startswith(incomplete)]


ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="Weigh blocks for this model: a name, e.g. llama-3.1-8b, or the path of its config.json.",
        autocompletion=complete_models,
    ),
]
LayersOption = Annotated[int | None, typer.Option("--layers", help="Or say its shape: layers that keep KV.")]
HeadsOption = Annotated[int | None, typer.Option("--heads", help="KV heads.")]
HeadSizeOption = Annotated[int | None, typer.Option("--head-size", help="Size of a head.")]
DtypeOption = Annotated[
    str, typer.Option("--dtype", help="KV dtype: bf16, fp16, fp32, fp8 or int8.", autocompletion=complete_dtypes)
]
ParamsOption = Annotated[float | None, typer.Option("--params", help="Parameters a token passes through, e.g. 8e9.")]
FlopsOption = Annotated[
    float, typer.Option("--flops", help="FLOP/s of prefill, for the time that hits save.", show_default="400e12")
]


@dataclass(frozen=True, slots=True)
class Weights:
    """A model and the rate at which it prefills."""

    model: Model
    flops_per_s: float

    def saved_s(self, hit_tokens: int) -> float | None:
        """Return the seconds of prefill that hits have saved, at least; None where the parameters are not known."""
        return self.model.saved_prefill_s(hit_tokens, self.flops_per_s)

    def as_dict(self) -> dict[str, Any]:
        """Return what a report says of the model."""
        return {
            "name": self.model.name,
            "token_bytes": self.model.token_bytes,
            "dtype": self.model.dtype,
            "num_params": self.model.num_params,
            "flops_per_s": self.flops_per_s,
        }

    def __str__(self) -> str:
        return f"{self.model.name}, {self.model.dtype}, {self.flops_per_s / 1e12:g} TFLOP/s"


def weights_of(
    model: str | None,
    layers: int | None,
    heads: int | None,
    head_size: int | None,
    dtype: str,
    params: float | None,
    flops: float,
) -> Weights | None:
    """Return the model and its rate of prefill, or None where no option names one."""
    from kvcache.assembly.models import Model, model_of
    from kvcache.cli.common import at_least

    shape = {"--layers": layers, "--heads": heads, "--head-size": head_size}
    given = [option for option, value in shape.items() if value is not None]
    for option, value in (("--flops", flops), ("--params", params)):
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"{option} must be a number > 0, got {value}")
    if model is not None:
        if given:
            raise ValueError(f"--model excludes {', '.join(given)}, got {model!r}")
        known = model_of(model, dtype)
        return Weights(known if params is None else replace(known, num_params=params), flops)
    if not given:
        if params is not None:
            raise ValueError("--params needs --model, or --layers, --heads and --head-size")
        return None
    if layers is None or heads is None or head_size is None:
        missing = [option for option, value in shape.items() if value is None]
        raise ValueError(f"{', '.join(given)} needs {', '.join(missing)}, too")
    for option, count in (("--layers", layers), ("--heads", heads), ("--head-size", head_size)):
        at_least(option, count, 1)
    name = f"{layers} layers x {heads} heads x {head_size}"
    return Weights(Model(name, layers, 2 * heads * head_size, params, dtype), flops)
