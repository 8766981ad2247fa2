"""The benchmarks' requests: a given trace, or generated chats.

The trace is not part of the project. Without it the benchmarks run on chats and print that.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from kvcache import ReqContext, make_offload_key
from kvcache.lab.traces.keys import KeyMaker
from kvcache.lab.traces.requests import Request

_CONVERSATION = Path("traces") / "mooncake_conversation.jsonl"
_AGENTS = Path("traces") / "agentic_coding.jsonl.gz"
MISSING = (
    "the trace is not here: save Mooncake's conversation trace, conversation_trace.jsonl of FAST25-release/traces in "
    f"https://github.com/kvcache-ai/Mooncake, as {_CONVERSATION} below the folder that KVCACHE_SHARED names"
)


def conversation_path() -> Path | None:
    """Return the conversation trace in `$KVCACHE_SHARED`, or in `shared` near the working directory; or None."""
    return _found(_CONVERSATION)


def given_trace() -> Path:
    """Return the path of the command line, or else the conversation trace; end the process if there is none."""
    return Path(sys.argv[1]) if len(sys.argv) > 1 else conversation_path() or sys.exit(f"error: {MISSING}")


def agents_path() -> Path | None:
    """Return the trace of coding agents, looked for likewise; or None."""
    return _found(_AGENTS)


def _found(trace: Path) -> Path | None:
    named = os.environ.get("KVCACHE_SHARED")
    here = Path.cwd().resolve()
    folders = [Path(named)] if named else [folder / "shared" for folder in (here, *here.parents)]
    return next((path for folder in folders if (path := folder / trace).is_file()), None)


def fresh_keys(requests: Iterable[Request], split: int) -> list[list[bytes]]:
    """Return new key objects for every request, as an engine makes them."""
    make_keys = KeyMaker(split)
    return [make_keys(request.hash_ids) for request in requests]


def serve(manager: Any, keys: list[bytes]) -> int:
    """Take a request through a scheduler's calls, and return its prefix hits."""
    context = ReqContext()
    hits: int = manager.lookup(keys, context)
    manager.touch(keys, context)
    leading = keys[:hits]
    manager.prepare_load(leading, context)
    manager.complete_load(leading, context)
    output = manager.prepare_store(keys, context)
    if output is not None:
        manager.complete_store(output.keys_to_store, context)
    manager.on_request_finished(context)
    return hits


def replay(manager: Any, keys_of_requests: list[list[bytes]]) -> int:
    """Take every request through a scheduler's calls, and return the prefix hits."""
    return sum(serve(manager, keys) for keys in keys_of_requests)


def serve_groups(manager: Any, positions: list[bytes], windows: list[int], step: int, timed: Callable[..., Any]) -> int:
    """Take a request of several KV-cache groups, the first without a window, through a scheduler's calls.

    `timed` is given each call and its arguments. Each store offers `step` positions. Return the number of keys.
    """
    context = ReqContext()
    groups = [[make_offload_key(key[:-4], group) for key in positions] for group in range(1 + len(windows))]
    for keys in groups:
        for i, key in enumerate(keys, 1):
            context.set_offload_key_position(key, 512 * i)
    anchors, *windowed = groups

    def keys_of_set(end: int) -> list[bytes]:
        return [key for keys, window in zip(windowed, windows, strict=True) for key in keys[max(end - window, 0) : end]]

    full = timed(manager.lookup, anchors, context)
    hit = next(end for end in range(full, -1, -1) if manager.lookup(keys := keys_of_set(end)) == len(keys))
    timed(manager.touch, anchors, context)
    if hit:
        timed(manager.prepare_load, anchors[:hit] + keys_of_set(hit), context)
        timed(manager.complete_load, anchors[:hit] + keys_of_set(hit), context)
    offered = {key for end in (full, len(anchors)) if end > hit for key in keys_of_set(end)}
    for first in range(hit, len(anchors), step):
        last = first + step
        keys = anchors[first:last] + [
            key for keys in windowed for key in keys[max(first - 1, 0) : last] if key in offered
        ]
        output = timed(manager.prepare_store, keys, context)
        if output is not None:
            timed(manager.complete_store, output.keys_to_store, context)
    timed(manager.on_request_finished, context)
    return len(anchors) + len(offered)
