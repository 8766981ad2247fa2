"""`kvcache bench tier`: how fast a configured tier stores and loads, beside its medium's own client."""

from __future__ import annotations

import json as json_format
from dataclasses import asdict
from typing import Annotated, Any

import typer

from kvcache.cli import common
from kvcache.lab.commands import options


def read_entry(text: str, option: str) -> dict[str, Any]:
    """Return the tier's entry, given as JSON."""
    try:
        entry = json_format.loads(text)
    except json_format.JSONDecodeError as error:
        raise ValueError(
            f"""{option} must be JSON such as '{{"type": "valkey", ...}}', got {text!r}: {error}"""
        ) from None
    if not isinstance(entry, dict) or not isinstance(entry.get("type"), str):
        raise ValueError(f"""{option} must be a JSON object with "type", got {text!r}""")
    return entry


def tier(
    entry: Annotated[str, typer.Argument(help='The tier, as in a configuration: {"type": "valkey", "url": ...}.')],
    block_bytes: options.BlockBytesOption = "2MiB",
    size: Annotated[str, typer.Option(help="Bytes to store and load in a round.", metavar="SIZE")] = "64MiB",
    rounds: Annotated[int, typer.Option(help="Rounds; of rates the best one counts, of ratios the median.")] = 10,
    json: common.JsonOption = None,
    quiet: common.QuietOption = False,
) -> None:
    """Store blocks in a tier and load them back, in turns with a plain loop of its client."""
    from rich.table import Table

    from kvcache.lab.bench.tier import measure_tier

    given = read_entry(entry, "the tier")
    num_bytes, num_blocks = options.blocks_within(block_bytes, size)
    common.at_least("--rounds", rounds, 1)
    # Check the target first: the store is measured for minutes.
    common.check_writable("--json", json)
    console = common.console(json)
    with common.Bar("tier", "rounds", quiet, total=rounds) as bar:
        rates = measure_tier(given, num_bytes, num_blocks, rounds, lambda name, done, _: bar.show(done, done, name))
        bar.show(rounds, rounds)
    if json != "-":
        table = Table(box=None)
        for title in ("", "tier, verified", "plain client loop", "ratio"):
            table.add_column(title, justify="left" if not title else "right")
        for name, rate, plain, ratio in (
            ("store", rates.store_bytes_per_s, rates.plain_store_bytes_per_s, rates.store_ratio),
            ("load", rates.load_bytes_per_s, rates.plain_load_bytes_per_s, rates.load_ratio),
        ):
            against = (f"{plain / 1e9:.2f} GB/s", f"{ratio:.2f}") if plain else ("", "")
            table.add_row(name, f"{rate / 1e9:.2f} GB/s", *against)
        console.print(table)
        console.print(
            f"asking whether a block is there takes {rates.exists_s_per_key * 1e6:.0f} us; a call keeps its thread "
            f"{rates.call_s_p50 * 1e6:.0f} us at the median, {rates.call_s_max * 1e3:.2f} ms at most"
        )
    common.write_json(json, asdict(rates))
