"""`kvcache chat-demo`: users chat with a transformers model, without and with a prefix cache."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from statistics import median
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcache.cli import common
from kvcache.lab.commands import options
from kvcache.options import format_size

if TYPE_CHECKING:
    from kvcache.lab.demos.chats import Turn

_MEMORY_BYTES = 64 << 20
# A title states a time only as the median of at least this many turns.
_LEAST_TURNS = 9


def chat_demo(
    users: Annotated[int, typer.Option(help="Users who chat, in turn.")] = 4,
    turns: Annotated[int, typer.Option(help="Turns of each chat.")] = 5,
    answer_tokens: Annotated[int, typer.Option(help="Tokens of an answer.")] = 12,
    policy: options.PolicyOption = "lru",
    seed: Annotated[int, typer.Option(help="Seed of the weights and of what is said.")] = 0,
    plot: Annotated[
        Path | None,
        typer.Option("--save", "--plot", help="Save a plot of it as PNG.", metavar="FILE", show_default=False),
    ] = None,
    json: common.JsonOption = None,
    quiet: common.QuietOption = False,
) -> None:
    """Chat with a small Llama, without kvcache and with it: time to first token and computed tokens."""
    for option, value in (("--users", users), ("--turns", turns), ("--answer-tokens", answer_tokens)):
        common.at_least(option, value, 1)
    options.one_policy(policy)
    common.check_writable("--json", json)
    common.check_writable("--save", None if plot is None else str(plot))
    from kvcache.integrations.transformers import PrefixCache
    from kvcache.lab.demos import chats

    if plot is not None:
        import matplotlib  # noqa: F401 - reported before the work if it is missing

    started = monotonic()
    console = common.console(json)
    common.at_least("--seed", seed, 0)
    cache = PrefixCache(chats.build_model(seed), memory=_MEMORY_BYTES, policy=policy)
    done: list[Turn] = []
    with common.Bar("chat", "turns", quiet, total=users * turns) as bar:
        for turn in chats.run(cache, users, turns, answer_tokens, seed):
            # A wrong token ends the demo before its turn is counted.
            if not turn.equal:
                raise common.CommandError(f"user {turn.user} got other tokens with the cache in turn {turn.turn}")
            done.append(turn)
            bar.show(len(done), len(done), "tokens equal")
    document = _document(done, cache, policy, monotonic() - started)
    if plot is not None:
        _save_plot(plot, done, document)
        document["plot"] = str(plot)
    if json != "-":
        console.print(_table(document, f"{users} users, {turns} turns each, seed {seed}"))
        if plot is not None:
            console.print(f"plot: {plot}", soft_wrap=True, markup=False)
        console.print("All tokens are equal without and with the cache.")
    common.write_json(json, document)


def _document(done: list[Turn], cache: Any, policy: str, elapsed_s: float) -> dict[str, Any]:
    by_turn = []
    for number in sorted({turn.turn for turn in done}):
        those = [turn for turn in done if turn.turn == number]
        prompt, computed = (sum(getattr(t, name) for t in those) for name in ("prompt_tokens", "computed_tokens"))
        by_turn.append(
            {
                "turn": number,
                "prompt_tokens": prompt,
                "computed_tokens": computed,
                "hit_rate": 1 - computed / prompt,
                "plain_ttft_s": median(turn.plain_s for turn in those),
                "cached_ttft_s": median(turn.cached_s for turn in those),
            }
        )
    stats = cache.stats()
    return {
        "policy": policy,
        "num_blocks": cache.num_blocks,
        "block_bytes": cache.block_bytes,
        "prompt_tokens": stats.prompt_tokens,
        "computed_tokens": stats.prompt_tokens - stats.loaded_tokens,
        "hit_rate": stats.hit_rate,
        "plain_ttft_s": median(turn.plain_s for turn in done),
        "cached_ttft_s": median(turn.cached_s for turn in done),
        "tokens_equal": True,
        "blocks": asdict(stats.blocks),
        "turns": by_turn,
        "elapsed_s": elapsed_s,
    }


def _table(document: dict[str, Any], title: str) -> Any:
    from rich.table import Table

    pool = format_size(document["num_blocks"] * document["block_bytes"])
    held = document["num_blocks"] - document["blocks"]["num_free"]
    shared = ""
    if document["turns"][0]["hit_rate"] > 0:
        shared = "Turn 1 hits what all chats share: the system prompt, which the first user has stored. "
    table = Table(
        title=f"Chat with a small Llama: {title}",
        title_justify="left",
        caption=f"Time to first token is the median over users. {shared}"
        f"{document['policy']}, {held:,} of {document['num_blocks']:,} blocks held ({pool}), "
        f"{document['elapsed_s']:.1f} s in all.",
        caption_justify="left",
        show_footer=True,
    )
    whole = [*document["turns"], document]
    columns = {
        "turn": [*(str(row["turn"]) for row in document["turns"]), "all"],
        "prompt\ntokens": [f"{row['prompt_tokens']:,}" for row in whole],
        "computed\nwith kvcache": [f"{row['computed_tokens']:,}" for row in whole],
        "hit\nrate": [f"{row['hit_rate']:.1%}" for row in whole],
        "first token\nwithout": [f"{row['plain_ttft_s'] * 1e3:,.0f} ms" for row in whole],
        "first token\nwith": [f"{row['cached_ttft_s'] * 1e3:,.0f} ms" for row in whole],
        "faster": [f"{row['plain_ttft_s'] / row['cached_ttft_s']:.1f}x" for row in whole],
    }
    for name, cells in columns.items():
        table.add_column(name, footer=cells[-1], justify="right")
    for row in zip(*(cells[:-1] for cells in columns.values()), strict=True):
        table.add_row(*row)
    return table


def _save_plot(path: Path, done: list[Turn], document: dict[str, Any]) -> None:
    from matplotlib.ticker import MaxNLocator

    from kvcache.lab.report.style import COLOURS, INK, caption, machine, new_figure, plain_axes

    gray = "#8a8f98"
    rows = document["turns"]
    numbers = [row["turn"] for row in rows]
    figure = new_figure(10, 4.8)
    times, tokens = figure.subplots(1, 2)
    for axes in (times, tokens):
        plain_axes(axes)
    sides = (
        ("without kvcache", gray, -0.2, "plain_s", "plain_ttft_s", "prompt_tokens"),
        ("with kvcache", COLOURS[0], 0.2, "cached_s", "cached_ttft_s", "computed_tokens"),
    )
    for label, color, shift, each, of_turn, count in sides:
        users = [getattr(turn, each) * 1e3 for turn in done]
        times.scatter([turn.turn for turn in done], users, s=16, color=color, alpha=0.35, linewidths=0)
        times.plot(numbers, [row[of_turn] * 1e3 for row in rows], color=color, linewidth=2.2, marker="o", label=label)
        tokens.bar([number + shift for number in numbers], [row[count] for row in rows], width=0.38, color=color)
    for row in rows:
        place = (row["turn"] + 0.2, row["computed_tokens"])
        text = f"{row['hit_rate']:.0%}"
        tokens.annotate(text, place, (0, 3), textcoords="offset points", ha="center", color=INK, fontsize=9)
    times.set_title("Time to first token, ms: each user, and the median", loc="left", fontsize=11)
    tokens.set_title("Prompt tokens computed, and the share loaded instead", loc="left", fontsize=11)
    for axes in (times, tokens):
        axes.set_xlabel("turn of the chat")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.yaxis.set_major_formatter("{x:,.0f}")
        axes.set_ylim(bottom=0)
    figure.legend(*times.get_legend_handles_labels(), loc="outside lower right", ncols=2, frameon=False)
    caption(figure, _title(done, document), f"{machine()}; a Llama built on the spot")
    figure.savefig(path, format="png", dpi=150)


def _title(done: list[Turn], document: dict[str, Any]) -> str:
    """Return a title with the counted tokens, and with times if they are medians of enough turns."""
    title = f"Same chats, same tokens: {document['hit_rate']:.0%} of prompt tokens loaded"
    if len(done) < _LEAST_TURNS:
        return title
    return f"{title}, first token {document['plain_ttft_s'] / document['cached_ttft_s']:.1f}x sooner at the median"
