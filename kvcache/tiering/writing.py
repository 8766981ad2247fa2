"""The way down: which blocks of host memory are offered to which tier, and the jobs that write them.

A block is referenced from the job's submission until the tier reports it, so it stays readable and is not evicted.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from kvcache.block import PENDING, READY
from kvcache.specs import block_ids_of
from kvcache.tiering.controller import TierController, TierJob
from kvcache.tiers.base.tier import MAX_STEP_BLOCKS

if TYPE_CHECKING:
    from kvcache.control.pool import BlockPool
    from kvcache.request import ReqContext
    from kvcache.specs import PrepareStoreOutput
    from kvcache.tiering.endurance import RunChoice

MAX_JOB_BLOCKS = 512
"""Blocks of one job at most: a tier can begin with the next one while the scheduler takes the first one in."""


class Writing:
    """Offers blocks to tiers by their write policies, and writes what waits in their backlogs.

    `job_ids` numbers all jobs of a manager, those of promotions too.
    """

    def __init__(self, pool: BlockPool, controllers: list[TierController]) -> None:
        self._pool = pool
        self._controllers = controllers
        self.job_ids = count(1)
        self._selective = [
            controller for controller in controllers if controller.config.write_policy == "write_through_selective"
        ]
        choices = [(controller, controller.backlog.choice) for controller in controllers]
        self._limited = [(controller, choice) for controller, choice in choices if choice is not None]
        # A policy that may decline blocks stores all of them only if some tier receives all blocks.
        may_decline = hasattr(pool.policy, "stores_all") and "group_windows" not in pool.configuration()
        self._declines = may_decline and len(self._limited) == len(controllers)
        # Its first item goes often: in a plain dict that would cost a walk over the gaps of those before.
        self._uses: OrderedDict[bytes, int] = OrderedDict()
        # The keys whose use was counted for each request.
        self._counted: WeakKeyDictionary[ReqContext, set[bytes]] = WeakKeyDictionary()

    def touch(self, keys: list[bytes], req_context: ReqContext | None) -> None:
        """Record a use of blocks, for the write policies and for the tiers."""
        self.count_uses(keys, req_context)
        for _, choice in self._limited:
            choice.note_use(keys, req_context)
        for controller in self._controllers:
            controller.touch(keys, req_context)

    def count_uses(self, keys: list[bytes], req_context: ReqContext | None) -> None:
        """Count one use a request of each resident key, and offer those that have been used enough."""
        if not self._selective:
            return
        if req_context is not None:
            counted = self._counted.setdefault(req_context, set())
            keys = [key for key in dict.fromkeys(keys) if key not in counted]
            counted.update(keys)
        # Counts of blocks that left go first.
        while len(self._uses) > 2 * self._pool.num_blocks:
            self._uses.popitem(last=False)
        by_uses: dict[int, list[bytes]] = {}
        for key in keys:
            num_uses = self._uses[key] = self._uses.get(key, 0) + 1
            by_uses.setdefault(num_uses, []).append(key)
        for controller in self._selective:
            # Other blocks are offered once they are ready.
            controller.backlog.offer(reversed(self._ready(by_uses.get(controller.config.num_uses, []))))

    def reserve(self, keys: list[bytes], req_context: ReqContext | None) -> PrepareStoreOutput | None:
        """Make room for blocks in host memory, and choose which tiers with a budget of writes receive them."""
        # A call without keys precedes the one that stores the request's blocks, whose number the choice needs.
        limited = self._limited if keys else []
        chosen = [(*part, self._chosen(*part, keys, req_context)) for part in limited]
        policy: Any = self._pool.policy
        is_written = not chosen or any(choice.writes(req_context) for _, choice, _ in chosen)
        if may_decline := self._declines and not is_written:
            # No tier receives these blocks, so the policy of host memory may decline them.
            policy.stores_all = False
        try:
            output = self._pool.reserve(keys, req_context)
        finally:
            if may_decline:
                policy.stores_all = True
        if output is not None:
            self.note_evicted(output.evicted_keys)
            self.count_uses(keys, req_context)
        for controller, choice, run in chosen:
            self._give(controller, choice, run)
        return output

    def _chosen(
        self, controller: TierController, choice: RunChoice, keys: list[bytes], req_context: ReqContext | None
    ) -> list[bytes]:
        find = partial(controller.lookup, now_s=self._pool.clock())
        return choice.choose(keys, req_context, find, controller.num_waiting)

    def _give(self, controller: TierController, choice: RunChoice, run: list[bytes]) -> None:
        states = self._pool.states(run)
        controller.backlog.offer(key for key, state in zip(run[::-1], states[::-1], strict=True) if state == READY)
        choice.due.update(key for key, state in zip(run, states, strict=True) if state == PENDING)

    def hurry(self, keys: list[bytes]) -> bool:
        """Have the next step write those of ready blocks that tiers would get later; return whether all had room."""
        num_left = 0
        for controller in self._controllers:
            backlog, config = controller.backlog, controller.config
            late = backlog.late(keys)
            if config.write_policy == "write_through_selective":
                late = [key for key in keys if self._uses.get(key, 1) < config.num_uses]
            room = max(0, controller.room(False) - len(backlog))
            num_left += len(late[room:])
            self._uses.update(dict.fromkeys(late[:room], config.num_uses))
            backlog.hurry(late[:room])
        return not num_left

    def offer(self, keys: list[bytes], source: TierController | None) -> None:
        """Offer blocks that became ready to the tiers, but for the one that they came from."""
        for controller in self._controllers:
            backlog, config = controller.backlog, controller.config
            keys_due = keys if backlog.choice is None else backlog.choice.take_due(keys)
            if controller is source:
                continue
            if config.write_policy == "write_through_selective":
                keys_due = [key for key in keys if self._uses.get(key, 1) >= config.num_uses]
            backlog.add(keys_due)

    def abort(self, keys: list[bytes]) -> None:
        """Record blocks that failed to become ready."""
        for _, choice in self._limited:
            choice.take_due(keys)

    def note_evicted(self, keys: list[bytes]) -> None:
        """Record blocks that left host memory."""
        if keys:
            for controller in self._controllers:
                controller.backlog.remove(keys)

    def send(self, now_s: float) -> None:
        """Write what waits, a bounded number of blocks for all tiers together."""
        num_left = MAX_STEP_BLOCKS
        for controller in self._controllers:
            backlog = controller.backlog
            if backlog.is_idle:
                continue
            if not controller.may_send(False, now_s):
                backlog.drop(is_paused=True)
                continue
            backlog.offer_due(controller.room(False))
            # A tier that is being tried again gets one job only.
            while (room := min(controller.room(False), num_left, MAX_JOB_BLOCKS)) > 0 and controller.may_send(
                False, now_s
            ):
                is_again = not backlog
                keys = backlog.take_missed(controller.room_for_missed(room)) if is_again else backlog.take(room)
                num_left -= len(keys)
                if not (keys and self._store(controller, keys, is_again, now_s)):
                    break

    def end(self, job: TierJob, missed: list[bytes]) -> None:
        """Release the blocks of a job; those that a failing tier missed are offered again once it works."""
        self._pool.unpin(job.keys)
        job.controller.backlog.miss(missed)

    def end_request(self, req_context: ReqContext) -> None:
        """Record the end of a request."""
        self._counted.pop(req_context, None)
        for controller, choice in self._limited:
            self._give(controller, choice, self._chosen(controller, choice, [], req_context))
            choice.end(req_context)
        for controller in self._controllers:
            controller.end_request(req_context)

    def clear(self) -> None:
        """Forget all counts; the controllers forget their backlogs themselves."""
        self._uses = OrderedDict()
        self._counted.clear()

    def _store(self, controller: TierController, keys: list[bytes], is_again: bool, now_s: float) -> bool:
        """Send one job; return whether the tier may get another one."""
        backlog = controller.backlog
        ready = self._ready(keys)
        backlog.note_unwritten(len(keys) - len(ready), is_again)
        if not ready:
            return True
        # The tier reads the blocks from the moment it has the job, so the reference comes first.
        block_ids = block_ids_of(self._pool.pin(ready, is_move=True)).tolist()
        deadline_s = now_s + controller.config.deadline_s
        job = TierJob(next(self.job_ids), controller, False, ready, block_ids, deadline_s, is_again=is_again)
        if controller.send(job, now_s):
            return True
        self._pool.unpin(ready)
        backlog.note_unwritten(len(ready), is_again)
        # A tier that refuses is full or closed, not failing: it refuses the rest as well.
        backlog.drop(is_paused=False)
        return False

    def _ready(self, keys: list[bytes]) -> list[bytes]:
        return [key for key, state in zip(keys, self._pool.states(keys), strict=True) if state == READY]
