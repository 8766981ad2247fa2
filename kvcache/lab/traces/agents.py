"""Generate requests of agents that call tools.

A person gives a task and reads the answer, minutes apart. In between the agent loops: each call of a tool takes
seconds, and the next prompt is the last one plus the tool's result. Some calls start a sub-agent, which shares only the
description of the tools.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from kvcache.lab.traces.chats import log_normal
from kvcache.lab.traces.requests import Request


@dataclass(slots=True)
class _Agent:
    birth: int
    ids: list[int]
    tokens: int
    steps_left: int
    turns_left: int
    parent: _Agent | None = None


@dataclass(frozen=True, slots=True)
class AgentWorkload:
    """Agents of `num_users` people at once, in order of arrival; the same `seed` gives the same requests.

    Lengths and pauses are log-normal with the given means, calls of tools in a turn (`mean_steps`) and turns of a
    session are geometric. A share `subagent_share` of the calls start a sub-agent. A session ends when its prompt would
    exceed `max_context_tokens`. Only full blocks are listed. The defaults suit a demo; they are not fitted to any
    trace.
    """

    num_requests: int = 2000
    seed: int = 0
    block_size: int = 16
    num_users: int = 8
    num_tool_sets: int = 2
    mean_tools_tokens: int = 4000
    mean_task_tokens: int = 120
    mean_result_tokens: int = 500
    mean_answer_tokens: int = 150
    mean_steps: float = 8.0
    mean_turns: float = 5.0
    mean_tool_s: float = 4.0
    mean_human_s: float = 180.0
    subagent_share: float = 0.05
    max_context_tokens: int = 65536
    _token_s: float = field(default=0.02, init=False, repr=False)

    def __iter__(self) -> Iterator[Request]:
        draw = random.Random(self.seed)
        counter = _Counter(self.block_size)
        tool_sets = []
        for _ in range(self.num_tool_sets):
            tokens = log_normal(draw, self.mean_tools_tokens)
            tool_sets.append((tokens, counter.grow([], tokens)))
        due: list[tuple[float, int, _Agent]] = []
        births = 0
        for _ in range(self.num_users):
            agent = self._begin(draw, tool_sets, births)
            heapq.heappush(due, (draw.uniform(0.0, self.mean_human_s), births, agent))
            births += 1
        made = 0
        while made < self.num_requests:
            now_s, _, agent = heapq.heappop(due)
            if agent.tokens > self.max_context_tokens:
                agent.steps_left = agent.turns_left = 0
            else:
                agent.ids = counter.grow(agent.ids, agent.tokens)
                answer = log_normal(draw, self.mean_answer_tokens)
                yield Request(np.array(agent.ids, dtype=np.int64), agent.tokens, answer, now_s)
                made += 1
                agent.tokens += answer
                now_s += answer * self._token_s
            if agent.steps_left:
                agent.steps_left -= 1
                if agent.parent is None and draw.random() < self.subagent_share:
                    # The agent continues when its sub-agent has answered.
                    child = self._begin(draw, tool_sets, births, agent)
                    heapq.heappush(due, (now_s, births, child))
                    births += 1
                else:
                    agent.tokens += log_normal(draw, self.mean_result_tokens)
                    heapq.heappush(due, (now_s + self._seconds(draw, self.mean_tool_s), agent.birth, agent))
            elif agent.parent is not None:
                agent.parent.tokens += log_normal(draw, self.mean_result_tokens)
                heapq.heappush(due, (now_s, agent.parent.birth, agent.parent))
            else:
                if agent.turns_left:
                    agent.turns_left -= 1
                    agent.steps_left = _geometric(draw, self.mean_steps)
                    agent.tokens += log_normal(draw, self.mean_task_tokens)
                else:
                    agent = self._begin(draw, tool_sets, agent.birth)
                heapq.heappush(due, (now_s + self._seconds(draw, self.mean_human_s), agent.birth, agent))

    def _begin(
        self, draw: random.Random, tool_sets: list[tuple[int, list[int]]], birth: int, parent: _Agent | None = None
    ) -> _Agent:
        tokens, ids = draw.choice(tool_sets)
        steps = _geometric(draw, self.mean_steps)
        turns = 0 if parent is not None else _geometric(draw, self.mean_turns) - 1
        return _Agent(birth, list(ids), tokens + log_normal(draw, self.mean_task_tokens), steps, turns, parent)

    def _seconds(self, draw: random.Random, mean_s: float) -> float:
        return log_normal(draw, mean_s * 1000) / 1000


class _Counter:
    """Give every new block a new id."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._next = 0

    def grow(self, ids: list[int], tokens: int) -> list[int]:
        missing = max(0, tokens // self._block_size - len(ids))
        grown = [*ids, *range(self._next, self._next + missing)]
        self._next += missing
        return grown


def _geometric(draw: random.Random, mean: float) -> int:
    return 1 if mean == 1 else 1 + int(math.log(1 - draw.random()) / math.log(1 - 1 / mean))
