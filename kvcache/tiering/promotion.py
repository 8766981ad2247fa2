"""Promotion: read the blocks that a request looks up from a tier into host memory.

A look-up that finds blocks in a tier waits. The end of the step reserves host blocks for them and sends the jobs.

No request waits for ever: it waits only while a block that it asked for is being promoted, or is queued for promotion.
A promotion that does not fit is cut, and the rest is a miss. One request tries to promote a key once, so two requests
that evict each other's blocks both get an answer. Blocks that a request waits for are held (one reference each) until
it loads them, ends, or its deadline passes. Past the deadline, host memory alone answers.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from itertools import compress
from operator import not_
from typing import TYPE_CHECKING, TypeAlias

from kvcache.block import ABSENT, PENDING, READY
from kvcache.request import ReqContext
from kvcache.specs import block_ids_of
from kvcache.tiering.controller import JobState, TierController, TierJob
from kvcache.tiering.pending import PendingRequest, PendingRequests
from kvcache.tiering.writing import MAX_JOB_BLOCKS, Writing, ready_keys
from kvcache.tiers.base.tier import MAX_STEP_BLOCKS

if TYPE_CHECKING:
    from kvcache.control.pool import BlockPool
    from kvcache.tiering.arbiter import Link, LoadArbiter
    from kvcache.tiering.controller import HostBudget

Source: TypeAlias = TierController | TierJob | None
"""The source of a block: a tier, a job that is loading it already, or None: host memory."""
_MAX_TIER_LOOKUPS = 64
_PREFETCH_SHARE, _MAX_UNUSED, _PREFETCH_STEP = 8, 4096, 256
# Members of an enum are slow to look up.
_SENT = JobState.SENT


class Promotion:
    """Finds blocks in tiers, has them read, and hands them to the requests that wait.

    `num_loads` counts the blocks that were loaded after a promotion for their request.
    """

    def __init__(
        self,
        pool: BlockPool,
        controllers: list[TierController],
        pending: PendingRequests,
        arbiter: LoadArbiter | None,
        writing: Writing,
        budget: HostBudget,
    ) -> None:
        self._pool = pool
        self._controllers = controllers
        self._pending = pending
        self._arbiter = arbiter
        self._writing = writing
        self._budget = budget
        self._job_of: dict[bytes, TierJob] = {}
        self.num_loads = 0
        # Blocks that came without a request in place of others, and that no request has loaded.
        self._unused: set[bytes] = set()
        self._has_counted = False

    def find(self, keys: list[bytes], req_context: ReqContext | None) -> tuple[int, int, bool]:
        """Return how many of the first keys are ready, how many behind them are being loaded, and whether to ask again.

        While blocks are coming, or a tier has not answered yet, the request waits:

        1. If a job already reads the only key for this request, the answer is the same as before.
        2. Count the first keys that are in host memory. After its deadline, a request gets only these.
        3. Find the source of each next key, up to the first absent one: a job that reads it, or a tier that holds it.
        4. With an arbiter, leave out the keys that are computed sooner than loaded.
        5. Hold the ready blocks for the request, add it to the jobs' waiters, and note the rest for the step's end.
        """
        request, now_s = self._pending.of(req_context), self._pending.clock()
        may_wait = request.may_wait(now_s)
        # Engines ask key by key, at each step. An arbiter has to see each of them: it may stop the wait.
        job = self._job_of.get(keys[0]) if len(keys) == 1 and self._arbiter is None else None
        if job is not None and may_wait and req_context in job.waiters and job.state is _SENT:
            return 0, 1, False
        num_ready = self._pool.match_prefix(keys, req_context)
        if num_ready == len(keys) or not may_wait:
            return num_ready, 0, False
        # Bound the work of a call. The request waits for these first, and its next look-up finds more.
        behind = keys[num_ready : num_ready + MAX_STEP_BLOCKS]
        if self._arbiter is None or req_context is None:
            sources, ask_again = self._sources_of(behind, request, now_s)
        else:
            sources, ask_again = self._worth_waiting(self._arbiter, behind, num_ready, req_context, now_s)
        if not (sources or ask_again):
            return num_ready, 0, False
        in_tiers: dict[bytes, TierController] = {}
        for key, source in zip(behind, sources, strict=False):
            if isinstance(source, TierController):
                in_tiers[key] = source
            elif source is not None:
                source.waiters.add(req_context)
        # Jobs are sent at the end of the step, so that the blocks of all requests go in few large jobs.
        self._pending.wait(req_context, keys, num_ready, in_tiers, now_s)
        return num_ready, len(sources), ask_again

    def waits_for_store(self, key: bytes, req_context: ReqContext | None) -> bool:
        """Return whether the engine is storing a block that was not found, and the request may still wait.

        The wait has the same limit as for a tier: the request that stores the block may have been preempted.
        """
        if self._pool.states([key]) != bytes([PENDING]) or key in self._job_of:
            return False
        if req_context is None:
            return True
        if self._arbiter is not None and self._arbiter.is_cut(key, req_context):
            return False
        now_s = self._pending.clock()
        return self._pending.begin(req_context, now_s).may_wait(now_s)

    def without_coming(self, keys: list[bytes]) -> list[bytes]:
        """Return the keys that no tier is reading."""
        return [key for key in keys if key not in self._job_of] if self._job_of else keys

    def note_load(self, keys: list[bytes], req_context: ReqContext | None) -> None:
        """Record that a request loads its blocks: it waits no longer."""
        if self._unused:
            self._unused.difference_update(keys)
        if req_context is not None:
            if tried := self._pending.of(req_context).tried:
                self.num_loads += len(tried.intersection(keys))
            self._pending.close(req_context)

    def send(self, now_s: float) -> None:
        """Send the jobs of this step: for the requests that wait, and then to measure links."""
        self._has_counted = False
        num_left = MAX_STEP_BLOCKS
        for request in self._pending.wanting():
            if num_left <= 0:
                break
            batch = self._next_batch(request, num_left, now_s)
            num_left -= len(batch)
            self._promote(request, batch, now_s)
        if self._arbiter is not None:
            self._probe(self._arbiter.probes, now_s)

    def prefetch(self, keys: list[bytes], now_s: float) -> str:
        """Read blocks without a request for them; see `OffloadingManager.prefetch`.

        They take free slots, or a share of the slots of the blocks that the policy evicts next. A block gives its part
        of the share back when a request loads it, or when it is evicted.
        """
        if not self._has_counted:
            # Once a step: a client may ask again and again.
            self._has_counted, unused = True, list(self._unused)
            self._unused = {key for key, state in zip(unused, self._pool.states(unused), strict=True) if state}
        states = self._pool.states(keys)
        absent = list(compress(keys, map(not_, states)))
        num_free = self._pool.num_free
        limit = max(num_free, min(self._pool.num_blocks // _PREFETCH_SHARE, _MAX_UNUSED) - len(self._unused))
        if not absent or limit <= 0:
            return "rejected" if absent else "accepted"
        if self._pending.wanting():
            # Requests that wait come first.
            return "deferred"
        holders, ask_again = self._ask_tiers(absent[: min(limit, _PREFETCH_STEP)], now_s)
        if not holders:
            return "deferred" if ask_again else "missing"
        request = PendingRequest(ReqContext("prefetch"), math.inf, dict(zip(absent, holders, strict=False)))
        batch = self._next_batch(request, MAX_STEP_BLOCKS, now_s)
        # They are used together: none may make room for another.
        kept = ready_keys(keys, states) if len(batch) > num_free else []
        self._pool.pin(kept, is_move=True)
        self._promote(request, batch, now_s)
        self._pool.unpin(kept)
        coming = [key for key in batch if key in self._job_of]
        self._unused.update(coming[num_free:])
        if ask_again or len(coming) < len(holders) or len(holders) == _PREFETCH_STEP < min(limit, len(absent)):
            return "deferred"
        return "clipped" if len(holders) == limit < len(absent) else "accepted"

    def end(self, job: TierJob, arrived: Collection[bytes]) -> None:
        """Commit the blocks that arrived, hold them for the requests that wait, and free the others."""
        for key in job.keys:
            del self._job_of[key]
        arrived = set(arrived)
        failed = [key for key in job.keys if key not in arrived]
        if failed:
            self._pool.abort(failed, is_move=True)
            self._writing.abort(failed)
        if arrived:
            done = [key for key in job.keys if key in arrived]
            ready = self._pool.commit(done, is_move=True)
            # Hold them before another call can evict them.
            self._pending.hold(job.waiters, done)
            self._writing.offer(ready, job.controller)

    def clear(self) -> None:
        """Forget the jobs under way, whose blocks a reset of the pool drops."""
        self._job_of = {}

    def _worth_waiting(
        self, arbiter: LoadArbiter, behind: list[bytes], num_ready: int, req_context: ReqContext, now_s: float
    ) -> tuple[list[Source], bool]:
        """Return the sources of the next keys that load sooner than they are computed, and whether to ask again."""
        # Decide for the whole prompt at once: an engine that asks key by key has reported all keys.
        run = arbiter.keys_to_weigh(behind, num_ready, req_context)[:MAX_STEP_BLOCKS]
        sources, ask_again = self._sources_of(run, self._pending.of(req_context), now_s)
        if not (sources or ask_again):
            return [], False
        num_to_load = arbiter.num_to_load(req_context, run, num_ready, sources, ask_again, now_s)
        if num_to_load is None:
            return [], True
        if num_to_load < 0:
            # Jobs under way go on: other requests may wait for them.
            self._pending.of(req_context).wanted.clear()
        return sources[: min(max(num_to_load, 0), len(behind))], False

    def _sources_of(self, keys: list[bytes], request: PendingRequest, now_s: float) -> tuple[list[Source], bool]:
        """Return the sources of keys up to the first absent one, and whether a tier must be asked again."""
        sources: list[Source] = []
        below: list[bytes] = []
        places: list[int] = []
        for key, state in zip(keys, self._pool.states(keys), strict=True):
            source: Source = None
            if state != READY:
                source = self._job_of.get(key)
                if source is not None:
                    if source.state is not _SENT:
                        break
                elif key in request.tried:
                    # A second promotion could fail like the first one, and the request would never run.
                    break
                else:
                    places.append(len(sources))
                    below.append(key)
            sources.append(source)
        # Ask for all keys at once: for a long prefix, a call per block would be slow.
        holders, ask_again = self._ask_tiers(below, now_s) if below else ([], False)
        for place, controller in zip(places, holders, strict=False):
            sources[place] = controller
        if len(holders) < len(below):
            del sources[places[len(holders)] :]
        return sources, ask_again

    def _ask_tiers(self, keys: list[bytes], now_s: float) -> tuple[list[TierController], bool]:
        """Return the first tier that holds each of the first keys, and whether a tier must be asked again."""
        holders: list[TierController] = []
        num_lookups = 0
        # Bounded, because tiers that hold every other block would be asked once per block.
        while len(holders) < len(keys) and num_lookups < _MAX_TIER_LOOKUPS:
            for controller in self._controllers:
                num_lookups += 1
                num_held = controller.lookup(keys[len(holders) :], now_s)
                if num_held is None:
                    return holders, True
                if num_held:
                    holders += [controller] * num_held
                    break
            else:
                break
        return holders, False

    def _next_batch(self, request: PendingRequest, num_left: int, now_s: float) -> dict[bytes, TierController]:
        """Take the first keys that fit from a request; give up the keys of tiers that must not be asked."""
        rooms: dict[TierController, int] = {}
        batch: dict[bytes, TierController] = {}
        given_up: list[bytes] = []
        num_left = min(num_left, self._budget.num_left)
        for key, controller in request.wanted.items():
            room = rooms.get(controller)
            if room is None:
                room = controller.room(True) if controller.may_send(True, now_s) else -1
            if room < 0:
                given_up.append(key)
                rooms[controller] = -1
                continue
            if room == 0 or len(batch) >= num_left:
                break
            rooms[controller] = room - 1
            batch[key] = controller
        request.tried.update(given_up, batch)
        for key in (*given_up, *batch):
            del request.wanted[key]
        return batch

    def _promote(self, request: PendingRequest, batch: dict[bytes, TierController], now_s: float) -> None:
        """Reserve host blocks for a batch, and send its jobs; other requests' jobs are shared."""
        absent = []
        for key in batch:
            job = self._job_of.get(key)
            if job is None:
                absent.append(key)
            else:
                job.waiters.add(request.req_context)
        by_controller: dict[TierController, tuple[list[bytes], list[int]]] = {}
        for key, block_id in zip(*self._reserve(absent), strict=True):
            keys, block_ids = by_controller.setdefault(batch[key], ([], []))
            keys.append(key)
            block_ids.append(block_id)
        for controller, (keys, block_ids) in by_controller.items():
            for first in range(0, len(keys), MAX_JOB_BLOCKS):
                part = slice(first, first + MAX_JOB_BLOCKS)
                self._load(controller, keys[part], block_ids[part], (request.req_context,), now_s)

    def _probe(self, cut: dict[Link, list[bytes]], now_s: float) -> None:
        """From time to time, load a few blocks that were just cut, to notice that a link became faster."""
        for controller in self._controllers:
            link = controller.link
            if link is None or link not in cut:
                continue
            keys = cut[link]
            absent = [key for key, state in zip(keys, self._pool.states(keys), strict=True) if state == ABSENT]
            del absent[min(link.probe_blocks(now_s), controller.room(True)) :]
            if absent and controller.may_send(True, now_s) and not self._pending.wanting():
                num_held = controller.lookup(absent, now_s)
                if num_held is None:
                    # The tier is asked again after the next step.
                    continue
                link.probed(now_s)
                reserved, block_ids = self._reserve(absent[:num_held])
                if reserved:
                    self._load(controller, reserved, block_ids, (), now_s)
            # A later probe takes blocks of a later cut.
            del cut[link]

    def _reserve(self, keys: list[bytes]) -> tuple[list[bytes], list[int]]:
        """Reserve host blocks for the leading keys that fit; return these keys and their blocks."""
        output = self._pool.reserve_leading(keys) if keys else None
        if output is None:
            return [], []
        self._writing.note_evicted(output.evicted_keys)
        return output.keys_to_store, block_ids_of(output.store_spec).tolist()

    def _load(
        self,
        controller: TierController,
        keys: list[bytes],
        block_ids: list[int],
        waiters: Iterable[ReqContext | None],
        now_s: float,
    ) -> None:
        deadline_s = now_s + controller.config.deadline_s
        job = TierJob(next(self._writing.job_ids), controller, True, keys, block_ids, deadline_s)
        job.waiters.update(waiters)
        # A tier that is being tried again gets one job only.
        if controller.may_send(True, now_s) and controller.send(job, now_s):
            self._job_of.update(dict.fromkeys(keys, job))
        else:
            self._pool.abort(keys, is_move=True)
