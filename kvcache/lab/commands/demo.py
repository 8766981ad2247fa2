"""`kvcache demo`: a replay of generated traffic, which needs no file."""

from __future__ import annotations

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
    data: options.DataOption = True,
    json: common.JsonOption = None,
    quiet: common.QuietOption = False,
) -> None:
    """Replay generated chats: store, evict, load back and verify their blocks."""
    from kvcache.lab.commands import session
    from kvcache.lab.traces.chats import ChatWorkload

    common.at_least("--requests", requests, 1)
    common.at_least("--seed", seed, 0)
    bytes_per_block = parse_size("--block-bytes", block_bytes or options.TEST_BLOCK_BYTES)
    settings = session.Settings(
        policy=options.one_policy(policy),
        num_blocks=options.parse_capacity(blocks, memory, bytes_per_block, default="4000"),
        block_bytes=bytes_per_block,
        sized=block_bytes is not None or memory is not None,
        split=1,
        data=data,
        json_target=json,
        is_quiet=quiet,
    )
    session.run(
        ChatWorkload(requests, seed),
        f"{requests:,} requests of generated chats, seed {seed}",
        settings,
        lambda done: done / requests,
        lambda: {"kind": "chats", "seed": seed},
    )
    if json != "-":
        common.console(json).print("Next: kvcache plan --help, docs/quickstart.md")
