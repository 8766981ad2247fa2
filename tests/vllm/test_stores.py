"""A store that engines share: blocks of one engine are hits for the next one, with the same tokens."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from engine_options import BLOCK_BYTES

from kvcache.lab.bench.servers import find_valkey, free_port, running_valkey, wait_for_port


def start_valkey(undo: ExitStack) -> dict[str, Any]:
    pytest.importorskip("valkey")
    if find_valkey() is None:
        pytest.skip("needs valkey-server or redis-server")
    return {"type": "valkey", "url": f"valkey://127.0.0.1:{undo.enter_context(running_valkey())}"}


def start_mooncake(undo: ExitStack) -> dict[str, Any]:
    pytest.importorskip("mooncake.store", exc_type=ImportError)

    def run(*command: Any) -> None:
        process = subprocess.Popen(list(map(str, command)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        undo.callback(process.wait)
        undo.callback(process.kill)

    binaries, port = Path(sys.executable).parent, free_port()
    run(binaries / "mooncake_master", f"-rpc_port={port}", "-rpc_address=127.0.0.1", f"-metrics_port={free_port()}")
    wait_for_port(port)
    node = (f"-master_server_address=127.0.0.1:{port}", "-metadata_server=P2PHANDSHAKE", "-host=127.0.0.1")
    run(binaries / "mooncake_client", *node, f"-port={free_port()}", "-global_segment_size=256MB")
    # Until the node has lent its memory.
    time.sleep(3)
    return {"type": "mooncake", "master": f"127.0.0.1:{port}"}


@pytest.fixture(params=[start_valkey, start_mooncake], ids=["valkey", "mooncake"])
def entry(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    with ExitStack() as undo:
        yield request.param(undo)


def ask_each(engine: Any, prompts: Any) -> tuple[list[list[int]], list[int]]:
    """Send one prompt after another; return tokens, and how many of each prompt's were not computed."""
    outputs = []
    for prompt in prompts:
        outputs += engine.generate([prompt])
        assert engine.manager._tiered.settle()
    return [list(output.outputs[0].token_ids) for output in outputs], [output.num_cached_tokens for output in outputs]


def test_second_engine_hits_what_the_first_stored(
    boot: Any, models: Any, crowd: Any, expected: Any, entry: dict[str, Any]
) -> None:
    # Host memory for 40 blocks, of which the seven prompts have 140.
    config = {
        "cpu_bytes_to_use": 40 * BLOCK_BYTES,
        "cache_policy": "lru",
        "lookup_deadline_s": 30,
        "tiers": [entry | {"deadline_s": 30}],
    }
    with boot(models["llama"], config) as engine:
        assert ask_each(engine, crowd) == (expected(crowd), [0] * 7)
        (lane,) = engine.manager._tiered.tier_stats()
        assert (lane.written_blocks, lane.failed_jobs) == (140, 0)
    with boot(models["llama"], config) as engine:
        assert ask_each(engine, crowd) == (expected(crowd), [640] * 7)
        (lane,) = engine.manager._tiered.tier_stats()
        assert (lane.promoted_blocks, lane.tier.stored_blocks, lane.failed_jobs) == (140, 0, 0)
        assert engine.metric("vllm:kvcache_tier_promoted_blocks") == 140
