"""Generate requests: seeded multi-turn chats that share system prompts.

Chats begin as a Poisson process, and people pause between turns. The prompt of a turn is all text so far and a new
question, so its leading blocks are those of the turn before.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from kvcache.lab.traces.requests import Request

_SPREAD = 0.6
"""Of lengths and pauses, which are drawn log-normally."""


@dataclass(frozen=True, slots=True)
class ChatWorkload:
    """Multi-turn chats in order of arrival; the same `seed` gives the same requests.

    The n-th most popular of `num_system_prompts` has a share proportional to 1/n. Lengths and pauses are log-normal
    with the given means, turns are geometric, and `chats_per_s` chats begin a second. A chat ends when its prompt would
    exceed `max_context_tokens`. Only full blocks are listed. The defaults suit a demo; they are not fitted to any
    trace.
    """

    num_requests: int = 2000
    seed: int = 0
    block_size: int = 16
    num_system_prompts: int = 12
    mean_system_tokens: int = 1200
    mean_question_tokens: int = 80
    mean_answer_tokens: int = 250
    mean_turns: float = 6.0
    chats_per_s: float = 1.0
    mean_think_s: float = 30.0
    max_context_tokens: int = 16384
    _token_s: float = field(default=0.02, init=False, repr=False)

    def __iter__(self) -> Iterator[Request]:
        draw = random.Random(self.seed)
        num_ids = 0
        prompts: list[tuple[int, list[int]]] = []
        for _ in range(self.num_system_prompts):
            tokens = log_normal(draw, self.mean_system_tokens)
            ids = list(range(num_ids, num_ids + tokens // self.block_size))
            num_ids += len(ids)
            prompts.append((tokens, ids))
        shares = [1 / rank for rank in range(1, self.num_system_prompts + 1)]

        # (arrival, order of birth, tokens so far, ids so far); a chat without tokens is about to begin.
        births = 0
        due: list[tuple[float, int, int, list[int]]] = [(draw.expovariate(self.chats_per_s), births, 0, [])]
        made = 0
        while made < self.num_requests:
            arrival_s, birth, tokens, ids = heapq.heappop(due)
            if not tokens:
                births += 1
                heapq.heappush(due, (arrival_s + draw.expovariate(self.chats_per_s), births, 0, []))
                tokens, shared = draw.choices(prompts, shares)[0]
                ids = list(shared)
            tokens += log_normal(draw, self.mean_question_tokens)
            if tokens > self.max_context_tokens:
                continue
            missing = tokens // self.block_size - len(ids)
            ids.extend(range(num_ids, num_ids + missing))
            num_ids += missing
            answer = log_normal(draw, self.mean_answer_tokens)
            yield Request(np.array(ids, dtype=np.int64), tokens, answer, arrival_s)
            made += 1
            if draw.random() >= 1 / self.mean_turns:
                think_s = log_normal(draw, self.mean_think_s * 1000) / 1000
                heapq.heappush(due, (arrival_s + answer * self._token_s + think_s, birth, tokens + answer, ids))


def log_normal(draw: random.Random, mean: float) -> int:
    """Draw a whole number >= 1 whose mean is about `mean`."""
    return max(1, round(draw.lognormvariate(math.log(mean) - _SPREAD * _SPREAD / 2, _SPREAD)))
