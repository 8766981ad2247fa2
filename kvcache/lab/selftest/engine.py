"""Compare the first tokens of small vLLM engines, and their times, without kvcache, with it, and after a restart.

Each engine runs in its own process, because a restart is measured. Models have random weights, without a download.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from kvcache.background import python_words
from kvcache.lab.selftest.rows import OK, SKIPPED, WRONG, Row

VOCABULARY = 512
_MEMORY_BYTES = 256 << 20
_MODELS = {"a small Llama": 0, "a model with windows": 256}
_LIFE = {"users": 3, "turns": 2, "prefix_tokens": 1024, "message_tokens": 64, "block_tokens": 32, "settle_s": 0}


def check_engine(folder: Path, on_cpu: bool) -> Iterator[Row]:
    """Yield whether engines answer alike with and without kvcache, and their times. Files go below `folder`."""
    if find_spec("vllm") is None:
        yield Row("vLLM", "is not installed here", SKIPPED)
        return
    for name, window in _MODELS.items():
        model = folder / f"model-{window}"
        build_model(model, 4, window)
        disk = {"type": "disk", "path": str(folder / f"blocks-{window}"), "capacity": 4 * _MEMORY_BYTES}
        ours = transfer_config({"cpu_bytes_to_use": _MEMORY_BYTES, "tiers": [disk]})
        lives = {"without": (None, {}), "memory": (ours, {"settle_s": 2}), "restart": (ours, {"turns": 1})}
        lines: dict[str, list[dict[str, Any]]] = {}
        for life, (config, change) in lives.items():
            settings = {**_LIFE, **change, "model": str(model), "on_cpu": on_cpu, "kv_transfer_config": config}
            settings["num_groups"] = 3 if window else 1
            lines[life] = list(run_life(settings, folder / "errors"))
        yield _compared(name, lines)


def transfer_config(options: dict[str, Any]) -> dict[str, Any]:
    """Return vLLM's ``kv_transfer_config`` for our spec with these options."""
    spec = {"spec_name": "KVCacheOffloadingSpec", "spec_module_path": "kvcache.integrations.vllm"}
    return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": spec | options}


def _compared(name: str, lines: dict[str, list[dict[str, Any]]]) -> Row:
    tokens = {(line["turn"], line["user"]): line["token"] for line in lines["without"]}
    others = [line for life in ("memory", "restart") for line in lines[life]]
    num_wrong = sum(line["token"] != tokens[line["turn"], line["user"]] for line in others)
    # Times of prompts that can hit: later turns repeat earlier prompts; after a restart, the disk has first turns.
    times = {life: [line["seconds"] for line in lines[life] if line["turn"] > 0] for life in ("without", "memory")}
    times["restart"] = [line["seconds"] for line in lines["restart"]]
    figures = {f"{life}_s": median(seconds) for life, seconds in times.items()}
    first = [f"{life} {seconds * 1e3:.0f} ms" for life, seconds in zip(times, figures.values(), strict=True)]
    text = f"{num_wrong} of {len(others)} answers differ from vLLM's own; first token: {', '.join(first)}"
    figures |= {"answers": len(others), "wrong": num_wrong}
    return Row(f"vLLM, {name}", text, WRONG if num_wrong or not others else OK, figures)


def build_model(folder: Path, num_layers: int, window: int = 0) -> None:
    """Save a model with random weights; with a `window`, two of three layers attend to that many tokens only."""
    import torch
    from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig

    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1 << 16,
        # Large, so that greedy tokens depend on the whole prompt.
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        # vLLM needs the ids of special tokens, and the model has no tokenizer that defines them.
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    config: Any = LlamaConfig(num_hidden_layers=num_layers, **shape)
    if window:
        kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
        config = Gemma3TextConfig(
            num_hidden_layers=len(kinds), head_dim=64, sliding_window=window, layer_types=kinds, **shape
        )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def prompts(users: int, turns: int, prefix_tokens: int, message_tokens: int) -> Iterator[tuple[int, int, list[int]]]:
    """Yield turn, user and prompt; each prompt continues the user's last one."""
    draws = [random.Random(user) for user in range(users)]
    chats = [[draw.randrange(3, VOCABULARY) for _ in range(prefix_tokens)] for draw in draws]
    for turn in range(turns):
        for user, (draw, chat) in enumerate(zip(draws, chats, strict=True)):
            chat += [draw.randrange(3, VOCABULARY) for _ in range(message_tokens)]
            yield turn, user, list(chat)


def run_life(life: dict[str, Any], errors: Path) -> Iterator[dict[str, Any]]:
    """Run one engine in its own process, and yield its line for each turn. RuntimeError: the engine fails.

    `life` holds the arguments of `prompts`, `model` and its `num_groups` of KV caches, `kv_transfer_config`,
    `block_tokens`, `on_cpu`, and `settle_s`: the time after the last turn.
    """
    # vLLM starts processes of its own from this one, so the code must not run again in them.
    words = python_words(f"if __name__ == '__main__':\n    from {__name__} import main\n    main()", json.dumps(life))
    with errors.open("w") as file, subprocess.Popen(words, stdout=subprocess.PIPE, stderr=file, text=True) as process:
        for line in process.stdout or ():
            if line.startswith('{"turn"'):
                yield json.loads(line)
    if process.returncode:
        # The first error is the cause, later ones its consequences in other processes.
        named = (line for line in errors.read_text().splitlines() if re.match(r"(\S+ )*\w+Error: ", line))
        raise RuntimeError(f"the engine ended with {process.returncode}: {next(named, 'without an error')}")


def _serve(life: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Start the engine, and yield the seconds to the first token of each turn, and the token."""
    os.environ.update({"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"})
    if life["on_cpu"]:
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        # vLLM reserves one core for other threads, or two with a connector: on a machine of two cores, none is left.
        cores = sorted(os.sched_getaffinity(0))
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, cores[:-1] or cores)))
    from vllm import LLM, SamplingParams

    turns = list(prompts(*(life[name] for name in ("users", "turns", "prefix_tokens", "message_tokens"))))
    longest = max(len(prompt) for _, _, prompt in turns) + 1
    options: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "block_size": life["block_tokens"],
        # Room for little more than one prompt, so that the engine's own cache loses earlier prompts.
        "num_gpu_blocks_override": life["num_groups"] * -(-longest // life["block_tokens"]) + 4,
        "dtype": "float32",
        "max_model_len": longest,
        "max_num_batched_tokens": longest,
        # A small share of a device that others may use.
        "gpu_memory_utilization": 0.3,
    }
    if life["kv_transfer_config"] is not None:
        options["kv_transfer_config"] = life["kv_transfer_config"]
    engine = LLM(life["model"], **options)
    sampling = SamplingParams(max_tokens=1, temperature=0, detokenize=False, ignore_eos=True)

    def first_token(prompt: list[int]) -> tuple[float, int]:
        started_s = time.perf_counter()
        (output,) = engine.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        return time.perf_counter() - started_s, output.outputs[0].token_ids[0]

    # Warm the engine up with a prompt of other tokens, as long as the shortest one.
    first_token([2] * len(turns[0][2]))
    for turn, user, prompt in turns:
        seconds, token = first_token(prompt)
        yield {"turn": turn, "user": user, "seconds": seconds, "token": token}
    # Stores to the tier may still be under way.
    time.sleep(life["settle_s"])


def main() -> None:
    """Run the engine of the command line's settings, and print a line for each turn."""
    for turn in _serve(json.loads(sys.argv[1])):
        print(json.dumps(turn), flush=True)
