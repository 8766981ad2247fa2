"""What retention hints would bring on a trace: hints from the future, as a bound, and hints that a server could give.

``python -m kvcache.lab.replay.retention TRACE --policies lru,amq --blocks 3000,10000`` prints the prefix hits of each.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias

from kvcache.control.cpu import CPUOffloadingManager
from kvcache.lab.replay.keys import KeyMaker
from kvcache.lab.replay.run import check_policy
from kvcache.lab.replay.trace import Trace, TraceError
from kvcache.request import ReqContext, Retention

Prompts: TypeAlias = list[list[int]]
Hint: TypeAlias = Retention | None

_ONE_SHOT = Retention(-1)
# A guess, not tuned to any trace.
_CHATTING = Retention(1, 600)


def no_hints(prompts: Prompts) -> Iterator[Hint]:
    """Yield no hint for any request."""
    return (None for _ in prompts)


def raised_chats(prompts: Prompts) -> Iterator[Hint]:
    """Yield priority 1 for ten minutes for each prompt that continues an earlier one: a chat that goes on.

    It continues one if more than its first block, the system prompt that all share, was named before; that stands in
    for the chat's id, which a server has and a trace has not.
    """
    return (_CHATTING if is_turn else None for is_turn in _turns(prompts))


def first_turns_one_shot(prompts: Prompts) -> Iterator[Hint]:
    """Yield the same for chats that go on, and one-shot for every other request, until its chat proves to go on."""
    return (_CHATTING if is_turn else _ONE_SHOT for is_turn in _turns(prompts))


def ended_chats(prompts: Prompts) -> Iterator[Hint]:
    """Yield one-shot for each request none of whose new blocks is named again: it needs the future."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for number, ids in enumerate(prompts):
        for block in ids:
            first.setdefault(block, number)
            last[block] = number
    for number, ids in enumerate(prompts):
        goes_on = any(first[block] == number < last[block] for block in ids)
        yield None if goes_on else _ONE_SHOT


def _turns(prompts: Prompts) -> Iterator[bool]:
    seen: set[int] = set()
    for ids in prompts:
        yield len(ids) > 1 and ids[0] in seen and ids[1] in seen
        seen.update(ids)


HINTS: dict[str, Callable[[Prompts], Iterable[Hint]]] = {
    "none": no_hints,
    "server: chats raised": raised_chats,
    "server: first turns one-shot": first_turns_one_shot,
    "oracle: ended chats": ended_chats,
}
"""Who gives which hints; the servers' are made from earlier requests alone."""


def prefix_hits(
    requests: Iterable[tuple[float, list[bytes]]], hints: Iterable[Hint], policy: str, num_blocks: int, block_size: int
) -> int:
    """Return the prefix hits of requests (arrival in seconds, keys) that carry these hints."""
    now_s = 0.0
    manager = CPUOffloadingManager(block_size, num_blocks, policy, clock=lambda: now_s)
    total = 0
    for (arrival_s, keys), hint in zip(requests, hints, strict=True):
        now_s = max(now_s, arrival_s)
        total += _serve(manager, keys, keys, ReqContext(retention=hint))
    return total


def bound_hits(requests: Iterable[list[bytes]], prompts: Prompts, policy: str, num_blocks: int, block_size: int) -> int:
    """Return the prefix hits if only blocks that a later request names are ever offered: the bound for each block."""
    last = {block: number for number, ids in enumerate(prompts) for block in ids}
    manager = CPUOffloadingManager(block_size, num_blocks, policy)
    total = 0
    for number, (keys, ids) in enumerate(zip(requests, prompts, strict=True)):
        offered = [key for key, block in zip(keys, ids, strict=True) if last[block] > number]
        total += _serve(manager, keys, offered, ReqContext())
    return total


def _serve(manager: CPUOffloadingManager, keys: list[bytes], offered: list[bytes], context: ReqContext) -> int:
    num_hits = manager.lookup(keys, context)
    manager.touch(keys, context)
    manager.prepare_load(keys[:num_hits], context)
    manager.complete_load(keys[:num_hits], context)
    output = manager.prepare_store(offered, context)
    if output is not None:
        manager.complete_store(output.keys_to_store, context)
    manager.on_request_finished(context)
    return num_hits


def table(path: str, policies: list[str], capacities: list[int]) -> Iterator[str]:
    """Yield the lines of a table in Markdown: prefix hits by policy, capacity and who gives hints."""
    make_keys = KeyMaker()
    with Trace(path) as trace:
        found = list(trace)
        block_size = trace.block_size
    prompts: Prompts = [request.hash_ids.tolist() for request in found]
    keys = [make_keys(request.hash_ids) for request in found]
    requests = [(request.arrival_s, named) for request, named in zip(found, keys, strict=True)]
    yield f"| policy | blocks | {' | '.join(HINTS)} | oracle: each block |"
    yield "|---|" + "---:|" * (len(HINTS) + 2)
    for policy in policies:
        for num_blocks in capacities:
            row = [prefix_hits(requests, give(prompts), policy, num_blocks, block_size) for give in HINTS.values()]
            row.append(bound_hits(keys, prompts, policy, num_blocks, block_size))
            yield f"| {policy} | {num_blocks} | {' | '.join(map(str, row))} |"


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m kvcache.lab.replay.retention", description=__doc__)
    parser.add_argument("trace", help="a file that `kvcache replay` reads")
    parser.add_argument("--policies", default="lru,amq", help="names, with commas between them")
    parser.add_argument("--blocks", default="3000,10000", help="capacities, with commas between them")
    given = parser.parse_args()
    try:
        policies = given.policies.split(",")
        for policy in policies:
            check_policy(policy)
        for line in table(given.trace, policies, [int(number) for number in given.blocks.split(",")]):
            print(line, flush=True)
    except (TraceError, ValueError) as error:
        print(f"retention: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
