"""`kvcache plan`: many policies at many capacities, with or without simulated tiers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from kvcache.cli import common
from kvcache.cli.model import HOW_TO_SIZE, ModelOption, read_model
from kvcache.lab.commands import options, tiers
from kvcache.options import parse_count

if TYPE_CHECKING:
    from kvcache.assembly.models import Model
    from kvcache.lab.simulate.choices import TierChoice

EXAMPLES = """
kvcache plan trace.jsonl --policy lru,arc,gittins,min --blocks 1k,10k,100k
kvcache plan trace.jsonl --model llama-3.1-8b --memory 256GiB,1TiB --save plan.html
kvcache plan trace.jsonl --model qwen3-8b,fp8 --memory 64GiB \\
    --tier nvme:1TiB,4TiB@6GB/s,write_back --serving engines=8,price=4/0.1
kvcache plan trace.jsonl --model llama-3.1-8b --memory 64GiB,256GiB --tier 1TiB@6GB/s \\
    --serving price=4/0.1 --target ttft_p99=0.5,dwpd=3
kvcache plan trace.jsonl --groups gpt-oss/config.json --policy lru,gittins --memory 64GiB,256GiB
kvcache plan trace.jsonl --policy lru,gittins,min --blocks 10k --hints honest
kvcache plan --models
kvcache plan huge.jsonl.zst --sample 0.01 --checkpoint cells.jsonl
"""


def complete_policies(incomplete: str) -> list[str]:
    """Complete as `options.complete_policies` does, with the offline optimum."""
    done, comma, last = incomplete.rpartition(",")
    return options.complete_policies(incomplete) + [f"{done}{comma}min"] * "min".startswith(last)


def list_models(asked: bool) -> None:
    """Print the models that `--model` knows, and end the command."""
    if asked:
        from kvcache.assembly.models import COUNTED, model_names, model_of
        from kvcache.lab.report.plan_tables import plain_table
        from kvcache.options import format_size

        lines: list[tuple[str, ...]] = []
        for model in map(model_of, model_names()):
            layers = model.num_layers + model.recurrent_layers
            params = f"{(model.num_params or 0) / 1e9:g}e9"
            lines.append((model.name, str(layers), format_size(model.token_bytes), params, model.layer_note))
        heads = ("model", "layers", "KV of a token, bf16", "parameters a token", "assumed")
        on = common.report_console(None)
        on.print(plain_table(heads, lines), crop=False)
        on.print(COUNTED, soft_wrap=True)
        raise typer.Exit


@dataclass(frozen=True, slots=True)
class PlanOptions(options.TraceOptions):
    """The command line, in the order of ``--help``."""

    file: options.TraceArgument
    policy: Annotated[
        str | None,
        typer.Option(
            help="Policies to compare: names or package.module:Class, and min for the offline optimum [default: lru, "
            "or that of a recording].",
            metavar="NAME,...",
            autocompletion=complete_policies,
            show_default=False,
        ),
    ] = None
    blocks: options.CapacitiesOption = None
    memory: options.CapacitiesMemoryOption = None
    model_text: ModelOption = None
    groups: Annotated[
        str | None,
        typer.Option(
            help="KV-cache groups of a hybrid model: full, swa:BLOCKS (the window) and mamba, as in full,swa:1, or its "
            "config.json. Behind a comma: retention=null if the engine offers every windowed block (vLLM's "
            "prefix_cache_retention_interval). Capacities then count slots of all groups.",
            metavar="GROUPS",
            show_default=False,
        ),
    ] = None
    tier: Annotated[
        list[str] | None,
        typer.Option(
            help="A tier below host memory, as in 1TiB@6GB/s or nvme:1TiB,4TiB@6GB/s; again for the next one. Behind "
            "the rate: a write_policy of the configuration, cache_policy=NAME (the tier's own policy) [default: lru], "
            "endurance=3 (drive writes a day at most) and arbiter (compute what would take longer to load).",
            metavar="[NAME:]SIZE,...@RATE[,RULE]",
            show_default=False,
        ),
    ] = None
    serving: Annotated[
        str | None,
        typer.Option(
            help="engines=N that prefill [default: as many as are busy for 80 % without a cache], link=RATE between "
            "host memory and device [default: 50GB/s], price=HOST/TIER/... of a GiB.",
            metavar="KEY=VALUE,...",
            show_default=False,
        ),
    ] = None
    target: Annotated[
        str | None,
        typer.Option(
            help="Recommend the cheapest line that reaches ttft_mean, ttft_p50, ttft_p99 (seconds) and dwpd (drive "
            "writes a day), as in ttft_p99=0.12,dwpd=3.",
            metavar="KEY=VALUE,...",
            show_default=False,
        ),
    ] = None
    hints: Annotated[
        str,
        typer.Option(
            help="honest: simulate clients that send hints of next use when they know it, with 10 to 20 % of errors "
            "(docs/howto/retention.md); none.",
            metavar="honest|none",
        ),
    ] = "none"
    sample: Annotated[float, typer.Option(help="Replay this share of the blocks, with error bars.")] = 1.0
    checkpoint: Annotated[
        str | None,
        typer.Option(
            help="Keep finished cells in this file, and continue from it.", metavar="FILE", show_default=False
        ),
    ] = None
    jobs: Annotated[
        str | None,
        typer.Option(
            help="Processes [default: one per CPU], or the address of a Dask scheduler.",
            metavar="N|tcp://HOST:PORT",
            show_default=False,
        ),
    ] = None
    save: Annotated[
        list[str] | None,
        typer.Option(
            "--save",
            "--plot",
            help="Write the cells to FILE.csv, or a plot to FILE.png, .svg or .html; again for another file.",
            metavar="FILE",
            show_default=False,
        ),
    ] = None
    shows_all: Annotated[
        bool, typer.Option("--all", help="With --target, print every line, not the best of each policy.")
    ] = False
    models: Annotated[
        bool, typer.Option("--models", help="List the models that --model knows.", is_eager=True, callback=list_models)
    ] = False
    json: common.JsonOption = None
    quiet: common.QuietOption = False


@options.takes(PlanOptions)
def plan(given: PlanOptions) -> None:
    """Compare policies, capacities and simulated tiers on a trace, on all cores.

    Only the bookkeeping is done: capacities may be larger than anything that this machine has. Without options, a
    recording is simulated with the policy, the capacity and the tiers of its manager.
    """
    from kvcache.lab.report import plan_files
    from kvcache.lab.simulate.choices import NO_LIMIT, recorded_tier, stacks_of
    from kvcache.lab.simulate.groups import parse_groups
    from kvcache.lab.simulate.plan import Settings, run
    from kvcache.lab.simulate.targets import parse_targets

    groups = None if given.groups is None else parse_groups(given.groups)
    model = read_model(given.model_text or (None if groups is None else groups.config))
    targets = plan_files.Targets.read(given.json, given.save, given.checkpoint, given.file)
    given_tiers = tiers.parse_tiers(given.tier)
    _check(given, given_tiers, model)
    # Every option is checked before the trace is opened, which may take minutes to read.
    wanted = parse_targets(given.target)
    _check_targets(given, wanted, model)
    serving = tiers.parse_serving(given.serving, 1 + len(given_tiers))
    with given.open() as trace:
        split = given.split_of(trace)
        block_bytes = options.block_bytes_of(model, trace, split)
        if groups is not None:
            groups = groups.at(trace.block_size // split)
            block_bytes = None if model is None else groups.slot_bytes(model, trace.block_size // split)
        recorded = getattr(trace, "manager", {})
        stacks: list[tuple[int, ...]] = stacks_of(given_tiers, block_bytes) if block_bytes else [()]
        if recorded.get("tiers") and model is None:
            given_tiers = [recorded_tier(i, tier) for i, tier in enumerate(recorded["tiers"])]
            stacks.append((NO_LIMIT,) * len(given_tiers))
        settings = Settings(
            policies=(given.policy or recorded.get("cache_policy") or "lru").split(","),
            capacities=options.parse_capacities(
                given.blocks, given.memory, block_bytes or 1, default=str(recorded.get("num_blocks", 10000))
            ),
            tiers=given_tiers,
            stacks=stacks,
            serving=serving,
            split=split,
            block_bytes=block_bytes,
            sample=given.sample,
            seed=given.seed,
            checkpoint=given.checkpoint,
            jobs=_read_jobs(given.jobs),
            is_quiet=given.quiet,
            groups=groups,
            has_hints=given.hints == "honest",
        )
        plan_files.report(run(trace, settings, model), trace, targets, wanted, given.shows_all)


def _check(given: PlanOptions, given_tiers: list[TierChoice], model: Model | None) -> None:
    if not 0 < given.sample <= 1:
        raise ValueError(f"--sample must be a share > 0 and <= 1, got {given.sample}")
    if given.hints not in ("honest", "none"):
        raise ValueError(f"--hints must be honest or none, got {given.hints!r}")
    if given.hints == "honest" and (given.groups is not None or given.sample < 1 or options.is_recording(given.file)):
        raise ValueError("--hints honest needs a whole trace and one KV-cache group: no --groups, sample or recording")
    has_optimum = "min" in (given.policy or "").split(",")
    if given.groups is not None and (has_optimum or given.sample < 1 or options.is_recording(given.file)):
        raise ValueError("--groups plans whole traces: leave out --sample and --policy min, and take no recording")
    for option, text in (("--memory", given.memory), ("--tier", given.tier[0] if given.tier else None)):
        if text is not None and model is None:
            raise ValueError(f"{option} needs the size of a block, got {text!r} alone: {HOW_TO_SIZE}")
    if given_tiers and given.policy == "min":
        raise ValueError(
            "--policy min is the optimum of host memory alone and knows no tiers, got --tier "
            f"{(given.tier or [''])[0]!r}: name a policy beside it, or leave --tier out"
        )
    if any(tier.arbiter for tier in given_tiers):
        if model is None or not model.saved_s(1):
            shown = model.name if model else "no model"
            raise ValueError(
                "--tier ...,arbiter weighs loading against computing: it needs a model with a known number of "
                f"parameters, such as --model llama-3.1-8b, got {shown}"
            )
        if given.sample < 1:
            raise ValueError(f"--tier ...,arbiter needs whole prefixes: leave out --sample, got {given.sample}")


def _check_targets(given: PlanOptions, wanted: dict[str, float], model: Model | None) -> None:
    """Raise ValueError if no cell can have a figure for a target."""
    if any(name.startswith("ttft") for name in wanted) and (model is None or model.saved_s(1) is None):
        raise ValueError(f"--target {given.target} needs a model with a known number of parameters: {HOW_TO_SIZE}")
    if "dwpd" in wanted and not given.tier:
        raise ValueError(f"--target {given.target}: dwpd needs a --tier, whose writes it limits")
    if wanted and given.sample < 1:
        raise ValueError(f"--target needs the times of whole requests: leave out --sample, got {given.sample}")


def _read_jobs(text: str | None) -> int | str | None:
    return text if text is None or "://" in text else parse_count("--jobs", text)
