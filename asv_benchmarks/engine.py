"""Time first tokens of a real vLLM on the CPU: without kvcache, with it, and after a restart with all blocks on disk.

``python -m asv_benchmarks.engine FOLDER [--plot FILE] [--json FILE]`` prints the medians. If LMCache is installed, its
server, with files that bypass the page cache, serves the same turns. A small Llama with random weights answers the
prompts of some users in turn. Each engine is a process of its own, because a restart is measured.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from servers import free_port, wait_for_port

from kvcache.lab.selftest.engine import build_model, run_life, transfer_config
from kvcache.options import parse_size

BLOCK_TOKENS = 128
Life = tuple[str, AbstractContextManager[dict[str, Any] | None], dict[str, int]]


@contextmanager
def running_lmcache(folder: Path, memory_bytes: int, log: Path) -> Iterator[dict[str, Any]]:
    """Run LMCache's server over files in `folder`, and yield vLLM's ``kv_transfer_config`` for it."""
    port, http_port = free_port(), free_port()
    options = {
        "--host": "127.0.0.1",
        "--port": port,
        "--http-host": "127.0.0.1",
        "--http-port": http_port,
        "--l1-size-gb": memory_bytes / (1 << 30),
        "--eviction-policy": "LRU",
        "--chunk-size": BLOCK_TOKENS,
        # Without it, the server serves engines on CUDA only.
        "--supported-transfer-mode": "engine_driven",
        "--l2-adapter": json.dumps({"type": "fs_native", "base_path": str(folder), "use_odirect": True}),
    }
    words = [sys.executable, "-m", "lmcache.v1.multiprocess.http_server", "--no-l1-use-lazy", "--disable-observability"]
    words += [str(word) for option in options.items() for word in option]
    folder.mkdir(exist_ok=True)
    with log.open("wb") as out, subprocess.Popen(words, stdout=out, stderr=out) as process:
        try:
            # The HTTP server listens last.
            wait_for_port(http_port, lambda: process.poll() is not None)
            extra = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port}
            yield {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
        finally:
            process.terminate()


def lives(folder: Path, number: int, num_bytes: int, policy: str) -> list[Life]:
    """Return the engines of a round: name, context of the ``kv_transfer_config``, and settings that differ.

    Each side's second life begins with empty memory and all blocks on the disk.
    """
    disk = {"type": "disk", "path": str(folder / f"kvcache-{number}"), "capacity": 4 * num_bytes}
    ours = transfer_config({"cpu_bytes_to_use": num_bytes, "cache_policy": policy, "tiers": [disk]})
    engines: list[Life] = [
        ("without", nullcontext(None), {}),
        ("kvcache", nullcontext(ours), {"settle_s": 2}),
        ("restart", nullcontext(ours), {"turns": 1}),
    ]
    if find_spec("lmcache") is not None:
        for name, change in (("lmcache", {"settle_s": 2}), ("lmcache restart", {"turns": 1})):
            server = running_lmcache(folder / f"lmcache-{number}", num_bytes, folder / "server")
            engines.append((name, server, change))
    return engines


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
        # After a restart, an engine without offloading computes the whole prompt, as in a first turn.
        if is_first and engine == "without":
            sides["after a restart"].setdefault(engine, []).append(seconds)
    return sides


def check_tokens(lines: list[dict[str, Any]]) -> None:
    """Raise SystemExit if an engine answered with another token than the one without offloading."""
    tokens = {(line["turn"], line["user"]): line["token"] for line in lines if line["engine"] == "without"}
    for line in lines:
        if line["token"] != tokens[line["turn"], line["user"]]:
            raise SystemExit(f"{line['engine']}: another token in turn {line['turn']} of user {line['user']}")


def save_plot(path: str, sides: dict[str, dict[str, list[float]]]) -> None:
    """Draw a bar for each median, and a point for each turn."""
    from kvcache.lab.report.style import COLOURS, INK, caption, machine, new_figure, plain_axes, save

    colours = {"without": "#8a8f98", "kvcache": COLOURS[0], "lmcache": COLOURS[4]}
    labels = {"without": "without offloading", "kvcache": "kvcache", "lmcache": "LMCache"}
    figure = new_figure(8.4, 4.8)
    axes = figure.subplots()
    plain_axes(axes)
    for place, times in enumerate(sides.values()):
        for shift, name in enumerate(colours):
            if name not in times:
                continue
            at, height = place + 0.28 * (shift - 1), median(times[name]) * 1e3
            axes.bar(at, height, 0.26, color=colours[name], label=labels[name] if place == 0 else None)
            points = [seconds * 1e3 for seconds in times[name]]
            axes.scatter([at] * len(points), points, s=8, color=INK, alpha=0.35, linewidths=0)
            axes.annotate(f"{height:,.0f}", (at, 0), (0, 3), textcoords="offset points", ha="center", color="white")
    axes.set_xticks(range(len(sides)), list(sides))
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, loc="upper right", ncols=3)
    restarted = sides["after a restart"]
    ratio = median(restarted["without"]) / median(restarted["kvcache"])
    title = f"First token of vLLM on the CPU, ms: after a restart {ratio:.1f}x sooner from kvcache's disk"
    caption(figure, title, f"{machine()}; bars are medians, points are turns")
    save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="a folder on a disk; a disk tier is created in it, and removed")
    for name, default in (("users", 6), ("turns", 3), ("prefix-tokens", 2048), ("message-tokens", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--memory", default="1GiB", help="host memory for keys and values")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--policy", default="lru")
    parser.add_argument("--plot", help="a picture, PNG or SVG")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    num_bytes = parse_size("--memory", options.memory)
    life = {name: getattr(options, name) for name in ("users", "turns", "prefix_tokens", "message_tokens")}
    life |= {"block_tokens": BLOCK_TOKENS, "on_cpu": True, "num_groups": 1}
    lines: list[dict[str, Any]] = []
    with TemporaryDirectory(dir=options.folder) as path:
        folder = Path(path)
        build_model(folder / "model", options.layers)
        for number in range(options.rounds):
            for name, opened, change in lives(folder, number, num_bytes, options.policy):
                print(f"round {number + 1}: {name}", file=sys.stderr)
                with opened as config:
                    whole = {**life, "model": f"{path}/model", "settle_s": 0, **change, "kv_transfer_config": config}
                    turns = run_life(whole, folder / "errors")
                    lines.extend({"engine": name, "round": number, **turn} for turn in turns)
    check_tokens(lines)
    sides = seconds_by_side(lines)
    if options.json is not None:
        options.json.write_text(json.dumps({**life, "rounds": options.rounds, "lines": lines}))
    if options.plot is not None:
        save_plot(options.plot, sides)
    names = list(sides["first turns"])
    print(f"{'first token, median':20}", *(f"{name:>10}" for name in names), " kvcache to without")
    for title, times in sides.items():
        medians = {name: median(times[name]) for name in names}
        cells = (f"{seconds * 1e3:7.0f} ms" for seconds in medians.values())
        print(f"{title:20}", *cells, f" {medians['kvcache'] / medians['without']:.2f}")


if __name__ == "__main__":
    main()
