"""`kvcache demo`: a replay of generated traffic, which needs no file."""

from __future__ import annotations

import math
from typing import Annotated

import typer

from kvcache.cli import common
from kvcache.lab.commands import options
from kvcache.options import parse_size


def demo(
    requests: Annotated[int, typer.Option(help="Requests to generate.")] = 2000,
    seed: Annotated[int, typer.Option(help="Seed of the chats: the same seed, the same requests.")] = 0,
    policy: options.PolicyOption = "lru",
    blocks: options.BlocksOption = None,
    memory: options.MemoryOption = None,
    block_bytes: options.TestBlockBytesOption = None,
    block_tokens: Annotated[int, typer.Option(help="Tokens of one block.")] = 16,
    traffic: Annotated[
        str, typer.Option(help="chats, or agents: tool loops of seconds, people of minutes, sub-agents.")
    ] = "chats",
    system_prompts: Annotated[
        int | None, typer.Option(help="System prompts that are shared [default: 12, agents 2].", show_default=False)
    ] = None,
    turns: Annotated[
        float | None, typer.Option(help="Mean turns of a session [default: 6, agents 5].", show_default=False)
    ] = None,
    store_threshold: options.GateOption = 0,
    what_if: options.WhatIfOption = False,
    data: options.DataOption = True,
    json: common.JsonOption = None,
    quiet: common.QuietOption = False,
) -> None:
    """Replay generated chats or agents: store, evict, load back and verify their blocks."""
    from kvcache.lab.commands import session
    from kvcache.lab.traces.agents import AgentWorkload
    from kvcache.lab.traces.chats import ChatWorkload

    if traffic not in ("chats", "agents"):
        raise ValueError(f"--traffic must be chats or agents, got {traffic!r}")
    common.at_least("--requests", requests, 1)
    common.at_least("--seed", seed, 0)
    common.at_least("--block-tokens", block_tokens, 1)
    if system_prompts is not None:
        common.at_least("--system-prompts", system_prompts, 1)
    if turns is not None:
        common.at_least("--turns", turns, 1)
        if turns == math.inf:
            raise ValueError(f"--turns must be finite, got {turns}")
    workload: ChatWorkload | AgentWorkload
    if traffic == "chats":
        workload = ChatWorkload(
            requests, seed, block_tokens, num_system_prompts=system_prompts or 12, mean_turns=turns or 6.0
        )
    else:
        workload = AgentWorkload(
            requests, seed, block_tokens, num_tool_sets=system_prompts or 2, mean_turns=turns or 5.0
        )
    bytes_per_block = parse_size("--block-bytes", block_bytes or options.TEST_BLOCK_BYTES)
    settings = session.Settings(
        policy=options.one_policy(policy),
        num_blocks=options.parse_capacity(blocks, memory, bytes_per_block, default="4000"),
        block_bytes=bytes_per_block,
        sized=block_bytes is not None or memory is not None,
        split=1,
        limit=None,
        data=data,
        json_target=json,
        store_threshold=common.at_least("--store-threshold", store_threshold, 0),
        what_if=what_if,
        is_quiet=quiet,
    )
    session.run(
        workload,
        f"{requests:,} requests of generated {traffic}, seed {seed}",
        settings,
        lambda done: done / requests,
        lambda: {"kind": traffic, "seed": seed},
    )
    if json != "-":
        common.console(json).print("Next: kvcache plan --help, docs/quickstart.md")
