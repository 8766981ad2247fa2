"""What a tenant gains by false hints of next use: a trace whose sessions belong to two tenants, of which one may lie.

``python -m kvcache.lab.replay.lies TRACE --policies gittins,lru --blocks 3000,10000`` prints the hits of both.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvcache.control.cpu import CPUOffloadingManager
from kvcache.lab.replay.compact import CompactTrace, next_uses
from kvcache.lab.replay.hints import derive_hints
from kvcache.lab.replay.keys import KeyMaker
from kvcache.lab.replay.run import Replay, ReplayClock, check_policy
from kvcache.lab.replay.trace import TraceError, open_trace
from kvcache.request import NEXT_USES, Retention

if TYPE_CHECKING:
    import numpy.typing as npt

    from kvcache.lab.replay.requests import Int64Array

CASES: dict[str, tuple[str | None, str | None]] = {
    "no hints": (None, None),
    "both honest": ("honest", "honest"),
    "B silent": ("honest", None),
    "B always soon": ("honest", "soon"),
    "the same, named": ("honest", "soon"),
}
"""What tenants A and B say: the truth, nothing, or always the same; in the last case each hint names its tenant."""


def sessions_of(trace: CompactTrace) -> Int64Array:
    """Return for each request the first request of its session.

    Notes
    -----
    A trace names no sessions. A request goes on with that of an older one if it names all of its blocks but the last;
    otherwise it begins one.
    """
    last: dict[int, int] = {}
    found = np.arange(len(trace), dtype=np.int64)
    lengths = np.diff(trace.bounds)
    for number, request in enumerate(trace):
        ids = request.hash_ids.tolist()
        num_known = next((i for i, block in enumerate(ids) if block not in last), len(ids))
        if num_known and num_known + 1 >= lengths[last[ids[num_known - 1]]]:
            found[number] = found[last[ids[num_known - 1]]]
        last.update(dict.fromkeys(ids, number))
    return found


def tenants_of(trace: CompactTrace, share: float, seed: int = 0) -> npt.NDArray[np.bool_]:
    """Return for each request whether it is of tenant B, who owns about so many of the sessions."""
    if not 0 <= share <= 1:
        raise ValueError(f"share must be in 0..1, got {share!r}")
    _, session = np.unique(sessions_of(trace), return_inverse=True)
    is_second: npt.NDArray[np.bool_] = (np.random.default_rng(seed).random(len(trace)) < share)[session]
    return is_second


def tenants_hits(
    trace: CompactTrace, policy: str, num_blocks: int, is_second: Sequence[bool], hints: Sequence[Retention | None]
) -> tuple[int, int]:
    """Return the prefix hits of the first and of the second tenant."""
    clock, make_keys = ReplayClock(), KeyMaker()
    replay = Replay(CPUOffloadingManager(trace.block_size, num_blocks, policy, clock=clock), arrivals=clock)
    hits = [0, 0]
    for request, tenant, hint in zip(trace, is_second, hints, strict=True):
        hits[bool(tenant)] += replay.step(request, make_keys(request.hash_ids), hint)
    return hits[0], hits[1]


def said_by(
    trace: CompactTrace, is_second: Sequence[bool], first: str | None, second: str | None, are_named: bool = False
) -> list[Retention | None]:
    """Return each request's hint, where both tenants say the truth (``"honest"``), nothing, or always the same."""
    honest = [NEXT_USES[hint] for hint in derive_hints(trace, next_uses(trace)[0])]
    hints: dict[tuple[str, str], Retention] = {}
    said: list[Retention | None] = []
    for tenant, truth in zip(is_second, honest, strict=True):
        word = second if tenant else first
        if word is None:
            said.append(None)
            continue
        key = truth if word == "honest" else word, "AB"[tenant] if are_named else ""
        said.append(hints.setdefault(key, Retention(next_use=key[0], tenant=key[1])))
    return said


def table(trace: CompactTrace, policies: list[str], capacities: list[int], share: float, seed: int) -> Iterator[str]:
    """Yield the lines of a table in Markdown: both tenants' hits by policy, capacity and case."""
    is_second = tenants_of(trace, share, seed).tolist()
    yield f"| policy | blocks | {' | '.join(f'{case}: A | B' for case in CASES)} |"
    yield "|---|---:|" + "---:|" * (2 * len(CASES))
    said = [said_by(trace, is_second, *words, "named" in case) for case, words in CASES.items()]
    for policy in policies:
        for num_blocks in capacities:
            hits = [tenants_hits(trace, policy, num_blocks, is_second, hints) for hints in said]
            cells = " | ".join(f"{first:,} | {second:,}" for first, second in hits)
            yield f"| {policy} | {num_blocks:,} | {cells} |"


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m kvcache.lab.replay.lies", description=__doc__)
    parser.add_argument("trace", help="a file that `kvcache replay` reads")
    parser.add_argument("--policies", default="gittins", help="names, with commas between them")
    parser.add_argument("--blocks", default="3000,10000", help="capacities, with commas between them")
    parser.add_argument("--share", type=float, default=0.5, help="share of the sessions that are B's")
    parser.add_argument("--seed", type=int, default=0, help="which those are")
    given = parser.parse_args()
    try:
        policies = given.policies.split(",")
        for policy in policies:
            check_policy(policy)
        capacities = [int(number) for number in given.blocks.split(",")]
        with open_trace(given.trace) as requests:
            trace = CompactTrace.of(requests, requests.block_size)
        for line in table(trace, policies, capacities, given.share, given.seed):
            print(line, flush=True)
    except (TraceError, ValueError) as error:
        print(f"lies: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
