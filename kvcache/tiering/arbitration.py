"""Arbitration: which blocks of each request are loaded from tiers, and which are left to be computed.

`kvcache.control.arbiter` weighs one prefix. This module keeps the decisions for each request, and loads a few blocks
from time to time to notice a link that got faster.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, TypeAlias
from weakref import WeakKeyDictionary

from kvcache.control.arbiter import BAND, MAX_PROBE_BLOCKS, MAX_TOKENS, LoadArbiter, Segment
from kvcache.tiering.controller import TierController, TierJob

if TYPE_CHECKING:
    from kvcache.request import ReqContext
    from kvcache.tiering.pending import PendingRequests

_GROUP_BYTES = 4
Source: TypeAlias = TierController | TierJob | None
"""The source of a block: a tier, a job that is loading it already, or None: host memory."""
Sources: TypeAlias = tuple[list[tuple[bytes, Source]], bool]
"""Keys with their sources, in prefix order, and whether a tier will know more at the next step."""


@dataclass(slots=True)
class LoadChoice:
    """The decision for one request so far; a cut is final.

    The prefix is decided up to `seen_token` and loaded up to `limit_token`; it is cut if that is less. At `give_up_s`,
    computing would have been done in the time spent waiting.
    """

    seen_token: int = -1
    limit_token: int = -1
    give_up_s: float = math.inf

    @property
    def is_cut(self) -> bool:
        """Whether a part of the prefix is left to be computed."""
        return self.limit_token < self.seen_token


class Arbitration:
    """Decides for a manager which requests load blocks.

    `counts` are the numbers of decisions, by the names of `ManagerStats`. `group_of` returns the KV-cache group of a
    key; a replay sets its own, because its keys are hashes.
    """

    def __init__(
        self,
        arbiter: LoadArbiter,
        pending: PendingRequests,
        controllers: list[TierController],
        block_size: int,
    ) -> None:
        self.arbiter = arbiter
        self.group_of: Callable[[bytes], bytes | None] = itemgetter(slice(-_GROUP_BYTES, None))
        self._pending = pending
        self._controllers = controllers
        self._block_size = block_size
        self._probes: dict[TierController, list[bytes]] = {}
        self._choices: WeakKeyDictionary[ReqContext, LoadChoice] = WeakKeyDictionary()
        names = ("arbiter_loads", "arbiter_cuts", "arbiter_cut_blocks", "arbiter_give_ups")
        self.counts = dict.fromkeys(names, 0)

    def may_wait_for(self, key: bytes, req_context: ReqContext) -> bool:
        """Return whether a request may wait for a block."""
        choice, end_token = self._choice_of(req_context), _known(req_context.get_offload_key_position(key))
        return not choice.is_cut or (end_token is not None and end_token <= choice.limit_token)

    def forget(self, req_context: ReqContext) -> None:
        """Forget the decision for a request that has ended."""
        self._choices.pop(req_context, None)

    def take_probes(self) -> dict[TierController, list[bytes]]:
        """Return blocks that were cut since the last call, by tier; loading some of them measures a link's rate."""
        probes, self._probes = self._probes, {}
        return probes

    def judge(
        self,
        found: Sources,
        keys: list[bytes],
        num_ready: int,
        req_context: ReqContext,
        now_s: float,
        look_below: Callable[[list[bytes]], Sources],
    ) -> Sources:
        """Return the blocks of a prefix that are worth waiting for, and whether a tier's answer is.

        `found` holds the sources of `keys` from `num_ready` on; the keys before them are in host memory. `look_below`
        returns the sources of other keys.
        """
        sources, is_unknown = found
        choice = self._choice_of(req_context)
        ends = self._end_tokens(keys[num_ready : num_ready + max(1, len(sources))], num_ready, req_context)
        is_waiting = ends[0] <= choice.seen_token if sources else is_unknown
        if is_waiting and now_s >= choice.give_up_s and not choice.is_cut:
            choice.seen_token, choice.limit_token = max(choice.seen_token, 0), -1
            # Jobs under way go on.
            self._pending.of(req_context).wanted.clear()
            self.counts["arbiter_give_ups"] += 1
        if not choice.is_cut and (is_unknown or ends[len(sources) - 1] > choice.seen_token):
            # If an engine asks key by key, decide about all known keys of the prompt at once.
            run, run_before = keys, num_ready
            if len(keys) == 1 and req_context.positions:
                group_of = self.group_of
                group = group_of(keys[0])
                run = [
                    key
                    for key, end in req_context.positions.items()
                    if (_known(end) or 0) >= ends[0] and group_of(key) == group
                ]
                run_before = 0
                sources_of_run, is_unknown = look_below(run)
            else:
                sources_of_run = sources
            if not self._decide(choice, sources_of_run, is_unknown, run, run_before, req_context, now_s):
                return [], True
        if not choice.is_cut:
            return sources, is_unknown
        num_kept = sum(end <= choice.limit_token for end in ends[: len(sources)])
        return sources[:num_kept], False

    def _choice_of(self, req_context: ReqContext) -> LoadChoice:
        return self._choices.setdefault(req_context, LoadChoice())

    def _end_tokens(self, keys: list[bytes], num_before: int, req_context: ReqContext) -> list[int]:
        """Return the end of each block in the prompt; without positions, `keys` follow `num_before` blocks."""
        positions, size = req_context.positions or {}, self._block_size
        ends = [_known(positions.get(key)) for key in keys]
        return [(num_before + i) * size if end is None else end for i, end in enumerate(ends, 1)]

    def _decide(
        self,
        choice: LoadChoice,
        sources: list[tuple[bytes, Source]],
        is_unknown: bool,
        keys: list[bytes],
        num_ready: int,
        req_context: ReqContext,
        now_s: float,
    ) -> bool:
        """Decide how long a prefix is loaded; return False if a tier has to answer first."""
        arbiter, known = self.arbiter, self.arbiter.prefill
        if is_unknown:
            if choice.give_up_s == math.inf and known.is_known:
                ends = self._end_tokens(keys[num_ready:], num_ready, req_context)
                first_token = max(ends[0] - self._block_size, 0)
                links = [controller.link for controller in self._controllers]
                if arbiter.is_hopeless(first_token, ends[-1], len(ends), links, now_s):
                    choice.seen_token, choice.limit_token = ends[-1], first_token
                    self.counts["arbiter_cuts"] += 1
                    return True
                choice.give_up_s = now_s + known.compute_s(first_token, ends[-1])
            return False
        ends = self._end_tokens([key for key, _ in sources], num_ready, req_context)
        # Blocks of earlier decisions are being loaded, or are here.
        fresh = [
            (end, key, source) for end, (key, source) in zip(ends, sources, strict=True) if end > choice.seen_token
        ]
        if not fresh:
            return True
        segments = []
        for source, group in groupby(fresh, key=lambda item: item[2]):
            items = list(group)
            controller = source.controller if isinstance(source, TierJob) else source
            link = None if controller is None else controller.link
            segments.append(Segment(link, len(items), items[-1][0], isinstance(source, TierJob)))
        choice.seen_token = fresh[-1][0]
        if all(segment.link is None for segment in segments):
            choice.limit_token = choice.seen_token
            return True
        first_token = max(fresh[0][0] - self._block_size, 0)
        decision = arbiter.decide(first_token, segments, now_s)
        choice.limit_token = decision.end_token if decision.kept_blocks else first_token
        if known.is_known and decision.kept_blocks:
            # Computing would be done by then, too.
            patience_s = max(known.compute_s(first_token, decision.end_token), decision.load_s)
            choice.give_up_s = now_s + (1 + BAND) * patience_s
        if not choice.is_cut:
            self.counts["arbiter_loads"] += 1
            return True
        self.counts["arbiter_cuts"] += 1
        cut = [(key, source) for end, key, source in fresh if end > choice.limit_token]
        self.counts["arbiter_cut_blocks"] += sum(source is not None for _, source in cut)
        for key, source in cut:
            if isinstance(source, TierController) and source.link is not None:
                probe = self._probes.setdefault(source, [])
                if len(probe) < MAX_PROBE_BLOCKS:
                    probe.append(key)
        return True


def _known(end_token: object) -> int | None:
    """Return a position that an engine gave, or None if it is not a position in a prompt."""
    return end_token if isinstance(end_token, int) and 0 <= end_token <= MAX_TOKENS else None
