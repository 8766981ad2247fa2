"""The arbiter: per request, load a prefix from below host memory only as far as loading is faster than computing.

Loading from a store across a network can be slower than prefill. Which of the two is faster depends on the prefix's
length, the traffic and the time of day. So both rates are learned (`kvcache.tiering.rates`), and no threshold is
configured. `LoadArbiter` weighs one prefix; `Arbitration` keeps the decisions for each request, and collects blocks
that were cut, to notice from time to time a link that got faster.

A prefix may be cut anywhere. Within one medium, the gain of one more block only grows with its position, so the best
cut is at a change of medium, and only these cuts are compared. Media load at the same time.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

from kvcache.tiering.controller import TierController, TierJob
from kvcache.tiering.rates import BAND, MAX_PROBE_BLOCKS, MAX_TOKENS, LinkRate, PrefillRate

if TYPE_CHECKING:
    from kvcache.request import ReqContext
    from kvcache.tiering.pending import PendingRequests

_GROUP_BYTES = 4
_MAX_DECISIONS = 256
Source: TypeAlias = TierController | TierJob | None
"""The source of a block: a tier, a job that is loading it already, or None: host memory."""
Sources: TypeAlias = tuple[list[tuple[bytes, Source]], bool]
"""Keys with their sources, in prefix order, and whether a tier will know more at the next step."""


class Segment(NamedTuple):
    """Consecutive blocks of a prefix in one medium.

    Parameters
    ----------
    link : LinkRate or None
        The link that loads them. None: loading costs nothing.
    num_blocks : int
        Number of blocks.
    end_token : int
        Position in the prompt where the last block ends.
    is_coming : bool
        Whether they are already being loaded for another request.
    """

    link: LinkRate | None
    num_blocks: int
    end_token: int
    is_coming: bool = False


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision for one request, and its reasons.

    Parameters
    ----------
    num_blocks, kept_blocks : int
        Blocks that could be loaded, and blocks that are loaded.
    end_token : int
        Position in the prompt where the loaded prefix ends.
    load_s, compute_s : float
        Expected seconds of loading all blocks, and of computing all of them.
    chosen_s : float
        Expected seconds of the decision.
    is_blind : bool
        Whether a rate was still unknown. Then everything is loaded, to learn it.
    """

    num_blocks: int
    kept_blocks: int
    end_token: int
    load_s: float
    compute_s: float
    chosen_s: float
    is_blind: bool = False

    def __str__(self) -> str:
        if self.is_blind:
            return f"loads {self.num_blocks} blocks: a rate is not known yet"
        decision = f"loads {self.kept_blocks} of {self.num_blocks} blocks" if self.kept_blocks else "computes"
        return f"{decision}: loading {self.load_s:.3g} s, computing {self.compute_s:.3g} s"


class LoadArbiter:
    """Decide which part of a prefix to load.

    Parameters
    ----------
    prefill_tokens_per_s : float or mapping of int to float, optional
        As for `PrefillRate`.

    Attributes
    ----------
    prefill : PrefillRate
        The prefill rate.
    decisions : deque of Decision
        The last 256 decisions.
    """

    def __init__(self, prefill_tokens_per_s: float | Mapping[int, float] | None = None) -> None:
        self.prefill = PrefillRate(prefill_tokens_per_s)
        self.decisions: deque[Decision] = deque(maxlen=_MAX_DECISIONS)

    def decide(self, first_token: int, segments: Sequence[Segment], now_s: float) -> Decision:
        """Return how much of a prefix to load.

        Parameters
        ----------
        first_token : int
            Token at which the segments begin; tokens before it need neither loading nor computing.
        segments : sequence of Segment
            In prefix order, at least one.
        now_s : float
            The manager's clock.

        Returns
        -------
        Decision
            The fastest choice. If choices are equal, the one that loads more.
        """
        end_token = segments[-1].end_token
        num_blocks = sum(segment.num_blocks for segment in segments)
        computed_s = self.prefill.compute_s(first_token, end_token)
        is_blind = not self.prefill.is_known
        best = (computed_s, first_token, 0)
        blocks: dict[LinkRate, int] = {}
        load_s = 0.0
        num_before = 0
        for segment in segments:
            num_before += segment.num_blocks
            link = segment.link
            if link is not None:
                is_blind |= not link.is_known and link.is_idle
                blocks[link] = blocks.get(link, 0) + (0 if segment.is_coming else segment.num_blocks)
                load_s = max(load_s, link.load_s(blocks[link], now_s))
            total_s = load_s + self.prefill.compute_s(segment.end_token, end_token)
            if total_s <= best[0]:
                best = (total_s, segment.end_token, num_before)
        # Without both rates any comparison is a guess, and only a load teaches the link's.
        if is_blind:
            best = (load_s, end_token, num_blocks)
        decision = Decision(num_blocks, best[2], best[1], load_s, computed_s, best[0], is_blind)
        self.decisions.append(decision)
        return decision

    def is_hopeless(
        self, first_token: int, end_token: int, num_blocks: int, links: Sequence[LinkRate | None], now_s: float
    ) -> bool:
        """Return whether to skip the look-up: computing the prefix is faster than loading it even if a medium has all.

        `links` are those of all media that may hold it. None is a medium whose loading cost is negligible. Loading a
        part of the prefix gains less than loading all of it, so the result also holds for parts. While the rate of a
        link must be learned, return False.
        """
        known = [link for link in links if link is not None and link.is_known and not link.is_probe_due(now_s)]
        if len(known) < len(links):
            return False
        load_s = min(link.load_s(num_blocks, now_s) for link in known)
        computed_s = self.prefill.compute_s(first_token, end_token)
        if computed_s >= load_s:
            return False
        self.decisions.append(Decision(num_blocks, 0, first_token, load_s, computed_s, computed_s))
        return True


