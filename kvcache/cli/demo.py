"""`kvcache demo`: the main job on generated chats, so that it needs no file."""

from __future__ import annotations

from typing import Annotated

import typer

from kvcache.cli import common
from kvcache.options import parse_size


def demo(
    requests: Annotated[int, typer.Option(help="Requests to generate.")] = 2000,
    seed: Annotated[int, typer.Option(help="Seed of the chats: the same seed, the same requests.")] = 0,
    policy: common.PolicyOption = "lru",
    blocks: common.BlocksOption = None,
    memory: common.MemoryOption = None,
    block_bytes: common.ReplayBlockBytesOption = None,
    block_tokens: Annotated[int, typer.Option(help="Tokens of one block.")] = 16,
    system_prompts: Annotated[int, typer.Option(help="System prompts that the chats share.")] = 12,
    turns: Annotated[float, typer.Option(help="Mean turns of a chat.")] = 6.0,
    store_threshold: common.GateOption = 0,
    what_if: common.WhatIfOption = False,
    data: common.DataOption = True,
    json: common.JsonOption = None,
    quiet: common.QuietOption = False,
) -> None:
    """Store, evict, load back and verify the blocks of generated multi-turn chats that share system prompts."""
    from kvcache.cli import session
    from kvcache.replay.chats import ChatWorkload

    workload = ChatWorkload(
        num_requests=common.at_least("--requests", requests, 1),
        seed=common.at_least("--seed", seed, 0),
        block_size=common.at_least("--block-tokens", block_tokens, 1),
        num_system_prompts=common.at_least("--system-prompts", system_prompts, 1),
        mean_turns=common.at_least("--turns", turns, 1),
    )
    bytes_per_block = parse_size("--block-bytes", block_bytes or common.TEST_BLOCK_BYTES)
    settings = session.Settings(
        policy=common.one_policy(policy),
        num_blocks=common.parse_capacity(blocks, memory, bytes_per_block, default="4000"),
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
        f"{requests:,} requests of generated chats, seed {seed}",
        settings,
        lambda done: done / requests,
        lambda: {"kind": "chats", "seed": seed},
    )
    common.say_next(json)
