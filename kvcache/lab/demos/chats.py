"""Chats of several users with a small model built on the spot, each turn run without and with a prefix cache.

Both runs of a turn stand side by side in time, so that other load on the machine falls on both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, logging

from kvcache.integrations.transformers import PrefixCache

VOCAB_SIZE = 8192
SYSTEM_TOKENS, MESSAGE_TOKENS = 192, 96


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of one user, run without the cache and with it.

    Without it, all `prompt_tokens` are computed, and the first token comes after `plain_s`; with it, `computed_tokens`
    and `cached_s` (look-up and load included). `equal`: both runs gave the same tokens.
    """

    user: int
    turn: int
    prompt_tokens: int
    computed_tokens: int
    plain_s: float
    cached_s: float
    equal: bool


class _FirstToken:
    """A streamer that records the time of the first token; `generate` puts the prompt before it."""

    def __init__(self) -> None:
        self._num_puts = 0
        self.time_s = 0.0

    def put(self, value: Any) -> None:
        self._num_puts += 1
        if self._num_puts == 2:
            self.time_s = perf_counter()

    def end(self) -> None:
        pass


def build_model(seed: int) -> LlamaForCausalLM:
    """Return a Llama of 8 layers with random weights; nothing is downloaded."""
    logging.set_verbosity_error()
    # One thread gives steady times on a busy machine.
    torch.set_num_threads(1)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=512,
        intermediate_size=1376,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=8192,
        # Wide enough that the next token depends on the whole context; otherwise equal tokens would prove nothing.
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(seed)
    return LlamaForCausalLM(config).eval()


def run(cache: PrefixCache, num_users: int, num_turns: int, answer_tokens: int, seed: int) -> Iterator[Turn]:
    """Run chats and yield each turn: first turns of all users, then second turns, and so on.

    All users share the system prompt; a message is random ids. The model of the (empty) cache answers.
    """
    draw = torch.Generator().manual_seed(seed)

    def tokens(count: int) -> torch.Tensor:
        return torch.randint(VOCAB_SIZE, (1, count), generator=draw)

    system = tokens(SYSTEM_TOKENS)
    histories = [system] * num_users
    # The first forward of a process is slower than later ones.
    cache.model.generate(system, attention_mask=torch.ones_like(system), max_new_tokens=2, do_sample=False)
    for turn in range(1, num_turns + 1):
        for user in range(num_users):
            prompt = torch.cat([histories[user], tokens(MESSAGE_TOKENS)], dim=1)
            loaded_before = cache.stats().loaded_tokens
            runs = {}
            # The second run finds warmer processor caches, so the order alternates.
            for generate in (cache.model.generate, cache.generate)[:: 1 if (turn + user) % 2 else -1]:
                first = _FirstToken()
                start_s = perf_counter()
                answer = generate(
                    input_ids=prompt,
                    attention_mask=torch.ones_like(prompt),
                    max_new_tokens=answer_tokens,
                    do_sample=False,
                    streamer=first,
                )
                runs[generate == cache.generate] = (answer, first.time_s - start_s)
            histories[user], plain_s = runs[False]
            answer, cached_s = runs[True]
            loaded = cache.stats().loaded_tokens - loaded_before
            yield Turn(
                user=user,
                turn=turn,
                prompt_tokens=prompt.shape[1],
                computed_tokens=prompt.shape[1] - loaded,
                plain_s=plain_s,
                cached_s=cached_s,
                equal=torch.equal(answer, histories[user]),
            )