@dataclass(slots=True)
class LoadChoice:
    """The decision for one request so far. It is extended to more tokens, until a cut ends it.

    The prefix is decided up to `seen_token` and loaded up to `limit_token`; if that is less, it is cut. At `give_up_s`
    the request has waited for as long as computing takes. Change it with `decide` and `give_up` only.
    """

    seen_token: int = -1
    limit_token: int = -1
    give_up_s: float = math.inf

    @property
    def is_cut(self) -> bool:
        """Whether a part of the prefix is left to be computed."""
        return self.limit_token < self.seen_token

    def decide(self, seen_token: int, limit_token: int) -> None:
        """Decide about the prefix up to `seen_token`: it is loaded up to `limit_token`. A cut is final."""
        if not self.is_cut:
            self.seen_token, self.limit_token = seen_token, limit_token

    def give_up(self) -> None:
        """Cut the whole prefix: the request has waited for too long, also for the blocks decided before."""
        self.decide(max(self.seen_token, 0), -1)


class Arbitration:
    """Decides for a manager which requests load blocks.

    A look-up only calls `sources_to_load`, which makes the whole decision. `counts` are the numbers of decisions,
    by the names of `ManagerStats`. `group_of` returns the KV-cache group of a key; a replay sets its own, because its
    keys are hashes.
    """

    def __init__(
        self, arbiter: LoadArbiter, pending: PendingRequests, controllers: list[TierController], block_size: int
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

    def sources_to_load(
        self,
        sources: Sources,
        keys: list[bytes],
        num_ready: int,
        req_context: ReqContext,
        now_s: float,
        look_below: Callable[[list[bytes]], Sources],
    ) -> Sources:
        """Return which of the sources behind `num_ready` keys a request loads, and whether it must ask again.

        `sources` are those of the first keys below host memory; `look_below` finds those of other keys.
        """
        run = self._run_to_decide(sources, keys, num_ready, req_context, now_s)
        if run is not None:
            run_keys, is_of_prompt = run
            seen_sources, num_before = (look_below(run_keys), 0) if is_of_prompt else (sources, num_ready)
            if not self._decide(run_keys, num_before, seen_sources, req_context, now_s):
                return [], True
        return self._worth_waiting(sources[0], num_ready, req_context), False

    def _run_to_decide(
        self, sources: Sources, keys: list[bytes], num_ready: int, req_context: ReqContext, now_s: float
    ) -> tuple[list[bytes], bool] | None:
        """Return the keys to decide about before a look-up of `keys` is answered, None if that is decided.

        The second value is whether they are the known keys of the whole prompt, instead of `keys`.

        `sources` are those of the keys below the first `num_ready`. If an engine asks key by key, all known keys of the
        prompt are decided about at once. A request that has waited too long gives up.
        """
        known_sources, is_unknown = sources
        choice = self._choice_of(req_context)
        asked = keys[num_ready : num_ready + max(1, len(known_sources))]
        ends = self._end_tokens(asked, num_ready, req_context)
        is_waiting = ends[0] <= choice.seen_token if known_sources else is_unknown
        if is_waiting and now_s >= choice.give_up_s and not choice.is_cut:
            choice.give_up()
            # Jobs under way go on.
            self._pending.of(req_context).wanted.clear()
            self.counts["arbiter_give_ups"] += 1
        if choice.is_cut or not (is_unknown or ends[-1] > choice.seen_token):
            return None
        if len(keys) != 1 or not req_context.positions:
            return keys, False
        group = self.group_of(keys[0])
        positions = req_context.positions.items()
        rest = [key for key, end in positions if (_known(end) or 0) >= ends[0] and self.group_of(key) == group]
        return rest, True

    def _decide(
        self, run: list[bytes], num_ready: int, sources: Sources, req_context: ReqContext, now_s: float
    ) -> bool:
        """Decide about the keys below the first `num_ready` of a run; return False if a tier's answer is worth it."""
        choice = self._choice_of(req_context)
        known_sources, is_unknown = sources
        if is_unknown:
            return self._is_hopeless(choice, self._end_tokens(run[num_ready:], num_ready, req_context), now_s)
        ends = self._end_tokens([key for key, _ in known_sources], num_ready, req_context)
        # Blocks of earlier decisions are being loaded, or are here.
        blocks = [(end, key, source) for end, (key, source) in zip(ends, known_sources, strict=True)
                  if end > choice.seen_token]  # fmt: skip
        if not blocks:
            return True
        segments, seen_token = _segments(blocks), blocks[-1][0]
        if all(segment.link is None for segment in segments):
            choice.decide(seen_token, seen_token)
            return True
        prefill = self.arbiter.prefill
        first_token = max(blocks[0][0] - self._block_size, 0)
        decision = self.arbiter.decide(first_token, segments, now_s)
        choice.decide(seen_token, decision.end_token)
        if prefill.is_known and decision.kept_blocks:
            # Computing would be done by then, too.
            patience_s = max(prefill.compute_s(first_token, decision.end_token), decision.load_s)
            choice.give_up_s = now_s + (1 + BAND) * patience_s
        if choice.is_cut:
            self._note_cut([(key, source) for end, key, source in blocks if end > choice.limit_token])
        else:
            self.counts["arbiter_loads"] += 1
        return True

    def _worth_waiting(
        self, sources: list[tuple[bytes, Source]], num_ready: int, req_context: ReqContext
    ) -> list[tuple[bytes, Source]]:
        """Return the first of the sources behind `num_ready` keys, those that are loaded."""
        choice = self._choice_of(req_context)
        if not choice.is_cut:
            return sources
        ends = self._end_tokens([key for key, _ in sources], num_ready, req_context)
        return sources[: sum(end <= choice.limit_token for end in ends)]

    def _choice_of(self, req_context: ReqContext) -> LoadChoice:
        return self._choices.setdefault(req_context, LoadChoice())

    def _end_tokens(self, keys: list[bytes], num_before: int, req_context: ReqContext) -> list[int]:
        """Return the end of each block in the prompt; without positions, `keys` follow `num_before` blocks."""
        positions, size = req_context.positions or {}, self._block_size
        ends = [_known(positions.get(key)) for key in keys]
        return [(num_before + i) * size if end is None else end for i, end in enumerate(ends, 1)]

    def _is_hopeless(self, choice: LoadChoice, ends: list[int], now_s: float) -> bool:
        """Return whether not even a tier that has all blocks is worth waiting for; if not, set how long to wait."""
        prefill = self.arbiter.prefill
        if choice.give_up_s < math.inf or not prefill.is_known:
            return False
        first_token = max(ends[0] - self._block_size, 0)
        links = [controller.link for controller in self._controllers]
        if self.arbiter.is_hopeless(first_token, ends[-1], len(ends), links, now_s):
            choice.decide(ends[-1], first_token)
            self.counts["arbiter_cuts"] += 1
            return True
        choice.give_up_s = now_s + prefill.compute_s(first_token, ends[-1])
        return False

    def _note_cut(self, blocks: list[tuple[bytes, Source]]) -> None:
        """Count the blocks that are not loaded, and keep some of each tier for a probe."""
        self.counts["arbiter_cuts"] += 1
        self.counts["arbiter_cut_blocks"] += sum(source is not None for _, source in blocks)
        for key, source in blocks:
            if isinstance(source, TierController) and source.link is not None:
                probe = self._probes.setdefault(source, [])
                if len(probe) < MAX_PROBE_BLOCKS:
                    probe.append(key)


def _segments(blocks: list[tuple[int, bytes, Source]]) -> list[Segment]:
    """Return runs of blocks with one source."""
    segments = []
    for source, group in groupby(blocks, key=itemgetter(2)):
        items = list(group)
        is_coming = isinstance(source, TierJob)
        controller = source.controller if isinstance(source, TierJob) else source
        link = None if controller is None else controller.link
        segments.append(Segment(link, len(items), items[-1][0], is_coming))
    return segments


def _known(end_token: object) -> int | None:
    """Return a position that an engine gave, or None if it is not a position in a prompt."""
    return end_token if isinstance(end_token, int) and 0 <= end_token <= MAX_TOKENS else None
