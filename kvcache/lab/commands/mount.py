"""Build the laboratory's commands for `kvcache.cli`. An old spelling raises an error that states the new one."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, ClassVar

import typer
from typer.core import TyperCommand
from typer.main import get_command

from kvcache.cli import common

_FLEET = "kvcache fleet FILE"
_PLAN = "kvcache plan FILE"
_RERUN = "kvcache rerun RECORDING"
RENAMED = {
    "--arbiter": f"{_PLAN} --tier SIZE@RATE,arbiter",
    "--as-trace": f"{_PLAN}, which reads a recording as a trace",
    "--block-bytes": "--model SIZE, the bytes of a token's KV",
    "--checkpoint": f"{_PLAN} --checkpoint",
    "--copies": f"{_FLEET} --copies",
    "--csv": f"{_PLAN} --save FILE.csv",
    "--dask": f"{_PLAN} --jobs tcp://HOST:PORT",
    "--disk": "kvcache replay FILE --tier PATH:SIZE",
    "--dtype": "--model NAME,DTYPE",
    "--engines": f"{_PLAN} --serving engines=N, or {_FLEET} --engines N,...",
    "--flops": "--model NAME,flops=N",
    "--format": "no option, because the first line of a trace shows its format",
    "--head-size": "--model LAYERSxHEADSxSIZE",
    "--heads": "--model LAYERSxHEADSxSIZE",
    "--hints": "no option, because hints are not simulated any more",
    "--jobs": f"{_PLAN} --jobs",
    "--layers": "--model LAYERSxHEADSxSIZE",
    "--limit": "kvcache replay FILE --limit, or head -n N FILE | kvcache plan -",
    "--max-memory": "no option, because a plan takes 80 % of the free memory",
    "--memory-rate": f"{_PLAN} --serving link=RATE",
    "--params": "--model NAME,params=N",
    "--plot": f"{_PLAN} --save FILE.png, .svg or .html",
    "--price": f"{_PLAN} --serving price=HOST/TIER/...",
    "--router": f"{_FLEET} --router",
    "--router-events": f"{_FLEET} --server RATE,KEYS,EVENTS",
    "--sample": f"{_PLAN} --sample",
    "--shrink": f"{_RERUN} --shrink",
    "--shrink-seconds": f"{_RERUN} --shrink-seconds",
    "--split": "--block-size LISTED:REPLAYED, as in 512:16 or :16",
    "--store": f"{_FLEET} --store",
    "--store-rate": f"{_FLEET} --store SIZE@RATE",
    "--store-server": f"{_FLEET} --server RATE,KEYS",
    "--store-threshold": "kvcache replay FILE --store-threshold",
}
"""The new spelling of each option of the old `kvcache replay` and `kvcache check`."""


class LabCommand(TyperCommand):
    """A command that rejects old options and states their new names."""

    renamed: ClassVar[dict[str, str]] = RENAMED

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command line; an option that was renamed raises ValueError with its new name."""
        own = {option for param in self.params for option in param.opts}
        for arg in args:
            option = arg.partition("=")[0]
            if option in self.renamed and option not in own and not ctx.resilient_parsing:
                raise ValueError(f"{option} is an option of an older kvcache; now: {self.renamed[option]}")
        return super().parse_args(ctx, args)


class ModelCommand(LabCommand):
    """A command whose old options described a model."""

    renamed: ClassVar[dict[str, str]] = {option: now for option, now in RENAMED.items() if now.startswith("--model")}


def build_command(name: str, module: str) -> Any:
    """Return the command `name` from the module of this package that defines a function of that name."""
    command: Any = import_module(f"{__package__}.{module}")
    run: Callable[..., None] = getattr(command, name.replace("-", "_"))
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    common.add_command(app, name, run, LabCommand, getattr(command, "EXAMPLES", ""))
    return get_command(app)
