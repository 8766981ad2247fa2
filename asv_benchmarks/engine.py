"""Time first tokens of a real vLLM on the CPU: without kvcache, with it, and after a restart with all blocks on disk.

``python -m asv_benchmarks.engine FOLDER [--plot FILE] [--json FILE]`` prints the medians. If LMCache is installed, its
server, with files that bypass the page cache, serves the same turns. A small Llama with random weights answers the
prompts of some users in turn. Each engine is a process of its own, because a restart is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from servers import free_port, wait_for_port

from kvcache.options import parse_size

BLOCK_TOKENS = 128
VOCABULARY = 512
Life = tuple[str, AbstractContextManager[dict[str, Any] | None], dict[str, int]]


def build_model(folder: Path, num_layers: int) -> None:
    """Save a Llama with random weights; a layer has 1 KiB of keys and values a token."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1 << 16,
        initializer_range=0.05,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def prompts(users: int, turns: int, prefix_tokens: int, message_tokens: int) -> Iterator[tuple[int, int, list[int]]]:
    """Yield turn, user and prompt; each prompt continues the user's last one."""
    draws = [random.Random(user) for user in range(users)]
    chats = [[draw.randrange(3, VOCABULARY) for _ in range(prefix_tokens)] for draw in draws]
    for turn in range(turns):
        for user, (draw, chat) in enumerate(zip(draws, chats, strict=True)):
            chat += [draw.randrange(3, VOCABULARY) for _ in range(message_tokens)]
            yield turn, user, list(chat)


def serve(life: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Start the engine, and yield the seconds to the first token of each turn."""
    os.environ.update({"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"})
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    # By default vLLM reserves one core for other threads, but two with a connector: none is left on two cores.
    cores = sorted(os.sched_getaffinity(0))
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, cores[:-1] or cores)))
    from vllm import LLM, SamplingParams

    turns = list(prompts(*(life[name] for name in ("users", "turns", "prefix_tokens", "message_tokens"))))
    longest = max(len(prompt) for _, _, prompt in turns) + 1
    options: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "block_size": BLOCK_TOKENS,
        # Room for little more than one prompt: the engine's own cache must not answer.
        "num_gpu_blocks_override": -(-longest // BLOCK_TOKENS) + 4,
        "dtype": "float32",
        "max_model_len": longest,
        "max_num_batched_tokens": longest,
    }
    if life["kv_transfer_config"] is not None:
        options["kv_transfer_config"] = life["kv_transfer_config"]
    engine = LLM(life["model"], **options)
    sampling = SamplingParams(max_tokens=1, temperature=0, detokenize=False, ignore_eos=True)

    def first_token(prompt: list[int]) -> tuple[float, int]:
        started_s = time.perf_counter()
        (output,) = engine.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        return time.perf_counter() - started_s, output.outputs[0].token_ids[0]

    # The engine's own first use: a prompt of other tokens, as long as the shortest.
    first_token([2] * len(turns[0][2]))
    for turn, user, prompt in turns:
        seconds, token = first_token(prompt)
        yield {"turn": turn, "user": user, "seconds": seconds, "token": token}
    # Stores to the tier may still be under way.
    time.sleep(life["settle_s"])


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
    settings = {
        "spec_name": "KVCacheOffloadingSpec",
        "spec_module_path": "kvcache.integrations.vllm",
        "cpu_bytes_to_use": num_bytes,
        "cache_policy": policy,
        "tiers": [{"type": "disk", "path": str(folder / f"kvcache-{number}"), "capacity": 4 * num_bytes}],
    }
    ours = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": settings}
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


def run_life(life: dict[str, Any], errors: Path) -> Iterator[dict[str, Any]]:
    """Run one engine's life in a process, and yield its lines."""
    words = [sys.executable, "-m", "asv_benchmarks.engine", "--life", json.dumps(life)]
    with errors.open("w") as file, subprocess.Popen(words, stdout=subprocess.PIPE, stderr=file, text=True) as process:
        for line in process.stdout or ():
            if line.startswith('{"turn"'):
                yield json.loads(line)
    if process.returncode:
        raise SystemExit(f"the engine ended with {process.returncode}: {errors.read_text()[-2000:]}")


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
    if sys.argv[1:2] == ["--life"]:
        for turn in serve(json.loads(sys.argv[2])):
            print(json.dumps(turn), flush=True)
    else:
        main()
