"""A real vLLM on the CPU with a small random Llama: users send prompts in turns, and each first token is timed.

``python -m kvcache.lab.bench.vllm_turns JSON`` is one engine's life, and prints a line of JSON per turn. Each life is a
process of its own, because a restart is what `kvcache bench engine` measures.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK_TOKENS = 128
_VOCABULARY = 512


def build_model(folder: Path, num_layers: int) -> None:
    """Save a Llama with random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=_VOCABULARY,
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
    """Yield turn, user and prompt; each prompt goes on from the user's last one."""
    draws = [random.Random(user) for user in range(users)]
    chats = [[draw.randrange(3, _VOCABULARY) for _ in range(prefix_tokens)] for draw in draws]
    for turn in range(turns):
        for user, (draw, chat) in enumerate(zip(draws, chats, strict=True)):
            chat += [draw.randrange(3, _VOCABULARY) for _ in range(message_tokens)]
            yield turn, user, list(chat)


def serve(life: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Start the engine, and yield the seconds to the first token of each turn."""
    os.environ.update({"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"})
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    # By itself vLLM leaves one core to other threads, but two with a connector, and none then if there are only two.
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


if __name__ == "__main__":
    for line in serve(json.loads(sys.argv[1])):
        print(json.dumps(line), flush=True)
